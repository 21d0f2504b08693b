"""Composes the time of a step from the time of a layer: pipeline, data parallelism, optimiser."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from steptime.cost.data_parallel import exposed_layerwise_s, partly_hidden_s
from steptime.cost.host import stage_issue_s, step_overhead_s
from steptime.cost.offload import exposed_copies_s, lasting_s
from steptime.cost.pipeline import lifted_passes, mean_stage_link_s, pipeline_bubble_s, zero_bubble_s
from steptime.cost.scaling import growth_s
from steptime.estimate.communication import boundary_times_s
from steptime.estimate.machine import Machine
from steptime.estimate.planned import PlannedJob
from steptime.estimate.stages import CriticalStage, Layout, Passes, critical_stage, exposed_pass
from steptime.estimate.traffic import (
    Traffic,
    host_optimizer_time_s,
    optimizer_time_s,
    owned_parameters,
    replicated_s,
    traffic_of,
)
from steptime.num import Num, where
from steptime.plan.framework import Framework
from steptime.plan.schedules import SCHEDULES


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """What a step is composed of beside the passes through its parts; before the framework has its say."""

    layout: Layout
    devices: Num
    micro_batches: Num
    lifted: Num
    """Passes for gradients of weights that the schedule takes out of the bubble."""
    hides_data: Num
    """1 where data-parallel traffic may hide behind computation; likewise messages between stages."""
    hides_stages: Num
    hides_copies: Num
    """Likewise copies of activations to the host and back."""
    copy_s: Num
    """Copy of a layer's activations in one direction, for one micro-batch."""
    fast_link_s: Num
    """One message to a stage in the same fast domain; below to one in another; their mean over the pipeline."""
    slow_link_s: Num
    stage_link_s: Num
    traffic: Traffic
    replicated_s: Num
    """Reduction of gradients of weights that tensor-parallel ranks replicate."""
    owned: Num
    """Parameters that a rank of the stage with most of them updates."""
    optimizer_s: Num
    """Its time on the device; 0 where the host does it."""
    host_optimizer_s: Num


class LayerwiseTraffic(NamedTuple):
    """Traffic of one layer at a time, which runs behind the computation of the next layer."""

    one_layer_s: Num
    layers: Num
    behind_s: Num
    exposed_share: Num
    """Share of what could hide that does not."""
    times: Num
    """Times per step."""

    @property
    def exposed_s(self) -> Num:
        """Part of a step that it takes."""
        least_s = exposed_layerwise_s(self.one_layer_s, self.layers, self.behind_s)
        return partly_hidden_s(least_s, self.one_layer_s * self.layers, self.exposed_share) * self.times


