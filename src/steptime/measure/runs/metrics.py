"""Measurements of a row: the step time, the FLOPs that a printed rate counts, and the memory."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from steptime.hardware.records import Device
from steptime.measure.runs.canonical import catalogue_device
from steptime.measure.runs.read import METRICS, Flag, Reason, RowProblem, TableRow
from steptime.model.parameters import active_parameter_terms, parameter_terms
from steptime.model.spec import ModelSpec
from steptime.plan.copies import NARROW_DTYPES
from steptime.plan.job import PRECISIONS


class TflopsDefinition(StrEnum):
    """Definitions of the FLOPs in a printed rate."""

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
    """Attention over all pairs of tokens, masked or not."""
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
)


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
        "fp4": ("fp4", "fp8", "bf16"),
        "fp8": ("fp8", "bf16"),
        "bf16": ("bf16", "fp16"),
        "fp16": ("fp16", "bf16"),
        "tf32": ("tf32", "fp32"),
        "fp32": ("fp32",),
    }
    rates = (known.matrix_rate(name) for name in order[PRECISIONS[precision].matrix_dtype])
    return next((rate for rate in rates if rate), None)


def printed_peak_flops_per_s(text: str, device: str, precision: str) -> float | None:
    """Peak (FLOP/s) that the text of a definition names and its MFU refers to; None if it names none.

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


class TimeOrigin(StrEnum):
    """Origins of a step time, the most direct first."""

    PRINTED = "printed"
    TOKENS = "batch tokens over printed tokens per second"
    TFLOPS = "FLOPs of the printed definition over printed TFLOP/s"
    MFU = "FLOPs of the printed definition over printed MFU times peak"
    COLUMN = "column derived_step_time_s"


