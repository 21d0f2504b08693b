"""Layouts map named dims of a module to axes of a mesh, as in Mesh-TensorFlow: ``batch:data, heads:model``.

Dims of tensors that operators, views and readers treat as one dim form a class. A class is named after the places where
it occurs (:data:`NAMES`); a name can mean the classes of many layers. Along each axis a tensor is sharded by the dim
whose class the layout puts there, and operators follow their tensors; a linear operator with partial sums as inputs
gives partial sums where that takes less time.

Source: Shazeer et al., "Mesh-TensorFlow", arXiv 1811.02084, sections 3 and 5.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, product
from typing import Final

import numpy as np

from steptime.captured.graph import FLOATS
from steptime.captured.ops import labelled_by, of_family
from steptime.captured.ops.norms import norm_dims
from steptime.captured.ops.placement import R, parted, shard
from steptime.errors import UnknownNameError, UserError, first_few, shorten
from steptime.num import Array
from steptime.sharding.annotate import matching, named_tensors
from steptime.sharding.build import Built, Way
from steptime.sharding.flow import Flow
from steptime.sharding.mesh import Mesh
from steptime.sharding.reshards import keeping_terms
from steptime.sharding.tensors import Tensors, splits, tensors_of

At = tuple[int, int]
"""A tensor and one of its dims."""
SHOWN: Final = 4
"""Tensors that a message names."""
ALIASES: Final = {"vocab": "vocabulary", "classes": "vocabulary", "inner": "ffn", "embed": "hidden"}
_EXAMPLE: Final = re.compile(r"(.+)\[(\d+)\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedDim:
    """All classes of dims that one name stands for."""

    name: str
    classes: frozenset[int]
    sizes: tuple[int, ...]
    """Largest number of pieces into which each class can be split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmatched:
    """An operator that every device of an axis runs whole, although the layout uses the axis."""

    item: str
    axis: str
    because: str
    share_of_compute: float


@dataclass(frozen=True, kw_only=True)
class LaidOut:
    """An option for each item that follows a layout."""

    choice: Array
    unmatched: tuple[Unmatched, ...]
    """Operators by falling share of computation."""
    pins: dict[int, tuple[int, ...]]
    """Item with a dim of the layout -> its options that follow the layout, with any placement along other axes."""


@dataclass(frozen=True, kw_only=True)
class Dims:
    """Classes of the dims of all tensors of a flow."""

    tensors: Tensors
    class_of: Mapping[At, int]

    @cached_property
    def members(self) -> dict[int, list[At]]:
        """Tensors and dims of each class."""
        out: dict[int, list[At]] = defaultdict(list)
        for at, number in self.class_of.items():
            out[number].append(at)
        return out

    def size(self, number: int) -> int:
        """The least size of a class's dims that are not broadcast, which is the most pieces it can be split into."""
        tensors = self.tensors
        return min((size for t, dim in self.members[number] if (size := tensors.types[t].shape[dim]) > 1), default=1)

    @cached_property
    def named(self) -> dict[str, NamedDim]:
        """Named dims of the module in the order of :data:`NAMES`; a class gets the first name that fits."""
        named: set[int] = set()
        out = {}
        for name, occurrences in NAMES.items():
            found = {self.class_of[at] for at in occurrences(self) if at in self.class_of}
            classes = frozenset(found - named)
            named |= classes
            if classes:
                sizes = tuple(sorted({self.size(each) for each in classes}))
                out[name] = NamedDim(name=name, classes=classes, sizes=sizes)
        return out


def dims_of_flow(flow: Flow) -> Dims:
    """Classes of dims: dims that operators, views and readers treat as one dim, whatever their names."""
    tensors = tensors_of(flow)
    parent: dict[At, At] = {}

    def root(at: At) -> At:
        while (above := parent.setdefault(at, at)) != at:
            parent[at] = at = parent[above]
        return at

    for group in _same_dims(tensors):
        first, *rest = map(root, group)
        parent.update(dict.fromkeys(rest, first))
    for tensor, type in enumerate(tensors.types):
        for dim, size in enumerate(type.shape):
            if size > 1:
                root((tensor, dim))
    numbers: dict[At, int] = {}
    return Dims(tensors=tensors, class_of={at: numbers.setdefault(root(at), len(numbers)) for at in list(parent)})


