"""Bands learnt from residuals of runs whose source had no part in the fit; fitted frameworks as a file."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from steptime.hardware.profiles import toml_key, toml_text
from steptime.measure.runs.fitting import (
    DEVICE_SPREAD,
    EXPERTS,
    PARAMETERS,
    UNMEASURED_SPREAD,
    Fitted,
    FrameworkFit,
    noise,
)
from steptime.measure.toml_file import with_table, without_table
from steptime.num import Array, weighted_quantiles
from steptime.plan.framework import BUSY, LEAST
from steptime.plan.framework_file import FILES, PACKAGED, framework_table
from steptime.store.files import write_whole

LEAST_SLOPE = 1e-6
"""Slope below which a time does not depend on the factor of an unknown framework."""
LEVEL = 0.9
"""Share of measured runs that a band is to hold."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """Predictions of runs by fits that did not see their group."""

    residual: Array
    """ln(predicted / measured)."""
    deviation: Array
    """Standard deviation of ``residual`` that all doubts together give."""
    slowing: Array
    """Slope of ln(time) by ln(factor of an unknown framework); 0 where the framework is known."""

    @property
    def scaled(self) -> Array:
        """ln(measured / predicted) in units of the deviation."""
        out: Array = -self.residual / self.deviation
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Quantiles of scaled residuals."""

    low: float
    high: float


SLOPE_STEP = 0.1
"""Step of the logarithm of the factor over which :attr:`Predicted.slowing` is taken: about the size that is fitted."""


def left_out_both(
    fit: FrameworkFit,
    group: Array,
    *,
    used: Array,
    ways: Sequence[bool] = (True, False),
    progress: Callable[[int, int], None] | None = None,
) -> list[Predicted]:
    """Predictions of every run by fits to the runs of all other groups, one result for each entry of ``ways``.

    Args:
        fit: all runs.
        group: group of each run.
        used: runs that a fit may use.
        ways: true: predict by the framework of each run, with parameters from its other groups; false: without it.
        progress: called with groups done and all groups.
    """
    made = [Predicted(*(np.zeros(fit.count) for _ in range(3))) for _ in ways]
    groups = sorted(set(group))
    for done, name in enumerate(groups, start=1):
        out = group == name
        fitted: Fitted = fit.fit(used & ~out)
        for each, named in zip(made, ways, strict=True):
            log_s, slower = fit.log_s(fitted, named=named), fit.log_s(replace(fitted, slower=SLOPE_STEP), named=named)
            each.residual[out] = (log_s - fit.log_measured)[out]
            each.deviation[out] = fit.deviations(fitted, named=named)[out]
            each.slowing[out] = ((slower - log_s) / SLOPE_STEP)[out]
        if progress:
            progress(done, len(groups))
    return made


def slower_of(predicted: Predicted, source: Array, chosen: Array) -> float:
    r"""Logarithm of the factor by which frameworks unknown to their fit were slower than the common values.

    $$\operatorname{median}_w\left(-\frac{e_r}{g_r}\right)$$

    over the runs $r$ of ``chosen`` whose time depends on it, all sources counting alike ($w$), where $e_r$ is the
    logarithm of predicted over measured time and $g_r$ its slope by that of the factor.

    Source: definition; 0 where no run is of a framework that its fit did not know.
    """
    use = chosen & (predicted.slowing > LEAST_SLOPE)
    if not use.any():
        return 0.0
    wanted = -predicted.residual[use] / predicted.slowing[use]
    return float(weighted_quantiles(wanted, source_weights(source[use]), [0.5])[0])


def with_slowdown(predicted: Predicted, unnamed: Predicted, source: Array, used: Array) -> Predicted:
    """The predictions with unknown frameworks slowed down by the factor that all other sources give.

    Args:
        predicted: predictions by fits without the group of a run.
        unnamed: predictions by the same fits without frameworks, which give the factor (:func:`slower_of`).
        source: source of each run.
        used: runs that a fit may use.
    """
    moved = predicted.residual.copy()
    for name in np.unique(source):
        own = source == name
        moved[own] += slower_of(unnamed, source, ~own & used) * predicted.slowing[own]
    return replace(predicted, residual=moved)


def source_weights(source: Array) -> Array:
    """Weights of runs in a quantile. All sources count alike, because a band is for a run of a new source."""
    _, of, counts = np.unique(source, return_inverse=True, return_counts=True)
    weights: Array = (1.0 / counts)[of]
    return weights


