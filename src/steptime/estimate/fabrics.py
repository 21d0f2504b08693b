"""Fitted collectives of a cluster: a measured fabric inside a domain, and one between domains in units of its NICs.

A fit belongs to the links of the catalogue. A number of a link that the user gives in place of the catalogue's changes
the coefficients that depend on it: a bandwidth in proportion, an efficiency and a latency as in
:mod:`steptime.cost.roofline`. All others stay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

from steptime.cost.collective_algorithms import PAYLOAD, Fabric, fabric_of
from steptime.cost.roofline import stated_latency_s, stated_share_factor
from steptime.hardware.library import usual_latency_s
from steptime.hardware.profiles import FabricProfile, load_fabric_profiles
from steptime.hardware.records import Cluster, Level
from steptime.units import format_si

#: Numbers of a level on which a fit depends, with the default where the catalogue gives none (None: no default).
OF_LINKS: Final[Mapping[str, float | None]] = {
    "link_Bps": None, "efficiency": None, "latency_s": None, "links_per_device": 1.0, "oversubscription": 1.0,
}  # fmt: skip
_ZERO: Final = (0.0, 0.0, 0.0)


def as_known(level: Level) -> Level | None:
    """The level with the numbers of the catalogue; None if the catalogue has none of it."""
    return _with(level, level.catalogue)


def as_measured(level: Level) -> Level | None:
    """The level with the numbers under which its collectives were measured; None if none were measured."""
    return _with(level, level.measured)


def _with(level: Level, known: Mapping[str, float]) -> Level | None:
    if not known:
        return None
    least = {name: value for name, value in OF_LINKS.items() if value is not None and "link_Bps" in known}
    numbers: dict[str, Any] = {name: value for name, value in {**least, **known}.items() if name in OF_LINKS}
    return replace(level, **numbers)


def restated_inside(values: Mapping[str, Any], level: Level, known: Level) -> dict[str, Any]:
    """Coefficients inside a domain, changed from the known numbers of a level to its given ones."""
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
    """Coefficients between domains, changed from known to given numbers; oversubscription is a separate argument."""
    rate = outer_Bps(level) / outer_Bps(known)
    share = _share_factor(level, known, values["outer_Bps"][-1] / outer_Bps(known))
    out = _faster(values, ("outer_Bps",), rate * share) | _later(values, ("outer_hop_s", "tree_hop_s"), level, known)
    return out | {"far_message_s": _message_s(values.get("outer_start_s", _ZERO), level, known)}


def at_its_word(level: Level) -> dict[str, Any]:
    """Textbook coefficients between domains, of a level whose file gives the rate that its links reach.

    Protocols that send flags with the data leave a smaller share of the links to the data.
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
    """Datasheet bandwidth with which a device leaves its domain, up to the first switch."""
    return level.link_Bps * level.links_per_device


