"""The search of ``steptime fit``: it proposes every combination, verifies the promising ones, and builds the guide."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

from steptime.captured.fit.choice import Choice, Point, front_of, thinned
from steptime.captured.fit.techniques import TECHNIQUES, Step
from steptime.estimate.memory_definitions import LIKELY_FITS
from steptime.estimate.result import SCHEMA_VERSION
from steptime.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class GuideStep:
    """One step of the guide: the techniques that it adds, and their effect."""

    step: Step
    before: Point
    after: Point | None
    """The best point with the techniques up to this step; None if the step brings no improvement."""
    needed: bool
    """True if nothing fitted before this step."""

    @property
    def added(self) -> tuple[str, ...]:
        """Techniques that the step adds."""
        if self.after is None:
            return ()
        had = set(self.before.choice.keys)
        return tuple(key for key in self.after.choice.keys if key not in had)

    @property
    def saved_bytes(self) -> float:
        """Memory that the step saves."""
        return 0.0 if self.after is None else self.before.memory_bytes - self.after.memory_bytes

    @property
    def time_factor(self) -> float:
        """Time of a training step over the time before; below 1: faster."""
        return 1.0 if self.after is None else self.after.step_s / self.before.step_s

    def as_record(self, device_type: str) -> dict[str, Any]:
        """Plain data, with the settings for that type of device."""
        return {
            "step": str(self.step), "needed": self.needed, "added": list(self.added),
            "memory_before_bytes": self.before.memory_bytes,
            "memory_after_bytes": None if self.after is None else self.after.memory_bytes,
            "saved_bytes": self.saved_bytes, "time_factor": self.time_factor,
            "fits": self.before.fits if self.after is None else self.after.fits,
            "point": None if self.after is None else self.after.as_record(device_type),
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class FitResult:
    """The cheapest way to fit a step on one device, and all ways that no other beats."""

    model: str
    device: str
    device_type: str
    """Device type of PyTorch: ``cuda``, or ``cpu`` for the processor of the host."""
    batch: int
    seq: int | None
    optimizer: str
    allow: str
    """Strongest allowed change of the numerics."""
    host_Bps: float
    capacity_bytes: float
    context_bytes: float
    """Bytes of the capacity for the context of the driver and the loaded kernels."""
    baseline: Point
    """The point without techniques."""
    cheapest: Point | None
    """The fastest point that fits; within 1 % of it, one with spare memory, mild changes and few techniques."""
    least: Point
    """The point with the least memory."""
    front: tuple[Point, ...]
    """Points that no other beats in both time and memory, fastest first."""
    guide: tuple[GuideStep, ...]
    candidates: int
    captures: int
    stacks: tuple[Point, ...] = ()
    """The cheapest point (or the least, if nothing fits) under each framework that has settings for its techniques."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """True if any point fits."""
        return self.cheapest is not None

    @property
    def missing_bytes(self) -> float:
        """Memory that the device lacks for the point with the least memory; 0 if any point fits."""
        return 0.0 if self.fits else max(self.least.device_bytes - self.capacity_bytes, 0.0)

    def __repr__(self) -> str:
        """One line for a prompt or a notebook; :meth:`to_json` has everything."""
        point, found = self.cheapest or self.least, "the cheapest" if self.fits else "nothing fits; the least memory"
        needs = f"{format_bytes(point.device_bytes)} of {format_bytes(self.capacity_bytes)}"
        how = f"{'+'.join(point.choice.keys) or 'as it is'}, {format_seconds(point.step_s)}, {needs}"
        return f"<FitResult of {self.model} on {self.device}, batch {self.batch}: {found}: {how}>"

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``."""
        kind = self.device_type
        used = {key for point in (*self.front, self.least) for key in point.choice.keys}
        return {
            "schema_version": SCHEMA_VERSION, "model": self.model, "device": self.device, "batch": self.batch,
            "seq": self.seq, "optimizer": self.optimizer, "allow": self.allow, "host_bandwidth_Bps": self.host_Bps,
            "memory_capacity_bytes": self.capacity_bytes, "context_bytes": self.context_bytes, "fits": self.fits,
            "missing_bytes": self.missing_bytes, "baseline": self.baseline.as_record(kind),
            "cheapest": None if self.cheapest is None else self.cheapest.as_record(kind),
            "least": self.least.as_record(kind),
            "front": [point.as_record(kind) for point in self.front],
            "guide": [one.as_record(kind) for one in self.guide],
            "techniques": {key: technique_record(key) for key in TECHNIQUES if key in used},
            "candidates": self.candidates, "captures": self.captures,
            "stacks": {str(point.framework): point.as_record(kind) for point in self.stacks},
            "provenance": dict(self.provenance),
            "notes": list(self.notes),
        }  # fmt: skip


def technique_record(key: str) -> dict[str, Any]:
    """A technique as plain data, without its settings, which each point has."""
    one = TECHNIQUES[key]
    return {
        "title": one.title, "step": str(one.step), "changes": str(one.changes), "memory": one.memory,
        "time": one.time, "numerics": one.numerics, "source": one.source,
    }  # fmt: skip


