"""Layers of neural networks: convolution, pooling, normalisation, softmax, embedding, attention.

Each constructor is named as the ATen operator that it makes. All raise ``ValueError`` where arguments do not fit.
"""

from __future__ import annotations

from collections.abc import Sequence

from steptime.captured.aten.maths import reduced_shape
from steptime.captured.aten.views import like, tensor_type, wrap
from steptime.captured.graph.program import Attribute, Nodes, TensorType, Value


def spatial(values: Sequence[int], rank: int) -> tuple[int, ...]:
    """One number per spatial dim; a single one counts for all.

    >>> spatial((3,), 2)
    (3, 3)
    """
    given = tuple(int(v) for v in values)
    if len(given) not in (1, rank):
        raise ValueError(f"{rank} spatial dims need one number each, not {given}")
    return given * rank if len(given) == 1 else given


def window_size(size: int, kernel: int, stride: int, pads: int, dilation: int = 1, ceil: bool = False) -> int:
    r"""Positions of a window that slides over a padded dim.

    .. math:: \lfloor (n + p - d (k - 1) - 1) / s \rfloor + 1

    with size n, pads p (both sides together), dilation d, kernel k, stride s; rounded up with ``ceil``.

    >>> window_size(224, 7, 2, 6)
    112
    """
    span = size + pads - dilation * (kernel - 1) - 1
    if stride < 1 or dilation < 1 or span < 0:
        raise ValueError(f"a window of {kernel} (dilation {dilation}, stride {stride}) does not fit {size} + {pads}")
    if not ceil:
        return span // stride + 1
    positions = -(-span // stride) + 1
    # A window that would start in the padding behind the tensor is left out.
    return positions - 1 if (positions - 1) * stride >= size + pads // 2 else positions


def convolution(
    nodes: Nodes,
    x: Value,
    weight: Value,
    bias: Value | None,
    *,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool = False,
    output_padding: Sequence[int] = (0,),
    groups: int = 1,
) -> Value:
    """Convolution of (n, c, ...) with weights (out, c / groups, ...); transposed: (c, out / groups, ...)."""
    rank = x.type.rank - 2
    if rank < 1 or weight.type.rank != x.type.rank or groups < 1:
        raise ValueError(f"{x.type} and {weight.type} cannot be convolved in {groups} groups")
    stride, padding, dilation = spatial(stride, rank), spatial(padding, rank), spatial(dilation, rank)
    output_padding = spatial(output_padding, rank)
    kernel, channels = weight.type.shape[2:], x.type.shape[1]
    if channels != (weight.type.shape[0] if transposed else weight.type.shape[1] * groups):
        raise ValueError(f"{weight.type} in {groups} groups does not take the {channels} channels of {x.type}")
    if transposed:
        sizes = [
            (n - 1) * s - 2 * p + d * (k - 1) + o + 1
            for n, s, p, d, k, o in zip(
                x.type.shape[2:], stride, padding, dilation, kernel, output_padding, strict=True
            )
        ]
        out = weight.type.shape[1] * groups
    else:
        sizes = [
            window_size(n, k, s, 2 * p, d)
            for n, k, s, p, d in zip(x.type.shape[2:], kernel, stride, padding, dilation, strict=True)
        ]
        out = weight.type.shape[0]
    attributes: dict[str, Attribute] = {
        "stride": stride, "padding": padding, "dilation": dilation, "transposed": transposed,
        "output_padding": output_padding, "groups": groups,
    }  # fmt: skip
    output = tensor_type((x.type.shape[0], out, *sizes), x.type.dtype)
    inputs = {"input": x, "weight": weight, "bias": bias}
    return nodes.apply("convolution", inputs, attributes, outputs=[output]).value()


def pool(
    nodes: Nodes,
    op: str,
    x: Value,
    *,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil: bool = False,
    dilation: Sequence[int] | None = None,
    **more: Attribute,
) -> tuple[Value, ...]:
    """``max_pool2d_with_indices``, ``avg_pool2d`` and their kin of one and three dims, on (n, c, ...)."""
    rank = len(kernel)
    spread = spatial(dilation or (1,), rank)
    sizes = [
        window_size(n, k, s, 2 * p, d, ceil)
        for n, k, s, p, d in zip(x.type.shape[-rank:], kernel, stride, padding, spread, strict=True)
    ]
    shape = (*x.type.shape[:-rank], *sizes)
    attributes: dict[str, Attribute] = {
        "kernel_size": tuple(kernel),
        "stride": tuple(stride),
        "padding": tuple(padding),
    }
    if dilation is not None:
        attributes["dilation"] = spread
    attributes |= {"ceil_mode": ceil, **more}
    outputs = [tensor_type(shape, x.type.dtype)]
    if op.endswith("with_indices"):
        outputs.append(tensor_type(shape, "int64"))
    node = nodes.apply(op, {"self": x}, attributes, outputs=outputs)
    return tuple(node.value(index) for index in range(len(outputs)))


def softmax(nodes: Nodes, x: Value, dim: int, log: bool = False) -> Value:
    """``_softmax`` or ``_log_softmax`` over one dim."""
    attributes: dict[str, Attribute] = {"dim": wrap(dim, x.type.rank), "half_to_float": False}
    return nodes.apply(
        "_log_softmax" if log else "_softmax", {"self": x}, attributes, outputs=[x.type.with_shape(*x.type.shape)]
    ).value()


def native_layer_norm(
    nodes: Nodes, x: Value, weight: Value | None, bias: Value | None, shape: Sequence[int], eps: float
) -> tuple[Value, Value, Value]:
    """Normalisation over the last dims: result, mean and reciprocal standard deviation."""
    kept = x.type.rank - len(shape)
    statistics = tensor_type((*x.type.shape[:kept], *(1 for _ in shape)), x.type.dtype)
    inputs = {"input": x, "weight": weight, "bias": bias}
    attributes: dict[str, Attribute] = {"normalized_shape": tuple(shape), "eps": eps}
    node = nodes.apply("native_layer_norm", inputs, attributes, outputs=[like(x.type), statistics, statistics])
    return node.value(0), node.value(1), node.value(2)


def rms_norm(nodes: Nodes, x: Value, weight: Value | None, shape: Sequence[int], eps: float) -> Value:
    """``_fused_rms_norm``: the input over the root of the mean of its squares."""
    kept = x.type.rank - len(shape)
    statistics = tensor_type((*x.type.shape[:kept], *(1 for _ in shape)), x.type.dtype)
    attributes: dict[str, Attribute] = {"normalized_shape": tuple(shape), "eps": eps}
    inputs = {"input": x, "weight": weight}
    return nodes.apply("_fused_rms_norm", inputs, attributes, outputs=[like(x.type), statistics]).value()


def native_batch_norm(
    nodes: Nodes, x: Value, parts: dict[str, Value | None], *, training: bool, momentum: float, eps: float
) -> tuple[Value, ...]:
    """Normalisation per channel; ``parts``: weight, bias, running_mean, running_var."""
    channels = x.type.shape[1] if training else 0
    statistics = tensor_type((channels,), x.type.dtype)
    attributes: dict[str, Attribute] = {"training": training, "momentum": momentum, "eps": eps}
    outputs = [like(x.type), statistics, statistics]
    node = nodes.apply("native_batch_norm", {"input": x, **parts}, attributes, outputs=outputs)
    return tuple(node.value(index) for index in range(3))


def native_group_norm(
    nodes: Nodes, x: Value, weight: Value | None, bias: Value | None, *, groups: int, eps: float
) -> tuple[Value, ...]:
    """Normalisation per group of channels."""
    n, c = x.type.shape[:2]
    if groups < 1 or c % groups:
        raise ValueError(f"{c} channels cannot be normalised in {groups} groups")
    inner = x.type.elements // max(n * c, 1)
    attributes: dict[str, Attribute] = {"N": n, "C": c, "HxW": inner, "group": groups, "eps": eps}
    statistics = tensor_type((n, groups), x.type.dtype)
    inputs = {"input": x, "weight": weight, "bias": bias}
    node = nodes.apply("native_group_norm", inputs, attributes, outputs=[like(x.type), statistics, statistics])
    return tuple(node.value(index) for index in range(3))


def embedding(nodes: Nodes, weight: Value, indices: Value) -> Value:
    """Rows of a table (v, h) by index."""
    if weight.type.rank != 2:
        raise ValueError(f"an embedding is a table of rows, not {weight.type}")
    output = TensorType((*indices.type.shape, weight.type.shape[1]), weight.type.dtype)
    return nodes.apply("embedding", {"weight": weight, "indices": indices}, outputs=[output]).value()


def attention(
    nodes: Nodes, query: Value, key: Value, value: Value, mask: Value | None, *, causal: bool, scale: float | None
) -> Value:
    """Fused attention on (batch, heads, tokens, head size), under the name of the kernel that a capture records."""
    (b, h, s, d), (_, heads, _, width) = query.type.shape, key.type.shape
    if width != d or heads != h:
        raise ValueError(f"queries {query.type} do not fit keys {key.type}")
    attributes: dict[str, Attribute] = {"dropout_p": 0.0, "is_causal": causal}
    if scale is not None:
        attributes["scale"] = scale
    inputs = {"query": query, "key": key, "value": value, "attn_mask": mask}
    size = value.type.shape[3]
    out = tensor_type((b, h, s, size), query.type.dtype, (s * h * size, size, h * size, 1))
    sums = tensor_type((b, h, s), "fp64" if query.type.dtype == "fp64" else "fp32", (s * h, 1, h))
    op = "_scaled_dot_product_flash_attention_for_cpu"
    return nodes.apply(op, inputs, attributes, outputs=[out, sums]).value()


def argmax(nodes: Nodes, op: str, x: Value, dim: int, keepdim: bool) -> Value:
    """``argmax`` or ``argmin`` over one dim."""
    dim = wrap(dim, x.type.rank)
    output = tensor_type(reduced_shape(x.type.shape, (dim,), keepdim), "int64")
    return nodes.apply(op, {"self": x}, {"dim": dim, "keepdim": keepdim}, outputs=[output]).value()
