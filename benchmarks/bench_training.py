"""How many plausible settings of measured training runs are evaluated a second; their errors are in docs/scoreboard.md.

python benchmarks/bench_training.py            prints the table
python benchmarks/bench_training.py --write    also writes it to benchmarks/training.md
"""

from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

import time  # noqa: E402

from machine import report  # noqa: E402
from steptime.measure.runs.reading import read_runs  # noqa: E402
from steptime.measure.runs.samples import modelled  # noqa: E402
from steptime_lab.data_root import require_data  # noqa: E402


def main() -> None:
    reading = read_runs(require_data("measured_training.csv.gz"))
    start_s = time.process_time()
    found = modelled(reading.runs)
    cpu_s = time.process_time() - start_s
    settings = len(found.fit.samples)
    table = (
        "| runs | plausible settings | CPU s | settings per CPU s |\n|---:|---:|---:|---:|\n"
        f"| {len(found.runs):,} | {settings:,} | {cpu_s:.1f} | {settings / cpu_s:.0f} |"
    )
    notes = (
        "Every setting that agrees with what a row states is evaluated once: step time and peak memory, before any\n"
        "framework. CPU seconds are `time.process_time`, one thread. Errors of the predictions: docs/scoreboard.md.\n"
    )
    report("training", "Measured training runs", table, notes)


if __name__ == "__main__":
    main()
