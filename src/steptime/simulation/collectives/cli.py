"""``steptime collective``: time and bandwidth of one collective on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from steptime.cli import options as o
from steptime.cli.parser import flag, number, positional, row
from steptime.options import MAX_DEVICES


def command(
    operation: Annotated[
        str,
        positional(
            metavar="OPERATION",
            help="broadcast, reduce, scatter, gather, all_gather, reduce_scatter, all_reduce or all_to_all.",
        ),
    ],
    cluster: Annotated[str, row("cluster")],
    ranks: Annotated[int, number("--ranks", "N", "Devices of the group.", 2, MAX_DEVICES)],
    size: Annotated[str, flag("--size", metavar="SIZE", help="The whole tensor, as nccl-tests counts it.")] = "1GiB",
    least: Annotated[
        str, flag("--from", metavar="SIZE", help="Smallest size of the table; it ends with --size.")
    ] = "1KiB",
    inside: Annotated[
        int | None, number("--inside", "N", "Ranks in each fast domain; default: as many as divide the group.")
    ] = None,
    algorithm: Annotated[
        list[str] | None,
        flag("--algorithm", metavar="NAME", help="nccl, mst, ring and others; may be given several times."),
    ] = None,
    plot: Annotated[
        Path | None, flag("--plot", metavar="FILE", help="Draw time over size too (needs matplotlib).")
    ] = None,
    json: o.Json = False,
) -> None:
    """Time and bandwidth of one collective: what the library chooses, rings, minimum spanning trees.

    nccl is the time that an estimate takes, with algorithm and protocol; the others are latency, transfer and additions
    on the links of the catalogue.
    """
    from steptime.report.figure import refuse_plot
    from steptime.simulation.collectives import report as report
    from steptime.simulation.collectives.times import collective
    from steptime.units import parse

    if plot is not None:
        refuse_plot(plot)
    least_bytes, size_bytes = min(parse(least, "bytes"), parse(size, "bytes")), parse(size, "bytes")
    found = collective(
        operation,
        cluster,
        ranks=ranks,
        size_bytes=size_bytes,
        inside=inside,
        algorithms=algorithm or (),
        least_bytes=least_bytes,
    )
    if plot is not None:
        report.write_plot(found, plot)
    if json:
        from steptime.cli.output import print_json

        print_json(found.to_json())
        return
    report.print_collective(found, plot)
