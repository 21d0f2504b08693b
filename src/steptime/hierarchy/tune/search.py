"""The search planner: which schedules are measured, in what order, and what is known of them from before."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from steptime.errors import UserError
from steptime.estimate.result import SCHEMA_VERSION
from steptime.hardware.caches import processor
from steptime.hierarchy.tune.kernel import SOURCE, product_of, timed
from steptime.hierarchy.tune.model import CostModel, Seen, learned
from steptime.hierarchy.tune.prior import Predicted, predicted
from steptime.hierarchy.tune.space import SLACK, Core, Schedule, check_shape, core_of, space, static_reasons
from steptime.num import Array
from steptime.store.files import unwritable
from steptime.store.journal import Journal, content_key

Shape = tuple[int, int, int]
STRATEGIES: Final = ("model", "random", "grid")
BATCH: Final = 4
"""Schedules that are measured before the model learns of them."""
Progress = Callable[[str], None]
Measure = Callable[[Sequence[Schedule], float], list[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A schedule with its times."""

    schedule: Schedule
    predicted_s: float
    measured_s: float
    known: bool
    """From a measurement before this search."""


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
    model_rows: int
    """Measurements from which the cost model learned."""
    history: str

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
            "model_rows": self.model_rows,
            "history": self.history,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Schedules that a search considers, with their prices."""

    found: Predicted
    left_out: dict[str, int]


def candidates(shape: Shape, core: Core, *, prune: bool = True) -> Candidates:
    """Every schedule of the space but those that cannot be best.

    ``registers`` and ``same`` as :func:`steptime.hierarchy.tune.space.static_reasons`; ``predicted``: the closed form
    is above the best one by more than it is wrong.
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
    found: Predicted,
    trials: int,
    measure: Measure,
    *,
    strategy: str = "model",
    seed: int = 0,
    seen: Sequence[Seen] = (),
    known: dict[Schedule, float] | None = None,
    progress: Progress | None = None,
) -> tuple[dict[Schedule, float], CostModel]:
    """Measure some schedules, each strategy in its order.

    Args:
        found: the schedules.
        trials: how many are measured.
        measure: seconds of some schedules, given the best known time.
        strategy: ``model`` (by the cost model, which learns after each few), ``random``, or ``grid`` (at equal
            distances).
        seed: of ``random``.
        seen: measurements of other products, from which the cost model learns.
        known: seconds of schedules of this product from before.
        progress: is told of each few.
    """
    times = dict(known or {})
    model = learned([*seen, *_seen(found, times)]) if strategy == "model" else CostModel()
    left = min(trials, len(found.schedules) - sum(one in times for one in found.schedules))
    while left > 0:
        batch = _next(found, times, model, strategy, seed, min(BATCH, left) if strategy == "model" else left)
        for one, seconds in zip(batch, measure(batch, min(times.values(), default=math.inf)), strict=True):
            times[one] = seconds
        left -= len(batch)
        if strategy == "model" and left > 0:
            model = learned([*seen, *_seen(found, times)])
        if progress is not None:
            progress(f"{len(times)} schedules, best {1e3 * min(times.values()):.3f} ms")
    return times, model


def _next(
    found: Predicted, times: dict[Schedule, float], model: CostModel, strategy: str, seed: int, count: int
) -> list[Schedule]:
    rest = [place for place, one in enumerate(found.schedules) if one not in times]
    if strategy == "random":
        order = np.random.default_rng(seed).permutation(rest)
    elif strategy == "grid":
        order = np.array(rest)[np.unique(np.linspace(0, len(rest) - 1, count).round().astype(int))]
    else:
        scores = model.scores(found)
        order = np.array(sorted(rest, key=lambda place: scores[place]))
        if model.trees is None:  # nothing is learned yet: every second one is drawn, for the model to learn from
            drawn = np.random.default_rng(seed + len(times)).permutation(order[count:])
            order = np.array([*order[: count - count // 2], *drawn[: count // 2], *order])
    return [found.schedules[int(place)] for place in order[:count]]


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
    reuse: bool = True,
    progress: Progress | None = None,
) -> Tuned:
    """The fastest schedule of a product on this machine.

    Args:
        shape: rows and columns of the result, depth.
        name: caches of the processor, of ``steptime cache list``, or ``machine``.
        trials: schedules that are measured; 0: predictions alone.
        strategy: ``model``, ``random`` or ``grid``.
        seed: of ``random``.
        folder: compiled kernels, and the history of measurements.
        reuse: earlier measurements count: of this product as they are, of others for the cost model.
        progress: is told of each few.

    Raises:
        UserError: a size, the strategy or the number of trials is wrong, there is no gcc, or the folder cannot be
            written.
    """
    check_shape(shape)
    if strategy not in STRATEGIES:
        raise UserError(f"there is no strategy {strategy!r}", hint=", ".join(STRATEGIES))
    core = core_of(processor(name))
    given = candidates(shape, core)
    if not trials:
        return _answer(shape, name, strategy, given, {}, CostModel(), "", {})
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(folder, error) from None
    path = folder / f"history-{name}.jsonl"
    header = {"of": "products", "processor": name, "kernel": content_key({"c": SOURCE.read_text(encoding="utf-8")})}
    product = product_of(shape, core, folder)
    with Journal(path, header, resume=path.exists()) as history:
        known, seen = _history(history.records, shape, core) if reuse else ({}, [])

        def measure(batch: Sequence[Schedule], best_s: float) -> list[float]:
            seconds = timed([product.runner(one) for one in batch], best_s=best_s)
            for one, each in zip(batch, seconds, strict=True):
                row = {"shape": list(shape), "schedule": one.to_json(), "seconds": each}
                history.append({"key": content_key(row), **row})
            return seconds

        times, model = searched(
            given.found, trials, measure, strategy=strategy, seed=seed, seen=seen, known=known, progress=progress
        )
    return _answer(shape, name, strategy, given, times, model, str(path), known)


def _history(records: Sequence[Any], shape: Shape, core: Core) -> tuple[dict[Schedule, float], list[Seen]]:
    """Times of this product's schedules, and what others have shown."""
    by_shape: dict[Shape, dict[Schedule, float]] = {}
    for record in records:
        own = by_shape.setdefault((*record["shape"],), {})
        one = Schedule(**record["schedule"])
        own[one] = min(own.get(one, math.inf), float(record["seconds"]))
    known = by_shape.pop(shape, {})
    seen = []
    for other, times in by_shape.items():
        priced = predicted(other, core, list(times))
        seen.append(Seen(features=priced.features, cycles=priced.cycles, seconds=np.array(list(times.values()))))
    return known, seen


def _answer(
    shape: Shape,
    name: str,
    strategy: str,
    given: Candidates,
    times: dict[Schedule, float],
    model: CostModel,
    history: str,
    known: dict[Schedule, float],
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
            known=one in known,
        )
        for one in shown
    )
    best = place[ranked[0].schedule]
    return Tuned(
        shape=shape,
        processor=name,
        strategy=strategy,
        space=len(space()),
        left_out=given.left_out,
        ranked=ranked,
        traffic_bytes=tuple(found.traffic_bytes[best].tolist()),
        model_rows=model.rows,
        history=history,
    )
