"""Fitted frameworks: those of the package, or those of the user's own fit by `steptime calibrate frameworks`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Final

from steptime.errors import UnknownNameError
from steptime.hardware.library import architecture_of
from steptime.plan.framework import (
    BUSY,
    IDEAL,
    PARAMETERS,
    Framework,
    Spread,
    habits_of,
    kernel_factor,
    widening,
)
from steptime.plan.framework_file import PACKAGED, framework_path, framework_table

GENERIC = "generic"
"""Name of the framework that nobody named: the common values, slower as far as frameworks were that no fit had seen,
with the spread between frameworks as doubt."""
SLOWED: Final = ("matrix", "attention", "vector")
"""Factors that are larger by as much in a framework that nobody named (:func:`slowed`)."""
_JOINTS: Final = str.maketrans("", "", "-_. ")


def slowed(framework: Framework, slower: float) -> Framework:
    """The framework with all that its device computes slower by a factor.

    >>> slowed(Framework(vector=2.0), 1.1).vector, slowed(Framework(), 1.1).data_links
    (2.2, 1.0)
    """
    return replace(framework, **{name: getattr(framework, name) * slower for name in SLOWED})


def framework_names() -> list[str]:
    """Names that :func:`load_framework` takes."""
    return ["ideal", GENERIC, *sorted(framework_table()["framework"])]


def bare_name(name: str) -> str:
    """A name without case and without what joins its words: names alike in that mean one framework.

    >>> bare_name("Megatron_Core"), bare_name("megatron-core")
    ('megatroncore', 'megatroncore')
    """
    return name.lower().translate(_JOINTS)


def unknown_framework(name: str, instead: str = "") -> UnknownNameError:
    """The error for a name that is no framework; where the user's own file is in use, it says so.

    Args:
        name: as given.
        instead: what to give in its place, where that is known.

    Raises:
        UserError: it is a file of the user's and cannot be used.
    """
    path = framework_path()
    own = f"{path} is in use, which has no others than {', '.join(framework_names())}" if path != PACKAGED else ""
    return UnknownNameError("framework", name, framework_names(), always=own or instead)


def load_framework(name: str, device: str, factors: Collection[str] = BUSY, *, measured: bool = True) -> Framework:
    """A framework on a device.

    Args:
        name: one of :func:`framework_names`; ``generic`` where the framework is not known.
        device: name of the device in the catalogue; one without runs has the common factor and a wider band.
        factors: parameters of :data:`~steptime.plan.framework.BUSY` that the device's own factors multiply.
        measured: whether products on the device are timed by curves that were fitted to measurements; of a device
            without runs and without them less is known.

    Raises:
        UnknownNameError: no such framework.
    """
    if name == IDEAL.name:
        return IDEAL
    table = framework_table()
    if name != GENERIC and name not in table["framework"]:
        raise unknown_framework(name)
    common, own = table["common"], table["framework"].get(name, {})
    values = {p: float(own.get(p, common[p])) for p in PARAMETERS}
    known = table["device"].get(device, {})
    values |= {p: values[p] * float(known[p]) for p in BUSY if p in known and p in factors}
    values["attention"] *= kernel_factor(habits_of(name).kernel, architecture_of(device))
    spread = _spread(table, own, known, measured)
    found = replace(IDEAL, name=name, spread=spread, **values)
    return slowed(found, float(table["generic"]["slower"])) if name == GENERIC else found


def _spread(table: Mapping[str, Any], own: Mapping[str, Any], device: Mapping[str, Any], measured: bool) -> Spread:
    band, model = table["band"]["named" if own else "generic"], table["band"]["model"]
    doubts = own.get("doubts") or table["doubts"]
    unknown = model["unknown_device" if measured else "unmeasured_device"]
    return Spread(
        doubts={p: float(doubts[p]) for p in PARAMETERS},
        device_doubt=float(device.get("doubt", unknown)), noise=float(model["noise"]),
        low=float(band["low"]), high=float(band["high"]), source=str(table["provenance"]["source"]),
        experts=float(model["experts"]), widening=widening(float(device.get("sources", model["unknown_sources"]))),
    )  # fmt: skip
