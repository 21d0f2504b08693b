"""Trace of a simulated schedule: a process per rank, a track per stream, arrows for messages, memory counters."""

from __future__ import annotations

import numpy as np

from steptime.formats.trace import Count, Slices, Trace
from steptime.num import Array, Num
from steptime.schedule.actions import COMPUTE, LETTERS, STREAM, STREAMS, Kind
from steptime.simulation.memory import MemoryReplay
from steptime.simulation.simulate import Simulation, spread
from steptime.simulation.waits import first_of_groups, is_message

CATEGORIES = ("pass", "data", "message", "copy", "tensor")
CATEGORY = np.array([0] * 4 + [2] * 4 + [1] * 3 + [0, 3, 3])
"""Category of each kind of action."""
TRACKS = ("compute", "data", "to host", "from host", "tensor")
"""Tracks of a rank: one by stream, then the communication of passes with tensor, context and expert ranks. Tracks for
messages to each other rank follow. Tracks for messages from other ranks come after all of these, so that an arrow is
known when it ends."""
TENSOR, PEERS = STREAMS, STREAMS + 1


def trace_of(simulation: Simulation, memory: MemoryReplay | None = None, message_bytes: Num = 0) -> Trace:
    """The trace of a simulated schedule.

    Every action is a slice with its stage, micro-batch (-1: none) and bytes. Each rank has the track `compute`,
    further ones for other streams (:data:`TRACKS`), and one for messages to and one for messages from each other rank.
    A pass that communicates with tensor, context or expert ranks is two slices: its computation, and then on the track
    `tensor` its exposed communication, although layers alternate between the two. Passes that run together share
    their time, one nested in another.

    Args:
        simulation: the schedule with its times.
        memory: memory of ranks, drawn as counters.
        message_bytes: size of the messages to each stage: a number, or an array by stage.
    """
    table, messages = simulation.table, simulation.graph.messages
    own = np.flatnonzero(~is_message(table))
    sends = np.flatnonzero(simulation.tensor_s > 0)
    forward = table.kind[messages.consumer] == Kind.FORWARD
    sent, width = np.where(forward, Kind.SEND_FORWARD, Kind.SEND_BACKWARD), PEERS + table.ranks
    size = spread(message_bytes, (table.stages,), "message_bytes")[table.stage[messages.consumer]]
    row = np.concatenate([own, sends, messages.producer, messages.consumer])
    kind = np.concatenate([table.kind[own], table.kind[sends], sent, sent + 1])
    away, back = messages.source * width + messages.target, (table.ranks + messages.target) * width + messages.source
    streams = table.rank[own] * width + STREAM[table.kind[own]], table.rank[sends] * width + TENSOR
    track = np.concatenate([*streams, PEERS + away, PEERS + back])
    apart = _without_tensor(simulation)
    start = np.concatenate([simulation.start_s[own], apart[sends], *[simulation.starts[messages.item]] * 2])
    end = np.concatenate([apart[own], simulation.end_s[sends], *[simulation.ends[messages.item]] * 2])
    inside = np.arange(len(table)) - first_of_groups(table)
    depth = np.concatenate([inside[own], inside[sends], np.zeros(2 * len(sent), np.int64)])
    nbytes = np.concatenate([np.zeros(len(own) + len(sends)), size, size]).astype(np.int64)
    sort = CATEGORY[kind]
    sort[len(own) : len(own) + len(sends)] = CATEGORIES.index("tensor")
    order = np.lexsort((depth, start, track))
    place = np.argsort(order)[len(own) + len(sends) :]
    tracks, number = np.unique(track[order], return_inverse=True)
    numbers = {"stage": table.stage[row], "micro_batch": table.micro_batch[row], "bytes": nbytes}
    return Trace(
        processes=[f"rank {rank}" for rank in range(table.ranks)],
        tracks=[_track(each, width, table.ranks) for each in tracks.tolist()],
        names=LETTERS,
        categories=CATEGORIES,
        slices=Slices(
            track=number,
            start_ns=_ns(start[order]),
            end_ns=_ns(end[order]),
            name=kind[order],
            category=sort[order],
            depth=depth[order],
            numbers={name: values[order] for name, values in numbers.items()},
        ),
        flows=(place[: len(sent)], place[len(sent) :]),
        counts=[] if memory is None else [_count(memory, rank) for rank in range(table.ranks)],
    )


def _without_tensor(simulation: Simulation) -> Array:
    """End of each action without its exposed communication with tensor, context and expert ranks, by row (s)."""
    graph = simulation.graph
    sent: Array = np.bincount(graph.item, simulation.tensor_s, graph.size)
    ends: Array = simulation.end_s - sent[graph.item] * (STREAM[graph.table.kind] == COMPUTE)
    return ends


def _ns(seconds: Array) -> Array:
    """Whole nanoseconds."""
    return np.rint(1e9 * seconds).astype(np.int64)


def _track(number: int, width: int, ranks: int) -> tuple[int, str]:
    """Rank and name of a track."""
    rank, stream = divmod(number, width)
    if stream < PEERS:
        return rank, TRACKS[stream]
    return rank % ranks, f"{'to' if rank < ranks else 'from'} rank {stream - PEERS}"


def _count(memory: MemoryReplay, rank: int) -> Count:
    """Counter of the memory of a rank, after all changes at each time."""
    of = memory.rank == rank
    time_ns, in_use = _ns(memory.time_s[of]), memory.in_use_bytes[of]
    last = np.concatenate([np.diff(time_ns) > 0, [True]])[: len(time_ns)]
    return Count(
        process=rank,
        name="memory",
        time_ns=time_ns[last],
        values={"in use (predicted)": np.rint(in_use[last]).astype(np.int64)},
    )
