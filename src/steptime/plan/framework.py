"""What the training software makes of a machine: slowdowns, overlap and overheads of a named framework."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from steptime.cost.host import SHARPNESS
from steptime.num import Num, maximum


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Uncertainty of the parameters of a framework, fitted to the residuals of measured runs."""

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
    experts: float = 0.0
    """What models with experts add to the noise, as a standard deviation."""
    widening: float = 1.0
    """Factor on the band of a device that few sources have measured, of :func:`widening`."""


NORMAL_95 = 1.6449
"""95 % quantile of the normal distribution."""
PRIOR_SOURCES = 2
"""What is believed of a device before any source measured it counts as much as this many sources."""


def widening(sources: float) -> float:
    r"""Factor on the width of a band for a device that only a few sources have measured.

    $$w = \frac{t_\nu}{z}, \qquad t_\nu = z + \frac{z^3+z}{4\nu} + \frac{5z^5+16z^3+3z}{96\nu^2} +
      \frac{3z^7+19z^5+17z^3-15z}{384\nu^3}, \qquad \nu = n + n_0$$

    where $n$ = `sources`, $n_0$ = :data:`PRIOR_SOURCES`, and $t_\nu$ is the 95 % quantile of Student's distribution
    by its expansion around that of the normal, $z$: the spread between sources is itself known from $\nu$ of them.

    Source: Fisher and Cornish, The percentile points of distributions having known cumulants, Technometrics 2, 1960.

    >>> round(widening(0), 2), round(widening(3), 3), widening(1e9) == 1.0   # t: 2.92, 2.015, 1.645
    (1.75, 1.225, True)
    """
    z, nu = NORMAL_95, sources + PRIOR_SOURCES
    t = z + (z**3 + z) / (4 * nu) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * nu**2)
    t += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * nu**3)
    return round(t / z, 6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """Parameters of one training framework; the ideal one changes nothing.

    Every parameter is a factor on a time of the model (1: as modelled), a share, or seconds. They may be arrays when
    many runs are composed at once.
    """

    name: str = "ideal"
    matrix: Num = 1.0
    """Time of matrix products in a running step over their time measured alone (clocks under load, layouts)."""
    narrow: Num = 1.0
    """Time of products in formats narrower than 16 bits over what :attr:`matrix` makes of them: scales, casts and
    layouts that a measurement of the product alone leaves out."""
    attention: Num = 1.0
    """Factor as :attr:`matrix`, of the attention core."""
    vector: Num = 1.0
    """Factor as :attr:`matrix`, of operators bound by memory: what is not fused costs more than once."""
    host_s: Num = 0.0
    """Time of the host to issue one operator of the model; below it the device waits."""
    tensor_links: Num = 1.0
    """Time of transfers over ``tp`` (and ``tp2``), hidden or not, over their time on free links."""
    context_links: Num = 1.0
    """The same over ``cp``."""
    expert_links: Num = 1.0
    """The same over ``ep``."""
    data_links: Num = 1.0
    """Time of gradient and weight traffic over its time on free links."""
    data_exposed: Num = 0.0
    """Share of the traffic that could overlap with computation but does not."""
    stage_links: Num = 1.0
    """Time of messages between stages over their time on free links."""
    router_s: Num = 0.0
    """Time that the device waits for the host at one router of experts, in each direction."""
    captured_wait: Num = 1.0
    """Share of it that is left where router and preprocessing are one graph."""
    stage_s: Num = 0.0
    """Time that the host loses per micro-batch and stage for starting it and waiting for its neighbours."""
    optimizer: Num = 1.0
    """Time of the optimiser step over one pass over its tensors."""
    step_s: Num = 0.0
    """Time that the ranks of a step spend on what they do together and no work explains: hooks and buckets of
    gradients, their norm, barriers of timers and logs (:func:`steptime.cost.host.step_overhead_s`)."""
    issue_sharpness: float = SHARPNESS
    """No parameter, but of the device: exponent of :func:`steptime.cost.host.issued_s`."""
    growth: Num = 0.0
    """Relative growth of the step per doubling of the devices beyond eight: stragglers and shared links."""
    spread: Spread | None = field(default=None, compare=False)
    """How far all this can be trusted; None: nothing is known, and estimates have no band."""

    def links(self, axis: str) -> Num:
        """Factor on transfers over an axis of the mesh."""
        factor: Num = getattr(self, AXIS_LINKS[axis])
        return factor


AXIS_LINKS = {
    "tp": "tensor_links",
    "tp2": "tensor_links",
    "etp": "tensor_links",
    "cp": "context_links",
    "ep": "expert_links",
}
LINKS = (*dict.fromkeys(AXIS_LINKS.values()), "data_links", "stage_links")
"""Parameters that are factors on transfers."""
PARAMETERS = tuple(f.name for f in fields(Framework) if f.name not in ("name", "issue_sharpness", "spread"))
FACTORS = tuple(name for name in PARAMETERS if getattr(Framework(), name) == 1.0)
"""Parameters that are factors on times."""
SHARES = frozenset({"data_exposed"})
"""Parameters between 0 and 1; all others are positive (or above :data:`LEAST`)."""
LEAST = {"data_links": 1.0, "stage_links": 1.0}
"""Least values: what travels as a whole takes no less than on free links; what overlaps is another parameter."""
TINY = 1e-9
"""What stands for nothing above a least value."""
BUSY = ("matrix", "narrow", "attention")
"""Parameters that a device's own factors multiply: its clock under load, and how well its kernels are known."""


def without_hiding(framework: Framework) -> Framework:
    """The framework where no transfer overlaps: its factors on links are at least 1.

    A factor below 1 was fitted to runs that overlap more than the model does.
    """
    whole: dict[str, Any] = {name: maximum(getattr(framework, name), 1.0) for name in LINKS}
    return replace(framework, **whole)


def to_fitted_scale(name: str, value: float) -> float:
    """A parameter on the scale on which it is fitted and doubted: logarithm (of what it has above its least value
    where :data:`LEAST` names one), of a share the logit.

    >>> to_fitted_scale("matrix", 1.0), to_fitted_scale("data_exposed", 0.5), to_fitted_scale("data_links", 2.0)
    (0.0, 0.0, 0.0)
    """
    return float(np.log(value / (1 - value)) if name in SHARES else np.log(max(value - LEAST.get(name, 0.0), TINY)))


def from_fitted_scale(name: str, fitted: Num) -> Num:
    """The inverse of :func:`to_fitted_scale`, of one value or of many."""
    out: Num = 1 / (1 + np.exp(-fitted)) if name in SHARES else LEAST.get(name, 0.0) + np.exp(fitted)
    return out


IDEAL = Framework()


MODEL_AXES = ("tp", "cp", "pp", "ep")
"""Axes of common frameworks other than ``dp``."""


def piped_stage(zero: int, stages: int) -> int:
    """The ZeRO stage that a stage amounts to with a number of pipeline stages.

    A pipeline keeps the weights gathered and reduces gradients once per step, so that what shards all of both runs as
    ZeRO-1 there (torchtitan: `fsdp_reshard_after_forward`, by default off with a pipeline).

    >>> piped_stage(3, 1), piped_stage(3, 4), piped_stage(0, 4)
    (3, 1, 0)
    """
    return zero if stages == 1 else min(zero, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """Defaults and features of a framework: facts of its documentation, not fitted."""

    gradient_dtype: str | None = None
    """Dtype in which gradients are accumulated and reduced; None: that of the precision."""
    context: str = "all_gather"
    """What context-parallel ranks exchange."""
    overlap: frozenset[str] = frozenset({"dp"})
    """Traffic that runs behind computation where it can."""
    kernel: str = "newest"
    """Fused attention kernel, of :data:`KERNELS`."""
    scattered_messages: bool = False
    """Tensor-parallel ranks each send their part of a message between stages, and gather it where it arrives."""

    exchange_once: bool = False
    """Tokens cross to their experts by kernels that send no copy twice over the same links (DeepEP, HybridEP)."""
    single_ring: bool = False
    """What ZeRO-3 gathers and reduces travels over one ring, and so over one NIC of each node."""
    root_unit: bool = False
    """ZeRO-3 gathers embedding and head before all layers and reduces them after all, as one unit (FSDP1)."""

    copied_parameters: bool = False
    """FSDP copies each parameter out of the buffer that it gathers, and its gradient into one (FSDP2)."""

    stops_early: bool = False
    """Recomputation of a whole layer ends before what the backward pass does not read: the second product of an MLP."""

    fused_copies: frozenset[str] = frozenset()
    """What fused attention copies from one layout of batch, sequence and heads into another, of :data:`COPIES`."""

    unfused_copies: frozenset[str] = frozenset()
    """What unfused attention copies from one layout into another."""

    complex_rope: bool = False
    """Rotary embeddings multiply complex numbers in fp32, which the compiler of PyTorch fuses with nothing."""

    triangular_softmax: bool = False
    """The softmax of unfused causal attention reads half of the scores, the unmasked scores, and each once."""

    asynchronous_tp: bool = False
    """Backward, traffic over ``tp`` of a product that gathers its input overlaps with its two products, each with one
    (:func:`steptime.plan.overlap.with_overlapped_gradients`)."""

    one_pass_norms: bool = False
    """Backward, a LayerNorm reads its input once (Apex's FastLayerNorm, Transformer Engine), not for each result."""

    separate_kernels: bool = False
    """What others fuse has kernels of its own: a dropout, before the residual addition, and the scaling and masking of
    the scores of unfused attention, before the softmax."""

    fp8: str = "fp8-te"
    """Recipe that it means by FP8 without further words."""

    selective: str = "attention"
    """What it recomputes when asked to do so selectively, in the words of a plan."""

    parts: str = ""
    """What it can recompute of a layer, other than all of it, for least time per byte; empty: nothing that is tried."""

    expert_parts: str = ""
    """The same of models with experts."""

    plain_norms: bool = False
    """RMSNorms are operators of the framework, each a kernel on fp32 copies; else one kernel."""

    recompute: str = "none"
    """What it recomputes unless told otherwise."""

    zero: int = 1
    """ZeRO stage that it runs unless told otherwise, without a pipeline."""

    within_node: bool = False
    """By default the devices of a node shard the states, and the nodes hold copies (HSDP)."""

    zero_stages: frozenset[int] = frozenset({0, 1, 2, 3})
    """ZeRO stages that it has, without a pipeline."""

    axes: frozenset[str] = frozenset(MODEL_AXES)
    """Axes that it has other than ``dp``."""

    def zero_with(self, stages: int) -> int:
        """ZeRO stage by default, with a number of pipeline stages (:func:`piped_stage`).

        >>> Habits(zero=3).zero_with(1), Habits(zero=3).zero_with(4), Habits(zero=0).zero_with(4)
        (3, 1, 0)
        """
        return piped_stage(self.zero, stages)

    def stages_with(self, stages: int) -> frozenset[int]:
        """ZeRO stages that it has with a number of pipeline stages.

        >>> torchtitan = Habits(zero_stages=frozenset({0, 2, 3}))
        >>> sorted(torchtitan.stages_with(1)), sorted(torchtitan.stages_with(2))
        ([0, 2, 3], [0, 1])
        """
        return frozenset(piped_stage(stage, stages) for stage in self.zero_stages)

    def overlap_with(self, offload: frozenset[str], *, experts: bool) -> frozenset[str]:
        """Traffic that overlaps by default where ``offload`` is kept on the host; without experts no
        ``ep``."""
        own = self.overlap if experts else self.overlap - {"ep"}
        return own | ({"offload"} if "activations" in offload else set())


COPIES = ("inputs", "context")
"""What attention may copy from one layout into another: queries, keys and values; what it returns."""
#: Fused attention kernel -> its time over that of cuDNN's, by architecture.
KERNELS: Mapping[str, Mapping[str, float]] = {
    "newest": {},
    "flash4": {"blackwell": 0.85},
    "flash2": {"hopper": 1.7, "blackwell": 2.5},
    "sdpa": {"hopper": 1.7},
    "flash1": {"ampere": 2.0, "ampere-rtx": 2.0, "ada": 2.0, "hopper": 3.4, "blackwell": 5.0},
}
"""FlashAttention-2 takes half the time of its predecessor (arXiv 2307.08691); on Hopper the third takes 1.5 to 2 times
less (arXiv 2407.08608) and is as fast as cuDNN; on Blackwell assumed by the growth of the matrix rate. The fourth,
for Blackwell, is said to be up to 1.3 times as fast as cuDNN there; in the mean of shapes less, assumed.
`sdpa` is PyTorch's `scaled_dot_product_attention` as torchtitan calls it: FlashAttention-2, but cuDNN on Blackwell."""


def kernel_factor(kernel: str, architecture: str | None) -> float:
    """Time of a fused attention kernel over that of the newest of all architectures, on one of them.

    >>> kernel_factor("flash2", "hopper"), kernel_factor("flash2", "ampere"), kernel_factor("newest", None)
    (1.7, 1.0, 1.0)
    """
    return KERNELS[kernel].get(architecture or "", 1.0)
