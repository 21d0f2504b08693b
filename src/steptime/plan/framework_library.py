"""The fitted frameworks of the package: `frameworks.toml`, written by `steptime calibrate frameworks`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import lru_cache
from importlib import resources
from typing import Any

from steptime.errors import UserError
from steptime.plan.framework import IDEAL, PARAMETERS, Framework, Spread

GENERIC = "generic"
"""Name of the framework that nobody named: the common values, with the spread between frameworks as doubt."""
NAMES = {"ideal": "no software at all: every operator at the speed at which it was measured alone"}


@lru_cache(maxsize=1)
def _table() -> Mapping[str, Any]:
    file = resources.files("steptime.plan") / "frameworks.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


def framework_names() -> list[str]:
    """Names that :func:`load_framework` takes."""
    return ["ideal", GENERIC, *sorted(_table()["framework"])]


@lru_cache(maxsize=256)
def load_framework(name: str, device: str) -> Framework:
    """A framework on a device.

    Args:
        name: one of :func:`framework_names`; ``generic`` where the framework is not known.
        device: name of the device in the catalogue; one without runs has the common factor and a wider band.

    Raises:
        UserError: no such framework.
    """
    if name == IDEAL.name:
        return IDEAL
    table = _table()
    if name != GENERIC and name not in table["framework"]:
        near = get_close_matches(name, framework_names(), n=1)
        hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(framework_names())}"
        raise UserError(f"there is no framework {name!r}", hint=hint)
    common, own = table["common"], table["framework"].get(name, {})
    values = {p: float(own.get(p, common[p])) for p in PARAMETERS}
    factors = table["device"].get(device, {})
    values |= {p: values[p] * float(factor) for p, factor in factors.items() if p in PARAMETERS}
    spread = _spread(table, own, known_device=bool(factors))
    return replace(IDEAL, name=name, spread=spread, **values)


def _spread(table: Mapping[str, Any], own: Mapping[str, Any], *, known_device: bool) -> Spread:
    band = table["band"]["named" if own else "generic"]
    doubts = own.get("doubts") or table["doubts"]
    return Spread(
        doubts={p: float(doubts[p]) for p in PARAMETERS},
        device_doubt=float(table["band"]["known_device" if known_device else "unknown_device"]),
        noise=float(table["band"]["noise"]), low=float(band["low"]), high=float(band["high"]),
        source=str(table["provenance"]["source"]),
    )  # fmt: skip
