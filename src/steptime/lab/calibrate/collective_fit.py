"""Fits the coefficients of a fabric to measured collectives: all sizes, groups and kinds of one machine at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from steptime.cost.collective_algorithms import PROTOCOLS, Fabric, candidate_s, collective_s
from steptime.lab.calibrate.collective_machines import Machine
from steptime.lab.calibrate.collective_priors import TREE_HOPS, fixed, priors, told
from steptime.lab.calibrate.collective_rows import Rows
from steptime.num import Array

__all__ = ["Rows", "fit", "predict"]

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


def fit(machine: Machine, rows: Rows, *, starts: int = 3, seed: int = 0) -> dict[str, Any]:
    r"""Coefficients (fields of `Fabric`) that minimise the robust log error, drawn to what is known beforehand.

    $$\min_c \sum_i \rho\big(\ln t_i(c) - \ln y_i\big) + \sum_j \rho\Big(w \frac{\ln c_j - \ln c_j^0}{\sigma_j}\Big)$$

    with $\rho$ = soft_l1, $c^0$ and $\sigma$ the values and spreads of `collective_priors`, $w$ = `PRIOR`, from
    several starts (the minimum over protocols makes the problem non-convex). Coefficients that the rows cannot tell
    anything about take the prior.
    """
    from scipy.optimize import least_squares  # type: ignore[import-untyped,unused-ignore]

    before, names = priors(machine), told(machine, rows)
    facts = fixed(machine) | _values({}, list(before), np.log([p.value for p in before.values()]))
    facts |= {"switch_Bps": facts["switch_Bps"] if machine.switch else 0.0}
    begin, low, high = (np.log([before[name][j] for name in names]) for j in range(3))
    weight = PRIOR / np.array([before[name].spread for name in names])
    high = np.maximum(high, low + 1e-6)
    target, random, best = np.log(rows.measured_s), np.random.default_rng(seed), None

    def residuals(x: Array, softness: float = 0.0) -> Array:
        time = predict(_fabric(facts, names, x), rows, softness)
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


def _fabric(facts: Mapping[str, Any], names: list[str], x: Array) -> Fabric:
    return Fabric(**_values(facts, names, x))
