"""Charts of time and place: passes of a pipeline over time, ranks of a plan over devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from steptime.errors import UserError
from steptime.report.plots.charts import Axis, Chart, Panel, Series
from steptime.report.plots.results import Result

PASSES: Final = {
    "F": "forward",
    "B": "backward",
    "I": "gradients of inputs",
    "W": "gradients of weights",
    "UPDATE": "update",
    "UNSHARD": "all-gather of weights",
    "REDUCE_GRAD": "reduction of gradients",
    "OFFLOAD": "to the host",
    "RELOAD": "from the host",
}
MOST_LABELS: Final = 400
"""Largest number of passes with numbers; more numbers would overlap."""
ORDER: Final = ("tp", "tp2", "cp", "dp", "pp")
"""Axes of a mesh, innermost first, as launchers number ranks."""
MOST_DOMAINS: Final = 32
"""Largest number of fast domains in a map."""


def timeline(results: Sequence[Result]) -> Chart:
    """Passes of every rank of a simulated step over time; the number in a box is its micro-batch.

    Raises:
        UserError: the result does not contain its passes.
    """
    found = results[0]
    if not found.has("passes"):
        raise UserError(f"{found.name}: the passes are not in it", hint="steptime simulate --json --timeline has them")
    count = len(found.items("passes", "kind"))
    ranks, kinds = int(found.real("ranks")), [found.word("passes", "kind", i) for i in range(count)]
    columns = {name: found.reals("passes", name) for name in ("rank", "start_s", "end_s", "micro_batch")}
    if any(len(values) != len(kinds) for values in columns.values()):
        raise UserError(f"{found.name}: its passes have columns of different lengths")
    numbered = len(kinds) <= MOST_LABELS
    series = []
    for kind in dict.fromkeys(kinds):
        of = [i for i, each in enumerate(kinds) if each == kind]
        series.append(
            Series(
                name=PASSES.get(kind, kind),
                style="box",
                x=tuple(columns["start_s"][i] for i in of),
                y=tuple(columns["rank"][i] for i in of),
                size=tuple(columns["end_s"][i] - columns["start_s"][i] for i in of),
                labels=tuple(f"{columns['micro_batch'][i]:.0f}" if numbered else "" for i in of),
            )
        )
    names = tuple(f"rank {rank}" for rank in range(min(ranks, 4096)))
    panel = Panel(x=Axis(label="time", unit="s"), y=Axis(label="", ticks=names), series=tuple(series))
    title = f"{found.word('model')} on {found.word('cluster')}, {found.word('schedule')}"
    share = f"bubble {100 * found.real('bubble_fraction'):.1f} % of {found.real('pipeline_s'):.4g} s"
    return Chart(kind="timeline", title=title, panels=(panel,), notes=(f"{share}; numbers are micro-batches",))


def mesh(results: Sequence[Result]) -> Chart:
    """Map of the ranks of each axis over fast domains.

    A row is a fast domain, a box a device, with its rank in the order of launchers and its place on every axis that the
    plan has; the series are the stages of the pipeline.
    """
    found = results[0]
    plan = found.table("plan")
    degrees = {axis: int(found.real("plan", axis)) for axis in ORDER if axis in plan}
    inside = {axis: int(found.real("plan", "placement", axis)) for axis in found.table("plan", "placement")}
    for axis, ranks in degrees.items():
        part = inside.setdefault(axis, 1)
        if ranks < 1 or part < 1 or ranks % part:
            raise UserError(f"{found.name}: {axis} has {ranks} ranks, of which {part} in a fast domain")
    places = list(places_of(degrees, inside))
    shown = [place for place in places if place["domain"] < MOST_DOMAINS]
    last = max(place["domain"] for place in shown)
    series = [_stage(stage, shown, degrees) for stage in range(degrees.get("pp", 1))]
    width, domains = max(place["slot"] for place in shown) + 1, max(place["domain"] for place in places) + 1
    panel = Panel(
        x=Axis(label="device of the fast domain", ticks=tuple(map(str, range(width)))),
        y=Axis(label="", ticks=tuple(f"domain {i}" for i in range(last + 1))),
        series=tuple(each for each in series if each.x),
    )
    more = (f"domains 0 to {last} of {domains}",) if last + 1 < domains else ()
    used = ", ".join(f"{axis} {ranks}" for axis, ranks in degrees.items() if ranks > 1) or "one device"
    idle = found.table("plan").get("idle_devices")
    notes = (*more, *((f"{idle} devices of each fast domain are idle",) if idle else ()))
    return Chart(kind="mesh", title=f"{title_of(found)}: {used}", panels=(panel,), notes=notes)


def places_of(degrees: Mapping[str, int], inside: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Rank, fast domain, slot in it and coordinates of every rank of a mesh, innermost axis first.

    >>> places = list(places_of({"tp": 2, "pp": 2}, {"tp": 2, "pp": 1}))
    >>> [(p["rank"], p["domain"], p["slot"], p["tp"], p["pp"]) for p in places]
    [(0, 0, 0, 0, 0), (1, 0, 1, 1, 0), (2, 1, 0, 0, 1), (3, 1, 1, 1, 1)]
    """
    total = 1
    for ranks in degrees.values():
        total *= ranks
    if total > 2**20:
        raise UserError(f"a map of {total:,} devices cannot be drawn", hint=f"at most {2**20:,}")
    for rank in range(total):
        rest, domain, slot, domains, slots = rank, 0, 0, 1, 1
        at = {}
        for axis, ranks in degrees.items():
            rest, at[axis] = divmod(rest, ranks)
            outer, inner = divmod(at[axis], inside[axis])
            slot, slots = slot + inner * slots, slots * inside[axis]
            domain, domains = domain + outer * domains, domains * (ranks // inside[axis])
        yield {"rank": rank, "domain": domain, "slot": slot, **at}


def _stage(stage: int, places: Sequence[Mapping[str, int]], degrees: Mapping[str, int]) -> Series:
    of = [place for place in places if place.get("pp", 0) == stage]
    axes = [axis for axis, ranks in degrees.items() if ranks > 1 and axis != "pp"]
    return Series(
        name=f"stage {stage}",
        style="box",
        x=tuple(float(place["slot"]) - 0.5 for place in of),
        y=tuple(float(place["domain"]) for place in of),
        size=(1.0,) * len(of),
        labels=tuple("\n".join([f"{p['rank']}", " ".join(f"{a}{p[a]}" for a in axes)]).strip() for p in of),
    )


def title_of(found: Result) -> str:
    """Model and cluster of an estimate.

    >>> data = {"provenance": {"model": "m", "cluster": "c"}, "workload": {"gpus": 8}}
    >>> title_of(Result(name="a", kind="estimate", data=data))
    'm on c, 8 devices'
    """
    words = f"{found.word('provenance', 'model')} on {found.word('provenance', 'cluster')}"
    gpus: Any = found.table("workload").get("gpus") if found.has("workload") else None
    return f"{words}, {gpus} devices" if gpus else words
