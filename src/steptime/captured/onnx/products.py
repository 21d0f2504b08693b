"""Rows of matrix products."""

from __future__ import annotations

import math

from steptime.captured.aten import maths, views
from steptime.captured.graph.node import Nodes, Value
from steptime.captured.onnx.call import OnnxCall, Result, row


def matmul(nodes: Nodes, a: Value, b: Value) -> Value:
    """``a @ b`` as PyTorch runs it: one ``mm`` where ``b`` is a matrix, else ``bmm`` over the broadcast batch."""
    if a.type.rank == 0 or b.type.rank == 0:
        raise ValueError("a product takes no scalars")
    if a.type.rank == b.type.rank == 1:
        return maths.dot(nodes, a, b)
    if a.type.rank == 1:
        return views.squeeze(nodes, matmul(nodes, views.unsqueeze(nodes, a, 0), b), (-2,))
    if b.type.rank == 1:
        return views.squeeze(nodes, matmul(nodes, a, views.unsqueeze(nodes, b, 1)), (-1,))
    if b.type.rank == 2:
        rows = a if a.type.rank == 2 else views.reshape(nodes, a, (math.prod(a.type.shape[:-1]), a.type.shape[-1]))
        product = maths.mm(nodes, rows, b)
        return views.reshape(nodes, product, (*a.type.shape[:-1], b.type.shape[-1]))
    batch = maths.broadcast(a.type.shape[:-2], b.type.shape[:-2])
    parts = []
    for part in (a, b):
        whole = views.expand(nodes, part, (*batch, *part.type.shape[-2:]))
        parts.append(views.reshape(nodes, whole, (math.prod(batch), *part.type.shape[-2:])))
    product = maths.bmm(nodes, parts[0], parts[1])
    return views.reshape(nodes, product, (*batch, *product.type.shape[-2:]))


@row("MatMul")
def _matmul(call: OnnxCall) -> Result:
    return matmul(call.nodes, call.weight(0), call.weight(1))


@row("FusedMatMul", domain="com.microsoft")
def _fused_matmul(call: OnnxCall) -> Result:
    if call.get("transBatchA") or call.get("transBatchB"):
        return None
    a, b = call.weight(0), call.weight(1)
    a = views.transpose(call.nodes, a, -2, -1) if call.get("transA") else a
    b = views.transpose(call.nodes, b, -2, -1) if call.get("transB") else b
    product = matmul(call.nodes, a, b)
    alpha = float(call.get("alpha", 1.0))
    return product if alpha == 1 else maths.mul(call.nodes, product, alpha)


@row("Gemm")
def _gemm(call: OnnxCall) -> Result:
    nodes, a, b = call.nodes, call.weight(0), call.weight(1)
    a = views.t(nodes, a) if call.get("transA") else a
    b = views.t(nodes, b) if call.get("transB") else b
    alpha, beta = float(call.get("alpha", 1.0)), float(call.get("beta", 1.0))
    bias = call.maybe_weight(2)
    if bias is not None and beta:
        return maths.addmm(nodes, bias, a, b, beta, alpha)
    product = maths.mm(nodes, a, b)
    return product if alpha == 1 else maths.mul(nodes, product, alpha)


@row("Einsum")
def _einsum(call: OnnxCall) -> Result:
    """Products of two tensors without repeated letters in one of them; the rest stays opaque."""
    equation = str(call.get("equation", "")).replace(" ", "")
    given, arrow, wanted = equation.partition("->")
    terms = given.split(",")
    letters = "".join(terms)
    if not letters.isalpha() or len(terms) != len(call.inputs):
        return None
    if not arrow:
        wanted = "".join(sorted(letter for letter in set(letters) if letters.count(letter) == 1))
    if len(set(wanted)) != len(wanted) or not set(wanted) <= set(letters):
        return None
    ranks = [value.type.rank for value in call.values()]
    if any(len(set(term)) != len(term) or len(term) != rank for term, rank in zip(terms, ranks, strict=True)):
        return None
    if len(terms) == 1:
        return _arrange(call.nodes, call.value(), terms[0], wanted)
    if len(terms) != 2:
        return None
    return _einsum_of_two(call.nodes, call.weight(0), call.weight(1), (terms[0], terms[1]), wanted)


def _arrange(nodes: Nodes, x: Value, have: str, wanted: str) -> Value:
    """Sum over the letters that are not wanted, then order the rest."""
    gone = tuple(n for n, letter in enumerate(have) if letter not in wanted)
    if gone:
        x = maths.reduce(nodes, "sum", x, gone, False)
    kept = [letter for letter in have if letter in wanted]
    return views.permute(nodes, x, [kept.index(letter) for letter in wanted])


def _einsum_of_two(nodes: Nodes, a: Value, b: Value, terms: tuple[str, str], wanted: str) -> Value:
    """Permute both to (batch, rows, inner) and (batch, inner, columns), one ``bmm``, then the order that is wanted."""
    left, right = terms
    sizes = dict(zip(right, b.type.shape, strict=True)) | dict(zip(left, a.type.shape, strict=True))
    batch = [x for x in wanted if x in left and x in right]
    rows = [x for x in wanted if x in left and x not in right]
    columns = [x for x in wanted if x in right and x not in left]
    inner = [x for x in left if x in right and x not in wanted]
    a = _arrange(nodes, a, left, "".join(batch + rows + inner))
    b = _arrange(nodes, b, right, "".join(batch + inner + columns))
    count = [math.prod(sizes[x] for x in group) for group in (batch, rows, inner, columns)]
    product = maths.bmm(
        nodes,
        views.reshape(nodes, a, (count[0], count[1], count[2])),
        views.reshape(nodes, b, (count[0], count[2], count[3])),
    )
    order = batch + rows + columns
    product = views.reshape(nodes, product, [sizes[x] for x in order])
    return views.permute(nodes, product, [order.index(x) for x in wanted])
