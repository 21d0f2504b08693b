"""Operators that multiply matrices: products, grouped products, and fused attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from steptime.captured.graph import Attribute, Node, TensorType
from steptime.captured.ops import processor
from steptime.captured.ops.labels import (
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
from steptime.captured.ops.operator import Dims, Layouts, Operator, Pieces
from steptime.captured.ops.pieces import Types
from steptime.captured.ops.placement import P, Placement, R, shard
from steptime.captured.ops.views import turned
from steptime.captured.ops.work import OperatorWork, as_operator, input_type, integer
from steptime.cost.attention import (
    attention_backward_pair_flops,
    attention_pair_flops,
    causal_pairs,
    fused_attention_backward_bytes,
    fused_attention_backward_vector_flops,
    fused_attention_bytes,
    fused_attention_vector_flops,
    scores_flops,
)
from steptime.cost.matmul import matmul_flops
from steptime.estimate.operators import Formula
from steptime.num import Num

Sizes = Callable[[Node], Mapping[str, Num]]


def _product_sizes(left: str, right: str) -> Sizes:
    """Sizes of a product: ``left`` is m x k, ``right`` k x n; all leading dims of ``left`` are rows."""

    def sizes(node: Node) -> dict[str, Num]:
        a, b = _shape(node, left), _shape(node, right)
        return {
            "m": math.prod(a[:-1]), "n": b[-1] if len(b) > 1 else 1, "k": a[-1], "accumulate": 1,
            "turned": float(turned_in(node, left)),
        }  # fmt: skip

    return sizes


def turned_in(node: Node, name: str) -> bool:
    """True if an operand is the transpose of the matrix in memory."""
    value = node.input(name)
    return value is not None and turned(value)


def _batched_sizes(left: str, right: str) -> Sizes:
    def sizes(node: Node) -> dict[str, Num]:
        a, b = _shape(node, left), _shape(node, right)
        return {"m": a[0] * a[1], "n": b[2], "k": a[2], "groups": a[0], "accumulate": 1}

    return sizes


def _linear_sizes(weight: str) -> Sizes:
    """Sizes of a linear layer; ``weight`` is n x k."""

    def sizes(node: Node) -> dict[str, Num]:
        a, w = _shape(node, "self", "input"), _shape(node, weight)
        return {"m": math.prod(a[:-1]), "n": w[0], "k": w[1], "accumulate": 1}

    return sizes


def _grouped_sizes(node: Node) -> dict[str, Num]:
    """Sizes of a grouped product; offsets split the rows of one operand, or of both, among the groups."""
    a, b = _shape(node, "self"), _shape(node, "mat2")
    groups = b[0] if len(b) == 3 else a[0] if len(a) == 3 else _shape(node, "offs")[0]
    if len(a) == 2 and len(b) == 2:  # split along k: one result per group
        return {"m": a[0] * groups, "n": b[-1], "k": a[1] / groups, "groups": groups, "accumulate": 1}
    rows = a[0] if len(a) == 2 else a[0] * a[1]
    columns = b[-1] if len(b) == 3 else b[-1] / groups
    return {"m": rows, "n": columns, "k": a[-1], "groups": groups, "accumulate": 1}


def _listed_sizes(node: Node) -> dict[str, Num]:
    """Sizes of a list of products, each with its own dims."""
    pairs = zip(node.inputs_of("self"), node.inputs_of("mat2"), strict=True)
    sizes = [(a.type.shape, b.type.shape) for a, b in pairs]
    return {"listed_flops": sum(matmul_flops(a[0], b[1], a[1], 1) for a, b in sizes), "listed": len(sizes)}


def _inner_sizes(node: Node) -> dict[str, Num]:
    return {"m": 1, "n": 1, "k": node.inputs[0].type.elements, "accumulate": 1}


def _outer_sizes(node: Node) -> dict[str, Num]:
    return {"m": _shape(node, "vec1", "self")[0], "n": _shape(node, "vec2")[0], "k": 1, "accumulate": 1}


def _shape(node: Node, *names: str) -> tuple[int, ...]:
    return input_type(node, *names).shape


def _multiplied(sizes: Sizes, operator: str = "matmul") -> OperatorWork:
    return OperatorWork(sizes=sizes, matrix_flops=Formula(matmul_flops), kernels=as_operator(operator))


def _product_dims(left: tuple[str, str], right: tuple[str, str], out: str, added: str = "") -> Dims:
    """Dims of a product from names and labels of its factors; the addend is a term of a sum where the product is."""

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


def _linear_dims(node: Node) -> OperatorDims:
    """Dims of a linear layer: rows times a weight of (columns, inner)."""
    first = node.names[0]
    rank = node.inputs[0].type.rank
    rows = tuple(f"rows{dim}" for dim in range(rank - 1))
    out = (*rows, "columns")
    given = by_name(node, {first: (*rows, "inner"), "weight": labels("columns inner"), "bias": labels("columns")})
    bias = numbers_of(node, "bias")
    dims = labelled(node, given, [out], {"inner": Special(inputs=dict.fromkeys(bias, P))})
    added = ("bias",) if bias else ()
    return OperatorDims(dims=dims, terms=terms_of(node, (first, *added), ("weight", *added)))


def _grouped_dims(node: Node) -> OperatorDims:
    """Dims of the products of experts; rows are sorted by expert, and every device is assumed to get an equal number.

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
    """Placement of rows where experts are split: rows go with their experts."""
    names = {"self": left, "mat2": right}
    inputs = {
        number: shard(names[name].index("!tokens"))
        for number, name in enumerate(node.names)
        if "!tokens" in names.get(name, ())
    }
    return Special(inputs=inputs, outputs={0: shard(out.index("!tokens"))} if "!tokens" in out else None)


