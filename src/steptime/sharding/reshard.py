"""Resharding of a tensor: the cheapest sequence of steps from one sharding to another, and their times.

Collectives are timed as in an estimate, all groups of an axis at once. Copies inside a device are timed by the bytes
read and written: slices, fills, and packing before and after a collective along a dim that is not the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import pairwise
from math import inf, prod
from typing import Any, Final

import numpy as np

from steptime.captured.ops.placement import UNEVEN, Reduction, Sharding, divides, text_of
from steptime.cost.roofline import memory_s
from steptime.errors import InternalError, UserError, counted
from steptime.estimate.kernels import streamed
from steptime.estimate.machine import Machine
from steptime.num import Num, where
from steptime.sharding.mesh import Mesh
from steptime.sharding.moves import ALWAYS, Graph, Layout, graph_of, layout_of
from steptime.units import format_bytes, format_seconds

COPY: Final = "copy"
"""Kind of the steps that pack pieces before a collective, or unpack them after it."""
TORCH: Final[Mapping[str, str]] = {
    "all_gather": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter_tensor",
    "all_reduce": "all_reduce",
    "all_to_all": "all_to_all_single",
    "permute": "all_to_all_single",
}
"""Kind of step -> the collective's name in PyTorch, as its ``CommDebugMode`` counts it."""


def copy_s(machine: Machine, moved_bytes: Num) -> Num:
    """Seconds of one pass over device memory; 0 if nothing is moved.

    This is the fitted curve of streams if the machine has one, else a launch plus the bytes read and written at the
    sustained rate.

    >>> from dataclasses import replace
    >>> from steptime.simulation.collectives.times import machine_for_links
    >>> from steptime.hardware import load_cluster
    >>> machine = machine_for_links(load_cluster("dgx-h100"), 8)
    >>> machine = replace(machine, memory_Bps=2e12, kernel_latency_s=5e-6, models={})
    >>> copy_s(machine, 0.0), round(copy_s(machine, 2e9), 6)
    (0.0, 0.001005)
    """
    fitted = streamed(machine.models, moved_bytes)
    seconds = machine.kernel_latency_s + memory_s(moved_bytes, machine.memory_Bps) if fitted is None else fitted.seconds
    return where(moved_bytes > 0, seconds, 0.0)


@dataclass(frozen=True, slots=True)
class _Timing:
    """Size of a kind of step as a function of the bytes that a device has before and after it."""

    size_bytes: Callable[[Num, Num], Num]
    """Bytes with which the collective is called; for a copy, bytes read and written."""
    local: bool = False


