"""Terms of a step beyond the rows of its layers: data parallelism, pipeline, optimiser."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from steptime.estimate.evaluate import Evaluation
from steptime.estimate.layer import ring_arguments
from steptime.estimate.operators import COLLECTIVES
from steptime.num import Num


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of the ledger of a step."""

    path: str
    exposed_s: float = 0.0
    hidden_s: float = 0.0
    part_s: float = 0.0
    """Time of a formula that another line is computed from; it is in no sum."""
    function: str
    """Dotted name below ``steptime.cost``."""
    arguments: Mapping[str, float]


def numbers(arguments: Mapping[str, Num]) -> dict[str, float]:
    """Arguments as Python numbers."""
    return {name: float(value) for name, value in arguments.items()}


def leaf(function: str) -> str:
    """Name of a function without its module."""
    return function.rsplit(".", 1)[1]


def step_lines(e: Evaluation) -> Iterator[Line]:
    """Lines of the traffic over the data-parallel group, of the pipeline and of the optimiser."""
    yield from _data_parallel_lines(e)
    yield from _pipeline_lines(e)
    step = e.step
    yield Line(
        path="optimizer/memory_s", exposed_s=float(step.optimizer_s), function="roofline.memory_s",
        arguments=numbers({"moved_bytes": step.optimizer_bytes, "memory_Bps": e.machine.memory_Bps}),
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
            function="data_parallel.exposed_layerwise_s", arguments=numbers(arguments),
        )  # fmt: skip
    weights, axes = e.sizes.layer.weights, e.strategy.gradient_axes
    reduce = "reduce_scatter" if plans.zero >= 1 else "all_reduce"
    yield _ring_part(e, "gradients", reduce, axes, weights * precision.gradient_bytes, step.one_reduction_s)
    yield _ring_part(e, "weights", "all_gather", axes, weights * precision.element_bytes, step.one_gather_s)
    replicated = e.sizes.layer.replicated * precision.gradient_bytes * step.stage.layers
    formula = COLLECTIVES["all_reduce"]
    ring = ring_arguments(plans, e.machine, (e.strategy.replicated_axis,), replicated)
    yield Line(path=f"dp_comm/replicated_weights/{leaf(formula.name)}", exposed_s=float(step.replicated_s),
               function=formula.name, arguments=numbers(ring))  # fmt: skip


def _ring_part(e: Evaluation, name: str, kind: str, axes: tuple[str, ...], size: Num, seconds: Num) -> Line:
    """The collective of one layer, from which the exposed time follows."""
    formula = COLLECTIVES[kind]
    arguments = numbers(ring_arguments(e.plans, e.machine, axes, size))
    return Line(path=f"dp_comm/{name}/one_layer/{leaf(formula.name)}", part_s=float(seconds), function=formula.name,
                arguments=arguments)  # fmt: skip


def _pipeline_lines(e: Evaluation) -> Iterator[Line]:
    step, plans = e.step, e.plans
    messages = 2 * step.micro_batches * plans.vpp
    link = {"stages": plans.pp, "inside": plans.in_pp, "fast_s": step.fast_link_s, "slow_s": step.slow_link_s}
    yield Line(
        path="pp_comm/mean_stage_link_s", exposed_s=float(step.pipeline_comm_s),
        hidden_s=float(messages * step.stage_link_s - step.pipeline_comm_s), function="pipeline.mean_stage_link_s",
        arguments=numbers({**link, "times_per_step": messages}),
    )  # fmt: skip
    bubble = {"all_stages_s": step.stage.all_stages_s, "slowest_stage_s": step.stage.slowest_s,
              "virtual_stages": plans.vpp}  # fmt: skip
    yield Line(path="bubble/pipeline_bubble_s", exposed_s=float(step.bubble_s - step.bubble_links_s),
               function="pipeline.pipeline_bubble_s", arguments=numbers(bubble))  # fmt: skip
    yield Line(path="bubble/mean_stage_link_s", exposed_s=float(step.bubble_links_s),
               function="pipeline.mean_stage_link_s",
               arguments=numbers({**link, "times_per_step": 2 * (plans.pp - 1)}))  # fmt: skip
