"""Perfetto and Chrome traces show the calls as nested spans, and counters that are the liveness."""

from __future__ import annotations

import importlib.util
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hand_programs import MIB, small_step, step_of
from steptime.captured.formats.step_trace import chrome_trace, perfetto_trace, write_trace
from steptime.captured.formats.timeline import Clock, memory_by_kind, spans
from steptime.captured.graph import Program
from steptime.captured.graph.liveness import Liveness
from steptime.captured.graph.placement import place
from steptime.errors import UserError
from steptime.formats.trace import varint
from suites import examples

SECONDS = [1e-3, 2e-3, 0.0, 3e-3, 5e-4]
SPANS = [
    ("forward", "phase", 0, 2), ("net", "module", 0, 2), ("fc", "module", 0, 0), ("mm", "operator", 0, 0),
    ("act", "module", 1, 2), ("relu", "operator", 1, 1), ("backward", "phase", 3, 3), ("net", "module", 3, 3),
    ("fc", "module", 3, 3), ("mm", "operator", 3, 3), ("optimizer", "phase", 4, 4), ("_foreach_add", "operator", 4, 4),
]  # fmt: skip


def fields(data: bytes) -> dict[int, list[Any]]:
    """The fields of one protocol-buffer message: number -> integers and byte strings."""
    out: dict[int, list[Any]] = defaultdict(list)
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        key = number()
        value: Any = number()
        if key & 7 == 2:
            at, value = at + value, data[at : at + value]
        else:
            assert key & 7 == 0
        out[key >> 3].append(value)
    return out


def packets(trace: bytes) -> Iterator[dict[int, list[Any]]]:
    yield from (fields(packet) for packet in fields(trace)[1])


def test_spans_by_hand() -> None:
    found = spans(small_step())
    assert [(s.name, s.category, s.first, s.last) for s in found] == SPANS
    assert found[3].details == {"module": "net.fc", "output": "fp32[1]", "workspace_bytes": MIB}
    assert found[4].details == {"module": "net.act", "class": "ReLU"}


@given(modules=st.lists(st.sampled_from(["", "a", "a.b", "a.b.c", "a.c", "b"]), max_size=20))
@settings(max_examples=examples(100))
def test_spans_nest_and_cover_each_call(modules: list[str]) -> None:
    blank = step_of([], len(modules)).calls
    calls = tuple(replace(call, module=module) for call, module in zip(blank, modules, strict=True))
    found = spans(Program(name="p", calls=calls, storages=()))
    open_spans: list[Any] = []
    for span in found:
        while open_spans and open_spans[-1].last < span.first:
            open_spans.pop()
        assert span.depth == len(open_spans)
        assert all(outer.first <= span.first and span.last <= outer.last for outer in open_spans)
        if span.category == "operator":
            assert ".".join(s.name for s in open_spans[1:]) == modules[span.first]
        open_spans.append(span)
    assert sum(span.category == "operator" for span in found) == len(modules)


def test_kinds_add_up_to_the_liveness() -> None:
    kinds = memory_by_kind(small_step(), rounding=512)
    assert list(kinds)[-1] == "workspace"
    assert kinds["workspace"].tolist() == [0, MIB, 0, 0, 0, 0]
    assert sum(kinds.values()).tolist() == Liveness(small_step(), rounding=512).in_use_bytes.tolist()  # type: ignore[union-attr]


def test_the_clock_goes_on_with_the_next_step() -> None:
    clock = Clock(small_step(), SECONDS)
    assert [clock.microsecond(n) for n in (-1, 0, 1, 3, 5, 8)] == [0, 0, 1000, 3000, 6500, 9500]
    assert clock.nanosecond(4, end=True) == 6_500_000
    with pytest.raises(UserError, match="4 times for 5 calls"):
        Clock(small_step(), SECONDS[:4])
    with pytest.raises(UserError, match=r"call 2 \(view\) takes inf s"):
        Clock(small_step(), [0, 0, float("inf"), 0, 0])


