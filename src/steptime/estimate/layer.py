"""Times of the rows of a block: each row joined to its formulas, a device's and a fabric's numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from steptime.cost.collective import panel_overlap_s
from steptime.cost.host import issued_s, router_wait_s
from steptime.cost.roofline import memory_s, roofline_compute_s, roofline_exposed_memory_s
from steptime.estimate.communication import collective_time_s
from steptime.estimate.kernels import Timed, further_timed, timed
from steptime.estimate.machine import Machine
from steptime.estimate.memory_kernels import memory_timed
from steptime.estimate.operators import OPERATORS
from steptime.num import Num, minimum, where
from steptime.plan.framework import Framework
from steptime.plan.plans import Plans
from steptime.plan.quantise import NARROW
from steptime.plan.rows import Row, Transfer

WEIGHT_PRODUCTS = ("matmul", "blocked_matmul", "wide_matmul", "grouped_matmul")
"""Operators whose backward pass has a product for the gradient of the input and one for that of the weights."""
RECORDED_WEIGHTS = "captured_weights_backward"
"""A recorded product of its own for the gradient of weights."""
FORWARD, BACKWARD, RECOMPUTE = "forward", "backward", "recompute"
Priced = Mapping[tuple[str, str], Num]
"""Seconds of rows that are priced already, as if a layer had each once, by the row's name and phase."""
_NONE: Priced = {}
EXPERT_AXIS = "ep"


class TransferTime(NamedTuple):
    """One transfer of a row in one phase."""

    transfer: Transfer
    busy_s: Num
    """Time on the links."""
    exposed_s: Num
    """Part that nothing hides."""
    one_s: Num
    """One call of its collective: all of it, or where a product is blocked that for one panel."""


class PhaseTime(NamedTuple):
    """One row in one phase, per micro-batch; a tuple, because an estimate makes some hundred of them."""

    row: Row
    phase: str
    matrix_flops: Num
    vector_flops: Num
    moved_bytes: Num
    compute_s: Num
    """Arithmetic and launch by the roofline, or the whole operator by a fitted model."""
    timed: Timed | None
    """The fitted model, where there is one."""
    memory_busy_s: Num
    exposed_memory_s: Num
    transfers: tuple[TransferTime, ...]
    issued: Num = 1.0
    """Operators that the host issues for it."""
    narrow: bool = False
    """A product in a format narrower than 16 bits."""
    times: Num = 1.0
    """How often a layer has it; everything above counts it so often."""
    once: PhaseTime | None = None
    """The same as if a layer had it once, where that differs."""

    @property
    def direction(self) -> str:
        """Pass that it belongs to: recomputation is part of the backward pass."""
        return FORWARD if self.phase == FORWARD else BACKWARD

    @property
    def total_s(self) -> Num:
        """Exposed time of the row."""
        total = self.compute_s + self.exposed_memory_s
        for transfer in self.transfers:
            total = total + transfer.exposed_s
        return total


def _transfer_times(row: Row, transfers: tuple[Transfer, ...], busy_s: Num, plans: Plans, machine: Machine) -> tuple[
    TransferTime, ...
]:  # fmt: skip
    transfers = tuple([t for t in transfers if not plans.is_alone(t.axis)])
    if not transfers:
        return ()
    panels = 1 if row.panels is None else row.panels
    each = [collective_time_s(t.collective, plans, machine, (t.axis,), t.size_bytes / panels) for t in transfers]
    if row.panels is None:
        return tuple(_behind(row, transfers, each, row.overlaps * busy_s, plans))
    one_panel_s: Num = sum(each)
    exposed_s = panel_overlap_s(one_panel_s, panels, busy_s)
    share = exposed_s / (one_panel_s + (one_panel_s == 0))
    return tuple(TransferTime(t, s * (panels + 1), s * share, s) for t, s in zip(transfers, each, strict=True))


