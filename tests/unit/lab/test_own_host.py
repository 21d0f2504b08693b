"""A processor that issues its own work, and products whose left operand lies transposed: by hand and as measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from steptime.api.jobs import framework_of
from steptime.captured.cost import Timer, cost_table
from steptime.captured.cost.timing import HOST_MORE_S
from steptime.captured.graph import Nodes, TensorType
from steptime.captured.ops import OPERATORS
from steptime.captured.ops.products import turned_in
from steptime.captured.profiling import profile as profile_model
from steptime.captured.report.profile import total_lines
from steptime.cost.host import IN_TURN, issued_s
from steptime.errors import UserError
from steptime.estimate.work import PhaseWork, paced_s
from steptime.hardware import load_cluster, load_device
from steptime.hardware.records import CPU, Curve, Device, Profile
from steptime.measure.machine import cluster_file, profile, work
from steptime.measure.machine.linear import MODELS
from steptime.measure.machine.runner import Host, Measured
from steptime.measure.machine.work import TRAINED, Task
from steptime.plan.job import PRECISIONS
from steptime.search.modes import MODES

HOST = Host(
    host="h", processor="a CPU", cores=2, memory_bytes=16e9, cache_bytes=32e6, device="cpu", gpus=0, torch="2.13.0",
    threads=1,
)  # fmt: skip
PRODUCT = {"latency_s": 1.0, "flops_per_s": 1e3, "m_half": 0.0, "n_half": 0.0, "k_half": 0.0,
           "turned_flops_per_s": 2e3, "turned_per_s": 10.0}  # fmt: skip
ALIGNED = {"loose_flops_per_s": 1e30, "odd_flops_per_s": 1e30}


def cpu(**changes: Any) -> Device:
    curve = Curve(
        family="half_size_matmul/matmul", dtype="fp32", coefficients=PRODUCT, points=30, median_ape=0.1, mean_ape=0.1,
        bias=0.0, band=(0.8, 1.2), source="bench",
    )  # fmt: skip
    h100 = replace(load_device("h100-sxm"), name="mine", architecture=CPU, matrix_flops_per_s={"fp32": 1e11})
    return replace(h100, curves=Profile(device="mine", curves=(curve,)), **changes)


# --- operands that lie transposed


def product(op: str = "mm", by: str = "t") -> Any:
    """4 x 5 by 5 x 6, of a left operand that looks at what lies in memory, one after another."""
    nodes, looks = Nodes(), by.split()
    turns = [sum(look in ("t", "transpose") for look in looks[i:]) % 2 for i in range(len(looks) + 1)]
    left, *types = (TensorType((5, 4) if turn else (4, 5), "fp32") for turn in turns)
    left = nodes.source("input", "x", left)
    for look, made in zip(looks, types, strict=True):
        left = nodes.apply(look, {"self": left}, outputs=[made]).value()
    right = nodes.source("input", "y", TensorType((5, 6), "fp32"))
    names = ("mat1", "mat2") if op == "addmm" else ("self", "mat2")
    given = dict(zip(names, (left, right), strict=True))
    if op == "addmm":
        given = {"self": nodes.source("parameter", "bias", TensorType((6,), "fp32")), **given}
    return nodes.apply(op, given, outputs=[TensorType((4, 6), "fp32")])


@pytest.mark.each("op", ["mm", "addmm"])
@pytest.mark.each(
    ("by", "is_turned"),
    [
        ("", False), ("t", True), ("transpose", True), ("relu", False), ("t t", False), ("t transpose", False),
        ("t t t", True), ("t detach", True), ("t relu", False), ("t relu t", True),
    ],
)  # fmt: skip
def test_a_captured_product_knows_whether_its_left_operand_is_turned(op: str, by: str, is_turned: bool) -> None:
    node = product(op, by)
    assert turned_in(node, OPERATORS[op].factors[0]) == is_turned
    plain = 1.0 + 2 * 4 * 5 * 6 / 1e3
    more = (2 * 4 * 5 * 6 / 2e3 + 4 * 5 / 10.0) * is_turned
    assert Timer(device=cpu()).cost(node).seconds == pytest.approx(plain + more)


def test_one_timer_tells_both_apart() -> None:
    timer = Timer(device=cpu())
    assert timer.cost(product()).seconds > timer.cost(product(by="")).seconds


def test_devices_of_the_catalogue_do_not_ask() -> None:
    timer = Timer(device=load_device("h100-sxm"))
    assert timer.cost(product()).seconds == timer.cost(product(by="")).seconds


SHAPES = [(16 * (1 + i % 5), 32 * (1 + i % 7), 64 * (1 + i % 3)) for i in range(48)]


def columns(layouts: tuple[str, ...]) -> dict[str, np.ndarray[Any, Any]]:
    rows = [
        profile.arguments_of(
            Task(
                kind="matmul", dtype="fp32", shape=dict(zip("mnk", dims, strict=True)), layout=layouts[i % len(layouts)]
            )
        )
        for i, dims in enumerate(SHAPES)
    ]
    return {name: np.array([row[name] for row in rows], float) for name in ("m", "n", "k", "turned", "loose", "odd")}


TRUE = {"latency_s": 1e-5, "flops_per_s": 1e11, "m_half": 20.0, "n_half": 5.0, "k_half": 0.0, **ALIGNED}


@pytest.mark.parametrize(
    ("coefficients", "layouts"),
    [
        ({"turned_flops_per_s": 2e11, "turned_per_s": 1e9}, work.LAYOUTS),
        ({"turned_flops_per_s": 1e30, "turned_per_s": 1e30}, work.LAYOUTS),
        ({"turned_flops_per_s": 1e30, "turned_per_s": 1e30}, ("nt", "nn")),
    ],
)  # fmt: skip
def test_a_fit_finds_what_turning_costs(coefficients: dict[str, float], layouts: tuple[str, ...]) -> None:
    model, shape = MODELS["half_size_matmul"], columns(layouts)
    found = model.fit(shape, np.asarray(model.predict(shape, TRUE | coefficients)))
    assert found == pytest.approx(TRUE | coefficients, rel=1e-6, abs=1e-6)


def test_a_fit_finds_what_rows_off_a_boundary_cost() -> None:
    """Dims of 8, 4, 2 and 1 elements of bf16 more than a multiple of 64: a half and three quarters lie off one."""
    dims = [(64 * (1 + i % 5), 64 * (1 + i % 7) + (0, 8, 4, 1)[i % 4], 64 * (1 + i % 3)) for i in range(48)]
    tasks = [Task(kind="matmul", dtype="bf16", shape=dict(zip("mnk", d, strict=True)), layout="nt") for d in dims]
    rows = [profile.arguments_of(task) for task in tasks]
    shape = {name: np.array([row[name] for row in rows], float) for name in ("m", "n", "k", "turned", "loose", "odd")}
    assert [shape[name].sum() for name in ("loose", "odd")] == [24, 12]
    true = TRUE | {"turned_flops_per_s": 1e30, "turned_per_s": 1e30, "loose_flops_per_s": 5e10, "odd_flops_per_s": 2e10}
    model = MODELS["half_size_matmul"]
    found = model.fit(shape, np.asarray(model.predict(shape, true)))
    assert found == pytest.approx(true, rel=1e-6, abs=1e-6)


def test_noise_is_not_taken_for_the_cost_of_turning() -> None:
    model, shape = MODELS["half_size_matmul"], columns(work.LAYOUTS)
    plain = np.asarray(model.predict(shape, TRUE | {"turned_flops_per_s": 1e30, "turned_per_s": 1e30}))
    noisy = plain * np.exp(0.05 * np.random.default_rng(0).standard_normal(len(plain)))
    found = model.fit(shape, noisy)
    assert found["turned_flops_per_s"] == found["turned_per_s"] == 1e30


# --- what the host needs to issue


def launched(**seconds: float) -> list[Measured]:
    shape = {"rows": 1, "width": 64}
    return [
        Measured(task=Task(kind=kind, dtype="fp32", shape=shape), seconds=s, noise=0.0, visits=3, rejected=0)
        for kind, s in seconds.items()
    ]


@pytest.mark.parametrize(
    ("device", "expected"), [("cpu", (300e-6 - 40e-6) / 9), ("cuda", 300e-6 / 9)]
)  # fmt: skip
def test_issue_by_hand(device: str, expected: float) -> None:
    """A CPU runs the operators itself; a host of a GPU only issues them."""
    found = launched(launch=3e-6, training_passes=300e-6, training_operators=40e-6)
    assert profile._issue_s(replace(HOST, device=device), found) == pytest.approx(expected)


def test_issue_of_a_step_that_was_not_measured_is_unknown() -> None:
    assert profile._issue_s(HOST, launched(launch=3e-6, training_passes=1e-3)) is None
    assert profile._issue_s(HOST, launched(training_passes=1e-4, training_operators=2e-4)) == 0.0


def fitted(**seconds: float) -> profile.Fitted:
    def seconds_of(task: Task) -> float:
        done = work.work_of(task)
        return 2e-6 + done.matrix_flops / 1e11 + done.vector_flops / 1e12 + done.moved_bytes / 4e10

    todo = work.tasks(work.extent_of("cpu", True, 16e9), ("fp32",), ())
    made = [Measured(task=t, seconds=seconds_of(t), noise=0.01, visits=3, rejected=0) for t in todo]
    return profile.fit(HOST, [*launched(**seconds), *made], [], None, "2026-11-22")


@pytest.mark.slow
def test_a_cluster_file_carries_it(tmp_path: Path) -> None:
    cluster_file.write(tmp_path / "a.toml", fitted(launch=3e-6, training_passes=3e-4, training_operators=4e-5))
    device = load_cluster(tmp_path / "a.toml").device
    assert device.issue_s == pytest.approx((3e-4 - 4e-5) / 9) and device.is_host
    assert Timer(device=device).host_s == device.issue_s
    cluster_file.write(tmp_path / "b.toml", fitted(launch=3e-6))
    device = load_cluster(tmp_path / "b.toml").device
    assert device.issue_s is None and Timer(device=device).host_s == 20e-6
    (tmp_path / "c.toml").write_text(f'base = "{tmp_path}/a.toml"\n[device]\nissue = "-1 us"\n')
    with pytest.raises(UserError, match="issue"):
        load_cluster(tmp_path / "c.toml")


def test_the_host_adds_to_the_time_of_its_own_work() -> None:
    torch = pytest.importorskip("torch")
    import steptime

    layers = torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64)
    program = steptime.capture(
        torch.nn.Sequential(*layers),
        (torch.empty(64, 64),),
        optimizer="sgd-loop",
        loss=lambda out: out.sum(),
        target="cpu",
    )
    mine = cpu(issue_s=1e-3)
    own, other = (
        cost_table(program, Timer(device=device)).totals for device in (mine, replace(mine, architecture="hopper"))
    )
    assert own.device_s == other.device_s
    assert own.host_s == pytest.approx(other.host_s - 4 * (1e-3 - HOST_MORE_S)), "updates have no module, no gradient"
    assert own.step_s == pytest.approx(own.device_s + own.host_s)
    assert other.step_s == issued_s(other.device_s, 1.0, other.host_s) < own.step_s
    assert own.bracket_s == (own.step_s, own.step_s)


def test_whether_both_take_turns_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step, its bounds, the bare updates and the words of a report follow from one answer."""
    torch = pytest.importorskip("torch")
    import steptime

    program = steptime.capture(
        torch.nn.Linear(64, 64), (torch.empty(64, 64),), optimizer="sgd-loop", loss=lambda out: out.sum(), target="cpu"
    )
    device = cpu(issue_s=1e-3, architecture="hopper")
    apart = cost_table(program, Timer(device=device)).totals
    monkeypatch.setattr("steptime.captured.cost.timing.issue_sharpness", lambda _device: IN_TURN)
    table = cost_table(program, Timer(device=device))
    turns = table.totals
    assert turns.step_s == pytest.approx(turns.device_s + turns.host_s) and turns.host_s < apart.host_s
    assert turns.bracket_s == (turns.device_s + turns.host_s,) * 2
    assert "on the same processor" in total_lines(table)[0]


