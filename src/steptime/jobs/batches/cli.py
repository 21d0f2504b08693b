"""``steptime lengths``: padding, bucketing and packing of sequences of unequal lengths."""

from __future__ import annotations

from typing import Annotated, Any

from steptime.cli import options as o
from steptime.cli.parser import flag, number, takes


@takes(o.JOB)
def command(
    model: o.ModelOrRun,
    lengths: Annotated[
        str,
        flag("--lengths", metavar="SPREAD", help="lognormal:MEAN,SIGMA, 512=0.7,4096=0.3, or .csv, .json."),
    ] = "",
    buckets: Annotated[int, number("--buckets", "N", "Lengths of buckets.", 1, 64)] = 4,
    json: o.Json = False,
    **job: Any,
) -> None:
    """Compare ways to make batches of sequences of unequal lengths: useful tokens a second, padding, waits.

    --seq is the longest sequence, --global-batch the sequences of a step.
    """
    from steptime.cli.job import asked_job, needed
    from steptime.errors import FieldError
    from steptime.jobs.batches.run import batches

    if not lengths:
        raise FieldError("", "--lengths", "missing", hint="for example --lengths lognormal:900,1")
    asked = asked_job(model, job)
    cluster = needed(asked, "a comparison of batches")
    found = batches(asked.model, cluster, lengths=lengths, buckets=buckets, plan=asked.plan, **asked.settings)
    if json:
        from steptime.cli.output import print_json

        print_json(found.to_json())
        return
    from steptime.jobs.batches.report import print_batches

    print_batches(found)