def band_of(scaled: Array, weights: Array) -> Band:
    """The band that holds the central share :data:`LEVEL` of weighted residuals."""
    low, high = weighted_quantiles(scaled, weights, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Band(low=float(low), high=float(high))


def other_bands(scaled: Array, source: Array, used: Array) -> tuple[Array, Array]:
    """Ends of the band that all other sources give each run; NaN where no other source has a used run."""
    low, high = np.full(len(source), np.nan), np.full(len(source), np.nan)
    for name in np.unique(source):
        own = source == name
        rest = ~own & used
        if rest.any():
            band = band_of(scaled[rest], source_weights(source[rest]))
            low[own], high[own] = band.low, band.high
    return low, high


def honest_coverage(scaled: Array, source: Array) -> Array:
    """True for each run that lies in the band of all other sources."""
    low, high = other_bands(scaled, source, np.ones(len(source), dtype=bool))
    inside: Array = (scaled >= low) & (scaled <= high)
    return inside


DIGITS = 5
SAVED = "written by `steptime calibrate frameworks --save`"
HEADER = "# Written by `steptime calibrate frameworks`; edits are lost when it runs again.\n"


def to_toml(
    fitted: Fitted,
    *,
    named: Band,
    generic: Band,
    provenance: Mapping[str, str | int | float],
    runs: Mapping[str, int] | None = None,
) -> str:
    """Text of the file: common values, those of each framework and device, doubts, bands and provenance."""
    texts = {name: toml_text(value) if isinstance(value, str) else str(value) for name, value in provenance.items()}
    parts = [HEADER, "[provenance]", *(f"{toml_key(name)} = {text}" for name, text in texts.items()), ""]
    parts += ["[common]", *_values(fitted.common), "", "[doubts]", *_doubts(fitted.common_doubt), ""]
    parts += ["[generic]", f"slower = {_number(math.exp(fitted.slower))}", ""]
    for title, band in (("named", named), ("generic", generic)):
        parts += [f"[band.{title}]", f"low = {_number(band.low)}", f"high = {_number(band.high)}", ""]
    parts += [
        "[band.model]",
        f"noise = {_number(noise())}",
        f"experts = {EXPERTS}",
        f"unknown_device = {DEVICE_SPREAD}",
        f"unmeasured_device = {UNMEASURED_SPREAD}",
        "unknown_sources = 0",
        "",
    ]
    for name, own in fitted.frameworks.items():
        counted = [f"runs = {runs[name]}"] if runs and name in runs else []
        parts += [f"[framework.{toml_text(name)}]", *counted, *_values(fitted.common + own), ""]
        parts += [f"[framework.{toml_text(name)}.doubts]", *_doubts(fitted.framework_doubts[name]), ""]
    for name, factors in fitted.devices.items():
        each = [f"{p} = {_number(math.exp(f))}" for p, f in zip(BUSY, factors, strict=True)]
        known = [
            f"doubt = {_number(fitted.device_doubts[name])}",
            f"sources = {fitted.device_sources.get(name, 0.0):.0f}",
        ]
        parts += [f"[device.{toml_text(name)}]", *each, *known, ""]
    return "\n".join(parts)


def save_fit(text: str, shared: Path = PACKAGED, folder: Path = FILES) -> None:
    """Writes the text of a fit (:func:`to_toml`) to the files of the package, one for each framework.

    A framework without a file gets one. A framework that the fit lacks loses its fitted values.
    """
    parts = re.split(r"^(?=\[)", text[max(text.find(HEADER), 0) :], flags=re.MULTILINE)
    own: dict[str, list[str]] = {path.stem: [] for path in folder.glob("*.toml")}
    for part in parts:
        if named := re.match(r"\[framework\.(\"(?:[^\"\\]|\\.)*\")(\.doubts)?\]\n", part):
            name = tomllib.loads(f"name = {named[1]}")["name"]
            head = [f"[fitted{named[2]}]"] if named[2] else []
            own.setdefault(name, []).extend([*head, part[named.end() :].rstrip(), ""])
    for name, lines in own.items():
        path = folder / f"{name}.toml"
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        write_whole(path, with_table(before, "fitted", lines, SAVED) if lines else without_table(before, "fitted"))
    by_hand = shared.read_text(encoding="utf-8").partition(HEADER)[0]
    rest = "".join(part for part in parts if not part.startswith("[framework."))
    write_whole(shared, f"{by_hand}{rest.rstrip()}\n")


def _number(value: float, more: int = 0) -> str:
    return f"{float(value):.{DIGITS + more}g}"


def _values(columns: Array) -> list[str]:
    """Lines of the fields of a framework. Fields with a least value get more digits, as they lie close above it."""
    return [
        f"{p.name} = {_number(float(p.outward(columns[i])), 3 if p.name in LEAST else 0)}"
        for i, p in enumerate(PARAMETERS)
    ]


def _doubts(doubts: Array) -> list[str]:
    return [f"{p.name} = {_number(doubts[i])}" for i, p in enumerate(PARAMETERS)]


def packaged() -> tuple[Fitted, tuple[Band, Band]]:
    """The frameworks of the package on the fitted scale, and their bands: named, and generic."""
    table = framework_table()
    common = _row(table["common"])
    frameworks, devices = table["framework"], table["device"]
    fitted = Fitted(
        common=common,
        frameworks={name: _row(own) - common for name, own in frameworks.items()},
        devices={name: np.log([float(own[p]) for p in BUSY]) for name, own in devices.items()},
        common_doubt=_plain(table["doubts"]),
        framework_doubts={name: _plain(own["doubts"]) for name, own in frameworks.items()},
        device_doubts={name: float(own["doubt"]) for name, own in devices.items()},
        rounds=0,
        device_sources={name: float(own["sources"]) for name, own in devices.items()},
        slower=math.log(float(table["generic"]["slower"])),
    )
    named, generic = (
        Band(low=float(b["low"]), high=float(b["high"])) for b in (table["band"]["named"], table["band"]["generic"])
    )
    return fitted, (named, generic)


def _row(values: Mapping[str, float]) -> Array:
    return np.array([p.inward(float(values[p.name])) for p in PARAMETERS])


def _plain(values: Mapping[str, float]) -> Array:
    return np.array([float(values[p.name]) for p in PARAMETERS])
