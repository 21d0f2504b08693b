"""Searches behind the commands: ranked plans of a job, and advice if none fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from steptime.api.frameworks import (
    Scope,
    fixed_values,
    read_as,
    renamed,
    scope_of,
    shards_within_node,
)
from steptime.api.jobs import Request, check_model
from steptime.api.models import MODULES, check_strategy, dtype_taken, element_for, mode_of, model_given, read_notes
from steptime.api.placed import laid
from steptime.api.request import (
    NameOrPath,
    check_mode,
    choice,
    constraints_of,
    job_choices,
    oom_limit_of,
    share,
    table,
    text,
    whole,
)
from steptime.api.unsearched import unsearched, why_not
from steptime.errors import UserError
from steptime.estimate.machine import levels_left_out, node_devices
from steptime.estimate.memory_definitions import LIKELY_FITS
from steptime.estimate.single import Setting
from steptime.goodput.training import all_trained, check_length, check_training, samples_of
from steptime.hardware.records import Cluster
from steptime.model.captured import CapturedModel
from steptime.plan.plans import MEMORY, RISK
from steptime.plan.space import Constraint
from steptime.plan.switches import fastest, switched_names
from steptime.search.advice import best_step_s, faster_counts, nearest_counts, why_empty
from steptime.search.modes import MODES, Mode
from steptime.search.objective import Wanted
from steptime.search.planner import PlanResult, Ranked, longest, rank_plans
from steptime.units import format_seconds

OFFLOADS: Final = (frozenset({"optimizer"}), frozenset({"optimizer", "activations"}))
"""Sets of what can be offloaded to host memory, the cheaper first."""


SHORTEST: Final = 128
"""Shortest sequence that is proposed if nothing fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """A job and the search of its plans."""

    request: Request
    gpus: int
    global_batch: int
    choices: Mapping[str, Any]
    """Choices common to all candidates."""
    columns: Mapping[str, Any]
    """Columns fixed to one value."""
    limit: Sequence[str]
    strategy: str
    oom_limit: float | None = None
    placement: str | None = None
    """Order of the axes over the devices, ``default``, or ``search``; None: the space's own."""

    def prepared(self) -> tuple[Setting, Scope]:
        """The job for the engine, and the scope of the search.

        Raises:
            UserError: something in the input is wrong; the message says what to change.
        """
        setting = self.request.setting(self.gpus, self.global_batch, self.choices)
        chosen = mode_of(setting, self.request.mode)
        check_strategy(setting, text("strategy", self.strategy))
        constraints = constraints_of(self.columns, self.limit, setting.job.framework.name)
        given = {**self.choices, **fixed_values(constraints)}
        check_mode(given, chosen)
        check_model(setting.job, text("strategy", self.strategy), given)
        most = oom_limit_of(self.limit, chosen)
        first = max(LIKELY_FITS, most or 0.0) if self.oom_limit is None else share("oom_limit", self.oom_limit)
        limited = chosen.method.calibrated and first < 1
        names = switched_names(setting.job, self.choices)
        job = fastest(setting.job, self.choices) if names else setting.job
        setting = replace(setting, job=job, switched=names, oom_limit=most, first_limit=first if limited else None)
        return setting, self._scope(setting, chosen, constraints)

    def _scope(self, setting: Setting, chosen: Mode, constraints: list[Constraint]) -> Scope:
        space, asked = chosen.space.fixed(fixed_values(constraints)), text("strategy", self.strategy)
        scope = scope_of(
            setting.job.framework.name,
            space,
            chosen.searched(asked),
            constraints,
            asked,
            within=shards_within_node(self.gpus, node_devices(setting.cluster)),
            experts=setting.job.model.experts is not None,
        )
        return scope if self.placement is None else replace(scope, space=laid(scope.space, self.placement))


def what_fits(search: Search, setting: Setting, scope: Scope, result: PlanResult) -> tuple[str, ...]:
    """Advice if nothing is feasible: changed options with their best step, fewest device seconds first.

    Args:
        search: the search that found nothing feasible.
        setting: its job on its cluster.
        scope: its space and constraints.
        result: result of the search.
    """
    empty = () if result.candidates else why_empty(setting.job, scope.constraints)
    others: list[tuple[float, str]] = []
    kept_on_host = False
    for words, other in _alternatives(search, setting, scope, result):
        if kept_on_host and "offload" in words:
            continue
        time_s = _best_s(other)
        if time_s is not None:
            others.append(
                (search.gpus * time_s * _work_over(search, other, setting), f"{words}: best step {time_s:.4g} s")
            )
            kept_on_host |= "offload" in words
    others += nearest_counts(setting, scope.space, scope.strategies, scope.constraints)
    ranked = [words for _, words in sorted(others, key=lambda one: one[0])]
    return (*empty, *ranked, *_one_device(search, setting))