def _behind(
    row: Row, transfers: tuple[Transfer, ...], each: list[Num], behind_s: Num, plans: Plans
) -> Iterator[TransferTime]:
    """Transfers that run behind a part of the row's own time, one after the other."""
    for transfer, busy_s in zip(transfers, each, strict=True):
        hidden_s = minimum(busy_s, behind_s)
        if row.overlaps_near:
            hidden_s = where(plans.is_near(transfer.axis), hidden_s, 0.0)
        behind_s = behind_s - hidden_s
        yield TransferTime(transfer, busy_s, busy_s - hidden_s, busy_s)


def links_busy_s(time: PhaseTime, plans: Plans, machine: Machine) -> Num:
    """Time that the transfers of a row keep the links of another machine busy."""
    panels = time.row.panels
    parts, passes = (1, 1) if panels is None else (panels, panels + 1)
    total: Num = 0.0
    for each in time.transfers:
        transfer = each.transfer
        one_s = collective_time_s(transfer.collective, plans, machine, (transfer.axis,), transfer.size_bytes / parts)
        total = total + one_s * passes
    return total * time.times


def phase_time(row: Row, phase: str, plans: Plans, machine: Machine, priced_s: Num | None = None) -> PhaseTime:
    """Time of one row in one phase, as if a layer had it once; recomputation is another forward pass.

    ``priced_s``: time of the row itself behind which its transfers may run, where the caller has it already.
    """
    operator = OPERATORS[row.operator]
    formulas, sent = (operator.backward, row.backward) if phase == BACKWARD else (operator.forward, row.forward)
    matrix: Num = 0.0 if formulas.matrix_flops is None else formulas.matrix_flops(row.shape)
    vector: Num = 0.0 if formulas.vector_flops is None else formulas.vector_flops(row.shape)
    moved: Num = 0.0 if formulas.moved_bytes is None else formulas.moved_bytes(row.shape)
    fitted = _fitted(row, phase, machine, matrix, vector, moved)
    if fitted is None:
        flops_per_s, vector_flops_per_s, launch_s = row_rates(row, machine)
        launch_s = launch_s if formulas.works else 0.0
        compute = roofline_compute_s(matrix, vector, flops_per_s, vector_flops_per_s, launch_s)
        exposed = roofline_exposed_memory_s(moved, machine.memory_Bps, compute)
    else:
        compute, exposed = fitted.seconds, 0.0 * moved
    behind_s = compute + exposed if priced_s is None else priced_s
    return PhaseTime(
        row=row, phase=phase, matrix_flops=matrix, vector_flops=vector, moved_bytes=moved, compute_s=compute,
        timed=fitted, memory_busy_s=memory_s(moved, machine.memory_Bps), exposed_memory_s=exposed,
        transfers=_transfer_times(row, sent, behind_s, plans, machine) if sent else (),
        issued=1.0 if formulas.works else 0.0, narrow=machine.narrow and row.operator in NARROW,
    )  # fmt: skip


def row_rates(row: Row, machine: Machine) -> tuple[Num, Num, Num]:
    """Rates of the matrix and vector units for a row, and the latency of its launch."""
    operator = OPERATORS[row.operator]
    matrix = machine.attention_flops_per_s if operator.attention_rate else machine.matrix_flops_per_s
    if operator.unaligned:
        matrix = machine.unaligned_flops_per_s or machine.vector_flops_per_s
    return matrix, machine.vector_flops_per_s, machine.kernel_latency_s


def _repeated(time: PhaseTime, times: Num) -> tuple[TransferTime, ...]:
    """The transfers of a row, so many times."""
    return tuple([TransferTime(t.transfer, t.busy_s * times, t.exposed_s * times, t.one_s) for t in time.transfers])


def _counted(time: PhaseTime, times: Num, phase: str) -> PhaseTime:
    """A row in a phase that takes as long, and that a layer has so often."""
    if isinstance(times, float) and times == 1.0 and phase == time.phase:
        return time
    return PhaseTime(
        row=time.row, phase=phase, matrix_flops=time.matrix_flops * times, vector_flops=time.vector_flops * times,
        moved_bytes=time.moved_bytes * times, compute_s=time.compute_s * times, timed=time.timed,
        memory_busy_s=time.memory_busy_s * times, exposed_memory_s=time.exposed_memory_s * times,
        transfers=_repeated(time, times), issued=time.issued * times, narrow=time.narrow, times=times,
        once=None if isinstance(times, float) and times == 1.0 else time,
    )  # fmt: skip


