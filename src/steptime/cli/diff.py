"""``steptime diff``: compare two estimates term by term."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from steptime.cli import options as o
from steptime.cli.parser import positional
from steptime.errors import UserError

if TYPE_CHECKING:
    from steptime.estimate.result import Estimate


def command(
    a: Annotated[
        str, positional(metavar="A", help="RUN.toml, or what estimate or plan (its first) wrote with --json.")
    ],
    b: Annotated[str, positional(metavar="B", help="The same.")],
    show_all: o.All = False,
    json: o.Json = False,
) -> None:
    """Compare two estimates: what differs in the plan, and which terms of time and memory follow."""
    from steptime import api

    difference = api.diff(estimate_or_file(a), estimate_or_file(b))
    if json:
        from steptime.cli.output import print_json

        print_json(difference.to_json())
        return
    from steptime.report.estimate import print_difference

    print_difference(difference, a, b, show_all=show_all)


def estimate_or_file(path: str) -> Estimate:
    """The estimate from a JSON file, or of the run in a RUN.toml.

    Raises:
        UserError: the file is neither.
    """
    from steptime.cli.job import estimate_of
    from steptime.formats.run_spec import is_run_document, parse_run, read_description
    from steptime.store.files import parse_toml

    text = read_description(path)
    if text.lstrip()[:1] in ("{", "[") and not path.lower().endswith(".toml"):
        from steptime.formats.estimate_file import parse_estimate

        return parse_estimate(text, path)
    document = parse_toml(text, path)
    if not is_run_document(document):
        raise UserError(f"{path}: neither a RUN.toml nor an estimate in JSON", hint="a RUN.toml has a key `model`")
    return estimate_of(parse_run(document, path), path)
