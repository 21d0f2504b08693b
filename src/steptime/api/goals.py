"""What a search looks for beyond the time of a step: its objective, its bounds, and the bill of what it finds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from steptime.api.training import samples_of
from steptime.estimate.single import Setting
from steptime.registry import loaded
from steptime.search.objective import Objective
from steptime.search.planner import PlanResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a search is to look for beyond the time of a step, as the user gave it."""

    objective: str
    deadline: str | None
    budget: str | None
    failures: str | None
    prices: str | None

    @property
    def plain(self) -> bool:
        """Whether it is the time of a step alone."""
        return self == Asked(objective="time", deadline=None, budget=None, failures=None, prices=None)

    def goal(self, setting: Setting, length: Mapping[str, float]) -> Objective | None:
        """What is least and what bounds it; None: the time of a step."""
        if self.plain:
            return None
        given = {name: getattr(self, name) for name in self.__slots__}
        steps = samples_of(length, setting.job) / setting.job.global_batch if length else None
        wanted = loaded("steptime.goodput.objective:Wanted")(**given)
        found: Objective | None = loaded("steptime.goodput.objective:objective_of")(setting, wanted, steps)
        return found

    def billed(self, result: PlanResult, setting: Setting) -> PlanResult:
        """The result with goodput, energy and money of its plans, where failures or prices are known."""
        if self.plain or not result.plans or not result.plans[0].training:
            return result
        prices = self.prices or ("default" if self.objective == "cost" or self.budget else None)
        failures = self.failures or ("default" if self.objective == "goodput" else None)
        bill = loaded("steptime.goodput.bill:billed_again")
        return replace(result, plans=tuple(bill(e, setting, failures, prices) for e in result.plans))

    def advice(self, goal: Objective | None, result: PlanResult) -> tuple[str, ...]:
        """What deadline and budget would have to be, where no plan keeps them."""
        if goal is None or not goal.bounds:
            return ()
        currency = loaded("steptime.goodput.prices:prices_of")(self.prices or "default").currency
        found: tuple[str, ...] = loaded("steptime.goodput.objective:bound_advice")(goal, result, currency)
        return found
