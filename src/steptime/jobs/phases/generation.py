"""Roofline of the generation of responses: concurrent sequences, and time per token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import ceil
from typing import Any, Final

from steptime.cost.generation import cache_bytes_per_token, decode_step_s, generation_s
from steptime.errors import PlanError, UserError
from steptime.hardware import load_cluster
from steptime.model import ModelSpec, active_parameter_terms, parameter_terms
from steptime.simulation.collectives.times import collective

ELEMENT_BYTES: Final = 2.0
"""Bytes of an element of weights and of the cache: bf16."""
USED: Final = 0.9
"""Part of the memory that generation may fill, the default of serving software."""
RATES: Final = ("bf16", "fp16", "fp32")
"""Dtypes in order of preference for the rate of products."""
STARTS_PER_LAYER: Final = 2
"""All-reduces per layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Responses:
    """Responses to generate in a step."""

    sequences: int
    prompt: int
    """Tokens of a prompt."""
    response: int
    """Tokens of a response."""
    at_once: int | None = None
    """Sequences of an engine at once; None: as many as fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Concurrent sequences and their memory."""

    engines: int
    held: int
    """Sequences of an engine that free memory holds; 0: none."""
    at_once: int
    """Sequences of an engine that run at once, at least one."""
    waves: int
    token_bytes: float
    """Bytes of a token in the cache of a device."""
    cache_bytes: float
    """Cache of a device at the end of a wave."""
    weight_bytes: float
    """Weights on a device: a copy in addition to the trained ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Time and memory of the generation of responses."""

    tp: int
    """Devices that generate the same sequences."""
    engines: int
    at_once: int
    """Sequences of an engine at once."""
    held: int
    """Sequences of an engine that free memory holds; fewer than ``at_once``: generation does not fit."""
    waves: int
    step_s: float
    exchange_s: float
    prefill_s: float
    total_s: float
    cache_bytes: float
    """Cache of a device at the end of a wave."""
    weight_bytes: float
    """Weights on a device: a copy in addition to the trained ones."""
    tokens_per_s: float
    """Tokens per second of all devices."""

    def to_json(self) -> Mapping[str, Any]:
        """Plain data."""
        return asdict(self)


def kv_width(model: ModelSpec) -> int:
    """Elements of a token in the cache of a layer."""
    if model.latent is not None:
        return model.latent.kv_lora_rank + model.latent.qk_rope_head_dim
    return 2 * model.kv_heads * model.head_dim


def _main(model: ModelSpec) -> ModelSpec:
    """The model without multi-token-prediction layers: engines load them for speculative decoding only."""
    return replace(model, mtp_depth=0)


def room_of(model: ModelSpec, asked: Responses, *, gpus: int, tp: int, free_bytes: float) -> Room:
    """Concurrent sequences and their memory; arguments as in :func:`generation_of`.

    Raises:
        UserError: the devices are no multiple of an engine's.
    """
    if tp < 1 or gpus % tp:
        raise PlanError(f"generation on {tp} devices: {gpus} GPUs are no multiple", hint="give --generation-tp N")
    engines, weights = gpus // tp, parameter_terms(_main(model)).total * ELEMENT_BYTES / tp
    per_token = cache_bytes_per_token(model.layers, kv_width(model), ELEMENT_BYTES) / tp
    each = per_token * (asked.prompt + asked.response)
    share = ceil(asked.sequences / engines)
    held = int((free_bytes * USED - weights) // each)
    waves = ceil(share / max(min(share, held if asked.at_once is None else asked.at_once), 1))
    count = ceil(share / waves)
    return Room(
        engines=engines,
        held=max(held, 0),
        at_once=count,
        waves=waves,
        token_bytes=float(per_token),
        cache_bytes=float(each * count),
        weight_bytes=float(weights),
    )


def generation_of(
    model: ModelSpec, cluster: str, asked: Responses, *, gpus: int, tp: int, free_bytes: float
) -> Generation:
    """Generation of all responses of a step on all devices.

    Args:
        model: the policy.
        cluster: name or file of its devices and links.
        asked: the responses.
        gpus: devices.
        tp: devices of an engine.
        free_bytes: memory of a device that training leaves.

    Raises:
        UserError: the devices are no multiple of an engine's, or the rate of their products is unknown.
    """
    room, device = room_of(model, asked, gpus=gpus, tp=tp, free_bytes=free_bytes), load_cluster(cluster).device
    prompt, response, count = asked.prompt, asked.response, room.at_once
    memory_Bps = device.memory_Bps * device.memory_efficiency
    peak = next((device.matrix_flops_per_s[name] for name in RATES if name in device.matrix_flops_per_s), None)
    if peak is None:
        raise UserError(f"the device of {cluster} has no rate of {', '.join(RATES)}", hint="give --generation-s")
    rate = peak * device.matrix_efficiency
    flops = 2.0 * active_parameter_terms(_main(model)).total / tp
    read = room.token_bytes * (prompt + response / 2)
    step_s = decode_step_s(room.weight_bytes, read * count, memory_Bps, flops * count, rate)
    exchange_s = 0.0
    if tp > 1:
        row = model.hidden * ELEMENT_BYTES * count
        found = collective("all_reduce", cluster, ranks=tp, size_bytes=row)
        exchange_s = STARTS_PER_LAYER * model.layers * found.times[0].time_s
    prefill_s = flops * prompt * count / rate
    total = generation_s(prefill_s, step_s, response, exchange_s, room.waves)
    return Generation(
        tp=tp,
        engines=room.engines,
        at_once=count,
        held=room.held,
        waves=room.waves,
        step_s=float(step_s),
        exchange_s=exchange_s,
        prefill_s=prefill_s,
        total_s=float(total),
        cache_bytes=room.cache_bytes,
        weight_bytes=room.weight_bytes,
        tokens_per_s=asked.sequences * response / float(total),
    )
