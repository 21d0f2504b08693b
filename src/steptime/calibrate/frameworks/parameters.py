"""What is fitted for a framework: each parameter with its scale and what is believed before any run is seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from steptime.estimate.kernels import profile_of
from steptime.num import Array
from steptime.plan.framework import Framework, from_fitted_scale, to_fitted_scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One field of :class:`~steptime.plan.framework.Framework`, fitted on a scale without limits."""

    name: str
    prior: float
    """What is believed before."""
    doubt: float
    """Standard deviation of that belief on the fitted scale."""
    spread: float
    """Standard deviation of frameworks around their common value on the fitted scale."""

    def inward(self, value: float) -> float:
        """From the field to the fitted scale."""
        return to_fitted_scale(self.name, value)

    def outward(self, fitted: Array) -> Array:
        """From the fitted scale to the field."""
        out: Any = from_fitted_scale(self.name, fitted)
        return np.asarray(out)


PARAMETERS: Sequence[Parameter] = (
    Parameter(name="matrix", prior=1.1, doubt=0.3, spread=0.12),
    Parameter(name="narrow", prior=1.0, doubt=0.2, spread=0.10),
    Parameter(name="attention", prior=1.1, doubt=0.4, spread=0.20),
    Parameter(name="vector", prior=1.3, doubt=0.5, spread=0.25),
    Parameter(name="host_s", prior=4e-5, doubt=0.7, spread=0.60),
    Parameter(name="router_s", prior=5e-4, doubt=1.0, spread=0.60),
    Parameter(name="tensor_links", prior=1.1, doubt=0.5, spread=0.30),
    Parameter(name="context_links", prior=1.0, doubt=0.5, spread=0.30),
    Parameter(name="expert_links", prior=1.0, doubt=0.5, spread=0.30),
    Parameter(name="data_links", prior=1.4, doubt=0.5, spread=0.30),
    Parameter(name="data_exposed", prior=0.3, doubt=1.0, spread=0.70),
    Parameter(name="stage_links", prior=1.0, doubt=0.5, spread=0.30),
    Parameter(name="stage_s", prior=2e-4, doubt=1.0, spread=0.60),
    Parameter(name="optimizer", prior=1.3, doubt=0.5, spread=0.30),
    Parameter(name="step_s", prior=0.01, doubt=1.0, spread=0.60),
    Parameter(name="growth", prior=0.01, doubt=0.7, spread=0.40),
)
"""The order of the columns of a fit."""
DEVICE_SPREAD = 0.12
"""Standard deviation of the logarithm of a device's own factor."""
UNMEASURED_SPREAD = 0.25
"""Likewise of a device whose matrix products have no curve: a share of the datasheet's peak stands for them."""


def device_spread(device: str) -> float:
    """What is believed of a device's own factors before any run of it is seen, as a standard deviation.

    >>> device_spread("h100-sxm"), device_spread("gaudi2")
    (0.12, 0.25)
    """
    profile = profile_of(device)
    known = profile is not None and any(curve.family == "gemm" for curve in profile.curves)
    return DEVICE_SPREAD if known else UNMEASURED_SPREAD


def framework_of(fitted: Array, name: str) -> Framework:
    """Framework of one row, or of many rows at once, of fitted values.

    Args:
        fitted: (..., number of parameters) on the fitted scale.
        name: name of the framework.
    """
    values: Mapping[str, Any] = {p.name: p.outward(fitted[..., i]) for i, p in enumerate(PARAMETERS)}
    if fitted.ndim == 1:
        values = {n: float(v) for n, v in values.items()}
    return Framework(name=name, **values)
