"""A snapshot file cannot run code, exhaust memory or time, or cause anything but one message that names it."""

from __future__ import annotations

import contextlib
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steptime.captured.formats import plain_pickle, snapshot_reader
from steptime.captured.formats.plain_pickle import NamedGlobal, PickleProblem, loads
from steptime.captured.formats.snapshot_reader import parse_snapshot, read_snapshot
from steptime.errors import InputFileError, UserError
from suites import examples

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner, inner, inner)
    | st.tuples(inner) | st.tuples(),
    max_leaves=30,
)  # fmt: skip


class Shell:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/never",)


@given(value=PLAIN, protocol=st.integers(0, 5))
@settings(max_examples=examples(200))
def test_plain_data_reads_as_pickle_reads_it(value: object, protocol: int) -> None:
    assert loads(pickle.dumps(value, protocol=protocol)) == value


@given(data=st.binary(max_size=200), start=st.sampled_from([b"", b"\x80\x04", b"\x80\x04}", b"(", b"\x80\x04]("]))
@settings(max_examples=examples(500))
def test_any_bytes_give_a_value_or_one_problem(data: bytes, start: bytes) -> None:
    with contextlib.suppress(PickleProblem, InputFileError):
        parse_snapshot(loads(start + data), "f")


@given(cut=st.integers(0, 400), at=st.integers(0, 400), byte=st.integers(0, 255))
@settings(max_examples=examples(300))
def test_cut_and_damaged_snapshots_give_one_message(tmp_path: Path, cut: int, at: int, byte: int) -> None:
    event = {"action": "alloc", "addr": 2**40, "size": 512, "frames": [{"filename": "f", "line": 1, "name": "n"}]}
    data = bytearray(pickle.dumps({"segments": [], "device_traces": [[event]]}, protocol=4))
    data[at % len(data)] = byte
    path = tmp_path / "s.pickle"
    path.write_bytes(data[: len(data) - cut % len(data)])
    try:
        read_snapshot(path).device()
    except UserError as error:
        assert str(error).startswith(str(path)) and str(error).count("\n") <= 1


@pytest.mark.parametrize("protocol", range(6))
def test_code_is_named_and_never_run(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "evil.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "x": Shell()}, protocol=protocol))
    with pytest.raises(InputFileError, match=r"evil.pickle: not a memory snapshot: it names \w+\.system"):
        read_snapshot(path)
    assert not Path("/tmp/never").exists()


@pytest.mark.each(
    ("data", "says"),
    [
        (b"cos\nsystem\n(S'true'\ntR.", "names os.system"),
        (b"(ios\nsystem\n.", "names os.system"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "names os.system"),
        (b"\x80\x02}q\x00.", "no segments"),
        (b"\x80\x04}b.", "instruction BUILD"),
        (b"\x80\x04}R.", "instruction REDUCE"),
        (b"\x80\x04\x82\x01.", "instruction EXT1"),
        (b"\x80\x04X\xff\xff\xff\xffab.", "cut short or damaged"),
        (b"\x80\x04\x8d" + b"\xff" * 8 + b".", "cut short or damaged"),
        (b"\x80\x04\x8b\xff\xff\xff\x7f.", "a number of 2147483647 bytes"),
        (b"\x80\x04N)s.", "cut short or damaged"),
        (b"\x80\x04})Ns.", "is a tuple, not a text"),
        (b"\x80\x04h\x00.", "cut short or damaged"),
        (b"\x80\x04]e.", "cut short or damaged"),
        (b"\x80\x04}Na.", "cut short or damaged"),
        (b"\x80\x04]NNs.", "cut short or damaged"),
        (b"", "empty"),
        (b'{"segments": []}', "not a pickle"),
        (b"\x1f\x8b\x08\x00", "not a pickle"),
        (b"I" + b"9" * 5000 + b"\n.", "cut short or damaged"),
    ],
)
def test_each_trick_has_its_message(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / "s.pickle"
    path.write_bytes(data)
    with pytest.raises(InputFileError, match=says):
        read_snapshot(path)


def test_a_memo_far_away_takes_no_memory() -> None:
    assert loads(b"\x80\x04Nr" + struct.pack("<I", 2**32 - 1) + b"j" + struct.pack("<I", 2**32 - 1) + b".") is None


@pytest.mark.slow
def test_nesting_and_doubling_end() -> None:
    deep = loads(b"\x80\x04" + b"]" * 300_000 + b"a" * 299_999 + b".")
    assert isinstance(deep, list)
    doubled = b"\x80\x04]\x94" + b"".join(b"](h" + bytes([n]) + b"h" + bytes([n]) + b"e\x94" for n in range(200)) + b"."
    loads(doubled)
    with pytest.raises(PickleProblem, match="not a text"):
        loads(b"\x80\x04})" + b"\x85" * 200_000 + b"Ns.")


def test_one_list_named_many_times_is_counted_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_reader, "MAX_ENTRIES", 1000)
    blocks = [{"size": 512, "state": "inactive"}] * 100
    segments = [{"device": 0, "address": 0, "total_size": 512, "blocks": blocks}] * 100
    with pytest.raises(InputFileError, match="more than 1000 blocks and events"):
        parse_snapshot({"segments": segments}, "f")


def test_size_and_number_of_containers_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_pickle, "MAX_CONTAINERS", 10)
    with pytest.raises(PickleProblem, match="more than 10"):
        loads(b"\x80\x04]" + b"]a" * 10 + b".")
    monkeypatch.setattr(snapshot_reader, "MAX_BYTES", 2**20)
    (tmp_path / "s.pickle").write_bytes(b"\x80\x04" + b"N" * 2**20)
    with pytest.raises(InputFileError, match="larger than 1 MiB"):
        read_snapshot(tmp_path / "s.pickle")
    with pytest.raises(InputFileError, match="is a folder"):
        read_snapshot(tmp_path)
    with pytest.raises(InputFileError, match="not a path"):
        read_snapshot("a\0b")


