"""``steptime guide``: questions by which a plan is chosen by hand, compared with the exhaustive search."""

from __future__ import annotations

from typing import Annotated, Any

from steptime.cli import options as o
from steptime.cli.parser import flag, number


def command(
    model: o.ModelOrRun,
    cluster: o.Cluster = None,
    gpus: o.Gpus = None,
    global_batch: o.GlobalBatch = None,
    seq: o.Seq = None,
    dtype: o.Dtype = None,
    optimizer: o.Optimizer = None,
    framework: o.Framework = None,
    steps: Annotated[int | None, number("--steps", "N", "Steps of the whole training.", 1, 10**9)] = None,
    within: Annotated[
        str | None,
        flag("--within", metavar="TIME", help="Time that the whole training may take, as '30 days'."),
    ] = None,
    json: o.Json = False,
) -> None:
    """Walk the questions by which a parallel plan is chosen by hand, each with its numbers, and what they miss.

    Does the model fit one device; is that fast enough; does saving memory make it fit; how are the devices connected;
    does traffic within operators fit the fast domain. It ends at the plan of the exhaustive search.
    """
    from steptime.cli.job import job_from, needed
    from steptime.cli.output import Progress
    from steptime.study.guide.decisions import guide
    from steptime.units import parse

    given = o.given(
        gpus=gpus, global_batch=global_batch, seq=seq, dtype=dtype, optimizer=optimizer, framework=framework
    )
    job = job_from(model, cluster, given, {})
    settings: dict[str, Any] = {name: value for name, value in job.settings.items() if name not in ("mode", "strategy")}
    within_s = None if within is None else parse(within, "s")
    with Progress("plans") as progress:
        found = guide(
            job.model, needed(job, "the guide"), **settings, steps=steps, within_s=within_s, progress=progress
        )
    if json:
        from steptime.cli.output import print_json

        print_json(found.to_json())
        return
    from steptime.study.guide.report import print_guide

    print_guide(found)
