"""Curves of the catalogue far outside their ranges: worst ratios over nine decades, as they are and as they were.

    python benchmarks/bench_curves.py            prints the table (benchmarks/curves.md)

Times of large sizes (a millisecond and more at the datasheet's rates) over the roofline, and between alike devices.
"before": rows beyond those that were measured cost as much as each of those.
"""

from __future__ import annotations

from asymptotes import against_alike, sweeps


def main() -> None:
    """Prints the table."""
    print("# Curves outside their ranges\n\nPrinted by `python benchmarks/bench_curves.py`.\n")
    print("| rows beyond the range | curve | largest over the roofline | between alike devices |\n|---|---|---:|---:|")
    for label, bounded in (("before: each its own cost", False), ("bytes only", True)):
        found = list(sweeps(bounded=bounded))
        apart = [(ratio, one.what.split(" over ")[0].split(" of rows")[0]) for ratio, one, _ in against_alike(found)]
        for what in sorted({name for _, name in apart}):
            over = [s.over.max() for s in found if len(s.over) and s.what.split(" ")[0] == what.split(" ")[0]]
            print(f"| {label} | {what} | {max(over):.1f} | {max(r for r, name in apart if name == what):.1f} |")


if __name__ == "__main__":
    main()
