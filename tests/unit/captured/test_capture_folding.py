"""Equal blocks are recorded a few times and unrolled; what only looks equal is recorded as it is."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import models  # noqa: E402
from models.hub import hub_model  # noqa: E402
from steptime.captured.cost import Timer, cost_table  # noqa: E402
from steptime.captured.graph import Program  # noqa: E402
from steptime.captured.graph.liveness import Liveness  # noqa: E402
from steptime.captured.graph.segments import KEPT  # noqa: E402
from steptime.captured.record import capture  # noqa: E402
from steptime.captured.record.fold import LEAST_SAVED, runs  # noqa: E402
from steptime.hardware import load_device  # noqa: E402


def mlp() -> Any:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 4))


X = torch.empty(5, 8)


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


@pytest.mark.quick("True-adamw", "False-sgd-momentum")
@pytest.mark.each("optimizer", ["adamw", "adamw-loop", "adamw-fused", "sgd-momentum", "adagrad", "rmsprop", None])
@pytest.mark.each("keep", [True, False])
def test_folded_is_the_whole(optimizer: str | None, keep: bool) -> None:
    module = Stack([block() for _ in range(9)], keep)
    folded, whole = (capture(module, [X], optimizer=optimizer, fold=fold) for fold in (True, False))
    assert folded.folded == ("blocks.0-8",)
    same(folded, whole)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused", "sgd"])
def test_folded_moves_the_bytes_of_the_whole(optimizer: str) -> None:
    """One value stands for the parameters of many blocks in the lists of an optimiser, which reads each of them."""
    device = load_device("h100-sxm")
    model = Stack([block() for _ in range(9)])
    programs = [capture(model, [X], optimizer=optimizer, loss="mse", fold=fold) for fold in (True, False)]
    tables = [cost_table(program, Timer(device=device)) for program in programs]
    assert programs[0].folded and not programs[1].folded
    moved = [{g.name: g.moved_bytes for g in table.by_operator()} for table in tables]
    assert moved[0] == pytest.approx(moved[1])


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


@pytest.mark.quick("gpt")
@pytest.mark.parametrize("name", ["gpt", "gpt_eager", "llama", "bert", "vit", "moe"])
def test_models_fold_exactly(name: str) -> None:
    module, inputs = models.FACTORIES[name](layers=8)
    folded, whole = (capture(module, inputs, fold=fold) for fold in (True, False))
    same(folded, whole)
    if name not in ("moe",):
        assert folded.folded


SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64}
DEEP = {**SMALL, "num_hidden_layers": 7, "num_key_value_heads": 1, "head_dim": 16}


@pytest.mark.quick(without=["llama-settings0-model.layers.0-6"])
@pytest.mark.parametrize(
    ("name", "settings", "run"),
    [
        ("llama", DEEP, "model.layers.0-6"),
        ("gpt2", {"n_embd": 32, "n_head": 2, "n_layer": 7, "vocab_size": 64}, "transformer.h.0-6"),
        ("gemma2", {**DEEP, "num_hidden_layers": 12, "sliding_window": 8}, "model.layers.0-11"),
    ],
)
def test_real_architectures_fold_exactly(name: str, settings: dict[str, Any], run: str) -> None:
    pytest.importorskip("transformers")
    with torch.device("meta"):
        module, inputs = hub_model(name, tokens=16, **settings)
    folded, whole = (capture(module, inputs, fold=fold) for fold in (True, False))
    assert folded.folded == (run,), folded.unfolded
    same(folded, whole)


def test_a_report_says_why_equal_blocks_were_recorded_one_by_one() -> None:
    assert "forward pass with fewer" in capture(Numbered([block() for _ in range(9)]), [X]).unfolded


class Numbered(Stack):
    """Blocks by number, nine of them."""

    def forward(self, x: Any) -> Any:
        for number in range(9):
            x = self.blocks[number](x)
        return x


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
    least = KEPT + LEAST_SAVED
    assert runs(Stack([block() for _ in range(least - 1)])) == []
    (run,) = runs(Stack([block() for _ in range(least)]))
    assert (run.container, run.period, run.count) == ("blocks", 1, least)


# -- what looks equal and is not ---------------------------------------------------------------------------------------


class Sixth(Stack):
    """Every sixth block is followed by something else; only the index says so."""

    def forward(self, x: Any) -> Any:
        for number, each in enumerate(self.blocks):
            x = each(x)
            x = x.tanh() if number % 6 == 5 else x
        return x


class Hidden(Stack):
    """All hidden states are used at the end."""

    def forward(self, x: Any) -> Any:
        states = []
        for each in self.blocks:
            x = each(x)
            states.append(x)
        return torch.stack(states).mean(0)


class Exit(Stack):
    """Leaves after the seventh block."""

    def forward(self, x: Any) -> Any:
        for number, each in enumerate(self.blocks):
            x = each(x)
            if number == 6:
                break
        return self.last(x)


class Counts(Stack):
    """Does as much again after the blocks as there are blocks."""

    def forward(self, x: Any) -> Any:
        for each in self.blocks:
            x = each(x)
        for _ in range(len(self.blocks)):
            x = x.tanh()
        return x


class Late(Stack):
    """The last blocks are recomputed, the first ones are not."""

    def forward(self, x: Any) -> Any:
        for number, each in enumerate(self.blocks):
            x = each(x) if number < 7 else checkpoint(each, x, use_reentrant=False)
        return self.last(x)


@pytest.mark.quick("Exit")
@pytest.mark.parametrize("kind", [Sixth, Hidden, Exit, Counts, Late])
def test_equal_blocks_that_are_used_unequally_are_recorded_one_by_one(kind: Any) -> None:
    module = kind([block() for _ in range(12)])
    folded, whole = (capture(module, [X], fold=fold) for fold in (True, False))
    same(folded, whole)
    assert not folded.folded


@pytest.mark.slow
def test_weights_shared_by_late_blocks_count_once() -> None:
    module = Stack([block() for _ in range(12)])
    module.blocks[9][1].weight = module.blocks[8][1].weight
    folded, whole = (capture(module, [X], fold=fold) for fold in (True, False))
    same(folded, whole)


def test_a_hook_on_one_block_is_seen() -> None:
    module = Stack([block() for _ in range(12)])
    module.blocks[7].register_forward_hook(lambda _m, _a, output: output.tanh())
    program = capture(module, [X])
    assert sum(c.node.op == "tanh" for c in program.calls) == 1


# -- equal operators on other tensors ----------------------------------------------------------------------------------


class Fed(nn.Module):
    """A block that reads a second tensor, which the model chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Any, other: Any) -> Any:
        return x + self.inner(x) * other