class DataParallel(NamedTuple):
    """Traffic over the data-parallel group, embedding and head included."""

    backward: LayerwiseTraffic
    """Traffic of layers beside the backward pass: gradients, and weights that are gathered again; below forward."""
    forward: LayerwiseTraffic
    reduction_share: Num
    """Part of the former that reduces gradients; below that gathers weights."""
    gather_share: Num
    one_reduction_s: Num
    """Reduction of the gradients of one layer; likewise the gathering of its weights."""
    one_gather_s: Num
    gradient_s: Num
    """Reduction of gradients."""
    gradient_busy_s: Num
    backward_gather_s: Num
    """Weights gathered again for the backward pass (ZeRO-3)."""
    backward_gather_busy_s: Num
    weight_gather_s: Num
    weight_gather_busy_s: Num

    @property
    def exposed_s(self) -> Num:
        """All that it adds to a step."""
        return self.gradient_s + self.backward_gather_s + self.weight_gather_s

    @property
    def busy_s(self) -> Num:
        """Time on the links."""
        return self.gradient_busy_s + self.backward_gather_busy_s + self.weight_gather_busy_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Terms of one optimiser step on the critical stage; exposed unless the name says otherwise."""

    stage: CriticalStage
    micro_batches: Num
    repeats: Num
    """Forward passes per micro-batch: 2 with full recomputation."""
    steady_s: Num
    """All micro-batches through the critical stage."""
    stage_link_s: Num
    """One message to the next stage, on average."""
    pipeline_comm_s: Num
    idle_s: Num
    """Filling and draining of the pipeline, but for the messages between stages."""
    bubble_links_s: Num
    """Those."""
    stage_host_s: Num
    """Time that the host loses per micro-batch."""
    data: DataParallel
    replicated_s: Num
    """Gradients of weights that tensor-parallel ranks replicate."""
    optimizer_s: Num
    owned: Num
    """Parameters that a rank of the stage with most of them updates."""
    copies_s: Num
    """Waits for activations on their way to the host and back, filling and draining of the pipeline included."""
    copies_busy_s: Num
    overhead_s: Num
    """Fixed time of a step that no work explains."""
    devices: Num
    growth: Num
    """Relative growth of its work per doubling of the devices."""
    behind_forward_s: Num
    """Forward time of one layer, behind which a gathering can hide; likewise backward."""
    behind_backward_s: Num

    @property
    def bubble_s(self) -> Num:
        """Filling and draining of the pipeline."""
        return self.idle_s + self.bubble_links_s

    @property
    def work_s(self) -> Num:
        """Everything that grows with the work."""
        return (
            self.steady_s + self.pipeline_comm_s + self.bubble_s + self.data.exposed_s + self.replicated_s
            + self.optimizer_s + self.stage_host_s + self.copies_s
        )  # fmt: skip

    @property
    def growth_s(self) -> Num:
        """Stragglers and shared links of many devices."""
        return self._growth_s(self.work_s)

    @property
    def total_s(self) -> Num:
        """Time of the step."""
        work_s = self.work_s
        return work_s + self.overhead_s + self._growth_s(work_s)

    def _growth_s(self, work_s: Num) -> Num:
        if isinstance(self.growth, float) and not self.growth:
            return 0.0
        return growth_s(work_s, self.devices, self.growth)


def inputs_of(planned: PlannedJob, machine: Machine, layout: Layout, copy_s: Num) -> StepInputs:
    """What the machine's links and memory determine of a step; ``copy_s`` as in :func:`critical_stage`."""
    job, plans, micro_batches = planned.job, planned.plans, planned.micro_batches
    fast_s, slow_s = boundary_times_s(job, machine, plans, planned.sizes.boundary_bytes)
    slow_s = slow_s * planned.method.slow_link_share(plans)
    owned = owned_parameters(planned)
    return StepInputs(
        layout=layout, devices=job.gpus, micro_batches=micro_batches,
        lifted=lifted_passes(SCHEDULES[job.schedule].fills, plans.pp, micro_batches),
        hides_data=float("dp" in job.overlap), hides_stages=float("pp" in job.overlap),
        hides_copies=float("offload" in job.overlap), copy_s=copy_s,
        fast_link_s=fast_s, slow_link_s=slow_s, stage_link_s=mean_stage_link_s(plans.pp, plans.in_pp, fast_s, slow_s),
        traffic=traffic_of(planned, machine), replicated_s=replicated_s(planned, machine),
        owned=owned, optimizer_s=optimizer_time_s(job, owned, machine),
        host_optimizer_s=host_optimizer_time_s(job, owned, machine),
    )  # fmt: skip


def compose(inputs: StepInputs, passes: Passes, framework: Framework) -> Step:
    """One optimiser step from the times of its parts."""
    layout = inputs.layout
    stage = critical_stage(layout, passes, inputs.copy_s, inputs.hides_copies)
    stages, chunks, links = layout.stages, layout.virtual_stages, framework.stage_links
    link_s = inputs.stage_link_s * links
    layer = exposed_pass(layout, passes.layer)
    backward_s = layer.backward_s + layout.recomputed * layer.forward_s
    return Step(
        stage=stage,
        micro_batches=inputs.micro_batches,
        repeats=1.0 + layout.recomputed,
        steady_s=inputs.micro_batches * stage.slowest_s,
        stage_link_s=link_s,
        pipeline_comm_s=(1.0 - inputs.hides_stages) * 2 * inputs.micro_batches * link_s * chunks,
        idle_s=zero_bubble_s(**bubble_arguments(inputs, stage)),
        bubble_links_s=(stages - 1) * 2 * link_s,
        stage_host_s=stage_issue_s(inputs.micro_batches, chunks, stages, framework.stage_s),
        replicated_s=inputs.replicated_s,
        owned=inputs.owned,
        optimizer_s=inputs.optimizer_s * framework.optimizer + inputs.host_optimizer_s,
        overhead_s=step_overhead_s(framework.step_s),
        copies_s=copies_s(inputs, stage, layer.forward_s, backward_s),
        copies_busy_s=2 * inputs.copy_s * inputs.micro_batches * stage.layers,
        devices=inputs.devices,
        growth=framework.growth,
        behind_forward_s=layer.forward_s,
        behind_backward_s=backward_s,
        data=_data_parallel(inputs, framework, *(
            lasting_s(each_s, inputs.copy_s, inputs.hides_copies) for each_s in (layer.forward_s, backward_s))),
    )  # fmt: skip