def _same_dims(tensors: Tensors) -> Iterator[list[At]]:
    """Groups of dims that are the same dim; rows and choices of dispatched tokens stay two dims."""
    for number, item in enumerate(tensors.flow.items):
        for option in splits(item)[1:]:
            if option.dim != "dispatched":
                yield [(tensor, dim) for tensor, dim in tensors.ports(number, option) if dim is not None]
    for tie in tensors.ties:
        for a, b in tie.dims:
            yield [(tie.first, a), (tie.second, b)]


# -- names ------------------------------------------------------------------------------------------------------------


def _input_dim(dim: int, *ranks: int) -> Callable[[Dims], Iterator[At]]:
    """Dim number ``dim`` of the inputs with one of the given ranks, or of all inputs."""

    def found(dims: Dims) -> Iterator[At]:
        tensors = dims.tensors
        for number, item in enumerate(tensors.flow.items):
            rank = item.node.outputs[0].rank if item.node.outputs else 0
            if item.kind == "source" and item.node.op == "input" and rank > dim and (not ranks or rank in ranks):
                yield tensors.outputs[number][0], dim

    return found


def _split(names: Iterable[str], ops: Iterable[str] = ()) -> Callable[[Dims], Iterator[At]]:
    """Dims that operators call by one of the names, of the given operators or of all."""
    dim_names, of = frozenset(names), frozenset(ops)

    def found(dims: Dims) -> Iterator[At]:
        tensors = dims.tensors
        for number, item in enumerate(tensors.flow.items):
            for option in splits(item) if not of or item.node.op in of else ():
                if option.dim in dim_names:
                    yield from ((tensor, dim) for tensor, dim in tensors.ports(number, option) if dim is not None)

    return found


def _of_tokens(name: str) -> Callable[[Dims], Iterator[At]]:
    """The dim with a name of tables in which integer inputs are looked up."""

    def found(dims: Dims) -> Iterator[At]:
        tensors, items = dims.tensors, dims.tensors.flow.items
        looked_up = {
            link.target
            for link in tensors.flow.links
            if items[link.target].node.op == "embedding"
            and items[link.source].node.op == "input"
            and items[link.source].node.outputs[0].dtype not in FLOATS
        }
        for number in sorted(looked_up):
            for option in splits(items[number]):
                if option.dim == name:
                    yield from ((tensor, dim) for tensor, dim in tensors.ports(number, option) if dim is not None)

    return found


def _either(*ways: Callable[[Dims], Iterator[At]]) -> Callable[[Dims], Iterator[At]]:
    """The dims of the first function that finds any."""
    return lambda dims: iter(next((each for way in ways if (each := list(way(dims)))), []))


def _both(*ways: Callable[[Dims], Iterator[At]]) -> Callable[[Dims], Iterator[At]]:
    return lambda dims: (at for way in ways for at in way(dims))


def _between_weights(dims: Dims) -> Iterator[At]:
    """Widths that one weight matrix gives and another one takes: rows of one and columns of the other."""
    tensors = dims.tensors
    places: dict[int, set[int]] = defaultdict(set)
    for number, item in enumerate(tensors.flow.items):
        if item.node.op == "parameter" and item.kind == "source" and item.node.outputs[0].rank in (2, 3):
            tensor, rank = tensors.outputs[number][0], item.node.outputs[0].rank
            for dim in (rank - 2, rank - 1):
                if (tensor, dim) in dims.class_of:
                    places[dims.class_of[tensor, dim]].add(dim - rank)
    return (dims.members[number][0] for number, seen in places.items() if len(seen) > 1)


NAMES: Final[Mapping[str, Callable[[Dims], Iterator[At]]]] = {
    "batch": _input_dim(0),
    "sequence": _input_dim(1, 2, 3),
    "height": _input_dim(2, 4, 5),
    "width": _input_dim(3, 4, 5),
    "vocabulary": _both(_of_tokens("rows"), _split(("classes",))),
    "hidden": _either(_of_tokens("width"), _split(("width0", "width1", "width2", "width3"), labelled_by(norm_dims))),
    "heads": _split(("heads",)),
    "experts": _split(("experts",)),
    "channels": _split(("in", "out", "groups"), of_family("convolution")),
    "ffn": _between_weights,
}
"""Name -> places of its dims. Batch: dim 0 of the inputs; sequence: dim 1 of inputs of two or three dims; hidden: the
width of the token table, else of the norms; ffn: a width between two weight matrices that has no other name."""


# -- layout -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    text: str
    axis: int
    classes: frozenset[int]


