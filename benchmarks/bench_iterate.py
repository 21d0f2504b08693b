"""Iterations of Lanczos on eight structures of matrices, each predicted by kernels of the other seven.

python benchmarks/bench_iterate.py           times kernels here (two minutes), prints the table
python benchmarks/bench_iterate.py --write   also writes benchmarks/iterate.md and the profile that steptime ships
"""

from __future__ import annotations

import sys
from statistics import mean

from machine import report
from steptime_lab.iterate.cli import PROFILE
from steptime_lab.iterate.machine import Profile
from steptime_lab.iterate.measure import ALGORITHMS, Measured, measured, profile_of

MEMORY_BPS = 27e9
"""Rate of memory for the roofline: a stream's, one thread."""


def off(predicted: float, row: Measured) -> float:
    """Relative error of an iteration."""
    return predicted / sum(row.seconds) - 1


def table(left_out: list[tuple[Measured, float]]) -> list[str]:
    """Mean errors by family."""
    lines = ["| family | iterations | error | bias | roofline of memory | noise |", "|---|--:|--:|--:|--:|--:|"]
    families = list(dict.fromkeys(row.family for row, _ in left_out))
    for family in [*families, "all"]:
        rows = [(row, predicted) for row, predicted in left_out if family in (row.family, "all")]
        errors = [off(predicted, row) for row, predicted in rows]
        roofs = [abs(off(row.bytes_moved / MEMORY_BPS, row)) for row, _ in rows]
        noise = [abs(off(row.again_s, row)) for row, _ in rows]
        cells = (mean(map(abs, errors)), mean(errors), mean(roofs), mean(noise))
        lines.append(f"| {family} | {len(rows)} | {' | '.join(f'{100 * each:.1f} %' for each in cells)} |")
    return lines


NOTES = """Every family is predicted by a profile of the other families' kernels. Times are CPU time of one thread,
first quartile of 12 repetitions; *noise* is the distance to 12 more. *Roofline* counts all arrays of the loop once, at
27 GB/s. Target: 10 % mean error."""


def notes(found: Profile, left_out: list[tuple[Measured, float]]) -> str:
    """What the table does not say."""
    by = {name: [abs(off(p, r)) for r, p in left_out if r.algorithm == name] for name in ALGORITHMS}
    each = "; ".join(f"{name} {100 * mean(errors):.1f} %" for name, errors in by.items())
    worst, predicted = max(left_out, key=lambda pair: abs(off(pair[1], pair[0])))
    values = "\n".join(f"| `{name}` | {value:.3g} |" for name, value in found.values.items())
    return f"""{NOTES} By algorithm: {each}.
Largest error: {100 * off(predicted, worst):+.0f} % ({worst.algorithm} on {worst.matrix}).

## Profile

A thread has {found.last_share:.0%} of the last cache of {found.processor}.

| coefficient | seconds |
|---|--:|
{values}
"""


def main() -> None:
    """Measure, print, write."""
    rows = measured("zen4", lambda text: print(text, file=sys.stderr, flush=True), sizes=(20_000, 100_000, 400_000))
    found, left_out = profile_of(rows, "zen4")
    report("iterate", "Iterations of Lanczos", "\n".join(table(left_out)), notes(found, left_out))
    if "--write" in sys.argv[1:]:
        found.write(PROFILE)


if __name__ == "__main__":
    main()
