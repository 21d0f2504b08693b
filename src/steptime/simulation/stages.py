"""A simulated step with another split of the layers over the stages: the best one found, or a given layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Final

import numpy as np

from steptime.api.request import NameOrPath
from steptime.errors import PlanError, UserError, counted, shorten
from steptime.estimate.evaluate import Evaluation, works_of
from steptime.estimate.layer import part_times
from steptime.estimate.memory import Stage, held_calls, kept_of_layer, phase_calls, total_bytes
from steptime.estimate.sizes import Part, part_of
from steptime.estimate.step import exposed_pass, overlapped_exchanges
from steptime.estimate.work import Pass, pass_of
from steptime.num import Array
from steptime.plan.rows import Row
from steptime.schedule.actions import Kind
from steptime.simulation.graph import ActionGraph
from steptime.simulation.layout import check_layout, parse_layout
from steptime.simulation.memory import Footprint, memory_replay
from steptime.simulation.partition import Counts, Items, Ranks, SplitTask, best_split, candidates, fastest, task_of
from steptime.simulation.run import Observed, Pace, SimulatedStep, StageChoice, Staged, simulate
from steptime.simulation.simulate import simulate as play
from steptime.units import parse

TRIES: Final = 160
"""Largest number of neighbours of candidates that are simulated."""
ACTIONS: Final = 4_000_000
"""Largest number of actions simulated in all tries together, without those of the candidates."""
ROUNDING: Final = 1e-6
OF_RANKS: Final = {"--rank-speeds": (1e3, "1*2,0.5*2"), "--rank-memory": (1e18, "80GiB*2,40GiB*2")}
"""Largest number in a list (its inverse is the smallest), and an example of the list."""
PREDICTED: Final = "mtp_"
"""Prefix of the names of rows for multi-token prediction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelItems:
    """Items of a model for a split, and further memory of a device."""

    items: Items
    weights_bytes: Array
    """One version of the weights, which the states include."""
    fixed_bytes: float
    """Temporaries and buffers of a device."""


