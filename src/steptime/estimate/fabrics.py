"""Fitted collectives of a cluster: a measured fabric inside a domain, and one between domains in units of its NICs.

Numbers of links that somebody stated over those of the catalogue, in fitted collectives.

A fit belongs to the links of the catalogue. What is stated changes the coefficients that it speaks of: a bandwidth
in proportion, an efficiency and a latency as :mod:`steptime.cost.roofline` says. All others stay.
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


LIBRARY: Final = "nccl"
"""The measured library of collectives; it runs on what runs CUDA."""
NETWORK: Final = "perlmutter"
"""The only measured network with all group sizes; its latencies stand for every other, in units of those of links that
do not say theirs, as its own do not."""
#: Share of a NIC that long transfers reach on InfiniBand and RoCE (nccl-tests of OCI with 16 ranks, A100 and MI300X:
#: 0.95 and 0.89; a host port that serves one GPU both ways reaches 0.64 to 0.73, GKE H200 and B200). The Slingshot
#: NICs of Perlmutter sit behind PCIe 4 and stay at 0.68.
NIC_SHARE: Final = 0.9
SINGLE_SHARE: Final = 0.7
FARTHEST: Final = 2.0
"""Coefficients are carried to a link that is at most so many times as fast or as slow as a measured one."""
LARGEST_NODE: Final = 16
"""A level that joins no more devices than this lies inside a node: it is no network."""
SWITCHED: Final = 8
"""Smallest domain whose links run through switches, which may add up."""

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
    """What the numbers of one level of a fabric rest on."""

    level: str
    """Name of the level of the cluster."""
    profile: FabricProfile | None
    """None: on what a file says of this level, with the textbook's formula."""
    carried: bool
    """Whether they were measured on other links and carried over in units of the datasheet."""
    stated: str = ""
    """What somebody stated over the numbers of the catalogue that they belong to."""

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
        """How the coefficients came about, before what they were fitted to."""
        return "carried over, in units of the datasheet links, from a fit to" if self.carried else "fitted to"


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricModel:
    """Fitted collectives of one cluster, for jobs of one size."""

    fabric: Fabric
    oversubscription: float
    inside: Basis
    between: Basis | None
    """Of the slowest level between domains; None on a machine without any, where all jobs stay in one domain."""
    besides: tuple[Basis, ...] = ()
    """Of the other levels that a group between domains crosses."""

    def faster(self, factors: Mapping[str, float]) -> FabricModel:
        """The same model on a machine whose rates are multiplied."""
        changed: dict[str, Any] = {}
        for rate, names in RATES.items():
            for name in names if rate in factors else ():
                changed[name] = scaled(getattr(self.fabric, name), factors[rate])
        return replace(self, fabric=replace(self.fabric, **changed))

    @property
    def nearer_is_faster(self) -> bool:
        """Whether no collective is slower with more of its ranks in each domain."""
        f = self.fabric
        if self.between is None:
            return True
        far_hops = all(far >= near for far, near in zip(f.outer_hop_s, _hops(f.hop_s, f.long_hop_s), strict=True))
        far_bytes = all(far <= near for far, near in zip(f.outer_Bps, f.Bps, strict=True))
        return far_hops and far_bytes and f.single_share <= 1 and (f.short_chains or not f.trees)

    def bases(self) -> tuple[Basis, ...]:
        """What its levels rest on."""
        return (self.inside,) if self.between is None else (self.inside, self.between, *self.besides)


def fabric_model(cluster: Cluster, slow: Level, gpus: int) -> FabricModel | None:
    """Fitted collectives of a cluster for a job of so many devices; None where the textbook formula has to do.

    Chains of trees are no longer than pays, so that no group is the slower one for lying nearer together.

    Nothing is carried over to other vendors and to links unlike any that was measured (PCIe); second levels inside a
    node, and levels that say themselves what their links reach, are taken at their word. Numbers that somebody stated
    over those of the catalogue change the coefficients that they speak of (:mod:`steptime.estimate.fabrics`).

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
    """What the numbers of a level between domains rest on, and the coefficients of a fabric that they are.

    ``near`` and ``inside`` are the profile and the coefficients inside a domain, ``carried`` whether those were
    carried over from other links.
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
    """Coefficients of transfers that cross several levels: of each the slowest link and the longest wait.

    Where they are several, the bandwidth that a level lacks to its devices together is in their rates.
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
    """Of each protocol the number that is chosen."""
    return tuple(choose(each) for each in zip(*triples, strict=True))


@lru_cache(maxsize=1)
def _profiles() -> tuple[FabricProfile, ...]:
    """Fabrics with links of their own between all devices of a domain."""
    return tuple(p for p in load_fabric_profiles() if p.library == LIBRARY and p.coefficients.get("trees", True))


def nearest_profile(cluster: Cluster, profiles: Iterable[FabricProfile]) -> FabricProfile | None:
    """The measured fabric that is most like the inside of a domain: the same device, the nearest link."""
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
    """Coefficients between domains, of another network, for the NICs of this one: latencies are in units of a hop's."""
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

    What was measured on two machines need not fit together so, and the search relies on it.
    """
    near_hops = _hops(values["hop_s"], values.get("long_hop_s", 0.0))
    hops = tuple(max(far, near) for far, near in zip(values["outer_hop_s"], near_hops, strict=True))
    rates = tuple(min(far, near) for far, near in zip(values["outer_Bps"], values["Bps"], strict=True))
    return {"outer_hop_s": hops, "outer_Bps": rates}


def _hops(hop_s: tuple[float, ...], long_hop_s: float) -> tuple[float, ...]:
    """The longest hop inside a domain by protocol: that of a long ring may be the longer one under Simple."""
    return (*hop_s[:-1], max(hop_s[-1], long_hop_s))
