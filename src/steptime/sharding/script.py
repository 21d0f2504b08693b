"""A sharded step as plain data: what every call reads, by which way it comes there, and how its results lie.

The data are tuples of texts and numbers, so that a file can hold them; :class:`Script` is what is read from them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from steptime.captured.graph import Attribute, TensorType
from steptime.captured.ops.placement import Sharding, placement_of
from steptime.sharding.moves import Layout, layout_of

Plain: TypeAlias = tuple[Any, ...]
_ORDER: Final = re.compile(r" \(dim (\d+) by ([^)]*)\)")


def parse_layout(text: str, names: Sequence[str], rank: int) -> Layout:
    """The layout that :meth:`~steptime.sharding.moves.Layout.text` writes.

    >>> made = parse_layout("S(0) S(0) (dim 0 by model, data)", ("data", "model"), 2)
    >>> made.divided, made.text(("data", "model"))
    (((1, 0), ()), 'S(0) S(0) (dim 0 by model, data)')
    """
    plain = layout_of(parse_sharding(_ORDER.sub("", text)), rank)
    divided = list(plain.divided)
    for dim, axes in _ORDER.findall(text):
        divided[int(dim)] = tuple(names.index(axis) for axis in axes.split(", "))
    return Layout(tuple(divided), plain.terms)


def parse_sharding(text: str) -> Sharding:
    """Placements with spaces between them.

    >>> [str(each) for each in parse_sharding("S(0) P(max)")]
    ['S(0)', 'P(max)']
    """
    return tuple(map(placement_of, text.split()))


@dataclass(frozen=True, slots=True)
class Move:
    """A step of resharding: a collective, a slice, or a fill."""

    kind: str
    axes: tuple[int, ...]
    source: Layout
    target: Layout
    shape: tuple[int, ...]
    """Of the whole tensor."""


@dataclass(frozen=True, slots=True)
class View:
    """A view of a piece."""

    op: str
    attributes: Mapping[str, Attribute]
    output: int
    target: Layout
    shape: tuple[int, ...]
    """Of the whole output."""


Way: TypeAlias = tuple[Move | View, ...]


@dataclass(frozen=True, slots=True)
class Write:
    """A tensor that a call makes."""

    storage: int
    type: TensorType
    layout: Layout | None
    """None: another look at a storage that is there, of which nothing is computed before it is read."""


@dataclass(frozen=True, slots=True)
class Read:
    """An input of a call."""

    storage: int
    piece: int
    """Number under which a device has it: the storage, or that of a copy."""
    way: Way
    """From where the piece lies to where it is read."""


@dataclass(frozen=True, slots=True)
class ScriptCall:
    """One call of the step."""

    op: str
    module: str
    copies: tuple[tuple[int, int, Way], ...]
    """What is brought elsewhere before the call, for it and for later ones: storage, number of the copy, way."""
    reads: tuple[Read, ...]
    writes: tuple[Write, ...]
    attributes: Mapping[str, Attribute]
    """Arguments that differ from those of the unsharded call."""
    freed: tuple[int, ...]
    """Storages that nothing reads afterwards."""
    view: bool


@dataclass(frozen=True, slots=True)
class Source:
    """What is there before the step."""

    storage: int
    kind: str
    name: str
    type: TensorType
    layout: Layout


@dataclass(frozen=True, slots=True)
class Update:
    """The optimiser's part for one parameter."""

    parameter: str
    storage: int
    gradient: int
    """Storage of its gradient."""
    there: Way
    """Way of the gradient to the update."""
    layout: Layout
    back: Way
    """Way of the new parameter to where the next step reads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A sharded step: forward and backward call by call, then the updates."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    sources: tuple[Source, ...]
    calls: tuple[ScriptCall, ...]
    updates: tuple[Update, ...]


def script_of(mesh: Mapping[str, int], step: Mapping[str, Sequence[Plain]]) -> Script:
    """The script that plain data hold; :func:`steptime.sharding.export.plain_step` makes them."""
    names = tuple(mesh)
    reader = _Plain(names, [_type(*each) for each in step["types"]])
    ways = [reader.way(each) for each in step["ways"]]
    return Script(
        names=names,
        sizes=tuple(mesh.values()),
        sources=tuple(
            Source(s, kind, name, *reader.tensor(type, text)) for s, kind, name, type, text in step["sources"]
        ),
        calls=tuple(_call(reader, ways, each) for each in step["calls"]),
        updates=tuple(
            Update(name, storage, gradient, ways[there], reader.tensor(type, text)[1], ways[back])
            for name, storage, gradient, there, type, text, back in step["updates"]
        ),
    )


def _type(dtype: str, shape: Iterable[int], strides: Iterable[int] | None) -> TensorType:
    return TensorType(tuple(shape), dtype, None if strides is None else tuple(strides))


def _call(reader: _Plain, ways: Sequence[Way], given: Plain) -> ScriptCall:
    op, module, copies, reads, writes, attributes, freed, view = given
    return ScriptCall(
        op,
        module,
        tuple((storage, piece, ways[way]) for storage, piece, way in copies),
        tuple(Read(storage, piece, ways[way]) for storage, piece, way in reads),
        tuple(
            Write(storage, reader.types[type], None if view else reader.tensor(type, text)[1])
            for storage, type, text in writes
        ),
        attributes,
        tuple(freed),
        view,
    )


@dataclass(frozen=True, slots=True)
class _Plain:
    names: tuple[str, ...]
    types: Sequence[TensorType]

    def tensor(self, type: int, text: str) -> tuple[TensorType, Layout]:
        found = self.types[type]
        return found, parse_layout(text, self.names, found.rank)

    def way(self, given: Plain) -> Way:
        return tuple(self._view(*each) if each[0] == "view" else self._move(*each) for each in given)

    def _move(self, kind: str, axes: str, source: str, target: str, shape: Sequence[int], _size_bytes: int) -> Move:
        numbers = tuple(self.names.index(axis) for axis in axes.split("+"))
        start, end = (parse_layout(text, self.names, len(shape)) for text in (source, target))
        return Move(kind, numbers, start, end, tuple(shape))

    def _view(
        self, _: str, op: str, attributes: Mapping[str, Attribute], output: int, target: str, shape: Sequence[int]
    ) -> View:
        return View(op, attributes, output, parse_layout(target, self.names, len(shape)), tuple(shape))
