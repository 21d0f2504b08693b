"""The planner of shardings next to other searches and manual recipes, over a grid of models, clusters and meshes.

    python benchmarks/bench_planners.py                      computes what the journal lacks, prints the tables
    python benchmarks/bench_planners.py --write              also writes them to benchmarks/planners.md
    python benchmarks/bench_planners.py --cpu 2              CPU seconds of each search; default 1
    python benchmarks/bench_planners.py --only GPT 2x8       only cases whose name has all the words
    python benchmarks/bench_planners.py --journal FILE       where finished cases are kept; default build/planners.jsonl
    python benchmarks/bench_planners.py --seconds 600        starts no case after as many seconds of wall time

Each finished case is a line of the journal; a case is computed again when its line is taken out, or for another
``--cpu``. Ends with 1 if any search or recipe is better than the planner by more than rounding.
"""

from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

import argparse  # noqa: E402
import json  # noqa: E402
import statistics  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from collections import Counter  # noqa: E402
from collections.abc import Iterator, Mapping  # noqa: E402
from dataclasses import dataclass, replace  # noqa: E402
from functools import lru_cache  # noqa: E402
from math import inf, prod  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any, Final  # noqa: E402

import numpy as np  # noqa: E402

from machine import report  # noqa: E402
from planner_models import MODELS, ROOT  # noqa: E402
from steptime.captured.cost import Timer  # noqa: E402
from steptime.captured.record import capture  # noqa: E402
from steptime.errors import UserError  # noqa: E402
from steptime.hardware import load_cluster  # noqa: E402
from steptime.sharding.build import Built, built  # noqa: E402
from steptime.sharding.flow import Flow, flow_of  # noqa: E402
from steptime.sharding.ilp import least_memory  # noqa: E402
from steptime.sharding.mesh import mesh_on, parse_axes  # noqa: E402
from steptime.sharding.planner import memory_of  # noqa: E402
from steptime.sharding.recipes import RECIPES  # noqa: E402
from steptime.units import format_seconds  # noqa: E402
from steptime_lab.planners.comparison import METHODS, PLANNER_S, RECIPE_S, ROUND_S, Comparison, compared  # noqa: E402

PLACES: Final = (("dgx-h100", "1x8"), ("dgx-h100", "2x4"), ("dgx-a100", "2x8"), ("rtx4090-8", "4x8"))
"""Cluster and mesh: 8, 8, 16 and 32 devices; the last two over several nodes, the last over a slow network."""
MEMORIES: Final = ("free", "tight")
TIGHT: Final = 0.25
"""Share of the way from the least memory that any sharding has to that of the best without a limit."""
ADDED: Final = 24
"""Calls whose memory is looked at in addition, each time that the least memory is not that of all calls."""
ROUNDING: Final = 1e-6
SAME: Final = 1e-3
"""Share above the planner up to which a method counts as equal."""
Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the table."""

    model: str
    cluster: str
    mesh: str
    memory: str

    @property
    def name(self) -> str:
        """What the journal calls it, but for the seconds of the searches."""
        return f"{self.model} | {self.cluster} | {self.mesh} | {self.memory}"


CASES: Final = tuple(
    Case(model=model, cluster=cluster, mesh=mesh, memory=memory)
    for model in MODELS
    for cluster, mesh in PLACES
    for memory in MEMORIES
)


@lru_cache(maxsize=1)
def flow(model: str) -> Flow:
    """The captured step; the last model's is kept."""
    module, inputs, loss = MODELS[model]()
    return flow_of(capture(module, inputs, loss=loss, optimizer="adamw", training=True, target="cuda", fold=True))


@lru_cache(maxsize=1)
def problem(model: str, cluster: str, mesh: str) -> Built:
    """All costs on a mesh, without a limit; the last one's are kept."""
    machines = load_cluster(cluster)
    sizes = [int(each) for each in mesh.split("x")]
    axes = "x".join(str(each) for each in sizes if each > 1)
    return built(flow(model), mesh_on(machines, parse_axes(axes), prod(sizes)), Timer(device=machines.device))


def least_bytes(given: Built) -> float:
    """Most memory over all calls of the choice with the least peak; moments are added where it needs more."""
    looked: set[int] = set()
    while True:
        found = least_memory(given.problem(None), time_limit_s=2.0)
        assert found is not None, "there is always a legal choice"
        use = memory_of(given, np.array(found.choice))[1:]
        over = [call for call in np.argsort(-use)[:ADDED].tolist() if use[call] > found.peak_bytes * (1 + 1e-6)]
        if looked.issuperset(over):
            return float(use.max())
        looked.update(over)
        given = given.with_moments(over)


def solved(case: Case, free: Record | None, cpu_s: float) -> dict[str, Any]:
    """Runs a case. A tight one needs the record of the free one, whose optimum says what is tight."""
    given = problem(case.model, case.cluster, case.mesh)
    began = time.process_time()
    if free is not None:
        low, high = least_bytes(given), float(free["peak_bytes"])
        given = replace(given, limit_bytes=low + TIGHT * (high - low))
    try:
        found = compared(given, METHODS, cpu_s=cpu_s * sum(name not in RECIPES for name in METHODS))
    except UserError as error:
        return {"name": case.name, "cpu": cpu_s, "error": str(error)}
    return {
        "name": case.name,
        "cpu": cpu_s,
        **recorded(found),
        "least_bytes": None if free is None else low,
        "spent_s": time.process_time() - began,
    }


def recorded(found: Comparison) -> dict[str, Any]:
    """What the tables need of a comparison."""
    return {
        "step_s": found.plan.step_s,
        "gap": found.plan.gap,
        "peak_bytes": float(found.plan.memory_bytes[1:].max()),
        "limit_bytes": None if found.limit_bytes == inf else found.limit_bytes,
        "planner_cpu_s": found.entries[0].cpu_s,
        "methods": {each.name: each.step_s for each in found.entries[1:]},
    }


