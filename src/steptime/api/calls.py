"""Functions behind the commands: one plan of a job for the engine, and its estimate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from steptime.api.frameworks import (
    framework_taken,
    read_as,
    recompute_unless_given,
    renamed,
    shard_unless_given,
    stage_unless_given,
)
from steptime.api.jobs import Request, check_model
from steptime.api.models import (
    MODULES,
    check_strategy,
    dtype_taken,
    element_for,
    mode_of,
    model_given,
    read_notes,
)
from steptime.api.placed import placed_plan
from steptime.api.request import (
    NameOrPath,
    checked_plan,
    completed_degrees,
    strategy_of,
    table,
    text,
    whole,
)
from steptime.errors import PlanError, UserError
from steptime.estimate.evaluate import evaluate
from steptime.estimate.machine import node_devices
from steptime.estimate.notes import global_batch_taken, micro_batch_taken, recompute_taken, stage_taken
from steptime.estimate.result import Estimate
from steptime.estimate.single import Setting, estimate_plan, rules_broken
from steptime.goodput.training import check_length, check_training, trained
from steptime.hardware.records import Cluster
from steptime.model.captured import CapturedModel
from steptime.options import AXES, CHOICES, COLUMNS, MAX_DEVICES
from steptime.plan.framework_file import habits_of
from steptime.plan.job import Job, replica_sequences
from steptime.plan.plans import Plans
from steptime.plan.space import panels_worth_trying
from steptime.plan.strategies import Strategy
from steptime.registry import loaded
from steptime.schedule.schedules import SEVERAL_RANKS, Pipeline
from steptime.search.modes import MODES, Mode

_COLUMNS = tuple(name for name in COLUMNS if name not in (*AXES, "panels"))
"""Columns of a plan other than its mesh; they have the engine's defaults."""
ALONE: Final = "replicas alone do not fit"
BEST_TAKEN: Final = "no degree was given, and the plan is the best that steptime plan finds"
NO_RUN: Final = "the plan does not fit: there is no training time, no bill"


def estimate(
    model: NameOrPath | CapturedModel,
    cluster: NameOrPath | Cluster,
    *,
    gpus: int | None = None,
    global_batch: int | None = None,
    seq: int | None = None,
    dtype: str | None = None,
    optimizer: str = "adam",
    strategy: str = "auto",
    mode: str = "corrected",
    framework: str | None = None,
    lora: Mapping[str, Any] | None = None,
    plan: Mapping[str, Any] | None = None,
    training: Mapping[str, Any] | None = None,
    failures: str | None = None,
    prices: str | None = None,
    predictor: str | None = None,
) -> Estimate:
    """Estimate the step of one plan.

    Args:
        plan: degrees and choices, the keys of :data:`steptime.options.KEYS` (``steptime estimate --help`` says what
            each is; a word with dashes has underscores here), ``placement`` (axis -> ranks inside a fast domain) and
            ``order`` (of the axes over domains and inside them, as ``"tp-cp-ep-dp-pp"``, ``default``, or ``search``:
            the fastest). Degrees and the micro-batch are 1 where they are missing, but ``dp`` takes the devices that
            are left; ``sp`` is on, and what is recomputed, the ZeRO stage and the choices are the framework's. Without
            a placement the axes fill a fast domain in the order of launchers (``tp``, ``cp``, ``dp``, ``pp``); in
            published mode it is the fastest one. The ``plan`` of an estimate or of a search may be given as it is.
        failures: how often parts of the cluster fail, and how it saves and restarts: ``default``, a name of
            :func:`steptime.goodput.operations.names`, or a TOML file; then :attr:`Estimate.run` has the goodput.
        prices: ``default`` or a TOML file; then :attr:`Estimate.run` has energy and money.
        predictor: a learned correction that multiplies the times of operators: ``learned`` (the correction for the
            kind of device), or its file.

    The other arguments are those of :func:`plan`. The command asks for ``gpus`` and ``global_batch``; here both may be
    left out. Without ``gpus`` the product of the degrees is taken. Without ``global_batch`` it is one micro-batch per
    stage and replica (``dp pp micro_batch`` sequences), a note says how many; a real step of more micro-batches takes
    longer, and spends less of its time on the bubble, gradients and optimiser.

    Raises:
        UserError: something in the input is wrong; the message says what to change.
    """
    length = check_training(training)
    asked = fitting_plan(
        model,
        cluster,
        gpus=gpus,
        global_batch=global_batch,
        seq=seq,
        dtype=dtype,
        optimizer=optimizer,
        strategy=strategy,
        mode=mode,
        framework=framework,
        lora=lora,
        plan=plan,
    )
    job, setting = asked.setting.job, asked.setting
    check_length(length, job)
    if predictor is not None:
        from steptime.estimate.learned import correction_named

        setting = replace(setting, correction=correction_named(predictor, setting.cluster.device))
    found = estimate_plan(setting, asked.strategy, asked.plans, explain=True)
    wanted = failures is not None or prices is not None
    notes = (*asked.notes, *_taken(found, job, asked.given), *found.notes)
    if not found.feasible:
        return replace(found, notes=(*notes, *([NO_RUN] if length or wanted else ())))
    found = trained(found, length, job)
    if wanted:
        from steptime.goodput.bill import billed

        found = billed(found, setting, asked.strategy, asked.plans, failures, prices)
    return replace(found, notes=notes)


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedPlan:
    """One plan of one job for the engine."""

    setting: Setting
    strategy: Strategy
    plans: Plans
    given: Mapping[str, Any]
    """The caller's entries of the plan, checked."""
    notes: tuple[str, ...]
    """Notes on how the input was read."""


