"""Terms of a step beyond the rows of its layers: data parallelism, pipeline, optimiser.

The named terms of one plan: time, hidden time, memory, and how each was computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from typing import NamedTuple

from steptime.cost.collective_algorithms import Fabric
from steptime.cost.host import issue_wait_s, router_wait_s
from steptime.cost.pipeline import waited_messages
from steptime.cost.roofline import held_to_peak_s
from steptime.estimate.communication import Collective, Given, message_basis
from steptime.estimate.evaluate import Evaluation
from steptime.estimate.hiding import LayerwiseTraffic
from steptime.estimate.kernels import MEMORY_BOUND, Timed, streamed
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
from steptime.estimate.memory import LAYERS_TERM
from steptime.estimate.operators import Call
from steptime.estimate.result import Argument, Detail, FormulaCall
from steptime.estimate.traffic import (
    Sent,
    host_read_arguments,
    host_read_s,
    layer_copy_arguments,
    matrix_arguments,
    momentum_of,
    offloaded_arguments,
    optimizer_bytes,
    replicated_of,
    shared_of,
)
from steptime.estimate.work import EXPERT_AXIS, device_s, phase_work, products_s, router_arguments
from steptime.num import Num
from steptime.plan.framework import IDEAL
from steptime.plan.plans import FULL_RECOMPUTE, is_set
from steptime.terms import Terms

Made = tuple[list[FormulaCall], str]
"""Calls of formulas that add up to a line, and the text that says what they rest on."""
Recipe = Callable[[], Made]
"""Makes them."""
STAGE_LINK = "pipeline.mean_stage_link_s"
MATRICES = "optimizers.matrix_update_s"


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
    if e.job.optimizer.matrices is not None:
        yield from _matrix_lines(e)
    yield from _overhead_lines(e)


def _overhead_lines(e: Evaluation) -> Iterator[Line]:
    """What the framework adds to every step."""
    step, layout, framework = e.step, e.inputs.layout, e.job.framework
    fitted = partial(fitted_parameter, framework.name)
    issue = {"micro_batches": e.inputs.host_starts, "virtual_stages": layout.virtual_stages, "stages": layout.stages,
             "stage_s": framework.stage_s}  # fmt: skip
    yield Line(path="host/stages/stage_issue_s", exposed_s=float(step.stage_host_s),
               recipe=known("host.stage_issue_s", issue, fitted("stage_s")))  # fmt: skip
    together = {"step_s": framework.step_s, "devices": step.devices, "tensors": e.inputs.tensors}
    yield Line(path="overhead/step_overhead_s", exposed_s=float(step.overhead_s),
               recipe=known("host.step_overhead_s", together, fitted("step_s")))  # fmt: skip
    grown = {"work_s": step.work_s, "devices": step.devices, "growth": step.growth}
    yield Line(path="scaling/growth_s", exposed_s=float(step.growth_s),
               recipe=known("host.growth_s", grown, fitted("growth")))  # fmt: skip


def _copies_lines(e: Evaluation) -> Iterator[Line]:
    """Waits for activations that go to the host and come back, and the copy of one layer, from which they follow."""
    step = e.step
    yield Line(
        path="offload/activations/exposed_copies_s", exposed_s=float(step.copies_s),
        hidden_s=max(float(step.copies_busy_s - step.copies_s), 0.0), recipe=lambda: _copies_recipe(e),
    )  # fmt: skip
    one = layer_copy_arguments(e, e.machine)
    yield Line(path="offload/activations/one_layer/host_copy_s", part_s=float(e.inputs.copy_s),
               recipe=known("host.host_copy_s", one, e.machine.host_basis))  # fmt: skip


def _copies_recipe(e: Evaluation) -> Made:
    calls = [called(c.formula.name, c.arguments, times_per_step=times) for c, times in e.step.copies if times]
    return calls, e.machine.host_basis


def _optimizer_line(e: Evaluation) -> Line:
    step, machine, updates = e.step, e.machine, e.step.updates
    seconds, factor, moved = float(step.optimizer_s), e.job.framework.optimizer, optimizer_bytes(e, step.owned)
    if "optimizer" in e.job.offload:
        host = offloaded_arguments(e.job, step.owned, machine)
        recipe = known("host.host_adam_s", host, machine.host_basis, times_per_step=updates)
        return Line(path="optimizer/host_adam_s", exposed_s=seconds, recipe=recipe)
    fitted = streamed(machine.models, moved)
    if fitted is None:
        traffic = {"moved_bytes": moved, "memory_Bps": machine.memory_Bps}
        recipe = known("roofline.memory_s", traffic, times_per_step=updates, framework_factor=factor)
        return Line(path="optimizer/memory_s", exposed_s=seconds, recipe=recipe)
    return Line(path=f"optimizer/{leaf(fitted.model.formula.name)}", exposed_s=seconds,
                recipe=lambda: (timed_calls(fitted, times_per_step=updates, framework_factor=factor),
                               fitted.model.basis))  # fmt: skip


def _matrix_lines(e: Evaluation) -> Iterator[Line]:
    """Products of matrices in the optimiser's step, and gathering of the momentum that they are made of."""
    update_s, gather_s, framework = float(e.step.matrix_update_s), float(e.step.momentum_gather_s), e.job.framework
    if update_s:
        arguments = matrix_arguments(e, e.machine)
        yield Line(
            path="optimizer/matrix_update_s",
            exposed_s=update_s,
            recipe=known(MATRICES, arguments, times_per_step=e.step.updates, framework_factor=framework.matrix),
        )
    if gather_s:
        sent = momentum_of(e)
        yield Line(
            path=f"optimizer/momentum/{sent[0].on(e.machine).call().leaf}",
            exposed_s=gather_s,
            recipe=lambda: _sent_recipe(e, sent, times_per_step=e.step.updates, framework_factor=framework.data_links),
        )


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
        ("gradients", shared.reduce, shared.reduce_ends, traffic.reduce),
        ("weights", shared.gather, shared.gather_ends, traffic.gather),
    ):
        reads = name == "weights" and "parameters" in e.job.offload
        for which, sent, part_s in (
            ("one_layer", layer, sums.one_layer_s),
            ("embedding", ends.shown, sums.shown_end_s),
            ("head", ends.hidden, sums.hidden_end_s),
        ):
            read_s = host_read_s(e.machine, sent) if reads else 0.0
            yield _part_line(e, f"{name}/{which}", sent, (part_s - read_s) * links, links)
    if "parameters" in e.job.offload:
        yield Line(path="offload/parameters/one_layer/host_copy_s", part_s=float(host_read_s(e.machine, shared.gather)),
                   recipe=lambda: (
                       [called("host.host_copy_s", one) for one in host_read_arguments(e.machine, shared.gather)],
                       e.machine.host_basis,
                   ))  # fmt: skip
    if shared.replicas:
        yield _part_line(e, "gradients/replicas", shared.replicas, traffic.replicas_s * links, links)
    replicated = replicated_of(e)
    yield Line(path=f"dp_comm/replicated_weights/{replicated.on(e.machine).call().leaf}",
               exposed_s=float(e.step.replicated_s),
               recipe=lambda: _sent_recipe(e, [replicated], times_per_step=e.step.updates))  # fmt: skip


