"""Times of operators, sums over programs and metrics of graphs, on hand-made programs."""

import dataclasses

import numpy as np
import pytest

from steptime.captured.cost import Timer, cost_table, table_metrics
from steptime.captured.cost.timing import fitted, work_of
from steptime.captured.graph import Call, Nodes, Program, TensorType
from steptime.cost.host import issued_s
from steptime.errors import UserError
from steptime.estimate.further_kernels import machine_for
from steptime.estimate.kernels import memory_timed, timed
from steptime.estimate.layer import FORWARD, phase_time
from steptime.hardware.library import load_device
from steptime.hardware.records import Curve, Profile
from steptime.plan.plans import Plans
from steptime.plan.rows import Row

WIDTH, ROWS_ = 4096, 8192


def tensor(*shape, dtype="bf16"):
    return TensorType(shape, dtype)


def chain(nodes, layers=2, dtype="bf16"):
    """Layers of a product and a GELU; returns the pairs of nodes and the last value."""
    x = nodes.source("input", "x", tensor(ROWS_, WIDTH, dtype=dtype))
    made = []
    for layer in range(layers):
        w = nodes.source("parameter", f"w{layer}", tensor(WIDTH, WIDTH, dtype=dtype))
        mm = nodes.apply("mm", {"self": x, "mat2": w}, outputs=[tensor(ROWS_, WIDTH, dtype=dtype)])
        gelu = nodes.apply("gelu", {"self": mm.value()}, outputs=[tensor(ROWS_, WIDTH, dtype=dtype)])
        x = gelu.value()
        made.append((mm, gelu))
    return made, x


def program(layers=2, recomputed=False, strange=False, dtype="bf16"):
    """The chain forward, and its products once more in the backward pass."""
    nodes = Nodes()
    made, last = chain(nodes, layers, dtype)
    calls = []
    for i, (mm, gelu) in enumerate(made):
        calls += [Call(mm, "forward", f"layers.{i}.fc", (), ()), Call(gelu, "forward", f"layers.{i}.act", (), ())]
    view = nodes.apply("view", {"self": last}, outputs=[tensor(ROWS_ * WIDTH, dtype=dtype)])
    calls.append(Call(view, "forward", "", (), (), view=True))
    if strange:
        odd = nodes.apply("mystery", {"self": last}, outputs=[tensor(ROWS_, WIDTH, dtype=dtype)])
        calls.append(Call(odd, "forward", "", (), ()))
    for i, (mm, _) in enumerate(made):
        calls.append(Call(mm, "backward", f"layers.{i}.fc", (), (), recomputed=recomputed))
    return Program(name="chain", calls=tuple(calls), storages=())


H100 = load_device("h100-sxm")
PRODUCT = 2 * ROWS_ * WIDTH * WIDTH


def test_a_product_takes_as_long_as_the_same_row_of_the_analytic_estimate():
    machine = machine_for(H100, "bf16", calibrated=True)
    made, _ = chain(Nodes())
    sizes = {"m": float(ROWS_), "n": float(WIDTH), "k": float(WIDTH), "accumulate": 1.0, "element_bytes": 2.0}
    row = Row(block="mlp", name="fc", operator="matmul", shape={**sizes, "output_passes": 1.0})
    both = phase_time(row, FORWARD, Plans(), machine)
    cost = Timer(device=H100).cost(made[0][0])
    assert cost.seconds == both.total_s
    assert cost.work.matrix_flops == both.matrix_flops == PRODUCT
    assert cost.work.moved_bytes == both.moved_bytes
    assert "gemm bf16" in cost.basis


def test_a_product_without_curves_is_on_the_same_roofline_as_the_analytic_estimate():
    machine = machine_for(H100, "bf16", calibrated=False)
    made, _ = chain(Nodes())
    cost = Timer(device=H100, calibrated=False).cost(made[0][0])
    assert cost.seconds == pytest.approx(H100.kernel_latency_s + PRODUCT / machine.matrix_flops_per_s)
    assert (cost.bound, cost.basis, cost.peak_flops_per_s) == ("matrix", "roofline", H100.matrix_flops_per_s["bf16"])


