"""Data-parallel training by all-reduce and through parameter servers: throughput, staleness, failures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from steptime.api.calls import estimate
from steptime.api.models import load_model
from steptime.api.request import NameOrPath, choice, name_or_path, whole
from steptime.cost.collective import reduction_s
from steptime.cost.data_parallel import largest_shard_servers, pull_s, push_s
from steptime.errors import FieldError, PlanError, UserError, counted
from steptime.estimate.machine import Machine
from steptime.estimate.result import SCHEMA_VERSION, Estimate
from steptime.hardware import load_cluster
from steptime.model.parameters import parameter_terms
from steptime.num import Array
from steptime.options import number
from steptime.simulation.collectives.times import machine_for_links
from steptime_lab.replicas.consistency import (
    ASYNCHRONOUS,
    Cycle,
    Outage,
    Timeline,
    all_reduced,
    draw_factors,
    simulate,
)
from steptime_lab.replicas.descent import StaleDescent, descend

ALL_REDUCE: Final = "all-reduce"
MODES: Final = (ALL_REDUCE, "bsp", "ssp", "asp")
"""All-reduce, and parameter servers bulk-synchronous, stale-synchronous and asynchronous."""
SHARDINGS: Final = ("even", "tensors")
"""Servers have equal bytes, or whole tensors, assigned largest first."""
WHAT: Final = ("worker", "server")
MAX_CLOCKS, MAX_CELLS, MAX_SERVERS = 100_000, 2_000_000, 100_000
DOES_NOT_FIT: Final = (
    "a worker does not fit on its devices with whole copies of weights, gradients and optimiser (ZeRO 0)"
)
DESCENT_CELLS: Final = 20_000
"""Largest number of clocks, over all workers, of the small convex problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureEffect:
    """Effect of one failure on one mode of training."""

    what: str
    """``worker`` or ``server``."""
    at_s: float
    stands_still_s: float
    """Time before the end of the failure in which no gradients arrive."""
    lost_gradients: int
    """Gradients whose effect is lost, because the parameters of a server return to its last checkpoint."""
    lost_s: float
    """Delay until the run has the same number of effective gradients as without the failure."""

    @property
    def stops(self) -> bool:
        """Whether training stops: a single point of failure."""
        return self.stands_still_s > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeRun:
    """Simulated run of one mode of consistency."""

    mode: str
    """One of :data:`MODES`."""
    bound: int | None
    """Clocks that a worker may be ahead of the slowest one; None: any number."""
    samples_per_s: float
    updates_per_s: float
    """Rate of parameter updates: one for all gradients of a clock; one for each gradient where workers do not wait."""
    clock_s: float
    """Mean time of a clock of a worker."""
    compute_share: float
    exchange_share: float
    """Share of workers' time for the exposed part of pulls and pushes, or of the all-reduce, queues included."""
    wait_share: float
    """Share of workers' time for waiting for slower ones."""
    behind: tuple[float, ...]
    """Shares of pulls whose parameters lack the updates of 0, 1, 2, ... clocks."""
    mean_behind: float
    most_behind: int
    mean_delay: float
    """Mean number of gradients of others that change the parameters between a pull and its push."""
    descent: StaleDescent
    """Descent on the small convex problem with the staleness of this mode."""
    failures: tuple[FailureEffect, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """Parameter servers and their links."""

    count: int
    sharding: str
    push_bytes: float
    """Gradients of one worker."""
    pull_bytes: float
    """Parameters that one worker fetches."""
    largest_share: float
    """Share of the parameters on the fullest server."""
    worker_Bps: float
    server_Bps: float
    received_bytes: float
    """Bytes that the fullest server receives from all workers in a clock."""
    push_s: float
    """Time of a push of all workers at once."""
    pull_s: float
    worker_link_s: float
    """Time of a push over a worker's own link alone."""
    enough: int
    """Fewest servers with equal shards for which the workers' links are the limit."""

    @property
    def bottleneck(self) -> str:
        """Whose links set the pace when all push at once: ``servers`` or ``workers``."""
        return "servers" if self.push_s > self.worker_link_s * (1 + 1e-9) else "workers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Consistency:
    """Comparison of the modes of consistency for the replicas of one job."""

    model: str
    cluster: str
    workers: int
    devices_per_worker: int
    step_s: float
    """Step of the estimate, with an all-reduce and workers of equal speed."""
    compute_s: float
    """Step without the exposed all-reduce."""
    exchange_s: float
    """Exposed part of the all-reduce."""
    jitter: float
    slow: float
    slow_workers: int
    clocks: int
    seed: int
    servers: Servers
    modes: tuple[ModeRun, ...]
    notes: tuple[str, ...]

    def mode(self, name: str) -> ModeRun:
        """The run of a mode of :data:`MODES`."""
        return next(one for one in self.modes if one.mode == name)

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``."""
        out = {"schema_version": SCHEMA_VERSION, **asdict(self)}
        out["servers"]["bottleneck"] = self.servers.bottleneck
        for row, mode in zip(out["modes"], self.modes, strict=True):
            for effect, record in zip(row["failures"], mode.failures, strict=True):
                effect["stops"] = record.stops
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A failure given by the user."""

    what: str
    at_s: float


def _draws(workers: int, clocks: int, *, jitter: float, slow: float, slow_workers: int, seed: int) -> _Draws:
    """Parameters of the random computing times, checked."""
    return _Draws(
        workers=workers,
        clocks=clocks,
        jitter=number("jitter", jitter, 0, 2, "coefficient of variation"),
        slow=number("slow", slow, 0.1, 100, "times as long"),
        seed=whole("seed", seed, 0, 2**32 - 1),
        slow_workers=whole("slow_workers", slow_workers, 0, workers),
    )


def consistency(
    model: NameOrPath,
    cluster: NameOrPath,
    *,
    gpus: int,
    global_batch: int,
    servers: int | None = None,
    staleness: int = 3,
    jitter: float = 0.1,
    slow: float = 1.0,
    slow_workers: int = 1,
    sharding: str = "even",
    server_Bps: float | None = None,
    clocks: int = 200,
    seed: int = 0,
    failures: Sequence[tuple[str, float]] = (),
    down_s: float = 300.0,
    checkpoint_s: float | None = None,
    plan: Mapping[str, Any] | None = None,
    **job: Any,
) -> Consistency:
    """Simulate data-parallel training by all-reduce and through parameter servers.

    A worker is one replica of the model, with the times of the estimate. The servers are further devices of the
    cluster, on links of the level between fast domains; they apply the optimiser once all gradients of a clock have
    arrived (BSP), or to each gradient separately (SSP, ASP).

    Args:
        servers: number of parameter servers; None: the number of workers.
        staleness: clocks that a worker may be ahead of the slowest one, in the mode ``ssp``.
        jitter: coefficient of variation of the computing time from clock to clock.
        slow: factor on the computing time of slow workers.
        slow_workers: number of slow workers; without effect where ``slow`` is 1.
        sharding: ``even``: equal bytes on each server; ``tensors``: whole tensors, assigned largest first.
        server_Bps: bandwidth of a server's link, each way; None: that of a device.
        clocks: simulated steps of each worker.
        seed: seed of the jitter and of the small convex problem.
        failures: pairs of ``worker`` or ``server`` and the time, in seconds, at which one fails.
        down_s: duration of a failure.
        checkpoint_s: interval of the servers' checkpoints; None: none, so that a server loses all updates since the
            start.
        plan: plan of the estimate; ZeRO stage 0, since each worker has a copy of its own.
        job: the other arguments of :func:`steptime.api.estimate`.

    Raises:
        UserError: something in the input is wrong; the message says what to change.
    """
    given = {"zero": 0, **(plan or {})}
    _check_plan(given, job)
    found = estimate(model, cluster, gpus=gpus, global_batch=global_batch, plan=given, **job)
    _check_experts(found)
    workers = int(found.plan["dp"])
    if workers < 2:
        raise PlanError("dp 1: a single worker has nobody to be consistent with", hint="give more --gpus, or less --tp")
    clocks = whole("clocks", clocks, 20, MAX_CLOCKS)
    asked = [
        Failure(what=choice("fail", what, WHAT), at_s=number("fail", at, 0, 1e9, "seconds")) for what, at in failures
    ]
    factors = _draws(workers, clocks, jitter=jitter, slow=slow, slow_workers=slow_workers, seed=seed)
    machine = machine_for_links(load_cluster(name_or_path("cluster", cluster)), gpus)
    load = _servers(found, machine, model, servers, choice("sharding", sharding, SHARDINGS), server_Bps)
    cycles = _cycles(found, load, machine)
    down_s = number("down_s", down_s, 0, 1e8, "seconds")
    if checkpoint_s is not None:
        checkpoint_s = number("checkpoint_s", checkpoint_s, 1e-3, 1e9, "seconds")
    bounds = {ALL_REDUCE: 0, "bsp": 0, "ssp": whole("staleness", staleness, 0, MAX_CLOCKS), "asp": ASYNCHRONOUS}
    players = {name: _player(name, bound, cycles, found) for name, bound in bounds.items()}
    per_gradient = global_batch / workers
    modes = [
        _mode(name, bounds[name], players[name], factors, per_gradient, asked, down_s, checkpoint_s) for name in MODES
    ]
    exchange_s = _exchange_s(found)
    return Consistency(
        model=found.provenance.model,
        cluster=found.provenance.cluster,
        workers=workers,
        devices_per_worker=gpus // workers,
        step_s=found.step_time_s,
        compute_s=found.step_time_s - exchange_s,
        exchange_s=exchange_s,
        jitter=factors.jitter,
        slow=factors.slow,
        slow_workers=0 if factors.slow == 1 else factors.slow_workers,
        clocks=clocks,
        seed=factors.seed,
        servers=load,
        modes=tuple(modes),
        notes=found.notes if found.feasible else (DOES_NOT_FIT, *found.notes),
    )


def _check_plan(given: Mapping[str, Any], job: Mapping[str, Any]) -> None:
    """Refuse plans in which a worker has no copy of its own of the trained parameters.

    Raises:
        PlanError: names the key to drop.
    """
    for key, alone in (("zero", 0), ("shard", 0), ("ep", 1)):
        if given.get(key, alone) not in (alone, None):
            raise PlanError(
                f"{key} {given[key]}: each worker keeps a whole copy of its own here",
                hint=f"drop {key}, or give --{key} {alone}",
            )
    if job.get("lora"):
        raise PlanError("lora: parameter servers of adapters are not modelled", hint="drop the adapters")
    if job.get("mode", "corrected") != "corrected":
        raise PlanError(f"mode {job['mode']}: only the corrected mode is modelled", hint="drop mode")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draws:
    """Parameters of the random factors of the computing time."""

    workers: int
    clocks: int
    jitter: float
    slow: float
    slow_workers: int
    seed: int

    def factors(self, more: int = 0) -> Array:
        """Factors of all clocks and of `more` further ones, which do not change the first."""
        if self.workers * (self.clocks + more) > MAX_CELLS:
            raise UserError(
                f"{self.workers} workers x {self.clocks + more} clocks are more than {MAX_CELLS:,} to play",
                hint="give fewer --clocks, or a shorter --down",
            )
        draw = draw_factors
        kinds = {"jitter": self.jitter, "slow": self.slow, "slow_workers": self.slow_workers}
        first = draw(self.workers, self.clocks, seed=self.seed, **kinds)  # type: ignore[arg-type]
        if not more:
            return first
        return np.hstack([first, draw(self.workers, more, seed=self.seed + 1, **kinds)])  # type: ignore[arg-type]


def _shards(found: Estimate) -> int:
    """Devices of a worker that hold different parameters."""
    return int(found.plan["tp"]) * int(found.plan["tp2"]) * int(found.plan["pp"])


def _check_experts(found: Estimate) -> None:
    """Refuse experts whose tensor ranks differ from those of the other layers.

    Raises:
        PlanError: names the degree to give.
    """
    inside, cut = int(found.plan["tp"]) * int(found.plan["cp"]), int(found.plan["etp"])
    if inside != cut and any(path.startswith("expert_") for path in found.memory):
        raise PlanError(
            f"etp {cut}: a worker of tp x cp = {inside} devices would hold its experts several times",
            hint=f"give --etp {inside}",
        )


def _exchange_s(found: Estimate) -> float:
    """Exposed seconds of the gradients' all-reduce."""
    return sum(value for path, value in found.time.items() if path.startswith("dp_comm/"))


def _servers(
    found: Estimate, machine: Machine, model: NameOrPath, count: int | None, sharding: str, server_Bps: float | None
) -> Servers:
    workers = int(found.plan["dp"])
    number_of = workers if count is None else whole("servers", count, 1, MAX_SERVERS)
    devices = _shards(found)
    gradients, weights = (
        devices * sum(v for path, v in found.memory.items() if path.split("/")[0] in (part, f"expert_{part}"))
        for part in ("gradients", "weights")
    )
    share = 1 / number_of if sharding == "even" else _largest_share(model, number_of)
    worker_Bps = devices * int(found.plan["cp"]) * machine.slow_Bps
    link_Bps = (
        machine.slow_Bps if server_Bps is None else number("server_Bps", server_Bps, 1e3, 1e15, "bytes per second")
    )
    alike = float(largest_shard_servers(share * gradients, gradients))
    links = (worker_Bps, link_Bps, machine.slow_latency_s)
    return Servers(
        count=number_of,
        sharding=sharding,
        push_bytes=gradients,
        pull_bytes=weights,
        largest_share=share,
        worker_Bps=worker_Bps,
        server_Bps=link_Bps,
        received_bytes=workers * share * gradients,
        push_s=float(push_s(gradients, workers, alike, *links)),
        pull_s=float(pull_s(weights, workers, alike, *links)),
        worker_link_s=float(push_s(gradients, 1, 1, worker_Bps, math.inf, machine.slow_latency_s)),
        enough=math.ceil(workers * worker_Bps / link_Bps - 1e-9),
    )


def _largest_share(model: NameOrPath, servers: int) -> float:
    """Share of the parameters on the fullest server if whole tensors, largest first, go to the emptiest server."""
    name = name_or_path("model", model)
    if ":" in name:
        raise FieldError("", "sharding", "tensors are known of models by their dimensions only", hint="give even")
    spec = load_model(name)
    parts = parameter_terms(spec)
    tensors = [
        float(size) / repeats
        for path, size in parts.items()
        for repeats in [spec.layers if path.startswith("layers/") else 1]
        for _ in range(repeats)
    ]
    filled = np.zeros(servers)
    for size in sorted(tensors, reverse=True):
        filled[filled.argmin()] += size
    return float(filled.max() / filled.sum())


def _cycles(found: Estimate, load: Servers, machine: Machine) -> Mapping[str, Cycle]:
    """Times of a clock with parameter servers: ``bsp``, and ``each`` where gradients are applied separately."""
    parts = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
    for path, seconds in found.time.items():
        words = path.split("/")
        name = "optimizer" if words[0] == "optimizer" else next((w for w in words[1:] if w in parts), "")
        if name and words[0] != "dp_comm":
            parts[name] += seconds
    micro_batches = int(found.plan["micro_batches"])
    forward_s, backward_s = parts["forward"] / micro_batches, parts["backward"] / micro_batches
    compute_s = found.step_time_s - _exchange_s(found) - parts["optimizer"]
    alike = 1 / load.largest_share
    update_s = parts["optimizer"] * _shards(found) / alike
    add_s = float(reduction_s(load.push_bytes / alike, machine.memory_Bps))
    receive_s = float(push_s(load.push_bytes, 1, alike, math.inf, load.server_Bps, 0.0))
    layers = max(int(n) for n in found.plan["stage_layers"].values())

    def cycle(apply_s: float, round_s: float) -> Cycle:
        return Cycle(
            forward_s=forward_s,
            between_s=max(compute_s - forward_s - backward_s, 0.0),
            backward_s=backward_s,
            pull_s=float(pull_s(load.pull_bytes, 1, 1, load.worker_Bps, math.inf, 0.0)),
            push_s=float(push_s(load.push_bytes, 1, 1, load.worker_Bps, math.inf, 0.0)),
            serve_pull_s=float(pull_s(load.pull_bytes, 1, alike, math.inf, load.server_Bps, 0.0)),
            serve_push_s=max(receive_s, apply_s),
            latency_s=machine.slow_latency_s,
            round_s=round_s,
            pieces=layers if "dp" in found.plan["overlap"] else 1,
        )

    return {"bsp": cycle(add_s, update_s), "each": cycle(update_s, 0.0)}


_Player = Callable[[Array, "Outage | None"], Timeline]


def _player(name: str, bound: int, cycles: Mapping[str, Cycle], found: Estimate) -> _Player:
    exchange_s = _exchange_s(found)
    if name == ALL_REDUCE:
        return lambda factors, outage: all_reduced(found.step_time_s - exchange_s, exchange_s, factors, outage)
    cycle = cycles["bsp" if name == "bsp" else "each"]
    return lambda factors, outage: simulate(cycle, factors, bound, outage)


def _mode(
    name: str,
    bound: int,
    play: _Player,
    draws: _Draws,
    per_gradient: float,
    failures: Sequence[Failure],
    down_s: float,
    checkpoint_s: float | None,
) -> ModeRun:
    run = play(draws.factors(), None)
    rate, together = run.rate_per_s(), name in (ALL_REDUCE, "bsp")
    behind = run.clocks_behind
    computing, exchanging, waiting = run.shares()
    few = max(min(draws.clocks, DESCENT_CELLS // draws.workers), 1)
    short = run if few == draws.clocks else play(draws.factors()[:, :few], None)
    return ModeRun(
        mode=name,
        bound=None if bound == ASYNCHRONOUS else bound,
        samples_per_s=rate * per_gradient,
        updates_per_s=rate / draws.workers if together else rate,
        clock_s=draws.workers / rate,
        compute_share=computing,
        exchange_share=exchanging,
        wait_share=waiting,
        behind=tuple((np.bincount(behind.ravel()) / behind.size).tolist()),
        mean_behind=float(behind.mean()),
        most_behind=int(behind.max()),
        mean_delay=0.0 if together else float(run.delays.mean()),
        descent=descend(short, draws.seed),
        failures=tuple(
            _failed(play, run, draws, one, down_s, checkpoint_s)
            for one in failures
            if not (one.what == "server" and name == ALL_REDUCE)
        ),
    )


def _failed(
    play: _Player, usual: Timeline, draws: _Draws, failure: Failure, down_s: float, checkpoint_s: float | None
) -> FailureEffect:
    """Effect of a failure, from the run with it and the run without."""
    end_s = float(usual.gate_s[usual.window()[1]])
    if failure.at_s >= end_s:
        played = counted(draws.clocks, "clock")
        raise FieldError(
            "",
            "fail",
            f"{failure.at_s:g} s lies behind the {played} that are played",
            hint=f"give a time before {end_s:.3g} s, or more --clocks",
        )
    server = failure.what == "server"
    kept_s = 0.0 if checkpoint_s is None else failure.at_s // checkpoint_s * checkpoint_s
    lost = int(((usual.done_s > kept_s) & (usual.done_s <= failure.at_s)).sum()) if server else 0
    fastest_s = float((usual.done_s - usual.free_s).min())
    more = math.ceil((down_s + (failure.at_s - kept_s if server else 0.0)) / fastest_s) + 2
    outage = Outage(at_s=failure.at_s, down_s=down_s, worker=None if server else 0)
    run = play(draws.factors(more), outage)
    back_s = failure.at_s + down_s
    arrived = run.done_s[run.done_s <= back_s]
    last_s = max(float(arrived.max(initial=0.0)), failure.at_s)
    usual_gap_s = float(np.diff(np.sort(usual.done_s[usual.done_s <= end_s])).max(initial=0.0))
    still_s = back_s - last_s
    count = int((usual.done_s <= end_s).sum())
    return FailureEffect(
        what=failure.what,
        at_s=failure.at_s,
        stands_still_s=still_s if still_s > usual_gap_s else 0.0,
        lost_gradients=lost,
        lost_s=run.time_of(count + lost) - end_s,
    )