def fitting_plan(
    model: NameOrPath | CapturedModel, cluster: NameOrPath | Cluster, *, always: bool = False, **job: Any
) -> AskedPlan:
    """One plan for the engine: of :func:`asked_plan`, but if no degree is given, a plan that fits, if one does.

    Without a degree the plan is data parallelism if it fits, and else the best plan of a search.
    Args:
        model: as in :func:`asked_plan`.
        cluster: as in :func:`asked_plan`.
        always: take the best plan also if data parallelism alone fits.
        job: other arguments of :func:`asked_plan`; without ``gpus`` and ``global_batch`` there is no search.

    Raises:
        UserError: something in the input is wrong; the message says what to change.
    """
    asked, given = asked_plan(model, cluster, **job), table("plan", job.get("plan"))
    setting, counts = asked.setting, (job.get("gpus"), job.get("global_batch"))
    if set(given) - set(CHOICES) or None in counts or not setting.method.calibrated:
        return asked
    e = None if always else evaluate(setting.method, asked.strategy, setting.job, setting.machine, asked.plans)
    if e is not None and not rules_broken(setting, e):
        return asked
    options = {name: value for name, value in job.items() if name != "plan"}
    try:
        found = loaded("steptime.api.searches:plan")(model, cluster, **options, fix=dict(given), top=1)
    except UserError:
        return asked
    if not found.feasible:
        return asked
    best = asked_plan(model, cluster, **{**job, "plan": found.plans[0].plan})
    return replace(best, notes=(*best.notes, BEST_TAKEN if always else f"{ALONE}: {BEST_TAKEN}"))


def asked_plan(
    model: NameOrPath | CapturedModel,
    cluster: NameOrPath | Cluster,
    *,
    gpus: int | None = None,
    global_batch: int | None = None,
    seq: int | None = None,
    dtype: str | None = None,
    optimizer: str = "adam",
    strategy: str = "auto",
    mode: str = "corrected",
    framework: str | None = None,
    lora: Mapping[str, Any] | None = None,
    plan: Mapping[str, Any] | None = None,
) -> AskedPlan:
    """One plan for the engine, from the arguments of :func:`estimate`.

    Raises:
        UserError: something in the input is wrong; the message says what to change.
    """
    model, chosen, given = model_given(model), MODES[text("mode", mode)], table("plan", plan)
    if "shardings" in given:
        job = {"gpus": gpus, "batch": global_batch, "seq": seq, "dtype": element_for(dtype), "optimizer": optimizer}
        return _sharded_plan(model, cluster, given, framework=framework, **job)
    if text("strategy", strategy) == "auto":
        strategy = text("strategy", given.get("strategy", strategy))
    words = framework_taken(None if framework is None else text("framework", framework))
    checked = checked_plan(given, chosen, words or "")
    if gpus is not None:
        whole("gpus", gpus, 1, MAX_DEVICES)
    name, checked = strategy_of(strategy, checked, chosen)
    degrees = completed_degrees(checked, gpus, cluster)
    devices = gpus or math.prod(degrees.values())
    micro_batch = checked.get("micro_batch", 1)
    batch = degrees["dp"] * degrees["pp"] * micro_batch if global_batch is None else global_batch
    request = Request(
        model=model,
        cluster=cluster,
        seq=seq,
        dtype=dtype_taken(model, dtype, seq),
        optimizer=optimizer,
        mode=chosen,
        framework=framework,
        lora=lora,
    )
    setting = request.setting(devices, batch, {key: checked[key] for key in CHOICES if key in checked})
    chosen = mode_of(setting, chosen)
    check_strategy(setting, name)
    check_model(setting.job, name, checked)
    _check_share(setting.job, degrees["dp"], micro_batch, chosen)
    both = max(degrees["tp"], degrees["tp2"])
    panels = panels_worth_trying(setting.job.model.hidden, both)[0] if name == "2d" else 1
    columns = {key: checked[key] for key in _COLUMNS if key in checked}
    if not {"zero", "shard"} & set(columns):
        columns["shard"] = shard_unless_given(framework, degrees, node_devices(setting.cluster))
    columns.setdefault("recompute", recompute_unless_given(setting.job.framework.name))
    columns.setdefault("zero", stage_unless_given(setting.job.framework.name, degrees))
    plans = Plans(**degrees, **columns, panels=checked.get("panels", panels))
    _check_served(setting, plans, checked)
    placed = placed_plan(setting, chosen, name, plans, checked.get("placement"), checked.get("order"))
    said = (*read_notes(model, setting, seq, dtype), *renamed(framework), *read_as(setting.job.framework.name, given))
    if global_batch is None:
        said = (*said, global_batch_taken(batch, setting.job.sample))
    return AskedPlan(setting=setting, strategy=chosen.method.strategy(name), plans=placed, given=checked, notes=said)


