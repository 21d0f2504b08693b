"""The operator that one device runs under a strategy: local tensors, and attributes that fit them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from steptime.captured.graph import Attribute, Node, Nodes, TensorType, Value
from steptime.captured.ops import OPERATORS, left_factor
from steptime.captured.ops.placement import Sharding, local_shape
from steptime.captured.ops.views import turned
from steptime.sharding.options import Strategy

Types = Sequence[TensorType]


def local_type(type: TensorType, sharding: Sharding, sizes: Sequence[int]) -> TensorType:
    """Type of a device's piece; its dims keep their order in memory, and broadcast ones have one element there.

    >>> from steptime.captured.ops.placement import shard
    >>> local_type(TensorType((8, 6), "fp32", (1, 8)), (shard(0),), (2,))
    TensorType(shape=(4, 6), dtype='fp32', strides=(1, 4))
    """
    shape = local_shape(type.shape, sharding, sizes)
    if type.strides is None or shape == type.shape:
        return TensorType(shape, type.dtype, type.strides)
    strides, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda each: (type.strides or ())[each]):
        if type.strides[dim]:
            strides[dim], step = step, step * shape[dim]
    return TensorType(shape, type.dtype, tuple(strides))


def local_node(node: Node, strategy: Strategy, sizes: Sequence[int], nodes: Nodes) -> Node:
    """The node that one device runs, made in `nodes`; its inputs are constants.

    Context-parallel attention has the queries of the device and all gathered keys. A causal mask is replaced by half of
    the keys without a mask, which is the mean work of balanced pieces of the sequence.
    """
    inputs = tuple(local_type(v.type, s, sizes) for v, s in zip(node.inputs, strategy.inputs, strict=True))
    outputs = tuple(local_type(t, s, sizes) for t, s in zip(node.outputs, strategy.outputs, strict=True))
    attributes = dict(node.attributes)
    row = OPERATORS.get(node.op)
    if row is not None and row.pieces is not None:
        attributes |= row.pieces(node, inputs, outputs)
    if "tokens" in strategy.dims:
        inputs, attributes = _gathered(node, strategy, sizes, inputs, attributes)
    values = _values(node, inputs, nodes)
    return nodes.node(node.op, values, node.names, tuple(attributes.items()), outputs)


def _values(node: Node, types: Types, nodes: Nodes) -> tuple[Value, ...]:
    """Constants, one for an input that is given twice; transposed in memory where the left factor of a product is."""
    first = {value: number for number, value in reversed(list(enumerate(node.inputs)))}
    left = left_factor(node)
    out = []
    for value, type in zip(node.inputs, types, strict=True):
        if value is left and type.rank == 2 and turned(value):
            source = nodes.source("constant", f"piece {first[value]}", TensorType(type.shape[::-1], type.dtype))
            out.append(nodes.apply("t", {"self": source}, outputs=[type]).value())
        else:
            out.append(nodes.source("constant", f"piece {first[value]}", type))
    return tuple(out)


def _gathered(
    node: Node, strategy: Strategy, sizes: Sequence[int], inputs: Types, attributes: dict[str, Attribute]
) -> tuple[tuple[TensorType, ...], dict[str, Attribute]]:
    ranks = math.prod(size for size, dim in zip(sizes, strategy.dims, strict=True) if dim == "tokens")
    causal = bool(attributes.get("is_causal"))
    at = next(
        p.dim for d, p in zip(strategy.dims, strategy.inputs[node.names.index("key")], strict=True) if d == "tokens"
    )
    types = list(inputs)
    for number, name in enumerate(node.names):
        if name in ("key", "value") and at is not None:
            shape = list(types[number].shape)
            shape[at] = shape[at] * ranks // (2 if causal else 1)
            types[number] = TensorType(tuple(shape), types[number].dtype)
    return tuple(types), attributes | ({"is_causal": False} if causal else {})