def _part_line(e: Evaluation, name: str, sent: list[Sent], seconds: Num, links: Num) -> Line:
    """Collectives of a layer or an end, from which the exposed time follows."""
    return Line(path=f"dp_comm/{name}/{sent[0].on(e.machine).call().leaf}", part_s=float(seconds),
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


def _sent_recipe(e: Evaluation, sent: list[Sent], **factors: Num) -> Made:
    """Collectives one after the other; those that send nothing are left out."""
    calls: list[FormulaCall] = []
    bases: dict[str, None] = {}
    for one in sent:
        if one.times and one.size_bytes and one.group[0] > 1:
            call = one.on(e.machine).call()
            arguments, basis = call.how()
            calls.append(called(call.function, arguments, **factors, passes=one.times))
            bases[basis] = None
    return calls, "; ".join(bases)


def _pipeline_lines(e: Evaluation) -> Iterator[Line]:
    step, plans, inputs = e.step, e.plans, e.inputs
    messages = waited_messages(plans.pp, step.micro_batches * inputs.slices, plans.vpp, 0.0)
    basis, factor = message_basis(e.machine, float(plans.pp), float(plans.in_pp)), e.job.framework.stage_links
    link = {"stages": plans.pp, "inside": plans.in_pp, "fast_s": inputs.fast_link_s, "slow_s": inputs.slow_link_s}
    yield Line(
        path=f"pp_comm/{leaf(STAGE_LINK)}", exposed_s=float(step.pipeline_comm_s),
        hidden_s=float(messages * step.stage_link_s - step.pipeline_comm_s),
        recipe=known(STAGE_LINK, link, basis, times_per_step=step.waited_messages, framework_factor=factor),
    )  # fmt: skip
    if step.contention is not None and step.contention.value:
        call = step.contention
        yield Line(
            path=f"pp_comm/contention/{leaf(call.formula.name)}",
            exposed_s=float(call.value),
            recipe=known(call.formula.name, call.arguments, "messages share the links of a node with gradients"),
        )
    bubble = step.bubble.formula.name
    yield Line(path=f"bubble/{leaf(bubble)}", exposed_s=float(step.idle_s),
               recipe=known(bubble, step.bubble.arguments))  # fmt: skip
    yield Line(path=f"bubble/{leaf(STAGE_LINK)}", exposed_s=float(step.bubble_links_s),
               recipe=known(STAGE_LINK, link, basis, times_per_step=step.filling_messages,
                            framework_factor=factor))  # fmt: skip


COMPUTE = "roofline.roofline_compute_s"
EXPOSED_MEMORY = "roofline.roofline_exposed_memory_s"
ISSUE = "host.issue_wait_s"
ROUTER = "host.router_wait_s"
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
    factors = _factors(time, count, factor)
    return timed_calls(timed, **factors), timed.model.basis


def _factors(time: PhaseTime, count: float, factor: float) -> dict[str, Num]:
    """What the time of one call is multiplied by; a learned correction only where there is one."""
    learned = {} if isinstance(time.learned, float) and time.learned == 1.0 else {"learned_factor": time.learned}
    return {"times_per_step": count * time.times, "framework_factor": factor, **learned}


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
    return [called(COMPUTE, work, **_factors(time, count, factor))], ""


def _traffic_recipe(time: PhaseTime, machine: Machine, count: float, factor: float) -> Made:
    one = time.once or time
    traffic = {
        "moved_bytes": one.moved_bytes,
        "memory_Bps": machine.memory_Bps,
        "compute_s": one.compute_s / one.learned,
    }
    return [called(EXPOSED_MEMORY, traffic, **_factors(time, count, factor))], ""


def _transfer_lines(time: PhaseTime, name: str, count: float, e: Evaluation, shown: float) -> Iterator[Line]:
    for each, exposed_s in zip(time.transfers, shown_s(time, e.job.framework), strict=True):
        axis = each.transfer.axis
        factor = float(e.job.framework.links(axis))
        share = shown if axis == EXPERT_AXIS else 1.0
        total_s, hidden_s = exposed_s * count, (each.busy_s * factor - exposed_s) * count
        calls = float(total_s / (each.one.seconds * factor or 1.0))
        yield Line(
            path=f"{axis}_comm/{name}/{each.one.call().leaf}", exposed_s=float(total_s * share),
            hidden_s=float(hidden_s + total_s * (1.0 - share)),
            recipe=partial(_transfer_recipe, time, each.one, calls, count, factor, share),
        )  # fmt: skip


def _transfer_recipe(time: PhaseTime, one: Collective, calls: float, count: float, factor: float, share: float) -> Made:
    """Exposed calls of a collective: part of one, or of a blocked product those for so many panels.

    ``calls``: how often it shows in a step, each time as long as the framework makes it.
    """
    name = "exposed_share" if time.row.panels is None else "exposed_panels"
    times = float(count * time.times)
    exposed = round(calls / times, 12) if times else 0.0
    call = one.call()
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
    """Share of the exchange of experts that is exposed, by direction; empty where nothing of it is overlapped."""
    factor, works = e.job.framework.links(EXPERT_AXIS), e.works["layer"]
    hidden = {phase: call.value for phase, call in e.step.exchanges.items()}
    sent = {phase: works[phase].links_s.get(EXPERT_AXIS, 0.0) * factor for phase in hidden}
    return {phase: float(1.0 - hidden[phase] / sent[phase]) for phase in hidden if hidden[phase]}


def _hidden_lines(e: Evaluation, count: float) -> Iterator[Line]:
    """Overlapped exchange of experts: no part of the step's time, but of its terms."""
    for phase, call in e.step.exchanges.items():
        name = call.formula.name
        yield Line(path=f"{EXPERT_AXIS}_comm/{phase}/layer/{leaf(name)}", exposed_s=0.0,
                   part_s=float(call.value * count),
                   recipe=known(name, call.arguments, times_per_step=count))  # fmt: skip


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


def _memory_detail(path: str, value: float, call: Call, share: float) -> Detail:
    """A call, or of the activations of layers the share of a row."""
    arguments = call.arguments if share == 1.0 else {**call.arguments, KEPT: share * call.arguments[KEPT]}
    one = called(call.formula.name, arguments)
    return Detail(path=path, function=one.function, value=value, arguments=one.arguments)


def _memory_shares(e: Evaluation, stage: str) -> Iterator[tuple[str, float, Call, float]]:
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
