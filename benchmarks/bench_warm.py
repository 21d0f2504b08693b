"""Plans ranked again in one process: another batch, another link; many jobs; growth with devices and layers; a profile.

Every job is ranked after others, and equal to the same job ranked alone.

python benchmarks/bench_warm.py                    prints the tables
python benchmarks/bench_warm.py --write            also writes them to benchmarks/warm.md
python benchmarks/bench_warm.py --before FOLDER    the first table also with another checkout, in alternating runs
"""

from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

import itertools  # noqa: E402
import json  # noqa: E402
import random  # noqa: E402
import resource  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from collections.abc import Iterator, Sequence  # noqa: E402
from pathlib import Path  # noqa: E402
from statistics import median  # noqa: E402
from typing import Any  # noqa: E402

from machine import every_candidate_costed, report  # noqa: E402
from pairs import alternating, asked, before, change, checkouts, heads  # noqa: E402
from steptime.api import plan  # noqa: E402
from steptime.study.evaluate import solve  # noqa: E402
from steptime.study.points import Point  # noqa: E402

SLIDERS = (("llama3.1-70b", 512, (1024, 512, 2048)), ("deepseek-v3", 2048, (4096, 2048, 8192)))
LINKS = ("45 GB/s", "40 GB/s", "35 GB/s")
RUNS, PROCESSES = 5, 3
EXACT, SEED = 500, 7
MODELS = ("llama3.1-8b", "llama2-13b", "llama3.1-70b", "llama3.1-405b", "gpt3-175b", "gpt3_1T", "mixtral-8x7b",
          "mixtral-8x22b", "qwen3-30b-a3b", "deepseek-v3")  # fmt: skip
CLUSTERS = ("dgx-a100-80gb", "dgx-h100", "dgx-h200", "dgx-b200", "tpu-v5p-pod")
COUNTS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
BATCHES = tuple(128 * 2**k for k in range(10)) + tuple(192 * 2**k for k in range(10))
SAMPLE, ALL, CORES = 300, 10_000, 2


def cpu_of(**job: Any) -> tuple[float, Any]:
    """CPU seconds of a search."""
    started = time.process_time()
    result = plan(**job)
    return time.process_time() - started, result


def sliders(each: Sequence[Path]) -> Iterator[str]:
    """The same plan again with another batch or another link, in each checkout."""
    names, rules = heads(each)
    yield f"| model, devices | what changes | candidates | costed before | CPU ms | range |{names}"
    yield f"|---|---|---:|---|---:|---:|{rules}"
    for model, gpus, _ in SLIDERS:
        found = alternating(__file__, model, each, PROCESSES)
        for name, (seen, candidates, _) in found[0][0].items():
            times = [[median(run[name][2]) for run in one] for one in found]
            every = [time for run in found[0] for time in run[name][2]]
            changes = "".join(f" {median(then):.0f} | {change(times[0], then)} |" for then in times[1:])
            yield (
                f"| {model}, {gpus:,} | {name} | {candidates:,} | {seen} | {median(times[0]):.0f} | "
                f"{min(every):.0f} to {max(every):.0f} |{changes}"
            )


def slid(model: str) -> dict[str, tuple[str, int, list[float]]]:
    """What changes -> what was costed before, candidates, milliseconds of some searches."""
    ((gpus, batches),) = ((gpus, batches) for name, gpus, batches in SLIDERS if name == model)
    job = {"model": model, "cluster": "dgx-h100", "gpus": gpus}
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, others, changes in (
            ("nothing before", [], [{"global_batch": batches[0]}] * RUNS),
            ("batch, back and forth", [{"global_batch": b} for b in batches],
             [{"global_batch": b} for b in batches * 2][:RUNS]),
            ("batch, never seen", [{"global_batch": batches[0]}], [{"global_batch": b} for b in batches[1:]]),
            ("network, never seen", [{"global_batch": batches[0]}],
             [{"global_batch": batches[0], "cluster": linked(Path(folder), speed)} for speed in LINKS]),
        ):  # fmt: skip
            times: list[float] = []
            for change in changes:
                if not times or name != "batch, back and forth":
                    for other in others:
                        plan(**{**job, **other})
                cpu_s, result = cpu_of(**{**job, **change})
                times.append(1e3 * cpu_s)
            found[name] = f"{len(others)} jobs" if others else "no", result.candidates, times
    return found


def linked(folder: Path, speed: str) -> str:
    """A cluster with another network."""
    path = folder / f"{speed.split()[0]}.toml"
    path.write_text(f'base = "dgx-h100"\n[levels.network]\nbandwidth = "{speed}"\n')
    return str(path)


