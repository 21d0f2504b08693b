"""Convolutions by hand: sizes, work, times of the three passes; as tables, graphs and measured machines see them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from steptime.captured.cost import Timer
from steptime.captured.cost.timing import work_of
from steptime.captured.graph import Nodes, TensorType
from steptime.cost.convolution import (
    channelwise,
    channelwise_s,
    convolution_flops,
    convolution_s,
    implicit_product,
    output_size,
)
from steptime.cost.regression import blocked_convolution_s
from steptime.errors import UserError
from steptime.estimate.further_kernels import (
    CURVES,
    alone,
    convolved_in,
    further_models,
    machine_for,
    with_further_models,
    with_usual_convolutions,
)
from steptime.estimate.kernels import NAMED, KernelModel, timed
from steptime.estimate.machine import machine_of
from steptime.estimate.measured import CONVOLVED
from steptime.hardware import load_device
from steptime.hardware.records import Curve, Device, Profile
from steptime.measure.machine import profile, work
from steptime.measure.machine.cluster_file import kernel_rows
from steptime.measure.machine.linear import MODELS
from steptime.measure.machine.runner import Measured
from steptime.measure.machine.work import Task
from steptime.measure.table import Table
from steptime.plan.job import PRECISIONS
from steptime_lab.calibrate import kernel_families as families

# --- the formulas


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "padding", "out"),
    [(7, 3, 2, 0, 3), (8, 3, 2, 0, 3), (8, 3, 2, 1, 4), (8, 1, 2, 0, 4), (5, 5, 1, 2, 5), (2, 5, 1, 0, 1),
     (9, 3, 3, 0, 3)],
)  # fmt: skip
def test_an_output_has_a_pixel_for_every_place_of_the_kernel(
    size: int, kernel: int, stride: int, padding: int, out: int
) -> None:
    assert output_size(size, kernel, stride, padding) == out
    places = range(-padding, size + padding - kernel + 1, stride)
    assert out == max(len(places), 1)


def test_operations_are_those_of_the_loops() -> None:
    """Two for each image, pixel, channel in, channel out and tap."""
    loops = sum(2 for _ in range(2) for _ in range(3) for _ in range(5) for _ in range(7) for _ in range(9))
    assert convolution_flops(2, 3, 5, 7, 9) == loops == 3780


def test_groups_stand_below_one_another() -> None:
    assert implicit_product(50, 2, 4, 9, 4) == (200, 4, 18)
    rows, columns, depth = implicit_product(50, 2, 4, 9, 4)
    assert 2 * rows * columns * depth == 4 * convolution_flops(1, 50, 2, 4, 9), "each group is a convolution"


def test_single_channels_are_no_product() -> None:
    assert [channelwise(*sizes) for sizes in ((1, 1, 8), (1, 2, 8), (2, 1, 8), (2, 2, 8), (1, 8, 1), (8, 1, 1))] == [
        1, 1, 1, 0, 0, 0,
    ]  # fmt: skip
    assert channelwise(np.array([1, 2]), np.array([4, 4]), np.array([2, 2])).tolist() == [1, 0]  # type: ignore[union-attr]


HAND: Mapping[str, float] = {
    "rows": 100, "columns": 40, "depth": 30, "moved_bytes": 12e9, "winograd_taps": 0, "matrix_flops_per_s": 2.0**20,
    "memory_Bps": 8e9, "sm_count": 4, "launch_s": 0.25, "efficiency": 0.5, "memory_efficiency": 0.75, "tail": 0.5,
    "tile": 64, "start_depth": 2, "winograd": 1.5,
}  # fmt: skip
"""128 x 64 padded, 32 deep: 2^19 operations at 2^19 a second; two blocks on four processors last half as long again;
12 GB at 6 GB/s."""


@pytest.mark.each(
    ("changed", "compute_s", "memory_s"),
    [
        ({}, 1.5, 2.0),
        ({"winograd_taps": 1}, 1.0, 2.0),
        ({"winograd": 2.25}, 1.5, 2.0),
        ({"rows": 128}, 1.5, 2.0),
        ({"rows": 129}, 1.25 * (1 + 0.5 * (4 / 3 - 1)), 2.0),
        ({"columns": 65}, 1.5 * 1.0, 2.0),
        ({"start_depth": 34}, 3.0, 2.0),
        ({"tail": 0.0}, 1.0, 2.0),
        ({"tail": 1.0}, 2.0, 2.0),
        ({"sm_count": 2}, 1.0, 2.0),
        ({"efficiency": 0.25}, 3.0, 2.0),
        ({"memory_efficiency": 0.375}, 1.5, 4.0),
        ({"moved_bytes": 0.0}, 1.5, 0.0),
    ],
)
def test_time_of_an_implicit_product_by_hand(changed: dict[str, float], compute_s: float, memory_s: float) -> None:
    expected = 0.25 + math.cbrt(compute_s**3 + memory_s**3)
    assert convolution_s(**{**HAND, **changed}) == pytest.approx(expected, rel=1e-12)


BLOCKED = {"latency_s": 0.5, "flops_per_s": 64e3, "vector_flops_per_s": 40e3, "memory_Bps": 1e6}


@pytest.mark.parametrize(
    ("columns", "channelwise", "seconds"),
    [(16, 0, 0.5 + 0.5 + 2), (20, 0, 0.5 + 1.0 + 2), (32, 0, 0.5 + 1.0 + 2), (33, 0, 0.5 + 1.5 + 2),
     (1, 0, 0.5 + 0.5 + 2), (20, 1, 0.5 + 1.0 + 2), (1, 1, 0.5 + 0.05 + 2)],
)  # fmt: skip
def test_channels_in_blocks_of_sixteen_by_hand(columns: int, channelwise: int, seconds: float) -> None:
    """2 x 100 rows x 10 deep: 2,000 operations a column; 2 MB at 1 MB/s."""
    found = blocked_convolution_s(100, columns, 10, 2e6, channelwise, **BLOCKED)
    assert found == pytest.approx(seconds, rel=1e-12)


# --- as a table of kernels has them


def row(**changed: float) -> Table:
    shape = {"batch": 2, "conv_cin": 3, "conv_cout": 8, "conv_kh": 3, "conv_kw": 5, "conv_h": 9, "conv_w": 13,
             "conv_stride": 2, "conv_pad": 1, **changed}  # fmt: skip
    numbers = {name: np.array([float(value)]) for name, value in shape.items()}
    return Table({**numbers, "dtype": np.array(["fp32"], dtype=object)})


def plain(shape: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(np.asarray(value).reshape(-1)[0]) for name, value in shape.items()}


def test_the_three_passes_of_a_row() -> None:
    """Five by six pixels of two images; 702 numbers in, 480 out, 360 weights."""
    common = {"moved_bytes": 4.0 * (702 + 480 + 360), "winograd_taps": 0.0, "rows": 60.0}
    made = {"columns": 8.0, "depth": 45.0}
    assert plain(families.forward(row())) == {**common, **made}
    assert plain(families.weight_gradient(row())) == {**common, **made}
    assert plain(families.data_gradient(row())) == {**common, "columns": 3.0, "depth": 120.0}


@pytest.mark.parametrize(
    ("changed", "saved"),
    [({"conv_kw": 3, "conv_stride": 1}, 1.0), ({"conv_kw": 3}, 0.0), ({"conv_stride": 1}, 0.0),
     ({"conv_kw": 3, "conv_kh": 5, "conv_stride": 1}, 0.0)],
)  # fmt: skip
def test_winograd_is_for_three_by_three_at_stride_one(changed: dict[str, float], saved: float) -> None:
    assert plain(families.forward(row(**changed)))["winograd_taps"] == saved


# --- as a graph has them


def tensor(*shape: int) -> TensorType:
    return TensorType(shape, "fp32")


def convolved(groups: int = 4, stride: int = 2, mask: tuple[bool, bool, bool] | None = None) -> Any:
    """A forward pass, or with ``mask`` the gradients, of two images of ten by ten pixels and 8 channels to 16."""
    side = 10 if stride == 1 else 5
    x, w, y = tensor(2, 8, 10, 10), tensor(16, 8 // groups, 3, 3), tensor(2, 16, side, side)
    nodes = Nodes()
    inputs = {"input": nodes.source("input", "x", x), "weight": nodes.source("parameter", "w", w)}
    attributes: dict[str, Any] = {
        "stride": (stride,) * 2, "padding": (1, 1), "dilation": (1, 1), "transposed": False, "output_padding": (0, 0),
        "groups": groups,
    }  # fmt: skip
    if mask is None:
        return nodes.apply("convolution", inputs, attributes, outputs=[y])
    inputs = {"grad_output": nodes.source("input", "dy", y), **inputs}
    outputs = [one for one, wanted in zip((x, w), mask, strict=False) if wanted]
    return nodes.apply("convolution_backward", inputs, {**attributes, "output_mask": mask}, outputs=outputs)


BOTH = (True, True, False)
BYTES = 4.0 * (1600 + 800 + 288)


def products(node: Any) -> dict[str, tuple[float, ...]]:
    names = ("rows", "columns", "depth", "tensor_bytes", "channelwise", "winograd_taps")
    return {call.operator: tuple(float(call.shape[name]) for name in names) for call in work_of(node).kernels}


def test_the_three_passes_of_a_node() -> None:
    """Four groups of 2 channels to 4; 25 pixels of two images."""
    assert products(convolved()) == {"conv_fwd": (200, 4, 18, BYTES, 0, 0)}
    assert products(convolved(mask=BOTH)) == {
        "conv_bwd_data": (200, 2, 36, BYTES, 0, 0), "conv_bwd_weight": (200, 4, 18, BYTES, 0, 0),
    }  # fmt: skip
    assert products(convolved(mask=(False, True, False))) == {"conv_bwd_weight": (200, 4, 18, BYTES, 0, 0)}


def test_single_channels_and_winograd_of_a_node() -> None:
    assert products(convolved(groups=8))["conv_fwd"][-2:] == (1, 0)
    assert products(convolved(groups=1, stride=1))["conv_fwd"][-2:] == (0, 1)
    assert products(convolved(groups=1, stride=1)) == {"conv_fwd": (200, 16, 72, 4.0 * (1600 + 3200 + 1152), 0, 1)}
    assert products(convolved(groups=4, stride=1))["conv_fwd"][-2:] == (0, 0)


@pytest.mark.parametrize("mask", [None, BOTH])
def test_products_do_the_work_of_the_node(mask: tuple[bool, bool, bool] | None) -> None:
    node = convolved(mask=mask)
    assert sum(2 * m * n * k for m, n, k, *_ in products(node).values()) == work_of(node).matrix_flops


# --- on a machine that measured them


def curve(kind: str, dtype: str = "fp32", **values: float) -> Curve:
    return Curve(
        family=f"blocked_convolution/{kind}", dtype=dtype, coefficients={**BLOCKED, **values}, points=30,
        median_ape=0.1, mean_ape=0.1, bias=0.0, band=(0.8, 1.2), source="bench",
    )  # fmt: skip


def timer(*curves: Curve) -> Timer:
    cpu = dataclasses.replace(load_device("h100-sxm"), name="mine", matrix_flops_per_s={"fp32": 1e11, "bf16": 1e12})
    return Timer(device=dataclasses.replace(cpu, curves=Profile(device="mine", curves=curves)))


def test_a_measured_machine_times_each_pass_by_its_own_curve() -> None:
    known = timer(curve("conv_fwd"), curve("conv_bwd_data", latency_s=1.0), curve("conv_bwd_weight", latency_s=2.0))
    forward = 2 * 200 * 18 * 16 / 64e3 + BYTES / 1e6
    cost = known.cost(convolved())
    assert cost.seconds == pytest.approx(0.5 + forward)
    assert cost.basis.startswith("fitted curve blocked_convolution/conv_fwd fp32") and cost.band == (0.8, 1.2)
    data = 2 * 200 * 36 * 16 / 64e3 + BYTES / 1e6
    assert known.cost(convolved(mask=BOTH)).seconds == pytest.approx(1.0 + data + 2.0 + forward)
    assert known.cost(convolved(mask=(False, True, False))).seconds == pytest.approx(2.0 + forward)
    alone = 2 * 400 * 9 * 2 / 40e3 + 4.0 * (1600 + 800 + 144) / 1e6
    assert known.cost(convolved(groups=8)).seconds == pytest.approx(0.5 + alone), "two outputs of every channel"


def test_machines_that_measured_no_convolutions_keep_the_roofline() -> None:
    """Profiles of earlier versions, and dtypes in which they are emulated."""
    assert timer().cost(convolved()).basis == "roofline"
    assert timer(curve("conv_fwd", "bf16")).cost(convolved()).basis == "roofline"
    assert timer(curve("conv_fwd")).cost(convolved(mask=BOTH)).basis == "roofline"


def test_a_curve_of_convolutions_without_a_coefficient_is_named() -> None:
    short = dataclasses.replace(curve("conv_fwd"), coefficients={"latency_s": 1e-6})
    with pytest.raises(UserError, match="blocked_convolution/conv_fwd fp32 of mine lacks the coefficient flops_per_s"):
        timer(short).cost(convolved())


# --- as a calibration measures them

SHAPE = {"batch": 2, "channels_in": 8, "channels_out": 16, "side": 10, "kernel": 3, "stride": 2, "groups": 4}


def test_a_task_is_the_node_that_it_stands_for() -> None:
    node = {**products(convolved()), **products(convolved(mask=BOTH))}
    names = ("rows", "columns", "depth", "tensor_bytes", "channelwise")
    for kind in CONVOLVED:
        task = Task(kind=kind, dtype="fp32", shape=SHAPE)
        arguments = profile.arguments_of(task)
        assert tuple(arguments[name] for name in names) == node[kind][:5]
        done = work.work_of(task)
        assert done.matrix_flops == work_of(convolved()).matrix_flops
        assert done.result_bytes == 4 * {"conv_fwd": 800, "conv_bwd_data": 1600, "conv_bwd_weight": 288}[kind]


TASKS = [
    task for task in work.tasks(work.extent_of("cpu", True, 16e9), ("fp32", "bf16"), ("fp32",))
    if task.kind in CONVOLVED
]  # fmt: skip


def test_tasks_have_the_kernels_and_strides_of_nets() -> None:
    assert {task.dtype for task in TASKS} == {"fp32"}
    shapes = [task.shape for task in TASKS if task.kind == "conv_fwd"]
    assert {s["kernel"] for s in shapes} == {1, 3, 7} and {s["stride"] for s in shapes} == {1, 2}
    assert {s["groups"] for s in shapes} >= {1, 8} and any(s["groups"] == s["channels_in"] for s in shapes)
    assert max(s["channels_out"] for s in shapes) > 10 * min(s["channels_out"] for s in shapes)
    of_colours = {task.kind for task in TASKS if task.shape["channels_in"] == 3}
    assert of_colours == {"conv_fwd", "conv_bwd_weight"}, "images need no gradient"


def test_a_fit_finds_what_made_the_times() -> None:
    rows = [profile.arguments_of(task) for task in TASKS if task.kind == "conv_bwd_data"]
    shape = {name: np.array([r[name] for r in rows], float) for name in rows[0]}
    model = MODELS["blocked_convolution"]
    true = {"latency_s": 5e-5, "flops_per_s": 1e11, "vector_flops_per_s": 4e9, "memory_Bps": 5e9}
    seconds = np.asarray(model.predict(shape, true))
    seconds[::9] *= 3  # outliers
    assert model.fit(shape, seconds) == pytest.approx(true, rel=0.1)


def test_rows_of_a_table_leave_groups_out() -> None:
    """Tables of kernels have no column for them."""
    dense = {**SHAPE, "groups": 1}
    made = [Measured(task=Task(kind="conv_fwd", dtype="fp32", shape=s), seconds=1e-3, noise=0.0, visits=1, rejected=0)
            for s in (SHAPE, dense)]  # fmt: skip
    (found,) = kernel_rows(made, "mine", "cpu_thread_p25")
    table = Table({n: np.array([v], dtype=object if isinstance(v, str) else float) for n, v in found.items()})
    node = products(convolved(groups=1))["conv_fwd"]
    shape = plain(families.forward(table))
    assert (shape["rows"], shape["columns"], shape["depth"], shape["moved_bytes"]) == node[:4]


# --- on devices of the catalogue


@pytest.mark.each("device", ["h100-sxm", "v100-sxm2-16gb", "rtx-4090"])
@pytest.mark.each("kind", CONVOLVED)
def test_single_channels_are_timed_by_the_vector_units(device: str, kind: str) -> None:
    """Curves of products were fitted to no groups: they would pad a channel to 32."""
    known = load_device(device)
    node = convolved(groups=8) if kind == "conv_fwd" else convolved(groups=8, mask=BOTH)
    call = next(each for each in work_of(node).kernels if each.operator == kind)
    single = dict(call.shape) | {"channelwise": 1.0}
    machine = machine_for(known, "fp32", calibrated=True)
    expected = channelwise_s(
        single["rows"], single["columns"], single["depth"], single["moved_bytes"],
        known.peak_vector_flops_per_s * known.vector_efficiency, known.memory_Bps * known.memory_efficiency,
        known.kernel_latency_s,
    )  # fmt: skip
    found, other = (
        timed(machine.models, kind, shape, {}, backward=False)
        for shape in (single, single | {"channelwise": 0.0})
    )  # fmt: skip
    assert (
        found is not None
        and found.seconds == pytest.approx(expected)
        and found.model.basis == "curve assumed: depthwise fp32"
    )
    assert other is not None and other.model.formula.function is convolution_s


@pytest.mark.parametrize(
    ("device", "dtype", "expected"),
    [("h100-sxm", "fp32", "tf32"), ("rtx-4090", "fp32", "tf32"), ("v100-sxm2-16gb", "fp32", "fp32"),
     ("h100-sxm", "bf16", "bf16"), ("mi300x", "fp32", "tf32")],
)  # fmt: skip
def test_convolutions_run_in_the_faster_of_both_types(device: str, dtype: str, expected: str) -> None:
    """PyTorch lets those of fp32 run in TF32, and its library takes what is faster; a V100 has no TF32."""
    known = load_device(device)
    assert convolved_in(known, dtype) == expected
    if expected != dtype and "conv_fwd" in machine_for(known, dtype, calibrated=True).models:
        own, other = (machine_for(known, d, calibrated=True) for d in (dtype, expected))
        usual = with_usual_convolutions(own, known, PRECISIONS[dtype]).models["conv_fwd"]
        assert usual.fixed == other.models["conv_fwd"].fixed != own.models["conv_fwd"].fixed
        assert with_usual_convolutions(own, known, PRECISIONS[dtype]).models.keys() == own.models.keys()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_models_of_each_type_are_made_once(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    made: list[str] = []
    device, precision = load_device("h100-sxm"), PRECISIONS[dtype]
    plain = machine_of(alone(device), 1, precision, lone_rank_has_all_links=True, calibrated=True)

    def counted(of: Device, profile: Profile, name: str) -> dict[str, KernelModel]:
        made.append(name)
        return further_models(of, profile, name)

    monkeypatch.setattr("steptime.estimate.further_kernels.further_models", counted)
    with_usual_convolutions(with_further_models(plain, device, precision), device, precision)
    assert made == {"fp32": ["fp32", "tf32"], "bf16": ["bf16"]}[dtype]


@pytest.mark.parametrize(("tf32_flops_per_s", "expected"), [(4e12, "tf32"), (1e12, "fp32")])
def test_a_measured_gpu_compares_its_own_curves(tf32_flops_per_s: float, expected: str) -> None:
    rates = {"latency_s": 1e-5, "vector_flops_per_s": 1e12, "memory_Bps": 1e12}
    curves = (
        curve("conv_fwd", "fp32", flops_per_s=2e12, **rates),
        curve("conv_fwd", "tf32", flops_per_s=tf32_flops_per_s, **rates),
    )
    known = dataclasses.replace(load_device("h100-sxm"), name="mine", curves=Profile(device="mine", curves=curves))
    assert convolved_in(known, "fp32") == expected


def test_every_curve_of_a_captured_kernel_is_asked_for() -> None:
    assert set(CURVES) <= NAMED