def test_maps_and_norms_take_the_curves_of_the_analytic_estimate():
    models = machine_for(H100, "bf16", calibrated=True).models
    nodes = Nodes()
    x = nodes.source("input", "x", tensor(512, 1024))
    w = nodes.source("parameter", "w", tensor(1024))
    stats = [tensor(512, 1024), tensor(512, 1), tensor(512, 1)]
    norm = nodes.apply("native_layer_norm", {"input": x, "weight": w, "bias": w}, {"normalized_shape": (1024,)},
                       outputs=stats)  # fmt: skip
    shape = {"elements": 524288.0, "rows": 512.0, "width": 1024.0, "element_bytes": 2.0}
    same = memory_timed(models, "layer_norm", shape, backward=False)
    assert Timer(device=H100).cost(norm).seconds == same.seconds
    add = nodes.apply("add", {"self": x, "other": x}, outputs=[tensor(512, 1024)])
    moved = memory_timed(models, "move", {"read_bytes": 2.0**20, "written_bytes": 2.0**20}, backward=False)
    assert Timer(device=H100).cost(add).seconds == moved.seconds
    assert timed(models, "layer_norm", shape, {}, backward=False) == same


def layer_norm_backward(nodes):
    x, w = nodes.source("input", "x", tensor(512, 1024)), nodes.source("parameter", "w", tensor(1024))
    return nodes.apply("native_layer_norm_backward", {"grad_out": x, "input": x, "weight": w},
                       {"normalized_shape": (1024,)}, outputs=[tensor(512, 1024)])  # fmt: skip


def lstm(nodes):
    x, w = nodes.source("input", "x", tensor(25, 64, 512)), nodes.source("parameter", "w", tensor(2048, 512))
    return nodes.apply("mkldnn_rnn_layer", {"input": x, "weight0": w}, {"mode": 2, "hidden_size": 512},
                       outputs=[tensor(25, 64, 512)])  # fmt: skip


@pytest.mark.parametrize("made", [layer_norm_backward, lstm])
def test_a_curve_of_an_operator_has_all_its_launches(made):
    """The runs that it was fitted to were timed whole; only streams are of one kernel each."""
    node = made(Nodes())
    work, machine = work_of(node), machine_for(H100, "bf16", calibrated=True)
    assert work.launches > len(work.kernels)
    expected = sum(float(fitted(machine, kernel, {}).seconds) for kernel in work.kernels)
    assert Timer(device=H100).cost(node).seconds == pytest.approx(expected)


def test_kernels_beyond_the_stream_of_an_operator_are_launched_too():
    nodes = Nodes()
    x = nodes.source("input", "x", tensor(512, 1024))
    part = nodes.apply("select_backward", {"grad_output": x}, {"dim": 0, "index": 0}, outputs=[tensor(4, 512, 1024)])
    machine = machine_for(H100, "bf16", calibrated=True)
    (kernel,) = work_of(part).kernels
    expected = float(fitted(machine, kernel, {}).seconds) + machine.kernel_latency_s
    assert Timer(device=H100).cost(part).seconds == pytest.approx(expected)


def test_a_measured_machine_takes_its_own_curves():
    def curve(family, **values):
        return Curve(family=family, dtype="fp32", coefficients=values, points=9, median_ape=0.1, mean_ape=0.1, bias=0.0,
                     band=(0.9, 1.1), source="bench")  # fmt: skip

    curves = (curve("linear/gelu", latency_s=1e-6, rate_per_s=1e9), curve("linear/add", latency_s=2e-6, rate_per_s=1e9))
    mine = dataclasses.replace(H100, name="mine", curves=Profile(device="mine", curves=curves))
    nodes = Nodes()
    x, y = (nodes.source("input", name, tensor(1000, dtype="fp32")) for name in "xy")
    gelu = nodes.apply("gelu", {"self": x}, outputs=[tensor(1000, dtype="fp32")])
    add = nodes.apply("add", {"self": x, "other": y}, outputs=[tensor(1000, dtype="fp32")])
    twice = nodes.apply("add", {"self": x, "other": x}, outputs=[tensor(1000, dtype="fp32")])
    timer = Timer(device=mine)
    assert timer.cost(gelu).seconds == 1e-6 + 8e-6
    assert timer.cost(add).seconds == 2e-6 + 12e-6
    assert timer.cost(twice).basis == "roofline"


def test_elements_without_a_rate_run_at_that_of_another():
    made, _ = chain(Nodes())
    v100 = load_device("v100-sxm2-16gb")
    cost = Timer(device=v100).cost(made[0][0])
    assert (cost.dtype, cost.peak_flops_per_s) == ("fp32", v100.matrix_flops_per_s["fp32"])
    bare = dataclasses.replace(v100, name="bare", matrix_flops_per_s={"int8": 1e12})
    with pytest.raises(UserError, match="bare has no matrix rate for bf16"):
        Timer(device=bare).cost(made[0][0])