_LISTED = OperatorWork(
    sizes=_listed_sizes, matrix_flops=lambda s: s["listed_flops"], launches=lambda s: s["listed"],
    kernels=lambda node, s: (),
)  # fmt: skip
_MATRICES: Final = "rows inner", "inner columns", "rows columns"
_BATCHES: Final = "batch rows inner", "batch inner columns", "batch rows columns"


def _row(
    names: str, work: OperatorWork, dims: Dims | None = None, layouts: Layouts = "recorded", **more: Any
) -> Operator:
    return Operator(
        names=names, family="product", work=work, dims=dims, layouts=layouts, processor=processor.product, **more
    )  # fmt: skip


def _matrices(names: str, left: str, right: str, *, added: str = "", batched: bool = False) -> Operator:
    """A product of two matrices, or a batch of products, from the names of its factors and of its addend."""
    a, b, out = _BATCHES if batched else _MATRICES
    sizes = _batched_sizes(left, right) if batched else _product_sizes(left, right)
    work = _multiplied(sizes, "grouped_matmul" if batched else "matmul")
    return _row(names, work, _product_dims((left, a), (right, b), out, added), "matrix", factors=(left, right))


MATRICES: Final = (_matrices("mm", "self", "mat2"), _matrices("addmm", "mat1", "mat2", added="self"))
"""Products of two matrices, with and without an addend."""
PRODUCTS: Final = (
    *MATRICES,
    _matrices("bmm", "self", "mat2", batched=True),
    _matrices("baddbmm", "batch1", "batch2", added="self", batched=True),
    _row("_scaled_mm _int_mm matmul", _multiplied(_product_sizes("self", "mat2")), factors=("self", "mat2")),
    _row("_addmm_activation", _multiplied(_product_sizes("mat1", "mat2")), factors=("mat1", "mat2")),
    _row("addbmm", _multiplied(_batched_sizes("batch1", "batch2"), "grouped_matmul")),
    _row("linear", _multiplied(_linear_sizes("weight")), _linear_dims, "matrix"),
    _row("mkldnn_linear mkldnn::_linear_pointwise", _multiplied(_linear_sizes("weight"))),
    _row(
        "mv", _multiplied(_product_sizes("self", "vec")),
        _product_dims(("self", "rows inner"), ("vec", "inner"), "rows"), factors=("self", "vec"),
    ),
    _row("addmv", _multiplied(_product_sizes("mat", "vec")), factors=("mat", "vec")),
    _row("dot", _multiplied(_inner_sizes), _product_dims(("self", "inner"), ("tensor", "inner"), "")),
    _row("vdot", _multiplied(_inner_sizes)),
    _row("addr outer", _multiplied(_outer_sizes)),
    _row("_foreach_mm", _LISTED),
    _row("_grouped_mm", _multiplied(_grouped_sizes, "grouped_matmul"), _grouped_dims),
    _row("_scaled_grouped_mm", _multiplied(_grouped_sizes, "grouped_matmul")),
)  # fmt: skip
"""Products; an addend is a term of a sum where the product is."""


