"""Tuning products: the tile that the model picks, with and without measurements, against all tiles measured.

python benchmarks/bench_tune.py           measures every schedule of 24 products here (some five minutes), prints tables
python benchmarks/bench_tune.py --write   also writes benchmarks/tune.md
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np

from machine import report
from steptime_lab.hierarchy.caches import processor
from steptime_lab.hierarchy.tune.history import Past, Request
from steptime_lab.hierarchy.tune.kernel import product_of, timed
from steptime_lab.hierarchy.tune.model import Seen, learned
from steptime_lab.hierarchy.tune.prior import Predicted
from steptime_lab.hierarchy.tune.search import candidates, searched
from steptime_lab.hierarchy.tune.space import Schedule, core_of

SHAPES = (
    (512, 512, 512), (384, 768, 256), (100, 1000, 300), (1000, 96, 800), (256, 256, 2048), (768, 768, 64),
    (333, 517, 419), (64, 2048, 512), (2048, 64, 512), (640, 640, 640), (128, 128, 4096), (720, 480, 360),
    (1024, 1024, 128), (50, 3000, 200), (800, 200, 600), (448, 448, 448), (300, 300, 900), (1200, 150, 300),
    (96, 1536, 384), (900, 600, 150), (513, 511, 257), (256, 1024, 256), (700, 900, 100), (160, 640, 1280),
)  # fmt: skip
CORE = core_of(processor("zen4"))
TRIALS = 16
SEEDS = 50
GROUP = 8
NOTES = """How much slower the schedule is that a way picks than the fastest of all, of {count} products in single
precision on one thread; CPU time, each schedule timed twice in three rounds. The fastest is that of the mean of both; a
search sees the first. The geometric mean is of the ratios to the fastest, less 1. *Learned* and *model*: trees that
have seen the other products (history). Pruning leaves out {left:.0f} % of the schedules whose sums fit the registers.
Random: mean of {seeds} seeds. Targets: 5 % without a measurement, 1 % with 16. With history {learned} and {model} of
{count} products meet them, on a fresh machine {closed} (the closed form) and {alone} (the model without history).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A product with every schedule timed."""

    shape: tuple[int, int, int]
    found: Predicted
    few: Predicted
    """Those that pruning leaves."""
    seconds: dict[Schedule, float]
    again: dict[Schedule, float]
    """A second measurement: of it the noise."""

    @property
    def best_s(self) -> float:
        """The fastest of both measurements' means."""
        return min(self.mean(one) for one in self.seconds)

    def mean(self, one: Schedule) -> float:
        """Of both measurements."""
        return (self.seconds[one] + self.again[one]) / 2

    def regret(self, some: Sequence[Schedule]) -> float:
        """How much slower than the best the one is that looks fastest in the first measurement."""
        return self.mean(min(some, key=self.seconds.__getitem__)) / self.best_s - 1

    @property
    def seen(self) -> Seen:
        """What a cost model learns of it."""
        seconds = np.array([self.seconds[one] for one in self.found.schedules])
        return Seen(features=self.found.features, cycles=self.found.cycles, seconds=seconds)


def measured(shape: tuple[int, int, int], folder: Path) -> Grid:
    """Times every schedule twice."""
    found, few = (candidates(shape, CORE, prune=prune).found for prune in (False, True))
    product = product_of(shape, CORE, folder)
    rounds: list[dict[Schedule, float]] = []
    for _ in range(2):
        times: dict[Schedule, float] = {}
        for at in range(0, len(found.schedules), GROUP):
            group = found.schedules[at : at + GROUP]
            runs = [product.runner(one) for one in group]
            times |= dict(zip(group, timed(runs, best_s=math.inf, cut=math.inf), strict=True))
        rounds.append(times)
    return Grid(shape=shape, found=found, few=few, seconds=rounds[0], again=rounds[1])


def searched_regret(grid: Grid, found: Predicted, strategy: str, seen: Sequence[Seen], seed: int = 0) -> float:
    """Of a search with as many trials, its measurements looked up."""
    request = Request(shape=grid.shape, trials=TRIALS, strategy=strategy, seed=seed)
    times, _ = searched(found, request, lambda batch, _: [grid.seconds[one] for one in batch], past=Past(seen=seen))
    return grid.regret(list(times))


def rows_of(grids: Sequence[Grid]) -> list[dict[str, float]]:
    """Regrets of every product."""
    out = []
    for grid in grids:
        others = [each.seen for each in grids if each is not grid]
        model = learned(others)
        first = {
            name: grid.mean(found.schedules[int(np.argmin(scores))]) / grid.best_s - 1
            for name, found, scores in (
                ("closed form, no trial", grid.few, np.log(grid.few.cycles)),
                ("learned, no trial", grid.few, model.scores(grid.few)),
            )
        }
        noise = mean(abs(grid.again[one] / grid.seconds[one] - 1) for one in grid.seconds)
        out.append({
            **first,
            "model, 16": searched_regret(grid, grid.few, "model", others),
            "model without history, 16": searched_regret(grid, grid.few, "model", []),
            "model without pruning, 16": searched_regret(grid, grid.found, "model", others),
            "random, 16": mean(searched_regret(grid, grid.found, "random", [], seed) for seed in range(SEEDS)),
            "random of pruned, 16": mean(searched_regret(grid, grid.few, "random", [], seed) for seed in range(SEEDS)),
            "grid, 16": searched_regret(grid, grid.found, "grid", []),
            "best that pruning leaves": min(map(grid.mean, grid.few.schedules)) / grid.best_s - 1,
            "noise": noise,
        })  # fmt: skip
        print(grid.shape, {name: f"{100 * value:.1f}" for name, value in out[-1].items()}, file=sys.stderr, flush=True)
    return out


def table_of(rows: Sequence[Mapping[str, float]]) -> str:
    """Statistics of every way over the products; the geometric mean is of the ratios to the fastest, less 1.

    >>> print(table_of([{"way": 0.0}, {"way": 0.21}]).splitlines()[-1])
    | way | 10.5 % | 10.0 % | 10.5 % | 21.0 % | 1 | 1 |
    """
    lines = ["| way | mean | geometric mean | median | largest | products within 1 % | within 5 % |"]
    lines.append("|---|--:|--:|--:|--:|--:|--:|")
    for way in rows[0]:
        values = np.array([row[way] for row in rows])
        middles = (values.mean(), np.expm1(np.log1p(values).mean()), np.median(values), values.max())
        cells = [f"{100 * each:.1f} %" for each in middles]
        counts = [str(int((values <= limit).sum())) for limit in (0.01, 0.05)]
        lines.append(f"| {way} | {' | '.join([*cells, *counts])} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print, write."""
    with tempfile.TemporaryDirectory() as name:
        grids = [measured(shape, Path(name)) for shape in SHAPES]
    rows = rows_of(grids)
    left = mean(1 - len(grid.few.schedules) / len(grid.found.schedules) for grid in grids)
    met = {
        name: sum(row[way] <= limit for row in rows)
        for name, way, limit in (
            ("learned", "learned, no trial", 0.05), ("model", "model, 16", 0.01),
            ("closed", "closed form, no trial", 0.05), ("alone", "model without history, 16", 0.01),
        )
    }  # fmt: skip
    notes = NOTES.format(count=len(grids), left=100 * left, seeds=SEEDS, **met)
    report("tune", "Tuning products", table_of(rows), notes)


if __name__ == "__main__":
    main()
