"""A simulated schedule as a trace: a process for each rank, a track for each stream, arrows for messages, memory."""

from __future__ import annotations

import numpy as np

from steptime.formats.trace import Count, Slices, Trace
from steptime.num import Array, Num
from steptime.schedule.actions import LETTERS, Kind
from steptime.schedule.memory import MemoryReplay
from steptime.schedule.simulate import Simulation, spread
from steptime.schedule.waits import first_of_groups, is_message

CATEGORIES = ("pass", "data", "message")
COMPUTE, DATA, PEERS = 0, 1, 2
"""Tracks of a rank; from the third on one for each other rank, to it. Tracks from other ranks come behind those of all
ranks, so that an arrow is known when it ends."""


def trace_of(simulation: Simulation, memory: MemoryReplay | None = None, message_bytes: Num = 0) -> Trace:
    """The trace of a simulated schedule.

    Every action is a slice with its stage, micro-batch (-1: of none) and bytes. Each rank has the tracks `compute`,
    `data` if it communicates with replicas, and one for messages to and one for messages from each other rank. Passes
    that run together share their time, one inside another.

    Args:
        simulation: the schedule with its times.
        memory: what ranks hold, as counters.
        message_bytes: size of the messages to each stage: a number, or an array by stage.
    """
    table, messages = simulation.table, simulation.graph.messages
    own = np.flatnonzero(~is_message(table))
    of_data = (table.kind[own] > Kind.WEIGHT_GRADIENT) & (table.kind[own] != Kind.UPDATE)
    forward = table.kind[messages.consumer] == Kind.FORWARD
    sent, width = np.where(forward, Kind.SEND_FORWARD, Kind.SEND_BACKWARD), PEERS + table.ranks
    size = spread(message_bytes, (table.stages,), "message_bytes")[table.stage[messages.consumer]]
    row = np.concatenate([own, messages.producer, messages.consumer])
    kind = np.concatenate([table.kind[own], sent, sent + 1])
    compute = table.rank[own] * width + np.where(of_data, DATA, COMPUTE)
    away, back = messages.source * width + messages.target, (table.ranks + messages.target) * width + messages.source
    track = np.concatenate([compute, PEERS + away, PEERS + back])
    item = np.concatenate([simulation.graph.item[own], messages.item, messages.item])
    depth = np.concatenate([(np.arange(len(table)) - first_of_groups(table))[own], np.zeros(2 * len(sent), np.int64)])
    nbytes = np.concatenate([np.zeros(len(own)), size, size]).astype(np.int64)
    order = np.lexsort((depth, simulation.starts[item], track))
    place = np.argsort(order)
    tracks, number = np.unique(track[order], return_inverse=True)
    sort = np.select([kind <= Kind.WEIGHT_GRADIENT, kind <= Kind.RECEIVE_BACKWARD, kind < Kind.UPDATE], [0, 2, 1], 0)
    return Trace(
        processes=[f"rank {rank}" for rank in range(table.ranks)],
        tracks=[_track(each, width, table.ranks) for each in tracks.tolist()],
        names=LETTERS,
        categories=CATEGORIES,
        slices=Slices(
            track=number,
            start_ns=_ns(simulation.starts[item][order]),
            end_ns=_ns(simulation.ends[item][order]),
            name=kind[order],
            category=sort[order],
            depth=depth[order],
            numbers={
                "stage": table.stage[row][order],
                "micro_batch": table.micro_batch[row][order],
                "bytes": nbytes[order],
            },
        ),
        flows=(place[len(own) : len(own) + len(sent)], place[len(own) + len(sent) :]),
        counts=[] if memory is None else [_count(memory, rank) for rank in range(table.ranks)],
    )


def _ns(seconds: Array) -> Array:
    """Whole nanoseconds."""
    return np.rint(1e9 * seconds).astype(np.int64)


def _track(number: int, width: int, ranks: int) -> tuple[int, str]:
    """Rank and name of a track."""
    rank, stream = divmod(number, width)
    if stream < PEERS:
        return rank, "data" if stream == DATA else "compute"
    return rank % ranks, f"{'to' if rank < ranks else 'from'} rank {stream - PEERS}"


def _count(memory: MemoryReplay, rank: int) -> Count:
    """What a rank holds, after all changes of each time."""
    of = memory.rank == rank
    time_ns, in_use = _ns(memory.time_s[of]), memory.in_use_bytes[of]
    last = np.concatenate([np.diff(time_ns) > 0, [True]])[: len(time_ns)]
    return Count(
        process=rank,
        name="memory",
        time_ns=time_ns[last],
        values={"in use (predicted)": np.rint(in_use[last]).astype(np.int64)},
    )
