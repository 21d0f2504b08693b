"""Who wins on a processor, by the curves of one that was measured (EPYC, one core, 2026-11-25): no time is taken.

`benchmarks/bench_rewrite.py` measures the same rewrites on the machine that it runs on; `tests/data/machines` has the
operators measured one by one.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from steptime.captured.cost import Timer, Work
from steptime.captured.cost.timing import direct_call, work_of
from steptime.captured.graph import Nodes, TensorType
from steptime.captured.ops.processor import operands
from steptime.hardware import device_within
from steptime.rewrite.engine import apply_passes
from steptime.rewrite.fused import FusedTimer, fuse
from steptime.rewrite.pricing import Prices, timer_for
from steptime.rewrite.trace import trace

HERE = device_within(str(Path(__file__).parents[2] / "data" / "machines" / "epyc-9004.toml"))


def curve(kind: str) -> dict[str, float]:
    """Coefficients of a measured operator."""
    found = next(c for c in HERE.curves.curves if c.family.endswith(f"/{kind}"))  # type: ignore[union-attr]
    return dict(found.coefficients)


class Of(nn.Module):
    """A function with weights."""

    def __init__(self, function, **weights) -> None:
        super().__init__()
        self.function = function
        for name, weight in weights.items():
            setattr(self, name, nn.Parameter(weight))

    def forward(self, *args):
        """The function."""
        return self.function(self, *args)


R = torch.randn


def fire(m, x):
    """Two convolutions side by side."""
    return torch.cat([F.conv2d(x, m.one), F.conv2d(x, m.three, padding=1)], 1)


def space_to_batch(m, x):
    """PET's mutant of a dilated convolution."""
    n, c, h, w = x.shape
    parts = x.reshape(n, c, h // 2, 2, w // 2, 2).permute(3, 5, 0, 1, 2, 4).reshape(4 * n, c, h // 2, w // 2)
    y = F.conv2d(parts, m.w, padding=1).reshape(2, 2, n, -1, h // 2, w // 2)
    return y.permute(2, 3, 4, 0, 5, 1).reshape(n, -1, h, w)


def batch_to_height(m, x):
    """PET's images above each other."""
    n, c, h, w = x.shape
    tall = F.pad(x, (0, 0, 0, 1)).transpose(0, 1).reshape(1, c, n * (h + 1), w)
    return F.conv2d(tall, m.w, padding=1).reshape(-1, n, h + 1, w)[:, :, :h].transpose(0, 1)


MUTANTS = {
    "enlarged": (
        Of(fire, one=R(64, 32, 1, 1), three=R(64, 32, 3, 3)), Of(lambda m, x: F.conv2d(x, m.both, padding=1),
        both=R(128, 32, 3, 3)), R(1, 32, 28, 28),
    ),
    "space to batch": (
        Of(lambda m, x: F.conv2d(x, m.w, padding=2, dilation=2), w=R(32, 32, 3, 3)),
        Of(space_to_batch, w=R(32, 32, 3, 3)), R(1, 32, 28, 28),
    ),
    "batch to height": (
        Of(lambda m, x: F.conv2d(x, m.w, padding=1), w=R(16, 16, 3, 3)), Of(batch_to_height, w=R(16, 16, 3, 3)),
        R(8, 16, 14, 14),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_lose(name: str) -> None:
    before, after, x = MUTANTS[name]
    flows = [trace(module.eval(), (x,)).flow for module in (before, after)]
    prices = Prices(timer_for(flows[0], HERE))
    old, new = (prices.table(flow).totals.step_s for flow in flows)
    assert old < 0.9 * new
    sums = [prices.sums(flow, flow.order) for flow in flows]
    assert prices.change(sums[0], *sums).band_s[0] < 0, "nobody would apply it"


def layer_norm(m, x):
    """Written out."""
    c = x - x.mean(-1, keepdim=True)
    return c * torch.rsqrt((c * c).mean(-1, keepdim=True) + 1e-5) * m.w + m.b


W = {"a": R(256, 256), "b": R(256, 256)}
#: Name of the pass -> module, inputs, and the gain that was measured.
WINNERS = {
    "reassociation": (Of(lambda m, x, y, z: (x @ y) @ z), (R(128, 4), R(4, 128), R(128, 4)), 2.8),
    "common factor": (Of(lambda m, x: x @ m.a + x @ m.b, **W), (R(32, 256),), 2.0),
    "layer norm": (Of(layer_norm, w=R(768), b=R(768)), (R(128, 768),), 2.4),
    "softmax": (
        Of(lambda m, x: (e := (x - x.amax(-1, keepdim=True)).exp()) / e.sum(-1, keepdim=True)), (R(128, 768),), 2.0,
    ),
    "SiLU": (Of(lambda m, x: x * x.sigmoid()), (R(128, 768),), 1.33),
}  # fmt: skip


@pytest.mark.parametrize("name", WINNERS)
def test_winners_win_by_as_much_as_measured(name: str) -> None:
    module, inputs, gain = WINNERS[name]
    found = apply_passes(trace(module.eval(), inputs).flow, HERE, passes=(name,))
    assert [step.name for step in found.steps if step.applied and not step.tidy] == [name]
    old, new = (found.prices.table(flow).totals.step_s for flow in (found.before, found.after))
    assert old / new == pytest.approx(gain, rel=0.25)


def test_joined_products_are_neutral_and_left_alone() -> None:
    module = Of(lambda m, x: (x @ m.a, x @ m.b), a=R(768, 768), b=R(768, 768))
    found = apply_passes(trace(module.eval(), (R(64, 768),)).flow, HERE, passes=("merged siblings",))
    assert not any(step.applied for step in found.steps)
    assert abs(found.steps[0].change.gain_s) < 0.05 * found.prices.table(found.before).totals.step_s


def test_looks_and_calls_take_the_host_as_long_as_measured() -> None:
    graph, eager = FusedTimer(device=HERE, recorded=False), FusedTimer(device=HERE)
    assert graph.look("slice").host_s == curve("cpu_view")["latency_s"]
    assert graph.look("t").host_s == curve("cpu_turn")["latency_s"]
    assert graph.call_s == curve("cpu_call")["latency_s"]
    assert eager.look("slice").host_s == eager.call_s == 0.0


F32 = TensorType((64, 32), "fp32")


def node_of(op: str, *types: TensorType, out: TensorType = F32, **attributes):
    """One operator."""
    nodes = Nodes()
    values = {
        name: nodes.source("input", name, type) for name, type in zip(("self", "other", "mat2"), types, strict=False)
    }
    return nodes.apply(op, values, outputs=[out], attributes=attributes)


CASES = [
    ("mul", (F32, TensorType((64, 32), "fp32")), "two", 0),
    ("mul", (F32, TensorType((32,), "fp32")), "row", 64),
    ("sub", (F32, TensorType((64, 1), "fp32")), "column", 64),
    ("add", (F32, TensorType((), "fp32")), "number", 0),
    ("add", (F32,), "number", 0),
    ("relu", (F32,), "one", 0),
]


@pytest.mark.parametrize(("op", "types", "kind", "rows"), CASES)
def test_how_operands_lie(op, types, kind, rows) -> None:
    assert operands(node_of(op, *types), alone=op == "relu" or len(types) > 2) == (kind, rows)


def test_an_exponential_is_timed_by_its_elements() -> None:
    node, exp = node_of("exp", F32), curve("cpu_exp")
    found = FusedTimer(device=HERE, recorded=False).cost(node)
    by_hand = exp["latency_s"] + 2048 / exp["steps_per_s"] + 2 * 2048 * 4 / exp["memory_Bps"]
    assert found.seconds == pytest.approx(by_hand, rel=1e-12)
    assert found.host_s == 0.0 and found.scatter == pytest.approx(0.03, abs=0.05)
    trained = Timer(device=HERE).cost(node)
    assert trained.host_s == HERE.issue_s and "cpu_exp" not in trained.basis
    huge = TensorType((4096, 4096), "fp32")
    assert "cpu_exp" not in FusedTimer(device=HERE, recorded=False).cost(node_of("exp", huge, out=huge)).basis


def test_products_read_what_no_cache_holds_from_beyond() -> None:
    nodes = Nodes()
    shapes = {"self": (4, 512), "mat2": (512, 256)}
    given = {name: nodes.source("input", name, TensorType(shape, "fp32")) for name, shape in shapes.items()}
    node = nodes.apply("mm", given, outputs=[TensorType((4, 256), "fp32")])
    known, moved = curve("cpu_product"), 4 * (4 * 512 + 512 * 256 + 4 * 256)
    warm, half = (FusedTimer(device=HERE, recorded=False, working_bytes=w).cost(node).seconds
                  for w in (1.0, 2 * known["cache_bytes"]))  # fmt: skip
    cold = FusedTimer(device=HERE, recorded=False).cost(node).seconds
    assert half - warm == pytest.approx(moved / 2 / known["far_Bps"])
    assert cold - warm == pytest.approx(moved / known["far_Bps"])


CONVOLVED = [
    ((1, 16, 28, 28), 3, 1, "additive"), ((1, 32, 28, 28), 3, 1, "blocked"), ((8, 64, 28, 28), 1, 1, "additive"),
    ((2, 16, 14, 14), 3, 1, "blocked"), ((16, 64, 7, 7), 1, 1, "blocked"), ((1, 16, 14, 14), 3, 2, "additive"),
]  # fmt: skip


@pytest.mark.parametrize(("size", "kernel", "dilation", "basis"), CONVOLVED)
def test_small_convolutions_are_unfolded_and_large_ones_are_the_library_s(size, kernel, dilation, basis) -> None:
    module = nn.Conv2d(size[1], 24, kernel, dilation=dilation, bias=False).eval()
    flow = trace(module, (R(size),)).flow
    prices, known = Prices(timer_for(flow, HERE)), curve("cpu_unfolded")
    found = next(cost for node in flow.order if (cost := prices.cost(flow, node)) is not None)
    assert basis in found.basis
    if basis == "additive":
        images, channels, side = size[0], size[1], size[2] - dilation * (kernel - 1)
        columns = images * side**2 * channels * kernel**2
        moved = 4 * (math.prod(size) + images * side**2 * 24 + 24 * channels * kernel**2)
        by_hand = known["latency_s"] + 2 * columns * 24 / known["matrix_flops_per_s"] + moved / known["memory_Bps"]
        by_hand += columns * (kernel > 1) / known["vector_flops_per_s"]
        assert found.seconds == pytest.approx(by_hand)


def test_other_types_and_reductions_over_rows_have_no_such_time() -> None:
    half = TensorType((64, 32), "bf16")
    for node in (node_of("exp", half, out=half), node_of("sum", F32, out=TensorType((32,), "fp32"), dim=(0,))):
        assert direct_call(node, work_of(node), math.inf) is None
    assert (
        direct_call(node_of("sum", F32, out=TensorType((64,), "fp32"), dim=(1,)), Work(family="map"), 1.0) is not None
    )


def test_fusing_saves_traffic_and_calls_but_no_arithmetic() -> None:
    nodes = Nodes()
    x, y = (nodes.source("input", name, F32) for name in "xy")
    e = nodes.apply("exp", {"self": x}, outputs=[F32])
    m = nodes.apply("mul", {"self": e.value(), "other": y}, outputs=[F32])
    timer, two, exp = FusedTimer(device=HERE, recorded=False), curve("cpu_two"), curve("cpu_exp")
    found = timer.cost(fuse(nodes, [e, m], [m])).seconds
    moved = 2048 * 4
    assert found < timer.cost(e).seconds + timer.cost(m).seconds
    saved = timer.cost(e).seconds + timer.cost(m).seconds - found
    assert saved == pytest.approx(exp["latency_s"] + (timer.measured_s("cpu_two", 2 * moved) - two["latency_s"]))


def test_a_convolution_in_a_fused_kernel_has_the_latency_of_its_curve() -> None:
    """Curves of convolutions and of products take sizes that those of maps do not."""
    timer = FusedTimer(device=HERE, recorded=False)
    for name in ("cpu_convolution", "cpu_unfolded", "cpu_product", "cpu_products", "cpu_attention"):
        assert timer.measured_s(name) == pytest.approx(curve(name)["latency_s"]), name
    module = torch.nn.Sequential(*(layer for _ in range(2) for layer in (torch.nn.Conv2d(8, 8, 3), torch.nn.ReLU())))
    found = apply_passes(trace(module.eval(), (R(4, 8, 20, 20),)).flow, HERE)
    assert found.prices.table(found.after).totals.step_s > 0


def test_what_is_only_removed_is_a_gain_for_certain() -> None:
    """Folding a batch norm leaves the same convolution with other weights: its doubt is that of both graphs alike."""
    module = torch.nn.Sequential(torch.nn.Conv2d(64, 64, 3, padding=1, bias=False), torch.nn.BatchNorm2d(64))
    flow = trace(module.eval(), (R(1, 64, 14, 14),)).flow
    (step,) = [step for step in apply_passes(flow, HERE).steps if "norm" in step.name]
    assert step.applied and 0 < step.change.band_s[0] < step.change.gain_s
