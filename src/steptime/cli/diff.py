"""``steptime diff``: compare two estimates term by term."""

from __future__ import annotations

from typing import Annotated

import typer

from steptime.cli import options as o


def command(
    a: Annotated[
        str, typer.Argument(metavar="A", help="RUN.toml, or what estimate or plan (its first) wrote with --json.")
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="The same.")],
    show_all: o.All = False,
    json: o.Json = False,
) -> None:
    """Compare two estimates: what differs in the plan, and which terms of time and memory follow."""
    from steptime import api
    from steptime.cli.job import estimate_or_file

    difference = api.diff(estimate_or_file(a), estimate_or_file(b))
    if json:
        from steptime.cli.output import print_json

        print_json(difference.to_json())
        return
    from steptime.report.diff import print_difference

    print_difference(difference, a, b, show_all=show_all)
