"""Fits the coefficients of a fabric to measured collectives: all sizes, groups and kinds of one machine at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np

from steptime.calibrate.collective_machines import Machine
from steptime.calibrate.fitting import hashed
from steptime.cost.collective_algorithms import candidate_s, collective_s
from steptime.cost.collective_fabric import PROTOCOLS, Fabric
from steptime.num import Array

US: Final = 1e-6
#: Log error up to which the loss is quadratic.
SCALE: Final = 0.025
#: Time of one level of a tree over one hop of a ring between domains, where trees were not measured (Perlmutter).
TREE_HOPS: Final = 2.5
#: A fit goes from a smooth minimum over protocols to the true one.
SOFTNESS: Final = (0.15, 0.03, 0.0)
Bounds = tuple[float, float, float]
"""Start, smallest and largest value."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Measured collectives as arguments of `collective_s`."""

    kind: Array
    ranks: Array
    inside: Array
    size_bytes: Array
    element_bytes: Array
    measured_s: Array

    def take(self, index: Any) -> Rows:
        """Rows by index or mask."""
        return Rows(*(getattr(self, f.name)[index] for f in fields(self)))

    def merged(self) -> Rows:
        """One row, the median time, for each repetition of the same collective."""
        key = hashed([self.kind_number(), self.ranks, self.inside, self.size_bytes, self.element_bytes])
        order = np.lexsort((self.measured_s, key))
        edges = np.flatnonzero(np.diff(key[order], prepend=key[order][0] - np.uint64(1)))
        counts = np.diff(edges, append=len(order))
        return self.take(order[edges + (counts - 1) // 2])

    def kind_number(self) -> Array:
        """The kinds as numbers."""
        return np.unique(self.kind.astype(str), return_inverse=True)[1].astype(np.float64)

    def folds(self, count: int) -> Array:
        """Fold of each row: the sizes in ascending order are dealt out in turn, so a size is in one fold only."""
        place: Array = np.unique(self.size_bytes, return_inverse=True)[1] % count
        return place

    def thinned(self, most: int) -> Rows:
        """At most so many rows, spread over sizes, groups and kinds."""
        if len(self.ranks) <= most:
            return self
        order = np.lexsort((self.size_bytes, self.ranks, self.inside, self.kind_number()))
        return self.take(order[np.linspace(0, len(order) - 1, most).astype(np.int64)])


def predict(fabric: Fabric, rows: Rows, softness: float = 0.0) -> Array:
    """Seconds of each row.

    Args:
        fabric: the machine.
        rows: what to predict.
        softness: 0 for the minimum over algorithms and protocols; above, a smooth one, so that a fit sees the
            slope of those that are not the fastest yet.
    """
    out = np.full(len(rows.ranks), np.nan)
    for kind in np.unique(rows.kind.astype(str)):
        own = rows.kind == kind
        args = (str(kind), rows.size_bytes[own], rows.ranks[own], rows.inside[own], fabric)
        if softness:
            times = candidate_s(*args, element_bytes=rows.element_bytes[own])[1]
            logs = -np.log(np.stack(np.broadcast_arrays(*times))) / softness
            most = logs.max(axis=0)
            out[own] = np.exp(-softness * (most + np.log(np.exp(logs - most).sum(axis=0))))
        else:
            out[own] = collective_s(*args, element_bytes=rows.element_bytes[own])[0]
    return out


def parameters(machine: Machine, rows: Rows) -> dict[str, Bounds]:
    """What is fitted for a machine, given what its rows can tell: start, low, high, all positive."""
    out: dict[str, Bounds] = {}
    kinds, link = set(rows.kind), machine.link_Bps
    inner = bool((rows.inside > 1).any())
    for i, (start, hop, share) in enumerate(((5, 0.8, 0.06), (6, 0.9, 0.4), (9, 2.0, 0.8))):
        out[f"start_s.{i}"] = (start * US, 0.3 * US, 100 * US)
        if inner:
            out[f"hop_s.{i}"] = (hop * US, 0.02 * US, 20 * US)
            out[f"Bps.{i}"] = (share * link, 0.003 * link, 1.15 * link)
    if inner:
        out |= {"own_steps": (0.4, 0.01, 2), "overlap": (1.3, 1, 4), "ramp_s": (30 * US, 0.1 * US, 300 * US)}
        out["ramp_bytes"] = (2e7, 1e5, 1e9)
    if (rows.element_bytes < 2).any():
        out["byte_reduction"] = (1.03, 1, 1.5)
    if kinds & {"all_to_all", "p2p"}:
        out |= {f"direct_start_s.{i}": (s * US, 0.01 * US, 40 * US) for i, s in enumerate((1, 3, 1))}
        out |= {f"direct_share.{i}": (0.9, 0.1, 2) for i in range(3)}
    if "all_to_all" in kinds:
        out |= {f"direct_hop_s.{i}": (0.2 * US, 0.001 * US, 5 * US) for i in range(3)}
        out["direct_own_steps"] = (0.3, 0.01, 2)
    if machine.switch and ((rows.kind == "all_reduce") & (rows.ranks > 4)).any():
        out |= {"switch_start_s": (20 * US, 2 * US, 80 * US), "switch_Bps": (0.65 * link, 0.2 * link, 1.3 * link)}
    if machine.outer and (rows.ranks > rows.inside).any():
        out |= _outer(machine, rows)
    return out


def _outer(machine: Machine, rows: Rows) -> dict[str, Bounds]:
    """Coefficients between domains."""
    out: dict[str, Bounds] = {}
    nic = machine.nic_Bps
    trees = machine.trees and ((rows.kind == "all_reduce") & (rows.ranks > 2 * rows.inside)).any()
    for i, (start, hop, share, tree) in enumerate(((5, 6, 0.15, 25), (8, 9, 0.4, 30), (15, 30, 0.7, 45))):
        out[f"outer_start_s.{i}"] = (start * US, 0.1 * US, 200 * US)
        out[f"outer_hop_s.{i}"] = (hop * US, 0.1 * US, 200 * US)
        out[f"outer_Bps.{i}"] = (share * nic, 0.005 * nic, 1.0 * nic)
        if trees:
            out[f"tree_hop_s.{i}"] = (tree * US, 0.5 * US, 300 * US)
    if trees:
        out["tree_share"] = (0.9, 0.3, 1)
    if len(set(np.minimum(rows.inside[rows.ranks > rows.inside], 2))) > 1:
        out["single_share"] = (0.85, 0.5, 1)
    return out


def fixed(machine: Machine) -> dict[str, Any]:
    """Coefficients that are facts of the machine."""
    out: dict[str, Any] = {"domain": machine.domain, "nics": machine.nics, "links_by_group": machine.links_by_group}
    out["trees"] = machine.trees
    out |= {"start_s": (0.0,) * 3, "hop_s": (0.0,) * 3, "Bps": (machine.link_Bps,) * 3}
    return out


def fit(machine: Machine, rows: Rows, *, starts: int = 3, seed: int = 0) -> dict[str, Any]:
    r"""Coefficients (fields of `Fabric`) that minimise the robust log error.

    $$\min_c \sum_i \rho\big(\ln t_i(c) - \ln y_i\big)$$

    with $\rho$ = soft_l1, from several starts (the minimum over protocols makes the problem non-convex).
    """
    from scipy.optimize import least_squares  # type: ignore[import-untyped,unused-ignore]

    bounds, facts = parameters(machine, rows), fixed(machine)
    names = list(bounds)
    begin, low, high = (np.log([bounds[name][j] for name in names]) for j in range(3))
    high = np.maximum(high, low + 1e-6)
    target, random, best = np.log(rows.measured_s), np.random.default_rng(seed), None

    def residuals(x: Array, softness: float = 0.0) -> Array:
        out: Array = np.log(predict(_fabric(facts, names, x), rows, softness)) - target
        return out

    def solve(x: Array, softness: float) -> Any:
        inside, shared = np.clip(x, low + 1e-7, high - 1e-7), {"loss": "soft_l1", "f_scale": SCALE, "max_nfev": 60}
        return least_squares(residuals, inside, bounds=(low, high), kwargs={"softness": softness}, **shared)

    for attempt in range(starts):
        x = begin + (random.normal(0, 0.35, len(begin)) if attempt else 0.0)
        for softness in SOFTNESS:
            found = solve(x, softness)
            x = found.x
        best = found if best is None or found.cost < best.cost else best
    assert best is not None
    out = _values(facts, names, best.x)
    if "outer_hop_s" in out and "tree_hop_s" not in out:
        out["tree_hop_s"] = tuple(TREE_HOPS * hop for hop in out["outer_hop_s"])
    return out


def _values(facts: Mapping[str, Any], names: list[str], x: Array) -> dict[str, Any]:
    """Facts and fitted numbers as fields of `Fabric`."""
    out = dict(facts)
    triples: dict[str, list[float]] = {}
    for name, value in zip(names, np.exp(x), strict=True):
        field, _, index = name.partition(".")
        if index:
            triples.setdefault(field, [0.0] * len(PROTOCOLS))[int(index)] = float(value)
        else:
            out[field] = float(value)
    return out | {name: tuple(values) for name, values in triples.items()}


def _fabric(facts: Mapping[str, Any], names: list[str], x: Array) -> Fabric:
    return Fabric(**_values(facts, names, x))
