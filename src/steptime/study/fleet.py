"""Devices to buy or rent for a run: kinds and numbers, each with its best plan, ranked by one measure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from steptime.cost.training import DAY_S
from steptime.errors import FieldError, UnknownNameError, UserError
from steptime.estimate.result import SCHEMA_VERSION, Estimate
from steptime.goodput.objective import budget_of
from steptime.goodput.prices import prices_of
from steptime.num import Array
from steptime.units import parse

MEASURES: Final[Mapping[str, Callable[[Estimate], float]]] = {
    "time": lambda e: float(e.run["goodput"]["wall_s"]),
    "energy": lambda e: float(e.run["energy"]["kWh"]),
    "cost": lambda e: float(e.run["money"]["cost"]),
}
"""Measure of a fleet: expected time, energy or money of its run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """One kind and number of devices with its best plan."""

    cluster: str
    gpus: int
    estimate: Estimate
    exceeds: tuple[str, ...]
    """Bounds that the fleet exceeds: deadline, budget."""

    @property
    def values(self) -> dict[str, float]:
        """Time (s), energy (kWh) and money of the run."""
        return {name: measure(self.estimate) for name, measure in MEASURES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleets:
    """Fleets, ranked: first those within deadline and budget, then by the objective."""

    objective: str
    fleets: tuple[Fleet, ...]
    front: tuple[int, ...]
    """Indices of the fleets on the Pareto front of time, energy and money."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Fleet -> reason why it has no plan or no price."""
    advice: tuple[str, ...] = ()
    currency: str = "USD"

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``."""
        rows = [
            {
                "cluster": one.cluster,
                "gpus": one.gpus,
                **_named(one),
                "exceeds": list(one.exceeds),
                "on_front": n in self.front,
                "estimate": one.estimate.to_json(),
            }
            for n, one in enumerate(self.fleets)
        ]
        return {
            "schema_version": SCHEMA_VERSION,
            "objective": self.objective,
            "currency": self.currency,
            "fleets": rows,
            "left_out": dict(self.left_out),
            "advice": list(self.advice),
        }


def _named(one: Fleet) -> dict[str, float]:
    values = one.values
    return {"wall_s": values["time"], "kWh": values["energy"], "cost": values["cost"]}


def pareto(points: Array) -> list[int]:
    """Indices of the rows on the Pareto front: no other row is at most as large everywhere and smaller somewhere.

    >>> pareto(np.array([[1.0, 3.0], [2.0, 2.0], [2.0, 3.0]]))
    [0, 1]
    """
    below = (points[:, None, :] <= points[None, :, :]).all(axis=2) & (points[:, None, :] < points[None, :, :]).any(
        axis=2
    )
    return [int(n) for n in np.flatnonzero(~below.any(axis=0))]


def fleet(
    model: Any,
    clusters: Sequence[str],
    gpus: Sequence[int],
    *,
    training: Mapping[str, Any],
    objective: str = "cost",
    deadline: str | None = None,
    budget: str | None = None,
    failures: str = "default",
    prices: str = "default",
    **job: Any,
) -> Fleets:
    """The best plan of every kind and number of devices, ranked.

    Args:
        model: as in :func:`steptime.api.plan`.
        clusters: kinds of clusters.
        gpus: numbers of devices to try for each kind.
        training: length of the run, as ``{"tokens": "1T"}``.
        objective: ``cost``, ``time`` or ``energy`` of the run.
        deadline: longest time of the run, as ``"30 days"``.
        budget: most that it may cost, as ``"2M USD"``.
        failures: as in :func:`steptime.api.estimate`.
        prices: as in :func:`steptime.api.estimate`.
        job: ``global_batch`` and other arguments of :func:`steptime.api.plan`.

    Raises:
        UserError: something in the input is wrong; the message says what to change.
    """
    if objective not in MEASURES:
        raise UnknownNameError("objective", str(objective), MEASURES)
    for name, given in (("cluster", clusters), ("gpus", gpus)):
        if not given:
            raise FieldError("", name, "missing", hint="give one or more")
    currency = prices_of(prices).currency
    most = {} if deadline is None else {"time": parse(deadline, "s")}
    most |= {} if budget is None else {"cost": budget_of(budget, currency)}
    found, left_out = _tried(model, clusters, gpus, most, training=training, failures=failures, prices=prices, **job)
    ranked = sorted(found, key=lambda one: (len(one.exceeds), one.values[objective]))
    points = np.array([list(one.values.values()) for one in ranked]).reshape(-1, len(MEASURES))
    return Fleets(
        objective=objective,
        fleets=tuple(ranked),
        front=tuple(pareto(points)),
        left_out=left_out,
        currency=currency,
        advice=tuple(_advice(ranked, most, currency)),
    )


_BOUNDS: Final = {"time": "deadline", "cost": "budget"}


def _tried(
    model: Any, clusters: Sequence[str], gpus: Sequence[int], most: Mapping[str, float], **job: Any
) -> tuple[list[Fleet], dict[str, str]]:
    """Fleets with their best plans, and reasons for those without one."""
    from steptime.api.searches import plan

    found, left_out = [], {}
    for cluster in dict.fromkeys(clusters):
        for count in dict.fromkeys(gpus):
            try:
                result = plan(model, cluster, gpus=count, objective="goodput", top=1, **job)
            except UserError as error:
                if len(clusters) * len(gpus) == 1:
                    raise
                left_out[f"{count} of {cluster}"] = str(error).partition("\n")[0]
                continue
            if not result.plans:
                left_out[f"{count} of {cluster}"] = "no plan fits"
                continue
            values = {name: measure(result.plans[0]) for name, measure in MEASURES.items()}
            over = tuple(_BOUNDS[name] for name, limit in most.items() if values[name] > limit)
            found.append(Fleet(cluster=cluster, gpus=count, estimate=result.plans[0], exceeds=over))
    return found, left_out


def _advice(ranked: Sequence[Fleet], most: Mapping[str, float], currency: str) -> list[str]:
    """Advice where no fleet keeps the bounds: the least deadline and budget that some fleet keeps."""
    if not ranked or not ranked[0].exceeds:
        return []
    out = []
    for name in most:
        kept = [one for one in ranked if not set(one.exceeds) - {_BOUNDS[name]}] or list(ranked)
        least = min(kept, key=lambda one: one.values[name])
        value = least.values[name]
        shown = f"{value / DAY_S:.4g} days" if name == "time" else f"{value:.6g} {currency}"
        if value > most[name]:
            out.append(f"the least {_BOUNDS[name]} that buys something is {shown}: {least.gpus} of {least.cluster}")
    return out
