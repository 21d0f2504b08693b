"""The result of the joint search: stages with their sub-meshes and shardings, schedule, time, memory, bounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from string import ascii_lowercase
from typing import Any, NamedTuple

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
    limit_bytes: float
    """Memory of a device for tensors; 0: the default of the software."""


class Solved(NamedTuple):
    """Shardings of a whole step on a sub-mesh: one choice of a stage."""

    kind: int
    plan: ShardingPlan
    spans: Spans
    branch: Spans
    """Costs of runs as branches (:attr:`steptime.sharding.units.Units.branches`)."""

    @property
    def devices(self) -> int:
        """Devices of the sub-mesh."""
        return self.plan.built.mesh.devices


class Part(NamedTuple):
    """A run of units on one sub-mesh: a stage, or one of its branches."""

    option: Solved
    first: int
    end: int
    """Unit after the last."""
    start: int
    """Number of its first device among those of its kind."""
    name: str

    @property
    def plan(self) -> ShardingPlan:
        """Shardings of the whole step."""
        return self.option.plan

    @property
    def units(self) -> range:
        """Numbers of its units."""
        return range(self.first, self.end)


class Way(NamedTuple):
    """The activations that pass from one stage or branch to another, which are given by name."""

    source: str
    target: str
    seconds: float
    passing: tuple[Passing, ...]


def way_of(pair: tuple[str, str], found: Sequence[Passing], message_s: Callable[[Num], Num]) -> Way:
    """All activations together, in as many messages as the one with the most pieces needs."""
    count = max(each.messages for each in found)
    size = sum(each.moved_bytes for each in found)
    seconds = count * float(message_s(size / count)) + sum(each.around_s for each in found)
    return Way(*pair, max(seconds, 0.0), tuple(found))


def seam_s(ways: Sequence[Way]) -> float:
    """Seconds of all ways between two stages; ways with a common branch at one end follow each other."""
    ends = [(end, way[end]) for way in ways for end in (0, 1)]
    return max((sum(way.seconds for way in ways if way[end] == name) for end, name in ends), default=0.0)


@dataclass(frozen=True, kw_only=True)
class PlannedStage:
    """One stage, or one of several branches of a stage that run at the same time on different devices."""

    name: str
    """Number of the stage from 1, and a letter for the branch if it has several: ``2``, ``1b``."""
    first_device: int
    """Number of its first device among those of its kind; with several stages per rank, the first of the rank."""
    units: tuple[str, ...]
    blocks: int
    machines: Machines
    plan: ShardingPlan
    """Shardings of the whole step; the stage runs its units of it."""
    recomputed: int
    """Blocks that run again in the backward pass."""
    in_flight: float
    memory_bytes: float
    passes_s: tuple[float, float, float]
    """Seconds of a micro-batch: forward pass, gradients of inputs, gradients of weights."""
    once_s: float
    """Seconds once in a step: exposed reduction of gradients, and optimiser."""
    parameters: dict[str, str]
    entering: tuple[Way, ...]
    """Activations from the stage before and from other branches; their gradients take the same seconds back."""

    @property
    def devices(self) -> int:
        """Devices of its sub-mesh."""
        return self.plan.built.mesh.devices


@dataclass(frozen=True, kw_only=True)
class JointPlan:
    """Stages with their sub-meshes and shardings, schedule, micro-batch, recomputation; time, memory, bounds."""

    model: str
    machines: tuple[Machines, ...]
    framework: str
    """Training software, whose factors, host, stragglers and overhead are in the times."""
    global_batch: int
    micro_batch: int
    """Samples of a micro-batch."""
    schedule: str
    stages_per_rank: int
    """Stages of each rank; if above 1, all stages have sub-meshes of one size."""
    stages: tuple[PlannedStage, ...]
    """In the order of the pipeline, branches of a stage one after another."""
    step_s: float
    bracket_s: tuple[float, float]
    closed_form_s: float
    """Step time by the formula of the schedule, with all stages as slow as the slowest."""
    bound_s: float
    """Lower bound for all stages, sub-meshes and shardings: computation at its fastest, evenly over all devices."""
    stages_bound_s: float
    """Lower bound of ``stages_s`` for all stages of the solved shardings."""
    stages_s: float
    """Sum of all stages plus the slowest, of the stages that were found."""
    stop: str
    solved: int
    """Number of sharding problems that were solved."""
    tried: tuple[tuple[int, str, float | None], ...]
    """Micro-batch, schedule, and the step time of its best stages; None: nothing fits. Schedules whose best stages are
    a single one are one entry, ``one stage``."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step."""
        return self.global_batch // self.micro_batch

    @property
    def count(self) -> int:
        """Stages of the pipeline; branches of one count once."""
        return int(self.stages[-1].name.rstrip(ascii_lowercase))

    @property
    def idle(self) -> int:
        """Number of devices that no stage uses."""
        used = sum(each.devices for each in self.stages) // self.stages_per_rank
        return sum(each.devices for each in self.machines) - used

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``."""
        return {
            "schema_version": SCHEMA_VERSION,
            "model": self.model,
            "machines": [{"cluster": each.cluster.name, "devices": each.devices} for each in self.machines],
            "framework": self.framework,
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
        "stage": stage.name,
        "units": list(stage.units),
        "blocks": stage.blocks,
        "cluster": stage.machines.cluster.name,
        "devices": stage.devices,
        "first_device": stage.first_device,
        "mesh": dict(zip(mesh.names, mesh.sizes, strict=True)),
        "recomputed_blocks": stage.recomputed,
        "micro_batches_in_flight": stage.in_flight,
        "memory_bytes": stage.memory_bytes,
        "memory_limit_bytes": stage.machines.limit_bytes,
        "micro_batch_s": dict(zip(names, stage.passes_s, strict=True)),
        "once_s": stage.once_s,
        "entering": [
            {"from": way.source, "seconds": way.seconds, "activations": [_passing_json(each) for each in way.passing]}
            for way in stage.entering
        ],
        "parameters": stage.parameters,
    }


def _passing_json(each: Passing) -> dict[str, Any]:
    ways = {name: text_of(getattr(each, name)) for name in ("made", "sent", "landed")}
    own = {"moved_bytes": each.moved_bytes, "messages": each.messages, "around_s": each.around_s}
    return {"tensor": each.name, **ways, "read": [text_of(one) for one in each.read], **own}
