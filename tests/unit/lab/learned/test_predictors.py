"""Splits, intervals, and what predictors learn from graphs whose truth is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from steptime.captured.ops.work import Work
from steptime.errors import UserError
from steptime.estimate.learned import NUMBERS
from steptime_lab.learned import additive, attention, harness
from steptime_lab.learned.data import Rows
from steptime_lab.learned.measuring import Graph
from steptime_lab.learned.memory import errors, fitted_workspaces
from steptime_lab.learned.sketch import Piece, Sketch

FACTORS = {"a": 0.5, "b": 1.0, "c": 2.0}


def rows(graphs: int = 120, machines: tuple[str, ...] = ("m",), seed: int = 0) -> Rows:
    """Graphs whose operators take a factor of their own, and whose host takes twice as long as assumed."""
    draw = np.random.default_rng(seed)
    names = np.array(sorted(FACTORS), object)
    operator = np.tile(names, graphs)
    graph = np.repeat(np.arange(graphs), len(names))
    device_s = draw.uniform(0.1, 1.0, len(graph)) ** 2
    host_s = np.full(len(graph), 0.05)
    count = draw.integers(1, 5, len(graph)).astype(float)
    truth = np.array([FACTORS[name] for name in operator])
    own = tuple(machines[g % len(machines)] for g in range(graphs))
    card = np.array([1.5 if name == "slow" else 1.0 for name in own])[graph]
    total = np.bincount(graph, (device_s * truth * card + 2 * host_s) * count)
    numbers = np.zeros((len(graph), len(NUMBERS)))
    numbers[:, 0] = np.log10(device_s)
    return Rows(
        operators=tuple(operator), numbers=numbers, device_s=device_s, host_s=host_s, count=count,
        issuer=np.zeros(len(graph), int), graph=graph, measured_s=total, sharpness=1.0,
        families=tuple("fgh"[g % 3] for g in range(graphs)), machines=own,
    )  # fmt: skip


@pytest.mark.slow
def test_factors_of_operators_and_of_the_host_are_recovered() -> None:
    known = rows()
    found = additive.fitted(known, additive.Options(epochs=250, batch=30, forgotten=0.0))
    fresh = rows(60, seed=1)
    assert abs(additive.predicted_s(found, fresh) / fresh.measured_s - 1).mean() < 0.03
    assert abs(fresh.analytic_s / fresh.measured_s - 1).mean() > 0.15
    numbers = tuple(fresh.numbers[0])
    assert found.factor("a", numbers) < 0.7 < 1.5 < found.factor("c", numbers)


@pytest.mark.slow
def test_a_slow_card_is_told_from_slow_operators() -> None:
    known = rows(machines=("usual", "slow"))
    found = additive.fitted(known, additive.Options(epochs=250, batch=30, forgotten=0.0, cards=0.002))
    assert found.machines["slow"][0] - found.machines["usual"][0] == pytest.approx(np.log(1.5), abs=0.1)
    mean = (found.machines["slow"][0] + found.machines["usual"][0]) / 2
    assert found.card("another")[0] == pytest.approx(mean)


def test_equal_seeds_give_equal_corrections() -> None:
    options = additive.Options(epochs=3)
    one, same = additive.fitted(rows(40), options), additive.fitted(rows(40), options)
    assert one.to_json() == same.to_json()


def test_splits_never_test_what_they_train_on() -> None:
    known = rows()
    single = known.only(np.arange(120))
    object.__setattr__(single, "families", (*known.families[:100], *["single"] * 20))
    for kind in (harness.RANDOM, harness.SIZE, harness.FAMILY, harness.FAMILY_ALONE):
        for split in harness.splits(single, kind, "single"):
            assert not set(split.train) & set(split.test)
            assert all(single.families[n] != "single" for n in split.test)
            assert (100 in split.train) == (kind != harness.FAMILY_ALONE)
    sizes = next(harness.splits(known, harness.SIZE, "single"))
    assert known.measured_s[sizes.train].max() <= known.measured_s[sizes.test].min()
    assert {split.name for split in harness.splits(known, harness.FAMILY, "single")} == {"f", "g", "h"}


def test_too_few_graphs_or_families_are_named() -> None:
    with pytest.raises(UserError, match="too few for a split"):
        list(harness.splits(rows(30), harness.RANDOM, "single"))
    one = rows(60)
    object.__setattr__(one, "families", ("f",) * 60)
    with pytest.raises(UserError, match="one family"):
        list(harness.splits(one, harness.FAMILY, "single"))


def test_an_interval_holds_its_share_of_new_graphs() -> None:
    draw = np.random.default_rng(0)
    shares = []
    for _ in range(200):
        band = harness.conformal(np.ones(60), np.exp(draw.normal(0, 0.2, 60)))
        shares.append(harness.coverage(np.ones(200), np.exp(draw.normal(0, 0.2, 200)), band))
    assert 0.88 < np.mean(shares) < 0.94


def test_the_distance_of_two_measurements_is_the_noise() -> None:
    assert harness.noise([1.1, 2.0], [1.0, 2.0]) == pytest.approx({"mean": 0.05, "median": 0.05, "graphs": 2.0})


def drawn(sizes: list[tuple[str, float, float, int]], **changes: Any) -> Sketch:
    """A sketch of calls: operator, bytes read and written, bytes in use."""
    work = Work(moved_bytes=1.0, launches=1.0)
    pieces = tuple(Piece(op=op, work=work, read_bytes=r, written_bytes=w) for op, r, w, _ in sizes)
    given: dict[str, Any] = {
        "name": "x", "pieces": pieces, "calls": tuple(range(len(sizes))), "phases": (0,) * len(sizes),
        "issuers": (0,) * len(sizes), "views": 0, "held_bytes": tuple(held for *_, held in sizes),
        "edges": tuple((n, n + 1, 8.0) for n in range(len(sizes) - 1)), "static_bytes": 0, "parameters": 0,
        "peak_bytes": max(held for *_, held in sizes),
    }  # fmt: skip
    return Sketch(**{**given, **changes})


def test_memory_that_a_kernel_takes_is_found_from_peaks() -> None:
    draw = np.random.default_rng(0)
    graphs = []
    for number in range(60):
        read, held = float(draw.integers(100, 200)), int(draw.integers(500, 900))
        one = drawn([("conv", read, 10.0, held), ("relu", 50.0, 50.0, held - int(draw.integers(0, 300)))])
        graphs.append(
            Graph(key=str(number), family="f", seconds=1.0, again_s=None, sketch=one,
                  allocated_bytes=int(held + 0.5 * read))
        )  # fmt: skip
    found = fitted_workspaces(graphs)
    assert set(found.shares) == {"conv"}
    assert found.shares["conv"][0] == pytest.approx(0.5, abs=0.05)
    assert abs(errors(graphs, found)).mean() < 0.01 < abs(errors(graphs)).mean()


def test_nothing_is_added_where_the_simulation_is_right() -> None:
    graphs = [
        Graph(key=str(n), family="f", seconds=1.0, again_s=None, allocated_bytes=500 + n,
              sketch=drawn([("conv", 100.0, 10.0, 500 + n), ("relu", 5.0, 5.0, 300)]))
        for n in range(20)
    ]  # fmt: skip
    assert fitted_workspaces(graphs).shares == {}


@pytest.mark.slow
def test_the_published_encoder_learns_what_depends_on_operators() -> None:
    draw = np.random.default_rng(0)
    sketches, seconds = [], []
    for _ in range(80):
        heavy, light = int(draw.integers(1, 6)), int(draw.integers(1, 6))
        sketches.append(drawn([("mm", 8.0, 8.0, 1)] * heavy + [("add", 8.0, 8.0, 1)] * light))
        seconds.append(1e-3 * (5 * heavy + light))
    times = np.array(seconds)
    found = attention.Network(sketches[:60], times[:60], epochs=60).seconds(sketches[60:])
    spread = abs(np.exp(np.log(times[:60]).mean()) / times[60:] - 1).mean()
    assert abs(found / times[60:] - 1).mean() < 0.3 * spread
