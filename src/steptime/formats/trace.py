"""Traces of predicted steps: tracks with slices, flows and counters, as Perfetto packets or as Chrome JSON.

Protocol buffers need three things: variable-length integers, length-prefixed fields, and field numbers. Integers that
differ between packets are padded to one length, so that packets of a kind are rows of one array of bytes.

Source: Perfetto, `protos/perfetto/trace/`: `trace.proto`, `trace_packet.proto`, `track_event/track_event.proto`,
`track_descriptor.proto`, `counter_descriptor.proto`, `debug_annotation.proto`, `interned_data/interned_data.proto`;
Chrome: Trace Event Format, phases X (complete), C (counter), s and f (flow), M (metadata).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from steptime.num import Array

PACKET: Final = 1
# TracePacket
TIMESTAMP, SEQUENCE_ID, TRACK_EVENT, INTERNED, FLAGS, TRACK_DESCRIPTOR = 8, 10, 11, 12, 13, 60
CLEARED, NEEDED = 1, 2
"""Sequence flags: incremental state was cleared; this packet needs it."""
# TrackDescriptor, ProcessDescriptor, ThreadDescriptor, CounterDescriptor
UUID, NAME, PROCESS, THREAD, PARENT, COUNTER = 1, 2, 3, 4, 5, 8
PID, PROCESS_NAME, TID, THREAD_NAME = 1, 6, 2, 5
UNIT, UNIT_BYTES = 3, 3
# TrackEvent
CATEGORIES, ANNOTATION, EVENT_TYPE, NAME_IID, TRACK_UUID, COUNTER_VALUE, FLOW, LAST_FLOW = 3, 4, 9, 10, 11, 30, 47, 48
BEGIN, END, COUNT = 1, 2, 4
# DebugAnnotation, InternedData
INT_VALUE, STRING_VALUE, ANNOTATION_NAME = 4, 6, 10
EVENT_CATEGORIES, EVENT_NAMES = 1, 2

SEQUENCE: Final = 1
LENGTH_BYTES, INT_BYTES = 4, 10
"""Bytes to which lengths (up to 2^28 - 1) and other integers (up to 64 bits) are padded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slices:
    """Slices of tracks as columns: track by track, in order of time, outer slices before inner ones."""

    track: Array
    """Index of the track."""
    start_ns: Array
    """Start in whole nanoseconds, 0 or more."""
    end_ns: Array
    """End in whole nanoseconds."""
    name: Array
    """Index into the names of the trace."""
    category: Array
    """Index into the categories of the trace."""
    depth: Array
    """Nesting depth: number of enclosing slices."""
    numbers: Mapping[str, Array] = field(default_factory=dict)
    """Integers shown with every slice."""
    details: Sequence[Mapping[str, str | int]] = ()
    """Further texts and integers of each slice; empty: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """Values over time."""

    process: int
    """Index of the process."""
    name: str
    time_ns: Array
    """Times of changes, ascending."""
    values: Mapping[str, Array]
    """Bytes from each time on, by name; Perfetto shows a track for each, Chrome stacks them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A predicted step."""

    processes: Sequence[str]
    tracks: Sequence[tuple[int, str]]
    """Index of its process, and name, of each track."""
    names: Sequence[str]
    categories: Sequence[str]
    slices: Slices
    flows: tuple[Array, Array] = (np.empty(0, np.int64), np.empty(0, np.int64))
    """Arrows between slices: indices of the slices at which they start and end, at most one of each for a slice."""
    counts: Sequence[Count] = ()


# -- the wire format --------------------------------------------------------------------------------------------------


def varint(value: int) -> bytes:
    """A variable-length integer: 7 bits a byte, lowest first; negative ones as 64-bit two's complement.

    >>> varint(300).hex(), len(varint(-1))
    ('ac02', 10)
    """
    value &= 2**64 - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def field_int(number: int, value: int) -> bytes:
    """A field with an integer."""
    return varint(number << 3) + varint(value)


def field_bytes(number: int, value: bytes) -> bytes:
    """A field with a text or a message."""
    return varint(number << 3 | 2) + varint(len(value)) + value


def _text(number: int, value: str) -> bytes:
    return field_bytes(number, value.encode("utf-8", "replace"))


def padded(values: Array, size: int) -> Array:
    """Variable-length integers of one length: a row of bytes for each.

    >>> padded(np.array([300, 1]), 3).tolist()
    [[172, 130, 0], [129, 128, 0]]
    """
    bits = values.astype(np.int64).view(np.uint64)[:, None] >> (7 * np.arange(size, dtype=np.uint64))
    out = (bits & np.uint64(0x7F)).astype(np.uint8)
    out[:, :-1] |= 0x80
    return out


def _rows(count: int, *parts: bytes | Array) -> Array:
    """Rows of bytes from common parts and columns."""
    blocks = [
        np.broadcast_to(np.frombuffer(part, np.uint8), (count, len(part))) if isinstance(part, bytes) else part
        for part in parts
    ]
    return np.concatenate(blocks, axis=1)


def _pieces(rows: Array) -> list[bytes]:
    """Each row as bytes."""
    data, width = rows.tobytes(), rows.shape[1]
    return [data[at : at + width] for at in range(0, len(data), width)]


# -- Perfetto ---------------------------------------------------------------------------------------------------------


def perfetto(trace: Trace) -> bytes:
    """The trace as TrackEvent packets, for ui.perfetto.dev."""
    packets = [field_bytes(PACKET, packet) for packet in (*_descriptors(trace), _names(trace))]
    packets += _slice_packets(trace)
    uuid = _first_counter(trace)
    for count in trace.counts:
        for values in count.values.values():
            packets.append(_count_packets(uuid, count.time_ns, values))
            uuid += 1
    return b"".join(packets)


def _first_counter(trace: Trace) -> int:
    return 1 + len(trace.processes) + len(trace.tracks)


def _descriptors(trace: Trace) -> Iterator[bytes]:
    """Processes, tracks, counters: uuids from 1 on, in this order."""
    sequence, flags = field_int(SEQUENCE_ID, SEQUENCE), field_int(FLAGS, CLEARED)
    for pid, name in enumerate(trace.processes, 1):
        process = field_int(UUID, pid) + field_bytes(PROCESS, field_int(PID, pid) + _text(PROCESS_NAME, name))
        yield sequence + flags + field_bytes(TRACK_DESCRIPTOR, process)
        flags = b""
    for tid, (process_index, name) in enumerate(trace.tracks, 1):
        pid = process_index + 1
        thread = field_int(PID, pid) + field_int(TID, tid) + _text(THREAD_NAME, name)
        track = field_int(UUID, len(trace.processes) + tid) + field_int(PARENT, pid) + field_bytes(THREAD, thread)
        yield sequence + field_bytes(TRACK_DESCRIPTOR, track)
    uuid = _first_counter(trace)
    for count in trace.counts:
        for name in count.values:
            unit = field_bytes(COUNTER, field_int(UNIT, UNIT_BYTES))
            track = field_int(UUID, uuid) + field_int(PARENT, count.process + 1) + _text(NAME, name) + unit
            yield sequence + field_bytes(TRACK_DESCRIPTOR, track)
            uuid += 1


def _names(trace: Trace) -> bytes:
    """Categories and names, each numbered from 1 on."""
    tables = [
        field_bytes(which, field_int(1, number) + _text(2, name))
        for which, names in ((EVENT_CATEGORIES, trace.categories), (EVENT_NAMES, trace.names))
        for number, name in enumerate(names, 1)
    ]
    head = field_int(SEQUENCE_ID, SEQUENCE) + field_int(FLAGS, NEEDED)
    return head + field_bytes(INTERNED, b"".join(tables))


def _events(time_ns: Array, body: Array, further: Array) -> Array:
    """Packets as rows of bytes; `further` bytes follow each."""
    count, width = body.shape
    inside = (
        varint(TIMESTAMP << 3),
        padded(time_ns, INT_BYTES),
        field_int(SEQUENCE_ID, SEQUENCE),
        field_int(FLAGS, NEEDED),
        varint(TRACK_EVENT << 3 | 2),
        padded(width + further, LENGTH_BYTES),
        body,
    )
    rest = _rows(count, *inside)
    return _rows(count, varint(PACKET << 3 | 2), padded(rest.shape[1] + further, LENGTH_BYTES), rest)


def _slice_packets(trace: Trace) -> list[bytes]:
    slices, count = trace.slices, len(trace.slices.track)
    track = padded(slices.track + 1 + len(trace.processes), INT_BYTES)
    uuid = varint(TRACK_UUID << 3)
    tails = _tails(trace)
    lengths = np.fromiter(map(len, tails), np.int64, count)
    name, category = padded(slices.name + 1, LENGTH_BYTES), padded(slices.category + 1, LENGTH_BYTES)
    shown = (varint(NAME_IID << 3), name, varint(CATEGORIES << 3), category)
    begin = _rows(count, field_int(EVENT_TYPE, BEGIN), uuid, track, *shown)
    end = _rows(count, field_int(EVENT_TYPE, END), uuid, track)
    begins = _pieces(_events(slices.start_ns, begin, lengths))
    ends = _pieces(_events(slices.end_ns, end, np.zeros(count, np.int64)))
    out: list[bytes] = []
    opened: list[bytes] = []
    last = -1
    for place, depth, head, tail, close in zip(
        slices.track.tolist(), slices.depth.tolist(), begins, tails, ends, strict=True
    ):
        while opened and (place != last or len(opened) > depth):
            out.append(opened.pop())
        out += (head, tail)
        opened.append(close)
        last = place
    return out + opened[::-1]


def _tails(trace: Trace) -> list[bytes]:
    """The parts of slices with varying lengths: numbers, details, flows."""
    slices, count = trace.slices, len(trace.slices.track)
    columns: list[bytes | Array] = []
    for name, values in slices.numbers.items():
        inside = _text(ANNOTATION_NAME, name) + varint(INT_VALUE << 3)
        columns += [varint(ANNOTATION << 3 | 2) + varint(len(inside) + INT_BYTES) + inside, padded(values, INT_BYTES)]
    tails = _pieces(_rows(count, *columns)) if columns else [b""] * count
    if slices.details:
        tails = [tail + _details(detail) for tail, detail in zip(tails, slices.details, strict=True)]
    for which, ends in ((FLOW, trace.flows[0]), (LAST_FLOW, trace.flows[1])):
        tag = varint(which << 3 | 1)
        for flow, at in enumerate(ends.tolist(), 1):
            tails[at] += tag + flow.to_bytes(8, "little")
    return tails


def _details(details: Mapping[str, str | int]) -> bytes:
    out = b""
    for key, value in details.items():
        if value != "":
            given = field_int(INT_VALUE, value) if isinstance(value, int) else _text(STRING_VALUE, value)
            out += field_bytes(ANNOTATION, _text(ANNOTATION_NAME, key) + given)
    return out


def _count_packets(uuid: int, time_ns: Array, values: Array) -> bytes:
    """A counter where it changes."""
    changes = np.concatenate([[True], values[1:] != values[:-1]])[: len(values)]
    time_ns, values = time_ns[changes], values[changes]
    head = field_int(EVENT_TYPE, COUNT) + field_int(TRACK_UUID, uuid) + varint(COUNTER_VALUE << 3)
    body = _rows(len(values), head, padded(values, INT_BYTES))
    return _events(time_ns, body, np.zeros(len(values), np.int64)).tobytes()


# -- Chrome -----------------------------------------------------------------------------------------------------------


def chrome(trace: Trace) -> bytes:
    """The trace as Chrome JSON, for ui.perfetto.dev and chrome://tracing; its times are in microseconds."""
    events = [*_metadata(trace), *_slice_events(trace), *_flow_events(trace)]
    for count in trace.counts:
        events += _count_events(count)
    return (
        '{"traceEvents":[' + ",".join(events) + '],"displayTimeUnit":"ms","otherData":{"predicted_by":"steptime"}}'
    ).encode()


