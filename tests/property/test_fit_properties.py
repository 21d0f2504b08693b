"""Of `steptime fit`: the front is one, its memory is that of captures, and more memory is never slower."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from steptime.captured.fit.bench import Bench, accumulating, with_states
from steptime.captured.fit.captured import Captured
from steptime.captured.fit.choice import Choice, Point, front_of, thinned
from steptime.captured.fit.driver import Found, search
from steptime.captured.fitting import fit
from steptime.captured.graph.liveness import Liveness
from steptime.hardware import load_device

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/gpt.py"
DEVICE = load_device("rtx-3090")


@pytest.fixture(scope="module")
def engine() -> Captured:
    return Captured(bench=Bench(text=f"{EXAMPLE}:tiny", device=DEVICE), batch=4, host_Bps=20e9)


@pytest.fixture(scope="module")
def found(engine: Captured) -> Found:
    return search(engine)


@pytest.mark.slow
def test_no_point_of_the_front_is_beaten(found: Found) -> None:
    assert len(found.front) > 3
    for a, b in pairwise(found.front):
        assert a.step_s < b.step_s and a.memory_bytes > b.memory_bytes
    assert found.least == found.front[-1]


@pytest.mark.slow
def test_memory_of_every_point_is_that_of_its_capture(engine: Captured, found: Found) -> None:
    """Captured anew, its states and gradients changed in the program itself, not by arithmetic."""
    bench = Bench(text=engine.bench.text, device=DEVICE)
    seen = [point for point in found.front if not point.choice.swapped]
    assert len(seen) >= len(found.front) / 2
    for point in seen:
        choice = point.choice
        tree, saves = engine._arrangements(choice.precision, choice.micro_batch)[choice.checkpoints]
        program = bench.run(choice.precision, choice.micro_batch, tree, saves).program
        program = accumulating(program) if choice.accumulation > 1 else program
        peak = Liveness(with_states(program, choice.optimizer)).peak().size_bytes
        assert point.basis == "capture"
        assert point.memory_bytes == peak, choice


def test_proposals_are_near_what_captures_say(found: Found) -> None:
    for point in found.front:
        if point.basis == "capture":
            assert point.proposed_bytes == pytest.approx(point.memory_bytes, rel=0.05)


@pytest.mark.slow
def test_more_memory_is_never_slower() -> None:
    """On devices that differ in memory only; points as good as equal may be exchanged."""
    bench = Bench(text=f"{EXAMPLE}:tiny", device=DEVICE)
    context = 1.5e9
    times = []
    for room in (25e6, 45e6, 60e6, 200e6):
        bench.device = replace(DEVICE, memory_bytes=context + room)
        best = search(Captured(bench=bench, batch=4, host_Bps=20e9)).cheapest
        assert best is None or best.device_bytes <= bench.device.memory_bytes
        times.append(best.step_s if best is not None else float("inf"))
    assert times[-1] < 0.99 * times[0]
    assert times[-1] < float("inf")
    assert all(less >= more / 1.01 for less, more in pairwise(times)), times


def test_more_memory_is_never_slower_by_estimate() -> None:
    times = [fit("gpt2", name, batch=32).cheapest for name in ("a100-sxm-40gb", "a100-sxm-80gb")]
    small, large = times
    assert small is not None and large is not None
    assert large.step_s <= small.step_s * 1.05  # the larger one has faster memory, too


points = st.builds(
    lambda step_s, memory: Point(
        choice=Choice(batch=1, micro_batch=1), step_s=step_s, bracket_s=(step_s, step_s), band_s=None,
        memory_bytes=memory, reserved_bytes=memory, device_bytes=memory, fits=True, oom_probability=0.0,
        basis="estimate",
    ),
    st.integers(1, 50).map(float), st.integers(1, 50).map(float),
)  # fmt: skip


@given(st.lists(points, min_size=1, max_size=30))
def test_any_point_is_beaten_or_equalled_by_one_of_the_front(given: list[Point]) -> None:
    front = front_of(given)
    for one in given:
        assert any(p.step_s <= one.step_s and p.memory_bytes <= one.memory_bytes for p in front)
    for a, b in pairwise(front):
        assert a.step_s < b.step_s and a.memory_bytes > b.memory_bytes


@given(st.lists(points, min_size=1, max_size=30), st.sampled_from([0.02, 0.1, 0.5]))
def test_a_thinned_front_keeps_its_ends(given: list[Point], apart: float) -> None:
    front = front_of(given)
    thin = thinned(front, apart)
    assert thin[-1] == front[-1]
    assert thin[0] == front[0] or len(thin) == 1
    assert set(map(id, thin)) <= set(map(id, front))
