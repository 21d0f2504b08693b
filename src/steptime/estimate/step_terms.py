"""Terms of a step beyond the rows of its layers: data parallelism, pipeline, optimiser."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import NamedTuple

from steptime.cost.offload import HOST_LINK_BPS
from steptime.estimate.communication import How, collective_call, message_basis
from steptime.estimate.evaluate import Evaluation
from steptime.estimate.memory_kernels import streamed
from steptime.estimate.traffic import offloaded_arguments
from steptime.num import Num
from steptime.plan.schedules import ZERO_BUBBLE


class Line(NamedTuple):
    """One line of the ledger of a step; a tuple, because an estimate makes some hundred of them."""

    path: str
    function: str
    """Dotted name below ``steptime.cost``."""
    how: How
    """Arguments and basis; made when somebody asks."""
    exposed_s: float = 0.0
    hidden_s: float = 0.0
    part_s: float = 0.0
    """Time of a formula that another line is computed from; it is in no sum."""

    @property
    def arguments(self) -> Mapping[str, float]:
        """The numbers put in."""
        return numbers(self.how()[0])

    @property
    def basis(self) -> str:
        """What kind of number it rests on: a fitted curve or fabric with its error, or a textbook formula."""
        return self.how()[1]


def known(arguments: Mapping[str, Num], basis: str = "") -> How:
    """Arguments that are at hand."""
    return lambda: (arguments, basis)


def numbers(arguments: Mapping[str, Num]) -> dict[str, float]:
    """Arguments as Python numbers."""
    return {name: float(value) for name, value in arguments.items()}


@cache
def leaf(function: str) -> str:
    """Name of a function without its module."""
    return function.rsplit(".", 1)[1]


def step_lines(e: Evaluation) -> Iterator[Line]:
    """Lines of the traffic over the data-parallel group, of the pipeline and of the optimiser."""
    yield from _data_parallel_lines(e)
    yield from _pipeline_lines(e)
    if "activations" in e.job.offload:
        yield _copies_line(e)
    yield _optimizer_line(e)
    yield from _overhead_lines(e)


def _overhead_lines(e: Evaluation) -> Iterator[Line]:
    """What the framework adds to every step."""
    step, layout, framework = e.step, e.inputs.layout, e.job.framework
    issue = {"micro_batches": step.micro_batches, "virtual_stages": layout.virtual_stages, "stages": layout.stages,
             "stage_s": framework.stage_s}  # fmt: skip
    yield Line(path="host/stages/stage_issue_s", exposed_s=float(step.stage_host_s), function="host.stage_issue_s",
               how=known(issue))  # fmt: skip
    yield Line(path="overhead/step_overhead_s", exposed_s=float(step.overhead_s), function="host.step_overhead_s",
               how=known({"step_s": framework.step_s}))  # fmt: skip
    grown = {"work_s": step.total_s - step.overhead_s - step.growth_s, "devices": e.inputs.devices,
             "growth": framework.growth}  # fmt: skip
    yield Line(path="scaling/growth_s", exposed_s=float(step.growth_s), function="scaling.growth_s",
               how=known(grown))  # fmt: skip


def _copies_line(e: Evaluation) -> Line:
    """Waits for activations that go to the host and come back."""
    step, inputs = e.step, e.inputs
    copies = {"copy_s": inputs.copy_s, "forward_s": step.behind_forward_s, "backward_s": step.behind_backward_s,
              "hides": inputs.hides_copies, "times_per_step": step.micro_batches * step.stage.layers}  # fmt: skip
    return Line(
        path="offload/activations/exposed_copies_s", exposed_s=float(step.copies_s),
        hidden_s=max(float(step.copies_busy_s - step.copies_s), 0.0), function="offload.exposed_copies_s",
        how=known(copies, f"host link of {HOST_LINK_BPS / 1e9:g} GB/s, assumed"),
    )  # fmt: skip


def _optimizer_line(e: Evaluation) -> Line:
    seconds, fitted = float(e.step.optimizer_s), streamed(e.machine.models, e.step.optimizer_bytes)
    if "optimizer" in e.job.offload:
        host = offloaded_arguments(e.job, e.step.optimizer_bytes, e.machine)
        return Line(path="optimizer/host_adam_s", exposed_s=seconds, function="offload.host_adam_s", how=known(host))
    if fitted is None:
        traffic = {"moved_bytes": e.step.optimizer_bytes, "memory_Bps": e.machine.memory_Bps}
        return Line(path="optimizer/memory_s", exposed_s=seconds, function="roofline.memory_s", how=known(traffic))
    name = fitted.model.formula.name
    return Line(
        path=f"optimizer/{leaf(name)}", exposed_s=seconds, function=name,
        how=known({**fitted.model.fixed, **fitted.shapes[0]}, fitted.model.basis),
    )  # fmt: skip


def _data_parallel_lines(e: Evaluation) -> Iterator[Line]:
    step, plans, precision = e.step, e.plans, e.job.precision
    overlapped = 1.0 if "dp" in e.job.overlap else 0.0
    again = 1.0 if plans.zero >= 3 else 0.0
    backward = {"one_layer_s": step.one_reduction_s + again * step.one_gather_s, "layers": step.stage.layers,
                "behind_s": overlapped * step.behind_backward_s}  # fmt: skip
    forward = {"one_layer_s": step.one_gather_s, "layers": step.stage.layers,
               "behind_s": overlapped * step.behind_forward_s}  # fmt: skip
    shared = (
        ("gradients", step.gradient_s, step.gradient_busy_s, backward),
        ("weights", step.weight_gather_s, step.weight_gather_busy_s, forward),
        ("weights_again", step.backward_gather_s, step.backward_gather_busy_s, backward),
    )
    for name, exposed, busy, arguments in shared:
        yield Line(
            path=f"dp_comm/{name}/exposed_layerwise_s", exposed_s=float(exposed), hidden_s=float(busy - exposed),
            function="data_parallel.exposed_layerwise_s", how=known(arguments),
        )  # fmt: skip
    weights, axes = e.sizes.layer.weights, e.strategy.gradient_axes
    reduce = "reduce_scatter" if plans.zero >= 1 else "all_reduce"
    yield _ring_part(e, "gradients", reduce, axes, weights * e.job.gradient_bytes, step.one_reduction_s)
    yield _ring_part(e, "weights", "all_gather", axes, weights * precision.element_bytes, step.one_gather_s)
    replicated = e.sizes.layer.replicated * e.job.gradient_bytes * step.stage.layers
    call = collective_call("all_reduce", plans, e.machine, (e.strategy.replicated_axis,), replicated)
    yield Line(path=f"dp_comm/replicated_weights/{call.leaf}", exposed_s=float(step.replicated_s),
               function=call.function, how=call.how)  # fmt: skip


def _ring_part(e: Evaluation, name: str, kind: str, axes: tuple[str, ...], size: Num, seconds: Num) -> Line:
    """The collective of one layer, from which the exposed time follows."""
    call = collective_call(kind, e.plans, e.machine, axes, size)
    return Line(path=f"dp_comm/{name}/one_layer/{call.leaf}", part_s=float(seconds), function=call.function,
                how=call.how)  # fmt: skip


def _pipeline_lines(e: Evaluation) -> Iterator[Line]:
    step, plans = e.step, e.plans
    messages = 2 * step.micro_batches * plans.vpp
    basis = message_basis(e.machine, float(plans.pp), float(plans.in_pp))
    link = {"stages": plans.pp, "inside": plans.in_pp, "fast_s": step.fast_link_s, "slow_s": step.slow_link_s}
    yield Line(
        path="pp_comm/mean_stage_link_s", exposed_s=float(step.pipeline_comm_s),
        hidden_s=float(messages * step.stage_link_s - step.pipeline_comm_s), function="pipeline.mean_stage_link_s",
        how=known({**link, "times_per_step": messages}, basis),
    )  # fmt: skip
    bubble, name = {"all_stages_s": step.stage.all_stages_s, "slowest_stage_s": step.stage.slowest_s,
                    "virtual_stages": plans.vpp}, "pipeline_bubble_s"  # fmt: skip
    if e.job.schedule in ZERO_BUBBLE:
        name = "zero_bubble_s"
        bubble |= {"all_weights_s": step.stage.all_weights_s, "slowest_weights_s": step.stage.slowest_weights_s,
                   "lifted": e.inputs.lifted}  # fmt: skip
    yield Line(path=f"bubble/{name}", exposed_s=float(step.bubble_s - step.bubble_links_s),
               function=f"pipeline.{name}", how=known(bubble))  # fmt: skip
    yield Line(path="bubble/mean_stage_link_s", exposed_s=float(step.bubble_links_s),
               function="pipeline.mean_stage_link_s",
               how=known({**link, "times_per_step": 2 * (plans.pp - 1)}, basis))  # fmt: skip
