"""Measured curves beside a hardware file: where they may lie, what a wrong one is told, when they are dropped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from steptime.errors import FieldError, InputFileError, UserError
from steptime.estimate.notes import changed_device
from steptime.hardware import Cluster, Device, load_cluster, load_device
from steptime.hardware.profiles import profile_toml
from steptime.hardware.records import Curve, Profile

CURVE = Curve(
    family="linear/copy", dtype="fp32", coefficients={"latency_s": 1e-6, "rate_per_s": 1e9}, points=9, median_ape=0.1,
    mean_ape=0.1, bias=0.0, band=(0.9, 1.1), source="bench",
)  # fmt: skip
PROFILE = Profile(device="mine", curves=(CURVE,))
DEVICE = """
memory = "48 GB"
memory_bandwidth = "900 GB/s"
{curves}
matrix = {{bf16 = "200 TFLOP/s"}}
vector = {{fp32 = "50 TFLOP/s"}}
"""
CLUSTER = "[device]" + DEVICE + '[levels.network]\nlink = "roce-400"\n'


def folder(path: Path) -> Path:
    (path / "deep").mkdir(parents=True)
    for name in ("a.curves.toml", "deep/b.curves.toml", "../outside.toml"):
        (path / name).write_text(profile_toml(PROFILE), encoding="utf-8")
    return path


def device_of(loaded: Device | Cluster) -> Device:
    return loaded.device if isinstance(loaded, Cluster) else loaded


@pytest.fixture(params=[(load_device, DEVICE), (load_cluster, CLUSTER)], ids=["device", "cluster"])
def given(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Device]:
    """Loads a file with that line in it."""
    load, text = request.param
    here = folder(tmp_path / "here")

    def made(line: str) -> Device:
        (here / "own.toml").write_text(text.format(curves=line), encoding="utf-8")
        return device_of(load(here / "own.toml"))

    return made


@pytest.mark.each("name", ["a.curves.toml", "./a.curves.toml", "deep/b.curves.toml", "deep/../a.curves.toml"])
def test_curves_beside_the_file_are_read(name: str, given: Callable[[str], Device]) -> None:
    assert given(f'curves = "{name}"').curves == PROFILE
    assert given("").curves is None


@pytest.mark.each(
    ("line", "words"),
    [
        ('curves = "../outside.toml"', "leads out of the folder"),
        ('curves = "deep/../../outside.toml"', "leads out of the folder"),
        ('curves = "none.toml"', "there is no file 'none.toml' next to this one"),
        ('curves = "a.curves.tml"', "not a relative path to a .toml file"),
        ('curves = "/etc/hosts.toml"', "not a relative path to a .toml file"),
        ('curves = ""', "not a relative path to a .toml file"),
        ('curves = "a\\u0000.toml"', "is not a path"),
        ("curves = 3", "is not a text"),
        ("curves = []", "is not a text"),
    ],
)
def test_other_places_are_refused(line: str, words: str, given: Callable[[str], Device]) -> None:
    with pytest.raises(FieldError, match=words) as caught:
        given(line)
    assert caught.value.where.endswith("own.toml") and caught.value.field.endswith("curves")


def test_a_link_out_of_the_folder_is_refused(given: Callable[[str], Device], tmp_path: Path) -> None:
    (tmp_path / "here" / "link.toml").symlink_to(tmp_path / "outside.toml")
    with pytest.raises(FieldError, match="leads out of the folder"):
        given('curves = "link.toml"')


@pytest.mark.parametrize(
    ("text", "error"),
    [("device = ", InputFileError), ('device = "x"\nspeed = 3\n', FieldError), ("#" * 2**21, InputFileError)],
)
def test_a_broken_companion_is_named(
    text: str, error: type[UserError], given: Callable[[str], Device], tmp_path: Path
) -> None:
    (tmp_path / "here" / "c.toml").write_text(text)
    with pytest.raises(error, match=r"c\.toml"):
        given('curves = "c.toml"')


def test_a_folder_is_no_companion(given: Callable[[str], Device], tmp_path: Path) -> None:
    (tmp_path / "here" / "d.toml").mkdir()
    with pytest.raises(InputFileError, match="is a folder"):
        given('curves = "d.toml"')


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("", True),
        ('name = "other"', True),
        ('memory = "96 GB"', True),  # no time depends on it
        ('power = "300 W"', True),
        ('memory_bandwidth = "1.7 TB/s"', False),
        ('matrix = {bf16 = "100 TFLOP/s"}', False),
        ('memory_bandwidth = "1.7 TB/s"\ncurves = "a.curves.toml"', True),
    ],
)
def test_other_numbers_over_a_measured_device_drop_its_curves(line: str, kept: bool, tmp_path: Path) -> None:
    here = folder(tmp_path / "here")
    (here / "deep" / "base.toml").write_text(DEVICE.format(curves='curves = "b.curves.toml"'))
    (here / "own.toml").write_text(f'base = "deep/base.toml"\n{line}\n')
    (here / "rig.toml").write_text(f'[device]\nbase = "deep/base.toml"\n{line}\n[levels.net]\nlink = "roce-400"\n')
    wanted: Any = PROFILE if kept else None
    for device in (load_device(here / "own.toml"), load_cluster(here / "rig.toml").device):
        assert (device.curves, device.without_curves) == (wanted, not kept)
        assert any("measured curves are left out" in note for note in changed_device(device)) == (not kept)


def test_a_number_given_again_keeps_the_curves(tmp_path: Path) -> None:
    here = folder(tmp_path / "here")
    text = DEVICE.format(curves='curves = "b.curves.toml"')
    (here / "deep" / "base.toml").write_text(text)
    again = next(line for line in text.splitlines() if line.startswith("memory_bandwidth"))
    (here / "own.toml").write_text(f'base = "deep/base.toml"\n{again}\n')
    assert load_device(here / "own.toml").curves == PROFILE


def test_a_device_is_called_changed_whatever_its_name_ends_in(tmp_path: Path) -> None:
    levels = '[levels.network]\nbandwidth = "50 GB/s"\n'
    device = '[device]\nmemory = "48 GB"\nmemory_bandwidth = "900 GB/s"\n'
    rates = 'matrix = {bf16 = "200 TFLOP/s"}\nvector = {fp32 = "50 TFLOP/s"}\n'
    texts = {
        "lab-device.toml": 'base = "h100-sxm"\n',
        "other.toml": f'[device]\nbase = "lab-device.toml"\nmemory_bandwidth = "4 TB/s"\n{levels}',
        "own.toml": device + rates + levels,
        "what-if.toml": 'base = "own.toml"\n[device]\nmemory_bandwidth = "5 TB/s"\n',
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    names = [load_cluster(tmp_path / name).device.name for name in ("other.toml", "own.toml", "what-if.toml")]
    assert names == ["lab-device-changed", "own-device", "own-device-changed"]