def simulate_stages(
    model: NameOrPath,
    cluster: NameOrPath,
    *,
    balance: bool = False,
    layout: str | None = None,
    rank_speeds: str | Sequence[float] | None = None,
    rank_memory: str | Sequence[float] | None = None,
    plan: Mapping[str, Any] | None = None,
    **further: Any,
) -> SimulatedStep:
    """Simulates one step with a split of the layers over the stages.

    Args:
        balance: find the split that fits into the memory and has the fastest simulated step.
        layout: the split as Megatron-Core writes it (:func:`steptime.simulation.layout.parse_layout`); ``vpp`` follows
            from it.
        rank_speeds: relative speed of each rank, for devices that differ: 0.5 takes twice as long for a pass.
        rank_memory: memory of each rank in bytes, or as text such as ``80GiB*8,40GiB*8``.
        plan: as for an estimate; without a schedule 1F1B, interleaved where ``vpp`` is more than 1.
        further: the other arguments of :func:`steptime.simulation.run.simulate`.

    Raises:
        UserError: something in the input is wrong, or no split fits; the message says what to change.
    """
    given = dict(plan or {})
    if balance and layout is not None:
        raise UserError("--balance finds the layout, and --layout gives it", hint="give one of the two")
    letters = None
    if layout is not None:
        letters, ranks = parse_layout(layout), given.get("pp", 1)
        if len(letters) % ranks == 0 and len(letters) > ranks:
            given.setdefault("vpp", len(letters) // ranks)
    schedule = given.get("schedule") or ("interleaved" if given.get("vpp", 1) > 1 else "1f1b")
    speeds = _by_rank("--rank-speeds", rank_speeds, float)
    memory = _by_rank("--rank-memory", rank_memory, lambda text: parse(text, "bytes"))
    choice = None
    if balance or letters is not None or speeds is not None or memory is not None:
        choice = _choice(balance, layout, letters, speeds, memory)
    observed = replace(further.pop("observed", Observed()), stages=choice)
    if choice is not None and observed.stage_times is not None:
        raise UserError(
            "measured times are of the stages that ran, on the ranks that ran them",
            hint="leave out --stage-times, or --balance, --layout, --rank-speeds and --rank-memory",
        )
    return simulate(model, cluster, schedule=schedule, plan=given, observed=observed, **further)


def _by_rank(option: str, given: str | Sequence[float] | None, read: Callable[[str], float]) -> Array | None:
    """A number for each rank, from text such as ``1*2,0.5*2``.

    Raises:
        UserError: something in the list is no positive number, or beyond what the option allows.
    """
    if given is None:
        return None
    highest, example = OF_RANKS[option]
    if not isinstance(given, str):
        given, read = ",".join(map(str, given)), float
    found: list[float] = []
    for part in given.split(","):
        text, _, times = part.partition("*")
        try:
            value, count = read(text.strip()), int(times or "1")
        except ValueError:
            value, count = -1.0, 1
        if not 0 < value < inf or not 1 <= count <= 65_536:
            raise UserError(f"{option}: {shorten(part, 40)!r} is no positive number", hint=f"for example {example}")
        if not 1 / highest <= value <= highest:
            raise UserError(f"{option}: {shorten(part, 40)!r} is beyond all devices", hint=f"for example {example}")
        found += [value] * count
    return np.array(found)


def _choice(
    balance: bool, layout: str | None, letters: tuple[str, ...] | None, speeds: Array | None, memory: Array | None
) -> StageChoice:
    """Function that replaces the stages of the estimate by those of the options."""

    def chosen(e: Evaluation, graph: ActionGraph, even: Staged, pace_s: Pace) -> Staged:
        ranks, stages = graph.table.ranks, graph.table.stages
        rank, found = _rank_of_stages(graph), items_of(e)
        own = _ranks(e, graph, even, found, speeds, memory)
        slowed = replace(own, speed=own.speed / np.broadcast_to(even.durations.slowdown, (ranks,)))
        task = task_of(found.items, slowed, rank)
        if letters is not None and layout is not None:
            check_layout(layout, letters, ranks, int(e.job.model.layers), int(e.job.model.mtp_depth))
            if len(letters) != stages:
                raise PlanError(
                    f"layout {layout!r} has {counted(len(letters), 'stage')}; the plan has {stages} ({ranks} ranks)",
                    hint=f"give --vpp {len(letters) // ranks}, or drop --vpp and --schedule",
                )

        def staged(counts: Sequence[int]) -> Staged:
            return _staged(even, found, own, rank, counts)

        usual = tuple(len(each) for each in even.layout)
        if letters is not None:
            counts = tuple(len(each) for each in letters)
        elif balance:
            counts = _balanced(task, usual, graph, staged, pace_s)
        else:
            counts = usual
        own_even = staged(usual)
        return replace(
            staged(counts),
            even_s=pace_s(own_even.durations),
            even_layout=even.layout,
            even_fits=not _shortage(graph, own_even),
        )

    return chosen


def _balanced(
    task: SplitTask, usual: Counts, graph: ActionGraph, staged: Callable[[Sequence[int]], Staged], pace_s: Pace
) -> Counts:
    """The split with the fastest simulated step whose simulated memory fits."""

    def shortage_of(counts: Counts) -> float:
        return _shortage(graph, staged(counts))

    def seconds_of(counts: Counts) -> float:
        return pace_s(staged(counts).durations)

    tries = min(TRIES, ACTIONS // graph.size)
    fitting = candidates(task, fits=lambda counts: not shortage_of(counts))
    starts = [best_split(task).counts, *fitting, usual]
    return fastest(task, starts, seconds_of, shortage_of, tries)


def _shortage(graph: ActionGraph, staged: Staged) -> float:
    """Largest memory shortage of a rank in the simulated step, as a share of its memory; 0: all ranks fit."""
    peak = memory_replay(play(graph, staged.durations), staged.footprint).peak_bytes
    share = float((peak / np.asarray(staged.capacity_bytes) - 1).max())
    return share if share > ROUNDING else 0.0


def _rank_of_stages(graph: ActionGraph) -> Array:
    """Rank of each stage.

    Raises:
        PlanError: stages are on two ranks.
    """
    table = graph.table
    passes = table.kind == Kind.FORWARD
    places = np.unique(table.stage[passes] * table.ranks + table.rank[passes])
    if len(places) != table.stages:
        raise PlanError(
            "the schedule has each stage on two ranks: a layout is for schedules with each stage on one",
            hint="give --schedule 1f1b, interleaved, zb-h1, zb-v or another with one copy of the model",
        )
    return places % table.ranks


def _ranks(
    e: Evaluation, graph: ActionGraph, even: Staged, found: ModelItems, speeds: Array | None, memory: Array | None
) -> Ranks:
    """The devices of each rank.

    Raises:
        PlanError: a list has another number of ranks.
    """
    ranks, chunks = graph.table.ranks, graph.table.stages // graph.table.ranks
    for option, given in (("--rank-speeds", speeds), ("--rank-memory", memory)):
        if given is not None and len(given) != ranks:
            raise PlanError(f"{option} has {counted(len(given), 'value')}; --pp is {ranks}", hint="give one per rank")
    played, stages, count = play(graph, even.durations), graph.table.stages, len(found.items.letters)
    shares = [np.full(stages, 1.0 / chunks), np.eye(stages)[0], np.eye(stages)[-1]]
    # a stage keeps its share of a micro-batch until the weight gradients are computed
    of_layers, of_first, of_last = (
        memory_replay(played, Footprint(activation_bytes=each, deferred_bytes=each)).peak_bytes for each in shares
    )
    in_flight = np.repeat(of_layers[:, None], count, axis=1)
    in_flight[:, 0], in_flight[:, 1 + int(e.job.model.layers) :] = of_first, of_last[:, None]
    return Ranks(
        speed=np.ones(ranks) if speeds is None else speeds,
        memory_bytes=np.full(ranks, float(e.machine.memory_bytes)) if memory is None else memory,
        fixed_bytes=np.full(ranks, found.fixed_bytes),
        in_flight=in_flight,
    )


def _staged(even: Staged, found: ModelItems, own: Ranks, rank: Array, counts: Sequence[int]) -> Staged:
    """Stages with `counts` items of the model each."""
    items, ends = found.items, np.cumsum(counts)
    starts, chunks = ends - np.asarray(counts), len(rank) / len(own.speed)

    def of_stages(values: Array) -> Array:
        sums = np.concatenate([[0.0], np.cumsum(values)])
        return np.asarray(sums[ends] - sums[starts])

    letters = tuple("".join(items.letters[a:b]) for a, b in zip(starts, ends, strict=True))
    speed, kept = own.speed[rank], of_stages(items.activation_bytes)
    weights = of_stages(found.weights_bytes)
    return replace(
        even,
        layers=np.array([each.count("t") for each in letters], float),
        durations=replace(
            even.durations,
            forward_s=of_stages(items.forward_s) / speed,
            input_gradient_s=of_stages(items.input_gradient_s) / speed,
            weight_gradient_s=of_stages(items.weight_gradient_s) / speed,
        ),
        footprint=replace(
            even.footprint,
            activation_bytes=kept,
            deferred_bytes=kept,
            weights_bytes=weights,
            fixed_bytes=of_stages(items.state_bytes) - weights + own.fixed_bytes[rank] / chunks,
        ),
        layout=letters,
        capacity_bytes=own.memory_bytes,
    )


# -- items of a model -------------------------------------------------------------------------------------------------


def items_of(e: Evaluation) -> ModelItems:
    """Items of an evaluated model: embedding, layers, multi-token-prediction layers, and head.

    The first layers of some models have no experts and are shorter. The products and the loss of the head for further
    tokens belong to the head.
    """
    layers, depth = int(e.job.model.layers), int(e.job.model.mtp_depth)
    is_next = [row.name.startswith(PREDICTED) and row.block != "head" for row in e.block.last]
    predicted = [row for row, each in zip(e.block.last, is_next, strict=True) if each]
    head = [row for row, each in zip(e.block.last, is_next, strict=True) if not each]
    again = float(e.inputs.recomputed)
    kinds = [_end(e, "E", e.block.first), *_layers(e, again), *[_end(e, "m", predicted)] * depth, _end(e, "L", head)]
    shares = np.array([1] * (1 + layers) + [depth] * depth + [1])
    columns = {
        name: np.array([getattr(each, name) for each in kinds]) / shares
        for name in ("forward_s", "input_gradient_s", "weight_gradient_s", "state_bytes", "activation_bytes")
    }
    weights = np.array([each.weights_bytes for each in kinds]) / shares
    letters = "E" + "t" * layers + "m" * depth + "L"
    working, loss = (_working(e, phase) for phase in ("backward", "loss"))
    columns["state_bytes"][-1] += max(loss - working, 0.0)
    buffers = total_bytes(_held(e, e.sizes.last, 2.0, 0.0, 0.0, 0.0, buffers=True))
    return ModelItems(
        items=Items(letters=tuple(letters), **columns), weights_bytes=weights, fixed_bytes=working + float(buffers)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """One item."""

    forward_s: float
    input_gradient_s: float
    weight_gradient_s: float
    state_bytes: float
    weights_bytes: float
    activation_bytes: float


def _pass(e: Evaluation, rows: Sequence[Row]) -> Pass:
    """Passes of some rows for one micro-batch."""
    times = part_times(replace(e.block, layer=tuple(rows), first=(), last=()), e.plans, e.machine)["layer"]
    return pass_of(works_of({"layer": times}, e.job, e.plans)["layer"], e.job.framework)


def _kind(found: Pass, again: float, kept_bytes: float, held: Mapping[str, Any]) -> _Kind:
    backward_s, weights_s = float(found.backward_with_s(again)), float(found.weights_s)
    own = {path: float(call.value) for path, call in held.items()}
    return _Kind(
        forward_s=float(found.forward_s),
        input_gradient_s=backward_s - weights_s,
        weight_gradient_s=weights_s,
        state_bytes=sum(own.values()),
        weights_bytes=sum(value for path, value in own.items() if path.split("/")[0].endswith("weights")),
        activation_bytes=kept_bytes,
    )


def _end(e: Evaluation, letter: str, rows: Sequence[Row]) -> _Kind:
    """The item before or after the layers."""
    part = part_of(rows)
    held = _held(e, part, 0.0, 0.0, float(letter == "E"), float(letter != "E"))
    return _kind(_pass(e, rows), 0.0, float(part.kept_bytes), held)


def _layers(e: Evaluation, again: float) -> list[_Kind]:
    """The layers in order: leading layers without experts and then the others, or each layer by its kind."""
    model, ahead = e.job.model, int(e.sizes.leading)
    if model.kinds:
        block = e.strategy.block(e.job, replace(e.plans, pp=1, vpp=1))
        alone = {
            kind.name: [
                replace(r, share=r.share * model.layers / kind.layers) for r in block.layer if r.kind == kind.name
            ]
            for kind in model.kinds
        }
        of_kind = {
            name: _layer(replace(e, sizes=replace(e.sizes, layer=part_of(rows))), rows, 0.0, again)
            for name, rows in alone.items()
        }
        return [of_kind[name] for name in model.pattern]
    rows = e.block.layer
    kinds = [(rows, 0.0)] * 2
    if ahead:
        dense = [replace(row, share=1.0 if row.block == "mlp" else row.share) for row in rows if row.block != "experts"]
        later = [
            replace(row, share=1.0 if row.block == "experts" else row.share)
            for row in rows
            if row.block != "mlp" or (isinstance(row.share, float) and row.share == 1.0)
        ]
        kinds = [(tuple(dense), 1.0), (tuple(later), 0.0)]
    leading, other = (_layer(e, own, of_first, again) for own, of_first in kinds)
    return [leading] * ahead + [other] * (model.layers - ahead)


def _layer(e: Evaluation, rows: Sequence[Row], ahead: float, again: float) -> _Kind:
    """A layer of these rows."""
    whole = _pass(e, rows)
    exposed = exposed_pass(whole, overlapped_exchanges(e.inputs.paired, whole))
    kept = kept_of_layer(part_of(rows).kept_bytes, e.sizes.boundary_bytes, e.plans)
    return _kind(exposed, again, float(kept), _held(e, e.sizes.last, 1.0, ahead, 0.0, 0.0))


def _stage(layers: float, ahead: float, first: float, last: float) -> Stage:
    return Stage(name="middle", exists=1.0, layers=layers, ahead=ahead, first=first, last=last, in_flight=1.0)


def _held(
    e: Evaluation, end: Part, layers: float, ahead: float, first: float, last: float, *, buffers: bool = False
) -> dict[str, Any]:
    """Terms of the memory that a stage with these parts holds throughout: its states, or its buffers."""
    sizes = replace(e.sizes, first=end, last=end)
    found = held_calls(replace(e, sizes=sizes), _stage(layers, ahead, first, last))
    return {path: call for path, call in found.items() if path.startswith("buffers/") == buffers}


def _working(e: Evaluation, phase: str) -> float:
    """Temporaries of a stage with layers and head in a phase."""
    found = phase_calls(e, _stage(2.0, 0.0, 0.0, 1.0 if phase == "loss" else 0.0), phase)
    return float(total_bytes({path: call for path, call in found.items() if path.startswith("working/")}))
