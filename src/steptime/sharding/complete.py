"""Plans from partly given shardings: the solver or propagation decides the rest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Any, Final, Literal

from steptime.errors import UserError, first_few
from steptime.num import Array
from steptime.sharding.annotate import annotations_of, pins_of, resolved
from steptime.sharding.build import Built
from steptime.sharding.ilp import GAP
from steptime.sharding.layout import LaidOut, laid_out
from steptime.sharding.planner import ShardingPlan, planned
from steptime.sharding.portfolio import EACH_S, with_others
from steptime.sharding.propagate import Propagated, propagated

Complete = Literal["solve", "propagate"]
SHOWN: Final = 6
OTHERS_SHARE: Final = 0.05
"""Share of the time limit that each further search may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Directions:
    """The shardings that a user gives, and how the rest is decided."""

    annotate: tuple[str, ...] = ()
    layout: str | None = None
    complete: Complete = "solve"

    def __post_init__(self) -> None:
        if self.annotate and self.layout is not None:
            raise UserError(
                "annotations and a layout together",
                hint='give one of them; a layout can name a dim of a tensor: "tokens.weight[0]:model"',
            )
        if self.complete not in ("solve", "propagate"):
            raise UserError(f"complete={self.complete!r}", hint="it is solve or propagate")
        if self.complete == "propagate" and not self:
            raise UserError("nothing to propagate", hint="give annotations or a layout")

    def __bool__(self) -> bool:
        return bool(self.annotate) or self.layout is not None


def completed(
    built: Built, directions: Directions, *, overlaps: bool = True, **limits: Any
) -> tuple[ShardingPlan, Propagated | LaidOut | None]:
    """A plan that keeps the given shardings, and the result of propagation or of the layout, if any.

    Args:
        built: the problem.
        directions: given shardings, and how the rest is decided.
        overlaps: as in :func:`~steptime.sharding.planner.planned`.
        limits: options of the solver.

    Raises:
        UserError: the given shardings contradict each other or the module, or no plan with them fits in memory.
    """
    if not directions:
        found_plan = planned(built, overlaps=overlaps, **limits)
        each_s = min(EACH_S, OTHERS_SHARE * float(limits.get("seconds", inf)))
        return with_others(found_plan, limits.get("gap", GAP), each_s), None
    annotations = annotations_of(directions.annotate)
    if directions.complete == "propagate":
        follows = propagated(built, annotations) if annotations else laid_out(built, directions.layout or "")
        return _plan(built, follows.choice, overlaps), follows
    found = None if annotations else laid_out(built, directions.layout or "")
    if found is None:
        annotated = resolved(built, annotations)
        pins, names = pins_of(built, annotated), [each.name for each in annotated]
    else:
        pins = found.pins
        names = [built.flow.items[item].name for item in pins]
    try:
        return planned(built.only(pins), overlaps=overlaps, **limits), found
    except UserError as error:
        raise UserError(f"with the given shardings of {first_few(names, SHOWN)}: {error}") from None


def _plan(built: Built, choice: Array, overlaps: bool) -> ShardingPlan:
    """A plan of a choice that was not searched, so that its bound is 0."""
    stop = "it follows from annotations or a layout; nothing was searched"
    plan = ShardingPlan(built=built, choice=choice, overlaps=overlaps, bound_s=0.0, stop=stop, cpu_s=0.0, solutions=())
    if built.limit_bytes < inf and plan.memory_bytes.max() > built.limit_bytes:
        return replace(plan, stop=f"{stop}; memory is above the limit")
    return plan
