"""One step of a pipeline simulated action by action, with the times and the memory of an estimate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from steptime.api.calls import AskedPlan, asked_plan
from steptime.api.request import NameOrPath, number, text, whole
from steptime.api.simulated_times import (
    durations_of,
    footprint_of,
    mean_times,
    measured,
    measured_mean,
    of_two_steps,
    once_of,
    slowdown_of,
)
from steptime.errors import PlanError, UserError
from steptime.estimate.evaluate import Evaluation, evaluate
from steptime.estimate.result import SCHEMA_VERSION
from steptime.formats.stage_times import StageTimes, read_stage_times
from steptime.num import Array
from steptime.plan.job import SCHEDULES as CLOSED_FORMS
from steptime.schedule import SCHEDULES, ActionTable, Kind, Pipeline
from steptime.schedule.actions import COMPUTE, DATA, FROM_HOST, STREAM, TO_HOST
from steptime.schedule.graph import ActionGraph, Transport, graph_of
from steptime.schedule.idle import Spent, spent
from steptime.schedule.legality import check
from steptime.schedule.memory import MemoryReplay, memory_replay
from steptime.schedule.messages import with_copies
from steptime.schedule.pytorch_csv import read_csv
from steptime.schedule.simulate import Durations, Jitter, Simulation, sampled_step_s
from steptime.schedule.simulate import simulate as play

WHOLE, SPLIT = "1f1b", "zb-h1"
"""Schedules whose estimate has the times of whole backward passes, and of backward passes in two parts."""
MAX_SAMPLES: Final = 10_000


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
    pipeline_s: float
    """From the first pass of a rank to its last, of the rank that takes longest: steps follow each other so. Of a
    schedule whose steps run into each other what a further step takes."""
    once_s: Mapping[str, float]
    """What a step has once: exposed data-parallel traffic, the optimiser, overheads, growth with devices."""
    closed_form_s: float | None
    """Step time of the estimate with the schedule's closed form; None: the estimate has none of this schedule."""
    samples_s: Array
    """Pipeline times with jitter, if samples were asked for."""
    capacity_bytes: float
    """Memory of a device."""
    message_bytes: float
    slow_ranks: Mapping[int, float]
    """Factor on the passes of ranks that are slow, by rank."""
    equal_ranks_s: float
    """The pipeline's time if no rank were slow."""
    notes: tuple[str, ...]

    @property
    def step_s(self) -> float:
        """Time of the step."""
        return self.pipeline_s + sum(self.once_s.values())

    @property
    def bubble_fraction(self) -> float:
        """Share of the pipeline's time in which a rank does no pass, mean over ranks."""
        busy_s = self.spent.passes_s + self.spent.tensor_s + self.spent.update_s
        return float(1 - np.mean(busy_s) / self.pipeline_s)

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``."""
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
            "stage_layers": self.stage_layers.tolist(),
            "step_time_s": self.step_s,
            "pipeline_s": self.pipeline_s,
            "once_s": dict(self.once_s),
            "closed_form_s": self.closed_form_s,
            "bubble_fraction": self.bubble_fraction,
            "spent_by_rank_s": {each.name: getattr(self.spent, each.name).tolist() for each in fields(Spent)},
            "critical_path_s": {name: float(path.seconds[stream == of].sum()) for name, of in critical.items()},
            "slow_ranks": {str(rank): factor for rank, factor in self.slow_ranks.items()},
            "stragglers_s": self.pipeline_s - self.equal_ranks_s,
            "peak_memory_bytes": self.memory.peak_bytes.tolist(),
            "memory_capacity_bytes": self.capacity_bytes,
            "samples_s": self.samples_s.tolist(),
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What is known of a run, in place of what the estimate has."""

    stage_times: str | Path | None = None
    """CSV file of measured times of the stages' passes (:func:`steptime.formats.stage_times.read_stage_times`)."""
    overhead_s: float = 0.0
    """Seconds that each micro-batch takes on each rank beyond its measured times."""
    slow_ranks: Mapping[int, float] = field(default_factory=dict)
    """Factor on the passes of ranks, by rank."""

    def checked(self) -> Observed:
        """The same; UserError: an overhead is out of range, or there are no measured times that it belongs to."""
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

    Durations of passes and messages, the layers of stages and what they hold are those of the estimate. What a step
    has once (traffic of data parallelism, optimiser, overheads) is added to the pipeline's time as the estimate has it.
    With ``offload activations`` what a stage keeps of a micro-batch goes to the host as a whole during the rank's next
    pass, and comes back during the pass before it is needed.

    Args:
        schedule: a name, or a CSV file of PyTorch's pipelining.
        observed: measured times and slow ranks.
        jitter: standard deviation of the factor on each pass (mean 1), for samples.
        samples: number of samples with jitter.
        seed: of the samples.
        plan: as for an estimate; ``vpp`` is the number of virtual stages of a rank.
        job: the other arguments of :func:`steptime.api.estimate`.

    Raises:
        UserError: something in the input is wrong; the message says what to change.
    """
    name, jitter = text("schedule", schedule), number("jitter", jitter, 0.0, 2.0, "standard deviation of a factor")
    samples, slow_ranks = whole("samples", samples, 0, MAX_SAMPLES), dict(observed.checked().slow_ranks)
    given = {key: value for key, value in (plan or {}).items() if key not in ("schedule", "vpp")}
    chunks = (plan or {}).get("vpp")
    read = read_csv(Path(name)) if name.lower().endswith(".csv") else None
    asked, e = _evaluated(model, cluster, given, job, WHOLE)
    table = _table(name, e, chunks, read)
    if np.any(table.kind == Kind.WEIGHT_GRADIENT):
        asked, e = _evaluated(model, cluster, given, job, SPLIT)
        table = _table(name, e, chunks, read)
    times = _measured_times(observed, e, table)
    if times is not None:
        table = _table(name, e, chunks, read, times=times)
    layers = _layers(e, table)
    equal = measured(durations_of(e, table, layers), times, table, observed.overhead_s)
    graph, twice = _graph(e, table), None
    if name in SCHEDULES and not SCHEDULES[name].synchronous:
        twice = _graph(e, _table(name, e, chunks, None, steps=2, times=times))
    durations = replace(equal, slowdown=slowdown_of(slow_ranks, table.ranks))
    played, pipeline_s = play(graph, durations), _pipeline_s(graph, twice, durations)
    closed = given | ({} if chunks is None else {"vpp": chunks})
    return SimulatedStep(
        model=asked.setting.job.model.name,
        cluster=asked.setting.cluster.name,
        schedule=name,
        table=table,
        simulation=played,
        memory=memory_replay(played, replace(footprint_of(e, table, layers), stashes=_stashes(name, e, chunks))),
        spent=spent(played),
        slow_ranks=slow_ranks,
        equal_ranks_s=_pipeline_s(graph, twice, equal) if slow_ranks else pipeline_s,
        stage_layers=layers,
        pipeline_s=pipeline_s,
        once_s=once_of(e, pipeline_s),
        closed_form_s=None if times or slow_ranks else _closed_form_s(model, cluster, name, closed, job),
        samples_s=sampled_step_s(graph, durations, Jitter(action=jitter), samples, seed),
        capacity_bytes=float(e.machine.memory_bytes),
        message_bytes=float(e.sizes.boundary_bytes),
        notes=asked.notes + _notes(e, times),
    )


def _pipeline_s(graph: ActionGraph, twice: ActionGraph | None, durations: Durations) -> float:
    """From the first pass of a rank to its last, of the rank that takes longest; or what a further step takes."""
    one_s = float(play(graph, durations).rank_span_s.max())
    return one_s if twice is None else float(play(twice, of_two_steps(durations)).rank_span_s.max()) - one_s


def _measured_times(observed: Observed, e: Evaluation, table: ActionTable) -> StageTimes | None:
    """Measured times of the stages of a table; None: there are none."""
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
    """What actions wait for where messages and copies overlap as the plan says."""
    return graph_of(table, Transport(overlap=bool(e.inputs.hides_stages), copies_ahead=_copies_ahead(e)))


def _copies_ahead(e: Evaluation) -> int:
    """Passes that run while activations are copied: one, or none where copies do not overlap."""
    return int(e.inputs.hides_copies > 0)


def _notes(e: Evaluation, times: StageTimes | None) -> tuple[str, ...]:
    """What the numbers leave out."""
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
    """The estimate that has the times of the passes.

    Raises:
        PlanError: the plan has no pipeline.
    """
    asked = asked_plan(model, cluster, plan={**plan, "schedule": schedule}, **job)
    if asked.plans.pp < 2:
        raise PlanError("pp 1: there is no pipeline to simulate", hint="give --pp 2 or more")
    setting = asked.setting
    return asked, evaluate(setting.method, asked.strategy, setting.job, setting.machine, asked.plans)


def _closed_form_s(
    model: NameOrPath, cluster: NameOrPath, name: str, plan: Mapping[str, Any], job: Mapping[str, Any]
) -> float | None:
    """Step time of the estimate with the closed form of the schedule; None where there is none for the plan."""
    if name not in CLOSED_FORMS:
        return None
    try:
        asked = asked_plan(model, cluster, plan={**plan, "schedule": name}, **job)
    except UserError:
        return None
    setting = asked.setting
    e = evaluate(setting.method, asked.strategy, setting.job, setting.machine, asked.plans)
    return float(e.step_time_s)


def _table(
    name: str,
    e: Evaluation,
    chunks: int | None,
    read: ActionTable | None,
    steps: int = 1,
    times: StageTimes | None = None,
) -> ActionTable:
    """The schedule as a table; where it has no sends and receives, a pass sends its result when it ends.

    Where activations are offloaded, it has their copies.

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
        table = schedule.order(pipeline)
    return with_copies(table, ahead=_copies_ahead(e)) if e.inputs.copy_s else table


