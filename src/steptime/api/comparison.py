"""Comparison of two estimates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from steptime.errors import FieldError, shown
from steptime.estimate.result import SCHEMA_VERSION, Estimate
from steptime.units import format_bytes, format_seconds

HEADLINE = (
    "step_time_s",
    "step_time_bracket_s",
    "step_time_band_s",
    "mfu",
    "hfu",
    "tokens_per_s_per_gpu",
    "samples_per_s",
    "peak_memory_bytes",
    "memory_capacity_bytes",
    "feasible",
    "bottleneck",
)

OF_JOB = ("model", "cluster", "mode")
"""Fields of an estimate's job in addition to the workload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Two estimates side by side; each value is [first, second]."""

    headline: Mapping[str, list[Any]]
    plan: Mapping[str, list[Any]]
    """Differing entries of the job and of the plan."""
    time: Mapping[str, list[float]]
    memory: Mapping[str, list[float]]

    def __repr__(self) -> str:
        """One line for a prompt or a notebook; :meth:`to_json` has everything."""
        (a_s, b_s), (a_bytes, b_bytes) = self.headline["step_time_s"], self.headline["peak_memory_bytes"]
        time = f"{format_seconds(a_s)} to {format_seconds(b_s)}"
        memory = f"{format_bytes(a_bytes)} to {format_bytes(b_bytes)}"
        return f"<Difference: {time}, {memory}; of the plan: {', '.join(self.plan) or 'nothing'}>"

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``."""
        return {
            "schema_version": SCHEMA_VERSION,
            "headline": dict(self.headline),
            "plan": dict(self.plan),
            "time": dict(self.time),
            "memory": dict(self.memory),
        }


def diff(a: Estimate, b: Estimate) -> Difference:
    """Two estimates side by side.

    Raises:
        FieldError: one of them is no estimate.
    """
    for name, given in (("a", a), ("b", b)):
        if not isinstance(given, Estimate):
            raise FieldError("", name, f"{shown(given)} is no estimate", hint="steptime.api.estimate makes one")
    said = [{**{k: getattr(e.provenance, k) for k in OF_JOB}, **e.workload, **e.plan} for e in (a, b)]
    differing = {key: pair for key, pair in _pairs(said[0], said[1], None).items() if pair[0] != pair[1]}
    return Difference(
        headline={name: [getattr(a, name), getattr(b, name)] for name in HEADLINE},
        plan=differing,
        time=_pairs(a.time, b.time, 0.0),
        memory=_pairs(a.memory, b.memory, 0.0),
    )


def _pairs(first: Mapping[str, Any], second: Mapping[str, Any], default: Any) -> dict[str, list[Any]]:
    keys = dict.fromkeys((*first, *second))
    return {key: [first.get(key, default), second.get(key, default)] for key in keys}
