"""A family of kernels: the measurements that it covers, its arguments from their rows, and its time model."""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final

import numpy as np

from steptime.hardware.records import Device
from steptime.measure.table import Table
from steptime.num import Array, Num

NAMES: Final[Mapping[str, Any]] = tomllib.loads(
    resources.files("steptime_lab.calibrate").joinpath("names.toml").read_text(encoding="utf-8")
)
"""Names in tables of measurements: ``names.toml``."""
UNREADABLE: Final = "unreadable"
"""Argument next to the shape if some row could not be read: NaN in unreadable rows, 0 in others."""

NO_SIZES: Final = frozenset({"converted", "alone_s"})
"""Shape arguments that say what a time includes; a curve has no range of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficient:
    """One number that is fitted."""

    name: str
    start: float
    low: float
    high: float
    log: bool = True
    """Fitted on a logarithmic scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFamily:
    """Rows of a measurement table that one formula predicts."""

    name: str
    ops: frozenset[str]
    """Values of the column ``op``."""
    formula: Callable[..., Num]
    """Pure function of :mod:`steptime.cost`: shape arguments, device arguments, coefficients, all by name."""
    shape: Callable[[Table], Mapping[str, Array]]
    """Shape arguments (SI) of each row; NaN where a row cannot be read."""
    device: Callable[[Device, str], Mapping[str, float]]
    """Device arguments for a dtype."""
    coefficients: tuple[Coefficient, ...]
    arguments: tuple[str, ...] = ()
    """Names of the formula's arguments, where its signature does not list them."""
    derived: Callable[[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]] | None = None
    """Further arguments of the formula, from shape, device and coefficients."""
    left_over: Callable[[Mapping[str, Array], Mapping[str, Any], Array], Mapping[str, float]] | None = None
    """Coefficients of the residual of the fitted model, from shape, device and log of measured over modelled."""

    def predict(self, shape: Mapping[str, Num], device: Mapping[str, float], values: Mapping[str, float]) -> Num:
        """Seconds."""
        everything: dict[str, Any] = {**shape, **device, **values}
        if self.derived is not None:
            everything |= self.derived(shape, device, values)
        return self.formula(
            **{name: everything[name] for name in self.arguments or inspect.signature(self.formula).parameters}
        )


def in_six_digits(coefficients: Mapping[str, float]) -> dict[str, float]:
    """Coefficients rounded as in a file of curves.

    >>> in_six_digits({"latency_s": 1.23456789e-5})
    {'latency_s': 1.23457e-05}
    """
    return {name: float(f"{value:.6g}") for name, value in coefficients.items()}


def readable(shape: Mapping[str, Array]) -> Array:
    """Rows whose shape arguments are all finite."""
    mask: Array = np.logical_and.reduce([np.isfinite(column) for column in shape.values()])
    return mask


def timed(seconds: Array) -> Array:
    """Rows whose time is positive and finite."""
    mask: Array = np.isfinite(seconds) & (seconds > 0)
    return mask


def rows_like(table: Table, wanted: Mapping[str, str]) -> Array:
    """Rows whose text columns match ``wanted``, an expression for each column."""
    texts, searched = zip(*map(table.text, wanted), strict=True), [re.compile(each) for each in wanted.values()]
    return np.array([all(e.search(t) for e, t in zip(searched, row, strict=True)) for row in texts], bool)


def shapes_of(family: KernelFamily, table: Table) -> dict[str, Array]:
    """Shape arguments of the rows; NaN for a row whose cells cannot be read at all."""
    try:
        with np.errstate(all="ignore"):
            return {name: np.asarray(v, np.float64) for name, v in family.shape(table).items()}
    except (ArithmeticError, ValueError, LookupError, TypeError, AttributeError):
        if table.rows == 1:
            return {UNREADABLE: np.full(1, np.nan)}
    middle = table.rows // 2
    parts = [shapes_of(family, table.take(slice(*ends))) for ends in ((0, middle), (middle, table.rows))]
    names = {name for part in parts for name in part}
    sizes = (middle, table.rows - middle)
    nothing = [np.full(size, np.nan if UNREADABLE in part else 0.0) for size, part in zip(sizes, parts, strict=True)]
    return {n: np.concatenate([p.get(n, gap) for p, gap in zip(parts, nothing, strict=True)]) for n in names}


def dtype_of(name: str) -> str:
    """Catalogue name of a dtype of the measured tables; "" if it is unknown.

    >>> dtype_of("bfloat16"), dtype_of("bf16xbf16->bf16"), dtype_of("f32xf32->f32")
    ('bf16', 'bf16', 'tf32')
    """
    return DTYPES.get(name, DTYPES.get(name.split("->")[0], ""))


DTYPES: Final[Mapping[str, str]] = NAMES["dtypes"]

TIMERS: Final[Mapping[str, str]] = NAMES["timers"]


def timer_of(method: str) -> str:
    """Kind of a timer: ``eager`` includes the launch from the host, ``kernel`` (also if unknown) does not."""
    return TIMERS.get(method, "kernel")


NOT_LAUNCHED: Final = "no training step launches this kernel"
"""Reason of rows that fits and scores leave out."""
TEXTS: Final = ("source", "kernel", "notes", "dtype")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Rows of some operators by an implementation that no training step launches.

    The texts are regular expressions that are searched in their column; "" matches every cell.
    """

    what: str
    """The implementation, for a reader."""
    ops: tuple[str, ...]
    source: str = ""
    kernel: str = ""
    notes: str = ""
    dtype: str = ""

    @property
    def wanted(self) -> Mapping[str, str]:
        """Expression by column."""
        return {name: getattr(self, name) for name in TEXTS}


RULES: Final = tuple(Rule(**rule) for rule in NAMES["rule"])


def launched(table: Table) -> Array:
    """Rows that no rule of :data:`RULES` names."""
    out, ops = np.ones(table.rows, bool), table.text("op").astype(str)
    texts = {name: table.text(name) for name in TEXTS}
    for rule in RULES:
        place = np.flatnonzero(np.isin(ops, rule.ops) & out)
        if len(place):
            out[place] = ~rows_like(Table({name: column[place] for name, column in texts.items()}), rule.wanted)
    return out