def exact() -> str:
    """Random jobs after one another against each alone, with every candidate costed."""
    draw = random.Random(SEED)
    jobs = [
        {"model": draw.choice(MODELS[:7]), "cluster": draw.choice(CLUSTERS), "gpus": draw.choice(COUNTS[:6]),
         "global_batch": draw.choice(BATCHES), "top": 5} for _ in range(EXACT)
    ]  # fmt: skip

    def found(job: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in plan(**job).to_json().items() if name != "stop"}

    warm, equal = [found(job) for job in jobs], 0
    with every_candidate_costed():
        for job, one in zip(jobs, warm, strict=True):
            equal += found(job) == one
    return f"{equal} of {EXACT} random jobs, ranked one after the other, equal the exhaustive search of each alone."


def many() -> Iterator[str]:
    """A sample of 10,000 jobs, in the order of a study: batch changes first."""
    every = list(itertools.product(MODELS, CLUSTERS, COUNTS, BATCHES))
    assert len(every) == ALL
    blocks = random.Random(SEED).sample(range(0, ALL, len(BATCHES)), SAMPLE // len(BATCHES))
    points = [
        Point(what="plan", options={"model": m, "cluster": c, "gpus": g, "global_batch": b})
        for start in sorted(blocks)
        for m, c, g, b in every[start : start + len(BATCHES)]
    ]
    started = time.process_time()
    rows = solve(points)
    cpu_s = time.process_time() - started
    share = cpu_s / len(points)
    candidates = sum(row.get("candidates") or 0 for row in rows)
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    yield (
        f"{len(points)} of the {ALL:,} jobs ({len(MODELS)} models, {len(CLUSTERS)} clusters, {len(COUNTS)} numbers of "
        f"devices, {len(BATCHES)} batches), {candidates:,} candidates: {cpu_s:.1f} s of CPU, "
        f"{1e3 * share:.0f} ms a job."
    )
    minutes = share * ALL / CORES / 60
    yield f"All on {CORES} cores, if they are as these: {minutes:.0f} minutes. Peak memory: {rss:.2f} GiB."


def growth() -> Iterator[str]:
    """CPU seconds against devices and layers."""
    yield "| model | devices | candidates | CPU s | microseconds a candidate |"
    yield "|---|---:|---:|---:|---:|"
    with tempfile.TemporaryDirectory() as folder:
        for model, gpus in [("llama3.1-70b", 4**k) for k in range(4, 11)] + [
            (layered(Path(folder), n), 4096) for n in (40, 80, 160, 320, 640)
        ]:
            cpu_s, result = cpu_of(model=model, cluster="dgx-h100", gpus=gpus, global_batch=4 * gpus)
            name = Path(model).stem if model.endswith(".toml") else model
            yield (
                f"| {name} | {gpus:,} | {result.candidates:,} | {cpu_s:.2f} | {1e6 * cpu_s / result.candidates:.2f} |"
            )


def layered(folder: Path, layers: int) -> str:
    """A model as wide as Llama-70B with other layers."""
    path = folder / f"{layers} layers.toml"
    path.write_text(
        f"layers = {layers}\nhidden = 8192\nheads = 64\nkv_heads = 8\nffn_hidden = 28672\ngated_mlp = true\n"
        'norm = "rmsnorm"\nvocab = 128256\nseq_len = 8192\n'
    )
    return str(path)


def rooms() -> Iterator[str]:
    """Where a first search spends its time, by room of the package."""
    import cProfile
    import pstats

    yield "| room | llama3.1-70b, 512 devices | deepseek-v3, 2,048 devices |"
    yield "|---|---:|---:|"
    shares: list[dict[str, float]] = []
    for model, gpus, batches in SLIDERS:
        profile = cProfile.Profile()
        profile.runcall(plan, model=model, cluster="dgx-h100", gpus=gpus, global_batch=batches[0])
        by_room: dict[str, float] = {}
        for (file, _, _), (_, _, own_s, *_) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
            _, found, rest = file.rpartition("/steptime/")
            room = rest.split("/")[0] if found else "numpy and Python"
            by_room[room] = by_room.get(room, 0.0) + own_s
        total = sum(by_room.values())
        shares.append({room: own_s / total for room, own_s in by_room.items()})
    for room in sorted(shares[0] | shares[1], key=lambda room: -shares[1].get(room, 0.0)):
        one, two = (100 * each.get(room, 0.0) for each in shares)
        if max(one, two) >= 1:
            yield f"| {room.removesuffix('.py')} | {one:.0f} % | {two:.0f} % |"


NOTES = """\
CPU seconds are `time.process_time`, one thread. "Never seen": the batches or links had no search before in which their
layers were costed; medians over them. Plans after the first are explained when they are read, which these times do not
have. In the profile the time of a room is that of its own lines; numpy's loops count as those of the lines that run
them where the profiler does not see them, such as arithmetic on arrays.
"""


def main() -> None:
    case = asked()
    if case is not None:
        print(json.dumps(slid(case)))
        return
    if "--profile" in sys.argv:
        print("\n".join(rooms()))
        return
    each = checkouts()
    parts = ["\n".join(sliders(each)), exact(), "\n".join(many()), "\n".join(growth()), "\n".join(rooms())]
    report("warm", "Ranking again", "\n\n".join(parts), NOTES + before(each))


if __name__ == "__main__":
    main()
