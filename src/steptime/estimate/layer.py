"""Times of the rows of a block: each row joined to its formulas, a device's and a fabric's numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from steptime.cost.collective import panel_overlap_s
from steptime.cost.host import issued_s, router_wait_s
from steptime.cost.roofline import memory_s, roofline_compute_s, roofline_exposed_memory_s
from steptime.estimate.communication import collective_time_s
from steptime.estimate.kernels import Timed, timed
from steptime.estimate.machine import Machine
from steptime.estimate.memory_kernels import memory_timed
from steptime.estimate.operators import OPERATORS
from steptime.num import Num, minimum
from steptime.plan.framework import Framework
from steptime.plan.plans import Plans
from steptime.plan.rows import Row, Transfer

FORWARD, BACKWARD, RECOMPUTE = "forward", "backward", "recompute"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferTime:
    """One transfer of a row in one phase."""

    transfer: Transfer
    busy_s: Num
    """Time on the links."""
    exposed_s: Num
    """Part that nothing hides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTime:
    """One row in one phase, per micro-batch."""

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
    panels = 1 if row.panels is None else row.panels
    each = [collective_time_s(t.collective, plans, machine, (t.axis,), t.size_bytes / panels) for t in transfers]
    if row.panels is None:
        behind_s = row.overlaps * busy_s
        return tuple(_behind(transfers, each, behind_s if transfers else 0.0))
    one_panel_s: Num = sum(each)
    exposed_s = panel_overlap_s(one_panel_s, panels, busy_s)
    share = exposed_s / (one_panel_s + (one_panel_s == 0))
    return tuple(
        TransferTime(transfer=t, busy_s=s * (panels + 1), exposed_s=s * share)
        for t, s in zip(transfers, each, strict=True)
    )


def _behind(transfers: tuple[Transfer, ...], each: list[Num], behind_s: Num) -> Iterator[TransferTime]:
    """Transfers that run behind a part of the row's own time, one after the other."""
    for transfer, busy_s in zip(transfers, each, strict=True):
        hidden_s = minimum(busy_s, behind_s)
        behind_s = behind_s - hidden_s
        yield TransferTime(transfer=transfer, busy_s=busy_s, exposed_s=busy_s - hidden_s)


def phase_time(row: Row, phase: str, plans: Plans, machine: Machine) -> PhaseTime:
    """Time of one row in one direction; recomputation is a forward without its transfers."""
    operator = OPERATORS[row.operator]
    formulas = operator.backward if phase == BACKWARD else operator.forward
    flops = [0.0 if f is None else f(row.shape) for f in (formulas.matrix_flops, formulas.vector_flops)]
    moved = 0.0 if formulas.moved_bytes is None else formulas.moved_bytes(row.shape)
    rate = machine.attention_flops_per_s if operator.attention_rate else machine.matrix_flops_per_s
    works = formulas.matrix_flops or formulas.vector_flops or formulas.moved_bytes
    launch_s = machine.kernel_latency_s if works else 0.0
    compute = roofline_compute_s(flops[0], flops[1], rate, machine.vector_flops_per_s, launch_s)
    exposed = roofline_exposed_memory_s(moved, machine.memory_Bps, compute)
    work = {"matrix_flops": flops[0], "vector_flops": flops[1], "moved_bytes": moved}
    fitted = timed(machine.models, row.operator, {**row.shape, **work}, backward=phase == BACKWARD)
    if fitted is None and machine.models:
        fitted = memory_timed(machine.models, row.operator, row.shape, backward=phase == BACKWARD)
    if fitted is not None:
        compute, exposed = fitted.seconds, 0.0 * moved
    transfers = row.backward if phase == BACKWARD else row.forward
    return PhaseTime(
        row=row, phase=phase, matrix_flops=flops[0], vector_flops=flops[1], moved_bytes=moved, compute_s=compute,
        timed=fitted,
        memory_busy_s=memory_s(moved, machine.memory_Bps), exposed_memory_s=exposed,
        transfers=_transfer_times(row, transfers, compute + exposed, plans, machine), issued=1.0 if works else 0.0,
    )  # fmt: skip


