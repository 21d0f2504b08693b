"""The search planner: which schedules are measured, in what order, and what is known of them from before."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from steptime.errors import UserError
from steptime.estimate.result import SCHEMA_VERSION
from steptime.measure.host import this_host
from steptime.num import Array
from steptime.store.files import unwritable
from steptime.store.journal import Journal, content_key
from steptime_lab.hierarchy.caches import processor
from steptime_lab.hierarchy.tune.history import Past, Request, Shape, file_of, header_of, past_of
from steptime_lab.hierarchy.tune.kernel import Product, private_folder, product_of, timed
from steptime_lab.hierarchy.tune.model import CostModel, Seen, learned
from steptime_lab.hierarchy.tune.prior import Predicted, predicted
from steptime_lab.hierarchy.tune.space import SLACK, Core, Schedule, check_shape, core_of, space, static_reasons

STRATEGIES: Final = ("model", "random", "grid")
BATCH: Final = 4
"""Schedules that are measured at a time; what a batch under way has measured is lost when the search is interrupted."""
LACKING: Final = "no {}: ranked by the closed form, half of each batch at random"
Progress = Callable[[str], None]
Measure = Callable[[Sequence[Schedule], float], list[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A schedule with its times."""

    schedule: Schedule
    predicted_s: float
    measured_s: float
    known: bool
    """From the history."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """What a search found."""

    shape: Shape
    processor: str
    strategy: str
    space: int
    left_out: dict[str, int]
    """Schedules that were not considered, by reason."""
    ranked: tuple[Tried, ...]
    """Those that were measured, the fastest first; without trials the best by prediction."""
    traffic_bytes: tuple[float, ...]
    """Of the best: bytes read into registers and into each cache."""
    ranking: str
    """What chose the schedules last: ``learned``, ``closed form``, or the strategy that is neither."""
    model_rows: int
    """Measurements from which the cost model learned."""
    history: str = ""
    earlier_history: str = ""
    """The history that a fresh one has set aside."""
    resumed: int = 0
    """Measurements of an interrupted run with which this one went on; they count as trials."""
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Tried:
        """The fastest."""
        return self.ranked[0]

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``."""

        def row(each: Tried) -> dict[str, Any]:
            measured = None if math.isinf(each.measured_s) else each.measured_s
            return {
                "schedule": each.schedule.to_json(),
                "predicted_s": each.predicted_s,
                "measured_s": measured,
                "known": each.known,
            }

        return {
            "schema_version": SCHEMA_VERSION,
            "shape": list(self.shape),
            "processor": self.processor,
            "strategy": self.strategy,
            "space": self.space,
            "left_out": dict(self.left_out),
            "ranked": [row(each) for each in self.ranked],
            "traffic_bytes": list(self.traffic_bytes),
            "ranking": self.ranking,
            "model_rows": self.model_rows,
            "history": self.history,
            "earlier_history": self.earlier_history or None,
            "resumed": self.resumed,
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Schedules that a search considers, with their prices."""

    found: Predicted
    left_out: dict[str, int]


def candidates(shape: Shape, core: Core, *, prune: bool = True) -> Candidates:
    """Every schedule of the space but those that cannot be best.

    ``registers`` and ``same`` as :func:`steptime_lab.hierarchy.tune.space.static_reasons`; ``predicted``: the closed
    form is above the best one by more than it is wrong.
    """
    every = space()
    reasons = static_reasons(shape, core, every)
    kept = [one for one, reason in zip(every, reasons, strict=True) if reason is None]
    left_out = {name: reasons.count(name) for name in ("registers", "same")}
    found = predicted(shape, core, kept)
    if prune:
        limit = SLACK * found.cycles.min()
        few = [one for one, cycles in zip(kept, found.cycles, strict=True) if cycles <= limit]
        left_out["predicted"] = len(kept) - len(few)
        found = predicted(shape, core, few)
    return Candidates(found=found, left_out=left_out)


def searched(
    found: Predicted, request: Request, measure: Measure, *, past: Past | None = None, progress: Progress | None = None
) -> tuple[dict[Schedule, float], CostModel]:
    """Measure some schedules, each strategy in its order, and return all times of the product.

    A request that was interrupted and goes on measures as many schedules in all as one that was not.

    Args:
        found: the schedules.
        request: how many are measured, and the strategy: ``model`` (by the cost model, which learns after each batch),
            ``random``, or ``grid`` (at equal distances). Its seed is of all random draws: of ``random``; with ``model``
            of half of each batch, rounded down, until there are :data:`steptime_lab.hierarchy.tune.model.LEAST`
            measurements, those of other products included, and throughout without scikit-learn.
        measure: seconds of some schedules, given the best known time.
        past: what is known from before.
        progress: is told of each batch.
    """
    past = past or Past()
    times, learns = past.times, request.strategy == "model"
    model = learned([*past.seen, *_seen(found, times)]) if learns else CostModel()
    left = min(request.trials - len(past.own), sum(one not in times for one in found.schedules))
    while left > 0:
        order = _by_model(found, request, times, model, min(BATCH, left)) if learns else _drawn(found, request, past)
        untimed = [one for one in (found.schedules[place] for place in dict.fromkeys(order)) if one not in times]
        batch = untimed[: min(BATCH, left)]
        for one, seconds in zip(batch, measure(batch, min(times.values(), default=math.inf)), strict=True):
            times[one] = seconds
        left -= len(batch)
        if learns and left > 0:
            model = learned([*past.seen, *_seen(found, times)])
        if progress is not None:
            progress(f"{len(times)} schedules, best {1e3 * min(times.values()):.3f} ms")
    return times, model


def _drawn(found: Predicted, request: Request, past: Past) -> list[int]:
    """Places in the order of ``random`` or ``grid``: the same whether or not the run was interrupted."""
    rest = [place for place, one in enumerate(found.schedules) if one not in past.known]
    if request.strategy == "grid":
        count = min(request.trials, len(rest))
        first = [rest[at] for at in np.linspace(0, len(rest) - 1, count).round().astype(int)]
        return [*first, *rest]
    order = np.random.default_rng(request.seed).permutation(len(found.schedules))
    return [int(place) for place in order if found.schedules[place] not in past.known]


def _by_model(
    found: Predicted, request: Request, times: dict[Schedule, float], model: CostModel, count: int
) -> list[int]:
    scores = model.scores(found)
    order = sorted(
        (place for place, one in enumerate(found.schedules) if one not in times), key=lambda place: scores[place]
    )
    if model.trees is None:  # nothing is learned yet: every second one is drawn, for the model to learn from
        drawn = np.random.default_rng(request.seed + len(times)).permutation(order[count:])
        return [*order[: count - count // 2], *map(int, drawn[: count // 2]), *order]
    return order


def _seen(found: Predicted, times: dict[Schedule, float]) -> list[Seen]:
    places = [place for place, one in enumerate(found.schedules) if math.isfinite(times.get(one, math.inf))]
    if not places:
        return []
    seconds: Array = np.array([times[found.schedules[place]] for place in places])
    return [Seen(features=found.features[places], cycles=found.cycles[places], seconds=seconds)]


def tune(
    shape: Shape,
    *,
    name: str = "machine",
    trials: int = 16,
    strategy: str = "model",
    seed: int = 0,
    folder: Path,
    fresh: bool = False,
    progress: Progress | None = None,
) -> Tuned:
    """The fastest schedule of a product on this machine.

    Args:
        shape: rows and columns of the result, depth.
        name: caches of the processor, of ``steptime cache list``, or ``machine``.
        trials: schedules that are measured, in addition to those of earlier runs that ended; those of an interrupted
            run with the same shape, trials, strategy and seed count. 0: predictions alone.
        strategy: ``model``, ``random`` or ``grid``.
        seed: of all random draws: of ``random``; with ``model`` of half of each batch until there are 8 measurements.
        folder: the history of measurements: of this product they count as they are, of others for the cost model.
            Compiled kernels are in :func:`~steptime_lab.hierarchy.tune.kernel.private_folder`.
        fresh: an empty history; earlier ones stay where they are.
        progress: is told of each batch.

    Raises:
        UserError: a size, the strategy or the number of trials is wrong, there is no gcc, or the folder cannot be
            written.
    """
    check_shape(shape)
    if strategy not in STRATEGIES:
        raise UserError(f"there is no strategy {strategy!r}", hint=", ".join(STRATEGIES))
    request, core = Request(shape=shape, trials=trials, strategy=strategy, seed=seed), core_of(processor(name))
    given, told = candidates(shape, core), progress or (lambda _: None)
    if not trials:
        return _answer(request, name, given, Past(), {}, CostModel())
    host = this_host()
    header = header_of(name, core, host)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path, earlier = file_of(folder, header, host, fresh)
    except OSError as error:
        raise unwritable(folder, error) from None
    product = product_of(shape, core, private_folder())
    with Journal(path, header, resume=True) as journal:
        past = past_of(journal.records, request, core)
        if earlier is not None:
            past = replace(past, notes=(f"a new history; the earlier one stays in {earlier}", *past.notes))
        for note in past.notes:
            told(note)
        times, model = _measured(product, journal, given.found, request, past, told)
    answer = _answer(request, name, given, past, times, model)
    return replace(answer, history=str(path), earlier_history=str(earlier or ""))


def _measured(
    product: Product, journal: Journal, found: Predicted, request: Request, past: Past, progress: Progress
) -> tuple[dict[Schedule, float], CostModel]:
    """A search whose beginning, measurements and end are in the journal."""
    run = past.run
    if not run:
        begin = {"run": request.to_json(), "after": len(journal.records)}
        run = content_key(begin)
        journal.append({"key": run, **begin})

    def measure(batch: Sequence[Schedule], best_s: float) -> list[float]:
        seconds = timed([product.runner(one) for one in batch], best_s=best_s)
        for one, each in zip(batch, seconds, strict=True):
            row = {"of_run": run, "shape": list(request.shape), "schedule": one.to_json(), "seconds": each}
            journal.append({"key": content_key(row), **row})
        return seconds

    try:
        done = searched(found, request, measure, past=past, progress=progress)
    except KeyboardInterrupt:
        kept = sum(record.get("of_run") == run for record in journal.records)
        progress(f"{kept} of {request.trials} trials are in {journal.path}; run again, without --fresh, to go on")
        raise
    journal.append({"key": content_key({"ended": run}), "ended": run})
    return done


def _answer(
    request: Request,
    name: str,
    given: Candidates,
    past: Past,
    times: dict[Schedule, float],
    model: CostModel,
) -> Tuned:
    found, clock_Hz = given.found, core_of(processor(name)).rates.clock_Hz
    scores = model.scores(found)
    place = {one: n for n, one in enumerate(found.schedules)}
    order = sorted(place, key=lambda one: (times.get(one, math.inf), scores[place[one]]))
    shown = [one for one in order if one in times] or order[:8]
    ranked = tuple(
        Tried(
            schedule=one,
            predicted_s=float(found.cycles[place[one]]) / clock_Hz,
            measured_s=times.get(one, math.inf),
            known=one in past.times,
        )
        for one in shown
    )
    best = place[ranked[0].schedule]
    by_model = request.strategy == "model" or not request.trials
    return Tuned(
        shape=request.shape,
        processor=name,
        strategy=request.strategy,
        space=len(space()),
        left_out=given.left_out,
        ranked=ranked,
        traffic_bytes=tuple(found.traffic_bytes[best].tolist()),
        ranking=model.ranking if by_model else request.strategy,
        model_rows=model.rows,
        resumed=len(past.own),
        notes=(*past.notes, LACKING.format(model.lacking)) if model.lacking else past.notes,
    )
