"""``steptime score``: measured against predicted, on a table of measurements."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from steptime.cli import options as o
from steptime.cli.parser import flag, number, positional
from steptime.errors import UserError
from steptime.store.files import refuse_output


def _file(option: str, text: str, metavar: str = "FILE") -> Any:
    return flag(option, metavar=metavar, help=text)


RAN = "Table of layouts that ran or ran out of memory, instead of FILE: columns of training runs, and outcome."
LEAVE_OUT = (
    "Predict runs by fits without their source (each), model, or model in its source; or only those of source KEY."
)
COLLECTIVE = (
    "If not in the file: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, gather, scatter or p2p."
)


def command(
    file: Annotated[str | None, positional(metavar="[FILE]", help="Table of measured training runs.")] = None,
    kernels: Annotated[Path | None, _file("--kernels", "Table of measured kernels instead.")] = None,
    collectives: Annotated[Path | None, _file("--collectives", "Table of measured collectives instead.")] = None,
    stages: Annotated[Path | None, _file("--stages", "Table of measured times of pipeline stages instead.")] = None,
    outcomes: Annotated[Path | None, _file("--outcomes", RAN)] = None,
    given_cells: Annotated[
        list[str] | None,
        flag("--set", metavar="COLUMN=TEXT", help="Text of the empty cells of a column of layouts."),
    ] = None,
    figure: Annotated[Path | None, _file("--figure", "Reliability diagram of the layouts.", "FILE.svg")] = None,
    leave_out: Annotated[str | None, _file("--leave-out", LEAVE_OUT, "each|model|source_and_model|KEY")] = None,
    unknown: Annotated[
        bool, flag("--framework-unknown", help="Predict runs by the values common to all frameworks.")
    ] = False,
    gpu: Annotated[str | None, _file("--gpu", "Device of collectives, where the file does not say it.", "NAME")] = None,
    gpus: Annotated[int | None, number("--gpus", "N", "Devices of the group, if not in the file.", 2)] = None,
    per_node: Annotated[int | None, number("--gpus-per-node", "N", "Devices of one node, if not in the file.")] = None,
    collective: Annotated[str | None, _file("--collective", COLLECTIVE, "NAME")] = None,
    columns: Annotated[bool, flag("--columns", help="List the columns and names that the tables may have.")] = False,
    out: Annotated[Path | None, flag("--out", metavar="FILE.csv", help="Write every row.")] = None,
    json: o.Json = False,
) -> None:
    """Predict every row of a table of measurements and report the errors.

    Tables are CSV, CSV.gz or Parquet; collectives also what nccl-tests prints. Rows that cannot be predicted are
    counted by reason.
    """
    if columns:
        from steptime.measure.report.score import columns_document, print_columns

        _report(columns_document(), json, lambda _: print_columns())
        return
    if sum(given is not None for given in (file, kernels, collectives, stages, outcomes)) != 1:
        raise UserError(
            "score needs one table",
            hint="give one of FILE, --kernels FILE, --collectives FILE, --stages FILE or --outcomes FILE",
        )
    where: dict[str, str | int | None] = {
        "gpu": gpu,
        "n_gpus": gpus,
        "gpus_per_node": per_node,
        "collective": collective,
    }
    given = {name: value for name, value in where.items() if value is not None}
    if given and collectives is None:
        raise UserError(
            "--gpu, --gpus, --gpus-per-node and --collective are for collectives alone", hint="give --collectives FILE"
        )
    if outcomes is None and (given_cells or figure):
        raise UserError("--set and --figure are for layouts alone", hint="give --outcomes FILE")
    if file is not None:
        _runs(file, leave_out, unknown, out, json)
        return
    for name, value in (("--leave-out", leave_out), ("--framework-unknown", unknown or None)):
        if value is not None:
            raise UserError(f"{name} is for training runs alone", hint="give FILE")
    if out is not None:
        refuse_output(out, "--out", "residuals.csv")
    if stages is not None:
        _stages(stages, out, json)
    elif outcomes is not None:
        _outcomes(outcomes, given_cells or [], figure, out, json)
    elif kernels is not None:
        _table("kernels", kernels, given, out, json)
    else:
        _table("collectives", collectives, given, out, json)


def _table(kind: str, path: Path | None, given: dict[str, str | int], out: Path | None, as_json: bool) -> None:
    from steptime.measure.kinds import KINDS
    from steptime.measure.report.score import print_score

    result = KINDS[kind].score(str(path), given)
    if out is not None:
        result.write(out)
    _report(result.to_json(), as_json, print_score)


def _runs(file: str, leave_out: str | None, unknown: bool, out: Path | None, as_json: bool) -> None:
    from steptime.cli.output import Progress
    from steptime.measure.report.score import print_run_score
    from steptime.measure.runs import scoring as measured_scoring

    if out is not None:
        refuse_output(out, "--out", "residuals.csv")
    with Progress("predicting runs" if leave_out is None else "fitting and predicting") as progress:
        result = measured_scoring.score_runs(file, leave_out=leave_out, named=not unknown, progress=progress)
    if out is not None:
        measured_scoring.write_rows(result, out)
    _report(result.to_json(), as_json, print_run_score)


def _stages(file: Path, out: Path | None, as_json: bool) -> None:
    from steptime.measure.runs import stages as stage_scoring

    result = stage_scoring.score_stages(str(file))
    if out is not None:
        stage_scoring.write_stages(result, out)
    from steptime.measure.report.score import print_stage_score

    _report(result.to_json(), as_json, print_stage_score)


def _outcomes(file: Path, texts: list[str], figure: Path | None, out: Path | None, as_json: bool) -> None:
    from steptime.cli.output import Progress
    from steptime.measure.runs import outcomes as outcome_scoring
    from steptime.measure.runs.outcomes import print_outcomes, write_reliability

    given = outcome_scoring.given_cells(texts)
    if figure is not None:
        refuse_output(figure, "--figure", "reliability.svg")
    with Progress("predicting layouts") as progress:
        result = outcome_scoring.score_outcomes(file, given, progress=progress)
    if out is not None:
        outcome_scoring.write_outcomes(result, out)
    score = result.to_json()
    if figure is not None:
        write_reliability(score, figure)
    _report(score, as_json, print_outcomes)


def _report(found: dict[str, Any], as_json: bool, show: Callable[[dict[str, Any]], None]) -> None:
    """Prints a result as a JSON document, or by ``show``."""
    if as_json:
        from steptime.cli.output import document, print_json

        print_json(document(**found))
    else:
        show(found)
