"""Activity of devices during a step and the power that they draw, for one plan or column by column for a block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from steptime.cost.energy import device_power_W, memory_share
from steptime.errors import UserError
from steptime.estimate.evaluate import Evaluation, model_flops_per_step, recomputed_flops_per_step
from steptime.estimate.machine import Machine
from steptime.estimate.result import PlannedJob
from steptime.estimate.step import Step
from steptime.estimate.work import Pass
from steptime.hardware.records import Device
from steptime.num import Array, Num, minimum
from steptime.plan.job import Job

IDLE_SHARE: Final = 0.12
"""Power of an idle device over its TDP where its file does not say; assumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """Shares of a step in which parts of a device are busy (see :func:`steptime.cost.energy.device_power_W`)."""

    running: Num
    matrix: Num
    memory: Num
    links: Num

    def power_W(self, idle_W: float, peak_W: float) -> Num:
        """Average power of a device between idle and TDP."""
        return device_power_W(idle_W, peak_W, self.running, self.matrix, self.memory, self.links)


def activity(planned: PlannedJob, machine: Machine, passes: Mapping[str, Pass], step: Step, flops: Num) -> Activity:
    """Shares of a step in which parts of a device are busy.

    Args:
        planned: job and plans.
        machine: its rates.
        passes: time of each part for one micro-batch.
        step: the step composed of them.
        flops: matrix operations of the step of the whole job, recomputation included.
    """
    total_s, layer = step.total_s, passes["layer"]
    matrix = flops / (total_s * planned.job.gpus * machine.peak_flops_per_s)
    running = (step.steady_s + step.optimizer_s + step.matrix_update_s) / total_s
    links_s = layer.forward_near_s + layer.forward_far_s + layer.backward_near_s + layer.backward_far_s
    return Activity(
        running=running,
        matrix=matrix,
        memory=memory_share(running, matrix),
        links=minimum(step.micro_batches * step.counts["layer"] * links_s / total_s, 1.0),
    )


def activity_of(e: Evaluation) -> Activity:
    """Shares of a step of one plan in which parts of a device are busy."""
    again = recomputed_flops_per_step(e.job, int(e.plans.recompute), int(e.plans.recompute_every))
    return activity(e, e.machine, e.passes, e.step, model_flops_per_step(e.job) + again)


def flops_of(job: Job, recompute: Array, every: Array) -> Array:
    """Matrix operations of a step under a block of plans: the model's plus those that each plan recomputes."""
    pairs = recompute.astype("int64") * (1 << 20) + every.astype("int64")
    _, first, place = np.unique(pairs, return_index=True, return_inverse=True)
    model = model_flops_per_step(job)
    each = [model + recomputed_flops_per_step(job, int(recompute[i]), int(every[i])) for i in first]
    found: Array = np.array(each)[place]
    return found


def powers_of(device: Device) -> tuple[float, float, Mapping[str, str]]:
    """Idle power and TDP of a device (W), with a remark on each assumed number.

    Raises:
        UserError: the TDP is unknown.
    """
    if device.power_W is None:
        hint = f'write a device file with base = "{device.name}" and power = "700 W"'
        raise UserError(f"the power of {device.name} is unknown", hint=hint)
    if device.idle_W is not None:
        return device.idle_W, device.power_W, {}
    assumed = {"idle power": f"{IDLE_SHARE:.0%} of the {device.power_W:g} W of {device.name}"}
    return IDLE_SHARE * device.power_W, device.power_W, assumed
