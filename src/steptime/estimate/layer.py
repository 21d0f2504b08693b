"""Times of the rows of a block: each row with its formulas, on the numbers of a device and a fabric."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from steptime.cost.collective import shown_beside_s
from steptime.cost.roofline import memory_s, roofline_compute_s, roofline_exposed_memory_s
from steptime.estimate.communication import transfer_s
from steptime.estimate.kernels import Timed, called_once, timed
from steptime.estimate.machine import Machine
from steptime.estimate.operators import OPERATORS
from steptime.num import Num, maximum, where
from steptime.plan.copies import NARROW
from steptime.plan.framework import IDEAL, Framework
from steptime.plan.plans import Plans
from steptime.plan.rows import Block, Row, Transfer
from steptime.terms import Called, at, call

FORWARD, BACKWARD, RECOMPUTE = "forward", "backward", "recompute"
PARTS = ("layer", "first", "last")
"""Parts of a model: one of its equal layers, what comes before them, and what comes after."""


class TransferTime(NamedTuple):
    """One transfer of a row in one phase."""

    transfer: Transfer
    busy_s: Num
    """Time on the links."""
    covered_s: Num
    """Part of ``busy_s`` that overlaps with the row's own work, and is exposed only as far as it takes longer."""
    one_s: Num
    """Time of one call of its collective: the whole transfer, or one panel of a blocked product."""
    calls: Sequence[Called] = ()
    """That call on the tape; empty without a tape."""


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
    """Operators that the host issues for the row."""
    narrow: bool = False
    """True for a product in a format narrower than 16 bits."""
    peak_s: Num = 0.0
    """Time of its products at the peak of the matrix units."""
    learned: Num = 1.0
    """Factor of a learned correction, contained in the times."""
    times: Num = 1.0
    """Occurrences of the row in a layer; all numbers above are for all of them."""
    calls: Sequence[Called] = ()
    """Formulas of the row's own time, for one occurrence; empty without a tape."""

    @property
    def direction(self) -> str:
        """Pass to which the phase belongs: recomputation is part of the backward pass."""
        return FORWARD if self.phase == FORWARD else BACKWARD

    @property
    def own_s(self) -> Num:
        """Time of the row without its transfers."""
        return self.compute_s + self.exposed_memory_s

    @property
    def total_s(self) -> Num:
        """Time of the row and exposed time of its transfers, without the factors of a framework."""
        return self.own_s + sum(exposed_transfers_s(self))

    @property
    def beside_s(self) -> Num:
        """Part of the row's own time with which its transfers may overlap; for a blocked product all of it."""
        return _share_beside(self.row, self.phase) * self.own_s


def factor_of(kind: str, narrow: bool, framework: Framework) -> Num:
    """Factor of a framework on the time of work of a kind; ``narrow``: in a format narrower than 16 bits."""
    factor: Num = getattr(framework, kind)
    return factor * framework.narrow if narrow else factor


def kind_of(row: Row) -> str:
    """Kind of a row's work, of :data:`~steptime.estimate.operators.KINDS`."""
    return OPERATORS[row.operator].kind


def may_overlap(row: Row, phase: str) -> bool:
    """True if transfers of a row may overlap with its own work in a phase."""
    share = _share_beside(row, phase)
    return not isinstance(share, float) or share > 0


def _share_beside(row: Row, phase: str) -> Num:
    """Share of a row's own time in a phase with which its transfers may overlap."""
    if row.panels is not None:
        return 1.0
    return maximum(row.overlaps, row.overlaps_backward) if phase == BACKWARD else row.overlaps


def exposed_transfers_s(time: PhaseTime, framework: Framework = IDEAL) -> Iterator[Num]:
    """Exposed time of each transfer of a row under a framework; transfers use up the row's own time in turn."""
    left_s = time.beside_s * factor_of(kind_of(time.row), time.narrow, framework)
    for each in time.transfers:
        factor = framework.links(each.transfer.axis)
        covered_s = each.covered_s * factor
        yield (each.busy_s - each.covered_s) * factor + shown_beside_s(covered_s, left_s)
        left_s = shown_beside_s(left_s, covered_s)


