r"""Latency and bandwidth of one kind of link: $t(B) = \alpha + B / \beta$."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from steptime.lab.calibrate.mesh.layout import Layout
from steptime.lab.calibrate.mesh.links import Links
from steptime.lab.calibrate.mesh.optional import scipy_module
from steptime.num import Array

#: Of a single message size: up to here its time is latency, from there on bandwidth.
SMALL_BYTES = 4096.0
LARGE_BYTES = 2.0**20
#: Relative standard error beyond which a number is not told.
WORST_ERROR = 0.5
#: Devices whose links are looked at.
MOST_ROWS = 512
#: Log error up to which the loss is quadratic.
LOSS_SCALE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Latency and bandwidth with their standard errors; None where the measurements do not tell."""

    latency_s: float | None = None
    latency_error_s: float | None = None
    Bps: float | None = None
    Bps_error: float | None = None


def class_speeds(links: Links, layout: Layout, skipped: Array, wanted: Sequence[int]) -> list[Speed]:
    """Latency and bandwidth of some classes of links.

    Args:
        links: what was measured.
        layout: devices on places.
        skipped: pairs that do not count (broken ones), in the order of the devices.
        wanted: classes.
    """
    step = max(1, links.devices // MOST_ROWS)
    places = np.arange(0, links.devices, step)
    classes = np.concatenate([layout.class_rows(int(p), int(p) + 1) for p in places])
    rows = layout.order[places]
    classes[skipped[rows][:, layout.order]] = -1
    classes[np.arange(len(places)), places] = -1
    picked = [classes == number for number in wanted]
    found: list[list[tuple[str, float, Array]]] = [[] for _ in wanted]
    for quantity in links.quantities:
        values = quantity.values[rows][:, layout.order]
        for mask, samples in zip(picked, found, strict=True):
            logs = np.log(values[mask])
            samples.append((quantity.kind, quantity.size_bytes or 0.0, logs[np.isfinite(logs)]))
    return [speed(samples) for samples in found]


def speed(samples: Sequence[tuple[str, float, Array]]) -> Speed:
    """Latency and bandwidth of alike links from logarithms of what was measured of them.

    Args:
        samples: of each quantity its kind (``seconds``, ``latency``, ``bandwidth``), the bytes of the message (of
            ``seconds``), and the logarithms.
    """
    samples = [sample for sample in samples if len(sample[2])]
    latencies = [_centre(logs) for kind, _, logs in samples if kind == "latency"]
    bandwidths = [_centre(logs) for kind, _, logs in samples if kind == "bandwidth"]
    times = sorted((size, *_centre(logs)) for kind, size, logs in samples if kind == "seconds")
    if len(times) == 1:
        size, seconds, error = times[0]
        if size <= SMALL_BYTES:
            latencies.append((seconds, error))
        elif size >= LARGE_BYTES:
            bandwidths.append((size / seconds, error))
    out = _regressed(np.array(times)) if len(times) > 1 else Speed()
    if latencies:
        value, error = latencies[0]
        out = Speed(latency_s=value, latency_error_s=value * error, Bps=out.Bps, Bps_error=out.Bps_error)
    if bandwidths:
        value, error = bandwidths[0]
        out = Speed(latency_s=out.latency_s, latency_error_s=out.latency_error_s, Bps=value, Bps_error=value * error)
    return out


def _centre(logs: Array) -> tuple[float, float]:
    r"""Median of the values, and its relative standard error $1.25\,\sigma / \sqrt{n}$ with a robust $\sigma$."""
    middle = float(np.median(logs))
    spread = 1.4826 * float(np.median(np.abs(logs - middle)))
    return math.exp(middle), 1.25 * spread / math.sqrt(len(logs))


def _regressed(times: Array) -> Speed:
    """Robust fit of the median times in log space; rows of bytes, seconds, relative error of the seconds."""
    size, seconds, error = times.T
    scale = np.log(seconds)
    slope = max((seconds[-1] - seconds[0]) / (size[-1] - size[0]), seconds[-1] / size[-1] * 1e-3)

    def misfit(x: Array) -> Array:
        out: Array = np.log(np.exp(x[0]) + size * np.exp(x[1])) - scale
        return out

    start = np.array([math.log(max(seconds[0] - slope * size[0], seconds[0] * 1e-3)), math.log(slope)])
    found = scipy_module("scipy.optimize").least_squares(misfit, start, loss="soft_l1", f_scale=LOSS_SCALE)
    share = np.exp(found.x[0]) / (np.exp(found.x[0]) + size * np.exp(found.x[1]))
    lever = np.stack([share, 1 - share], axis=1)
    spread = np.maximum(error, np.abs(misfit(found.x)))
    errors = np.sqrt(np.diag(np.linalg.pinv(lever.T @ (lever / np.maximum(spread, 1e-6)[:, None] ** 2), rcond=1e-14)))
    latency_s, Bps = math.exp(found.x[0]), math.exp(-found.x[1])
    known = [e < WORST_ERROR and weight > 0.01 for e, weight in zip(errors, lever.max(axis=0), strict=True)]
    return Speed(
        latency_s=latency_s if known[0] else None,
        latency_error_s=float(errors[0]) * latency_s if known[0] else None,
        Bps=Bps if known[1] else None,
        Bps_error=float(errors[1]) * Bps if known[1] else None,
    )
