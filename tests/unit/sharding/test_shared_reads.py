"""What several operators read is resharded once; parameters are gathered for each reader."""

from __future__ import annotations

from math import inf

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("highspy")

from torch import nn  # noqa: E402

from steptime.captured.cost import Timer  # noqa: E402
from steptime.captured.record import capture  # noqa: E402
from steptime.hardware import load_cluster  # noqa: E402
from steptime.sharding.annotate import annotations_of, pins_of, resolved  # noqa: E402
from steptime.sharding.build import built  # noqa: E402
from steptime.sharding.flow import flow_of  # noqa: E402
from steptime.sharding.mesh import mesh_on, parse_axes  # noqa: E402
from steptime.sharding.planner import planned  # noqa: E402

ROWS, WIDTH = 8192, 64
MACHINES = load_cluster("dgx-h100")


class Projections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x):
        x = self.norm(x)
        return (self.q(x) * self.k(x) * self.v(x)).sum()


@pytest.fixture(scope="module")
def plan():
    """Rows are sharded in the norm, columns in the projections, as with sequence and tensor parallelism."""
    program = capture(Projections(), (torch.zeros(ROWS, WIDTH),), loss="own", training=True, target="cuda")
    given = built(flow_of(program), mesh_on(MACHINES, parse_axes("4"), 4), Timer(device=MACHINES.device), inf)
    texts = ["norm=S(0)", "input.0=S(0)"]
    texts += [text for name in "qkv" for text in (f"{name}.weight=S(0)", f"{name}=S(1)")]
    pins = pins_of(given, resolved(given, annotations_of(texts)))
    return planned(given.only(pins), overlaps=False)


def test_three_projections_gather_their_input_once(plan):
    size_bytes = ROWS * WIDTH * 4
    gathers = [t for t in plan.transfers if t.collective == "all_gather_into_tensor" and t.size_bytes == size_bytes]
    forward = [t for t in gathers if t.source == "norm: native_layer_norm"]
    # Once for three products of the forward pass, once for three gradients of weights.
    assert [(t.target, t.count) for t in forward] == 2 * [("norm: native_layer_norm (copy)", 1)]


def test_each_copy_has_its_reads_of_one_pass(plan):
    flow = plan.built.flow
    calls = flow.program.calls
    assert flow.copies
    for copy in flow.copies:
        assert len(copy.reads) > 1
        assert {calls[read.call].reads[read.place] for read in copy.reads} == {copy.storage}
        assert len({calls[read.call].phase for read in copy.reads}) == 1
        assert flow.items[copy.item].kind == "copy"
    readers = [link for link in flow.links if flow.items[link.source].node.op == "parameter"]
    assert all(flow.items[link.target].kind != "copy" for link in readers)


def test_seconds_of_the_plan_are_those_of_its_transfers(plan):
    _, data_s, others_s = plan.parts_s
    moved_s = sum(each.count * each.seconds for each in plan.transfers)
    options = zip(plan.built.flow.items, plan.built.seconds.inside, plan.choice, strict=True)
    updates_s = sum(float(each[option]) for item, each, option in options if item.kind == "update")
    assert data_s + others_s - updates_s == pytest.approx(moved_s, rel=0.05)
