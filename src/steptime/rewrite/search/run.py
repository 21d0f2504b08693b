"""Run of a named search: weights and limits from the user's options, and rounds over tangents of the time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from steptime.errors import UserError, did_you_mean
from steptime.hardware.records import Device
from steptime.rewrite.added import MUTANTS, RULES, added
from steptime.rewrite.engine import CUDA_ROUNDING_BYTES, Rewritten, Step, apply_passes, is_legal, merged, pass_named
from steptime.rewrite.flow import Flow
from steptime.rewrite.fused import FusedTimer
from steptime.rewrite.layout.joint import with_layouts_priced
from steptime.rewrite.passes import MOVES
from steptime.rewrite.pricing import Prices
from steptime.rewrite.scene import Objective, Pass
from steptime.rewrite.search.best_first import ALPHA, BUDGET, LIMIT
from steptime.rewrite.search.control import Control, Report
from steptime.rewrite.search.decided import decide
from steptime.rewrite.search.presets import OF_THE_WHOLE, SEARCHES, Run
from steptime.rewrite.search.problem import METRICS, CostModel, Found, Metric, Problem, time_weights
from steptime.rewrite.search.space import EPSILON

PEAK: Final = "peak_bytes"
TEMPLATE: Final = "template"
WORTH: Final = 1e-3
"""Least relative change of the time for another round of the tangent."""
GUIDE: Final = 1e-3
"""Weight of a byte of traffic relative to a byte of the peak, which guides the search of parts."""
ROUNDS: Final = 3
NAMES: Final = (TEMPLATE, *SEARCHES)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a search."""

    search: str = "recommended"
    objective: Objective = "time"
    weights: Mapping[str, float] = field(default_factory=dict)
    """Weights of metrics; empty: the weights of the objective."""
    limits: Mapping[str, float] = field(default_factory=dict)
    alpha: float = ALPHA
    budget: int = BUDGET
    everything: bool = False
    passes: Sequence[str] = ()
    mutants: bool = False
    """Include the mutants of partial equality as moves."""
    layouts: bool = False
    """Price graphs in their best layouts in searches of the whole graph."""
    rules: str = ""
    """Rules as further moves: ``shipped`` (the proved rules), or a user's file, whose rules are proved first."""
    measured: bool = False
    """Time operators on this machine."""
    limit_s: float | None = None
    report: Report | None = None
    """Progress report."""