def _stashes(name: str, e: Evaluation, chunks: int | None) -> bool:
    """Whether ranks keep the weights that a forward pass read; a schedule from a file changes none within a step."""
    if name not in SCHEDULES:
        return True
    return SCHEDULES[name].weight_versions(_pipeline(name, e, chunks), 0) != 1


def _pipeline(name: str, e: Evaluation, chunks: int | None, steps: int = 1) -> Pipeline:
    """What the schedule is made for."""
    schedule = SCHEDULES[name]
    return Pipeline(
        ranks=int(e.plans.pp),
        chunks=schedule.usual_chunks if chunks is None else chunks,
        micro_batches=int(e.micro_batches) * steps,
        slices=schedule.usual_slices,
        times=mean_times(e),
    )


def _layers(e: Evaluation, table: ActionTable) -> Array:
    """Layers of each stage: with one stage a rank those of the estimate, with several as equal as can be, fewer last.

    Raises:
        PlanError: there are more stages than layers.
    """
    layers, stages = int(e.job.model.layers), table.stages
    if stages > layers:
        raise PlanError(f"{stages} stages of {layers} layers", hint="give a smaller --pp or --vpp")
    if stages == int(e.plans.pp):
        found = np.full(stages, float(e.split.middle))
        found[0], found[-1] = float(e.split.first), float(e.split.last)
        if found.sum() == layers:
            return found
    return np.diff(np.ceil(np.arange(stages + 1) * (layers / stages) - 1e-9))


def csv_of(found: SimulatedStep) -> ActionTable:
    """The passes of a simulated schedule alone, as PyTorch's pipelining reads them."""
    table = found.table
    passes = np.flatnonzero(table.kind <= Kind.WEIGHT_GRADIENT)
    return table.taken(passes)
