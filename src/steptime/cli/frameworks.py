"""``steptime frameworks``: list fitted training frameworks, or show one with every parameter and its doubt."""

from __future__ import annotations

from typing import Annotated

import typer

from steptime.cli import options as o


def command(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Name of a framework.")] = None,
    overlap: Annotated[
        bool, typer.Option("--overlap", help="List what hides behind what, what it needs and shares.")
    ] = False,
    json: o.Json = False,
) -> None:
    """List the frameworks that --framework takes, or show one with every parameter and its doubt.

    With --overlap: what traffic hides behind what; of a framework the rules that it follows unless told otherwise.
    """
    from steptime.api.frameworks import framework_file_record, framework_record, overlap_records
    from steptime.cli.output import document, print_json
    from steptime.plan.framework_file import framework_names
    from steptime.report import catalogue as report

    if overlap:
        rules = overlap_records(name)
        notes = () if name is None else framework_record(name).notes
        if json:
            print_json(document(overlap=rules, notes=list(notes)))
        else:
            report.print_overlap_rules(rules, notes)
        return
    if name is not None:
        record = framework_record(name)
        if json:
            print_json(document(framework=record.to_json()))
        else:
            report.print_framework(record)
        return
    records = [framework_record(known) for known in framework_names()]
    fit = framework_file_record()
    if json:
        print_json(document(fit=fit, frameworks=[record.to_json() for record in records]))
    else:
        report.print_framework_list(records, fit)
