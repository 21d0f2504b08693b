"""What passes between stages: bytes and messages by enumerated pieces, ways through a seam, equal shardings."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import inf
from pathlib import Path

import numpy as np
import pytest

from steptime.captured.cost import Timer
from steptime.captured.ops.placement import R, local_shape, pieces, shard
from steptime.estimate.communication import message_time_s
from steptime.hardware import load_cluster
from steptime.sharding.build import built
from steptime.sharding.flow import flow_of
from steptime.sharding.joint_plan import way_of
from steptime.sharding.mesh import mesh_on, parse_axes
from steptime.sharding.planner import planned
from steptime.sharding.reshard import costs
from steptime.sharding.seams import crossing_bytes, passing
from steptime.sharding.shard import captured_step
from steptime.sharding.units import units_of

VGG = f"{Path(__file__).parents[2] / 'models' / 'vgg.py'}:vgg16"
CAPTURE = {"seq": None, "dtype": None, "inputs": (), "optimizer": "sgd", "loss": None, "autocast": None}


def boxes(shape, sharding, sizes):
    """First and last element of each device along each dim."""
    counts, most = pieces(sharding, sizes, len(shape)), local_shape(shape, sharding, sizes)
    for at in product(*map(range, sizes)):
        number = [0] * len(shape)
        for axis, placement in enumerate(sharding):
            if placement.dim is not None:
                number[placement.dim] = number[placement.dim] * sizes[axis] + at[axis]
        yield tuple(
            (n * each, min((n + 1) * each, size)) for n, each, size, _ in zip(number, most, shape, counts, strict=True)
        )


@pytest.mark.parametrize(
    ("source", "sizes", "target", "others"),
    [
        ((shard(0),), (4,), (shard(0),), (4,)),
        ((shard(0),), (4,), (shard(1),), (6,)),
        ((shard(0), R), (2, 2), (R, shard(1)), (2, 3)),
        ((shard(1), shard(0)), (3, 2), (shard(0),), (12,)),
        ((R,), (4,), (R,), (3,)),
        ((shard(0),), (5,), (shard(0),), (1,)),
    ],
)
def test_bytes_and_messages_are_those_of_enumerated_pieces(source, sizes, target, others):
    shape = (24, 12)
    holders, wanting = list(boxes(shape, source, sizes)), list(boxes(shape, target, others))
    sent, sends = np.zeros(len(holders)), np.zeros(len(holders))
    received, receives = np.zeros(len(wanting)), np.zeros(len(wanting))
    for j, box in enumerate(wanting):
        for piece in dict.fromkeys(holders):
            share = [max(min(a[1], b[1]) - max(a[0], b[0]), 0) for a, b in zip(piece, box, strict=True)]
            same = [i for i, each in enumerate(holders) if each == piece]
            if np.prod(share):
                sent[same] += np.prod(share) / len(same)
                sends[same] += 1 / len(same)
                received[j] += np.prod(share)
                receives[j] += 1
    moved, messages = crossing_bytes(shape, 1.0, source, target, (sizes, others))
    assert moved == pytest.approx(max(sent.max(), received.max()))
    assert messages == max(np.ceil(sends.max() - 1e-9), receives.max())


@pytest.fixture(scope="module")
def parts():
    cluster = load_cluster("dgx-v100")
    flow = flow_of(captured_step(VGG, cluster, batch=64, **CAPTURE))

    def plan(axes):
        return planned(built(flow, mesh_on(cluster, parse_axes(axes)), Timer(device=cluster.device), inf))

    return units_of(flow), plan


def crossing(units, plans, unit):
    """The one activation that enters a unit, over links between nodes."""
    machine = plans[1].built.mesh.machine

    def message_s(size_bytes):
        return message_time_s(machine, size_bytes)[1]

    (storage,) = units.crossing[unit]
    made, read = units.kept[storage] < unit, range(unit, units.count)
    return passing(units, storage, plans, made=made, read=read, message_s=message_s), message_s


@pytest.mark.slow
def test_equal_shardings_take_one_message(parts):
    units, plan = parts
    found, message_s = crossing(units, (plan("4"), plan("4")), 5)
    assert found.made == found.landed == found.read[0] == (shard(0),)
    assert (found.messages, found.around_s) == (1, 0.0)
    assert way_of(("1", "2"), [found], message_s).seconds == float(message_s(units.boundary_bytes[5] / 4))


def test_what_every_device_wants_crosses_once_and_is_gathered(parts):
    units, plan = parts
    first, unit = plan("4"), units.names.index("classifier.3")
    whole = [
        next((n for n, way in enumerate(ways) if {*way.inputs, *way.outputs} <= {(R,)}), chosen)
        for ways, chosen in zip(first.built.ways, first.choice, strict=True)
    ]
    second = replace(first, choice=np.array(whole))
    found, message_s = crossing(units, (first, second), unit)
    (reader,) = found.read
    assert reader == (R,) and found.landed == (shard(0),)
    size = units.boundary_bytes[unit]
    gather_s = costs((64, 4096), 4, [(shard(0),)], [(R,)], second.built.mesh)[0, 0]
    assert found.around_s == pytest.approx(gather_s)
    seconds = way_of(("1", "2"), [found], message_s).seconds
    assert seconds == pytest.approx(message_s(size / 4) + gather_s) and seconds < message_s(size)


def test_fewer_devices_receive_more(parts):
    units, plan = parts
    found, _ = crossing(units, (plan("4"), plan("1")), 5)
    assert (found.moved_bytes, found.messages, found.around_s) == (units.boundary_bytes[5], 4, 0.0)
