"""Effects of the training software on a machine: slowdowns, overlap and overheads of a named framework."""

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
    """Standard deviation of the logarithm of each parameter (for shares: of the logit)."""
    device_doubt: float
    """Standard deviation of the logarithm of the device's own factor on products."""
    noise: float
    """Standard deviation of the logarithm of the time of runs that are known exactly."""
    low: float
    """5 % quantile of residuals in units of the standard deviation from all doubts."""
    high: float
    source: str
    experts: float = 0.0
    """Standard deviation that models with experts add to the noise."""
    widening: float = 1.0
    """Factor on the band of a device that few sources have measured, by :func:`widening`."""


NORMAL_95 = 1.6449
"""95 % quantile of the normal distribution."""
PRIOR_SOURCES = 2
"""Weight of the prior of a device, as a number of sources that measured it."""


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
    """Time of products in formats narrower than 16 bits over their time with :attr:`matrix`: scales, casts and layouts
    that a measurement of the product alone leaves out."""
    attention: Num = 1.0
    """Time of the attention core in a running step over its time measured alone."""
    vector: Num = 1.0
    """Time of memory-bound operators in a running step over the modelled time, which assumes fusion."""
    host_s: Num = 0.0
    """Time of the host to issue one operator of the model; shorter operators make the device wait."""
    tensor_links: Num = 1.0
    """Time of transfers over ``tp`` (and ``tp2``), overlapped or not, over their time on free links."""
    context_links: Num = 1.0
    """Time of transfers over ``cp``, overlapped or not, over their time on free links."""
    expert_links: Num = 1.0
    """Time of transfers over ``ep``, overlapped or not, over their time on free links."""
    data_links: Num = 1.0
    """Time of gradient and weight traffic over its time on free links."""
    data_exposed: Num = 0.0
    """Share of the traffic that could overlap with computation but does not."""
    stage_links: Num = 1.0
    """Time of messages between stages over their time on free links."""
    router_s: Num = 0.0
    """Time that the device waits for the host at one router of experts, in each direction."""
    captured_wait: Num = 1.0
    """Share of :attr:`router_s` that remains if router and preprocessing are one graph."""
    stage_s: Num = 0.0
    """Time that the host loses per micro-batch and stage for starting it and waiting for its neighbours."""
    optimizer: Num = 1.0
    """Time of the optimiser step over one pass over its tensors."""
    step_s: Num = 0.0
    """Fixed time of a step for joint work of the ranks: hooks and buckets of gradients, their norm, barriers of timers
    and logs (:func:`steptime.cost.host.step_overhead_s`)."""
    issue_sharpness: float = SHARPNESS
    """Exponent of :func:`steptime.cost.host.issued_s`: a number of the device, no parameter of the framework."""
    growth: Num = 0.0
    """Relative growth of the step per doubling of the devices beyond eight: stragglers and shared links."""
    spread: Spread | None = field(default=None, compare=False)
    """Uncertainty of the parameters; None: unknown, so that estimates have no band."""

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
"""Least values: traffic as a whole takes no less than on free links; its overlap is another parameter."""
TINY = 1e-9
"""Smallest distance to a least value, which stands for zero."""
BUSY = ("matrix", "narrow", "attention")
"""Parameters that a device's own factors multiply: its clock under load, and the quality of its curves."""


def without_hiding(framework: Framework) -> Framework:
    """The framework without overlap of transfers: its factors on links are at least 1.

    A factor below 1 was fitted to runs that overlap more than the model does.
    """
    whole: dict[str, Any] = {name: maximum(getattr(framework, name), 1.0) for name in LINKS}
    return replace(framework, **whole)


def to_fitted_scale(name: str, value: float) -> float:
    """A parameter on the scale of the fit and of the doubts: the logarithm (of the distance to its least value, for
    those in :data:`LEAST`), for a share the logit.

    >>> to_fitted_scale("matrix", 1.0), to_fitted_scale("data_exposed", 0.5), to_fitted_scale("data_links", 2.0)
    (0.0, 0.0, 0.0)
    """
    return float(np.log(value / (1 - value)) if name in SHARES else np.log(max(value - LEAST.get(name, 0.0), TINY)))


def from_fitted_scale(name: str, fitted: Num) -> Num:
    """The inverse of :func:`to_fitted_scale`, for one value or many."""
    out: Num = 1 / (1 + np.exp(-fitted)) if name in SHARES else LEAST.get(name, 0.0) + np.exp(fitted)
    return out


IDEAL = Framework()


MODEL_AXES = ("tp", "cp", "pp", "ep")
"""Axes of common frameworks other than ``dp``."""


