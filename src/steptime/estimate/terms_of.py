"""The named terms of one plan: time, hidden time, memory, and how each was computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from steptime.cost.experts import hidden_exchange_s
from steptime.cost.host import issue_wait_s, router_wait_s
from steptime.cost.roofline import held_to_peak_s
from steptime.estimate.communication import TransferCall, collective_call
from steptime.estimate.evaluate import Evaluation
from steptime.estimate.kernels import Timed
from steptime.estimate.layer import (
    BACKWARD,
    FORWARD,
    RECOMPUTE,
    PhaseTime,
    factor_of,
    kind_of,
    row_rates,
    shown_s,
)
from steptime.estimate.machine import Machine
from steptime.estimate.memory import LAYERS_TERM, MemoryCall
from steptime.estimate.memory_kernels import MEMORY_BOUND
from steptime.estimate.result import Detail
from steptime.estimate.stages import exchanges_of, hidden_exchanges
from steptime.estimate.step_terms import Line, Made, called, fitted_parameter, known, leaf, step_lines, timed_calls
from steptime.estimate.work import EXPERT_AXIS, device_s, phase_work, products_s, router_arguments
from steptime.plan.plans import FULL_RECOMPUTE, is_set
from steptime.terms import Terms

COMPUTE = "roofline.roofline_compute_s"
EXPOSED_MEMORY = "roofline.roofline_exposed_memory_s"
ISSUE = "host.issue_wait_s"
ROUTER = "host.router_wait_s"
HIDDEN = "experts.hidden_exchange_s"
PEAK = "roofline.held_to_peak_s"
KEPT = "kept_bytes_per_layer"


def _phase_lines(time: PhaseTime, phase: str, count: float, e: Evaluation, shown: float = 1.0) -> list[Line]:
    """Lines of one row in one phase, ``count`` times per step; ``shown``: share of its exchange that shows."""
    if not (time.compute_s or time.exposed_memory_s or time.transfers):
        return []
    name = f"{phase}/{time.row.name}"
    factor = float(factor_of(kind_of(time.row), time.narrow, e.job.framework))
    if time.timed is None:
        lines = _roofline_lines(time, name, count, factor, e)
    else:
        function = time.timed.model.formula.name
        group = "memory_bound" if function == MEMORY_BOUND.name else "compute"
        lines = [Line(path=f"{group}/{name}/{leaf(function)}", exposed_s=float(time.compute_s * count * factor),
                      recipe=partial(_timed_recipe, time, time.timed, count, factor))]  # fmt: skip
    return [*lines, *_transfer_lines(time, name, count, e, shown)] if time.transfers else lines


def _timed_recipe(time: PhaseTime, timed: Timed, count: float, factor: float) -> Made:
    return timed_calls(timed, times_per_step=count * time.times, framework_factor=factor), timed.model.basis


def _roofline_lines(time: PhaseTime, name: str, count: float, factor: float, e: Evaluation) -> list[Line]:
    total, hidden = count * factor, time.memory_busy_s - time.exposed_memory_s
    return [
        Line(path=f"compute/{name}/{leaf(COMPUTE)}", exposed_s=float(time.compute_s * total),
             recipe=partial(_compute_recipe, time, e.machine, count, factor)),
        Line(path=f"memory_bound/{name}/{leaf(EXPOSED_MEMORY)}", exposed_s=float(time.exposed_memory_s * total),
             hidden_s=float(hidden * total), recipe=partial(_traffic_recipe, time, e.machine, count, factor)),
    ]  # fmt: skip


def _compute_recipe(time: PhaseTime, machine: Machine, count: float, factor: float) -> Made:
    one, (matrix, vector, latency_s) = time.once or time, row_rates(time.row, machine)
    work = {
        "matrix_flops": one.matrix_flops, "vector_flops": one.vector_flops, "matrix_flops_per_s": matrix,
        "vector_flops_per_s": vector, "kernel_latency_s": latency_s,
    }  # fmt: skip
    return [called(COMPUTE, work, times_per_step=count * time.times, framework_factor=factor)], ""


def _traffic_recipe(time: PhaseTime, machine: Machine, count: float, factor: float) -> Made:
    one = time.once or time
    traffic = {"moved_bytes": one.moved_bytes, "memory_Bps": machine.memory_Bps, "compute_s": one.compute_s}
    return [called(EXPOSED_MEMORY, traffic, times_per_step=count * time.times, framework_factor=factor)], ""


def _transfer_lines(time: PhaseTime, name: str, count: float, e: Evaluation, shown: float) -> Iterator[Line]:
    panels = 1 if time.row.panels is None else time.row.panels
    for each, exposed_s in zip(time.transfers, shown_s(time, e.job.framework), strict=True):
        axis, kind = each.transfer.axis, each.transfer.collective
        factor = float(e.job.framework.links(axis))
        share = shown if axis == EXPERT_AXIS else 1.0
        total_s, hidden_s = exposed_s * count, (each.busy_s * factor - exposed_s) * count
        calls = float(total_s / (each.one_s * factor or 1.0))
        call = collective_call(kind, e.plans, e.machine, (axis,), each.transfer.size_bytes / panels)
        yield Line(
            path=f"{axis}_comm/{name}/{call.leaf}", exposed_s=float(total_s * share),
            hidden_s=float(hidden_s + total_s * (1.0 - share)),
            recipe=partial(_transfer_recipe, time, call, calls, count, factor, share),
        )  # fmt: skip


def _transfer_recipe(
    time: PhaseTime, call: TransferCall, calls: float, count: float, factor: float, share: float
) -> Made:
    """Exposed calls of a collective: part of one, or of a blocked product those for so many panels.

    ``calls``: how often it shows in a step, each time as long as the framework makes it.
    """
    name = "exposed_share" if time.row.panels is None else "exposed_panels"
    times = float(count * time.times)
    exposed = round(calls / times, 12) if times else 0.0
    arguments, basis = call.how()
    return [called(call.function, arguments, times_per_step=times, framework_factor=factor, shown_share=share,
                   **{name: exposed})], basis  # fmt: skip


def _part_lines(e: Evaluation) -> Iterator[Line]:
    stage, again = e.step.stage, float(e.inputs.layout.recomputed)
    counts = {"layer": stage.layers, "first": stage.first, "last": stage.last}
    for part, times in e.times.items():
        count = float(counts[part] * e.step.micro_batches)
        if not count:
            continue
        shown = _shown_exchange(e) if part == "layer" else {}
        for time in times:
            yield from _phase_lines(time, time.phase, count, e, shown.get(time.direction, 1.0))
            if part == "layer" and again and time.phase == FORWARD and time.row.runs_again:
                yield from _phase_lines(time, RECOMPUTE, count * again, e)
        for phase in (FORWARD, BACKWARD):
            yield _peak_line(e, part, phase, count)
            yield from _host_lines(e, part, phase, count)
        if shown:
            yield from _hidden_lines(e, count)
        if part == "layer" and again:
            yield _peak_line(e, part, RECOMPUTE, count * again)
            yield from _host_lines(e, part, RECOMPUTE, count * again)


def _shown_exchange(e: Evaluation) -> dict[str, float]:
    """Share of the exchange of experts that shows, by direction; empty where nothing hides."""
    hidden = dict(zip((FORWARD, BACKWARD), hidden_exchanges(e.inputs.layout, e.passes.layer), strict=True))
    factor, works = e.job.framework.links(EXPERT_AXIS), e.works["layer"]
    sent = {phase: works[phase].links_s.get(EXPERT_AXIS, 0.0) * factor for phase in hidden}
    return {phase: float(1.0 - hidden[phase] / sent[phase]) for phase in hidden if hidden[phase]}


def _hidden_lines(e: Evaluation, count: float) -> Iterator[Line]:
    """What hides of the exchange of experts behind the opposite pass: no part of the step's time, but of its terms."""
    for phase, how in exchanges_of(e.inputs.layout, e.passes.layer).items():
        yield Line(path=f"{EXPERT_AXIS}_comm/{phase}/layer/{leaf(HIDDEN)}", exposed_s=0.0,
                   part_s=float(hidden_exchange_s(**how) * count),
                   recipe=known(HIDDEN, how, times_per_step=count))  # fmt: skip


