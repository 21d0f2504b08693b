"""Time and energy of candidates, for searches with an objective or bounds on a whole run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from steptime.estimate.energy import activity, flops_of
from steptime.estimate.result import PlannedJob
from steptime.estimate.single import Setting
from steptime.estimate.step import Step
from steptime.estimate.work import Pass
from steptime.num import Array
from steptime.plan.plans import Plans, rows_of
from steptime.search.accumulators import pareto_front
from steptime.search.objective import Objective

Made: TypeAlias = tuple[PlannedJob, Mapping[str, Pass], Step]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyFront:
    """Plans that no other beats in both time and energy of a step, fastest first."""

    time_s: Array
    energy_J: Array
    plans: Plans


class Priced:
    """Time and energy of every candidate: ranks those within the bounds, and keeps the front of all."""

    def __init__(self, objective: Objective, setting: Setting, configurations: Plans) -> None:
        self.objective, self.setting = objective, setting
        columns = (configurations.recompute, configurations.recompute_every)
        rows = (rows_of(configurations),)
        self.flops = flops_of(setting.job, *(np.broadcast_to(np.asarray(each), rows) for each in columns))
        self.refused: dict[str, int] = {}
        self.lost = 0
        self.time_s = self.energy_J = np.zeros(0)
        self.ids: Array = np.zeros((0, 2), dtype=np.int64)

    def values(self, made: Made, times: Array, at: tuple[Array, ...]) -> tuple[Array, Array]:
        """Values of the objective for a block of candidates, and True for those within the bounds.

        Args:
            made: job, passes and steps of the block.
            times: step times of the block in seconds.
            at: position, configuration and placement of each candidate.
        """
        position, configuration, place = at
        planned, passes, step = made
        does = activity(planned, self.setting.machine, passes, step, self.flops[position])
        wanted, devices = self.objective, self.setting.job.gpus
        power = np.broadcast_to(np.asarray(does.power_W(wanted.idle_W, wanted.peak_W)), times.shape)
        energy = wanted.energy_J(times, power, devices)
        over = np.zeros(times.shape, dtype=bool)
        for name, out in wanted.refused(times, energy).items():
            if count := int(out.sum()):
                self.refused[name] = self.refused.get(name, 0) + count
            over |= out
        self.lost += int(over.sum())
        kept = np.flatnonzero(~over)
        self._to_front(times, energy, np.stack([configuration, place], axis=1))
        return np.asarray(wanted.mix.of(times[kept], energy[kept])), kept

    def _to_front(self, times: Array, energy: Array, ids: Array) -> None:
        near = pareto_front(times, energy)
        merged = np.concatenate([self.time_s, times[near]]), np.concatenate([self.energy_J, energy[near]])
        kept = pareto_front(*merged)
        self.time_s, self.energy_J = merged[0][kept], merged[1][kept]
        self.ids = np.concatenate([self.ids, ids[near]])[kept]

    def front(self, plans: Plans) -> EnergyFront:
        """The front of all candidates that fit in memory; ``plans``: plans of :attr:`ids`."""
        return EnergyFront(time_s=self.time_s, energy_J=self.energy_J, plans=plans)