CAUSAL_TYPES: Final = (1, 2)
"""Values of ``custom_mask_type`` that mean a causal mask, from top left or from bottom right."""


def _attention_geometry(node: Node, sequence: int) -> dict[str, Num]:
    """Sizes of the kernel; ``sequence`` is the dim of tokens: 2 in (batch, heads, tokens, head), else 1."""
    q, k, v = (input_type(node, name).shape for name in ("query", "key", "value"))
    heads = 3 - sequence
    if len(q) == 3:  # sequences of many lengths end to end: tokens, heads, head
        return _packed_sizes(node)
    batch, queries, keys = q[0], q[sequence], k[sequence]
    return _attention_sizes(node, batch, (q[heads], k[heads]), (queries, keys), (q[3], v[3]))


def _packed_sizes(node: Node) -> dict[str, Num]:
    """Sizes of packed attention; lengths are data, so every sequence counts as the longest."""
    q, k, v = (input_type(node, name).shape for name in ("query", "key", "value"))
    offsets = node.input("cum_seq_q") or node.input("cu_seqlens_q")
    batch = 1 if offsets is None else offsets.type.shape[0] - 1
    queries = integer(node, "max_q", integer(node, "max_seqlen_q", q[0]))
    keys = integer(node, "max_k", integer(node, "max_seqlen_k", k[0]))
    return _attention_sizes(node, batch, (q[1], k[1]), (queries, keys), (q[2], v[2]))


def _attention_sizes(
    node: Node, batch: int, heads: tuple[int, int], length: tuple[int, int], width: tuple[int, int]
) -> dict[str, Num]:
    causal = integer(node, "is_causal", int(integer(node, "custom_mask_type", 0) in CAUSAL_TYPES))
    (queries, keys), rows = length, batch * heads[0] * length[0]
    dropout = isinstance(share := node.attribute("dropout_p", 0.0), (int, float)) and share > 0
    seen = batch * heads[0] * _unmasked(queries, keys) if causal else rows * keys
    return {
        "batch": batch, "heads": heads[0], "kv_heads": heads[1], "queries": queries, "seen_keys": keys,
        "causal": float(causal), "window": 0.0, "pairs": seen, "rows": rows,
        "keys": batch * heads[0] * keys, "kv_rows": batch * heads[1] * keys, "kv_rows_read": batch * heads[1] * keys,
        "head_dim": width[0], "qk_dim": width[0], "v_dim": width[1], "dropout": float(dropout),
    }  # fmt: skip


def _unmasked(queries: int, keys: int) -> Num:
    """Query-key pairs of one head under a causal mask from top left: row i sees keys 0 to i."""
    beyond = max(queries - keys, 0) * keys
    rows = min(queries, keys)
    return causal_pairs(rows, rows) + beyond


_PAIR_FLOPS, _PAIR_FLOPS_BACKWARD = Formula(attention_pair_flops), Formula(attention_backward_pair_flops)


def _attention_forward(sequence: int) -> OperatorWork:
    return OperatorWork(
        sizes=lambda node: _attention_geometry(node, sequence),
        matrix_flops=lambda s: s["pairs"] * _PAIR_FLOPS(s),
        vector_flops=Formula(fused_attention_vector_flops),
        moved_bytes=Formula(fused_attention_bytes),
        kernels=as_operator("fused_attention"),
    )


def _attention_backward(sequence: int) -> OperatorWork:
    return OperatorWork(
        sizes=lambda node: _attention_geometry(node, sequence),
        matrix_flops=lambda s: s["pairs"] * _PAIR_FLOPS_BACKWARD(s),
        repeated_flops=lambda s: scores_flops(s["pairs"], s["qk_dim"], 1),
        vector_flops=Formula(fused_attention_backward_vector_flops),
        moved_bytes=Formula(fused_attention_backward_bytes),
        launches=lambda s: 2.0,
        kernels=as_operator("fused_attention", backward=True),
    )


