"""Numbers of links that somebody stated over those of the catalogue, in fitted collectives.

A fit belongs to the links of the catalogue. What is stated changes the coefficients that it speaks of: a bandwidth
in proportion, an efficiency and a latency as :mod:`steptime.cost.stated` says. All others stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from steptime.cost.collective_fabric import PAYLOAD
from steptime.cost.stated import stated_latency_s, stated_share_factor
from steptime.hardware.records import Level
from steptime.units import format_si

#: Numbers of a level that a fit has to do with, and what stands where the catalogue does not say.
OF_LINKS: Final[Mapping[str, float | None]] = {
    "link_Bps": None, "efficiency": None, "latency_s": None, "links_per_device": 1.0, "oversubscription": 1.0,
}  # fmt: skip
_ZERO: Final = (0.0, 0.0, 0.0)


def as_known(level: Level) -> Level | None:
    """The level with the numbers of the catalogue where it has some; None where its own are all there is."""
    return _with(level, level.catalogue)


def as_measured(level: Level) -> Level | None:
    """The level with the numbers that its collectives were measured with; None where none were."""
    return _with(level, level.measured)


def _with(level: Level, known: Mapping[str, float]) -> Level | None:
    if not known:
        return None
    least = {name: value for name, value in OF_LINKS.items() if value is not None and "link_Bps" in known}
    numbers: dict[str, Any] = {name: value for name, value in {**least, **known}.items() if name in OF_LINKS}
    return replace(level, **numbers)


def restated_inside(values: Mapping[str, Any], level: Level, known: Level) -> dict[str, Any]:
    """Coefficients inside a domain, with the numbers that a level states over those that were known."""
    rate = inner_Bps(level) / inner_Bps(known)
    share = _share_factor(level, known, values["Bps"][-1] / inner_Bps(known))
    out = _faster(values, ("Bps", "switch_Bps", "direct_pair_Bps"), rate * share)
    out |= _later(values, ("hop_s",), level, known)
    if "long_hop_s" in values:
        out["long_hop_s"] = stated_latency_s(values["long_hop_s"], level.latency_s, known.latency_s)
    if "switch_start_s" in values:
        out["switch_start_s"] = values["switch_start_s"] + max(level.latency_s - known.latency_s, 0.0)
    return out | {"near_message_s": _message_s(values.get("direct_start_s", _ZERO), level, known)}


def restated_between(values: Mapping[str, Any], level: Level, known: Level) -> dict[str, Any]:
    """Likewise between domains; oversubscription has an argument of its own there."""
    rate = outer_Bps(level) / outer_Bps(known)
    share = _share_factor(level, known, values["outer_Bps"][-1] / outer_Bps(known))
    out = _faster(values, ("outer_Bps",), rate * share) | _later(values, ("outer_hop_s", "tree_hop_s"), level, known)
    return out | {"far_message_s": _message_s(values.get("outer_start_s", _ZERO), level, known)}


def at_its_word(level: Level) -> dict[str, Any]:
    """Coefficients between domains of a level that says itself what its links reach: those of the textbook.

    Protocols that send flags with the data leave less of the links to it.
    """
    latencies, reached_Bps = (level.latency_s,) * 3, outer_Bps(level) * level.efficiency
    return {
        "outer_Bps": tuple(share * reached_Bps for share in PAYLOAD), "single_share": 1.0, "tree_share": 1.0,
        "outer_start_s": _ZERO, "outer_hop_s": latencies, "tree_hop_s": latencies, "far_message_s": level.latency_s,
    }  # fmt: skip


def inner_Bps(level: Level) -> float:
    """Datasheet bandwidth of a device inside its domain."""
    return level.link_Bps * level.links_per_device / level.oversubscription


def outer_Bps(level: Level) -> float:
    """Datasheet bandwidth of a device out of its domain, up to the first switch."""
    return level.link_Bps * level.links_per_device


def stated_text(level: Level, known: Level) -> str:
    """What a level states over what was known, for a report; empty where that is the same.

    >>> level = Level(name="net", devices=None, link_Bps=5e10, efficiency=0.5, latency_s=2e-4)
    >>> stated_text(level, replace(level, efficiency=0.7, latency_s=5e-6))
    'with the stated efficiency 0.5 for 0.7, latency 200 us for 5 us'
    """
    shown = (
        ("bandwidth", outer_Bps, "B/s"), ("efficiency", lambda one: one.efficiency, ""),
        ("latency", lambda one: one.latency_s, "s"), ("oversubscription", lambda one: one.oversubscription, ""),
    )  # fmt: skip
    changed = [(name, of(level), of(known), unit) for name, of, unit in shown if of(level) != of(known)]
    texts = [f"{name} {_number(new, unit)} for {_number(old, unit)}" for name, new, old, unit in changed]
    return f"with the stated {', '.join(texts)}" if texts else ""


def _number(value: float, unit: str) -> str:
    if unit == "s":
        return f"{value * 1e6:g} us"
    return format_si(value, unit) if unit else f"{value:g}"


def _share_factor(level: Level, known: Level, reached: float) -> float:
    return stated_share_factor(level.efficiency, known.efficiency, reached)


def _faster(values: Mapping[str, Any], names: tuple[str, ...], factor: float) -> dict[str, Any]:
    """Rates times a factor."""
    return {name: scaled(values[name], factor) for name in names if name in values}


def _later(values: Mapping[str, Any], names: tuple[str, ...], level: Level, known: Level) -> dict[str, Any]:
    """Latencies of hops as stated."""
    latencies = level.latency_s, known.latency_s
    return {n: tuple([stated_latency_s(hop_s, *latencies) for hop_s in values[n]]) for n in names if n in values}


def _message_s(start_s: tuple[float, ...], level: Level, known: Level) -> float:
    """What a message, whose partners do not wait for each other, has of a stated latency: one hop."""
    least_s = min(start_s)
    return stated_latency_s(least_s, level.latency_s, known.latency_s) - least_s


def scaled(value: Any, factor: float) -> Any:
    """A coefficient, or a triple of them, times a factor."""
    return tuple(v * factor for v in value) if isinstance(value, tuple) else value * factor
