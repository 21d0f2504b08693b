"""Dims of operators that multiply: matrix products, grouped products of experts, fused attention, convolution."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

from steptime.captured.cost.work import integer, integers
from steptime.captured.graph import Node, TensorType
from steptime.sharding.placement import P, Placement, R, shard
from steptime.sharding.rows import (
    Dim,
    Exchange,
    Labels,
    OperatorDims,
    Special,
    by_name,
    labelled,
    labels,
    numbers_of,
    right_aligned,
    terms_of,
    unlabelled,
)

Rule = Callable[[Node], OperatorDims]


def _product(left: tuple[str, str], right: tuple[str, str], out: str, added: str = "") -> Rule:
    """Two factors by argument name and labels; what is added to the product is a term where the product is one."""

    def rule(node: Node) -> OperatorDims:
        to = labels(out)
        given = by_name(node, {left[0]: labels(left[1]), right[0]: labels(right[1])})
        extra = numbers_of(node, added) if added else ()
        for number in extra:
            given[number] = right_aligned(to, node.inputs[number].type)
        inner = set(labels(left[1])) - set(to)
        special = {name: Special(inputs=dict.fromkeys(extra, P)) for name in inner}
        groups = [(added, left[0]), (added, right[0])] if extra else [(left[0],), (right[0],)]
        return OperatorDims(dims=labelled(node, given, [to], special), terms=terms_of(node, *groups))

    return rule


def _linear(node: Node) -> OperatorDims:
    """Rows times a weight of (columns, inner)."""
    first = node.names[0]
    rank = node.inputs[0].type.rank
    rows = tuple(f"rows{dim}" for dim in range(rank - 1))
    out = (*rows, "columns")
    given = by_name(node, {first: (*rows, "inner"), "weight": labels("columns inner"), "bias": labels("columns")})
    bias = numbers_of(node, "bias")
    dims = labelled(node, given, [out], {"inner": Special(inputs=dict.fromkeys(bias, P))})
    added = ("bias",) if bias else ()
    return OperatorDims(dims=dims, terms=terms_of(node, (first, *added), ("weight", *added)))


def _grouped(node: Node) -> OperatorDims:
    """Products of experts; rows are sorted by expert, and each device is taken to get as many of them as any other.

    Split by experts, a device has the rows of its own experts and their offsets.
    """
    a, b = (node.inputs_of(name)[0].type for name in ("self", "mat2"))
    shapes: Mapping[tuple[int, int], tuple[str, str, str]] = {
        (2, 3): ("!tokens inner", "experts inner columns", "!tokens columns"),
        (2, 2): ("rows !tokens", "!tokens columns", "experts rows columns"),
        (3, 2): ("experts rows inner", "inner !tokens", "rows !tokens"),
        (3, 3): ("experts rows inner", "experts inner columns", "experts rows columns"),
    }
    left, right, out = map(labels, shapes[a.rank, b.rank])
    table: dict[str, Labels] = {"self": left, "mat2": right, "offs": ("experts",)}
    dims = labelled(node, by_name(node, table), [out], {"experts": _of_experts(node, left, right, out)})
    return OperatorDims(dims=dims, terms=terms_of(node, ("self",), ("mat2",)))


def _of_experts(node: Node, left: Labels, right: Labels, out: Labels) -> Special:
    """Rows go with their experts."""
    names = {"self": left, "mat2": right}
    inputs = {
        number: shard(names[name].index("!tokens"))
        for number, name in enumerate(node.names)
        if "!tokens" in names.get(name, ())
    }
    return Special(inputs=inputs, outputs={0: shard(out.index("!tokens"))} if "!tokens" in out else None)


_HEADS_FIRST: Final = "batch heads {tokens} {width}"
_TOKENS_FIRST: Final = "batch {tokens} heads {width}"
_GRADIENTS: Final = ("grad_out", "grad_out_")


def _attention(order: str) -> Rule:
    """Fused attention, forward and backward, on tensors of four dims."""

    def rule(node: Node) -> OperatorDims:
        types = {name: value.type for name, value in zip(node.names, node.inputs, strict=True)}
        q, k = types["query"], types["key"]
        if q.rank != 4:  # sequences end to end: tokens, heads, width
            return _packed(node)
        to = labels(order.format(tokens="queries", width="!out_width"))
        keys = labels(order.format(tokens="!keys", width="{}"))
        table: dict[str, Labels] = {
            "query": labels(order.format(tokens="queries", width="!width")),
            "key": (*keys[:-1], "!width"),
            "value": (*keys[:-1], "!out_width"),
            "out": to,
            **dict.fromkeys(_GRADIENTS, to),
            "logsumexp": labels("batch heads queries"),
        }
        scores = labels("batch heads queries !keys")
        for name in ("attn_bias", "attn_mask"):
            if name in types:
                table[name] = right_aligned(scores, types[name])
        given, outputs = by_name(node, table), _attention_outputs(node, table)
        return OperatorDims(
            dims=(
                *labelled(node, given, outputs, _attention_specials(node, order, types)),
                *_context(node, order, q, k),
            ),
            terms=terms_of(node, *((name,) for name in _GRADIENTS)),
        )

    return rule


def _attention_outputs(node: Node, table: Mapping[str, Labels]) -> list[Labels]:
    """Forward: result, sums of exponents, random state; backward: gradients of queries, keys, values, bias."""
    backward = node.op.endswith("_backward")
    names = ("query", "key", "value", "attn_bias") if backward else ("out", "logsumexp")
    known = [table[name] for name in names if name in table]
    known += [()] * (len(node.outputs) - len(known))
    return [
        names if len(names) == type.rank else unlabelled(type) for names, type in zip(known, node.outputs, strict=False)
    ]


def _attention_specials(node: Node, order: str, types: Mapping[str, TensorType]) -> dict[str, Special]:
    """Heads go in groups that share keys; queries are apart where no causal mask ties them to their place."""
    at = labels(order.format(tokens="t", width="w")).index("heads")
    shared, backward = types["key"].shape[at], node.op.endswith("_backward")
    sums = types["logsumexp"] if backward else node.outputs[1] if len(node.outputs) > 1 else None
    padded = sums is None or sums.rank != 3 or sums.shape[2] != types["query"].shape[3 - at]
    causal = integer(node, "is_causal", int(integer(node, "custom_mask_type", 0) > 0))
    of_keys: dict[int, Placement] = {1: P, 2: P} if backward else {}
    return {
        "heads": Special(units=shared if shared > 1 else None, outputs=of_keys if shared == 1 else None),
        "queries": Special(kind="indivisible" if causal or padded else None, outputs=of_keys),
    }


def _context(node: Node, order: str, q: TensorType, k: TensorType) -> tuple[Dim, ...]:
    """Queries, keys and values split by tokens: keys and values are gathered, their gradients reduced and scattered.

    A causal mask is taken to be balanced over the devices (first and last pieces of the sequence together).
    """
    at = labels(order.format(tokens="tokens", width="w")).index("tokens")
    if q.shape[at] != k.shape[at] or "attn_bias" in node.names or "attn_mask" in node.names:
        return ()
    backward = node.op.endswith("_backward")
    inputs = tuple(
        shard(at) if value.type.rank == 4 else shard(2) if name == "logsumexp" and value.type.rank == 3 else R
        for name, value in zip(node.names, node.inputs, strict=True)
    )
    outputs = tuple(
        shard(at) if type.rank == 4 else shard(2) if number == 1 and type.rank == 3 and not backward else R
        for number, type in enumerate(node.outputs)
    )
    moved = sum(node.inputs_of(name)[0].type.size_bytes for name in ("key", "value")) * (2 if backward else 1)
    exchange = Exchange(collective="all_gather", size_bytes=moved, across=("batch", "heads"))
    return (Dim(name="tokens", size=q.shape[at], kind="exchanged", inputs=inputs, outputs=outputs, exchange=exchange),)


def _packed(node: Node) -> OperatorDims:
    """Only heads: tokens of many sequences lie end to end."""
    table: dict[str, Labels] = dict.fromkeys(
        ("query", "key", "value", "out", *_GRADIENTS), labels("!tokens heads !width")
    )
    outputs = [labels("!tokens heads !width") if type.rank == 3 else (".",) * type.rank for type in node.outputs]
    shared = node.inputs_of("key")[0].type.shape[1]
    return OperatorDims(
        dims=labelled(node, by_name(node, table), outputs, {"heads": Special(units=shared)}),
        terms=terms_of(node, *((name,) for name in _GRADIENTS)),
    )


def _convolution(node: Node) -> OperatorDims:
    """Images, channels (or groups of them), and spatial dims, whose edges neighbours exchange."""
    backward = "grad_output" in node.names
    names = {"grad_output": _result_labels(node), "weight": _weight_labels(node), "bias": ("out",)}
    x = next(name for name in ("input", "self") if name in node.names)
    names[x] = _image_labels(node)
    to: list[Labels] = [names["grad_output"]]
    if backward:
        mask = integers(node, "output_mask") or (1, 1, 0)
        to = [each for each, kept in zip((names[x], names["weight"], ("out",)), mask, strict=True) if kept]
    special = _convolution_specials(node, to, backward)
    dims = labelled(node, by_name(node, names), to, special)
    bias = ("bias",) if "bias" in node.names else ()
    groups = [("grad_output",)] if backward else [(x, *bias), ("weight", *bias)]
    return OperatorDims(dims=dims, terms=terms_of(node, *groups))


def _grouped_channels(node: Node) -> bool:
    return integer(node, "groups", 1) > 1


def _spatial(node: Node) -> tuple[str, ...]:
    rank = node.inputs_of("weight")[0].type.rank - 2
    return tuple(f"space{dim}" for dim in range(rank))


def _image_labels(node: Node) -> Labels:
    return ("images", "groups" if _grouped_channels(node) else "in", *_spatial(node))


def _result_labels(node: Node) -> Labels:
    return ("images", "groups" if _grouped_channels(node) else "out", *_spatial(node))


def _weight_labels(node: Node) -> Labels:
    pair = ("groups", "!in") if _grouped_channels(node) else ("out", "in")
    pair = (pair[1], pair[0]) if integer(node, "transposed", 0) and not _grouped_channels(node) else pair
    return (*pair, *(f"!tap{dim}" for dim in range(len(_spatial(node)))))


def _convolution_specials(node: Node, to: list[Labels], backward: bool) -> dict[str, Special]:
    """Gradients sum over what they lost; the bias is a term where channels are summed, and its gradient whole."""
    out: dict[str, Special] = {}
    for name in ("images", "out", "in"):
        summed = (n for n, each in enumerate(to) if name not in each and (name, each) != ("in", ("out",)))
        bias = numbers_of(node, "bias") if name == "in" and not backward else ()
        out[name] = Special(outputs=dict.fromkeys(summed, P) if backward else {}, inputs=dict.fromkeys(bias, P))
    for dim, name in enumerate(_spatial(node)):
        summed = (n for n, each in enumerate(to) if name not in each)
        out[name] = _window(node, dim, dict.fromkeys(summed, P) if backward else {})
    if _grouped_channels(node):  # the bias and its gradient are by channel, and channels go with their groups
        inputs = {number: shard(0) for number in numbers_of(node, "bias")}
        biases = {n: shard(0) for n, each in enumerate(to) if each == ("out",)}
        out["groups"] = Special(units=integer(node, "groups", 1), inputs=inputs, outputs=biases)
        out["out"] = Special(kind="indivisible")
    return out


def reach(kernel: int, stride: int, padding: int, dilation: int, transposed: bool = False) -> tuple[int, int]:
    """Rows that a piece needs from the pieces before and after it, where strides divide the rows evenly.

    >>> reach(3, 1, 1, 1), reach(7, 2, 3, 1), reach(2, 2, 0, 1)
    ((1, 1), (3, 2), (0, 0))
    """
    span = dilation * (kernel - 1)
    if transposed:
        return max((span - padding) // stride, 0), max((padding + stride - 1) // stride, 0)
    return padding, max(span + 1 - stride - padding, 0)


def _window(node: Node, dim: int, lost: Mapping[int, Placement]) -> Special:
    x = next(node.inputs_of(name)[0].type for name in ("input", "self") if name in node.names)
    y = node.inputs_of("grad_output")[0].type if "grad_output" in node.names else node.outputs[0]
    weight = node.inputs_of("weight")[0].type
    each = [_of_dim(node, name, dim, default) for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))]
    turned = bool(integer(node, "transposed", 0))
    inner, outer = (y, x) if turned else (x, y)
    if inner.shape[2 + dim] != outer.shape[2 + dim] * each[0]:
        return Special(kind="indivisible")
    rows = sum(reach(weight.shape[2 + dim], each[0], each[1], each[2], turned))
    if not rows:
        return Special(units=outer.shape[2 + dim], outputs=lost)
    row = math.prod(x.shape) // x.shape[2 + dim] * x.element_bytes
    if "grad_output" in node.names:  # the same rows of the gradient, and what the edges add to the neighbour's
        row += math.prod(y.shape) // y.shape[2 + dim] * y.element_bytes
    across = ("images", "in", "groups", *(name for n, name in enumerate(_spatial(node)) if n != dim))
    exchange = Exchange(collective="halo", size_bytes=rows * row, across=across)
    return Special(kind="halo", units=outer.shape[2 + dim], outputs=lost, exchange=exchange)


def _of_dim(node: Node, name: str, dim: int, default: int) -> int:
    given = integers(node, name) or (default,)
    return given[dim] if dim < len(given) else given[-1]


CONVOLUTIONS: Final = (
    "convolution",
    "_convolution",
    "convolution_overrideable",
    "cudnn_convolution",
    "mkldnn_convolution",
    "conv2d",
    "convolution_backward",
    "convolution_backward_overrideable",
)
"""Convolutions and their backward passes."""
_FUSED = [
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
]
PRODUCTS: Final[Mapping[str, Rule]] = {
    "mm": _product(("self", "rows inner"), ("mat2", "inner columns"), "rows columns"),
    "addmm": _product(("mat1", "rows inner"), ("mat2", "inner columns"), "rows columns", "self"),
    "bmm": _product(("self", "batch rows inner"), ("mat2", "batch inner columns"), "batch rows columns"),
    "baddbmm": _product(
        ("batch1", "batch rows inner"), ("batch2", "batch inner columns"), "batch rows columns", "self"
    ),
    "mv": _product(("self", "rows inner"), ("vec", "inner"), "rows"),
    "dot": _product(("self", "inner"), ("tensor", "inner"), ""),
    "linear": _linear,
    "_grouped_mm": _grouped,
    **{name: _attention(_HEADS_FIRST) for base in _FUSED for name in (base, f"{base}_backward")},
    **dict.fromkeys(
        (
            "_flash_attention_forward",
            "_flash_attention_backward",
            "_efficient_attention_forward",
            "_efficient_attention_backward",
        ),
        _attention(_TOKENS_FIRST),
    ),
    **dict.fromkeys(CONVOLUTIONS, _convolution),
}
