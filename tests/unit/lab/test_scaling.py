"""How coefficients follow the datasheet from device to device, and the median that bears an outlier among them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lacking_curves import beside_sixteen_bits, lacking_curves
from steptime.hardware import device_names, load_device
from steptime.hardware.profiles import load_profile
from steptime.hardware.records import Curve
from steptime_lab.calibrate.gemm import COEFFICIENTS, FAMILY, STRIDE, gemm_device
from steptime_lab.calibrate.transfer import (
    PROCESS_POWER,
    SCALED_NEIGHBOURS,
    TRANSFER_BANDS,
    carried,
    clock_Hz,
    large_share,
    traits,
    transferred_curve,
    weighted_median,
    within_peak,
)

HERE = replace(
    load_device("h100-sxm"), name="here", clock_Hz=1e9, sm_count=100, memory_Bps=1e12, power_W=500.0,
    matrix_flops_per_s={"bf16": 1e14}, vector_flops_per_s={"fp32": 2e13},
)  # fmt: skip
CURVE = Curve(
    family="gemm", dtype="bf16", coefficients={c.name: c.start for c in COEFFICIENTS}, points=1000,
    median_ape=0.05, mean_ape=0.07, bias=0.0, band=(0.9, 1.1), source="made up",
)  # fmt: skip


def factors(curve: Curve = CURVE, **figures: object) -> dict[str, float]:
    """Coefficients on a device with other figures over those here, where they differ."""
    there = carried(curve, HERE, replace(HERE, name="there", **figures))  # type: ignore[arg-type]
    ratios = {name: value / curve.coefficients[name] for name, value in there.items()}
    return {name: ratio for name, ratio in ratios.items() if ratio != 1}


def test_latencies_are_clocks_but_for_the_launch_from_the_host() -> None:
    twice = factors(clock_Hz=2e9, sm_count=50)  # as wide as before per clock of all: width and drain stay
    assert twice == {"latency_s": pytest.approx(0.5), "step_s": pytest.approx(0.5)}
    assert factors(replace(CURVE, timer="eager"), clock_Hz=2e9, sm_count=50) == {"step_s": pytest.approx(0.5)}


def test_bandwidth_width_and_power_by_hand() -> None:
    assert factors(memory_Bps=1.5e12) == {
        "latency_s": pytest.approx(1.5**-0.15), "cached_cost": pytest.approx(1.5),
    }  # fmt: skip
    assert factors(power_W=1000.0) == {"compute_efficiency": pytest.approx(2**0.2)}
    assert factors(matrix_flops_per_s={"bf16": 2e14}) == {
        "step_s": pytest.approx(2**-0.5), "compute_efficiency": pytest.approx(2**-0.2),
    }  # fmt: skip


def test_a_process_that_needs_more_power_holds_the_clock_of_matrix_units() -> None:
    """To N7 from N5: 1 / 0.7 of the power, as TSMC says; the rule of both is by hand."""
    assert factors(architecture="ampere") == {"compute_efficiency": pytest.approx((0.4 / 0.28) ** -0.3)}
    assert factors(architecture="ampere-rtx") == {"compute_efficiency": pytest.approx((0.54 / 0.28) ** -0.3)}
    assert factors(architecture="ada") == factors(architecture="a new one") == factors(architecture=None) == {}
    wide = replace(CURVE, dtype="fp32")
    assert factors(wide, architecture="ampere") == {}, "lanes of single precision stay below the limit"


def test_every_architecture_of_a_gpu_of_the_catalogue_has_a_process() -> None:
    found = {device.architecture for name in device_names() if (device := load_device(name)).is_gpu}
    assert found - {None} == set(PROCESS_POWER)


def test_processes_need_what_their_makers_say_of_each_against_the_one_before() -> None:
    n7 = 1 - 0.6
    steps = {
        "maxwell": 1 / (1 - 0.7), **dict.fromkeys(("pascal", "pascal-gp102", "vega"), 1.0),
        **dict.fromkeys(("volta", "turing"), 1 - 0.25),
        "ampere-rtx": (1 - 0.4) * (1 - 0.15) * (1 - 0.1) / (1 - 0.15), "ampere": n7, "cdna1": n7, "cdna2": n7,
        **dict.fromkeys(("ada", "hopper", "blackwell", "blackwell-rtx", "cdna3"), n7 * 0.7), "cdna4": n7 * 0.7 * 0.7,
    }  # fmt: skip
    assert pytest.approx(steps, rel=0.03) == PROCESS_POWER


def test_what_a_datasheet_lacks_changes_nothing() -> None:
    assert factors(power_W=None) == {}
    assert factors(clock_Hz=None, vector_flops_per_s={}) == {}
    assert factors(replace(CURVE, family="attention_fwd"), clock_Hz=2e9) == {}
    assert factors(replace(CURVE, dtype="fp8"), clock_Hz=2e9, sm_count=50) == {
        "latency_s": pytest.approx(0.5), "step_s": pytest.approx(0.5),
    }, "no peak of the dtype"  # fmt: skip


def test_no_large_product_beats_the_peak_of_a_device() -> None:
    h20, numbers = load_device("h20"), gemm_device(load_device("h20"), "bf16")
    wild = CURVE.coefficients | {"compute_efficiency": 1.3}
    held = within_peak(wild, h20, "bf16")
    sizes = {"a_bytes": 2.0, "b_bytes": 2.0, "out_bytes": 2.0, "batch": 1.0}
    times = [float(FAMILY.predict({"m": n, "n": n, "k": n, **sizes}, numbers, held)) for n in (8192.0, 16384.0)]
    shares = [2 * n**3 / t / h20.matrix_rate("bf16") for n, t in zip((8192.0, 16384.0), times, strict=True)]
    assert shares[1] == pytest.approx(1.0, abs=1e-3) and shares[0] <= 1.0
    assert {n for n in wild if wild[n] != held[n]} == {"compute_efficiency"}
    assert within_peak(CURVE.coefficients, h20, "bf16") == CURVE.coefficients, "0.8 of the peak inside a tile"
    assert within_peak(wild, load_device("arc-b60"), "fp8") == wild, "no peak to beat"


def test_coefficients_stay_within_the_bounds_of_the_fit() -> None:
    slow = carried(CURVE, HERE, replace(HERE, memory_Bps=1e15, clock_Hz=1e6))
    for coefficient in COEFFICIENTS:
        assert coefficient.low <= slow[coefficient.name] <= coefficient.high
    assert slow["cached_cost"] == next(c.high for c in COEFFICIENTS if c.name == "cached_cost")


def test_the_clock_is_that_at_which_the_vector_units_reach_their_peak() -> None:
    assert clock_Hz(HERE) == 1e9
    unsaid = replace(HERE, clock_Hz=None)
    assert clock_Hz(replace(unsaid, vector_flops_per_s={"fp32": 1.5e9 * 100 * 256})) == pytest.approx(1.5e9)
    assert clock_Hz(replace(unsaid, vector_flops_per_s={"fp32": 1.5e9 * 100 * 128})) == pytest.approx(1.5e9)
    assert clock_Hz(replace(HERE, sm_count=2)) is None, "few large cores are no multiprocessors"
    for name in device_names():
        clock = clock_Hz(load_device(name))
        assert clock is None or 0.9e9 < clock < 3e9, name
    assert set(traits(load_device("tpu-v5e"), "bf16")) == {"bandwidth"}


def test_the_weighted_median_by_hand() -> None:
    assert weighted_median([5.0], [0.1]) == 5.0
    assert weighted_median([1.0, 2.0, 9.0], [1.0, 1.0, 8.0]) == pytest.approx(2 + 7 * 3.5 / 4.5)
    assert weighted_median([9.0, 1.0], [8.0, 1.0]) == pytest.approx(1 + 8 * 4 / 4.5)
    assert weighted_median([9.0, 1.0, 10.0], [8.0, 1.0, 1.0]) == 9.0
    assert weighted_median([1.0, 2.0], [3.0, 1.0]) == pytest.approx(1.25)


def test_one_odd_device_does_not_move_a_transferred_product() -> None:
    names = ("a100-sxm-80gb", "h100-sxm", "h200-sxm", "b200-sxm", "gb300")
    devices = {name: load_device(name) for name in names}
    target = load_device("b300-sxm")
    plain = dict.fromkeys(names, CURVE)
    odd = plain | {"h100-sxm": replace(CURVE, coefficients=CURVE.coefficients | {"throttle": 1.0, "overlap": 20.0})}
    before, after = (transferred_curve(target, curves, devices).coefficients for curves in (plain, odd))
    assert after["throttle"] == before["throttle"] == pytest.approx(CURVE.coefficients["throttle"])
    other = {name: replace(curve, family="layernorm") for name, curve in odd.items()}
    assert transferred_curve(target, other, devices).coefficients["throttle"] > 1.05 * before["throttle"]


def test_cards_of_one_architecture_share_the_vote_on_what_its_library_has() -> None:
    names = ("a100-sxm-40gb", "a100-sxm-80gb", "a100-pcie-80gb", "h100-sxm", "l40s")
    devices = {name: load_device(name) for name in names}
    fixed = replace(CURVE, coefficients=CURVE.coefficients | {"batched_tile": 4.0, "throttle": 0.4})
    chosen = replace(CURVE, coefficients=CURVE.coefficients | {"batched_tile": 1.0, "throttle": 0.1})
    curves = {name: fixed if name.startswith("a100") else chosen for name in names}
    found = transferred_curve(load_device("a40"), curves, devices).coefficients
    assert found["throttle"] > 0.39, "three cards"
    assert found["batched_tile"] < 1.5, "one architecture of three"


def test_a_card_has_the_library_of_its_own_architecture() -> None:
    names = ("a100-sxm-80gb", "h100-sxm", "b200-sxm", "l40s")
    devices = {name: load_device(name) for name in names}
    fixed = replace(CURVE, coefficients=CURVE.coefficients | {"batched_tile": 4.0, "throttle": 0.4})
    chosen = replace(CURVE, coefficients=CURVE.coefficients | {"batched_tile": 1.0, "throttle": 0.1})
    curves = dict.fromkeys(names, chosen) | {"l40s": fixed}
    found = transferred_curve(load_device("l4"), curves, devices).coefficients
    assert found["batched_tile"] == 4.0, "as on the only other card of its kind"
    assert found["throttle"] < 0.39, "which has one vote of four on everything else"


def test_a_transferred_product_carries_and_says_from_where() -> None:
    names = [n for n in device_names() if "bf16" in load_device(n).matrix_flops_per_s and n != "b200-sxm"][:9]
    devices = {name: load_device(name) for name in names}
    given = replace(CURVE, coefficients=CURVE.coefficients | {STRIDE.name: 0.05, "residual_2_2_0": -0.1})
    curve = transferred_curve(load_device("b200-sxm"), dict.fromkeys(names, given), devices)
    assert len(curve.source.split(", ")) == SCALED_NEIGHBOURS
    assert curve.coefficients[STRIDE.name] == pytest.approx(0.05)
    assert "residual_2_2_0" not in curve.coefficients
    assert curve.coefficients["latency_s"] != pytest.approx(CURVE.coefficients["latency_s"], rel=0.01)


@pytest.mark.parametrize("band", TRANSFER_BANDS.values())
def test_the_band_of_a_transfer_holds_the_usual_error(band: tuple[float, float]) -> None:
    assert band[0] <= -0.24 and band[1] >= 0.24


def _reaching(dtype: str, efficiency: float) -> Curve:
    return replace(CURVE, dtype=dtype, coefficients=CURVE.coefficients | {"compute_efficiency": efficiency})


def test_a_transferred_dtype_gains_no_more_over_16_bits_than_on_its_donors() -> None:
    device, donor = load_device("a100-sxm-80gb"), load_device("h100-sxm")
    curve, own = _reaching("tf32", 1.0), _reaching("bf16", 0.7)
    donors = [(donor, _reaching("tf32", 0.72), _reaching("bf16", 0.8))]
    gain = [large_share(c.coefficients, donor, c.dtype) for c in donors[0][1:]]
    want = large_share(own.coefficients, device, "bf16") * gain[0] / gain[1]
    held = beside_sixteen_bits(curve, device, own, donors)
    assert large_share(held.coefficients, device, "tf32") == pytest.approx(want, rel=1e-3)
    assert want < 0.8 * large_share(curve.coefficients, device, "tf32")
    slow = _reaching("tf32", 0.3)
    assert beside_sixteen_bits(slow, device, own, donors).coefficients == slow.coefficients, "an upper bound alone"


def test_tf32_of_the_a100_is_no_nearer_to_its_peak_than_its_16_bits() -> None:
    """Both keep the same matrix units busy; measured on H100 and B200 the shares of the peaks are within 5 %."""
    device, profile = load_device("a100-sxm-80gb"), load_profile("a100-sxm-80gb")
    assert profile is not None
    shares = {}
    for dtype in ("bf16", "tf32"):
        curve = profile.curve("gemm", dtype)
        assert curve is not None
        shares[dtype] = large_share(curve.coefficients, device, dtype)
    assert 0.6 < shares["tf32"] <= 1.05 * shares["bf16"]


@pytest.mark.slow
def test_the_transferred_curves_of_the_catalogue_are_those_of_today() -> None:
    """What ``python benchmarks/bench_kernels.py --transfer`` writes; a device that joins the catalogue needs it."""
    old = [
        (name, curve.family, curve.dtype)
        for name, curves in lacking_curves()
        for curve in curves
        if (stored := load_profile(name)) is None
        or (found := stored.curve(curve.family, curve.dtype, curve.timer)) is None
        or (found.coefficients, found.band, found.source) != (curve.coefficients, curve.band, curve.source)
    ]
    assert old == []
