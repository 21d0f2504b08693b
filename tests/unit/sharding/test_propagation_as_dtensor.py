"""Shardings that propagate from annotations, next to those that DTensor propagates, operator by operator."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import zip_longest

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard  # noqa: E402

from dtensor_runs import dtensor_run, fake_devices  # noqa: E402
from sharded_modules import Attention  # noqa: E402
from steptime.captured.cost import Timer  # noqa: E402
from steptime.captured.ops import VIEWS  # noqa: E402
from steptime.captured.ops.placement import text_of  # noqa: E402
from steptime.captured.record.step import capture  # noqa: E402
from steptime.hardware import load_cluster  # noqa: E402
from steptime.sharding.annotate import annotations_of, matching, named_tensors  # noqa: E402
from steptime.sharding.build import built  # noqa: E402
from steptime.sharding.flow import flow_of  # noqa: E402
from steptime.sharding.mesh import mesh_on  # noqa: E402
from steptime.sharding.propagate import propagated  # noqa: E402

CLUSTER = load_cluster("dgx-h100")


def tokens():
    return torch.randn(8, 64, 128)


def mlp():
    return nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)), tokens()


def attention():
    return Attention(), tokens()


def unfused():
    return Attention(fused=False), tokens()


def images():
    return nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 3, padding=1)), torch.randn(
        8, 8, 16, 16
    )


def choices():
    return nn.Sequential(nn.Linear(128, 256), nn.Softmax(-1)), tokens()


COLUMNS_AND_ROWS = "input.0=S(0) R; 1.weight=R S(0); 1.bias=R S(0); 3.weight=R S(1)"
HEADS = "input.0=S(0) R; [qkv].weight=R S(0); out.weight=R S(1)"
SAME = {}
FLATTENED = "batch and heads in one dim: heads lie in strides there, which DTensor notes and no plain placement can"
SUMMED = "DTensor passes terms on to a linear operator; we only do where that takes less time than adding them up"
SOFTMAX = "we split softmax over its classes and add up rows inside; DTensor gathers its input, with all that follows"
CASES = {
    "data parallel MLP": (mlp, "input.0=S(0) R", SAME),
    "two axes of data": (mlp, "input.0=S(0) S(0)", SAME),
    "column and row split MLP": (mlp, COLUMNS_AND_ROWS, {"native_layer_norm_backward": SUMMED}),
    "heads": (attention, HEADS, SAME),
    "data parallel attention": (attention, "input.0=R S(0)", SAME),
    "heads, unfused": (unfused, HEADS, dict.fromkeys(("bmm", "_softmax", "_softmax_backward_data"), FLATTENED)),
    "images": (images, "input.0=S(0) R", SAME),
    "classes": (choices, "input.0=S(0) R; 0.weight=R S(0); 0.bias=R S(0)",
                dict.fromkeys(("_softmax", "mul", "sum", "add", "_softmax_backward_data", "mm"), SOFTMAX)),
}  # fmt: skip
"""Module, annotations, and operators whose outputs may lie otherwise, with the reason."""


def squares(y):
    """Terms are added up before the loss, as a row-parallel layer of PyTorch does."""
    if isinstance(y, DTensor):
        y = y.redistribute(placements=[p if isinstance(p, Shard) else Replicate() for p in y.placements])
    return (y * y).sum()


def our_rows(module, x, annotations):
    program = capture(module, [x], loss=squares, optimizer="sgd", fold=False)
    flow = flow_of(program)
    problem = built(flow, mesh_on(CLUSTER, {"data": 2, "model": 4}), Timer(device=CLUSTER.device))
    found = propagated(problem, annotations)
    assert not found.conflicts
    items = [flow.of_call[call] for call in sorted(flow.of_call)]
    return [(flow.items[n].node.op, problem.ways[n][found.choice[n]].outputs) for n in items], flow


def their_rows(make, annotations, flow, fake):
    names = named_tensors(flow)
    named = {name: each.sharding for each in annotations for name in matching(names, each.pattern)}
    with fake_devices() as mesh, FakeTensorMode() if fake else nullcontext():
        module, x = make()
        rows = dtensor_run(module, [x], squares, named, mesh)
    return [(name, outputs) for name, outputs in rows if name not in VIEWS]


@pytest.mark.quick(without=["heads, unfused"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore")
def test_every_operator_lies_as_dtensor_has_it(name):
    make, text, excused = CASES[name]
    module, x = make()
    annotations = annotations_of([text])
    ours, flow = our_rows(module, x, annotations)
    theirs = their_rows(make, annotations, flow, make is attention)
    differing = set()
    for one, other in zip_longest(ours, theirs):
        assert one[0] == other[0]
        if any(a != b for a, b in zip(one[1], other[1], strict=False)):
            differing.add(one[0])
            print(one[0], [text_of(a) for a in one[1]], [" ".join(map(str, b)) for b in other[1]])
    assert differing == set(excused)
