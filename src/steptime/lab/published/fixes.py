"""What each fix of the published model changes: its whole search again, with one defect corrected at a time.

The points are those of arXiv 2410.00273 and of its code: two models, three strategies, nine systems, 4 to 16,384
devices in powers of two, 4096 sequences per step. A point's result is its best configuration.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Final

from steptime.estimate.single import Setting
from steptime.hardware import load_cluster
from steptime.lab.published.defects import FIXES, NONE, Defects
from steptime.lab.published.method import PUBLISHED, PublishedMethod
from steptime.lab.published.space import PublishedSpace
from steptime.model.library import load_catalogue_model
from steptime.plan.job import OPTIMIZERS, PRECISIONS, Job
from steptime.plan.plans import RECOMPUTE_CODES
from steptime.plan.space import CorrectedSpace, Space
from steptime.plan.strategies import CORRECTED, Method
from steptime.search.exhaustive import Found, Task, search

MODELS: Final = ("gpt3_1T", "vit_era5")
STRATEGIES: Final = ("1d", "context", "2d")
DEVICES: Final = ("a100", "h200", "b200")
FAST_DOMAINS: Final = (4, 8, 64)
GPUS: Final = tuple(2**k for k in range(2, 15))
GLOBAL_BATCH: Final = 4096

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Point:
    """One search of the paper."""

    model: str
    strategy: str
    device: str
    fast_domain: int
    gpus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Winner:
    """Best configuration of a point."""

    step_time_s: float
    plan: dict[str, int]


Winners = dict[Point, Winner | None]
Search = Callable[[int], list[tuple[Point, Found]]]
"""Runs a group of searches, given how many best configurations to keep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Best throughput after a fix over that before it, at the points where it differs."""

    points: int
    least: float
    median: float
    greatest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What one fix, or several, does to the published results."""

    name: str
    """Switch that is turned off, ``all_switches``, or ``corrected_mode``."""
    fix: str
    both: int
    """Points that are feasible before and after."""
    plans: int
    """Those of them that have another best configuration."""
    ratios: dict[str, Ratio]
    """By model."""
    gained: tuple[Point, ...]
    """Points that become feasible."""
    lost: tuple[Point, ...]
    """Points that become infeasible."""


def searches(method: Method, space: Space) -> Iterator[Search]:
    """The searches of all points in groups that share their layers; each is run by calling it."""
    clusters = {(device, n): load_cluster(f"published-{device}-nvs{n}") for device in DEVICES for n in FAST_DOMAINS}
    for model, strategy, device in product(MODELS, STRATEGIES, DEVICES):
        points = [
            Point(model=model, strategy=strategy, device=device, fast_domain=n, gpus=gpus)
            for n, gpus in product(FAST_DOMAINS, GPUS)
        ]
        tasks = [
            Task(
                setting=Setting(method=method, job=job_of(point), cluster=clusters[device, point.fast_domain]),
                strategy=method.strategy(strategy),
                space=space,
            )
            for point in points
        ]
        yield partial(_run, points, tasks)


def _run(points: list[Point], tasks: list[Task], top: int) -> list[tuple[Point, Found]]:
    return list(zip(points, search(tasks, top), strict=True))


def job_of(point: Point) -> Job:
    """The paper's job at a point."""
    model = load_catalogue_model(point.model)
    return Job(
        model=model, gpus=point.gpus, global_batch=GLOBAL_BATCH, seq_len=model.seq_len,
        precision=PRECISIONS["bf16"], optimizer=OPTIMIZERS["adam"],
    )  # fmt: skip


def winners(method: Method, space: Space, progress: Callable[[], None] | None = None) -> Winners:
    """Best configuration of every point."""
    out: Winners = {}
    for group in searches(method, space):
        for point, found in group(1):
            out[point] = None
            if len(found.best_s):
                row: Any = found.best.row(0)
                out[point] = Winner(step_time_s=float(found.best_s[0]), plan=row.columns())
        if progress:
            progress()
    return out


def compare(name: str, fix: str, before: Winners, after: Winners) -> Change:
    """What changed from one set of winners to another."""
    both = [(p, b, a) for p, b in before.items() if b is not None and (a := after[p]) is not None]
    ratios = {}
    for model in MODELS:
        values = [b.step_time_s / a.step_time_s for p, b, a in both if p.model == model]
        values = [value for value in values if value != 1.0]
        if values:
            ratios[model] = Ratio(
                points=len(values), least=min(values), median=statistics.median(values), greatest=max(values)
            )
    return Change(
        name=name, fix=fix, both=len(both), plans=sum(b.plan != a.plan for _, b, a in both), ratios=ratios,
        gained=tuple(sorted(p for p, a in after.items() if a is not None and before[p] is None)),
        lost=tuple(sorted(p for p, b in before.items() if b is not None and after[p] is None)),
    )  # fmt: skip


def variants() -> dict[str, tuple[str, Method, Space]]:
    """Name -> what it does, its method and its space: each fix alone, all of them, and the corrected mode."""

    def published(defects: Defects) -> tuple[Method, Space]:
        return PublishedMethod(defects), PublishedSpace(defects=defects)

    plain = CorrectedSpace(recompute=(RECOMPUTE_CODES["none"],), zero=(1,), vpp=(1,))
    return {
        **{name: (fix, *published(Defects().without(name))) for name, fix in FIXES.items()},
        "all_switches": ("all of the above", *published(NONE)),
        "corrected_mode": ("corrected mode without recomputation and interleaving, ZeRO-1", CORRECTED, plain),
    }


def corrections(progress: Progress | None = None) -> tuple[int, list[Change]]:
    """Feasible points of the published model, and what each fix changes.

    Args:
        progress: called with groups of searches done and all groups.
    """
    chosen = variants()
    total = (1 + len(chosen)) * len(MODELS) * len(STRATEGIES) * len(DEVICES)
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        if progress:
            progress(done, total)

    before = winners(PUBLISHED, PublishedSpace(), step)
    changes = [
        compare(name, fix, before, winners(method, space, step)) for name, (fix, method, space) in chosen.items()
    ]
    return sum(winner is not None for winner in before.values()), changes
