"""Shadow prices of a run: the worth of one more unit of a resource, and the range in which the price holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from steptime.api.calls import AskedPlan, fitting_plan
from steptime.api.searches import plan
from steptime.cost.training import training_s
from steptime.errors import FieldError, UserError
from steptime.estimate.evaluate import evaluate
from steptime.estimate.result import SCHEMA_VERSION
from steptime.estimate.single import Setting, plan_record, rules_broken
from steptime.goodput.objective import rates_of
from steptime.goodput.prices import prices_of
from steptime.goodput.training import check_training, samples_of
from steptime.hardware.library import changed_cluster
from steptime.hardware.records import Cluster
from steptime.plan.plans import names_of

SMALL: Final = 1e-3
"""Relative change of a number for its shadow price."""
SAME: Final = 0.1
"""A price holds while the saving is within this share of price times change."""
DOUBLINGS: Final = 8
"""Number of doublings of the smallest change up to which the range of a price is examined."""
GB, TFLOPS = 1e9, 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Shadow:
    """Shadow price: the worth of one more unit of a resource to a run."""

    name: str
    unit: str
    now: float
    """Current amount, in units."""
    worth_s: float
    """Seconds saved per step by one more unit."""
    worth_run_s: float
    """Seconds saved over the run."""
    worth_money: float
    """Money saved over the run, without the price of the unit itself."""
    holds_to: float
    """Largest number of units at which the price holds within :data:`SAME`."""
    next_at: float | None = None
    """If the price is zero: number of units from which another plan is faster; None: there is no further gain."""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shadows:
    """Shadow prices of a run, highest worth first."""

    step_s: float
    run_s: float
    cost: float
    currency: str
    prices: tuple[Shadow, ...]
    plan: Mapping[str, Any]
    """Plan with the names of the command line."""
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``."""
        rows = [{name: getattr(one, name) for name in one.__slots__} for one in self.prices]
        return {
            "schema_version": SCHEMA_VERSION,
            "step_s": self.step_s,
            "run_s": self.run_s,
            "cost": self.cost,
            "currency": self.currency,
            "plan": dict(self.plan),
            "prices": rows,
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A plan to time on changed clusters."""

    asked: AskedPlan
    base: str
    """Name or path of the cluster."""

    def step_s(self, tables: Mapping[str, Any] | None = None, **job: Any) -> float:
        """Step time with changed tables of the cluster file or changed numbers of the job."""
        setting = self.asked.setting
        cluster = changed_cluster(self.base, tables, "shadow") if tables else setting.cluster
        # a new record has no values cached for the old cluster
        other = replace(setting, cluster=cluster, job=replace(setting.job, **job))
        return float(
            evaluate(other.method, self.asked.strategy, other.job, other.machine, self.asked.plans).step_time_s
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """One resource of a cluster that could be increased."""

    name: str
    unit: str
    size: float
    """SI value of the unit."""
    now: float
    """Current SI value."""
    tables: Callable[[float], dict[str, Any]]
    """Tables of a cluster file that set another SI value."""


def resources_of(cluster: Cluster, dtype: str) -> Iterator[Resource]:
    """Resources that a step may wait for: the rate of matrix units, memory bandwidth, bandwidth of each link."""
    device = cluster.device
    rates = device.matrix_flops_per_s
    rate = device.matrix_rate(dtype) or max(rates.values())

    def faster(value: float) -> dict[str, Any]:
        return {"device": {"matrix": {name: f"{each * value / rate!r} FLOP/s" for name, each in rates.items()}}}

    yield Resource(name="matrix units", unit="TFLOP/s", size=TFLOPS, now=rate, tables=faster)
    yield Resource(
        name="memory bandwidth",
        unit="GB/s",
        size=GB,
        now=device.memory_Bps,
        tables=lambda value: {"device": {"memory_bandwidth": f"{value!r} B/s"}},
    )
    for level in cluster.levels:
        yield Resource(
            name=f"link {level.name}",
            unit="GB/s",
            size=GB,
            now=level.link_Bps,
            tables=lambda value, name=level.name: {"levels": {name: {"bandwidth": f"{value!r} B/s"}}},  # type: ignore[misc]
        )


def slope_s(case: Case, resource: Resource) -> tuple[float, float]:
    """Seconds that a step saves per SI unit, and the value up to which this holds within :data:`SAME`.

    The slope is the central difference at a relative change of :data:`SMALL`; the range is doubled from there.
    """
    step_s, change = case.step_s(), resource.now * SMALL
    below_s, above_s = (case.step_s(resource.tables(resource.now + sign * change)) for sign in (-1, 1))
    slope = (below_s - above_s) / (2 * change)
    holds = resource.now
    for n in range(DOUBLINGS):
        more = change * 2**n
        saved = step_s - case.step_s(resource.tables(resource.now + more))
        if abs(saved - slope * more) > SAME * max(abs(slope * more), 1e-12 * step_s):
            break
        holds = resource.now + more
    return slope * resource.size, holds / resource.size


def shadow(
    model: Any,
    cluster: str,
    *,
    training: Mapping[str, Any],
    failures: str | None = None,
    prices: str = "default",
    plans: bool = True,
    **job: Any,
) -> Shadows:
    """Shadow prices of all resources of a run under one plan.

    Args:
        model: as in :func:`steptime.api.estimate`.
        cluster: catalogue name or TOML file.
        training: length of the run, as ``{"tokens": "1T"}``.
        failures: as in :func:`steptime.api.estimate`.
        prices: as in :func:`steptime.api.estimate`.
        plans: also search for the worth of more memory and more devices, which changes the plan.
        job: ``gpus``, ``global_batch``, ``plan`` and other arguments of :func:`steptime.api.estimate`.

    Raises:
        UserError: something in the input is wrong; the message says what to change.
    """
    length = check_training(training)
    if not length:
        raise FieldError("", "tokens", "missing; a shadow price is of a whole run", hint="give --tokens 1T")
    asked = fitting_plan(model, cluster, **job, always=True)
    case, setting = Case(asked=asked, base=cluster), asked.setting
    e = evaluate(setting.method, asked.strategy, setting.job, setting.machine, asked.plans)
    record, broken = plan_record(setting, asked.strategy, asked.plans), names_of(rules_broken(setting, e))
    if broken:
        raise UserError(
            f"the plan does not fit ({', '.join(broken)}): nothing is worth anything to it",
            hint="give degrees of a plan that fits, or none: steptime plan ranks them",
        )
    given = prices_of(prices)
    steps = samples_of(length, setting.job) / setting.job.global_batch
    rates = rates_of(setting, steps, failures, given)
    step_s = case.step_s()
    found: list[Shadow | None] = []
    for resource in resources_of(setting.cluster, setting.job.precision.matrix_dtype):
        worth, holds = slope_s(case, resource)
        found.append(_shadow(rates, resource.name, resource.unit, resource.now / resource.size, worth, holds))
    found.append(_batch(case, rates, length))
    if plans:
        options = {name: value for name, value in job.items() if name != "plan"}
        found += [_memory(model, setting, rates, cluster, options), _devices(model, setting, rates, cluster, options)]
    known = [one for one in found if one is not None]
    return Shadows(
        step_s=step_s,
        run_s=float(rates.run_s.of(step_s, 0.0)),
        cost=float(rates.money.of(step_s, 0.0)),
        currency=given.currency,
        plan=record,
        notes=asked.notes,
        prices=tuple(sorted(known, key=lambda one: -one.worth_run_s * max(one.now, 1.0))),
    )


def _shadow(rates: Any, name: str, unit: str, now: float, worth_s: float, holds: float, **more: Any) -> Shadow:
    run_s, money = (float(mix.of(worth_s, 0.0)) for mix in (rates.run_s, rates.money))
    return Shadow(
        name=name, unit=unit, now=now, worth_s=worth_s, worth_run_s=run_s, worth_money=money, holds_to=holds, **more
    )


def _batch(case: Case, rates: Any, length: Mapping[str, float]) -> Shadow:
    """Worth of one more sequence per step: fewer, longer steps; the batch changes by a micro-batch per replica."""
    job, plans = case.asked.setting.job, case.asked.plans
    more = int(plans.dp) * int(plans.micro_batch)
    samples = samples_of(length, job)

    def run_s(batch: int) -> float:
        return float(training_s(case.step_s(global_batch=batch), samples, batch))

    now_s, steps = run_s(job.global_batch), samples / job.global_batch
    worth_s = (now_s - run_s(job.global_batch + more)) / more / steps
    holds, n = job.global_batch + more, 2
    while n <= 64 and abs(now_s - run_s(job.global_batch + n * more) - worth_s * steps * n * more) <= SAME * abs(
        worth_s * steps * n * more
    ):
        holds, n = job.global_batch + n * more, 2 * n
    note = f"in pieces of {more}, one micro-batch of every replica; per step of the batch that there is"
    return _shadow(rates, "global batch", job.sample, float(job.global_batch), worth_s, float(holds), note=note)


def _memory(model: Any, setting: Setting, rates: Any, cluster: str, job: Mapping[str, Any]) -> Shadow | None:
    """Worth of one more GB of device memory: a step function, from the front of plans in time and memory."""
    now = setting.cluster.device.memory_bytes
    larger = changed_cluster(cluster, {"device": {"memory": f"{2.0 * now!r} B"}}, "shadow")
    front = plan(model, larger, **job, top=1).pareto
    fits = [point["step_time_s"] for point in front if point["peak_memory_bytes"] <= now]
    if not fits:
        return None
    best_s = min(fits)
    steps = sorted((p["peak_memory_bytes"], p["step_time_s"]) for p in front if p["step_time_s"] < best_s * (1 - 1e-9))
    within = [time_s for size, time_s in steps if size <= now + GB]
    worth_s = best_s - min(within, default=best_s)
    following = next((size for size, _ in steps if size > now + (GB if within else 0.0)), None)
    return _shadow(
        rates,
        "device memory",
        "GB",
        now / GB,
        worth_s,
        (now if following is None else following) / GB,
        next_at=None if following is None else following / GB,
        note="of the best plan; faster plans that need more",
    )


def _devices(model: Any, setting: Setting, rates: Any, cluster: str, job: Mapping[str, Any]) -> Shadow | None:
    """Worth of one more device, between the best plan now and the best on the next faster number of whole nodes."""
    gpus = setting.job.gpus
    domain = min(setting.machine.fast_domain, gpus)
    rest = {name: value for name, value in job.items() if name != "gpus"}
    now_s = _best_s(model, cluster, gpus, rest)
    for more in (domain, 2 * domain, 4 * domain, gpus):
        then_s = _best_s(model, cluster, gpus + more, rest)
        if now_s is not None and then_s is not None and then_s < now_s:
            worth_s = (now_s - then_s) / more
            return _shadow(
                rates,
                "devices",
                "device",
                float(gpus),
                worth_s,
                float(gpus + more),
                note=f"of the best plan; the next number that is faster is {gpus + more}",
            )
    return None


def _best_s(model: Any, cluster: str, gpus: int, job: Mapping[str, Any]) -> float | None:
    try:
        found = plan(model, cluster, gpus=gpus, **job, top=1)
    except UserError:
        return None
    return found.plans[0].step_time_s if found.plans else None
