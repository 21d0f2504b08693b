"""The operator that one device runs under a strategy: pieces of its tensors, and attributes that fit them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from steptime.captured.cost.products import LEFT
from steptime.captured.cut.rules import turned
from steptime.captured.graph import Attribute, Node, Nodes, TensorType, Value
from steptime.sharding.dims_products import CONVOLUTIONS
from steptime.sharding.options import Strategy
from steptime.sharding.placement import Sharding, local_shape

Types = Sequence[TensorType]


def local_type(type: TensorType, sharding: Sharding, sizes: Sequence[int]) -> TensorType:
    """Type of the piece that a device has; its dims lie in memory in the same order, broadcast ones once.

    >>> from steptime.sharding.placement import shard
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

    Context-parallel attention has the queries of the device and all gathered keys; under a causal mask, half of the
    keys without a mask, which is as much work as balanced pieces of the sequence have on average.
    """
    inputs = tuple(local_type(v.type, s, sizes) for v, s in zip(node.inputs, strategy.inputs, strict=True))
    outputs = tuple(local_type(t, s, sizes) for t, s in zip(node.outputs, strategy.outputs, strict=True))
    attributes = dict(node.attributes)
    adapt = ADAPTED.get(node.op)
    if adapt is not None:
        attributes |= adapt(node, inputs, outputs)
    if "tokens" in strategy.dims:
        inputs, attributes = _gathered(node, strategy, sizes, inputs, attributes)
    values = _values(node, inputs, nodes)
    return nodes.node(node.op, values, node.names, tuple(attributes.items()), outputs)


def _values(node: Node, types: Types, nodes: Nodes) -> tuple[Value, ...]:
    """Constants, the same where an input is given twice, turned in memory where the left operand of a product is."""
    first = {value: number for number, value in reversed(list(enumerate(node.inputs)))}
    left = next((value for name in LEFT if (value := node.input(name)) is not None), None)
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


Adapt = Callable[[Node, Types, Types], Mapping[str, Attribute]]


def _to_output(*names: str) -> Adapt:
    """Attributes that are the shape of the result."""
    return lambda node, inputs, outputs: {name: outputs[0].shape for name in names if node.attribute(name) is not None}


def _rows(node: Node, inputs: Types, outputs: Types) -> dict[str, Attribute]:
    return {"num_weights": outputs[0].shape[0]}


def _normed(node: Node, inputs: Types, outputs: Types) -> dict[str, Attribute]:
    given = node.attribute("normalized_shape")
    rank = len(given) if isinstance(given, tuple) else 1
    x = inputs[next(n for n, name in enumerate(node.names) if name == "input")]
    return {"normalized_shape": x.shape[x.rank - rank :]}


def _group_normed(node: Node, inputs: Types, outputs: Types) -> dict[str, Attribute]:
    number = next(n for n, name in enumerate(node.names) if name in ("input", "X"))
    x, whole = inputs[number], node.inputs[number].type
    group = node.attribute("group", 1)
    groups = int(group) if isinstance(group, int) else 1
    return {
        "N": x.shape[0],
        "C": x.shape[1],
        "HxW": math.prod(x.shape[2:]),
        "group": groups * x.shape[1] // whole.shape[1],
    }


def _convolved(node: Node, inputs: Types, outputs: Types) -> dict[str, Attribute]:
    """Groups are divided with the channels; the size of a bias is that of its gradient."""
    number = next(n for n, name in enumerate(node.names) if name in ("input", "self"))
    groups = node.attribute("groups", 1)
    made: dict[str, Attribute] = {}
    if isinstance(groups, int) and groups > 1:
        made["groups"] = groups * inputs[number].shape[1] // node.inputs[number].type.shape[1]
    if "grad_output" in node.names and node.attribute("bias_sizes"):
        made["bias_sizes"] = (inputs[node.names.index("grad_output")].shape[1],)
    return made


def _range(node: Node, inputs: Types, outputs: Types) -> dict[str, Attribute]:
    """The first piece of a range; others begin later."""
    start, step = node.attribute("start", 0), node.attribute("step", 1)
    if isinstance(start, (int, float)) and isinstance(step, (int, float)):
        return {"end": start + step * outputs[0].shape[0]}
    return {}


def _longest(node: Node, inputs: Types, outputs: Types) -> dict[str, Attribute]:
    """Lengths of heads-first attention."""
    sizes = {name: type.shape[2] for name, type in zip(node.names, inputs, strict=True) if type.rank == 4}
    return {
        name: sizes[of] for name, of in (("max_q", "query"), ("max_k", "key")) if node.attribute(name) and of in sizes
    }


_SIZED = [
    "view",
    "_unsafe_view",
    "reshape",
    "view_copy",
    "expand",
    "zeros",
    "ones",
    "full",
    "new_zeros",
    "new_ones",
    "new_full",
    "empty",
    "new_empty",
    "rand",
    "randn",
    "randint",
    "empty_strided",
    "new_empty_strided",
]
ADAPTED: Final[Mapping[str, Adapt]] = {
    **dict.fromkeys(_SIZED, _to_output("size", "shape")),
    **dict.fromkeys(("select_backward", "slice_backward"), _to_output("input_sizes")),
    **dict.fromkeys(
        [
            "upsample_nearest2d_backward",
            "upsample_bilinear2d_backward",
            "upsample_bicubic2d_backward",
            "upsample_nearest1d_backward",
            "upsample_nearest3d_backward",
        ],
        _to_output("input_size"),
    ),
    "arange": _range,
    "embedding_dense_backward": _rows,
    **dict.fromkeys(
        [
            "native_layer_norm",
            "native_layer_norm_backward",
            "_fused_rms_norm",
            "_fused_rms_norm_backward",
            "layer_norm",
            "rms_norm",
        ],
        _normed,
    ),
    **dict.fromkeys(("native_group_norm", "native_group_norm_backward"), _group_normed),
    **dict.fromkeys(CONVOLUTIONS, _convolved),
    **{
        f"{name}{way}": _longest
        for name in (
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_fused_attention_overrideable",
        )
        for way in ("", "_backward")
    },
}
"""Operator -> the attributes that change with the pieces of its tensors."""


def members(node: Node, nodes: Nodes) -> tuple[Node, ...]:
    """An operator on lists as one operator for each tensor, which can be split on their own; others as they are.

    The place of a tensor in its list is its place in every list of the same length; a single tensor is given to all.
    """
    if not node.op.startswith(("_foreach_", "_fused_adam", "_fused_sgd", "_fused_adagrad")) or not node.outputs:
        return (node,)
    lists: dict[str, list[Value]] = {}
    for name, value in zip(node.names, node.inputs, strict=True):
        lists.setdefault(name, []).append(value)
    count = len(lists[node.names[0]])
    ways = len(node.outputs) // count
    out = []
    for place in range(count):
        inputs = {name: [each[place] if len(each) == count else each[0]] for name, each in lists.items()}
        attributes = {
            name: (given[place],) if isinstance(given, tuple) and len(given) == count else given
            for name, given in node.attributes
        }
        types = [node.outputs[way * count + place] for way in range(ways)]
        out.append(nodes.apply(node.op, inputs, attributes, outputs=types))
    return tuple(out)
