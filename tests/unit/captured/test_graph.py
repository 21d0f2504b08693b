"""The graph interns nodes; liveness counts each storage from its allocation to its last reference."""

from __future__ import annotations

import pytest

from steptime.captured.graph import (
    BEFORE,
    Call,
    Graph,
    Nodes,
    Program,
    Storage,
    TensorType,
    contiguous_strides,
)
from steptime.captured.graph.liveness import Liveness
from steptime.errors import UserError

FP32 = TensorType((4, 4), "fp32")


def chain(nodes: Nodes, length: int) -> Graph:
    value = nodes.source("input", "x", FP32)
    for _ in range(length):
        value = nodes.apply("relu", {"self": value}, outputs=[FP32]).value()
    return Graph((value,))


def test_equal_operators_on_equal_values_are_one_node() -> None:
    nodes = Nodes()
    x = nodes.source("input", "x", FP32)
    one = nodes.apply("add", {"self": x, "other": x}, {"alpha": 1}, outputs=[FP32])
    assert nodes.apply("add", {"self": x, "other": x}, {"alpha": 1}, outputs=[FP32]) is one
    assert nodes.apply("add", {"self": x, "other": x}, {"alpha": 2}, outputs=[FP32]) is not one
    assert len(nodes) == 3


def test_nodes_cannot_be_changed() -> None:
    node = Nodes().source("input", "x", FP32).node
    with pytest.raises(AttributeError):
        node.op = "other"


@pytest.mark.slow
def test_topological_order_has_no_depth_limit() -> None:
    graph = chain(Nodes(), 20_000)
    order = graph.nodes()
    assert len(order) == 20_001
    place = {node: number for number, node in enumerate(order)}
    assert all(place[value.node] < place[node] for node in order for value in node.inputs)


def test_arguments_are_found_by_name() -> None:
    nodes = Nodes()
    x, y = (nodes.source("input", name, FP32) for name in "xy")
    cat = nodes.apply("cat", {"tensors": [x, y]}, {"dim": 0}, outputs=[TensorType((8, 4), "fp32")])
    assert cat.inputs_of("tensors") == (x, y)
    assert cat.input("tensors") == x
    assert cat.input("other") is None
    assert cat.attribute("dim") == 0
    assert cat.attribute("axis", 7) == 7


def test_sources_are_of_known_kinds() -> None:
    with pytest.raises(ValueError, match="weights"):
        Nodes().source("weights", "w", FP32)


def test_sizes_and_strides() -> None:
    assert TensorType((2, 3, 5), "bf16").size_bytes == 60
    assert TensorType((), "fp32").elements == 1
    assert contiguous_strides((2, 0, 5)) == (5, 5, 1)
    with pytest.raises(UserError, match="int7"):
        TensorType((1,), "int7")


def program() -> Program:
    """Two forward calls, one backward call, one optimiser call; sizes 100 (weight), 10, 20, 40 bytes."""
    nodes = Nodes()
    x = nodes.source("input", "x", FP32)
    node = nodes.apply("relu", {"self": x}, outputs=[FP32])
    calls = (
        Call(node, "forward", "a", (0,), (1,)),
        Call(node, "forward", "b", (1,), (2,)),
        Call(node, "backward", "b", (2,), (3,)),
        Call(node, "optimizer", "", (3,), (0,), inplace=True, scratch_bytes=5),
    )
    storages = (
        Storage(100, BEFORE, None, "parameter", "w"),
        Storage(10, 0, 1, "temporary"),
        Storage(20, 1, 2, "activation"),
        Storage(40, 2, None, "gradient", "w.grad"),
    )
    return Program(name="hand", calls=calls, storages=storages)


def test_memory_in_use_by_hand() -> None:
    live = Liveness(program())
    assert live.in_use_bytes.tolist() == [100, 110, 130, 160, 145]
    assert {name: use.tolist() for name, use in live.by_category().items()} == {
        "parameter": [100] * 5,
        "temporary": [0, 10, 10, 0, 0],
        "activation": [0, 0, 20, 20, 0],
        "gradient": [0, 0, 0, 40, 40],
    }


def test_peaks_by_hand() -> None:
    live = Liveness(program())
    peaks = live.peaks()
    assert {phase: peak.size_bytes for phase, peak in peaks.items()} == {
        "forward": 130, "backward": 160, "optimizer": 145,
    }  # fmt: skip
    assert live.peak() == peaks["backward"]
    assert peaks["backward"].by_category == {"parameter": 100, "gradient": 40, "activation": 20}
    assert [held.storage.size_bytes for held in live.alive(2)] == [100, 40, 20]
    assert [held.made_by for held in live.alive(2)] == ["w", "b: relu", "b: relu"]


def test_sizes_are_rounded_up_as_an_allocator_does() -> None:
    assert Liveness(program(), rounding=512).peak().size_bytes == 3 * 512