class MemoryDefinition(StrEnum):
    """Definitions of a printed memory."""

    ALLOCATED = "largest sum of live tensors"
    RESERVED = "largest pool of the allocator"
    DEVICE = "in use on the device, with context and libraries"
    NOT_STATED = "not stated"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTime:
    """A step time and its origin."""

    step_time_s: float
    origin: TimeOrigin
    definition: TflopsDefinition | None = None
    """FLOPs that the rate counts, where the time comes from a rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMemory:
    """Peak memory of the fullest device."""

    memory_bytes: float
    definition: MemoryDefinition
    unit_assumed: bool
    """True if the row says neither GB nor GiB. GiB is then taken: tools that frameworks print from divide by 1024^3."""

    @property
    def least_bytes(self) -> float:
        """The memory if an unstated unit was GB (10^9 bytes): 7 % less."""
        return self.memory_bytes * (1e9 / 2**30 if self.unit_assumed else 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RateBasis:
    """Properties of a run that the conversion of a printed rate to a time needs."""

    spec: ModelSpec
    gpus: int
    global_batch: int
    seq_len: int
    device: str
    precision: str
    recompute: str
    frozen: bool = False
    """Adapters are trained, the weights are frozen: their sources count no gradients of weights."""

    @property
    def tokens(self) -> float:
        """Tokens per step."""
        return float(self.global_batch) * self.seq_len


_DISAGREE: Final = 0.02
MEMORY: Final = "metric_peak_mem_gb"
UNITS_DIFFER: Final = 100.0
"""Factor between two times of a row from which a wrong unit is more likely than a wrong figure."""


def check_times(row: TableRow) -> None:
    """Refuses a row with a time or rate that cannot be read: another figure must not silently replace it.

    Raises:
        RowProblem: names the column and its text.
    """
    for name in METRICS:
        if name != MEMORY and row.measured(name) is None and name in row.unread:
            raise RowProblem(Reason.BAD_MEASUREMENT, f"{name}: {row.text(name)!r}")


def _quantity(row: TableRow, name: str) -> float | None:
    found = row.measured(name)
    return None if found is None else found[0]


def measured_time(row: TableRow, basis: RateBasis, flags: set[Flag]) -> MeasuredTime | None:
    """The step time: as printed, or from tokens per second, TFLOP/s or MFU, in this order.

    Raises:
        RowProblem: one of them is there and cannot be read.
    """
    check_times(row)
    printed = _quantity(row, "metric_step_time_s")
    rate = _quantity(row, "metric_tokens_per_s_per_gpu")
    by_tokens = basis.tokens / (rate * basis.gpus) if rate else None
    if printed is not None:
        if by_tokens is not None and abs(by_tokens / printed - 1) > _DISAGREE:
            flags.add(Flag.TIME_INCONSISTENT)
        by_rate = _from_rate(row, basis)
        others = (by_tokens, by_rate.step_time_s if by_rate else None)
        if any(t and not 1 / UNITS_DIFFER < t / printed < UNITS_DIFFER for t in others):
            flags.add(Flag.TIME_UNITS)
        return _checked(MeasuredTime(step_time_s=printed, origin=TimeOrigin.PRINTED), basis, flags)
    if by_tokens is not None:
        return _checked(MeasuredTime(step_time_s=by_tokens, origin=TimeOrigin.TOKENS), basis, flags)
    found = _from_rate(row, basis)
    if found is not None:
        if found.definition is TflopsDefinition.NOT_STATED:
            flags.add(Flag.FLOPS_UNDEFINED)
        return _checked(found, basis, flags)
    derived = _quantity(row, "derived_step_time_s")
    return _checked(MeasuredTime(step_time_s=derived, origin=TimeOrigin.COLUMN), basis, flags) if derived else None


def _from_rate(row: TableRow, basis: RateBasis) -> MeasuredTime | None:
    text = row.text("tflops_definition")
    kind = TflopsDefinition.LORA if basis.frozen else tflops_definition(text)
    parts = forward_flops(basis.spec, basis.seq_len, row.number("n_params"))
    tflops = _quantity(row, "metric_tflops_per_gpu")
    if tflops is not None:
        flops = basis.tokens * flops_per_token(kind, parts, basis.recompute)
        return MeasuredTime(step_time_s=flops / (tflops * 1e12 * basis.gpus), origin=TimeOrigin.TFLOPS, definition=kind)
    mfu = row.measured("metric_mfu")
    if mfu is None:
        return None
    share = mfu[0] / 100 if mfu[0] > 1.5 and not mfu[1] else mfu[0]
    peak = printed_peak_flops_per_s(text, basis.device, basis.precision) or peak_flops_per_s(
        basis.device, basis.precision
    )
    if peak is None:
        return None
    kind = TflopsDefinition.MODEL_FULL if kind is TflopsDefinition.HARDWARE else kind
    flops = basis.tokens * flops_per_token(kind, parts, basis.recompute)
    return MeasuredTime(step_time_s=flops / (share * peak * basis.gpus), origin=TimeOrigin.MFU, definition=kind)


def _checked(found: MeasuredTime, basis: RateBasis, flags: set[Flag]) -> MeasuredTime:
    """Flags a time that even twice the peak of the device could not reach."""
    peak = peak_flops_per_s(basis.device, basis.precision)
    parts = forward_flops(basis.spec, basis.seq_len)
    # forward and the gradients of the inputs, as frozen weights may need no more
    least = 2 * basis.tokens * parts.layers
    if peak and least / (found.step_time_s * basis.gpus) > peak:
        flags.add(Flag.TIME_IMPLAUSIBLE)
    return found


def measured_memory(row: TableRow, device: Device, flags: set[Flag]) -> MeasuredMemory | None:
    """The printed peak memory.

    A GiB is 2^30 and a GB 10^9 bytes; "GB as printed" and no unit at all are taken for GiB and flagged.
    A unit behind the number wins over the column ``mem_unit``.
    """
    found = row.measured(MEMORY)
    if found is None:
        flags |= {Flag.MEMORY_UNREAD} if MEMORY in row.unread else set()
        return None
    number, behind = found
    unit, text = row.text("mem_unit").lower(), row.text("mem_definition").lower()
    unit = ("gib" if behind.endswith("ib") else "gb") if behind else unit
    exact = unit in ("gib", "gb", "gb (1e9)", "gb (10^9)")
    scale = 1e9 if exact and unit != "gib" else 2.0**30
    if not exact:
        flags.add(Flag.MEMORY_UNIT_ASSUMED)
    kinds = {"alloc": MemoryDefinition.ALLOCATED, "reserv": MemoryDefinition.RESERVED}
    device_words = ("smi", "device", "used", "nvml", "hbm")
    kind = next((k for word, k in kinds.items() if word in text), None)
    if kind is None:
        on_device = any(word in text for word in device_words) and "not stated" not in text
        kind = MemoryDefinition.DEVICE if on_device else MemoryDefinition.NOT_STATED
    if number * scale > 1.08 * device.memory_bytes:
        flags.add(Flag.MEMORY_ABOVE_DEVICE)
    return MeasuredMemory(memory_bytes=number * scale, definition=kind, unit_assumed=not exact)
