"""What is fitted for a framework: each parameter with its scale and what is believed before any run is seen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from steptime.estimate.kernels import profile_of
from steptime.hardware.library import architecture_of, device_names
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
    Parameter(name="matrix", prior=1.1, doubt=0.3, spread=0.2),
    Parameter(name="narrow", prior=1.0, doubt=0.2, spread=0.15),
    Parameter(name="attention", prior=1.1, doubt=0.4, spread=0.3),
    Parameter(name="vector", prior=1.3, doubt=0.5, spread=0.25),
    Parameter(name="host_s", prior=4e-5, doubt=0.7, spread=0.60),
    Parameter(name="router_s", prior=5e-4, doubt=1.0, spread=0.60),
    Parameter(name="captured_wait", prior=0.4, doubt=0.5, spread=0.25),
    Parameter(name="tensor_links", prior=1.1, doubt=0.5, spread=0.6),
    Parameter(name="context_links", prior=1.0, doubt=0.5, spread=0.7),
    Parameter(name="expert_links", prior=1.0, doubt=0.5, spread=0.7),
    Parameter(name="data_links", prior=1.15, doubt=1.0, spread=0.6),
    Parameter(name="data_exposed", prior=0.3, doubt=1.0, spread=1.6),
    Parameter(name="stage_links", prior=1.05, doubt=1.0, spread=0.6),
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


OWN_SPREAD = 0.05
"""What devices of one design differ by beyond their datasheets: assumed."""


def device_spread(device: str) -> float:
    """What is believed of a device's own factors before any run of it is seen, as a standard deviation.

    >>> device_spread("h100-sxm"), device_spread("gaudi2")
    (0.12, 0.25)
    """
    profile = profile_of(device)
    known = profile is not None and any(curve.family == "gemm" for curve in profile.curves)
    return DEVICE_SPREAD if known else UNMEASURED_SPREAD


def line_of(device: str) -> str | None:
    """Design that a device shares with others; generations of one line (``cdna3``, ``cdna4``) count as one.

    >>> line_of("h200-sxm") == line_of("h100-sxm"), line_of("mi355x"), line_of("tpu-v6e")
    (True, 'cdna', None)
    """
    architecture = architecture_of(device)
    return None if architecture is None else architecture.rstrip("0123456789")


def with_relatives(devices: Iterable[str]) -> list[str]:
    """Devices, and those of the catalogue that share a design with one of them, of which a fit then knows something."""
    lines = {line_of(device) for device in devices} - {None}
    return sorted({*map(str, devices), *(name for name in device_names() if line_of(name) in lines)})


def device_covariance(devices: Sequence[str]) -> Array:
    r"""Covariance of what is believed of the factors of devices before any run is seen.

    $$\Sigma_{ij} = \begin{cases} s_i^2 & i = j \\ \min(s_i, s_j)^2 - u^2 & \text{same design} \\ 0 &
      \text{else} \end{cases}$$

    where $s_i$ is :func:`device_spread` and $u$ = :data:`OWN_SPREAD` what devices of one design differ by.

    Source: definition of a two-level normal prior.

    >>> device_covariance(["a100-sxm-80gb", "h100-sxm", "h200-sxm"]).round(4).tolist()
    [[0.0144, 0.0, 0.0], [0.0, 0.0144, 0.0119], [0.0, 0.0119, 0.0144]]
    """
    spread, lines = np.array([device_spread(d) for d in devices]), [line_of(d) for d in devices]
    same = np.array([[a is not None and a == b for b in lines] for a in lines])
    shared = np.minimum(spread[:, None], spread[None]) ** 2 - OWN_SPREAD**2
    return np.where(np.eye(len(devices), dtype=bool), spread**2, np.where(same, shared, 0.0))


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
