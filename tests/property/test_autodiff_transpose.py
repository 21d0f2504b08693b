"""On random graphs the derived backward pass is the transpose of the forward derivative: <J v, w> = <v, J' w>."""

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from aten_interpreter import evaluate  # noqa: E402
from steptime.captured.aten import (  # noqa: E402
    layers,
    maths,
    views,
)
from steptime.captured.autodiff import gradients, pushforward  # noqa: E402
from steptime.captured.graph import Graph, Nodes, TensorType  # noqa: E402

UNARY = ("tanh", "sigmoid", "relu", "gelu", "silu", "sin", "exp", "erf", "neg", "abs", "softplus")
BINARY = ("add", "sub", "mul", "maximum", "minimum")


def grow(draw, nodes, values):
    """One more value from the ones that are there; all are matrices."""
    x = draw(st.sampled_from(values))
    rows, columns = x.type.shape
    kind = draw(st.sampled_from(("unary", "binary", "mm", "shape", "reduce", "softmax", "norm", "slice", "cat")))
    if kind == "unary":
        return maths.unary(nodes, draw(st.sampled_from(UNARY)), maths.unary(nodes, "tanh", x))
    if kind == "binary":
        fitting = [v for v in values if v.type.shape == x.type.shape or v.type.shape == (1, columns)]
        return maths.binary(nodes, draw(st.sampled_from(BINARY)), x, draw(st.sampled_from(fitting)))
    if kind == "mm":
        fitting = [v for v in values if v.type.shape[0] == columns]
        return maths.mm(nodes, x, draw(st.sampled_from(fitting))) if fitting else views.t(nodes, x)
    if kind == "shape":
        sizes = [n for n in range(1, rows * columns + 1) if rows * columns % n == 0]
        size = draw(st.sampled_from(sizes))
        return views.reshape(nodes, x, (size, rows * columns // size))
    if kind == "reduce":
        op = draw(st.sampled_from(("sum", "mean")))
        return maths.reduce(nodes, op, x, (draw(st.integers(0, 1)),), True)
    if kind == "softmax":
        return layers.softmax(nodes, x, draw(st.integers(0, 1)), draw(st.booleans()))
    if kind == "norm":
        return layers.native_layer_norm(nodes, x, None, None, (columns,), 0.1)[0]
    if kind == "slice":
        start = draw(st.integers(0, rows - 1))
        return views.slice(nodes, x, 0, start, draw(st.integers(start + 1, rows)), draw(st.integers(1, 2)))
    return views.cat(nodes, [x, draw(st.sampled_from([v for v in values if v.type.shape[0] == rows]))], 1)


@given(st.data())
@settings(max_examples=60)
def test_reverse_is_the_transpose_of_forward(data):
    nodes = Nodes()
    shapes = [(2, 3), (3, 4), (1, 3), (4, 2)]
    sources = [nodes.source("input", f"x{n}", TensorType(shape, "fp64")) for n, shape in enumerate(shapes)]
    values = list(sources)
    for _ in range(data.draw(st.integers(1, 12))):
        made = grow(data.draw, nodes, values)
        if made.type.elements <= 200:
            values.append(made)
    output = values[-1]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))

    def random(type):
        return torch.randn(type.shape, dtype=torch.float64, generator=generator)

    moves = [nodes.source("input", f"v{n}", source.type) for n, source in enumerate(sources)]
    seed = nodes.source("input", "w", TensorType(output.type.shape, "fp64"))
    tensors = {v.node.attribute("name"): random(v.type) for v in (*sources, *moves, seed)}
    (tangent,) = pushforward(nodes, Graph((output,)), dict(zip(sources, moves, strict=True)))
    derived = gradients(nodes, Graph((output,)), sources, [seed])
    assert tangent is not None
    assert derived.wanted
    pushed, *pulled = evaluate([tangent, *derived.wanted.values()], tensors)
    left = float((pushed * tensors["w"]).sum())
    moved = [tensors[move.node.attribute("name")] for move in moves]
    reached = [move for source, move in zip(sources, moved, strict=True) if source in derived.wanted]
    right = sum(float((grad * move).sum()) for grad, move in zip(pulled, reached, strict=True))
    scale = float(pushed.abs().sum()) + 1.0
    assert abs(left - right) <= 1e-9 * max(abs(left), scale)
