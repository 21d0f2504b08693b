r"""Sub-meshes, shardings, stages, schedule, micro-batch and recomputation of a captured module as one answer.

For each micro-batch and each sub-mesh of each kind of devices the shardings of the whole step are solved once, without
a limit of memory and with those that a part of the model leaves. :mod:`steptime.sharding.units` has what they cost in
each unit, :mod:`steptime.sharding.stages` the best stages for each schedule's micro-batches in flight. What wins there
is played action by action.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from math import inf
from typing import Any, Final, NamedTuple

import numpy as np

from steptime.api.request import NameOrPath, cluster_given, whole
from steptime.captured.cost import Timer
from steptime.captured.ops.placement import text_of
from steptime.errors import UnknownNameError, UserError, counted
from steptime.estimate.communication import message_time_s, pair_of
from steptime.hardware.records import Cluster
from steptime.num import Array, Num, divisors, maximum
from steptime.options import MAX_DEVICES
from steptime.schedule import SCHEDULES, Pipeline, Schedule
from steptime.sharding.build import Built, built
from steptime.sharding.flow import flow_of
from steptime.sharding.joint_plan import JointPlan, Machines, Part, PlannedStage, Seam, Solved, seam_of
from steptime.sharding.mesh import logical_meshes, mesh_on, parse_axes
from steptime.sharding.pipeline import (
    MOST_STAGES,
    in_flight_groups,
    least_operators_s,
    least_step_s,
    played_s,
    replica_counts,
    sub_meshes,
)
from steptime.sharding.planner import ShardingPlan, planned
from steptime.sharding.seams import passing
from steptime.sharding.shard import captured_step, room_bytes
from steptime.sharding.spans import Overlap, spans_of
from steptime.sharding.stages import SpanCosts, Split, Stage, split
from steptime.sharding.units import Units, of_micro_batch, unit_costs, units_of
from steptime.simulation.graph import Transport
from steptime.units import format_bytes

SCHEDULES_TRIED: Final = ("1f1b", "gpipe", "zb-h1", "interleaved")
MICRO_BATCHES: Final = 4
"""Micro-batches that are tried where none are given."""
ONE_STAGE: Final = "one stage"
"""Name of what all schedules are where the best stages are a single one."""
AXES: Final = 2
MAX_BATCH: Final = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What :func:`joint` weighs, how long it solves, and how the module is captured."""

    micro_batches: Sequence[int] | None = None
    """Samples that pass the pipeline at once, the sizes to try; None: some that divide the step."""
    schedules: Sequence[str] = SCHEDULES_TRIED
    """Synchronous pipeline schedules of one copy of the model, with the usual number of stages for each rank."""
    stages: int | None = None
    """Number of stages; None: any."""
    recompute: bool = True
    """Blocks may run again where memory does not suffice."""
    overlaps: bool = True
    plain_norms: bool = False
    """Batch norms take the statistics of each device's part, as in :func:`steptime.sharding.shard.shard`."""
    """Traffic of weights and their gradients runs while the devices compute."""
    memory_bytes: float | None = None
    """Memory of a device for tensors; None: as in :func:`steptime.sharding.shard.shard`."""
    gap: float = 0.01
    """Share above the bound at which a solver may stop."""
    seconds: float = 20.0
    """Time limit of each problem of shardings."""
    seq: int | None = None
    dtype: str | None = None
    inputs: Sequence[str] = ()
    optimizer: str | None = "adamw"
    loss: str | None = None
    autocast: str | None = None

    @property
    def capture(self) -> dict[str, Any]:
        """Those of the capture, as :func:`steptime.captured.profiling.profile` has them."""
        return {name: getattr(self, name) for name in ("seq", "dtype", "inputs", "optimizer", "loss", "autocast")}


