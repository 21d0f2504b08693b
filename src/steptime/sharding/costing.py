"""The job of a captured step on some devices; its estimate is the cost of a choice of shardings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np

from steptime.api.jobs import CAPTURED_DEFAULT, Request
from steptime.api.models import CAPTURED_DTYPES
from steptime.captured.cost import Timer, work_of
from steptime.captured.graph import Program
from steptime.captured.workload import element_of
from steptime.cost.data_parallel import BUCKET_PARAMETERS, BUCKET_PARAMETERS_PER_RANK
from steptime.cost.host import growth_s, issued_s, step_overhead_s
from steptime.estimate.evaluate import evaluate
from steptime.estimate.memory import state_bytes
from steptime.estimate.memory_definitions import allocated_within
from steptime.estimate.result import Estimate
from steptime.estimate.single import Setting, estimate_plan
from steptime.estimate.traffic import update_s
from steptime.hardware.records import Cluster
from steptime.model.spec import ELEMENT_BYTES
from steptime.num import Array
from steptime.plan.captured import SHARDED, captured_of
from steptime.plan.framework import Framework
from steptime.plan.job import Job
from steptime.plan.optimizers import Optimizer
from steptime.plan.plans import Plans
from steptime.search.modes import MODES
from steptime.sharding.build import Built, built
from steptime.sharding.flow import Flow
from steptime.sharding.mesh import Mesh
from steptime.sharding.placed import whole_step, workload_of
from steptime.sharding.planner import ShardingPlan

FACTORS: Final = ("matrix", "attention", "vector", "optimizer", "data_links", "tensor_links")
"""Parameters of a framework that are factors on kernels and on the links of shardings."""


@dataclass(frozen=True)
class Asked:
    """A choice of shardings as a plan of the estimate."""

    plan: ShardingPlan
    setting: Setting
    plans: Plans

    @cached_property
    def step_s(self) -> float:
        """Seconds of a step with this choice."""
        return float(evaluate(SHARDED, ONE, self.setting.job, self.setting.machine, self.plans).step_time_s)

    @property
    def estimate(self) -> Estimate:
        """The estimate of this choice, with explained terms."""
        return estimate_plan(self.setting, ONE, self.plans, explain=True)


ONE: Final = SHARDED.strategy("1d")


@dataclass(frozen=True, kw_only=True)
class Costing:
    """The job of a captured step, independent of its shardings."""

    setting: Setting
    """Setting with the workload of :func:`whole_step`, which :meth:`of` replaces by that of :func:`workload_of`."""
    program: Program
    """The step, with weights, gradients and states in the sizes of the job."""

    @property
    def framework(self) -> Framework:
        """The training software."""
        return self.setting.job.framework

    @cached_property
    def timer(self) -> Timer:
        """Time models of operators, with the factors of the framework."""
        factors = {kind: float(getattr(self.framework, kind)) for kind in FACTORS}
        first_s = float(self.framework.host_s)
        return Timer(device=self.setting.cluster.device, factors=factors, given_host_s=first_s, host_more_s=0.0)

    @property
    def overlaps(self) -> float:
        """Share of the traffic of parameters that computation may overlap."""
        return 1.0 - float(self.framework.data_exposed) if "dp" in self.setting.job.overlap else 0.0

    @cached_property
    def room_bytes(self) -> float:
        """Largest peak of live tensors, in bytes, of a plan that is likely to fit (:data:`LIKELY_FITS`)."""
        return allocated_within(
            self.setting.machine.memory_bytes, self.setting.job.memory.name, is_host=self.setting.machine.is_host
        )

    def built(self, flow: Flow, mesh: Mesh, limit_bytes: float, *, plain_norms: bool = True) -> Built:
        """The problem of the job's shardings on a mesh."""
        # The largest buckets of any group of the mesh, so that the traffic takes no less.
        bucket_bytes = (
            max(BUCKET_PARAMETERS, BUCKET_PARAMETERS_PER_RANK * mesh.devices) * self.setting.job.gradient_bytes
        )
        return built(
            flow,
            mesh,
            self.timer,
            limit_bytes,
            plain_norms=plain_norms,
            update_s=self.update_s,
            bucket_bytes=bucket_bytes,
        )

    def update_s(self, elements: float) -> float:
        """Seconds of the optimiser for the elements that a device updates."""
        job = self.setting.job
        return float(update_s(job, elements, self.setting.machine) * job.framework.optimizer)

    def least_s(self, device_s: float) -> float:
        """Lower bound in seconds of a step whose devices compute and communicate for ``device_s``; rises with it.

        The wait for the host is that of the whole step at once, which is no longer than the waits of its passes.
        """
        if not device_s:
            return 0.0
        issued = float(issued_s(device_s, 1.0, self.host_s, self.framework.issue_sharpness))
        return self.with_ranks_s(issued, self.setting.job.gpus)

    def with_ranks_s(self, work_s: float, devices: int) -> float:
        """Seconds of a step from the seconds of one device, with stragglers and overheads of the ranks."""
        tensors = len({each.name.rpartition(".")[0] for each in self.program.parameters if each.trained})
        ranks_s = float(step_overhead_s(self.framework.step_s, devices, tensors))
        return work_s + float(growth_s(work_s, devices, self.framework.growth)) + ranks_s

    def paced_s(self, device_s: Array, operators: Array) -> Array:
        """Seconds of devices with waits for the host, which issues the given number of operators meanwhile."""
        paced = issued_s(device_s, operators, float(self.framework.host_s), self.framework.issue_sharpness)
        later: Array = np.maximum(np.asarray(paced), device_s)
        return later

    @cached_property
    def host_s(self) -> float:
        """Seconds of the host to issue the operators of both passes, independent of shardings."""
        calls = [call for call in self.program.calls if not call.view and call.phase != "optimizer"]
        return sum(self.timer.cost(call.node, inplace=call.inplace).host_s for call in calls)

    def of(self, plan: ShardingPlan) -> Asked:
        """A choice of shardings as a plan: the outer axes of the mesh are ``dp``, the innermost ``tp``."""
        mesh, workload = plan.built.mesh, workload_of(plan, captured_of(self.setting.job))
        job = replace(self.setting.job, captured=workload)
        if not plan.overlaps:
            job = replace(job, overlap=job.overlap - {"dp"})
        last = len(mesh.sizes) - 1
        columns: dict[str, Any] = {"zero": 0, "sp": 0}
        for axis, axes in {"dp": tuple(range(last)) or (0,), **({"tp": (last,)} if last else {})}.items():
            found = mesh.group(axes)
            columns |= {axis: found.ranks, f"in_{axis}": found.inside}
        columns["micro_batch"] = -(-job.global_batch // columns["dp"])
        return Asked(plan, replace(self.setting, method=SHARDED, job=job), Plans(**columns))

    def best_of(self, found: ShardingPlan, further: Iterable[ShardingPlan] = ()) -> Asked:
        """The choice with the shortest step among all that searches found.

        A search compares the whole traffic of parameters with the whole computation; the estimate of a step knows
        which parts overlap.

        Args:
            found: the search whose bound counts.
            further: other searches on the same mesh.
        """
        met = [*(tuple(each.choice.tolist()) for each in (found, *further)), *(one.choice for one in found.solutions)]
        plans = [replace(found, choice=np.asarray(choice)) for choice in dict.fromkeys(met) if choice is not None]
        first, *others = plans
        within = [first, *(each for each in others if float(each.memory_bytes.max()) <= found.built.limit_bytes)]
        return min(map(self.of, within), key=lambda one: one.step_s)


def costing_of(
    program: Program,
    machines: Cluster,
    gpus: int,
    *,
    optimizer: str | None = CAPTURED_DEFAULT,
    framework: str | None = None,
    overlaps: bool = True,
) -> Costing:
    """The job of a captured step on some devices.

    The optimiser has the states that were recorded, in fp32; batch and tokens are those of the first input.

    Args:
        program: the unsharded step.
        machines: the cluster.
        gpus: devices of the job.
        optimizer: its name.
        framework: training software; None: ``generic``, as for ``plan``.
        overlaps: computation overlaps traffic of parameters, as far as the framework does that.

    Raises:
        UserError: the framework is unknown, or the cluster has fewer devices.
    """
    computed, (samples, tokens) = computed_in(program), samples_of(program)
    recipe = next((name for name, element in CAPTURED_DTYPES.items() if element == computed), "fp32")
    request = Request(
        model=whole_step(program, tokens, CAPTURED_DTYPES[recipe]),
        cluster=machines,
        seq=None,
        dtype=recipe,
        optimizer="adamw",
        mode=MODES["corrected"],
        framework=framework,
        lora=None,
    )
    setting = request.setting(gpus, samples, {} if overlaps else {"overlap": frozenset()})
    own = Optimizer(name=optimizer or "none", state_bytes=4.0 * state_elements(program))
    job = replace(setting.job, optimizer=own)
    return Costing(setting=replace(setting, job=job), program=as_held(program, job))


def as_held(program: Program, job: Job) -> Program:
    """The step with trained weights, gradients and states in the sizes of a job's software."""
    each, of_states = state_bytes(job), state_elements(program)
    trained = {one.storage: float(ELEMENT_BYTES[one.dtype]) for one in program.parameters if one.trained}
    recorded = sum(program.storages[n].size_bytes for n in trained) or 1.0
    element_bytes = recorded / (sum(program.storages[n].size_bytes / size for n, size in trained.items()) or 1.0)
    factors = {
        "gradient": each["gradients"] / element_bytes,
        "state": each["optimizer"] / (of_states * element_bytes) if of_states else 1.0,
    }
    weights = {n: each["weights"] / size for n, size in trained.items()}
    storages = list(program.storages)
    for number, storage in enumerate(storages):
        factor = weights.get(number, factors.get(storage.category, 1.0))
        if factor != 1.0:
            storages[number] = replace(storage, size_bytes=round(storage.size_bytes * factor))
    return replace(program, storages=tuple(storages))


def computed_in(program: Program) -> str:
    """Element type of most matrix FLOPs of a step; without any, of most parameters."""
    sums: Counter[str] = Counter()
    for call in program.calls:
        if not call.view and (work := work_of(call.node)).matrix_flops:
            sums[work.dtype] += int(work.matrix_flops)
    return sums.most_common(1)[0][0] if sums else element_of(program)


def samples_of(program: Program) -> tuple[int, int]:
    """Samples of a step's first input, and tokens of each sample if it has integers in two dims, else 1."""
    for call in program.calls:
        for value in call.node.inputs:
            if value.node.op == "input" and value.type.shape:
                shape, whole = value.type.shape, value.type.dtype.startswith("int")
                return shape[0], shape[1] if whole and len(shape) == 2 else 1
    return 1, 1


def state_elements(program: Program) -> float:
    """Elements of the optimiser's states for each element of the parameters that it updates."""
    trained = {parameter.storage for parameter in program.parameters if parameter.trained}
    whole = sum(program.storages[storage].size_bytes for storage in trained)
    states = sum(storage.size_bytes for storage in program.storages if storage.category == "state")
    return round(states / whole, 2) if whole else 0.0
