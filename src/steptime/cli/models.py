"""``steptime models``: list models, or show one."""

from __future__ import annotations

from typing import Annotated

import typer

from steptime.cli import options as o


def command(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Name in the catalogue, a config.json or a TOML file.")
    ] = None,
    json: o.Json = False,
) -> None:
    """List models, or show one with its dimensions and parameters."""
    from steptime.api.models import load_model, read_model
    from steptime.cli.output import document, plain, print_json
    from steptime.model import active_parameter_terms, catalogue_names, parameter_terms
    from steptime.report import catalogue

    if name is not None:
        spec, report = read_model(name)
        terms, active = parameter_terms(spec), active_parameter_terms(spec).total
        if json:
            imported = {"assumed": dict(report.assumed), "ignored": dict(report.ignored)}
            print_json(document(model={**plain(spec), "parameters": terms, "active_parameters": active, **imported}))
        else:
            catalogue.print_model(spec, terms, active)
            catalogue.print_import(report.assumed, report.ignored)
        return
    listed = [(spec, parameter_terms(spec).total) for spec in map(load_model, catalogue_names())]
    if json:
        print_json(document(models=[{**plain(spec), "parameters": total} for spec, total in listed]))
    else:
        catalogue.print_models(listed)
