"""Architectures of public packages: parameters are exact, FLOPs are those of PyTorch's counter in a real run."""

from __future__ import annotations

import collections
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.flop_counter import FlopCounterMode, flop_registry  # noqa: E402

from public_models import ROWS, loss_of  # noqa: E402
from recorded import excess_of_grouped_weights, full_flops  # noqa: E402
from steptime.captured.cost import work_of  # noqa: E402
from steptime.captured.record import capture  # noqa: E402

#: Third-party code: deprecations and hints of the packages themselves.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]  # fmt: skip

COUNTED = {operator.__name__ for operator in flop_registry if hasattr(operator, "__name__")}
FUSED = "_scaled_dot_product_flash_attention_for_cpu"
GROUPED = "_grouped_mm"

#: Architecture -> operators with products that PyTorch's counter does not count.
CASES: dict[str, set[str]] = {
    "Llama 7B": {FUSED}, "Mixtral 8x7B": {FUSED, GROUPED}, "DeepSeek-V3": {FUSED, GROUPED}, "GPT-OSS 120B": {GROUPED},
    "Qwen3-Next": {FUSED, GROUPED}, "Mamba 130M": set(), "T5 small": set(), "Longformer": set(),
    "Qwen2-VL": {FUSED}, "wav2vec 2.0": set(), "mobilenetv3_large_100": set(), "pvt_v2_b0": {FUSED},
}  # fmt: skip


def counted(module: Any, inputs: Any) -> dict[str, int]:
    """What PyTorch's counter says of a forward and backward pass that really runs."""
    with FlopCounterMode(display=False) as counter:
        loss_of(module(**inputs) if isinstance(inputs, dict) else module(*inputs)).backward()
    return {str(op).rpartition(".")[2]: flops for op, flops in counter.get_flop_counts()["Global"].items()}


@pytest.mark.quick("T5 small", "mobilenetv3_large_100")
@pytest.mark.each("name", CASES)
def test_parameters_and_flops_are_those_of_a_real_run(name: str) -> None:
    pytest.importorskip(ROWS[name].package)
    torch.manual_seed(0)
    module, inputs = ROWS[name].small()
    program = capture(module, inputs, loss=loss_of)
    assert program.parameter_count == sum(parameter.numel() for parameter in module.parameters())
    ours: dict[str, float] = collections.Counter()
    for call in program.calls:
        if not call.view:
            ours[call.node.op] += float(full_flops(call.node))
    found = {op: flops for op, flops in ours.items() if flops}
    theirs = counted(module.train(), inputs)
    if "convolution_backward" in theirs:
        theirs["convolution_backward"] -= excess_of_grouped_weights(program)
    assert {op: flops for op, flops in found.items() if op in COUNTED} == theirs
    assert {op.removesuffix("_backward") for op in found if op not in COUNTED} == CASES[name]


def test_every_operator_of_the_experts_is_known() -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    module, inputs = ROWS["Mixtral 8x7B"].small()
    calls = capture(module, inputs, loss=loss_of, optimizer=None).calls
    assert {call.node.op for call in calls if work_of(call.node).family == "unknown"} == set()