def test_tf32_for_convolutions_only_unless_asked():
    made, _ = chain(Nodes(), dtype="fp32")
    times = {tf32: Timer(device=H100, tf32=tf32).cost(made[0][0]) for tf32 in ("none", "convolutions", "all")}
    assert [times[name].dtype for name in times] == ["fp32", "fp32", "tf32"]
    assert times["all"].seconds < times["none"].seconds / 2


def test_convolutions_take_their_curve_where_there_is_one():
    def cost(device, dtype):
        nodes = Nodes()
        x, w = nodes.source("input", "x", tensor(8, 64, 56, 56, dtype=dtype)), tensor(64, 64, 3, 3, dtype=dtype)
        inputs = {"input": x, "weight": nodes.source("parameter", "w", w)}
        attributes = {"stride": (1, 1), "padding": (1, 1), "transposed": False, "groups": 1}
        conv = nodes.apply("convolution", inputs, attributes, outputs=[tensor(8, 64, 56, 56, dtype=dtype)])
        return Timer(device=load_device(device)).cost(conv)

    assert cost("v100-sxm2-16gb", "fp32").basis.startswith("fitted curve conv_fwd fp32")
    assert cost("h100-sxm", "bf16").basis.startswith("curve carried over from v100-sxm2-16gb: conv_fwd bf16")
    assert cost("mi300x", "bf16").basis == "roofline"
    assert cost("h100-sxm", "bf16").band[1] >= 2.0


def test_sums_by_module_operator_phase_and_bound_agree_with_the_whole():
    table = cost_table(program(), Timer(device=H100))
    totals = table.totals
    assert totals.executed_flops == totals.model_flops == 4 * PRODUCT
    for groups in (table.by_operator(), table.by_phase(), table.by_bound(), table.by_basis()):
        assert sum(group.seconds for group in groups) == pytest.approx(totals.device_s)
        assert sum(group.moved_bytes for group in groups) == totals.moved_bytes
        assert sum(group.calls for group in groups) == table.coverage.calls == 6
    assert [(group.name, group.calls) for group in table.by_phase()] == [("forward", 4), ("backward", 2)]
    few = dataclasses.replace(table.program, calls=table.program.calls[-2:] + table.program.calls[:1])
    assert [group.name for group in cost_table(few, table.timer).by_phase()] == ["forward", "backward"]
    assert {group.name: group.flops for group in table.by_operator()} == {"mm": 4 * PRODUCT, "gelu": 0.0}
    assert table.seconds[4] == table.moved_bytes[4] == 0  # the view
    assert np.all(table.launches[:4] == 1)


def test_modules_roll_up_into_a_tree():
    table = cost_table(program(strange=True), Timer(device=H100))
    tree = {group.name: group for group in table.by_module(1)}
    assert list(tree) == ["(model)", "layers", "layers.0", "layers.1", "(loss)"]
    assert tree["(model)"].flops == tree["layers"].flops == 4 * PRODUCT
    assert (tree["layers.0"].calls, tree["layers.0"].depth) == (3, 2)
    inside = table.totals.device_s - tree["(loss)"].seconds
    assert tree["layers"].seconds == pytest.approx(inside)
    folded = {group.name: group for group in table.by_module(2, folded=True)}
    assert list(folded)[:5] == ["(model)", "layers", "layers.*", "layers.*.fc", "layers.*.act"]
    assert folded["layers.*"].seconds == pytest.approx(inside)
    assert folded["layers.*.fc"].calls == 4


def test_recomputed_calls_count_for_hfu_only():
    plain = cost_table(program(), Timer(device=H100)).totals
    again = cost_table(program(recomputed=True), Timer(device=H100)).totals
    assert plain.mfu == plain.hfu == again.hfu
    assert again.mfu == pytest.approx(again.hfu / 2)
    assert plain.hfu == pytest.approx(4 * PRODUCT / plain.step_s / H100.matrix_flops_per_s["bf16"])


