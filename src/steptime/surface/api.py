"""The Python API: what the commands print is what these functions return."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from steptime.errors import PlanError, UserError, shorten
from steptime.estimate.evaluate import evaluate
from steptime.estimate.metrics import forward_flops_per_sequence
from steptime.estimate.result import FLOPS_CONVENTION, SCHEMA_VERSION, Estimate
from steptime.estimate.single import Setting, estimate_plan
from steptime.hardware import load_cluster
from steptime.plan.job import OPTIMIZERS, PRECISIONS, Job
from steptime.plan.plans import RECOMPUTE_CODES, Plans
from steptime.plan.space import Space, panels_worth_trying, rows_of
from steptime.search.advice import faster_counts, nearest_counts, why_empty
from steptime.search.layers import as_float
from steptime.search.planner import rank_plans
from steptime.search.result import PlanResult
from steptime.study.modes import MODES, Mode
from steptime.surface.models import load_model
from steptime.surface.request import (
    check_recompute,
    checked_plan,
    choice,
    completed_degrees,
    constraints_of,
    strategy_of,
    text,
    whole,
)
from steptime.terms import Terms
from steptime.workload.parameters import active_parameter_terms, parameter_terms
from steptime.workload.spec import ModelSpec

MAX_GPUS, MAX_BATCH, MAX_SEQ = 10**7, 10**9, 10**8


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """What a model has, whatever it runs on."""

    name: str
    family: str
    source: str
    parameters: Terms
    flops: Terms
    """Model FLOPs of one sequence forward, by part."""
    bytes: Terms
    """Weights, gradients and optimiser states of the whole model."""
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``."""
        return {
            "schema_version": SCHEMA_VERSION, "name": self.name, "family": self.family, "source": self.source,
            "parameters": dict(self.parameters), "parameters_total": self.parameters.total,
            "flops_per_sequence_forward": dict(self.flops), "bytes": dict(self.bytes),
            "flops_convention": FLOPS_CONVENTION, "notes": list(self.notes),
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Two estimates side by side; each value is [first, second]."""

    headline: Mapping[str, list[Any]]
    plan: Mapping[str, list[Any]]
    """Only what differs."""
    time: Mapping[str, list[float]]
    memory: Mapping[str, list[float]]

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``."""
        return {
            "schema_version": SCHEMA_VERSION, "headline": dict(self.headline), "plan": dict(self.plan),
            "time": dict(self.time), "memory": dict(self.memory),
        }  # fmt: skip


def plan(
    model: str, cluster: str, *, gpus: int, global_batch: int, seq: int | None = None, dtype: str = "bf16",
    optimizer: str = "adam", strategy: str = "auto", mode: str = "corrected",
    fix: Mapping[str, int | str] | None = None, limit: Sequence[str] = (), top: int = 10,
    progress: Callable[[int, int], None] | None = None,
) -> PlanResult:  # fmt: skip
    """Ranks every parallel plan of a model on so many devices.

    Args:
        model: catalogue name, ``config.json``, or TOML file.
        cluster: catalogue name or TOML file.
        gpus: devices to use.
        global_batch: sequences per optimiser step.
        seq: tokens of a sequence; None: the model's own.
        dtype: training recipe (``bf16``, ``fp16``, ``fp8``, ``tf32``, ``fp32``).
        optimizer: ``adam``, ``adamw``, ``adam8bit``, ``momentum``, ``sgd``.
        strategy: ``1d``, ``context``, ``2d`` (SUMMA), or ``auto``: all of them.
        mode: ``corrected`` or ``published``.
        fix: columns of the plan that may have one value only, as ``{"tp": 8}``.
        limit: bounds, as ``["pp<=16"]``.
        top: number of plans to return.
        progress: called with candidates done and candidates known so far.

    Raises:
        UserError: something in the input is wrong; the message says what to change.
    """
    chosen = MODES[text("mode", mode)]
    fixed = _table("fix", fix)
    attention = choice("attention", fixed.pop("attention", "fused"), chosen.attentions)
    job = _job(model, gpus, global_batch, seq, dtype, optimizer, attention, frozenset({"dp"}))
    setting = _setting(chosen, job, cluster)
    constraints = constraints_of(fixed, [limit] if isinstance(limit, str) else limit)
    check_recompute(str(fixed.get("recompute", "none")), attention)
    if text("strategy", strategy) != "auto":
        chosen.method.strategies[strategy]
    strategies = chosen.auto if strategy == "auto" else {strategy: ()}
    space = _space(chosen, {c.column: c.value for c in constraints if c.relation == "="})
    whole("top", top, 1, 10**5)
    result = rank_plans(setting, space, strategies, constraints, top=top, progress=progress)
    if result.feasible:
        best_s = result.plans[0].step_time_s
        return replace(result, advice=faster_counts(setting, space, strategies, constraints, best_s))
    if not result.candidates:
        reasons = why_empty(job, constraints)
        return replace(result, advice=(*reasons, *nearest_counts(setting, space, strategies, constraints)))
    return replace(result, advice=nearest_counts(setting, space, strategies, constraints))


def _table(field: str, value: Any) -> dict[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise UserError(f"{field} is a table such as {{'tp': 8}}, not {shorten(repr(value))}")
    return dict(value or {})


def _space(mode: Mode, fixed: Mapping[str, int]) -> Space:
    return mode.space.fixed(fixed)


def estimate(
    model: str, cluster: str, *, gpus: int | None = None, global_batch: int | None = None, seq: int | None = None,
    dtype: str = "bf16", optimizer: str = "adam", strategy: str = "auto", mode: str = "corrected",
    plan: Mapping[str, Any] | None = None,
) -> Estimate:  # fmt: skip
    """Explains one plan.

    Args:
        plan: degrees and choices: ``dp tp tp2 cp pp vpp micro_batch panels zero recompute schedule overlap attention``
            and ``placement`` (axis -> ranks inside a fast domain). What is missing is 1, except ``dp``, which takes the
            devices that are left, and the placement, which is the fastest one.

    The other arguments are those of :func:`plan`; without ``gpus`` the product of the degrees is taken, without
    ``global_batch`` one micro-batch per stage and replica.

    Raises:
        UserError: something in the input is wrong; the message says what to change.
    """
    chosen = MODES[text("mode", mode)]
    checked = checked_plan(_table("plan", plan), chosen)
    if gpus is not None:
        whole("gpus", gpus, 1, MAX_GPUS)
    name, checked = strategy_of(strategy, checked, chosen)
    degrees = completed_degrees(checked, gpus)
    devices = gpus or int(np.prod(list(degrees.values())))
    micro_batch = checked.get("micro_batch", 1)
    batch = degrees["dp"] * degrees["pp"] * micro_batch if global_batch is None else global_batch
    job = _job(model, devices, batch, seq, dtype, optimizer, checked.get("attention", "fused"),
               checked.get("overlap", frozenset({"dp"})))  # fmt: skip
    setting = _setting(chosen, job, cluster)
    _check_share(job, degrees["dp"], micro_batch, chosen)
    panels = panels_worth_trying(job.model.hidden, max(degrees["tp"], degrees["tp2"]))[0] if name == "2d" else 1
    plans = Plans(
        **degrees, vpp=checked.get("vpp", 1), micro_batch=micro_batch, panels=checked.get("panels", panels),
        recompute=RECOMPUTE_CODES[checked.get("recompute", "none")], zero=checked.get("zero", 1),
    )  # fmt: skip
    placed = _placed(setting, chosen, name, plans, checked.get("placement"))
    return estimate_plan(setting, chosen.method.strategies[name], placed, explain=True)


def _check_share(job: Job, dp: int, micro_batch: int, mode: Mode) -> None:
    """Refuses a plan that leaves a replica without a micro-batch, where the mode cannot round up."""
    if mode.method.micro_batches(job, Plans(dp=dp, micro_batch=micro_batch)) < 1:
        raise PlanError(
            f"micro_batch {micro_batch} is more than a replica's share of the batch: {job.global_batch} / dp {dp} = "
            f"{job.global_batch / dp:g}",
            hint=f"give at most --micro-batch {max(job.global_batch // dp, 1)} and --dp {job.global_batch}",
        )


def _placed(setting: Setting, mode: Mode, strategy: str, plans: Plans, placement: Mapping[str, int] | None) -> Plans:
    """The plan with the placement that was given, or with the fastest of its space."""
    how = mode.method.strategies[strategy]
    domain = setting.machine.fast_domain
    axes = (*how.tensor_axes, "dp", "pp")
    if placement is not None:
        for axis, inside in placement.items():
            degree = int(getattr(plans, axis))
            if degree % inside:
                raise PlanError(f"placement {axis} {inside} does not divide {axis} {degree}")
        placed = plans.with_columns({f"in_{axis}": n for axis, n in placement.items()})
        if placed.domain_ranks > domain:
            arithmetic = " x ".join(f"{axis} {n}" for axis, n in placement.items())
            raise PlanError(f"placement {arithmetic} = {placed.domain_ranks} is more than the {domain} devices "
                            "of a fast domain")  # fmt: skip
        return placed
    one = Plans(**{axis: np.array([int(getattr(plans, axis))]) for axis in axes})
    spaces = [mode.space, MODES["corrected"].space]
    for space in spaces:
        placed_rows, options = space.placements(
            how, one, int(plans.ranks), domain, nearer_is_faster=setting.machine.nearer_is_faster
        )
        if len(placed_rows):
            break
    rows = rows_of(options)
    inside_columns = {f"in_{axis}": np.broadcast_to(getattr(options, f"in_{axis}"), (rows,)) for axis in axes}
    block = plans.with_columns(inside_columns)
    times = evaluate(mode.method, how, setting.job, setting.machine, as_float(block)).step_time_s
    return block.row(int(np.argmin(np.broadcast_to(np.asarray(times), (rows,)))))


def _job(
    model: str, gpus: int, global_batch: int, seq: int | None, dtype: str, optimizer: str, attention: str,
    overlap: frozenset[str],
) -> Job:  # fmt: skip
    for field, value in (("dtype", dtype), ("optimizer", optimizer)):
        text(field, value)
    spec = load_model(text("model", model))
    require_estimable(spec)
    return Job(
        model=spec, gpus=whole("gpus", gpus, 1, MAX_GPUS),
        global_batch=whole("global_batch", global_batch, 1, MAX_BATCH),
        seq_len=spec.seq_len if seq is None else whole("seq", seq, 1, MAX_SEQ), precision=PRECISIONS[dtype],
        optimizer=OPTIMIZERS[optimizer], attention=attention, overlap=overlap,
    )  # fmt: skip


def require_estimable(spec: ModelSpec) -> None:
    """Refuses models whose step this version cannot cost.

    Raises:
        UserError: the model has experts or latent attention.
    """
    what = "experts" if spec.experts else "latent attention" if spec.latent else None
    if what:
        raise UserError(
            f"{spec.name} has {what}: its training step cannot be estimated in this version",
            hint=f"its parameters can: steptime estimate {spec.name}",
        )


def _setting(mode: Mode, job: Job, cluster: str) -> Setting:
    setting = Setting(
        method=mode.method, job=job, cluster=load_cluster(text("cluster", cluster)), statistics=mode.statistics
    )
    outermost = setting.cluster.levels[-1]
    if outermost.devices is not None and job.gpus > outermost.devices:
        raise UserError(
            f"{cluster}: its outermost level {outermost.name} joins {outermost.devices} devices, not {job.gpus}",
            hint="add a level without devices that joins any number, or ask for fewer GPUs",
        )
    return setting


def ledger(model: str, *, seq: int | None = None, dtype: str = "bf16") -> Ledger:
    """Parameters, FLOPs and bytes of a model without a cluster.

    Raises:
        UserError: something in the input is wrong; the message says what to change.
    """
    spec, precision = load_model(text("model", model)), PRECISIONS[text("dtype", dtype)]
    length = spec.seq_len if seq is None else whole("seq", seq, 1, MAX_SEQ)
    parameters, active = parameter_terms(spec), active_parameter_terms(spec).total
    notes = [] if active == parameters.total else [f"{active:,.0f} parameters are active per token"]
    if spec.experts or spec.latent:
        flops = Terms({"two_per_active_parameter_and_token": 2.0 * active * length})
        notes.append("FLOPs are two per active parameter and token; attention scores are left out")
    else:
        job = Job(model=spec, gpus=1, global_batch=1, seq_len=length, precision=precision, optimizer=OPTIMIZERS["adam"])
        flops = Terms(forward_flops_per_sequence(job))
    states = OPTIMIZERS["adam"].bytes_per_parameter(precision)
    count = parameters.total
    return Ledger(
        name=spec.name, family=spec.family, source=spec.source, parameters=parameters, flops=flops,
        bytes=Terms({
            "weights/parameter_bytes": count * (spec.weight_bytes or precision.element_bytes),
            "gradients/parameter_bytes": count * precision.gradient_bytes,
            "adam_states/parameter_bytes": count * states,
        }),
        notes=(f"sequence of {length} tokens, {dtype}", *notes),
    )  # fmt: skip


HEADLINE = (
    "step_time_s", "step_time_bracket_s", "mfu", "hfu", "tokens_per_s_per_gpu", "samples_per_s", "peak_memory_bytes",
    "memory_capacity_bytes", "feasible", "bottleneck",
)  # fmt: skip


def diff(a: Estimate, b: Estimate) -> Difference:
    """Two estimates side by side."""

    def pairs(first: Mapping[str, Any], second: Mapping[str, Any], default: Any) -> dict[str, list[Any]]:
        keys = dict.fromkeys((*first, *second))
        return {key: [first.get(key, default), second.get(key, default)] for key in keys}

    plan_pairs = {key: pair for key, pair in pairs(a.plan, b.plan, None).items() if pair[0] != pair[1]}
    return Difference(
        headline={name: [getattr(a, name), getattr(b, name)] for name in HEADLINE},
        plan=plan_pairs, time=pairs(a.time, b.time, 0.0), memory=pairs(a.memory, b.memory, 0.0),
    )  # fmt: skip
