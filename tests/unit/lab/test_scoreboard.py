"""The scoreboard: targets by what the fields of a run say, the page, its figures, the benchmarks' tables."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from scoreboard import (
    CLAIMS,
    SEEN,
    TARGETS,
    UNSEEN,
    WAYS,
    Board,
    Target,
    Where,
    board_of,
    frameworks_digest,
    reached,
    to_json,
)
from scoreboard_page import FIGURES, gpu_table, markdown, page, targets_table, write_figures
from steptime.measure.runs.aggregate import ScoredRun, coverage_interval
from steptime.measure.runs.reading import Reading, read_runs

ROOT = Path(__file__).parents[3]
SOURCES = ("sc21", "korthikanti", "zero-bubble", "mt-nlg")


def published(sources: tuple[str, ...]) -> Reading:
    every = read_runs(ROOT / "tests/data/published_runs.csv")
    return replace(every, runs=tuple(run for run in every.runs if run.source_key in sources))


@pytest.fixture(scope="module")
def reading() -> Reading:
    return published(SOURCES)


@pytest.fixture(scope="module")
def board(reading: Reading) -> Board:
    printed = replace(reading, runs=tuple(run for run in reading.runs if run.source_key != "mt-nlg"))
    return board_of(reading, printed, second=published(("llm.c",)))


def off(reading: Reading, source: str, ratio: float) -> list[ScoredRun]:
    """Predictions that are off by a ratio on one source, exact on the others."""
    return [
        ScoredRun(run=run, step_time_s=f * (run.step_time_s or math.nan), memory_bytes=f * (run.memory_bytes or 1.0))
        for run in reading.runs for f in [ratio if run.source_key == source else 1.0]
    ]  # fmt: skip


def test_a_target_is_met_or_missed_on_its_own_runs(reading: Reading) -> None:
    target = Target(name="x", where=Where(source="sc21"), wanted=0.05, split="model")
    for ratio, missed in ((1.08, 0.03), (0.97, -0.02)):
        found = reached({"model": off(reading, "sc21", ratio)}, [target])[0]
        assert found.missed_by == pytest.approx(missed) and found.rows == 22
    assert reached({"model": off(reading, "mt-nlg", 2.0)}, [target])[0].missed_by == pytest.approx(-0.05)
    assert reached({"each": off(reading, "sc21", 1.0)}, [target])[0].missed_by is None
    assert reached({"model": []}, [target])[0].missed_by is None
    nobody = replace(target, wanted=None)
    assert reached({"model": off(reading, "sc21", 1.0)}, [nobody])[0].missed_by is None


def test_a_target_takes_runs_by_source_nodes_and_schedule(reading: Reading) -> None:
    flush = Where(source="zero-bubble", schedules=frozenset({"1f1b", "interleaved"}))
    kept = [run for run in reading.runs if flush.holds(run)]
    assert kept and {run.schedule for run in kept} <= {"1f1b", "interleaved"}
    assert {run.source_key for run in kept} == {"zero-bubble"}
    nodes = [[run for run in reading.runs if Where(source="zero-bubble", one_node=one).holds(run)]
             for one in (None, True, False)]  # fmt: skip
    assert len(nodes[0]) == len(nodes[1]) + len(nodes[2]) and all(run.gpus <= run.gpus_per_node for run in nodes[1])


def test_statistics_of_targets(reading: Reading) -> None:
    scored = off(reading, "korthikanti", 1.1)
    place = next(i for i, s in enumerate(scored) if s.run.source_key == "korthikanti")
    scored[place] = replace(scored[place], step_time_s=1.3 * (scored[place].run.step_time_s or 0))
    mean, largest = reached({"each": scored}, [t for t in TARGETS if t.where.source == "korthikanti"])
    assert largest.errors["each"] == pytest.approx(0.3) and mean.errors["each"] == pytest.approx((0.3 + 3 * 0.1) / 4)
    memory = next(t for t in TARGETS if t.measure == "memory" and t.where.source == "zero-bubble")
    known = [replace(s, step_time_s=2 * s.step_time_s) for s in off(reading, "zero-bubble", 0.9)]
    found = reached({"each": known}, [memory])[0]
    assert found.errors["each"] == pytest.approx(0.1)
    assert to_json([found])[0]["errors"] == dict(found.errors)


def test_every_figure_of_others_has_its_source() -> None:
    assert all(claim.source and claim.claim and claim.scope for claim in CLAIMS)
    assert all(target.by for target in TARGETS if target.wanted is not None)
    assert {target.split for target in TARGETS} <= set(WAYS)


@pytest.mark.slow
def test_the_page_says_what_the_board_has(board: Board) -> None:
    text = page(board)
    assert f"`{frameworks_digest()}`" in text and all(way.title in text for way in WAYS.values())
    assert all(f"figures/{name}.svg" in text for name in FIGURES) and all(claim.tool in text for claim in CLAIMS)
    said = ", ".join(f"{WAYS[key].title}: {100 * error:.1f} %" for key, error in board.as_printed.items())
    assert f"With the tables as they are printed the mean over sources is: {said}." in text and len(said) > 50
    table = targets_table(board.targets)
    for target in board.targets:
        line = next(line for line in table.splitlines() if f"| {target.target.name} |" in line)
        values = [target.errors[way] for way in ("packaged", "source_and_model", "model", "each")]
        if target.target.measure == "memory":
            values[1:] = [None] * 3  # no way refits memory
        assert f"| {' | '.join('-' if v is None else f'{100 * v:.1f} %' for v in values)} |" in line
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({line.count("|") for line in block.splitlines()}) == 1, "every row has all columns"
    assert markdown(("a", "b"), [("x", "1")]).splitlines()[1] == "|---|--:|"


@pytest.mark.slow
def test_the_page_has_regret_all_sources_and_measured_rows(board: Board) -> None:
    text = page(board)
    choice = board.summaries[UNSEEN]["choice"]
    said = [line for line in text.splitlines() if line.startswith(f"| {WAYS[UNSEEN].title} | {choice['groups']} |")]
    regret = ("best_picked", "mean_regret", "median_regret", "p90_regret", "chance")
    assert any(line.endswith(" | ".join(["", *(f"{100 * choice[n]:.1f} %" for n in regret)]) + " |") for line in said)
    assert choice["groups"] > board.summaries[UNSEEN]["rank"]["groups"]
    every = board.summaries[UNSEEN]["macro_all_sources"]
    assert f"| {WAYS[UNSEEN].title} | 4 | {100 * every['mape']:.1f} % |" in text and every["sources"] == 4
    assert "| ampere, dense |" in text


@pytest.mark.slow
def test_a_second_table_has_statistics_of_its_own(board: Board, reading: Reading) -> None:
    """A further source is fitted with the rest, and counted apart."""
    assert set(board.second[UNSEEN]["by_source"]) == {"llm.c"}
    assert set(board.summaries[UNSEEN]["by_source"]) == set(SOURCES)
    assert board.second[UNSEEN]["time"]["rows"] == 3
    assert board.summaries[UNSEEN]["time"]["rows"] == sum(run.time is not None for run in reading.runs)
    text = page(board)
    assert "## Second table" in text and f"| {WAYS[UNSEEN].title}, second table | 0 |" in text
    assert "## Second table" not in page(replace(board, second={}))


@pytest.mark.slow
def test_each_gpu_has_the_interval_that_its_sources_make(board: Board) -> None:
    score = board.scores[UNSEEN]
    moved = [replace(one, run=replace(one.run, device="h100-sxm")) if one.run.source_key == "sc21" else one
             for one in score.scored]  # fmt: skip
    changed = replace(score, scored=tuple(moved))
    both = {SEEN: changed.to_json(), UNSEEN: changed.to_json()}
    lines = gpu_table(replace(board, scores={UNSEEN: changed}, summaries=both)).splitlines()[2:]
    assert [line.split("|")[1].strip() for line in lines] == ["a100-sxm-80gb"], "22 rows are too few"
    *_, interval, sources, _ = (cell.strip() for cell in lines[0].strip("|").split("|"))
    own = [one for one in moved if one.run.device == "a100-sxm-80gb"]
    ends = coverage_interval(own)
    assert ends is not None and interval == " to ".join(f"{100 * end:.1f} %" for end in ends) and sources == "3"


@pytest.mark.slow
def test_ways_differ(board: Board) -> None:
    means = [board.summaries[key]["time"]["mape"] for key in WAYS]
    assert len(set(means)) == len(means) and all(m is not None and m < 1 for m in means)
    assert {board.summaries[key]["time"]["rows"] for key in WAYS} == {board.summaries[SEEN]["time"]["rows"]}


@pytest.mark.slow
def test_figures_are_small_and_the_same_again(board: Board, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    made = write_figures(board, tmp_path / "one")
    assert [path.stem for path in made] == list(FIGURES)
    for path, again in zip(made, write_figures(board, tmp_path / "two"), strict=True):
        assert path.read_bytes() == again.read_bytes() and 2e3 < path.stat().st_size < 3e5
        assert b"<svg" in path.read_bytes()


def test_the_committed_page_has_its_figures() -> None:
    text = (ROOT / "docs/scoreboard.md").read_text()
    for name in re.findall(r"\(figures/([\w.-]+)\)", text):
        assert (ROOT / "docs/figures" / name).stat().st_size < 3e5
