"""Candidates per CPU-second of the whole published space: listed, checked for memory, costed and ranked on one core.

The space is that of arXiv 2410.00273: 3 strategies, 2 models, 9 systems (3 GPU generations, fast domains of 4, 8 and
64), 13 GPU counts (4 to 16,384), global batch 4,096. Of each of the 702 searches the ten fastest candidates and the
front of time and memory are kept. It is searched twice: as one group per (model, strategy, GPU generation), which
shares its layer configurations; and with nothing shared between systems, each search on its own. A third row searches
in corrected mode, where fitted kernels and collectives time every operator and every transfer, under the framework that
is the default (`generic`); a fourth searches models with experts and latent attention. The last two do the same without
bounds, so that every candidate is costed.

    python benchmarks/bench_search.py                    prints the table
    python benchmarks/bench_search.py --write            also writes it to benchmarks/search.md
    python benchmarks/bench_search.py --before FOLDER    also measures another checkout, in alternating runs
"""

from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

import json  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Sequence  # noqa: E402
from contextlib import nullcontext  # noqa: E402
from dataclasses import asdict, dataclass  # noqa: E402
from pathlib import Path  # noqa: E402
from statistics import median  # noqa: E402

from machine import every_candidate_costed, report  # noqa: E402
from pairs import alternating, asked, before, change, checkouts, heads  # noqa: E402
from steptime.api.models import load_model  # noqa: E402
from steptime.estimate.single import Setting  # noqa: E402
from steptime.hardware import load_cluster  # noqa: E402
from steptime.plan.framework_file import GENERIC, load_framework  # noqa: E402
from steptime.plan.job import OPTIMIZERS, PRECISIONS, Job  # noqa: E402
from steptime.search.exhaustive import Found, Task, search  # noqa: E402
from steptime.search.modes import MODES  # noqa: E402

MODELS = ("gpt3_1T", "vit_era5")
GENERATIONS = ("a100", "h200", "b200")
DOMAINS = (4, 8, 64)
COUNTS = tuple(2**k for k in range(2, 15))
GLOBAL_BATCH = 4096
CANDIDATES = 9_183_444
TOP = 10
RUNS = 5

CALIBRATED_MODELS = ("gpt3-175b", "llama3.1-70b")
CALIBRATED_CLUSTERS = ("dgx-a100-80gb", "dgx-h100", "dgx-b200")
CALIBRATED_COUNTS = (64, 256, 1024, 4096)
EXPERT_MODELS = ("mixtral-8x7b", "deepseek-v3")
EXPERT_CLUSTERS = ("dgx-h100",)
EXPERT_COUNTS = (64, 512, 2048)

Groups = Sequence[Sequence[Task]]


@dataclass(frozen=True, slots=True)
class Totals:
    """What one pass over the space did."""

    cpu_s: float
    candidates: int
    feasible: int
    layers: int


def groups() -> Groups:
    """The searches of each (model, strategy, GPU generation): they differ in fast domain and GPU count only."""
    mode, out = MODES["published"], []
    for model in map(load_model, MODELS):
        for strategy in mode.method.strategies.values():
            for generation in GENERATIONS:
                tasks = []
                for domain in DOMAINS:
                    cluster = load_cluster(f"published-{generation}-nvs{domain}")
                    for gpus in COUNTS:
                        job = Job(
                            model=model, gpus=gpus, global_batch=GLOBAL_BATCH, seq_len=model.seq_len,
                            precision=PRECISIONS["bf16"], optimizer=OPTIMIZERS["adam"],
                        )  # fmt: skip
                        setting = Setting(method=mode.method, job=job, cluster=cluster)
                        tasks.append(Task(setting=setting, strategy=strategy, space=mode.space))
                out.append(tasks)
    return out


def calibrated() -> Groups:
    """Searches in corrected mode on clusters with fitted kernels and collectives, each on its own."""
    return whole_steps(CALIBRATED_MODELS, CALIBRATED_CLUSTERS, CALIBRATED_COUNTS)


def experts() -> Groups:
    """Searches in corrected mode of models with experts."""
    return whole_steps(EXPERT_MODELS, EXPERT_CLUSTERS, EXPERT_COUNTS)


