"""Ranks the plans of one job over several strategies, and explains the winners.

A search returns counts, its stopping reason, the best plans, the front and the nearest miss.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, TypeVar, overload

import numpy as np

from steptime.errors import counted
from steptime.estimate.evaluate import evaluate
from steptime.estimate.memory_definitions import LIKELY_FITS
from steptime.estimate.result import SCHEMA_VERSION, Estimate
from steptime.estimate.single import Setting, chance_of, estimate_plan, plan_record, rules_broken, workload_record
from steptime.num import Array
from steptime.plan.framework_file import habits_of
from steptime.plan.plans import FULL_RECOMPUTE, Plans, is_set
from steptime.plan.recompute import recompute_code
from steptime.plan.space import Constraint, Space
from steptime.plan.strategies import Strategy
from steptime.search.accumulators import pareto_front
from steptime.search.exhaustive import Found, Progress, Task, search
from steptime.search.objective import Objective
from steptime.search.ranking import RISKY_SHOWN

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Stopping reason of a search, and its proof."""

    reason: str
    """``exhausted``: every candidate that fits was costed, so that the first plan is the best. ``pruned``: the same is
    proved, as the lower bound of each candidate without a cost is above the times to beat. ``infeasible``: none
    fits."""
    proof: str
    """The claim in words."""
    elapsed_cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """One change of a plan that brings its chance of running out of memory below the limit of a first plan."""

    change: str
    """The change in the words of the command line, as ``recompute=full``."""
    step_time_s: float
    oom_probability: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Risky:
    """A plan that is faster than the first but too likely to run out of memory to be the first."""

    estimate: Estimate
    remedies: tuple[Remedy, ...]
    """Changes that make it fit, the fastest first."""

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``."""
        return {**self.estimate.to_json(), "would_fit": [asdict(remedy) for remedy in self.remedies]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One choice at another value than in the search, and the step time of the first plan with it."""

    change: str
    """The choice in the words of the command line, as ``schedule=zb-h1``."""
    step_time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsearched:
    """Choices that a search kept at one value, so that its claim does not cover other values."""

    names: tuple[str, ...] = ()
    """Names of choices and columns of a plan."""
    faster: tuple[Change, ...] = ()
    """Changes that each make the first plan faster, the fastest first; other plans may gain more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyNot:
    """An axis or technique that the first plan does not use, and the step time with it."""

    change: str
    """The change in the words of the command line, as ``tp=2 (pp=4)``."""
    step_time_s: float | None
    """Step time of the fastest plan that is one step away; None: none of them can run."""
    because: str
    """The term with the largest growth, or the broken rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """Ranked plans of one model on a number of devices."""

    candidates: int
    feasible: int
    reasons: Mapping[str, int]
    """Named reason -> number of candidates with it; one candidate may have several."""
    stop: Stop
    plans: Sequence[Estimate]
    """The best plans, fastest first, all with a chance of running out of memory up to the limit of a first plan; if no
    plan keeps it, the one with the smallest memory. All but the first are explained when they are read."""
    pareto: tuple[Mapping[str, Any], ...]
    """Front of step time and memory: no candidate is better in both. Each has step_time_s,
    peak_memory_bytes and plan."""
    nearest: Estimate | None
    """The plan that exceeds memory least, if nothing fits."""
    likely_to_fit: Estimate | None = None
    """The fastest plan of the space that likely fits, if the first plan may run out of memory."""
    oom_limit: float | None = None
    """Largest chance of running out of memory of a first plan; None: no limit."""
    risky: Sequence[Risky] = ()
    """The fastest plans with a larger chance that are faster than the first; explained when they are read."""
    advice: tuple[str, ...] = ()
    """Advice if nothing fits: device counts that work, and the cost of idle devices."""

    workload: Mapping[str, Any] = field(default_factory=dict)
    """The job in the words of the command line, as in an estimate."""
    energy_front: tuple[Mapping[str, Any], ...] = ()
    """Front of time and energy of a step for a search with an objective: step_time_s, step_energy_J and plan. At one
    number of devices money is a mix of both, so that it is the front of time and money too."""
    notes: tuple[str, ...] = ()
    """Notes on the search: another name for the framework, and plans that the framework does not support."""
    why_not: tuple[WhyNot, ...] = ()
    """Axes and techniques that the first plan does not use, with the reason."""
    unsearched: Unsearched = Unsearched()
    """Choices that the claim of :attr:`stop` does not cover; empty if nothing fits."""
    shardings: Mapping[str, Any] = field(default_factory=dict)
    """Search over shardings of single operators of a captured module: ``bound_s``, the lower bound of all shardings on
    the ``mesh`` of the best one, and the stopping reason. Empty without such a search."""

    def __repr__(self) -> str:
        """One line for a prompt or a notebook; :meth:`to_json` has everything."""
        best = f"the fastest: {self.plans[0]!r}" if self.plans else "none fits"
        return f"<PlanResult: {self.feasible:,} of {self.candidates:,} candidates are feasible; {best}>"

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``."""
        return {
            "schema_version": SCHEMA_VERSION,
            "candidates": self.candidates,
            "feasible": self.feasible,
            "reasons": dict(self.reasons),
            "stop": {"reason": self.stop.reason, "proof": self.stop.proof, "elapsed_cpu_s": self.stop.elapsed_cpu_s},
            "plans": [plan.to_json() for plan in self.plans],
            "pareto": [dict(point) for point in self.pareto],
            "nearest": self.nearest.to_json() if self.nearest else None,
            "likely_to_fit": self.likely_to_fit.to_json() if self.likely_to_fit else None,
            "oom_limit": self.oom_limit,
            "risky": [each.to_json() for each in self.risky],
            "advice": list(self.advice),
            "workload": dict(self.workload),
            **({"energy_front": [dict(point) for point in self.energy_front]} if self.energy_front else {}),
            "notes": list(self.notes),
            "why_not": [asdict(each) for each in self.why_not],
            "unsearched": asdict(self.unsearched),
            **({"shardings": dict(self.shardings)} if self.shardings else {}),
        }


def rank_plans(
    setting: Setting, space: Space, strategies: Mapping[str, tuple[Constraint, ...]],
    constraints: Sequence[Constraint] = (), *, top: int = 10, progress: Progress | None = None, brief: bool = False,
    objective: Objective | None = None,
) -> PlanResult:  # fmt: skip
    """The best plans of a job among all strategies given.

    Args:
        setting: method, job and cluster.
        space: the candidates.
        strategies: name of each strategy to search, with constraints of its own.
        constraints: columns that the user fixes or bounds.
        top: number of plans to return.
        progress: called with candidates done and candidates known so far.
        brief: without the front, the details of the first plan, and its what-ifs.
        objective: quantity to minimise, with bounds; None: the time of a step.
    """
    started = time.process_time()
    found = find(setting, space, strategies, constraints, top=top, progress=progress, objective=objective)
    ranked, risky = _merged(found, top)
    rows = [(strategy, each) for _, strategy, each in ranked]
    known = [_explained(setting, *row, first=not brief) for row in rows[:1]]
    plans = Ranked(rows, partial(_explained, setting, first=False), known)
    candidates, feasible = sum(f.candidates for f in found), sum(f.feasible for f in found)
    return PlanResult(
        candidates=candidates, feasible=feasible, reasons=_reasons(found),
        stop=_stop(found, _dimensions(setting, strategies), time.process_time() - started,
                   "faster" if objective is None else "better"),
        plans=plans, pareto=() if brief else _front(setting, found),
        nearest=_nearest(setting, found) if not feasible else None,
        likely_to_fit=_likely(setting, found) if plans and plans[0].oom_probability > LIKELY_FITS else None,
        oom_limit=setting.first_limit,
        risky=() if brief else Ranked([(strategy, each) for _, strategy, each in risky], partial(_risky, setting)),
        workload=workload_record(setting.job),
        energy_front=() if objective is None else _energy_front(setting, found),
    )  # fmt: skip


def longest(estimate: Estimate, other: Estimate) -> tuple[str, float]:
    """The group of terms in which an estimate exceeds another one most, and the excess in seconds."""
    terms, others = estimate.time.rollup(1), other.time.rollup(1)
    more = {name: terms.get(name, 0.0) - others.get(name, 0.0) for name in {**others, **terms}}
    name = max(more, key=lambda each: more[each])
    return name, more[name]


_Row = tuple[float, Strategy, Plans]


def _merged(found: Sequence[Found], top: int) -> tuple[list[_Row], list[_Row]]:
    """The best plans of all searches, and faster ones that are too likely to run out of memory."""
    best, risky = (
        sorted(
            ((float(value), n, i) for n, f in enumerate(found) for i, value in enumerate(getattr(f, f"{name}_s"))),
        )
        for name in ("best", "risky")
    )
    ranked = [(value, found[n].task.strategy, found[n].best.row(i)) for value, n, i in best[:top]]
    if not ranked and risky:
        ranked = [_safest(found)] if found[0].task.objective is None else []
        ranked = ranked or [(value, found[n].task.strategy, found[n].risky.row(i)) for value, n, i in risky[:1]]
    before = [(value, found[n].task.strategy, found[n].risky.row(i)) for value, n, i in risky if value < ranked[0][0]]
    return ranked, before[:RISKY_SHOWN]


def _safest(found: Sequence[Found]) -> _Row:
    """The plan with the smallest memory."""
    f = min((f for f in found if len(f.front_bytes)), key=lambda f: float(f.front_bytes.min()))
    at = int(np.argmin(f.front_bytes))
    return float(f.front_s[at]), f.task.strategy, f.front.row(at)


def _risky(setting: Setting, strategy: Strategy, plans: Plans) -> Risky:
    """A plan with the changes that make it fit: more recomputation, smaller micro-batches, more shards."""
    e = _explained(setting, strategy, plans, first=False)
    limit, found = setting.first_limit or 0.0, []
    for change, columns in _less_memory(setting, plans):
        other = evaluate(setting.method, strategy, setting.job, setting.machine, plans.with_columns(columns))
        if not rules_broken(setting, other) and (chance := chance_of(setting, other)) <= limit:
            found.append(Remedy(change=change, step_time_s=float(other.step_time_s), oom_probability=chance))
    return Risky(estimate=e, remedies=tuple(sorted(found, key=lambda one: one.step_time_s)))


def _less_memory(setting: Setting, plans: Plans) -> Iterator[tuple[str, dict[str, Any]]]:
    """Single changes of a plan that reduce its memory, in the words of the command line."""
    habits = habits_of(setting.job.framework.name)
    parts = habits.parts if setting.job.model.experts is None else habits.expert_parts
    now = int(plans.recompute)
    for text in dict.fromkeys((parts, "full")):
        code = recompute_code(text) if text else now
        if not is_set(now, FULL_RECOMPUTE) and code != now:
            yield f"recompute={text}", {"recompute": code}
    size = int(plans.micro_batch)
    while size > 1:
        size = (size + 1) // 2
        yield f"micro_batch={size}", {"micro_batch": size}
    for stage in sorted(habits.stages_with(int(plans.pp))):
        if stage > int(plans.zero) and int(plans.dp) > 1:
            yield f"zero={stage}", {"zero": stage}


def find(
    setting: Setting, space: Space, strategies: Mapping[str, tuple[Constraint, ...]],
    constraints: Sequence[Constraint] = (), *, top: int = 1, progress: Progress | None = None,
    objective: Objective | None = None,
) -> list[Found]:  # fmt: skip
    """Outcome of the search of each strategy, without explanations of the winners."""
    out: list[Found] = []
    done = 0
    for name, own in strategies.items():
        task = Task(setting=setting, strategy=setting.method.strategy(name), space=space,
                    constraints=(*constraints, *own), objective=objective)  # fmt: skip
        out += search([task], top, _shifted(progress, done))
        done += out[-1].candidates
    return out


class Ranked(Sequence[T]):
    """Plans of a job, fastest first, each explained when it is first read.

    Args:
        rows: strategy and columns of each plan.
        explain: function that makes the explained plan from both.
        known: the explained plans among the first ones.
    """

    def __init__(
        self, rows: Sequence[tuple[Strategy, Plans]], explain: Callable[[Strategy, Plans], T], known: Sequence[T] = ()
    ) -> None:
        self._rows, self._explain = rows, explain
        self._known: dict[int, T] = dict(enumerate(known))

    def row(self, place: int) -> tuple[Strategy, Plans]:
        """Strategy and columns of the plan of a rank, without an explanation."""
        return self._rows[place]

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...

    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        """The plan of a rank, from 0 on, or the plans of a slice of ranks."""
        if isinstance(index, slice):
            return tuple(self[i] for i in range(len(self))[index])
        place = range(len(self))[index]
        if place not in self._known:
            self._known[place] = self._explain(*self._rows[place])
        return self._known[place]

    def __repr__(self) -> str:
        """Number of plans, for a prompt, without explanations."""
        return f"<Ranked: {len(self)}, fastest first>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(len(self))

    def __reduce__(self) -> tuple[type, tuple[tuple[T, ...]]]:
        """Pickles the plans explained, for other processes."""
        return tuple, (tuple(self),)


def _shifted(progress: Progress | None, before: int) -> Progress | None:
    if progress is None:
        return None
    return lambda done, known: progress(before + done, before + known)


def _explained(setting: Setting, strategy: Strategy, plans: Plans, *, first: bool) -> Estimate:
    return estimate_plan(setting, strategy, plans, explain=first, what_ifs=first)


def _dimensions(setting: Setting, strategies: Iterable[str]) -> str:
    """Dimensions of a search in words: strategies, and choices of the job that it tries."""
    tried = f"{' and '.join(setting.switched)} too" if setting.switched else ""
    return "; ".join(filter(None, (", ".join(strategies), tried)))


def _stop(found: Sequence[Found], dimensions: str, elapsed_cpu_s: float, better: str) -> Stop:
    candidates, feasible, costed = (sum(getattr(f, n) for f in found) for n in ("candidates", "feasible", "costed"))
    if not candidates:
        return Stop(reason="infeasible", proof="the space has no candidate", elapsed_cpu_s=elapsed_cpu_s)
    space = f"all {counted(candidates, 'candidate', f'{candidates:,}')} of the space ({dimensions}) were checked"
    if not feasible:
        return Stop(reason="infeasible", proof=f"{space}: none is feasible", elapsed_cpu_s=elapsed_cpu_s)
    if costed < feasible:
        space = f"all {candidates:,} candidates ({dimensions}) were bounded, {costed:,} costed"
    return Stop(
        reason="pruned" if costed < feasible else "exhausted",
        proof=f"{space}: no other is {better} than the first",
        elapsed_cpu_s=elapsed_cpu_s,
    )


def _reasons(found: Sequence[Found]) -> dict[str, int]:
    out: dict[str, int] = {}
    for f in found:
        for name, count in f.reasons.items():
            out[name] = out.get(name, 0) + count
    return dict(sorted(out.items(), key=lambda item: -item[1]))


def _front(setting: Setting, found: Sequence[Found]) -> tuple[Mapping[str, Any], ...]:
    time_s: Array = np.concatenate([f.front_s for f in found])
    memory: Array = np.concatenate([f.front_bytes for f in found])
    owner = np.concatenate([np.full(len(f.front_s), n) for n, f in enumerate(found)])
    place = np.concatenate([np.arange(len(f.front_s)) for f in found])
    points = []
    for i in pareto_front(time_s, memory):
        f = found[int(owner[i])]
        record = plan_record(setting, f.task.strategy, f.front.row(int(place[i])))
        points.append({"step_time_s": float(time_s[i]), "peak_memory_bytes": float(memory[i]), "plan": record})
    return tuple(points)


def _energy_front(setting: Setting, found: Sequence[Found]) -> tuple[Mapping[str, Any], ...]:
    fronts = [f.energy for f in found if f.energy is not None]
    time_s: Array = np.concatenate([front.time_s for front in fronts])
    energy: Array = np.concatenate([front.energy_J for front in fronts])
    place = [(n, i) for n, front in enumerate(fronts) for i in range(len(front.time_s))]
    points = []
    for k in pareto_front(time_s, energy):
        n, i = place[k]
        record = plan_record(setting, found[n].task.strategy, fronts[n].plans.row(i))
        point = {"step_time_s": float(time_s[k]), "step_energy_J": float(energy[k]), "plan": record}
        points.append(point)
    return tuple(points)


def _likely(setting: Setting, found: Sequence[Found]) -> Estimate | None:
    """The fastest plan that likely does not run out of memory."""
    first = min(found, key=lambda f: f.likely_s)
    return None if first.likely is None else _explained(setting, first.task.strategy, first.likely.row(0), first=False)


def _nearest(setting: Setting, found: Sequence[Found]) -> Estimate | None:
    """The plan with the smallest memory among those that break no rule but memory."""
    estimates = [
        estimate_plan(setting, f.task.strategy, f.nearest.row(0), explain=True) for f in found if f.nearest is not None
    ]
    return min(estimates, key=lambda e: e.peak_memory_bytes, default=None)