def _peak_line(e: Evaluation, part: str, phase: str, count: float) -> Line:
    """What the products of a part take longer than curves and framework say, as they would beat the peak."""
    work = phase_work(e.works[part], phase)
    held = {"timed_s": products_s(work, e.job.framework), "peak_s": work.peak_s}
    return Line(path=f"compute/{phase}/{part}/{leaf(PEAK)}", exposed_s=float(held_to_peak_s(**held) * count),
                recipe=known(PEAK, held, times_per_step=count))  # fmt: skip


def _host_lines(e: Evaluation, part: str, phase: str, count: float) -> Iterator[Line]:
    """What the device waits for the host in one part of the model."""
    work, framework = phase_work(e.works[part], phase), e.job.framework
    issued = {
        "device_s": device_s(work, framework), "operators": work.operators, "host_s": framework.host_s,
        "sharpness": framework.issue_sharpness,
    }  # fmt: skip
    waits = router_arguments(work, framework)
    path, fitted = f"host/{phase}/{part}", partial(fitted_parameter, framework.name)
    yield Line(path=f"{path}/{leaf(ISSUE)}", exposed_s=float(issue_wait_s(**issued) * count),
               recipe=known(ISSUE, issued, fitted("host_s"), times_per_step=count))  # fmt: skip
    if work.routers:
        yield Line(path=f"{path}/{leaf(ROUTER)}", exposed_s=float(router_wait_s(**waits) * count),
                   recipe=known(ROUTER, waits, fitted("router_s"), times_per_step=count))  # fmt: skip


