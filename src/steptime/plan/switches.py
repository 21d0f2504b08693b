"""Settings that training software can switch on any mesh: CUDA graphs, dispatchers, overlap; and the fastest of each.

None of them changes memory, and one choice of each is never slower than the others in any plan, so that a search takes
it without trying the others:

* graphs: with ``step`` the host issues no single operator and no router waits for it; it issues each captured part of
  a layer as one operator, and its routers wait for the share ``captured_wait``. The time of a pass rises with both
  (:func:`steptime.cost.host.issued_s`, :func:`steptime.cost.host.router_wait_s`), and that of a step with every pass.
* dispatchers: one that sends a token once over the same links sends no more than one that sends every copy.
* overlap: overlapped traffic exposes at most all of its time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

from steptime.plan.framework_file import framework_tables
from steptime.plan.job import GRAPH_PARTS, Job, dispatched_by

STEP: Final = "step"
LAYER: Final = "+".join(GRAPH_PARTS)
"""All parts of a layer that a graph may hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Switches:
    """Settings that training software supports in addition to its defaults."""

    graphs: tuple[str, ...] = ()
    """Graphs in the words of a job (:attr:`steptime.plan.job.Job.graphs`)."""
    dispatchers: tuple[str, ...] = ()
    overlap: frozenset[str] = frozenset()
    """Traffic that overlaps on request."""


def switches_of(framework: str) -> Switches:
    """Settings in the file of a framework (``[switches]``) in addition to its defaults; none without the table.

    >>> switches_of("torchtitan").dispatchers, switches_of("ddp") == Switches()
    (('deepep', 'all_to_all'), True)
    """
    own = framework_tables(framework).get("switches", {})
    lists = {name: tuple(own.get(name, ())) for name in ("graphs", "dispatchers")}
    return Switches(**lists, overlap=frozenset(own.get("overlap", ())))


def switched_names(job: Job, given: Collection[str]) -> tuple[str, ...]:
    """Choices of a job, in the words of a plan, that its software can switch and the user did not fix."""
    has = switches_of(job.framework.name)
    if job.captured is not None:
        return ()
    known = {"graphs": has.graphs, "dispatcher": has.dispatchers if job.model.experts else (), "overlap": has.overlap}
    return tuple(name for name, values in known.items() if values and name not in given)


def settings_of(job: Job, given: Collection[str]) -> Iterator[Job]:
    """The job under every combination of settings that its software has and the user left open, the default first."""
    has, names = switches_of(job.framework.name), switched_names(job, given)
    graphs = dict.fromkeys((job.graphs, *(has.graphs if "graphs" in names else ())))
    dispatchers = dict.fromkeys((job.dispatcher, *(has.dispatchers if "dispatcher" in names else ())))
    overlaps = dict.fromkeys((job.overlap, *((job.overlap | has.overlap,) if "overlap" in names else ())))
    for graph, dispatcher, overlap in product(graphs, dispatchers, overlaps):
        other = job if dispatcher == job.dispatcher else dispatched_by(job, dispatcher)
        other = replace(other, graphs=graph, overlap=overlap)
        if graph == job.graphs or may_capture(other):
            yield other


def may_capture(job: Job) -> bool:
    """True if the graphs of a job can be captured; for a whole step the host must read nothing from the device.

    Experts that drop no token have products whose sizes the host reads, except with HybridEP, which leaves them on the
    device; activations that are offloaded to the host leave the graph.

    Source: Megatron-Core's developer guide, CUDA Graph.
    """
    if job.graphs != STEP:
        return True
    alone = job.model.experts is None or job.expert_capacity is not None or job.dispatcher == "hybridep"
    return alone and "activations" not in job.offload


def fastest(job: Job, given: Collection[str]) -> Job:
    """The job under the settings that are never slower than others (see the module); the default among equal ones.

    Args:
        job: job with the defaults of its software and the user's choices.
        given: names of the user's choices.
    """
    return max(settings_of(job, given), key=_rank)


def _rank(job: Job) -> tuple[int, bool, int]:
    """Rank of the settings of a job; higher ranks are never slower."""
    parts = set(job.graphs.split("+")) & set(GRAPH_PARTS)
    helps = bool(parts) and job.framework.captured_wait <= 1
    return (2 if job.graphs == STEP else int(helps)), job.exchange_once, len(job.overlap)
