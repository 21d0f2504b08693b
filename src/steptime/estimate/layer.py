"""Times of the rows of a block: each row joined to its formulas, a device's and a fabric's numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from steptime.cost.collective import panel_overlap_s
from steptime.cost.roofline import memory_s, roofline_compute_s, roofline_exposed_memory_s
from steptime.estimate.kernels import Timed, timed
from steptime.estimate.machine import Machine
from steptime.estimate.operators import COLLECTIVES, OPERATORS
from steptime.num import Num
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

    @property
    def total_s(self) -> Num:
        """Exposed time of the row."""
        total = self.compute_s + self.exposed_memory_s
        for transfer in self.transfers:
            total = total + transfer.exposed_s
        return total


def ring_arguments(plans: Plans, machine: Machine, axes: Iterable[str], size_bytes: Num) -> dict[str, Num]:
    """Arguments of a ring collective over the product of some mesh axes."""
    ranks: Num = 1
    inside: Num = 1
    for axis in axes:
        ranks, inside = ranks * getattr(plans, axis), inside * plans.inside(axis)
    return {
        "size_bytes": size_bytes, "ranks": ranks, "inside": inside,
        "fast_Bps": machine.fast_Bps, "slow_Bps": machine.slow_link_Bps(inside),
        "fast_latency_s": machine.fast_latency_s, "slow_latency_s": machine.slow_latency_s,
    }  # fmt: skip


def _transfer_times(row: Row, transfers: tuple[Transfer, ...], busy_s: Num, plans: Plans, machine: Machine) -> tuple[
    TransferTime, ...
]:  # fmt: skip
    panels = 1 if row.panels is None else row.panels
    each = [
        COLLECTIVES[t.collective](ring_arguments(plans, machine, (t.axis,), t.size_bytes / panels)) for t in transfers
    ]
    if row.panels is None:
        return tuple(TransferTime(transfer=t, busy_s=s, exposed_s=s) for t, s in zip(transfers, each, strict=True))
    one_panel_s: Num = sum(each)
    exposed_s = panel_overlap_s(one_panel_s, panels, busy_s)
    share = exposed_s / (one_panel_s + (one_panel_s == 0))
    return tuple(
        TransferTime(transfer=t, busy_s=s * (panels + 1), exposed_s=s * share)
        for t, s in zip(transfers, each, strict=True)
    )


def phase_time(row: Row, phase: str, plans: Plans, machine: Machine) -> PhaseTime:
    """Time of one row in one direction; recomputation is a forward without its transfers."""
    operator = OPERATORS[row.operator]
    formulas = operator.backward if phase == BACKWARD else operator.forward
    flops = [0.0 if f is None else f(row.shape) for f in (formulas.matrix_flops, formulas.vector_flops)]
    moved = 0.0 if formulas.moved_bytes is None else formulas.moved_bytes(row.shape)
    rate = machine.attention_flops_per_s if operator.attention_rate else machine.matrix_flops_per_s
    compute = roofline_compute_s(flops[0], flops[1], rate, machine.vector_flops_per_s, machine.kernel_latency_s)
    exposed = roofline_exposed_memory_s(moved, machine.memory_Bps, compute)
    fitted = timed(machine.models, row.operator, row.shape, backward=phase == BACKWARD)
    if fitted is not None:
        compute, exposed = fitted.seconds, 0.0 * moved
    transfers = row.backward if phase == BACKWARD else row.forward
    return PhaseTime(
        row=row, phase=phase, matrix_flops=flops[0], vector_flops=flops[1], moved_bytes=moved, compute_s=compute,
        timed=fitted,
        memory_busy_s=memory_s(moved, machine.memory_Bps), exposed_memory_s=exposed,
        transfers=_transfer_times(row, transfers, compute + exposed, plans, machine),
    )  # fmt: skip


def phase_times(rows: Iterable[Row], plans: Plans, machine: Machine) -> Iterator[PhaseTime]:
    """Every row forward and backward, and once more forward where it is recomputed."""
    for row in rows:
        yield phase_time(row, FORWARD, plans, machine)
        yield phase_time(row, BACKWARD, plans, machine)
        if not isinstance(row.recomputed, float) or row.recomputed:
            yield _scaled(phase_time(row, RECOMPUTE, plans, machine), row.recomputed)


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
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Exposed time of some rows for one micro-batch."""

    forward_s: Num
    backward_s: Num

    @property
    def both_s(self) -> Num:
        """Forward and backward."""
        return self.forward_s + self.backward_s


def pass_of(times: Iterable[PhaseTime]) -> Pass:
    """Sums by direction; recomputation belongs to the backward pass."""
    forward: Num = 0.0
    backward: Num = 0.0
    for time in times:
        if time.phase == FORWARD:
            forward = forward + time.total_s
        else:
            backward = backward + time.total_s
    return Pass(forward_s=forward, backward_s=backward)
