"""Stages of a captured module: sums over units, devices of two speeds, recomputation, what cannot be planned."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf
from pathlib import Path

import numpy as np
import pytest

from steptime.captured.cost import Timer
from steptime.captured.cut.chains import chain_of
from steptime.errors import UserError
from steptime.hardware import load_cluster
from steptime.sharding.build import built
from steptime.sharding.cli.joint import print_joint
from steptime.sharding.flow import flow_of
from steptime.sharding.joint import joint
from steptime.sharding.mesh import mesh_on, parse_axes
from steptime.sharding.pipeline import least_step_s, sub_meshes
from steptime.sharding.planner import planned
from steptime.sharding.shard import captured_step
from steptime.sharding.spans import spans_of
from steptime.sharding.units import Branches, Units, of_micro_batch, unit_costs, units_of

MODELS = Path(__file__).parents[2] / "models"
VGG = f"{MODELS / 'vgg.py'}:vgg16"
DEEP = f"{Path(__file__).parents[2] / 'models' / 'megatron.py'}:deep"
TOWERS = f"{Path(__file__).parents[3] / 'examples' / 'two_tower.py'}:two_tower"
TINY = f"{Path(__file__).parents[3] / 'examples' / 'gpt.py'}:tiny"

CAPTURE = {"seq": None, "dtype": None, "inputs": (), "optimizer": "adamw", "loss": None, "autocast": None}
FEW = {"framework": "ideal", "gpus": 4, "global_batch": 16, "micro_batches": (4,), "schedules": ("1f1b",), "seconds": 5}


@pytest.fixture(scope="module")
def cluster():
    return load_cluster("dgx-a100")


@pytest.fixture(scope="module")
def flow(cluster):
    return flow_of(captured_step(TINY, cluster, batch=8, **CAPTURE))


@pytest.fixture(scope="module")
def vgg(cluster):
    return flow_of(captured_step(VGG, cluster, batch=8, **CAPTURE))


@pytest.fixture(scope="module")
def four(cluster):
    return joint(TINY, cluster, stages=4, **FEW)


@pytest.mark.quick(without=["2x2"])
@pytest.mark.parametrize("axes", ["1", "2x2"])
def test_units_add_up_to_the_step(cluster, flow, axes):
    problem = built(flow, mesh_on(cluster, parse_axes(axes)), Timer(device=cluster.device), inf)
    plan, units = planned(problem), units_of(flow)
    costs = unit_costs(units, plan, 1)
    computing_s, data_s, others_s = plan.parts_s
    assert units.names[:2] == ("head", "blocks.0") and units.count == 10
    assert costs.computing_s.sum() == pytest.approx(computing_s)
    assert (costs.weights_s + costs.gradients_s).sum() == pytest.approx(data_s)
    assert costs.others_s.sum() + costs.update_s.sum() == pytest.approx(others_s)
    spans = spans_of(costs, micro_batches=1, limit_bytes=inf, recompute=False)
    whole = (0, units.count)
    again = np.zeros(spans.blocks.shape)
    assert (spans.micro_batch_s(again) + spans.once_s())[whole] == pytest.approx(plan.step_s)
    assert sum(spans.passes_s(*whole, 0.0, "data")) == pytest.approx(spans.micro_batch_s(again)[whole])
    # The sum of parts is an upper bound of the recorded liveness, and a near one.
    held = float(spans.memory_bytes(1.0, again)[whole])
    assert plan.memory_bytes.max() <= held <= 1.2 * plan.memory_bytes.max()


@pytest.mark.slow
def test_once_in_a_step_counts_once(cluster, flow):
    problem = built(flow, mesh_on(cluster, parse_axes("4")), Timer(device=cluster.device), inf)
    whole, part = planned(problem), planned(of_micro_batch(problem, 8))
    one = unit_costs(units_of(flow), whole, 1)
    eighth = unit_costs(units_of(flow), replace(part, choice=whole.choice), 8)
    for name in ("gradients_s", "update_s", "weights_s", "held_bytes"):
        assert getattr(eighth, name) == pytest.approx(getattr(one, name)), name


def test_a_module_without_equal_blocks_is_cut_where_one_activation_passes(vgg):
    units = units_of(vgg)
    assert 10 <= units.count <= 16 and not units.blocks.any()
    # Functions of activations and pools are with the layer before them, dense layers are parts of their own.
    assert units.names[-3:] == ("classifier.0", "classifier.3", "classifier.6")
    assert all(len(each) == 1 for each in units.crossing[1:])
    assert units.boundary_bytes[-3:].tolist() == [8 * 512 * 49 * 4, 8 * 4096 * 4, 8 * 4096 * 4]
    # Each part has the backward pass of its own modules.
    calls = vgg.program.calls
    for phase in ("forward", "backward"):
        owners = {call.module: int(units.of_call[n]) for n, call in enumerate(calls) if call.phase == phase}
        assert owners["features.0"] == 0 and owners["classifier.6"] == units.count - 1
        assert units.names[owners["classifier.3"]] == "classifier.3"


def test_parts_of_a_module_with_skips(cluster):
    net = flow_of(captured_step(f"{MODELS / 'unet.py'}:unet", cluster, batch=2, **CAPTURE))
    crossing = [len(each) for each in units_of(net).crossing]
    assert len(crossing) > 8 and max(crossing) == 4


def test_parts_of_a_module_with_a_shared_parameter(flow):
    # The gradient of the table is complete in the last call of the backward pass, which is of the first user.
    found = chain_of(flow.program)
    assert found.names[0] == "tokens" and len(found.names) == 16 and not found.parallel


def test_parts_add_up_to_the_step(cluster, vgg):
    plan = planned(built(vgg, mesh_on(cluster, parse_axes("2")), Timer(device=cluster.device), inf))
    costs = unit_costs(units_of(vgg), plan, 1)
    spans = spans_of(costs, micro_batches=1, limit_bytes=inf, recompute=False)
    again = np.zeros(spans.blocks.shape)
    assert (spans.micro_batch_s(again) + spans.once_s())[0, -1] == pytest.approx(plan.step_s)


def test_a_parameter_of_two_units_is_on_both_stages(flow):
    units = units_of(flow)
    (tied,) = units.held[1]
    assert tied.units == (0, units.count - 1) and tied.gradient >= 0
    assert (units.boundary_bytes[1:] == 8 * 64 * 128 * 4).all()


@pytest.mark.slow
def test_four_stages(four):
    assert [stage.blocks for stage in four.stages] == [2, 2, 2, 2]
    assert [stage.in_flight for stage in four.stages] == [4, 3, 2, 1]
    assert four.bound_s < four.step_s and four.stages_bound_s <= four.stages_s
    assert four.bracket_s[0] <= four.step_s <= four.bracket_s[1]
    assert four.step_s == pytest.approx(four.stages_s, rel=0.03)
    assert four.idle == 0


@pytest.mark.slow
def test_a_record_and_a_report(four, capsys):
    record = json.loads(json.dumps(four.to_json()))
    assert [stage["units"][0] for stage in record["stages"]] == ["head", "blocks.2", "blocks.4", "blocks.6"]
    assert record["stages"][3]["parameters"]["tokens.weight"] == "R"
    (way,) = record["stages"][1]["entering"]
    (entering,) = way["activations"]
    assert way["from"] == "1" and way["seconds"] > 0 and record["stages"][0]["entering"] == []
    assert entering["made"] == "R" and entering["moved_bytes"] == 4 * 64 * 128 * 4
    print_joint(four)
    text = capsys.readouterr().out
    assert "4 stages, schedule 1f1b, micro-batch 4, 4 micro-batches" in text
    assert "most of a device" in text and "128 KiB" in text
    assert "blocks.2 to" in text and "0 of 2" in text


@pytest.mark.slow
def test_blocks_run_again_where_memory_is_short(cluster, four):
    limit = 0.75 * max(stage.memory_bytes for stage in four.stages)
    tight = joint(TINY, cluster, stages=4, memory_bytes=limit, **FEW)
    assert sum(stage.recomputed for stage in tight.stages) > 0
    assert all(stage.memory_bytes <= limit for stage in tight.stages)
    assert tight.step_s > four.step_s
    kept = {stage.units[0]: stage for stage in four.stages}
    for stage in tight.stages:
        if stage.recomputed and stage.units == kept[stage.units[0]].units:
            assert stage.passes_s[1] > kept[stage.units[0]].passes_s[1]


@pytest.mark.slow
def test_slower_devices_get_fewer_blocks(cluster):
    device = cluster.device
    rates = {
        name: {key: rate / 3 for key, rate in getattr(device, name).items()}
        for name in ("matrix_flops_per_s", "vector_flops_per_s")
    }
    usual = replace(cluster, name="usual", device=replace(device, name="usual"))
    slow = replace(cluster, name="slow", device=replace(device, name="slow", memory_Bps=device.memory_Bps / 3, **rates))
    found = joint(DEEP, usual, further=[(slow, 2)], stages=4, **{**FEW, "gpus": 2})
    blocks = {name: [s.blocks for s in found.stages if s.machines.cluster.name == name] for name in ("usual", "slow")}
    assert len(blocks["usual"]) == len(blocks["slow"]) == 2
    assert max(blocks["slow"]) < min(blocks["usual"]) and sum(map(sum, blocks.values())) == 12


@pytest.mark.slow
def test_several_stages_a_rank(cluster):
    found = joint(TINY, cluster, stages=8, **{**FEW, "schedules": ("interleaved",)})
    assert joint(TINY, cluster, **{**FEW, "schedules": ("interleaved",)}).step_s <= found.step_s
    assert found.stages_per_rank == 2 and len(found.stages) == 8 and found.idle == 0
    assert {stage.devices for stage in found.stages} == {1} and sum(stage.blocks for stage in found.stages) == 8
    # Half the bubble of one stage a rank, with messages to pay for.
    assert found.step_s < joint(TINY, cluster, stages=4, **FEW).step_s * 1.05


def test_more_stages_than_units(cluster):
    with pytest.raises(UserError, match="40 stages of 10 units"):
        joint(TINY, cluster, stages=40, **FEW)


@pytest.mark.slow
def test_too_little_memory_names_the_stage(cluster):
    with pytest.raises(UserError, match=r"stage \d of \d \(.*\) on .* needs .* MiB of 977 KiB"):
        joint(TINY, cluster, memory_bytes=1e6, **FEW)


def test_what_cannot_be_asked(cluster):
    with pytest.raises(UserError, match="a micro-batch of 3 does not divide the global batch of 16"):
        joint(TINY, cluster, **{**FEW, "micro_batches": (3,)})
    with pytest.raises(UserError, match=r"schedule .*dualpipe"):
        joint(TINY, cluster, **{**FEW, "schedules": ("dualpipe",)})


def test_one_unit(cluster, tmp_path):
    file = tmp_path / "plain.py"
    file.write_text(
        "import torch\n\ndef plain(batch: int = 8):\n"
        "    return torch.nn.Linear(512, 2048), torch.zeros(batch, 512), lambda y: y.sum()\n"
    )
    found = joint(f"{file}:plain", cluster, **FEW)
    assert [stage.units for stage in found.stages] == [("whole",)]
    with pytest.raises(UserError, match="2 stages of 1 unit"):
        joint(f"{file}:plain", cluster, stages=2, **FEW)


@pytest.mark.slow
def test_replicas_on_any_number_of_devices(cluster, monkeypatch):
    # Servers of one device, as some of arXiv 1806.03377: convolutions on 3 of them, dense layers on the last.
    servers = load_cluster("v100-pcie-8")
    node, network = servers.levels
    network = replace(network, link_Bps=1.25e9, links_per_device=1.0, efficiency=1.0)
    apart = replace(servers, name="apart", levels=(replace(node, devices=1), network))
    job = {**FEW, "global_batch": 384, "micro_batches": (48,), "optimizer": "sgd"}
    found = joint(VGG, apart, **job)
    assert [stage.devices for stage in found.stages] == [3, 1]
    assert found.stages[0].plan.built.mesh.sizes == (3,) and found.stages[0].parameters["features.0.weight"] == "R"
    assert found.stages[1].units[-1] == "classifier.6" and found.idle == 0
    (tried,) = found.tried
    assert tried[:2] == (48, "1f1b")
    assert found.step_s < 0.75 * joint(VGG, apart, stages=1, **job).step_s
    monkeypatch.setattr("steptime.sharding.joint.replica_counts", lambda devices, usual: [])
    assert found.step_s < 0.9 * joint(VGG, apart, **job).step_s


@pytest.fixture(scope="module")
def apart():
    """Servers of one device each, 1 Gb/s between them."""
    servers = load_cluster("v100-pcie-8")
    node, network = servers.levels
    network = replace(network, link_Bps=1.25e8, links_per_device=1.0, efficiency=1.0)
    return replace(servers, name="apart", levels=(replace(node, devices=1), network))


@pytest.mark.slow
def test_software_that_overlaps_nothing_overlaps_nothing(cluster):
    given = {**FEW, "framework": "megatron-2021", "stages": 1}
    assert joint(TINY, cluster, **given).step_s == joint(TINY, cluster, **given, overlaps=False).step_s


@pytest.mark.slow
def test_devices_of_two_clusters_may_be_more_than_one_of_them_joins(cluster):
    node = replace(cluster, name="node", levels=(replace(cluster.levels[0], devices=2),))
    found = joint(TINY, node, further=[(cluster, 2)], **{**FEW, "gpus": 2, "framework": "megatron-core"})
    assert sum(each.devices for each in found.machines) == 4


def test_two_towers_are_branches_until_they_meet(cluster):
    flow = flow_of(captured_step(TOWERS, cluster, batch=4, **CAPTURE))
    units = units_of(flow)
    text, tail = units.names.index("text.table"), units.count - 1
    assert units.branches[0, tail] == Branches((0, text, tail), tail)
    assert units.branches[0, units.count] == Branches((0, text, units.count), tail)
    assert units.branches[2, text + 1] == Branches((2, text, text + 1), text + 1)
    assert (0, text) not in units.branches and (text, tail) not in units.branches
    # The text tower alone has nothing of what the image tower made; the tail has what it reads.
    size = np.array([each.size_bytes for each in flow.program.storages])
    assert units.boundary_bytes[text] == 4 * 512 * 4 and units.read_bytes(size)[text, tail] == 0
    assert units.read_bytes(size)[text, units.count] == 4 * 512 * 4


TWO = {**FEW, "gpus": 2, "global_batch": 64, "micro_batches": (64,)}


@pytest.mark.slow
def test_towers_on_different_devices_where_links_are_slow(apart, monkeypatch, capsys):
    found = joint(TOWERS, apart, **TWO)
    assert [(stage.name, stage.units[0], stage.first_device) for stage in found.stages] == [
        ("1a", "image.layers.0", 0),
        ("1b", "text.table", 1),
    ]
    assert found.stages[1].units[-1] == "tail" and found.count == 1 and found.idle == 0
    busy = [sum(stage.passes_s) for stage in found.stages]
    once = max(stage.once_s for stage in found.stages)
    (way,) = found.stages[1].entering
    assert (way.source, way.target) == ("1a", "1b") and [each.name for each in way.passing] == ["image.project: addmm"]
    assert max(busy) + once <= found.step_s < sum(busy)
    passes = np.array([stage.passes_s for stage in found.stages])
    assert found.step_s <= passes.max(axis=0).sum() + 2 * way.seconds + once
    stages = found.to_json()["stages"]
    assert [(each["stage"], each["first_device"], each["devices"]) for each in stages] == [("1a", 0, 1), ("1b", 1, 1)]
    assert stages[1]["entering"][0]["from"] == "1a"
    assert "image.layers.0.weight" in stages[0]["parameters"] and "text.table.weight" not in stages[0]["parameters"]
    print_joint(found)
    text = capsys.readouterr().out
    assert "1 stage, schedule" in text and "1a to 1b" in text
    monkeypatch.setattr(Units, "branches", {})
    assert found.step_s < 0.8 * joint(TOWERS, apart, **TWO).step_s


def test_towers_share_devices_where_links_are_fast(cluster):
    found = joint(TOWERS, cluster, **TWO)
    assert [(stage.name, stage.devices) for stage in found.stages] == [("1", 2)]


def test_blocks_of_one_tower_do_not_make_a_head_of_the_other(cluster, tmp_path):
    file = tmp_path / "uneven.py"
    file.write_text(
        "import torch\nfrom torch import nn\n\nclass Towers(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.a = nn.Linear(2048, 4096)\n"
        "        self.b = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) "
        "for _ in range(3)), nn.Linear(1024, 4096))\n\n"
        "    def forward(self, x, y):\n        x, y = self.a(x), self.b(y)\n        return x * y\n\n"
        "def towers(batch: int = 64):\n"
        "    return Towers(), (torch.zeros(batch, 2048), torch.zeros(batch, 1024)), lambda y: y.sum()\n"
    )
    flow = flow_of(captured_step(f"{file}:towers", cluster, batch=4, **CAPTURE))
    units = units_of(flow)
    assert flow.sections.blocks is not None and not units.blocks.any()
    assert units.names[0] == "a" and units.branches[0, units.count].bounds[:2] == (0, 1)


def test_three_towers(apart, tmp_path):
    file = tmp_path / "three.py"
    file.write_text(
        "import torch\nfrom torch import nn\n\nclass Three(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.a, self.b, self.c = (nn.Sequential(nn.Linear(n, 2048), nn.Tanh(), nn.Linear(2048, 64)) for n in "
        "(2048, 2304, 2560))\n\n"
        "    def forward(self, x, y, z):\n"
        "        x, y, z = self.a(x), self.b(y), self.c(z)\n        return x * y * z\n\n"
        "def three(batch: int = 64):\n    shapes = (batch, 2048), (batch, 2304), (batch, 2560)\n"
        "    return Three(), tuple(map(torch.zeros, shapes)), lambda y: y.sum()\n"
    )
    found = joint(f"{file}:three", apart, **{**TWO, "gpus": 3})
    assert [(stage.name, stage.units[0], stage.first_device) for stage in found.stages] == [
        ("1a", "a.0", 0),
        ("1b", "b.0", 1),
        ("1c", "c.0", 2),
    ]


def test_bounds_over_kinds():
    # 12 device-seconds; the second kind takes twice as long: 4 of one and 4 of the other do as much as 6.
    work = np.array([[6.0, 6.0], [12.0, 12.0]])
    assert least_step_s(work, [4, 4]) == pytest.approx(2.0)
    # What only one kind does well goes there.
    assert least_step_s(np.array([[4.0, 40.0], [40.0, 4.0]]), [1, 1]) == pytest.approx(4.0)
    assert sub_meshes(1024, 8)[0] == 16
