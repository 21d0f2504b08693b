"""Which product a fitted kernel is asked for by a row, and which traffic by a softmax or a loss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from steptime.api.models import load_model
from steptime.cost.gemm import gemm_s
from steptime.estimate.evaluate import Evaluation, evaluate
from steptime.estimate.kernels import memory_timed
from steptime.estimate.layer import BACKWARD, FORWARD, PhaseTime
from steptime.estimate.single import Setting
from steptime.hardware import load_cluster
from steptime.plan.framework_file import memory_profile_of
from steptime.plan.job import OPTIMIZERS, PRECISIONS, Job
from steptime.plan.plans import Plans
from steptime.plan.strategies import CORRECTED

TOKENS, WIDTH, HIDDEN = 4096, 28672, 4096


def evaluated(strategy: str, plans: Plans, **changes: Any) -> Evaluation:
    """Llama 3 8B on H100s: the first product of its MLP has 2 x 14336 columns."""
    job = Job(model=load_model("llama3-8b"), gpus=int(plans.ranks), global_batch=8, seq_len=TOKENS,
              precision=PRECISIONS["bf16"], optimizer=OPTIMIZERS["adam"])  # fmt: skip
    job = replace(job, **changes)
    machine = Setting(method=CORRECTED, job=job, cluster=load_cluster("dgx-h100")).machine
    return evaluate(CORRECTED, CORRECTED.strategies[strategy], job, machine, plans)


def product_s(e: Evaluation, m: float, n: float, k: float) -> float:
    """One product on the 132 multiprocessors of an H100, with the coefficients of its curve."""
    model = e.machine.models["matmul"]
    residual = 0.0 if model.residual is None else model.residual.at(m=m, n=n, k=k, batch=1.0, sm_count=132.0)
    device: dict[str, Any] = {"a_bytes": 2, "b_bytes": 2, "out_bytes": 2, "peak_flops_per_s": 989.4e12,
                              "memory_Bps": 3.35e12, "sm_count": 132, "l2_bytes": 0, "stride": 0}  # fmt: skip
    fitted = dict(model.curve.coefficients) | {"quantise_s": 0.0}
    names = {name for name in model.formula.arguments if name in fitted}
    return float(gemm_s(m=m, n=n, k=k, batch=1, **device, residual=residual, **{name: fitted[name] for name in names}))


def time_of(e: Evaluation, name: str, phase: str) -> PhaseTime:
    (found,) = [time for time in e.times["layer"] if (time.row.name, time.phase) == (name, phase)]
    return found


@pytest.mark.parametrize("tp", [1, 8])
def test_a_product_is_timed_by_its_own_dimensions(tp: int) -> None:
    """Forward m x n over k; the gradients of its input m x k over n, and of its weights n x k over m."""
    e, n = evaluated("1d", Plans(tp=tp, in_tp=tp)), WIDTH / tp
    forward, backward = (float(time_of(e, "mlp_in", phase).compute_s) for phase in (FORWARD, BACKWARD))
    assert forward == pytest.approx(product_s(e, TOKENS, n, HIDDEN), rel=1e-12)
    gradients = product_s(e, TOKENS, HIDDEN, n), product_s(e, HIDDEN, n, TOKENS)
    assert backward == pytest.approx(sum(gradients), rel=1e-12)


@pytest.mark.parametrize("elements_per_row", [512, 65536])
@pytest.mark.parametrize(("backward", "tensors", "again"), [(False, 2, 1), (True, 3, 2)])
def test_a_softmax_reads_what_it_needs_and_writes_once(
    elements_per_row: int, backward: bool, tensors: int, again: int
) -> None:
    """Forward one tensor in and one out, backward two in and one out; rows beyond a block are read once more."""
    e, rows = evaluated("1d", Plans()), 1024.0
    elements = rows * elements_per_row
    shape = {"elements": elements, "rows": rows, "pairs": elements, "element_bytes": 2.0}
    timed = memory_timed(e.machine.models, "softmax", shape, backward=backward)
    assert timed is not None
    (call,) = timed.shapes
    reread = again * elements * 2 if elements_per_row == 65536 else 0
    assert (call["moved_bytes"], call["reread_bytes"], call["rows"]) == (tensors * elements * 2, reread, rows)
    assert call["vector_flops"] == (0 if backward else 4 * elements), "as the curves were fitted"


@pytest.mark.parametrize(("backward", "passes"), [(False, 1.5), (True, 2)])
def test_a_triangular_softmax_keeps_its_rows(backward: bool, passes: float) -> None:
    """Megatron-LM's kernel holds a row of up to thousands of scores in the registers of a warp: none is read again."""
    e, rows = evaluated("1d", Plans()), 1024.0
    shape = {"elements": rows * 4096, "rows": rows, "pairs": rows * 4096, "element_bytes": 2.0}
    timed = memory_timed(e.machine.models, "triangular_softmax", shape, backward=backward)
    assert timed is not None
    (call,) = timed.shapes
    assert (call["moved_bytes"], call["reread_bytes"]) == (passes * rows * 4096 * 2, 0)
    assert timed.model is e.machine.models["stream"], "as fast as any kernel that reads and writes once"


def test_a_norm_in_one_pass_is_a_stream_backward_and_a_norm_forward() -> None:
    e, rows, width = evaluated("1d", Plans()), 1024.0, 4096.0
    shape = {"elements": rows * width, "rows": rows, "width": width, "element_bytes": 2.0}
    calls = [memory_timed(e.machine.models, "one_pass_layer_norm", shape, backward=b) for b in (False, True)]
    assert [call and call.model for call in calls] == [e.machine.models["norm"], e.machine.models["stream"]]
    assert calls[1] is not None and calls[1].shapes[0]["moved_bytes"] == (3 * rows * width + 2 * rows + 2 * width) * 2


@pytest.mark.parametrize(
    ("framework", "dtype", "moved"),
    [("megatron", "bf16", (38, 14)), ("megatron", "fp32", (32, 8)), ("torchtitan", "bf16", (22, 26)),
     ("megatron-core", "bf16", (6, 4)), ("composer-fsdp", "bf16", (4, 4))],
)  # fmt: skip
def test_a_loss_moves_what_its_framework_says(framework: str, dtype: str, moved: tuple[int, int]) -> None:
    """Kernel by kernel, turned to fp32 and back where the logits are not; no row is read again beside that."""
    e = evaluated("1d", Plans(), memory=memory_profile_of(framework), precision=PRECISIONS[dtype])
    for phase, size in zip((FORWARD, BACKWARD), moved, strict=True):
        (time,) = [t for t in e.times["last"] if t.row.name == "cross_entropy" and t.phase == phase]
        assert time.moved_bytes == size * TOKENS * 128256


@pytest.mark.parametrize(("phase", "products", "tensors"), [(FORWARD, 2, (2, 2)), (BACKWARD, 5, (4, 4))])
def test_attention_is_timed_by_its_products_and_tensors(phase: str, products: int, tensors: tuple[int, int]) -> None:
    """FlashAttention-2, arXiv 2307.08691: two products forward, five backward. Forward reads q, k, v and writes o;
    backward reads these and the gradient of o and writes those of q, k and v."""
    timed = time_of(evaluated("1d", Plans()), "fused_attention", phase).timed
    assert timed is not None
    (call,) = timed.shapes
    assert call["pair_flops"] == products * 2 * 128
    assert (call["heads"], call["kv_heads"], call["queries"], call["keys"], call["causal"]) == (32, 8, 4096, 4096, 1)
    assert call["moved_bytes"] == (tensors[0] * 32 + tensors[1] * 8) * TOKENS * 128 * 2
