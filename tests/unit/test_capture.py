"""A captured step: operators, modules, phases, storages; equal blocks folded; what cannot be captured is explained."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import models  # noqa: E402
from steptime.errors import UnknownNameError, UserError  # noqa: E402
from steptime.workload.capture import capture  # noqa: E402
from steptime.workload.capture.fake import build  # noqa: E402
from steptime.workload.capture.fold import runs  # noqa: E402
from steptime.workload.capture.problems import CaptureError  # noqa: E402
from steptime.workload.graph import PHASES, Program  # noqa: E402
from steptime.workload.graph.liveness import Liveness  # noqa: E402


def mlp() -> Any:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 4))


X = torch.empty(5, 8)


def test_operators_by_phase_and_module() -> None:
    program = capture(mlp(), [X], optimizer="sgd-loop")
    forward = [(c.node.op, c.module) for _, c in program.of_phase("forward") if not c.view]
    assert forward == [("addmm", "0"), ("relu", "1"), ("addmm", "2"), ("sum", "")]
    backward = [(c.node.op, c.module) for _, c in program.of_phase("backward") if not c.view]
    assert backward == [
        ("ones_like", ""), ("mm", "2"), ("mm", "2"), ("sum", "2"), ("threshold_backward", "1"), ("mm", "0"),
        ("sum", "0"),
    ]  # fmt: skip
    assert Counter(c.node.op for _, c in program.of_phase("optimizer") if not c.view) == {"add": 4}


def test_shapes_types_and_attributes_are_recorded() -> None:
    program = capture(mlp(), [X], optimizer=None)
    addmm = program.calls[1].node
    assert addmm.op == "addmm"
    assert [str(value.type) for value in addmm.inputs] == ["fp32[16]", "fp32[5x8]", "fp32[8x16]"]
    assert addmm.inputs[2].type.strides == (1, 8)
    assert addmm.names == ("self", "mat1", "mat2")
    assert addmm.outputs[0].shape == (5, 16)


def test_views_have_no_storage_of_their_own_and_inplace_operators_write_the_old_one() -> None:
    program = capture(mlp(), [X], optimizer=None)
    t, addmm, relu = program.calls[:3]
    assert t.view and t.writes == t.reads
    assert not addmm.view and addmm.writes[0] not in addmm.reads
    assert relu.inplace and relu.writes == relu.reads


def test_storages_say_what_they_hold() -> None:
    program = capture(mlp(), [X], optimizer="adamw-loop")
    sizes: Counter[str] = Counter()
    for storage in program.storages:
        sizes[storage.category] += storage.size_bytes
    parameters = 4 * (8 * 16 + 16 + 16 * 4 + 4)
    assert sizes["parameter"] == sizes["gradient"] == parameters
    assert sizes["state"] == 2 * parameters + 4 * 4
    assert sizes["input"] == 4 * 5 * 8
    assert sizes["activation"] == 4 * (5 * 16 + 5 * 4 + 1)


def test_a_parameter_without_gradient_has_no_states() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            return self.used(x)

    program = capture(Half(), [X], optimizer="adamw")
    states = {s.name: s.size_bytes for s in program.storages if s.category == "state"}
    assert states["used.weight.exp_avg"] == 256
    assert states["idle.weight.exp_avg"] == 0


def test_tied_weights_are_one_storage() -> None:
    module, inputs = models.gpt()
    program = capture(module, inputs)
    assert program.parameter_count == models.parameters_of(module)
    table = next(s for s in program.storages if s.name == "wte.weight")
    assert sum(s.category == "gradient" and s.size_bytes == table.size_bytes for s in program.storages) == 1


def test_the_module_is_as_before() -> None:
    module = mlp()
    weights = dict(module.named_parameters())
    values = {name: weight.detach().clone() for name, weight in weights.items()}
    module.eval()
    capture(module, [X])
    assert all(module.get_parameter(name) is weight for name, weight in weights.items())
    assert all(torch.equal(weight, values[name]) and weight.grad is None for name, weight in weights.items())
    assert not module.training


def test_a_module_on_the_meta_device_needs_no_memory() -> None:
    with torch.device("meta"):
        module = nn.Linear(200_000, 200_000)
    program = capture(module, [torch.empty(1, 200_000)], optimizer="sgd")
    assert Liveness(program).peak().size_bytes > 2 * 160e9


def test_a_constructor_that_reads_values_is_built_without_weights() -> None:
    def factory() -> Any:
        rates = torch.linspace(0, 0.5, 3).tolist()
        return nn.Sequential(*(nn.Dropout(rate) for rate in rates), nn.Linear(100_000, 100_000))

    module = build(factory)
    assert module[3].weight.is_meta
    assert module[2].p == 0.5


def test_frozen_parameters_get_no_gradient() -> None:
    module = mlp()
    module[0].requires_grad_(False)
    program = capture(module, [X], optimizer="sgd-loop")
    assert sum(c.node.op == "mm" for _, c in program.of_phase("backward")) == 1
    assert [p.trained for p in program.parameters] == [False, False, True, True]


def test_inference_records_the_forward_pass_alone() -> None:
    program = capture(mlp(), [X], training=False)
    assert {c.phase for c in program.calls} == {"forward"}


def test_recomputation_is_marked() -> None:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, x: Any) -> Any:
            return checkpoint(self.body, x, use_reentrant=False)

    program = capture(Kept(), [X.clone().requires_grad_()], optimizer=None)
    again = [(c.node.op, c.module, c.phase) for c in program.calls if c.recomputed and not c.view]
    assert again == [
        ("addmm", "body.0", "backward"), ("relu", "body.1", "backward"),
    ]  # fmt: skip  # The last product is not needed for any gradient.


def test_inputs_by_name_and_a_loss_by_name() -> None:
    module, (tokens,) = models.gpt(layers=1)
    program = capture(module, {"tokens": tokens}, loss="cross-entropy")
    assert "_log_softmax" in {c.node.op for c in program.calls}


@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_an_exported_program_is_the_module(name: str) -> None:
    module, inputs = models.FACTORIES[name]()
    plain = capture(module, inputs, fold=False)
    exported = capture(torch.export.export(module, inputs), inputs)
    assert Counter(c.node.op for c in exported.calls if not c.view) == Counter(
        c.node.op for c in plain.calls if not c.view
    )
    assert Liveness(exported).peak().size_bytes == Liveness(plain).peak().size_bytes
    assert {c.module for c in exported.calls} <= {c.module for c in plain.calls}
    assert [p.name for p in exported.parameters] == [p.name for p in plain.parameters]


# -- folding ----------------------------------------------------------------------------------------------------------


class Stack(nn.Module):
    """Blocks of a kind, each recomputed on request."""

    def __init__(self, blocks: list[Any], keep: bool = True) -> None:
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(8, 8), nn.ModuleList(blocks), nn.Linear(8, 8)
        self.keep = keep

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = x + (block(x) if self.keep else checkpoint(block, x, use_reentrant=False))
        return self.last(x)


def block(width: int = 16) -> Any:
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, width), nn.GELU(), nn.Linear(width, 8))


def same(a: Program, b: Program) -> None:
    """Two programs are equal call by call and byte by byte."""
    assert [(c.node.op, c.module, c.phase, c.recomputed, c.view) for c in a.calls] == [
        (c.node.op, c.module, c.phase, c.recomputed, c.view) for c in b.calls
    ]
    assert [c.node.outputs for c in a.calls] == [c.node.outputs for c in b.calls]
    assert (Liveness(a).in_use_bytes == Liveness(b).in_use_bytes).all()
    assert [p.name for p in a.parameters] == [p.name for p in b.parameters]
    assert dict(a.modules) == dict(b.modules)
    records = [
        Counter((s.size_bytes, s.born, s.freed, s.category, s.name) for s in each.storages if s.size_bytes)
        for each in (a, b)
    ]
    assert records[0] == records[1]


@pytest.mark.parametrize(
    "optimizer", ["adamw", "adamw-loop", "adamw-fused", "sgd-momentum", "adagrad", "rmsprop", None]
)
@pytest.mark.parametrize("keep", [True, False])
def test_folded_is_the_whole(optimizer: str | None, keep: bool) -> None:
    module = Stack([block() for _ in range(9)], keep)
    folded, whole = (capture(module, [X], optimizer=optimizer, fold=fold) for fold in (True, False))
    assert folded.folded == ("blocks.0-8",)
    same(folded, whole)


def test_a_pattern_of_two_blocks_is_folded() -> None:
    module = Stack([block(16 if n % 2 else 32) for n in range(14)])
    folded, whole = (capture(module, [X], fold=fold) for fold in (True, False))
    assert folded.folded == ("blocks.0-13",)
    same(folded, whole)


def test_a_run_may_start_later_and_end_earlier() -> None:
    module = Stack([block(24), *(block() for _ in range(8)), block(40)])
    folded, whole = (capture(module, [X], fold=fold) for fold in (True, False))
    assert folded.folded == ("blocks.1-8",)
    same(folded, whole)


@pytest.mark.parametrize("name", ["gpt", "gpt_eager", "llama", "bert", "vit", "moe"])
def test_models_fold_exactly(name: str) -> None:
    module, inputs = models.FACTORIES[name](layers=8)
    folded, whole = (capture(module, inputs, fold=fold) for fold in (True, False))
    same(folded, whole)
    if name not in ("moe",):
        assert folded.folded


def test_blocks_that_the_forward_counts_are_recorded_one_by_one() -> None:
    class Counted(Stack):
        def forward(self, x: Any) -> Any:
            for number in range(9):
                x = self.blocks[number](x)
            return x

    program = capture(Counted([block() for _ in range(9)]), [X])
    assert not program.folded
    assert sum(c.node.op == "gelu" for c in program.calls) == 9


def test_blocks_that_do_different_things_are_recorded_one_by_one() -> None:
    class Uneven(Stack):
        def forward(self, x: Any) -> Any:
            for number, each in enumerate(self.blocks):
                x = each(x) if number % 2 else each(x).tanh()
            return x

    module = Uneven([block() for _ in range(9)])
    program = capture(module, [X])
    assert not program.folded
    assert sum(c.node.op == "tanh" for c in program.calls) == 5


def test_few_blocks_are_no_run() -> None:
    assert runs(Stack([block() for _ in range(5)])) == []


# -- what cannot be captured ------------------------------------------------------------------------------------------


class Reads(nn.Module):
    def forward(self, x: Any) -> Any:
        if x.sum().item() > 0:
            return x
        return -x


class Picks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        rows = (x[:, 0] > 0).nonzero().flatten()
        return self.line(x[rows])


class Breaks(nn.Module):
    def forward(self, x: Any) -> Any:
        raise KeyError("no such key")


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Reads(), "if x.sum().item() > 0"),
        (Picks(), "rows = (x[:, 0] > 0).nonzero().flatten()"),
        (Breaks(), 'raise KeyError("no such key")'),
    ],
)
def test_the_message_names_the_line(module: Any, message: str) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(module, [X])
    assert message in str(caught.value)
    assert __file__ in str(caught.value)


def test_a_share_of_a_mask_can_be_stated() -> None:
    program = capture(Picks(), [torch.empty(40, 8)], nonzero_share=0.25)
    assert next(c for c in program.calls if c.node.op == "addmm").node.outputs[0].shape == (10, 8)


def test_wrong_options_are_named() -> None:
    with pytest.raises(UnknownNameError, match="adamv"):
        capture(mlp(), [X], optimizer="adamv")
    with pytest.raises(UserError, match="fp8"):
        capture(mlp(), [X], autocast="fp8")
    with pytest.raises(CaptureError, match="not a scalar"):
        capture(mlp(), [X], loss=lambda output: output)


def test_every_call_has_a_known_phase() -> None:
    program = capture(mlp(), [X])
    assert {call.phase for call in program.calls} == set(PHASES)


# -- kernels of the target --------------------------------------------------------------------------------------------


def operators(program: Program) -> Counter[str]:
    return Counter(call.node.op for call in program.calls)


def test_cuda_drops_out_with_a_mask_of_one_byte() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 8))
    here, there = (capture(module, [X], target=target, optimizer=None) for target in ("cpu", "cuda"))
    assert "native_dropout" not in operators(here)
    assert operators(there)["native_dropout"] == operators(there)["native_dropout_backward"] == 1
    assert any(s.category == "activation" and s.size_bytes == 5 * 8 for s in there.storages)


@pytest.mark.parametrize(("dtype", "kernel"), [(torch.bfloat16, "flash"), (torch.float32, "efficient")])
def test_cuda_attention_depends_on_the_type(dtype: Any, kernel: str) -> None:
    module, inputs = models.gpt(layers=1)
    found = operators(capture(module.to(dtype), inputs, target="cuda"))
    assert found[f"_scaled_dot_product_{kernel}_attention"] == 1
    assert found[f"_scaled_dot_product_{kernel}_attention_backward"] == 1


def test_kernels_are_found_inside_pytorchs_own_functions() -> None:
    attention = nn.MultiheadAttention(16, 2, dropout=0.1, batch_first=True)

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = attention

        def forward(self, x: Any) -> Any:
            return self.attention(x, x, x, need_weights=False)[0]

    program = capture(Own(), [torch.empty(2, 4, 16)], target="cuda")
    assert operators(program)["_scaled_dot_product_efficient_attention"] == 1


def test_cuda_has_one_kernel_for_an_rms_norm() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8), nn.Linear(8, 8))
    found = capture(module, [X], target="cuda", optimizer=None)
    assert operators(found)["_fused_rms_norm"] == operators(found)["_fused_rms_norm_backward"] == 1
    assert "pow" not in operators(found)
    assert any(s.category == "activation" and s.size_bytes == 4 * 5 for s in found.storages)


def test_the_functions_are_as_before() -> None:
    before = nn.functional.dropout, nn.functional.scaled_dot_product_attention
    capture(mlp(), [X], target="cuda")
    assert (nn.functional.dropout, nn.functional.scaled_dot_product_attention) == before
    with pytest.raises(UserError, match="tpu"):
        capture(mlp(), [X], target="tpu")
