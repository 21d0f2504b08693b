"""Money: what devices and electricity cost over a time, and per token."""

from __future__ import annotations

from steptime.cost.energy import KWH_J
from steptime.cost.training import HOUR_S
from steptime.num import Num


def run_cost(devices: Num, device_hour: Num, wall_s: Num, energy_J: Num, kWh: Num) -> Num:
    r"""Price of a run: devices by the hour, and electricity if it is paid for separately.

    $$c = n\, p\, \frac{t}{3600} + q\, \frac{E}{3.6 \cdot 10^6}$$

    Args:
        devices: $n$, devices that are paid for, spares too.
        device_hour: $p$, price of a device per hour (currency/h).
        wall_s: $t$, time that they are paid for (s).
        energy_J: $E$, energy at the meter (J).
        kWh: $q$, price of a kilowatt hour (currency); 0 where the price of the device has it.

    Source: definition.

    Eight devices for two hours at 3, and 10 kWh at 0.1:

    >>> run_cost(8, 3.0, 7200.0, 3.6e7, 0.1)
    49.0
    """
    return devices * device_hour * wall_s / HOUR_S + energy_J / KWH_J * kWh
