"""What a search returns: counts, why it stopped, the best plans, the front, the nearest miss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from steptime.estimate.result import SCHEMA_VERSION, Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Why the search ended, and what that proves."""

    reason: str
    """``exhausted`` (every candidate of the space was costed: the first plan is the best) or
    ``infeasible`` (every candidate was costed, none fits)."""
    proof: str
    """The claim in words."""
    elapsed_cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """Ranked plans of one model on so many devices."""

    candidates: int
    feasible: int
    reasons: Mapping[str, int]
    """Named reason -> candidates that have it; one candidate may have several."""
    stop: Stop
    plans: tuple[Estimate, ...]
    """Fastest first."""
    pareto: tuple[Mapping[str, Any], ...]
    """Front of step time and memory: no candidate is better in both. Each has step_time_s,
    peak_memory_bytes and plan."""
    nearest: Estimate | None
    """When nothing fits: the plan that lacks least."""
    likely_to_fit: Estimate | None = None
    """Where the first plan may run out of memory: the fastest of the space that likely does not."""
    advice: tuple[str, ...] = ()
    """What to change when nothing fits: device counts that work, what idle devices cost."""

    workload: Mapping[str, Any] = field(default_factory=dict)
    """The job in the words of the command line, as in an estimate."""
    notes: tuple[str, ...] = ()
    """What to know about the search: another name for the framework, and plans that it has not."""

    def __repr__(self) -> str:
        """One line for a prompt or a notebook; :meth:`to_json` has everything."""
        best = f"the fastest: {self.plans[0]!r}" if self.plans else "none fits"
        return f"<PlanResult: {self.feasible:,} of {self.candidates:,} candidates are feasible; {best}>"

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``."""
        return {
            "schema_version": SCHEMA_VERSION,
            "candidates": self.candidates,
            "feasible": self.feasible,
            "reasons": dict(self.reasons),
            "stop": {"reason": self.stop.reason, "proof": self.stop.proof, "elapsed_cpu_s": self.stop.elapsed_cpu_s},
            "plans": [plan.to_json() for plan in self.plans],
            "pareto": [dict(point) for point in self.pareto],
            "nearest": self.nearest.to_json() if self.nearest else None,
            "likely_to_fit": self.likely_to_fit.to_json() if self.likely_to_fit else None,
            "advice": list(self.advice),
            "workload": dict(self.workload),
            "notes": list(self.notes),
        }
