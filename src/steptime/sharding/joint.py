r"""Sub-meshes, shardings, stages, schedule, micro-batch and recomputation of a captured module as one answer.

For each micro-batch and each sub-mesh of each kind of devices the shardings of the whole step are solved once, without
a limit of memory and with those that a part of the model leaves. :mod:`steptime.sharding.units` has what they cost in
each unit, :mod:`steptime.sharding.stages` the best stages for each schedule's micro-batches in flight. What wins there
is played action by action.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Any, Final, NamedTuple

import numpy as np

from steptime.api.request import NameOrPath, whole
from steptime.captured.cost import Timer
from steptime.errors import UnknownNameError, UserError, counted
from steptime.estimate.communication import message_time_s
from steptime.estimate.result import SCHEMA_VERSION
from steptime.hardware import load_cluster
from steptime.hardware.records import Cluster
from steptime.num import Array, divisors
from steptime.plan.keys import MAX_DEVICES
from steptime.schedule import SCHEDULES, Kind, Pipeline, Schedule, Times
from steptime.schedule.graph import Transport
from steptime.schedule.simulate import Durations
from steptime.schedule.simulate import simulate as play
from steptime.sharding.build import Built, built
from steptime.sharding.flow import flow_of
from steptime.sharding.mesh import logical_meshes, mesh_on, parse_axes
from steptime.sharding.placement import text_of
from steptime.sharding.planner import ShardingPlan, planned
from steptime.sharding.shard import captured_step, room_of
from steptime.sharding.spans import Overlap, Spans, spans_of
from steptime.sharding.stages import SpanCosts, Stage, split
from steptime.sharding.units import Units, of_micro_batch, unit_costs, units_of
from steptime.units import format_bytes

SCHEDULES_TRIED: Final = ("1f1b", "gpipe", "zb-h1")
MOST_STAGES: Final = 64
MICRO_BATCHES: Final = 4
"""Micro-batches that are tried where none are given."""
AXES: Final = 2
SECONDS: Final = 20.0
GAP: Final = 0.01
DEFAULTS: Final = {"seq": None, "dtype": None, "inputs": (), "optimizer": "adamw", "loss": None, "autocast": None}
"""Of the capture, as those of ``steptime shard``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """Devices of one kind."""

    cluster: Cluster
    devices: int
    timer: Timer
    limit_bytes: float


class Solved(NamedTuple):
    """Shardings of a whole step on a sub-mesh: what a stage can be."""

    kind: int
    plan: ShardingPlan
    spans: Spans


@dataclass(frozen=True, kw_only=True)
class PlannedStage:
    """One stage."""

    units: tuple[str, ...]
    blocks: int
    machines: Machines
    plan: ShardingPlan
    """Shardings of the whole step, of which the stage has its units."""
    recomputed: int
    """Blocks that run again in the backward pass."""
    in_flight: float
    memory_bytes: float
    passes_s: tuple[float, float, float]
    """Of a micro-batch: forward pass, gradients of inputs, gradients of weights."""
    once_s: float
    """Once in a step: exposed reduction of gradients, and optimiser."""
    parameters: dict[str, str]

    @property
    def devices(self) -> int:
        """Devices of its sub-mesh."""
        return self.plan.built.mesh.devices


