"""CPU seconds until steptime answers: the import, the help, a plan from a cold start.

python benchmarks/bench_startup.py            prints the table
python benchmarks/bench_startup.py --write    also writes it to benchmarks/startup.md
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from statistics import median

from machine import report

RUNS = 7
STEPTIME = (sys.executable, "-c", "from steptime.__main__ import run; run()")
JOB = ("gpt3_1T", "--cluster", "dgx-b200", "--gpus", "2048", "--global-batch", "4096")
COMMANDS: Mapping[str, Sequence[str]] = {
    "python -c pass": (sys.executable, "-c", "pass"),
    "python -c 'import steptime'": (sys.executable, "-c", "import steptime"),
    "steptime --help": (*STEPTIME, "--help"),
    f"steptime plan {' '.join(JOB)}": (*STEPTIME, "plan", *JOB),
}


def cpu_s(command: Sequence[str]) -> float:
    """User and system seconds of a child."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime)


def main() -> None:
    lines = ["| command | CPU s | range |", "|---|---:|---:|"]
    for name, command in COMMANDS.items():
        cpu_s(command)
        times = [cpu_s(command) for _ in range(RUNS)]
        lines.append(f"| `{name}` | {median(times):.2f} | {min(times):.2f} to {max(times):.2f} |")
    notes = (
        f"User and system seconds of a fresh process, one thread, median of {RUNS} runs after one that fills the\n"
        "file cache. The bare interpreter is the floor.\n"
    )
    report("startup", "Starting up", "\n".join(lines), notes)


if __name__ == "__main__":
    main()
