"""The named terms of one plan: time, hidden time, memory, and how each was computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from steptime.estimate.evaluate import Evaluation
from steptime.estimate.layer import FORWARD, RECOMPUTE, PhaseTime, ring_arguments
from steptime.estimate.memory import STAGES, stage_terms, stage_total
from steptime.estimate.operators import COLLECTIVES, OPERATORS, Formula
from steptime.estimate.result import Detail
from steptime.num import Num
from steptime.plan.rows import Row
from steptime.terms import Terms

COMPUTE = "roofline.roofline_compute_s"
EXPOSED_MEMORY = "roofline.roofline_exposed_memory_s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of the ledger of a step."""

    path: str
    exposed_s: float
    hidden_s: float
    function: str
    arguments: dict[str, float]


def _numbers(arguments: dict[str, Num]) -> dict[str, float]:
    return {name: float(value) for name, value in arguments.items()}


def _leaf(function: str) -> str:
    return function.rsplit(".", 1)[1]


def _phase_lines(time: PhaseTime, phase: str, count: float, e: Evaluation) -> Iterator[Line]:
    """Lines of one row in one phase, ``count`` times per step."""
    machine, name = e.machine, f"{phase}/{time.row.name}"
    rate = machine.attention_flops_per_s if OPERATORS[time.row.operator].attention_rate else machine.matrix_flops_per_s
    compute = {
        "matrix_flops": time.matrix_flops, "vector_flops": time.vector_flops, "matrix_flops_per_s": rate,
        "vector_flops_per_s": machine.vector_flops_per_s, "kernel_latency_s": machine.kernel_latency_s,
    }  # fmt: skip
    traffic = {"moved_bytes": time.moved_bytes, "memory_Bps": machine.memory_Bps, "compute_s": time.compute_s}
    times = {"times_per_step": count}
    yield Line(path=f"compute/{name}/{_leaf(COMPUTE)}", exposed_s=float(time.compute_s * count), hidden_s=0.0,
               function=COMPUTE, arguments=_numbers(compute) | times)  # fmt: skip
    hidden = time.memory_busy_s - time.exposed_memory_s
    yield Line(path=f"exposed_memory/{name}/{_leaf(EXPOSED_MEMORY)}", exposed_s=float(time.exposed_memory_s * count),
               hidden_s=float(hidden * count), function=EXPOSED_MEMORY,
               arguments=_numbers(traffic) | times)  # fmt: skip
    panels = 1 if time.row.panels is None else time.row.panels
    for each in time.transfers:
        formula = COLLECTIVES[each.transfer.collective]
        axis = each.transfer.axis
        arguments = ring_arguments(e.plans, machine, (axis,), each.transfer.size_bytes / panels)
        yield Line(
            path=f"{axis}_comm/{name}/{_leaf(formula.name)}", exposed_s=float(each.exposed_s * count),
            hidden_s=float((each.busy_s - each.exposed_s) * count), function=formula.name,
            arguments=_numbers(arguments) | times | {"panels": float(panels)},
        )  # fmt: skip


def _part_lines(e: Evaluation) -> Iterator[Line]:
    stage = e.step.stage
    counts = {"layer": stage.layers, "first": stage.first, "last": stage.last}
    for part, times in e.times.items():
        count = float(counts[part] * e.step.micro_batches)
        for time in times:
            yield from _phase_lines(time, time.phase, count, e)
            if part == "layer" and e.step.repeats > 1 and time.phase == FORWARD:
                yield from _phase_lines(time, RECOMPUTE, count, e)