def _work_over(search: Search, other: Search, setting: Setting) -> float:
    """Tokens per step of one search over another's: the factor by which the other's step time counts."""
    length = other.request.seq or setting.job.seq_len
    return search.global_batch * setting.job.seq_len / (other.global_batch * length)


def _one_device(search: Search, setting: Setting) -> tuple[str, ...]:
    if search.gpus > 1 or setting.job.captured is not None or not search.request.mode.method.calibrated:
        return ()
    fit = f"steptime fit {search.request.model} --device {setting.cluster.device.name} --batch {search.global_batch}"
    return (f"{fit} weighs what one device can do: adapters, 8-bit states, the host's memory",)


def _alternatives(search: Search, setting: Setting, scope: Scope, result: PlanResult) -> Iterator[tuple[str, Search]]:
    """Variants of a search with one option changed, each with a description."""
    for key, value in search.columns.items():
        rest = {name: one for name, one in search.columns.items() if name != key}
        yield f"without --fix {key}={value} plans fit", replace(search, columns=rest)
    for key in search.choices:
        rest = {name: one for name, one in search.choices.items() if name != key}
        yield f"without --fix {key} plans fit", replace(search, choices=rest)
    for number, bound in enumerate(search.limit):
        bounds = [*search.limit[:number], *search.limit[number + 1 :]]
        yield f"without --limit '{bound}' plans fit", replace(search, limit=bounds)
    if search.global_batch < search.gpus and result.reasons.get("batch"):
        per_device = f"a {setting.job.sample} per device"
        yield f"--global-batch {search.gpus} fits, {per_device}", replace(search, global_batch=search.gpus)
    if (result.reasons.get(MEMORY) or result.reasons.get(RISK)) and search.request.mode.method.calibrated:
        yield from _more_room(search, setting, scope)


def _more_room(search: Search, setting: Setting, scope: Scope) -> Iterator[tuple[str, Search]]:
    held = search.choices.get("offload", frozenset())
    for wanted in OFFLOADS:
        if not wanted <= held:
            both = {**search.choices, "offload": wanted | held}
            words = f"--fix offload={','.join(sorted(wanted | held, reverse=True))} fits, with {_kept(wanted | held)}"
            yield f"{words} in the host's memory", replace(search, choices=both)
    if setting.job.optimizer.name in ("adam", "adamw"):
        quantised = replace(search.request, optimizer="adam8bit")
        yield "--optimizer adam8bit fits, with states of 8 bits", replace(search, request=quantised)
    half = setting.job.seq_len // 2
    while half >= SHORTEST and setting.job.sample != "sample" and setting.job.captured is None:
        shorter = replace(search, request=replace(search.request, seq=half))
        if _best_s(shorter) is not None:
            yield f"--seq {half} fits, shorter sequences", shorter
            break
        half //= 2
    if scope.notes:
        generic = replace(search.request, framework=None)
        yield "--framework generic, which has every kind of plan, fits", replace(search, request=generic)


def _kept(offload: frozenset[str]) -> str:
    return " and ".join("the optimiser" if one == "optimizer" else one for one in sorted(offload, reverse=True))


def _best_s(search: Search) -> float | None:
    """Step time of the best plan; None: there is none, or the job is refused."""
    try:
        setting, scope = search.prepared()
    except UserError:
        return None
    return best_step_s(setting, setting.job.gpus, scope.space, scope.strategies, scope.constraints)


