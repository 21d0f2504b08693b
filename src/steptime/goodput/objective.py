"""Objectives of a search of plans: time, goodput, energy or money of a run, within a deadline and a budget."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from steptime.cost.energy import KWH_J
from steptime.cost.training import DAY_S, HOUR_S
from steptime.errors import FieldError, UnknownNameError, UserError, shown
from steptime.estimate.energy import powers_of
from steptime.estimate.single import Setting
from steptime.goodput.bill import billed_again, load_of
from steptime.goodput.operations import operations_of
from steptime.goodput.prices import Prices, prices_of
from steptime.goodput.run import goodput_of
from steptime.goodput.training import amount
from steptime.search.objective import Mix, Objective, Wanted
from steptime.search.planner import PlanResult
from steptime.units import parse

NAMES: Final = ("time", "goodput", "energy", "cost")
SHORT_S: Final = 1e-3
"""Step time short enough that a run can save at the best interval."""
ENOUGH: Final = 1.00001
"""Factor on a least bound, so that its printed, rounded value is still enough."""
_BUDGET: Final = re.compile(r"\s*([\d._]+(?:[eE]\d+)?\s*[kKmMbBtT]?)\s*([A-Z]{3})\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Cost of a run as a function of time and energy of a step."""

    steps: float
    overhead: float
    """Expected time of the run over the time of its steps."""
    run_s: Mix
    """Time of the run."""
    money: Mix
    """Money of the run."""


def budget_of(given: str, currency: str) -> float:
    """Money of a text such as ``2.5M USD``.

    Raises:
        FieldError: it has no currency, or another one than the prices.

    >>> budget_of("2.5M USD", "USD")
    2500000.0
    """
    match = _BUDGET.fullmatch(given) if isinstance(given, str) else None
    if match is None:
        raise FieldError("", "budget", f"{shown(given)} has no currency", hint=f'write for example "2M {currency}"')
    if match[2] != currency:
        raise FieldError(
            "", "budget", f"{shown(given)} is not in {currency}", hint="prices and budget have one currency"
        )
    return amount("budget", match[1].strip())


def rates_of(setting: Setting, steps: float, failures: Any, prices: Prices | None) -> Rates:
    """Cost of the run by time and energy of a step; without prices its money is zero."""
    job, device = setting.job, setting.cluster.device
    overhead, spares = 1.0, 0
    if failures is not None:
        ops = operations_of(failures)
        load = load_of(setting, SHORT_S, None, 1e9, ops)
        runs = goodput_of(load, ops)
        overhead, spares = runs.wall_s / runs.ideal_s, runs.spares * load.node
    run_s = Mix(per_s=steps * overhead)
    if prices is None:
        return Rates(steps=steps, overhead=overhead, run_s=run_s, money=Mix())
    hour, per_J = prices.of(device).value, prices.kWh / KWH_J
    waiting_W = 0.0
    if prices.kWh:
        idle_W, tdp_W, _ = powers_of(device)
        waiting_W = prices.pue * job.gpus * (idle_W + prices.host_power_W(tdp_W)) * (overhead - 1.0)
    per_s = steps * ((job.gpus + spares) * hour / HOUR_S * overhead + waiting_W * per_J)
    return Rates(steps=steps, overhead=overhead, run_s=run_s, money=Mix(per_s=per_s, per_J=steps * per_J))