HEADS_FIRST: Final = "batch heads {tokens} {width}"


TOKENS_FIRST: Final = "batch {tokens} heads {width}"


_GRADIENTS: Final = ("grad_out", "grad_out_")


def _attention_dims(order: str) -> Dims:
    """Dims of fused attention, forward and backward, on tensors of four dims."""

    def rule(node: Node) -> OperatorDims:
        types = {name: value.type for name, value in zip(node.names, node.inputs, strict=True)}
        q, k = types["query"], types["key"]
        if q.rank != 4:  # sequences end to end: tokens, heads, width
            return _packed_dims(node)
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
    """Labels of the outputs. Forward: result, log-sum-exp, random state. Backward: gradients of q, k, v, bias."""
    backward = node.op.endswith("_backward")
    names = ("query", "key", "value", "attn_bias") if backward else ("out", "logsumexp")
    known = [table[name] for name in names if name in table]
    known += [()] * (len(node.outputs) - len(known))
    return [
        names if len(names) == type.rank else unlabelled(type) for names, type in zip(known, node.outputs, strict=False)
    ]


def _attention_specials(node: Node, order: str, types: Mapping[str, TensorType]) -> dict[str, Special]:
    """Heads are split in groups that share keys; queries are independent unless a causal mask fixes their position."""
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
    """The dim that splits queries, keys and values by tokens: keys and values are gathered, gradients reduce-scattered.

    A causal mask is assumed to be balanced over the devices (first and last pieces of the sequence together).
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


def _packed_dims(node: Node) -> OperatorDims:
    """Dims of packed attention: only heads, since tokens of many sequences lie end to end."""
    table: dict[str, Labels] = dict.fromkeys(
        ("query", "key", "value", "out", *_GRADIENTS), labels("!tokens heads !width")
    )
    outputs = [labels("!tokens heads !width") if type.rank == 3 else (".",) * type.rank for type in node.outputs]
    shared = node.inputs_of("key")[0].type.shape[1]
    return OperatorDims(
        dims=labelled(node, by_name(node, table), outputs, {"heads": Special(units=shared)}),
        terms=terms_of(node, *((name,) for name in _GRADIENTS)),
    )


def _longest(node: Node, inputs: Types, outputs: Types) -> dict[str, Attribute]:
    """Attributes of heads-first attention that are lengths of its pieces."""
    sizes = {name: type.shape[2] for name, type in zip(node.names, inputs, strict=True) if type.rank == 4}
    return {
        name: sizes[of] for name, of in (("max_q", "query"), ("max_k", "key")) if node.attribute(name) and of in sizes
    }


def _attention_rows(names: str, order: str, sequence: int, pieces: Pieces | None = None) -> tuple[Operator, Operator]:
    """Rows of the forward pass (names with or without the ending ``_forward``) and of the backward pass."""
    bases = [name.removesuffix("_forward") for name in names.split()]
    forward = Operator(
        names=names, family="attention", work=_attention_forward(sequence), dims=_attention_dims(order), pieces=pieces,
        layouts="recorded" if sequence == 1 else "heads", processor=processor.attention,
    )  # fmt: skip
    backward = Operator(
        names=" ".join(f"{base}_backward" for base in bases), family="attention", work=_attention_backward(sequence),
        dims=_attention_dims(order), pieces=pieces,
    )  # fmt: skip
    return forward, backward


ATTENTION: Final = (
    *_attention_rows(
        "_scaled_dot_product_flash_attention _scaled_dot_product_cudnn_attention"
        " _scaled_dot_product_fused_attention_overrideable", HEADS_FIRST, 2, _longest,
    ),
    *_attention_rows(
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention", HEADS_FIRST, 2
    ),
    *_attention_rows("_flash_attention_forward _efficient_attention_forward", TOKENS_FIRST, 1),
    Operator(
        names="_scaled_dot_product_attention_math_for_mps", family="attention", work=_attention_forward(2),
        processor=processor.attention,
    ),
)  # fmt: skip
"""Fused attention."""
