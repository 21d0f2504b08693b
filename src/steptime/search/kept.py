"""Costs of layers that outlive a search: the next job computes only the layers that no earlier one had.

A layer costs the same in every job of one model under one method, recipe and framework on one kind of device; numbers
of devices, batch, fast domain and capacity do not count. What a device does by itself is kept apart from its transfers,
so that other links leave it. All is computed from the part of job and machine by which it is kept, so that nothing else
can matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import Lock
from typing import Any, Final, Generic, TypeVar

import numpy as np

from steptime.estimate.machine import Machine
from steptime.num import Array, hashes, joined, taken
from steptime.plan.job import Job
from steptime.records import changed, leaves, same_columns

T = TypeVar("T")

KINDS: Final = 12
"""Tables that are kept; the one that was used least lately makes room."""
_STRIDE: Final = 32
"""Placements that a table has room for at least."""
ROWS: Final = 1 << 19
"""Rows from which on a table starts again: some 100 MB."""


def job_of_layers(job: Job) -> Job:
    """The job as far as its layers go; where passes over parameters count, they run once in a step of its batch."""
    whole = job.copied_parameters or job.precision.quantised_bytes is not None
    return job if whole else replace(job, gpus=1, global_batch=1)


def machine_of_transfers(machine: Machine) -> Machine:
    """The machine as far as layers with their transfers go."""
    nearer = None if machine.nearer is None else machine_of_transfers(machine.nearer)
    return replace(machine, memory_bytes=0.0, host_Bps=0.0, host_basis="", host_ranks=1.0, bound=None, nearer=nearer)


def machine_of_work(machine: Machine) -> Machine:
    """The machine as far as it computes, without links."""
    return replace(
        machine_of_transfers(machine),
        fast_Bps=1.0,
        fast_latency_s=0.0,
        slow_Bps=1.0,
        lone_slow_Bps=1.0,
        slow_latency_s=0.0,
        fast_domain=1,
        fabric=None,
        groups=None,
        network=None,
        nearer=None,
    )


def models_key(machine: Machine) -> tuple[Any, ...]:
    """What fitted models rest on beyond the numbers by which they are equal: their curves and what these miss."""
    return tuple(
        (name, model.curve, None if model.residual is None else model.residual.table.tobytes())
        for name, model in machine.models.items()
    )


class _Index:
    """Numbers of distinct rows of whole numbers, in the order in which they came."""

    def __init__(self, width: int) -> None:
        self.rows = np.zeros((0, width), dtype=np.int64)
        self._hash, self._at = np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.int64)

    def numbers(self, rows: Array) -> Array:
        """Number of each of some distinct rows; those that are new get one."""
        sought = hashes(rows.T, len(rows))
        numbers = np.full(len(rows), -1, dtype=np.int64)
        if len(self._at):
            place = np.minimum(np.searchsorted(self._hash, sought), len(self._at) - 1)
            at = self._at[place]
            known = (self._hash[place] == sought) & (self.rows[at] == rows).all(axis=1)
            numbers[known] = at[known]
        new = np.flatnonzero(numbers < 0)
        if len(new):
            numbers[new] = len(self.rows) + np.arange(len(new))
            self.rows = np.concatenate((self.rows, rows[new]))
            every = hashes(self.rows.T, len(self.rows))
            self._at = np.argsort(every, kind="stable")
            self._hash = every[self._at]
        return numbers


class Kept(Generic[T]):
    """Records of columns by the numbers of their rows; a number that all rows share stays one number."""

    def __init__(self) -> None:
        self._at = np.zeros(0, dtype=np.int64)
        self._made: T | None = None
        self._leaves: list[Any] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def get(self, numbers: Array, compute: Callable[[Array], T]) -> T:
        """The record of some rows; ``compute`` makes that of places among them that are not kept."""
        if not len(numbers):
            return compute(np.arange(0))
        top = int(numbers.max()) + 1
        if top > len(self._at):
            self._at = np.concatenate((self._at, np.full(max(top, 2 * len(self._at)) - len(self._at), -1)))
        missing = np.flatnonzero(self._at[numbers] < 0)
        made = compute(missing) if len(missing) else None
        if made is not None and self._made is not None and not same_columns(made, self._made):
            self._at[:], self._made, self._count = -1, None, 0  # other transfers than before: none is kept
            missing, made = np.arange(len(numbers)), compute(np.arange(len(numbers)))
        if made is not None:
            self._add(numbers[missing], made)
        at = self._at[numbers]
        columns = iter([taken(leaf, at) for leaf in self._leaves])
        found: Any = changed(self._made, lambda _: next(columns))
        return found  # type: ignore[no-any-return]

    def _add(self, numbers: Array, made: T) -> None:
        new, count = list(leaves(made)), len(numbers)
        if self._made is None:
            self._made, self._leaves = made, new
        else:
            self._leaves = [joined(each, (self._count, count)) for each in zip(self._leaves, new, strict=True)]
        self._at[numbers] = self._count + np.arange(count)
        self._count += count


class Costs:
    """What is kept of the layers of one job on one machine: of shapes, and of shapes under placements."""

    def __init__(self, key: tuple[Any, ...], columns: tuple[int, int], stride: int) -> None:
        self.key, self.stride = key, stride
        self.shapes, self.inner = _Index(columns[0]), _Index(columns[1])
        self.kept: Kept[Any] = Kept()

    def pairs(self, shapes: Array, inner: Array, shape_of: Array, inner_of: Array) -> Array:
        """Numbers of shapes under placements."""
        return self.shapes.numbers(shapes)[shape_of] * self.stride + self.inner.numbers(inner)[inner_of]


_LOCK: Final = Lock()
_TABLES: Final[list[Costs]] = []


@contextmanager
def tables() -> Iterator[Callable[[tuple[Any, ...], tuple[int, int], int], Costs] | None]:
    """What finds a table; None while another thread uses them."""
    if not _LOCK.acquire(blocking=False):
        yield None
        return
    try:
        yield _table
    finally:
        _LOCK.release()


def _table(key: tuple[Any, ...], columns: tuple[int, int], inner: int) -> Costs:
    """The table of a key, which is made where there is none or where it has become too large."""
    stride = max(_STRIDE, 1 << (2 * inner).bit_length())
    for each in _TABLES:
        if each.key == key:
            _TABLES.remove(each)
            full = len(each.kept) > ROWS or len(each.inner.rows) + inner > each.stride
            _TABLES.insert(0, Costs(key, columns, stride) if full else each)
            break
    else:
        _TABLES.insert(0, Costs(key, columns, stride))
        del _TABLES[KINDS:]
    return _TABLES[0]


def forget() -> None:
    """Drops all that is kept."""
    _TABLES.clear()
