"""What the training software makes of a machine: slowdowns, overlap and overheads of a named framework."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from steptime.num import Num


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How far the parameters of a framework can be trusted, learnt from the residuals of measured runs."""

    doubts: Mapping[str, float]
    """Standard deviation of each parameter, of the logarithm (of shares: of the logit)."""
    device_doubt: float
    """Standard deviation of the logarithm of the device's own factor on products."""
    noise: float
    """Standard deviation of the logarithm of time of runs that are known exactly."""
    low: float
    """Quantiles of residuals in units of the standard deviation that all doubts make: of 5 % and of 95 %."""
    high: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """Parameters of one training framework; the ideal one changes nothing.

    Every parameter is a factor on a time of the model (1: as modelled), a share, or seconds. They may be arrays when
    many runs are composed at once.
    """

    name: str = "ideal"
    matrix: Num = 1.0
    """Time of matrix products in a running step over their time measured alone (clocks under load, layouts)."""
    attention: Num = 1.0
    """Likewise of the attention core."""
    vector: Num = 1.0
    """Likewise of operators bound by memory: what is not fused costs more than once."""
    host_s: Num = 0.0
    """Time of the host to issue one operator of the model; below it the device waits."""
    tensor_links: Num = 1.0
    """Exposed time of transfers over ``tp`` (and ``tp2``) over their time on free links."""
    context_links: Num = 1.0
    """Likewise over ``cp``."""
    expert_links: Num = 1.0
    """Likewise over ``ep``."""
    data_links: Num = 1.0
    """Time of gradient and weight traffic over its time on free links."""
    data_exposed: Num = 0.0
    """Share of the traffic that could hide behind computation but does not."""
    stage_links: Num = 1.0
    """Time of messages between stages over their time on free links."""
    stage_s: Num = 0.0
    """Time that the host loses per micro-batch and stage for starting it and waiting for its neighbours."""
    optimizer: Num = 1.0
    """Time of the optimiser step over one pass over its tensors."""
    step_s: Num = 0.0
    """Time of a step that no work explains: data loading, logging, clipping, synchronisation."""
    growth: Num = 0.0
    """Relative growth of the step per doubling of the devices beyond eight: stragglers and shared links."""
    spread: Spread | None = field(default=None, compare=False)
    """How far all this can be trusted; None: nothing is known, and estimates have no band."""

    def links(self, axis: str) -> Num:
        """Factor on transfers over an axis of the mesh."""
        factor: Num = getattr(self, AXIS_LINKS[axis])
        return factor


AXIS_LINKS = {
    "tp": "tensor_links", "tp2": "tensor_links", "etp": "tensor_links", "cp": "context_links", "ep": "expert_links",
}  # fmt: skip
PARAMETERS = tuple(f.name for f in fields(Framework) if f.name not in ("name", "spread"))
SHARES = frozenset({"data_exposed"})
"""Parameters between 0 and 1; all others are positive."""
IDEAL = Framework()


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """What a framework does unless it is told otherwise; facts of its documentation, not fitted."""

    gradient_dtype: str | None = None
    """Dtype in which gradients are accumulated and reduced; None: that of the precision."""
    context: str = "all_gather"
    """What context-parallel ranks exchange."""
    overlap: frozenset[str] = frozenset({"dp"})
    """Traffic that runs behind computation where it can."""


_MEGATRON = Habits(gradient_dtype="fp32", context="ring", overlap=frozenset({"dp"}))
HABITS: Mapping[str, Habits] = {
    "megatron": _MEGATRON, "megatron-core": _MEGATRON, "megatron-2021": _MEGATRON,
    "megatron-deepspeed": Habits(), "torchtitan": Habits(gradient_dtype="fp32", context="ring"),
}  # fmt: skip
"""Megatron-LM accumulates and reduces in fp32 (`--accumulate-allreduce-grads-in-fp32` with bf16); torchtitan reduces in
fp32; both pass keys and values round a ring. Others as :class:`Habits` says."""


def habits_of(name: str) -> Habits:
    """Habits of a framework; of one without an entry the defaults."""
    return HABITS.get(name, Habits())
