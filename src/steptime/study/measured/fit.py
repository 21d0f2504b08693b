"""A coarse memory of a setting, only to tell which settings a run cannot have had."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

from steptime.study.measured.degrees import Degrees
from steptime.workload.parameters import parameter_terms
from steptime.workload.spec import ModelSpec

#: Share of the memory beyond which a setting counts as not fitting; the estimate is coarse.
ROOM: Final = 1.1
UNFIT_WEIGHT: Final = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the memory of one device depends on."""

    degrees: Degrees
    micro_batch: int
    micro_batches: int
    zero: int
    shard_ranks: int
    recompute: str
    sequence_parallel: bool
    fused: bool
    element_bytes: float
    frozen: bool
    """Weights are frozen: no gradients and no states of the optimiser."""
    base_bytes: float
    """Bytes of a weight in use."""
    offload: frozenset[str]


@cache
def _parameters(spec: ModelSpec) -> tuple[float, float]:
    """Weights outside and inside of the routed experts."""
    terms = parameter_terms(spec)
    routed = sum(terms.get(path, 0.0) for path in ("layers/experts/up", "layers/experts/down"))
    return float(terms.total) - routed, float(routed)


def coarse_bytes(spec: ModelSpec, seq_len: int, load: Load) -> float:
    r"""States and activations of the fullest device, coarsely.

    States: with Adam and reduced precision 2 bytes per weight, 2 to 4 per gradient, 12 per state, each shared out
    from its ZeRO stage on. Activations of a layer (arXiv 2205.05198, equations 1 to 5): :math:`s b h (10 + 24/t)`,
    :math:`34 s b h / t` with sequence parallelism, :math:`5 a s^2 b / t` more without a fused kernel, and
    :math:`2 s b h` with full recomputation; of as many micro-batches as are in flight on the first stage, which are
    all layers of the pipeline.
    """
    d = load.degrees
    dense, routed = _parameters(spec)
    held = dense / (d.tp * d.pp) + routed / (d.pp * max(d.ep or 1, 1))
    shards = max(1, load.shard_ranks)
    weights = load.base_bytes * held / (shards if load.zero >= 3 or "weights" in load.offload else 1)
    states = 0.0
    if not load.frozen:
        states = 3 * held / (shards if load.zero >= 2 else 1)
        states += 0.0 if "optimizer" in load.offload else 12 * held / (shards if load.zero >= 1 else 1)
    return weights + states + _activation_bytes(spec, seq_len, load)


def _activation_bytes(spec: ModelSpec, seq_len: int, load: Load) -> float:
    d = load.degrees
    tokens = seq_len * load.micro_batch / d.cp
    tp = d.tp if load.sequence_parallel else 1
    whole = 2 * tokens * spec.hidden / tp
    block = 5 * whole + 24 * tokens * spec.hidden / d.tp
    scores = 0.0 if load.fused else 5 * spec.heads * seq_len * tokens / d.tp
    kept = {"full": whole, "attention": block, "norms": 0.8 * block, "ops": 0.6 * block}.get(load.recompute)
    layer = block + scores if kept is None else kept
    layer = 0.0 if "activations" in load.offload else layer * load.element_bytes / 2
    in_flight = min(d.pp, load.micro_batches) * (1 + 1 / d.pp if (d.vpp or 1) > 1 else 1)
    logits = 6 * tokens * spec.vocab / d.tp
    return layer * spec.layers / d.pp * in_flight + logits + (block + scores if load.recompute == "full" else 0.0)


def fit_weight(needed_bytes: float, memory_bytes: float) -> float:
    """1 for what fits, little for what does not.

    >>> fit_weight(70e9, 80e9), fit_weight(90e9, 80e9)
    (1.0, 0.002)
    """
    return 1.0 if needed_bytes <= ROOM * memory_bytes else UNFIT_WEIGHT
