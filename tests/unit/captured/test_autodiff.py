"""Derived gradients are PyTorch's: values, operators (FLOPs) and saved bytes; forward mode agrees with reverse mode."""

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

from aten_interpreter import Tracer, evaluate  # noqa: E402
from steptime.captured.autodiff import gradients, pushforward  # noqa: E402
from steptime.captured.graph import Graph, Nodes, TensorType  # noqa: E402
from steptime.errors import UserError  # noqa: E402


def R(*shape, low=-1.0, high=1.0):
    return torch.rand(shape, dtype=torch.float64) * (high - low) + low


def P(*shape):
    """Positive numbers."""
    return R(*shape, low=0.2, high=2.0)


INDEX = torch.tensor([2, 0, 1, 2])
MASK = torch.tensor([[True, False, True, False]])

OPERATORS = {
    "add": (lambda a, b: torch.add(a, b, alpha=2), R(3, 4), R(4)),
    "sub": (lambda a, b: torch.sub(a, b, alpha=3), R(3, 1), R(3, 4)),
    "rsub": (lambda a: 2 - a, R(3)),
    "mul": (lambda a, b: a * b, R(2, 3, 4), R(3, 1)),
    "mul number": (lambda a: a * 2.5, R(3)),
    "div": (lambda a, b: a / b, R(3, 4), P(4)),
    "pow": (lambda a: a**3, R(3)),
    "pow 2": (lambda a: a**2, R(3)),
    "pow tensor": (lambda a, b: a**b, P(3, 4), R(4)),
    "pow base": (lambda a: 2.0**a, R(3)),
    "maximum": (lambda a, b: torch.maximum(a, b), R(3, 4), R(4)),
    "minimum": (lambda a, b: torch.minimum(a, b), R(3, 4), R(3, 1)),
    "where": (lambda a, b: torch.where(MASK, a, b), R(3, 4), R(4)),
    "masked_fill": (lambda a: a.masked_fill(MASK, -3.0), R(3, 4)),
    "clamp": (lambda a: a.clamp(-0.5, 0.4), R(20)),
    "clamp one side": (lambda a: a.clamp(min=0.1), R(20)),
    "addcmul": (lambda a, b, c: torch.addcmul(a, b, c, value=0.5), R(3), R(3), R(3)),
    "addcdiv": (lambda a, b, c: torch.addcdiv(a, b, c, value=0.5), R(3), R(3), P(3)),
    "cast": (lambda a: a.float().double(), R(3)),
    **{
        name: (getattr(torch, name), P(3, 4))
        for name in ("exp", "log", "log1p", "log2", "sqrt", "rsqrt", "reciprocal", "expm1", "sinh", "cosh", "asinh")
    },
    **{name: (getattr(torch, name), R(3, 4, low=-0.9, high=0.9)) for name in (
        "sin", "cos", "tan", "tanh", "sigmoid", "erf", "abs", "neg", "atan", "asin", "acos", "atanh", "square"
    )},
    **{name: (getattr(F, name), R(30, low=-3.5, high=3.5)) for name in (
        "relu", "gelu", "silu", "mish", "hardswish", "hardsigmoid", "leaky_relu", "elu", "selu", "softplus",
        "hardtanh", "relu6", "logsigmoid", "softsign", "celu",
    )},
    "gelu tanh": (lambda a: F.gelu(a, approximate="tanh"), R(9)),
    "threshold": (lambda a: F.threshold(a, 0.2, 0.1), R(9)),
    "prelu": (F.prelu, R(2, 3, 4), R(3)),
    "sum": (lambda a: a.sum(), R(3, 4)),
    "sum dims": (lambda a: a.sum((0, -1)), R(3, 4, 5)),
    "mean": (lambda a: a.mean(), R(3, 4)),
    "mean keepdim": (lambda a: a.mean(-1, keepdim=True), R(3, 4)),
    "amax": (lambda a: a.amax(1), R(3, 4)),
    "max": (lambda a: a.max(1).values, R(3, 4)),
    "max all": (lambda a: a.max(), R(3, 4)),
    "topk": (lambda a: a.topk(2, dim=-1).values, R(3, 5)),
    "sort": (lambda a: a.sort(dim=0).values, R(3, 5)),
    "var": (lambda a: a.var(-1), R(3, 4)),
    "std": (lambda a: a.std(0, correction=0), R(3, 4)),
    "logsumexp": (lambda a: a.logsumexp((1, 2)), R(3, 4, 5)),
    "norm": (lambda a: torch.linalg.vector_norm(a, dim=1), R(3, 4)),
    "norm 1": (lambda a: torch.linalg.vector_norm(a, 1, dim=1), R(3, 4)),
    "cumsum": (lambda a: a.cumsum(1), R(3, 4)),
    "view": (lambda a: a.transpose(0, 1).reshape(6, 2), R(3, 4)),
    "permute": (lambda a: a.permute(2, 0, 1), R(2, 3, 4)),
    "t": (lambda a: a.t() * 2, R(2, 3)),
    "expand": (lambda a: a.expand(2, 3, 4), R(3, 1)),
    "squeeze": (lambda a: a.squeeze(), R(3, 1, 2, 1)),
    "squeeze dim": (lambda a: a.squeeze(1), R(3, 1, 2, 1)),
    "unsqueeze": (lambda a: a.unsqueeze(-1), R(3, 2)),
    "slice": (lambda a: a[1:4:2, :-1], R(5, 3)),
    "select": (lambda a: a[:, -1], R(5, 3)),
    "split": (lambda a: a.split(2, 1)[1], R(3, 5)),
    "split sizes": (lambda a: torch.mul(*a.split((2, 2, 1), 1)[:2]), R(3, 5)),
    "chunk": (lambda a: a.chunk(2, -1)[0] * a.chunk(2, -1)[1], R(3, 4)),
    "unbind": (lambda a: a.unbind(1)[1], R(3, 4)),
    "cat": (lambda a, b: torch.cat([a, b, a], 1), R(3, 4), R(3, 2)),
    "stack": (lambda a, b: torch.stack([a, b], 1), R(3, 4), R(3, 4)),
    "pad": (lambda a: F.pad(a, (1, 2, 0, 1), value=3.0), R(3, 4)),
    "flip": (lambda a: a.flip(1), R(3, 4)),
    "roll": (lambda a: a.roll(2, 1), R(3, 4)),
    "tril": (lambda a: a.tril(), R(4, 4)),
    "repeat": (lambda a: a.repeat(2, 3, 1), R(3, 4)),
    "embedding": (lambda w: F.embedding(INDEX, w), R(3, 4)),
    "index_select": (lambda a: a.index_select(0, INDEX), R(3, 4)),
    "index": (lambda a: a[INDEX], R(3, 4)),
    "gather": (lambda a: a.gather(0, INDEX[None, :]), R(3, 4)),
    "scatter_add": (lambda a, b: a.scatter_add(0, INDEX[None, :], b), R(3, 4), R(1, 4)),
    "index_add": (lambda a, b: a.index_add(0, INDEX, b), R(3, 4), R(4, 4)),
    "mm": (lambda a, b: a @ b, R(3, 4), R(4, 5)),
    "addmm": (lambda c, a, b: torch.addmm(c, a, b, beta=2, alpha=3), R(5), R(3, 4), R(4, 5)),
    "linear": (F.linear, R(2, 3, 4), R(5, 4), R(5)),
    "bmm": (lambda a, b: a @ b, R(2, 3, 4), R(2, 4, 5)),
    "baddbmm": (lambda c, a, b: torch.baddbmm(c, a, b, alpha=2), R(2, 3, 5), R(2, 3, 4), R(2, 4, 5)),
    "mv": (lambda a, b: a @ b, R(3, 4), R(4)),
    "dot": (lambda a, b: a @ b, R(4), R(4)),
    "conv": (lambda x, w, b: F.conv2d(x, w, b, 2, 1), R(2, 4, 7, 7), R(6, 4, 3, 3), R(6)),
    "conv groups": (lambda x, w: F.conv2d(x, w, None, 1, 2, 2, 2), R(2, 4, 7, 7), R(6, 2, 3, 3)),
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b), R(2, 4, 7), R(6, 4, 3), R(6)),
    "conv transposed": (lambda x, w: F.conv_transpose2d(x, w, None, 2, 1, 1), R(2, 4, 5, 5), R(4, 3, 3, 3)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (4,), w, b), R(2, 3, 4), R(4), R(4)),
    "layer_norm plain": (lambda x: F.layer_norm(x, (3, 4)), R(2, 3, 4)),
    "rms_norm": (lambda x, w: F.rms_norm(x, (4,), w, 1e-5), R(2, 3, 4), R(4)),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), R(2, 4, 3, 3), R(4), R(4)),
    "batch_norm": (
        lambda x, w, b: F.batch_norm(x, torch.zeros(3).double(), torch.ones(3).double(), w, b, True),
        R(4, 3, 5, 5), R(3), R(3),
    ),
    "batch_norm eval": (
        lambda x, w, b: F.batch_norm(x, torch.zeros(3).double(), torch.ones(3).double(), w, b, False),
        R(4, 3, 5, 5), R(3), R(3),
    ),
    "max_pool2d": (lambda x: F.max_pool2d(x, 3, 2, 1), R(2, 3, 7, 7)),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), R(2, 3, 7, 7)),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, (2, 3)), R(2, 3, 7, 7)),
    "adaptive_avg_pool2d 1": (lambda x: F.adaptive_avg_pool2d(x, 1), R(2, 3, 7, 7)),
    "upsample nearest": (lambda x: F.interpolate(x, scale_factor=2), R(2, 3, 4, 4)),
    "upsample bilinear": (lambda x: F.interpolate(x, size=(7, 9), mode="bilinear"), R(2, 3, 4, 4)),
    "softmax": (lambda a: a.softmax(1), R(3, 4, 5)),
    "log_softmax": (lambda a: a.log_softmax(-1), R(3, 4)),
    "cross_entropy": (lambda a: F.cross_entropy(a, INDEX), R(4, 5)),
    "cross_entropy 2d": (lambda a: F.cross_entropy(a, INDEX.view(1, 4).expand(2, 4)), R(2, 5, 4)),
    "mse_loss": (F.mse_loss, R(3, 4), R(3, 4)),
    "smooth_l1": (F.smooth_l1_loss, R(3, 4), R(3, 4)),
    "huber": (lambda a, b: F.huber_loss(a, b, delta=0.5), R(3, 4), R(3, 4)),
    "bce logits": (lambda a: F.binary_cross_entropy_with_logits(a, torch.full((3, 4), 0.3).double()), R(3, 4)),
    "attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        R(2, 2, 5, 8), R(2, 2, 5, 8), R(2, 2, 5, 8),
    ),
    "attention mask": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, torch.eye(5).bool()),
        R(2, 2, 5, 8), R(2, 2, 5, 8), R(2, 2, 5, 8),
    ),
    "glu": (lambda a: F.glu(a, 1), R(3, 4)),
}  # fmt: skip

