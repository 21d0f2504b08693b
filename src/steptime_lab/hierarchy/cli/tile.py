"""``steptime tile``: the best tiles of a product, and what a warp's accesses cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

from steptime.cli import options as o
from steptime.cli.parser import Group, flag, number

if TYPE_CHECKING:
    from steptime_lab.hierarchy.tiles import TilePlan

GROUP: Final = Group("steptime tile", "Tiles of a product at every level of a machine, and accesses of a warp.")
LARGEST: Final = 1 << 24


@GROUP.command()
def matmul(
    m: Annotated[int, number("--m", "M", "Rows of the result; default 4096.", 1, LARGEST)] = 4096,
    n: Annotated[int, number("--n", "N", "Columns of the result; default 4096.", 1, LARGEST)] = 4096,
    k: Annotated[int, number("--k", "K", "Depth of the product; default 4096.", 1, LARGEST)] = 4096,
    dtype: Annotated[str, flag("--dtype", help="fp64, fp32 (default), tf32, bf16, fp16, fp8, int8.")] = "fp32",
    device: Annotated[
        str | None, flag("--device", catalogue="device", help="A GPU of the catalogue, as h100-sxm.")
    ] = None,
    processor: Annotated[
        str | None,
        flag("--processor", metavar="NAME", help="Of steptime cache list, or machine; zen4."),
    ] = None,
    cache: Annotated[
        str | None, flag("--cache", metavar="SIZE:WAYS,...", help="Caches of a core in place of these.")
    ] = None,
    plot: o.Plot = None,
    json: o.Json = False,
) -> None:
    """The tile of every level that moves the fewest bytes, next to the fewest that any order moves.

    The side by formula is that of a square in real numbers; the tile is found by search over multiples of the tile
    inside it. A GPU keeps results in registers, strips of the operands in shared memory and the second level.
    """
    from steptime.cli.output import document, print_json
    from steptime.report.plots.asked import drawing
    from steptime_lab.hierarchy.answers import tile_answer

    draw = drawing("hierarchy", plot)
    plan = tile_answer((m, n, k), dtype, device=device, name=processor, cache=cache)
    answer = document(**{key: getattr(plan, key) for key in plan.__dataclass_fields__})
    if draw is not None:
        from steptime.cli.output import plain

        draw(plain(answer))
    if json:
        print_json(answer)
        return
    _print_plan(plan)


@GROUP.command()
def warp(
    stride: Annotated[int, number("--stride", "BYTES", "From thread to thread; default 4.", 0, 1 << 30)] = 4,
    access: Annotated[int, number("--access", "BYTES", "Of a thread: 1, 2, 4, 8 or 16; default 4.", 1, 16)] = 4,
    offset: Annotated[int, number("--offset", "BYTES", "Of the first thread's address; default 0.", 0, 1 << 30)] = 0,
    paths: Annotated[int, number("--paths", "N", "Paths that its threads take; default 1.", 1, 32)] = 1,
    json: o.Json = False,
) -> None:
    """Sectors, bank conflicts and divergence of one instruction of 32 threads at equal distances."""
    from steptime.cli.output import document, print_json
    from steptime_lab.hierarchy.warp import warp_request

    found = warp_request(stride, access, offset_bytes=offset, paths=paths)
    if json:
        print_json(document(**{key: getattr(found, key) for key in found.__dataclass_fields__}))
        return
    from steptime.report import text as t

    out = t.console()
    out.print(f"32 threads, {access} bytes each, {stride} bytes apart")
    table = t.grid(["what", "count", "factor"])
    table.add_row("sectors of global memory", str(found.sectors), f"{found.memory_factor:.3g}")
    table.add_row("useful share of them", t.percent(found.coalescing), "")
    table.add_row("cycles of shared memory", str(found.bank_conflict_ways), f"{found.bank_conflict_ways}")
    table.add_row("paths issued", str(found.paths), f"{found.paths}")
    out.print(table)


def _print_plan(plan: TilePlan) -> None:
    from steptime.report import text as t
    from steptime.units import format_bytes, format_seconds

    out = t.console()
    out.print(t.printable(f"{plan.m} x {plan.n} x {plan.k} in {plan.dtype}, {plan.machine}"), soft_wrap=True)
    timed = any(row.time_s is not None for row in plan.levels)
    columns = ["tile in", "size", "square", "filled from", "moves", "at least", "FLOP/B", *(["time"] if timed else [])]
    table = t.grid(columns, left=(0, 3))
    for row in plan.levels:
        cells = [
            f"{row.rows} x {row.columns}",
            f"{row.closed_form:.1f}",
            row.below,
            format_bytes(row.traffic_bytes),
            format_bytes(row.bound_bytes),
            f"{row.intensity:.1f}",
        ]
        if timed:
            cells.append("" if row.time_s is None else format_seconds(row.time_s))
        table.add_row(row.level, *cells)
    out.print(table)
    out.print(f"Without tiles: {format_bytes(plan.naive_bytes)}.", soft_wrap=True)
    if plan.limited_by is not None and plan.peak_flops_per_s:
        seconds = format_seconds(plan.flops / plan.peak_flops_per_s)
        out.print(f"At the peak {seconds}; limited by {plan.limited_by}.", soft_wrap=True)
