"""How often the right mesh is found, by kind of fabric and number of devices, and the CPU seconds of 4,096 devices.

1,000 random fabrics of up to 256 devices: sizes and speeds drawn at random, adjacent levels 1.6 to 5 times apart, one
message size, log-normal noise of sigma 0.15 on every link (the same in both directions, which leaves nothing to
average), devices in random order. Then the same with every step exactly 1.6, with faults, gaps, and several sizes.

    python benchmarks/bench_mesh.py            prints the tables
    python benchmarks/bench_mesh.py --write    also writes them to benchmarks/mesh.md
"""

from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

import math  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Iterable, Sequence  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from pathlib import Path  # noqa: E402

import numpy as np  # noqa: E402

from machine import report  # noqa: E402
from steptime.hardware.records import AxisKind, Mesh  # noqa: E402
from steptime.measure.mesh import (  # noqa: E402
    Links,
    discover,
    synthetic,
)

FABRICS = 1000
FIRST_SEED = 7_000_000
SIGMA = 0.15
BANDS = ((2, 8), (9, 16), (17, 32), (33, 64), (65, 128), (129, 256))
LARGE = {
    "fat tree, 8 x 32 x 16": lambda: synthetic.fat_tree(8, 32, 16),
    "six levels, 2 x 2 x 2 x 8 x 8 x 8": lambda: synthetic.nested(
        "six levels", (2, 2, 2, 8, 8, 8), list(2e-6 * 1.6 ** np.arange(6)), list(4e11 / 1.6 ** np.arange(6))
    ),
    "flat switch, 4096": lambda: synthetic.flat_switch(4096),
    "rails, 8 x 512": lambda: synthetic.rails(512, 8),
    "2D torus, 64 x 64": lambda: synthetic.torus((64, 64)),
    "3D torus, 16 x 16 x 16": lambda: synthetic.torus((16, 16, 16)),
}


@dataclass(frozen=True, slots=True)
class Trial:
    """One fabric and what was found."""

    kind: str
    devices: int
    right: bool
    confidence: float
    false_alarms: int
    cpu_s: float


def same_shape(kind: str, found: Mesh, shape: Sequence[int]) -> bool:
    """Size, place and kind of every axis; tori have no fast axis, so the order of theirs is free."""
    ring = {AxisKind.RING, AxisKind.SWITCH} if min(shape) < 4 else {AxisKind.RING}
    if "torus" in kind:
        return sorted(found.shape) == sorted(shape) and {axis.kind for axis in found.axes} <= ring
    wanted = AxisKind.RAIL if kind == "rails" else AxisKind.SWITCH
    return found.shape == tuple(shape) and found.axes[-1].kind == wanted


def trials(count: int, measure: Callable[[synthetic.Fabric, int], Links], first_seed: int) -> list[Trial]:
    """The kinds take turns."""
    out, kinds = [], list(synthetic.KINDS)
    for number in range(count):
        kind, seed = kinds[number % len(kinds)], first_seed + number
        fabric = synthetic.random_fabric(kind, seed)
        links = measure(fabric, seed)
        started = time.process_time()
        mesh = discover(links)
        cpu_s = time.process_time() - started
        alarms = len(mesh.broken_links) + len(mesh.asymmetric_links)
        right = same_shape(kind, mesh, fabric.shape)
        out.append(Trial(kind, fabric.devices, right, mesh.confidence, alarms, cpu_s))
    return out


def rate(some: Iterable[Trial]) -> str:
    """Share of right shapes, and how many of how many."""
    every = list(some)
    right = sum(t.right for t in every)
    return f"{right / len(every):.1%} | {right} of {len(every)}" if every else "- | 0"


def plainly(fabric: synthetic.Fabric, seed: int) -> Links:
    return synthetic.measured(fabric, seed, sigma=SIGMA)[0]


def with_gaps(share: float) -> Callable[[synthetic.Fabric, int], Links]:
    return lambda fabric, seed: synthetic.measured(fabric, seed, sigma=SIGMA, missing=share)[0]