def phase_times(rows: Iterable[Row], plans: Plans, machine: Machine) -> Iterator[PhaseTime]:
    """Every row forward and backward, and once more forward where it is recomputed."""
    for row in rows:
        yield _counted(phase_time(row, FORWARD, plans, machine), row.share)
        yield _counted(phase_time(row, BACKWARD, plans, machine), row.share)
        if not isinstance(row.recomputed, float) or row.recomputed:
            again = _scaled(phase_time(row, RECOMPUTE, plans, machine), row.recomputed)
            yield _counted(again, row.share)


def _counted(time: PhaseTime, share: Num) -> PhaseTime:
    """A phase of a row that a layer has ``share`` times."""
    return time if isinstance(share, float) and share == 1.0 else _scaled(time, share)


def _scaled(time: PhaseTime, share: Num) -> PhaseTime:
    """A phase that runs only where ``share`` is 1."""
    transfers = tuple(
        TransferTime(transfer=t.transfer, busy_s=t.busy_s * share, exposed_s=t.exposed_s * share)
        for t in time.transfers
    )
    return PhaseTime(
        row=time.row, phase=time.phase, matrix_flops=time.matrix_flops * share, vector_flops=time.vector_flops * share,
        moved_bytes=time.moved_bytes * share, compute_s=time.compute_s * share, timed=time.timed,
        memory_busy_s=time.memory_busy_s * share, exposed_memory_s=time.exposed_memory_s * share, transfers=transfers,
        issued=time.issued * share,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What some rows do in one direction for one micro-batch, by kind; before the framework has its say."""

    matrix_s: Num
    """Matrix products."""
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


def kind_of(row: Row) -> str:
    """Kind of a row's work: ``matrix``, ``attention`` or ``vector``."""
    operator = OPERATORS[row.operator]
    if operator.attention_rate:
        return "attention"
    return "matrix" if operator.forward.matrix_flops is not None else "vector"


def work_of(times: Iterable[PhaseTime]) -> dict[str, Work]:
    """Work forward and backward; recomputation belongs to the backward pass."""
    sums: dict[str, dict[str, Num]] = {FORWARD: {}, BACKWARD: {}}
    links: dict[str, dict[str, Num]] = {FORWARD: {}, BACKWARD: {}}
    for time in times:
        phase = FORWARD if time.phase == FORWARD else BACKWARD
        into, kind = sums[phase], kind_of(time.row)
        into[kind] = into.get(kind, 0.0) + (time.compute_s + time.exposed_memory_s)
        into["operators"] = into.get("operators", 0.0) + time.issued
        if time.row.operator == "top_k":
            into["routers"] = into.get("routers", 0.0) + time.issued
        for each in time.transfers:
            axis = each.transfer.axis
            links[phase][axis] = links[phase].get(axis, 0.0) + each.exposed_s
    return {
        phase: Work(
            matrix_s=into.get("matrix", 0.0), attention_s=into.get("attention", 0.0), vector_s=into.get("vector", 0.0),
            operators=into.get("operators", 0.0), routers=into.get("routers", 0.0), links_s=links[phase],
        )
        for phase, into in sums.items()
    }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Time of some rows for one micro-batch."""

    forward_s: Num
    backward_s: Num

    @property
    def both_s(self) -> Num:
        """Forward and backward."""
        return self.forward_s + self.backward_s


def device_s(work: Work, framework: Framework) -> Num:
    """Time that the device and its links need for some work."""
    total = work.matrix_s * framework.matrix + work.attention_s * framework.attention + work.vector_s * framework.vector
    for axis, links_s in work.links_s.items():
        total = total + links_s * framework.links(axis)
    return total


def paced_s(work: Work, framework: Framework) -> Num:
    """Time of some work under a framework: what the device needs, or the host if it is slower."""
    paced = issued_s(device_s(work, framework), work.operators, framework.host_s)
    return paced + router_wait_s(work.routers, framework.router_s)


def pass_of(work: Mapping[str, Work], framework: Framework) -> Pass:
    """Both directions."""
    return Pass(forward_s=paced_s(work[FORWARD], framework), backward_s=paced_s(work[BACKWARD], framework))
