"""Proposes every combination, verifies those that matter, and walks the guide."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from steptime.captured.fit.choice import Choice, Point, front_of, thinned
from steptime.captured.fit.result import GuideStep
from steptime.captured.fit.techniques import TECHNIQUES, Step
from steptime.estimate.memory_definitions import LIKELY_FITS

CLOSE: Final = 0.01
"""Times within this share are as good as equal: fewer changes and techniques decide."""
APART: Final = 0.04
"""Points of the front save at least this share of the memory of the one before."""
WORTH: Final = 0.9
"""A step that is not needed is shown by its fastest combination that leaves at most this share of the memory."""
ALWAYS: Final = (Step.PRECISION, Step.FUSED)
"""Steps that are taken even where everything fits, as they cost nothing."""


class Engine(Protocol):
    """Evaluates combinations."""

    def plain(self, precision: str = "fp32", optimizer: str = "default") -> Choice:
        """The whole batch, and nothing but a precision and an optimiser."""
        ...

    @property
    def precisions(self) -> tuple[str, ...]:
        """Precisions that are allowed."""
        ...

    @property
    def optimizers(self) -> tuple[str, ...]:
        """Kinds of optimiser states that are allowed."""
        ...

    def choices(self) -> Iterable[Choice]:
        """Every combination that is weighed."""
        ...

    def proposed(self, choice: Choice) -> Point:
        """Costs of a combination, as far as they are known without further captures."""
        ...

    def verified(self, choice: Choice, proposed: Point | None = None) -> Point:
        """Costs of a combination, captured if that can be done."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search has found."""

    baseline: Point
    cheapest: Point | None
    least: Point
    front: tuple[Point, ...]
    guide: tuple[GuideStep, ...]
    candidates: int


def search(engine: Engine, more: Callable[[int], None] = lambda captures: None) -> Found:
    """Evaluate all combinations of an engine.

    Args:
        engine: evaluates combinations.
        more: called with the number of combinations that are about to be captured.
    """
    pool = _Pool(engine, more)
    front = pool.front()
    best = pool.best(lambda choice: True)
    return Found(
        baseline=pool.get(engine.plain()), cheapest=best if best.fits else None, front=front, least=front[-1],
        guide=tuple(_guide(pool, engine)), candidates=len(pool.points),
    )  # fmt: skip


class _Pool:
    """All combinations with what is known of them."""

    def __init__(self, engine: Engine, more: Callable[[int], None]) -> None:
        self.engine, self.more = engine, more
        self.points: dict[Choice, Point] = {}
        self.final: set[Choice] = set()
        plain = [engine.plain(p, o) for p in engine.precisions for o in ("default", *engine.optimizers[:1])]
        for choice in (*plain, *engine.choices()):
            if choice not in self.points:
                self.points[choice] = engine.proposed(choice)

    def get(self, choice: Choice) -> Point:
        """A combination, verified."""
        if choice not in self.final:
            self.points[choice] = self.engine.verified(choice, self.points.get(choice))
            self.final.add(choice)
        return self.points[choice]

    def front(self) -> tuple[Point, ...]:
        """The front, every point of it verified."""
        while True:
            front = thinned(front_of(self.points.values()), APART)
            open_ones = [point.choice for point in front if point.choice not in self.final]
            if not open_ones:
                return front
            self.more(len(open_ones))
            for choice in open_ones:
                self.get(choice)

    def best(self, allowed: Callable[[Choice], bool]) -> Point:
        """The cheapest that fits of some combinations, else the one with least memory; verified."""
        while True:
            points = [point for choice, point in self.points.items() if allowed(choice)]
            found = cheapest_of(points)
            if found.choice in self.final:
                return found
            self.get(found.choice)


def cheapest_of(points: Iterable[Point]) -> Point:
    """The fastest that fits, the safest and simplest among those as good as equal; of none that fits, the smallest."""
    given = list(points)
    fitting = [point for point in given if point.fits]
    if not fitting:
        return min(given, key=lambda p: (p.memory_bytes, p.step_s))
    fastest_s = min(point.step_s for point in fitting)
    close = [point for point in fitting if point.step_s <= fastest_s * (1 + CLOSE)]
    return min(close, key=_preferred)


def _preferred(point: Point) -> tuple[int, float, float]:
    """Mild changes, few techniques, none that needs the host, and room to spare."""
    used = [TECHNIQUES[key] for key in point.choice.keys]
    burden = sum(1 + one.changes.rank + 2 * (one.step is Step.HOST) for one in used)
    return burden + 2 * (point.oom_probability > LIKELY_FITS), point.step_s, point.memory_bytes


def _guide(pool: _Pool, engine: Engine) -> Iterable[GuideStep]:
    """Steps in order: each allows its techniques beside those before it."""
    allowed: set[str] = set()
    current = pool.get(engine.plain())
    for step in Step:
        own = {key for key, technique in TECHNIQUES.items() if technique.step is step}
        if not any(own & set(choice.keys) for choice in pool.points):
            continue
        allowed |= own
        needed = not current.fits
        if needed or step in ALWAYS:
            after = pool.best(partial(_allowed, allowed=frozenset(allowed), current=current))
            better = after.choice != current.choice and (
                after.memory_bytes < current.memory_bytes or after.step_s < current.step_s or after.fits
            )
            yield GuideStep(step=step, before=current, after=after if better else None, needed=needed)
            current = after if better else current
        else:
            yield GuideStep(step=step, before=current, after=_instead(pool, current, own), needed=False)


def _allowed(choice: Choice, allowed: frozenset[str], current: Point) -> bool:
    """Whether a combination has allowed techniques only, and the free ones that were taken."""
    return set(choice.keys) <= allowed and _kept(choice, current)


def _kept(choice: Choice, current: Point) -> bool:
    """Whether a combination keeps the free techniques that were taken."""
    free = {key for key in current.choice.keys if TECHNIQUES[key].step is Step.PRECISION}
    return choice.weights != "trained" or free <= set(choice.keys)


def _instead(pool: _Pool, current: Point, own: set[str]) -> Point | None:
    """What a step that is not needed would give beside what is there: the fastest that is worth it."""
    had = set(current.choice.keys)
    points = [
        point for choice, point in pool.points.items()
        if own & set(choice.keys) and set(choice.keys) <= had | own and _kept(choice, current)
        and choice.micro_batch == (choice.micro_batch if "accumulation" in own else current.choice.micro_batch)
        and point.memory_bytes <= WORTH * current.memory_bytes
    ]  # fmt: skip
    return min(points, key=lambda p: (p.step_s, p.memory_bytes), default=None)