def stated_text(level: Level, known: Level) -> str:
    """Phrase for a report on the given numbers of a level that differ from the known ones; empty if none do.

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
    """Latencies of hops, changed from the known to the given latency of a level."""
    latencies = level.latency_s, known.latency_s
    return {n: tuple([stated_latency_s(hop_s, *latencies) for hop_s in values[n]]) for n in names if n in values}


def _message_s(start_s: tuple[float, ...], level: Level, known: Level) -> float:
    """Change of the time of a message by a given latency: one hop, as its partners do not wait for each other."""
    least_s = min(start_s)
    return stated_latency_s(least_s, level.latency_s, known.latency_s) - least_s


def scaled(value: Any, factor: float) -> Any:
    """A coefficient, or a triple of them, times a factor."""
    return tuple(v * factor for v in value) if isinstance(value, tuple) else value * factor


LIBRARY: Final = "nccl"
"""The measured library of collectives, for devices that run CUDA."""
NETWORK: Final = "perlmutter"
"""The only network measured with all group sizes. Its latencies stand for those of every other network, in units of
the default latency of links, which its own links have too."""
#: Share of a NIC that long transfers reach on InfiniBand and RoCE (nccl-tests of OCI with 16 ranks, A100 and MI300X:
#: 0.95 and 0.89; a host port that serves one GPU both ways reaches 0.64 to 0.73, GKE H200 and B200). The Slingshot
#: NICs of Perlmutter sit behind PCIe 4 and stay at 0.68.
NIC_SHARE: Final = 0.9
SINGLE_SHARE: Final = 0.7
FARTHEST: Final = 2.0
"""Largest ratio of link speeds, either way, over which coefficients are carried from a measured link to another."""
LARGEST_NODE: Final = 16
"""Devices up to which a level lies inside a node and is no network."""
SWITCHED: Final = 8
"""Smallest domain whose links run through switches, which may do sums."""

#: A rate of a machine -> coefficients of a fabric that scale with it.
RATES: Final[Mapping[str, tuple[str, ...]]] = {
    "fast_Bps": ("Bps", "switch_Bps", "direct_pair_Bps", "wrap_Bps"),
    "slow_Bps": ("outer_Bps",),
    "fast_latency_s": (
        "start_s", "hop_s", "long_hop_s", "direct_start_s", "direct_hop_s", "long_direct_hop_s", "switch_start_s",
        "ramp_s", "wrap_start_s", "wrap_hop_s", "near_message_s",
    ),
    "slow_latency_s": ("outer_start_s", "outer_hop_s", "tree_hop_s", "far_message_s"),
}  # fmt: skip

#: Coefficient of transfers between domains -> which of several levels' sets the pace.
WORST: Final[Mapping[str, Callable[[Iterable[float]], float]]] = {
    **dict.fromkeys(("single_share", "tree_share", "outer_overlap"), min),
    **dict.fromkeys(("outer_start_s", "outer_hop_s", "tree_hop_s", "far_message_s"), max),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """Basis of the coefficients of one level of a fabric."""

    level: str
    """Name of the level of the cluster."""
    profile: FabricProfile | None
    """Measured fabric; None: the numbers of the level's file with the textbook formula."""
    carried: bool
    """True if measured on other links and carried over in units of the datasheet."""
    stated: str = ""
    """Phrase on given numbers that replace those of the catalogue."""

    @property
    def text(self) -> str:
        """One phrase for a report."""
        if self.profile is None:
            return f"{self.level}: bandwidth, efficiency and latency as stated"
        error = f"median error {'there ' * self.carried}{100 * self.profile.median_ape:.1f} %"
        how = "carried over from fabric" if self.carried else "fitted fabric"
        return f"{self.level}: {how} {self.profile.name} ({error}){self.stated and f', {self.stated}'}"

    @property
    def how(self) -> str:
        """Origin of the coefficients, to be followed by the fabric that they were fitted to."""
        return "carried over, in units of the datasheet links, from a fit to" if self.carried else "fitted to"


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricModel:
    """Fitted collectives of one cluster, for jobs of one size."""

    fabric: Fabric
    oversubscription: float
    inside: Basis
    between: Basis | None
    """Basis of the slowest level between domains; None on a machine of a single domain."""
    besides: tuple[Basis, ...] = ()
    """Bases of the other levels that a group between domains crosses."""

    def faster(self, factors: Mapping[str, float]) -> FabricModel:
        """The same model on a machine whose rates are multiplied."""
        changed: dict[str, Any] = {}
        for rate, names in RATES.items():
            for name in names if rate in factors else ():
                changed[name] = scaled(getattr(self.fabric, name), factors[rate])
        return replace(self, fabric=replace(self.fabric, **changed))

    @property
    def nearer_is_faster(self) -> bool:
        """True if no collective becomes slower with more of its ranks in each domain."""
        f = self.fabric
        if self.between is None:
            return True
        far_hops = all(far >= near for far, near in zip(f.outer_hop_s, _hops(f.hop_s, f.long_hop_s), strict=True))
        far_bytes = all(far <= near for far, near in zip(f.outer_Bps, f.Bps, strict=True))
        return far_hops and far_bytes and f.single_share <= 1 and (f.short_chains or not f.trees)

    def bases(self) -> tuple[Basis, ...]:
        """Bases of all its levels."""
        return (self.inside,) if self.between is None else (self.inside, self.between, *self.besides)


