"""Curves of devices that nobody measured, from relatives: the same chip, other units of one dtype, nearer donors."""

from __future__ import annotations

from dataclasses import replace
from math import log

import pytest

from lacking_curves import lacking_curves
from steptime.hardware import device_names, load_device
from steptime.hardware.profiles import distance, load_profile
from steptime.hardware.records import Curve
from steptime_lab.calibrate.transfer import large_share, transferred_curve, unlike_units


def products(device: str) -> dict[str, Curve]:
    """Transferred curves of products by dtype."""
    return {curve.dtype: curve for _, found in lacking_curves([device]) for curve in found if curve.family == "gemm"}


def rate(device: str, curve: Curve | None) -> float:
    """FLOP/s of a large product."""
    assert curve is not None
    record = load_device(device)
    return large_share(curve.coefficients, record, curve.dtype) * record.matrix_flops_per_s[curve.dtype]


def test_units_are_unlike_by_what_a_dtype_gains_over_16_bits() -> None:
    gb200, gb300, b200 = (load_device(name) for name in ("gb200", "gb300", "b200-sxm"))
    assert unlike_units(gb200, gb300, "fp4") == pytest.approx(log(6 / 4))
    assert unlike_units(gb200, b200, "fp4") == 0
    assert unlike_units(load_device("h100-sxm"), b200, "tf32") == 0, "495 of 989 and 1100 of 2250 are halves"
    assert unlike_units(load_device("h100-sxm"), gb300, "fp4") == 0, "nothing to compare"
    assert unlike_units(load_device("a100-sxm-80gb"), load_device("h100-sxm"), "fp32") == 0, "other units than 16 bits"


def test_matrix_units_that_fetch_their_operands_are_those_of_hopper_and_of_blackwell_in_data_centres() -> None:
    fetching = {load_device(name).architecture for name in device_names() if load_device(name).fetches_operands}
    assert fetching == {"hopper", "blackwell"}
    assert not load_device("rtx-pro-6000").fetches_operands, "SM120 has mma.sync"


def test_products_come_from_cards_with_the_same_instructions_first() -> None:
    """An A100 by its datasheet is nearest to an H100, whose kernels it cannot run."""
    names = ("h100-sxm", "rtx-4090", "l40s")
    records = {name: load_device(name) for name in names}
    curves = {name: profile.curve("gemm", "bf16") for name in names if (profile := load_profile(name)) is not None}
    target = load_device("a100-sxm-80gb")
    assert min(names, key=lambda name: distance(target, records[name])) == "h100-sxm"
    order = transferred_curve(target, {n: c for n, c in curves.items() if c is not None}, records).source
    assert order.endswith("h100-sxm") and order.count(",") == 2
    single = {name: replace(curve, dtype="fp32") for name, curve in curves.items() if curve is not None}
    assert transferred_curve(target, single, records).source.startswith("transferred from h100-sxm"), "lanes are alike"
    nobodys = replace(target, architecture=None)
    known = transferred_curve(nobodys, {n: c for n, c in curves.items() if c is not None}, records)
    assert known.source.startswith("transferred from h100-sxm"), "nobody knows what instructions it has"


@pytest.mark.slow
def test_products_of_16_bits_hear_all_cards_of_a_vendor_once_one_is_alike() -> None:
    """The L4 is near the L40S alone; the Gaudi 2 is near nothing, though an Arc has the same vendor."""
    l4 = products("l4")
    assert l4["bf16"].source.count(",") > 4 and l4["fp8"].source == "transferred from l40s"
    assert not products("gaudi2")


def test_four_bits_of_the_gb200_lie_between_those_of_its_relatives() -> None:
    found = products("gb200")["fp4"]
    slow, fast = (rate(name, load_profile(name).curve("gemm", "fp4")) for name in ("b200-sxm", "gb300"))  # type: ignore[union-attr]
    assert found.source.startswith("transferred from b200-sxm")
    assert 0.97 * slow <= rate("gb200", found) <= fast < 10e15 * 0.7


@pytest.mark.quick(without=["h800-sxm-h100-sxm"])
@pytest.mark.parametrize(("device", "same"), [("a800-sxm-80gb", "a100-sxm-80gb"), ("h800-sxm", "h100-sxm")])
def test_a_device_that_differs_in_its_links_alone_has_the_curves_of_its_twin_as_they_are(
    device: str, same: str
) -> None:
    twin = load_profile(same)
    assert twin is not None
    for dtype in ("bf16", "fp16"):
        found, own = products(device)[dtype], twin.curve("gemm", dtype)
        assert own is not None and found.coefficients == own.coefficients
        assert (found.source, found.kind, found.points) == (f"transferred from {same}", "assumed", 0)
        assert any(name.startswith("residual_") for name in found.coefficients)


@pytest.mark.slow
def test_of_two_formats_of_16_bits_that_of_the_nearer_donors_stands_for_both() -> None:
    assert set(products("gb200")) == {"bf16", "fp8", "fp4", "tf32"}
    assert {"fp16", "bf16"} <= set(products("h800-sxm")), "both were measured on the nearest"
    assert "fp16" in products("v100-sxm2-32gb"), "it has no other"


@pytest.mark.quick("a100-pcie-40gb-ampere")
@pytest.mark.parametrize(
    ("device", "own"), [("h200-nvl", "hopper"), ("a100-pcie-40gb", "ampere"), ("gb200", "blackwell")]
)
def test_attention_comes_from_devices_of_the_same_architecture_where_one_is_measured(device: str, own: str) -> None:
    found = [c for _, curves in lacking_curves([device]) for c in curves if c.family.startswith("attention_")]
    donors = {name for c in found for name in c.source.removeprefix("transferred from ").split(", ")}
    assert donors and {load_device(name).architecture for name in donors} == {own}


def test_attention_of_an_architecture_that_nobody_measured_comes_from_others() -> None:
    curves = [c for _, found in lacking_curves(["rtx-a6000"]) for c in found if c.family == "attention_fwd"]
    donors = {name for c in curves for name in c.source.removeprefix("transferred from ").split(", ")}
    assert len({load_device(name).architecture for name in donors} - {"ampere-rtx"}) > 1
