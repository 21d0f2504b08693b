"""Names of devices as tables and drivers write them: found word by word, and never taken for another chip."""

from __future__ import annotations

import pytest

from steptime.hardware.library import _aliases, device_named, device_names

FOUND = {
    "RTX-PRO-6000-BSE": "rtx-pro-6000", "NVIDIA RTX PRO 6000 Blackwell Server Edition": "rtx-pro-6000",
    "NVIDIA GH200 SXM": "gh200-96gb", "NVIDIA GH200 480GB": "gh200-96gb", "NVIDIA GH200 144G HBM3e": "gh200-144gb",
    "A100 PCIe 80GB": "a100-pcie-80gb", "A100-40GB-PCIe": "a100-pcie-40gb", "NVIDIA A100-SXM4-40GB": "a100-sxm-40gb",
    "A100-80G": "a100-sxm-80gb", "H100 SXM 80 GB": "h100-sxm", "H100 (PCIe)": "h100-pcie", "H100 96GB": "h100-sxm-96gb",
    "B200-SXM6-180GB": "b200-sxm", "B200 192GB": "b200-sxm", "NVIDIA B300 SXM6 AC": "b300-sxm",
    "GB200 NVL72": "gb200", "L40S PCIe": "l40s", "AMD Instinct MI300X OAM": "mi300x", "MI300X-192GB": "mi300x",
    "Radeon Instinct MI25": "mi25", "Google Cloud TPU v5p": "tpu-v5p", "Habana Gaudi2": "gaudi2",
    "AWS Trainium2": "trainium2", "rtx4090": "rtx-4090",
}  # fmt: skip
OTHERS = (
    "NVIDIA GeForce RTX 4090 Laptop GPU", "RTX 4090 D", "NVIDIA GeForce RTX 3090 Ti", "Quadro RTX 6000", "NVIDIA L40",
    "NVIDIA H800 PCIe", "B200 PCIe", "Tesla P100-SXM2-16GB", "V100S-PCIE-32GB", "NVIDIA H20 141GB", "H100 40GB",
    "A100 96GB", "H100 SXM 64GB", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "A100-SXM(80 or 40 unstated)", "Trainium",
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "MI200 GCD", "80GB", "nvidia", "gpu", "sxm", "",
)  # fmt: skip


@pytest.mark.each("name", FOUND)
def test_spellings_of_a_device(name: str) -> None:
    found = device_named(name)
    assert found is not None and found.name == FOUND[name]


@pytest.mark.each("name", OTHERS)
def test_other_chips_are_not_taken_for_one_of_the_catalogue(name: str) -> None:
    assert device_named(name) is None


def test_names_and_aliases_mean_themselves() -> None:
    known = {name: name for name in device_names()} | _aliases("device")
    found = {name: device_named(name) for name in known}
    assert {name: device.name for name, device in found.items() if device is not None} == known
