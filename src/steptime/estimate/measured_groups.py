"""Collectives of a machine that was measured: one regression per kind, axis and size of group.

A curve is named MODEL/KIND/AXIS and number of ranks (``streaming/all_reduce/local4``). Groups of sizes that were not
measured, and groups over both axes, keep the ring formulas with the fitted numbers of the cluster file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from steptime.cost.regression import SENT
from steptime.cost.stated import stated_latency_s
from steptime.errors import UnknownNameError
from steptime.estimate.measured import AGAIN, FORMULAS, MEASURED, checked
from steptime.estimate.operators import Formula
from steptime.estimate.stated import as_measured, stated_text
from steptime.hardware.profile import Curve, Profile
from steptime.hardware.records import Level
from steptime.num import Num, where

NAME: Final = re.compile(r"(\w+)/(\w+)/(local|node)(\d+)")
#: Kinds that were not measured -> one that sends the same bytes the other way.
MIRROR: Final = {"reduce": "broadcast", "p2p": "point_to_point"}
OF_RATE: Final = ("rate_per_s", "near_Bps", "far_Bps")
"""Coefficients that are rates of the links."""
#: A rate of a machine -> coefficients that scale with it, by axis.
RATES: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "fast_Bps": ("local", OF_RATE),
    "slow_Bps": ("node", OF_RATE),
    "fast_latency_s": ("local", ("latency_s",)),
    "slow_latency_s": ("node", ("latency_s",)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCurve:
    """Time of one kind of collective over groups of one size."""

    kind: str
    axis: str
    """``local``: all ranks in one fast domain; ``node``: each in a domain of its own."""
    ranks: int
    formula: Formula
    fixed: Mapping[str, float]
    curve: Curve
    stated: str = ""
    """What somebody stated over the numbers of the level that the curve was measured on."""

    @property
    def inside(self) -> int:
        """Ranks of the group in each fast domain."""
        return self.ranks if self.axis == "local" else 1

    @property
    def text(self) -> str:
        """One phrase for a report."""
        error = f"median error {100 * self.curve.median_ape:.1f} %"
        return f"measured {self.kind} of {self.ranks} ranks ({error}){self.stated and f', {self.stated}'}"

    def arguments(self, size_bytes: Num) -> dict[str, Num]:
        """Arguments of the formula for a tensor of that size."""
        return {**self.fixed, "moved_bytes": size_bytes * SENT[self.kind](self.ranks), "result_bytes": 0.0}

    def seconds(self, size_bytes: Num) -> Num:
        """Time of one collective; nothing is sent for an empty tensor."""
        return where(size_bytes > 0, self.formula(self.arguments(size_bytes)), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """All measured groups of a machine."""

    curves: tuple[GroupCurve, ...]

    @property
    def between(self) -> bool:
        """Whether groups between fast domains were measured: then no order of speeds is sure."""
        return any(one.axis == "node" for one in self.curves)

    def seconds(self, kind: str, size_bytes: Num, ranks: Num, inside: Num, otherwise: Num) -> Num:
        """Time of a collective; ``otherwise`` where its group was not measured."""
        out = otherwise
        for one in self.curves:
            if one.kind == MIRROR.get(kind, kind):
                out = where((ranks == one.ranks) & (inside == one.inside), one.seconds(size_bytes), out)
        return out

    def find(self, kind: str, ranks: float, inside: float) -> GroupCurve | None:
        """The curve that :meth:`seconds` takes for one plan."""
        for one in reversed(self.curves):
            if (one.kind, one.ranks, one.inside) == (MIRROR.get(kind, kind), ranks, inside):
                return one
        return None

    def restated(self, levels: Mapping[str, Level]) -> Groups:
        """The same groups with what a file states over the levels that they were measured on.

        Args:
            levels: axis -> its level.
        """
        return Groups(curves=tuple(_restated(one, levels[one.axis]) for one in self.curves))

    def faster(self, factors: Mapping[str, float]) -> Groups:
        """The same groups on a machine whose rates are multiplied."""
        return Groups(curves=tuple(_faster(one, factors) for one in self.curves))


def _faster(one: GroupCurve, factors: Mapping[str, float]) -> GroupCurve:
    fixed = dict(one.fixed)
    for rate, factor in factors.items():
        axis, names = RATES.get(rate, ("", ()))
        for name in names if axis == one.axis else ():
            if name in fixed:
                fixed[name] *= factor
    return replace(one, fixed=fixed)


def _restated(one: GroupCurve, level: Level) -> GroupCurve:
    """Rates in proportion to those of the level, latencies as :func:`~steptime.cost.stated.stated_latency_s` says.

    A collective has at least one hop per rank but the first.
    """
    known = as_measured(level)
    text = "" if known is None else stated_text(level, known)
    if known is None or not text:
        return one
    fixed = {n: value * level.rank_Bps / known.rank_Bps if n in OF_RATE else value for n, value in one.fixed.items()}
    hops = one.ranks - 1
    if "latency_s" in fixed:
        fixed["latency_s"] = stated_latency_s(fixed["latency_s"], hops * level.latency_s, hops * known.latency_s)
    return replace(one, fixed=fixed, stated=text)


def groups_of(profile: Profile | None) -> Groups | None:
    """The measured groups of a profile; None if it has none.

    Raises:
        UserError: a curve lacks a coefficient of its formula.
        UnknownNameError: a curve is of no formula or of nothing that is measured.
    """
    if profile is None:
        return None
    found = []
    for curve in profile.curves:
        _check_family(curve, profile)
        name = NAME.fullmatch(curve.family)
        if name is not None:
            formula, _ = checked(curve, ("moved_bytes", "result_bytes"), profile)
            found.append(
                GroupCurve(
                    kind=name[2], axis=name[3], ranks=int(name[4]), formula=formula, fixed=curve.coefficients,
                    curve=curve,
                )
            )  # fmt: skip
    return Groups(curves=tuple(found)) if found else None


def _check_family(curve: Curve, profile: Profile) -> None:
    """No curve of a file is left out because of how its name is spelt."""
    formula, _, ran = curve.family.partition("/")
    named = f"the curve {curve.family} {curve.dtype} of {profile.device}"
    if formula not in FORMULAS:
        raise UnknownNameError("formula of curves", formula, FORMULAS, where=named)
    ranks = re.findall(r"\d+$", ran) or ["2"]
    known = MEASURED | {f"{kind}/{axis}{ranks[0]}" for kind in SENT for axis in ("local", "node")}
    if ran not in known:
        raise UnknownNameError("measured operator", ran, known, where=named, otherwise=AGAIN)