def _transfer_times(
    row: Row, phase: str, transfers: Iterable[Transfer], plans: Plans, machine: Machine
) -> Iterator[TransferTime]:
    panels = 1 if row.panels is None else row.panels
    for transfer in transfers:
        if transfer.group is None and plans.is_alone(transfer.axis):
            continue
        with at(f"{transfer.axis}_comm/{phase}/{row.name}") as calls:
            one_s = transfer_s(transfer, plans, machine, panels)
        covered_s = one_s * panels if may_overlap(row, phase) else 0.0
        if row.overlaps_near:
            anywhere = row.overlaps_backward if phase == BACKWARD else 0.0
            covered_s = where(plans.is_near(transfer.axis) | (anywhere > 0), covered_s, 0.0)
        busy_s = one_s if row.panels is None else one_s * (panels + 1)
        yield TransferTime(transfer, busy_s, covered_s, one_s, calls)


def links_busy_s(time: PhaseTime, plans: Plans, machine: Machine) -> Num:
    """Time for which the transfers of a row keep the links of another machine busy."""
    panels = time.row.panels
    parts, passes = (1, 1) if panels is None else (panels, panels + 1)
    total: Num = 0.0
    for each in time.transfers:
        total = total + transfer_s(each.transfer, plans, machine, parts) * passes
    return total * time.times


def phase_time(row: Row, phase: str, plans: Plans, machine: Machine) -> PhaseTime:
    """Time of one occurrence of a row in one phase; recomputation is another forward pass."""
    operator = OPERATORS[row.operator]
    formulas, sent = (operator.backward, row.backward) if phase == BACKWARD else (operator.forward, row.forward)
    matrix: Num = 0.0 if formulas.matrix_flops is None else formulas.matrix_flops(row.shape)
    vector: Num = 0.0 if formulas.vector_flops is None else formulas.vector_flops(row.shape)
    moved: Num = 0.0 if formulas.moved_bytes is None else formulas.moved_bytes(row.shape)
    fitted = _fitted(row, phase, machine, matrix, vector, moved)
    flops_per_s, vector_flops_per_s, launch_s = row_rates(row, machine)
    with at(f"{phase}/{row.name}") as calls:
        if fitted is None:
            compute = call(
                roofline_compute_s, matrix_flops=matrix, vector_flops=vector, matrix_flops_per_s=flops_per_s,
                vector_flops_per_s=vector_flops_per_s, kernel_latency_s=launch_s if formulas.works else 0.0,
            )  # fmt: skip
            exposed = call(
                roofline_exposed_memory_s, moved_bytes=moved, memory_Bps=machine.memory_Bps, compute_s=compute
            )
        else:
            compute, exposed = fitted.seconds, 0.0 * moved
    # Products at the peak of the matrix units; recorded kernels with their own format at the peak of that format.
    peak_s = matrix / (flops_per_s / machine.matrix_efficiency)
    if fitted is not None and row.timing is not None:
        own = fitted.model.fixed.get("peak_flops_per_s")
        peak_s = 0.0 * matrix if own is None else matrix / own
    learned = _learned(row, phase, machine, (matrix, vector, moved), compute + exposed)
    return PhaseTime(
        row=row, phase=phase, matrix_flops=matrix, vector_flops=vector, moved_bytes=moved, compute_s=compute * learned,
        timed=fitted, memory_busy_s=memory_s(moved, machine.memory_Bps), exposed_memory_s=exposed * learned,
        learned=learned, calls=calls,
        transfers=tuple(_transfer_times(row, phase, sent, plans, machine)) if sent else (),
        issued=row.issued if formulas.works else 0.0, narrow=machine.narrow and row.operator in NARROW,
        peak_s=peak_s,
    )  # fmt: skip


