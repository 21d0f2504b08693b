"""Stages on a cluster under a schedule: sub-meshes, micro-batches in flight, step time, and a bound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from steptime.num import Array
from steptime.schedule import Kind, Pipeline, Schedule, Times
from steptime.sharding.build import Built
from steptime.simulation.graph import Transport
from steptime.simulation.simulate import Durations
from steptime.simulation.simulate import simulate as play

MOST_STAGES: Final = 64
MOST_REPLICAS: Final = 16
"""Largest number of devices of a stage whose number of devices need not be a usual one."""


def sub_meshes(devices: int, fast_domain: int) -> list[int]:
    """Sizes of sub-meshes of a cluster: powers of two in a fast domain, then whole domains, and all devices.

    >>> sub_meshes(32, 8), sub_meshes(12, 8)
    ([1, 2, 4, 8, 16, 32], [1, 2, 4, 8, 12])
    """
    out = {1 << n for n in range(devices.bit_length()) if 1 << n <= min(devices, fast_domain)}
    out |= {fast_domain << n for n in range(devices.bit_length()) if fast_domain << n <= devices}
    return sorted(n for n in out | {devices} if n >= devices / MOST_STAGES)


def replica_counts(devices: int, usual: Sequence[int]) -> list[int]:
    """Other sizes of a stage, which divides its samples: any up to 16, and all devices less a usual size.

    The convolutions of VGG-16 on 15 of 16 devices and its dense layers on the last one are the best stages of Narayanan
    et al., "PipeDream", SOSP 2019, arXiv 1806.03377. There a replica takes every n-th micro-batch. Here each replica
    takes its share of every micro-batch, and the largest share counts: under schedules that flush after each step this
    needs no more micro-batches in flight, and shortens the passes of a micro-batch by the same factor.

    >>> replica_counts(16, sub_meshes(16, 8)), replica_counts(32, sub_meshes(32, 8))[-4:]
    ([3, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15], [24, 28, 30, 31])
    """
    found = {*range(1, min(devices, MOST_REPLICAS) + 1), *(devices - count for count in usual)} - {0, *usual}
    return sorted(n for n in found if n >= devices / MOST_STAGES)


def places(sizes: Sequence[int], devices: int, fast_domain: int) -> list[int] | None:
    """First device of each sub-mesh such that none spans more fast domains than necessary; None: not found.

    Sub-meshes are placed in their order if that suffices, else the largest first. Those of :func:`sub_meshes` always
    fit.

    >>> places([4, 4, 8], 16, 8), places([3, 4, 1], 8, 4), places([5, 5, 6], 16, 8)
    ([0, 4, 8], [4, 0, 7], None)
    """

    def whole(start: int, size: int) -> bool:
        return (start + size - 1) // fast_domain - start // fast_domain < -(-size // fast_domain)

    out = [sum(sizes[:n]) for n in range(len(sizes))]
    if all(map(whole, out, sizes)):
        return out
    free = np.ones(devices, bool)
    for n in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        fitting = (at for at in range(devices - sizes[n] + 1) if free[at : at + sizes[n]].all() and whole(at, sizes[n]))
        out[n] = next(fitting, -1)
        if out[n] < 0:
            return None
        free[out[n] : out[n] + sizes[n]] = False
    return out


def in_flight_groups(row: Schedule, micro_batches: int, counts: Sequence[int]) -> dict[tuple[float, ...], list[int]]:
    """Micro-batches in flight by place from the end -> numbers of stages that have them; a prefix of another key is
    merged into it.

    >>> from steptime.schedule import SCHEDULES
    >>> in_flight_groups(SCHEDULES["1f1b"], 2, [1, 2, 3]), in_flight_groups(SCHEDULES["zb-h1"], 8, [1, 2])
    ({(1.0, 2.0, 2.0): [1, 2, 3]}, {(2.0, 2.0): [2], (1.0,): [1]})
    """
    out: dict[tuple[float, ...], list[int]] = {}
    for count in sorted(counts, reverse=True):
        pipeline = Pipeline(ranks=count, micro_batches=micro_batches)
        if not all(rule.holds(pipeline) for rule in row.rules):
            continue
        flights = tuple(float(row.in_flight(pipeline, rank) or 0.0) for rank in reversed(range(count)))
        key = next((known for known in out if known[:count] == flights), flights)
        out.setdefault(key, []).insert(0, count)
    return out


def played_s(
    row: Schedule, passes: Array, once_s: Array, message_s: Array, micro_batches: int, transport: Transport
) -> tuple[float, float]:
    """Simulated step time, in which each rank ends with the once-a-step work of its stages; the closed form.

    Args:
        row: the schedule.
        passes: seconds of forward pass, gradients of inputs and of weights, [stage, pass].
        once_s: seconds once in a step, by stage.
        message_s: seconds of a message from each stage to the next.
        micro_batches: micro-batches of a step.
        transport: model of message transport.
    """
    chunks = row.usual_chunks
    ranks = len(passes) // chunks
    mean = passes.sum(axis=0) / ranks
    times = Times(
        forward_s=max(float(mean[0]), 1e-12), input_gradient_s=float(mean[1]), weight_gradient_s=float(mean[2])
    )
    table = row.actions(ranks, chunks, micro_batches, times=times)
    of_stage = np.zeros(len(passes), int)
    of_stage[table.stage[table.kind == Kind.FORWARD]] = table.rank[table.kind == Kind.FORWARD]
    between = np.zeros((ranks, ranks))
    for each, a, b in zip(message_s, of_stage[:-1], of_stage[1:], strict=True):
        between[a, b] = between[b, a] = max(between[a, b], each)
    durations = Durations(
        forward_s=passes[:, 0], input_gradient_s=passes[:, 1], weight_gradient_s=passes[:, 2], message_s=between
    )
    played = play(table, durations, transport)
    ends, once, busy = np.zeros(ranks), np.bincount(of_stage, once_s, ranks), np.zeros((ranks, 3))
    passing = played.table.kind <= Kind.WEIGHT_GRADIENT
    np.maximum.at(ends, played.table.rank[passing], played.end_s[passing])
    np.add.at(busy, of_stage, passes)
    slowest = busy[int(busy.sum(axis=1).argmax())]
    times = Times(
        forward_s=max(float(slowest[0]), 1e-12),
        input_gradient_s=float(slowest[1]),
        weight_gradient_s=float(slowest[2]),
    )
    bubble_s = row.bubble_s(Pipeline(ranks=ranks, chunks=chunks, micro_batches=micro_batches, times=times)) or 0.0
    closed = bubble_s + micro_batches * float(slowest.sum()) + float(once.max()) + 2 * float(message_s.sum())
    return float((ends + once).max()), closed


def least_operators_s(problem: Built) -> Array:
    """Least seconds of each item's computation."""
    return np.array([float(np.min(each)) if len(each) else 0.0 for each in problem.seconds.operators])


