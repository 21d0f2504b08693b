"""Profile files: read back as written, merged by curve, refused when malformed; nearest architectures; transfer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from steptime.errors import FieldError, InputFileError, UserError
from steptime.hardware import device_names, load_device
from steptime.hardware.profiles import (
    distance,
    load_profile,
    nearest,
    profile_from,
    profile_names,
    profile_toml,
    read_profile,
    save_curves,
)
from steptime.hardware.records import Curve, Profile
from steptime_lab.calibrate.gemm import FAMILY
from steptime_lab.calibrate.transfer import outside, predict, transferred_curve, widened

CURVE = Curve(
    family="gemm", dtype="bf16", coefficients={c.name: c.start for c in FAMILY.coefficients}, points=12,
    ranges={"m": (1.0, 1024.0)}, median_ape=0.05, mean_ape=0.07, bias=-0.01, band=(0.9, 1.2),
    source='a "quoted" source\nof two lines \\ Müller',
)  # fmt: skip
SHAPE = {"m": 512.0, "n": 512.0, "k": 512.0, "batch": 1.0, "a_bytes": 2.0, "b_bytes": 2.0, "out_bytes": 2.0}


def test_a_profile_reads_back_as_it_was_written(tmp_path: Path) -> None:
    path = save_curves("h100-sxm", [CURVE], tmp_path)
    assert read_profile(path) == Profile(device="h100-sxm", curves=(CURVE,))


def test_two_writers_keep_each_others_curves(tmp_path: Path) -> None:
    other = replace(CURVE, family="attention")
    save_curves("x", [CURVE], tmp_path)
    save_curves("x", [other], tmp_path)
    save_curves("x", [replace(CURVE, points=99)], tmp_path)
    profile = read_profile(tmp_path / "x.toml")
    assert {(c.family, c.points) for c in profile.curves} == {("attention", 12), ("gemm", 99)}
    assert [p.name for p in tmp_path.iterdir()] == ["x.toml"]
    assert profile.curve("gemm", "bf16") == replace(CURVE, points=99)
    assert profile.curve("gemm", "bf16", "eager") is None


@pytest.mark.each(
    ("old", "new", "field"),
    [
        ("points = 12", "points = 1.5", "points"),
        ("points = 12", "points = true", "points"),
        ("points = 12", "pints = 12", "pints"),
        ("bias = -0.01", "bias = nan", "bias"),
        ("bias = -0.01", 'bias = "low"', "bias"),
        ("band = [0.9, 1.2]", "band = [1.2, 0.9]", "band"),
        ("band = [0.9, 1.2]", "band = [0.9]", "band"),
        ('timer = "kernel"', 'timer = "wall"', "timer"),
        ('kind = "fitted"', 'kind = "guess"', "kind"),
        ('family = "gemm"', 'family = ""', "family"),
        ("latency_s = 3e-06", 'latency_s = "3 us"', "latency_s"),
        ("m = [1.0, 1024.0]", "m = 1.0", "m"),
        ('device = "x"', 'device = "x"\nbase = "y"', "base"),
    ],
)
def test_a_malformed_profile_names_the_field(tmp_path: Path, old: str, new: str, field: str) -> None:
    text = profile_toml(Profile(device="x", curves=(CURVE,)))
    assert old in text
    path = tmp_path / "x.toml"
    path.write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(FieldError, match=field):
        read_profile(path)


def test_a_profile_that_is_no_table_of_curves() -> None:
    with pytest.raises(FieldError, match="curves"):
        profile_from({"device": "x", "curves": "none"}, "x.toml")


def test_a_curve_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(profile_toml(Profile(device="x", curves=(CURVE, CURVE))), encoding="utf-8")
    with pytest.raises(FieldError, match="two curves of gemm bf16 kernel"):
        read_profile(path)


def test_files_that_are_no_profiles(tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("device = ", encoding="utf-8")
    for path in (broken, tmp_path / "absent.toml", tmp_path):
        with pytest.raises(InputFileError):
            read_profile(path)


def test_a_name_that_is_a_path_finds_nothing() -> None:
    assert load_profile("../devices/h100-sxm") is None
    assert load_profile("nothing") is None


def test_the_users_folder_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_curves("h100-sxm", [CURVE], tmp_path / "profiles")
    monkeypatch.setenv("STEPTIME_PATH", str(tmp_path))
    assert load_profile("h100-sxm") == Profile(device="h100-sxm", curves=(CURVE,))


@pytest.mark.each("name", profile_names())
def test_every_profile_of_the_catalogue(name: str) -> None:
    profile = load_profile(name)
    assert profile is not None and profile.device == name
    for curve in profile.curves:
        assert curve.source
        assert "NaN" not in str(curve)


def test_distance_is_symmetric_and_zero_to_itself() -> None:
    devices = [load_device(name) for name in device_names()[:12]]
    for one in devices:
        assert distance(one, one) < 3 * 0.5
        for other in devices:
            assert distance(one, other) == pytest.approx(distance(other, one))


@pytest.mark.parametrize(
    ("name", "expected"), [("h200-sxm", "h100-sxm"), ("b300-sxm", "b200-sxm"), ("a100-pcie-80gb", "a100-sxm-80gb")]
)
def test_the_nearest_architecture(name: str, expected: str) -> None:
    candidates = [load_device(n) for n in ("a100-sxm-80gb", "h100-sxm", "b200-sxm", "mi300x", "t4", name)]
    order = nearest(load_device(name), candidates)
    assert order[0].name == expected
    assert name not in [device.name for device in order]


def test_a_transferred_curve_is_between_its_neighbours_and_less_sure() -> None:
    names = ("a100-sxm-80gb", "h100-sxm")
    devices = {name: load_device(name) for name in names}
    low = replace(CURVE, coefficients=CURVE.coefficients | {"latency_s": 2e-6})
    high = replace(CURVE, coefficients=CURVE.coefficients | {"latency_s": 4e-6})
    curve = transferred_curve(load_device("h200-sxm"), dict(zip(names, (low, high), strict=True)), devices)
    assert 3e-6 < curve.coefficients["latency_s"] < 4e-6, "nearer to the h100"
    assert curve.kind == "assumed" and curve.points == 0
    assert curve.band[0] < CURVE.band[0] and curve.band[1] > CURVE.band[1]
    assert "h100-sxm, a100-sxm-80gb" in curve.source
    with pytest.raises(UserError, match="no curve"):
        transferred_curve(load_device("h200-sxm"), {}, devices)


def test_what_a_transfer_rests_on() -> None:
    names = ("a100-sxm-80gb", "h100-sxm")
    devices = {name: load_device(name) for name in (*names, "arc-b60")}
    far, near = (replace(CURVE, coefficients=CURVE.coefficients | {"latency_s": x}, points=500) for x in (2e-6, 4e-6))
    residual = {"residual_2_2_0": -0.1}
    far, left = (replace(curve, coefficients=curve.coefficients | residual) for curve in (far, near))
    target = load_device("h200-sxm")
    sure = transferred_curve(target, {names[0]: far, names[1]: left}, devices)
    assert not any(name.startswith("residual") for name in sure.coefficients)
    scant = transferred_curve(target, {names[0]: far, names[1]: replace(left, points=50)}, devices)
    assert scant.coefficients["latency_s"] < sure.coefficients["latency_s"], "few measurements count less"
    stranger = transferred_curve(target, {"arc-b60": near}, devices)
    assert stranger.band[0] < sure.band[0] and stranger.band[1] > sure.band[1], "no device of the vendor"


def test_the_band_widens_outside_the_measured_shapes() -> None:
    device = load_device("h100-sxm")
    inside = predict(FAMILY, CURVE, device, SHAPE)
    beyond = predict(FAMILY, CURVE, device, SHAPE | {"m": 8192.0})
    assert inside.low_s == pytest.approx(0.9 * inside.seconds) and inside.high_s == pytest.approx(1.2 * inside.seconds)
    assert beyond.high_s / beyond.seconds > 1.3 and beyond.low_s / beyond.seconds < 0.8
    assert outside(CURVE, SHAPE) == 0.0
    many = predict(FAMILY, CURVE, device, SHAPE | {"m": np.array([512.0, 8192.0])})
    np.testing.assert_allclose(many.high_s, [inside.high_s, beyond.high_s], rtol=1e-12)


def test_widening_adds_in_squares() -> None:
    once = widened((0.9, 1.1), 0.1)
    twice = widened(once, 0.1)
    np.testing.assert_allclose(twice, widened((0.9, 1.1), 0.1 * 2**0.5), rtol=1e-4)
