"""Legal placements of the tensors of an operator: along one axis of a mesh, and along all of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from steptime.captured.graph import Node, TensorType
from steptime.captured.ops import dims_of
from steptime.captured.ops.labels import Dim, Exchange, all_replicated
from steptime.captured.ops.placement import Placement, Sharding, divides, parted


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """Placements of the tensors of an operator along one axis with which each device can compute its part."""

    inputs: tuple[Placement, ...]
    """One per input of the node."""
    outputs: tuple[Placement, ...]
    dim: str = ""
    """The dim that is split, or the terms; empty: everything is replicated."""
    units: int = 1
    """Size that the number of devices must divide; 0: terms, which any number of devices can have."""
    exchange: Exchange | None = None
    masked: bool = False
    """Each device counts only the indices that point into its piece."""
    equal: bool = True
    """All pieces must have one size; if False, the last pieces may be smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """Shardings of the tensors of an operator on a mesh."""

    dims: tuple[str, ...]
    """Dim that is split over each axis."""
    inputs: tuple[Sharding, ...]
    """One per input of the node."""
    outputs: tuple[Sharding, ...]
    exchanges: tuple[Exchange | None, ...]
    """Communication inside the operator over each axis, with the bytes that remain as other axes divide its tensors."""

    @property
    def replicated(self) -> bool:
        """Every device runs the whole operator."""
        return not any(self.dims)


_Key = tuple[object, ...]
_OPTIONS: dict[_Key, tuple[Option, ...]] = {}
_STRATEGIES: dict[_Key, tuple[Strategy, ...]] = {}


def signature(node: Node) -> _Key:
    """Key of a node's shardings: nodes with equal keys have the same options."""
    attributes = tuple(pair for pair in node.attributes if pair[0] not in ("draw", "name"))
    return (node.op, node.names, tuple(value.type for value in node.inputs), attributes, node.outputs)


def options(node: Node) -> tuple[Option, ...]:
    """Options along one axis, the replicated one first; an unknown operator has only that one.

    >>> from steptime.captured.graph import Nodes, TensorType
    >>> x = Nodes().source("input", "x", TensorType((8, 4), "fp32"))
    >>> y = Nodes().apply("sum", {"self": x}, {"dim": (1,)}, outputs=[TensorType((8,), "fp32")])
    >>> [(each.dim, str(each.inputs[0]), str(each.outputs[0])) for each in options(y)]
    [('', 'R', 'R'), ('d0', 'S(0)', 'S(0)'), ('d1', 'S(1)', 'P'), ('terms of self', 'P', 'P')]
    """
    key = signature(node)
    found = _OPTIONS.get(key)
    if found is None:
        found = _OPTIONS[key] = _options(node)
    return found


def _options(node: Node) -> tuple[Option, ...]:
    inputs, outputs = all_replicated(node)
    made = [Option(inputs=inputs, outputs=outputs)]
    known = dims_of(node)
    if known is not None:
        made += [_of_dim(dim) for dim in known.dims if dim.kind != "indivisible"]
        made += [Option(inputs=t.inputs, outputs=t.outputs, dim=t.name, units=0) for t in known.terms]
    best: dict[tuple[object, ...], Option] = {}
    for each in made:  # of options with equal placements the one with the least communication
        key = (each.inputs, each.outputs)
        if key not in best or _bytes(each.exchange) < _bytes(best[key].exchange):
            best[key] = each
    return tuple(best.values())


def _of_dim(dim: Dim) -> Option:
    return Option(
        inputs=dim.inputs,
        outputs=dim.outputs,
        dim=dim.name,
        units=dim.size,
        exchange=dim.exchange,
        masked=dim.masked,
        equal=dim.equal,
    )


def _bytes(exchange: Exchange | None) -> int:
    return exchange.size_bytes if exchange is not None else -1


