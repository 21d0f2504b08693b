"""Users' own files: what they may say, and what a wrong one is told."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steptime.errors import FieldError, InputFileError, UnknownNameError, UserError
from steptime.hardware import Kind, cluster_names, device_names, device_within, load_cluster, load_device
from steptime.hardware.load import MAX_BYTES
from suites import examples

DEVICE = """
memory = "48 GB"
memory_bandwidth = "900 GB/s"
[matrix]
bf16 = "200 TFLOP/s"
[vector]
fp32 = "50 TFLOP/s"
"""
CLUSTER = """
device = "h100-sxm"
[levels.network]
link = "roce-400"
[levels.nvlink]
link = "nvlink4"
devices = 8
"""


@pytest.fixture(autouse=True)
def no_user_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("STEPTIME_PATH", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def write(folder: Path, text: str, name: str = "own.toml") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_a_datasheet_is_enough(tmp_path: Path) -> None:
    path = write(tmp_path, DEVICE)
    device = load_device(path)
    assert (device.name, device.vendor, device.memory_bytes) == ("own", "unknown", 48e9)
    assert device.sources["memory_bytes"].text == str(path)
    assert {source.kind for source in device.sources.values()} == {Kind.ASSUMED}
    assert (device.matrix_efficiency, device.l2_bytes) == (0.7, None)
    assert "2411.01137" in device.sources["matrix_efficiency"].text


def test_sources_of_single_fields(tmp_path: Path) -> None:
    text = 'source = "sheet"\nkind = "datasheet"\nmatrix_efficiency = 0.6\n' + DEVICE
    text += '[[sources]]\nfields = ["matrix.bf16", "matrix_efficiency"]\nsource = "bench"\n'
    text += '[[sources]]\nfields = ["matrix", "memory"]\nsource = "all"\nkind = "fitted"\n'
    sources = load_device(write(tmp_path, text)).sources
    assert (sources["memory_Bps"].text, sources["memory_Bps"].kind) == ("sheet", Kind.DATASHEET)
    assert (sources["memory_bytes"].text, sources["memory_bytes"].kind) == ("all", Kind.FITTED)
    assert sources["matrix_flops_per_s.bf16"].text == "bench", "the entry that lists the key itself wins"
    assert sources["matrix_efficiency"].kind is Kind.ASSUMED, "a source without a kind is not trusted"


def test_base_changes_single_fields(tmp_path: Path) -> None:
    device = load_device(write(tmp_path, 'base = "h100-sxm"\nmemory = "96 GB"\n[matrix]\nfp4 = "4 PFLOP/s"'))
    assert (device.memory_bytes, device.memory_Bps) == (96e9, 3.35e12)
    assert device.matrix_flops_per_s["fp4"] == 4e15
    assert device.matrix_flops_per_s["bf16"] == 989.4e12
    assert device.sources["memory_bytes"].kind is Kind.ASSUMED
    assert device.sources["memory_Bps"].kind is Kind.DATASHEET


def test_levels_are_ordered_by_size(tmp_path: Path) -> None:
    cluster = load_cluster(write(tmp_path, CLUSTER))
    assert [level.name for level in cluster.levels] == ["nvlink", "network"]
    assert cluster.device == load_device("h100-sxm")
    assert cluster.levels[1].link_Bps == 50e9


def test_what_if_on_a_cluster(tmp_path: Path) -> None:
    text = 'base = "dgx-h100"\n[device]\nmemory_bandwidth = "5 TB/s"\n[levels.nvlink]\ndevices = 64\n'
    text += '[levels.network]\nlink = "infiniband-xdr"\noversubscription = 2\nefficiency = 0.5'
    cluster = load_cluster(write(tmp_path, text))
    assert (cluster.device.name, cluster.device.memory_Bps) == ("h100-sxm-changed", 5e12)
    nvlink, network = cluster.levels
    assert (nvlink.devices, nvlink.link_Bps) == (64, 450e9)
    assert (network.link_Bps, network.oversubscription, network.efficiency) == (100e9, 2.0, 0.5)
    assert network.sources["link_Bps"].kind is Kind.DATASHEET
    assert network.sources["efficiency"].text.endswith("own.toml")


def test_link_to_the_host_of_ones_own(tmp_path: Path) -> None:
    """A device file gives it, the default where it does not; a cluster changes it like every number of its device."""
    assert load_device(write(tmp_path, DEVICE)).host_Bps == 20e9
    own = load_device(write(tmp_path, 'host_bandwidth = "100 GB/s"\nhost_efficiency = 0.5\n' + DEVICE))
    assert (own.host_link_Bps, own.host_Bps) == (100e9, 50e9)
    rig = load_cluster(write(tmp_path, 'base = "dgx-h100"\n[device]\nhost_bandwidth = "32 GB/s"'))
    assert rig.device.host_Bps == 20e9 and rig.device.memory_Bps == 3.35e12
    for wrong in ("host_bandwidth = 64", 'host_bandwidth = "64 GB"', "host_efficiency = 1.5"):
        with pytest.raises(FieldError, match=wrong.split()[0]):
            load_device(write(tmp_path, f"{wrong}\n{DEVICE}"))


def test_device_table_with_a_base_and_a_path_beside_the_cluster(tmp_path: Path) -> None:
    write(tmp_path, DEVICE, "part/chip.toml")
    named = CLUSTER.replace('"h100-sxm"', '"part/chip.toml"')
    assert load_cluster(write(tmp_path, named)).device.name == "chip"
    table = CLUSTER.replace('device = "h100-sxm"', "") + '[device]\nbase = "h200-sxm"\nname = "big"\nmemory = "1 TB"'
    device = load_cluster(write(tmp_path, table)).device
    assert (device.name, device.memory_bytes) == ("big", 1e12)


def test_inline_device_without_a_base(tmp_path: Path) -> None:
    text = CLUSTER.replace('device = "h100-sxm"', "")
    text += DEVICE.replace("[", "[device.").replace("memory =", "[device]\nmemory =")
    assert load_cluster(write(tmp_path, text)).device.memory_bytes == 48e9


def test_search_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, DEVICE, "config/steptime/devices/mine.toml")
    write(tmp_path, CLUSTER.replace("h100-sxm", "mine"), "lab/clusters/Rig.toml")
    monkeypatch.setenv("STEPTIME_PATH", f"{tmp_path / 'absent'}{os.pathsep}{tmp_path / 'lab'}")
    assert "mine" in device_names() and "rig" in cluster_names()
    assert load_cluster("RIG").device.name == "mine"
    write(tmp_path, DEVICE.replace("48 GB", "7 GB"), "lab/devices/mine.toml")
    assert load_device("mine").memory_bytes == 7e9, "$STEPTIME_PATH goes before the user's folder"


def test_the_device_of_a_cluster(tmp_path: Path) -> None:
    """By name, alias and file; a device stays what it is, and a wrong name gets the nearest devices."""
    assert device_within("dgx-h100") == device_within("h100") == load_device("h100-sxm")
    file = write(tmp_path, 'base = "dgx-h100"\n[device]\nmemory = "1 TB"\n')
    assert device_within(file) == load_cluster(file).device and device_within(file).memory_bytes == 1e12
    assert device_within(write(tmp_path, CLUSTER, "levels.toml")) == load_device("h100-sxm")
    assert device_within(write(tmp_path, DEVICE, "chip.toml")).name == "chip"
    with pytest.raises(UnknownNameError, match="did you mean h100-sxm"):
        device_within("h1oo-sxm")
    with pytest.raises(InputFileError, match="the file does not exist"):
        device_within(tmp_path / "absent.toml")


def test_device_file_as_cluster(tmp_path: Path) -> None:
    path = write(tmp_path, DEVICE)
    with pytest.raises(InputFileError, match="describes a device"):
        load_cluster(path)
    with pytest.raises(InputFileError, match="describes a cluster"):
        load_device(write(tmp_path, CLUSTER))
    write(tmp_path, DEVICE, "config/steptime/devices/mine.toml")
    with pytest.raises(FieldError, match=r"no cluster of its own"):
        load_cluster("mine")


@pytest.mark.parametrize(
    ("load", "given", "near"),
    [
        (load_device, "h10-sxm", "h100-sxm"),
        (load_cluster, "dgx-h10", "there is no cluster 'dgx-h10'\n  did you mean dgx-h100"),
        (load_cluster, "h10-sxm", "h100-sxm"),
        (load_device, "", ""),
        (load_device, "x" * 5000, ""),
        (load_cluster, "\0", ""),
    ],
)
def test_unknown_name(load: Any, given: str, near: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        load(given)
    assert near in str(caught.value) and len(str(caught.value)) < 600


# text that takes the place of the first line that starts with the same key, the field in the message, words of it
BAD_DEVICE = [
    ("memory = 80", "memory", "no unit.*80 GB"),
    ('memory = "80"', "memory", "no unit.*80 GB"),
    ('memory = "80 GB/s"', "memory", "unit of Bps"),
    ('memory = "-80 GB"', "memory", "not between"),
    ('memory = "0 GB"', "memory", "not between"),
    ('memory = "1e30 GB"', "memory", "not between"),
    ('memory = "1e999 GB"', "memory", "not finite"),
    ('memory = "80 Gigs"', "memory", "unknown unit"),
    ("memory = true", "memory", "not a text"),
    ("memory = []", "memory", "not a text"),
    ("memory = nan", "memory", "no unit"),
    ("memory = 1979-05-27", "memory", "not a text"),
    ('memory_bandwidth = "1e18 B/s"', "memory_bandwidth", "not between"),
    ("matrix_efficiency = 1.5", "matrix_efficiency", "not a number"),
    ("matrix_efficiency = 0", "matrix_efficiency", "not a number"),
    ("matrix_efficiency = nan", "matrix_efficiency", "not a number"),
    ("matrix_efficiency = inf", "matrix_efficiency", "not a number"),
    ('matrix_efficiency = "70 %"', "matrix_efficiency", "not a number"),
    ("matrix_efficiency = true", "matrix_efficiency", "not a number"),
    (f"matrix_efficiency = 1{'0' * 400}", "matrix_efficiency", "not a number"),
    ("sm_count = 108.0", "sm_count", "not a whole number"),
    ("sm_count = -1", "sm_count", "not a whole number"),
    ('kernel_latency = "-1 us"', "kernel_latency", "not between"),
    ('kernel_latency = "2 h"', "kernel_latency", "not between"),
    ("memroy = 1", "memroy", "unknown key.*memory"),
    ('kind = "guess"', "kind", "datasheet"),
    ("title = 3", "title", "not a text"),
    ('bf16 = "200 TB/s"', "matrix.bf16", "unit of Bps"),
    ('bf17 = "200 TFLOP/s"', "matrix.bf17", "unknown key.*bf16"),
]


@pytest.mark.each(("line", "field", "words"), BAD_DEVICE)
def test_bad_device_names_file_and_field(tmp_path: Path, line: str, field: str, words: str) -> None:
    key = line.partition(" ")[0]
    replaced, count = re.subn(rf"(?m)^{key} = .*$", lambda _: line, DEVICE)
    if field.startswith("matrix."):
        text = replaced if count else DEVICE.replace("[vector]", f"{line}\n[vector]")
    else:
        text = replaced if count else f"{line}\n{DEVICE}"
    path = write(tmp_path, text)
    with pytest.raises(FieldError, match=f"(?s){re.escape(f'{path}: {field}: ')}.*{words}") as caught:
        load_device(path)
    assert (caught.value.where, caught.value.field) == (str(path), field)
    assert len(str(caught.value)) < 1500


BAD_CLUSTER = [
    ("devices = 8", "devices = 0", "levels.nvlink.devices", "not a whole number"),
    ("devices = 8", "devices = 8.5", "levels.nvlink.devices", "whole"),
    ("devices = 8", "", "levels.nvlink.devices", "no limit of devices"),
    ("devices = 8", "device = 8", "levels.nvlink.device", "unknown key.*devices"),
    ("devices = 8", "devices = 8\noversubscription = 0.5", "levels.nvlink.oversubscription", "not a number"),
    ('link = "nvlink4"', "link = 4", "levels.nvlink.link", "not a text"),
    ('link = "nvlink4"', "", "levels.nvlink", "no link"),
    ('link = "nvlink4"', "bandwidth = 450", "levels.nvlink.bandwidth", "no unit"),
    ('device = "h100-sxm"', "", "device", "is missing"),
    ('device = "h100-sxm"', "device = { memory = 3 }", "device.memory", "no unit"),
    ('device = "h100-sxm"', 'device = { memory = "3 GB" }', "device.memory_bandwidth", "is missing"),
    ("[levels.network]", "[levels.x]\ndevices = 12\nlink = 'pcie4'\n[levels.network]", "levels.x.devices", "multiple"),
]


@pytest.mark.each(("old", "new", "field", "words"), BAD_CLUSTER)
def test_bad_cluster_names_file_and_field(tmp_path: Path, old: str, new: str, field: str, words: str) -> None:
    assert old in CLUSTER
    path = write(tmp_path, CLUSTER.replace(old, new))
    with pytest.raises(FieldError, match=f"(?s){re.escape(f'{path}: {field}: ')}.*{words}"):
        load_cluster(path)


def test_missing_numbers_are_all_named(tmp_path: Path) -> None:
    with pytest.raises(FieldError, match=r"memory: is missing; so is memory_bandwidth"):
        load_device(write(tmp_path, '[vector]\nfp32 = "1 TFLOP/s"'))
    with pytest.raises(FieldError, match=r"matrix: is missing"):
        load_device(write(tmp_path, 'memory = "1 GB"\nmemory_bandwidth = "1 GB/s"'))
    with pytest.raises(FieldError, match=r"levels: is missing"):
        load_cluster(write(tmp_path, 'device = "t4"'))


def test_unknown_names_inside_a_file(tmp_path: Path) -> None:
    for old, new, where in (("h100-sxm", "h101-sxm", "device.base"), ("nvlink4", "nvlnk4", "levels.nvlink.link")):
        path = write(tmp_path, CLUSTER.replace(old, new))
        with pytest.raises(UnknownNameError, match=f"{re.escape(str(path))}: {where}: .*(?s:.*){old}"):
            load_cluster(path)


def test_first_ten_problems_at_once(tmp_path: Path) -> None:
    text = "".join(f"key{i} = {i}\n" for i in range(30))
    with pytest.raises(UserError) as caught:
        load_device(write(tmp_path, text))
    first, *lines, last = str(caught.value).splitlines()
    assert first.endswith("own.toml: 30 fields are wrong") and last.strip() == "and 20 more"
    assert len(lines) == 10 and all(f"key{i}:" in line for i, line in enumerate(lines))


def test_circle_of_bases(tmp_path: Path) -> None:
    write(tmp_path, 'base = "b.toml"', "a.toml")
    path = write(tmp_path, 'base = "a.toml"', "b.toml")
    with pytest.raises(FieldError, match="leads back"):
        load_device(path)


@pytest.mark.each(
    ("data", "words"),
    [
        (b"memory = ", "not valid TOML"),
        (b"a = 1\na = 2", "not valid TOML"),
        (b"a = " + b"9" * 10_000, "not valid TOML"),
        (b"\xff\xfe\x00m", "not UTF-8"),
        (b"a = " + b"[" * 50_000, "nested too deeply|not valid TOML"),
        (b"#" * (MAX_BYTES + 1), "too large"),
        (b"", "memory: is missing"),
    ],
)
@pytest.mark.each("load", [load_device, load_cluster])
def test_broken_file(tmp_path: Path, data: bytes, words: str, load: Any) -> None:
    path = tmp_path / "own.toml"
    path.write_bytes(data)
    with pytest.raises(UserError, match=words if load is load_device or data else "device: is missing") as caught:
        load(path)
    assert str(path) in str(caught.value)


def test_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_bytes(b"\xef\xbb\xbf" + DEVICE.encode())
    assert load_device(path).memory_bytes == 48e9


def test_what_is_no_plain_file(tmp_path: Path) -> None:
    (tmp_path / "dir.toml").mkdir()
    os.mkfifo(tmp_path / "pipe.toml")
    write(tmp_path, DEVICE, "chip.toml")
    for name, words in (
        ("dir.toml", "is a folder"),
        ("pipe.toml", "not a regular file"),
        ("chpi.toml", r"the file does not exist\n.*chip.toml"),
        ("chip.toml/x.toml", "cannot be read"),
        ("n" * 5000 + ".toml", "cannot be read"),
        ("\0.toml", "not a path"),
    ):
        with pytest.raises(InputFileError, match=words):
            load_device(str(tmp_path / name))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_file(tmp_path: Path) -> None:
    path = write(tmp_path, DEVICE)
    path.chmod(0)
    with pytest.raises(InputFileError, match="cannot be read"):
        load_device(path)


VALUES = st.one_of(
    st.integers(),
    st.floats(),
    st.booleans(),
    st.text(alphabet=st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=20),
    st.sampled_from(["80 GB", "1 TB/s", "4 TFLOP/s", "5 us", "h100-sxm", "nvlink4", "1e999 B", "- 3 GB"]),
    st.lists(st.integers(), max_size=2),
    st.just({"memory": "3 GB"}),
)
KEYS = st.sampled_from(["memory", "memory_bandwidth", "l2", "clock", "base", "device", "levels", "matrix", "vector"])
KEYS |= st.sampled_from(["sources", "source", "kind", "title", "x", "name", "cluster"])


def toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(entry)}" for key, entry in value.items()) + "}"
    return str(value)


@given(table=st.dictionaries(KEYS, VALUES, max_size=5), load=st.sampled_from([load_device, load_cluster]))
@settings(max_examples=examples(150))
def test_any_file_loads_or_gives_a_user_error(tmp_path: Path, table: dict[str, object], load: Any) -> None:
    path = write(tmp_path, "\n".join(f"{key} = {toml(value)}" for key, value in table.items()))
    try:
        load(path)
    except UserError as error:
        assert str(error) and len(str(error)) < 3000


@given(data=st.binary(max_size=200))
@settings(max_examples=examples(60))
def test_any_bytes_load_or_give_a_user_error(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "own.toml"
    path.write_bytes(data)
    with pytest.raises(UserError, match=re.escape(str(path))):
        load_device(path)


def test_a_name_of_the_catalogue_does_not_import_pydantic() -> None:
    code = (
        "import sys; from steptime.hardware import load_cluster; load_cluster('h100'); print('pydantic' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_examples_of_the_documentation_load(tmp_path: Path) -> None:
    page = Path(__file__).parents[3] / "docs" / "hardware.md"
    blocks = re.findall(r"```toml\n# (\S+)\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.S)
    assert len(blocks) >= 3
    for name, text in blocks:
        write(tmp_path, text, name)
    for name, text in blocks:
        load = load_cluster if "[levels." in text else load_device
        load(tmp_path / name)