_TIMINGS: Final[Mapping[str, _Timing]] = {
    "all_gather": _Timing(lambda source, target: target),
    "reduce_scatter": _Timing(lambda source, target: source),
    "all_reduce": _Timing(lambda source, target: source),
    "all_to_all": _Timing(lambda source, target: source),
    "permute": _Timing(lambda source, target: source),
    "slice": _Timing(lambda source, target: 2 * target, local=True),
    "fill": _Timing(lambda source, target: source + target, local=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of a route."""

    kind: str
    """``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all``, ``permute`` (each device sends all it has to
    another one), ``slice``, ``fill`` (terms of other devices become the neutral element), ``copy``."""
    axes: tuple[str, ...]
    source: Layout
    target: Layout
    size_bytes: float
    """Bytes with which the collective is called (the result of a gather, else the input); for a step inside a device,
    bytes read and written."""
    seconds: float

    @property
    def collective(self) -> str | None:
        """Name of the collective in PyTorch; None: nothing leaves the device."""
        return TORCH.get(self.kind)

    def __str__(self) -> str:
        axes = f" {'+'.join(self.axes)}" if self.axes else ""
        return f"{self.kind}{axes} {format_bytes(self.size_bytes)} {format_seconds(self.seconds, 3)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The steps from one sharding of a tensor to another."""

    steps: tuple[Step, ...]
    seconds: float

    def communication(self) -> list[tuple[str, float]]:
        """Name in PyTorch and bytes of each collective."""
        return [(step.collective, step.size_bytes) for step in self.steps if step.collective]

    def to_json(self, names: Sequence[str]) -> dict[str, Any]:
        """Plain data for ``json.dumps``; `names`: the axes of the mesh."""
        steps = [
            {
                **asdict(step),
                "source": step.source.text(names),
                "target": step.target.text(names),
                "collective": step.collective,
            }
            for step in self.steps
        ]
        return {"seconds": self.seconds, "steps": steps}

    def __str__(self) -> str:
        return ", ".join(map(str, self.steps)) or "nothing"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Table:
    """Least times between all layouts of tensors of one shape on a mesh, and the fastest steps."""

    graph: Graph
    mesh: Mesh
    size_bytes: Any
    """Bytes with which the collective of each move is called."""
    seconds: Any
    """Seconds of each move without copies."""
    before: Any
    """Bytes that the copy before each move reads and writes."""
    after: Any
    """Bytes that the copy after each move reads and writes."""
    single: Any
    """Seconds of a single step with its copies, [source, target]; infinite: there is none."""
    least: Any
    """Least seconds, [source, target]."""
    following: Any
    """Next layout on the fastest way, [source, target]."""
    numbers: dict[Sharding, int] = field(default_factory=dict)
    """Cache: sharding -> number of its layout (:func:`_number`)."""

    def steps(self, source: int, target: int) -> Iterator[Step]:
        """The steps of one move, with its copies."""
        graph, names = self.graph, self.mesh.names
        number = int(graph.between[source, target])
        move, (start, end) = graph.moves[number], (graph.layouts[source], graph.layouts[target])
        axes = tuple(names[axis] for axis in move.axes)

        def copied(moved_bytes: float, layout: Layout) -> Iterator[Step]:
            if moved_bytes > 0:
                seconds = float(copy_s(self.mesh.machine, moved_bytes))
                yield Step(kind=COPY, axes=(), source=layout, target=layout, size_bytes=moved_bytes, seconds=seconds)

        yield from copied(float(self.before[number]), start)
        yield Step(
            kind=move.kind,
            axes=axes,
            source=start,
            target=end,
            size_bytes=float(self.size_bytes[number]),
            seconds=float(self.seconds[number]),
        )
        yield from copied(float(self.after[number]), end)

    def walk(self, source: int, target: int) -> Iterator[tuple[int, int]]:
        """The moves of the cheapest way."""
        while source != target:
            following = int(self.following[source, target])
            yield source, following
            source = following


@lru_cache(maxsize=128)
def table_of(mesh: Mesh, shape: tuple[int, ...], element_bytes: float, reductions: tuple[Reduction, ...]) -> Table:
    """The cached all-pairs table of a tensor on a mesh."""
    graph = graph_of(mesh.sizes, len(shape), reductions)
    source, target, before_dim, after_dim = (graph.numbers[name] for name in ("source", "target", "before", "after"))
    # Collectives take pieces of one size: smaller ones are padded to the largest.
    local = np.ceil(np.array(shape, float) / graph.pieces)
    even = (np.array(shape, int) % graph.pieces == 0).all(axis=1)
    fits = (local * graph.pieces <= np.array(shape, float) * (1 + UNEVEN)).all(axis=1)
    local_bytes = element_bytes * local.prod(axis=1)
    outer = np.cumprod(np.column_stack([np.ones(len(local)), local]), axis=1)
    before = np.where(_packs(outer, source, before_dim), 2 * local_bytes[source], 0.0)
    after = np.where(_packs(outer, target, after_dim), 2 * local_bytes[target], 0.0)
    size_bytes, seconds = np.zeros(len(source)), np.zeros(len(source))
    for (kind, axes), numbers in graph.calls.items():
        if mesh.group(axes).ranks == 1:
            before[numbers] = after[numbers] = 0.0
            continue
        timing = _TIMINGS[kind]
        sizes = timing.size_bytes(local_bytes[source[numbers]], local_bytes[target[numbers]])
        size_bytes[numbers] = sizes
        seconds[numbers] = _seconds(mesh, kind, axes, sizes)
    whole = seconds + copy_s(mesh.machine, before) + copy_s(mesh.machine, after)
    single = np.full((len(local),) * 2, inf)
    single[source, target] = np.where(fits[source] & fits[target], whole, inf)
    for numbers in (found for (kind, _), found in graph.calls.items() if kind == "permute"):
        # With unequal pieces, another order of the axes that divide a dim makes other pieces.
        ends = source[numbers], target[numbers]
        single[ends] = np.where(even[ends[0]] & even[ends[1]], single[ends], inf)
    least, following = _shortest(single)
    return Table(
        graph=graph,
        mesh=mesh,
        size_bytes=size_bytes,
        seconds=seconds,
        before=before,
        after=after,
        single=single,
        least=least,
        following=following,
    )


def _packs(outer: Any, layouts: Any, dims: Any) -> Any:
    """True if the pieces along a dim are not contiguous, because a dim before it has several elements."""
    return (dims == ALWAYS) | ((dims >= 0) & (outer[layouts, np.maximum(dims, 0)] > 1))


def _seconds(mesh: Mesh, kind: str, axes: tuple[int, ...], size_bytes: Any) -> Any:
    """Seconds of a step without the copies around it."""
    if _TIMINGS[kind].local:
        return copy_s(mesh.machine, size_bytes)
    if kind == "permute":
        return mesh.message_s(axes, size_bytes)
    return mesh.collective_s(kind, axes, size_bytes)


def _shortest(single: Any) -> tuple[Any, Any]:
    """Least times between all pairs, and the next layout on each way (Floyd 1962, Warshall 1962)."""
    least, count = single.copy(), len(single)
    np.fill_diagonal(least, 0.0)
    following = np.broadcast_to(np.arange(count, dtype=np.int32), (count, count)).copy()
    for via in range(count):
        through = least[:, via, None] + least[via]
        better = through < least
        np.copyto(least, through, where=better)
        np.copyto(following, following[:, via, None], where=better)
    return least, following


def reductions_of(shardings: Sequence[Sharding]) -> tuple[Reduction, ...]:
    """Reductions whose terms may occur on routes between the shardings: their own, and the sum."""
    return tuple(sorted({"sum", *(one.reduction for each in shardings for one in each if one.reduction)}))


def costs(
    shape: Sequence[int], element_bytes: float, sources: Sequence[Sharding], targets: Sequence[Sharding], mesh: Mesh
) -> Any:
    """Least seconds, [source, target]; infinite if a sharding does not divide the shape.

    >>> from steptime.hardware import load_cluster
    >>> from steptime.sharding.mesh import mesh_on
    >>> from steptime.captured.ops.placement import P, R, shard
    >>> mesh = mesh_on(load_cluster("dgx-h100"), {"data": 2, "model": 4})
    >>> found = costs((8192, 6), 2, [(R, R), (P, P)], [(R, R), (R, shard(0)), (R, shard(1))], mesh)
    >>> found.shape, float(found[0, 0]), float(found[0, 2]), bool(found[1, 1] < found[1, 0])
    ((2, 3), 0.0, inf, True)
    """
    table = table_of(mesh, tuple(shape), float(element_bytes), reductions_of([*sources, *targets]))
    rows, columns = ([_number(table, shape, each) for each in group] for group in (sources, targets))
    found = table.least[np.ix_(rows, columns)]
    outside = np.array([number < 0 for number in rows])[:, None] | np.array([number < 0 for number in columns])
    return np.where(outside, inf, found)


def _number(table: Table, shape: Sequence[int], sharding: Sharding) -> int:
    """Number of a sharding's layout; -1: it does not divide the shape, or mixes reductions."""
    found = table.numbers.get(sharding)
    if found is None:
        found = -1
        if len(sharding) == len(table.mesh.sizes) and divides(shape, sharding, table.mesh.sizes):
            found = table.graph.index.get(layout_of(sharding, len(shape)), -1)
        table.numbers[sharding] = found
    return found


def route(shape: Sequence[int], element_bytes: float, source: Sharding, target: Sharding, mesh: Mesh) -> Route:
    """The cheapest steps from one sharding to another.

    Raises:
        UserError: a sharding does not divide the shape, has another number of axes, or terms of two reductions.

    >>> from steptime.hardware import load_cluster
    >>> from steptime.sharding.mesh import mesh_on
    >>> from steptime.captured.ops.placement import R, shard
    >>> mesh = mesh_on(load_cluster("dgx-h100"), {"data": 2, "model": 4})
    >>> found = route((8192, 8192), 2, (R, shard(0)), (shard(0), shard(0)), mesh)
    >>> [(step.kind, step.axes, step.target.text(mesh.names)) for step in found.steps]
    [('slice', ('data',), 'S(0) S(0) (dim 0 by model, data)'), ('permute', ('data', 'model'), 'S(0) S(0)')]
    """
    return along(shape, element_bytes, (source, target), mesh, cheapest=True)


def along(
    shape: Sequence[int], element_bytes: float, shardings: Sequence[Sharding], mesh: Mesh, *, cheapest: bool = False
) -> Route:
    """The route along given shardings: from each to the next in one step, or by the cheapest steps.

    Raises:
        UserError: as :func:`route`; or no single step leads from one sharding to the next.
    """
    table = table_of(mesh, tuple(shape), float(element_bytes), reductions_of(shardings))
    numbers = [_checked(table, shape, sharding) for sharding in shardings]
    pairs = [pair for pair in pairwise(numbers) if pair[0] != pair[1]]
    if cheapest:
        pairs = [move for pair in pairs for move in table.walk(*pair)]
    for start, end in pairs:
        if not np.isfinite(table.single[start, end]):
            texts = [table.graph.layouts[number].text(mesh.names) for number in (start, end)]
            raise UserError(f"no single step leads from {texts[0]} to {texts[1]}", hint="ask for the cheapest route")
    steps = tuple(step for pair in pairs for step in table.steps(*pair))
    return Route(steps=steps, seconds=sum(step.seconds for step in steps))


def _checked(table: Table, shape: Sequence[int], sharding: Sharding) -> int:
    """Number of a sharding's layout, or the error that explains why it has none."""
    mesh, text = table.mesh, text_of(sharding)
    number = _number(table, shape, sharding)
    if number >= 0:
        return number
    size = "x".join(map(str, shape))
    if len(sharding) != len(mesh.sizes):
        raise UserError(
            f"sharding {text!r} has {counted(len(sharding), 'placement')}, mesh {mesh} has {len(mesh.sizes)} "
            f"{'axis' if len(mesh.sizes) == 1 else 'axes'}",
            hint="write one placement for each axis, as in 'S(0) R'",
        )
    if not divides(shape, sharding, mesh.sizes):
        raise UserError(
            f"sharding {text} does not divide a tensor of {size or 'no dims'} on mesh {mesh}",
            hint="dims count from 0; each device has an equal piece of every sharded dim",
        )
    if len({placement.reduction for placement in sharding} - {None}) > 1:
        raise UserError(f"sharding {text} has terms of two reductions", hint="terms of one reduction at a time")
    raise InternalError(f"{text}: no layout of {prod(shape)} elements")