def _sharded_plan(
    model: str | CapturedModel,
    cluster: NameOrPath | Cluster,
    given: Mapping[str, Any],
    **job: Any,
) -> AskedPlan:
    """The plan of a record with the ``mesh`` and the sharding of each parameter; the rest follows from these.

    ``job``: arguments of the function that finds shardings.

    Raises:
        UserError: the model is no factory of a torch module, or the record is not of this module.
    """
    mesh, placements = table("mesh", given.get("mesh")), table("shardings", given["shardings"])
    if not isinstance(model, str) or not mesh:
        raise PlanError(
            "the plan is a choice of shardings, of a torch module and a mesh",
            hint="give the FILE.py:NAME and the plan as steptime plan or shard wrote it",
        )
    found = MODULES["sharded"](
        model,
        cluster,
        mesh=",".join(f"{axis}={size}" for axis, size in mesh.items()),
        annotate=[f"{name}={placement}" for name, placement in placements.items()],
        overlaps=given.get("overlap", ["dp"]) != [],
        **{**job, "gpus": job["gpus"] or math.prod(mesh.values())},
    )
    return AskedPlan(
        setting=found.setting, strategy=found.setting.method.strategy("1d"), plans=found.plans, given=given, notes=()
    )


def _taken(found: Estimate, job: Job, given: Mapping[str, Any]) -> tuple[str, ...]:
    """Notes on defaults taken for values that were not given."""
    shard = 0 if "shard" in given else int(found.plan["shard"])
    stage = () if "zero" in given else stage_taken(job.framework.name, found.plan["zero"], shard)
    if "micro_batch" in given:
        return stage
    share = int(replica_sequences(job.global_batch, found.plan["dp"]))
    usual = habits_of(job.framework.name).recompute
    again = () if usual == "none" or "recompute" in given else (recompute_taken(job.framework.name, usual),)
    return (*micro_batch_taken(found.time, share, job.sample), *stage, *again)


def _check_served(setting: Setting, plans: Plans, given: Mapping[str, Any]) -> None:
    """Refuse a plan that its named schedule cannot serve.

    Raises:
        UserError: the message has the rule and the numbers that break it.
    """
    if "schedule" not in given:
        return
    job, row = setting.job, setting.job.pipeline
    ranks, chunks = int(plans.pp), int(plans.vpp)
    micro_batches = int(setting.method.micro_batches(job, plans))
    pipeline = Pipeline(
        ranks=ranks,
        chunks=chunks,
        micro_batches=micro_batches,
        slices=row.usual_slices,
        per_update=row.usual_per_update,
    )
    if not (row.one_rank or SEVERAL_RANKS.holds(pipeline)):
        raise PlanError(
            f"schedule {row.name} requires {SEVERAL_RANKS.text}; got {pipeline}", hint="give --pp 2 or more"
        )
    row.check(pipeline)
    if not job.is_cut:
        raise PlanError(
            f"schedule {row.name} cuts sequences of {job.seq_len} tokens into {row.usual_slices} slices; "
            f"{job.model.name} cannot be cut so",
            hint="it needs causal attention, layers that are not captured, and a token in each slice",
        )
    if ranks * chunks > job.model.layers:
        raise PlanError(
            f"schedule {row.name}: {ranks * chunks} stages of {job.model.layers} layers",
            hint="give a smaller --pp or --vpp",
        )


def _check_share(job: Job, dp: int, micro_batch: int, mode: Mode) -> None:
    """Refuse a plan that leaves a replica without a micro-batch, if the mode cannot round up."""
    if mode.method.micro_batches(job, Plans(dp=dp, micro_batch=micro_batch)) < 1:
        raise PlanError(
            f"micro_batch {micro_batch} is more than a replica's share of the batch: {job.global_batch} / dp {dp} = "
            f"{job.global_batch / dp:g}",
            hint=f"give at most --micro-batch {max(job.global_batch // dp, 1)} and --dp {job.global_batch}",
        )
