"""Fitted frameworks as the file of the package, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from steptime.hardware.profiles import toml_key, toml_text
from steptime.lab.calibrate.frameworks.bands import Band
from steptime.lab.calibrate.frameworks.fit import EXPERTS, Fitted, noise
from steptime.lab.calibrate.frameworks.parameters import DEVICE_SPREAD, PARAMETERS, UNMEASURED_SPREAD
from steptime.num import Array
from steptime.plan.framework import BUSY, LEAST
from steptime.plan.framework_file import framework_table

DIGITS = 5
HEADER = "# Written by `steptime calibrate frameworks`; edits are lost when it runs again.\n"


def to_toml(
    fitted: Fitted,
    *,
    named: Band,
    generic: Band,
    provenance: Mapping[str, str | int | float],
    runs: Mapping[str, int] | None = None,
) -> str:
    """The file: common values, each framework's and device's own, doubts, bands, and where all of it comes from."""
    parts = [HEADER, "[provenance]", *(f"{toml_key(name)} = {_value(value)}" for name, value in provenance.items()), ""]
    parts += ["[common]", *_values(fitted.common), "", "[doubts]", *_doubts(fitted.common_doubt), ""]
    parts += ["[generic]", f"slower = {_number(math.exp(fitted.slower))}", ""]
    for title, band in (("named", named), ("generic", generic)):
        parts += [f"[band.{title}]", f"low = {_number(band.low)}", f"high = {_number(band.high)}", ""]
    parts += ["[band.model]", f"noise = {_number(noise())}", f"experts = {EXPERTS}",
              f"unknown_device = {DEVICE_SPREAD}", f"unmeasured_device = {UNMEASURED_SPREAD}",
              "unknown_sources = 0", ""]  # fmt: skip
    for name, own in fitted.frameworks.items():
        counted = [f"runs = {runs[name]}"] if runs and name in runs else []
        parts += [f"[framework.{toml_text(name)}]", *counted, *_values(fitted.common + own), ""]
        parts += [f"[framework.{toml_text(name)}.doubts]", *_doubts(fitted.framework_doubts[name]), ""]
    for name, factors in fitted.devices.items():
        each = [f"{p} = {_number(math.exp(f))}" for p, f in zip(BUSY, factors, strict=True)]
        known = [f"doubt = {_number(fitted.device_doubts[name])}",
                 f"sources = {fitted.device_sources.get(name, 0.0):.0f}"]  # fmt: skip
        parts += [f"[device.{toml_text(name)}]", *each, *known, ""]
    return "\n".join(parts)


def _value(value: str | float) -> str:
    return toml_text(value) if isinstance(value, str) else str(value)


def _number(value: float, more: int = 0) -> str:
    return f"{float(value):.{DIGITS + more}g}"


def _values(columns: Array) -> list[str]:
    """As the fields of a framework; what is fitted above a least value with more digits, as little is left of it."""
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
        common=common, frameworks={name: _row(own) - common for name, own in frameworks.items()},
        devices={name: np.log([float(own[p]) for p in BUSY]) for name, own in devices.items()},
        common_doubt=_plain(table["doubts"]),
        framework_doubts={name: _plain(own["doubts"]) for name, own in frameworks.items()},
        device_doubts={name: float(own["doubt"]) for name, own in devices.items()}, rounds=0,
        device_sources={name: float(own["sources"]) for name, own in devices.items()},
        slower=math.log(float(table["generic"]["slower"])),
    )  # fmt: skip
    named, generic = (Band(low=float(b["low"]), high=float(b["high"])) for b in
                      (table["band"]["named"], table["band"]["generic"]))  # fmt: skip
    return fitted, (named, generic)


def _row(values: Mapping[str, float]) -> Array:
    return np.array([p.inward(float(values[p.name])) for p in PARAMETERS])


def _plain(values: Mapping[str, float]) -> Array:
    return np.array([float(values[p.name]) for p in PARAMETERS])