@dataclass(frozen=True, kw_only=True)
class JointPlan:
    """Stages with their sub-meshes and shardings, schedule, micro-batch, recomputation; time, memory, bounds."""

    model: str
    machines: tuple[Machines, ...]
    global_batch: int
    micro_batch: int
    """Samples that pass the pipeline at once."""
    schedule: str
    stages: tuple[PlannedStage, ...]
    step_s: float
    bracket_s: tuple[float, float]
    closed_form_s: float
    """Of the schedule, with the slowest stage for all."""
    bound_s: float
    """No stages, sub-meshes or shardings take less: all computation at its fastest, divided evenly over all devices."""
    stages_bound_s: float
    """No stages of the solved shardings take less by the sum of stages and the slowest."""
    stages_s: float
    """That sum of the stages that were found."""
    stop: str
    solved: int
    """Problems of shardings that were solved."""
    tried: tuple[tuple[int, str, float | None], ...]
    """Micro-batch, schedule, and the step time of its best stages; None: nothing fits."""

    @property
    def micro_batches(self) -> int:
        """Of a step."""
        return self.global_batch // self.micro_batch

    @property
    def idle(self) -> int:
        """Devices that no stage has."""
        return sum(each.devices for each in self.machines) - sum(each.devices for each in self.stages)

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``."""
        return {
            "schema_version": SCHEMA_VERSION,
            "model": self.model,
            "machines": [{"cluster": each.cluster.name, "devices": each.devices} for each in self.machines],
            "global_batch": self.global_batch,
            "micro_batch": self.micro_batch,
            "micro_batches": self.micro_batches,
            "schedule": self.schedule,
            "step_time_s": self.step_s,
            "step_time_bracket_s": list(self.bracket_s),
            "closed_form_s": self.closed_form_s,
            "bound_s": self.bound_s,
            "stages_s": self.stages_s,
            "stages_bound_s": self.stages_bound_s,
            "stop": self.stop,
            "solved": self.solved,
            "idle_devices": self.idle,
            "stages": [_stage_json(each) for each in self.stages],
            "tried": [{"micro_batch": b, "schedule": name, "step_time_s": step_s} for b, name, step_s in self.tried],
        }


def _stage_json(stage: PlannedStage) -> dict[str, Any]:
    mesh, names = stage.plan.built.mesh, ("forward", "input_gradients", "weight_gradients")
    return {
        "units": list(stage.units),
        "blocks": stage.blocks,
        "cluster": stage.machines.cluster.name,
        "devices": stage.devices,
        "mesh": dict(zip(mesh.names, mesh.sizes, strict=True)),
        "recomputed_blocks": stage.recomputed,
        "micro_batches_in_flight": stage.in_flight,
        "memory_bytes": stage.memory_bytes,
        "memory_limit_bytes": stage.machines.limit_bytes,
        "micro_batch_s": dict(zip(names, stage.passes_s, strict=True)),
        "once_s": stage.once_s,
        "parameters": stage.parameters,
    }


def joint(
    model: str,
    cluster: NameOrPath | Cluster,
    *,
    gpus: int,
    global_batch: int,
    further: Sequence[tuple[NameOrPath | Cluster, int]] = (),
    micro_batches: Sequence[int] | None = None,
    schedules: Sequence[str] = SCHEDULES_TRIED,
    stages: int | None = None,
    recompute: bool = True,
    overlaps: bool = True,
    memory_bytes: float | None = None,
    gap: float = GAP,
    seconds: float = SECONDS,
    progress: Callable[[int, int], None] | None = None,
    **capture: Any,
) -> JointPlan:
    """Stages, sub-meshes, shardings, schedule, micro-batch and recomputation of a module's training step.

    Args:
        model: ``pkg.module:factory`` or ``file.py:factory``.
        cluster: catalogue name, file, or the record.
        gpus: devices of the cluster.
        global_batch: samples of a step.
        further: clusters with devices of other kinds in the same job, each with their number.
        micro_batches: samples that pass the pipeline at once, the sizes to try; None: some that divide the step.
        schedules: pipeline schedules with one stage for each rank.
        stages: number of stages; None: any.
        recompute: blocks may run again where memory does not suffice.
        overlaps: traffic of weights and their gradients runs while the devices compute.
        memory_bytes: memory of a device for tensors; None: as in :func:`steptime.sharding.shard.shard`.
        gap: share above the bound at which a solver may stop.
        seconds: time limit of each problem of shardings.
        progress: called with sub-meshes done and sub-meshes to solve.
        capture: ``seq``, ``dtype``, ``inputs``, ``optimizer``, ``loss``, ``autocast`` of the capture.

    Raises:
        UserError: the module cannot be captured, the batch cannot be divided, there are more stages than units, or
            nothing fits; then the message names the stage that lacks memory, and how much.
    """
    kinds = tuple(_machines(each, count, memory_bytes) for each, count in ((cluster, gpus), *further))
    whole("global_batch", global_batch, 1, 1 << 30)
    sizes = _sizes(global_batch, micro_batches)
    rows = [_schedule(name) for name in schedules]
    search = _Search(model=model, kinds=kinds, global_batch=global_batch, rows=rows, stages=stages,
                     recompute=recompute, overlap="data" if overlaps else "none", gap=gap, seconds=seconds,
                     capture=DEFAULTS | capture, progress=progress, sizes=sizes)  # fmt: skip
    return search.best()


def _machines(cluster: NameOrPath | Cluster, devices: int, memory_bytes: float | None) -> Machines:
    whole("gpus", devices, 1, MAX_DEVICES)
    found = cluster if isinstance(cluster, Cluster) else load_cluster(str(cluster))
    limit = room_of(found) if memory_bytes is None else memory_bytes
    return Machines(cluster=found, devices=devices, timer=Timer(device=found.device), limit_bytes=limit)


def _sizes(global_batch: int, given: Sequence[int] | None) -> tuple[int, ...]:
    """Micro-batches, the largest first."""
    if given is None:
        return tuple(sorted(divisors(global_batch), reverse=True)[:MICRO_BATCHES])
    for each in given:
        if each < 1 or global_batch % each:
            raise UserError(f"a micro-batch of {each} does not divide the global batch of {global_batch}",
                            hint=f"give some of {', '.join(map(str, divisors(global_batch)))}")  # fmt: skip
    return tuple(sorted(set(given), reverse=True))


def _schedule(name: str) -> Schedule:
    """A schedule with one stage for each rank, whose micro-batches in flight are known."""
    fitting = [n for n, row in SCHEDULES.items() if row.synchronous and row.copies == row.usual_chunks == 1
               and row.usual_slices == 1 and row.in_flight(Pipeline(ranks=2, micro_batches=4), 0) is not None]  # fmt: skip
    if name not in fitting:
        raise UnknownNameError("schedule with one stage for each rank", name, fitting)
    return SCHEDULES[name]


def sub_meshes(devices: int, fast_domain: int) -> list[int]:
    """Devices of the sub-meshes of a cluster: powers of two in a fast domain, then whole domains, and all devices.

    >>> sub_meshes(32, 8), sub_meshes(12, 8)
    ([1, 2, 4, 8, 16, 32], [1, 2, 4, 8, 12])
    """
    out = {1 << n for n in range(devices.bit_length()) if 1 << n <= min(devices, fast_domain)}
    out |= {fast_domain << n for n in range(devices.bit_length()) if fast_domain << n <= devices}
    return sorted(n for n in out | {devices} if n >= devices / MOST_STAGES)


@dataclass(kw_only=True)
class _Search:
    model: str
    kinds: tuple[Machines, ...]
    global_batch: int
    rows: Sequence[Schedule]
    stages: int | None
    recompute: bool
    overlap: Overlap
    gap: float
    seconds: float
    capture: dict[str, Any]
    progress: Callable[[int, int], None] | None
    sizes: tuple[int, ...]
    done: int = 0
    solved: int = 0
    bound_s: float = inf

    @cached_property
    def meshes(self) -> list[tuple[int, str]]:
        """Kind and axes of every sub-mesh."""
        out = []
        for kind, machines in enumerate(self.kinds):
            domain = mesh_on(machines.cluster, {"data": machines.devices}).machine.fast_domain
            for count in sub_meshes(machines.devices, domain):
                shapes = logical_meshes(count, AXES) if count > 1 else [(1,)]
                out += [(kind, "x".join(map(str, sizes))) for sizes in shapes]
        return out

    def best(self) -> JointPlan:
        """The best over all micro-batches and schedules."""
        found: list[JointPlan] = []
        tried: list[tuple[int, str, float | None]] = []
        failed: UserError | None = None
        for size in self.sizes:
            program = captured_step(self.model, self.kinds[0].cluster, batch=size, **self.capture)
            units = units_of(flow_of(program))
            self._check(units)
            options = self._options(units, size)
            for row in self.rows:
                plans = list(self._plans(units, options, size, row, program.name))
                found += plans
                tried.append((size, row.name, min((each.step_s for each in plans), default=None)))
            if not found:
                failed = self._lacking(units, options, size)
        if not found:
            raise failed or UserError("no stages fit")
        best = min(found, key=lambda plan: plan.step_s)
        return replace(best, tried=tuple(tried), bound_s=self.bound_s, solved=self.solved)

    def _check(self, units: Units) -> None:
        if self.stages is not None and not 1 <= self.stages <= units.count:
            raise UserError(f"{counted(self.stages, 'stage')} of {counted(units.count, 'unit')}",
                            hint="a stage has one unit at least; the units are the blocks of the module, and what "
                                 "comes before and after them")  # fmt: skip

    # -- shardings ------------------------------------------------------------------------------------------------

    def _options(self, units: Units, size: int) -> list[Solved]:
        """Shardings on every sub-mesh, at one micro-batch."""
        micro_batches, out = self.global_batch // size, []
        least: list[list[Array]] = [[] for _ in self.kinds]
        for kind, text in self.meshes:
            if self.progress is not None:
                self.progress(self.done, len(self.meshes) * len(self.sizes))
            self.done += 1
            machines = self.kinds[kind]
            mesh = mesh_on(machines.cluster, parse_axes(text))
            problem = of_micro_batch(built(units.flow, mesh, machines.timer, inf), micro_batches)
            least[kind].append(_least_s(problem) * mesh.devices * micro_batches)
            for plan in self._solutions(problem, machines):
                costs = unit_costs(units, plan, micro_batches)
                spans = spans_of(costs, micro_batches=micro_batches, limit_bytes=machines.limit_bytes,
                                 recompute=self.recompute)  # fmt: skip
                out.append(Solved(kind, plan, spans))
        work = np.array([np.min(each, axis=0) for each in least])
        self.bound_s = min(self.bound_s, least_step_s(work, [each.devices for each in self.kinds]))
        return out

    def _solutions(self, problem: Built, machines: Machines) -> Iterator[ShardingPlan]:
        """Without a limit of memory, and with what stages of a part of the model leave for the whole of it."""
        first = self._planned(problem)
        yield first
        most = max(machines.devices // problem.mesh.devices, 1)
        needed, least = float(first.memory_bytes.max()), machines.limit_bytes
        for share in sorted({most, max(most // 2, 1)}, reverse=True):
            if share * least < needed:
                try:
                    yield self._planned(replace(problem, limit_bytes=share * least))
                except UserError:
                    return

    def _planned(self, problem: Built) -> ShardingPlan:
        self.solved += 1
        return planned(problem, overlaps=self.overlap == "data", gap=self.gap, seconds=self.seconds)

    # -- stages ---------------------------------------------------------------------------------------------------

    def _counts(self, units: Units) -> list[int]:
        most = min(units.count, sum(each.devices for each in self.kinds), MOST_STAGES)
        return list(range(1, most + 1)) if self.stages is None else [self.stages]

    def _plans(
        self, units: Units, options: Sequence[Solved], size: int, row: Schedule, name: str
    ) -> Iterator[JointPlan]:
        micro_batches = self.global_batch // size
        for flights, counts in in_flight_groups(row, micro_batches, self._counts(units)).items():
            costs = self._costs(options, flights)
            found = split(costs, kind=[each.kind for each in options],
                          devices=[each.plan.built.mesh.devices for each in options],
                          available=[each.devices for each in self.kinds], counts=counts)  # fmt: skip
            if found is not None:
                lines = [self._stage(units, options[s.choice], s, flights[len(found.stages) - 1 - place])
                         for place, s in enumerate(found.stages)]  # fmt: skip
                step_s, bracket_s, closed_s = self._played(options, found.stages, lines, micro_batches, row)
                yield JointPlan(
                    model=name, machines=self.kinds, global_batch=self.global_batch, micro_batch=size,
                    schedule=row.name, stages=tuple(lines), step_s=step_s, bracket_s=bracket_s, closed_form_s=closed_s,
                    bound_s=0.0, stages_bound_s=found.bound_s, stages_s=found.total_s,
                    stop=f"no stages of these shardings are faster by more than {1 - found.bound_s / found.total_s:.2g}"
                         f" by the sum of stages and the slowest; {counted(found.limits, 'limit')} of it tried",
                    solved=0, tried=(),
                )  # fmt: skip

    def _costs(self, options: Sequence[Solved], flights: Sequence[float]) -> list[SpanCosts]:
        known: dict[float, SpanCosts] = {}
        for each in flights:
            if each not in known:
                priced = [option.spans.priced(each, self.overlap) for option in options]
                known[each] = SpanCosts(np.array([p.each_s for p in priced]), np.array([p.busy_s for p in priced]))
        return [known[each] for each in flights]

    def _stage(self, units: Units, option: Solved, stage: Stage, in_flight: float) -> PlannedStage:
        spans, at = option.spans, (stage.first, stage.end)
        again = spans.recomputed(in_flight)
        names = [name for name, where in units.of_parameter.items() if any(at[0] <= unit < at[1] for unit in where)]
        known = option.plan.parameters
        return PlannedStage(
            units=units.names[stage.first : stage.end], blocks=int(units.blocks[stage.first : stage.end].sum()),
            machines=self.kinds[option.kind], plan=option.plan, recomputed=int(again[at]), in_flight=in_flight,
            memory_bytes=float(spans.memory_bytes(in_flight, np.where(np.isfinite(again), again, 0))[at]),
            passes_s=spans.passes_s(*at, float(again[at]), self.overlap),
            once_s=float(spans.once_s(self.overlap)[at]),
            parameters={name: text_of(known[name]) for name in names if name in known},
        )  # fmt: skip

    # -- time -----------------------------------------------------------------------------------------------------

    def _played(
        self, options: Sequence[Solved], stages: Sequence[Stage], lines: Sequence[PlannedStage], micro_batches: int,
        row: Schedule,
    ) -> tuple[float, tuple[float, float], float]:  # fmt: skip
        """Step time by events, with all and with no traffic overlapped, and in closed form."""
        messages = self._messages(options, stages)

        def step(overlap: Overlap, sent_s: Array, transport: Transport) -> tuple[float, float]:
            spans = [options[s.choice].spans for s in stages]
            passes = np.array([each.passes_s(s.first, s.end, float(line.recomputed), overlap)
                               for each, s, line in zip(spans, stages, lines, strict=True)])  # fmt: skip
            once = np.array([each.once_s(overlap)[s.first, s.end] for each, s in zip(spans, stages, strict=True)])
            return _step_s(row, passes, once, sent_s, micro_batches, transport)

        middle, closed = step(self.overlap, messages, Transport())
        low, _ = step("all", np.zeros_like(messages), Transport())
        high, _ = step("none", messages, Transport(overlap=False))
        return middle, (min(low, middle), max(high, middle)), closed

    def _messages(self, options: Sequence[Solved], stages: Sequence[Stage]) -> Array:
        """Seconds of a message between two ranks: each device of the smaller sub-mesh sends its part."""
        out = np.zeros((len(stages), len(stages)))
        taken, starts = [0] * len(self.kinds), []
        for stage in stages:
            starts.append(taken[options[stage.choice].kind])
            taken[options[stage.choice].kind] += options[stage.choice].plan.built.mesh.devices
        for n in range(1, len(stages)):
            pair = [options[stages[n - 1].choice], options[stages[n].choice]]
            parts = min(each.plan.built.mesh.devices for each in pair)
            machines = [each.plan.built.mesh.machine for each in pair]
            size = float(pair[1].spans.costs.units.boundary_bytes[stages[n].first]) / parts
            domains = [start // machine.fast_domain for start, machine in zip(starts[n - 1 : n + 1], machines,
                                                                             strict=True)]  # fmt: skip
            far = pair[0].kind != pair[1].kind or domains[0] != domains[1]
            out[n - 1, n] = out[n, n - 1] = max(float(message_time_s(each, size)[far]) for each in machines)
        return out

    # -- nothing fits ---------------------------------------------------------------------------------------------

    def _lacking(self, units: Units, options: Sequence[Solved], size: int) -> UserError:
        """Of the stages that need least memory on their fullest device, that one and what it lacks."""
        micro_batches, row = self.global_batch // size, self.rows[0]
        least: tuple[float, str] | None = None
        for flights, counts in in_flight_groups(row, micro_batches, self._counts(units)).items():
            costs = [self._share(options, each) for each in flights]
            found = split(costs, kind=[each.kind for each in options],
                          devices=[each.plan.built.mesh.devices for each in options],
                          available=[each.devices for each in self.kinds], counts=counts)  # fmt: skip
            for place, stage in enumerate(found.stages if found is not None else ()):
                share = float(costs[len(found.stages) - 1 - place].busy_s[stage.choice, stage.first, stage.end])  # type: ignore[union-attr]
                if share == (found.total_s if found is not None else 0) and (least is None or share < least[0]):
                    option = options[stage.choice]
                    limit = self.kinds[option.kind].limit_bytes
                    names = units.names[stage.first : stage.end]
                    least = (
                        share,
                        (
                            f"stage {place + 1} of {len(found.stages)} ({names[0]} to {names[-1]}) on "  # type: ignore[union-attr]
                            f"{counted(option.plan.built.mesh.devices, 'device')} needs {format_bytes(share * limit)} of "
                            f"{format_bytes(limit)}"
                        ),
                    )
        text = "no stages are possible on these devices" if least is None else least[1]
        return UserError(f"nothing fits with a micro-batch of {size}: {text}",
                         hint="give more devices, a smaller micro-batch, recomputation, or more memory")  # fmt: skip

    @staticmethod
    def _share(options: Sequence[Solved], in_flight: float) -> SpanCosts:
        """Memory of stages as a share of the limit, with as many blocks again as possible."""
        out = []
        for each in options:
            spans = each.spans
            again = spans.blocks if spans.recompute else np.zeros(spans.blocks.shape)
            used = np.minimum(spans.memory_bytes(in_flight, again), spans.memory_bytes(in_flight, 0 * again))
            out.append(np.where(spans.kept_bytes + spans.held_bytes > 0, used / spans.limit_bytes, inf))
        runs = np.array(out)
        runs[:, np.arange(runs.shape[2])[None, :] <= np.arange(runs.shape[1])[:, None]] = inf
        return SpanCosts(np.where(np.isfinite(runs), 0.0, inf), runs)


def in_flight_groups(row: Schedule, micro_batches: int, counts: Sequence[int]) -> dict[tuple[float, ...], list[int]]:
    """Micro-batches in flight by place from the end -> numbers of stages that they are of; one that others begin with
    is in the longest.

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


