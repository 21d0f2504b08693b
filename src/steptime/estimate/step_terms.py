"""Terms of a step beyond the rows of its layers: data parallelism, pipeline, optimiser."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import NamedTuple

from steptime.cost.collective_fabric import Fabric
from steptime.cost.pipeline import waited_messages
from steptime.estimate.communication import Given, TransferCall, collective_over_call, message_basis
from steptime.estimate.evaluate import Evaluation
from steptime.estimate.hiding import LayerwiseTraffic
from steptime.estimate.kernels import Timed
from steptime.estimate.memory_kernels import streamed
from steptime.estimate.result import Argument, FormulaCall
from steptime.estimate.stages import exposed_pass, mirrored_bubble
from steptime.estimate.step import bubble_arguments, copy_arguments, lasting_bubble, layer_copies
from steptime.estimate.traffic import (
    Sent,
    layer_copy_arguments,
    offloaded_arguments,
    optimizer_bytes,
    replicated_of,
    shared_of,
)
from steptime.num import Num
from steptime.plan.framework import IDEAL

Made = tuple[list[FormulaCall], str]
"""Calls of formulas that add up to a line, and the text that says what they rest on."""
Recipe = Callable[[], Made]
"""Makes them."""
STAGE_LINK = "pipeline.mean_stage_link_s"


class Line(NamedTuple):
    """One line of the ledger of a step; a tuple, because an estimate makes some hundred of them."""

    path: str
    recipe: Recipe
    """How it was computed; made when somebody asks."""
    exposed_s: float = 0.0
    hidden_s: float = 0.0
    part_s: float = 0.0
    """Time of a formula that another line is computed from; it is in no sum."""

    @property
    def basis(self) -> str:
        """What kind of number it rests on: a fitted curve or fabric with its error, or a textbook formula."""
        return self.recipe()[1]


def fitted_parameter(framework: str, name: str) -> str:
    """What a number rests on that was fitted to the runs of a framework; of the ideal one, which has none, nothing.

    >>> fitted_parameter("torchtitan", "step_s")
    'step_s of framework torchtitan, fitted to runs (steptime frameworks torchtitan)'
    """
    if framework == IDEAL.name:
        return ""
    return f"{name} of framework {framework}, fitted to runs (steptime frameworks {framework})"


def called(function: str, arguments: Mapping[str, Given], **factors: Num) -> FormulaCall:
    """A call with plain numbers; a factor of one says nothing."""
    return FormulaCall(function=function, arguments=_plain(arguments), factors=_counted(factors))


def _counted(factors: Mapping[str, Num]) -> dict[str, float]:
    return {name: float(value) for name, value in factors.items() if value != 1.0}


def _plain(arguments: Mapping[str, Given]) -> dict[str, Argument]:
    return {
        name: value if type(value) is float or isinstance(value, (str, Fabric)) else float(value)
        for name, value in arguments.items()
    }


def known(function: str, arguments: Mapping[str, Given], basis: str = "", **factors: Num) -> Recipe:
    """One call whose arguments are at hand."""
    return lambda: ([called(function, arguments, **factors)], basis)


def timed_calls(timed: Timed, **factors: Num) -> list[FormulaCall]:
    """The calls of a fitted model."""
    formula, fixed, counted = timed.model.formula, timed.model.fixed, _counted(factors | {"calls": timed.times})
    return [
        FormulaCall(function=formula.name, arguments=formula.named({**fixed, **shape}), factors=counted)
        for shape in timed.shapes
    ]


@cache
def leaf(function: str) -> str:
    """Name of a function without its module."""
    return function.rsplit(".", 1)[1]


def step_lines(e: Evaluation) -> Iterator[Line]:
    """Lines of the traffic over the data-parallel group, of the pipeline and of the optimiser."""
    yield from _data_parallel_lines(e)
    yield from _pipeline_lines(e)
    if "activations" in e.job.offload:
        yield from _copies_lines(e)
    yield _optimizer_line(e)
    yield from _overhead_lines(e)


def _overhead_lines(e: Evaluation) -> Iterator[Line]:
    """What the framework adds to every step."""
    step, layout, framework = e.step, e.inputs.layout, e.job.framework
    fitted = partial(fitted_parameter, framework.name)
    issue = {"micro_batches": e.inputs.host_starts, "virtual_stages": layout.virtual_stages, "stages": layout.stages,
             "stage_s": framework.stage_s}  # fmt: skip
    yield Line(path="host/stages/stage_issue_s", exposed_s=float(step.stage_host_s),
               recipe=known("host.stage_issue_s", issue, fitted("stage_s")))  # fmt: skip
    yield Line(path="overhead/step_overhead_s", exposed_s=float(step.overhead_s),
               recipe=known("host.step_overhead_s", {"step_s": framework.step_s}, fitted("step_s")))  # fmt: skip
    grown = {"work_s": step.work_s, "devices": step.devices, "growth": step.growth}
    yield Line(path="scaling/growth_s", exposed_s=float(step.growth_s),
               recipe=known("scaling.growth_s", grown, fitted("growth")))  # fmt: skip


def _copies_lines(e: Evaluation) -> Iterator[Line]:
    """Waits for activations that go to the host and come back, and the copy of one layer, from which they follow."""
    step = e.step
    yield Line(
        path="offload/activations/exposed_copies_s", exposed_s=float(step.copies_s),
        hidden_s=max(float(step.copies_busy_s - step.copies_s), 0.0), recipe=lambda: _copies_recipe(e),
    )  # fmt: skip
    one = layer_copy_arguments(e, e.machine)
    yield Line(path="offload/activations/one_layer/host_copy_s", part_s=float(e.inputs.copy_s),
               recipe=known("offload.host_copy_s", one, e.machine.host_basis))  # fmt: skip


def _copies_recipe(e: Evaluation) -> Made:
    step, inputs = e.step, e.inputs
    layer = exposed_pass(inputs.layout, e.passes.layer)
    bubbles = lasting_bubble(inputs, step.stage, layer_copies(inputs, layer)), bubble_arguments(inputs, step.stage)
    times = step.micro_batches * step.stage.layers
    calls = [called("offload.exposed_copies_s", copy_arguments(inputs, layer), times_per_step=times)]
    for bubble, sign in zip(bubbles, (1.0, -1.0), strict=True):
        calls.append(called(*_bubble(e, bubble), times_per_step=sign))
    return calls, e.machine.host_basis


def _optimizer_line(e: Evaluation) -> Line:
    step, machine = e.step, e.machine
    seconds, factor, moved = float(step.optimizer_s), e.job.framework.optimizer, optimizer_bytes(e.job, step.owned)
    if "optimizer" in e.job.offload:
        host = offloaded_arguments(e.job, step.owned, machine)
        recipe = known("offload.host_adam_s", host, machine.host_basis)
        return Line(path="optimizer/host_adam_s", exposed_s=seconds, recipe=recipe)
    fitted = streamed(machine.models, moved)
    if fitted is None:
        traffic = {"moved_bytes": moved, "memory_Bps": machine.memory_Bps}
        recipe = known("roofline.memory_s", traffic, framework_factor=factor)
        return Line(path="optimizer/memory_s", exposed_s=seconds, recipe=recipe)
    return Line(path=f"optimizer/{leaf(fitted.model.formula.name)}", exposed_s=seconds,
                recipe=lambda: (timed_calls(fitted, framework_factor=factor), fitted.model.basis))  # fmt: skip


def _data_parallel_lines(e: Evaluation) -> Iterator[Line]:
    data, traffic, shared, links = e.step.data, e.inputs.traffic, shared_of(e), e.job.framework.data_links
    for name, exposed_s, busy_s, behind, part in (
        ("gradients", data.gradient_s, data.gradient_busy_s, data.backward, 1.0 - data.again_share),
        ("weights", data.weight_gather_s, data.weight_gather_busy_s, data.forward, 1.0),
        ("weights_again", data.backward_gather_s, data.backward_gather_busy_s, data.backward, data.again_share),
    ):
        yield Line(
            path=f"dp_comm/{name}/{behind.hiding.formula.__name__}", exposed_s=float(exposed_s),
            hidden_s=float(busy_s - exposed_s), recipe=partial(_layerwise_recipe, behind, part),
        )  # fmt: skip
    for name, layer, ends, sums in (
        ("gradients", shared.reduce, shared.reduce_ends, traffic.reduce.times(links)),
        ("weights", shared.gather, shared.gather_ends, traffic.gather.times(links)),
    ):
        yield _part_line(e, f"{name}/one_layer", layer, sums.one_layer_s, links)
        yield _part_line(e, f"{name}/embedding", ends.shown, sums.shown_end_s, links)
        yield _part_line(e, f"{name}/head", ends.hidden, sums.hidden_end_s, links)
    if shared.replicas:
        yield _part_line(e, "gradients/replicas", shared.replicas, traffic.replicas_s * links, links)
    replicated = replicated_of(e)
    yield Line(path=f"dp_comm/replicated_weights/{_sent_call(e, replicated).leaf}",
               exposed_s=float(e.step.replicated_s), recipe=lambda: _sent_recipe(e, [replicated]))  # fmt: skip


def _part_line(e: Evaluation, name: str, sent: list[Sent], seconds: Num, links: Num) -> Line:
    """Collectives of a layer or an end, from which the exposed time follows."""
    return Line(path=f"dp_comm/{name}/{_sent_call(e, sent[0]).leaf}", part_s=float(seconds),
                recipe=lambda: _sent_recipe(e, sent, framework_factor=links))  # fmt: skip


def _layerwise_recipe(traffic: LayerwiseTraffic, part: Num) -> Made:
    """What runs behind the computation of layers: as far as it hides, and what could but does not."""
    hiding = traffic.hiding
    each = ((hiding.arguments, 1.0 - traffic.exposed_share), (hiding.shown, traffic.exposed_share))
    function = f"data_parallel.{hiding.formula.__name__}"
    return [
        called(function, arguments, times_per_step=traffic.times, share_of_traffic=part, share_of_time=share)
        for arguments, share in each if share
    ], ""  # fmt: skip


def _sent_call(e: Evaluation, one: Sent) -> TransferCall:
    return collective_over_call(one.kind, e.machine, one.size_bytes, lambda: one.group, one.senders)


def _sent_recipe(e: Evaluation, sent: list[Sent], **factors: Num) -> Made:
    """Collectives one after the other; those that send nothing are left out."""
    calls: list[FormulaCall] = []
    bases: dict[str, None] = {}
    for one in sent:
        if one.times and one.size_bytes and one.group[0] > 1:
            call = _sent_call(e, one)
            arguments, basis = call.how()
            calls.append(called(call.function, arguments, **factors, passes=one.times))
            bases[basis] = None
    return calls, "; ".join(bases)


def _bubble(e: Evaluation, arguments: Mapping[str, Num]) -> tuple[str, dict[str, Num]]:
    """Formula of the bubble of a schedule that is not mirrored, and what it is called with."""
    if e.job.splits_backward:
        return "pipeline.zero_bubble_s", dict(arguments)
    return "pipeline.pipeline_bubble_s", {
        each: arguments[each] for each in ("all_stages_s", "slowest_stage_s", "virtual_stages")
    }


def _pipeline_lines(e: Evaluation) -> Iterator[Line]:
    step, plans, inputs = e.step, e.plans, e.inputs
    messages = waited_messages(plans.pp, step.micro_batches, plans.vpp, 0.0)
    basis, factor = message_basis(e.machine, float(plans.pp), float(plans.in_pp)), e.job.framework.stage_links
    link = {"stages": plans.pp, "inside": plans.in_pp, "fast_s": inputs.fast_link_s, "slow_s": inputs.slow_link_s}
    yield Line(
        path=f"pp_comm/{leaf(STAGE_LINK)}", exposed_s=float(step.pipeline_comm_s),
        hidden_s=float(messages * step.stage_link_s - step.pipeline_comm_s),
        recipe=known(STAGE_LINK, link, basis, times_per_step=step.waited_messages, framework_factor=factor),
    )  # fmt: skip
    bubble, arguments = _bubble(e, bubble_arguments(inputs, step.stage))
    if e.job.stages_held > 1:
        bubble, arguments = "pipeline.dual_pipe_bubble_s", mirrored_bubble(inputs.layout, e.passes, step.stage)
    yield Line(path=f"bubble/{leaf(bubble)}", exposed_s=float(step.idle_s), recipe=known(bubble, arguments))
    yield Line(path=f"bubble/{leaf(STAGE_LINK)}", exposed_s=float(step.bubble_links_s),
               recipe=known(STAGE_LINK, link, basis, times_per_step=step.filling_messages,
                            framework_factor=factor))  # fmt: skip
