"""Costs each distinct layer configuration of a group of searches once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from steptime.estimate.evaluate import Works, passes_of, works_of
from steptime.estimate.layer import PARTS, part_times
from steptime.estimate.machine import Machine
from steptime.estimate.sizes import Sizes, sizes_of
from steptime.estimate.work import NUMBERS, Pass, PhaseWork, phase_work
from steptime.num import Array, Num, joined, taken
from steptime.plan.job import Job
from steptime.plan.plans import Plans, as_float
from steptime.plan.rows import Block, Row
from steptime.plan.strategies import Strategy
from steptime.records import rows

SHAPE_COLUMNS = ("tp", "tp2", "cp", "micro_batch", "panels", "recompute", "pp", "ep", "etp", "sp")
"""Columns that the rows of a layer depend on; ``recompute`` and ``pp`` only where the rows read them."""
_INNER_COLUMNS = ("in_tp", "in_tp2", "in_cp")

K = TypeVar("K")

PIECE = 1 << 14
"""Number of placements whose transfers are computed at a time, so that their arrays stay in the cache."""


def inner_columns(job: Job, machine: Machine) -> tuple[str, ...]:
    """Placement columns that the rows of a layer depend on; with experts also that of ``dp``, which they span.

    On a network with separate levels the distances between members of a group count too.
    """
    inside = (*_INNER_COLUMNS, "in_dp") if job.model.experts is not None else _INNER_COLUMNS
    return (*inside, *(name.replace("in_", "at_") for name in inside)) if machine.levels_apart else inside


@dataclass(frozen=True, slots=True)
class Codes:
    """Distinct rows of some columns, and the index of each plan's row."""

    columns: tuple[str, ...]
    distinct: Plans
    count: int
    inverse: Array


def distinct_rows(blocks: list[Plans], lengths: list[int], columns: tuple[str, ...]) -> Codes:
    """Distinct combinations of the columns over several blocks."""
    whole = sum(lengths)
    code = np.zeros(whole, dtype=np.int64)
    values: dict[str, Array] = {}
    for name in columns:
        column = np.broadcast_to(joined([getattr(block, name) for block in blocks], lengths), (whole,))
        values[name] = column
        levels, rank = _ranks(column)
        code = code * len(levels) + rank
    _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
    distinct = {name: column[first] for name, column in values.items()}
    # A constant column becomes one number, so that formulas need not carry an array of equal entries.
    same = {name: len(column) and (column == column[0]).all() for name, column in distinct.items()}
    plans = Plans(**{name: int(column[0]) if same[name] else column for name, column in distinct.items()})
    return Codes(columns=columns, distinct=plans, count=len(first), inverse=inverse)


def _ranks(column: Array) -> tuple[Array, Array]:
    """Distinct values and the rank of each entry, by counting sort, as columns are small whole numbers."""
    top = int(column.max(initial=0)) + 1
    if top > 1 << 22:
        levels, rank = np.unique(column, return_inverse=True)
        return levels, rank
    present = np.zeros(top, dtype=bool)
    present[column] = True
    levels = np.flatnonzero(present)
    lookup = np.zeros(top, dtype=np.int64)
    lookup[levels] = np.arange(len(levels))
    return levels, lookup[column]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """Table of the distinct shapes of a layer, for all placements."""

    plans: Plans
    count: int
    sizes: Sizes


def shapes_of(strategy: Strategy, job: Job, codes: Codes) -> Shapes:
    """Sizes of every distinct shape.

    Groups of experts lie within the ranks of ``tp``, ``cp`` and ``dp`` together; if shapes do not have a column ``dp``,
    its degree is the number of expert ranks.
    """
    plans = codes.distinct
    if job.model.experts is not None and "dp" not in codes.columns:
        plans = plans.with_columns({"dp": plans.ep * plans.etp})
    block = strategy.block(job, as_float(plans))
    return Shapes(plans=plans, count=codes.count, sizes=sizes_of(block, job.optimizer.matrices))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTable:
    """Times of every distinct layer configuration: a shape with a placement of its tensor axes."""

    passes: Mapping[str, Pass]
    row: Array
    """Row of (shape, inner placement); -1: not costed."""
    count: int

    def take(self, shape: Array, inner: Array) -> Mapping[str, Pass]:
        """Passes of pairs of a shape and an inner placement."""
        return rows(self.passes, self.row[shape, inner])


