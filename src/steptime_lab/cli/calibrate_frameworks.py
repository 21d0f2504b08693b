"""``steptime calibrate frameworks``: fit the parameters of training frameworks to measured runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Final

from steptime.cli import options as o
from steptime.cli.parser import flag, positional
from steptime.errors import FieldError, UserError

#: Source in the file of the package.
OWN_SOURCE: Final = "step times of published training runs; see docs/scoreboard.md"


def command(
    files: Annotated[list[Path], positional(metavar="FILE...", help="Tables of measured training runs.")],
    out: Annotated[
        Path | None, flag("--out", metavar="FILE.toml", help="File to write; without it frameworks.toml here.")
    ] = None,
    save: Annotated[bool, flag("--save", help="Write the files of the package itself.")] = False,
    json: o.Json = False,
) -> None:
    """Fit slowdowns, overlap and overheads of training frameworks to measured runs.

    Bands come from runs whose source had no part in the fit that predicts them. A folder of STEPTIME_PATH that has
    the file makes every command use it. Takes a minute for a few thousand runs.
    """
    from steptime.cli.output import Progress
    from steptime.measure.runs.bands import save_fit
    from steptime.plan.framework_file import NAME, PACKAGED
    from steptime.report.text import printable
    from steptime.store.files import refuse_unwritable, write_whole
    from steptime_lab.calibrate.framework_fitting import fit_runs

    if save and out is not None:
        raise UserError("--save and --out exclude each other", hint="--save writes the files of the package")
    target = PACKAGED if save else out or Path(NAME)
    if target.suffix != ".toml":
        raise FieldError("", "--out", f"{str(target)[:80]!r} does not end in .toml", hint=f"for example {NAME}")
    refuse_unwritable(target)
    with Progress("fitting frameworks") as progress:
        result = fit_runs(files, progress, source=OWN_SOURCE if save else None)
    save_fit(result.toml) if save else write_whole(target, result.toml)
    for warning in result.warnings:
        print(printable(f"Warning: {warning}"), file=sys.stderr)
    if json:
        from steptime.cli.output import document, print_json

        print_json(document(file=str(target), **result.to_json()))
        return
    from steptime.report.catalogue import print_frameworks

    print_frameworks(result.to_json(), str(target))
