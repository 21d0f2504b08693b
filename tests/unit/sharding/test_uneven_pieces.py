"""Dims that devices do not divide: the last pieces are smaller, as DTensor has them, and the largest is priced."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("highspy")

from steptime.captured.cost import Timer  # noqa: E402
from steptime.captured.graph import Nodes, TensorType  # noqa: E402
from steptime.captured.ops.placement import local_shape, shard  # noqa: E402
from steptime.captured.record import capture  # noqa: E402
from steptime.hardware import load_device  # noqa: E402
from steptime.sharding.local import local_node  # noqa: E402
from steptime.sharding.options import strategies  # noqa: E402
from steptime.sharding.shard import shard as shardings  # noqa: E402

VOCABULARY, WIDTH, DEVICES = 50257, 1024, 4


def head():
    nodes = Nodes()
    x = nodes.source("input", "x", TensorType((8192, WIDTH), "bf16"))
    w = nodes.source("parameter", "w", TensorType((WIDTH, VOCABULARY), "bf16"))
    return nodes.apply("mm", {"self": x, "mat2": w}, outputs=[TensorType((8192, VOCABULARY), "bf16")])


@pytest.mark.parametrize(("size", "count"), [(50257, 4), (50257, 8), (1000, 3), (17, 4), (33, 32)])
def test_the_largest_piece_is_that_of_dtensor(size, count):
    largest = max(piece.numel() for piece in torch.zeros(size).chunk(count))
    assert local_shape((size,), (shard(0),), (count,)) == (largest,)


def test_a_vocabulary_is_split_and_its_largest_piece_priced():
    node = head()
    split = next(each for each in strategies(node, (DEVICES,)) if each.dims == ("columns",))
    local = local_node(node, split, (DEVICES,), Nodes())
    assert local.outputs[0].shape == (8192, 12565)
    timer = Timer(device=load_device("h100-sxm"))
    share = timer.cost(local).work.matrix_flops / timer.cost(node).work.matrix_flops
    assert share == pytest.approx(12565 / VOCABULARY, rel=1e-12)


def test_pieces_that_differ_too_much_are_no_option():
    nodes = Nodes()
    x = nodes.source("input", "x", TensorType((9, WIDTH), "bf16"))
    node = nodes.apply("relu", {"self": x}, outputs=[x.type])
    assert {each.dims for each in strategies(node, (8,))} == {("",), ("d1",)}


class Language(torch.nn.Module):
    """An embedding and a head over an odd vocabulary, tied."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(VOCABULARY, 256)
        self.head = torch.nn.Linear(256, VOCABULARY, bias=False)

    def forward(self, tokens):
        return torch.nn.functional.cross_entropy(self.head(self.table(tokens)), tokens)


def test_an_odd_vocabulary_is_split_as_asked():
    tokens = torch.zeros(64, dtype=torch.int64)
    program = capture(Language(), (tokens,), loss="own", training=True, target="cuda", name="odd")
    found = shardings(program, "dgx-h100", gpus=DEVICES, mesh="model=4", annotate=["head.weight=S(0)"])
    assert found.to_json()["parameters"]["head.weight"] == "S(0)"


def test_a_layout_splits_an_odd_vocabulary():
    tokens = torch.zeros(64, dtype=torch.int64)
    program = capture(Language(), (tokens,), loss="own", training=True, target="cuda", name="odd")
    found = shardings(program, "dgx-h100", gpus=DEVICES, mesh="model=4", layout="vocabulary:model")
    assert found.to_json()["parameters"]["head.weight"] == "S(0)"
