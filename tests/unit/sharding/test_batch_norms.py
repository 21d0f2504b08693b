"""Batch norms of data-parallel devices: over the whole batch, for which sums are exchanged, or each over its part."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("highspy")

from steptime.captured.cost import Timer  # noqa: E402
from steptime.captured.record import capture  # noqa: E402
from steptime.hardware import load_cluster, load_device  # noqa: E402
from steptime.sharding.build import built  # noqa: E402
from steptime.sharding.flow import flow_of  # noqa: E402
from steptime.sharding.mesh import mesh_on  # noqa: E402
from steptime.sharding.shard import shard  # noqa: E402


class Convolved(torch.nn.Module):
    """Two convolutions with a norm after each."""

    def __init__(self):
        super().__init__()
        layers = [torch.nn.Conv2d(8, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU()]
        self.layers = torch.nn.Sequential(*layers, torch.nn.Conv2d(8, 8, 3, padding=1), torch.nn.BatchNorm2d(8))

    def forward(self, x):
        return self.layers(x).sum()


@pytest.fixture(scope="module")
def program():
    x = torch.zeros(64, 8, 64, 64)
    return capture(Convolved(), (x,), loss="own", training=True, target="cuda", name="convolved")


def inside_s(program, *, plain_norms):
    """Seconds that batch norms exchange something in, over all their options and both passes."""
    mesh, device = mesh_on(load_cluster("dgx-h100"), {"data": 4}), load_device("h100-sxm")
    found = built(flow_of(program), mesh, Timer(device=device), plain_norms=plain_norms)
    norms = [n for n, item in enumerate(found.flow.items) if "batch_norm" in item.node.op]
    return sum(float(found.seconds.inside[number].sum()) for number in norms)


def test_plain_norms_exchange_nothing_inside(program):
    assert inside_s(program, plain_norms=False) > 0
    assert inside_s(program, plain_norms=True) == 0
    given = {"gpus": 4, "mesh": "data=4", "framework": "ideal"}
    synchronised, plain = (shard(program, "dgx-h100", synchronised_norms=whole, **given) for whole in (True, False))
    assert plain.step_s <= synchronised.step_s


def test_a_plan_that_is_to_run_is_over_the_whole_batch(program):
    found = shard(program, "dgx-h100", gpus=4, mesh="data=4", runnable=True)
    assert not found.best.built.walker.silent