class Wired(nn.Module):
    """Blocks whose second tensor is chosen from the states before and from two masks of one shape."""

    def __init__(self, choose: Any) -> None:
        super().__init__()
        self.blocks, self.choose = nn.ModuleList([Fed() for _ in range(14)]), choose

    def forward(self, x: Any) -> Any:
        states, masks = [x.tanh()], (x.sin(), x.cos())
        for number, each in enumerate(self.blocks):
            states.append(each(states[-1], self.choose(number, states, masks)))
        return states[-1] * 2


WIRES = {
    "the state before": (lambda n, states, masks: states[n], True),
    "one mask": (lambda n, states, masks: masks[0], True),
    "one state before all": (lambda n, states, masks: states[0], True),
    "from the seventh on the state of the sixth": (lambda n, states, masks: states[min(n, 6)], False),
    "two blocks back, once": (lambda n, states, masks: states[n - (n == 7)], False),
    "another mask for every fifth": (lambda n, states, masks: masks[n % 5 == 4], False),
    "another mask for the last": (lambda n, states, masks: masks[n > 9], False),
}


@pytest.mark.parametrize("wire", WIRES)
def test_equal_blocks_that_read_other_tensors_are_recorded_one_by_one(wire: str) -> None:
    choose, folds = WIRES[wire]
    module = Wired(choose)
    folded, whole = (capture(module, [X], fold=fold, optimizer=None) for fold in (True, False))
    same(folded, whole)
    assert bool(folded.folded) is folds, folded.unfolded


class Constant(nn.Module):
    """A block that holds a tensor which is neither parameter nor buffer."""

    def __init__(self, constant: Any) -> None:
        super().__init__()
        self.inner, self.held = nn.Linear(8, 8), [constant]

    def forward(self, x: Any) -> Any:
        return x + self.inner(x) * self.held[0]


@pytest.mark.parametrize("own", [True, False])
def test_constants_of_blocks_count_as_often_as_they_are_there(own: bool) -> None:
    """Each its own: folded. Two for all, the second in the middle: the recorded blocks would not see it."""
    two = torch.ones(8), torch.ones(8)
    module = nn.Sequential(*(Constant(torch.ones(8) if own else two[n in (6, 7)]) for n in range(12)))
    folded, whole = (capture(module, [X], fold=fold, optimizer=None) for fold in (True, False))
    same(folded, whole)
    assert bool(folded.folded) is own, folded.unfolded


class Scaled(torch.autograd.Function):
    """The number says what is saved and what the backward pass runs; the forward pass is the same."""

    @staticmethod
    def forward(ctx: Any, x: Any, number: int) -> Any:
        ctx.save_for_backward(*((x,) if number % 5 == 4 else ()))
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        return (gradient.tanh() if ctx.saved_tensors else gradient * 2), None


class Hooked(Stack):
    """A hook on the gradient of one block's output."""

    def forward(self, x: Any) -> Any:
        for number, each in enumerate(self.blocks):
            x = each(x)
            if number == 7:
                x.register_hook(lambda gradient: gradient.tanh())
        return self.last(x)


class OwnBackward(Stack):
    """A function of its own between the blocks."""

    def forward(self, x: Any) -> Any:
        for number, each in enumerate(self.blocks):
            x = Scaled.apply(each(x), number)
        return self.last(x)


class KeptForAWhile(Stack):
    """Copies of the states, dropped at every fourth block."""

    def forward(self, x: Any) -> Any:
        kept = []
        for number, each in enumerate(self.blocks):
            x = each(x)
            kept.append(x.detach() * 2)
            if number % 4 == 3:
                kept.clear()
        return self.last(x)


@pytest.mark.parametrize("kind", [Hooked, OwnBackward, KeptForAWhile])
def test_what_the_operators_of_the_forward_pass_do_not_show(kind: Any) -> None:
    module = kind([nn.Linear(8, 8) for _ in range(12)])
    folded, whole = (capture(module, [X], fold=fold, optimizer=None) for fold in (True, False))
    same(folded, whole)
    assert not folded.folded
