"""Memory of a simulated schedule: bytes of each rank over time, and the peak."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from steptime.num import Array, Num
from steptime.schedule.actions import ActionTable, Kind
from steptime.simulation.simulate import Simulation, spread

LAST = (Kind.BACKWARD, Kind.WEIGHT_GRADIENT)
"""Kinds that end the backward pass of a micro-batch through a stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes that stages hold: a number, or an array by stage; activations also by stage and micro-batch."""

    activation_bytes: Num = 0.0
    """Activations of a stage for a whole micro-batch, held from the start of its forward pass on."""
    copied_bytes: Num | None = None
    """Part of the activations that OFFLOAD moves to the host until RELOAD brings it back; None: all."""
    deferred_bytes: Num = 0.0
    """Part of the activations that a separate weight-gradient pass still needs; the rest is freed at the end of the
    input-gradient pass."""
    weights_bytes: Num = 0.0
    """One version of the weights."""
    fixed_bytes: Num = 0.0
    """Gradients, optimiser states, and everything else held throughout."""
    gathered_bytes: Num = 0.0
    """Weights gathered by UNSHARD, until RESHARD."""
    message_bytes: Num = 0.0
    """A result of another rank, held from the start of its message to the start of the pass that needs it; by receiving
    stage."""
    stashes: bool = True
    """Weight stashing: a stage keeps the weights that a forward pass read until its backward pass has ended. Matters
    only where weights change within the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReplay:
    """Bytes held by ranks, ordered by rank and time; one entry for each change."""

    rank: Array
    time_s: Array
    in_use_bytes: Array
    """Bytes held from this time on."""
    peak_bytes: Array
    """By rank."""


def memory_replay(simulation: Simulation, footprint: Footprint) -> MemoryReplay:
    """Memory of each rank of a simulated schedule over time.

    Raises:
        UserError: a size is negative or has the wrong shape.
    """
    table = simulation.table
    changes = _Changes(simulation)
    _static(changes, footprint)
    _activations(changes, footprint)
    _gathered(changes, footprint)
    if footprint.stashes:
        _versions(changes, footprint)
    if np.any(footprint.message_bytes):
        _received(changes, footprint)
    rank, time_s, place, change = (np.concatenate(each) for each in zip(*changes.found, strict=True))
    order = np.lexsort((place, time_s, rank))
    rank, time_s, change = rank[order], time_s[order], change[order]
    in_use = np.cumsum(change)
    first = np.searchsorted(rank, np.arange(table.ranks))
    in_use = in_use - (in_use - change)[first][rank]
    peak = np.maximum.reduceat(in_use, first)
    return MemoryReplay(rank=rank, time_s=time_s, in_use_bytes=in_use, peak_bytes=peak)


def weight_versions(simulation: Simulation) -> Array:
    """Largest number of versions of the weights of one stage that each rank holds at once under weight stashing."""
    table = simulation.table
    held = [
        memory_replay(simulation, Footprint(weights_bytes=of_stage)).peak_bytes for of_stage in np.eye(table.stages)
    ]
    most: Array = np.max(held, axis=0)
    return most