def plan(
    model: NameOrPath | CapturedModel,
    cluster: NameOrPath | Cluster,
    *,
    gpus: int,
    global_batch: int,
    seq: int | None = None,
    dtype: str | None = None,
    optimizer: str = "adam",
    strategy: str = "auto",
    mode: str = "corrected",
    framework: str | None = None,
    lora: Mapping[str, Any] | None = None,
    fix: Mapping[str, Any] | None = None,
    limit: Sequence[str] = (),
    oom_limit: float | None = None,
    top: int = 10,
    placement: str | None = None,
    training: Mapping[str, Any] | None = None,
    objective: str = "time",
    deadline: str | None = None,
    budget: str | None = None,
    failures: str | None = None,
    prices: str | None = None,
    shardings: str = "auto",
    advise: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> PlanResult:
    """Rank all parallel plans of a model on a number of devices.

    Args:
        model: catalogue name, ``config.json``, TOML file, ``pkg.module:factory`` of a torch module, or a module that
            was captured (:func:`steptime.captured_model`).
        cluster: catalogue name, TOML file, or a record (:func:`steptime.load_cluster`).
        gpus: devices to use.
        global_batch: sequences per optimiser step.
        seq: tokens of a sequence; None: the model's own.
        dtype: training recipe (``bf16``, ``fp16``, ``tf32``, ``fp32``, ``fp8``, ``fp8-te``, ``fp8-tensorwise``,
            ``fp8-blockwise``, ``mxfp8``, ``nvfp4``).
            None: ``bf16``, but of a module the one that it is made or was captured in.
        optimizer: ``adam``, ``adamw``, ``adam8bit``, ``momentum`` (also ``sgd-momentum``), ``sgd``, ``muon``, and the
            others of :data:`steptime.plan.optimizers.OPTIMIZERS`.
        strategy: ``1d``, ``context``, ``2d`` (SUMMA), or ``auto``: the first two; in published mode all.
        mode: ``corrected`` or ``published``.
        framework: training software whose fitted slowdowns and overheads are applied (``steptime frameworks`` lists
            them); ``generic`` where it is not known, ``ideal`` for none. None: ``generic``, in published mode
            ``ideal``.
        lora: low-rank adapters on frozen weights, as ``{"rank": 16, "targets": "linear", "qlora": False}``.
        fix: columns of the plan fixed to one value, as ``{"tp": 8}``, and choices for all candidates, the keys of
            :data:`steptime.options.CHOICES`.
        limit: bounds, as ``["pp<=16"]``; ``oom_probability<=0.1`` on the chance of running out of memory.
        oom_limit: largest chance of running out of memory with which a plan is put first, as a share; 1: any; None:
            0.05, or what ``limit`` allows. Faster plans above it are in :attr:`PlanResult.risky`, with what would make
            them fit.
        top: number of plans to return.
        placement: placement of ranks on devices: an order of the axes, innermost first, as ``"tp-cp-ep-dp-pp"``,
            ``default`` (the order of launchers), or ``search`` (the fastest for each plan). None: ``search``, under a
            named framework ``default``.
        training: length of the whole run, as ``{"tokens": "1T"}``: ``tokens``, ``samples``, or ``epochs`` with
            ``dataset_tokens`` or ``dataset_samples``; then :attr:`Estimate.training` says what it takes.
        objective: quantity to minimise: ``time`` of a step, ``goodput`` (expected time of the run), ``energy`` or
            ``cost``.
        deadline: longest time of the whole run, as ``"30 days"``, failures included where they are given.
        budget: most that it may cost, as ``"2M USD"``.
        failures: as in :func:`estimate`.
        prices: as in :func:`estimate`; default with the objective ``cost`` or a budget: the catalogue's.
        shardings: also shard the operators of a torch module one by one, by an integer program on every mesh of the
            devices: ``auto`` (for a module without a run of equal blocks), ``all`` (for any module), ``none``.
        advise: also find changes that make a plan fit, fewer devices that are faster, choices that the search left
            out, and why the first plan uses no other axis; False: the plans alone.
        progress: called with candidates done and candidates known so far.

    Raises:
        UserError: something in the input is wrong; the message says what to change.
    """
    model, chosen, length = model_given(model), MODES[text("mode", mode)], check_training(training)
    choices, columns = job_choices(table("fix", fix))
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
    search = Search(
        request=request,
        gpus=gpus,
        global_batch=global_batch,
        choices=choices,
        columns=columns,
        limit=[limit] if isinstance(limit, str) else limit,
        strategy=strategy,
        oom_limit=oom_limit,
        placement=placement,
    )
    setting, scope = search.prepared()
    check_length(length, setting.job)
    whole("top", top, 1, 10**5)
    wanted = Wanted(objective=objective, deadline=deadline, budget=budget, failures=failures, prices=prices)
    goal = None
    if wanted != Wanted():
        from steptime.goodput.objective import billed_plans, bound_advice, objective_of

        steps = samples_of(length, setting.job) / setting.job.global_batch if length else None
        goal = objective_of(setting, wanted, steps)
    sharded = sharded_too(search, setting, choice("shardings", shardings, SHARDINGS), timed=wanted == Wanted())
    result = rank_plans(
        setting, scope.space, scope.strategies, scope.constraints, top=top, progress=progress, objective=goal
    )
    said = (*read_notes(model, setting, seq, dtype), *renamed(framework), *read_as(setting.job.framework.name, columns))
    said += () if sharded else not_searched(model, setting)
    notes = (*said, *scope.notes, *levels_left_out(setting.cluster, setting.job.gpus))
    result = _completed(setting, result, {**choices, **columns}) if advise else result
    if sharded:
        result, failed = with_shardings(result, search, setting, dtype=dtype, top=top, quick=shardings != "all")
        notes += failed
    advice: tuple[str, ...] = ()
    result = all_trained(result, length, setting.job)
    if wanted != Wanted():
        result, advice = billed_plans(result, setting, wanted), bound_advice(goal, result, wanted)
    advice = advice or (_advice(search, setting, scope, result) if advise else ())
    return replace(result, advice=advice, notes=notes)


def _completed(setting: Setting, result: PlanResult, given: Mapping[str, Any]) -> PlanResult:
    """The result with the choices that the search left out, and why the first plan uses no other axis.

    A paper's space and a captured module do not have these choices.
    """
    modelled = setting.method.calibrated and setting.job.captured is None
    if not modelled or not isinstance(result.plans, Ranked) or not len(result.plans):
        return result
    first, best = result.plans.row(0), result.plans[0]
    left = unsearched(setting, (*first, best.step_time_s), given)
    return replace(result, unsearched=left, why_not=why_not(setting, (*first, best), given))


SHARDINGS: Final = ("auto", "all", "none")


def sharded_too(search: Search, setting: Setting, shardings: str, *, timed: bool) -> bool:
    """True if the operators of a module are to be sharded one by one too.

    Args:
        search: the search.
        setting: its job on its cluster.
        shardings: one of :data:`SHARDINGS`.
        timed: True if the objective is the step time alone.
    Raises:
        UserError: ``all`` is given, and the operators cannot be sharded.
    """
    captured, free = setting.job.captured, timed and not search.columns and not search.limit
    possible = free and captured is not None and isinstance(search.request.model, str) and setting.job.gpus > 1
    if shardings == "all" and not possible:
        raise UserError(
            "shardings all: only the operators of a torch module that its factory names, on several devices, can be "
            "sharded one by one, without degrees that are fixed or bounded, prices or another objective than time",
            hint="leave shardings out, or give FILE.py:NAME, devices and a batch alone",
        )
    return possible and (shardings == "all" or (shardings == "auto" and captured is not None and not captured.repeats))


def with_shardings(
    result: PlanResult,
    search: Search,
    setting: Setting,
    *,
    dtype: str | None,
    top: int,
    quick: bool,
) -> tuple[PlanResult, tuple[str, ...]]:
    """The result with the best shardings of single operators among its plans, and notes if there are none.

    Args:
        result: the plans by degrees.
        search: the search.
        setting: its job on its cluster.
        dtype: requested element type; None: as the module is made.
        top: number of plans to return.
        quick: search only meshes of one axis for a large module.
    """
    job = setting.job
    try:
        found = MODULES["sharded"](
            search.request.model,
            setting.cluster,
            gpus=job.gpus,
            batch=job.global_batch,
            seq=search.request.seq,
            dtype=element_for(dtype),
            optimizer=search.request.optimizer,
            framework=search.request.framework,
            overlaps="dp" in job.overlap,
            quick=quick,
        )
    except UserError as error:
        why = str(error).partition("\n")[0]
        return result, (f"shardings of single operators were not searched: {why}",)
    best, tried = found.estimate, len(found.tried)
    meshes = "1 mesh" if tried == 1 else f"{tried} meshes"
    fits = best.feasible and best.oom_probability <= (setting.first_limit or 1.0)
    plans = sorted((*result.plans, *([best] if fits else [])), key=lambda each: each.step_time_s)[:top]
    proof = f"{result.stop.proof}; of the shardings of single operators on {meshes}"
    proof += f" none takes less than {format_seconds(found.bound_s)} on that of the best, {found.best.built.mesh}"
    if fits and result.feasible and plans[0] is not best:
        name, more_s = longest(best, plans[0])
        longer = f"{100 * (best.step_time_s / plans[0].step_time_s - 1):.2g} %"
        proof += f"; it takes {longer} longer: {name} {format_seconds(more_s)} more"
    return replace(
        result,
        plans=plans,
        candidates=result.candidates + tried,
        feasible=result.feasible + (1 if fits else 0),
        stop=replace(result.stop, proof=proof),
        shardings={"bound_s": found.bound_s, "mesh": best.plan["mesh"], "stop": found.stop},
    ), ()


def not_searched(model: str | CapturedModel, setting: Setting) -> tuple[str, ...]:
    """A note on plans of a module outside this space, and the command that finds them."""
    job = setting.job
    if job.captured is None or job.gpus < 2:
        return ()
    name = model if isinstance(model, str) else "FILE.py:NAME"
    command = (
        f"steptime shard {name} --cluster {setting.cluster.name} --gpus {job.gpus} --batch {job.global_batch} "
        f"--dtype {element_for(job.precision.name)}"
    )
    return (
        f"whole blocks were divided over data, pipeline and tensor ranks; that single weights and activations of "
        f"{job.model.name} lie otherwise, which may be faster, was not searched: give --shardings all, or {command}",
    )


def _advice(search: Search, setting: Setting, scope: Scope, result: PlanResult) -> tuple[str, ...]:
    """Advice of a search: changes that make a plan fit, or smaller numbers of devices that are faster."""
    if not result.feasible:
        return what_fits(search, setting, scope, result)
    found = result.plans[0].step_time_s
    return faster_counts(setting, scope.space, scope.strategies, scope.constraints, found)