def objective_of(setting: Setting, wanted: Wanted, steps: float | None) -> Objective | None:
    """The objective and its bounds; None if the objective is the step time without bounds.

    Args:
        setting: job and cluster.
        wanted: the user's objective.
        steps: steps of the run; None: its length is not given.

    Raises:
        UserError: something in the input is wrong; the message says what to change.
    """
    if wanted.objective not in NAMES:
        raise UnknownNameError("objective", str(wanted.objective), NAMES)
    if wanted == Wanted(failures=wanted.failures, prices=wanted.prices):
        return None
    if steps is None and (wanted.deadline is not None or wanted.budget is not None):
        raise FieldError("", "tokens", "missing; a deadline and a budget are of a whole run", hint="give --tokens 1T")
    needs_prices = wanted.objective == "cost" or wanted.budget is not None
    prices = prices_of("default" if wanted.prices is None else wanted.prices)
    failures = wanted.failures or ("default" if wanted.objective == "goodput" else None)
    rates = rates_of(setting, steps or 1.0, failures, prices if needs_prices else None)
    bounds = {}
    if wanted.deadline is not None:
        bounds["deadline"] = (rates.run_s, _positive("deadline", parse(str(wanted.deadline), "s")))
    if wanted.budget is not None:
        bounds["budget"] = (rates.money, budget_of(wanted.budget, prices.currency))
    mixes = {"time": Mix(per_s=1.0), "goodput": rates.run_s, "energy": Mix(per_J=1.0), "cost": rates.money}
    idle_W, tdp_W, host_W = _powers(setting, prices, needed=wanted.objective == "energy" or prices.kWh > 0)
    return Objective(
        name=wanted.objective,
        mix=mixes[wanted.objective],
        idle_W=idle_W,
        peak_W=tdp_W,
        host_W=host_W,
        pue=prices.pue,
        bounds=bounds,
    )


def _positive(field: str, value: float) -> float:
    if value <= 0:
        raise FieldError("", field, f"{value:g} s is not above zero", hint='for example "30 days"')
    return value


def _powers(setting: Setting, prices: Prices, *, needed: bool) -> tuple[float, float, float]:
    """Idle power, TDP and power of the hosts; zero if they are unknown and not needed."""
    try:
        idle_W, tdp_W, _ = powers_of(setting.cluster.device)
    except UserError:
        if needed:
            raise
        return 0.0, 0.0, 0.0
    return idle_W, tdp_W, prices.host_power_W(tdp_W)


def bound_advice(objective: Objective | None, result: PlanResult, wanted: Wanted) -> tuple[str, ...]:
    """Advice where no plan keeps the bounds: the least feasible value of each, with the others kept if possible."""
    if objective is None or not objective.bounds or result.feasible or not result.energy_front:
        return ()
    return tuple(_least(objective.bounds, result.energy_front, prices_of(wanted.prices or "default").currency))


def billed_plans(result: PlanResult, setting: Setting, wanted: Wanted) -> PlanResult:
    """The result with goodput, energy and money of its plans, if failures or prices are given."""
    if not result.plans or not result.plans[0].training:
        return result
    prices = wanted.prices or ("default" if wanted.objective == "cost" or wanted.budget else None)
    failures = wanted.failures or ("default" if wanted.objective == "goodput" else None)
    return replace(result, plans=tuple(billed_again(e, setting, failures, prices) for e in result.plans))


def _least(bounds: Mapping[str, tuple[Mix, float]], front: Sequence[Mapping[str, Any]], currency: str) -> Iterator[str]:
    time_s, energy_J = (np.array([point[name] for point in front]) for name in ("step_time_s", "step_energy_J"))
    for name, (mix, most) in bounds.items():
        others = [other for other in bounds if other != name]
        kept = np.ones(len(front), dtype=bool)
        for other in others:
            kept &= bounds[other][0].of(time_s, energy_J) <= bounds[other][1]
        values = np.asarray(mix.of(time_s, energy_J))
        if not kept.any():
            kept, others = np.ones(len(front), dtype=bool), []
        least = float(values[kept].min())
        unit, scale = ("days", DAY_S) if name == "deadline" else (currency, 1.0)
        given, needed = (f"{value / scale:.6g} {unit}" for value in (most, least * ENOUGH))
        within = f" within the {others[0]}" if others else ""
        if least > most:
            yield f"a {name} of {given} buys nothing: the least that would{within} is {needed}"
