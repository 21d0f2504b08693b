"""One step of a pipeline simulated action by action, with the times and the memory of an estimate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from steptime.api.calls import AskedPlan, asked_plan
from steptime.api.request import NameOrPath, number, text, whole
from steptime.errors import PlanError, UserError
from steptime.estimate.evaluate import Evaluation, evaluate
from steptime.estimate.memory import kept_of_layer, stage_memory
from steptime.estimate.result import SCHEMA_VERSION
from steptime.estimate.step import exposed_pass
from steptime.num import Array
from steptime.schedule import SCHEDULES, ActionTable, Kind, Pipeline, Times
from steptime.schedule.graph import Transport, graph_of
from steptime.schedule.idle import Spent, spent
from steptime.schedule.legality import check
from steptime.schedule.memory import Footprint, MemoryReplay, memory_replay
from steptime.schedule.pytorch_csv import read_csv
from steptime.schedule.simulate import Durations, Jitter, Simulation, sampled_step_s, two_streams
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
    notes: tuple[str, ...]

    @property
    def step_s(self) -> float:
        """Time of the step."""
        return self.pipeline_s + sum(self.once_s.values())

    @property
    def bubble_fraction(self) -> float:
        """Share of the pipeline's time in which a rank does no pass, mean over ranks."""
        return float(1 - np.mean(self.spent.passes_s + self.spent.update_s) / self.pipeline_s)

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``."""
        path = self.simulation.critical_path()
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
            "critical_path_s": {
                "passes": float(path.seconds[~path.message].sum()),
                "messages": float(path.seconds[path.message].sum()),
            },
            "peak_memory_bytes": self.memory.peak_bytes.tolist(),
            "memory_capacity_bytes": self.capacity_bytes,
            "samples_s": self.samples_s.tolist(),
            "notes": list(self.notes),
        }


def simulate(
    model: NameOrPath,
    cluster: NameOrPath,
    *,
    schedule: str = WHOLE,
    jitter: float = 0.0,
    samples: int = 0,
    seed: int = 0,
    plan: Mapping[str, Any] | None = None,
    **job: Any,
) -> SimulatedStep:
    """Simulates one step of a pipeline: any schedule of :data:`steptime.schedule.SCHEDULES`, or one from a file.

    Durations of passes and messages, the layers of stages and what they hold are those of the estimate. What a step has
    once (traffic of data parallelism, optimiser, overheads) is added to the pipeline's time as the estimate has it.

    Args:
        schedule: a name, or a CSV file of PyTorch's pipelining.
        jitter: standard deviation of the factor on each pass (mean 1), for samples.
        samples: number of samples with jitter.
        seed: of the samples.
        plan: as for an estimate; ``vpp`` is the number of virtual stages of a rank.
        job: the other arguments of :func:`steptime.api.estimate`.

    Raises:
        UserError: something in the input is wrong; the message says what to change.
    """
    name, jitter = text("schedule", schedule), number("jitter", jitter, 0.0, 2.0, "standard deviation of a factor")
    samples = whole("samples", samples, 0, MAX_SAMPLES)
    given = dict(plan or {})
    chunks = given.pop("vpp", None)
    given.pop("schedule", None)
    read = read_csv(Path(name)) if name.lower().endswith(".csv") else None
    asked, e = _evaluated(model, cluster, given, job, WHOLE)
    table = _table(name, e, chunks, read)
    if np.any(table.kind == Kind.WEIGHT_GRADIENT):
        asked, e = _evaluated(model, cluster, given, job, SPLIT)
        table = _table(name, e, chunks, read)
    layers = _layers(e, table)
    own = _of_schedule(model, cluster, name, given | ({} if chunks is None else {"vpp": chunks}), job)
    durations, transport = _durations(e, table, layers), Transport(overlap=bool(e.inputs.hides_stages))
    graph = graph_of(table, transport)
    played = play(graph, durations)
    pipeline_s = float(played.rank_span_s.max())
    if read is None and not SCHEDULES[name].synchronous:
        twice = play(_table(name, e, chunks, None, steps=2), durations, transport)
        pipeline_s = float(twice.rank_span_s.max()) - pipeline_s
    return SimulatedStep(
        model=asked.setting.job.model.name,
        cluster=asked.setting.cluster.name,
        schedule=name,
        table=table,
        simulation=played,
        memory=memory_replay(played, replace(_footprint(e, table, layers), stashes=_stashes(name, e, chunks))),
        spent=spent(played),
        stage_layers=layers,
        pipeline_s=pipeline_s,
        once_s=_once(own or e, pipeline_s),
        closed_form_s=None if own is None else float(own.step_time_s),
        samples_s=sampled_step_s(graph, durations, Jitter(action=jitter), samples, seed),
        capacity_bytes=float(e.machine.memory_bytes),
        message_bytes=float(e.sizes.boundary_bytes),
        notes=asked.notes,
    )


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


def _of_schedule(
    model: NameOrPath, cluster: NameOrPath, name: str, plan: Mapping[str, Any], job: Mapping[str, Any]
) -> Evaluation | None:
    """The estimate with the closed forms of the schedule; None where there are none for the plan."""
    if name not in SCHEDULES:
        return None
    try:
        return _evaluated(model, cluster, plan, job, name)[1]
    except UserError:
        return None


def _table(name: str, e: Evaluation, chunks: int | None, read: ActionTable | None, steps: int = 1) -> ActionTable:
    """The schedule as a table; where it has no sends and receives, a pass sends its result when it ends.

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
        return read
    schedule, pipeline = SCHEDULES[name], _pipeline(name, e, chunks, steps)
    schedule.check(pipeline)
    return schedule.order(pipeline)


