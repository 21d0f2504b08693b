r"""Power and energy of a training run: what devices draw while they work and wait, PUE, carbon.

The weights of :func:`device_power_W` are assumed, not fitted: no measured runs with their power were at hand. They
are marked so wherever a number rests on them.
"""

from __future__ import annotations

from typing import Final

from steptime.num import Num, maximum, minimum

KWH_J: Final = 3.6e6
"""Joules of a kilowatt hour."""
RUNNING, MATRIX, MEMORY, LINKS = 0.25, 0.8, 0.45, 0.15
"""Shares of the range from idle to full power: running kernels, matrix units at their peak, memory, links."""
SUSTAINED: Final = 0.7
"""Share of the matrix peak at which products run; the rest of the time of kernels is taken to be at memory speed."""


def memory_share(running: Num, matrix: Num) -> Num:
    r"""Share of a step in which kernels run at memory speed: what products at $\epsilon$ = 0.7 of the peak leave.

    $$v = \max(r - m / \epsilon,\ 0)$$

    Args:
        running: $r$, share of the step in which the device runs kernels.
        matrix: $m$, matrix operations of the step over the peak of its time.

    Source: own; the split into products and the rest is that of a roofline.

    >>> round(memory_share(0.9, 0.35), 6), memory_share(0.3, 0.35)
    (0.4, 0.0)
    """
    return maximum(running - matrix / SUSTAINED, 0.0)


def device_power_W(idle_W: Num, peak_W: Num, running: Num, matrix: Num, memory: Num, links: Num) -> Num:
    r"""Average power of a device during a step.

    $$P = P_0 + (P_1 - P_0) \min(1,\ a_r r + a_m m + a_v v + a_l l)$$

    Args:
        idle_W: $P_0$, power of the device when it has nothing to do (W).
        peak_W: $P_1$, power that it is held to: its TDP (W).
        running: $r$, share of the step in which it runs kernels.
        matrix: $m$, matrix operations over what the peak of its time would be.
        memory: $v$, share of the step at memory speed.
        links: $l$, share of the step in which its links are busy.

    Source: assumed: linear in utilisation between idle and TDP, with the weights $a$ of this module.

    A device of 100 W idle and 700 W whose kernels run half of the time, with nothing else:

    >>> device_power_W(100.0, 700.0, 0.5, 0.0, 0.0, 0.0), device_power_W(100.0, 700.0, 1.0, 1.0, 0.0, 0.0)
    (175.0, 700.0)
    """
    load = RUNNING * running + MATRIX * matrix + MEMORY * memory + LINKS * links
    return idle_W + (peak_W - idle_W) * minimum(load, 1.0)


def site_energy_J(devices: Num, working_J: Num, waiting_s: Num, idle_W: Num, host_W: Num, wall_s: Num, pue: Num) -> Num:
    r"""Energy of a run at the meter of the site.

    $$E = \text{PUE} \cdot n \left(E_1 + P_0 t_0 + P_h t\right)$$

    Args:
        devices: $n$, devices of the job.
        working_J: $E_1$, energy of one device while it steps, lost work included (J).
        waiting_s: $t_0$, time in which devices wait: checkpoints, restarts (s).
        idle_W: $P_0$, power of a waiting device (W).
        host_W: $P_h$, power of hosts, switches and fans per device, always (W).
        wall_s: $t$, whole time of the run (s).
        pue: power of the site over that of its machines.

    Source: definition; PUE: ISO/IEC 30134-2.

    >>> site_energy_J(2, 1000.0, 10.0, 50.0, 100.0, 20.0, 1.5)
    10500.0
    """
    return pue * devices * (working_J + idle_W * waiting_s + host_W * wall_s)


def carbon_kg(energy_J: Num, kg_per_kWh: Num) -> Num:
    r"""Carbon dioxide of energy (kg of CO2 equivalent): $m = E\,g / 3.6 \cdot 10^6$.

    $E$ = `energy_J`, of a grid that emits $g$ = `kg_per_kWh`.

    >>> carbon_kg(7.2e6, 0.4)
    0.8
    """
    return energy_J / KWH_J * kg_per_kWh
