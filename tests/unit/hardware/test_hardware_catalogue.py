"""Every file of the catalogue loads, every number has a source, and figures agree with the datasheets."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import steptime.hardware as hardware
from steptime.estimate.fabrics import fabric_model
from steptime.hardware import Device, Kind, cluster_names, device_names, load_cluster, load_device
from steptime.hardware.load import DEVICE, LEVEL, check
from steptime.hardware.records import MAKERS

CATALOGUE = Path(hardware.__file__).parent / "catalogue"
KINDS = {"devices": "device", "links": "link", "clusters": "cluster"}
FILES = sorted(path for folder in KINDS for path in (CATALOGUE / folder).glob("*.toml"))


@pytest.fixture(autouse=True)
def only_the_catalogue(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("STEPTIME_PATH", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))


@pytest.mark.each("path", FILES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_file_passes_the_gate_and_names_its_source(path: Path) -> None:
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    check(table, KINDS[path.parent.name], str(path))
    assert table["source"] and table["kind"] and table["title"]
    assert path.stem == path.stem.lower()


def test_vendors_are_those_whose_letters_readers_know() -> None:
    assert {load_device(name).vendor for name in device_names()} == set(MAKERS)


@pytest.mark.parametrize("written", ["nvidia", "Nvidia", " NVIDIA"])
def test_a_vendor_in_other_letters_is_the_same_vendor(tmp_path: Path, written: str) -> None:
    """With a vendor that nobody knows, what was measured on its fabric would not be used."""
    path = tmp_path / "own.toml"
    path.write_text(f'base = "dgx-h100"\n[device]\nvendor = "{written}"', encoding="utf-8")
    own, known = load_cluster(path), load_cluster("dgx-h100")
    assert own.device.vendor == "NVIDIA" and own.device.runs_cuda
    assert fabric_model(own, own.levels[1], 64) == fabric_model(known, known.levels[1], 64) is not None


@pytest.mark.parametrize("kind", ["device", "link"])
def test_defaults_pass_the_gate_and_are_assumed(kind: str) -> None:
    table = tomllib.loads((CATALOGUE / "defaults.toml").read_text(encoding="utf-8"))[kind]
    check(table, kind, "defaults.toml")
    assert table["kind"] == "assumed"


def numbers_of(device: Device) -> set[str]:
    plain = {spec.record for spec in DEVICE.values() if getattr(device, spec.record) is not None}
    matrix = {f"matrix_flops_per_s.{dtype}" for dtype in device.matrix_flops_per_s}
    return plain | matrix | {f"vector_flops_per_s.{dtype}" for dtype in device.vector_flops_per_s}


@pytest.mark.each("name", device_names())
def test_every_number_of_a_device_has_a_source(name: str) -> None:
    device = load_device(name)
    assert device.name == name
    assert set(device.sources) == numbers_of(device)
    assert all(source.text and not source.text.endswith(".toml") for source in device.sources.values())


@pytest.mark.each("name", device_names())
def test_device_is_plausible_and_has_a_node(name: str) -> None:
    device = load_device(name)
    rates = list(device.matrix_flops_per_s.values())
    assert rates == sorted(rates), "narrower dtypes are not slower"
    assert min(rates) >= device.vector_flops_per_s["fp32"] * 0.99
    cluster = load_cluster(name)
    assert cluster.device == device


@pytest.mark.each("name", cluster_names())
def test_every_number_of_a_level_has_a_source(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name
    assert cluster.levels[-1].devices is None or cluster.topology is not None
    assert cluster.sources["levels"].text
    for level in cluster.levels:
        assert {"link_Bps", "efficiency", "latency_s"} <= set(level.sources)
        assert set(level.sources) <= {spec.record for spec in LEVEL.values()}
        assert all(source.text and not source.text.endswith(".toml") for source in level.sources.values())
    rates = [level.link_Bps * level.links_per_device * level.efficiency for level in cluster.levels]
    assert rates == sorted(rates, reverse=True), "levels get slower outward"


def test_the_nodes_asked_for_are_there() -> None:
    asked = (
        "dgx-v100 dgx-a100 dgx-a100-80gb dgx-h100 dgx-h200 dgx-b200 dgx-b300 gb200-nvl72 gb300-nvl72 hgx-h800 hgx-h20"
    )
    asked += (
        " aws-p4d aws-p5 aws-p5en perlmutter frontier mi300x-8 mi325x-8 mi355x-8 gaudi2-8 gaudi3-8 l40s-8 rtx4090-8"
    )
    asked += " aws-p4de aws-p5e aws-p6-b200 azure-nd-h100-v5 gcp-a3-mega gcp-a3-ultra trn2-pod alps el-capitan"
    assert set(asked.split()) <= set(cluster_names())


# device, dense bf16 (fp16 where there is no bf16) TFLOP/s, vector fp32 TFLOP/s, memory GB, bandwidth GB/s
DATASHEET = [
    ("v100-sxm2-16gb", 125, 15.7, 16, 900),
    ("v100-sxm2-32gb", 125, 15.7, 32, 900),
    ("v100-pcie-32gb", 112, 14, 32, 900),
    ("a100-sxm-40gb", 312, 19.5, 40, 1555),
    ("a100-sxm-80gb", 312, 19.5, 80, 2039),
    ("a100-pcie-80gb", 312, 19.5, 80, 1935),
    ("h100-sxm", 989.4, 66.9, 80, 3350),
    ("h100-pcie", 756, 51.2, 80, 2039),
    ("h100-nvl", 835.5, 60, 94, 3900),
    ("h200-sxm", 989.4, 66.9, 141, 4800),
    ("h20", 148, 44, 96, 4000),
    ("b200-sxm", 2250, 75, 180, 8000),
    ("b300-sxm", 2250, 75, 270, 8000),
    ("gb200", 2500, 80, 186, 8000),
    ("l4", 121, 30.3, 24, 300),
    ("l40s", 362.05, 91.6, 48, 864),
    ("t4", 65, 8.1, 16, 320),
    ("rtx-4090", 165.2, 82.6, 24, 1008),
    ("mi250x", 191.5, 23.95, 64, 1638.4),
    ("mi300x", 1307.4, 163.4, 192, 5300),
    ("mi325x", 1307.4, 163.4, 256, 6000),
    ("mi355x", 2516.6, 157.3, 288, 8000),
    ("tpu-v5e", 197, None, 16, 819),
    ("tpu-v6e", 918, None, 32, 1638),
    ("rtx-5090", 209.5, 104.8, 32, 1792),
    ("rtx-6000-ada", 364.2, 91.1, 48, 960),
    ("a10", 125, 31.2, 24, 600),
    ("a10g", 70, 35, 24, 600),
    ("gh200-96gb", 989.4, 66.9, 96, 4000),
    ("gh200-144gb", 989.4, 66.9, 144, 4900),
    ("mi300a", 980.6, 122.6, 128, 5300),
    ("trainium2", 667, None, 96, 2900),
    ("gaudi2", 432, None, 96, 2460),
    ("gaudi3", 1835, None, 128, 3670),
]


@pytest.mark.each(("name", "matrix", "vector", "memory", "bandwidth"), DATASHEET)
def test_we_see_what_the_datasheet_says(
    name: str, matrix: float, vector: float | None, memory: float, bandwidth: float
) -> None:
    device = load_device(name)
    peaks = device.matrix_flops_per_s
    assert peaks.get("bf16", peaks.get("fp16")) == pytest.approx(matrix * 1e12, rel=1e-12)
    assert 0.93 * memory * 2**30 <= device.memory_bytes <= 1.02 * memory * 2**30, "vendors mean GiB"
    assert device.memory_Bps == pytest.approx(bandwidth * 1e9, rel=1e-12)
    if vector is not None:
        assert device.vector_flops_per_s["fp32"] == pytest.approx(vector * 1e12, rel=1e-12)


# device, units, FLOP per unit and clock of the given dtype: peak = units x FLOP x clock
@pytest.mark.each(
    ("name", "dtype", "flops_per_clock"),
    [
        ("v100-sxm2-32gb", "fp16", 1024),
        ("a100-sxm-80gb", "bf16", 2048),
        ("h100-sxm", "bf16", 4096),
        ("h100-pcie", "bf16", 4096),
        ("t4", "fp16", 1024),
        ("l40s", "bf16", 1024),
        ("rtx-6000-ada", "bf16", 1024),
        ("rtx-5090", "bf16", 512),
        ("rtx-5090", "fp4", 4096),
        ("a10", "bf16", 1024),
        ("a10g", "bf16", 512),
        ("mi300a", "bf16", 2048),
        ("mi300x", "bf16", 2048),
        ("mi355x", "bf16", 4096),
        ("mi350x", "fp8", 8192),
    ],
)
def test_peak_is_units_times_clock(name: str, dtype: str, flops_per_clock: int) -> None:
    device = load_device(name)
    assert device.sm_count is not None and device.clock_Hz is not None
    peak = device.sm_count * flops_per_clock * device.clock_Hz
    assert device.matrix_flops_per_s[dtype] == pytest.approx(peak, rel=0.02)


@pytest.mark.parametrize(
    ("name", "share"), [("v100-sxm2-32gb", 0.9), ("a100-sxm-80gb", 0.85), ("h100-pcie", 0.55), ("h100-sxm", 0.7)]
)
def test_measured_efficiencies_cite_their_measurement(name: str, share: float) -> None:
    device = load_device(name)
    source = device.sources["matrix_efficiency"]
    assert (device.matrix_efficiency, source.kind) == (share, Kind.MEASURED)
    assert "2411.01137" in source.text
    assert device.kernel_latency_s == pytest.approx(4.5e-6)


# device, GB/s of its link to the host in one direction
HOST_LINKS = [
    ("v100-sxm2-16gb", 16), ("a100-pcie-40gb", 32), ("h100-sxm", 64), ("h200-nvl", 64), ("gb200", 225),
    ("gb300", 225), ("gh200-144gb", 450), ("rtx-5090", 64), ("mi300a", 2650),
    ("mi250x", 36), ("mi325x", 64), ("gaudi2", 32), ("arc-b60", 32),
]  # fmt: skip


@pytest.mark.each(("name", "GBps"), HOST_LINKS)
def test_link_to_the_host(name: str, GBps: float) -> None:
    device = load_device(name)
    assert device.host_link_Bps == GBps * 1e9
    assert device.host_Bps == pytest.approx(0.625 * GBps * 1e9)
    assert device.sources["host_efficiency"].kind is Kind.ASSUMED


def test_devices_that_do_not_say_have_the_usual_link_to_the_host() -> None:
    silent = {
        name
        for name in device_names()
        if load_device(name).sources["host_link_Bps"].text.startswith("steptime default")
    }
    assert {name.partition("-")[0] for name in silent} == {"tpu", "trainium2", "published"}
    assert {load_device(name).host_Bps for name in silent} == {20e9}


def test_a_variant_does_not_inherit_a_measurement() -> None:
    for name in ("h200-sxm", "h800-sxm", "a800-sxm-80gb", "b200-sxm", "a100-pcie-80gb"):
        assert load_device(name).sources["matrix_efficiency"].kind is Kind.ASSUMED, name


PUBLISHED = {
    "a100": (312e12, 78e12, 1555e9, 80e9, 300e9, 25e9),
    "h200": (989.4e12, 133.8e12, 4800e9, 141e9, 450e9, 50e9),
    "b200": (2500e12, 339e12, 8000e9, 192e9, 900e9, 100e9),
}


@pytest.mark.each("size", [4, 8, 64])
@pytest.mark.each("generation", list(PUBLISHED))
def test_published_system(generation: str, size: int) -> None:
    cluster = load_cluster(f"published-{generation}-nvs{size}")
    device, (fast, slow) = cluster.device, cluster.levels
    matrix, vector, bandwidth, capacity, nvlink, network = PUBLISHED[generation]
    see = [
        *(device.matrix_flops_per_s[dtype] for dtype in ("fp16", "bf16")),
        *(device.vector_flops_per_s[dtype] for dtype in ("fp16", "bf16")),
        *(device.memory_Bps, device.memory_bytes, fast.link_Bps, slow.link_Bps, fast.latency_s, slow.latency_s),
        *(device.kernel_latency_s, device.matrix_efficiency, device.vector_efficiency, device.memory_efficiency),
    ]
    expected = [
        matrix,
        matrix,
        vector,
        vector,
        bandwidth,
        capacity,
        nvlink,
        network,
        2.5e-6,
        5e-6,
        20e-6,
        0.8,
        0.8,
        1.0,
    ]
    assert see == pytest.approx(expected, rel=1e-15)
    assert (fast.devices, slow.devices) == (size, None)
    assert (fast.efficiency, slow.efficiency, fast.links_per_device, slow.links_per_device) == (0.7, 0.7, 1, 1)
    assert cluster.fast_domain == size
    kinds = {s.kind for holder in (device, fast, slow) for s in holder.sources.values()}
    assert kinds == {Kind.ASSUMED}


@pytest.mark.each(
    ("name", "devices", "per_device_Bps"),
    [
        ("dgx-a100", 8, 25e9),
        ("dgx-h100", 8, 50e9),
        ("dgx-v100", 8, 6.25e9),
        ("aws-p4d", 8, 6.25e9),
        ("aws-p5", 8, 50e9),
        ("aws-p5en", 8, 50e9),
        ("aws-p4de", 8, 6.25e9),
        ("aws-p5e", 8, 50e9),
        ("aws-p6-b200", 8, 50e9),
        ("aws-g5", 8, 1.5625e9),
        ("azure-nd-h100-v5", 8, 50e9),
        ("gcp-a3-mega", 8, 25e9),
        ("gcp-a3-ultra", 8, 50e9),
        ("trn2-pod", 16, 25e9),
        ("alps", 4, 25e9),
        ("el-capitan", 4, 25e9),
        ("perlmutter", 4, 25e9),
        ("gb200-nvl72", 72, 50e9),
        ("gb300-nvl72", 72, 100e9),
        ("frontier", 2, 12.5e9),
        ("tpu-v5p-pod", 8960, 6.25e9),
        ("gaudi2-8", 8, 37.5e9),
    ],
)
def test_network_share_of_a_device(name: str, devices: int, per_device_Bps: float) -> None:
    cluster = load_cluster(name)
    outer = cluster.levels[-1]
    assert cluster.fast_domain == devices
    assert outer.link_Bps * outer.links_per_device == pytest.approx(per_device_Bps)


@pytest.mark.each(
    ("spelling", "name"),
    [
        ("h100", "h100-sxm"),
        ("H100-SXM-80GB", "h100-sxm"),
        ("A100", "a100-sxm-80gb"),
        ("a100_40gb", "a100-sxm-40gb"),
        ("B200", "b200-sxm"),
        ("RTX 4090", "rtx-4090"),
        ("TPU v5e", "tpu-v5e"),
        ("RTX 5090", "rtx-5090"),
        ("RTX 6000 Ada", "rtx-6000-ada"),
        ("GH200", "gh200-96gb"),
        ("Trn2", "trainium2"),
        ("TPU7x Ironwood", "tpu-v7"),
    ],
)
def test_spellings(spelling: str, name: str) -> None:
    assert load_device(spelling).name == name


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("p4de", "aws-p4de"),
        ("p4de.24xlarge", "aws-p4de"),
        ("p6-b200.48xlarge", "aws-p6-b200"),
        ("Standard_ND96isr_H100_v5", "azure-nd-h100-v5"),
        ("a3-megagpu-8g", "gcp-a3-mega"),
        ("a3-ultragpu-8g", "gcp-a3-ultra"),
    ],
)
def test_instances_by_the_names_of_their_clouds(spelling: str, name: str) -> None:
    assert load_cluster(spelling).name == name


def test_aliases_lead_somewhere_and_hide_nothing() -> None:
    tables = tomllib.loads((CATALOGUE / "aliases.toml").read_text(encoding="utf-8"))
    for folder, names in (("devices", device_names()), ("clusters", cluster_names())):
        assert set(tables[folder].values()) <= set(names)
        assert not set(tables[folder]) & set(names)


def test_a_device_stands_for_its_node() -> None:
    assert load_cluster("h100-sxm").name == "dgx-h100"
    small = load_cluster("v100-sxm2-16gb")
    assert (small.name, small.device.memory_bytes, small.fast_domain) == ("v100-sxm2-16gb", 16160 * 2**20, 8)


def test_exports() -> None:
    assert sorted(hardware.__all__) == hardware.__all__
    assert all(hasattr(hardware, name) for name in hardware.__all__)
