r"""Time and devices of a whole training run, from the time of one of its steps."""

from __future__ import annotations

from typing import Final

from steptime.num import Num

HOUR_S: Final = 3600.0
DAY_S: Final = 86400.0


def training_s(step_s: Num, samples: Num, global_batch: Num) -> Num:
    r"""Time of a training run: all of its steps, of which the last may be a part of one.

    $$t = t_\text{step} \frac{n}{B}$$

    Nothing fails, and nothing is evaluated or saved between steps.

    Args:
        step_s: $t_\text{step}$, time of one optimiser step (s).
        samples: $n$, sequences or images of the whole run, repeated ones included.
        global_batch: $B$, sequences or images of one step.

    Source: steps = samples / batch is how arXiv 2410.00273 counts its training days (its plots of strong scaling):
    1e12 tokens of gpt3_1T are 1e12 / 2048 sequences.

    A step of 2 s, 1,000 sequences, 10 in each step:

    >>> training_s(2.0, 1000, 10)
    200.0
    """
    return step_s * (samples / global_batch)


def device_s(run_s: Num, devices: Num) -> Num:
    r"""Device time of a run: what is paid for, idle moments of the devices included.

    $$T = N t$$

    Args:
        run_s: $t$, time of the run (s).
        devices: $N$, devices of the job.

    Source: definition.

    >>> device_s(3600.0, 8) / HOUR_S
    8.0
    """
    return devices * run_s
