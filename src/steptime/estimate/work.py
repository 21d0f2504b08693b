"""Work of some rows for one micro-batch by kind, and the time that a framework makes of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from steptime.cost.collective import shown_beside_s
from steptime.cost.host import issued_s, router_wait_s
from steptime.estimate.layer import BACKWARD, FORWARD, PhaseTime, factor_of, hides, kind_of
from steptime.num import Num, where
from steptime.plan.framework import Framework

WEIGHT_PRODUCTS = ("matmul", "blocked_matmul", "wide_matmul", "grouped_matmul")
"""Operators whose backward pass has a product for the gradient of the input and one for that of the weights."""
RECORDED_WEIGHTS = "captured_weights_backward"
"""A recorded product of its own for the gradient of weights."""
EXPERT_AXIS = "ep"


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Transfers of one row and the work beside which they run; before the framework has its say."""

    work_s: Mapping[tuple[str, bool], Num]
    """Time of the work, by its kind and whether it is in a narrow format."""
    links_s: Mapping[str, Num]
    """Transfers, by axis."""


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
    """Transfers that nothing hides, by axis."""
    beside: Mapping[str, Beside]
    """Transfers that run beside the work of their own row, by phase and row."""
    weights_s: Num = 0.0
    """Part of the products that makes gradients of weights; 0 where nobody asks for it."""


def weights_s(time: PhaseTime) -> Num:
    """Time of a row's product that makes the gradient of weights: of two products with as many FLOPs the second."""
    if time.row.operator == RECORDED_WEIGHTS and time.phase == BACKWARD:
        return time.own_s
    if time.phase != BACKWARD or not time.row.trained or time.row.operator not in WEIGHT_PRODUCTS:
        return 0.0
    if time.timed is None:
        return time.own_s / 2
    return time.timed.model.seconds(time.timed.shapes[-1]) * time.timed.times * time.times


def _beside(time: PhaseTime) -> Beside:
    links: dict[str, Num] = {}
    for each in time.transfers:
        links[each.transfer.axis] = links.get(each.transfer.axis, 0.0) + each.covered_s
    return Beside(work_s={(kind_of(time.row), time.narrow): time.beside_s}, links_s=links)


def work_of(times: Iterable[PhaseTime], *, splits: bool = False) -> dict[str, PhaseWork]:
    """Work forward and backward; recomputation belongs to the backward pass.

    ``splits``: also the part that makes gradients of weights.
    """
    sums: dict[str, dict[str, Num]] = {FORWARD: {}, BACKWARD: {}}
    links: dict[str, dict[str, Num]] = {FORWARD: {}, BACKWARD: {}}
    beside: dict[str, dict[str, Beside]] = {FORWARD: {}, BACKWARD: {}}
    for time in times:
        phase = time.direction
        into, kind = sums[phase], kind_of(time.row)
        into[kind] = into.get(kind, 0.0) + time.own_s
        if time.narrow:
            into["narrow"] = into.get("narrow", 0.0) + time.own_s
        if splits and phase == BACKWARD:
            into["weights"] = into.get("weights", 0.0) + weights_s(time)
        into["operators"] = into.get("operators", 0.0) + time.issued
        if time.row.operator == "top_k":
            into["routers"] = into.get("routers", 0.0) + time.issued
        for each in time.transfers:
            axis = each.transfer.axis
            links[phase][axis] = links[phase].get(axis, 0.0) + (each.busy_s - each.covered_s)
        if hides(time.row):
            beside[phase][f"{time.phase}/{time.row.name}"] = _beside(time)
    return {
        phase: PhaseWork(
            matrix_s=into.get("matrix", 0.0), narrow_s=into.get("narrow", 0.0),
            attention_s=into.get("attention", 0.0), vector_s=into.get("vector", 0.0),
            operators=into.get("operators", 0.0), routers=into.get("routers", 0.0), links_s=links[phase],
            beside=beside[phase], weights_s=into.get("weights", 0.0),
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


def products_s(work: PhaseWork, framework: Framework) -> Num:
    """Time of the products outside attention, each as :func:`factor_of` says."""
    return (work.matrix_s + work.narrow_s * (framework.narrow - 1.0)) * framework.matrix


def device_s(work: PhaseWork, framework: Framework) -> Num:
    """Time that the device and its links need for some work."""
    total = products_s(work, framework) + work.attention_s * framework.attention + work.vector_s * framework.vector
    for axis, links_s in work.links_s.items():
        total = total + links_s * framework.links(axis)
    for each in work.beside.values():
        total = total + shown_beside_s(
            sum(links_s * framework.links(axis) for axis, links_s in each.links_s.items()),
            sum(work_s * factor_of(*how, framework) for how, work_s in each.work_s.items()),
        )  # fmt: skip
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