def parse_layout(text: str) -> tuple[tuple[str, str], ...]:
    """Parse a layout: names of dims, each with the axis that splits it.

    Raises:
        UserError: the text has another form.

    >>> parse_layout("batch:data, tokens.weight[0]:model")
    (('batch', 'data'), ('tokens.weight[0]', 'model'))
    """
    out = []
    for part in text.split(","):
        dim, colon, axis = (each.strip() for each in part.rpartition(":"))
        if not (dim and colon and axis):
            raise UserError(
                f"{shorten(part.strip())!r} in a layout is no dim with its axis",
                hint='write "batch:data, heads:model", or a dim of a tensor: "tokens.weight[0]:model"',
            )
        out.append((dim, axis))
    return tuple(out)


def laid_out(built: Built, layout: str) -> LaidOut:
    """Options of all items that follow a layout; an item is replicated along an axis where no option follows it.

    Raises:
        UserError: a dim or an axis is unknown, an axis does not divide a dim, a dim is on two axes, or two dims of one
            tensor are on the same axis.
    """
    dims = dims_of_flow(built.flow)
    entries = [_entry(built, dims, dim, axis) for dim, axis in parse_layout(layout)]
    axes = _axes_of(dims, entries, built.mesh)
    followed = [_follow(built, dims.tensors, number, axes) for number in range(len(built.flow.items))]
    choice = keeping_terms(built, np.array([option for option, _ in followed], int))
    pins = {number: pin for number, (_, pin) in enumerate(followed) if pin}
    return LaidOut(choice=choice, unmatched=tuple(_unmatched(built, dims.tensors, choice, axes)), pins=pins)


def _entry(built: Built, dims: Dims, name: str, axis: str) -> _Entry:
    number, text = built.mesh.axis(axis), f"{name}:{axis}"
    example = _EXAMPLE.fullmatch(name)
    if example is not None:
        return _Entry(text=text, axis=number, classes=frozenset(_of_example(built, dims, example[1], int(example[2]))))
    known = dims.named.get(ALIASES.get(name, name))
    if known is None:
        sizes = ", ".join(f"{each.name} ({first_few(list(map(str, each.sizes)), 4)})" for each in dims.named.values())
        always = f'the module has: {sizes}; others by a tensor: "tokens.weight[0]:{axis}"'
        raise UnknownNameError("dim", name, dims.named, where=f"layout {text}", always=always)
    return _Entry(text=text, axis=number, classes=known.classes)


def _of_example(built: Built, dims: Dims, pattern: str, dim: int) -> Iterator[int]:
    named = named_tensors(built.flow)
    for name in matching(named, pattern):
        tensor = named[name]
        if dim >= tensor.type.rank:
            raise UserError(
                f"layout {pattern}[{dim}]: {name} is {'x'.join(map(str, tensor.type.shape))}",
                hint=f"dims are 0 to {tensor.type.rank - 1}",
            )
        number = dims.tensors.outputs[tensor.item][tensor.output]
        if tensor.looks:
            number = dims.tensors.views.get((tensor.item, tensor.output, tensor.looks), number)
        if (number, dim) in dims.class_of:
            yield dims.class_of[number, dim]


def _axes_of(dims: Dims, entries: Sequence[_Entry], mesh: Mesh) -> dict[At, int]:
    """Tensor and dim that the layout splits -> axis."""
    taken: dict[int, _Entry] = {}
    out: dict[At, int] = {}
    for entry in entries:
        for number in sorted(entry.classes):
            other = taken.setdefault(number, entry)
            if other.axis != entry.axis:
                raise UserError(
                    f"layout: {other.text} and {entry.text} put one dim on two axes: "
                    f"{_examples(dims, dims.members[number])}",
                    hint="a dim has one axis",
                )
            uneven = [at for at in dims.members[number] if _size(dims, at) > 1]
            uneven = [at for at in uneven if not parted(_size(dims, at), mesh.sizes[entry.axis])]
            if uneven:
                least = min(uneven, key=lambda at: _size(dims, at))
                size = mesh.sizes[entry.axis]
                raise UserError(
                    f"layout {entry.text}: axis {mesh.names[entry.axis]} of {size} devices does not divide "
                    f"{_size(dims, least)}: {_examples(dims, [least, *uneven])}",
                    hint=f"the dim is split at most by its sizes everywhere: {_sizes(dims, number)}",
                )
            out.update(dict.fromkeys(dims.members[number], entry.axis))
    _check_apart(dims, out, taken)
    return out