@dataclass(frozen=True, kw_only=True)
class Searched:
    """The result of a search."""

    options: Options
    rewritten: Rewritten = field(repr=False)
    found: Found
    start: float
    """Cost of the original graph."""
    weights: Mapping[str, float]
    broken: bool = False
    """The graph breaks a limit, because the search found none that keeps it."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        known = {"search": self.options.search, "alpha": self.options.alpha, "budget": self.options.budget}
        best = {"start": self.start, "cost": self.found.cost, "bound": self.found.bound}
        rest = {"graphs": self.found.graphs, "stop": self.found.stop, "breaks_a_limit": self.broken}
        given = {"weights": dict(self.weights), "limits": dict(self.options.limits)}
        moves = {"mutants": self.options.mutants, "rules": self.options.rules}
        return known | best | rest | given | moves


def check_options(options: Options) -> None:
    """Check the options of a search.

    Raises:
        UserError: the name or a metric is unknown, or a value, alpha or the budget is out of range.
    """
    if options.search not in NAMES:
        raise UserError(f"there is no search {options.search!r}", hint=did_you_mean(options.search, list(NAMES)))
    for name in (*options.weights, *options.limits):
        if name not in (*METRICS, PEAK):
            raise UserError(f"there is no metric {name!r}", hint=f"one of {', '.join((*METRICS, PEAK))}")
    for name, value in (*options.weights.items(), *options.limits.items()):
        if not 0 <= value < float("inf"):
            raise UserError(f"{name}={value:g}: a weight or a limit is finite and not negative")
    if not 1 <= options.alpha <= 10:
        raise UserError(f"alpha is {options.alpha:g}: it is 1 to 10", hint="1 is greedy, 1.05 MetaFlow's")
    if options.search == TEMPLATE and options.rules:
        raise UserError("--rules are moves; template makes none", hint="--search recommended, taso or metaflow")
    if options.budget < 1:
        raise UserError(f"the budget is {options.budget} graphs: it is 1 or more")


def moves_of(flow: Flow, device: Device, options: Options) -> tuple[Pass, ...]:
    """The moves that apply to a graph on a device."""
    chosen = {pass_named(name, MOVES) for name in options.passes} or set(MOVES)
    memory: Objective = "memory" if PEAK in (*options.weights, *options.limits) else options.objective
    rows = [row for row in MOVES if row in chosen]
    rows += added(MUTANTS) if options.mutants or options.search == "pet" else ()
    rows += added(RULES, options.rules) if options.rules else ()
    return tuple(row for row in rows if is_legal(row, flow, device, memory, everything=False))


def searched(flow: Flow, device: Device, options: Options) -> Searched:
    """Search for a cheaper graph.

    Args:
        flow: the graph.
        device: what it runs on.
        options: the search, its objective and its limits.

    The step time is a soft maximum of device and host time, which is no sum over operators. The search therefore uses
    its tangent plane at the graph, then that at the graph that was found, until that gains no more.

    Raises:
        UserError: an option is unknown or out of range, or an operator cannot be timed here.
    """
    check_options(options)
    prices = Prices(FusedTimer(device=device), CUDA_ROUNDING_BYTES if device.runs_cuda else 1)
    control = Control(limit_s=options.limit_s, report=options.report)
    by_time = not options.weights and options.objective == "time" and not options.measured
    problem = Problem(
        flow=flow,
        moves=moves_of(flow, device, options),
        cost=_model(prices, flow, options),
        on_cuda=device.runs_cuda,
    )
    if options.layouts and options.search in OF_THE_WHOLE:
        problem = with_layouts_priced(problem)
    if options.search == TEMPLATE:
        problem, found, steps = _template(problem, device, options, by_time=by_time)
    else:
        with control.stops_at_interrupt():
            problem, found = _rounds(problem, options, control, by_time=by_time)
        found, each = decide(problem, found, everything=options.everything, by_time=by_time)
        steps = merged(each)
    weights: dict[str, float] = {str(name): value for name, value in problem.cost.weights.items()}
    if problem.cost.peak_weight:
        weights[PEAK] = problem.cost.peak_weight
    return Searched(
        options=options,
        rewritten=Rewritten(before=flow, after=found.flow, steps=steps, prices=prices),
        found=found,
        start=_time(prices, flow) if by_time else problem.cost.guided(flow),
        weights=weights,
        broken=problem.cost.excess(found.flow) > 0,
    )


def _model(prices: Prices, flow: Flow, options: Options) -> CostModel:
    """The cost model of the options."""
    given: dict[str, float] = {**options.weights} or _weights(prices, flow, options)
    limits = dict(options.limits)
    peak_weight, peak_limit = given.pop(PEAK, 0.0), limits.pop(PEAK, None)
    timed = options.measured or "measured_s" in (*given, *limits)
    clock = None
    if timed:
        from steptime.rewrite.search.measured import Clock

        clock = Clock()
    names: Mapping[str, Metric] = {name: name for name in METRICS}
    return CostModel(
        prices=prices,
        weights={names[name]: value for name, value in given.items()},
        limits={names[name]: value for name, value in limits.items()},
        peak_limit_bytes=peak_limit,
        peak_weight=peak_weight,
        clock=clock,
    )


def _weights(prices: Prices, flow: Flow, options: Options) -> dict[str, float]:
    if options.measured:
        return {"measured_s": 1.0}
    if options.objective == "launches":
        return {"launches": 1.0}
    if options.objective == "memory":
        return {PEAK: 1.0, "moved_bytes": GUIDE}
    return dict(time_weights(prices, flow))  # type: ignore[arg-type]


def _rounds(problem: Problem, options: Options, control: Control, *, by_time: bool) -> tuple[Problem, Found]:
    """Search under the tangent at the graph, then under the tangents at the graphs that are found."""

    def run(given: Problem) -> Found:
        return SEARCHES[options.search](Run(problem=given, alpha=options.alpha, budget=options.budget, control=control))

    found = run(problem)
    prices = problem.cost.prices
    for _ in range(ROUNDS if by_time else 0):
        problem = _tangent(problem, found.flow)
        now = problem.cost.guided(found.flow)
        settled = abs(now - found.cost) <= (WORTH if found.bound is None else EPSILON) * now
        found = replace(found, cost=now, bound=found.bound if settled else None)
        if settled or control.why() or found.stop.startswith(LIMIT):
            break
        other = run(problem)
        better = _time(prices, other.flow) < _time(prices, found.flow) * (1 - EPSILON)
        found = replace(other if better else found, graphs=found.graphs + other.graphs, bound=other.bound)
        if not better:
            break
    return problem, found


def _tangent(problem: Problem, flow: Flow) -> Problem:
    """The problem under the tangent of the time at a graph."""
    weights = time_weights(problem.cost.prices, flow)
    return replace(problem, cost=replace(problem.cost, weights=weights, _sums={}))


def _time(prices: Prices, flow: Flow) -> float:
    sums, p = prices.sums(flow, flow.operators), prices.timer.sharpness
    return float((sums.device_s**p + sums.host_s**p) ** (1 / p))


def _template(
    problem: Problem, device: Device, options: Options, *, by_time: bool
) -> tuple[Problem, Found, tuple[Step, ...]]:
    """The template passes only, which decide by their own rule."""
    everything, passes = options.everything, options.passes
    done = apply_passes(problem.flow, device, objective=options.objective, everything=everything, passes=passes)
    problem = _tangent(problem, done.after) if by_time else problem
    cost, tried = problem.cost.guided(done.after), len(done.steps)
    found = Found(flow=done.after, cost=cost, bound=None, graphs=tried, stop="every pass was tried")
    return problem, found, done.steps
