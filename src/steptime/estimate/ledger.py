"""The terms of one plan: the share of each row of a layer and each part of a step, and how it was computed.

All numbers come from the tape under which the plan was evaluated (:mod:`steptime.terms`). Composition of a step notes
the terms beyond the rows (:func:`steptime.estimate.step.compose`); the terms of rows and of waits for the host follow
from their counts on the critical stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from steptime.cost.collective_algorithms import Fabric
from steptime.cost.memory_bound import memory_bound_s
from steptime.cost.roofline import roofline_compute_s
from steptime.errors import InternalError
from steptime.estimate.evaluate import Evaluation, evaluate
from steptime.estimate.layer import BACKWARD, FORWARD, RECOMPUTE, PhaseTime, exposed_transfers_s, factor_of, kind_of
from steptime.estimate.machine import Machine
from steptime.estimate.memory import LAYERS_TERM
from steptime.estimate.operators import formula_of
from steptime.estimate.result import Detail, FormulaCall
from steptime.estimate.work import EXPERT_AXIS, PASS_OF, phase_work
from steptime.num import Num
from steptime.plan.job import Job
from steptime.plan.plans import FULL_RECOMPUTE, Plans, is_set
from steptime.plan.strategies import Method, Strategy
from steptime.terms import Tape, Term, Terms, made_of, taped

KEPT = "kept_bytes_per_layer"


def explained(
    method: Method, strategy: Strategy, job: Job, machine: Machine, plans: Plans
) -> tuple[Evaluation, list[Term]]:
    """One plan evaluated under a tape, and all terms of its step; the exposed seconds add up to its time.

    Raises:
        InternalError: the sum differs: a term is missing in `Step.total_s`, or has no call at the path that it names.
    """
    with taped() as tape:
        e = evaluate(method, strategy, job, machine, plans)
    terms = [*_layer_terms(e, tape), *tape.terms]
    exposed_s, step_s = math.fsum(float(each.exposed_s) for each in terms), float(e.step.total_s)
    if not math.isclose(exposed_s, step_s, rel_tol=1e-6):
        raise InternalError(f"the terms of the step add up to {exposed_s:.6g} s, the step takes {step_s:.6g} s")
    return e, terms


def _layer_terms(e: Evaluation, tape: Tape) -> Iterator[Term]:
    """Terms of the rows of each part of the model on the critical stage, and of its waits for the host."""
    again = float(e.inputs.recomputed)
    for part, times in e.times.items():
        count = float(e.step.counts[part] * e.step.micro_batches)
        if not count:
            continue
        shown = _shown_exchange(e) if part == "layer" else {}
        for time in times:
            yield from _row_terms(time, time.phase, count, e, shown.get(time.direction, 1.0))
            if part == "layer" and again and time.phase == FORWARD and time.row.runs_again:
                yield from _row_terms(time, RECOMPUTE, count * again, e)
        for phase in (FORWARD, BACKWARD):
            yield from _pass_terms(e, tape, part, phase, count)
        if shown:
            for phase, one in zip(e.step.exchanges, tape.calls["exchange"], strict=True):
                yield made_of(f"{EXPERT_AXIS}_comm/{phase}/layer", [one], times_per_step=count)
        if part == "layer" and again:
            yield from _pass_terms(e, tape, part, RECOMPUTE, count * again)


def _row_terms(time: PhaseTime, phase: str, count: float, e: Evaluation, shown: float = 1.0) -> Iterator[Term]:
    """Terms of one row in one phase, ``count`` times per step; ``shown``: share of its exchange that is exposed."""
    if not (time.compute_s or time.exposed_memory_s or time.transfers):
        return
    name, factor = f"{phase}/{time.row.name}", float(factor_of(kind_of(time.row), time.narrow, e.job.framework))
    total = count * factor
    factors: dict[str, Num] = {"times_per_step": count * time.times, "framework_factor": factor}
    if not (isinstance(time.learned, float) and time.learned == 1.0):
        factors["learned_factor"] = time.learned
    if time.calls[0].formula is roofline_compute_s:
        compute, memory = ([one] for one in time.calls)
        hidden_s = (time.memory_busy_s - time.exposed_memory_s) * total
        yield made_of(f"compute/{name}", compute, time.compute_s * total, **factors)
        yield made_of(f"memory_bound/{name}", memory, time.exposed_memory_s * total, hidden_s, **factors)
    else:
        group = "memory_bound" if time.calls[0].formula is memory_bound_s else "compute"
        yield made_of(f"{group}/{name}", time.calls, time.compute_s * count * factor, **factors)
    for each, exposed_s in zip(time.transfers, exposed_transfers_s(time, e.job.framework), strict=True):
        axis = each.transfer.axis
        links, share = float(e.job.framework.links(axis)), shown if axis == EXPERT_AXIS else 1.0
        total_s, hidden_s = exposed_s * count, (each.busy_s * links - exposed_s) * count
        # Exposed calls per transfer: a part of one, or for a blocked product a number of panels.
        calls, times = float(total_s / (each.one_s * links or 1.0)), float(count * time.times)
        exposed = {
            "exposed_share" if time.row.panels is None else "exposed_panels": round(calls / times, 12) if times else 0.0
        }
        yield made_of(
            f"{axis}_comm/{name}", each.calls, total_s * share, hidden_s + total_s * (1.0 - share),
            times_per_step=times, framework_factor=links, shown_share=share, **exposed,
        )  # fmt: skip


def _shown_exchange(e: Evaluation) -> dict[str, float]:
    """Exposed share of the exchange of experts, by direction; empty if nothing of it is overlapped."""
    factor, works, hidden = e.job.framework.links(EXPERT_AXIS), e.works["layer"], e.step.exchanges
    sent = {phase: works[phase].links_s.get(EXPERT_AXIS, 0.0) * factor for phase in hidden}
    return {phase: float(1.0 - hidden[phase] / sent[phase]) for phase in hidden if hidden[phase]}


def _pass_terms(e: Evaluation, tape: Tape, part: str, phase: str, count: float) -> Iterator[Term]:
    """Terms of a pass of a part: time of products held to the peak, and waits for the host."""
    calls = tape.calls.get(f"{part}/{phase}") or tape.calls[f"{part}/{PASS_OF[phase]}"]
    groups = ("compute", "host", "host")
    for group, one in zip(groups, calls[: 2 + bool(phase_work(e.works[part], phase).routers)], strict=False):
        yield made_of(f"{group}/{phase}/{part}", [one], one.value * count, times_per_step=count)


def exposed_terms(terms: Iterable[Term]) -> Terms:
    """Exposed seconds by path."""
    return _summed((one.path, one.exposed_s) for one in terms)


def hidden_terms(terms: Iterable[Term]) -> Terms:
    """Overlapped seconds by path, without rounding noise below a femtosecond."""
    return _summed((one.path, one.hidden_s) for one in terms if one.hidden_s > 1e-15)


def _summed(pairs: Iterable[tuple[str, float]]) -> Terms:
    out: dict[str, float] = {}
    for path, value in pairs:
        out[path] = out.get(path, 0.0) + value
    return Terms({path: value for path, value in out.items() if value})


def details_of(terms: Iterable[Term]) -> tuple[Detail, ...]:
    """Details of all terms: exposed and overlapped ones, and those from which others are computed."""
    return tuple(map(_detail, (one for one in terms if one.exposed_s or one.part_s or one.hidden_s > 1e-15)))


def _detail(one: Term) -> Detail:
    """Detail of a term, without calls with a factor of 0 and collectives that send nothing."""
    called = [each for each in one.calls if all(each.factors.values()) and ("passes" not in each.factors or each.value)]
    first, *further = (
        FormulaCall(
            function=formula_of(each.formula).name,
            arguments={  # names and fabrics stay as they are
                name: value if isinstance(value, (str, Fabric)) else float(value)
                for name, value in each.arguments.items()
            },
            factors={k: float(v) for k, v in {**one.factors, **each.factors}.items() if v != 1.0},  # one says nothing
        )
        for each in called
    )
    bases = dict.fromkeys(each.basis if isinstance(each.basis, str) else each.basis() for each in called)
    return Detail(path=one.path, function=first.function, value=one.exposed_s or one.part_s,
                  arguments=first.arguments, factors=first.factors, basis="; ".join(filter(None, bases)),
                  further=tuple(further))  # fmt: skip


def fullest_stage(e: Evaluation) -> str:
    """The pipeline stage that needs most memory."""
    fullest = {name: max(map(float, stage.totals.values())) for name, stage in e.memory.items()}
    return max(fullest, key=lambda name: fullest[name])


def memory_terms(e: Evaluation, stage: str) -> Terms:
    """Bytes of one stage by path, the activations of the layers split by row."""
    return _summed((one.path, one.value) for one in memory_details(e, stage))


def memory_details(e: Evaluation, stage: str) -> tuple[Detail, ...]:
    """Details of the memory terms of one stage: a formula each, or for activations of layers the share of a row."""
    found = []
    for path, call in e.memory[stage].calls().items():
        shares = [(path, 1.0)]
        if path == LAYERS_TERM and not is_set(e.plans.recompute, FULL_RECOMPUTE):
            kept = float(e.sizes.layer.kept_bytes)
            shares = [
                (f"activations/{row.name}/activation_bytes", float(row.kept_bytes * row.share) / kept)
                for row in e.block.layer if float(row.kept_bytes)
            ]  # fmt: skip
        for own, share in shares:
            arguments = {name: float(value) for name, value in call.arguments.items()}
            if share != 1.0:
                arguments[KEPT] = share * arguments[KEPT]
            value = float(call.value) * share
            found.append(Detail(path=own, function=call.formula.name, value=value, arguments=arguments))
    return tuple(one for one in found if one.value)