class _Changes:
    """Changes of memory: rank, time, place among changes at the same time, bytes."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.table: ActionTable = simulation.table
        self.found: list[tuple[Array, Array, Array, Array]] = []

    def add(self, rows: Array, at_end: bool, change: Array, rank: Array | None = None) -> None:
        """Add changes at the start or the end of rows of the table."""
        time_s = (self.simulation.end_s if at_end else self.simulation.start_s)[rows]
        self.put(self.table.rank[rows] if rank is None else rank, time_s, 4 * rows + 2 * at_end, change)

    def put(self, rank: Array, time_s: Array, place: Array, change: Array) -> None:
        """Add changes at given times; changes at equal times are ordered by `place`."""
        self.found.append((rank, time_s, place, change))

    def rows(self, *kinds: Kind) -> Array:
        """Rows of these kinds, ascending."""
        return np.flatnonzero(np.isin(self.table.kind, kinds))

    def of_stage(self, value: Num, rows: Array, name: str) -> Array:
        """Value of each row, looked up by its stage."""
        return spread(value, (self.table.stages,), name)[self.table.stage[rows]]


def _static(changes: _Changes, footprint: Footprint) -> None:
    """Add one version of the weights of each stage of a rank, with gradients and states."""
    table = changes.table
    passes = changes.rows(Kind.FORWARD)
    places = np.unique(table.rank[passes] * table.stages + table.stage[passes])
    shape = (table.stages,)
    each = spread(footprint.weights_bytes, shape, "weights_bytes") + spread(footprint.fixed_bytes, shape, "fixed_bytes")
    held = np.bincount(places // table.stages, each[places % table.stages], table.ranks)
    changes.put(np.arange(table.ranks), np.zeros(table.ranks), np.full(table.ranks, -1), held)


def _activations(changes: _Changes, footprint: Footprint) -> None:
    """Add activations, held from the start of a forward pass to the end of the last pass that needs them.

    A copy to the host frees memory when it has ended; a copy back takes it from its start.
    """
    table = changes.table
    shape = (table.stages, table.micro_batches)
    whole = spread(footprint.activation_bytes, shape, "activation_bytes") / table.slices
    late = np.minimum(spread(footprint.deferred_bytes, shape, "deferred_bytes") / table.slices, whole)

    def of(values: Array, rows: Array) -> Array:
        found: Array = values[table.stage[rows], table.micro_batch[rows]]
        return found

    forward, backward = changes.rows(Kind.FORWARD), changes.rows(Kind.BACKWARD)
    inputs, weights = changes.rows(Kind.INPUT_GRADIENT), changes.rows(Kind.WEIGHT_GRADIENT)
    changes.add(forward, False, of(whole, forward))
    changes.add(backward, True, -of(whole, backward))
    changes.add(inputs, True, of(late, inputs) - of(whole, inputs))
    changes.add(weights, True, -of(late, weights))
    out, back = changes.rows(Kind.OFFLOAD), changes.rows(Kind.RELOAD)
    if out.size:
        copied = whole
        if footprint.copied_bytes is not None:
            copied = np.minimum(spread(footprint.copied_bytes, shape, "copied_bytes") / table.slices, whole)
        changes.add(out, True, -of(copied, out))
        changes.add(back, False, of(copied, back))


def _gathered(changes: _Changes, footprint: Footprint) -> None:
    """Add gathered weights."""
    for kind, sign in ((Kind.UNSHARD, 1), (Kind.RESHARD, -1)):
        rows = changes.rows(kind)
        if rows.size:
            changes.add(rows, sign < 0, sign * changes.of_stage(footprint.gathered_bytes, rows, "gathered_bytes"))


def _received(changes: _Changes, footprint: Footprint) -> None:
    """Add results of other ranks that wait for the pass that consumes them."""
    simulation, messages = changes.simulation, changes.simulation.graph.messages
    size = changes.of_stage(footprint.message_bytes, messages.consumer, "message_bytes")
    changes.put(messages.target, simulation.starts[messages.item], 4 * messages.consumer - 2, size)
    changes.put(messages.target, simulation.start_s[messages.consumer], 4 * messages.consumer - 1, -size)


def _versions(changes: _Changes, footprint: Footprint) -> None:
    """Add further versions of weights, each from its update until a newer one exists and no pass needs it."""
    table, simulation = changes.table, changes.simulation
    updates, count = changes.rows(Kind.UPDATE), len(table.kind)
    if not updates.size:
        return
    place = (table.rank * table.stages + table.stage).astype(np.int64)
    updates = updates[np.argsort(place[updates], kind="stable")]
    keys = place[updates] * count + updates
    start = np.searchsorted(place[updates], place[updates])
    forward, last = changes.rows(Kind.FORWARD), changes.rows(*LAST)
    # The version that the backward pass needs is the one that its forward pass read.
    shape = (table.stages, table.micro_batches)
    read = np.zeros(shape, np.int64)
    read[table.stage[forward], table.micro_batch[forward]] = np.searchsorted(keys, place[forward] * count + forward)
    own = read[table.stage[last], table.micro_batch[last]]
    behind = own > np.searchsorted(place[updates], place[last])
    # The last row that needs each version: of version i + 1, which update i makes, and of the first of each place.
    made_by, first = np.full(len(updates) + 1, -1), np.full(table.ranks * table.stages, -1)
    np.maximum.at(made_by, own[behind], last[behind])
    np.maximum.at(first, place[last[~behind]], last[~behind])
    older = np.where(np.arange(len(updates)) > start, made_by[:-1], first[place[updates]])
    gone = np.maximum(older, updates)
    size = changes.of_stage(footprint.weights_bytes, updates, "weights_bytes")
    changes.put(table.rank[updates], simulation.end_s[updates], 4 * updates + 3, size)
    changes.put(table.rank[updates], simulation.end_s[gone], 4 * gone + 2, -size)
