r"""Sub-meshes, shardings, stages, schedule, micro-batch and recomputation of a captured module as one answer.

For each micro-batch and each sub-mesh of each kind of device, the shardings of the whole step are solved without a
memory limit and with those of stages that have a part of the model. :mod:`steptime.sharding.units` divides their costs
over units; :mod:`steptime.sharding.stages` finds the best stages for each schedule's micro-batches in flight. The best
stages are then simulated action by action.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from itertools import pairwise, product
from math import inf
from string import ascii_lowercase
from typing import Any, Final, NamedTuple

import numpy as np

from steptime.api.request import NameOrPath, cluster_given, whole
from steptime.captured.graph import Program
from steptime.captured.ops.placement import text_of
from steptime.errors import UnknownNameError, UserError, counted
from steptime.estimate.communication import message_time_s, pair_of
from steptime.hardware.records import Cluster
from steptime.num import Array, Num, divisors, maximum
from steptime.options import MAX_DEVICES
from steptime.schedule import SCHEDULES, Pipeline, Schedule
from steptime.sharding.build import Built
from steptime.sharding.costing import Costing, costing_of
from steptime.sharding.flow import flow_of
from steptime.sharding.joint_plan import JointPlan, Machines, Part, PlannedStage, Solved, Way, seam_s, way_of
from steptime.sharding.mesh import logical_meshes, mesh_on, parse_axes
from steptime.sharding.pipeline import (
    MOST_STAGES,
    in_flight_groups,
    least_operators_s,
    least_step_s,
    places,
    played_s,
    replica_counts,
    sub_meshes,
)
from steptime.sharding.planner import ShardingPlan, planned
from steptime.sharding.seams import Passing, passing
from steptime.sharding.shard import captured_step
from steptime.sharding.spans import Overlap, spans_of
from steptime.sharding.stages import SpanCosts, Split, Stage, split
from steptime.sharding.units import Branches, Units, of_micro_batch, unit_costs, units_of
from steptime.simulation.graph import Transport
from steptime.units import format_bytes

SCHEDULES_TRIED: Final = ("1f1b", "gpipe", "zb-h1", "interleaved")
MICRO_BATCHES: Final = 4
"""Number of micro-batch sizes that are tried by default."""
ONE_STAGE: Final = "one stage"
"""Name in the report for all schedules whose best pipeline is a single stage."""
AXES: Final = 2
MAX_BATCH: Final = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of :func:`joint`: choices to search, limits of the solver, and the capture of the module."""

    micro_batches: Sequence[int] | None = None
    """Micro-batch sizes to try, in samples; None: the largest :data:`MICRO_BATCHES` divisors of the global batch."""
    schedules: Sequence[str] = SCHEDULES_TRIED
    """Synchronous pipeline schedules with one copy of the model and the usual number of stages per rank."""
    stages: int | None = None
    """Number of stages; None: any."""
    recompute: bool = True
    """Allow recomputation of blocks where memory does not suffice."""
    overlaps: bool = True
    """Traffic of weights and their gradients runs while the devices compute."""
    synchronised_norms: bool = False
    """Batch norms take the statistics of the whole batch, as in :func:`steptime.sharding.shard.shard`."""
    memory_bytes: float | None = None
    """Memory of a device for tensors; None: as in :func:`steptime.sharding.shard.shard`."""
    framework: str | None = None
    """Training software, as in :func:`steptime.sharding.shard.shard`."""
    gap: float = 0.01
    """Share above the bound at which a solver may stop."""
    seconds: float = 20.0
    """Time limit of each sharding problem, in seconds."""
    seq: int | None = None
    dtype: str | None = None
    inputs: Sequence[str] = ()
    optimizer: str | None = "adamw"
    loss: str | None = None
    autocast: str | None = None

    @property
    def capture(self) -> dict[str, Any]:
        """Arguments of the capture, as of :func:`steptime.captured.profiling.profile`."""
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
            nothing fits; in that case the message names the stage that lacks memory, and how much.
    """
    known = [each.name for each in fields(Options)]
    for name in options:
        if name not in known:
            raise UnknownNameError("option", name, known)
    chosen = Options(**options)
    whole("global_batch", global_batch, 1, MAX_BATCH)
    for _, count in ((cluster, gpus), *further):
        whole("gpus", count, 1, MAX_DEVICES)
    limit_bytes = chosen.memory_bytes or 0.0
    kinds = tuple(
        Machines(cluster=cluster_given(each), devices=count, limit_bytes=limit_bytes)
        for each, count in ((cluster, gpus), *further)
    )
    sizes = _sizes(global_batch, chosen.micro_batches)
    rows = [_schedule(name) for name in chosen.schedules]
    return _Search(
        model=model, kinds=kinds, global_batch=global_batch, sizes=sizes, rows=rows, options=chosen, progress=progress
    ).best()


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
    """The schedule of a name, if it is synchronous, has one copy of the model and known micro-batches in flight."""
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
    """The choices of a stage: shardings, then numbers of devices for branches."""

    options: Sequence[Solved]
    kind: Sequence[int]
    devices: Sequence[int]
    available: Sequence[int]
    shares: Sequence[tuple[int, ...]] = ()
    """Devices of each branch; each entry is one choice, numbered after the shardings."""


class _Best(NamedTuple):
    """Options with the same number of devices, as branches."""

    numbers: Sequence[int]
    option: Array
    """Index of the best in ``numbers``, [first unit, unit after the last]."""
    costs: SpanCosts
    """Costs, [option, first unit, unit after the last]."""


@dataclass(kw_only=True)
class _Search:
    model: str
    kinds: tuple[Machines, ...]
    global_batch: int
    rows: Sequence[Schedule]
    options: Options
    progress: Callable[[int, int], None] | None
    sizes: tuple[int, ...]
    costings: list[Costing] = field(default_factory=list)
    """Costing of each kind at the current micro-batch."""
    done: int = 0
    solved: int = 0
    bound_s: float = inf

    @property
    def overlap(self) -> Overlap:
        """Traffic that overlaps with computation."""
        return "data" if self.options.overlaps else "none"

    @cached_property
    def domains(self) -> list[int]:
        """Devices of a fast domain of each kind."""
        return [mesh_on(each.cluster, {"data": each.devices}).machine.fast_domain for each in self.kinds]

    @cached_property
    def usual(self) -> list[list[int]]:
        """Sizes of the sub-meshes of each kind for which places in fast domains always exist."""
        return [sub_meshes(each.devices, domain) for each, domain in zip(self.kinds, self.domains, strict=True)]

    @cached_property
    def meshes(self) -> list[tuple[int, str]]:
        """Kind and axes of every sub-mesh."""
        out = []
        for kind, (machines, usual) in enumerate(zip(self.kinds, self.usual, strict=True)):
            for count in usual:
                shapes = logical_meshes(count, AXES) if count > 1 else [(1,)]
                out += [(kind, "x".join(map(str, sizes))) for sizes in shapes]
            out += [(kind, str(count)) for count in replica_counts(machines.devices, usual)]
        return out

    def best(self) -> JointPlan:
        """The best plan over all micro-batches and schedules."""
        found: list[JointPlan] = []
        tried: list[tuple[int, str, float | None]] = []
        failed: UserError | None = None
        for size in self.sizes:
            program = captured_step(self.model, self.kinds[0].cluster, batch=size, **self.options.capture)
            self._cost(program)
            units = units_of(flow_of(self.costings[0].program))
            self._check(units)
            options = self._options(units, size)
            for row in self.rows:
                plans = list(self._plans(units, options, size, row, program.name))
                found += plans
                least = min(plans, key=lambda each: each.step_s, default=None)
                name = ONE_STAGE if least is not None and least.count == 1 else row.name
                if (size, name) not in [each[:2] for each in tried]:
                    tried.append((size, name, None if least is None else least.step_s))
            if not found:
                failed = self._lacking(units, options, size)
        if not found:
            raise failed or UserError("no stages fit")
        best = min(found, key=lambda plan: plan.step_s)
        return replace(best, tried=tuple(tried), bound_s=self.bound_s, solved=self.solved)

    def _cost(self, program: Program) -> None:
        """Set the costing of the step on each kind of device, and default memory limits."""
        chosen = self.options
        self.costings = [
            costing_of(
                program,
                each.cluster,
                each.devices,
                optimizer=chosen.optimizer,
                framework=chosen.framework,
                overlaps=chosen.overlaps,
            )
            for each in self.kinds
        ]
        rooms = [each.limit_bytes or one.room_bytes for each, one in zip(self.kinds, self.costings, strict=True)]
        self.kinds = tuple(replace(each, limit_bytes=room) for each, room in zip(self.kinds, rooms, strict=True))

    def _check(self, units: Units) -> None:
        if self.options.stages is not None and not 1 <= self.options.stages <= units.count:
            raise UserError(
                f"{counted(self.options.stages, 'stage')} of {counted(units.count, 'unit')}",
                hint="a stage has one unit at least; the units are the blocks of the module and what comes before and "
                "after them, or parts between which few activations pass",
            )

    # -- shardings ------------------------------------------------------------------------------------------------

    def _options(self, units: Units, size: int) -> list[Solved]:
        """Shardings on every sub-mesh for one micro-batch."""
        micro_batches, out = self.global_batch // size, []
        work: list[list[Array]] = [[] for _ in self.kinds]
        for kind, text in self.meshes:
            if self.progress is not None:
                self.progress(self.done, len(self.meshes) * len(self.sizes))
            self.done += 1
            machines, costing = self.kinds[kind], self.costings[kind]
            mesh = mesh_on(machines.cluster, parse_axes(text))
            plain = not self.options.synchronised_norms
            problem = of_micro_batch(costing.built(units.flow, mesh, inf, plain_norms=plain), micro_batches)
            work[kind].append(least_operators_s(problem) * mesh.devices * micro_batches)
            for plan in self._solutions(problem, machines):
                spans = partial(
                    spans_of,
                    unit_costs(units, plan, micro_batches, costing.paced_s),
                    micro_batches=micro_batches,
                    limit_bytes=machines.limit_bytes,
                    recompute=self.options.recompute,
                    share=costing.overlaps,
                )
                out.append(Solved(kind, plan, spans(), spans(branch=True)))
        least = np.array([np.min(each, axis=0) for each in work])
        self.bound_s = min(self.bound_s, least_step_s(least, [each.devices for each in self.kinds]))
        return out

    def _solutions(self, problem: Built, machines: Machines) -> Iterator[ShardingPlan]:
        """Plans without a memory limit, and with the limits of stages that have only a part of the model."""
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
        return planned(problem, overlaps=self.costings[0].overlaps, gap=self.options.gap, seconds=self.options.seconds)

    # -- stages ---------------------------------------------------------------------------------------------------

    def _counts(self, units: Units, chunks: int = 1) -> list[int]:
        """Numbers of stages to search."""
        most = min(units.count, chunks * sum(each.devices for each in self.kinds), MOST_STAGES)
        return list(range(1, most + 1)) if self.options.stages is None else [self.options.stages]

    def _plans(
        self, units: Units, options: Sequence[Solved], size: int, row: Schedule, name: str
    ) -> Iterator[JointPlan]:
        micro_batches = self.global_batch // size
        for some, flights, counts in self._fields(units, options, micro_batches, row):
            found, stages = self._placed(some, units, flights, counts, row.usual_chunks)
            if found is not None:
                flight = flights[len(found.stages) - 1 :: -1]
                ways = self._ways(units, stages, row.usual_chunks)
                lines = [
                    self._stage(units, part, flight[place], [way for way in ways if way.target == part.name])
                    for place, parts in enumerate(stages)
                    for part in parts
                ]
                step_s, bracket_s, closed_s = self._played(units, stages, lines, micro_batches, row)
                yield JointPlan(
                    model=name,
                    machines=self.kinds,
                    framework=self.costings[0].framework.name,
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

    def _placed(
        self, field: _Field, units: Units, flights: Sequence[float], counts: Sequence[int], chunks: int
    ) -> tuple[Split | None, list[tuple[Part, ...]]]:
        """The best stages and their devices; only the usual sub-meshes are used if others find no places."""
        found = self._split(field, self._costs(field, units, flights), counts)
        if found is None:
            return None, []
        stages = self._parts(field, units, found.stages, flights[len(found.stages) - 1 :: -1], chunks)
        usual = [each for each in field.options if each.devices in self.usual[each.kind]]
        if stages is None and len(usual) < len(field.options):
            return self._placed(self._field(usual, units), units, flights, counts, chunks)
        return (None, []) if stages is None else (found, stages)

    def _fields(
        self, units: Units, options: Sequence[Solved], micro_batches: int, row: Schedule
    ) -> Iterator[tuple[_Field, tuple[float, ...], list[int]]]:
        """Choices of stages, with micro-batches in flight by place from the end and numbers of stages.

        Stages get their places last, so the choices come once with messages as between neighbours of one size, and once
        with all messages between fast domains. With several stages per rank, all ranks have usual sub-meshes of one
        kind, the ranks use all devices, and each stage has an equal share of the memory of its rank.
        """
        chunks = row.usual_chunks
        if chunks == 1:
            far = [
                each._replace(
                    spans=replace(each.spans, message_s=each.spans.far_message_s),
                    branch=replace(each.branch, message_s=each.branch.far_message_s),
                )
                for each in options
            ]
            several = any(each.devices > domain for each, domain in zip(self.kinds, self.domains, strict=True))
            for flights, counts in in_flight_groups(row, micro_batches, self._counts(units)).items():
                for sort in (options, far) if several else (options,):
                    yield self._field(sort, units), flights, counts
            return
        for option in options:
            machines = self.kinds[option.kind]
            ranks = min(machines.devices // option.devices, units.count // chunks)
            count, pipeline = ranks * chunks, Pipeline(ranks=max(ranks, 1), chunks=chunks, micro_batches=micro_batches)
            allowed = option.devices in self.usual[option.kind] and count in self._counts(units, chunks)
            if ranks > 1 and allowed and all(rule.holds(pipeline) for rule in row.rules):
                flight = max(float(row.in_flight(pipeline, rank) or 0.0) for rank in range(ranks))
                share = replace(option.spans, limit_bytes=option.spans.limit_bytes / chunks)
                yield _Field([option._replace(spans=share)], [0], [1], [count]), (flight,) * count, [count]

    def _field(self, options: Sequence[Solved], units: Units | None = None) -> _Field:
        """All shardings; if units have branches, also numbers of devices: all pairs, equal ones for more branches."""
        kind, devices, shares = [each.kind for each in options], [each.devices for each in options], []
        for number, machines in enumerate(self.kinds):
            counts = sorted({each.devices for each in options if each.kind == number})
            for branches in sorted({len(each.bounds) - 1 for each in (units.branches if units else {}).values()}):
                each = product(counts, counts) if branches == 2 else ((count,) * branches for count in counts)
                found = [share for share in each if sum(share) <= machines.devices]
                shares += found
                kind += [number] * len(found)
                devices += map(sum, found)
        return _Field(options, kind, devices, [each.devices for each in self.kinds], shares)

    def _costs(self, field: _Field, units: Units, flights: Sequence[float]) -> list[SpanCosts]:
        known: dict[float, SpanCosts] = {}
        for each in flights:
            if each not in known:
                priced = [option.spans.priced(each, self.overlap) for option in field.options]
                priced += self._branch_costs(field, units, each)
                known[each] = SpanCosts(np.array([p.each_s for p in priced]), np.array([p.busy_s for p in priced]))
        return [known[each] for each in flights]

    def _branch_costs(self, field: _Field, units: Units, in_flight: float) -> Iterator[SpanCosts]:
        """Costs of each choice of devices for branches: the slowest branch up to the meeting, then the last branch."""
        runs: dict[int, list[Branches]] = {}
        for each in units.branches.values() if field.shares else ():
            runs.setdefault(len(each.bounds) - 1, []).append(each)
        best = self._best_branches(field, in_flight) if runs else {}
        for kind, share in zip(field.kind[len(field.options) :], field.shares, strict=True):
            bounds = np.array([each.bounds for each in runs[len(share)]]).T
            meet = np.array([each.meet for each in runs[len(share)]])
            out = SpanCosts(*(np.full((units.count, units.count + 1), inf) for _ in range(2)))
            for into, name in zip(out, SpanCosts._fields, strict=True):
                *others, (last, whole) = (
                    (best[kind, count], getattr(best[kind, count].costs, name)[best[kind, count].option[at], *at])
                    for count, at in zip(share, pairwise(bounds), strict=True)
                )
                before = getattr(last.costs, name)[last.option[bounds[-2], bounds[-1]], bounds[-2], meet]
                behind = np.where(np.isfinite(whole), whole, inf) - np.where(np.isfinite(before), before, 0.0)
                into[bounds[0], bounds[-1]] = np.max([before, *(each for _, each in others)], axis=0) + behind
            yield out

    def _best_branches(self, field: _Field, in_flight: float) -> dict[tuple[int, int], _Best]:
        """Kind and number of devices -> the option with the least sum of both costs, for each run as a branch."""
        options: dict[tuple[int, int], list[int]] = {}
        for number, option in enumerate(field.options):
            options.setdefault((option.kind, option.devices), []).append(number)
        out = {}
        for key, numbers in options.items():
            priced = [field.options[n].branch.priced(in_flight, self.overlap) for n in numbers]
            costs = SpanCosts(np.array([each.each_s for each in priced]), np.array([each.busy_s for each in priced]))
            out[key] = _Best(numbers, np.argmin(costs.each_s + costs.busy_s, axis=0), costs)
        return out

    # -- what was chosen ------------------------------------------------------------------------------------------

    def _parts(
        self, field: _Field, units: Units, stages: Sequence[Stage], flights: Sequence[float], chunks: int
    ) -> list[tuple[Part, ...]] | None:
        """The branches of each stage (usually one) with their devices; None: there are no places for them."""
        chosen: list[list[tuple[Solved, int, int]]] = []
        for place, stage in enumerate(stages):
            number = stage.choice - len(field.options)
            if number < 0:
                chosen.append([(field.options[stage.choice], stage.first, stage.end)])
                continue
            best, branches = self._best_branches(field, flights[place]), []
            bounds = pairwise(units.branches[stage.first, stage.end].bounds)
            for count, (first, end) in zip(field.shares[number], bounds, strict=True):
                of_count = best[field.kind[stage.choice], count]
                option = field.options[of_count.numbers[of_count.option[first, end]]]
                branches.append((option._replace(spans=option.branch), first, end))
            chosen.append(branches)
        ranks = chosen[: len(stages) // chunks]
        starts: dict[int, Iterator[int]] = {}
        for kind, (machines, domain) in enumerate(zip(self.kinds, self.domains, strict=True)):
            sizes = [option.devices for each in ranks for option, _, _ in each if option.kind == kind]
            found = places(sizes, machines.devices, domain)
            if found is None:
                return None
            starts[kind] = iter(found * chunks)
        return [
            tuple(
                Part(*part, next(starts[part[0].kind]), f"{place + 1}{letter if len(parts) > 1 else ''}")
                for letter, part in zip(ascii_lowercase, parts, strict=False)
            )
            for place, parts in enumerate(chosen)
        ]

    def _stage(self, units: Units, part: Part, in_flight: float, entering: Sequence[Way]) -> PlannedStage:
        option, at = part.option, (part.first, part.end)
        spans, again = option.spans, option.spans.recomputed(in_flight)
        names = [name for name, where in units.of_parameter.items() if any(at[0] <= unit < at[1] for unit in where)]
        known = option.plan.parameters
        return PlannedStage(
            name=part.name,
            first_device=part.start,
            units=units.names[part.first : part.end],
            blocks=int(units.blocks[part.first : part.end].sum()),
            machines=self.kinds[option.kind],
            plan=option.plan,
            recomputed=int(again[at]),
            in_flight=in_flight,
            memory_bytes=float(spans.memory_bytes(in_flight, np.where(np.isfinite(again), again, 0))[at]),
            passes_s=spans.passes_s(*at, float(again[at]), self.overlap),
            once_s=float(spans.once_s(self.overlap)[at]),
            entering=tuple(entering),
            parameters={name: text_of(known[name]) for name in names if name in known},
        )

    # -- time -----------------------------------------------------------------------------------------------------

    def _played(
        self,
        units: Units,
        stages: Sequence[Sequence[Part]],
        lines: Sequence[PlannedStage],
        micro_batches: int,
        row: Schedule,
    ) -> tuple[float, tuple[float, float], float]:
        """Simulated step time; its bracket with all and with no traffic overlapped; step time in closed form."""
        of_name = {line.name: line for line in lines}
        messages = np.zeros(len(stages) - 1)
        for n, (before, behind) in enumerate(pairwise(stages)):
            sources = [part.name for part in before]
            messages[n] = seam_s([w for part in behind for w in of_name[part.name].entering if w.source in sources])

        def step(overlap: Overlap, share: float, transport: Transport) -> tuple[float, float]:
            passes, once = [], []
            for parts in stages:
                *others, own = [
                    np.array(
                        part.option.spans.passes_s(part.first, part.end, float(of_name[part.name].recomputed), overlap)
                    )
                    for part in parts
                ]
                passes.append(own)
                if others:  # after the meeting the last branch runs alone, once it has the results of the others
                    meet, last = units.branches[parts[0].first, parts[-1].end].meet, parts[-1]
                    behind = np.array(last.option.spans.passes_s(meet, last.end, 0.0, overlap))
                    sent = {way.source: share * way.seconds for way in of_name[last.name].entering}
                    for each, part in zip(others, parts, strict=False):
                        both_ways = sent.get(part.name, 0.0) * np.array([1.0, 1.0, 0.0])
                        passes[-1] = np.maximum(passes[-1], each + both_ways + behind)
                once.append(max(part.option.spans.once_s(overlap)[part.first, part.end] for part in parts))
            return played_s(row, np.array(passes), np.array(once), share * messages, micro_batches, transport)

        middle, closed = step(self.overlap, 1.0, Transport())
        low, _ = step("all", 0.0, Transport())
        high, _ = step("none", 1.0, Transport(overlap=False))
        whole = partial(self.costings[0].with_ranks_s, devices=sum(each.devices for each in self.kinds))
        return whole(middle), (whole(min(low, middle)), whole(max(high, middle))), whole(closed)

    def _ways(self, units: Units, stages: Sequence[Sequence[Part]], chunks: int) -> list[Way]:
        """Activations that pass between stages, and between branches of a stage.

        An activation comes from the branch that makes it, or from the first branch if an earlier stage makes it. It
        goes to each branch that reads it, or to the first branch if only a later stage does.
        """
        ranks, out = len(stages) // chunks if chunks > 1 else None, list[Way]()
        for before, behind in pairwise(stages):
            out += self._between(units, before, behind, units.crossing[behind[0].first], ranks)
        for *others, last in stages:
            made = [n for n, unit in units.made.items() if any(unit in part.units for part in others)]
            read = [n for n in made if any(unit in last.units for unit in units.readers.get(n, ()))]
            out += self._between(units, others, [last], read, None)
        return out

    def _between(
        self, units: Units, before: Sequence[Part], behind: Sequence[Part], crossing: Sequence[int], ranks: int | None
    ) -> Iterator[Way]:
        ways: dict[tuple[int, int], list[Passing]] = {}
        times = {
            (a, b): self._message_s(one, other, ranks) for a, one in enumerate(before) for b, other in enumerate(behind)
        }
        for storage in crossing:
            a = next((n for n, part in enumerate(before) if units.made[storage] in part.units), 0)
            made = units.made[storage] in before[a].units
            reading = [n for n, part in enumerate(behind) if {*part.units} & {*units.readers[storage]}]
            for b in reading or [0]:
                plans, read = (before[a].plan, behind[b].plan), behind[b].units
                each = passing(units, storage, plans, made=made, read=read, message_s=times[a, b])
                ways.setdefault((a, b), []).append(each)
        for (a, b), found in ways.items():
            yield way_of((before[a].name, behind[b].name), found, times[a, b])

    def _message_s(self, before: Part, behind: Part, ranks: int | None) -> Callable[[Num], Num]:
        """A function from bytes to the seconds of a message from the devices of one stage to those of another.

        With several stages on each of ``ranks`` ranks, it leaves the fast domain if all ranks together exceed one.
        """
        pair = before, behind
        machines = [each.plan.built.mesh.machine for each in pair]
        domains = [each.start // machine.fast_domain for each, machine in zip(pair, machines, strict=True)]
        far, ends = before.option.kind != behind.option.kind or domains[0] != domains[1], (before.start, behind.start)
        if ranks is not None:
            devices = ranks * min(each.option.devices for each in pair)
            far, ends = devices > machines[0].fast_domain, (0, devices - 1)

        def message_s(size_bytes: Num) -> Num:
            slower = [message_time_s(each, size_bytes, pair_of(each, *ends))[far] for each in machines]
            return maximum(slower[0], slower[1])

        return message_s

    # -- nothing fits ---------------------------------------------------------------------------------------------

    def _lacking(self, units: Units, options: Sequence[Solved], size: int) -> UserError:
        """The error that nothing fits: the fullest stage of the split that needs least memory, and its needs."""
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
                    devices = counted(options[stage.choice].devices, "device")
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
        """Memory of stages as a share of the limit, with recomputation of all blocks if that takes less."""
        out = []
        for each in options:
            spans = each.spans
            again = spans.blocks if spans.recompute else np.zeros(spans.blocks.shape)
            used = np.minimum(spans.memory_bytes(in_flight, again), spans.memory_bytes(in_flight, 0 * again))
            out.append(np.where(spans.kept_bytes + spans.held_bytes > 0, used / spans.limit_bytes, inf))
        runs = np.array(out)
        runs[:, np.arange(runs.shape[2])[None, :] <= np.arange(runs.shape[1])[:, None]] = inf
        return SpanCosts(np.where(np.isfinite(runs), 0.0, inf), runs)