def _stashes(name: str, e: Evaluation, chunks: int | None) -> bool:
    """Whether ranks keep the weights that a forward pass read; a schedule from a file changes none within a step."""
    if name not in SCHEDULES:
        return True
    return bool(SCHEDULES[name].weight_versions(_pipeline(name, e, chunks), 0) != 1)


def _pipeline(name: str, e: Evaluation, chunks: int | None, steps: int = 1) -> Pipeline:
    """What the schedule is made for."""
    schedule = SCHEDULES[name]
    return Pipeline(
        ranks=int(e.plans.pp),
        chunks=schedule.usual_chunks if chunks is None else chunks,
        micro_batches=int(e.micro_batches) * steps,
        slices=schedule.usual_slices,
        times=_mean_times(e),
    )


def _mean_times(e: Evaluation) -> Times:
    """Times of a stage of mean length, for orders that follow from times."""
    layer, ends, stages = exposed_pass(e.passes.layer, e.step.exchanges), (e.passes.first, e.passes.last), e.plans.pp
    whole, again = float(e.inputs.layout.whole), e.inputs.layout.recomputed
    forward_s = whole * layer.forward_s + sum(end.forward_s for end in ends)
    backward_s = whole * layer.backward_with_s(again) + sum(end.backward_s for end in ends)
    weights_s = whole * layer.weights_s + sum(end.weights_s for end in ends)
    if not weights_s:
        weights_s = backward_s / 2
    return Times(
        forward_s=float(forward_s / stages),
        input_gradient_s=float((backward_s - weights_s) / stages),
        weight_gradient_s=float(weights_s / stages),
        message_s=float(e.step.stage_link_s),
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


def _durations(e: Evaluation, table: ActionTable, layers: Array) -> Durations:
    """Seconds of passes by stage, and of messages by the ranks that they are between."""
    layer, again = exposed_pass(e.passes.layer, e.step.exchanges), e.inputs.layout.recomputed

    def of_stages(of_layer: Any, of_first: Any, of_last: Any) -> Array:
        seconds = layers * float(of_layer)
        seconds[0] += float(of_first)
        seconds[-1] += float(of_last)
        return seconds

    first, last = e.passes.first, e.passes.last
    backward_s = of_stages(layer.backward_with_s(again), first.backward_s, last.backward_s)
    weights_s = of_stages(layer.weights_s, first.weights_s, last.weights_s)
    inside, links = max(int(e.plans.in_pp), 1), e.job.framework.stage_links
    near_s, far_s = float(e.inputs.fast_link_s * links), float(e.inputs.slow_link_s * links)
    return Durations(
        forward_s=of_stages(layer.forward_s, first.forward_s, last.forward_s) / table.slices,
        input_gradient_s=(backward_s - weights_s) / table.slices,
        weight_gradient_s=weights_s / table.slices,
        message_s=lambda sender, receiver: (
            np.where(sender // inside == receiver // inside, near_s, far_s) / table.slices
        ),
        together=two_streams,
    )


def _footprint(e: Evaluation, table: ActionTable, layers: Array) -> Footprint:
    """Bytes that stages hold; those of a rank's states and temporaries are divided over its stages.

    ZeRO shards states of the optimiser over all copies of the model that the ranks hold together.
    """
    stages, sizes = table.stages, e.sizes
    each = float(kept_of_layer(sizes.layer.kept_bytes, sizes.boundary_bytes, e.plans))
    kept = layers * each
    kept[0] += float(sizes.first.kept_bytes)
    kept[-1] += float(sizes.last.kept_bytes)
    ranks = table.ranks
    sharing = len(np.unique(table.rank * stages + table.stage)) / stages if e.plans.shares("optimizer") else 1.0
    held, weights = np.zeros(stages), np.zeros(stages)
    for stage in range(stages):
        name = "first" if stage == 0 else "last" if stage == stages - 1 else "middle"
        found = stage_memory(e, name if ranks > 2 or name != "middle" else "first")
        own = {path: float(call.value) for path, call in found.held.items()}
        own = {path: value / (sharing if "optimizer" in path.split("/")[0] else 1) for path, value in own.items()}
        working = {path: float(call.value) for path, call in found.calls().items() if path.startswith("working/")}
        weights[stage] = sum(value for path, value in own.items() if path.split("/")[0].endswith("weights"))
        held[stage] = sum(own.values()) - weights[stage] + sum(working.values())
    share = ranks / stages
    return Footprint(
        activation_bytes=kept, deferred_bytes=kept, weights_bytes=weights * share, fixed_bytes=held * share
    )


def _once(e: Evaluation, pipeline_s: float) -> dict[str, float]:
    """What a step has once, in seconds, by name; the growth is that of the whole step's work."""
    step = e.step
    found = {
        "data_parallel": float(step.data.exposed_s + step.replicated_s),
        "optimizer": float(step.optimizer_s),
        "host": float(step.stage_host_s),
        "copies": float(step.copies_s),
    }
    work_s = pipeline_s + sum(found.values())
    grown = float(step.growth_s) / float(step.work_s) * work_s
    return {
        name: value for name, value in {**found, "overhead": float(step.overhead_s), "growth": grown}.items() if value
    }


def csv_of(found: SimulatedStep) -> ActionTable:
    """The passes of a simulated schedule alone, as PyTorch's pipelining reads them."""
    table = found.table
    passes = np.flatnonzero(table.kind <= Kind.WEIGHT_GRADIENT)
    return table.taken(passes)
