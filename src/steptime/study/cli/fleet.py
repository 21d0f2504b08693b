"""``steptime fleet``: which kind and number of devices a run needs for a deadline, a budget, the least cost."""

from __future__ import annotations

from typing import Annotated, Any

from steptime.cli import options as o
from steptime.cli.parser import flag, takes


@takes(o.TRAINING)
def command(
    model: o.ModelOrRun,
    cluster: Annotated[str | None, flag("--cluster", metavar="A,B,...", help="Kinds of clusters.")] = None,
    gpus: Annotated[
        str | None,
        flag("--gpus", metavar="N,M,...|N..M", help="Numbers of devices; N..M: doubled from N to M."),
    ] = None,
    global_batch: o.GlobalBatch = None,
    seq: o.Seq = None,
    dtype: o.Dtype = None,
    optimizer: o.Optimizer = None,
    framework: o.Framework = None,
    objective: Annotated[str, flag("--objective", help="What is least: cost, time or energy.")] = "cost",
    deadline: o.Deadline = None,
    budget: o.Budget = None,
    failures: o.Failures = "default",
    prices: o.Prices = "default",
    json: o.Json = False,
    **training: Any,
) -> None:
    """Rank kinds and numbers of devices for one training run: when it is done, what it costs, what it draws.

    Each has its fastest plan. Those first that keep deadline and budget; a star marks the front of time, money, energy.
    """
    from steptime.errors import FieldError
    from steptime.study.fleet import fleet

    length = o.training_given(training)
    if not length:
        raise FieldError("", "tokens", "missing; a fleet is bought for a whole run", hint="give --tokens 1T")
    if global_batch is None:
        raise FieldError("", "--global-batch", "missing", hint="give --global-batch SEQUENCES")
    job: dict[str, Any] = o.given(
        global_batch=global_batch, seq=seq, dtype=dtype, optimizer=optimizer, framework=framework
    )
    found = fleet(
        model,
        [name for name in (cluster or "").split(",") if name],
        counts(gpus or ""),
        objective=objective,
        deadline=deadline,
        budget=budget,
        failures=failures or "default",
        prices=prices or "default",
        **length,
        **job,
    )
    if json:
        from steptime.cli.output import print_json

        print_json(found.to_json())
        return
    from steptime.study.worth import print_fleets

    print_fleets(found)


def counts(text: str) -> list[int]:
    """Numbers of devices of a list such as ``256,512`` or ``256..1024``.

    >>> counts("8,16"), counts("256..1024")
    ([8, 16], [256, 512, 1024])
    """
    from steptime.errors import FieldError, shown
    from steptime.options import digits

    low, dots, high = text.partition("..")
    first, last = digits(low), digits(high)
    if dots and 1 <= first <= last <= 10**7:
        return [first << n for n in range(24) if first << n <= last]
    out = [digits(part) for part in text.split(",") if part]
    if dots or any(not 1 <= count <= 10**7 for count in out):
        raise FieldError("", "--gpus", f"{shown(text)} has no numbers of devices", hint="as 256,512 or 256..2048")
    return out
