"""Fitted kernels and collectives in an estimate: which model times what, and what the report says about it."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from explained_terms import noted
from lacking_curves import lacking_curves
from steptime.cost.collective import ring_all_gather_s
from steptime.cost.collective_algorithms import candidate_s
from steptime.cost.memory_bound import memory_bound_s
from steptime.estimate.communication import TEXTBOOK, collective_of, message_time_s
from steptime.estimate.fabrics import fabric_model
from steptime.estimate.kernels import memory_models, memory_timed, streamed
from steptime.estimate.machine import Machine, curve_constants, machine_of
from steptime.hardware import load_cluster, load_device
from steptime.hardware.profiles import load_fabric_profiles, load_profile, profile_names
from steptime.measure.table import Table
from steptime.plan.job import PRECISIONS
from steptime.plan.plans import Plans
from steptime_lab.calibrate import kernel_families as measured

EIGHT, TWO_NODES = Plans(tp=8, in_tp=8), Plans(tp=16, in_tp=8)


def machine(cluster: str, gpus: int = 64, *, calibrated: bool = True) -> Machine:
    return machine_of(
        load_cluster(cluster), gpus, PRECISIONS["bf16"], lone_rank_has_all_links=True, calibrated=calibrated
    )  # fmt: skip


def test_without_calibration_nothing_is_fitted() -> None:
    plain = machine("dgx-h100", calibrated=False)
    assert (dict(plain.models), plain.fabric, plain.bound) == ({}, None, None)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
def test_the_fastest_legal_algorithm_is_taken_and_named(kind: str) -> None:
    h100 = machine("dgx-h100")
    assert h100.fabric is not None
    for size in (1e4, 1e6, 1e9):
        names, times = candidate_s(kind, size, 8, 8, h100.fabric.fabric)
        best = min(range(len(times)), key=times.__getitem__)
        assert collective_of(kind, EIGHT, h100, ("tp",), size) == times[best]
        call, basis = noted(partial(collective_of, kind, EIGHT, h100, ("tp",), size))
        algorithm, protocol = names[best]
        assert basis.startswith(f"{algorithm}, protocol {protocol}: the fastest; nvlink: fitted fabric h100-sxm")
        assert "median error" in basis and call.name == f"{kind}/collective_s"


def test_a_group_between_nodes_says_what_was_carried_over() -> None:
    h100 = machine("dgx-h100")
    _, basis = noted(lambda: collective_of("all_gather", TWO_NODES, h100, ("tp",), 1e8))
    assert "nvlink: fitted fabric h100-sxm-nccl" in basis
    assert "network: carried over from fabric perlmutter-nccl" in basis
    _, lone = noted(lambda: collective_of("all_gather", Plans(dp=8), h100, ("dp",), 1e8))
    assert "nvlink" not in lone, "no rank of it shares a node"
    kinds = {c.name: str(c.source.kind) for c in curve_constants(h100)}
    assert kinds["nvlink.h100-sxm-nccl.median_error"] == "fitted"
    assert kinds["network.perlmutter-nccl.median_error"] == "assumed"


def test_the_machine_that_was_measured_keeps_its_own_network() -> None:
    own = machine("perlmutter").fabric
    assert own is not None and own.between is not None and not own.between.carried
    profiles = {profile.name: profile for profile in load_fabric_profiles()}
    fitted = profiles["perlmutter-nccl"].coefficients["outer_Bps"]
    assert own.fabric.outer_Bps == pytest.approx(tuple(fitted)), "as fitted"


def test_a_network_of_twice_the_bandwidth_sends_a_large_tensor_in_half_the_time() -> None:
    times = []
    for name, nic_Bps in (("dgx-a100-80gb", 25e9), ("dgx-h100", 50e9)):
        cluster = machine(name)
        # 7/8 of 100 GB by a NIC of which one rank both ways reaches 0.7
        times.append((7 / 8 * 1e11 / (0.7 * nic_Bps), cluster))
    for expected, cluster in times:
        assert collective_of("all_gather", Plans(dp=8), cluster, ("dp",), 1e11) == pytest.approx(expected, rel=0.001)


@pytest.mark.parametrize("cluster", ["l40s-8", "mi300x-8", "tpu-v5p-pod", "gaudi3-8", "frontier"])
def test_links_that_nothing_alike_was_measured_on_keep_the_textbook(cluster: str) -> None:
    cluster_record = load_cluster(cluster)
    assert fabric_model(cluster_record, cluster_record.levels[-1], 64) is None


def test_pcie_says_textbook() -> None:
    call, basis = noted(lambda: collective_of("all_gather", EIGHT, machine("l40s-8", 8), ("tp",), 1e8))
    assert basis == TEXTBOOK and call.formula is ring_all_gather_s


def test_a_message_inside_a_node_is_faster_than_one_between_nodes() -> None:
    for cluster in ("dgx-a100-80gb", "dgx-h100", "perlmutter", "gb300-nvl72"):
        near, far = message_time_s(machine(cluster, 1024), np.logspace(1, 10, 20))
        assert (near < far).all()


def _table(**columns: object) -> Table:
    rows = {"source": "neusight", "gpu": "H100", "kernel": "", "notes": "", "dtype": "bf16"} | columns
    return Table({k: np.array([v], dtype=None if isinstance(v, float) else object) for k, v in rows.items()})


@pytest.mark.parametrize(
    ("operator", "backward", "shape"),
    [
        ("layer_norm", False, measured.norms),
        ("layer_norm", True, measured.gradients_of_norms),
        ("dropout", False, measured.dropouts),
        ("rope", False, measured.rotary),
        ("embedding", False, measured.lookups),
        ("gated_activation", False, measured.gated),
    ],
)
def test_shapes_are_those_of_the_rows_that_were_fitted(operator: str, backward: bool, shape: object) -> None:
    rows, width = 4096.0, 8192.0
    given = {"elements": rows * width, "rows": rows, "width": width, "element_bytes": 2.0, "mask_bytes": 1.0,
             "tokens": rows}  # fmt: skip
    if operator == "gated_activation":
        given["elements"] /= 2  # of the result; the rows of tables count what goes in
    timed = memory_timed(machine("dgx-h100").models, operator, given, backward=backward)
    assert timed is not None
    (call,) = timed.shapes
    expected = shape(_table(rows=rows, cols=width, numel=rows * width))  # type: ignore[operator]
    for name in ("moved_bytes", "reread_bytes", "vector_flops"):
        assert float(call[name]) == pytest.approx(float(expected[name][0]), rel=1e-12), name


def test_a_norm_is_timed_by_its_curve() -> None:
    device, profile = load_device("h100-sxm"), load_profile("h100-sxm")
    assert profile is not None
    curve = profile.curve("layernorm", "any", "eager")
    assert curve is not None
    given = {"elements": 4096 * 8192, "rows": 4096, "width": 8192, "element_bytes": 2.0}
    timed = memory_timed(machine("dgx-h100").models, "layer_norm", given, backward=False)
    assert timed is not None
    without_host = {**curve.coefficients, "floor_s": 0.0, "launch_s": device.kernel_latency_s}
    assert curve.coefficients["launch_s"] > device.kernel_latency_s
    expected = memory_bound_s(
        moved_bytes=(2 * 4096 * 8192 + 2 * 4096 + 2 * 8192) * 2.0, rows=4096, reread_bytes=0.0,
        vector_flops=9 * 4096 * 8192, memory_Bps=device.memory_Bps, l2_bytes=float(device.l2_bytes or 0),
        vector_flops_per_s=device.vector_flops_per_s["fp32"], most_rows=curve.ranges["rows"][1], **without_host,
    )  # fmt: skip
    assert timed.seconds == pytest.approx(expected, rel=1e-12)


def test_the_optimiser_streams() -> None:
    models = machine("dgx-h100").models
    timed = streamed(models, 1e11)
    assert timed is not None
    assert timed.seconds == pytest.approx(1e11 / (models["stream"].fixed["efficiency"] * 3.35e12), rel=1e-3)
    assert streamed({}, 1e11) is None


def test_transferred_curves_say_so() -> None:
    kinds = {c.name: c.source for c in curve_constants(machine("gb200-nvl72"))}
    gemm = kinds["matmul.gemm.bf16.median_error"]
    assert str(gemm.kind) == "assumed" and gemm.text.startswith("transferred from")
    assert "transferred from" in machine("gb200-nvl72").models["stream"].basis


def test_no_curve_is_transferred_where_one_was_fitted_or_from_another_vendor() -> None:
    found = dict(lacking_curves(["h100-sxm", "mi300x", "tpu-v5p", "published-a100", "h100-nvl"]))
    assert "tpu-v5p" not in found and "published-a100" not in found
    assert not any(c.family in ("gemm", "elementwise") for c in found.get("h100-sxm", []))
    assert all("mi" in c.source and "h100" not in c.source for c in found["mi300x"])
    assert all(c.kind == "assumed" and c.points == 0 for c in found["h100-nvl"])
    assert not any(c.dtype == "fp4" for c in found["h100-nvl"])


@pytest.mark.each("name", profile_names())
def test_no_operator_bound_by_memory_launches_longer_than_a_kernel_does(name: str) -> None:
    """A fit that lacks what narrow rows cost puts it into the launch, which then makes all others too slow."""
    device = load_device(name)
    for role, model in memory_models(device, load_profile(name)).items():
        assert model.fixed["launch_s"] <= 1.1 * device.kernel_latency_s, role
