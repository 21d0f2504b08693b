"""The numbers of a hardware file: TOML key, record field, unit and the range that is not absurd."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from steptime.errors import UserError, shown
from steptime.units import parse


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One number that a file may give."""

    record: str
    """Name in the record; carries the unit."""
    dimension: str | None = None
    """Key of :data:`steptime.units.UNITS`; None: a bare number."""
    low: float
    high: float
    whole: bool = False
    required: bool = True
    example: str
    """How a user writes it; shown when the unit is missing."""


def _share(record: str) -> Field:
    return Field(record=record, low=1e-4, high=1.0, example="0.7")


#: Keys of a device file (besides the tables ``matrix`` and ``vector``).
DEVICE: Final[Mapping[str, Field]] = {
    "memory": Field(record="memory_bytes", dimension="bytes", low=1e6, high=1e15, example="80 GB"),
    "memory_bandwidth": Field(record="memory_Bps", dimension="Bps", low=1e6, high=1e17, example="3.35 TB/s"),
    "l2": Field(record="l2_bytes", dimension="bytes", low=1e3, high=1e13, required=False, example="50 MiB"),
    "sm_count": Field(record="sm_count", low=1, high=1e6, whole=True, required=False, example="132"),
    "clock": Field(record="clock_Hz", dimension="Hz", low=1e6, high=1e12, required=False, example="1830 MHz"),
    "power": Field(record="power_W", dimension="W", low=0.01, high=1e6, required=False, example="700 W"),
    "host_bandwidth": Field(record="host_link_Bps", dimension="Bps", low=1e6, high=1e15, example="64 GB/s"),
    "host_efficiency": _share("host_efficiency"),
    "devices_per_cpu": Field(record="devices_per_cpu", low=1, high=64, whole=True, required=False, example="2"),
    "matrix_efficiency": _share("matrix_efficiency"),
    "vector_efficiency": _share("vector_efficiency"),
    "memory_efficiency": _share("memory_efficiency"),
    "issue": Field(record="issue_s", dimension="s", low=0.0, high=1.0, required=False, example="20 us"),
    "kernel_latency": Field(record="kernel_latency_s", dimension="s", low=0.0, high=1.0, example="4.5 us"),
}

#: A peak rate in ``[matrix]`` or ``[vector]``.
RATE: Final = Field(record="", dimension="flops_per_s", low=1e6, high=1e20, example="989.4 TFLOP/s")

#: Table of a device file -> (record field, dtypes that it may hold).
RATES: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "matrix": ("matrix_flops_per_s", ("fp32", "tf32", "fp16", "bf16", "fp8", "int8", "fp4")),
    "vector": ("vector_flops_per_s", ("fp32", "fp16", "bf16")),
}

#: Keys of a link file; a level may override them.
LINK: Final[Mapping[str, Field]] = {
    "bandwidth": Field(record="link_Bps", dimension="Bps", low=1e3, high=1e16, example="450 GB/s"),
    "efficiency": _share("efficiency"),
    "latency": Field(record="latency_s", dimension="s", low=0.0, high=1.0, example="2.5 us"),
}

#: Keys of one level of a cluster.
LEVEL: Final[Mapping[str, Field]] = {
    "devices": Field(record="devices", low=1, high=1e8, whole=True, required=False, example="8"),
    "links_per_device": Field(record="links_per_device", low=1e-4, high=1e4, required=False, example="0.5"),
    "oversubscription": Field(record="oversubscription", low=1.0, high=1e4, required=False, example="2"),
    **LINK,
}


def value_of(given: object, field: Field) -> float:
    """Number in SI of what a file gives for ``field``.

    Raises:
        UserError: a bare number where a unit is needed, a unit where none belongs, not finite, or out of range.

    >>> value_of("80 GB", DEVICE["memory"])
    80000000000.0
    >>> value_of(80, DEVICE["memory"])
    Traceback (most recent call last):
    steptime.errors.UserError: 80 has no unit
      write it as text with a unit, for example "80 GB"
    """
    value = _plain(given, field) if field.dimension is None else _quantity(given, field, field.dimension)
    if not field.low <= value <= field.high:  # true of nan as well
        raise UserError(
            f"{shown(given)} is not between {_bound(field.low, field)} and {_bound(field.high, field)}",
            hint=f"for example {_example(field)}",
        )
    return int(value) if field.whole else value


def _quantity(given: object, field: Field, dimension: str) -> float:
    if isinstance(given, str):
        return parse(given, dimension)
    if isinstance(given, int | float) and not isinstance(given, bool):
        raise UserError(
            f"{shown(given)} has no unit", hint=f"write it as text with a unit, for example {_example(field)}"
        )
    raise UserError(f"{shown(given)} is not a text with a number and a unit", hint=f"for example {_example(field)}")


def _plain(given: object, field: Field) -> float:
    allowed: tuple[type, ...] = (int,) if field.whole else (int, float)
    if isinstance(given, bool) or not isinstance(given, allowed):
        kind = "whole number" if field.whole else "number"
        raise UserError(f"{shown(given)} is not a {kind}", hint=f"write it bare, for example {field.example}")
    try:
        return given if isinstance(given, int) and field.whole else float(given)  # type: ignore[arg-type]
    except OverflowError:
        return math.inf


def _example(field: Field) -> str:
    return field.example if field.dimension is None else f'"{field.example}"'


def _bound(value: float, field: Field) -> str:
    unit = {"bytes": "B", "Bps": "B/s", "flops_per_s": "FLOP/s", None: ""}.get(field.dimension, field.dimension or "")
    return f"{value:g} {unit}".rstrip()
