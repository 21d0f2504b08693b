"""Application of passes to a graph: each kind of match is priced once, and made if it pays, until nothing changes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from steptime.captured.cost import CostTable
from steptime.captured.graph import Node, Value
from steptime.errors import UserError, did_you_mean
from steptime.hardware.records import Device
from steptime.rewrite.added import MUTANTS, added
from steptime.rewrite.flow import Flow, removed_and_added, substituted
from steptime.rewrite.passes import PASSES, STAGES
from steptime.rewrite.passes.fusion import FUSION
from steptime.rewrite.pricing import Change, Prices, Sums, timer_for
from steptime.rewrite.retype import RefusedError
from steptime.rewrite.scene import OBJECTIVES, Folds, Match, Mode, Objective, Pass, Scene

ROUNDS: Final = 8
"""Largest number of rounds of a stage, which is tried again after a change."""
CUDA_ROUNDING_BYTES: Final = 512
UNFUSED: Final = 4
"""Number of stages before the mutants, which need folded convolutions and products but no fused kernels."""

CERTAIN: Final = "the gain exceeds the doubt"
UNMADE: Final = "its readers need the memory layout that it changes"

Measure = Callable[[Flow, Match], "float | None"]
"""Function that times a match on this machine: seconds that it saves, or None if it cannot be run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Equal rewrites of one pass, priced together."""

    name: str
    what: str
    count: int
    modules: tuple[str, ...]
    """Modules of the matches, with ``*`` for numbers of blocks."""
    applied: bool
    why: str
    """Reason why it was applied or not."""
    change: Change
    fuses: bool = False
    reorders: bool = False
    tidy: bool = False
    measured_gain_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Rewritten:
    """A graph before and after its rewrites."""

    before: Flow
    after: Flow
    steps: tuple[Step, ...]
    prices: Prices = field(repr=False)


def modes_of(flow: Flow) -> Mode:
    """``training`` if weights change, else ``inference``."""
    return "training" if flow.training else "inference"


def pass_named(name: str, among: Sequence[Pass] = PASSES) -> Pass:
    """A pass by its name.

    Raises:
        UserError: the name is unknown.
    """
    found = next((each for each in among if each.name == name), None)
    if found is None:
        raise UserError(f"there is no pass {name!r}", hint=did_you_mean(name, [each.name for each in among]))
    return found


def objective_named(name: str) -> Objective:
    """An objective by its name.

    Raises:
        UserError: it is unknown.
    """
    found = next((each for each in OBJECTIVES if each == name), None)
    if found is None:
        raise UserError(f"objective {name!r} is unknown", hint=f"one of {', '.join(OBJECTIVES)}")
    return found


def apply_passes(
    flow: Flow,
    device: Device,
    *,
    objective: Objective = "time",
    everything: bool = False,
    passes: Sequence[str] = (),
    measure: Measure | None = None,
    mutants: bool = False,
) -> Rewritten:
    """Rewrite a graph where the predicted gain exceeds the doubt of the prediction.

    Args:
        flow: the graph.
        device: what it runs on.
        objective: ``time`` of the step, ``memory`` at its peak, or ``launches``.
        everything: apply every match, also if it does not pay or its gain is within the doubt.
        passes: names of the passes to try; empty: all.
        measure: times matches on this machine; the sign of the gain then decides.
        mutants: try the mutants of partial equality too.

    Raises:
        UserError: an unknown objective or pass.
    """
    objective = objective_named(objective)
    named = {row.name: row for row in PASSES}
    mutating = added(MUTANTS) if mutants or not set(passes) <= named.keys() else ()
    chosen = {pass_named(name, (*PASSES, *mutating)) for name in passes} or set(PASSES)
    chosen |= set(mutating if mutants else ())
    rounding = CUDA_ROUNDING_BYTES if device.runs_cuda else 1
    run = _Run(Prices(timer_for(flow, device), rounding), objective, everything, measure)
    before, steps = flow, list[Step]()
    for stage in (*STAGES[:UNFUSED], mutating, *STAGES[UNFUSED:]):
        rows = [row for row in stage if row in chosen and is_legal(row, flow, device, objective, everything)]
        for _ in range(1 if stage is mutating else ROUNDS):  # Mutation of mutants would not end.
            changed = False
            for row in rows:
                flow, found = run.one(flow, row, device.runs_cuda)
                steps += found
                changed |= any(step.applied for step in found)
            if not changed:
                break
    return Rewritten(before=before, after=flow, steps=merged(steps), prices=run.prices)


def is_legal(row: Pass, flow: Flow, device: Device, objective: Objective, everything: bool) -> bool:
    """True if a pass fits the mode, the device and the objective; passes that trade time for memory need memory."""
    if modes_of(flow) not in row.modes or (row.only_cuda and not device.runs_cuda):
        return False
    return not row.trades_memory or objective == "memory" or everything


class _Run:
    """State of one rewriting: constants, prices, and the rule that decides."""

    def __init__(self, prices: Prices, objective: Objective, everything: bool, measure: Measure | None) -> None:
        self.prices = prices
        self._folds = Folds()
        self._objective, self._everything, self._measure = objective, everything, measure

    def one(self, flow: Flow, row: Pass, on_cuda: bool) -> tuple[Flow, list[Step]]:
        """Try one pass: all its matches are in the same graph, and accepted ones are made together."""
        scene = Scene(flow=flow, folds=self._folds, on_cuda=on_cuda)
        groups = self._groups(flow, row.find(scene))
        if not groups:
            return flow, []
        whole = self.prices.sums(flow, flow.order)
        if row.trades_memory and self._objective == "memory":
            return self._traded(flow, row, groups, whole)
        steps = [self._tried(flow, row, members, whole) for members in groups]
        chosen = [members for members, step in zip(groups, steps, strict=True) if step.applied]
        made, done = self._made(flow, [each.match for members in chosen for each in members])
        if done == sum(map(len, chosen)):
            return made, steps
        return self._one_by_one(flow, groups, steps)

    def _traded(self, flow: Flow, row: Pass, groups: Sequence[list[_Priced]], whole: Sums) -> tuple[Flow, list[Step]]:
        """Make groups that lower the peak after chains are fused: one after another, or else all together."""
        steps = [replace(self._tried(flow, row, each, whole), applied=False, why="the peak stays") for each in groups]
        start = best = self._fused_peak_bytes(flow)
        now, made_matches = flow, list[Match]()
        for number, members in enumerate([*groups, [each for group in groups for each in group]]):
            if number == len(groups) and made_matches:
                break
            matches = [*made_matches, *(each.match for each in members)]
            made, done = self._made(flow, matches)
            peak = self._fused_peak_bytes(made) if done == len(matches) else best
            if peak >= best:
                continue
            change = {"applied": True, "why": f"the peak falls by {best - peak:,} bytes once chains are fused"}
            chosen = [number] if number < len(groups) else range(len(groups))
            for each in chosen:
                steps[each] = replace(steps[each], **change)  # type: ignore[arg-type]
            now, best, made_matches = made, peak, matches
        assert best <= start
        return now, steps

    def _fused_peak_bytes(self, flow: Flow) -> int:
        """Memory peak of a graph after its chains are fused."""
        scene = Scene(flow=flow, folds=self._folds, on_cuda=True)
        made, _ = self._made(flow, list(FUSION.find(scene)))
        return self.prices.peak_bytes(made)

    def _one_by_one(
        self, flow: Flow, groups: Sequence[list[_Priced]], steps: Sequence[Step]
    ) -> tuple[Flow, list[Step]]:
        """Make the first accepted group that can be made; the others are found again in the next round."""
        for number, (members, step) in enumerate(zip(groups, steps, strict=True)):
            if not step.applied:
                continue
            made, done = self._made(flow, [each.match for each in members])
            if done:
                change = step.change.times(done / len(members))
                return made, [replace(step, count=done, change=change)]
            steps = [*steps[:number], replace(step, applied=False, why=UNMADE), *steps[number + 1 :]]
        return flow, list(steps)

    def _groups(self, flow: Flow, matches: Iterable[Match]) -> list[list[_Priced]]:
        """Matches that do not overlap, in groups of equal ones."""
        found: dict[object, list[_Priced]] = defaultdict(list)
        touched: set[Node] = set()
        for match in matches:
            old, new = removed_and_added(flow, match.replace)
            nodes = {*old, *(value.node for value in match.replace)}
            if touched & nodes:
                continue
            touched |= nodes
            found[(kinds(old), kinds(new))].append(_Priced(match, old, new))
        return list(found.values())

    def _tried(self, flow: Flow, row: Pass, members: list[_Priced], whole: Sums) -> Step:
        """Price a group of equal matches by its first one, and decide on them."""
        first = members[0]
        old, new = self.prices.sums(flow, first.old), self.prices.sums(flow, first.new)
        change = self.prices.change(whole, old, new).times(len(members))
        measured = self._measure(flow, first.match) if self._measure is not None and not row.tidy else None
        step = Step(
            name=row.name,
            what=first.match.what,
            count=len(members),
            modules=tuple(dict.fromkeys(flow.block(each.match.root) for each in members)),
            applied=False,
            why="",
            change=change,
            fuses=row.fuses,
            reorders=row.reorders,
            tidy=row.tidy,
            measured_gain_s=None if measured is None else measured * len(members),
        )
        if self._objective == "memory" and not (row.tidy or row.trades_memory):
            made, done = self._made(flow, [each.match for each in members])
            if not done:
                return replace(step, why=UNMADE)
            peak = self.prices.peak_bytes(made) - self.prices.peak_bytes(flow)
            step = replace(step, change=replace(change, peak_bytes=float(peak)))
        applied, why = self._decided(row, step)
        return replace(step, applied=applied, why=why)

    def _made(self, flow: Flow, matches: Sequence[Match]) -> tuple[Flow, int]:
        """The graph with the matches replaced, and their number; if they need each other, half of them are dropped."""
        replacements: dict[Value, Value] = {}
        for match in matches:
            replacements |= match.replace
        if not replacements:
            return flow, 0
        try:
            return substituted(flow, replacements, self._folds.definitions), len(matches)
        except RefusedError:
            return (flow, 0) if len(matches) == 1 else self._made(flow, matches[: len(matches) // 2])

    def _decided(self, row: Pass, step: Step) -> tuple[bool, str]:
        change = step.change
        if row.tidy:
            return True, "changes no kernel"
        if self._everything:
            return True, "all rewrites were asked for"
        if step.measured_gain_s is not None:
            return step.measured_gain_s > 0, "as measured here"
        if self._objective == "memory" and change.peak_bytes:
            return change.peak_bytes < 0, f"the peak {'falls' if change.peak_bytes < 0 else 'rises'}"
        if self._objective == "launches" and change.launches:
            return change.launches < 0, f"{'fewer' if change.launches < 0 else 'more'} launches"
        if change.band_s[0] > 0:
            return True, CERTAIN
        if change.gain_s > 0:
            return False, "the gain is within the doubt"
        return False, "it costs time" if change.gain_s < 0 else "no difference"


@dataclass(frozen=True, slots=True)
class _Priced:
    match: Match
    old: list[Node]
    new: list[Node]


def kinds(nodes: Iterable[Node]) -> tuple[tuple[object, ...], ...]:
    """Key of the cost of nodes, independent of the values that they read."""
    rows = []
    for node in nodes:
        attributes = tuple(pair for pair in node.attributes if pair[0] not in ("draw", "again"))
        rows.append((node.op, node.outputs, tuple(value.type for value in node.inputs), attributes))
    return tuple(sorted(rows, key=repr))


def merged(steps: Iterable[Step]) -> tuple[Step, ...]:
    """Steps with equal name, shapes and decision as one row, by falling gain; repeated refusals count once."""
    rows: dict[tuple[str, str, bool], Step] = {}
    for step in steps:
        step = replace(step, what="", modules=()) if step.tidy else step
        key = (step.name, step.what, step.applied)
        known = rows.get(key)
        if known is None or not step.applied:
            rows[key] = step
            continue
        a, b = known.change, step.change
        total = Change(
            gain_s=a.gain_s + b.gain_s,
            band_s=(a.band_s[0] + b.band_s[0], a.band_s[1] + b.band_s[1]),
            device_s=a.device_s + b.device_s,
            host_s=a.host_s + b.host_s,
            launches=a.launches + b.launches,
            moved_bytes=a.moved_bytes + b.moved_bytes,
            flops=a.flops + b.flops,
            peak_bytes=a.peak_bytes + b.peak_bytes,
        )
        modules = tuple(dict.fromkeys(known.modules + step.modules))
        rows[key] = replace(known, count=known.count + step.count, change=total, modules=modules)
    done = {(name, what) for name, what, applied in rows if applied}
    kept = [step for (name, what, applied), step in rows.items() if applied or (name, what) not in done]
    return tuple(sorted(kept, key=lambda step: (not step.applied, -step.change.gain_s)))


def metrics(prices: Prices, flow: Flow) -> Mapping[str, float]:
    """Totals of a graph: time with its band, launches, traffic, operations, peak."""
    return graph_metrics(prices, flow, prices.table(flow))


def graph_metrics(prices: Prices, flow: Flow, table: CostTable) -> Mapping[str, float]:
    """Totals of a table of costs, with the memory peak and the number of operators of a graph."""
    totals = table.totals
    return {
        "step_time_s": totals.step_s,
        "low_s": totals.band_s[0],
        "high_s": totals.band_s[1],
        "device_s": totals.device_s,
        "host_s": totals.host_s,
        "launches": totals.launches,
        "moved_bytes": totals.moved_bytes,
        "flops": totals.executed_flops + totals.vector_flops,
        "peak_bytes": float(prices.peak_bytes(flow)),
        "operators": float(len(flow.order)),
    }
