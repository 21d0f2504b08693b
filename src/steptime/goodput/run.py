"""Goodput of a whole run: checkpoints, failures, restarts, pauses; expected time, band, losses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from steptime.cost import failures as f
from steptime.errors import UserError
from steptime.goodput.operations import Operations
from steptime.num import Array
from steptime.units import format_seconds

SAMPLES: Final = 4096
"""Number of runs sampled for a band, with a fixed seed."""
SEED: Final = 35
WORST: Final = 20.0
"""Limit of a restart and an interval together, in mean times between failures; beyond, a run does not end."""
Z95: Final = 1.6448536269514722
"""95th percentile of the normal distribution."""

INTERVALS: Final = {"young": f.young_interval_s, "daly": f.daly_interval_s, "exact": f.best_interval_s}
"""Formulas of the best work between checkpoints, by author."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Quantities of a run that its goodput depends on."""

    step_s: float
    steps: float
    devices: int
    node: int
    """Devices of a host."""
    saved_bytes: float
    """Bytes of a checkpoint."""
    host_Bps: float
    """Bandwidth between a device and its host."""
    network_Bps: float
    """Bandwidth of one host to another."""
    step_band: tuple[float, float] | None = None
    """5th and 95th percentile of the time of a step."""

    @property
    def nodes(self) -> float:
        """Hosts of the job."""
        return math.ceil(self.devices / self.node)


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Costs of one checkpoint, one restart and one failure."""

    mtbf_s: float
    """Mean time between failures of the job."""
    write_s: float
    """Time until the store has a checkpoint."""
    stall_s: float
    lag_s: float
    """Time from the end of the stall until the checkpoint is safe."""
    restart_s: float
    """Time of a restart, with the read of the checkpoint and the mean wait for a node."""
    waiting_s: float
    """Mean wait for a node, a part of the restart."""
    store_mtbf_s: float
    """Mean time between failures that lose copies in memory; infinite if checkpoints go to the store."""
    store_interval_s: float
    """Work between checkpoints in the store, if others are in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Expected time of a run and its losses (SI units)."""

    wall_s: float
    wall_band_s: tuple[float, float]
    """5th and 95th percentile, from the bands of the step and of the failure rate, and chance."""
    ideal_s: float
    """Time of the steps alone."""
    effective_ratio: float
    """Effective training time ratio: ideal over expected time."""
    effective_band: tuple[float, float]
    failures: float
    failures_band: tuple[float, float]
    mtbf_s: float
    kind: str
    """Kind of checkpoints."""
    saved_bytes: float
    interval_s: float
    """Chosen work between checkpoints."""
    intervals_s: Mapping[str, float]
    """Best work between checkpoints by ``young``, ``daly`` and ``exact``."""
    write_s: float
    stall_s: float
    restart_s: float
    spares: int
    losses_s: Mapping[str, float]
    """Cause -> expected seconds of the run, largest first; with the ideal time they add up to the expected time."""
    assumed: tuple[str, ...]
    source: str
    """Source of the failure rates."""


def spares_of(ops: Operations, nodes: float) -> int:
    """Spare nodes: as given, else one in a hundred, at least one."""
    return max(1, round(nodes / 100)) if ops.spares is None else ops.spares


def costs_of(load: Load, ops: Operations) -> Costs:
    """Costs of one checkpoint, one restart and one failure.

    Raises:
        UserError: parts fail faster than the run restarts.
    """
    mtbf_s = ops.job_mtbf_s(load.devices, load.node)
    write_s = float(f.checkpoint_write_s(load.saved_bytes, load.nodes, ops.node_Bps, ops.store_Bps))
    copy_s = load.saved_bytes / load.devices / load.host_Bps + ops.stall_s
    peer_s = load.saved_bytes / load.nodes / load.network_Bps
    stall_s, lag_s, read_s = {
        "sync": (write_s, 0.0, write_s),
        "async": (copy_s, write_s, write_s),
        "memory": (copy_s, peer_s, peer_s + copy_s),
    }[ops.kind]
    outage_s = ops.outage_mtbf_s(load.devices, load.node)
    waiting_s = 0.0
    if math.isfinite(outage_s):
        waiting_s = f.spare_wait_s(outage_s, ops.repair_s, spares_of(ops, load.nodes)) * mtbf_s / outage_s
    lost = ops.lost_copies if ops.kind == "memory" else 0.0
    store_mtbf_s = mtbf_s / lost if lost else math.inf
    costs = Costs(
        mtbf_s=mtbf_s,
        write_s=write_s,
        stall_s=stall_s,
        lag_s=lag_s,
        restart_s=ops.restart_s + read_s + waiting_s,
        waiting_s=waiting_s,
        store_mtbf_s=store_mtbf_s,
        store_interval_s=max(float(f.best_interval_s(copy_s, store_mtbf_s)), write_s) if lost else math.inf,
    )
    if costs.restart_s + costs.lag_s + costs.stall_s > WORST * mtbf_s:
        took = f"a restart takes {format_seconds(costs.restart_s)} and the job fails every {format_seconds(mtbf_s)}"
        raise UserError(f"the run does not end: {took}", hint="more spares, a faster restart, or fewer devices")
    return costs


def interval_of(load: Load, ops: Operations, costs: Costs) -> float:
    """Work between checkpoints: as given, else the best; in whole steps, and not below the time to write one."""
    best_s = ops.interval_s or float(f.best_interval_s(costs.stall_s, costs.mtbf_s))
    least_s = max(best_s, costs.lag_s - costs.stall_s)
    up = math.ceil if least_s > best_s else round
    return max(up(least_s / load.step_s), 1) * load.step_s


def stretched(costs: Costs, interval_s: float, mtbf_s: Any) -> Any:
    """Expected time over work for failures every ``mtbf_s``, including failures that lose copies in memory."""
    near_s = np.maximum(mtbf_s, (costs.restart_s + costs.lag_s + costs.stall_s + interval_s) / WORST)
    out = f.stretch(interval_s, costs.stall_s, costs.lag_s, costs.restart_s, np.asarray(near_s, dtype=float))
    if math.isinf(costs.store_mtbf_s):
        return out
    far_s = near_s * (costs.store_mtbf_s / costs.mtbf_s)
    longer_s = costs.restart_s + costs.write_s
    return out * f.stretch(costs.store_interval_s, costs.stall_s, costs.write_s, longer_s, np.asarray(far_s))


def goodput_of(load: Load, ops: Operations) -> Goodput:
    """Expected time of the run, its band and its losses.

    Raises:
        UserError: the run does not end.
    """
    costs = costs_of(load, ops)
    interval_s = interval_of(load, ops, costs)
    ideal_s = load.steps * load.step_s
    work_s = ideal_s * float(f.slowest_of(load.nodes, ops.jitter))
    trained_s = work_s * float(stretched(costs, interval_s, costs.mtbf_s))
    pauses = {"evaluation": work_s * ops.evaluation_s / ops.evaluation_every_s, "data": work_s * ops.data}
    wall_s = trained_s + sum(pauses.values())
    walls, ratios, counts = sampled(load, ops, costs, interval_s, wall_s - trained_s)
    losses = {"stragglers": work_s - ideal_s, **pauses, **losses_of(costs, interval_s, work_s, trained_s)}
    return Goodput(
        wall_s=wall_s,
        wall_band_s=walls,
        ideal_s=ideal_s,
        effective_ratio=ideal_s / wall_s,
        effective_band=ratios,
        failures=trained_s / costs.mtbf_s,
        failures_band=counts,
        mtbf_s=costs.mtbf_s,
        kind=ops.kind,
        saved_bytes=load.saved_bytes,
        interval_s=interval_s,
        intervals_s={name: float(best(costs.stall_s, costs.mtbf_s)) for name, best in INTERVALS.items()},
        write_s=costs.write_s,
        stall_s=costs.stall_s,
        restart_s=costs.restart_s,
        spares=spares_of(ops, load.nodes),
        losses_s={name: value for name, value in sorted(losses.items(), key=lambda item: -item[1]) if value > 0},
        assumed=ops.assumed,
        source=ops.source,
    )


def losses_of(costs: Costs, interval_s: float, work_s: float, trained_s: float) -> dict[str, float]:
    """Time that checkpoints and failures add to the work of a run, by cause (s)."""
    stalls_s = work_s / interval_s * costs.stall_s
    if math.isfinite(costs.store_interval_s):
        stalls_s += work_s / costs.store_interval_s * costs.stall_s
    restarts_s = trained_s * float(f.restarting_share(costs.restart_s, costs.mtbf_s))
    waits_s = restarts_s * costs.waiting_s / costs.restart_s if costs.restart_s else 0.0
    return {
        "lost work": float(f.lost_work_s(trained_s, work_s, stalls_s, restarts_s)),
        "restarts": restarts_s - waits_s,
        "waits for a node": waits_s,
        "checkpoint stalls": stalls_s,
    }


def sampled(
    load: Load, ops: Operations, costs: Costs, interval_s: float, pauses_s: float
) -> tuple[tuple[float, float], ...]:
    """5th and 95th percentiles of expected time, effective ratio and number of failures.

    The step time is log-normal between the edges of its band, the failure rate log-normal with the spread of clusters;
    the number of failures is Poisson, and each costs its mean.
    """
    random = np.random.default_rng(SEED)
    low_s, high_s = load.step_band or (load.step_s, load.step_s)
    centre, width = math.log(low_s * high_s) / 2, math.log(high_s / low_s) / (2 * Z95)
    steps_s = np.exp(centre + width * random.standard_normal(SAMPLES))
    if load.step_band is None:
        steps_s = np.full(SAMPLES, load.step_s)
    mtbf_s = costs.mtbf_s * np.exp(ops.spread * random.standard_normal(SAMPLES))
    slower = float(f.slowest_of(load.nodes, ops.jitter))
    work_s = load.steps * steps_s * slower
    trained_s = work_s * stretched(costs, interval_s, mtbf_s)
    mean = trained_s / mtbf_s
    each_s = costs.restart_s + costs.lag_s + (interval_s + costs.stall_s) / 2
    counts = random.poisson(np.minimum(mean, 1e12))
    chance_s = np.maximum(trained_s + (counts - mean) * each_s, work_s)
    wall_s = chance_s + pauses_s * steps_s / load.step_s
    return _band(wall_s), _band(load.steps * steps_s / wall_s), _band(counts)


def _band(values: Array) -> tuple[float, float]:
    low, high = np.quantile(values, [0.05, 0.95])
    return float(low), float(high)
