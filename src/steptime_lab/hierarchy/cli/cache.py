"""``steptime cache``: access patterns through simulated caches, reuse distances, predicted levels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

from steptime.cli import options as o
from steptime.cli.parser import Group, flag, number, positional

if TYPE_CHECKING:
    from steptime_lab.hierarchy.answers import CacheReport
    from steptime_lab.hierarchy.levels import Predicted
    from steptime_lab.hierarchy.traces import Shape

GROUP: Final = Group("steptime cache", "Caches simulated access by access: hits, causes of misses, distances of reuse.")
MOST: Final = 1 << 26
LINE: Final = 64
Pattern = Annotated[
    str,
    positional(
        metavar="PATTERN",
        help="stream, strided, stencil, transpose, matmul, matmul-naive, gather, zipf, histogram, chase, spmv, "
        "spmv-skewed or spmv-banded.",
    ),
]
Cache = Annotated[
    str | None, flag("--cache", metavar="SIZE:WAYS,...", help="Levels, as 32KiB:8,1MiB:8; WAYS may be full.")
]
Name = Annotated[
    str | None,
    flag("--processor", metavar="NAME", help="Caches of steptime cache list, or machine; default zen4."),
]
Line = Annotated[int | None, number("--line", "BYTES", "Bytes of a line; default 64.", 1, 4096)]
N = Annotated[int | None, number("--n", "N", "Elements, or the side of a matrix; default 4096, 96.", 1, MOST)]
Width = Annotated[int | None, number("--element-bytes", "BYTES", "Of an element; default 8.", 1, 64)]
Tile = Annotated[int | None, number("--tile", "N", "Side of a tile of matmul; default 16.", 1, MOST)]
Stride = Annotated[int | None, number("--stride", "N", "Elements between loads of strided; default 16.", 1, MOST)]
Table = Annotated[int | None, number("--table", "N", "Elements that are gathered from; default 65536.", 2, MOST)]
Passes = Annotated[int | None, number("--passes", "N", "Passes of stream, strided, spmv; default 2.", 1, 1000)]
Leading = Annotated[int | None, number("--leading", "N", "Elements from row to row; default its own.", 1, MOST)]
Seed = Annotated[int | None, number("--seed", "N", "Of random places; default 0.", 0, 2**31)]
Unpacked = Annotated[bool, flag("--unpacked", help="Tiles of matmul lie in rows of the whole matrix.")]
WIDE: Final = 80
"""Least width of a terminal, in characters, for a table with all columns."""
SIDE: Final = 96
"""Default side of a matrix."""


def _shape(pattern: str, given: dict[str, Any]) -> Shape:
    from steptime_lab.hierarchy.traces import MATRICES, Shape

    fields = {name: value for name, value in given.items() if name in Shape.__dataclass_fields__ and value is not None}
    if pattern in MATRICES:
        fields.setdefault("n", SIDE)
    return Shape(**fields, packed=not given["unpacked"])


@GROUP.command()
def simulate(
    pattern: Pattern,
    cache: Cache = None,
    processor: Name = None,
    inclusive: Annotated[bool, flag("--inclusive", help="A level has all lines of the levels above.")] = False,
    line: Line = None,
    n: N = None,
    element_bytes: Width = None,
    tile: Tile = None,
    stride: Stride = None,
    table: Table = None,
    passes: Passes = None,
    leading: Leading = None,
    unpacked: Unpacked = False,
    seed: Seed = None,
    json: o.Json = False,
) -> None:
    """Play a pattern through caches: hits of each level, traffic, and why the first level misses.

    Replacement is least recently used; stores allocate, dirty lines are written back. Not inclusive unless asked.
    """
    from steptime_lab.hierarchy.answers import cache_report, chosen_caches

    given = locals()
    name, caches = chosen_caches(cache, processor, line_bytes=line or LINE, inclusive=inclusive)
    report = cache_report(pattern, _shape(pattern, given), caches, name)
    if json:
        from steptime.cli.output import print_json

        print_json(report.to_json())
        return
    _print_report(report)


@GROUP.command("reuse")
def reuse_command(
    pattern: Pattern,
    line: Line = None,
    n: N = None,
    element_bytes: Width = None,
    tile: Tile = None,
    stride: Stride = None,
    table: Table = None,
    passes: Passes = None,
    leading: Leading = None,
    unpacked: Unpacked = False,
    seed: Seed = None,
    json: o.Json = False,
) -> None:
    """Distances of reuse: the miss ratio of every size of a cache with one set, and the working sets."""
    from steptime_lab.hierarchy.answers import reuse_report
    from steptime_lab.hierarchy.geometry import hierarchy

    given = locals()
    length = line or LINE
    hierarchy(f"{length}B:1", line_bytes=length)  # refuses a line of an impossible length
    report = reuse_report(pattern, _shape(pattern, given), length)
    if json:
        from steptime.cli.output import print_json

        print_json(report)
        return
    _print_reuse(report)


@GROUP.command()
def levels(
    patterns: Annotated[
        list[str] | None, positional(metavar="PATTERN...", help="Of simulate; default twelve of them.")
    ] = None,
    cache: Annotated[
        str | None, flag("--cache", metavar="SIZE:WAYS,...", help="Default 8KiB:8,64KiB:8,512KiB:16.")
    ] = None,
    processor: Annotated[str | None, flag("--processor", metavar="NAME", help="Caches of steptime cache list.")] = None,
    json: o.Json = False,
) -> None:
    """Predict which level serves a miss of the first: accuracy of seven predictors on each pattern.

    Next level, two-bit histories and a Bloom miss map are the baselines; the detector of popular levels, the last level
    of the instruction, the metadata cache and the location map are those of Jalili and Erez, HPCA 2022.
    """
    from steptime_lab.hierarchy.answers import chosen_caches
    from steptime_lab.hierarchy.levels import PROTOTYPE, level_table

    levels_text = PROTOTYPE if cache is None and processor is None else cache
    name, caches = chosen_caches(levels_text, processor, line_bytes=LINE, inclusive=False)
    rows = level_table(caches, tuple(patterns or ()))
    if json:
        from steptime.cli.output import document, print_json

        print_json(document(caches=name, patterns=rows))
        return
    _print_levels(name, rows)


@GROUP.command("list")
def list_command(json: o.Json = False) -> None:
    """List the processors whose caches are known, with their sources."""
    from steptime.cli.output import document, print_json
    from steptime_lab.hierarchy.caches import processor, processors

    rows = [processor(name) for name in processors()]
    if json:
        print_json(document(processors=rows))
        return
    from steptime.report import text as t
    from steptime.units import format_bytes

    out = t.console()
    table = t.grid(["processor", "what", "L1", "L2", "L3"], left=(0, 1))
    for row in rows:
        sizes = (f"{format_bytes(level.size_bytes)}, {level.ways}" for level in row.levels)
        table.add_row(row.name, row.title, *sizes)
    out.print(table)
    out.print("Size and ways; lines of 64 bytes. machine is the processor that this runs on.")
    for row in rows:
        t.indented(out, f"{row.name}: {row.source}", 2)


def _print_report(report: CacheReport) -> None:
    from steptime.report import text as t
    from steptime.units import format_bytes

    out = t.console()
    out.print(
        t.printable(
            f"{report.pattern}: {report.accesses:,} accesses to {format_bytes(report.footprint_bytes)}, {report.caches}"
        ),
        soft_wrap=True,
    )
    table = t.grid(["level", "geometry", "hits", "hit rate", "written back", "traffic below"], left=(0, 1))
    for row in report.levels:
        geometry = f"{format_bytes(row['size_bytes'])}, {row['ways']} x {row['sets']}"
        cells = (f"{row['hits']:,}", t.percent(row["hit_rate"]), f"{row['write_backs']:,}")
        table.add_row(row["name"], geometry, *cells, format_bytes(row["below_bytes"]))
    out.print(table)
    t.heading(out, "Served by")
    names = list(next(iter(report.served.values())))
    table = t.grid(["instruction", *names])
    for site, shares in report.served.items():
        table.add_row(site, *(t.percent(share) for share in shares.values()))
    out.print(table)
    causes = report.causes
    out.print(
        f"Misses of L1: {causes['cold']:,} cold, {causes['capacity']:,} capacity, {causes['conflict']:,} conflict",
        soft_wrap=True,
    )
    if report.conflict:
        t.indented(out, report.conflict, 2)


def _print_reuse(report: dict[str, Any]) -> None:
    from steptime.report import text as t
    from steptime.units import format_bytes

    out = t.console()
    out.print(f"{report['pattern']}: {report['accesses']:,} accesses to {report['lines']:,} lines", soft_wrap=True)
    table = t.grid(["cache with one set", "misses", "working set"], left=(0, 2))
    held = {row["capacity_bytes"] for row in report["working_sets"]}
    for row in report["curve"]:
        size = row["capacity_bytes"]
        table.add_row(format_bytes(size), f"{100 * row['miss_ratio']:.2f} %", "fits" if size in held else "")
    out.print(table)


def _print_levels(name: str, rows: list[Predicted]) -> None:
    from steptime.report import text as t

    out = t.console()
    out.print(t.printable(f"Share of misses of L1 whose level was predicted, %; {name}"))
    short = {
        "next level": "next",
        "hit/miss history": "2-bit",
        "Bloom miss map": "Bloom",
        "popular levels": "pop",
        "last of instruction": "last",
        "metadata cache": "meta",
        "location map": "map",
    }
    wide = out.width >= WIDE
    names = [short[score.predictor] for score in rows[0].scores]
    table = t.grid(["pattern", *(["misses"] if wide else []), *names, *(["looks"] if wide else [])])
    for row in rows:
        popular = next(score for score in row.scores if score.predictor == "metadata cache")
        cells = (f"{100 * score.accuracy:.{int(wide)}f}" for score in row.scores)
        shown = [f"{row.misses:,}"] if wide else []
        table.add_row(row.pattern, *shown, *cells, *([f"{popular.lookups:.2f}"] if wide else []))
    out.print(table)
    out.print(
        "next: always L2. 2-bit: hit/miss history. Bloom: miss map. pop: popular-levels detector. last: level of "
        "the instruction's last miss. meta: metadata cache, else the detector. map: location map of all lines. "
        "looks: levels looked up per miss with the metadata cache, a second one where the detector is not sure."
    )
