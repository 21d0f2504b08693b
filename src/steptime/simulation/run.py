"""One step of a pipeline simulated action by action, with the times and the memory of an estimate."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from steptime.api.calls import AskedPlan, asked_plan
from steptime.api.request import NameOrPath, text, whole
from steptime.errors import PlanError, UserError
from steptime.estimate.evaluate import Evaluation, evaluate
from steptime.estimate.result import SCHEMA_VERSION
from steptime.num import Array, Num
from steptime.options import number
from steptime.schedule import SCHEDULES, ActionTable, Kind, Pipeline
from steptime.schedule.actions import COMPUTE, DATA, FROM_HOST, LETTERS, MESSAGES, STREAM, TO_HOST
from steptime.simulation.graph import ActionGraph, Transport, graph_of
from steptime.simulation.idle import Spent, spent
from steptime.simulation.layout import layout_text
from steptime.simulation.legality import check
from steptime.simulation.memory import Footprint, MemoryReplay, memory_replay
from steptime.simulation.messages import with_copies
from steptime.simulation.pytorch_csv import read_csv
from steptime.simulation.simulate import Durations, Jitter, Simulation, sampled_step_s
from steptime.simulation.simulate import simulate as play
from steptime.simulation.stage_times import StageTimes, read_stage_times
from steptime.simulation.times import (
    best_lengths,
    durations_of,
    footprint_of,
    mean_times,
    measured,
    measured_mean,
    of_steps,
    once_of,
    slice_factors,
    slowdown_of,
)

WHOLE, SPLIT = "1f1b", "zb-h1"
"""Schedules whose estimates give the times of whole backward passes, and of backward passes in two parts."""
MAX_SAMPLES: Final = 10_000
MOST_PASSES: Final = 2**21
"""Largest number of passes of a simulated step."""
MOST_STEPS: Final = 8
"""Largest number of steps simulated for the mean time of a further step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """Stages of a step: their layers, durations and memory."""

    layers: Array
    """Layers of each stage."""
    durations: Durations
    footprint: Footprint
    layout: tuple[str, ...]
    """Letters of each stage (:mod:`steptime.simulation.layout`)."""
    capacity_bytes: Num
    """Memory of a device: a number, or an array by rank."""
    even_s: float | None = None
    """Pipeline time of the even split, where another one was chosen."""
    even_layout: tuple[str, ...] = ()
    even_fits: bool = True
    """True if the even split fits into the memory."""
    notes: tuple[str, ...] = ()

    def slowed(self, factors: Array) -> Staged:
        """A copy with the passes of each rank slowed by its factor."""
        return replace(self, durations=replace(self.durations, slowdown=self.durations.slowdown * factors))


