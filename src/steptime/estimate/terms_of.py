"""The named terms of one plan: time, hidden time, memory, and how each was computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial

from steptime.cost.host import router_wait_s
from steptime.estimate.communication import Call, collective_call
from steptime.estimate.evaluate import Evaluation
from steptime.estimate.kernels import Timed
from steptime.estimate.layer import BACKWARD, FORWARD, RECOMPUTE, PhaseTime, device_s, kind_of, paced_s
from steptime.estimate.memory import LAYERS_TERM
from steptime.estimate.memory_kernels import MEMORY_BOUND
from steptime.estimate.operators import OPERATORS
from steptime.estimate.result import Detail
from steptime.estimate.step_terms import Line, known, leaf, numbers, step_lines
from steptime.num import Num
from steptime.plan.plans import FULL_RECOMPUTE, is_set
from steptime.terms import Terms

COMPUTE = "roofline.roofline_compute_s"
EXPOSED_MEMORY = "roofline.roofline_exposed_memory_s"
ISSUED = "host.issued_s"
ROUTER = "host.router_wait_s"


def _phase_lines(time: PhaseTime, phase: str, count: float, e: Evaluation) -> Iterator[Line]:
    """Lines of one row in one phase, ``count`` times per step."""
    if not (time.compute_s or time.exposed_memory_s or time.transfers):
        return
    name = f"{phase}/{time.row.name}"
    factor = float(getattr(e.job.framework, kind_of(time.row)))
    if time.timed is not None:
        function = time.timed.model.formula.name
        group = "memory_bound" if function == MEMORY_BOUND.name else "compute"
        yield Line(path=f"{group}/{name}/{leaf(function)}", exposed_s=float(time.compute_s * count * factor),
                   function=function, how=partial(_timed_how, time.timed, count, factor))  # fmt: skip
    else:
        yield from _roofline_lines(time, name, count, factor, e)
    if time.transfers:
        yield from _transfer_lines(time, name, count, e)


def _times(count: float, factor: float) -> dict[str, float]:
    return {"times_per_step": count} | ({"framework_factor": factor} if factor != 1.0 else {})


def _timed_how(timed: Timed, count: float, factor: float) -> tuple[Mapping[str, Num], str]:
    return {**timed.model.fixed, **timed.shapes[0], **_times(count, factor)}, timed.model.basis


def _roofline_lines(time: PhaseTime, name: str, count: float, factor: float, e: Evaluation) -> Iterator[Line]:
    machine, total = e.machine, count * factor
    rate = machine.attention_flops_per_s if OPERATORS[time.row.operator].attention_rate else machine.matrix_flops_per_s
    compute = {
        "matrix_flops": time.matrix_flops, "vector_flops": time.vector_flops, "matrix_flops_per_s": rate,
        "vector_flops_per_s": machine.vector_flops_per_s, "kernel_latency_s": machine.kernel_latency_s,
    }  # fmt: skip
    traffic = {"moved_bytes": time.moved_bytes, "memory_Bps": machine.memory_Bps, "compute_s": time.compute_s}
    times = _times(count, factor)
    yield Line(path=f"compute/{name}/{leaf(COMPUTE)}", exposed_s=float(time.compute_s * total), function=COMPUTE,
               how=known(compute | times))  # fmt: skip
    hidden = time.memory_busy_s - time.exposed_memory_s
    yield Line(path=f"memory_bound/{name}/{leaf(EXPOSED_MEMORY)}", exposed_s=float(time.exposed_memory_s * total),
               hidden_s=float(hidden * total), function=EXPOSED_MEMORY, how=known(traffic | times))  # fmt: skip


def _transfer_lines(time: PhaseTime, name: str, count: float, e: Evaluation) -> Iterator[Line]:
    panels = 1 if time.row.panels is None else time.row.panels
    for each in time.transfers:
        axis, kind = each.transfer.axis, each.transfer.collective
        factor = float(e.job.framework.links(axis))
        call = collective_call(kind, e.plans, e.machine, (axis,), each.transfer.size_bytes / panels)
        times = {**_times(count, factor), "panels": float(panels)}
        yield Line(
            path=f"{axis}_comm/{name}/{call.leaf}", exposed_s=float(each.exposed_s * count * factor),
            hidden_s=float((each.busy_s - each.exposed_s) * count), function=call.function,
            how=partial(_call_how, call, times),
        )  # fmt: skip


def _call_how(call: Call, times: Mapping[str, float]) -> tuple[Mapping[str, Num], str]:
    arguments, basis = call.how()
    return {**arguments, **times}, basis


def _part_lines(e: Evaluation) -> Iterator[Line]:
    stage, again = e.step.stage, float(e.inputs.layout.recomputed)
    counts = {"layer": stage.layers, "first": stage.first, "last": stage.last}
    for part, times in e.times.items():
        count = float(counts[part] * e.step.micro_batches)
        if not count:
            continue
        for time in times:
            yield from _phase_lines(time, time.phase, count, e)
            if part == "layer" and again and time.phase == FORWARD:
                yield from _phase_lines(time, RECOMPUTE, count * again, e)
        for phase in (FORWARD, BACKWARD):
            yield from _host_lines(e, part, phase, count)
        if part == "layer" and again:
            yield from _host_lines(e, part, FORWARD, count * again, named=RECOMPUTE)


def _host_lines(e: Evaluation, part: str, phase: str, count: float, named: str = "") -> Iterator[Line]:
    """What the device waits for the host in one part of the model."""
    work, framework = e.works[part][phase], e.job.framework
    device, waited = device_s(work, framework), router_wait_s(work.routers, framework.router_s)
    paced = paced_s(work, framework) - waited
    arguments = {"device_s": device, "operators": work.operators, "host_s": framework.host_s, "times_per_step": count}
    path = f"host/{named or phase}/{part}"
    yield Line(path=f"{path}/{leaf(ISSUED)}", exposed_s=float((paced - device) * count), function=ISSUED,
               how=known(arguments))  # fmt: skip
    waits = {"routers": work.routers, "wait_s": framework.router_s, "times_per_step": count}
    yield Line(path=f"{path}/{leaf(ROUTER)}", exposed_s=float(waited * count), function=ROUTER,
               how=known(waits))  # fmt: skip


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
    arguments, basis = line.how()
    return Detail(path=line.path, function=line.function, value=line.exposed_s or line.part_s,
                  arguments=numbers(arguments), basis=basis)  # fmt: skip


def _summed(pairs: Iterable[tuple[str, float]]) -> Terms:
    out: dict[str, float] = {}
    for path, value in pairs:
        out[path] = out.get(path, 0.0) + value
    return Terms(out).without_zeros()


def fullest_stage(e: Evaluation) -> str:
    """The pipeline stage that needs most memory."""
    fullest = {name: max(map(float, stage.totals.values())) for name, stage in e.memory.items()}
    return max(fullest, key=lambda name: fullest[name])


def memory_details(e: Evaluation, stage: str) -> tuple[Detail, ...]:
    """Memory terms of one stage, the activations of the layers split by row, and how each was computed."""
    out = []
    for path, call in e.memory[stage].calls().items():
        detail = Detail(path=path, function=call.formula.name, value=float(call.value),
                        arguments=numbers(call.arguments))  # fmt: skip
        split = path == LAYERS_TERM and not is_set(e.plans.recompute, FULL_RECOMPUTE)
        out += _by_row(e, detail) if split else [detail]
    return tuple(detail for detail in out if detail.value)


def _by_row(e: Evaluation, whole: Detail) -> list[Detail]:
    """The activations of a layer, row by row."""
    return [
        Detail(
            path=f"activations/{row.name}/activation_bytes", function=whole.function,
            value=whole.value * share,
            arguments={**whole.arguments, "kept_bytes_per_layer": share * whole.arguments["kept_bytes_per_layer"]},
        )
        for row in e.block.layer
        for share in [float(row.kept_bytes * row.share) / float(e.sizes.layer.kept_bytes)]
        if float(row.kept_bytes)
    ]  # fmt: skip


def memory_terms(details: Iterable[Detail]) -> Terms:
    """Bytes by path."""
    return _summed((detail.path, detail.value) for detail in details)