def with_broken_links(fabric: synthetic.Fabric, seed: int) -> Links:
    """One pair in a hundred takes eight times longer; one at least."""
    random = np.random.default_rng(seed)
    pairs = fabric.devices * (fabric.devices - 1) // 2
    ends = random.integers(0, fabric.devices, size=(max(1, pairs // 100), 2))
    broken = [(int(a), int(b), 8.0) for a, b in ends if a != b]
    return synthetic.measured(fabric, seed, sigma=SIGMA, broken=broken)[0]


def three_sizes(fabric: synthetic.Fabric, seed: int) -> Links:
    return synthetic.measured(fabric, seed, sizes_bytes=(8, 2**16, 2**24), sigma=SIGMA, both_ways=True)[0]


def main_table() -> tuple[str, list[Trial]]:
    found = trials(FABRICS, plainly, FIRST_SEED)
    lines = ["| fabric | right shape | fabrics | mean CPU s |\n|---|---:|---:|---:|"]
    for kind in synthetic.KINDS:
        some = [t for t in found if t.kind == kind]
        lines.append(f"| {kind} | {rate(some)} | {np.mean([t.cpu_s for t in some]):.2f} |")
    lines.append(f"| **all** | {rate(found)} | {np.mean([t.cpu_s for t in found]):.2f} |")
    lines.append("\n| devices | right shape | fabrics |\n|---|---:|---:|")
    for low, high in BANDS:
        lines.append(f"| {low} to {high} | {rate(t for t in found if low <= t.devices <= high)} |")
    lines.append("\n| stated confidence | right shape | fabrics |\n|---|---:|---:|")
    for low, high in ((0, 0.9), (0.9, 0.99), (0.99, 1)):
        lines.append(f"| {low} to {high} | {rate(t for t in found if low <= t.confidence < high)} |")
    pairs = sum(t.devices * (t.devices - 1) // 2 for t in found)
    alarms = sum(t.false_alarms for t in found)
    lines.append(f"\nSound links reported as broken or asymmetric: {alarms} of {pairs:,}.")
    return "\n".join(lines), found


def harder_table(count: int = 180) -> str:
    lines = ["| measured how | right shape | fabrics |\n|---|---:|---:|"]
    cases: dict[str, Callable[[synthetic.Fabric, int], Links]] = {
        "1 % of the pairs broken (8 times slower)": with_broken_links,
        "three message sizes, noise of each direction its own": three_sizes,
        "10 % of the pairs missing": with_gaps(0.1),
        "30 % of the pairs missing": with_gaps(0.3),
    }
    for name, measure in cases.items():
        lines.append(f"| {name} | {rate(trials(count, measure, FIRST_SEED + 10_000))} |")
    usual, synthetic.RATIOS = synthetic.RATIOS, (1.6, 1.6)
    lines.append(f"| every step exactly 1.6 | {rate(trials(count, plainly, FIRST_SEED + 20_000))} |")
    synthetic.RATIOS = usual
    return "\n".join(lines)


def smallest_table(repeats: int = 200) -> str:
    """Where the noise of a few links decides."""
    lines = ["| fabric | step 1.6 | step 2.0 | step 3.0 |\n|---|---:|---:|---:|"]
    for shape in ((4,), (6,), (8,), (2, 2), (2, 3), (3, 2), (2, 4), (4, 2), (2, 2, 2), (2, 8)):
        cells = []
        for step in (1.6, 2.0, 3.0):
            cost = step ** np.arange(len(shape))
            fabric = synthetic.nested("small", shape, list(2e-6 * cost), list(4e11 / cost))
            right = sum(discover(plainly(fabric, FIRST_SEED + seed)).shape == shape for seed in range(repeats))
            cells.append(f"{right / repeats:.1%}")
        lines.append(f"| {' x '.join(map(str, shape))} | {' | '.join(cells)} |")
    return "\n".join(lines)


_LARGE_RUN = """
import resource, sys, time
import numpy as np
from steptime.measure.mesh import Links, Quantity
from steptime.measure.mesh import discover
values = np.load(sys.argv[1])
quantity = Quantity(kind="seconds", size_bytes=2.0**24, values=values)
links = Links(names=tuple(map(str, range(len(values)))), quantities=(quantity,))
started = time.process_time()
mesh = discover(links)
print(time.process_time() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, *mesh.shape)
"""


def large_table() -> str:
    """Each in a process of its own, so that memory is that of the search and of the measured matrix alone."""
    lines = ["| 4,096 devices (16.8 M ordered pairs) | right shape | CPU s | peak memory, GiB |\n|---|---|---:|---:|"]
    for name, make in LARGE.items():
        fabric = make()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "seconds.npy")
            np.save(path, synthetic.measured(fabric, 1, sigma=SIGMA)[0].quantities[0].values)
            done = subprocess.run([sys.executable, "-c", _LARGE_RUN, path], capture_output=True, text=True, check=True)
        cpu_s, memory, *shape = done.stdout.split()
        right = sorted(map(int, shape)) == sorted(fabric.shape)
        lines.append(f"| {name} | {'yes' if right else 'no'} | {float(cpu_s):.1f} | {float(memory):.2f} |")
    return "\n".join(lines)


def interval(found: Sequence[Trial]) -> str:
    """Wilson interval of the success rate."""
    n, p, z = len(found), sum(t.right for t in found) / len(found), 1.96
    centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return f"{(centre - half) / (1 + z * z / n):.1%} to {(centre + half) / (1 + z * z / n):.1%}"


def main() -> None:
    table, found = main_table()
    parts = [
        table, "## Harder measurements", harder_table(), "## The smallest fabrics", smallest_table(),
        "## Large fabrics", large_table(),
    ]  # fmt: skip
    notes = f"""\
The first table has {FABRICS:,} fabrics of 2 to 256 devices, seeds from {FIRST_SEED:,} on, 95 % interval of
the whole {interval(found)}.
One message size, log-normal noise of sigma {SIGMA} on every link, the same in both directions; adjacent levels
{synthetic.RATIOS[0]} to {synthetic.RATIOS[1]} times apart; hops of a torus cost h^0.7 to h of one. A shape is right if
every axis has the right size and place; the axes of a torus may stand in any order.

With a step of 1.6 and this noise a handful of links cannot settle the question: of a flat switch of four devices the
two fastest links form a pair of pairs by chance in a few per cent of all cases. Several message sizes, or the noise
of both directions, average it away.
"""
    report("mesh", "Finding the mesh", "\n\n".join(parts), notes)


if __name__ == "__main__":
    main()
