"""``steptime clusters``: list clusters, or show one with the source of every number."""

from __future__ import annotations

from typing import Annotated

import typer

from steptime.cli import options as o


def command(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Name in the catalogue, or a TOML file.")] = None,
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