def strategies(node: Node, sizes: Sequence[int]) -> tuple[Strategy, ...]:
    """Strategies on a mesh with axes of `sizes` devices: an option along each axis, where pieces are nearly equal.

    A dim that no axis divides is in no strategy; the first strategy is always the replicated one.

    >>> from steptime.captured.graph import Nodes, TensorType
    >>> x = Nodes().source("input", "x", TensorType((8, 3), "fp32"))
    >>> y = Nodes().apply("relu", {"self": x}, outputs=[TensorType((8, 3), "fp32")])
    >>> [each.dims for each in strategies(y, (2, 4))]
    [('', ''), ('', 'd0'), ('d0', ''), ('d0', 'd0')]
    """
    key = (*signature(node), tuple(sizes))
    found = _STRATEGIES.get(key)
    if found is None:
        found = _STRATEGIES[key] = tuple(_strategies(node, tuple(sizes)))
    return found


def _strategies(node: Node, sizes: tuple[int, ...]) -> list[Strategy]:
    types = (*(value.type for value in node.inputs), *node.outputs)
    each_axis = [[o for o in options(node) if _fits(types, o, size)] for size in sizes]
    best: dict[tuple[object, ...], Strategy] = {}
    for chosen in itertools.product(*each_axis):
        made = _combined(chosen, sizes, len(node.inputs), len(node.outputs))
        if not _even(types, made, chosen, sizes):
            continue
        key = (made.inputs, made.outputs)
        if key not in best or _total(made) < _total(best[key]):
            best[key] = made
    return list(best.values())


def _total(strategy: Strategy) -> int:
    return sum(_bytes(each) for each in strategy.exchanges)


def _fits(types: Sequence[TensorType], option: Option, size: int) -> bool:
    placements = (*option.inputs, *option.outputs)
    return (
        _divided(option, size)
        and all(divides(type.shape, (placement,), (size,)) for type, placement in zip(types, placements, strict=True))
        if option.dim
        else True
    )


def _divided(option: Option, count: int) -> bool:
    """True if the dim of an option can be divided into ``count`` pieces; terms always can."""
    return option.units % count == 0 if option.equal else parted(option.units, count)


def _even(types: Sequence[TensorType], made: Strategy, chosen: Sequence[Option], sizes: tuple[int, ...]) -> bool:
    shardings = (*made.inputs, *made.outputs)
    return all(
        _divided(each, math.prod(size for size, option in zip(sizes, chosen, strict=True) if option.dim == each.dim))
        for each in {option.dim: option for option in chosen if option.dim}.values()
    ) and all(divides(type.shape, sharding, sizes) for type, sharding in zip(types, shardings, strict=True))


def _combined(chosen: Sequence[Option], sizes: tuple[int, ...], inputs: int, outputs: int) -> Strategy:
    exchanges = []
    for axis, option in enumerate(chosen):
        rest = math.prod(
            size
            for other, size in enumerate(sizes)
            if other != axis and option.exchange is not None and chosen[other].dim in option.exchange.across
        )
        exchange = option.exchange
        exchanges.append(exchange and replace(exchange, size_bytes=exchange.size_bytes // rest))
    return Strategy(
        dims=tuple(option.dim for option in chosen),
        inputs=tuple(tuple(option.inputs[number] for option in chosen) for number in range(inputs)),
        outputs=tuple(tuple(option.outputs[number] for option in chosen) for number in range(outputs)),
        exchanges=tuple(exchanges),
    )


def kept_replicated(node: Node, sizes: Sequence[int]) -> str:
    """The reason why an operator is replicated on a mesh; empty if it can be split.

    >>> from steptime.captured.graph import Nodes, TensorType
    >>> nodes = Nodes()
    >>> x = nodes.source("input", "x", TensorType((7, 3), "fp32"))
    >>> kept_replicated(nodes.apply("relu", {"self": x}, outputs=[x.type]), (2, 4))
    'relu is kept replicated: 2 or 4 devices divide none of d0 (7), d1 (3)'
    >>> kept_replicated(nodes.apply("special", {"self": x}, outputs=[x.type]), (2, 4))
    'special is kept replicated: nothing is known of its dims'
    """
    if any(not each.replicated for each in strategies(node, sizes)):
        return ""
    known = dims_of(node)
    if known is None:
        return f"{node.op} is kept replicated: nothing is known of its dims"
    dims = ", ".join(f"{dim.name} ({dim.size})" for dim in known.dims if dim.kind != "indivisible")
    counts = " or ".join(str(size) for size in dict.fromkeys(sizes))
    why = f"{counts} devices divide none of {dims}" if dims else "it has no dim that can be split"
    return f"{node.op} is kept replicated: {why}"
