"""Predictions of measured training runs: their errors, and how many a second.

python benchmarks/bench_training.py            prints the tables (docs/scoreboard.md has more of them)
python benchmarks/bench_training.py --write    also writes them to benchmarks/training.md
"""

from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

import time  # noqa: E402

from machine import report  # noqa: E402

from steptime.study.data_root import require_data  # noqa: E402
from steptime.study.measured import read_runs  # noqa: E402
from steptime.study.measured.samples import modelled  # noqa: E402
from steptime.surface.report.scoreboard import group_table, targets_table, ways_table  # noqa: E402
from steptime.surface.scoreboard import board_of  # noqa: E402


def main() -> None:
    reading = read_runs(require_data("measured_training.csv.gz"))
    board = board_of(reading)
    start_s = time.process_time()
    found = modelled(reading.runs)
    cpu_s = time.process_time() - start_s
    table = "\n\n".join((ways_table(board), group_table(board, "by_source", "source"), targets_table(board.targets)))
    notes = (
        f"{len(found.runs)} runs with {len(found.fit.samples)} plausible settings are evaluated in {cpu_s:.1f} CPU s\n"
        f"({len(found.fit.samples) / cpu_s:.0f} a second, one thread). Columns as in docs/scoreboard.md.\n"
    )
    report("training", "Measured training runs", table, notes)


if __name__ == "__main__":
    main()
