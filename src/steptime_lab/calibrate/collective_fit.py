"""Fits the coefficients of a fabric to measured collectives, with priors from datasheets and other machines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from steptime.cost.collective_algorithms import PROTOCOLS, Fabric, candidate_s, collective_s
from steptime.num import Array
from steptime_lab.calibrate.collective_machines import Machine, Rows

US: Final = 1e-6
#: Time of one level of a tree over one hop of a ring between domains, where trees were not measured (Perlmutter).
TREE_HOPS: Final = 2.5
#: Hop of a long ring over NVLink under protocol Simple, and one partner in an exchange of many pairs. Rings of 4 to 72
#: in one domain (GB300 under XLA, the only ones beyond 8) take 1.7 to 2.6 us a hop, depending on whether hops of short
#: rings are separated, and exchanges 0.3 to 0.4 us; NCCL itself assumes 3.4 us on NVLink (src/graph/tuning.cc). Groups
#: of 2 to 8 do not determine it. A hop takes 12 us there on NVLink 5, which rings of 64 and 72 contradict by factors;
#: on NVLink 4 it cannot be separated from the start (0.5 to 3.4 us fit as well), nor a partner (0.02 to 2.7 us).
LONG_HOP_S: Final = 2.4 * US
LONG_DIRECT_HOP_S: Final = 0.3 * US
#: Longest hop under LL128 on NVLink: twice the 1.9 us that NCCL itself assumes (src/graph/tuning.cc).
LONGEST_LL128_S: Final = 3.8 * US
#: Largest datasheet bandwidth of a device on PCIe (5.0 x16); faster links are NVLink or xGMI.
PCIE_BPS: Final = 64e9


class Prior(NamedTuple):
    """Prior of a coefficient; all are positive and fitted as logarithms."""

    value: float
    low: float
    high: float
    spread: float
    """Standard deviation of the logarithm of the value."""


#: Start, hop (us) and bandwidth (share of the link) of the three protocols inside a domain.
_INNER: Final[Mapping[str, tuple[tuple[float, float, float], ...]]] = {
    "nvlink": ((6, 1.0, 0.03), (7, 1.1, 0.33), (12, 1.5, 0.78)),
    "pcie": ((5, 0.8, 0.15), (6, 1.0, 0.4), (14, 3.0, 0.65)),
    "kernel": ((12, 1.0, 0.03), (18, 1.1, 0.33), (25, 1.5, 0.78)),
    "host": ((80, 1.0, 0.03), (90, 1.1, 0.33), (100, 3.0, 0.7)),
}
#: Start, hop, share of the NIC and level of a tree: between hosts, and between pairs of one host over PCIe.
_BETWEEN: Final[Mapping[str, tuple[tuple[float, float, float, float], ...]]] = {
    "hosts": ((8, 6, 0.2, 20), (9, 8, 0.4, 25), (15, 25, 0.7, 45)),
    "pcie": ((1, 2, 0.2, 5), (1.5, 3, 0.45, 8), (4, 10, 0.55, 25)),
    "bridge": ((1, 2, 0.3, 5), (1.5, 3, 0.6, 8), (4, 10, 0.77, 25)),
}


def priors(machine: Machine) -> dict[str, Prior]:
    """All coefficients of a machine, measured or not, by name (`field.index` for one of a triple)."""
    link, out = machine.link_Bps, dict[str, Prior]()
    for i, (start, hop, share) in enumerate(_INNER[_class_of(machine)]):
        out[f"start_s.{i}"] = Prior(start * US, 0.3 * US, 150 * US, 0.6)
        out[f"hop_s.{i}"] = Prior(hop * US, 0.05 * US, 20 * US, 0.6)
        out[f"Bps.{i}"] = Prior(share * link, 0.003 * link, 1.15 * link, (0.6, 0.4, 0.2)[i])
        out[f"direct_start_s.{i}"] = Prior((1.5, 5, 3)[i] * US, 0.01 * US, 40 * US, 1.0)
        out[f"direct_hop_s.{i}"] = Prior(0.3 * US, 0.001 * US, 5 * US, 1.0)
        out[f"direct_share.{i}"] = Prior(1.0, 0.1, 2, 0.5)
    out |= {
        "own_steps": Prior(0.3, 0.01, 2, 1.0),
        "overlap": Prior(1.6, 1, 4, 0.5),
        "ramp_s": Prior(20 * US, 0.1 * US, 300 * US, 1.0),
        "ramp_bytes": Prior(1e7, 1e5, 1e9, 1.5),
        "byte_reduction": Prior(1.03, 1, 1.5, 0.1),
        "direct_own_steps": Prior(0.3, 0.01, 2, 1.0),
        "direct_pair_Bps.0": Prior(0.02 * link, 0.002 * link, 1.15 * link, 1.0),
        "direct_pair_Bps.1": Prior(0.2 * link, 0.002 * link, 1.15 * link, 1.0),
        "switch_start_s": Prior(40 * US, 2 * US, 120 * US, 0.6),
        "switch_Bps": Prior(0.6 * link, 0.2 * link, 1.3 * link, 0.4),
    }
    if machine.known_ranks:
        out["hop_s.1"] = out["hop_s.1"]._replace(high=LONGEST_LL128_S)
    if machine.library == "host":
        out |= {
            "wrap_start_s": Prior(100 * US, 1 * US, 1e-3, 1.0),
            "wrap_hop_s": Prior(20 * US, 0.1 * US, 200 * US, 1.0),
            "wrap_Bps": Prior(link, 0.05 * link, 20 * link, 1.0),
        }
    return out | (_between(machine) if machine.outer else {})


def _class_of(machine: Machine) -> str:
    """Key of `_INNER`: how the devices of a domain are connected and timed."""
    if machine.library in ("host", "nccl-kernel"):
        return machine.library.rsplit("-", 1)[-1]
    return "pcie" if machine.link_Bps <= PCIE_BPS else "nvlink"


def _between(machine: Machine) -> dict[str, Prior]:
    """Coefficients between domains."""
    out: dict[str, Prior] = {}
    nic = machine.nic_Bps
    paired = not machine.trees and PCIE_BPS / 4 < nic <= PCIE_BPS and machine.nics == 1
    place = ("bridge" if machine.link_Bps > PCIE_BPS else "pcie") if paired else "hosts"
    for i, (start, hop, share, tree) in enumerate(_BETWEEN[place]):
        out[f"outer_start_s.{i}"] = Prior(start * US, 0.1 * US, 200 * US, 0.7)
        out[f"outer_hop_s.{i}"] = Prior(hop * US, 0.1 * US, 200 * US, 0.7)
        out[f"outer_Bps.{i}"] = Prior(share * nic, 0.005 * nic, nic, (0.6, 0.5, 0.4)[i])
        out[f"tree_hop_s.{i}"] = Prior(tree * US, 0.5 * US, 300 * US, 0.7)
    return out | {"tree_share": Prior(0.85, 0.3, 1, 0.2), "single_share": Prior(0.85, 0.5, 1, 0.2)}


def determined(machine: Machine, rows: Rows) -> list[str]:
    """Names of the coefficients that the rows of a machine determine."""
    kinds = set(rows.kind)
    spans = rows.ranks > rows.inside
    names = ["start_s"]
    if (rows.inside > 1).any():
        names += ["hop_s", "Bps", "own_steps", "overlap", "ramp_s", "ramp_bytes"]
    if (rows.element_bytes < 2).any():
        names.append("byte_reduction")
    if kinds & {"all_to_all", "p2p"}:
        names += ["direct_start_s", "direct_share"]
    if "all_to_all" in kinds:
        names += ["direct_hop_s", "direct_own_steps", "direct_pair_Bps"]
    if machine.switch and ((rows.kind == "all_reduce") & (rows.ranks > 4)).any():
        names += ["switch_start_s", "switch_Bps"]
    if machine.library == "host":
        names += ["wrap_start_s", "wrap_hop_s", "wrap_Bps"]
    if machine.outer and spans.any():
        names += ["outer_start_s", "outer_hop_s", "outer_Bps"]
        if machine.trees and ((rows.kind == "all_reduce") & (rows.ranks > 2 * rows.inside)).any():
            names += ["tree_hop_s", "tree_share"]
        if len(set(np.minimum(rows.inside[spans], 2))) > 1:
            names.append("single_share")
    return [name for name in priors(machine) if name.partition(".")[0] in names]


def fixed(machine: Machine) -> dict[str, Any]:
    """Coefficients that are facts of the machine."""
    out: dict[str, Any] = {"domain": machine.domain, "nics": machine.nics, "links_by_group": machine.links_by_group}
    out["trees"] = machine.trees
    if machine.known_ranks:
        out |= {"known_ranks": machine.known_ranks, "long_hop_s": LONG_HOP_S, "long_direct_hop_s": LONG_DIRECT_HOP_S}
    return out


def undetermined(machine: Machine, rows: Rows) -> list[str]:
    """Groups of coefficients, in words, that the rows of a machine do not determine: its profile has their priors."""
    out = []
    if not (rows.inside > 1).any():
        out.append("inside a domain")
    if machine.outer and not (rows.ranks > rows.inside).any():
        out.append("between domains")
    if len(set(rows.ranks)) < 2 and "p2p" not in set(rows.kind):
        out.append("hops")
    return out


#: Log error up to which the loss is quadratic.
SCALE: Final = 0.025
#: Log error of one row that weighs as much as a coefficient one spread off its prior.
PRIOR: Final = 0.02
#: A fit goes from a smooth minimum over protocols to the true one.
SOFTNESS: Final = (0.15, 0.03, 0.0)


def predict(fabric: Fabric, rows: Rows, softness: float = 0.0) -> Array:
    """Seconds of each row.

    Args:
        fabric: the machine.
        rows: rows to predict.
        softness: 0 for the minimum over algorithms and protocols; above 0 a smooth minimum, so that a fit sees the
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