def test_the_step_that_is_measured_has_as_many_operators_as_it_is_divided_by() -> None:
    torch = pytest.importorskip("torch")
    from steptime.measure.machine.torch_ops import Pool, call_of

    counts = {}
    for kind in ("training_passes", "training_operators"):
        task = Task(kind=kind, dtype="fp32", shape={"rows": 1, "width": 64})
        call = call_of(task, torch, Pool(torch, "cpu"), 1)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            call(0)
        kernels = ("aten::addmm", "aten::mm", "aten::sum", "aten::gelu", "aten::gelu_backward")
        counts[kind] = {e.key: e.count for e in seen.key_averages() if e.key in kernels}
    assert counts["training_passes"] == counts["training_operators"]
    assert sum(counts["training_passes"].values()) == TRAINED


@pytest.mark.parametrize(("device", "sharpness"), [("h100-sxm", 8.0), ("cpu", 1.0)])
def test_estimates_join_both_likewise(device: str, sharpness: float) -> None:
    found = cpu() if device == "cpu" else load_device(device)
    framework = framework_of(None, MODES["corrected"], found, PRECISIONS["fp32"])
    done = PhaseWork(
        matrix_s=1e-3, vector_s=0.0, attention_s=0.0, narrow_s=0.0, peak_s=0.0, operators=10.0, routers=0.0,
        captured=0.0, links_s={}, covered_s={}, beside_s={}, busy_s={},
    )  # fmt: skip
    device_s = 1e-3 * framework.matrix
    assert paced_s(device_s, done, framework) == issued_s(device_s, 10.0, framework.host_s, sharpness)


@pytest.mark.slow
def test_a_step_on_the_host_says_who_issues_it(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    module = tmp_path / "m.py"
    module.write_text("import torch\ndef make():\n    return torch.nn.Linear(8, 8), (torch.empty(2, 8),)\n")
    cluster_file.write(tmp_path / "a.toml", fitted(launch=3e-6, training_passes=3e-4, training_operators=4e-5))
    found = profile_model(f"{module}:make", device=str(tmp_path / "a.toml"))
    assert found.settings.optimizer == "adamw-loop"
    assert any("on the same processor" in line for line in total_lines(found.table))
    other = profile_model(f"{module}:make", device="h100-sxm")
    assert other.settings.optimizer == "adamw"
    assert any("side by side" in line for line in total_lines(other.table))