def test_globals_are_a_problem_of_their_own() -> None:
    with pytest.raises(NamedGlobal, match=r"builtins\.print"):
        loads(pickle.dumps(print))


@pytest.mark.each(
    ("document", "says"),
    [
        (7, "no segments"),
        ({"segments": 7}, "segments is not a list"),
        ({"segments": [7]}, r"segments\[0\] is not a dictionary"),
        ({"segments": [{"total_size": "1"}]}, "total_size of segment of device 0 is str"),
        ({"segments": [{"total_size": 10**30}]}, "not a whole number"),
        ({"segments": [{"total_size": True}]}, "not a whole number"),
        ({"segments": [{"total_size": 1, "blocks": [{"size": -1}]}]}, "size of block of device 0 is -1"),
        ({"segments": [], "device_traces": {}}, "device_traces is not a list"),
        ({"segments": [], "device_traces": [[1]]}, "is not a dictionary"),
        ({"segments": [], "device_traces": [[{"action": "alloc", "size": 1.5}]]}, "is 1.5"),
    ],
)
def test_wrong_documents_name_the_value(document: object, says: str) -> None:
    with pytest.raises(InputFileError, match=says):
        parse_snapshot(document, "f")


def test_odd_but_harmless_documents_are_read() -> None:
    frames: list[Any] = [3, {"filename": 5, "line": "x"}]
    events = [{"action": ["alloc"]}, {"action": "alloc", "addr": 5, "size": 700, "frames": frames, "category": 3}]
    block = {"size": 1024, "requested_size": 700, "state": "active_allocated"}
    segment = {"device": 1, "address": 5, "total_size": 2048, "blocks": [block, {"size": 1024, "state": 7}]}
    device = parse_snapshot({"segments": [segment], "device_traces": [[], events]}, "f").device()
    assert (device.device, device.events, device.peak_requested_bytes) == (1, 2, 700)
    assert (device.by_category, device.holders[0].place) == ({"unknown": 700}, "5:x ")
    empty = parse_snapshot([], "f")
    with pytest.raises(UserError, match="empty"):
        empty.device()
    with pytest.raises(UserError, match="no device 3"):
        parse_snapshot({"segments": [{"total_size": 1}]}, "f").device(3)
