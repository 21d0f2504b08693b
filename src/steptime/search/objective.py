"""Objective of a search: the smallest mix of time and energy of a step, within bounds on other such mixes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from steptime.num import Array, Num


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Objective and bounds as the user gives them."""

    objective: str = "time"
    deadline: str | None = None
    budget: str | None = None
    failures: Any = None
    prices: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    r"""A price of time and energy: $a t + b E$ of a step of $t$ seconds and $E$ joules at the meter.

    Days, money and carbon of a run are such mixes at a given number of devices, as is their sum.
    """

    per_s: float = 0.0
    per_J: float = 0.0

    def of(self, time_s: Num, energy_J: Num) -> Num:
        """Value of the mix for steps with a time and an energy.

        >>> Mix(per_s=2.0, per_J=0.5).of(3.0, 4.0)
        8.0
        """
        return self.per_s * time_s + self.per_J * energy_J


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A mix to minimise, and bounds on mixes that no plan may exceed."""

    name: str
    mix: Mix
    idle_W: float
    peak_W: float
    """TDP of a device."""
    host_W: float
    """Power of hosts, switches and fans per device."""
    pue: float
    bounds: Mapping[str, tuple[Mix, float]]
    """Name of a reason -> a mix and its largest value."""

    def energy_J(self, time_s: Array, device_W: Array, devices: int) -> Array:
        """Energy of a step at the meter, from the average power of a device in it."""
        return self.pue * devices * (device_W + self.host_W) * time_s

    def refused(self, time_s: Array, energy_J: Array) -> dict[str, Array]:
        """Reason -> True for the plans that exceed its bound."""
        return {name: np.asarray(mix.of(time_s, energy_J) > most) for name, (mix, most) in self.bounds.items()}
