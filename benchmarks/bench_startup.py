"""CPU seconds until steptime answers: the import, the help, a plan and an estimate from a cold start.

python benchmarks/bench_startup.py                    prints the table
python benchmarks/bench_startup.py --write            also writes it to benchmarks/startup.md
python benchmarks/bench_startup.py --before FOLDER    also measures another checkout, in alternating runs
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from machine import report
from pairs import before, change, checkouts, heads

RUNS = 15
STEPTIME = (sys.executable, "-c", "from steptime.__main__ import run; run()")
JOB = ("gpt3_1T", "--cluster", "dgx-b200", "--gpus", "2048", "--global-batch", "4096")
COMMANDS: Mapping[str, Sequence[str]] = {
    "python -c pass": (sys.executable, "-c", "pass"),
    "python -c 'import numpy'": (sys.executable, "-c", "import numpy"),
    "python -c 'import steptime'": (sys.executable, "-c", "import steptime"),
    "steptime --help": (*STEPTIME, "--help"),
    f"steptime plan {' '.join(JOB)}": (*STEPTIME, "plan", *JOB),
    "steptime estimate run.toml": (*STEPTIME, "estimate", "run.toml"),
}
RUN = """\
model = "llama3-70b"
cluster = "dgx-h100"
gpus = 512
global_batch = 1024

[plan]
tp = 8
pp = 4
"""


def cpu_s(command: Sequence[str], folder: Path, checkout: Path) -> float:
    """User and system seconds of a child, with the modules compiled as those of an installed package are."""
    start = resource.getrusage(resource.RUSAGE_CHILDREN)
    kept = {"PYTHONPYCACHEPREFIX": str(folder / "pycache"), "PYTHONDONTWRITEBYTECODE": ""}
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"} | kept
    environment["PYTHONPATH"] = str(checkout / "src")
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment, cwd=folder)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime - start.ru_utime) + (after.ru_stime - start.ru_stime)


def measured(each: Sequence[Path]) -> dict[str, list[list[float]]]:
    """Command -> seconds of its runs, by checkout; one run of each checkout after the other."""
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "run.toml").write_text(RUN)
        for words, command in COMMANDS.items():
            runs = [[cpu_s(command, folder, checkout) for checkout in each] for _ in range(RUNS + 1)][1:]
            found[words] = [list(times) for times in zip(*runs, strict=True)]
    return found


def main() -> None:
    each = checkouts()
    names, rules = heads(each)
    lines = [f"| command | CPU s | range |{names}", f"|---|---:|---:|{rules}"]
    for name, (now, *then) in measured(each).items():
        line = f"| `{name}` | {median(now):.2f} | {min(now):.2f} to {max(now):.2f} |"
        lines.append(line + "".join(f" {median(t):.2f} | {change(now, t)} |" for t in then))
    notes = (
        f"User and system seconds of a fresh process, one thread, median of {RUNS} runs after one that fills the\n"
        "file cache and compiles the modules; the catalogue is compiled (`scripts/catalogue`). The bare interpreter\n"
        "and the import of NumPy are the floor.\n" + before(each)
    )
    report("startup", "Starting up", "\n".join(lines), notes)


if __name__ == "__main__":
    main()
