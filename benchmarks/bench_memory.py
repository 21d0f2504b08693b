"""Predicted against measured peak memory: `python benchmarks/bench_memory.py [--write]`.

Prints the table of ``benchmarks/memory.md``. ``--write`` fits the constants between the definitions of memory anew.
"""

from __future__ import annotations

import argparse
import datetime
import math
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from memory_fit import RELEASED, MemoryPoint, as_toml, errors_of, fitted_constants, reliability, unseen_deviation
from steptime.estimate.memory_definitions import FILE, UNSTATED, MemoryConstants, communicators, memory_constants
from steptime.measure.runs.canonical import catalogue_device
from steptime.measure.runs.reading import read_runs
from steptime.measure.runs.run import MeasuredRun
from steptime.measure.runs.samples import Setting, definition_of, is_stated, settings_of
from steptime.measure.toml_file import with_table, without_table
from steptime.plan.framework import NORMAL_95
from steptime.plan.framework_file import FILES
from steptime.plan.memory_profile import PLAIN
from steptime_lab.data_root import require_data

TABLES = ("measured_training.csv.gz", "measured_training_2.csv.gz")
CONTEXT_BYTES = 1.5e9
SOURCE = "peak memory of published training runs; see benchmarks/memory.md"
NOT_MODELLED = ("zb-1p", "zb-2p")


def settled(run: MeasuredRun) -> bool:
    """Whether a row leaves at most two settings open."""
    return len(settings_of(run)) <= 2


def point_of(run: MeasuredRun, changed: Callable[[Setting], Setting] = lambda s: s) -> MemoryPoint | None:
    """The run with the geometric mean of what its settings allocate; None where its schedule is not modelled.

    Args:
        run: with a measured peak.
        changed: what to make of each setting before it is evaluated.
    """
    if run.memory is None or run.schedule in NOT_MODELLED:
        return None
    found = [(s.weight, s, changed(s).evaluate()) for s in settings_of(run)]
    most = catalogue_device(run.device).memory_bytes
    allocated = math.exp(sum(w * math.log(min(float(e.peak_bytes), most)) for w, _, e in found))
    first = found[0][1]
    return MemoryPoint(
        source=run.source_key, framework=first.job.memory.name, definition=definition_of(run),
        allocated_bytes=allocated, communicators=float(communicators(first.plans)),
        measured_bytes=run.memory.memory_bytes, stated=is_stated(run),
    )  # fmt: skip


def pairs_of(runs: list[MeasuredRun]) -> list[tuple[float, float]]:
    """Distinct pairs of allocated and reserved memory (bytes) that notes state beside the measured one."""
    found = set()
    for run in runs:
        text = re.search(r"reserved ([\d.]+) GiB", run.notes)
        if text and run.memory is not None and definition_of(run) == "allocated":
            found.add((run.memory.memory_bytes, float(text.group(1)) * 2.0**30))
    return sorted(found)


def left_out(runs: list[MeasuredRun]) -> dict[str, MemoryConstants]:
    """Constants by source, fitted without its rows, to runs whose settings the row states."""
    known = [(run, point) for run in runs if settled(run) and (point := point_of(run)) is not None]
    found, all_pairs = {}, pairs_of([run for run, _ in known])
    for source in {run.source_key for run in runs}:
        rest = [(run, point) for run, point in known if run.source_key != source]
        pairs = pairs_of([run for run, _ in rest]) or all_pairs
        found[source] = fitted_constants([point for _, point in rest], pairs, CONTEXT_BYTES, SOURCE)
    return found


def spread_of(point: MemoryPoint, constants: MemoryConstants) -> float:
    """Standard deviation of the logarithm of a point."""
    own = constants.spread(point.definition, point.framework)
    return own if point.stated else math.hypot(own, constants.deviation[UNSTATED])


def print_sources(points: list[MemoryPoint], constants: MemoryConstants, without: dict[str, MemoryConstants]) -> None:
    """Prints the errors of each source, with the constants of the package and with those fitted without it."""
    groups: dict[tuple[str, str], list[MemoryPoint]] = defaultdict(list)
    for point in points:
        groups[point.source, point.definition].append(point)
    print("| source | definition | rows | mean error | bias | fitted without it | in band |")
    print("|---|---|---|---|---|---|---|")
    for (source, definition), own in sorted(groups.items()):
        error, unseen = (np.exp(-errors_of(own, each)) - 1 for each in (constants, without[source]))
        spread = np.array([spread_of(point, without[source]) for point in own])
        inside = np.mean(np.abs(errors_of(own, without[source])) <= NORMAL_95 * spread)
        print(f"| {source} | {definition} | {len(own)} | {np.mean(np.abs(error)):.2%} | {np.mean(error):+.2%} "
              f"| {np.mean(np.abs(unseen)):.2%} | {inside:.0%} |")  # fmt: skip


def main() -> None:
    """Prints the errors by source, and the reliability of the spread."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="fit the constants anew and write them")
    runs = [run for name in TABLES for run in read_runs(require_data(name)).runs if run.memory is not None]
    points = [point for run in runs if (point := point_of(run)) is not None]
    if parser.parse_args().write:
        # The spread is that of runs whose settings the row states; what is guessed has another.
        known = [p for run in runs if settled(run) and (p := point_of(run)) is not None]
        constants = fitted_constants(known, pairs_of(runs), CONTEXT_BYTES, SOURCE)
        constants = replace(constants, released=RELEASED, unseen=unseen_deviation(known, left_out(runs)))
        text = as_toml(constants, datetime.date.today().isoformat(), len(known))
        (Path(__file__).parents[1] / "src" / "steptime" / "estimate" / FILE).write_text(text)
        seen = {p.framework for p in known} - {PLAIN.name}
        for path in FILES.glob("*.toml"):
            lines = [f"{name} = {value:.5g}" for name, value in constants.own.get(path.stem, {}).items()]
            before = path.read_text(encoding="utf-8")
            after = with_table(before, "fitted_memory", lines, "written by `benchmarks/bench_memory.py --write`")
            path.write_text(after if path.stem in seen else without_table(before, "fitted_memory"))
        memory_constants.cache_clear()
    constants = memory_constants()
    print_sources(points, constants, left_out(runs))
    known = [p for p in points if p.source not in ("colossalai", "torchtune", "mlperf")]
    print("\n| nominal | " + " | ".join(f"{q:.0%}" for q in reliability(known, constants)) + " |")
    print("|---|" + "---|" * 5)
    print("| observed | " + " | ".join(f"{share:.0%}" for share in reliability(known, constants).values()) + " |")


if __name__ == "__main__":
    main()