def _learned(row: Row, phase: str, machine: Machine, counts: tuple[Num, Num, Num], seconds: Num) -> Num:
    """Factor of the machine's learned correction on a row; 1 without one."""
    if machine.correction is None:
        return 1.0
    from steptime.estimate.learned import described

    work = dict(zip(("matrix_flops", "vector_flops", "moved_bytes"), counts, strict=True))
    work["launches"] = _launches(row, machine)
    numbers = described(
        row.shape,
        work,
        seconds,
        backward=phase == BACKWARD,
        peak_flops_per_s=machine.matrix_flops_per_s,
        memory_Bps=machine.memory_Bps,
    )
    return machine.correction.factor(row.operator, numbers, machine.device)


def row_rates(row: Row, machine: Machine) -> tuple[Num, Num, Num]:
    """Rates of the matrix and vector units for a row, and the latency of its launches."""
    operator = OPERATORS[row.operator]
    matrix = machine.attention_flops_per_s if operator.attends else machine.matrix_flops_per_s
    if operator.wide:
        matrix = machine.attention_flops_per_s * machine.wide_share
    if operator.unaligned:
        matrix = machine.unaligned_flops_per_s or machine.vector_flops_per_s
    return matrix, machine.vector_flops_per_s, machine.kernel_latency_s * _launches(row, machine)


def _launches(row: Row, machine: Machine) -> float:
    if row.timing is None or (called_once(row.timing.operator, on_host=machine.is_host)):
        return 1.0
    return row.timing.launches


def _counted(time: PhaseTime, times: Num, phase: str, sends: Num = 1.0) -> PhaseTime:
    """Times of a row scaled to ``times`` occurrences in a layer, under another phase; ``sends``: share of transfers."""
    if isinstance(times, float) and times == 1.0 and phase == time.phase:
        return time
    sent = time.transfers
    for factor in (sends, times):
        if not isinstance(factor, float) or factor != 1.0:
            sent = tuple([one._replace(busy_s=one.busy_s * factor, covered_s=one.covered_s * factor) for one in sent])
    return PhaseTime(
        row=time.row, phase=phase, matrix_flops=time.matrix_flops * times, vector_flops=time.vector_flops * times,
        moved_bytes=time.moved_bytes * times, compute_s=time.compute_s * times, timed=time.timed,
        memory_busy_s=time.memory_busy_s * times, exposed_memory_s=time.exposed_memory_s * times,
        transfers=sent, issued=time.issued * times, narrow=time.narrow,
        peak_s=time.peak_s * times, learned=time.learned, times=times,
        calls=time.calls,
    )  # fmt: skip


def _fitted(row: Row, phase: str, machine: Machine, matrix: Num, vector: Num, moved: Num) -> Timed | None:
    """Calls of fitted models that time a row; None if the machine has none for it."""
    if not machine.models:
        return None
    operator, shape, backward = row.operator, row.shape, phase == BACKWARD
    if row.timing is not None:
        if getattr(OPERATORS[operator], BACKWARD if backward else FORWARD).moved_bytes is None:
            return None
        operator, shape, backward = row.timing.operator, row.timing.shape, row.timing.backward
    work = {"matrix_flops": matrix, "vector_flops": vector, "moved_bytes": moved}
    return timed(machine.models, operator, shape, work, backward=backward)


def part_times(block: Block, plans: Plans, machine: Machine) -> dict[str, tuple[PhaseTime, ...]]:
    """Times of the rows of each part of the model for one micro-batch.

    A row appears in every phase in which it has work: forward, backward, and forward again if it is recomputed.
    """
    times: dict[str, list[PhaseTime]] = {part: [] for part in PARTS}
    for part, found in times.items():
        for row in getattr(block, part):
            operator, forward = OPERATORS[row.operator], None
            if operator.forward.works or row.forward:
                forward = phase_time(row, FORWARD, plans, machine)
                found.append(_counted(forward, row.share, FORWARD))
            if operator.backward.works or row.backward:
                found.append(_counted(phase_time(row, BACKWARD, plans, machine), row.share, BACKWARD))
            if forward is not None and (not isinstance(row.recomputed, float) or row.recomputed):
                again = row.recomputed * row.share
                found.append(_counted(forward, again, RECOMPUTE, row.sent_again))
    return {part: tuple(found) for part, found in times.items()}