def lines_of(e: Evaluation) -> list[Line]:
    """Every line of a step; the exposed seconds add up to its time."""
    return [*_part_lines(e), *step_lines(e)]


def exposed_terms(lines: list[Line]) -> Terms:
    """Exposed seconds by path."""
    return _summed((line.path, line.exposed_s) for line in lines)


def hidden_terms(lines: list[Line]) -> Terms:
    """Hidden seconds by path; rounding noise below a femtosecond is nothing."""
    return _summed((line.path, line.hidden_s) for line in lines if line.hidden_s > 1e-15)


def details_of(lines: list[Line]) -> tuple[Detail, ...]:
    """How each line was computed: exposed and hidden ones, and those that others are made of."""
    return tuple(map(_detail, (line for line in lines if line.exposed_s or line.part_s or line.hidden_s > 1e-15)))


def _detail(line: Line) -> Detail:
    (first, *further), basis = line.recipe()
    return Detail(path=line.path, function=first.function, value=line.exposed_s or line.part_s,
                  arguments=first.arguments, factors=first.factors, basis=basis, further=tuple(further))  # fmt: skip


def _summed(pairs: Iterable[tuple[str, float]]) -> Terms:
    out: dict[str, float] = {}
    for path, value in pairs:
        out[path] = out.get(path, 0.0) + value
    return Terms({path: value for path, value in out.items() if value})


def fullest_stage(e: Evaluation) -> str:
    """The pipeline stage that needs most memory."""
    fullest = {name: max(map(float, stage.totals.values())) for name, stage in e.memory.items()}
    return max(fullest, key=lambda name: fullest[name])


def memory_terms(e: Evaluation, stage: str) -> Terms:
    """Bytes of one stage by path, the activations of the layers split by row."""
    return _summed((path, value) for path, value, _, _ in _memory_shares(e, stage))


def memory_details(e: Evaluation, stage: str) -> tuple[Detail, ...]:
    """How each of them was computed."""
    return tuple(_memory_detail(*each) for each in _memory_shares(e, stage) if each[1])


def _memory_detail(path: str, value: float, call: MemoryCall, share: float) -> Detail:
    """A call, or of the activations of layers the share of a row."""
    arguments = call.arguments if share == 1.0 else {**call.arguments, KEPT: share * call.arguments[KEPT]}
    one = called(call.formula.name, arguments)
    return Detail(path=path, function=one.function, value=value, arguments=one.arguments)


def _memory_shares(e: Evaluation, stage: str) -> Iterator[tuple[str, float, MemoryCall, float]]:
    """Path, bytes, and the call with the share of it that they are: of the activations of layers that of a row."""
    for path, call in e.memory[stage].calls().items():
        value = float(call.value)
        if path == LAYERS_TERM and not is_set(e.plans.recompute, FULL_RECOMPUTE):
            kept = float(e.sizes.layer.kept_bytes)
            for row in e.block.layer:
                if float(row.kept_bytes):
                    share = float(row.kept_bytes * row.share) / kept
                    yield f"activations/{row.name}/activation_bytes", value * share, call, share
        else:
            yield path, value, call, 1.0