def _sent_again(time: PhaseTime) -> PhaseTime:
    """A row's forward pass with those of its transfers that recomputation repeats."""
    share = time.row.sent_again
    if not time.transfers or (isinstance(share, float) and share == 1.0):
        return time
    return time._replace(transfers=_repeated(time, share))


def _fitted(row: Row, phase: str, machine: Machine, matrix: Num, vector: Num, moved: Num) -> Timed | None:
    """The calls of fitted models that stand for a row, where the machine has them."""
    if not machine.models:
        return None
    operator, shape, backward = row.operator, row.shape, phase == BACKWARD
    if row.timing is not None:
        if getattr(OPERATORS[operator], BACKWARD if backward else FORWARD).moved_bytes is None:
            return None
        operator, shape, backward = row.timing.operator, row.timing.shape, row.timing.backward
        if operator in machine.models and operator not in ("matmul", "attention"):
            return further_timed(machine.models[operator], shape)
    work = {"matrix_flops": matrix, "vector_flops": vector, "moved_bytes": moved}
    found = timed(machine.models, operator, shape, work, backward=backward)
    return found or memory_timed(machine.models, operator, shape, backward=backward)


def phase_times(rows: Iterable[Row], plans: Plans, machine: Machine, priced: Priced = _NONE) -> Iterator[PhaseTime]:
    """Every row in the phases in which it does something: forward, backward, and forward again where recomputed."""
    for row in rows:
        operator, forward = OPERATORS[row.operator], None
        if operator.forward.works or row.forward:
            forward = phase_time(row, FORWARD, plans, machine, priced.get((row.name, FORWARD)))
            yield _counted(forward, row.share, FORWARD)
        if operator.backward.works or row.backward:
            backward = phase_time(row, BACKWARD, plans, machine, priced.get((row.name, BACKWARD)))
            yield _counted(backward, row.share, BACKWARD)
        if forward is not None and (not isinstance(row.recomputed, float) or row.recomputed):
            yield _counted(_sent_again(forward), row.recomputed * row.share, RECOMPUTE)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseWork:
    """What some rows do in one direction for one micro-batch, by kind; before the framework has its say."""

    matrix_s: Num
    """Matrix products."""
    narrow_s: Num
    """Those of them in formats narrower than 16 bits."""
    attention_s: Num
    """Products of the attention core."""
    vector_s: Num
    """Operators without products."""
    operators: Num
    """Operators that the host issues."""
    routers: Num
    """Routers of experts, at which the host waits for the device."""
    links_s: Mapping[str, Num]
    """Exposed transfers by axis."""
    weights_s: Num = 0.0
    """Part of the products that makes gradients of weights; 0 where nobody asks for it."""


def kind_of(row: Row) -> str:
    """Kind of a row's work, of :data:`~steptime.estimate.operators.KINDS`."""
    return OPERATORS[row.operator].kind


def weights_s(time: PhaseTime) -> Num:
    """Time of a row's product that makes the gradient of weights: of two products with as many FLOPs the second."""
    if time.row.operator == RECORDED_WEIGHTS and time.phase == BACKWARD:
        return time.compute_s + time.exposed_memory_s
    if time.phase != BACKWARD or not time.row.trained or time.row.operator not in WEIGHT_PRODUCTS:
        return 0.0
    if time.timed is None:
        return (time.compute_s + time.exposed_memory_s) / 2
    return time.timed.model.seconds(time.timed.shapes[-1]) * time.timed.times * time.times


