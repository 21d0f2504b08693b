"""Operators of packages and users: timed by their bytes without a row, described by one row with it."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch")

import steptime  # noqa: E402
from public_models.rows import load_torchvision  # noqa: E402
from steptime.captured.cost import Timer, cost_table, work_of  # noqa: E402
from steptime.captured.ops import OPERATORS  # noqa: E402
from steptime.captured.ops.labels import spelled  # noqa: E402
from steptime.captured.ops.maps import per_element  # noqa: E402
from steptime.captured.ops.placement import P, R, shard  # noqa: E402
from steptime.captured.record import capture  # noqa: E402
from steptime.hardware import load_device  # noqa: E402
from steptime.sharding.options import _options, options  # noqa: E402

ROWS, WIDTH = 16, 8


@torch.library.custom_op("steptime_tests::scaled", mutates_args=())
def scaled(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(x) * weight


scaled.register_fake(lambda x, weight: torch.empty_like(x))


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return scaled(x, self.weight)


def captured_node():
    program = capture(Scaled(), (torch.zeros(ROWS, WIDTH),), training=False, name="m")
    return next(call.node for call in program.calls if call.node.op == "steptime_tests::scaled")


def test_a_row_says_what_an_own_operator_does():
    node = captured_node()
    assert (work_of(node).family, work_of(node).vector_flops, len(options(node))) == ("unknown", 0, 1)
    row = steptime.Operator(
        names="steptime_tests::scaled",
        family="map",
        work=per_element(5),
        dims=spelled("rows width, width -> rows width"),
    )
    steptime.register_operator(row)
    try:
        assert (work_of(node).family, work_of(node).vector_flops) == ("map", 5 * ROWS * WIDTH)
        found = {each.dim: (each.inputs, each.outputs) for each in _options(node) if each.dim}
        assert found == {
            "rows": ((shard(0), R), (shard(0),)),
            "width": ((shard(1), shard(0)), (shard(1),)),
        }
    finally:
        del OPERATORS["steptime_tests::scaled"]


def test_a_label_that_no_output_has_is_summed_away():
    node = captured_node()
    dims = spelled("rows width, width -> rows .")(node).dims
    assert {dim.name: dim.outputs for dim in dims} == {"rows": (shard(0),), "width": (P,)}
    assert spelled("rows, width -> rows")(node).dims == ()


@pytest.mark.each("text", ("rows width, rows -> rows width", "rows width, width -> width rows"))
@pytest.mark.each("square", (False, True))
def test_labels_that_are_not_those_of_the_operator_are_refused(text, square):
    """Also where all sizes happen to be the same: the operator's kernel for shapes tells."""
    program = capture(Scaled(), (torch.zeros(WIDTH if square else ROWS, WIDTH),), training=False, name="m")
    node = next(call.node for call in program.calls if call.node.op == "steptime_tests::scaled")
    told = not square or text.endswith("width rows")
    with pytest.raises(steptime.UserError, match="do not fit steptime_tests::scaled") if told else nullcontext():
        spelled(text)(node)


def test_rows_of_pytorch_are_not_replaced():
    with pytest.raises(steptime.UserError, match="mm has a row already"):
        steptime.register_operator(steptime.Operator(names="lab::own mm", family="map", work=per_element(1)))


class Mixed(torch.nn.Module):
    def forward(self, x):
        return torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real


def test_transforms_have_their_operations():
    program = capture(Mixed(), (torch.zeros(2, ROWS, WIDTH),), training=False, name="m")
    first, second = (call.node for call in program.calls if call.node.op.startswith("_fft"))
    assert (first.op, second.op) == ("_fft_r2c", "_fft_c2c")
    elements = 2 * ROWS * WIDTH
    assert work_of(first).vector_flops == 5 * elements * 3 / 2  # log2(8), half of it for real data
    assert work_of(second).vector_flops == 5 * elements * 4  # log2(16)
    assert work_of(second).moved_bytes == 2 * elements * 8
    assert {each.dim for each in options(second)} == {"", "d0", "d2", "terms of self"}


def test_all_operators_of_fnet_are_known():
    """Google's FNet mixes tokens by transforms, which no row had."""
    pytest.importorskip("torchvision")
    load_torchvision()
    hf = pytest.importorskip("transformers")
    config = hf.FNetConfig(num_hidden_layers=2, hidden_size=128, intermediate_size=256, vocab_size=512)
    with torch.device("meta"):
        module = hf.FNetForMaskedLM(config)
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    program = capture(module, {"input_ids": tokens, "labels": tokens}, training=True, target="cuda", name="fnet")
    assert {call.node.op for call in program.calls if "fft" in call.node.op} == {"_fft_c2c"}
    assert cost_table(program, Timer(device=load_device("h100-sxm"))).coverage.unknown == ()


INCOMPLETE = [
    ({"names": ""}, "names are words"), ({"names": 5}, "names are words"),
    ({"family": "nofamily"}, "family is one of product"), ({"work": None}, "without it an operator costs nothing"),
    ({"work": 3}, "work is an OperatorWork"), ({"dims": "rows -> rows"}, "dims is a function"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), INCOMPLETE)
def test_incomplete_rows_are_refused(change, message):
    given = {"names": "lab::op", "family": "map", "work": per_element(1), **change}
    with pytest.raises(steptime.UserError, match=message):
        steptime.register_operator(steptime.Operator(**given))