def bubble_arguments(inputs: StepInputs, stage: CriticalStage) -> dict[str, Num]:
    """Arguments of :func:`steptime.cost.pipeline.zero_bubble_s`."""
    return {
        "all_stages_s": stage.all_stages_s, "slowest_stage_s": stage.slowest_s, "all_weights_s": stage.all_weights_s,
        "slowest_weights_s": stage.slowest_weights_s, "lifted": inputs.lifted,
        "virtual_stages": inputs.layout.virtual_stages,
    }  # fmt: skip


def copies_s(inputs: StepInputs, stage: CriticalStage, forward_s: Num, backward_s: Num) -> Num:
    """Waits for copied activations: of all micro-batches on the critical stage, and of one on the others."""
    one_s = exposed_copies_s(**copy_arguments(inputs, forward_s, backward_s))
    return inputs.micro_batches * stage.layers * one_s + pipeline_bubble_s(**copy_bubble(inputs, stage, one_s))


def copy_arguments(inputs: StepInputs, forward_s: Num, backward_s: Num) -> dict[str, Num]:
    """Arguments of :func:`steptime.cost.offload.exposed_copies_s`."""
    return {"copy_s": inputs.copy_s, "forward_s": forward_s, "backward_s": backward_s, "hides": inputs.hides_copies}


def copy_bubble(inputs: StepInputs, stage: CriticalStage, one_s: Num) -> dict[str, Num]:
    """Arguments of :func:`steptime.cost.pipeline.pipeline_bubble_s` where a layer waits so long for its copies."""
    layout = inputs.layout
    return {
        "all_stages_s": one_s * layout.whole, "slowest_stage_s": one_s * stage.layers,
        "virtual_stages": layout.virtual_stages,
    }  # fmt: skip


def _data_parallel(inputs: StepInputs, framework: Framework, forward_s: Num, backward_s: Num) -> DataParallel:
    """Traffic over the data-parallel group, exposed and busy; ``forward_s``, ``backward_s``: as long as passes last."""
    traffic, links, layers = inputs.traffic, framework.data_links, inputs.layout.first
    reduce_s, gather_s, again_s = traffic.reduce_s * links, traffic.gather_s * links, traffic.gather_again_s * links
    ends_s, gather_ends_s = traffic.reduce_ends_s * links, traffic.gather_ends_s * links
    both_s = reduce_s + again_s
    exposed = 1.0 - inputs.hides_data * (1.0 - framework.data_exposed)
    backward = LayerwiseTraffic(both_s, layers, backward_s, exposed, traffic.reductions)
    forward = LayerwiseTraffic(gather_s, layers, forward_s, exposed, traffic.gathers)
    exposed_s, share = backward.exposed_s, reduce_s / (both_s + (both_s == 0))
    again = (1.0 - share) * where(traffic.gather_again_s > 0, 1.0, 0.0)
    return DataParallel(
        backward=backward, forward=forward, reduction_share=share, gather_share=again,
        one_reduction_s=reduce_s, one_gather_s=gather_s,
        gradient_s=exposed_s * share + ends_s * traffic.reductions,
        gradient_busy_s=(reduce_s * layers + ends_s) * traffic.reductions,
        backward_gather_s=exposed_s * again, backward_gather_busy_s=again_s * layers * traffic.gathers,
        weight_gather_s=forward.exposed_s + gather_ends_s * traffic.gathers,
        weight_gather_busy_s=(gather_s * layers + gather_ends_s) * traffic.gathers,
    )  # fmt: skip
