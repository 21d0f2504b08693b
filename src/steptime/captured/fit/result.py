"""What ``steptime fit`` answers: the cheapest way to fit, the front, the guide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from steptime.captured.fit.choice import Point
from steptime.captured.fit.techniques import TECHNIQUES, Step
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
            "candidates": self.candidates, "captures": self.captures, "provenance": dict(self.provenance),
            "notes": list(self.notes),
        }  # fmt: skip


def technique_record(key: str) -> dict[str, Any]:
    """A technique as plain data, its settings apart: those are with each point."""
    one = TECHNIQUES[key]
    return {
        "title": one.title, "step": str(one.step), "changes": str(one.changes), "memory": one.memory,
        "time": one.time, "numerics": one.numerics, "source": one.source,
    }  # fmt: skip