def _microseconds(time_ns: Array) -> list[str]:
    whole, rest = np.divmod(time_ns, 1000)
    return [f"{us}.{ns:03d}" if ns else str(us) for us, ns in zip(whole.tolist(), rest.tolist(), strict=True)]


def _metadata(trace: Trace) -> Iterator[str]:
    def named(kind: str, pid: int, tid: int, key: str, value: str | int) -> str:
        return json.dumps(
            {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {key: value}}, separators=(",", ":")
        )

    firsts = {process: tid for tid, (process, _) in reversed(list(enumerate(trace.tracks, 1)))}
    for index, name in enumerate(trace.processes):
        yield named("process_name", index + 1, firsts.get(index, 0), "name", name)
    for tid, (process, name) in enumerate(trace.tracks, 1):
        yield named("thread_name", process + 1, tid, "name", name)
        if len(trace.tracks) > 1:
            yield named("thread_sort_index", process + 1, tid, "sort_index", tid)


def _slice_events(trace: Trace) -> Iterable[str]:
    slices = trace.slices
    names, categories = ([json.dumps(name) for name in every] for every in (trace.names, trace.categories))
    heads = [f'"pid":{process + 1},"tid":{tid},"ts":' for tid, (process, _) in enumerate(trace.tracks, 1)]
    arguments = [""] * len(slices.track)
    if slices.numbers:
        form = ",".join(json.dumps(name).replace("%", "%%") + ":%d" for name in slices.numbers)
        rows = zip(*(values.tolist() for values in slices.numbers.values()), strict=True)
        arguments = [form % row for row in rows]
    if slices.details:
        each = (json.dumps(detail, separators=(",", ":"))[1:-1] for detail in slices.details)
        arguments = [",".join(filter(None, pair)) for pair in zip(arguments, each, strict=True)]
    duration = _microseconds(slices.end_ns - slices.start_ns)
    columns = (slices.name.tolist(), slices.category.tolist(), slices.track.tolist())
    return [
        f'{{"ph":"X","name":{names[name]},"cat":{categories[category]},{heads[track]}{start},"dur":{dur},"args":{{{args}}}}}'
        for name, category, track, start, dur, args in zip(
            *columns, _microseconds(slices.start_ns), duration, arguments, strict=True
        )
    ]


def _flow_events(trace: Trace) -> Iterator[str]:
    heads = [f'"pid":{process + 1},"tid":{tid},"ts":' for tid, (process, _) in enumerate(trace.tracks, 1)]
    for phase, ends in (('"s"', trace.flows[0]), ('"f","bp":"e"', trace.flows[1])):
        tracks, starts = trace.slices.track[ends].tolist(), _microseconds(trace.slices.start_ns[ends])
        for flow, (track, start) in enumerate(zip(tracks, starts, strict=True), 1):
            yield f'{{"ph":{phase},"name":"message","cat":"message","id":{flow},{heads[track]}{start}}}'


def _count_events(count: Count) -> Iterator[str]:
    values = np.array(list(count.values.values()))
    if not values.size:
        return
    changes = np.concatenate([[True], (values[:, 1:] != values[:, :-1]).any(axis=0)])
    form = ",".join(json.dumps(name).replace("%", "%%") + ":%d" for name in count.values)
    name = json.dumps(count.name)
    for start, row in zip(_microseconds(count.time_ns[changes]), values.T[changes].tolist(), strict=True):
        yield f'{{"ph":"C","name":{name},"pid":{count.process + 1},"ts":{start},"args":{{{form % tuple(row)}}}}}'
