"""The commands ``devices``, ``clusters``, ``models`` and ``frameworks``: list a catalogue, or show one entry."""

from __future__ import annotations

from typing import Annotated

from steptime.cli import options as o
from steptime.cli.parser import flag, positional


def devices(
    name: Annotated[str | None, positional("[NAME]", "Name in the catalogue, or a TOML file.", "device")] = None,
    json: o.Json = False,
) -> None:
    """List devices, or show one with every number, its kind and its source."""
    from steptime.cli.output import document, print_json
    from steptime.hardware import device_names, load_device
    from steptime.report import catalogue

    if name is not None:
        record = load_device(name)
        if json:
            print_json(document(device=record))
        else:
            catalogue.print_device(record)
        return
    records = [load_device(known) for known in device_names()]
    if json:
        print_json(document(devices=records))
    else:
        catalogue.print_devices(records)


def clusters(
    name: Annotated[str | None, positional("[NAME]", "Name in the catalogue, or a TOML file.", "cluster")] = None,
    json: o.Json = False,
) -> None:
    """List clusters, or show one with every number, its kind and its source."""
    from steptime.cli.output import document, print_json
    from steptime.hardware import cluster_names, load_cluster
    from steptime.report import catalogue

    if name is not None:
        record = load_cluster(name)
        if json:
            print_json(document(cluster=record))
        else:
            catalogue.print_cluster(record)
        return
    records = [load_cluster(known) for known in cluster_names()]
    if json:
        print_json(document(clusters=records))
    else:
        catalogue.print_clusters(records)


def models(
    name: Annotated[
        str | None, positional("[NAME]", "Name in the catalogue, a config.json or a TOML file.", "model")
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


def frameworks(
    name: Annotated[str | None, positional("[NAME]", "Name of a framework, or a file of one.", "framework")] = None,
    overlap: Annotated[bool, flag("--overlap", help="List what overlaps with what, what it needs and shares.")] = False,
    json: o.Json = False,
) -> None:
    """List the frameworks that --framework takes, or show one with every parameter and its doubt.

    With --overlap: which traffic overlaps with what; for a framework the rules that it follows by default.
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
