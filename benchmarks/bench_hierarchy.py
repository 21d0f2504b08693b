"""Rate of the cache simulator, agreement with valgrind and pycachesim, formulas of tiles, and predicted levels.

python benchmarks/bench_hierarchy.py            prints the tables
python benchmarks/bench_hierarchy.py --write    also writes them to benchmarks/hierarchy.md
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import report
from steptime_lab.cost import tiling
from steptime_lab.hierarchy.compiled import COMPILED
from steptime_lab.hierarchy.geometry import hierarchy
from steptime_lab.hierarchy.levels import CASES, PREDICTORS, PROTOTYPE, level_table
from steptime_lab.hierarchy.reuse import reuse
from steptime_lab.hierarchy.simulate import simulate
from steptime_lab.hierarchy.traces import Shape, Trace, panel_matmul, tiled_matmul, trace

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
CACHES = "32KiB:8,256KiB:8,2MiB:16"


def rates() -> list[str]:
    """Accesses per CPU second; each kernel has run once before."""
    scale = 100 if COMPILED else 1
    side = 480 if COMPILED else 96
    rows: list[tuple[str, Trace]] = [
        (f"matmul {side}, tile 24, packed", tiled_matmul((side, side, side), (24, 24, 24), 8)),
        ("stream", trace("stream", Shape(n=200_000 * scale // 2, passes=1))),
        ("gather of 64 MB", trace("gather", Shape(n=50_000 * scale, table=1 << 23))),
    ]
    simulate(trace("stream", Shape(n=64)), hierarchy(CACHES))
    reuse(trace("stream", Shape(n=64)))
    lines = ["| trace | accesses | 1 level | 3 levels | distances of reuse |", "|---|--:|--:|--:|--:|"]
    for name, made in rows:
        cells = []
        for work in (lambda t: simulate(t, hierarchy("32KiB:8")), lambda t: simulate(t, hierarchy(CACHES)), reuse):
            start = time.process_time()
            work(made)
            cells.append(f"{made.accesses / (time.process_time() - start) / 1e6:.2f} M/s")
        lines.append(f"| {name} | {made.accesses:,} | {' | '.join(cells)} |")
        print(lines[-1], file=sys.stderr, flush=True)
    return lines


def as_cachegrind() -> list[str]:
    """Misses of data next to cachegrind's, in two levels."""
    import shutil

    from validation.test_caches_as_valgrind import CASES as KERNELS
    from validation.test_caches_as_valgrind import missed

    if not (shutil.which("valgrind") and shutil.which("gcc")):
        return ["valgrind and gcc are not installed here."]
    lines = ["| kernel | caches | L1 here | L1 cachegrind | last here | last cachegrind | largest difference |"]
    lines.append("|---|---|--:|--:|--:|--:|--:|")
    for name, (made, body, caches) in KERNELS.items():
        sizes = [f"{c.size_bytes},{c.ways},{c.line_bytes}" for c in hierarchy(caches).caches]
        with tempfile.TemporaryDirectory() as folder:
            theirs = missed(Path(folder), body, *sizes)
        ours = [level.misses for level in simulate(made, hierarchy(caches)).levels]
        worst = max(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True))
        pairs = " | ".join(f"{a:,} | {b:,}" for a, b in zip(ours, theirs, strict=True))
        lines.append(f"| {name} | {caches} | {pairs} | {100 * worst:.2f} % |")
    return lines


def tiles() -> list[str]:
    """Traffic by formula and as simulated, of packed tiles and of rows of a power of two."""
    lines = ["| product | formula | words by formula | simulated | ratio |", "|---|---|--:|--:|--:|"]

    def row(name: str, formula: str, words: float, moved: float) -> None:
        lines.append(f"| {name} | {formula} | {words:,.0f} | {moved:,.0f} | {moved / words:.3f} |")

    for n, b, caches in ((96, 12, "8KiB:8"), (96, 16, "8KiB:8"), (96, 24, "32KiB:8"), (64, 16, "8KiB:4")):
        words = float(tiling.square_tile_reads_words(n, b))
        for name, packed in (("packed", True), ("rows", False)):
            done = simulate(tiled_matmul((n, n, n), (b, b, b), 8, packed=packed), hierarchy(caches))
            row(f"{n}, tile {b}, {name}, {caches}", "$2n^3/b + n^2$", words, done.levels[0].misses * 8)
    for n, b1 in ((64, 8), (64, 16), (96, 24)):
        room = (b1 + 16 + b1 * 8 // n + 1) * n * 8
        done = simulate(panel_matmul(n, (b1, 8), (8, 8), 8), hierarchy(f"{-(-room // 64) * 64}B:full"))
        row(f"{n}, panels of {b1}", "$n^2 + n^3/b_1$, $n^2$ more for C",
            float(tiling.panel_reads_words(n, b1)) + n * n, done.levels[0].misses * 8)  # fmt: skip
    return lines


def predicted() -> list[str]:
    """Accuracy of every predictor on twelve patterns."""
    lines = [f"| pattern | accesses | misses of L1 | {' | '.join(PREDICTORS)} | levels looked up |"]
    lines.append("|---|--:|--:|" + "--:|" * (len(PREDICTORS) + 1))
    for found in level_table():
        cells = [f"{100 * score.accuracy:.1f} %" for score in found.scores]
        looked = next(score for score in found.scores if score.predictor == "metadata cache")
        cells.append(f"{looked.lookups:.2f}")
        lines.append(f"| {found.pattern} | {found.accesses:,} | {found.misses:,} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parts: list[tuple[str, Any]] = [
        (f"Rate, one thread, kernels {'compiled by numba' if COMPILED else 'interpreted: numba is missing'}", rates),
        ("Misses next to cachegrind's", as_cachegrind),
        ("Words that tiles move", tiles),
        (f"Share of misses of L1 whose level was predicted first ({PROTOTYPE}, {len(CASES)} patterns)", predicted),
    ]  # fmt: skip
    text = "\n\n".join("\n".join([f"## {title}", "", *work()]) for title, work in parts)
    notes = (
        "Accesses per second of CPU; generating the trace is part of every rate, compiling is not. Counts are held by\n"
        "`tests/validation/test_caches_as_valgrind.py` and `test_caches_as_pycachesim.py`, the formulas by\n"
        "`tests/unit/cost/test_tiling_formulas.py`. Prefetching is in none of it.\n"
    )
    report("hierarchy", "The memory hierarchy", text, notes)


if __name__ == "__main__":
    main()
