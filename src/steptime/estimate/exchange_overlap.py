"""The exchange of tokens between experts beside the computation of another micro-batch."""

from __future__ import annotations

from steptime.cost.experts import exposed_exchange_s
from steptime.estimate.layer import BACKWARD, FORWARD, PhaseTime
from steptime.num import Num
from steptime.plan.job import Job
from steptime.plan.plans import Plans

AXIS = "ep"
OPPOSITE = {FORWARD: BACKWARD, BACKWARD: FORWARD}


def hides_exchange(job: Job) -> bool:
    """Whether exchanges of a job may run beside another micro-batch."""
    return AXIS in job.overlap and job.model.experts is not None


def beside_another(times: tuple[PhaseTime, ...], plans: Plans) -> tuple[PhaseTime, ...]:
    """The rows of a layer, of whose exchanges only what is longer than the opposite pass shows.

    Both are those of the machine, before a framework's factors. Recomputation belongs to the backward pass.
    """
    work: dict[str, Num] = {FORWARD: 0.0, BACKWARD: 0.0}
    sent: dict[str, Num] = {FORWARD: 0.0, BACKWARD: 0.0}
    for time in times:
        phase = _direction(time)
        work[phase] = work[phase] + (time.compute_s + time.exposed_memory_s)
        for each in time.transfers:
            if each.transfer.axis == AXIS:
                sent[phase] = sent[phase] + each.exposed_s
    shares = {
        phase: exposed_exchange_s(sent[phase], work[OPPOSITE[phase]], plans.vpp) / (sent[phase] + (sent[phase] == 0))
        for phase in sent
    }
    return tuple(_shown(time, shares[_direction(time)]) for time in times)


def _direction(time: PhaseTime) -> str:
    return FORWARD if time.phase == FORWARD else BACKWARD


def _shown(time: PhaseTime, share: Num) -> PhaseTime:
    """The row with so much of its exchange exposed."""
    transfers = tuple([
        t._replace(exposed_s=t.exposed_s * share) if t.transfer.axis == AXIS else t for t in time.transfers
    ])  # fmt: skip
    return time._replace(transfers=transfers) if transfers else time
