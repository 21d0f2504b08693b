"""The search planner: chooses the schedules to measure and their order, with the history of measurements."""

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
"""Schedules that are measured at a time; an interruption loses the measurements of the current batch."""
NOT_LEARNED: Final = "no {}: ranked by the closed form, half of each batch at random"
Progress = Callable[[str], None]
Measure = Callable[[Sequence[Schedule], float], list[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A schedule with its times."""

    schedule: Schedule
    predicted_s: float
    measured_s: float
    known: bool
    """Whether the measured time comes from the history."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """Result of a search."""

    shape: Shape
    processor: str
    strategy: str
    space: int
    left_out: dict[str, int]
    """Schedules that were not considered, by reason."""
    ranked: tuple[Tried, ...]
    """Measured schedules, the fastest first; without trials the best by prediction."""
    traffic_bytes: tuple[float, ...]
    """Bytes that the best schedule reads into registers and into each cache."""
    ranking: str
    """Ranking that chose the last schedules: ``learned``, ``closed form``, ``random`` or ``grid``."""
    model_rows: int
    """Measurements from which the cost model learned."""
    history: str = ""
    earlier_history: str = ""
    """The earlier history that a fresh one replaces."""
    resumed: int = 0
    """Measurements of an interrupted run that this one resumed; they count as trials."""
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Tried:
        """The fastest schedule."""
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
    """Schedules that a search considers, with their predicted cost."""

    found: Predicted
    left_out: dict[str, int]


def candidates(shape: Shape, core: Core, *, prune: bool = True) -> Candidates:
    """Every schedule of the space except those that cannot be best.

    Reasons for leaving a schedule out: ``registers`` and ``same`` of
    :func:`steptime_lab.hierarchy.tune.space.static_reasons`; ``predicted``: its predicted cycles are more than `SLACK`
    times the fewest.
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
    """Measure schedules in the order of a strategy; returns all times of the product and the cost model.

    A resumed request measures as many schedules in all as one that was not interrupted.

    Args:
        found: the schedules.
        request: number of trials, strategy and seed. Strategies are ``model`` (by the cost model, which learns after
            each batch), ``random``, and ``grid`` (at equal distances). The seed determines the draws of ``random``, and
            with ``model`` half of each batch, rounded down, until there are
            :data:`steptime_lab.hierarchy.tune.model.LEAST` measurements, other products included; without
            scikit-learn, half of every batch.
        measure: seconds of some schedules, given the best known time.
        past: measurements known before.
        progress: called with a line after each batch.
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
    """Indices in the order of ``random`` or ``grid``, which an interruption does not change."""
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
    if model.trees is None:  # nothing is learned yet: half of the batch is random, for the model to learn from
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
        name: processor whose caches are used: a name of ``steptime cache list``, or ``machine``.
        trials: number of schedules to measure, in addition to those of earlier runs that ended; those of an interrupted
            run with the same shape, trials, strategy and seed count. 0: predictions alone.
        strategy: ``model``, ``random`` or ``grid``.
        seed: seed of the random draws: of ``random``; with ``model`` of half of each batch until there are 8
            measurements.
        folder: folder of the history of measurements. Times of this product are used directly, those of other products
            by the cost model. Compiled kernels are in
            :func:`~steptime_lab.hierarchy.tune.kernel.private_folder`.
        fresh: whether to start an empty history; earlier ones stay in their files.
        progress: called with a line after each batch.

    Raises:
        UserError: a size, the strategy or the number of trials is wrong, there is no gcc, or the folder cannot be
            written.
    """
    check_shape(shape)
    if strategy not in STRATEGIES:
        raise UserError(f"there is no strategy {strategy!r}", hint=", ".join(STRATEGIES))
    request, core = Request(shape=shape, trials=trials, strategy=strategy, seed=seed), core_of(processor(name))
    given, report = candidates(shape, core), progress or (lambda _: None)
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
            report(note)
        times, model = _measured(product, journal, given.found, request, past, report)
    answer = _answer(request, name, given, past, times, model)
    return replace(answer, history=str(path), earlier_history=str(earlier or ""))


def _measured(
    product: Product, journal: Journal, found: Predicted, request: Request, past: Past, progress: Progress
) -> tuple[dict[Schedule, float], CostModel]:
    """Search, and record the beginning, the measurements and the end of the run in the journal."""
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
        notes=(*past.notes, NOT_LEARNED.format(model.missing_package)) if model.missing_package else past.notes,
    )
