"""Plays a run event by event: work, checkpoints, failures, restarts, repairs; the closed forms are held against it."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np

from steptime.goodput.run import Costs


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One run that was played."""

    wall_s: float
    failures: int
    restarting_s: float
    stalls_s: float


def play(costs: Costs, work_s: float, interval_s: float, seed: int) -> Played:
    """Plays a run until its work is safe.

    A failure during work, a stall or a restart leads to a restart. Work goes back to the last checkpoint that was safe:
    each is safe a lag after its stall, while the run works on. Where copies are in memory, a share of the failures
    loses them, and work goes back to the last checkpoint in the store, of which there is one every store interval.

    Args:
        costs: what one checkpoint and one restart cost.
        work_s: work of the run (s).
        interval_s: work between checkpoints (s).
        seed: of the failures.
    """
    random = np.random.default_rng(seed)
    lost = 0.0 if math.isinf(costs.store_mtbf_s) else costs.mtbf_s / costs.store_mtbf_s
    now = safe = stored = saving = done = restarting = stalls = 0.0
    failures, due, pending = 0, random.exponential(costs.mtbf_s), math.inf
    next_stored = costs.store_interval_s
    while safe < work_s:
        piece = min(interval_s, work_s - done) if done < work_s else 0.0
        end = now + piece + (costs.stall_s if piece else 0.0)
        if pending < math.inf and pending <= min(due, end if piece else math.inf):
            if saving >= work_s:
                now = max(now, pending)
            safe, pending = saving, math.inf
            continue
        if piece and end <= due:
            stored_now = done + piece >= next_stored
            now, done, stalls = end, done + piece, stalls + costs.stall_s
            saving, pending = done, now + costs.lag_s
            if stored_now:
                stored, next_stored = done, done + costs.store_interval_s
                now, stalls = now + costs.stall_s, stalls + costs.stall_s
            continue
        now, pending, failures = due, math.inf, failures + 1
        due, longer = now + random.exponential(costs.mtbf_s), 0.0
        if random.random() < lost:
            safe = stored
            next_stored, longer = stored + costs.store_interval_s, costs.write_s
        until = now + costs.restart_s + longer
        while due < until:
            restarting, failures = restarting + due - now, failures + 1
            now = due
            due, until = now + random.exponential(costs.mtbf_s), now + costs.restart_s + longer
        restarting, now, done = restarting + until - now, until, safe
    return Played(wall_s=now, failures=failures, restarting_s=restarting, stalls_s=stalls)


def mean_wall_s(costs: Costs, work_s: float, interval_s: float, runs: int, seed: int = 0) -> float:
    """Mean time of a number of runs with seeds from ``seed`` on."""
    return float(np.mean([play(costs, work_s, interval_s, seed + i).wall_s for i in range(runs)]))


def play_spares(outage_s: float, repair_s: float, spares: int, outages: int, seed: int) -> float:
    """Mean wait for a node over a number of outages: exponential failures while the job works, exponential repairs."""
    random = np.random.default_rng(seed)
    repairs: list[float] = []
    now, waited, free = 0.0, 0.0, spares
    for _ in range(outages):
        now += random.exponential(outage_s)
        heapq.heappush(repairs, now + random.exponential(repair_s))
        while repairs and repairs[0] <= now:
            heapq.heappop(repairs)
            free += 1
        if not free:
            back = heapq.heappop(repairs)
            waited, now, free = waited + back - now, back, 1
        free -= 1
    return waited / outages
