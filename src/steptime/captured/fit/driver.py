"""The search of ``steptime fit``: proposes every combination, verifies the promising ones, and walks the guide."""

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
    """One step of the guide: what it adds, and what that gives."""

    step: Step
    before: Point
    after: Point | None
    """The best with the techniques up to this step; None where it has nothing to offer."""
    needed: bool
    """Whether nothing fitted before."""

    @property
    def added(self) -> tuple[str, ...]:
        """Techniques of this point that the point before has not."""
        if self.after is None:
            return ()
        had = set(self.before.choice.keys)
        return tuple(key for key in self.after.choice.keys if key not in had)

    @property
    def saved_bytes(self) -> float:
        """Memory that it saves."""
        return 0.0 if self.after is None else self.before.memory_bytes - self.after.memory_bytes

    @property
    def time_factor(self) -> float:
        """Time of a step over that before; below 1: faster."""
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
    """The cheapest way to make a step fit on one device, and every way that no other beats."""

    model: str
    device: str
    device_type: str
    """What PyTorch calls it: ``cuda``, or ``cpu`` where it is the processor of its host."""
    batch: int
    seq: int | None
    optimizer: str
    allow: str
    """Strongest change of the numbers that was allowed."""
    host_Bps: float
    capacity_bytes: float
    context_bytes: float
    """What the driver's context and the loaded kernels take of it."""
    baseline: Point
    """Nothing applied."""
    cheapest: Point | None
    """The fastest that fits; of those within 1 % of it, one with room to spare, few changes and few techniques."""
    least: Point
    """The least memory that can be reached."""
    front: tuple[Point, ...]
    """Fastest first; no point is beaten in both time and memory."""
    guide: tuple[GuideStep, ...]
    candidates: int
    captures: int
    stacks: tuple[Point, ...] = ()
    """The cheapest, or the least where nothing fits, as each framework runs it whose settings are named."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether anything fits."""
        return self.cheapest is not None

    @property
    def missing_bytes(self) -> float:
        """What the device lacks for the least memory that can be reached; 0 where something fits."""
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
    """A technique as plain data, its settings apart: those are with each point."""
    one = TECHNIQUES[key]
    return {
        "title": one.title, "step": str(one.step), "changes": str(one.changes), "memory": one.memory,
        "time": one.time, "numerics": one.numerics, "source": one.source,
    }  # fmt: skip


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
    return _filled(min(close, key=_preferred), fitting)


def _filled(best: Point, fitting: Iterable[Point]) -> Point:
    """The same techniques with the largest micro-batch that surely fits and whose time is inside the band.

    A time that the band does not tell apart is no reason to leave memory unused: fewer, larger micro-batches wait less
    for the host and reduce gradients as often.
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
    """A combination without its micro-batch, and how its checkpoints lie."""
    return choice.precision, choice.optimizer, choice.checkpoints.key, choice.swapped, choice.weights


def _preferred(point: Point) -> tuple[int, float, float]:
    """Mild changes, few techniques, none that needs the host, and room to spare."""
    used = [TECHNIQUES[key] for key in point.choice.keys]
    burden = sum(1 + one.changes.rank + 2 * (one.step is Step.HOST) for one in used)
    return burden + 2 * (point.oom_probability > LIKELY_FITS), point.step_s, point.memory_bytes


def _guide(pool: _Pool, engine: Engine) -> Iterable[GuideStep]:
    """Steps in order: each allows its techniques and the ones of the steps before it."""
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
    """Whether a combination has allowed techniques only, and the free ones that were taken."""
    return set(choice.keys) <= allowed and _kept(choice, current)


def _kept(choice: Choice, current: Point) -> bool:
    """Whether a combination keeps the free techniques that were taken."""
    free = {key for key in current.choice.keys if TECHNIQUES[key].step is Step.PRECISION}
    return choice.weights != current.choice.weights or free <= set(choice.keys)


def _instead(pool: _Pool, current: Point, own: set[str]) -> Point | None:
    """What a step that is not needed would give on top of what is there: the fastest that is worth it."""
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
