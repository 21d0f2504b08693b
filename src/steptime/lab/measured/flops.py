"""What a printed rate counts as FLOPs, and the step time that follows from it.

Every definition is a weighted sum of three parts of one forward pass, per token:

* layers: :math:`F_L = 2 N_L`, with :math:`N_L` the weights of the matrices of all layers that a token meets,
* scores: :math:`F_A = 2 s H L (d_{qk} + d_v)` for scores and their product with the values over all pairs
  (:math:`4 s H d L` where both are :math:`d` wide),
* head: :math:`F_V = 2 V h`.

Sources: model FLOPs 3 (F_L + F_A + F_V), arXiv 2205.05198 appendix A; with full recomputation 4 (F_L + F_A) + 3 F_V,
arXiv 2104.04473 equation 3.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from steptime.lab.measured.canonical import catalogue_device
from steptime.model.parameters import active_parameter_terms, parameter_terms
from steptime.model.spec import ModelSpec
from steptime.plan.copies import NARROW_DTYPES
from steptime.plan.job import PRECISIONS


class TflopsDefinition(StrEnum):
    """What the FLOPs of a printed rate are."""

    MODEL_FULL = "3 (F_L + F_A + F_V)"
    MODEL_CAUSAL = "3 (F_L + F_A / 2 + F_V)"
    HARDWARE = "4 (F_L + F_A) + 3 F_V with full recomputation, 3 F_L + 4 F_A + 3 F_V with that of attention, else model"
    SIX_N_FULL = "6 N + 3 F_A"
    SIX_N = "6 N"
    TWO_N_PASSES = "4 x 2 N with recomputation, 3 x 2 N without"
    LORA = "2 F_L + 3 F_A / 2 + 2 F_V: no gradients of frozen weights"
    NOT_STATED = "not stated; taken for model, full attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardFlops:
    """FLOPs per token of one forward pass."""

    layers: float
    scores: float
    """Over all pairs, masked or not."""
    head: float
    parameters: float
    """All weights of the model, as 6N counts them."""


#: Pattern -> definition, the first that is found in the text.
_DEFINITIONS: Final = (
    (r"lora", TflopsDefinition.LORA),
    (r"\b4\s*\*\s*2\s*\*|\(4 if ckpt", TflopsDefinition.TWO_N_PASSES),
    (r"6\s*n\s*\+\s*12", TflopsDefinition.SIX_N_FULL),
    (r"hardware|\bhfu\b.*tflops|recompute incl|incl\.? (full )?recompute|sc21|96\s*\*?\s*b", TflopsDefinition.HARDWARE),
    (r"not stated|unknown|depends on", TflopsDefinition.NOT_STATED),
    (r"\bfull\b|non-causal", TflopsDefinition.MODEL_FULL),
    (r"causal|halved|/\s*2\b", TflopsDefinition.MODEL_CAUSAL),
    (r"^6\s*n\b(?!.*attention)", TflopsDefinition.SIX_N),
    (r"model|korthikanti|peak", TflopsDefinition.MODEL_FULL),
)  # fmt: skip


def tflops_definition(text: str) -> TflopsDefinition:
    """The definition that a text means.

    >>> tflops_definition("model, CAUSAL (halved) attention").name, tflops_definition("").name
    ('MODEL_CAUSAL', 'NOT_STATED')
    >>> tflops_definition("model (6N + 12*L*h*s/token, full non-causal attention)").name
    'SIX_N_FULL'
    """
    low = text.lower()[:300]
    return next((kind for pattern, kind in _DEFINITIONS if re.search(pattern, low)), TflopsDefinition.NOT_STATED)


def forward_flops(spec: ModelSpec, seq_len: int, parameters: float | None = None) -> ForwardFlops:
    """FLOPs per token of one forward pass, part by part."""
    experts = replace(spec.experts, router_bias=False, expert_bias=False) if spec.experts else None
    bare = replace(spec, qkv_bias=False, out_bias=False, mlp_bias=False, experts=experts)
    terms = active_parameter_terms(bare)
    paths = ("layers/attention/", "layers/mlp/", "layers/experts/")
    layers = sum(n for path, n in terms.items() if path.startswith(paths) and "norm" not in path and "sink" not in path)
    values = spec.latent.v_head_dim if spec.latent else spec.head_dim
    return ForwardFlops(
        layers=2.0 * layers,
        scores=2.0 * seq_len * spec.heads * spec.layers * (spec.head_dim + values),
        head=2.0 * spec.vocab * spec.hidden,
        parameters=parameters or float(parameter_terms(spec).total),
    )


def flops_per_token(kind: TflopsDefinition, parts: ForwardFlops, recompute: str) -> float:
    """FLOPs that a definition counts for one token of a training step.

    Args:
        kind: the definition.
        parts: one forward pass.
        recompute: ``full``, ``attention`` or anything else; counts for definitions of hardware FLOPs alone.

    >>> flops_per_token(TflopsDefinition.SIX_N, ForwardFlops(layers=0, scores=0, head=0, parameters=7e9), "none")
    42000000000.0
    """
    layers, scores, head = parts.layers, parts.scores, parts.head
    again = 4.0 if recompute == "full" else 3.0
    match kind:
        case TflopsDefinition.MODEL_CAUSAL:
            return 3 * (layers + scores / 2 + head)
        case TflopsDefinition.HARDWARE:
            return again * layers + (4.0 if recompute == "attention" else again) * scores + 3 * head
        case TflopsDefinition.SIX_N_FULL:
            return 6 * parts.parameters + 3 * scores
        case TflopsDefinition.SIX_N:
            return 6 * parts.parameters
        case TflopsDefinition.TWO_N_PASSES:
            return again * 2 * parts.parameters
        case TflopsDefinition.LORA:
            return 2 * layers + 3 * scores / 2 + 2 * head
        case _:
            return 3 * (layers + scores + head)


def peak_flops_per_s(device: str, precision: str) -> float | None:
    """Dense peak of the matrix units for a precision (FLOP/s); the next wider one where the device has none.

    Where the units lack fp8 and have int8, its rate counts, as in an estimate.

    >>> peak_flops_per_s("h100-sxm", "fp8-blockwise"), peak_flops_per_s("tpu-v5p", "fp8")
    (1978900000000000.0, 918000000000000.0)
    """
    known = catalogue_device(device)
    order = {
        "fp4": ("fp4", "fp8", "bf16"), "fp8": ("fp8", "bf16"), "bf16": ("bf16", "fp16"), "fp16": ("fp16", "bf16"),
        "tf32": ("tf32", "fp32"), "fp32": ("fp32",),
    }  # fmt: skip
    rates = (known.matrix_rate(name) for name in order[PRECISIONS[precision].matrix_dtype])
    return next((rate for rate in rates if rate), None)


def printed_peak_flops_per_s(text: str, device: str, precision: str) -> float | None:
    """The peak that a text of a definition names, in which an MFU is a share.

    >>> text = "peak 989/1979 (H100 BF16/FP8), 2450/4900 (GB200)"
    >>> printed_peak_flops_per_s(text, "gb200", "fp8"), printed_peak_flops_per_s("model; peak 312", "a100", "bf16")
    (4900000000000000.0, 312000000000000.0)
    """
    tail = text.lower().partition("peak")[2] or text.rpartition(";")[2]
    narrow = PRECISIONS[precision].matrix_dtype in NARROW_DTYPES
    choices = re.findall(r"\b(\d{3,4})(?:/(\d{3,5}))?\s{0,4}(\([^)]{0,200}\))?", tail)
    named = [c for c in choices if c[2] and device.split("-")[0] in c[2]]
    plain = named if named else [c for c in choices if not c[2]]
    if not plain:
        return None
    wide, fast, _ = plain[0]
    return float(fast if narrow and fast else wide) * 1e12