def _step_s(
    row: Schedule, passes: Array, once_s: Array, message_s: Array, micro_batches: int, transport: Transport
) -> tuple[float, float]:
    """Step time by events, each rank with what it has once at its end; and in closed form with equal stages."""
    slowest = passes[int(passes.sum(axis=1).argmax())]
    count = len(passes)
    mean_s = float(message_s.sum()) / max(2 * (count - 1), 1)
    pipeline = Pipeline(
        ranks=count, micro_batches=micro_batches,
        times=Times(forward_s=max(float(slowest[0]), 1e-12), input_gradient_s=float(slowest[1]),
                    weight_gradient_s=float(slowest[2]), message_s=mean_s),
    )  # fmt: skip
    durations = Durations(forward_s=passes[:, 0], input_gradient_s=passes[:, 1], weight_gradient_s=passes[:, 2],
                          message_s=message_s)  # fmt: skip
    played = play(row.actions(count, 1, micro_batches, times=pipeline.times), durations, transport)
    ends = np.zeros(count)
    passing = played.table.kind <= Kind.WEIGHT_GRADIENT
    np.maximum.at(ends, played.table.rank[passing], played.end_s[passing])
    bubble_s = row.bubble_s(pipeline) or 0.0
    closed = bubble_s + micro_batches * float(slowest.sum()) + float(once_s.max()) + float(message_s.sum())
    return float((ends + once_s).max()), closed


def _least_s(problem: Built) -> Array:
    """Least seconds of each item's computation."""
    return np.array([float(np.min(each)) if len(each) else 0.0 for each in problem.seconds.operators])


def least_step_s(work_s: Array, devices: Sequence[int]) -> float:
    r"""Least time in which devices of some kinds do all work, divided in any way.

    $$T \ge \max_{\lambda \ge 0} \frac{\sum_v \min_k \lambda_k w_{kv}}{\sum_k \lambda_k D_k}$$

    where $w_{kv}$ are the device-seconds of item $v$ on kind $k$ = `work_s`, $D_k$ = `devices`. Of two kinds the
    largest is at a ratio of multipliers at which an item may go to either.

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
