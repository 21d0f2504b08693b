"""Studies: 10,000 points killed at random moments against one uninterrupted run; the paper's nine systems.

python benchmarks/bench_study.py            prints the tables
python benchmarks/bench_study.py --write    also writes them to benchmarks/study.md
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from machine import report
from steptime import study
from steptime.study.file import Study

ROOT = Path(__file__).resolve().parents[1]
DRIVER = ROOT / "tests/study_driver.py"
KILLS, SEED = 20, 1
TABLES = ("points", "plans", "front", "terms")
POINTS = """
what = "estimate"
[job]
model = "gpt2"
cluster = "dgx-h100"
mode = "published"
gpus = [8, 16, 32, 64]
global_batch = { from = 512, to = 256000, step = 512 }
[job.plan]
micro_batch = [1, 2, 4, 8, 16]
"""
#: arXiv 2410.00273, plots_overall_perf: days of gpt3_1T (1e12 tokens) on 4,096 devices, strategy 1d.
PRINTED = {"a100": (97.96, 86.88, 85.47), "h200": (30.95, 30.15, 29.22), "b200": (12.88, 12.47, 12.21)}


def cpu_s() -> float:
    """CPU seconds of this process and of those that it waited for."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(sum(resource.getrusage(kind)[:2]) for kind in kinds)


def tables(found: Study, store: Path) -> list[list[dict[str, Any]]]:
    """All rows that a store has of a study."""
    results = study.results(found, store)
    assert not results.missing and not results.damaged
    return [results.rows(name) for name in TABLES]


def killed(folder: Path) -> Iterator[str]:
    """An uninterrupted run, and one that is killed again and again."""
    (folder / "points.toml").write_text(POINTS)
    found = study.read_study(folder / "points.toml")
    before, wall = cpu_s(), time.monotonic()
    study.run(found, folder / "whole", workers=2)
    whole_s, whole_wall = cpu_s() - before, time.monotonic() - wall
    longest = 2 * 0.8 * whole_wall / KILLS  # so that most of it is done when the last run is killed
    command = [sys.executable, DRIVER, folder / "points.toml", folder / "killed", "random", SEED, KILLS, longest]
    done = subprocess.run(
        [str(part) for part in command], check=True, env={**os.environ}, capture_output=True, text=True
    )
    equal = "yes" if tables(found, folder / "killed") == tables(found, folder / "whole") else "NO"
    *kept, last = done.stdout.split()
    size, other = (sum(path.stat().st_size for path in (folder / of).rglob("*")) / 2**20 for of in ("whole", "killed"))
    yield "| run of 10,000 points, 2 workers | store | rows equal, bit by bit |"
    yield "|---|---:|---|"
    yield f"| uninterrupted: {whole_s:.0f} s CPU | {size:.1f} MiB | |"
    yield f"| {KILLS} SIGKILLs at random moments, then finished | {other:.1f} MiB | {equal} |"
    yield ""
    yield f"Points that the store had after each SIGKILL: {', '.join(kept)}; the last run computed {last}."


def nine_systems(folder: Path) -> Iterator[str]:
    """The study of the paper: nine systems, two models, three strategies, 13 numbers of devices."""
    found = study.read_study(ROOT / "studies/strong-scaling.toml")
    before = cpu_s()
    outcome = study.run(found, folder / "nine", workers=2)
    took_s = cpu_s() - before
    before = cpu_s()
    again = study.run(found, folder / "nine", workers=2)
    results = study.results(found, folder / "nine")
    (count,) = results.query("select sum(candidates) as n, sum(feasible_candidates) as f from points")
    rows = results.query("select cluster, training_days from plans where gpus = 4096 and model = 'gpt3_1T' "
                         "and asked_strategy = '1d' and rank = 1")  # fmt: skip
    days = {row["cluster"]: f"{row['training_days']:.2f}" for row in rows}
    pairs = [(f"published-{d}-nvs{n}", v) for d, of in PRINTED.items() for n, v in zip((4, 8, 64), of, strict=True)]
    printed = {system: f"{value:.2f}" for system, value in pairs}
    yield f"{outcome.points} searches over {count['n']:,.0f} candidates, {count['f']:,.0f} feasible, terms kept: "
    yield f"{took_s:.1f} s CPU on two workers. A second run computes {again.computed} in {cpu_s() - before:.1f} s."
    yield ""
    yield "| gpt3_1T, 4,096 devices, 1e12 tokens: days | NVLink domain 4 | 8 | 64 | as printed |"
    yield "|---|---:|---:|---:|---|"
    for device in PRINTED:
        names = [f"published-{device}-nvs{n}" for n in (4, 8, 64)]
        same = "yes" if all(days[name] == printed[name] for name in names) else "NO"
        yield f"| {device} | {' | '.join(days[name] for name in names)} | {same} |"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        nine = "\n".join(nine_systems(Path(name)))
        report("study", "Studies", "\n".join(killed(Path(name))), f"{nine}\n")