def whole_steps(models: Sequence[str], clusters: Sequence[str], counts: Sequence[int]) -> Groups:
    """Searches of the whole step under the default framework."""
    mode, out = MODES["corrected"], []
    for model in map(load_model, models):
        for name in clusters:
            cluster = load_cluster(name)
            framework = load_framework(GENERIC, cluster.device.name)
            for gpus in counts:
                job = Job(
                    model=model, gpus=gpus, global_batch=1024, seq_len=model.seq_len, precision=PRECISIONS["bf16"],
                    optimizer=OPTIMIZERS["adam"], framework=framework,
                )  # fmt: skip
                setting = Setting(method=mode.method, job=job, cluster=cluster)
                assert setting.machine.models and setting.machine.fabric is not None
                for strategy, kept in mode.auto.items():
                    out.append([
                        Task(setting=setting, strategy=mode.method.strategies[strategy], space=mode.space,
                             constraints=kept)
                    ])  # fmt: skip
    return out


def alone(shared: Groups) -> Groups:
    """Every search as a group of its own."""
    return [[task] for tasks in shared for task in tasks]


def forget() -> None:
    """Empty the caches that an earlier pass filled, so that every pass does all of the work."""
    from steptime.plan import space

    space._factorisations.cache_clear()


def passed(searched: Groups) -> Totals:
    """One pass over the space."""
    forget()
    started = time.process_time()
    found: list[list[Found]] = [search(tasks, TOP) for tasks in searched]
    cpu_s = time.process_time() - started
    every = [one for group in found for one in group]
    return Totals(
        cpu_s, sum(f.candidates for f in every), sum(f.feasible for f in every),
        sum(group[0].distinct_layers for group in found),
    )  # fmt: skip


ROWS: dict[str, Callable[[], Groups]] = {
    "per model, strategy, GPU generation": groups,
    "nothing between systems": lambda: alone(groups()),
    "corrected mode, nothing shared": calibrated,
    "corrected mode, models with experts": experts,
    "corrected mode, nothing shared, every candidate costed": calibrated,
    "corrected mode, models with experts, every candidate costed": experts,
}


def measured(name: str) -> dict[str, float]:
    """A pass after one that loads what is loaded at the first call; some cost every candidate, without bounds."""
    passed(ROWS[name]()[:1])
    with every_candidate_costed() if name.endswith("costed") else nullcontext():
        return asdict(passed(ROWS[name]()))


def row(name: str, each: Sequence[Path]) -> str:
    runs = alternating(__file__, name, each, RUNS)
    totals, times = runs[0][0], [[run["cpu_s"] for run in one] for one in runs]
    assert "corrected" in name or totals["candidates"] == CANDIDATES, totals
    cpu_s = median(times[0])
    changes = "".join(f" {median(then):.2f} | {change(times[0], then)} |" for then in times[1:])
    return (
        f"| {name} | {totals['candidates']:,} | {totals['feasible']:,} | {totals['layers']:,} | {cpu_s:.2f} | "
        f"{min(times[0]):.2f} to {max(times[0]):.2f} | {totals['candidates'] / cpu_s / 1e6:.2f} million |{changes}"
    )


NOTES = f"""\
Each pass lists every candidate, checks its memory, costs it, and keeps of each of the 702 searches the {TOP} fastest
candidates and the front of step time and memory. CPU seconds are `time.process_time`, one thread, median of {RUNS}
processes after the imports and a first group; the clusters and models are read outside the time.

What is shared in the first row: a layer configuration is costed once per (model, strategy, GPU generation) and used by
the three domain sizes and thirteen GPU counts. In both rows memory is checked once per configuration for all its
placements, since it does not depend on them, and a candidate that does not fit is counted but not costed.

The third row is corrected mode on {", ".join(CALIBRATED_CLUSTERS)}: {" and ".join(CALIBRATED_MODELS)} on
{", ".join(map(str, CALIBRATED_COUNTS))} devices, global batch 1,024, strategies 1d and context, framework {GENERIC}.
The fourth is {" and ".join(EXPERT_MODELS)} on {", ".join(EXPERT_CLUSTERS)},
{", ".join(map(str, EXPERT_COUNTS))} devices, expert ranks searched too.
"""


def main() -> None:
    each = checkouts()
    names, rules = heads(each)
    head = (
        "| shared | candidates | feasible | layer configurations costed | CPU s | range | candidates per CPU s |"
        f"{names}\n|---|---:|---:|---:|---:|---:|---:|{rules}"
    )
    lines = [row(name, each) for name in ROWS]
    report("search", "Searching the published space", "\n".join([head, *lines]), NOTES + before(each))


if __name__ == "__main__":
    case = asked()
    if case is None:
        main()
    else:
        print(json.dumps(measured(case)))
