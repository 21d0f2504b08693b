"""What was measured: the step time and how it is known, and the memory and what it is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from steptime.hardware.records import Device
from steptime.lab.measured.flops import (
    TflopsDefinition,
    flops_per_token,
    forward_flops,
    peak_flops_per_s,
    printed_peak_flops_per_s,
    tflops_definition,
)
from steptime.lab.measured.read import METRICS, TableRow
from steptime.lab.measured.reasons import Flag, Reason, RowProblem
from steptime.model.spec import ModelSpec


class TimeOrigin(StrEnum):
    """How the step time of a row is known, the most direct first."""

    PRINTED = "printed"
    TOKENS = "batch tokens over printed tokens per second"
    TFLOPS = "FLOPs of the printed definition over printed TFLOP/s"
    MFU = "FLOPs of the printed definition over printed MFU times peak"
    COLUMN = "column derived_step_time_s"


class MemoryDefinition(StrEnum):
    """What a printed memory is."""

    ALLOCATED = "largest sum of live tensors"
    RESERVED = "largest pool of the allocator"
    DEVICE = "in use on the device, with context and libraries"
    NOT_STATED = "not stated"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTime:
    """A step time and how it is known."""

    step_time_s: float
    origin: TimeOrigin
    definition: TflopsDefinition | None = None
    """What the rate counts, where the time comes from one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMemory:
    """Peak memory of the fullest device."""

    memory_bytes: float
    definition: MemoryDefinition
    unit_assumed: bool
    """Whether GB or GiB is not stated; then GiB, as the tools that frameworks print from divide by 1024^3."""

    @property
    def least_bytes(self) -> float:
        """The memory if an unstated unit was GB (10^9 bytes): 7 % less."""
        return self.memory_bytes * (1e9 / 2**30 if self.unit_assumed else 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RateBasis:
    """What a printed rate refers to: all that its conversion to time needs to know of a run."""

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
"""Factor between two times of a row from which on a unit is more likely wrong than a figure."""


def check_times(row: TableRow) -> None:
    """Refuses a row with a time or rate that cannot be read: another figure of it must not stand in unnoticed.

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
    # forward and the gradients of the inputs: frozen weights may need no more
    least = 2 * basis.tokens * parts.layers
    if peak and least / (found.step_time_s * basis.gpus) > peak:
        flags.add(Flag.TIME_IMPLAUSIBLE)
    return found


def measured_memory(row: TableRow, device: Device, flags: set[Flag]) -> MeasuredMemory | None:
    """The printed peak memory.

    A stated GiB is 2^30 and a stated GB 10^9 bytes; "GB as printed" and no unit at all are taken for GiB and flagged.
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
