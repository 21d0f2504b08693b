"""Numbers stated over those of the catalogue: they change what they speak of, in the direction that they say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from explained_terms import noted
from steptime import api
from steptime.estimate.communication import collective_of, collective_over, message_time_s
from steptime.estimate.kernels import models_of
from steptime.estimate.machine import Machine, machine_of
from steptime.estimate.notes import changed_device
from steptime.estimate.result import Estimate
from steptime.estimate.stated_device import restated
from steptime.hardware import load_cluster, load_device
from steptime.hardware.records import Cluster
from steptime.num import Num
from steptime.plan.job import PRECISIONS
from steptime.plan.plans import Plans

CLUSTERS = ("dgx-h100", "gb200-nvl72", "perlmutter", "hgx-a800")
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "ring_exchange")
GROUPS = ((2, 2), (4, 4), (8, 4), (16, 1), (64, 4))
SIZES = (1e3, 1e5, 1e7, 1e9)
EFFICIENCIES = ("matrix_efficiency", "vector_efficiency", "memory_efficiency")


def machine(cluster: Cluster) -> Machine:
    return machine_of(cluster, 64, PRECISIONS["bf16"], lone_rank_has_all_links=True, calibrated=True)


def with_level(cluster: Cluster, number: int, **stated: float) -> Cluster:
    levels = list(cluster.levels)
    levels[number] = replace(levels[number], **stated)  # type: ignore[arg-type]
    return replace(cluster, levels=tuple(levels))


def transfers(m: Machine) -> list[Num]:
    assert m.fabric is not None
    times = [collective_over(k, m, size, *group) for k in KINDS for group in GROUPS for size in SIZES]
    return times + [time for size in SIZES for time in message_time_s(m, size)]


@given(
    st.sampled_from(CLUSTERS), st.sampled_from([0, 1]), st.sampled_from(["efficiency", "latency_s", "link_Bps"]),
    st.floats(0.02, 50.0), st.floats(1.01, 20.0),
)  # fmt: skip
def test_better_links_are_never_slower(name: str, number: int, field: str, factor: float, more: float) -> None:
    cluster = load_cluster(name)
    known = getattr(cluster.levels[number], field)
    low, high = (known * f if field != "efficiency" else min(1.0, known * f / 10) for f in (factor, factor * more))
    worse, better = (low, high) if field != "latency_s" else (high, low)
    slow, fast = (transfers(machine(with_level(cluster, number, **{field: value}))) for value in (worse, better))
    assert all(f <= s * (1 + 1e-9) for f, s in zip(fast, slow, strict=True))
    assert low == high or sum(map(float, fast)) < sum(map(float, slow)), "and it has an effect"


@pytest.mark.parametrize("field", ["efficiency", "latency_s", "link_Bps"])
def test_a_level_that_nobody_touched_keeps_its_fit(field: str) -> None:
    cluster = load_cluster("dgx-h100")
    before = machine(cluster)
    for number, others in ((1, ((2, 2), (8, 8))), (0, ((2, 1), (16, 1)))):
        half = {field: getattr(cluster.levels[number], field) / 2}
        after = machine(with_level(cluster, number, **half))
        for kind in KINDS:
            for group in others:
                before_s, after_s = (collective_over(kind, m, 1e6, *group) for m in (before, after))
                assert after_s == before_s


@given(st.sampled_from(CLUSTERS), st.floats(0.0, 1e-3))
def test_a_stated_latency_is_that_of_each_hop(name: str, latency_s: float) -> None:
    cluster = load_cluster(name)
    before, known_s = machine(cluster), cluster.levels[1].latency_s
    after = machine(with_level(cluster, 1, latency_s=known_s + latency_s))
    assert before.fabric is not None and after.fabric is not None
    for old, new in zip(before.fabric.fabric.outer_hop_s, after.fabric.fabric.outer_hop_s, strict=True):
        assert new == pytest.approx(old + latency_s)
    _, far_before = message_time_s(before, 1e3)
    _, far_after = message_time_s(after, 1e3)
    assert far_after == pytest.approx(far_before + latency_s)


@pytest.mark.parametrize("name", CLUSTERS)
def test_an_efficiency_of_one_is_the_datasheet(name: str) -> None:
    cluster = load_cluster(name)
    whole = machine(with_level(with_level(cluster, 0, efficiency=1.0), 1, efficiency=1.0)).fabric
    assert whole is not None
    inner, outer = cluster.levels[:2]
    assert whole.fabric.Bps[-1] == pytest.approx(inner.link_Bps * inner.links_per_device)
    assert whole.fabric.outer_Bps[-1] == pytest.approx(outer.link_Bps * outer.links_per_device)


@pytest.mark.parametrize("name", ["l4", "h100-sxm", "b200"])
def test_no_large_product_beats_the_peak_of_a_device_that_is_said_to_reach_it(name: str) -> None:
    device = replace(load_device(name), matrix_efficiency=1.0)
    model = restated(device, models_of(device, PRECISIONS["bf16"]))["matmul"]
    edges = (8192.0, 16384.0)
    times_s = [float(model.seconds({"m": n, "n": n, "k": n, "residual": 0.0})) for n in edges]
    shares = [2 * n**3 / t / device.matrix_flops_per_s["bf16"] for n, t in zip(edges, times_s, strict=True)]
    assert max(shares) == pytest.approx(1.0, rel=1e-3) or max(shares) < 1.0


def step(cluster: str) -> Estimate:
    return api.estimate("llama3-8b", cluster, gpus=32, global_batch=64, plan={"tp": 8})


SAME = {
    "levels.nvlink": ('bandwidth = "450 GB/s"', "efficiency = 0.8", 'latency = "2.5 us"', "links_per_device = 1"),
    "levels.network": ('bandwidth = "50 GB/s"', "efficiency = 0.7", 'latency = "5 us"', "oversubscription = 1"),
    "device": (
        "matrix_efficiency = 0.7", "vector_efficiency = 0.8", "memory_efficiency = 0.85", 'kernel_latency = "4.5 us"',
        'clock = "1830 MHz"', "sm_count = 132", 'memory_bandwidth = "3.35 TB/s"',
    ),
}  # fmt: skip


@pytest.mark.each(("table", "line"), [(table, line) for table, lines in SAME.items() for line in lines])
def test_a_number_stated_as_it_was_changes_nothing(tmp_path: Path, table: str, line: str) -> None:
    path = tmp_path / "same.toml"
    path.write_text(f'base = "dgx-h100"\n[{table}]\n{line}\n')
    same, plain = (step(name) for name in (str(path), "dgx-h100"))
    assert same.time == plain.time and same.notes == plain.notes


@pytest.mark.each(
    ("table", "worse"),
    [
        ("levels.nvlink", "efficiency = 0.5"), ("levels.nvlink", 'latency = "40 us"'),
        ("levels.network", "efficiency = 0.5"), ("levels.network", 'latency = "200 us"'),
        ("levels.network", 'bandwidth = "25 GB/s"'), ("levels.network", "oversubscription = 4"),
        ("device", "matrix_efficiency = 0.5"), ("device", "memory_efficiency = 0.5"),
        ("device", "vector_efficiency = 0.2"), ("device", 'clock = "1200 MHz"'), ("device", 'kernel_latency = "9 us"'),
    ],
)  # fmt: skip
def test_a_worse_machine_is_a_slower_step(tmp_path: Path, table: str, worse: str) -> None:
    path = tmp_path / "worse.toml"
    path.write_text(f'base = "dgx-h100"\n[{table}]\n{worse}\n')
    after, before = (step(name) for name in (str(path), "dgx-h100"))
    assert after.step_time_s > before.step_time_s * 1.0001


def test_a_report_says_what_was_stated(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('base = "dgx-h100"\n[levels.network]\nlatency = "9 us"\n[device]\nmatrix_efficiency = 0.6\n')
    mine = machine(load_cluster(path))
    _, basis = noted(lambda: collective_of("all_gather", Plans(tp=16, in_tp=8), mine, ("tp",), 1e8))
    assert basis.endswith("with the stated latency 9 us for 5 us") and basis.count("stated") == 1
    assert mine.models["matmul"].basis.endswith("with the stated matrix_efficiency 0.6 for 0.7")
    assert "stated" not in mine.models["stream"].basis
    explained = step(str(path))
    assert explained.provenance.constants["network.latency_s"]["value"] == 9e-6
    assert "network.efficiency" not in explained.provenance.constants, "the fit stands for it"


@given(st.sampled_from(EFFICIENCIES), st.floats(0.05, 1.0), st.floats(0.05, 1.0))
def test_a_more_efficient_device_is_never_slower(field: str, one: float, other: float) -> None:
    cluster = load_cluster("dgx-h100")
    shape = {"m": 4096.0, "n": 4096.0, "k": 4096.0, "residual": 0.0}
    moved = {"moved_bytes": 1e8, "rows": 4096.0, "reread_bytes": 0.0, "vector_flops": 1e8}
    low, high = sorted((one, other))
    slow, fast = (machine(replace(cluster, device=replace(cluster.device, **{field: v}))) for v in (low, high))  # type: ignore[arg-type]
    for model, call in (("matmul", shape), ("stream", moved), ("norm", moved)):
        assert fast.models[model].seconds(call) <= slow.models[model].seconds(call)
    assert 2 * 4096**3 / fast.models["matmul"].seconds(shape) <= fast.peak_flops_per_s


def test_peaks_follow_a_stated_clock_but_for_those_that_are_stated_too(tmp_path: Path) -> None:
    path = tmp_path / "clocked.toml"
    path.write_text('base = "dgx-h100"\n[device]\nclock = "915 MHz"\n[device.matrix]\nfp8 = "1978.9 TFLOP/s"\n')
    device, base = load_cluster(path).device, load_cluster("dgx-h100").device
    assert device.matrix_flops_per_s["bf16"] == pytest.approx(base.matrix_flops_per_s["bf16"] / 2)
    assert device.vector_flops_per_s["fp32"] == pytest.approx(base.vector_flops_per_s["fp32"] / 2)
    assert device.matrix_flops_per_s["fp8"] == base.matrix_flops_per_s["fp8"]
    assert device.memory_Bps == base.memory_Bps
    assert "given clock" in device.sources["matrix_flops_per_s.bf16"].text
    assert "given clock" not in device.sources["matrix_flops_per_s.fp8"].text


def test_fewer_units_say_that_the_peaks_stay() -> None:
    device = load_cluster("dgx-h100").device
    assert changed_device(device) == ()
    half = replace(device, sm_count=66)
    assert "sm_count 66 for 132" in changed_device(half)[0]
    rates = {dtype: rate / 2 for dtype, rate in device.matrix_flops_per_s.items()}
    assert changed_device(replace(half, matrix_flops_per_s=rates)) == ()


def test_a_clock_without_one_to_compare_it_with_says_so() -> None:
    device = load_cluster("dgx-h100").device
    known = {name: value for name, value in device.catalogue.items() if name != "clock_Hz"}
    assert "clock changes nothing" in changed_device(replace(device, catalogue=known, clock_Hz=1e9))[0]


def own(tmp_path: Path, nvlink: str, network: str) -> Machine:
    path = tmp_path / "own.toml"
    path.write_text(f'device = "h100-sxm"\n[levels.nvlink]\ndevices = 8\n{nvlink}\n[levels.network]\n{network}\n')
    return machine(load_cluster(path))


def test_a_level_that_says_all_of_its_links_is_taken_at_its_word(tmp_path: Path) -> None:
    word = 'bandwidth = "40 GB/s"\nefficiency = 0.8\nlatency = "3 us"'
    mine, usual = (own(tmp_path, 'link = "nvlink4"', text) for text in (word, 'link = "infiniband-ndr"'))
    assert mine.fabric is not None and usual.fabric is not None
    assert mine.fabric.fabric.Bps == usual.fabric.fabric.Bps, "the other level keeps its fit"
    assert mine.fabric.fabric.outer_Bps == (16e9, 30e9, 32e9), "flags take half and a sixteenth of short protocols"
    assert mine.fabric.fabric.outer_hop_s == (3e-6,) * 3
    assert collective_over("all_gather", mine, 1e12, 2, 1) == pytest.approx(1e12 / 2 / 32e9, rel=1e-3)
    _, basis = noted(lambda: collective_of("all_gather", Plans(tp=16, in_tp=8), mine, ("tp",), 1e8))
    assert basis.endswith("network: bandwidth, efficiency and latency as stated")
    assert own(tmp_path, 'bandwidth = "450 GB/s"\nefficiency = 0.8\nlatency = "3 us"', word).fabric is None


def test_stating_what_is_assumed_of_unknown_links_changes_nothing(tmp_path: Path) -> None:
    plain, same, worse = (
        own(tmp_path, 'link = "nvlink4"', f'bandwidth = "40 GB/s"\n{line}')
        for line in ("", "efficiency = 0.7", "efficiency = 0.35")
    )
    assert plain.fabric is not None and same.fabric is not None and worse.fabric is not None
    assert plain.fabric.fabric.outer_Bps[-1] == pytest.approx(0.9 * 40e9), "carried over from another network"
    assert same.fabric.fabric == plain.fabric.fabric
    assert worse.fabric.fabric.outer_Bps == pytest.approx([rate / 2 for rate in plain.fabric.fabric.outer_Bps])