#: Operators without a forward-mode rule.
ONE_WAY = {
    "amax", "max", "max all", "topk", "sort", "var", "std", "logsumexp", "norm", "norm 1", "scatter_add", "index_add",
    "rms_norm", "group_norm", "batch_norm", "batch_norm eval", "smooth_l1", "huber", "bce logits",
    "attention", "attention mask", "cross_entropy 2d", "glu",
}  # fmt: skip


def traced(function, tensors):
    """Outputs of a function on tensors, and the same as a graph of sources x0, x1, ..."""
    torch.manual_seed(0)
    tracer = Tracer()
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    sources = [tracer.source("input", f"x{n}", leaf) for n, leaf in enumerate(leaves)]
    with tracer:
        result = function(*leaves)
    return leaves, result, tracer, sources, Graph((tracer.values[id(result)],))


def same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.each("name", OPERATORS)
def test_reverse_mode_of_an_operator(name):
    function, *tensors = OPERATORS[name]
    leaves, result, tracer, sources, graph = traced(function, tensors)
    seed = torch.rand(result.shape, dtype=torch.float64)
    direction = tracer.nodes.source("input", "seed", TensorType(tuple(seed.shape), "fp64"))
    derived = gradients(tracer.nodes, graph, sources, [direction])
    with torch.no_grad():
        ours = evaluate([derived.wanted[source] for source in sources], {**tracer.sources, "seed": seed})
    same(ours, torch.autograd.grad(result, leaves, seed))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.each("name", sorted(set(OPERATORS) - ONE_WAY))
