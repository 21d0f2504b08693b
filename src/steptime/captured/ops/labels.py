"""Dims of an operator: which exist, their positions in its tensors, and the effect of splitting one of them.

An operator gives every dim of its tensors a label; equal labels are one dim. The labels determine the placement of each
tensor when a dim is split over the devices of a mesh axis: sharded where it has the label, replicated where it does
not, and a term of a sum in an output that lost the label. :class:`Special` describes the exceptions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from steptime.captured.graph import Node, Nodes, TensorType
from steptime.captured.ops.placement import P, Placement, R, shard
from steptime.captured.ops.work import integers
from steptime.errors import UserError

Kind: TypeAlias = Literal["batch", "contracted", "reduced", "halo", "exchanged", "indivisible"]
"""Batch: independent iterations. Contracted: summed over. Reduced: another reduction, or one that is finished in the
operator. Halo: windows reach over the edges of a piece. Exchanged: devices exchange more than edges. Indivisible: it
cannot be split."""
Collective: TypeAlias = Literal["halo", "all_reduce", "all_gather", "all_to_all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Communication inside an operator that has one of its dims split.

    `size_bytes` is the size of the tensor that is reduced, gathered (the whole result) or redistributed; for a halo,
    the bytes that one device sends to both of its neighbours together. Sizes are of the whole operator: dims in
    `across` divide them where they are split over other axes.
    """

    collective: Collective
    size_bytes: int
    across: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Dim:
    """One dim of an operator, and the placements of its tensors when this dim is split over one axis of a mesh."""

    name: str
    size: int
    """Maximum number of pieces of equal work: heads where a width is heads times head size."""
    kind: Kind
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    exchange: Exchange | None = None
    masked: bool = False
    """Indices point into the split dim: each device handles indices of its own piece and masks the others."""
    equal: bool = True
    """All pieces have the same size; otherwise the last ones may be smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Inputs in which the operator is linear: from terms of a sum of them it computes terms of a sum of its outputs."""

    name: str
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorDims:
    """Dims along which an operator can be split, and groups of inputs in which it is linear."""

    dims: tuple[Dim, ...]
    terms: tuple[Terms, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Special:
    """Exceptions to the placements that the labels determine."""

    kind: Kind | None = None
    inputs: Mapping[int, Placement] | None = None
    """Number of an input -> placement."""
    outputs: Mapping[int, Placement] | None = None
    units: int | None = None
    """Maximum number of pieces; tensors may have this dim with different sizes."""
    exchange: Exchange | None = None
    masked: bool = False


Labels: TypeAlias = Sequence[str]
NO_LABEL: Final = "."
"""Label of a dim of a tensor that is no dim of the operator."""
FIXED: Final = "!"
"""First character of the label of a dim that cannot be split."""
_NOTHING: Final = Special()


def labels(text: str) -> tuple[str, ...]:
    """Labels from a text with one word for each dim."""
    return tuple(text.split())


def numbered(rank: int) -> tuple[str, ...]:
    """One label for each dim of a tensor.

    >>> numbered(2)
    ('d0', 'd1')
    """
    return tuple(f"d{dim}" for dim in range(rank))


def right_aligned(names: Labels, type: TensorType) -> tuple[str, ...]:
    """Labels of a tensor that is broadcast to one with the given labels.

    >>> right_aligned(("d0", "d1"), TensorType((7,), "fp32"))
    ('d1',)
    """
    return tuple(names[len(names) - type.rank :]) if type.rank <= len(names) else (NO_LABEL,) * type.rank


def unlabelled(type: TensorType) -> tuple[str, ...]:
    """Labels of a tensor that is replicated in every split of the operator."""
    return (NO_LABEL,) * type.rank


def all_replicated(node: Node) -> tuple[tuple[Placement, ...], tuple[Placement, ...]]:
    """Placements of a node whose tensors are all replicated."""
    return (R,) * len(node.inputs), (R,) * len(node.outputs)


def labelled(
    node: Node, inputs: Sequence[Labels], outputs: Sequence[Labels], special: Mapping[str, Special] | None = None
) -> tuple[Dim, ...]:
    """Dims of a node from the labels of its tensors, in order of first appearance: outputs first, then inputs."""
    given = [value.type for value in node.inputs]
    sizes: dict[str, int] = {}
    for names, type in (*zip(outputs, node.outputs, strict=True), *zip(inputs, given, strict=True)):
        for name, size in zip(names, type.shape, strict=True):
            sizes[name] = max(sizes.get(name, 1), size)
    return tuple(
        _dim(name, size, (inputs, given), (outputs, node.outputs), (special or {}).get(name, _NOTHING))
        for name, size in sizes.items()
        if name != NO_LABEL and size > 1
    )


_Tensors: TypeAlias = tuple[Sequence[Labels], Sequence[TensorType]]


def _dim(name: str, size: int, inputs: _Tensors, outputs: _Tensors, special: Special) -> Dim:
    replicated = (R,) * len(inputs[1]), (R,) * len(outputs[1])
    kind = special.kind or ("batch" if any(name in names for names in outputs[0]) else "contracted")
    if name.startswith(FIXED) or kind == "indivisible":
        own = name.removeprefix(FIXED)
        return Dim(name=own, size=size, kind="indivisible", inputs=replicated[0], outputs=replicated[1])
    lost = P if kind == "contracted" else R
    return Dim(
        name=name,
        size=special.units or size,
        kind=kind,
        exchange=special.exchange,
        masked=special.masked,
        equal=special.units is not None or special.exchange is not None,
        inputs=_placements(name, size, inputs, R, special.inputs, special.units),
        outputs=_placements(name, size, outputs, lost, special.outputs, special.units),
    )


def _placements(
    name: str, size: int, tensors: _Tensors, lost: Placement, given: Mapping[int, Placement] | None, units: int | None
) -> tuple[Placement, ...]:
    out = []
    for number, (names, type) in enumerate(zip(*tensors, strict=True)):
        at = next((dim for dim, each in enumerate(names) if each == name and type.shape[dim] > 1), None)
        same = at is not None and (type.shape[at] == size or units is not None)
        found = shard(at) if same and at is not None else lost
        out.append((given or {}).get(number, found))
    return tuple(out)


def spelled(text: str) -> Callable[[Node], OperatorDims]:
    """Dims of an operator from labels of its inputs and outputs: ``"rows inner, inner columns -> rows columns"``.

    A label that no output has is summed over; a label that begins with ``!`` cannot be split, and ``.`` is no dim.

    Args:
        text: the labels of each tensor, inputs in the order of their arguments.
    """
    given, out = ([labels(part) for part in side.split(",")] for side in text.split("->"))

    def rule(node: Node) -> OperatorDims:
        """Dims of a node; none where the number or the ranks of its tensors differ from the text.

        Raises:
            UserError: the labels contradict the operator.
        """
        types = [value.type for value in node.inputs], node.outputs
        if [[len(names) for names in side] for side in (given, out)] != [[t.rank for t in side] for side in types]:
            return OperatorDims(dims=())
        wrong = _contradicted(node, given, out)
        if wrong:
            hint = "a label is one dim of the operator: it has one size, or 1 where it broadcasts"
            raise UserError(f"labels {text!r} do not fit {node.op}: {wrong}", hint=hint)
        return OperatorDims(dims=labelled(node, given, out))

    return rule


def _contradicted(node: Node, given: Sequence[Labels], out: Sequence[Labels]) -> str:
    """Message on a label that has two sizes; empty if none has.

    The operator is also evaluated on longer dims of distinct sizes. Outputs with sizes given by attributes keep them;
    operators that reject the longer dims, and dims that no input has, are not checked.
    """
    from steptime.captured.ops.making import types_of

    sizes: dict[str, int] = {}
    for names, type in zip((*given, *out), (*(value.type for value in node.inputs), *node.outputs), strict=True):
        for name, size in zip(names, type.shape, strict=True):
            if name != NO_LABEL and size != sizes.setdefault(name, size):
                if 1 not in (size, sizes[name]):
                    return f"{name} is {sizes[name]} and {size}"
                sizes[name] = max(size, sizes[name])
    longer: dict[str, int] = {}
    for name, size in sizes.items():
        multiples = (size * times for times in range(2, 2 * len(sizes) + 3))
        longer[name] = next(each for each in multiples if each not in (*sizes.values(), *longer.values()))
    nodes, inputs = Nodes(), []
    for number, (names, value) in enumerate(zip(given, node.inputs, strict=True)):
        shape = [longer.get(name, size) if size > 1 else 1 for name, size in zip(names, value.type.shape, strict=True)]
        inputs.append(nodes.source("input", f"x{number}", TensorType(tuple(shape), value.type.dtype)))
    try:
        types = types_of(nodes.node(node.op, tuple(inputs), node.names, node.attributes, ()))
    except (UserError, ValueError, LookupError, ArithmeticError, AssertionError):
        return ""
    for names, type, had in zip(out, types, node.outputs, strict=False):
        for name, size, before in zip(names, type.shape, had.shape, strict=False):
            if name != NO_LABEL and any(name in each for each in given) and size not in (longer[name], before):
                return f"where {name} is {longer[name]} long, the output has {size}"
    return ""


def terms_of(node: Node, *groups: Iterable[str], outputs: Iterable[int] | None = None) -> tuple[Terms, ...]:
    """Terms of an operator that is linear in each group of arguments; groups of absent arguments are skipped."""
    chosen = set(range(len(node.outputs)) if outputs is None else outputs)
    made = []
    for group in map(tuple, groups):
        if any(name in node.names for name in group):
            placements = tuple(P if name in group else R for name in node.names)
            to = tuple(P if number in chosen else R for number in range(len(node.outputs)))
            made.append(Terms(name="terms of " + ", ".join(group), inputs=placements, outputs=to))
    return tuple(made)


def by_name(node: Node, table: Mapping[str, Labels]) -> list[tuple[str, ...]]:
    """Labels of each input, from a table by argument name; unlabelled where the table has none of its rank."""
    return [
        tuple(table[name]) if name in table and len(table[name]) == value.type.rank else unlabelled(value.type)
        for name, value in zip(node.names, node.inputs, strict=True)
    ]


def fixed(names: Sequence[str], at: int) -> tuple[str, ...]:
    """Labels with the one at a dim marked as indivisible."""
    return tuple(f"{FIXED}{name}" if dim == at else name for dim, name in enumerate(names))


def without(names: Sequence[str], at: int) -> tuple[str, ...]:
    """Labels without the one at a dim."""
    return tuple(name for dim, name in enumerate(names) if dim != at)


def at_dim(node: Node, rank: int, name: str = "dim", default: int = 0) -> int:
    """The dim that an attribute names, as an index from the front."""
    return (integers(node, name) or (default,))[0] % max(rank, 1)


def numbers_of(node: Node, *names: str) -> tuple[int, ...]:
    """Positions of the inputs that have one of the argument names."""
    return tuple(number for number, name in enumerate(node.names) if name in names)