def joint(
    model: str,
    cluster: NameOrPath | Cluster,
    *,
    gpus: int,
    global_batch: int,
    further: Sequence[tuple[NameOrPath | Cluster, int]] = (),
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> JointPlan:
    """Stages, sub-meshes, shardings, schedule, micro-batch and recomputation of a module's training step.

    Args:
        model: ``pkg.module:factory`` or ``file.py:factory``.
        cluster: catalogue name, file, or the record.
        gpus: devices of the cluster.
        global_batch: samples of a step.
        further: clusters with devices of other kinds in the same job, each with their number.
        progress: called with sub-meshes done and sub-meshes to solve.
        options: fields of :class:`Options`.

    Raises:
        UserError: the module cannot be captured, the batch cannot be divided, there are more stages than units, or
            nothing fits; then the message names the stage that lacks memory, and how much.
    """
    known = [each.name for each in fields(Options)]
    for name in options:
        if name not in known:
            raise UnknownNameError("option", name, known)
    chosen = Options(**options)
    whole("global_batch", global_batch, 1, MAX_BATCH)
    kinds = tuple(_machines(each, count, chosen.memory_bytes) for each, count in ((cluster, gpus), *further))
    sizes = _sizes(global_batch, chosen.micro_batches)
    rows = [_schedule(name) for name in chosen.schedules]
    return _Search(
        model=model, kinds=kinds, global_batch=global_batch, sizes=sizes, rows=rows, options=chosen, progress=progress
    ).best()


def _machines(cluster: NameOrPath | Cluster, devices: int, memory_bytes: float | None) -> Machines:
    whole("gpus", devices, 1, MAX_DEVICES)
    found = cluster_given(cluster)
    limit = room_bytes(found) if memory_bytes is None else memory_bytes
    return Machines(cluster=found, devices=devices, timer=Timer(device=found.device), limit_bytes=limit)


def _sizes(global_batch: int, given: Sequence[int] | None) -> tuple[int, ...]:
    """Micro-batches, the largest first."""
    if given is None:
        return tuple(sorted(divisors(global_batch), reverse=True)[:MICRO_BATCHES])
    for each in given:
        if each < 1 or global_batch % each:
            raise UserError(
                f"a micro-batch of {each} does not divide the global batch of {global_batch}",
                hint=f"give some of {', '.join(map(str, divisors(global_batch)))}",
            )
    return tuple(sorted(set(given), reverse=True))


def _schedule(name: str) -> Schedule:
    """A synchronous schedule of one copy of the model, whose micro-batches in flight are known."""
    fitting = [
        each.name
        for each in SCHEDULES.values()
        if each.synchronous
        and (each.copies, each.usual_slices) == (1, 1)
        and each.in_flight(Pipeline(ranks=2, chunks=each.usual_chunks, micro_batches=4), 0) is not None
    ]
    if name not in fitting:
        raise UnknownNameError("schedule", name, fitting)
    return SCHEDULES[name]


class _Field(NamedTuple):
    """What stages are chosen from."""

    options: Sequence[Solved]
    kind: Sequence[int]
    devices: Sequence[int]
    available: Sequence[int]


@dataclass(kw_only=True)
class _Search:
    model: str
    kinds: tuple[Machines, ...]
    global_batch: int
    rows: Sequence[Schedule]
    options: Options
    progress: Callable[[int, int], None] | None
    sizes: tuple[int, ...]
    done: int = 0
    solved: int = 0
    bound_s: float = inf

    @property
    def overlap(self) -> Overlap:
        """What overlaps with computation."""
        return "data" if self.options.overlaps else "none"

    @cached_property
    def meshes(self) -> list[tuple[int, str]]:
        """Kind and axes of every sub-mesh."""
        out = []
        for kind, machines in enumerate(self.kinds):
            domain = mesh_on(machines.cluster, {"data": machines.devices}).machine.fast_domain
            usual = sub_meshes(machines.devices, domain)
            for count in usual:
                shapes = logical_meshes(count, AXES) if count > 1 else [(1,)]
                out += [(kind, "x".join(map(str, sizes))) for sizes in shapes]
            out += [(kind, str(count)) for count in replica_counts(machines.devices, usual)]
        return out

    def best(self) -> JointPlan:
        """The best over all micro-batches and schedules."""
        found: list[JointPlan] = []
        tried: list[tuple[int, str, float | None]] = []
        failed: UserError | None = None
        for size in self.sizes:
            program = captured_step(self.model, self.kinds[0].cluster, batch=size, **self.options.capture)
            units = units_of(flow_of(program))
            self._check(units)
            options = self._options(units, size)
            for row in self.rows:
                plans = list(self._plans(units, options, size, row, program.name))
                found += plans
                least = min(plans, key=lambda each: each.step_s, default=None)
                name = ONE_STAGE if least is not None and len(least.stages) == 1 else row.name
                if (size, name) not in [each[:2] for each in tried]:
                    tried.append((size, name, None if least is None else least.step_s))
            if not found:
                failed = self._lacking(units, options, size)
        if not found:
            raise failed or UserError("no stages fit")
        best = min(found, key=lambda plan: plan.step_s)
        return replace(best, tried=tuple(tried), bound_s=self.bound_s, solved=self.solved)

    def _check(self, units: Units) -> None:
        if self.options.stages is not None and not 1 <= self.options.stages <= units.count:
            raise UserError(
                f"{counted(self.options.stages, 'stage')} of {counted(units.count, 'unit')}",
                hint="a stage has one unit at least; the units are the blocks of the module and what comes before and "
                "after them, or parts between which few activations pass",
            )

    # -- shardings ------------------------------------------------------------------------------------------------

    def _options(self, units: Units, size: int) -> list[Solved]:
        """Shardings on every sub-mesh, at one micro-batch."""
        micro_batches, out = self.global_batch // size, []
        work: list[list[Array]] = [[] for _ in self.kinds]
        for kind, text in self.meshes:
            if self.progress is not None:
                self.progress(self.done, len(self.meshes) * len(self.sizes))
            self.done += 1
            machines = self.kinds[kind]
            mesh = mesh_on(machines.cluster, parse_axes(text))
            problem = of_micro_batch(
                built(units.flow, mesh, machines.timer, inf, plain_norms=self.options.plain_norms), micro_batches
            )
            work[kind].append(least_operators_s(problem) * mesh.devices * micro_batches)
            for plan in self._solutions(problem, machines):
                costs = unit_costs(units, plan, micro_batches)
                spans = spans_of(
                    costs,
                    micro_batches=micro_batches,
                    limit_bytes=machines.limit_bytes,
                    recompute=self.options.recompute,
                )
                out.append(Solved(kind, plan, spans))
        least = np.array([np.min(each, axis=0) for each in work])
        self.bound_s = min(self.bound_s, least_step_s(least, [each.devices for each in self.kinds]))
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
        return planned(problem, overlaps=self.options.overlaps, gap=self.options.gap, seconds=self.options.seconds)

    # -- stages ---------------------------------------------------------------------------------------------------

    def _counts(self, units: Units, chunks: int = 1) -> list[int]:
        """Numbers of stages."""
        most = min(units.count, chunks * sum(each.devices for each in self.kinds), MOST_STAGES)
        return list(range(1, most + 1)) if self.options.stages is None else [self.options.stages]

    def _plans(
        self, units: Units, options: Sequence[Solved], size: int, row: Schedule, name: str
    ) -> Iterator[JointPlan]:
        micro_batches = self.global_batch // size
        for field, flights, counts in self._fields(units, options, micro_batches, row):
            options, costs = field.options, self._costs(field.options, flights)
            found = self._split(field, costs, counts)
            if found is not None:
                parts = self._parts(options, found.stages)
                seams = self._seams(units, parts, row.usual_chunks)
                lines = [
                    self._stage(units, each, flights[len(parts) - 1 - place], seams[place])
                    for place, each in enumerate(parts)
                ]
                step_s, bracket_s, closed_s = self._played(parts, lines, micro_batches, row)
                yield JointPlan(
                    model=name,
                    machines=self.kinds,
                    global_batch=self.global_batch,
                    micro_batch=size,
                    schedule=row.name,
                    stages_per_rank=row.usual_chunks,
                    stages=tuple(lines),
                    step_s=step_s,
                    bracket_s=bracket_s,
                    closed_form_s=closed_s,
                    bound_s=0.0,
                    stages_bound_s=found.bound_s,
                    stages_s=found.total_s,
                    stop=f"no stages of these shardings are faster by more than {1 - found.bound_s / found.total_s:.2g}"
                    f" by the sum of stages and the slowest; {counted(found.limits, 'limit')} of it tried",
                    solved=0,
                    tried=(),
                )

    def _fields(
        self, units: Units, options: Sequence[Solved], micro_batches: int, row: Schedule
    ) -> Iterator[tuple[_Field, tuple[float, ...], list[int]]]:
        """What stages are chosen from, micro-batches in flight by place from the end, numbers of stages.

        With several stages for each rank all ranks have sub-meshes of one sort, with as many ranks as there are devices
        for, and each stage an equal share of the memory of its rank.
        """
        chunks = row.usual_chunks
        if chunks == 1:
            for flights, counts in in_flight_groups(row, micro_batches, self._counts(units)).items():
                yield self._field(options), flights, counts
            return
        for option in options:
            machines = self.kinds[option.kind]
            ranks = min(machines.devices // option.plan.built.mesh.devices, units.count // chunks)
            count, pipeline = ranks * chunks, Pipeline(ranks=max(ranks, 1), chunks=chunks, micro_batches=micro_batches)
            if ranks > 1 and count in self._counts(units, chunks) and all(rule.holds(pipeline) for rule in row.rules):
                flight = max(float(row.in_flight(pipeline, rank) or 0.0) for rank in range(ranks))
                share = replace(option.spans, limit_bytes=option.spans.limit_bytes / chunks)
                yield _Field([option._replace(spans=share)], [0], [1], [count]), (flight,) * count, [count]

    def _field(self, options: Sequence[Solved]) -> _Field:
        devices = [each.plan.built.mesh.devices for each in options]
        return _Field(options, [each.kind for each in options], devices, [each.devices for each in self.kinds])

    def _costs(self, options: Sequence[Solved], flights: Sequence[float]) -> list[SpanCosts]:
        known: dict[float, SpanCosts] = {}
        for each in flights:
            if each not in known:
                priced = [option.spans.priced(each, self.overlap) for option in options]
                known[each] = SpanCosts(np.array([p.each_s for p in priced]), np.array([p.busy_s for p in priced]))
        return [known[each] for each in flights]

    def _parts(self, options: Sequence[Solved], stages: Sequence[Stage]) -> list[Part]:
        """Each stage with its devices, in the order of the stages."""
        taken, out = [0] * len(self.kinds), []
        for stage in stages:
            option = options[stage.choice]
            out.append(Part(option, stage.first, stage.end, taken[option.kind]))
            taken[option.kind] += option.plan.built.mesh.devices
        return out

    def _stage(self, units: Units, part: Part, in_flight: float, entering: Seam) -> PlannedStage:
        option, at = part.option, (part.first, part.end)
        spans, again = option.spans, option.spans.recomputed(in_flight)
        names = [name for name, where in units.of_parameter.items() if any(at[0] <= unit < at[1] for unit in where)]
        known = option.plan.parameters
        return PlannedStage(
            units=units.names[part.first : part.end],
            blocks=int(units.blocks[part.first : part.end].sum()),
            machines=self.kinds[option.kind],
            plan=option.plan,
            recomputed=int(again[at]),
            in_flight=in_flight,
            memory_bytes=float(spans.memory_bytes(in_flight, np.where(np.isfinite(again), again, 0))[at]),
            passes_s=spans.passes_s(*at, float(again[at]), self.overlap),
            once_s=float(spans.once_s(self.overlap)[at]),
            entering=entering,
            parameters={name: text_of(known[name]) for name in names if name in known},
        )

    # -- time -----------------------------------------------------------------------------------------------------

    def _played(
        self, parts: Sequence[Part], lines: Sequence[PlannedStage], micro_batches: int, row: Schedule
    ) -> tuple[float, tuple[float, float], float]:
        """Step time by events, with all and with no traffic overlapped, and in closed form."""
        messages = np.array([line.entering.seconds for line in lines[1:]])

        def step(overlap: Overlap, sent_s: Array, transport: Transport) -> tuple[float, float]:
            passes = np.array(
                [
                    each.option.spans.passes_s(each.first, each.end, float(line.recomputed), overlap)
                    for each, line in zip(parts, lines, strict=True)
                ]
            )
            once = np.array([each.option.spans.once_s(overlap)[each.first, each.end] for each in parts])
            return played_s(row, passes, once, sent_s, micro_batches, transport)

        middle, closed = step(self.overlap, messages, Transport())
        low, _ = step("all", np.zeros_like(messages), Transport())
        high, _ = step("none", messages, Transport(overlap=False))
        return middle, (min(low, middle), max(high, middle)), closed

    def _seams(self, units: Units, parts: Sequence[Part], chunks: int) -> list[Seam]:
        """What enters each stage; nothing the first."""
        out = [Seam(0.0)]
        for before, behind in pairwise(parts):
            message_s = self._message_s(before, behind, len(parts) // chunks if chunks > 1 else None)
            crossing = units.crossing[behind.first]
            found = tuple(
                passing(
                    units,
                    storage,
                    (before.plan, behind.plan),
                    made=units.kept.get(storage) in before.units,
                    read=behind.units,
                    message_s=message_s,
                )
                for storage in crossing
            )
            out.append(seam_of(found, message_s))
        return out

    def _message_s(self, before: Part, behind: Part, ranks: int | None) -> Callable[[Num], Num]:
        """Time of a message of some bytes from the devices of one stage to those of another.

        Of several stages for each of a number of ranks it leaves the fast domain if all ranks together are larger.
        """
        pair = before, behind
        machines = [each.plan.built.mesh.machine for each in pair]
        domains = [each.start // machine.fast_domain for each, machine in zip(pair, machines, strict=True)]
        far, ends = before.option.kind != behind.option.kind or domains[0] != domains[1], (before.start, behind.start)
        if ranks is not None:
            devices = ranks * min(each.plan.built.mesh.devices for each in pair)
            far, ends = devices > machines[0].fast_domain, (0, devices - 1)

        def message_s(size_bytes: Num) -> Num:
            slower = [message_time_s(each, size_bytes, pair_of(each, *ends))[far] for each in machines]
            return maximum(slower[0], slower[1])

        return message_s

    # -- nothing fits ---------------------------------------------------------------------------------------------

    def _lacking(self, units: Units, options: Sequence[Solved], size: int) -> UserError:
        """Of the stages that need least memory on their fullest device, that one and what it lacks."""
        least, text = inf, "no stages are possible on these devices"
        groups = in_flight_groups(self.rows[0], self.global_batch // size, self._counts(units))
        for flights, counts in groups.items():
            costs = [self._share(options, each) for each in flights]
            found = self._split(self._field(options), costs, counts)
            for place, stage in enumerate(found.stages if found is not None else ()):
                count = len(found.stages) if found is not None else 0
                share = float(costs[count - 1 - place].busy_s[stage.choice, stage.first, stage.end])
                if found is not None and share == found.total_s < least:
                    limit = self.kinds[options[stage.choice].kind].limit_bytes
                    devices = counted(options[stage.choice].plan.built.mesh.devices, "device")
                    names = f"{units.names[stage.first]} to {units.names[stage.end - 1]}"
                    need = f"{format_bytes(share * limit)} of {format_bytes(limit)}"
                    least, text = share, f"stage {place + 1} of {count} ({names}) on {devices} needs {need}"
        return UserError(
            f"nothing fits with a micro-batch of {size}: {text}",
            hint="give more devices, a smaller micro-batch, recomputation, or more memory",
        )

    @staticmethod
    def _split(field: _Field, costs: Sequence[SpanCosts], counts: Sequence[int]) -> Split | None:
        return split(costs, kind=field.kind, devices=field.devices, available=field.available, counts=counts)

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
