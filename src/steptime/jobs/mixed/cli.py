"""``steptime mixed``: a job over two kinds of devices, or two sites."""

from __future__ import annotations

from typing import Annotated, Any

from steptime.cli import options as o
from steptime.cli.parser import flag, number, positional


def command(
    model: Annotated[str, positional(metavar="MODEL", help="Catalogue name, config.json, or TOML file.")],
    cluster: Annotated[
        str | None, flag("--cluster", metavar="GROUPS.toml", help="File with [groups.NAME] and [link].")
    ] = None,
    global_batch: o.GlobalBatch = None,
    way: Annotated[str, flag("--way", help="stages, data, or both.")] = "both",
    fix: Annotated[
        list[str] | None, flag("--fix", metavar="KEY=VALUE", help="Degree of all groups, as tp=8. Repeatable.")
    ] = None,
    seq: o.Seq = None,
    dtype: o.Dtype = None,
    optimizer: o.Optimizer = None,
    framework: o.Framework = None,
    top: Annotated[int, number("--top", "K", "Pipelines to show, next to the best shares.", 1, 100)] = 3,
    json: o.Json = False,
) -> None:
    """Plan a job over several groups of devices: unequal stages, or unequal shares of the batch.

    Names the slower group, how long each waits, the best split and the even one.
    """
    from steptime.cli.job import parse_fix
    from steptime.errors import FieldError
    from steptime.jobs.mixed.run import mixed

    if cluster is None:
        raise FieldError("", "--cluster", "missing", hint="give --cluster GROUPS.toml (steptime mixed --help)")
    if global_batch is None:
        raise FieldError("", "--global-batch", "missing", hint="give --global-batch SEQUENCES")
    job: dict[str, Any] = o.given(seq=seq, dtype=dtype, optimizer=optimizer, framework=framework)
    found = mixed(model, cluster, global_batch=global_batch, way=way, fix=parse_fix(fix or []), top=top, **job)
    if json:
        from steptime.cli.output import print_json

        print_json(found.to_json())
        return
    from steptime.jobs.mixed.report import print_mixed

    print_mixed(found)
