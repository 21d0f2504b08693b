"""Traces of simulated schedules, read back with Perfetto's own definitions and as JSON."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from steptime.formats.trace import Trace, chrome, padded, perfetto
from steptime.schedule import SCHEDULES
from steptime.simulation.memory import Footprint, memory_replay
from steptime.simulation.messages import with_copies, with_messages
from steptime.simulation.simulate import Durations, Simulation, longest, simulate
from steptime.simulation.trace import trace_of

protos = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")

DURATIONS = Durations(
    forward_s=np.array([1.0, 2.0]), input_gradient_s=1.0, weight_gradient_s=0.5, message_s=0.25, unshard_s=0.125,
    reduce_s=0.5, update_s=0.25, together=longest,
)  # fmt: skip


def simulated(name: str = "1f1b", micro_batches: int = 3, **further: Any) -> Simulation:
    return simulate(with_messages(SCHEDULES[name].actions(2, 1, micro_batches), **further), DURATIONS)


def made(simulation: Simulation) -> Trace:
    footprint = Footprint(activation_bytes=100.0, weights_bytes=7.0)
    return trace_of(simulation, memory_replay(simulation, footprint), np.array([5, 9]))


def read(
    data: bytes,
) -> tuple[list[tuple[Any, ...]], dict[int, list[tuple[int, str]]], dict[str, list[tuple[int, int]]]]:
    """Slices (process, track, name, category, start, end, stage, micro-batch, bytes), flows, counters."""
    names: dict[int, str] = {}
    kinds: dict[int, str] = {}
    tracks: dict[int, Any] = {}
    opened: dict[int, list[Any]] = defaultdict(list)
    slices, flows, counts = [], defaultdict(list), defaultdict(list)
    # As Perfetto does: by time, packets of the same time in the order in which they were written.
    for packet in sorted(protos.Trace.FromString(data).packet, key=lambda packet: packet.timestamp):
        assert packet.trusted_packet_sequence_id == 1
        names |= {entry.iid: entry.name for entry in packet.interned_data.event_names}
        kinds |= {entry.iid: entry.name for entry in packet.interned_data.event_categories}
        if packet.HasField("track_descriptor"):
            tracks[packet.track_descriptor.uuid] = packet.track_descriptor
        if not packet.HasField("track_event"):
            continue
        event, track = packet.track_event, tracks[packet.track_event.track_uuid]
        process = tracks[track.parent_uuid].process.process_name
        if event.type == protos.TrackEvent.TYPE_COUNTER:
            assert track.counter.unit == protos.CounterDescriptor.UNIT_SIZE_BYTES
            counts[process].append((packet.timestamp, event.counter_value))
        elif event.type == protos.TrackEvent.TYPE_SLICE_BEGIN:
            told = {note.name: note.int_value for note in event.debug_annotations}
            title = names[event.name_iid]
            opened[track.uuid].append((process, track.thread.thread_name, title, kinds[event.category_iids[0]],
                                       packet.timestamp, told))  # fmt: skip
            for number in (*event.flow_ids, *event.terminating_flow_ids):
                flows[number].append((packet.timestamp, title))
        else:
            *head, start, told = opened[track.uuid].pop()
            slices.append((*head, start, packet.timestamp, *told.values()))
            assert list(told) == ["stage", "micro_batch", "bytes"]
    assert not any(opened.values())
    return sorted(slices), flows, counts


def read_chrome(data: bytes) -> list[tuple[Any, ...]]:
    document = json.loads(data)
    assert document["displayTimeUnit"] == "ms"
    events = document["traceEvents"]
    title = {
        (e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and "name" in e["args"]
    }
    process = {pid: name for (kind, pid, _), name in title.items() if kind == "process_name"}
    return sorted(
        (process[e["pid"]], title["thread_name", e["pid"], e["tid"]], e["name"], e["cat"], round(1000 * e["ts"]),
         round(1000 * (e["ts"] + e["dur"])), *e["args"].values())
        for e in events if e["ph"] == "X"
    )  # fmt: skip


def test_slices_by_hand() -> None:
    slices, flows, _ = read(perfetto(made(simulated(micro_batches=1))))
    assert slices == [
        ("rank 0", "compute", "B", "pass", 5_000_000_000, 6_500_000_000, 0, 0, 0),
        ("rank 0", "compute", "F", "pass", 0, 1_000_000_000, 0, 0, 0),
        ("rank 0", "from rank 1", "RECV_B", "message", 4_750_000_000, 5_000_000_000, 0, 0, 5),
        ("rank 0", "to rank 1", "SEND_F", "message", 1_000_000_000, 1_250_000_000, 0, 0, 9),
        ("rank 1", "compute", "B", "pass", 3_250_000_000, 4_750_000_000, 1, 0, 0),
        ("rank 1", "compute", "F", "pass", 1_250_000_000, 3_250_000_000, 1, 0, 0),
        ("rank 1", "from rank 0", "RECV_F", "message", 1_000_000_000, 1_250_000_000, 1, 0, 9),
        ("rank 1", "to rank 0", "SEND_B", "message", 4_750_000_000, 5_000_000_000, 1, 0, 5),
    ]
    assert dict(flows) == {
        1: [(1_000_000_000, "SEND_F"), (1_000_000_000, "RECV_F")],
        2: [(4_750_000_000, "SEND_B"), (4_750_000_000, "RECV_B")],
    }


@pytest.mark.parametrize(
    ("name", "micro_batches", "further"),
    [("1f1b", 3, {"reduces": True, "updates": True}), ("zb-h1", 4, {"gathered": 1}), ("dualpipe", 6, {})],
)
def test_both_formats_have_every_action(name: str, micro_batches: int, further: dict[str, Any]) -> None:
    simulation = simulated(name, micro_batches, **further)
    trace = made(simulation)
    slices, flows, counts = read(perfetto(trace))
    assert slices == read_chrome(chrome(trace))
    assert len(slices) == len(simulation.table)
    assert len(flows) == len(simulation.graph.messages.item)
    for (start, sent), (end, received) in flows.values():
        assert start == end and sent.replace("SEND", "RECV") == received
    replay = memory_replay(simulation, Footprint(activation_bytes=100.0, weights_bytes=7.0))
    assert [max(value for _, value in counts[f"rank {r}"]) for r in range(2)] == replay.peak_bytes.tolist()
    for rank, found in enumerate(counts.values()):
        times, values = replay.time_s[replay.rank == rank], replay.in_use_bytes[replay.rank == rank]
        expected = {round(1e9 * time): value for time, value in zip(times, values, strict=True)}
        assert [time for time, _ in found] == sorted({time for time, _ in found})
        assert all(expected[time] == value for time, value in found)
    assert {s[3] for s in slices if s[2] in ("UNSHARD", "RESHARD", "REDUCE_GRAD")} <= {"data"}
    if name == "dualpipe":
        assert any(one[4] == two[4] and one[0] == two[0] and one[2] != two[2] for one in slices for two in slices)


def test_streams_of_a_rank_have_tracks_of_their_own() -> None:
    """Passes of 1 s and 2 s, a fifth of each communication; copies of 0.5 s and 0.25 s."""
    table = with_copies(SCHEDULES["gpipe"].actions(1, 1, 3))
    durations = Durations(forward_s=1.0, backward_s=2.0, offload_s=0.5, reload_s=0.25, collective_share=0.2)
    simulation = simulate(table, durations)
    slices, _, _ = read(perfetto(trace_of(simulation)))
    assert slices == read_chrome(chrome(trace_of(simulation)))
    seconds = {
        track: [((start) / 1e9, end / 1e9) for _, own, _, _, start, end, *_ in sorted(slices, key=lambda s: s[4])
                if own == track]
        for track in ("compute", "tensor", "to host", "from host")
    }  # fmt: skip
    assert seconds["compute"] == [(0, 0.8), (1, 1.8), (2, 2.8), (3, 4.6), (5, 6.6), (7, 8.6)]
    assert seconds["tensor"] == [(0.8, 1), (1.8, 2), (2.8, 3), (4.6, 5), (6.6, 7), (8.6, 9)]
    assert seconds["to host"] == [(1, 1.5), (2, 2.5), (3, 3.5)]
    assert seconds["from host"] == [(2, 2.25), (3, 3.25), (5, 5.25)]
    assert {(own, kind) for _, own, _, kind, *_ in slices} == {
        ("compute", "pass"), ("tensor", "tensor"), ("to host", "copy"), ("from host", "copy")
    }  # fmt: skip


def test_chrome_flows_and_counters() -> None:
    trace = made(simulated())
    events = json.loads(chrome(trace))["traceEvents"]
    starts, ends = ({e["id"]: e["ts"] for e in events if e["ph"] == phase} for phase in "sf")
    assert starts == ends and len(starts) == 6
    counted = [(e["pid"], round(1000 * e["ts"]), e["args"]["in use (predicted)"]) for e in events if e["ph"] == "C"]
    _, _, counts = read(perfetto(trace))
    assert counted == [(rank + 1, *each) for rank in range(2) for each in counts[f"rank {rank}"]]


def test_padded_integers_are_read_as_any_other() -> None:
    from steptime.formats.trace import field_bytes, varint

    for value in (-(2**63), -1, 0, 127, 128, 2**63 - 1):
        body = varint(30 << 3) + padded(np.array([value]), 10).tobytes()
        packet = field_bytes(11, body)
        assert protos.Trace.FromString(field_bytes(1, packet)).packet[0].track_event.counter_value == value