def least_step_s(work_s: Array, devices: Sequence[int]) -> float:
    r"""Lower bound of the time in which devices of several kinds do all work, however it is divided.

    $$T \ge \max_{\lambda \ge 0} \frac{\sum_v \min_k \lambda_k w_{kv}}{\sum_k \lambda_k D_k}$$

    where $w_{kv}$ are the device-seconds of item $v$ on kind $k$ = `work_s`, $D_k$ = `devices`. With two kinds the
    maximum is at a ratio of multipliers at which some item costs the same on both.

    >>> least_step_s(np.array([[4.0, 4.0]]), [8]), least_step_s(np.array([[4.0, 4.0], [8.0, 8.0]]), [2, 4])
    (1.0, 2.0)
    """
    counts = np.asarray(devices, float)
    if len(counts) == 1:
        return float(work_s[0].sum() / counts[0])
    best = 0.0
    busy = (work_s > 0).all(axis=0)
    for k in range(1, len(counts)):
        for ratio in np.unique(work_s[0][busy] / work_s[k][busy]):
            factors = np.ones(len(counts))
            factors[k] = ratio
            for other in range(1, len(counts)):
                if other != k:
                    factors[other] = float(np.median(work_s[0][busy] / work_s[other][busy]))
            value = float((factors[:, None] * work_s).min(axis=0).sum() / (factors @ counts))
            best = max(best, value)
    return best
