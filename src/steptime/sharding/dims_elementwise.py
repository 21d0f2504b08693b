"""Dims of operators on every element, of reductions and scans, softmax, norms, losses, and lists of tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

from steptime.captured.cost.elementwise import MAPS, OPTIMISERS, RANDOM
from steptime.captured.cost.work import integer, integers
from steptime.captured.graph import FLOATS, Node
from steptime.sharding.placement import P, Placement, R, Reduction, partial, shard
from steptime.sharding.rows import (
    FIXED,
    Dim,
    Exchange,
    Labels,
    OperatorDims,
    Special,
    by_name,
    labelled,
    numbered,
    right_aligned,
    terms_of,
    unlabelled,
)

Rule = Callable[[Node], OperatorDims]

#: Operator -> arguments in which it is linear together; gradients are always.
LINEAR: Final[Mapping[str, tuple[tuple[str, ...], ...]]] = {
    **dict.fromkeys(
        ["neg", "clone", "_to_copy", "contiguous", "conj", "real", "imag", "tril", "triu", "cumsum", "flip", "roll"],
        (("self",),),
    ),
    "add": (("self", "other"),),
    "sub": (("self", "other"),),
    "rsub": (("self", "other"),),
    "mul": (("self",), ("other",)),
    "div": (("self",),),
    "true_divide": (("self",),),
    "where": (("self", "other"),),
    "copy": (("src",),),
    "masked_fill": (("self",),),
    "lerp": (("self", "end"),),
}
GRADIENTS: Final = ("grad_output", "grad", "grad_out")
NEED_BOTH: Final = frozenset({"add", "sub", "rsub", "where", "lerp"})


def _linear_groups(node: Node) -> tuple[tuple[str, ...], ...]:
    if node.op.endswith("_backward"):
        return tuple((name,) for name in GRADIENTS)
    if node.attribute("rounding_mode") is not None or not all(type.dtype in FLOATS for type in node.outputs):
        return ()
    groups = LINEAR.get(node.op, ())
    if node.op in NEED_BOTH:
        return tuple(group for group in groups if set(group) <= set(node.names))
    if node.op == "masked_fill" and node.attribute("value") != 0:
        return ()
    return groups


def elementwise(node: Node) -> OperatorDims:
    """Every dim of the result; an input that is broadcast along one has all of it everywhere."""
    names = numbered(max((type.rank for type in node.outputs), default=0))
    given = [right_aligned(names, value.type) for value in node.inputs]
    out = [right_aligned(names, type) for type in node.outputs]
    return OperatorDims(dims=labelled(node, given, out), terms=terms_of(node, *_linear_groups(node)))


def drawn(node: Node) -> OperatorDims:
    """Random numbers: each device draws its own, so that nothing is linear."""
    return OperatorDims(dims=elementwise(node).dims)


_REDUCED: Final[Mapping[str, Reduction]] = {
    "sum": "sum",
    "nansum": "sum",
    "mean": "avg",
    "amax": "max",
    "amin": "min",
    "max": "max",
    "min": "min",
    "prod": "product",
    "any": "max",
    "all": "min",
    "count_nonzero": "sum",
}
_ROOTS: Final = frozenset({"norm", "linalg_vector_norm", "std", "var", "var_mean", "std_mean", "logsumexp"})
"""Reductions that one all-reduce of numbers per row finishes inside the operator."""


def _over(node: Node) -> tuple[int, ...]:
    rank = node.inputs[0].type.rank
    return (
        tuple(each % rank for each in integers(node, "dim")) if rank and integers(node, "dim") else tuple(range(rank))
    )


def reduction(node: Node) -> OperatorDims:
    """Dims that stay are apart; over the others each device has a term, or what finishes one is exchanged."""
    x, over = node.inputs[0].type, _over(node)
    names = numbered(x.rank)
    kept = [name for dim, name in enumerate(names) if dim not in over]
    outputs: list[Labels] = [
        tuple("." if dim in over else name for dim, name in enumerate(names))
        if type.rank == x.rank and x.rank
        else tuple(kept)
        if type.rank == len(kept)
        else unlabelled(type)
        for type in node.outputs
    ]
    special = {names[dim]: _reduced(node, kept) for dim in over}
    given = [names, *(unlabelled(value.type) for value in node.inputs[1:])]
    linear = node.op in ("sum", "mean") and x.dtype in FLOATS
    return OperatorDims(dims=labelled(node, given, outputs, special), terms=terms_of(node, ("self",)) if linear else ())


def _reduced(node: Node, kept: list[str]) -> Special:
    many = len(node.outputs) > 1
    if node.op in _REDUCED and not many:
        kind = _REDUCED[node.op]
        outputs: dict[int, Placement] = {0: partial(kind)}
        return Special(kind="contracted" if kind == "sum" else "reduced", outputs=outputs)
    if node.op not in _ROOTS:
        return Special(kind="indivisible")
    size = sum(type.size_bytes for type in node.outputs)
    return Special(kind="exchanged", exchange=Exchange(collective="all_reduce", size_bytes=size, across=tuple(kept)))


def along(*arguments: str) -> Rule:
    """Scans, sorts and choices: anything but the dim along which they go."""

    def rule(node: Node) -> OperatorDims:
        rank = node.inputs[0].type.rank
        at = _at(node, rank)
        names = tuple(f"{FIXED}{name}" if dim == at else name for dim, name in enumerate(numbered(rank)))
        given = [names if value.type.rank == rank else unlabelled(value.type) for value in node.inputs]
        out = [
            names if type.rank == rank else tuple(name for name in names if not name.startswith(FIXED))
            for type in node.outputs
        ]
        return OperatorDims(dims=labelled(node, given, out), terms=terms_of(node, *((name,) for name in arguments)))

    return rule


def _at(node: Node, rank: int, default: int = -1) -> int:
    return (integers(node, "dim") or (default,))[0] % max(rank, 1)


def softmax(node: Node) -> OperatorDims:
    """Rows are apart; along them devices exchange the largest and the sum of each row (backward: one sum)."""
    x, backward = node.inputs[0].type, node.op.endswith("_backward_data")
    names, at = numbered(x.rank), _at(node, node.inputs[0].type.rank)
    rows = tuple(name for dim, name in enumerate(names) if dim != at)
    size = x.elements // max(x.shape[at] if x.rank else 1, 1) * x.element_bytes * (1 if backward else 2)
    special = Special(kind="exchanged", exchange=Exchange(collective="all_reduce", size_bytes=size, across=rows))
    dims = labelled(node, [names] * len(node.inputs), [names], {names[at]: special} if names else None)
    return OperatorDims(dims=dims, terms=terms_of(node, ("grad_output",)) if backward else ())


def norm(node: Node) -> OperatorDims:
    """Norms over the last dims: rows are apart, and over a split row two sums of it are exchanged."""
    x = next(value.type for name, value in zip(node.names, node.inputs, strict=True) if name == "input")
    normed = len(integers(node, "normalized_shape")) or 1
    names = tuple(f"rows{dim}" if dim < x.rank - normed else f"width{dim}" for dim in range(x.rank))
    rows, width = names[: x.rank - normed], names[x.rank - normed :]
    table = {
        "weight": width,
        "bias": width,
        **dict.fromkeys(("grad_out", "grad_output", "input"), names),
        **dict.fromkeys(("mean", "rstd"), (*rows, *("." for _ in width))),
    }
    # Statistics of rank equal to the input's keep dims of one; gradients of weight and bias have the width alone.
    out: list[Labels] = [
        names
        if type.shape == x.shape
        else width
        if type.shape == x.shape[-normed:]
        else (*rows, *("." for _ in width))
        if type.rank == x.rank
        else unlabelled(type)
        for type in node.outputs
    ]
    summed: dict[int, Placement] = {number: P for number, each in enumerate(out) if each == width}
    size = 2 * math.prod(x.shape[: x.rank - normed]) * 4
    exchange = Exchange(collective="all_reduce", size_bytes=size, across=rows)
    special = {
        **{name: Special(outputs=summed) for name in rows},
        **{name: Special(kind="exchanged", exchange=exchange) for name in width},
    }
    return OperatorDims(
        dims=labelled(node, by_name(node, table), out, special),
        terms=terms_of(node, ("grad_out",), ("grad_output",)) if node.op.endswith("_backward") else (),
    )


def group_norm(node: Node) -> OperatorDims:
    """Images and groups of channels are apart; the spatial dims share statistics."""
    x = next(v.type for name, v in zip(node.names, node.inputs, strict=True) if name in ("input", "X"))
    groups = integer(node, "group", integer(node, "num_groups", 1))
    names = ("images", "groups", *(f"space{dim}" for dim in range(x.rank - 2)))
    table: dict[str, Labels] = {
        **dict.fromkeys(("input", "X", "grad_out"), names),
        "weight": ("groups",),
        "bias": ("groups",),
        **dict.fromkeys(("mean", "rstd"), ("images", "groups")),
    }
    out: list[Labels] = [
        names if type.shape == x.shape else ("groups",) if type.rank == 1 else ("images", "groups")
        for type in node.outputs
    ]
    summed: dict[int, Placement] = {number: P for number, each in enumerate(out) if each == ("groups",)}
    exchange = Exchange(collective="all_reduce", size_bytes=2 * x.shape[0] * groups * 4, across=("images", "groups"))
    special = {
        "images": Special(outputs=summed),
        "groups": Special(units=groups),
        **{name: Special(kind="exchanged", exchange=exchange, outputs=summed) for name in names[2:]},
    }
    if groups == 1:
        special["groups"] = Special(kind="indivisible")
    dims = labelled(node, by_name(node, table), out, special)
    return OperatorDims(dims=dims, terms=terms_of(node, ("grad_out",)))


def batch_norm(node: Node) -> OperatorDims:
    """Channels are apart; images and pixels share statistics, unless these are given."""
    x = next(v.type for name, v in zip(node.names, node.inputs, strict=True) if name in ("input", "self"))
    names = ("images", "channels", *(f"space{dim}" for dim in range(x.rank - 2)))
    table: dict[str, Labels] = {
        name: names if value.type.shape == x.shape else ("channels",) if value.type.rank == 1 else ()
        for name, value in zip(node.names, node.inputs, strict=True)
    }
    out: list[Labels] = [
        names if type.shape == x.shape else ("channels",) if type.shape == x.shape[1:2] else unlabelled(type)
        for type in node.outputs
    ]
    backward = node.op.endswith("_backward")
    training = integer(node, "training", integer(node, "train", 1)) and not node.op.endswith("no_training")
    exchange = Exchange(collective="all_reduce", size_bytes=2 * x.shape[1] * 4, across=("channels",))
    summed: dict[int, Placement] = {number: P for number, each in enumerate(out) if each == ("channels",)}
    shared = Special(kind="exchanged", exchange=exchange) if training else Special(outputs=summed if backward else None)
    dims = labelled(node, by_name(node, table), out, {name: shared for name in names if name != "channels"})
    return OperatorDims(dims=dims, terms=terms_of(node, ("grad_out",)) if backward else ())


def label_loss(node: Node) -> OperatorDims:
    """Negative log-likelihood of rows: a mean divides by a weight of all rows, which devices add up.

    Split over classes, each device has the labels of its own; a loss by rows is a term of a sum then.
    """
    target = node.inputs_of("target")[0].type
    rows = tuple(f"rows{dim}" for dim in range(target.rank))
    scores = (rows[0], "classes", *rows[1:]) if target.rank else ("classes",)
    loss = node.outputs[0]
    mean, backward = integer(node, "reduction", 1) == 1, node.op.endswith("backward")
    table: dict[str, Labels] = {
        "self": scores,
        "target": rows,
        "weight": ("classes",),
        "grad_output": rows if node.inputs[0].type.rank else (),
    }
    if backward:
        dims = labelled(node, by_name(node, table), [scores], {"classes": Special(masked=True)})
        return OperatorDims(dims=dims, terms=terms_of(node, ("grad_output",)))
    out = [rows if loss.rank == target.rank and rows else unlabelled(loss), *map(unlabelled, node.outputs[1:])]
    exchange = Exchange(collective="all_reduce", size_bytes=loss.element_bytes) if mean else None
    summed: dict[int, Placement] = {0: P, **({1: R if mean else P} if len(node.outputs) > 1 else {})}
    whole = any(out[0])
    by_row = Special(kind="contracted" if not whole else None, outputs=None if whole else summed, exchange=exchange)
    special = {
        **dict.fromkeys(rows, by_row),
        "classes": Special(outputs={0: P, **({1: R} if summed.get(1) else {})}, masked=True),
    }
    return OperatorDims(dims=labelled(node, by_name(node, table), out, special))


def loss_of_pairs(node: Node) -> OperatorDims:
    """Losses on every element, reduced or not."""
    x = next(v.type for name, v in zip(node.names, node.inputs, strict=True) if name == "self")
    if node.outputs[0].rank == x.rank:
        return elementwise(node)
    names = numbered(x.rank)
    how: Reduction = "avg" if integer(node, "reduction", 1) == 1 else "sum"
    special = {name: Special(kind="reduced" if how == "avg" else None, outputs={0: partial(how)}) for name in names}
    return OperatorDims(dims=labelled(node, [right_aligned(names, v.type) for v in node.inputs], [()], special))


def listed(node: Node) -> OperatorDims:
    """Operators on lists: the same dim of every tensor that has it.

    Tensors of a list need not lie alike; :func:`~steptime.sharding.local.members` has each of them by itself.
    """
    types = [*(value.type for value in node.inputs), *node.outputs]
    dims = []
    for at in range(max((type.rank for type in types), default=0)):
        placements = tuple(shard(at) if type.rank > at and type.shape[at] > 1 else R for type in types)
        sizes = (type.shape[at] for type, placement in zip(types, placements, strict=True) if placement.sharded)
        inputs, outputs = placements[: len(node.inputs)], placements[len(node.inputs) :]
        dims.append(Dim(name=f"d{at}", size=math.gcd(*sizes), kind="batch", inputs=inputs, outputs=outputs))
    return OperatorDims(dims=tuple(dims))


_NORMS = [
    "native_layer_norm",
    "native_layer_norm_backward",
    "_fused_rms_norm",
    "_fused_rms_norm_backward",
    "rms_norm",
    "layer_norm",
]
_BATCH_NORMS = [
    "native_batch_norm",
    "cudnn_batch_norm",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit_no_training",
    "batch_norm",
    "native_batch_norm_backward",
    "cudnn_batch_norm_backward",
]
_SOFTMAXES = [
    "_softmax",
    "_log_softmax",
    "_safe_softmax",
    "softmax",
    "log_softmax",
    "_softmax_backward_data",
    "_log_softmax_backward_data",
]
_REDUCTIONS = (*_REDUCED, *_ROOTS)
_SCANS = [
    "cumprod",
    "cummax",
    "cummin",
    "logcumsumexp",
    "_cummax_helper",
    "argmax",
    "argmin",
    "sort",
    "argsort",
    "msort",
    "topk",
    "kthvalue",
    "median",
]
_PAIR_LOSSES = [
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "kl_div",
    "soft_margin_loss",
]
ELEMENTS: Final[Mapping[str, Rule]] = {
    **{name: elementwise for names in MAPS.values() for name in names.split() if not name.startswith("glu")},
    **{name: drawn for names in RANDOM.values() for name in names.split()},
    **dict.fromkeys(
        [
            "_to_copy",
            "clone",
            "contiguous",
            "to",
            "copy",
            "zeros_like",
            "ones_like",
            "full_like",
            "empty_like",
            "fill",
            "zero",
            "native_dropout_backward",
            "mse_loss_backward",
            "smooth_l1_loss_backward",
            "huber_loss_backward",
            "binary_cross_entropy_backward",
            "bucketize",
        ],
        elementwise,
    ),
    **dict.fromkeys(("native_dropout", "_fused_dropout"), drawn),
    **dict.fromkeys(_REDUCTIONS, reduction),
    **dict.fromkeys(_SCANS, along()),
    "cumsum": along("self"),
    **dict.fromkeys(_SOFTMAXES, softmax),
    **dict.fromkeys(_NORMS, norm),
    **dict.fromkeys(_BATCH_NORMS, batch_norm),
    **dict.fromkeys(("native_group_norm", "native_group_norm_backward"), group_norm),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward", "nll_loss_backward", "nll_loss2d_backward"), label_loss),
    **dict.fromkeys(_PAIR_LOSSES, loss_of_pairs),
    **dict.fromkeys(("glu", "glu_backward"), along(*GRADIENTS)),
    **dict.fromkeys(OPTIMISERS, listed),
}
