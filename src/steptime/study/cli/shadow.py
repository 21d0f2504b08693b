"""``steptime shadow``: what one more unit of memory, bandwidth, rate, device or batch is worth to a run."""

from __future__ import annotations

from typing import Any

from steptime.cli import options as o
from steptime.cli.parser import takes


@takes({**o.JOB, **o.TRAINING})
def command(
    model: o.ModelOrRun,
    failures: o.Failures = None,
    prices: o.Prices = "default",
    json: o.Json = False,
    **job: Any,
) -> None:
    """Show what one more unit of everything that a run waits for is worth to it, in time and money, and how far.

    Bandwidths, rates and batch: of this plan. Device memory and devices: of the best plans.
    """
    from steptime.cli.job import asked_job, needed
    from steptime.errors import FieldError
    from steptime.study.shadow import shadow

    length = o.training_given(job)
    if not length:
        raise FieldError("", "tokens", "missing; a shadow price is of a whole run", hint="give --tokens 1T")
    asked = asked_job(model, job)
    found = shadow(
        asked.model,
        needed(asked, "a shadow price"),
        plan=asked.plan,
        failures=failures,
        prices=prices or "default",
        **asked.settings,
        **length,
    )
    if json:
        from steptime.cli.output import print_json

        print_json(found.to_json())
        return
    from steptime.study.worth import print_shadows

    print_shadows(found)
