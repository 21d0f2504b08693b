"""Time of each rank in a simulated step: computation, communication, and the bubble by cause."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from steptime.num import Array
from steptime.schedule.actions import COMPUTE, DATA, STREAMS, Kind
from steptime.simulation.graph import ActionGraph
from steptime.simulation.simulate import Simulation


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Seconds of a rank's compute stream by activity, by rank; they add up to the step time.

    A wait for a pass of another rank counts as fill before the rank's first backward pass, as drain after its last
    forward pass, and as a wait for peers in between.
    """

    passes_s: Array
    """Forward and backward passes, without their exposed communication with tensor, context and expert ranks."""
    tensor_s: Array
    """Exposed communication of passes with tensor, context and expert ranks."""
    update_s: Array
    """Optimiser."""
    fill_s: Array
    """Waits for a pass of another rank before its own first backward pass."""
    drain_s: Array
    """Waits for a pass of another rank after its own last forward pass, and for the end of the step."""
    peers_s: Array
    """Waits for a pass of another rank in between: its stage is longer, its rank is slower, or it waited itself."""
    message_s: Array
    """Waits for a finished result that is queued or on its way; also sends, where messages do not overlap."""
    data_s: Array
    """Waits for data-parallel communication of its own: gathers of weights, reductions of gradients."""
    copy_s: Array
    """Waits for activations on their way to its host or back."""

    @property
    def bubble_s(self) -> Array:
        """Step time less passes, their communication, and updates (s), by rank."""
        return self.fill_s + self.drain_s + self.peers_s + self.message_s + self.data_s + self.copy_s

    @property
    def total_s(self) -> Array:
        """The step time (s), by rank."""
        found: Array = sum((getattr(self, field.name) for field in fields(self)), start=np.zeros(len(self.passes_s)))
        return found


def spent(simulation: Simulation) -> Spent:
    """Seconds of a step by activity, for each rank."""
    graph, ends = simulation.graph, simulation.ends
    ranks = graph.table.ranks
    items = np.flatnonzero((graph.chain < STREAMS * ranks) & (graph.chain % STREAMS == COMPUTE) & (graph.chain >= 0))
    rank = graph.chain[items] // STREAMS
    before, start = ends[graph.previous[items]], simulation.starts[items]

    def by_rank(seconds: Array, where: Array) -> Array:
        found: Array = np.bincount(rank[where], seconds[where], ranks).astype(float)
        return found

    is_pass, is_update, is_message = (each[items] for each in _sorts(graph))
    to_chain = graph.chain[graph.cross[items]]
    of_rank = (to_chain < STREAMS * ranks) & (to_chain >= 0)
    to_data = of_rank & (to_chain % STREAMS == DATA)
    to_copy = of_rank & (to_chain % STREAMS > DATA)
    ready = _ready_s(simulation)[graph.cross[items]]
    waits = np.where(to_data | to_copy, 0.0, np.clip(np.minimum(ready, start) - before, 0.0, None))
    rest = start - before - waits
    first, last = _turning_points(graph)
    fills, drains = items <= first[rank], items > last[rank]
    taken = simulation.seconds[items]
    drain_s, data_s, copy_s = _after_the_last(simulation)
    tensor_s: Array = np.bincount(graph.table.rank, simulation.tensor_s, ranks).astype(float)
    return Spent(
        passes_s=by_rank(taken, is_pass) - tensor_s,
        tensor_s=tensor_s,
        update_s=by_rank(taken, is_update),
        fill_s=by_rank(waits, fills),
        drain_s=by_rank(waits, drains & ~fills) + drain_s,
        peers_s=by_rank(waits, ~fills & ~drains),
        message_s=by_rank(rest, ~to_data & ~to_copy) + by_rank(taken, is_message),
        data_s=by_rank(rest, to_data) + data_s,
        copy_s=by_rank(rest, to_copy) + copy_s,
    )


def _sorts(graph: ActionGraph) -> tuple[Array, Array, Array]:
    """Three masks over the items: passes, updates, messages."""
    kind, found = graph.table.kind, np.zeros((3, graph.size), bool)
    found[0, graph.item[kind <= Kind.WEIGHT_GRADIENT]] = True
    found[1, graph.item[kind == Kind.UPDATE]] = True
    found[2, graph.messages.item] = True
    return found[0], found[1], found[2]


def _ready_s(simulation: Simulation) -> Array:
    """For each item, the time until which a wait for it counts as a wait for another rank: the start of a message."""
    messages, ready = simulation.graph.messages, simulation.ends.copy()
    queued = simulation.end_s[messages.producer]
    ready[messages.item] = queued if simulation.graph.transport.overlap else simulation.starts[messages.item]
    return ready


def _turning_points(graph: ActionGraph) -> tuple[Array, Array]:
    """Item of the first backward pass and of the last forward pass of each rank; a number out of range if none."""
    table, kind = graph.table, graph.table.kind
    first, last = np.full(table.ranks, graph.size), np.full(table.ranks, -1)
    backward = np.flatnonzero((kind == Kind.BACKWARD) | (kind == Kind.INPUT_GRADIENT))
    forward = np.flatnonzero(kind == Kind.FORWARD)
    np.minimum.at(first, table.rank[backward], graph.item[backward])
    np.maximum.at(last, table.rank[forward], graph.item[forward])
    return first, last


def _after_the_last(simulation: Simulation) -> tuple[Array, Array, Array]:
    """Seconds from the last pass or update of each rank to the end of the step: idle, communicating, copying."""
    graph = simulation.graph
    last = np.zeros(STREAMS * graph.table.ranks)
    filled = np.flatnonzero((graph.first < graph.stop)[: len(last)])
    last[filled] = simulation.ends[graph.stop[filled] - 1]
    compute, data, *copies = last.reshape(-1, STREAMS).T
    data_s = np.clip(data - compute, 0.0, None)
    copy_s = np.clip(np.maximum(*copies) - compute - data_s, 0.0, None)
    return simulation.step_s - compute - data_s - copy_s, data_s, copy_s