class Journal:
    """Finished cases, one a line."""

    def __init__(self, path: Path, cpu_s: float) -> None:
        self.path, self.cpu_s = path, cpu_s
        lines = path.read_text().splitlines() if path.exists() else []
        self.records = {each["name"]: each for each in map(json.loads, lines) if each["cpu"] == cpu_s}

    def record(self, case: Case) -> Record:
        """The record of a case, computed if it is not there; that of a tight case asks for the free one first."""
        if case.name not in self.records:
            free = None if case.memory == "free" else self.record(replace(case, memory="free"))
            self.records[case.name] = found = solved(case, free, self.cpu_s)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as lines:
                lines.write(json.dumps(found) + "\n")
        return self.records[case.name]


def others(record: Record) -> dict[str, float]:
    """Seconds of each method that found something, over those of the planner."""
    return {name: step_s / record["step_s"] for name, step_s in record["methods"].items() if step_s is not None}


def line(case: Case, record: Record) -> str:
    """A row of the first table."""
    if "error" in record:
        return f"| {case.name} | - | - | - | {record['error']} | - | - |"
    name, ratio = min(others(record).items(), key=lambda each: each[1])
    peak, step = f"{record['peak_bytes'] / 1e9:.2f}", format_seconds(record["step_s"])
    return (
        f"| {case.name} | {peak} | {step} | {record['gap']:.2%} | "
        f"{name} | {ratio - 1:+.2%} | {record['planner_cpu_s']:.1f} |"
    )


def methods(records: list[Record]) -> Iterator[str]:
    """The second table: what became of each method."""
    for method in METHODS:
        ratios = [others(each)[method] for each in records if method in others(each)]
        if not ratios:
            yield f"| {method} | 0 | 0 | - | - |"
            continue
        same = sum(ratio <= 1 + SAME for ratio in ratios)
        yield f"| {method} | {len(ratios)} | {same} | {statistics.median(ratios) - 1:+.2%} | {max(ratios) - 1:+.2%} |"


def chosen(words: list[str]) -> tuple[Case, ...]:
    """Cases whose name has all the words.

    Raises:
        UserError: there is none.
    """
    found = tuple(case for case in CASES if all(word.lower() in case.name.lower() for word in words))
    if not found:
        raise UserError(f"no case has {' and '.join(map(repr, words))}", hint=f"models: {', '.join(MODELS)}")
    return found


def main() -> int:
    """Runs what is missing and reports."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--cpu", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=inf)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--journal", type=Path, default=ROOT / "build" / "planners.jsonl")
    given = parser.parse_args()
    journal, until = Journal(given.journal, given.cpu), time.monotonic() + given.seconds
    lines, records = [], []
    cases = chosen(given.only)
    for number, case in enumerate(cases):
        if time.monotonic() > until and case.name not in journal.records:
            continue
        records.append(journal.record(case))
        lines.append(line(case, records[-1]))
        print(f"{number + 1}/{len(cases)} {lines[-1]}", file=sys.stderr, flush=True)
    compared_ = [each for each in records if "error" not in each]
    lost = [each["name"] for each in compared_ if min(others(each).values()) < 1 - ROUNDING]
    table = [
        "| model | cluster | mesh | memory | GB | planner | gap | best other | its time | planner CPU s |",
        "|---|---|---|---|--:|--:|--:|---|--:|--:|",
        *lines,
        "",
        "| method | found a plan that fits | as good | median | worst |",
        "|---|--:|--:|--:|--:|",
        *methods(compared_),
    ]
    report("planners", "Planner, searches and recipes", "\n".join(table), notes(cases, compared_, lost, given.cpu))
    return 1 if lost else 0


def notes(cases: tuple[Case, ...], records: list[Record], lost: list[str], cpu_s: float) -> str:
    """The summary line, and what the tables show."""
    best = Counter(min(others(each), key=others(each).__getitem__) for each in records)
    tight = [each for each in records if each["limit_bytes"] is not None]
    bound = sum(each["peak_bytes"] <= each["limit_bytes"] * (1 + 1e-6) for each in tight)
    proved = sum(each["gap"] <= ROUNDING for each in records)
    lost_ = f": {'; '.join(lost)}" if lost else ""
    return (
        f"{len(records)} cases compared of {len(cases)}; in {len(lost)} of them another method beats the planner by "
        f"more than {ROUNDING:g}{lost_}. The planner's plan is proved the best in {proved}, the largest gap is "
        f"{max((each['gap'] for each in records), default=0):.2%}; {bound} of {len(tight)} tight plans keep to the "
        f"limit. Best others: {', '.join(f'{name} {count}' for name, count in best.most_common())}.\n\n"
        f"Each search has {cpu_s:g} CPU s and what those before it leave, a recipe {RECIPE_S:g} CPU s for what it "
        f"leaves open, the planner {PLANNER_S:g} s and at least {ROUND_S:g} s a round "
        "(wall time; the last column is what it took): where it is slow, times are not equal. Nothing overlaps. "
        f"GB: of a device at the peak. Tight: {TIGHT:.0%} of the "
        "way from the least memory that any sharding has to that of the best without a limit. Gap: of the planner to "
        "the proved bound. Its time: of the best of all others, relative to the planner's. As good: at most "
        f"{SAME:.1%} above the planner. Models have two blocks where blocks are equal, since equal blocks have the "
        "same shardings. "
        f"All cases together took {sum(each['spent_s'] for each in records) / 60:.0f} CPU min without captures.\n"
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(str(error))
