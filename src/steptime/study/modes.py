"""Modes of the planner: the corrected model, and papers that are reproduced as their code computes them."""

from __future__ import annotations

from dataclasses import dataclass

from steptime.estimate.single import Statistics
from steptime.plan.constraints import Constraint
from steptime.plan.corrected import CORRECTED
from steptime.plan.corrected_space import CorrectedSpace
from steptime.plan.method import Method
from steptime.plan.space import Space
from steptime.registry import Registry
from steptime.study.published.method import PUBLISHED
from steptime.study.published.space import PublishedSpace
from steptime.study.published.statistics import statistics


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """A method with its space."""

    method: Method
    space: Space
    auto: dict[str, tuple[Constraint, ...]]
    """Strategies that ``auto`` searches, with what keeps them apart. SUMMA is searched on request only in corrected
    mode: no common framework runs it."""
    attentions: tuple[str, ...]
    statistics: Statistics | None = None

    def searched(self, asked: str) -> dict[str, tuple[Constraint, ...]]:
        """Strategies that a search tries, for ``auto`` or a name, each with what keeps it apart from the others.

        Raises:
            UnknownNameError: the mode has no strategy of that name.
        """
        if asked == "auto":
            return self.auto
        self.method.strategy(asked)
        return {asked: ()}


def _more_than_one(axis: str) -> tuple[Constraint, ...]:
    return (Constraint(column=axis, relation=">=", value=2),)


MODES: Registry[Mode] = Registry("mode", "steptime.modes")
MODES.add(
    "corrected",
    Mode(
        method=CORRECTED,
        space=CorrectedSpace(),
        attentions=("fused", "unfused"),
        auto={"1d": (), "context": _more_than_one("cp")},
    ),
)
MODES.add(
    "published",
    Mode(
        method=PUBLISHED,
        space=PublishedSpace(),
        attentions=("fused", "unfused", "summa"),
        statistics=statistics,
        auto={"1d": (), "context": (), "2d": ()},
    ),
)
