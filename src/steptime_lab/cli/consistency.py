"""``steptime consistency``: all-reduce and parameter servers, synchronous, stale-synchronous and asynchronous."""

from __future__ import annotations

from typing import Annotated, Any, Final

from steptime.cli import options as o
from steptime.cli.parser import flag, number, real, takes

#: Options of the command that the API takes as they are.
_PLAIN: Final = ("servers", "staleness", "jitter", "slow", "slow_workers", "sharding", "clocks", "seed")


@takes(o.JOB)
def command(
    model: o.ModelOrRun,
    servers: Annotated[
        int | None, number("--servers", "K", "Parameter servers; default: as many as workers.", 1, 100_000)
    ] = None,
    staleness: Annotated[
        int | None, number("--staleness", "S", "Clocks ahead of the slowest worker; default 3.", 0, 100_000)
    ] = None,
    jitter: Annotated[
        float | None, real("--jitter", "CV", "Coefficient of variation of the computing time; default 0.1.")
    ] = None,
    slow: Annotated[float | None, real("--slow", "FACTOR", "Factor by which some workers compute slower.")] = None,
    slow_workers: Annotated[int | None, number("--slow-workers", "N", "How many; default 1.", 0)] = None,
    sharding: Annotated[
        str | None, flag("--sharding", help="even: equal bytes on each server (default); tensors: whole ones.")
    ] = None,
    server_bandwidth: Annotated[
        str | None,
        flag("--server-bandwidth", metavar="'N GB/s'", help="Link of a server; default: as a device's."),
    ] = None,
    fail: Annotated[
        list[str] | None,
        flag("--fail", metavar="WHAT@TIME", help="worker@60s or server@60s; may be given several times."),
    ] = None,
    down: Annotated[str | None, flag("--down", metavar="TIME", help="How long it is away; default 5 min.")] = None,
    checkpoint: Annotated[
        str | None, flag("--checkpoint", metavar="TIME", help="Interval of the servers' checkpoints.")
    ] = None,
    clocks: Annotated[
        int | None, number("--clocks", "N", "Steps of each worker that are played; default 200.", 20, 100_000)
    ] = None,
    seed: Annotated[int | None, number("--seed", "N", "Of the jitter; default 0.", 0, 2**32 - 1)] = None,
    json: o.Json = False,
    **job: Any,
) -> None:
    """Throughput, waiting, staleness and failures of data-parallel training, by all-reduce and parameter servers.

    Workers are replicas of the model with the times of an estimate. Parameter servers run bulk-synchronous (bsp),
    stale-synchronous (ssp) or asynchronous (asp).
    """
    given = {
        "servers": servers,
        "staleness": staleness,
        "jitter": jitter,
        "slow": slow,
        "slow_workers": slow_workers,
        "sharding": sharding,
        "clocks": clocks,
        "seed": seed,
    }
    quantities = {"server_Bps": server_bandwidth, "down_s": down, "checkpoint_s": checkpoint}
    _run({"model": model, "json": json, **job}, o.given(**given), o.given(**quantities), fail or [])


def _run(job: dict[str, Any], given: dict[str, Any], quantities: dict[str, str], fail: list[str]) -> None:
    from steptime.cli.job import asked_job, needed
    from steptime.units import parse
    from steptime_lab.replicas.updates import consistency

    run = asked_job(job["model"], job)
    parsed: dict[str, Any] = {name: parse(text, name.rpartition("_")[2]) for name, text in quantities.items()}
    cluster = needed(run, "this command")
    found = consistency(
        run.model, cluster, **run.settings, plan=run.plan, failures=[_failure(text) for text in fail], **given, **parsed
    )
    if job["json"]:
        from steptime.cli.output import print_json

        print_json(found.to_json())
        return
    from steptime_lab.report.consistency import print_consistency

    print_consistency(found)


def _failure(text: str) -> tuple[str, float]:
    """The failing part and its time from text such as ``worker@60s``.

    >>> _failure("worker@2min")
    ('worker', 120.0)
    """
    from steptime.errors import FieldError
    from steptime.units import parse

    what, at, when = text.partition("@")
    if not at:
        raise FieldError("", "--fail", f"{text[:40]!r} has no time", hint="write for example worker@60s or server@60s")
    return what, parse(when, "s")