def _check_apart(dims: Dims, axes: Mapping[At, int], taken: Mapping[int, _Entry]) -> None:
    seen: dict[At, At] = {}
    for (tensor, dim), axis in sorted(axes.items()):
        if _size(dims, (tensor, dim)) == 1:
            continue
        first = seen.setdefault((tensor, axis), (tensor, dim))
        if first != (tensor, dim):
            texts = sorted({taken[dims.class_of[first]].text, taken[dims.class_of[tensor, dim]].text})
            raise UserError(
                f"layout: {' and '.join(texts)} put dims {first[1]} and {dim} of one tensor on one axis: "
                f"{dims.tensors.text(tensor)}",
                hint="put one of them on another axis, or leave it out",
            )


def _size(dims: Dims, at: At) -> int:
    return dims.tensors.types[at[0]].shape[at[1]]


def _sizes(dims: Dims, number: int) -> str:
    return first_few([str(size) for size in sorted({_size(dims, at) for at in dims.members[number]} - {1})], 8)


def _examples(dims: Dims, members: Sequence[At]) -> str:
    return first_few(list(dict.fromkeys(dims.tensors.text(*at) for at in members)), SHOWN)


def _follow(built: Built, tensors: Tensors, item: int, axes: Mapping[At, int]) -> tuple[int, tuple[int, ...]]:
    """The fastest option among those that follow the layout along most axes, and all options that follow it there."""
    ways, count = built.ways[item], len(built.mesh.sizes)
    seconds = built.seconds.operators[item] + built.seconds.inside[item]
    fits = np.array([[_fits(tensors, item, way, axis, axes) for axis in range(count)] for way in ways])
    plain = np.array([[_replicated(way, axis) for axis in range(count)] for way in ways])
    used = np.array([_asked(tensors, item, axis, axes) for axis in range(count)])
    subsets = sorted(product((True, False), repeat=count), key=lambda each: -sum(np.array(each) & used))
    for follows in subsets:
        along = np.array(follows) & used
        found = np.flatnonzero(np.where(along, fits, plain).all(axis=1))
        if len(found):
            pin = np.flatnonzero(np.where(along, fits, True).all(axis=1)) if along.any() else found[:0]
            return int(min(found, key=lambda n: seconds[n])), tuple(map(int, pin))
    return 0, ()


def _asked(tensors: Tensors, item: int, axis: int, axes: Mapping[At, int]) -> bool:
    """True if the layout splits a tensor of an item along an axis."""
    numbers = {*tensors.inputs[item], *tensors.outputs[item]}
    return any(axes.get((n, dim)) == axis for n in numbers for dim in range(tensors.types[n].rank))


def _fits(tensors: Tensors, item: int, way: Way, axis: int, axes: Mapping[At, int]) -> bool:
    """True if each tensor of an item is sharded along an axis as in the layout, or is a partial sum if not in it."""
    ports = chain(
        zip(tensors.inputs[item], way.inputs, strict=False), zip(tensors.outputs[item], way.outputs, strict=True)
    )
    for tensor, sharding in ports:
        type = tensors.types[tensor]
        asked = next((d for d in range(type.rank) if type.shape[d] > 1 and axes.get((tensor, d)) == axis), None)
        if sharding[axis] != shard(asked) if asked is not None else sharding[axis].sharded:
            return False
    return True


def _replicated(way: Way, axis: int) -> bool:
    return all(sharding[axis] == R for sharding in (*way.inputs, *way.outputs))


def _unmatched(built: Built, tensors: Tensors, choice: Array, axes: Mapping[At, int]) -> list[Unmatched]:
    seconds = [float(each[option]) for each, option in zip(built.seconds.operators, choice, strict=True)]
    total, out = sum(seconds) or 1.0, []
    for number, item in enumerate(built.flow.items):
        for axis in sorted(set(axes.values())):
            if item.kind == "operator" and _replicated(built.ways[number][choice[number]], axis):
                asked = _asked(tensors, number, axis, axes)
                because = "no option of it has its tensors so" if asked else "no dim of it is on the axis"
                share = seconds[number] / total
                name = built.mesh.names[axis]
                out.append(Unmatched(item=item.name, axis=name, because=because, share_of_compute=share))
    return sorted(out, key=lambda each: -each.share_of_compute)