def test_forward_mode_of_an_operator(name):
    function, *tensors = OPERATORS[name]
    _, _, tracer, sources, graph = traced(function, tensors)
    moves = [torch.rand_like(tensor) for tensor in tensors]
    named = {f"t{n}": move for n, move in enumerate(moves)}
    tangents = [
        tracer.nodes.source("input", f"t{n}", TensorType(tuple(move.shape), "fp64")) for n, move in enumerate(moves)
    ]
    (out,) = pushforward(tracer.nodes, graph, dict(zip(sources, tangents, strict=True)))
    with torch.no_grad():
        ours = evaluate([out], {**tracer.sources, **named})
    torch.manual_seed(0)
    _, theirs = torch.func.jvp(function, tuple(tensors), tuple(moves))
    same(ours, [theirs])


def test_an_operator_without_a_rule_is_named():
    nodes = Nodes()
    x = nodes.source("parameter", "x", TensorType((2, 2), "fp32"))
    y = nodes.apply("linalg_det", {"A": x}, outputs=[TensorType((), "fp32")])
    with pytest.raises(UserError, match=r"gradient of the operator 'linalg_det' is not known.*fp32\[2x2\]"):
        gradients(nodes, Graph((y.value(),)))
    with pytest.raises(UserError, match="forward derivative of the operator 'linalg_det'"):
        pushforward(nodes, Graph((y.value(),)), {x: x})


def test_no_gradient_through_integers_and_comparisons():
    nodes = Nodes()
    x = nodes.source("parameter", "x", TensorType((3,), "fp32"))
    mask = nodes.apply("gt", {"self": x}, {"other": 0.0}, outputs=[TensorType((3,), "bool")]).value()
    y = nodes.apply("_to_copy", {"self": mask}, {"dtype": "fp32"}, outputs=[TensorType((3,), "fp32")]).value()
    assert gradients(nodes, Graph((y,))).wanted == {}
    z = nodes.apply("floor", {"self": x}, outputs=[TensorType((3,), "fp32")]).value()
    assert gradients(nodes, Graph((z,))).wanted == {}
