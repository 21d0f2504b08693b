"""``steptime devices``: list devices, or show one with the source of every number."""

from __future__ import annotations

from typing import Annotated

import typer

from steptime.cli import options as o


def command(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Name in the catalogue, or a TOML file.")] = None,
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