def work_of(times: Iterable[PhaseTime], *, splits: bool = False) -> dict[str, PhaseWork]:
    """Work forward and backward; recomputation belongs to the backward pass.

    ``splits``: also the part that makes gradients of weights.
    """
    sums: dict[str, dict[str, Num]] = {FORWARD: {}, BACKWARD: {}}
    links: dict[str, dict[str, Num]] = {FORWARD: {}, BACKWARD: {}}
    for time in times:
        phase = time.direction
        into, kind = sums[phase], kind_of(time.row)
        into[kind] = into.get(kind, 0.0) + (time.compute_s + time.exposed_memory_s)
        if time.narrow:
            into["narrow"] = into.get("narrow", 0.0) + (time.compute_s + time.exposed_memory_s)
        if splits and phase == BACKWARD:
            into["weights"] = into.get("weights", 0.0) + weights_s(time)
        into["operators"] = into.get("operators", 0.0) + time.issued
        if time.row.operator == "top_k":
            into["routers"] = into.get("routers", 0.0) + time.issued
        for each in time.transfers:
            axis = each.transfer.axis
            links[phase][axis] = links[phase].get(axis, 0.0) + each.exposed_s
    return {
        phase: PhaseWork(
            matrix_s=into.get("matrix", 0.0), narrow_s=into.get("narrow", 0.0),
            attention_s=into.get("attention", 0.0), vector_s=into.get("vector", 0.0),
            operators=into.get("operators", 0.0), routers=into.get("routers", 0.0), links_s=links[phase],
            weights_s=into.get("weights", 0.0),
        )
        for phase, into in sums.items()
    }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Time of some rows for one micro-batch."""

    forward_s: Num
    backward_s: Num
    weights_s: Num = 0.0
    """Part of the backward pass that makes gradients of weights."""
    forward_exchange_s: Num = 0.0
    """What the exchange of experts adds to the forward pass; likewise to the backward pass."""
    backward_exchange_s: Num = 0.0

    @property
    def both_s(self) -> Num:
        """Forward and backward."""
        return self.forward_s + self.backward_s


def factor_of(kind: str, narrow: bool, framework: Framework) -> Num:
    """What a framework makes of work of a kind; ``narrow``: in a format narrower than 16 bits."""
    factor: Num = getattr(framework, kind)
    return factor * framework.narrow if narrow else factor


def products_s(work: PhaseWork, framework: Framework) -> Num:
    """Time of the products outside attention, each as :func:`factor_of` says."""
    return (work.matrix_s + work.narrow_s * (framework.narrow - 1.0)) * framework.matrix


def device_s(work: PhaseWork, framework: Framework) -> Num:
    """Time that the device and its links need for some work."""
    total = products_s(work, framework) + work.attention_s * framework.attention + work.vector_s * framework.vector
    for axis, links_s in work.links_s.items():
        total = total + links_s * framework.links(axis)
    return total


def paced_s(work: PhaseWork, framework: Framework) -> Num:
    """Time of some work under a framework: what the device needs, or the host if it is slower."""
    return _paced_s(device_s(work, framework), work, framework)


def _paced_s(device: Num, work: PhaseWork, framework: Framework) -> Num:
    paced = issued_s(device, work.operators, framework.host_s)
    return paced + router_wait_s(work.routers, framework.router_s)


def _paced_and_exchange_s(work: PhaseWork, framework: Framework) -> tuple[Num, Num]:
    """As :func:`paced_s`, and what the exchange of experts adds to it."""
    device, sent = device_s(work, framework), work.links_s.get(EXPERT_AXIS, 0.0)
    whole = _paced_s(device, work, framework)
    if isinstance(sent, float) and not sent:
        return whole, 0.0
    return whole, whole - _paced_s(device - sent * framework.links(EXPERT_AXIS), work, framework)


def pass_of(work: Mapping[str, PhaseWork], framework: Framework) -> Pass:
    """Both directions."""
    one = work[BACKWARD]
    (forward, sent), (backward, returned) = (_paced_and_exchange_s(each, framework) for each in (work[FORWARD], one))
    products = one.matrix_s + where(one.matrix_s > 0, 0.0, 1.0)
    return Pass(
        forward_s=forward, backward_s=backward, weights_s=one.weights_s * products_s(one, framework) / products,
        forward_exchange_s=sent, backward_exchange_s=returned,
    )  # fmt: skip