def test_chrome_trace_by_hand(tmp_path: Path) -> None:
    write_trace(small_step(), tmp_path / "t.json", seconds=SECONDS, placement=place(small_step()))
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    slices = [(e["name"], e["cat"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    starts, ends = [0, 1000, 3000, 3000, 6000], [1000, 3000, 3000, 6000, 6500]
    assert [(n, c, pytest.approx(ts), pytest.approx(ts + d)) for n, c, ts, d in slices] == [
        (name, category, starts[first], ends[last]) for name, category, first, last in SPANS
    ]
    use = [e for e in events if e["ph"] == "C" and e["name"] == "memory in use (bytes)"]
    assert [e["ts"] for e in use] == pytest.approx([0, 0, 1000, 3000, 6000])
    assert use[1]["args"] == {
        "parameter": 3 * MIB, "state": 3 * MIB, "input": 1000, "activation": 4 * MIB, "temporary": 0, "gradient": 0,
        "workspace": MIB,
    }  # fmt: skip
    assert [e["args"]["bytes"] for e in events if e["name"] == "reserved by the allocator"] == [22 * MIB]
    assert {e["name"] for e in events if e["ph"] == "M"} == {"process_name", "thread_name"}


def test_perfetto_by_hand(tmp_path: Path) -> None:
    write_trace(small_step(), tmp_path / "t.pftrace", seconds=SECONDS, placement=place(small_step()))
    names: dict[int, bytes] = {}
    tracks: dict[int, bytes] = {}
    slices, counts = [], defaultdict(list)
    for packet in packets((tmp_path / "t.pftrace").read_bytes()):
        assert packet[10] == [1]
        for table in packet[12]:
            names |= {fields(e)[1][0]: fields(e)[2][0] for e in fields(table)[2]}
        for track in map(fields, packet[60]):
            tracks[track[1][0]] = track[2][0] if track[2] else b""
            assert not track[8] or fields(track[8][0])[3] == [3]
        for event in map(fields, packet[11]):
            kind, track_id, time_ns = event[9][0], event[11][0], packet[8][0]
            if kind == 4:
                counts[tracks[track_id].decode()].append((time_ns, event[30][0]))
            else:
                slices.append((time_ns, names[event[10][0]].decode() if kind == 1 else "end"))
    assert slices[:5] == [(0, "forward"), (0, "net"), (0, "fc"), (0, "mm"), (1_000_000, "end")]
    assert sum(name == "end" for _, name in slices) == len(SPANS) == len(slices) // 2
    assert [time for time, _ in slices] == sorted(time for time, _ in slices)
    assert counts["in use: activation"] == [(0, 0), (0, 4 * MIB), (6_000_000, 0)]
    assert counts["reserved"] == [(0, 22 * MIB)]
    assert counts["in use"][-1] == (6_000_000, int(Liveness(small_step()).in_use_bytes[-1]))


def test_perfetto_by_its_own_definitions() -> None:
    if importlib.util.find_spec("perfetto") is None:
        pytest.skip("the package perfetto is not installed")
    from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protos

    trace = protos.Trace.FromString(perfetto_trace(small_step(), seconds=SECONDS, placement=place(small_step())))
    event = protos.TrackEvent
    found = [packet for packet in trace.packet if packet.HasField("track_event")]
    kinds = [packet.track_event.type for packet in found]
    assert kinds.count(event.TYPE_SLICE_BEGIN) == kinds.count(event.TYPE_SLICE_END) == len(SPANS)
    tracks = {p.track_descriptor.uuid: p.track_descriptor for p in trace.packet if p.HasField("track_descriptor")}
    counters = [track for track in tracks.values() if track.HasField("counter")]
    assert {track.counter.unit for track in counters} == {protos.CounterDescriptor.UNIT_SIZE_BYTES}
    assert {tracks[track.parent_uuid].process.process_name for track in counters} == {"small"}
    assert [track.thread.thread_name for track in tracks.values() if track.HasField("thread")] == ["step (predicted)"]
    first = next(packet for packet in found if packet.track_event.debug_annotations)
    notes = {note.name: note.string_value or note.int_value for note in first.track_event.debug_annotations}
    assert notes == {"module": "net", "class": "Sequential"}
    interned = [packet.interned_data for packet in trace.packet if packet.HasField("interned_data")]
    assert [name.name for data in interned for name in data.event_names][:3] == ["forward", "net", "fc"]
    assert [c.name for data in interned for c in data.event_categories] == ["phase", "module", "operator"]
    assert trace.packet[0].sequence_flags == protos.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
    assert {p.sequence_flags for p in found} == {protos.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE}


@given(value=st.integers(-(2**63), 2**64 - 1))
def test_variable_length_integers(value: int) -> None:
    (decoded,) = fields(b"\x08" + varint(value))[1]
    assert decoded == value % 2**64


def test_an_empty_program_is_an_empty_trace() -> None:
    program = Program(name="", calls=(), storages=())
    assert [e["ph"] for e in json.loads(chrome_trace(program))["traceEvents"]] == ["M", "M"]
    assert all(not packet[11] for packet in packets(perfetto_trace(program)))