Pace = Callable[[Durations], float]
"""Pipeline time with some durations."""
StageChoice = Callable[[Evaluation, ActionGraph, Staged, Pace], Staged]
"""Function that replaces the stages of the estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """One step of a pipeline, played action by action (SI units)."""

    model: str
    cluster: str
    schedule: str
    """Name of the schedule, or the file that it was read from."""
    table: ActionTable
    simulation: Simulation
    memory: MemoryReplay
    spent: Spent
    stage_layers: Array
    """Layers of each stage."""
    update_s: float
    """One update of the weights within the step: its exposed data-parallel traffic and the optimiser; 0: none."""
    updates: float
    """Updates in a step of a long run."""
    pipeline_s: float
    """Longest time of a rank from its first pass to its last, which is the time from step to step. If steps of the
    schedule overlap: the time that a further step adds."""
    once_s: Mapping[str, float]
    """Times that occur once per step: exposed data-parallel traffic and the optimiser, unless the schedule updates
    within the step; overheads, growth with devices."""
    closed_form_s: float | None
    """Step time of the estimate with the schedule's closed form; None: there is no closed form."""
    samples_s: Array
    """Pipeline times of the samples with jitter."""
    capacity_bytes: Num
    """Memory of a device: a number, or an array by rank."""
    message_bytes: float
    slow_ranks: Mapping[int, float]
    """Factor on the passes of slow ranks, by rank."""
    equal_ranks_s: float
    """The pipeline's time if no rank were slow."""
    notes: tuple[str, ...]
    layout: tuple[str, ...]
    """Letters of each stage (:mod:`steptime.simulation.layout`)."""
    slices: tuple[int, ...] = ()
    """Tokens of each slice of a sequence; empty: not cut."""
    even_step_s: float | None = None
    """Time of the step with the even split, where another one was chosen."""
    even_layout: tuple[str, ...] = ()
    even_fits: bool = True
    """True if the even split fits into the memory."""

    @property
    def step_s(self) -> float:
        """Step time (s)."""
        return self.pipeline_s + sum(self.once_s.values())

    @property
    def bubble_fraction(self) -> float:
        """Share of the pipeline's time in which a rank runs no pass, mean over ranks."""
        busy_s = self.spent.passes_s + self.spent.tensor_s + self.spent.update_s
        return float(1 - np.mean(busy_s) / self.pipeline_s)

    def to_json(self, *, timeline: bool = False) -> dict[str, Any]:
        """Plain data for ``json.dumps``; with ``timeline`` every pass too."""
        path = self.simulation.critical_path()
        stream = np.where(path.message, -1, STREAM[self.table.kind[path.row]])
        critical = {"messages": -1, "passes": COMPUTE, "data": DATA, "to_host": TO_HOST, "from_host": FROM_HOST}
        return {
            "schema_version": SCHEMA_VERSION,
            "model": self.model,
            "cluster": self.cluster,
            "schedule": self.schedule,
            "ranks": self.table.ranks,
            "stages": self.table.stages,
            "micro_batches": self.table.micro_batches,
            "slices": list(self.slices),
            "stage_layers": self.stage_layers.tolist(),
            "layout": layout_text(self.layout),
            "even_layout": layout_text(self.even_layout) if self.even_layout else None,
            "even_step_time_s": self.even_step_s,
            "even_fits": None if self.even_step_s is None else self.even_fits,
            "step_time_s": self.step_s,
            "pipeline_s": self.pipeline_s,
            "once_s": dict(self.once_s),
            "updates": self.updates,
            "update_s": self.update_s,
            "closed_form_s": self.closed_form_s,
            "bubble_fraction": self.bubble_fraction,
            "spent_by_rank_s": {each.name: getattr(self.spent, each.name).tolist() for each in fields(Spent)},
            "critical_path_s": {name: float(path.seconds[stream == of].sum()) for name, of in critical.items()},
            "slow_ranks": {str(rank): factor for rank, factor in self.slow_ranks.items()},
            "stragglers_s": self.pipeline_s - self.equal_ranks_s,
            "peak_memory_bytes": self.memory.peak_bytes.tolist(),
            "memory_capacity_bytes": np.asarray(self.capacity_bytes).tolist(),
            "samples_s": self.samples_s.tolist(),
            "notes": list(self.notes),
            **({"passes": self.passes()} if timeline else {}),
        }

    def passes(self) -> dict[str, Any]:
        """Timeline of all actions without messages, as columns; micro-batch -1: the action has none."""
        table, played = self.table, self.simulation
        own = np.flatnonzero(~np.isin(table.kind, MESSAGES) & (played.end_s > played.start_s))
        return {
            "rank": table.rank[own].tolist(),
            "kind": [LETTERS[kind] for kind in table.kind[own].tolist()],
            "stage": table.stage[own].tolist(),
            "micro_batch": table.micro_batch[own].tolist(),
            "start_s": played.start_s[own].tolist(),
            "end_s": played.end_s[own].tolist(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Observations of a run that replace values of the estimate."""

    stage_times: str | Path | None = None
    """CSV file of measured times of the stages' passes (:func:`steptime.simulation.stage_times.read_stage_times`)."""
    overhead_s: float = 0.0
    """Seconds that each micro-batch takes on each rank beyond its measured times."""
    slow_ranks: Mapping[int, float] = field(default_factory=dict)
    """Factor on the passes of ranks, by rank."""
    stages: StageChoice | None = None
    """Another split of the layers (:mod:`steptime.simulation.stages`); None: the estimate's."""

    def checked(self) -> Observed:
        """Self; UserError: the overhead is out of range, or given without measured times."""
        overhead_s = number("overhead", self.overhead_s, 0.0, 3600.0, "seconds")
        if overhead_s and self.stage_times is None:
            raise UserError("an overhead per micro-batch is for measured times", hint="give --stage-times FILE.csv too")
        return self


def simulate(
    model: NameOrPath,
    cluster: NameOrPath,
    *,
    schedule: str = WHOLE,
    observed: Observed = Observed(),
    jitter: float = 0.0,
    samples: int = 0,
    seed: int = 0,
    plan: Mapping[str, Any] | None = None,
    **job: Any,
) -> SimulatedStep:
    """Simulates one step of a pipeline: any schedule of :data:`steptime.schedule.SCHEDULES`, or one from a file.

    Durations of passes and messages, layers of stages and their memory come from the estimate. Times that occur once
    per step (data-parallel traffic, optimiser, overheads) are added to the pipeline's time as in the estimate.
    With ``offload activations`` all activations of a stage for a micro-batch go to the host during the rank's next
    pass, and come back during the pass before they are needed.

    Args:
        schedule: a name, for some with a number (``terapipe:8`` slices, ``pipedream:4`` micro-batches per update), or
            with slices of a sequence (``terapipe:best``, ``terapipe:512+512+1024`` tokens); or a CSV file of PyTorch's
            pipelining.
        observed: measured times, slow ranks, another split of the layers.
        jitter: standard deviation of the factor on each pass (mean 1), for samples.
        samples: number of samples with jitter.
        seed: seed of the samples.
        plan: as for an estimate; ``vpp`` is the number of virtual stages of a rank.
        job: the other arguments of :func:`steptime.api.estimate`.

    Raises:
        UserError: something in the input is wrong; the message says what to change.
    """
    name, jitter = text("schedule", schedule), number("jitter", jitter, 0.0, 2.0, "standard deviation of a factor")
    samples, slow_ranks = whole("samples", samples, 0, MAX_SAMPLES), dict(observed.checked().slow_ranks)
    given = {key: value for key, value in (plan or {}).items() if key not in ("schedule", "vpp")}
    chunks = (plan or {}).get("vpp")
    name, slices = _cut(model, cluster, name, given, job)
    read = read_csv(Path(name)) if name.lower().endswith(".csv") else None
    asked, e, table, times = _asked_table(model, cluster, name, chunks, read, observed, given, job)
    graph, longer, slow = _graph(e, table), None, slowdown_of(slow_ranks, table.ranks)
    own = _of_schedule(model, cluster, name, given | ({} if chunks is None else {"vpp": chunks}), job)
    update_s, updates = _updates(table, own or e)
    if updates:
        steps = _whole_steps(table.micro_batches, updates)
        longer = _graph(e, _table(name, e, chunks, None, steps=1 + steps, times=times)), steps
    pace_s = partial(_pipeline_s, graph, longer)
    staged = _staged(name, e, table, chunks, lambda own: measured(own, times, table, observed.overhead_s))
    staged = replace(staged, durations=replace(staged.durations, update_s=update_s)).slowed(slow)
    if table.slices > 1 and times is None:
        slices = slices or (-(-int(e.job.seq_len) // table.slices),) * table.slices
        staged = replace(staged, durations=replace(staged.durations, slice_factor=slice_factors(e, slices)))
    if observed.stages is not None:
        staged = observed.stages(e, graph, staged, pace_s)
    played, pipeline_s = play(graph, staged.durations), pace_s(staged.durations)
    other = bool(times or slow_ranks or observed.stages or len(set(slices)) > 1)
    return SimulatedStep(
        model=asked.setting.job.model.name,
        cluster=asked.setting.cluster.name,
        schedule=name,
        table=table,
        simulation=played,
        memory=memory_replay(played, staged.footprint),
        spent=spent(played),
        slow_ranks=slow_ranks,
        equal_ranks_s=pace_s(staged.slowed(1 / slow).durations) if slow_ranks else pipeline_s,
        stage_layers=staged.layers,
        pipeline_s=pipeline_s,
        once_s=once_of(own or e, pipeline_s, updates=updates > 0),
        update_s=update_s,
        updates=updates,
        closed_form_s=None if other or own is None else float(own.step_time_s),
        samples_s=sampled_step_s(graph, staged.durations, Jitter(action=jitter), samples, seed),
        capacity_bytes=staged.capacity_bytes,
        message_bytes=float(e.sizes.boundary_bytes),
        notes=(*asked.notes, *_notes(e, times), *staged.notes),
        layout=staged.layout,
        slices=slices,
        even_step_s=_even_step_s(own or e, staged, updates=updates > 0),
        even_layout=staged.even_layout,
        even_fits=staged.even_fits,
    )


def _cut(
    model: NameOrPath, cluster: NameOrPath, name: str, plan: Mapping[str, Any], job: Mapping[str, Any]
) -> tuple[str, tuple[int, ...]]:
    """Schedule with its number of slices, and tokens of each slice, from ``NAME:best`` or ``NAME:512+512+1024``.

    Raises:
        UserError: the tokens do not sum to the sequence.
    """
    base, _, given = name.partition(":")
    cuts = base in SCHEDULES and SCHEDULES[base].parameter == "usual_slices"
    if not cuts or name in SCHEDULES:
        return name, ()
    e = _evaluated(model, cluster, plan, job, base)[1]
    if given == "best":
        lengths = best_lengths(e)
    else:
        parts = given.split("+")
        lengths = tuple(int(part) for part in parts if re.fullmatch("[1-9][0-9]{0,8}", part))
        if len(lengths) != len(parts) or sum(lengths) != e.job.seq_len:
            raise UserError(
                f"schedule {name}: slices of {given} tokens",
                hint=f"give {base}:N for N equal slices, {base}:best, or lengths with a sum of {e.job.seq_len}: "
                f"{base}:A+B",
            )
    return f"{base}:{len(lengths)}", lengths


def _asked_table(
    model: NameOrPath,
    cluster: NameOrPath,
    name: str,
    chunks: int | None,
    read: ActionTable | None,
    observed: Observed,
    plan: Mapping[str, Any],
    job: Mapping[str, Any],
) -> tuple[AskedPlan, Evaluation, ActionTable, StageTimes | None]:
    """The estimate for the schedule's backward passes (whole or split), the schedule's table, and measured times."""
    cut = name in SCHEDULES and SCHEDULES[name].usual_slices > 1
    asked, e = _evaluated(model, cluster, plan, job, name if cut else WHOLE)
    table = _table(name, e, chunks, read)
    if np.any(table.kind == Kind.WEIGHT_GRADIENT):
        asked, e = _evaluated(model, cluster, plan, job, SPLIT)
        table = _table(name, e, chunks, read)
    times = _measured_times(observed, e, table)
    if times is not None:
        table = _table(name, e, chunks, read, times=times)
    return asked, e, table, times


def _staged(
    name: str, e: Evaluation, table: ActionTable, chunks: int | None, known: Callable[[Durations], Durations]
) -> Staged:
    """Stages with the estimate's split of the layers."""
    layers = _layers(e, table)
    return Staged(
        layers=layers,
        durations=known(durations_of(e, table, layers)),
        footprint=replace(footprint_of(e, table, layers), stashes=_stashes(name, e, chunks)),
        layout=_letters(e, layers),
        capacity_bytes=float(e.machine.memory_bytes),
    )


def _pipeline_s(graph: ActionGraph, longer: tuple[ActionGraph, int] | None, durations: Durations) -> float:
    """Longest time of a rank from its first pass to its last; with `longer`, the time that a further step adds, as a
    mean over several."""
    one_s = float(play(graph, durations).rank_span_s.max())
    if longer is None:
        return one_s
    more, steps = longer
    return (float(play(more, of_steps(durations, 1 + steps)).rank_span_s.max()) - one_s) / steps


def _updates(table: ActionTable, e: Evaluation) -> tuple[float, float]:
    """Seconds of an update within a step, and updates per step; zeros if weights change only at the end."""
    if not np.any(table.kind == Kind.UPDATE):
        return 0.0, 0.0
    return float(e.step.update_s), float(e.step.updates)


def _whole_steps(micro_batches: int, updates: float) -> int:
    """Least steps after which the pattern of updates repeats, :data:`MOST_STEPS` at most.

    >>> _whole_steps(64, 64.0), _whole_steps(12, 1.5), _whole_steps(4, 0.5)
    (1, 2, 2)
    """
    return min(Fraction(updates).limit_denominator(micro_batches**2).denominator, MOST_STEPS)


def _measured_times(observed: Observed, e: Evaluation, table: ActionTable) -> StageTimes | None:
    """Measured times of the stages of a table; None: not given."""
    if observed.stage_times is None:
        return None
    model = e.job.model
    job = {
        "pp": table.ranks,
        "microbatches": table.micro_batches,
        "micro_batch": int(e.plans.micro_batch),
        "layers": int(model.layers),
        "hidden": int(model.hidden),
        "heads": int(model.heads),
        "seq_len": int(e.job.seq_len),
    }
    return read_stage_times(Path(observed.stage_times), stages=table.stages, ranks=table.ranks, job=job)


def _graph(e: Evaluation, table: ActionTable) -> ActionGraph:
    """Graph of the schedule, with the overlap of messages and copies that the plan has."""
    return graph_of(table, Transport(overlap=bool(e.inputs.hides_stages), copies_ahead=_copies_ahead(e)))


def _copies_ahead(e: Evaluation) -> int:
    """Passes that run while activations are copied: 1, or 0 if copies do not overlap."""
    return int(e.inputs.hides_copies > 0)


def _notes(e: Evaluation, times: StageTimes | None) -> tuple[str, ...]:
    """Notes on what the numbers leave out."""
    notes = []
    if times is not None:
        notes.append("passes take the measured times; what a step has once, and memory, are those of the estimate")
    if e.inputs.copy_s:
        notes.append(
            "activations go to the host and back by whole passes of a stage: ranks hold more of them than the two "
            "layers of the estimate; --csv leaves copies out"
        )
    return tuple(notes)


def _evaluated(
    model: NameOrPath, cluster: NameOrPath, plan: Mapping[str, Any], job: Mapping[str, Any], schedule: str
) -> tuple[AskedPlan, Evaluation]:
    """The estimate that gives the times of the passes.

    Raises:
        PlanError: the plan has no pipeline, or the module no equal blocks to split over stages.
    """
    asked = asked_plan(model, cluster, plan={**plan, "schedule": schedule}, **job)
    if asked.plans.pp < 2:
        raise PlanError("pp 1: there is no pipeline to simulate", hint="give --pp 2 or more")
    setting = asked.setting
    if setting.job.captured is not None and not setting.job.captured.repeats:
        raise PlanError(
            f"{setting.job.model.name} has no run of equal blocks that stages could share (no_blocks)",
            hint="steptime shard MODULE --pipeline cuts a module by its real layers",
        )
    return asked, evaluate(setting.method, asked.strategy, setting.job, setting.machine, asked.plans)


def _of_schedule(
    model: NameOrPath, cluster: NameOrPath, name: str, plan: Mapping[str, Any], job: Mapping[str, Any]
) -> Evaluation | None:
    """The estimate with the closed forms of the schedule; None if there are none for the plan."""
    if name not in SCHEDULES:
        return None
    try:
        return _evaluated(model, cluster, plan, job, name)[1]
    except UserError:
        return None


def _table(
    name: str,
    e: Evaluation,
    chunks: int | None,
    read: ActionTable | None,
    steps: int = 1,
    times: StageTimes | None = None,
) -> ActionTable:
    """The schedule as a table, with copies if activations are offloaded. Without sends and receives a pass sends its
    result when it ends.

    Raises:
        UserError: the schedule is unknown or cannot serve the plan, or a file has another number of ranks.
    """
    ranks, micro_batches = int(e.plans.pp), int(e.micro_batches)
    if read is not None:
        if (read.ranks, read.micro_batches) != (ranks, micro_batches):
            raise PlanError(
                f"{name}: {read.ranks} ranks and {read.micro_batches} micro-batches; the plan has {ranks} and "
                f"{micro_batches}",
                hint=f"give --pp {read.ranks}, and a global batch of {read.micro_batches} micro-batches per replica",
            )
        check(read)
        table = read
    else:
        schedule, pipeline = SCHEDULES[name], _pipeline(name, e, chunks, steps)
        if times is not None:
            pipeline = replace(pipeline, times=measured_mean(times, pipeline.ranks))
        schedule.check(pipeline)
        _check_work(pipeline)
        table = schedule.order(pipeline)
    return with_copies(table, ahead=_copies_ahead(e)) if e.inputs.copy_s else table


def _check_work(pipeline: Pipeline) -> None:
    """Refuse a step with more passes than can be simulated.

    Raises:
        PlanError: the message has the number of passes, and options that lower it.
    """
    passes = 2 * pipeline.ranks * pipeline.chunks * pipeline.micro_batches * pipeline.slices
    if passes > MOST_PASSES:
        raise PlanError(
            f"a step of {passes:,} passes ({pipeline}); at most {MOST_PASSES:,} are simulated",
            hint="give a smaller --global-batch, as micro-batches repeat, or a larger --micro-batch; steptime estimate "
            "has closed forms",
        )


def _stashes(name: str, e: Evaluation, chunks: int | None) -> bool:
    """Weight stashing of the schedule; without effect for a file, whose schedule has no updates within a step."""
    if name not in SCHEDULES:
        return True
    return bool(SCHEDULES[name].weight_versions(_pipeline(name, e, chunks), 0) != 1)


def _pipeline(name: str, e: Evaluation, chunks: int | None, steps: int = 1) -> Pipeline:
    """The pipeline that the schedule is made for."""
    schedule = SCHEDULES[name]
    return Pipeline(
        ranks=int(e.plans.pp),
        chunks=schedule.usual_chunks if chunks is None else chunks,
        micro_batches=int(e.micro_batches) * steps,
        slices=schedule.usual_slices,
        per_update=schedule.usual_per_update,
        times=mean_times(e),
    )


def _layers(e: Evaluation, table: ActionTable) -> Array:
    """Layers of each stage: the estimate's with one stage per rank; as equal as possible, fewer last, with several.

    With one or two stages more than layers, the last stage, or the first and the last, have no layers.

    Raises:
        PlanError: there are more stages than layers, embedding and head.
    """
    layers, stages = int(e.job.model.layers), table.stages
    if 0 < stages - layers <= 2:
        return np.concatenate([np.zeros(stages - layers - 1), np.ones(layers), [0.0]])
    if stages > layers:
        raise PlanError(f"{stages} stages of {layers} layers", hint="give a smaller --pp or --vpp")
    if stages == int(e.plans.pp):
        found = np.full(stages, float(e.split.middle))
        found[0], found[-1] = float(e.split.first), float(e.split.last)
        if found.sum() == layers:
            return found
    return np.diff(np.ceil(np.arange(stages + 1) * (layers / stages) - 1e-9))


def _letters(e: Evaluation, layers: Array) -> tuple[str, ...]:
    """Letters of each stage: embedding in the first, multi-token prediction and loss in the last."""
    found = ["t" * int(count) for count in layers]
    found[0], found[-1] = "E" + found[0], found[-1] + "m" * int(e.job.model.mtp_depth) + "L"
    return tuple(found)


def _even_step_s(e: Evaluation, staged: Staged, *, updates: bool) -> float | None:
    """Time of the step with the even split, where another one was chosen."""
    if staged.even_s is None:
        return None
    return staged.even_s + sum(once_of(e, staged.even_s, updates=updates).values())


def csv_of(found: SimulatedStep) -> ActionTable:
    """The passes of a simulated schedule without other actions, for PyTorch's pipelining."""
    table = found.table
    passes = np.flatnonzero(table.kind <= Kind.WEIGHT_GRADIENT)
    return table.taken(passes)
