"""Resharding: our cheapest routes next to the paths of PyTorch's DTensor under the same cost, for all pairs.

python benchmarks/bench_reshard.py            prints the tables
python benchmarks/bench_reshard.py --write    also writes them to benchmarks/reshard.md
"""

from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

import sys  # noqa: E402
import time  # noqa: E402
from itertools import product  # noqa: E402
from math import exp, log  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any, NamedTuple  # noqa: E402

from machine import report  # noqa: E402
from steptime.captured.ops.placement import P, R, Sharding, shard, text_of  # noqa: E402
from steptime.hardware import load_cluster  # noqa: E402
from steptime.sharding.mesh import Mesh, mesh_on  # noqa: E402
from steptime.sharding.moves import graph_of  # noqa: E402
from steptime.sharding.reshard import Route, along, costs, route, table_of  # noqa: E402
from steptime.units import format_seconds  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

ELEMENT_BYTES = 2
SHAPES = ((64, 64), (1024, 1024), (8192, 8192), (64, 2048, 1024))
MESHES = (
    ("dgx-h100", {"data": 2, "model": 4}), ("dgx-h100", {"data": 4, "model": 8}), ("dgx-h100", {"data": 8, "model": 8}),
    ("frontier", {"data": 2, "model": 4}), ("frontier", {"data": 8, "model": 8}),
)  # fmt: skip
SHOWN = 2
"""Number of the shape whose pairs are listed one by one, on the first mesh."""
REPEATS = 5


class Pair(NamedTuple):
    """One pair of shardings."""

    source: Sharding
    target: Sharding
    ours: Route
    theirs: Route
    refused: bool


def shardings(rank: int, axes: int = 2) -> list[Sharding]:
    return list(product((R, *map(shard, range(rank)), P), repeat=axes))


def pairs_of(shape: tuple[int, ...], mesh: Mesh) -> list[Pair]:
    from dtensor_paths import dtensor_path, is_refused

    out = []
    for source, target in product(shardings(len(shape)), repeat=2):
        if source != target:
            path = dtensor_path(shape, source, target, mesh.sizes)
            ours = route(shape, ELEMENT_BYTES, source, target, mesh)
            theirs = along(shape, ELEMENT_BYTES, path, mesh)
            out.append(Pair(source, target, ours, theirs, is_refused(path)))
    return out


def dearer(pair: Pair) -> float:
    return pair.theirs.seconds / pair.ours.seconds


def sent_s(route: Route) -> float:
    return sum(step.seconds for step in route.steps if step.collective)


def summary(name: str, mesh: Mesh, shape: tuple[int, ...], pairs: list[Pair]) -> str:
    run = [pair for pair in pairs if not pair.refused]
    ratios = [dearer(pair) for pair in run]
    better, worse = (sum(r > 1 + 1e-9 for r in ratios), sum(r < 1 - 1e-9 for r in ratios))
    less = sum(sent_s(pair.ours) < sent_s(pair.theirs) * (1 - 1e-9) for pair in run)
    mean = exp(sum(map(log, ratios)) / len(ratios))
    cells = (
        name, mesh, "x".join(map(str, shape)), len(pairs), len(pairs) - len(run), better, less,
        len(run) - better - worse, worse,        f"{mean:.2f}", f"{max(ratios):.1f}",
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def listed(pair: Pair) -> str:
    kinds = ", ".join(f"{step.kind} {'+'.join(step.axes)}".strip() for step in pair.ours.steps)
    theirs = "refused" if pair.refused else format_seconds(pair.theirs.seconds, 3)
    cells = text_of(pair.source), text_of(pair.target), format_seconds(pair.ours.seconds, 3), theirs, kinds
    return f"| {' | '.join(cells)} |"


def cpu_s(function: Any) -> float:
    times = []
    for _ in range(REPEATS):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return sorted(times)[REPEATS // 2]


def speed(name: str, axes: dict[str, int], shape: tuple[int, ...]) -> str:
    mesh = mesh_on(load_cluster(name), axes)
    every = shardings(len(shape), len(axes))

    def graph() -> None:
        graph_of.cache_clear()
        graph = graph_of(mesh.sizes, len(shape), ("sum",))
        assert graph.numbers and graph.calls and len(graph.between)

    def table() -> None:
        table_of.cache_clear()
        costs(shape, ELEMENT_BYTES, every, every, mesh)

    graph_s, table_s = cpu_s(graph), cpu_s(table)
    again_s = cpu_s(lambda: costs(shape, ELEMENT_BYTES, every, every, mesh))
    found = graph_of(mesh.sizes, len(shape), ("sum",))
    times = (f"{1e3 * seconds:.2f} ms" for seconds in (graph_s, table_s, again_s))
    cells = (mesh, len(shape), len(found.layouts), f"{len(found.moves):,}", f"{len(every) ** 2:,}", *times)
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    lines = [
        "| cluster | mesh | tensor, bf16 | pairs | DTensor refuses | cheaper | less time in collectives | equal | "
        "dearer | DTensor over ours, geometric mean | largest |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    shown: list[Pair] = []
    for number, (name, axes) in enumerate(MESHES):
        mesh = mesh_on(load_cluster(name), axes)
        for shape in SHAPES:
            pairs = pairs_of(shape, mesh)
            lines.append(summary(name, mesh, shape, pairs))
            shown = pairs if (number, shape) == (0, SHAPES[SHOWN]) else shown
    lines += [
        "", "CPU time, median of five:", "",
        "| mesh | dims | layouts | steps | pairs | graph of steps, once | table of a shape, new | kept |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
        *(speed("dgx-h100", axes, shape) for axes, shape in (
            ({"data": 2, "model": 4}, (8192, 8192)), ({"data": 2, "model": 4}, (16, 32, 2048, 64)),
            ({"data": 8, "model": 8}, (16, 32, 2048, 64)), ({"pod": 4, "data": 8, "model": 8}, (64, 2048, 8192)),
        )),
        "", "All pairs of 8192x8192 on dgx-h100, mesh data=2 x model=4:", "",
        "| from | to | ours | DTensor | our steps |", "|---|---|--:|--:|---|", *map(listed, shown),
    ]  # fmt: skip
    notes = (
        "Pairs: every two different of the shardings (R, S(d), P) x (R, S(d), P), of which there are 16 for two dims\n"
        "and 25 for three. Both columns have the same prices: DTensor's steps are those of `_gen_transform_infos`,\n"
        "each timed as our step of that kind with its copies. `refused`: DTensor plans a step from S to P, which it\n"
        "does not run; these pairs are in no ratio. Our routes may go through layouts that a DTensor cannot have\n"
        "(axes that divide a dim in another order than theirs). Graph and table are of one process, one thread.\n"
    )
    report("reshard", "Resharding", "\n".join(lines), notes)


if __name__ == "__main__":
    main()
