"""Batch norm and pooling of images by hand: their loops, and their times on machines that measured them or did not."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from steptime.captured.cost import Timer
from steptime.captured.cost.timing import work_of
from steptime.captured.graph import Nodes, TensorType
from steptime.cost.regression import short_loops_s
from steptime.errors import UserError
from steptime.estimate.further_kernels import machine_for
from steptime.estimate.kernels import KernelModel
from steptime.estimate.layer import BACKWARD, FORWARD, phase_time
from steptime.estimate.measured import FORMULAS, LOOPED, POOLS
from steptime.hardware import load_device
from steptime.hardware.records import Curve, Profile
from steptime.measure.machine import profile, work
from steptime.measure.machine.cluster_file import kernel_rows
from steptime.measure.machine.linear import FRESH_BYTES, MODELS
from steptime.measure.machine.runner import Measured
from steptime.measure.machine.work import Task, pooled_side
from steptime.plan.plans import Plans
from steptime.plan.rows import Row, Timing

# --- the formula

LOOPS = {"latency_s": 0.5, "loops_per_s": 100.0, "steps_per_s": 1e4, "memory_Bps": 1e6, "fresh_Bps": 4e6,
         "fresh_from_bytes": 2e6}  # fmt: skip


@pytest.mark.parametrize(
    ("loops", "steps", "moved", "result", "seconds"),
    [(0, 0, 0, 0, 0.5), (25, 0, 0, 0, 0.75), (0, 2500, 0, 0, 0.75), (0, 0, 3e6, 0, 3.5), (0, 0, 0, 1999999, 0.5),
     (0, 0, 0, 2e6, 1.0), (25, 2500, 3e6, 2e6, 4.5)],
)  # fmt: skip
def test_short_loops_by_hand(loops: int, steps: int, moved: float, result: float, seconds: float) -> None:
    assert short_loops_s(loops, steps, moved, result, **LOOPS) == pytest.approx(seconds, rel=1e-12)
    both = np.array([loops, loops]), np.array([steps, steps]), np.array([moved, moved]), np.array([result, 0.0])
    found = np.asarray(short_loops_s(*both, **LOOPS))
    assert found[0] == pytest.approx(seconds) and found[1] <= found[0], "arrays likewise"


# --- as a graph has them


def tensor(*shape: int, dtype: str = "fp32") -> TensorType:
    return TensorType(shape, dtype)


def made(op: str, inputs: dict[str, TensorType], outputs: list[TensorType], **attributes: Any) -> Any:
    nodes = Nodes()
    given = {name: nodes.source("input", name, type) for name, type in inputs.items()}
    return nodes.apply(op, given, attributes, outputs=outputs)


def normed(*shape: int, op: str = "native_batch_norm", **attributes: Any) -> Any:
    x, c = tensor(*shape), tensor(shape[1])
    parts = {"weight": c, "running_mean": c, "running_var": c}
    if op.endswith("_backward"):
        return made(op, {"grad_out": x, "input": x, **parts}, [x, c, c], **attributes)
    return made(op, {"input": x, **parts}, [x, c, c], **attributes)


X = tensor(2, 8, 10, 10)


def pooled(kind: str, kernel: int, out: int, stride: int = 2, **attributes: Any) -> Any:
    """Two images of ten by ten pixels and eight channels."""
    y, places = tensor(2, 8, out, out), tensor(2, 8, out, out, dtype="int64")
    window = {"kernel_size": (kernel,) * 2, "stride": (stride,) * 2, "padding": ((kernel - 1) // 2,) * 2, **attributes}
    if kind == "max_pool":
        return made("max_pool2d_with_indices", {"self": X}, [y, places], **window)
    if kind == "max_pool_backward":
        inputs = {"grad_output": y, "self": X, "indices": places}
        return made("max_pool2d_with_indices_backward", inputs, [X], **window)
    if kind == "avg_pool":
        return made("avg_pool2d", {"self": X}, [y], **window)
    return made("avg_pool2d_backward", {"grad_output": y, "self": X}, [X], **window)


NORM = normed(2, 8, 10, 10, training=True)
NORM_BACKWARD = normed(2, 8, 10, 10, op="native_batch_norm_backward", train=True)
ADAPTIVE = made("_adaptive_avg_pool2d", {"self": X}, [tensor(2, 8, 5, 5)], output_size=(5, 5))
ADAPTIVE_BACKWARD = made("_adaptive_avg_pool2d_backward", {"grad_output": tensor(2, 8, 5, 5), "self": X}, [X])


def loops(node: Any) -> tuple[Any, ...]:
    (call,) = work_of(node).kernels
    return (call.operator, *(call.shape.get(name) for name in ("loops", "steps", "moved_bytes", "result_bytes")))


@pytest.mark.each(
    ("node", "expected"),
    [
        (NORM, ("batch_norm", 16, 1600, 4 * (3 * 1600 + 4 * 8), 6400)),
        (NORM_BACKWARD, ("batch_norm_backward", 16, 1600, 4 * (5 * 1600 + 5 * 8), 6400)),
        (pooled("max_pool", 2, 5), ("max_pool", 400, 1600, 6400 + 400 * 12, 3200)),
        (pooled("max_pool", 3, 5), ("max_pool", 400, 3600, 6400 + 400 * 12, 3200)),
        (pooled("max_pool", 3, 10, 1), ("max_pool", 1600, 14400, 6400 + 1600 * 12, 12800)),
        (pooled("max_pool_backward", 3, 5), ("max_pool_backward", 400, 3600, 2 * 6400 + 400 * 12, 6400)),
        (pooled("avg_pool", 2, 5), ("avg_pool", 400, 1600, 6400 + 1600, 1600)),
        (pooled("avg_pool_backward", 3, 5), ("avg_pool_backward", 400, 3600, 2 * 6400 + 1600, 6400)),
        (ADAPTIVE, ("avg_pool", 400, 1600, 6400 + 1600, 1600)),
        (ADAPTIVE_BACKWARD, ("avg_pool_backward", 400, 1600, 2 * 6400 + 1600, 6400)),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else value.op,
)
def test_loops_of_a_node(node: Any, expected: tuple[Any, ...]) -> None:
    """16 planes of 100 pixels; 16 x 5 x 5 or 16 x 10 x 10 windows of four or nine taps; places of eight bytes."""
    assert loops(node) == expected


@pytest.mark.parametrize(
    "node",
    [
        normed(2, 8, 10, 10, training=False), normed(2, 8, 10, 10, op="native_batch_norm_backward", train=False),
        normed(2, 8, 10, 10, op="_native_batch_norm_legit_no_training"), normed(2, 8, training=True),
        normed(2, 8, 1, 1, training=True),
    ],
    ids=["frozen", "frozen_backward", "no_training", "no images", "one pixel"],
)  # fmt: skip
def test_other_batch_norms_are_timed_as_what_they_move(node: Any) -> None:
    """Statistics that are given, and rows of channels without pixels: other loops than those that are measured."""
    assert loops(node)[0] == "move"


# --- on a machine that measured them, and on others


def curve(family: str, dtype: str = "fp32", **values: float) -> Curve:
    return Curve(
        family=family, dtype=dtype, coefficients=values, points=30, median_ape=0.1, mean_ape=0.1, bias=0.0,
        band=(0.8, 1.2), source="bench",
    )  # fmt: skip


STREAM = {"latency_s": 1.0, "near_Bps": 1e5, "far_Bps": 1e5, "cache_bytes": 0.0, "fresh_Bps": 1e30,
          "fresh_from_bytes": 1e30}  # fmt: skip
UPDATE = curve("streaming/update", **STREAM)


def timer(*curves: Curve) -> Timer:
    cpu = dataclasses.replace(load_device("h100-sxm"), name="mine", matrix_flops_per_s={"fp32": 1e11, "bf16": 1e12})
    return Timer(device=dataclasses.replace(cpu, curves=Profile(device="mine", curves=curves)))


NODES = {"batch_norm": NORM, "batch_norm_backward": NORM_BACKWARD, **{kind: pooled(kind, 3, 5) for kind in POOLS}}


@pytest.mark.parametrize("kind", LOOPED)
def test_a_measured_machine_times_each_by_its_own_curve(kind: str) -> None:
    _, count, steps, moved, _ = loops(NODES[kind])
    others = [curve(f"short_loops/{other}", **LOOPS) for other in LOOPED if other != kind]
    known = timer(UPDATE, *others, curve(f"short_loops/{kind}", **{**LOOPS, "latency_s": 7.0}))
    cost = known.cost(NODES[kind])
    assert cost.seconds == pytest.approx(7.0 + count / 100 + steps / 1e4 + moved / 1e6)
    assert cost.basis.startswith(f"fitted curve short_loops/{kind} fp32") and cost.band == (0.8, 1.2)
    assert timer(UPDATE, curve(f"streaming/{kind}", **{**STREAM, "latency_s": 7.0})).cost(
        NODES[kind]
    ).seconds == pytest.approx(7.0 + moved / 1e5)


@pytest.mark.parametrize("kind", LOOPED)
def test_files_of_before_time_them_as_what_they_move(kind: str) -> None:
    """Profiles of earlier versions, and element types in which they were not measured."""
    for known in (timer(UPDATE), timer(UPDATE, curve(f"short_loops/{kind}", "bf16", **LOOPS))):
        cost = known.cost(NODES[kind])
        assert cost.basis.startswith("fitted curve streaming/update fp32")
        assert cost.seconds == pytest.approx(1.0 + loops(NODES[kind])[3] / 1e5)
    assert timer().cost(NODES[kind]).basis == "roofline"


@pytest.mark.parametrize("device", ["h100-sxm", "v100-sxm2-16gb", "mi300x"])
def test_devices_of_the_catalogue_time_them_as_what_they_move(device: str) -> None:
    known = Timer(device=load_device(device))
    for node in NODES.values():
        done = work_of(node)
        (call,) = done.kernels
        stream = {"read_bytes": done.moved_bytes, "written_bytes": 0.0}
        as_moved = dataclasses.replace(call, operator="move", shape=stream, backward=False)
        assert known.cost(node).seconds == known.time(node.op, dataclasses.replace(done, kernels=(as_moved,))).seconds


@pytest.mark.each("curves", [(), (UPDATE,), (UPDATE, "own"), ("own",)], ids=["none", "other", "both", "own"])
@pytest.mark.each("kind", LOOPED)
def test_plans_take_the_curve_that_profiles_take(kind: str, curves: tuple[Any, ...]) -> None:
    """A row of a captured module, and the operator that it was made of."""
    known = timer(*(curve(f"short_loops/{kind}", **LOOPS) if each == "own" else each for each in curves))
    done = work_of(NODES[kind])
    (call,) = done.kernels
    phase = BACKWARD if call.backward else FORWARD
    row = Row(
        name=kind, block="captured", operator=f"captured_pass_{phase}",
        shape={name: getattr(done, name) for name in ("matrix_flops", "vector_flops", "moved_bytes")},
        timing=Timing(operator=call.operator, backward=call.backward, shape=call.shape),
    )  # fmt: skip
    machine = machine_for(known.device, "fp32", calibrated=True)
    assert phase_time(row, phase, Plans(), machine).own_s == pytest.approx(known.cost(NODES[kind]).seconds)


def test_faster_units_run_faster_loops() -> None:
    found = curve("short_loops/max_pool", **LOOPS)
    model = KernelModel(formula=FORMULAS["short_loops"], fixed=found.coefficients, curve=found)
    fast = model.faster({"vector_flops_per_s": 2.0, "memory_Bps": 4.0})
    shape = {"loops": 100.0, "steps": 1e4, "moved_bytes": 1e6, "result_bytes": 4e6}
    assert (model.seconds(shape), fast.seconds(shape)) == (0.5 + 1 + 1 + 1 + 1, 0.5 + 0.5 + 0.5 + 0.25 + 0.25)


def test_a_curve_of_images_without_a_coefficient_is_named() -> None:
    short = curve("short_loops/max_pool", **{name: LOOPS[name] for name in LOOPS if name != "loops_per_s"})
    with pytest.raises(UserError, match="short_loops/max_pool fp32 of mine lacks the coefficient loops_per_s"):
        timer(short).cost(NODES["max_pool"])


# --- as a calibration measures them

IMAGES = {"batch": 2, "channels": 8, "side": 10}
TASKS = [
    task for task in work.tasks(work.extent_of("cpu", True, 16e9), ("fp32", "bf16"), ("fp32",)) if task.kind in LOOPED
]  # fmt: skip


@pytest.mark.each("window", [(2, 2, 5), (3, 2, 5), (3, 1, 10)])
@pytest.mark.each("kind", LOOPED)
def test_a_task_is_the_node_that_it_stands_for(kind: str, window: tuple[int, int, int]) -> None:
    kernel, stride, out = window
    node = pooled(kind, kernel, out, stride) if kind in POOLS else NODES[kind]
    shape = {**IMAGES, "kernel": kernel, "stride": stride} if kind in POOLS else IMAGES
    given = profile.arguments_of(Task(kind=kind, dtype="fp32", shape=shape))
    assert (kind, *(given[name] for name in ("loops", "steps", "moved_bytes", "result_bytes"))) == loops(node)
    assert given["vector_flops"] == work_of(node).vector_flops


def test_tasks_have_the_windows_and_sizes_of_nets() -> None:
    assert {task.dtype for task in TASKS} == {"fp32"}
    assert {task.kind for task in TASKS} == set(LOOPED)
    windows = {(task.shape["kernel"], task.shape["stride"]) for task in TASKS if task.kind == "max_pool"}
    assert windows == {(2, 2), (3, 2), (3, 1)}
    for kind in LOOPED:
        counts = [profile.arguments_of(task)["steps"] for task in TASKS if task.kind == kind]
        assert max(counts) > 50 * min(counts)
    assert all(pooled_side(task.shape) > 1 for task in TASKS if task.kind in POOLS)


def test_images_of_a_gpu_are_not_measured_in_tf32() -> None:
    found = work.tasks(work.extent_of("cuda", True, 80e9), ("fp32", "tf32"), ("fp32", "tf32"))
    assert {task.dtype for task in found if task.kind in LOOPED} == {"fp32"}


@pytest.mark.parametrize("kind", LOOPED)
def test_a_fit_finds_what_made_the_times(kind: str) -> None:
    rows = [profile.arguments_of(task) for task in TASKS if task.kind == kind]
    rows += [{**row, "result_bytes": 2.0 * FRESH_BYTES} for row in rows[-3:]]
    shape = {name: np.array([r[name] for r in rows], float) for name in rows[0]}
    true = {"latency_s": 5e-6, "loops_per_s": 1e7, "steps_per_s": 5e8, "memory_Bps": 5e9, "fresh_Bps": 2e9,
            "fresh_from_bytes": FRESH_BYTES}  # fmt: skip
    model = MODELS["short_loops"]
    seconds = np.asarray(model.predict(shape, true))
    found = model.fit(shape, seconds)
    assert np.asarray(model.predict(shape, found)) == pytest.approx(seconds, rel=1e-3)
    assert found["fresh_Bps"] == pytest.approx(2e9, rel=1e-2)
    without = model.fit({**shape, "result_bytes": np.zeros(len(rows))}, seconds)
    assert without["fresh_Bps"] == 1e30, "no large result was measured"


def test_tables_of_kernels_have_none_of_them() -> None:
    seen = [Measured(task=task, seconds=1e-3, noise=0.0, visits=1, rejected=0) for task in TASKS]
    assert list(kernel_rows(seen, "mine", "cpu_thread_p25")) == []
