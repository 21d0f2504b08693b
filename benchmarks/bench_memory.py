"""Predicted against measured peak memory: `python benchmarks/bench_memory.py [--write]`.

Prints the table of ``benchmarks/memory.md``. ``--write`` fits the constants between the definitions of memory anew.
"""

from __future__ import annotations

import argparse
import datetime
import math
import re
from collections import defaultdict
from pathlib import Path

import numpy as np

from steptime.calibrate.memory_fit import MemoryPoint, as_toml, errors_of, fitted_constants, reliability
from steptime.estimate.memory_definitions import FILE, communicators, memory_constants
from steptime.study.data_root import require_data
from steptime.study.measured import MeasuredRun, read_runs
from steptime.study.measured.engine import settings_of
from steptime.study.measured.memory import definition_of, is_stated

TABLES = ("measured_training.csv.gz", "measured_training_2.csv.gz")
CONTEXT_BYTES = 1.5e9
SOURCE = "peak memory of published training runs; see benchmarks/memory.md"
ZERO_BUBBLE = ("zb-1p", "zb-2p", "zb-v", "dualpipe")


def point_of(run: MeasuredRun) -> MemoryPoint | None:
    """The run with the geometric mean of what its settings allocate; None where its schedule is not modelled."""
    if run.memory is None or run.schedule in ZERO_BUBBLE:
        return None
    found = [(s.weight, s, s.evaluate()) for s in settings_of(run)]
    allocated = math.exp(sum(w * math.log(float(e.peak_bytes)) for w, _, e in found))
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


def main() -> None:
    """Prints the errors by source, and the reliability of the spread."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="fit the constants anew and write them")
    runs = [run for name in TABLES for run in read_runs(require_data(name)).runs if run.memory is not None]
    points = [point for run in runs if (point := point_of(run)) is not None]
    if parser.parse_args().write:
        # The spread is that of runs whose settings the row states; what is guessed has another.
        known = [p for run in runs if len(settings_of(run)) <= 2 and (p := point_of(run)) is not None]
        constants = fitted_constants(known, pairs_of(runs), CONTEXT_BYTES, SOURCE)
        text = as_toml(constants, datetime.date.today().isoformat(), len(known))
        (Path(__file__).parents[1] / "src" / "steptime" / "estimate" / FILE).write_text(text)
        memory_constants.cache_clear()
    constants = memory_constants()
    groups: dict[tuple[str, str], list[MemoryPoint]] = defaultdict(list)
    for point in points:
        groups[point.source, point.definition].append(point)
    print("| source | definition | rows | mean error | bias |\n|---|---|---|---|---|")
    for (source, definition), own in sorted(groups.items()):
        error = np.exp(-errors_of(own, constants)) - 1
        print(f"| {source} | {definition} | {len(own)} | {np.mean(np.abs(error)):.2%} | {np.mean(error):+.2%} |")
    known = [p for p in points if p.source not in ("colossalai", "torchtune", "mlperf")]
    print("\n| nominal | " + " | ".join(f"{q:.0%}" for q in reliability(known, constants)) + " |")
    print("|---|" + "---|" * 5)
    print("| observed | " + " | ".join(f"{share:.0%}" for share in reliability(known, constants).values()) + " |")


if __name__ == "__main__":
    main()
