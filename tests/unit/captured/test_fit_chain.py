"""Nests of checkpoints are schedules and back, and what the chain says of them is what their captures say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from steptime.captured.fit.bench import Bench, accumulating, gradient_bytes, state_bytes, with_states
from steptime.captured.fit.layout import layout_of, schedule_of, tree_of
from steptime.captured.graph.liveness import Liveness
from steptime.captured.graph.segments import Checkpoint, Tree, every, grouped, leaves, plain, text
from steptime.captured.rematerialisation.chain import described, keep_all
from steptime.hardware import load_device

EXAMPLE = Path(__file__).resolve().parents[3] / "examples/gpt.py"
BLOCKS = 8


@st.composite
def trees(draw: Any, first: int = 0, last: int = 5, depth: int = 3) -> Tree:
    out: list[int | Checkpoint] = []
    while first <= last:
        end = draw(st.integers(first, last))
        if draw(st.booleans()) and depth:
            out.append(Checkpoint(draw(trees(first=first, last=end, depth=depth - 1))))
            first = end + 1
        else:
            out.append(first)
            first += 1
    return tuple(out)


@given(trees())
def test_a_tree_comes_back_from_its_schedule(tree: Tree) -> None:
    assert list(leaves(tree)) == list(range(6))
    back = tree_of(schedule_of(tree))
    assert back is not None
    assert schedule_of(back) == schedule_of(tree)


def test_schedules_by_hand() -> None:
    assert schedule_of(plain(3)) == keep_all(3)
    assert described(schedule_of((*grouped(2, 1), 2))) == "Fck0 Fck1 Fall2 B2 Fall1 B1 Fall0 B0"
    assert tree_of(schedule_of(plain(3))[1:]) is None
    assert text(grouped(5, 2)) == "[0 1] [2 3] [4]"


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(text=f"{EXAMPLE}:tiny", device=load_device("rtx-3090"))


TREES: dict[str, Tree] = {
    "plain": plain(BLOCKS), "all": grouped(BLOCKS, 1), "groups": grouped(BLOCKS, 3), "every 2nd": every(BLOCKS, 2),
    "nested": (Checkpoint((0, 1, Checkpoint((2, 3)))), 4, Checkpoint((5, Checkpoint((6,)))), 7),
}  # fmt: skip


@pytest.mark.quick("plain-fp32-True", "nested-bf16-False")
@pytest.mark.each("accumulate", [False, True])
@pytest.mark.each("precision", ["fp32", "bf16"])
@pytest.mark.each("name", TREES)
def test_the_chain_says_what_the_capture_says(bench: Bench, name: str, precision: str, accumulate: bool) -> None:
    base = bench.run(precision, 8)
    program = accumulating(base.program) if accumulate else base.program
    layout = layout_of(program, base.table, bench.paths)
    assert layout is not None
    weighed = layout.weigh((*TREES[name], BLOCKS))
    run = bench.run(precision, 8, TREES[name])
    # Autocast keeps its copies of the weights to the end of the forward pass, which the chain does not know.
    tolerance = 1e-3 if precision == "fp32" else 0.04
    assert weighed.passes_bytes == pytest.approx(run.footprint(accumulate).passes_bytes, rel=tolerance)
    recomputed = float(run.table.seconds[run.table.recomputed].sum())
    assert weighed.recomputed_s == pytest.approx(recomputed, rel=0.1, abs=1e-9)


def test_accumulation_adds_to_gradients_that_are_there(bench: Bench) -> None:
    """Against a capture of a step whose gradients exist before it."""
    import torch

    from steptime.captured.record import capture

    class Keeping(torch.optim.AdamW):
        """Leaves the gradients of the step that makes its states."""

        calls = 0

        def zero_grad(self, set_to_none: bool = True) -> None:
            self.calls += 1
            if self.calls > 1:
                super().zero_grad(set_to_none)

    target = bench.target(None, 8)
    real = capture(
        target.module, target.inputs, optimizer=lambda p: Keeping(p, fused=True), loss=target.loss, target="cuda"
    )
    program = bench.run("fp32", 8).program
    ours, theirs = Liveness(accumulating(program)).peaks(), Liveness(real).peaks()
    assert {k: p.size_bytes for k, p in ours.items()} == {k: p.size_bytes for k, p in theirs.items()}
    assert ours["forward"].size_bytes == Liveness(program).peaks()["forward"].size_bytes + gradient_bytes(program)


def test_states_in_8_bits_or_on_the_host(bench: Bench) -> None:
    program = bench.run("fp32", 8).program
    whole, narrow = state_bytes(program), state_bytes(program, "8bit")
    moments = {one.size_bytes for one in program.storages if one.category == "state"}
    assert whole == pytest.approx(2 * gradient_bytes(program), rel=1e-3)
    assert 0.25 < narrow / whole < 0.3, sorted(moments)
    assert state_bytes(program, "paged") == state_bytes(program, "offload") == 0
    before, after = Liveness(program).peak().size_bytes, Liveness(with_states(program, "8bit")).peak().size_bytes
    assert before - after == whole - narrow


def test_states_of_bf16_weights_in_8_bits() -> None:
    """A state of 2 bytes an element shrinks to 1 and its scales."""
    bench = Bench(text=f"{EXAMPLE}:tiny", device=load_device("rtx-3090"))
    program = bench.run("pure-bf16", 8).program
    assert 0.5 < state_bytes(program, "8bit") / state_bytes(program) < 0.56


def test_adapters_on_frozen_4_bit_weights(bench: Bench) -> None:
    """Linear layers of 8 blocks: 12 width^2 weights in NF4, adapters of rank 16 on 9 + 2 widths trained."""
    width = 128
    program = bench.run("qlora", 8).program
    frozen = {one.storage: one for one in program.parameters if not one.trained}
    trained = [one for one in program.parameters if one.trained]
    assert sum(one.elements for one in trained) == 8 * 16 * (width * (1 + 1 + 1 + 4) + width * (3 + 1 + 4 + 1))
    stored = {program.storages[n].size_bytes for n, one in frozen.items() if one.name.endswith("qkv.weight")}
    assert stored == {49152 // 2 + 768 + 4 * 3}  # 49152 of 4 bits, 768 scales of 8 bits, 3 of fp32
    wide = {call.scratch_bytes for call in program.calls if call.node.op in ("addmm", "mm")}
    assert {2 * width * width, 2 * 3 * width * width, 2 * 4 * width * width} <= wide
    assert state_bytes(program) < 0.2 * state_bytes(bench.run("pure-bf16", 8).program)
    assert bench.run("qlora", 8).part("forward").host_s > bench.run("pure-bf16", 8).part("forward").host_s
