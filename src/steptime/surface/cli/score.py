"""``steptime score``: measured against predicted, on a table of measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from steptime.errors import UserError
from steptime.surface.cli import options as o


def command(
    file: Annotated[
        str | None, typer.Argument(metavar="[FILE]", help="Measured training runs (not in this version).")
    ] = None,
    kernels: Annotated[
        Path | None, typer.Option("--kernels", metavar="FILE", help="Table of measured kernels.")
    ] = None,
    collectives: Annotated[
        Path | None, typer.Option("--collectives", metavar="FILE", help="Table of measured collectives.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE.csv", help="Write the residual of every row.")
    ] = None,
    json: o.Json = False,
) -> None:
    """Predict every row of a table of measurements and report the errors.

    Tables are CSV, CSV.gz or Parquet. Rows that cannot be predicted are counted by reason.
    """
    if file is not None:
        raise UserError(
            "scoring measured training runs is not available in this version",
            hint="give --kernels FILE or --collectives FILE",
        )
    if (kernels is None) == (collectives is None):
        raise UserError("score needs one table", hint="give either --kernels FILE or --collectives FILE")
    from steptime.surface import scoring

    if out is not None:
        scoring.check_out(out)
    result = scoring.score_kernels(kernels) if kernels is not None else scoring.score_collectives(str(collectives))
    if out is not None:
        scoring.write_residuals(result, out)
    _report(result.score.to_json(), json)


def _report(score: dict[str, Any], as_json: bool) -> None:
    if as_json:
        from steptime.surface.cli.output import document, print_json

        print_json(document(**score))
        return
    from steptime.surface.report.score import print_score

    print_score(score)
