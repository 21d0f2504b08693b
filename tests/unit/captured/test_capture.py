"""A captured step: operators, modules, phases, storages; equal blocks folded; what cannot be captured is explained."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import models  # noqa: E402
from recorded import calls_of  # noqa: E402
from steptime.captured.graph.liveness import Liveness  # noqa: E402
from steptime.captured.record import capture  # noqa: E402
from steptime.captured.record.fake import build  # noqa: E402


def mlp() -> Any:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 4))


X = torch.empty(5, 8)


def test_operators_by_phase_and_module() -> None:
    program = capture(mlp(), [X], optimizer="sgd-loop")
    forward = [(c.node.op, c.module) for c in calls_of(program, "forward") if not c.view]
    assert forward == [("addmm", "0"), ("relu", "1"), ("addmm", "2"), ("sum", "")]
    backward = [(c.node.op, c.module) for c in calls_of(program, "backward") if not c.view]
    assert backward == [
        ("ones_like", ""), ("mm", "2"), ("mm", "2"), ("sum", "2"), ("threshold_backward", "1"), ("mm", "0"),
        ("sum", "0"),
    ]  # fmt: skip
    assert Counter(c.node.op for c in calls_of(program, "optimizer") if not c.view) == {"add": 4}


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
    assert sum(c.node.op == "mm" for c in calls_of(program, "backward")) == 1
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


def test_recomputation_casts_as_the_forward_pass_did() -> None:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.body = nn.Linear(8, 16), nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16))

        def forward(self, x: Any) -> Any:
            return checkpoint(self.body, self.stem(x), use_reentrant=False)

    program = capture(Kept(), [X], optimizer=None, autocast="bf16", target="cuda")
    norms = [(c.recomputed, c.node.inputs[0].type.dtype) for c in program.calls if c.node.op == "native_layer_norm"]
    assert norms == [(False, "fp32"), (True, "fp32")]  # Of a bf16 tensor, widened by autocast on CUDA both times.


def test_inputs_by_name_and_a_loss_by_name() -> None:
    module, (tokens,) = models.gpt(layers=1)
    program = capture(module, {"tokens": tokens}, loss="cross-entropy")
    assert "_log_softmax" in {c.node.op for c in program.calls}


@pytest.mark.quick(without=["resnet"])
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


def test_a_loss_may_have_its_targets_from_around_it() -> None:
    targets = torch.empty(5, 4, device="meta")
    program = capture(mlp(), [X], loss=lambda output: nn.functional.mse_loss(output, targets))
    assert "mse_loss" in {c.node.op for c in program.calls}
    assert targets.is_meta


class Projected(nn.Module):
    """A loss with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(16, 4))

    def forward(self, output: Any) -> Any:
        return (output @ self.weight.t()).logsumexp(-1).sum()


GLOBAL = Projected()


def from_globals(output: Any) -> Any:
    return GLOBAL(output)


def losses_that_learn() -> dict[str, Any]:
    module, weight, held = Projected(), nn.Parameter(torch.empty(16, 4)), [Projected()]
    return {
        "module": module, "method": module.forward, "closure": lambda output: module(output),
        "argument": partial(lambda learned, output: learned(output), module), "list": lambda output: held[0](output),
        "parameter": lambda output: (output @ weight.t()).logsumexp(-1).sum(), "global": from_globals,
    }  # fmt: skip


@pytest.mark.parametrize("name", losses_that_learn())
def test_what_a_loss_learns_is_counted(name: str) -> None:
    """Parameters, states and the update of a loss with weights are those of the same module inside of the model."""
    inside = mlp()
    head = capture(nn.Sequential(*inside, Projected()), [X])
    loss = losses_that_learn()[name]
    program = capture(mlp(), [X], loss=loss)
    assert program.parameter_count == head.parameter_count == 8 * 16 + 16 + 16 * 4 + 4 + 16 * 4
    for category in ("parameter", "gradient", "state"):
        sizes = [
            sum(s.size_bytes for s in one.storages if s.category == category and s.size_bytes > 4)
            for one in (program, head)
        ]
        assert sizes[0] == sizes[1] > 0, category
    assert [p.name for p in program.parameters if p.name.startswith("loss")]
    assert [c.node.op for c in calls_of(program, "optimizer")] == [c.node.op for c in calls_of(head, "optimizer")]


def test_weights_of_the_model_in_a_loss_are_counted_once() -> None:
    module = mlp()
    program = capture(module, [X], loss=lambda output: (output @ module[2].weight[:, :4]).sum())
    assert [p.name for p in program.parameters] == [name for name, _ in module.named_parameters()]
    assert not module[0].weight.is_meta and type(module[0].weight) is nn.Parameter


def test_a_teacher_in_a_loss_is_there_and_not_trained() -> None:
    teacher = nn.Sequential(mlp(), nn.Dropout()).eval()

    def distilled(output: Any) -> Any:
        with torch.no_grad():
            target = teacher(torch.zeros(5, 8))
        return (output - target).square().sum()

    program = capture(mlp(), [X], loss=distilled)
    assert program.parameter_count == 2 * (8 * 16 + 16 + 16 * 4 + 4)
    assert not [s for s in program.storages if s.category == "state" and s.name.startswith("loss") and not s.freed]
    assert not [c for c in program.calls if "dropout" in c.node.op or "bernoulli" in c.node.op]
    assert not teacher.training
