"""Every option and strategy: the operator run on each device's pieces gives the pieces of the unsharded result."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")

from aten_interpreter import call  # noqa: E402
from operator_samples import SAMPLES  # noqa: E402
from steptime.captured.graph import Nodes  # noqa: E402
from steptime.captured.ops.placement import REDUCTIONS  # noqa: E402
from steptime.sharding.local import local_node  # noqa: E402
from steptime.sharding.options import options, strategies  # noqa: E402

SIZES = (2, 4)
JOIN = {
    "sum": lambda each: torch.stack(each).sum(0), "avg": lambda each: torch.stack(each).mean(0),
    "max": lambda each: torch.stack(each).amax(0), "min": lambda each: torch.stack(each).amin(0),
    "product": lambda each: torch.stack(each).prod(0),
}  # fmt: skip


def pieces(tensor, sharding, sizes, generator):
    """The tensor of each device, by its coordinates."""
    held = {(): tensor}
    for placement, size in zip(sharding, sizes, strict=True):
        parted = {}
        for at, whole in held.items():
            for rank, piece in enumerate(parts(whole, placement, size, generator)):
                parted[(*at, rank)] = piece
        held = parted
    return held


def parts(tensor, placement, size, generator):
    if placement.dim is not None:
        return tensor.chunk(size, placement.dim)
    if placement.partial:
        terms = [torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype) for _ in range(size - 1)]
        return [*terms, tensor - sum(terms)]
    return [tensor] * size


def joined(held, sharding, sizes):
    """The tensor that the devices hold together; what is replicated has to be the same on all."""
    for axis in reversed(range(len(sizes))):
        placement, rest = sharding[axis], {}
        for at in itertools.product(*map(range, sizes[:axis])):
            each = [held[(*at, rank)] for rank in range(sizes[axis])]
            rest[at] = together(each, placement)
        held = rest
    return held[()]


def together(each, placement):
    if placement.dim is not None:
        return torch.cat(list(each), placement.dim)
    if placement.reduction is not None:
        assert placement.reduction in REDUCTIONS
        return JOIN[placement.reduction](each)
    for other in each[1:]:
        torch.testing.assert_close(other, each[0], equal_nan=True)
    return each[0]


def run(sample, strategy, sizes):
    """Outputs of the unsharded node as the devices make them."""
    generator = torch.Generator().manual_seed(1)
    node = local_node(sample.node, strategy, sizes, Nodes())
    held = [pieces(t, s, sizes, generator) for t, s in zip(sample.tensors, strategy.inputs, strict=True)]
    results = {}
    for at in itertools.product(*map(range, sizes)):
        given = [each[at].clone() for each in held]
        for tensor, value in zip(given, node.inputs, strict=True):
            assert tuple(tensor.shape) == value.type.shape
        results[at] = call(node, given)
        for tensor, type in zip(results[at], node.outputs, strict=True):
            assert tuple(tensor.shape) == type.shape, f"{node}: {tuple(tensor.shape)}"
    return [
        joined({at: each[number] for at, each in results.items()}, sharding, sizes)
        for number, sharding in enumerate(strategy.outputs)
    ]


def plain(sample):
    """Strategies without communication inside, and without indices of a piece."""
    apart = {o.dim for o in options(sample.node) if o.exchange is not None or o.masked}
    return [s for s in strategies(sample.node, SIZES) if not apart & set(s.dims)]


RUN = [name for name, sample in SAMPLES.items() if sample.run]


@pytest.mark.parametrize("name", RUN)
def test_pieces_make_the_whole(name):
    sample = SAMPLES[name]
    for strategy in plain(sample):
        made = run(sample, strategy, SIZES)
        for result, whole in zip(made, sample.results, strict=True):
            torch.testing.assert_close(result, whole, equal_nan=True, msg=lambda text, s=strategy: f"{s}: {text}")


def test_enough_operators_are_run():
    assert len({SAMPLES[name].op for name in RUN if len(plain(SAMPLES[name])) > 1}) >= 80