def fabric_model(cluster: Cluster, slow: Level, gpus: int) -> FabricModel | None:
    """Fitted collectives of a cluster for a job of ``gpus`` devices; None where only the textbook formula applies.

    The length of chains in trees is limited, so that no group is slower because it lies nearer together.

    Nothing is carried over to other vendors or to links unlike any measured one (PCIe). Second levels inside a node,
    and levels whose file gives the rate that their links reach, have textbook coefficients. Given numbers that replace
    those of the catalogue change the coefficients that depend on them (:mod:`steptime.estimate.fabrics`).

    Args:
        cluster: the machine.
        slow: the slowest level that groups cross once they leave a domain.
        gpus: devices of the job.
    """
    fast = as_known(cluster.levels[0])
    if not cluster.device.runs_cuda or fast is None:
        return None
    profiles = _profiles()
    near = nearest_profile(replace(cluster, levels=(fast, *cluster.levels[1:])), profiles)
    link_Bps = inner_Bps(fast)
    if near is None:
        return None
    same_device = near.device == cluster.device.measured_as
    if not same_device and not 1 / FARTHEST <= near.link_Bps / link_Bps <= FARTHEST:
        return None
    carried = not same_device or near.link_Bps != link_Bps or near.coefficients["domain"] != fast.devices
    values = carried_inside(near, link_Bps, fast.group)
    if carried and (fast.devices or SWITCHED) < SWITCHED:
        values["switch_Bps"] = 0.0
    inside = Basis(level=fast.name, profile=near, carried=carried, stated=stated_text(cluster.levels[0], fast))
    stated = restated_inside(values, cluster.levels[0], fast) if inside.stated else {}
    crossed = cluster.crossed_levels(cluster.beyond_domain(gpus))
    outside = {level.name: _outside(level, near, values, carried=carried) for level in crossed}
    between, besides = None, [basis for name, (basis, _) in outside.items() if name != slow.name]
    if outside:
        between = outside[slow.name][0]
        values |= _slowest([numbers for _, numbers in outside.values()], crossed)
    return FabricModel(
        fabric=replace(fabric_of({**values, **stated}), short_chains=True), inside=inside, between=between,
        besides=tuple(besides), oversubscription=slow.oversubscription if len(outside) == 1 else 1.0,
    )  # fmt: skip


def _outside(
    level: Level, near: FabricProfile, inside: Mapping[str, Any], *, carried: bool
) -> tuple[Basis, dict[str, Any]]:
    """Basis and coefficients of a level between domains.

    ``near`` and ``inside`` are the profile and the coefficients inside a domain; ``carried``: those were carried over
    from other links.
    """
    joins_nodes = level.devices is None or level.devices > LARGEST_NODE
    net = as_known(level) if joins_nodes else None
    # The measured fabric whose coefficients between domains are carried over.
    network = next((p for p in _profiles() if p.name.startswith(NETWORK)), near)
    values = dict(inside)
    if carried or net is None or near.nic_Bps != outer_Bps(net):
        values |= carried_between(net or level, network, int(inside["domain"]))
        values |= _no_nearer_than_inside(values)
        carried = True
    if net is None:
        values |= at_its_word(level)
        return Basis(level=level.name, profile=None, carried=False), values
    basis = Basis(level=level.name, profile=network, carried=carried, stated=stated_text(level, net))
    return basis, values | (restated_between(values, level, net) if basis.stated else {})


def _slowest(outside: list[dict[str, Any]], levels: Sequence[Level]) -> dict[str, Any]:
    """Coefficients of transfers that cross several levels: for each the slowest link and the longest wait.

    With several levels the oversubscription of each is part of its rates.
    """
    first, *others = outside
    if not others:
        return first
    rates = [
        scaled(values["outer_Bps"], 1 / level.oversubscription) for values, level in zip(outside, levels, strict=True)
    ]
    worst: dict[str, Any] = {"outer_Bps": _each(min, rates)}
    for name, choose in WORST.items():
        found = [values[name] for values in outside if name in values]
        worst |= {name: _each(choose, found) if isinstance(found[0], tuple | list) else choose(found)} if found else {}
    return first | worst