def test_the_host_bounds_a_step_of_small_kernels():
    table = cost_table(program(), Timer(device=H100, given_host_s=1.0))
    totals = table.totals
    assert (totals.launches, totals.host_s) == (6, 6.0)
    assert totals.bracket_s == (6.0, 6.0 + totals.device_s)
    assert totals.step_s == issued_s(totals.device_s, 1.0, 6.0) == pytest.approx(6.0)
    assert totals.mfu < 1e-3
    lists = Nodes()
    many = [lists.source("parameter", f"p{i}", tensor(4)) for i in range(100)]
    add = lists.apply("_foreach_add", {"self": many, "other": many}, outputs=[tensor(4)] * 100)
    assert Timer(device=H100, given_host_s=1.0, host_more_s=0.1).cost(add, inplace=True).host_s == 1.1
    free = cost_table(program(), Timer(device=H100, given_host_s=0.0)).totals
    assert free.step_s == free.device_s == free.bracket_s[0] == free.bracket_s[1]


def test_the_band_holds_the_step_and_is_wider_without_curves():
    fitted, bare = (cost_table(program(), Timer(device=H100, calibrated=c)).totals for c in (True, False))
    for totals in (fitted, bare):
        low, high = totals.band_s
        assert low < totals.step_s < high
    assert bare.band_s[1] / bare.step_s > fitted.band_s[1] / fitted.step_s


def test_unknown_operators_are_named_with_their_share_of_the_traffic():
    table = cost_table(program(strange=True), Timer(device=H100))
    (unknown,) = table.coverage.unknown
    moved = 2 * ROWS_ * WIDTH * 2
    assert (unknown.op, unknown.calls) == ("mystery", 1)
    assert unknown.share_of_bytes == pytest.approx(moved / table.totals.moved_bytes)
    assert table.coverage.known_share_of_bytes == pytest.approx(1 - unknown.share_of_bytes)
    assert table.coverage.known_share_of_calls == pytest.approx(6 / 7)
    assert {group.name: group.seconds for group in table.by_operator()}["mystery"] > 0
    assert cost_table(program(), Timer(device=H100)).coverage.unknown == ()


def test_equal_nodes_are_timed_once():
    timer = Timer(device=H100)
    table = cost_table(program(layers=50), timer)
    assert len(timer._costs) == 2
    assert len(table.kinds) == 3  # with what costs nothing
    assert len(table.seconds) == 151


def test_draws_of_random_numbers_are_timed_once():
    nodes, timer = Nodes(), Timer(device=H100)
    x = nodes.source("input", "x", tensor(64, 64))
    for draw in range(3):
        timer.cost(nodes.apply("bernoulli", {"self": x}, {"p": 0.1, "draw": draw}, outputs=[tensor(64, 64)]))
    assert len(timer._costs) == 1


def test_metrics_of_a_program_have_the_time_of_the_step():
    table = cost_table(program(), Timer(device=H100, given_host_s=1.0))
    metrics = table_metrics(table)
    assert metrics.seconds == table.totals.step_s
    assert metrics.flops == table.totals.executed_flops + table.totals.vector_flops


def test_the_record_is_plain_values():
    record = cost_table(program(strange=True), Timer(device=H100)).as_record()
    assert record["totals"]["executed_flops"] == 4 * PRODUCT
    assert record["coverage"]["unknown"][0]["op"] == "mystery"
    assert [group["name"] for group in record["by_phase"]] == ["forward", "backward"]


@pytest.mark.each("device", ["v100-sxm2-16gb", "v100-pcie-16gb", "titan-v"])
def test_products_that_winograd_saves_are_not_utilisation(device: str) -> None:
    """A convolution of three by three in fp32 is faster than the peak for what is counted, and not for what runs."""
    nodes = Nodes()
    images, weights = tensor(64, 256, 56, 56, dtype="fp32"), tensor(256, 256, 3, 3, dtype="fp32")
    given = {"input": nodes.source("input", "x", images), "weight": nodes.source("parameter", "w", weights)}
    attributes = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1, "transposed": False}
    node = nodes.apply("convolution", given, attributes, outputs=[images])
    calls = (Call(node, "forward", "", (), ()), Call(node, "backward", "", (), (), recomputed=True))
    table = cost_table(Program(name="one", calls=calls, storages=()), Timer(device=load_device(device)))
    found = table.totals
    counted = 2.0 * 64 * 56 * 56 * 256 * 256 * 9
    assert found.executed_flops == 2 * counted and found.model_flops == counted
    assert counted / (table.seconds[0] * table.kinds[0].peak_flops_per_s) > 1.3
    assert found.saved_flops == pytest.approx(2 * counted * (1 - 1 / 1.89228), rel=1e-5)
    assert 0.3 < found.mfu < found.hfu < 1.0