CLOSE: Final = 0.01
"""Relative difference up to which times count as equal, so that fewer changes and techniques decide."""
APART: Final = 0.04
"""Smallest fraction of the previous memory that each point of the front saves."""
WORTH: Final = 0.9
"""Largest fraction of the memory that the combination shown for an unneeded step may leave."""
ALWAYS: Final = (Step.PRECISION, Step.FUSED)
"""Steps that are taken even if everything fits, because they cost no time."""


class Engine(Protocol):
    """Evaluates combinations."""

    def plain(self, precision: str = "fp32", optimizer: str = "default") -> Choice:
        """The whole batch with a precision and an optimiser, without other techniques."""
        ...

    @property
    def precisions(self) -> tuple[str, ...]:
        """Allowed precisions."""
        ...

    @property
    def optimizers(self) -> tuple[str, ...]:
        """Allowed kinds of optimiser states."""
        ...

    def choices(self) -> Iterable[Choice]:
        """Every combination that is weighed."""
        ...

    def proposed(self, choice: Choice) -> Point:
        """Cost of a combination without further captures."""
        ...

    def verified(self, choice: Choice, proposed: Point | None = None) -> Point:
        """Cost of a combination, from its capture if possible."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Result of a search."""

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
    """All combinations with their points, proposed or verified."""

    def __init__(self, engine: Engine, more: Callable[[int], None]) -> None:
        self.engine, self.more = engine, more
        self.points: dict[Choice, Point] = {}
        self.final: set[Choice] = set()
        plain = [engine.plain(p, o) for p in engine.precisions for o in ("default", *engine.optimizers[:1])]
        for choice in (*plain, *engine.choices()):
            if choice not in self.points:
                self.points[choice] = engine.proposed(choice)

    def get(self, choice: Choice) -> Point:
        """Verified point of a combination."""
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
        """Verified cheapest point that fits among the allowed combinations, else the one with the least memory."""
        while True:
            points = [point for choice, point in self.points.items() if allowed(choice)]
            found = cheapest_of(points)
            if found.choice in self.final:
                return found
            self.get(found.choice)


def cheapest_of(points: Iterable[Point]) -> Point:
    """The safest and simplest of the fastest points that fit; if none fits, the one with the least memory."""
    given = list(points)
    fitting = [point for point in given if point.fits]
    if not fitting:
        return min(given, key=lambda p: (p.memory_bytes, p.step_s))
    fastest_s = min(point.step_s for point in fitting)
    close = [point for point in fitting if point.step_s <= fastest_s * (1 + CLOSE)]
    return _filled(min(close, key=_preferred), fitting)


def _filled(best: Point, fitting: Iterable[Point]) -> Point:
    """The same techniques with the largest micro-batch that is likely to fit and whose time is inside the band.

    A difference in time inside the band is no reason to leave memory unused: fewer, larger micro-batches wait less for
    the host and reduce gradients equally often.
    """
    if best.band_s is None:
        return best
    larger = [
        point
        for point in fitting
        if _but_batch(point.choice) == _but_batch(best.choice)
        and point.step_s <= best.band_s[1]
        and point.oom_probability <= max(LIKELY_FITS, best.oom_probability)
    ]
    return max(larger, key=lambda p: (p.choice.micro_batch, -p.step_s, -p.memory_bytes), default=best)


def _but_batch(choice: Choice) -> tuple[object, ...]:
    """A combination without its micro-batch and the arrangement of its checkpoints."""
    return choice.precision, choice.optimizer, choice.checkpoints.key, choice.swapped, choice.weights


def _preferred(point: Point) -> tuple[int, float, float]:
    """Sort key that prefers mild changes, few techniques, none that needs the host, and spare memory."""
    used = [TECHNIQUES[key] for key in point.choice.keys]
    burden = sum(1 + one.changes.rank + 2 * (one.step is Step.HOST) for one in used)
    return burden + 2 * (point.oom_probability > LIKELY_FITS), point.step_s, point.memory_bytes


def _guide(pool: _Pool, engine: Engine) -> Iterable[GuideStep]:
    """Steps of the guide in order; each allows its own techniques and those of earlier steps."""
    current = pool.get(engine.plain())
    allowed = set(current.choice.keys)
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
    """True if a combination has only allowed techniques, and all precisions that were chosen before."""
    return set(choice.keys) <= allowed and _kept(choice, current)


def _kept(choice: Choice, current: Point) -> bool:
    """True if a combination keeps the techniques of the precision step, or has other weights."""
    free = {key for key in current.choice.keys if TECHNIQUES[key].step is Step.PRECISION}
    return choice.weights != current.choice.weights or free <= set(choice.keys)


def _instead(pool: _Pool, current: Point, own: set[str]) -> Point | None:
    """The fastest worthwhile point that a step which is not needed would add to the current one."""
    had = set(current.choice.keys)
    points = [
        point
        for choice, point in pool.points.items()
        if own & set(choice.keys)
        and set(choice.keys) <= had | own
        and _kept(choice, current)
        and choice.micro_batch == (choice.micro_batch if "accumulation" in own else current.choice.micro_batch)
        and point.memory_bytes <= WORTH * current.memory_bytes
    ]
    return min(points, key=lambda p: (p.step_s, p.memory_bytes), default=None)