def _step_lines(e: Evaluation) -> Iterator[Line]:
    step, plans, machine, precision = e.step, e.plans, e.machine, e.job.precision
    weights = e.sizes.layer.weights
    axes = e.strategy.gradient_axes

    def ring(kind: str, axes: tuple[str, ...], size: Num) -> tuple[Formula, dict[str, float]]:
        return COLLECTIVES[kind], _numbers(ring_arguments(plans, machine, axes, size))

    reduce = "reduce_scatter" if plans.zero >= 1 else "all_reduce"
    shared = (
        ("gradients", step.gradient_s, step.gradient_busy_s, *ring(reduce, axes, weights * precision.gradient_bytes)),
        ("weights", step.weight_gather_s, step.weight_gather_busy_s,
         *ring("all_gather", axes, weights * precision.element_bytes)),
        ("weights_again", step.backward_gather_s, step.backward_gather_busy_s,
         *ring("all_gather", axes, weights * precision.element_bytes)),
        ("replicated_weights", step.replicated_s, step.replicated_s,
         *ring("all_reduce", (e.strategy.replicated_axis,), e.sizes.layer.replicated * precision.gradient_bytes)),
    )  # fmt: skip
    for name, exposed, busy, formula, arguments in shared:
        yield Line(path=f"dp_comm/{name}/{_leaf(formula.name)}", exposed_s=float(exposed),
                   hidden_s=float(busy - exposed), function=formula.name,
                   arguments=arguments | {"layers": float(step.stage.layers)})  # fmt: skip
    links_s = 2 * step.micro_batches * step.stage_link_s * plans.vpp
    link = {"stages": plans.pp, "inside": plans.in_pp, "times_per_step": 2 * step.micro_batches * plans.vpp}
    yield Line(path="pp_comm/mean_stage_link_s", exposed_s=float(step.pipeline_comm_s),
               hidden_s=float(links_s - step.pipeline_comm_s), function="pipeline.mean_stage_link_s",
               arguments=_numbers(link))  # fmt: skip
    bubble = {"all_stages_s": step.stage.all_stages_s, "slowest_stage_s": step.stage.slowest_s,
              "virtual_stages": plans.vpp}  # fmt: skip
    yield Line(path="bubble/pipeline_bubble_s", exposed_s=float(step.bubble_s), hidden_s=0.0,
               function="pipeline.pipeline_bubble_s", arguments=_numbers(bubble))  # fmt: skip
    yield Line(path="optimizer/memory_s", exposed_s=float(step.optimizer_s), hidden_s=0.0,
               function="roofline.memory_s",
               arguments={"moved_bytes": float(step.optimizer_s) * machine.memory_Bps,
                          "memory_Bps": machine.memory_Bps})  # fmt: skip


def lines_of(e: Evaluation) -> list[Line]:
    """Every line of a step; the exposed seconds add up to its time."""
    return [*_part_lines(e), *_step_lines(e)]


def exposed_terms(lines: list[Line]) -> Terms:
    """Exposed seconds by path."""
    return _summed((line.path, line.exposed_s) for line in lines)


def hidden_terms(lines: list[Line]) -> Terms:
    """Hidden seconds by path; rounding noise below a femtosecond is nothing."""
    return _summed((line.path, line.hidden_s) for line in lines if line.hidden_s > 1e-15)


def details_of(lines: list[Line]) -> tuple[Detail, ...]:
    """How each exposed or hidden line was computed."""
    return tuple(
        Detail(path=line.path, function=line.function, value=line.exposed_s, arguments=line.arguments)
        for line in lines
        if line.exposed_s or line.hidden_s > 1e-15
    )


def _summed(pairs: Iterable[tuple[str, float]]) -> Terms:
    out: dict[str, float] = {}
    for path, value in pairs:
        out[path] = out.get(path, 0.0) + value
    return Terms(out).without_zeros()


def memory_terms(e: Evaluation) -> tuple[str, Terms]:
    """The fullest stage and its terms, the activations of the layers split by row."""
    by_stage = {
        s: {k: float(v) for k, v in stage_terms(e.method, e.strategy, e.job, e.plans, e.sizes, s).items()}
        for s in STAGES
    }
    stage = max(STAGES, key=lambda s: float(stage_total(by_stage[s])))
    terms = by_stage[stage]
    whole = "activations/layers/activation_bytes"
    rows = [r for r in e.block.layer if float(r.kept_bytes)]
    if e.plans.recompute == 2 or not rows:
        return stage, Terms(terms).without_zeros()
    split = {f"activations/{_row_path(r)}": terms[whole] * _share(r, e) for r in rows}
    out: dict[str, float] = {}
    for path, value in terms.items():
        out |= split if path == whole else {path: value}
    return stage, Terms(out).without_zeros()


def _row_path(row: Row) -> str:
    return f"{row.name}/activation_bytes"


def _share(row: Row, e: Evaluation) -> float:
    return float(row.kept_bytes) / float(e.sizes.layer.kept_bytes)