def fit(machine: Machine, rows: Rows, *, starts: int = 3, seed: int = 0) -> dict[str, Any]:
    r"""Coefficients (fields of `Fabric`) that minimise the robust log error, with priors.

    $$\min_c \sum_i \rho\big(\ln t_i(c) - \ln y_i\big) + \sum_j \rho\Big(w \frac{\ln c_j - \ln c_j^0}{\sigma_j}\Big)$$

    with $\rho$ = soft_l1, $c^0$ and $\sigma$ the values and spreads of `priors`, $w$ = `PRIOR`, from
    several starts (the minimum over protocols makes the problem non-convex). Coefficients that the rows do not
    determine take the prior.
    """
    from scipy.optimize import least_squares  # type: ignore[import-untyped,unused-ignore]

    before, names = priors(machine), determined(machine, rows)
    facts = fixed(machine) | _values({}, list(before), np.log([p.value for p in before.values()]))
    facts |= {"switch_Bps": facts["switch_Bps"] if machine.switch else 0.0}
    begin, low, high = (np.log([before[name][j] for name in names]) for j in range(3))
    weight = PRIOR / np.array([before[name].spread for name in names])
    high = np.maximum(high, low + 1e-6)
    target, random, best = np.log(rows.measured_s), np.random.default_rng(seed), None

    def residuals(x: Array, softness: float = 0.0) -> Array:
        time = predict(Fabric(**_values(facts, names, x)), rows, softness)
        return np.concatenate([np.log(time) - target, weight * (x - begin)])

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
    if "outer_hop_s" in out and "tree_share" not in names:
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