def piped_stage(zero: int, stages: int) -> int:
    """The effective ZeRO stage with a number of pipeline stages.

    A pipeline keeps the weights gathered and reduces gradients once per step, so that ZeRO-3 runs as ZeRO-1 there
    (torchtitan: `fsdp_reshard_after_forward`, by default off with a pipeline).

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
    """Exchange of context-parallel ranks, as the option ``context``."""
    overlap: frozenset[str] = frozenset({"dp"})
    """Traffic that overlaps with computation if it can."""
    kernel: str = "newest"
    """Fused attention kernel, of :data:`KERNELS`."""
    scattered_messages: bool = False
    """Tensor-parallel ranks each send their part of a message between stages, and gather it on arrival."""

    exchange_once: bool = False
    """Tokens go to their experts by kernels that send no copy twice over the same links (DeepEP, HybridEP)."""
    single_ring: bool = False
    """Traffic of ZeRO-3 goes round one ring, and so over one NIC of each node."""
    root_unit: bool = False
    """ZeRO-3 gathers embedding and head before all layers and reduces them after all, as one unit (FSDP1)."""

    copied_parameters: bool = False
    """FSDP copies each parameter out of the buffer that it gathers, and its gradient into one (FSDP2)."""

    stops_early: bool = False
    """Recomputation of a whole layer skips results that the backward pass does not read: an MLP's second product."""

    fused_copies: frozenset[str] = frozenset()
    """Tensors of :data:`COPIES` that fused attention copies to another layout of batch, sequence and heads."""

    unfused_copies: frozenset[str] = frozenset()
    """Tensors of :data:`COPIES` that unfused attention copies to another layout."""

    complex_rope: bool = False
    """Rotary embeddings multiply complex numbers in fp32, which PyTorch's compiler does not fuse."""

    triangular_softmax: bool = False
    """The softmax of unfused causal attention reads half of the scores, the unmasked scores, and each once."""

    asynchronous_tp: bool = False
    """Each of the two backward transfers over ``tp`` of a product that gathers its input overlaps with one of its two
    backward products (:func:`steptime.plan.overlap.with_overlapped_gradients`)."""

    one_pass_norms: bool = False
    """A backward LayerNorm reads its input once (Apex's FastLayerNorm, Transformer Engine), not for each result."""

    separate_kernels: bool = False
    """Separate kernels for work that others fuse: dropout before the residual addition, and scaling and masking of the
    scores of unfused attention before the softmax."""

    fp8: str = "fp8-te"
    """Recipe that ``fp8`` means in the framework."""

    selective: str = "attention"
    """Parts that ``selective`` recomputation means in the framework, in the words of a plan."""

    parts: str = ""
    """Parts of a layer that it can recompute at least time per byte; empty: a search tries no parts."""

    expert_parts: str = ""
    """The same parts for models with experts."""

    plain_norms: bool = False
    """An RMSNorm is several operators of PyTorch, each a kernel on fp32 copies; else it is one kernel."""

    recompute: str = "none"
    """Default recomputation."""

    zero: int = 1
    """Default ZeRO stage without a pipeline."""

    within_node: bool = False
    """By default the devices of a node shard the states, and the nodes hold replicas (HSDP)."""

    zero_stages: frozenset[int] = frozenset({0, 1, 2, 3})
    """Supported ZeRO stages without a pipeline."""

    axes: frozenset[str] = frozenset(MODEL_AXES)
    """Supported axes other than ``dp``."""

    def zero_with(self, stages: int) -> int:
        """Default ZeRO stage with a number of pipeline stages (:func:`piped_stage`).

        >>> Habits(zero=3).zero_with(1), Habits(zero=3).zero_with(4), Habits(zero=0).zero_with(4)
        (3, 1, 0)
        """
        return piped_stage(self.zero, stages)

    def stages_with(self, stages: int) -> frozenset[int]:
        """Supported ZeRO stages with a number of pipeline stages.

        >>> torchtitan = Habits(zero_stages=frozenset({0, 2, 3}))
        >>> sorted(torchtitan.stages_with(1)), sorted(torchtitan.stages_with(2))
        ([0, 2, 3], [0, 1])
        """
        return frozenset(piped_stage(stage, stages) for stage in self.zero_stages)

    def overlap_with(self, offload: frozenset[str], *, experts: bool) -> frozenset[str]:
        """Traffic that overlaps by default with ``offload`` kept on the host; without experts no ``ep``."""
        own = self.overlap if experts else self.overlap - {"ep"}
        return own | ({"offload"} if "activations" in offload else set())


COPIES = ("inputs", "context")
"""Tensors that attention may copy to another layout: queries, keys and values; its output."""
#: Fused attention kernel -> its time over the time of cuDNN's, by architecture.
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
    """Time of a fused attention kernel on an architecture over the time of the newest kernel on it.

    >>> kernel_factor("flash2", "hopper"), kernel_factor("flash2", "ampere"), kernel_factor("newest", None)
    (1.7, 1.0, 1.0)
    """
    return KERNELS[kernel].get(architecture or "", 1.0)
