"""Operators of PyTorch on a CPU as a graph calls them: one call after the other, without gradients, on warm tensors.

The cost of such an operator is its call, the allocation of its result, the start of its loops and its arithmetic. Sizes
begin where the call dominates and end past the cache of a core.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from steptime.cost import attention, convolution, matmul
from steptime.estimate.measured import (
    CPU_ATTENTION,
    CPU_CALL,
    CPU_CONVOLUTION,
    CPU_MAPS,
    CPU_PRODUCT,
    CPU_PRODUCTS,
    CPU_TURN,
    CPU_UNFOLDED,
    CPU_VIEW,
)

Shape = Mapping[str, int]
Run = Callable[[int], object]
Random = Callable[..., Any]
ELEMENT_BYTES: Final = 4
#: Elements of maps, from a row to several times the second cache.
ELEMENTS: Final = (64.0, 7e5)
_SIZES: Final = 9
#: Operations of matrix products, and sets of operands that are gone through in turn.
_FLOPS: Final = (2e3, 6e8)
_SETS: Final = (1, 1, 2, 8)

#: Operator -> tensors of the size of the result that it reads and writes, and whether it goes row by row.
TRAFFIC: Final[Mapping[str, tuple[float, bool]]] = {
    **dict.fromkeys(CPU_MAPS, (2.0, False)),
    "cpu_two": (3.0, False),
    "cpu_copy_joined": (4.0, False),
    "cpu_row": (2.0, True),
    "cpu_column": (2.0, True),
    **dict.fromkeys(("cpu_row_sum", "cpu_row_mean", "cpu_row_max"), (1.0, True)),
    **dict.fromkeys(("cpu_row_softmax", "cpu_row_norm", "cpu_plane_norm", "cpu_copy_turned"), (2.0, True)),
    CPU_VIEW: (0.0, False),
    CPU_TURN: (0.0, False),
    CPU_CALL: (0.0, False),
}


def shapes(seed: int, quick: bool) -> Iterator[tuple[str, dict[str, int]]]:
    """Kind and shape of every task."""
    more = 1 if quick else 2
    for kind in CPU_MAPS:
        count = 6 if not TRAFFIC[kind][0] else _SIZES * more
        yield from _maps(random.Random(f"{kind} {seed}"), kind, count)
    yield from _products(random.Random(f"cpu products {seed}"), 110 * more)
    draw = random.Random(f"cpu batches {seed}")
    for number in range(44 * more):
        heads, tokens, width = draw.choice((2, 3, 6, 12)), _drawn(draw, 12, 300), draw.choice((24, 48, 64, 96))
        if number % 2:
            yield CPU_ATTENTION, {"heads": heads, "tokens": tokens, "width": width}
        else:
            m, k = (tokens, width) if number % 4 else (width, tokens)
            yield CPU_PRODUCTS, {"m": m, "n": tokens, "k": k, "groups": heads, "biased": 0, "sets": 1}
    draw = random.Random(f"cpu convolutions {seed}")
    for number in range(64 * more):
        kernel = (1, 3, 3, 5)[number % 4]
        channels = [8 * _drawn(draw, 1, 16) for _ in range(2)]
        shape = {
            "batch": draw.choice((1, 1, 2, 4)),
            "channels_in": channels[0],
            "channels_out": channels[1],
            "side": _drawn(draw, 6, 40),
            "kernel": kernel,
            "stride": 1,
            "groups": 1,
        }
        elements = shape["batch"] * channels[0] * shape["side"] ** 2
        library = convolution.blocked_by_library(shape["batch"], elements, kernel, 1, 1)
        yield (CPU_CONVOLUTION if library else CPU_UNFOLDED), shape


def _drawn(draw: random.Random, low: float, high: float) -> int:
    return round(math.exp(draw.uniform(math.log(low), math.log(high))))


def _maps(draw: random.Random, kind: str, count: int) -> Iterator[tuple[str, dict[str, int]]]:
    start, end = map(math.log, ELEMENTS)
    for i in range(count):
        elements = math.exp(start + (end - start) * (i + draw.uniform(-0.2, 0.2)) / (count - 1))
        width = 16 * max(round(math.exp(draw.uniform(math.log(64), math.log(1500))) / 16), 1)
        width = min(width, max(round(elements), 1))
        yield kind, {"rows": max(1, round(elements / width)), "width": width}


def _products(draw: random.Random, count: int) -> Iterator[tuple[str, dict[str, int]]]:
    """Products with few rows as often as with many: decoding, low ranks, whole sequences."""
    made = 0
    while made < count:
        m, n, k = _drawn(draw, 1, 700), _drawn(draw, 4, 2400), _drawn(draw, 4, 1400)
        m, n, k = (value // 8 * 8 if value > 8 and draw.random() < 0.8 else value for value in (m, n, k))
        if _FLOPS[0] <= 2 * m * n * k <= _FLOPS[1]:
            sets = _SETS[made % len(_SETS)]
            yield CPU_PRODUCT, {"m": m, "n": n, "k": k, "groups": 1, "biased": made % 3 // 2, "sets": sets}
            made += 1


def counts(kind: str, shape: Shape) -> dict[str, float]:
    """Work of a task as graphs count it: operations, bytes, loops."""
    size = ELEMENT_BYTES
    if kind in (CPU_PRODUCT, CPU_PRODUCTS):
        m, n, k, groups = (shape[name] for name in ("m", "n", "k", "groups"))
        moved = groups * (m * k + k * n + m * n) * size + shape["biased"] * n * size
        return {
            "matrix_flops": float(groups * matmul.matmul_flops(m, n, k, 1)),
            "moved_bytes": float(moved),
            "result_bytes": float(groups * m * n * size),
            "working_bytes": float(moved * shape["sets"]),
        }
    if kind == CPU_UNFOLDED:
        sizes = implicit(shape)
        columns = sizes["rows"] * sizes["depth"]
        return {
            "matrix_flops": 2 * columns * sizes["columns"],
            "vector_flops": columns * (shape["kernel"] > 1),
            "moved_bytes": sizes["tensor_bytes"],
            "result_bytes": 0.0,
        }
    if kind == CPU_ATTENTION:
        rows, width = shape["heads"] * shape["tokens"], shape["width"]
        pairs = rows * shape["tokens"]
        return {
            "matrix_flops": float(attention.fused_attention_flops(pairs, rows, width, 1)),
            "vector_flops": float(attention.fused_attention_vector_flops(pairs, rows, 0)),
            "moved_bytes": float(attention.fused_attention_bytes(rows, rows, width, size)),
            "result_bytes": float(rows * width * size),
        }
    elements = shape["rows"] * shape["width"]
    passes, by_rows = TRAFFIC[kind]
    return {
        "loops": float(by_rows * shape["rows"]),
        "steps": float(elements * bool(passes)),
        "moved_bytes": passes * elements * size,
        "result_bytes": float(elements * size * (passes > 1)),
    }


def implicit(shape: Shape) -> dict[str, float]:
    """Sizes of a convolution that keeps the side of its images, as an implicit product."""
    taps, pixels = shape["kernel"] ** 2, shape["batch"] * shape["side"] ** 2
    inward, outward = shape["channels_in"], shape["channels_out"]
    rows, columns, depth = convolution.implicit_product(pixels, inward, outward, taps, 1)
    elements = pixels * (inward + outward) + inward * outward * taps
    return {
        "rows": float(rows),
        "columns": float(columns),
        "depth": float(depth),
        "channelwise": 0.0,
        "tensor_bytes": float(elements * ELEMENT_BYTES),
    }


def call(kind: str, shape: Shape, torch: Any, random: Random) -> Run:
    """A function of a number that runs the operator."""
    if kind in (CPU_PRODUCT, CPU_PRODUCTS):
        return _product(kind, shape, torch.ops.aten, random)
    if kind == CPU_ATTENTION:
        q, k, v = (random(1, shape["heads"], shape["tokens"], shape["width"]) for _ in range(3))
        attend = torch.nn.functional.scaled_dot_product_attention
        return lambda i: attend(q, k, v)
    if kind in (CPU_CONVOLUTION, CPU_UNFOLDED):
        return _convolution(shape, torch.ops.aten, random)
    return _graph(torch, random(1, 64)) if kind == CPU_CALL else _map(kind, shape, torch, random)


def _product(kind: str, shape: Shape, aten: Any, random: Random) -> Run:
    m, n, k, groups, sets = (shape[name] for name in ("m", "n", "k", "groups", "sets"))
    if kind == CPU_PRODUCTS:
        a, b = random(groups, m, k), random(groups, n, k).transpose(1, 2)
        return lambda i: aten.bmm.default(a, b)
    left, bias = [random(m, k) for _ in range(sets)], random(n)
    right = [random(n, k).t() if n // 8 % 2 else random(k, n) for _ in range(sets)]
    if shape["biased"]:
        return lambda i: aten.addmm.default(bias, left[i % sets], right[i % sets])
    return lambda i: aten.mm.default(left[i % sets], right[i % sets])


def _convolution(shape: Shape, aten: Any, random: Random) -> Run:
    kernel, side = shape["kernel"], shape["side"]
    x = random(shape["batch"], shape["channels_in"], side, side)
    weight = random(shape["channels_out"], shape["channels_in"], kernel, kernel)
    bias, padding = random(shape["channels_out"]), [kernel // 2] * 2
    return lambda i: aten.convolution.default(x, weight, bias, [1, 1], padding, [1, 1], False, [0, 0], 1)


def _map(kind: str, shape: Shape, torch: Any, random: Random) -> Run:
    rows, width = shape["rows"], shape["width"]
    aten = torch.ops.aten
    x, y, row, column = random(rows, width), random(rows, width), random(width), random(rows, 1)
    positive, turned = random(rows, width).abs() + 0.1, random(width, rows).t()
    planes, mean, variance = x.view(1, rows, width, 1), random(rows), random(rows).abs() + 0.5
    last = ([-1], True)
    runs: dict[str, Run] = {
        "two": lambda i: aten.mul.Tensor(x, y),
        "number": lambda i: aten.mul.Tensor(x, 0.5),
        "row": lambda i: aten.mul.Tensor(x, row),
        "column": lambda i: aten.sub.Tensor(x, column),
        "one": lambda i: aten.relu.default(x),
        "exp": lambda i: aten.exp.default(x),
        "tanh": lambda i: aten.tanh.default(x),
        "sigmoid": lambda i: aten.sigmoid.default(x),
        "erf": lambda i: aten.erf.default(x),
        "gelu": lambda i: aten.gelu.default(x),
        "gelu_tanh": lambda i: aten.gelu.default(x, approximate="tanh"),
        "silu": lambda i: aten.silu.default(x),
        "sqrt": lambda i: aten.rsqrt.default(positive),
        "log": lambda i: aten.log.default(positive),
        "sin": lambda i: aten.sin.default(x),
        "power": lambda i: aten.pow.Tensor_Scalar(positive, 1.7),
        "row_sum": lambda i: aten.sum.dim_IntList(x, *last),
        "row_mean": lambda i: aten.mean.dim(x, *last),
        "row_max": lambda i: aten.amax.default(x, *last),
        "row_softmax": lambda i: aten._softmax.default(x, -1, False),
        "row_norm": lambda i: aten.native_layer_norm.default(x, [width], row, row, 1e-5),
        "plane_norm": lambda i: aten.native_batch_norm.default(planes, mean, mean, mean, variance, False, 0.1, 1e-5),
        "copy_whole": lambda i: aten.clone.default(x),
        "copy_turned": lambda i: aten.clone.default(turned, memory_format=torch.contiguous_format),
        "copy_joined": lambda i: aten.cat.default([x, y], 0),
        "view": (lambda i: aten.slice.Tensor(x, 1, 0, 1)) if rows % 2 else (lambda i: aten.view.default(x, [-1])),
        "turn": (lambda i: aten.t.default(x)) if rows % 2 else (lambda i: aten.transpose.int(x, 0, 1)),
    }
    return runs[kind.removeprefix("cpu_")]


def _graph(torch: Any, x: Any) -> Run:
    """A graph without an operator."""
    graph = torch.fx.Graph()
    graph.output(graph.placeholder("x"))
    module = torch.fx.GraphModule(torch.nn.Module(), graph)

    def run(i: int) -> object:
        with torch.no_grad():
            return module(x)

    return run
