"""What the joint search answers: stages with their sub-meshes and shardings, schedule, time, memory, bounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from steptime.captured.cost import Timer
from steptime.captured.ops.placement import text_of
from steptime.estimate.result import SCHEMA_VERSION
from steptime.hardware.records import Cluster
from steptime.num import Num
from steptime.sharding.planner import ShardingPlan
from steptime.sharding.seams import Passing
from steptime.sharding.spans import Spans


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


class Part(NamedTuple):
    """A run of units on one sub-mesh."""

    option: Solved
    first: int
    end: int
    """Unit after the last."""
    start: int
    """Number of its first device among those of its kind."""

    @property
    def plan(self) -> ShardingPlan:
        """Shardings of the whole step."""
        return self.option.plan

    @property
    def units(self) -> range:
        """Numbers of its units."""
        return range(self.first, self.end)


class Seam(NamedTuple):
    """What passes from one stage to the next."""

    seconds: float
    passing: tuple[Passing, ...] = ()


def seam_of(found: tuple[Passing, ...], message_s: Callable[[Num], Num]) -> Seam:
    """All tensors in one message between two devices, or as many as the one needs that has the most pieces."""
    count = max((each.messages for each in found), default=1)
    size = sum(each.moved_bytes for each in found)
    return Seam(max(count * float(message_s(size / count)) + sum(each.around_s for each in found), 0.0), found)


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
    entering: Seam
    """What comes from the stage before; of the gradients on their way back the same seconds are taken."""

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
    stages_per_rank: int
    """More than 1: ranks have several stages each, and all stages sub-meshes of one size."""
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
    """Micro-batch, schedule, and the step time of its best stages; None: nothing fits. Schedules whose best stages are
    a single one are one entry, ``one stage``."""

    @property
    def micro_batches(self) -> int:
        """Of a step."""
        return self.global_batch // self.micro_batch

    @property
    def idle(self) -> int:
        """Devices that no stage has."""
        used = sum(each.devices for each in self.stages) // self.stages_per_rank
        return sum(each.devices for each in self.machines) - used

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
            "stages_per_rank": self.stages_per_rank,
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
        "entering_s": stage.entering.seconds,
        "entering": [_passing_json(each) for each in stage.entering.passing],
        "parameters": stage.parameters,
    }


def _passing_json(each: Passing) -> dict[str, Any]:
    ways = {name: text_of(getattr(each, name)) for name in ("made", "sent", "landed")}
    own = {"moved_bytes": each.moved_bytes, "messages": each.messages, "around_s": each.around_s}
    return {"tensor": each.name, **ways, "read": [text_of(one) for one in each.read], **own}
