"""Layouts of a tensor on a mesh, and the single steps between them.

A layout is a sharding together with the order in which axes divide each dim. Shardings have the order of the axes of
the mesh; layouts in between may have any. The steps are those of Rink et al. 2021, arXiv 2112.01075 (all-gather, slice,
all-to-all, permutation), and the reductions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, combinations, permutations, product
from typing import Any, Final, NamedTuple

import numpy as np

from steptime.captured.ops.placement import Placement, R, Reduction, Sharding, partial, shard, text_of

ALWAYS: Final = -1
"""Marker instead of a dim: the pieces of a collective are never contiguous in memory."""
NEVER: Final = -2
"""Marker instead of a dim: the collective needs no packing."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A sharding of a tensor on a mesh, with the order of the axes that divide each dim.

    >>> print(layout_of((shard(0), shard(0)), 2), Layout(((1, 0), ()), (None, None)))
    S(0) S(0) S(0) S(0) (dim 0 by 1, 0)
    """

    divided: tuple[tuple[int, ...], ...]
    """Axes that divide each dim of the tensor, in the order of division."""
    terms: tuple[Reduction | None, ...]
    """Reduction of whose terms (partial results) the devices of each axis have one each, or None."""

    @property
    def sharding(self) -> Sharding:
        """Placement along each axis."""
        dims = {axis: shard(dim) for dim, axes in enumerate(self.divided) for axis in axes}
        return tuple(dims.get(axis) or (partial(term) if term else R) for axis, term in enumerate(self.terms))

    def text(self, names: Sequence[str]) -> str:
        """The sharding, with the order of axes where it is not that of the mesh."""
        orders = [
            f" (dim {dim} by {', '.join(names[axis] for axis in axes)})"
            for dim, axes in enumerate(self.divided)
            if not _ascending(axes)
        ]
        return text_of(self.sharding) + "".join(orders)

    def __str__(self) -> str:
        return self.text([str(axis) for axis in range(len(self.terms))])


def layout_of(sharding: Sharding, rank: int) -> Layout:
    """The layout of a sharding of a tensor of `rank` dims."""
    divided: list[list[int]] = [[] for _ in range(rank)]
    for axis, placement in enumerate(sharding):
        if placement.dim is not None:
            divided[placement.dim].append(axis)
    return Layout(tuple(map(tuple, divided)), tuple(placement.reduction for placement in sharding))


def _ascending(axes: Sequence[int]) -> bool:
    return list(axes) == sorted(axes)


class Move(NamedTuple):
    """One step between two layouts, for any shape of the tensor."""

    kind: str
    axes: tuple[int, ...]
    """Axes along which devices communicate, in the order of the mesh."""
    source: int
    target: int
    before: int = NEVER
    """Dim of the source along which the collective takes pieces; they are packed first, unless the dims before it
    have one element each."""
    after: int = NEVER
    """Dim of the target along which the collective gives pieces."""


@dataclass(frozen=True, kw_only=True)
class Graph:
    """All layouts of tensors of one rank on meshes of given sizes, and all single steps between them."""

    layouts: tuple[Layout, ...]
    moves: tuple[Move, ...]
    pieces: Any
    """Number of pieces, [layout, dim]."""

    @cached_property
    def index(self) -> dict[Layout, int]:
        """Layout -> its number."""
        return {layout: number for number, layout in enumerate(self.layouts)}

    @cached_property
    def numbers(self) -> dict[str, Any]:
        """Integer fields of the moves as arrays, by name."""
        return {name: np.array([getattr(move, name) for move in self.moves], int) for name in _COLUMNS}

    @cached_property
    def calls(self) -> dict[tuple[str, tuple[int, ...]], Any]:
        """Kind and axes -> numbers of the moves, which are timed in one call."""
        out: dict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(list)
        for number, move in enumerate(self.moves):
            out[move.kind, move.axes].append(number)
        return {key: np.array(numbers) for key, numbers in out.items()}

    @cached_property
    def between(self) -> Any:
        """Number of the move, [source, target]; -1: there is no single step."""
        out = np.full((len(self.layouts),) * 2, -1)
        out[self.numbers["source"], self.numbers["target"]] = np.arange(len(self.moves))
        return out


_COLUMNS: Final = ("source", "target", "before", "after")


@lru_cache(maxsize=64)
def graph_of(sizes: tuple[int, ...], rank: int, reductions: tuple[Reduction, ...]) -> Graph:
    """Layouts and steps of tensors of `rank` dims on meshes of the given sizes.

    A layout has terms of one reduction only: a maximum of sums is not a sum of maxima.
    """
    layouts = tuple(_layouts(len(sizes), rank, reductions))
    index = {layout: number for number, layout in enumerate(layouts)}
    pieces = np.array([[_product(sizes, axes) for axes in layout.divided] for layout in layouts], int)
    moves = [
        Move(kind, tuple(sorted(axes)), index[source], index[target], before, after)
        for layout in layouts
        for kind, axes, source, target, before, after in chain(_from_shards(layout, reductions), _exchanges(layout))
    ]
    moves += _permutations(layouts, sizes)
    return Graph(layouts=layouts, moves=tuple(moves), pieces=pieces.reshape(len(layouts), rank))


def _product(sizes: Sequence[int], axes: Iterable[int]) -> int:
    out = 1
    for axis in axes:
        out *= sizes[axis]
    return out


def _layouts(axes: int, rank: int, reductions: Sequence[Reduction]) -> Iterator[Layout]:
    """Every placement along every axis, with every order of the axes that divide one dim."""
    choices: list[Placement] = [R, *map(shard, range(rank)), *map(partial, reductions)]
    for sharding in product(choices, repeat=axes):
        if len({placement.reduction for placement in sharding} - {None}) > 1:
            continue
        plain = layout_of(sharding, rank)
        for divided in product(*(permutations(each) for each in plain.divided)):
            yield Layout(divided, plain.terms)


_Found = tuple[str, tuple[int, ...], Layout, Layout, int, int]


def _from_shards(layout: Layout, reductions: Sequence[Reduction]) -> Iterator[_Found]:
    """Steps that gather, slice, fill or reduce the last axes of each dim, and reductions over replicated axes."""
    own = next((term for term in layout.terms if term), None)
    whole = [axis for axis, placement in enumerate(layout.sharding) if placement.replicated]
    for kept in product(*(range(len(axes) + 1) for axes in layout.divided)):
        divided = tuple(axes[:n] for axes, n in zip(layout.divided, kept, strict=True))
        parts = [(dim, axes[n:]) for dim, (axes, n) in enumerate(zip(layout.divided, kept, strict=True)) if axes[n:]]
        left = tuple(axis for _, axes in parts for axis in axes)
        dim = parts[0][0] if len(parts) == 1 and _ascending(left) else ALWAYS
        if left:
            without = Layout(divided, layout.terms)
            yield "all_gather", left, layout, without, NEVER, dim
            yield "slice", left, without, layout, NEVER, NEVER
        for term in (own,) if own else reductions:
            for more in chain.from_iterable(combinations(whole, n) for n in range(len(whole) + 1)):
                axes = (*left, *more)
                if not axes:
                    continue
                terms = tuple(term if axis in axes else each for axis, each in enumerate(layout.terms))
                summed = Layout(divided, terms)
                yield "fill", axes, layout, summed, NEVER, NEVER
                if not left:
                    yield "all_reduce", axes, summed, layout, NEVER, NEVER
                elif not more:
                    yield "reduce_scatter", axes, summed, layout, dim, NEVER


def _exchanges(layout: Layout) -> Iterator[_Found]:
    """All-to-all steps: the last axes of one dim become the last axes of another dim."""
    for old, new in permutations(range(len(layout.divided)), 2):
        for n in range(len(layout.divided[old])):
            moved = layout.divided[old][n:]
            divided = list(layout.divided)
            divided[old], divided[new] = divided[old][:n], (*divided[new], *moved)
            before, after = (new, old) if _ascending(moved) else (ALWAYS, ALWAYS)
            yield "all_to_all", moved, layout, Layout(tuple(divided), layout.terms), before, after


def _permutations(layouts: Sequence[Layout], sizes: Sequence[int]) -> Iterator[Move]:
    """Steps between layouts with equal pieces, in which every device sends its whole piece to another one."""
    classes: dict[Any, list[int]] = defaultdict(list)
    for number, layout in enumerate(layouts):
        counts = tuple(_product(sizes, axes) for axes in layout.divided)
        terms = _product(sizes, (axis for axis, term in enumerate(layout.terms) if term))
        classes[counts, terms, next((term for term in layout.terms if term), None)].append(number)
    for members in classes.values():
        for source, target in permutations(members, 2):
            roles = (_roles(layouts[number], sizes) for number in (source, target))
            moved = tuple(axis for axis, (a, b) in enumerate(zip(*roles, strict=True)) if a != b)
            yield Move("permute", moved, source, target)


def _roles(layout: Layout, sizes: Sequence[int]) -> list[tuple[int, int] | str | None]:
    """Role of each axis: the dim and the stride that it divides, the reduction of its terms, or None: replicated."""
    out: list[tuple[int, int] | str | None] = list(layout.terms)
    for dim, axes in enumerate(layout.divided):
        stride = 1
        for axis in reversed(axes):
            out[axis], stride = (dim, stride), stride * sizes[axis]
    return out