def _each(choose: Callable[[Iterable[float]], float], triples: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """The number that ``choose`` takes for each protocol."""
    return tuple(choose(each) for each in zip(*triples, strict=True))


@lru_cache(maxsize=1)
def _profiles() -> tuple[FabricProfile, ...]:
    """Fabrics with links of their own between all devices of a domain."""
    return tuple(p for p in load_fabric_profiles() if p.library == LIBRARY and p.coefficients.get("trees", True))


def nearest_profile(cluster: Cluster, profiles: Iterable[FabricProfile]) -> FabricProfile | None:
    """The measured fabric most similar to the inside of a domain: the same device first, then the nearest link."""
    level = cluster.levels[0]
    link, domain = level.link_Bps * level.links_per_device, float(level.group)
    device = cluster.device.measured_as

    def distance(p: FabricProfile) -> tuple[bool, bool, float, float]:
        width = float(p.coefficients["domain"])  # type: ignore[arg-type]
        speed, size, same = abs(math.log(p.link_Bps / link)), abs(math.log(width / domain)), p.device == device
        wired = bool(p.coefficients.get("links_by_group")) and (size > 0 or (not same and speed > 0))
        return wired, not same, speed, size

    return min(profiles, key=distance, default=None)


def carried_inside(near: FabricProfile, link_Bps: float, domain: int) -> dict[str, Any]:
    """Coefficients inside a domain, for links of another speed: latencies stay, bandwidths are shares of the link."""
    values: dict[str, Any] = dict(near.coefficients) | {"domain": domain}
    for name in ("Bps", "switch_Bps", "direct_pair_Bps"):
        if name in values:
            values[name] = scaled(values[name], link_Bps / near.link_Bps)
    return values


def carried_between(outer: Level, network: FabricProfile, domain: int | None) -> dict[str, Any]:
    """Coefficients between domains carried from a measured network to other NICs, latencies in units of a hop's."""
    names = ("outer_start_s", "outer_hop_s", "single_share", "tree_hop_s", "tree_share")
    out: dict[str, Any] = {n: network.coefficients[n] for n in names if n in network.coefficients}
    per_device = outer.link_Bps * outer.links_per_device
    share = per_device / network.nic_Bps if network.nic_Bps else 1.0
    slow, middle, _ = scaled(network.coefficients.get("outer_Bps", (per_device,) * 3), share)
    out |= {"outer_Bps": (slow, middle, NIC_SHARE * per_device), "single_share": SINGLE_SHARE / NIC_SHARE}
    out |= {"outer_overlap": network.coefficients["overlap"]} if "overlap" in network.coefficients else {}
    late = outer.latency_s / usual_latency_s()
    out |= {n: scaled(out[n], late) for n in ("outer_start_s", "outer_hop_s", "tree_hop_s") if n in out}
    return out | {"nics": float(domain or 1)}


def _no_nearer_than_inside(values: Mapping[str, Any]) -> dict[str, Any]:
    """A hop between domains takes no less than one inside, and a NIC carries no more than the links.

    Fits of two machines need not agree on this, and the search relies on it.
    """
    near_hops = _hops(values["hop_s"], values.get("long_hop_s", 0.0))
    hops = tuple(max(far, near) for far, near in zip(values["outer_hop_s"], near_hops, strict=True))
    rates = tuple(min(far, near) for far, near in zip(values["outer_Bps"], values["Bps"], strict=True))
    return {"outer_hop_s": hops, "outer_Bps": rates}


def _hops(hop_s: tuple[float, ...], long_hop_s: float) -> tuple[float, ...]:
    """The longest hop inside a domain by protocol: under Simple the hop of a long ring may be longer."""
    return (*hop_s[:-1], max(hop_s[-1], long_hop_s))