def layer_table(
    strategy: Strategy, job: Job, machine: Machine, shapes: Shapes, inner: Codes, used: Array
) -> LayerTable:
    """Costs the pairs of a shape and an inner placement that occur among candidates."""
    shape_of, inner_of = np.nonzero(used)
    row = np.full(used.shape, -1, dtype=np.int64)
    row[shape_of, inner_of] = np.arange(len(shape_of))
    plans = as_float(shapes.plans.take(shape_of).with_columns(
        {name: taken(getattr(inner.distinct, name), inner_of) for name in inner_columns(job, machine)}
    ))  # fmt: skip
    costed, shape_at = np.unique(shape_of, return_inverse=True)
    some = as_float(shapes.plans.take(costed))
    without = _changed(strategy.block(job, some), lambda row: replace(row, forward=(), backward=()))
    works = works_of(part_times(without, some, machine), job, some)
    passes = passes_of(_with_links(strategy, job, machine, works, shape_at, plans), job.framework)
    return LayerTable(passes=passes, row=row, count=len(shape_of))


def _with_links(strategy: Strategy, job: Job, machine: Machine, device: Works, shape_at: Array, plans: Plans) -> Works:
    """Work of every placement: device work of its shape, and its own transfers."""
    links: list[Works] = []
    lengths: list[int] = []
    for start in range(0, max(len(shape_at), 1), PIECE):
        piece = slice(start, start + PIECE)
        links.append(_links_of(strategy, job, machine, plans.take(piece)))
        lengths.append(len(shape_at[piece]))
    return {
        part: {
            phase: _joined(work, shape_at, [phase_work(one[part], phase) for one in links], lengths)
            for phase, work in phases.items()
        }
        for part, phases in device.items()
    }


def _links_of(strategy: Strategy, job: Job, machine: Machine, plans: Plans) -> Works:
    """Transfers of some placements, by rows that send something but compute nothing."""
    block = strategy.block(job, plans)
    sending = _changed(block, lambda row: replace(row, operator="nothing") if row.forward or row.backward else None)
    return works_of(part_times(sending, plans, machine), job, plans)


def _changed(block: Block, change: Callable[[Row], Row | None]) -> Block:
    layer, first, last = (tuple(row for row in map(change, getattr(block, part)) if row is not None) for part in PARTS)
    return replace(block, layer=layer, first=first, last=last)


def _joined(device: PhaseWork, shape_at: Array, pieces: Sequence[PhaseWork], lengths: Sequence[int]) -> PhaseWork:
    """Device work of the shape of each placement, with the transfers of the placements concatenated from pieces."""
    own = {name: taken(getattr(device, name), shape_at) for name in NUMBERS}
    rows_sending = {name for name, _ in pieces[0].covered_s}
    beside_s = {key: taken(work_s, shape_at) for key, work_s in device.beside_s.items() if key[0] in rows_sending}
    links_s, busy_s, covered_s = (
        _columns([getattr(piece, name) for piece in pieces], lengths) for name in ("links_s", "busy_s", "covered_s")
    )
    return PhaseWork(**own, links_s=links_s, busy_s=busy_s, covered_s=covered_s, beside_s=beside_s)


def _columns(pieces: Sequence[Mapping[K, Num]], lengths: Sequence[int]) -> dict[K, Num]:
    """Concatenation of the pieces of each transfer, by axis."""
    axes = dict.fromkeys(axis for piece in pieces for axis in piece)
    return {axis: joined([piece.get(axis, 0.0) for piece in pieces], lengths) for axis in axes}
