"""``steptime iterate``: time of an iteration of Lanczos, conjugate gradients, or a user's loop."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Final

from steptime.cli import options as o
from steptime.cli.parser import flag, number, positional

PROFILE: Final = Path(__file__).with_name("zen4.json")
"""Default profile, measured on a Zen 4 processor."""


def command(
    algorithm: Annotated[
        str | None, positional(metavar="ALGORITHM", help="lanczos, lanczos-full, cg, power or a TOML file.")
    ] = None,
    matrix: Annotated[
        str | None, flag("--matrix", metavar="FAMILY:ROWS|FILE.mtx", help="As stencil-3d:100000.")
    ] = None,
    vectors: Annotated[int, number("--vectors", "N", "Vectors of the basis at its mean length.", 1, 10_000)] = 20,
    profile: Annotated[str | None, flag("--profile", metavar="FILE", help="Of a processor; default: a Zen 4.")] = None,
    nodes: Annotated[int, number("--nodes", "N", "Nodes over which rows are divided.", 1, 10**6)] = 1,
    cluster: Annotated[str | None, flag("--cluster", metavar="NAME", help="Links between the nodes.")] = None,
    calibrate: Annotated[
        str | None, flag("--calibrate", metavar="FILE", help="Time kernels on this machine, write a profile.")
    ] = None,
    processor: Annotated[
        str, flag("--processor", metavar="NAME", help="Caches for --calibrate; default: this machine's.")
    ] = "machine",
    json: o.Json = False,
) -> None:
    """Predict an iteration from what each level of the memory serves of its kernels, and name the parts.

    On several nodes the parts of x that others have, and sums, are sent over the links of a cluster.
    """
    from steptime.errors import FieldError

    if calibrate is not None:
        _calibrate(calibrate, processor)
        if algorithm is None:
            return
        profile = profile or calibrate
    if algorithm is None or matrix is None:
        raise FieldError("", "algorithm, --matrix", "missing", hint="as lanczos --matrix stencil-3d:100000")
    from steptime_lab.iterate.machine import read_profile
    from steptime_lab.iterate.run import iteration

    found = iteration(
        algorithm, matrix, read_profile(profile or PROFILE), vectors=vectors, nodes=nodes, cluster=cluster
    )
    if json:
        from steptime.cli.output import print_json

        print_json(found.to_json())
        return
    from steptime_lab.iterate.report import print_iteration

    print_iteration(found)


def _calibrate(path: str, processor: str) -> None:
    from steptime_lab.iterate.measure import measured, profile_of

    def report(text: str) -> None:
        print(text, file=sys.stderr)

    found, _ = profile_of(measured(processor, report), processor)
    found.write(path)
    report(f"{path}: {found.rows} kernels; {found.error:.1%} mean error on families left out")
