"""Devices that a log names, against that of the prediction."""

from __future__ import annotations

from dataclasses import replace

import pytest

from steptime.doctor.log import Devices, device_contradictions
from steptime.hardware.library import load_device

GIB = 2**30


@pytest.mark.each(
    ("line", "name", "gib"),
    [
        ("CUDA capacity: NVIDIA B200 with 178.36GiB memory", "NVIDIA B200", 178.36),
        ("HIP capacity: AMD Instinct MI300X with 191.98GiB memory", "AMD Instinct MI300X", 191.98),
        ("You are using a CUDA device ('NVIDIA H200') that has Tensor Cores.", "NVIDIA H200", None),
        ("GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-5a)", "NVIDIA A100-SXM4-80GB", None),
        ("|   0  NVIDIA H100 80GB HBM3          On  |   00000000:1B:00.0 Off |                    0 |",
         "NVIDIA H100 80GB HBM3", None),
        ("|   0  Tesla V100-SXM2...  On   | 00000000:1A:00.0 Off |", "Tesla V100-SXM2...", None),
        ("| N/A   30C    P0    70W / 700W |   1234MiB / 81559MiB |      0%      Default |", "", 81559 / 1024),
        ("_CudaDeviceProperties(name='NVIDIA L40S', major=8, minor=9, total_memory=45488MB, multi_processor_count=142)",
         "NVIDIA L40S", 45488 / 1024),
        ("StreamExecutor device (0): NVIDIA GB200, Compute Capability 10.0", "NVIDIA GB200", None),
        ("Created device /GPU:0 with 38000 MB memory:  -> device: 0, name: NVIDIA A100-SXM4-40GB, pci bus id: 0000:07",
         "NVIDIA A100-SXM4-40GB", None),
        ('  "gpu_name": "NVIDIA H20",', "NVIDIA H20", None),
        ("CUDA out of memory. GPU 3 has a total capacity of 79.10 GiB of which 1 GiB is free", "", 79.1),
        ("device_name: cuda", "", None),
        ("NVIDIA Release 24.05 (build 91431255)", "", None),
        ("Building 1-D device mesh with ['dp_shard'], [8]", "", None),
    ],
)  # fmt: skip
def test_where_programs_name_their_device(line, name, gib):
    devices = Devices()
    devices.feed(line)
    assert devices.name == name
    assert devices.memory_bytes == (None if gib is None else pytest.approx(gib * GIB))


def test_the_first_device_counts():
    devices = Devices()
    for line in ("GPU 0: NVIDIA H100 80GB HBM3 (UUID: a)", "GPU 1: NVIDIA B200 (UUID: b)"):
        devices.feed(line)
    assert devices.name == "NVIDIA H100 80GB HBM3"


def said(device: str, name: str = "", capacity_gib: float | None = None, peak_gib: float | None = None) -> str:
    sizes = (None if gib is None else gib * GIB for gib in (capacity_gib, peak_gib))
    return "; ".join(device_contradictions(load_device(device), "c", name, *sizes))


def test_another_device_or_another_memory_is_a_contradiction():
    assert said("h100-sxm", "NVIDIA B200", 178.36) == "c has h100-sxm, but the run names NVIDIA B200 (b200-sxm)"
    assert said("h100-sxm", "NVIDIA H800") and said("h100-sxm", "NVIDIA H100 PCIe") and said("b200-sxm", "NVIDIA GB200")
    assert "79.6 GiB of memory, but the run has 141 GiB" in said("h100-sxm", capacity_gib=141)
    assert "40 GiB of memory, but the run used 45 GiB" in said("a100-sxm-40gb", peak_gib=45)


def test_one_device_by_another_name_is_none():
    assert said("h100-sxm") == said("h100-sxm", "NVIDIA H100 80GB HBM3", 79.1, 77.0) == ""
    assert said("h100-sxm", "some accelerator", 80.0) == ""
    assert said("a100-sxm-80gb", "NVIDIA A100 80GB") == ""
    assert "names NVIDIA A100 80GB PCIe (a100-pcie-80gb)" in said("a100-sxm-80gb", "NVIDIA A100 80GB PCIe")


def test_a_device_of_the_user_is_held_by_its_figures():
    own = replace(load_device("h100-sxm"), name="ours", like=None)
    assert device_contradictions(own, "c", "NVIDIA H100 80GB HBM3", None, None) == ()
    assert device_contradictions(own, "c", "NVIDIA H200", None, None) == (
        "c has ours, but the run names NVIDIA H200 (h200-sxm)",
    )
    assert device_contradictions(replace(own, like="h200-sxm"), "c", "NVIDIA H200", None, None) == ()
