"""Modes of the planner: the corrected model, and papers that are reproduced as their code computes them."""

from __future__ import annotations

from dataclasses import dataclass

from steptime.estimate.single import Statistics
from steptime.plan.space import Constraint, CorrectedSpace, Space
from steptime.plan.strategies import CORRECTED, Method
from steptime.registry import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """A method with its space."""

    method: Method
    space: Space
    auto: dict[str, tuple[Constraint, ...]]
    """Strategies that ``auto`` searches, with constraints that make them disjoint. Corrected mode searches SUMMA only
    on request, as no common framework runs it."""
    attentions: tuple[str, ...]
    statistics: Statistics | None = None

    def searched(self, asked: str) -> dict[str, tuple[Constraint, ...]]:
        """Strategies that a search tries, for ``auto`` or a name, with constraints that make them disjoint.

        Raises:
            UnknownNameError: the mode has no strategy of that name.
        """
        if asked == "auto":
            return self.auto
        self.method.strategy(asked)
        return {asked: ()}


def more_than_one(axis: str) -> tuple[Constraint, ...]:
    """The constraint that an axis has more than one rank."""
    return (Constraint(column=axis, relation=">=", value=2),)


MODES: Registry[Mode] = Registry("mode", "steptime.modes")
MODES.add(
    "corrected",
    Mode(
        method=CORRECTED,
        space=CorrectedSpace(),
        attentions=("fused", "unfused"),
        auto={"1d": (), "context": more_than_one("cp")},
    ),
)
