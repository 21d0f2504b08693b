"""Simulation of a schedule: start and end of each action, step time, critical path, samples with jitter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heappop, heappush

import numpy as np

from steptime.errors import UserError
from steptime.num import Array, Num, maximum
from steptime.schedule.actions import COMPUTE, PASSES, STREAMS, ActionTable, Kind
from steptime.simulation.graph import ActionGraph, Transport, graph_of

Together = Callable[[Num, Num, Num], Num]
CELLS = 1 << 24
"""Largest product of items and samples in memory at once: 128 MiB."""


def longest(longest_s: Num, total_s: Num, collectives_s: Num) -> Num:
    """Passes that run together take as long as the longest of them."""
    return longest_s


def total(longest_s: Num, total_s: Num, collectives_s: Num) -> Num:
    """Passes that run together take as long as one after another."""
    return total_s


def two_streams(longest_s: Num, total_s: Num, collectives_s: Num) -> Num:
    """Passes that run together overlap: one communicates with tensor or expert ranks while the other computes.

    Kernels are sequential on the compute stream, collectives on the tensor stream, and so are the parts of a pass.

    >>> two_streams(3.0, 5.0, 1.5), two_streams(3.0, 5.0, 3.5), two_streams(3.0, 3.5, 1.5)
    (3.5, 3.5, 3.0)
    """
    return maximum(longest_s, maximum(total_s - collectives_s, collectives_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Seconds of actions.

    Seconds of passes are a number, or an array by stage, by stage and micro-batch, or by stage, micro-batch and slice;
    `unshard_s`, `reduce_s`, `update_s`, `offload_s` and `reload_s` are a number or an array by stage.
    """

    forward_s: Num
    input_gradient_s: Num = 0.0
    """Gradients of inputs, in a split backward pass."""
    weight_gradient_s: Num = 0.0
    """Gradients of weights, in a split backward pass."""
    backward_s: Num | None = None
    """Whole backward pass; None: the sum of its two parts."""
    unshard_s: Num = 0.0
    """All-gather of the weights of a stage."""
    reduce_s: Num = 0.0
    """Reduction of the gradients of a stage over replicas."""
    update_s: Num = 0.0
    """Optimiser of a stage."""
    offload_s: Num = 0.0
    """Copy of the activations of a forward pass to the host; of one slice, if there are several."""
    reload_s: Num = 0.0
    """Copy of the activations back from the host."""
    message_s: Num | Callable[[Array, Array], Num] = 0.0
    """A message between two ranks: a number, an array by sender and receiver, or a function of arrays of both."""
    slowdown: Num = 1.0
    """Factor on passes and updates of a rank: a number, or an array by rank; 1.1: 10 % slower."""
    slice_factor: Num = 1.0
    """Factor on the passes of each slice of a sequence: a number, or an array by slice."""
    together: Together = total
    """Seconds of passes that run together, from the seconds of the longest, of all in sequence, and of their
    communication with tensor or expert ranks; :func:`total`, :func:`longest`, :func:`two_streams`, or another."""
    collective_share: Num = 0.0
    """Share of a pass in which it communicates with tensor, context or expert ranks and computes nothing, 0 to 1: a
    number, or an array by stage, or by stage and kind of pass (F, B, I, W)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Jitter:
    """Random factors, log-normal with a mean of 1, each given by its standard deviation."""

    action: float = 0.0
    """Standard deviation of the factor on each pass and update."""
    rank: float = 0.0
    """Standard deviation of one factor per rank on all its passes and updates of a step."""
    message: float = 0.0
    """Standard deviation of the factor on each message, collective and copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalPath:
    """Actions that follow each other without a gap from the start of the step to its end; their seconds add up."""

    row: Array
    """Rows of the table; for a message, the row of its send, or of the pass that produces it if there are no sends."""
    message: Array
    """True for messages."""
    seconds: Array
    """Seconds of each (s), first to last."""


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A schedule with the times of its actions."""

    graph: ActionGraph
    seconds: Array
    """Seconds of each item of the graph."""
    ends: Array
    """End of each item of the graph (s)."""
    tensor_s: Array
    """Exposed communication with tensor, context and expert ranks of each action (s), by row of the table. Passes that
    run together share the time in which they communicate and none computes, in proportion."""

    @property
    def table(self) -> ActionTable:
        """The schedule."""
        return self.graph.table

    @cached_property
    def step_s(self) -> float:
        """From the start of the first action to the end of the last (s)."""
        return float(self.ends.max())

    @cached_property
    def starts(self) -> Array:
        """Start of each item of the graph (s)."""
        return np.maximum(self.ends[self.graph.previous], self.ends[self.graph.cross])

    @cached_property
    def start_s(self) -> Array:
        """Start of each action (s), by row of the table. A send and its receive last as long as the message."""
        return self.starts[self.graph.item]

    @cached_property
    def end_s(self) -> Array:
        """End of each action (s), by row of the table."""
        return self.ends[self.graph.item]

    @cached_property
    def rank_span_s(self) -> Array:
        """From the start of a rank's first pass or update to the end of its last (s), by rank.

        The largest is the time from one step to the next where steps follow each other without a barrier.
        """
        of_ranks = slice(COMPUTE, STREAMS * self.table.ranks, STREAMS)
        first, stop = self.graph.first[of_ranks], self.graph.stop[of_ranks]
        begin, end = np.minimum(first, self.graph.size - 1), np.maximum(stop - 1, 0)
        return np.where(first < stop, self.ends[end] - self.starts[begin], 0.0)

    def critical_path(self) -> CriticalPath:
        """The critical path of the step, first action first."""
        previous, cross, ends = self.graph.previous, self.graph.cross, self.ends
        item, path = int(np.argmax(ends)), []
        while item:
            path.append(item)
            before, other = previous[item], cross[item]
            item = int(other if ends[other] > ends[before] else before)
        items = np.array(path[::-1], np.int64)
        items = items[self.seconds[items] > 0]
        row = np.full(self.graph.size, -1)
        row[self.graph.item[::-1]] = np.arange(len(self.graph.item))[::-1]
        messages = self.graph.messages
        row[messages.item] = messages.send
        return CriticalPath(row=row[items], message=np.isin(items, messages.item), seconds=self.seconds[items])


def simulate(
    schedule: ActionTable | ActionGraph, durations: Durations, transport: Transport | None = None
) -> Simulation:
    """Times of all actions of a schedule.

    Args:
        schedule: the table, or its graph from :func:`steptime.simulation.graph.graph_of`, which several simulations can
            share.
        durations: seconds of the actions.
        transport: model of messages, for a table; None: overlapped with computation, on links of their own.

    Raises:
        UserError: the schedule breaks a rule, or a duration is negative or has the wrong shape.
    """
    if isinstance(schedule, ActionGraph):
        graph = schedule
    else:
        graph = graph_of(schedule, transport or Transport())
        if graph.transport.link is not None:
            graph = _as_they_are_ready(graph, durations)
    seconds = seconds_of_items(graph, durations)
    tensor_s = _exposed_tensor_s(graph, durations, seconds)
    return Simulation(graph=graph, seconds=seconds, ends=graph.ends_s(seconds), tensor_s=tensor_s)


def sampled_step_s(graph: ActionGraph, durations: Durations, jitter: Jitter, samples: int, seed: int = 0) -> Array:
    """Step time (s) of each of a number of samples.

    The same seed gives the same samples; the first ones do not depend on the number of samples. Shared links keep the
    graph's order of messages.
    """
    seconds = seconds_of_items(graph, durations)
    computes, rank = _of_ranks(graph)
    deviation = np.where(computes, jitter.action, jitter.message)
    at_once = max(CELLS // graph.size, 1)
    found = np.empty(samples)
    seeds = np.random.SeedSequence(seed).spawn(samples)
    for low in range(0, samples, at_once):
        factors = []
        for each in seeds[low : low + at_once]:
            normal = np.random.default_rng(each)
            ranks = _factor(jitter.rank, normal.standard_normal(graph.table.ranks))
            factors.append(
                _factor(deviation, normal.standard_normal(graph.size)) * np.where(computes, ranks[rank], 1.0)
            )
        ends = graph.ends_of_samples_s(seconds[:, None] * np.array(factors).T)
        found[low : low + at_once] = ends.max(axis=0)
    return found


def _factor(deviation: Num, normal: Array) -> Array:
    """Log-normal factors with a mean of 1 and this standard deviation."""
    variance = np.log1p(np.square(deviation))
    factor: Array = np.exp(np.sqrt(variance) * normal - variance / 2)
    return factor


def _of_ranks(graph: ActionGraph) -> tuple[Array, Array]:
    """Mask of the items that are passes or updates, and the rank of each item's chain (0 for links)."""
    computes = np.zeros(graph.size, bool)
    kind = graph.table.kind
    computes[graph.item[(kind <= Kind.WEIGHT_GRADIENT) | (kind == Kind.UPDATE)]] = True
    return computes, np.where(graph.chain < STREAMS * graph.table.ranks, graph.chain // STREAMS, 0)


def _as_they_are_ready(graph: ActionGraph, durations: Durations) -> ActionGraph:
    """The graph with links that take messages in the order in which they are ready."""
    alone = graph_of(graph.table, replace(graph.transport, link=None))
    messages, seconds = alone.messages, seconds_of_items(alone, durations)
    link = np.full(alone.size, -1)
    link[messages.item] = graph.transport.links(messages.source, messages.target)
    place = np.zeros(alone.size, np.int64)
    begun = _in_order_of_time(alone, seconds.tolist(), link.tolist())
    place[begun] = np.arange(len(begun))
    order = np.empty(len(messages.item), np.int64)
    order[np.argsort(place[messages.item])] = np.arange(len(order))
    return graph_of(graph.table, graph.transport, order)


def _in_order_of_time(graph: ActionGraph, seconds: list[float], link: list[int]) -> list[int]:
    """Items in the order in which they could start, with links that carry one message at a time.

    Waits of messages within the chain of their link are ignored, because their order is the result.
    """
    before = graph.previous.copy()
    if graph.transport.overlap:
        sent = np.zeros(graph.size, bool)
        sent[graph.messages.item] = True
        before[sent[before]] = 0
    followers: list[list[int]] = [[] for _ in range(graph.size)]
    for item, (previous, cross) in enumerate(zip(before.tolist(), graph.cross.tolist(), strict=True)):
        if item:
            followers[previous].append(item)
            followers[cross].append(item)
    ready, awaited, free = [0.0] * graph.size, [2] * graph.size, dict.fromkeys(link, 0.0)
    coming, begun = [(0.0, 0)], []
    while coming:
        now, item = heappop(coming)
        begun.append(item)
        on = link[item]
        if on >= 0:
            now = max(now, free[on])
        end = now + seconds[item]
        if on >= 0:
            free[on] = end
        for each in followers[item]:
            ready[each] = max(ready[each], end)
            awaited[each] -= 1
            if not awaited[each]:
                heappush(coming, (ready[each], each))
    return begun


# -- durations --------------------------------------------------------------------------------------------------------


def seconds_of_items(graph: ActionGraph, durations: Durations) -> Array:
    """Seconds of each item of a graph.

    Raises:
        UserError: a duration is negative, not finite, or has the wrong shape.
    """
    table = graph.table
    by_row = seconds_of_rows(table, durations)
    seconds = np.zeros(graph.size)
    seconds[graph.item] = by_row
    _join(graph, durations, by_row, seconds)
    seconds[graph.messages.item] = _message_seconds(graph, durations)
    seconds[0] = 0.0
    return seconds


def seconds_of_rows(table: ActionTable, durations: Durations) -> Array:
    """Seconds of each action by itself; 0 for sends and receives."""
    shape = (table.stages, table.micro_batches, table.slices)
    parts = ("input_gradient_s", "weight_gradient_s")
    backward = parts if durations.backward_s is None else ("backward_s",)
    seconds = np.zeros(len(table.kind))
    for kind, names in zip(PASSES, (("forward_s",), backward, *((part,) for part in parts)), strict=True):
        rows = np.flatnonzero(table.kind == kind)
        if rows.size:
            place = (table.stage[rows], table.micro_batch[rows], table.slice[rows])
            seconds[rows] = sum(spread(getattr(durations, name), shape, name)[place] for name in names)
    for kind, value in (
        (Kind.UNSHARD, durations.unshard_s),
        (Kind.REDUCE, durations.reduce_s),
        (Kind.UPDATE, durations.update_s),
        (Kind.OFFLOAD, durations.offload_s),
        (Kind.RELOAD, durations.reload_s),
    ):
        rows = np.flatnonzero(table.kind == kind)
        if rows.size:
            seconds[rows] = spread(value, (table.stages,), f"{kind.name.lower()}_s")[table.stage[rows]]
    passes = np.flatnonzero(table.kind <= Kind.WEIGHT_GRADIENT)
    seconds[passes] *= spread(durations.slice_factor, (table.slices,), "slice_factor")[table.slice[passes]]
    on_compute = np.flatnonzero((table.kind <= Kind.WEIGHT_GRADIENT) | (table.kind == Kind.UPDATE))
    seconds[on_compute] *= spread(durations.slowdown, (table.ranks,), "slowdown")[table.rank[on_compute]]
    return seconds


def spread(value: Num, shape: tuple[int, ...], name: str) -> Array:
    """A value broadcast to the shape; missing trailing dimensions are added.

    Raises:
        UserError: the shape does not fit, or a value is no duration.
    """
    array = np.asarray(value, np.float64)
    if array.shape != shape[: array.ndim]:
        raise UserError(f"{name} has the shape {array.shape}", hint=f"a number, or an array of the shape {shape}")
    if not (np.isfinite(array).all() and (array >= 0).all()):
        raise UserError(f"{name} is not a time: {array[~(np.isfinite(array) & (array >= 0))][0]}", hint="0 or more")
    return np.broadcast_to(array.reshape(array.shape + (1,) * (len(shape) - array.ndim)), shape)


def _join(graph: ActionGraph, durations: Durations, by_row: Array, seconds: Array) -> None:
    """Set the seconds of items that are several passes running together."""
    rows = np.flatnonzero((graph.table.together >= 0) & (graph.table.kind <= Kind.WEIGHT_GRADIENT))
    if not rows.size:
        return
    items, place = np.unique(graph.item[rows], return_inverse=True)
    most, every = np.zeros(len(items)), np.bincount(place, by_row[rows])
    np.maximum.at(most, place, by_row[rows])
    joint = durations.together(most, every, np.bincount(place, _shares(graph.table, durations)[rows] * by_row[rows]))
    seconds[items] = np.where(np.bincount(place) == 1, every, joint)


def _shares(table: ActionTable, durations: Durations) -> Array:
    """Share of each action in which it communicates with tensor, context or expert ranks; 0 unless it is a pass."""
    share = spread(durations.collective_share, (table.stages, len(PASSES)), "collective_share")
    found: Array = np.where(table.kind < len(PASSES), share[table.stage, np.minimum(table.kind, PASSES[-1])], 0.0)
    return found


def _exposed_tensor_s(graph: ActionGraph, durations: Durations, seconds: Array) -> Array:
    """Seconds in which passes communicate with tensor, context and expert ranks and nothing computes, by row."""
    table = graph.table
    if not np.any(durations.collective_share):
        return np.zeros(len(table))
    alone_s = seconds_of_rows(table, durations)
    sent_s = _shares(table, durations) * alone_s
    rows = np.flatnonzero((table.together >= 0) & (table.kind <= Kind.WEIGHT_GRADIENT))
    if rows.size:
        items, place = np.unique(graph.item[rows], return_inverse=True)
        sent, computed = (np.bincount(place, each[rows]) for each in (sent_s, alone_s - sent_s))
        exposed = np.clip(seconds[items] - computed, 0.0, sent)
        sent_s[rows] *= np.divide(exposed, sent, out=np.zeros(len(items)), where=sent > 0)[place]
    return sent_s


def _message_seconds(graph: ActionGraph, durations: Durations) -> Array:
    """Seconds of each message."""
    messages, given = graph.messages, durations.message_s
    if callable(given):
        found = np.broadcast_to(given(messages.source, messages.target), messages.source.shape)
        return spread(found, found.shape, "message_s")
    if np.ndim(given) == 1:
        raise UserError("message_s is an array by rank", hint="a number, or an array by sender and receiver")
    links = spread(given, (graph.table.ranks, graph.table.ranks), "message_s")
    return links[messages.source, messages.target]
