"""Goodput, energy and money of a whole run under one plan, as the API returns them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from steptime.cost.energy import KWH_J, carbon_kg, site_energy_J
from steptime.cost.money import run_cost
from steptime.cost.training import DAY_S, HOUR_S
from steptime.errors import FieldError
from steptime.estimate.energy import activity_of, powers_of
from steptime.estimate.evaluate import evaluate
from steptime.estimate.machine import node_devices
from steptime.estimate.result import Estimate
from steptime.estimate.single import Setting
from steptime.estimate.sizes import sizes_of, state_bytes_of_model
from steptime.goodput.operations import Operations, operations_of
from steptime.goodput.prices import Price, Prices, prices_of
from steptime.goodput.run import Goodput, Load, goodput_of
from steptime.num import Num
from steptime.options import LAUNCHED
from steptime.plan.job import Job
from steptime.plan.placements import numbered, order_of
from steptime.plan.plans import Plans
from steptime.plan.recompute import recompute_code
from steptime.plan.strategies import CORRECTED, Strategy

POWER_BAND: Final = 0.2
"""Assumed relative error of the power of a device."""
WAITING: Final = ("restarts", "waits for a node", "checkpoint stalls", "data")
"""Losses in which devices are idle."""


def saved_bytes(job: Job) -> float:
    """Bytes of a checkpoint: trained weights in the dtype of the forward pass, and optimiser states."""
    plain = replace(job, gpus=1, global_batch=1)
    sizes, layers = sizes_of(CORRECTED.strategy("1d").block(plain, Plans()), job.optimizer.matrices), job.model.layers
    parts = ((layers, sizes.layer), (1, sizes.first), (1, sizes.last))
    trained = sum(count * (part.weights + part.expert_weights) for count, part in parts)
    return float(job.precision.element_bytes * trained + state_bytes_of_model(sizes, job, trained))


def load_of(setting: Setting, step_s: float, step_band: Any, steps: float, ops: Operations) -> Load:
    """The quantities of a run that its goodput depends on."""
    job, cluster = setting.job, setting.cluster
    node = min(node_devices(cluster), job.gpus)
    outer = cluster.outer_level(cluster.beyond_domain(job.gpus))
    return Load(
        step_s=step_s,
        steps=steps,
        devices=job.gpus,
        node=node,
        saved_bytes=saved_bytes(job) if ops.saved_bytes is None else ops.saved_bytes,
        host_Bps=cluster.device.host_Bps,
        network_Bps=outer.rank_Bps * node,
        step_band=step_band,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """Power of a job."""

    device_W: float
    """Average power of a device in a step."""
    idle_W: float
    tdp_W: float
    host_W: float
    shares: Mapping[str, float]
    """Utilisation of the parts of a device."""
    assumed: tuple[str, ...]


def power_of(setting: Setting, strategy: Strategy, plans: Plans, prices: Prices) -> Power:
    """Power of a job under one plan.

    Raises:
        UserError: the power of the device is unknown.
    """
    e = evaluate(setting.method, strategy, setting.job, setting.machine, plans)
    idle_W, tdp_W, assumed = powers_of(setting.cluster.device)
    does = activity_of(e)
    shares: dict[str, Num] = {name: getattr(does, name) for name in ("running", "matrix", "memory", "links")}
    host_W, host = prices.host_power_W(tdp_W), f"host power {prices.host_share:.0%} of the TDP"
    return Power(
        device_W=float(does.power_W(idle_W, tdp_W)),
        idle_W=idle_W,
        tdp_W=tdp_W,
        host_W=host_W,
        shares={name: float(value) for name, value in shares.items()},
        assumed=("power over utilisation", *assumed.values(), *(() if prices.host_W is not None else (host,))),
    )


def billed(
    found: Estimate, setting: Setting, strategy: Strategy, plans: Plans, failures: Any = None, prices: Any = None
) -> Estimate:
    """The estimate with goodput, energy and money of its whole run; unchanged without failures and prices.

    Args:
        found: an estimate that has the length of its run.
        setting: its job and cluster.
        strategy: its strategy.
        plans: its plan.
        failures: name of the catalogue, ``default``, the path of a file, or None.
        prices: ``default``, the path of a file, or None.

    Raises:
        UserError: something in the input is wrong; the message says what to change.
    """
    if failures is None and prices is None:
        return found
    if not found.training:
        raise FieldError("", "tokens", "missing; failures and prices are of a whole run", hint="give --tokens 1T")
    out: dict[str, Any] = {}
    runs, spares = None, 0
    if failures is not None:
        ops = operations_of(failures)
        load = load_of(setting, found.step_time_s, found.step_time_band_s, found.training["steps"], ops)
        runs = goodput_of(load, ops)
        spares = runs.spares * load.node
        out["goodput"] = goodput_record(runs)
    if prices is not None:
        given = prices_of(prices)
        power, price = power_of(setting, strategy, plans, given), given.of(setting.cluster.device)
        meter = Meter(gpus=setting.job.gpus, paid=setting.job.gpus + spares, power=power, prices=given, price=price)
        out |= priced(found, runs, meter)
    return replace(found, run=out)


def billed_again(found: Estimate, setting: Setting, failures: Any, prices: Any) -> Estimate:
    """The bill of a plan that a search found, by its record."""
    columns = ("dp", "tp", "tp2", "cp", "pp", "vpp", "ep", "etp", "shard", "micro_batch", "panels", "zero")
    plan = found.plan
    inside = {f"in_{axis}": ranks for axis, ranks in plan["placement"].items()}
    recompute = {"recompute": recompute_code(plan["recompute"]), "recompute_every": plan["recompute_every"]}
    plans = Plans(**{name: plan[name] for name in columns}, sp=plan["sp"], **recompute, **inside)
    plans = numbered(plans, order_of(plan.get("order", LAUNCHED)))
    return billed(found, setting, setting.method.strategy(plan["strategy"]), plans, failures, prices)


def goodput_record(runs: Goodput) -> dict[str, Any]:
    """Goodput as plain data, with days."""
    out: dict[str, Any] = {name: getattr(runs, name) for name in runs.__slots__}
    out["losses_s"], out["intervals_s"] = dict(runs.losses_s), dict(runs.intervals_s)
    days = [runs.wall_s / DAY_S, [edge / DAY_S for edge in runs.wall_band_s]]
    return {"wall_days": days[0], "wall_band_days": days[1], **out}


@dataclass(frozen=True, slots=True, kw_only=True)
class Meter:
    """Energy and money of a job as functions of time."""

    gpus: int
    paid: int
    """Devices to pay for, spares included."""
    power: Power
    prices: Prices
    price: Price

    def joules(self, time_s: float, waiting_s: float, factor: float = 1.0) -> float:
        """Energy at the meter over a time, of which devices wait a part; ``factor`` scales the power of a step."""
        device_W = min(self.power.device_W * factor, self.power.tdp_W)
        working_J, host_W = device_W * (time_s - waiting_s), self.power.host_W
        idle_W, pue = self.power.idle_W, self.prices.pue
        return float(site_energy_J(self.gpus, working_J, waiting_s, idle_W, host_W, time_s, pue))

    def money(self, time_s: float, energy_J: float) -> float:
        """Money for a time and its energy."""
        return float(run_cost(self.paid, self.price.value, time_s, energy_J, self.prices.kWh))


def priced(found: Estimate, runs: Goodput | None, meter: Meter) -> dict[str, Any]:
    """Energy and money of a run, its steps and its tokens."""
    training = found.training
    wall_s = training["training_s"] if runs is None else runs.wall_s
    band_s = (training["training_band_s"] if runs is None else runs.wall_band_s) or ()
    waits_s = 0.0 if runs is None else sum(runs.losses_s.get(name, 0.0) for name in WAITING)
    energy_J, step_J = meter.joules(wall_s, waits_s), meter.joules(found.step_time_s, 0.0)
    factors = (1 - POWER_BAND, 1 + POWER_BAND)
    edges_J = [meter.joules(t, waits_s * t / wall_s, by) for t, by in zip(band_s, factors, strict=False)]
    cost, tokens, price = meter.money(wall_s, energy_J), training.get("tokens"), meter.price
    bill = {
        "currency": meter.prices.currency,
        "cost": cost,
        "step_cost": meter.money(found.step_time_s, step_J),
        "band": [meter.money(t, J) for t, J in zip(band_s, edges_J, strict=False)] or None,
        **({"cost_per_million_tokens": cost / tokens * 1e6} if tokens else {}),
        "device_hours": meter.paid * wall_s / HOUR_S,
        "device_hour": price.value,
        "assumed": meter.prices.assumed,
        "source": price.source,
        "date": price.date,
    }
    return {"energy": energy_record(meter, wall_s, energy_J, step_J, edges_J), "money": bill}


def energy_record(meter: Meter, wall_s: float, energy_J: float, step_J: float, edges_J: list[float]) -> dict[str, Any]:
    """Power and energy as plain data."""
    power, prices = meter.power, meter.prices
    return {
        "device_W": power.device_W,
        "device_band_W": [min(power.device_W * (1 + sign * POWER_BAND), power.tdp_W) for sign in (-1, 1)],
        "tdp_W": power.tdp_W,
        "idle_W": power.idle_W,
        "host_W": power.host_W,
        "shares": dict(power.shares),
        "site_W": energy_J / wall_s,
        "step_kWh": step_J / KWH_J,
        "kWh": energy_J / KWH_J,
        "kWh_band": [edge / KWH_J for edge in edges_J] or None,
        "pue": prices.pue,
        "carbon_kg": float(carbon_kg(energy_J, prices.carbon_kg_per_kWh)),
        "assumed": list(power.assumed),
    }
