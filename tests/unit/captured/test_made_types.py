"""Types of views and of element-wise results, strides included, are PyTorch's on random layouts."""

import random

import pytest

torch = pytest.importorskip("torch")

from aten_interpreter import type_of  # noqa: E402
from steptime.captured.graph import Nodes, TensorType  # noqa: E402
from steptime.captured.graph.strides import is_contiguous, tensor_type, view_strides  # noqa: E402
from steptime.captured.ops import making  # noqa: E402


def layout(draw, sizes=(1, 2, 3, 4), rank=None):
    """A tensor of random shape, permuted, cut and expanded."""
    rank = draw.randint(1, 4) if rank is None else rank
    x = torch.empty([draw.choice(sizes) for _ in range(rank)])
    if draw.random() < 0.6:
        x = x.permute(draw.sample(range(rank), rank))
    if draw.random() < 0.4:
        dim = draw.randrange(rank)
        x = x.narrow(dim, 0, draw.randint(1, x.shape[dim]))
    if draw.random() < 0.2:
        x = x[..., :1].expand(*x.shape)
    return x


def normal(type):
    """The type with its dims of size 1 left out of the strides: they say nothing."""
    if type.strides is None:
        return type.shape, type.dtype, None
    return type.shape, type.dtype, [step for size, step in zip(type.shape, type.strides, strict=True) if size != 1]


@pytest.mark.each("seed", range(60))
def test_views_of_random_layouts(seed):
    draw = random.Random(seed)
    x, nodes = layout(draw), Nodes()
    value = nodes.source("input", "x", type_of(x))
    shape = list(x.shape)
    draw.shuffle(shape)
    if draw.random() < 0.5 and len(shape) > 1:
        shape = [shape[0] * shape[1], *shape[2:]]
    ours = view_strides(value.type, tuple(shape))
    try:
        theirs = x.view(shape)
    except RuntimeError:
        assert ours is None
    else:
        assert ours is not None
        assert normal(tensor_type(shape, "fp32", ours)) == normal(type_of(theirs))
    dim = draw.randrange(x.dim())
    pairs = [
        (making.unsqueeze(nodes, value, dim), x.unsqueeze(dim)), (making.squeeze(nodes, value, (dim,)), x.squeeze(dim)),
        (making.slice(nodes, value, dim, 0, 2), x.narrow(dim, 0, min(2, x.shape[dim]))),
        (making.select(nodes, value, dim, 0), x.select(dim, 0)),
        (making.transpose(nodes, value, 0, dim), x.transpose(0, dim)),
        (making.expand(nodes, value, (5, *x.shape)), x.expand(5, *x.shape)),
    ]  # fmt: skip
    for ours, theirs in pairs:
        assert normal(ours.type) == normal(type_of(theirs))


@pytest.mark.each("seed", range(120))
def test_results_of_element_wise_operators(seed):
    draw = random.Random(seed)
    a = layout(draw, rank=draw.randint(1, 4))
    b = layout(draw, rank=a.dim())
    try:
        theirs = torch.add(a, b)
    except RuntimeError:
        theirs, b = a * 2, None
    nodes = Nodes()
    x = nodes.source("input", "a", type_of(a))
    ours = making.mul(nodes, x, 2) if b is None else making.add(nodes, x, nodes.source("input", "b", type_of(b)))
    assert normal(ours.type) == normal(type_of(theirs))


def test_sizes_of_one_do_not_matter():
    assert is_contiguous(TensorType((1, 3), "fp32", (99, 1)))
    assert tensor_type((1, 3), "fp32", (99, 1)).strides is None


PROMOTED = [
    (torch.float32, torch.float64), (torch.int64, torch.float16), (torch.bool, torch.int32), (torch.uint8, torch.int8),
    (torch.float16, torch.bfloat16), (torch.int32, torch.int64),
]  # fmt: skip


@pytest.mark.each("kinds", PROMOTED)
@pytest.mark.each("ranks", [(1, 1), (0, 1), (1, 0), (0, 0)])
@pytest.mark.each("op", ["add", "div", "lt"])
def test_promotion_of_element_types(kinds, ranks, op):
    a, b = (torch.ones([2] * rank, dtype=kind) for rank, kind in zip(ranks, kinds, strict=True))
    nodes = Nodes()
    ours = making.binary(nodes, op, nodes.source("input", "a", type_of(a)), nodes.source("input", "b", type_of(b)))
    assert ours.type == type_of(getattr(torch, op)(a, b))
