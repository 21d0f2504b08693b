"""CPU seconds of the chain solver, and what its schedules gain over the usual recipes.

First table: chains of unequal segments (sizes and times drawn at random, seed 0): one table of 500 slots that serves
all limits, the front that it holds, each point weighed exactly, and the best schedule for one limit, at 0.3 of the
memory that keeping everything needs. Second table: equal blocks of a transformer (GPT-3 175B layers, micro-batch 1,
16-bit, 8 tensor ranks with sequence parallelism, flash attention), what each recipe takes at its own memory, and the
chain solver at the same memory.

    python benchmarks/bench_rematerialisation.py            prints the tables
    python benchmarks/bench_rematerialisation.py --write    also writes them to benchmarks/rematerialisation.md
"""

from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

import math  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable  # noqa: E402
from statistics import median  # noqa: E402

import numpy as np  # noqa: E402

from machine import report  # noqa: E402
from steptime.captured.fit.layout import schedule_of  # noqa: E402
from steptime.captured.graph.segments import Checkpoint, Tree, grouped  # noqa: E402
from steptime.captured.rematerialisation.chain import (  # noqa: E402
    Chain,
    Segment,
    Solution,
    keep_all,
    simulate,
    solution,
)
from steptime.captured.rematerialisation.rotor import SLOTS, fill, solve  # noqa: E402

COUNTS = (24, 50, 100, 128)
SHARE = 0.3
RUNS = 3

LAYERS = 96
HIDDEN, SEQUENCE, TENSOR = 12288, 2048, 8
BLOCK_UNIT = SEQUENCE * HIDDEN / TENSOR
ENDS = {"output_bytes": 2 * BLOCK_UNIT, "output_gradient_bytes": 2 * BLOCK_UNIT}


def unequal(count: int) -> Chain:
    draw = np.random.default_rng(0).uniform
    segments = [
        Segment(
            forward_s=draw(0.5, 1.5), backward_s=draw(1, 3), input_bytes=draw(1e6, 3e6), saved_bytes=draw(10e6, 40e6),
            gradient_bytes=draw(1e6, 3e6), forward_transient_bytes=draw(5e6, 10e6),
            backward_transient_bytes=draw(5e6, 10e6),
        )
        for _ in range(count)
    ]  # fmt: skip
    return Chain(segments=tuple(segments), output_bytes=1e6, output_gradient_bytes=1e6)


def transformer(layers: int) -> Chain:
    """Bytes per layer: 34 s b h / t of activations without the scores (arXiv 2205.05198), 2 s b h / t of them the
    input; times in units of one forward."""
    segment = Segment(
        forward_s=1, backward_s=2, input_bytes=2 * BLOCK_UNIT, saved_bytes=32 * BLOCK_UNIT,
        gradient_bytes=2 * BLOCK_UNIT, forward_transient_bytes=16 * BLOCK_UNIT, backward_transient_bytes=8 * BLOCK_UNIT,
    )  # fmt: skip
    return Chain(segments=(segment,) * layers, **ENDS)


def cpu_s(work: Callable[[], object]) -> float:
    """Median CPU seconds of a few runs."""
    runs = []
    for _ in range(RUNS):
        started = time.process_time()
        work()
        runs.append(time.process_time() - started)
    return median(runs)


def row(count: int) -> str:
    chain = unequal(count)
    most = simulate(chain, keep_all(count)).peak_bytes
    points = fill(chain).front()
    best = solve(chain, SHARE * most)
    assert isinstance(best, Solution)
    table = cpu_s(lambda: fill(chain))
    front = cpu_s(lambda: fill(chain).front())
    one = cpu_s(lambda: solve(chain, SHARE * most))
    return (
        f"| {count} | {table:.2f} | {front:.2f} | {len(points)} | {points[0].peak_bytes / most:.3f} | {one:.2f} | "
        f"{best.time_s / chain.base_s - 1:+.1%} |"
    )


def every(k: int) -> Tree:
    """A checkpoint around every k layers; the last k are saved at once."""
    groups = grouped(LAYERS, k)
    last = groups[-1]
    return (*groups[:-1], *(last.items if isinstance(last, Checkpoint) else (last,)))


def twice(count: int) -> Tree:
    """The first layers run twice, each in a checkpoint of its own; the rest is saved."""
    return (*(Checkpoint((layer,)) for layer in range(count)), *range(count, LAYERS))


def gains() -> list[str]:
    chain = transformer(LAYERS)
    most = simulate(chain, keep_all(LAYERS)).peak_bytes
    trees: dict[str, Tree] = {f"every {k}": every(k) for k in (1, 2, 4)}
    trees["every sqrt(N)"] = every(math.isqrt(LAYERS - 1) + 1)
    recipes = {name: solution(chain, schedule_of(tree)) for name, tree in trees.items()}
    halves = [solution(chain, schedule_of(twice(count))) for count in range(LAYERS + 1)]
    for share in (0.25, 0.5, 0.75):
        count = next(n for n, found in enumerate(halves) if found.peak_bytes <= share * most)
        recipes[f"{count} layers twice, the rest kept"] = halves[count]
    lines = []
    for name, recipe in recipes.items():
        ours = solve(chain, recipe.peak_bytes)
        assert isinstance(ours, Solution)
        lines.append(
            f"| {name} | {recipe.peak_bytes / 2**30:.2f} | {recipe.time_s / chain.base_s - 1:+.1%} | "
            f"{ours.time_s / chain.base_s - 1:+.1%} |"
        )
    return lines


NOTES = f"""\
CPU seconds are `time.process_time`, one thread, median of {RUNS} runs. A table has {SLOTS} slots. "Time at {SHARE}" is
the time beyond that of no recomputation, at {SHARE} of the memory that keeping everything needs. The second table's
chain has {LAYERS} equal segments; "every k" keeps the input of every k-th layer, and saves the last k at once.
"""


def main() -> None:
    head = (
        f"| segments | one table, CPU s | table and front, CPU s | points of the front | least memory / keep all | "
        f"one limit, CPU s | time at {SHARE} |\n|---:|---:|---:|---:|---:|---:|---:|"
    )
    second = "| recipe | memory, GiB | time, recipe | time, chain solver at that memory |\n|---|---:|---:|---:|"
    tables = "\n".join([head, *map(row, COUNTS), "", second, *gains()])
    report("rematerialisation", "Solving for rematerialisation", tables, NOTES)


if __name__ == "__main__":
    main()
