"""A small graph of operations, and bytes and seconds of a schedule with recomputation on it.

A schedule has one stage per node, in topological order; stage $t$ runs node $t$ for the first time, after running again
whatever earlier nodes it chooses, in order. Between stages a chosen set of results is kept. Within a stage a result is
released after the last run that reads it, unless the next stage keeps it.

Source of the form: Jain et al., "Checkmate: breaking the memory wall with optimal tensor rematerialization", MLSys
2020, arXiv 1910.02653. Added here: by-products (a node that exists only when another runs, such as what a forward saves
for its backward), transient bytes, nodes that run once, results that hold others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from steptime.captured.rematerialisation.chain import Chain, ScheduleError, check_number
from steptime.errors import FieldError


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One operation and its result."""

    time_s: float
    result_bytes: float
    reads: tuple[int, ...] = ()
    """Earlier nodes whose results it needs."""
    transient_bytes: float = 0.0
    """Bytes at its peak beyond its result; of a node with a by-product, only where that is not made."""
    by_product: bool = False
    """Whether it is made only while the node before it runs, and so has no stage of its own."""
    once: bool = False
    """Whether it never runs again."""
    holds: tuple[int, ...] = ()
    """Earlier nodes whose results are kept from stage to stage wherever its own is."""

    def __post_init__(self) -> None:
        for name in ("time_s", "result_bytes", "transient_bytes"):
            check_number("node", name, getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Dag:
    """Nodes in topological order, and the bytes that live at all times.

    Raises :class:`~steptime.errors.FieldError` where there is no node, or one reads a node that is not before it.
    """

    nodes: tuple[Node, ...]
    constant_bytes: float = 0.0

    def __post_init__(self) -> None:
        check_number("dag", "constant_bytes", self.constant_bytes)
        if not self.nodes or self.nodes[0].by_product:
            raise FieldError("dag", "nodes", "is empty, or begins with a by-product")
        for i, node in enumerate(self.nodes):
            for name, given in (("reads", node.reads), ("holds", node.holds)):
                if not all(0 <= j < i for j in given):
                    raise FieldError("dag", f"nodes[{i}].{name}", f"is {given}; allowed are nodes 0 to {i - 1}")
            if node.by_product and self.nodes[i - 1].by_product:
                raise FieldError(
                    "dag", f"nodes[{i}].by_product", "follows a by-product; give one with the sum of bytes"
                )

    @property
    def stages(self) -> tuple[int, ...]:
        """The node that each stage runs for the first time."""
        return tuple(i for i, node in enumerate(self.nodes) if not node.by_product)

    def has_by_product(self, i: int) -> bool:
        """Whether the next node is made only while this one runs."""
        return i + 1 < len(self.nodes) and self.nodes[i + 1].by_product


@dataclass(frozen=True, slots=True, kw_only=True)
class DagStage:
    """What one stage runs, in order, and which results it takes over from the stage before."""

    runs: tuple[int, ...]
    kept: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class DagSimulation:
    """What a schedule of a graph costs."""

    peak_bytes: float
    time_s: float
    runs: tuple[int, ...]
    """Runs of each node."""


def simulate_dag(dag: Dag, schedule: Sequence[DagStage]) -> DagSimulation:
    """Execute a schedule.

    Raises :class:`~steptime.captured.rematerialisation.chain.ScheduleError` at the first stage that is not legal.

    >>> two = Dag(nodes=(Node(time_s=1, result_bytes=4), Node(time_s=2, result_bytes=3, reads=(0,))))
    >>> simulate_dag(two, (DagStage(runs=(0,)), DagStage(runs=(1,), kept=frozenset({0})))).peak_bytes
    7.0
    """
    if len(schedule) != len(dag.stages):
        raise ScheduleError(len(schedule), None, f"has {len(schedule)} stages; the graph needs {len(dag.stages)}")
    live: set[int] = set()
    peak, time_s, runs = 0.0, 0.0, [0] * len(dag.nodes)
    for t, stage in enumerate(schedule):
        if not stage.kept <= live:
            raise ScheduleError(t, None, f"keeps {sorted(stage.kept - live)}, which the stage before does not have")
        if loose := [i for i in stage.kept if not stage.kept.issuperset(dag.nodes[i].holds)]:
            raise ScheduleError(t, None, f"keeps {loose} without the results that they hold")
        if dag.stages[t] not in stage.runs or list(stage.runs) != sorted(set(stage.runs)):
            raise ScheduleError(t, None, f"does not run node {dag.stages[t]}, or not in order")
        live = set(stage.kept)
        later = schedule[t + 1].kept if t + 1 < len(schedule) else frozenset[int]()
        for position, i in enumerate(stage.runs):
            _check_run(dag, t, stage, i, live)
            rest = stage.runs[position + 1 :]
            live.add(i)
            node = dag.nodes[i]
            transient = 0.0 if dag.has_by_product(i) and i + 1 in rest else node.transient_bytes
            peak = max(peak, dag.constant_bytes + sum(dag.nodes[j].result_bytes for j in live) + transient)
            needed = {j for k in rest for j in dag.nodes[k].reads}
            live -= {j for j in (*node.reads, i) if j not in needed and j not in later}
            time_s += node.time_s
            runs[i] += 1
    return DagSimulation(peak_bytes=peak, time_s=time_s, runs=tuple(runs))


def _check_run(dag: Dag, t: int, stage: DagStage, i: int, live: set[int]) -> None:
    node = dag.nodes[i]
    if missing := [j for j in node.reads if j not in live]:
        raise ScheduleError(t, None, f"node {i} reads {missing}, which are not in memory")
    if node.by_product and i - 1 not in stage.runs:
        raise ScheduleError(t, None, f"node {i} is made only while node {i - 1} runs")
    if node.once and dag.stages[t] != i:
        raise ScheduleError(t, None, f"node {i} runs once, in its own stage")


def dag_of(chain: Chain) -> Dag:
    r"""The chain as a graph that means the same: forward $F_i$, its by-product $G_i$, backward $B_i$.

    $F_i$ reads $F_{i-1}$ and has $x_{i+1}$ bytes; $G_i$ reads both, holds the first, and has $s_i$ bytes; $B_i$ reads
    $G_i$, $F_{i-1}$, $B_{i+1}$ (and $F_i$ where the output is read) and has $d_i$ bytes. Node $F_i$ is $2 i$, $G_i$ is
    $2 i + 1$, $B_i$ is $3 N - 1 - i$. Every memory-persistent schedule of the chain is a schedule of this graph with
    the same bytes and seconds; the graph has others too, which release a checkpoint and make it again.
    """
    n, x, d = len(chain), chain.boundary_bytes, chain.gradient_bytes
    nodes = []
    for i, one in enumerate(chain.segments):
        before = (2 * i - 2,) if i else ()
        nodes.append(Node(
            time_s=one.forward_s, result_bytes=x[i + 1], reads=before, transient_bytes=one.forward_transient_bytes,
        ))  # fmt: skip
        nodes.append(Node(
            time_s=0.0, result_bytes=one.saved_bytes, reads=(*before, 2 * i), by_product=True,
            transient_bytes=one.saving_transient_bytes,
            holds=(*before, *([2 * i] if one.output_in_backward else [])),
        ))  # fmt: skip
    for i in reversed(range(n)):
        one = chain.segments[i]
        reads = [2 * i + 1, *([2 * i - 2] if i else []), *([2 * i] if one.output_in_backward else [])]
        first = i == n - 1
        nodes.append(Node(
            time_s=one.backward_s, result_bytes=d[i], reads=tuple(reads if first else [*reads, 3 * n - 2 - i]),
            transient_bytes=one.backward_transient_bytes + (d[n] if first else 0.0), once=True,
        ))  # fmt: skip
    return Dag(nodes=tuple(nodes), constant_bytes=x[0])
