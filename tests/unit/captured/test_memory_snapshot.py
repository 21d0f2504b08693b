"""A predicted snapshot has what PyTorch's viewer reads, and reads back as what was predicted."""

from __future__ import annotations

import json
import pickletools
from pathlib import Path
from typing import Any

import pytest

from hand_programs import MIB, small_step, step_of
from steptime.captured.formats.memory_snapshot import memory_snapshot, write_memory_snapshot
from steptime.captured.formats.snapshot_reader import DeviceMemory, compare_snapshot, parse_snapshot, read_snapshot
from steptime.captured.graph.allocator import AllocatorSettings
from steptime.captured.graph.placement import place
from steptime.errors import InputFileError, UserError

VIEWER_READS = {
    "PROTO", "FRAME", "STOP", "MARK", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "APPEND", "APPENDS", "SETITEM",
    "SETITEMS", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2",
    "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET",
}  # fmt: skip


@pytest.fixture(params=[False, True], ids=["native", "expandable"])
def snapshot(request: pytest.FixtureRequest) -> dict[str, Any]:
    return memory_snapshot(place(small_step(), AllocatorSettings(expandable_segments=request.param)))


def test_segments_are_full_of_blocks_and_addresses_are_exact_in_javascript(snapshot: dict[str, Any]) -> None:
    assert snapshot["segments"]
    for segment in snapshot["segments"]:
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
        used = [block for block in segment["blocks"] if block["state"] == "active_allocated"]
        assert segment["allocated_size"] == sum(block["size"] for block in used)
        assert segment["requested_size"] == sum(block["requested_size"] for block in used)
        assert segment["address"] + segment["total_size"] < 2**53
    assert {block["state"] for s in snapshot["segments"] for block in s["blocks"]} <= {"active_allocated", "inactive"}


def test_events_are_in_time_order_and_frames_lead_from_operator_to_phase(snapshot: dict[str, Any]) -> None:
    (trace,) = snapshot["device_traces"]
    times = [event["time_us"] for event in trace]
    assert times == sorted(times) and times[-1] == 10
    activation = next(event for event in trace if event.get("category") == "activation")
    assert [(f["filename"], f["line"], f["name"]) for f in activation["frames"]] == [
        ("net.fc", 0, "mm"), ("net.fc", 0, "Linear"), ("net", 0, "Sequential"), ("small", 0, "forward"),
    ]  # fmt: skip
    weight = trace[1]
    assert (weight["category"], weight["frames"][0]["filename"]) == ("parameter", "net.fc.weight")


def test_one_event_has_no_known_category_because_old_viewers_stop_otherwise(snapshot: dict[str, Any]) -> None:
    assert snapshot["device_traces"][0][-1]["action"] == "snapshot"
    assert snapshot["device_traces"][0][-1]["category"] == "unknown"


def test_predicted_times_are_the_time_axis() -> None:
    trace = memory_snapshot(place(small_step(), steps=1), seconds=[1e-3, 2e-3, 0, 3e-3, 1e-3])["device_traces"][0]
    gradient = [event["time_us"] for event in trace if event.get("category") == "gradient"]
    assert gradient == [3000, 7000, 7000]
    for wrong in ([1.0], [1.0] * 4 + [float("nan")], [1.0] * 4 + [-1.0]):
        with pytest.raises(UserError):
            memory_snapshot(place(small_step(), steps=1), seconds=wrong)


def test_the_file_uses_only_what_the_viewer_reads(tmp_path: Path) -> None:
    program = step_of([(n * 4096, n % 9, n % 9 + 3) for n in range(300)], 12)
    write_memory_snapshot(program, tmp_path / "s.pickle")
    data = (tmp_path / "s.pickle").read_bytes()
    assert {op.name for op, _, _ in pickletools.genops(data)} <= VIEWER_READS
    assert data[:2] == b"\x80\x04"


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="cannot be written"):
        write_memory_snapshot(small_step(), tmp_path / "absent" / "s.pickle")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("expandable", [False, True])
def test_what_was_written_reads_back_as_what_was_predicted(tmp_path: Path, expandable: bool) -> None:
    path = tmp_path / "s.pickle"
    placed = write_memory_snapshot(small_step(), path, settings=AllocatorSettings(expandable_segments=expandable))
    device = read_snapshot(path).device()
    assert device.peak_reserved_bytes == placed.peak_reserved_bytes == 22 * MIB
    whole = 0 if expandable else MIB  # the state lies in the 4 MiB of the activation, which is not split for 1 MiB
    assert device.peak_allocated_bytes == placed.peak_allocated_bytes == 13 * MIB + 1024 + whole
    assert device.peak_requested_bytes == placed.peak_requested_bytes
    assert device.requested_bytes == 6 * MIB + 1000
    assert device.by_category == {
        "activation": 4 * MIB, "parameter": 3 * MIB, "state": 3 * MIB, "gradient": 3 * MIB, "input": 1000,
    }  # fmt: skip
    first = device.holders[0]
    assert (first.place, first.size_bytes, first.count) == ("net.fc:0 mm", 4 * MIB, 1)


def test_pytorchs_own_tool_reads_it(snapshot: dict[str, Any]) -> None:
    viz = pytest.importorskip("torch.cuda._memory_viz")
    summary = viz.segsum(snapshot)
    reserved = sum(segment["total_size"] for segment in snapshot["segments"])
    assert f"total_reserved: {viz.Bytes(reserved)}" in summary
    assert f"total_allocated: {viz.Bytes(6 * MIB + 1000)}" in summary
    assert viz.trace(snapshot).count("# free completed") == 2 * 4
    for plot in (viz.trace_plot(snapshot), viz.trace_plot(snapshot, plot_segments=True), viz.segment_plot(snapshot)):
        assert "MemoryViz.js" in plot


def measured(document: dict[str, Any]) -> DeviceMemory:
    return parse_snapshot(json.loads(json.dumps(document)), "measured").device()


def test_a_measurement_is_compared_by_the_same_definitions() -> None:
    placed = place(small_step())
    same = compare_snapshot(placed, measured(memory_snapshot(placed)))
    assert [row.relative for row in (*same.totals, *same.by_category)] == [0.0] * 9
    document = memory_snapshot(place(small_step(), AllocatorSettings(expandable_segments=True)))
    for event in document["device_traces"][0]:
        event.pop("category", None)
    other = compare_snapshot(placed, measured(document))
    assert other.by_category == ()
    document["segments"].append({"device": 0, "address": 1, "total_size": 22 * MIB, "blocks": []})
    assert compare_snapshot(placed, measured(document)).totals[0].relative == -0.5


def test_a_trace_that_lost_its_oldest_events_gives_the_same_peaks() -> None:
    placed = place(small_step(), steps=3)
    document = memory_snapshot(placed)
    whole = measured(document)
    second = next(n for n, e in enumerate(document["device_traces"][0]) if e["time_us"] >= 5)
    del document["device_traces"][0][:second]
    late = measured(document)
    assert (late.peak_reserved_bytes, late.peak_allocated_bytes) == (whole.peak_reserved_bytes, 14 * MIB + 1024)
    assert late.by_category["unknown"] == 6 * MIB + 1000
    assert {h.place for h in late.holders} == {h.place for h in whole.holders}
