"""What a device really does: coefficients of operator time models, fitted to measurements, with their provenance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

ALIKE: Final[Mapping[str, str]] = {"bf16": "fp16", "fp16": "bf16"}
"""The two 16-bit formats, which run in the same units at one rate: a curve of either stands for the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """What coefficients were fitted to and how well; errors are those on measurements that the fit did not see."""

    points: int
    """Measurements that it was fitted to."""
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Smallest and largest value of each argument that was measured."""
    median_ape: float
    """Median absolute relative error."""
    mean_ape: float
    bias: float
    """Mean signed relative error, predicted / measured - 1."""
    band: tuple[float, float]
    """5th and 95th percentile of measured / predicted."""
    source: str
    kind: str = "fitted"
    """``fitted``, or ``assumed`` where it was carried over from other devices or machines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve(Fitted):
    """Coefficients of one time model on one device; errors are cross-validated by shape."""

    family: str
    """Name of the model: ``gemm``, ``attention_forward``, ``elementwise``, ..."""
    dtype: str
    """``bf16``, ``fp16``, ``fp8``, ``nvfp4``, ``tf32``, ``fp32``."""
    timer: str = "kernel"
    """``kernel``: time on the device alone (graph replay, profiler); ``eager``: with the launch from the host."""
    coefficients: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """All curves of one device."""

    device: str
    """Catalogue name."""
    curves: tuple[Curve, ...]

    def curve(self, family: str, dtype: str, timer: str = "kernel") -> Curve | None:
        """The curve of that family, or None."""
        for curve in self.curves:
            if (curve.family, curve.dtype, curve.timer) == (family, dtype, timer):
                return curve
        return None
