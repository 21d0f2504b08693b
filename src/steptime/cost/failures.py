r"""Cost of failures of a training run: rates of a job, checkpoints, the best interval between them, spares, stragglers.

Failures are exponential: a job of units with rates $\lambda_i$ fails at $\lambda = \sum_i n_i \lambda_i = 1/M$. A run
works for an interval $\tau$, then stalls for $\delta$ while it saves. What is saved is safe $L$ later (a lag, while an
asynchronous checkpoint is written). A failure loses the work since the last safe checkpoint and costs a restart of $R$.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import Final

import numpy as np

from steptime.num import Num, exp, maximum, minimum, where

NEWTON: Final = 60
"""Steps of Newton's method that find an interval to rounding error: the start is halved until near, then squared."""

LONGEST: Final = 30.0
"""Stalls longer than this many times M leave an interval of M to rounding error."""


def joined_mtbf_s(counts: list[Num], mtbf_s: list[Num]) -> Num:
    r"""Mean time between failures of a job whose units all have to work.

    $$M = 1 / \sum_i \frac{n_i}{M_i}$$

    Args:
        counts: $n_i$, units of each kind: devices, hosts, switches.
        mtbf_s: $M_i$, mean time between failures of one unit of the kind (s).

    Source: the least of independent exponential times is exponential with the sum of their rates.

    Two devices that fail every 100 s and one switch that fails every 50 s:

    >>> joined_mtbf_s([2, 1], [100.0, 50.0])
    25.0
    """
    return 1.0 / sum(count / each for count, each in zip(counts, mtbf_s, strict=True))


def checkpoint_write_s(saved_bytes: Num, nodes: Num, node_Bps: Num, store_Bps: Num) -> Num:
    r"""Time to write a checkpoint that all nodes share equally.

    $$t = \frac{C}{\min(n b, B)}$$

    Args:
        saved_bytes: $C$, bytes of the whole checkpoint (B).
        nodes: $n$, nodes that write.
        node_Bps: $b$, bandwidth between one node and the store (B/s).
        store_Bps: $B$, bandwidth of the store for all of them (B/s).

    Source: definition.

    >>> checkpoint_write_s(1e12, 100, 1e9, 50e9)
    20.0
    """
    return saved_bytes / minimum(nodes * node_Bps, store_Bps)


def young_interval_s(stall_s: Num, mtbf_s: Num) -> Num:
    r"""Best work between checkpoints, to first order: $\tau = \sqrt{2 \delta M}$.

    Args:
        stall_s: $\delta$, what one checkpoint stalls the run (s).
        mtbf_s: $M$, mean time between failures of the job (s).

    Source: Young, A first order approximation to the optimum checkpoint interval, CACM 17 (1974).

    >>> young_interval_s(2.0, 400.0)
    40.0
    """
    return (2.0 * stall_s * mtbf_s) ** 0.5


def daly_interval_s(stall_s: Num, mtbf_s: Num) -> Num:
    r"""Best work between checkpoints, to higher order.

    $$\tau = \sqrt{2 \delta M} \left(1 + \frac13 \sqrt{\frac{\delta}{2M}} + \frac19 \frac{\delta}{2M}\right) - \delta,
    \qquad \tau = M \text{ where } \delta \ge 2M$$

    Args:
        stall_s: $\delta$, what one checkpoint stalls the run (s).
        mtbf_s: $M$, mean time between failures of the job (s).

    Source: Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22 (2006), eq. 37.

    $\sqrt{2 \cdot 2 \cdot 400} = 40$, $\sqrt{2/800} = 1/20$:

    >>> round(daly_interval_s(2.0, 400.0), 6) == round(40 * (1 + 1 / 60 + 1 / 3600) - 2, 6)
    True
    """
    ratio = (stall_s / (2.0 * mtbf_s)) ** 0.5
    near = (2.0 * stall_s * mtbf_s) ** 0.5 * (1.0 + ratio / 3.0 + ratio * ratio / 9.0) - stall_s
    return where(stall_s < 2.0 * mtbf_s, near, mtbf_s)


def best_interval_s(stall_s: Num, mtbf_s: Num) -> Num:
    r"""Best work between checkpoints for exponential failures, exact.

    It is the $\tau$ at which $(e^{(\tau + \delta)/M} - 1)/\tau$ is least, whatever the restart and the lag:

    $$\frac{\tau + \delta}{M} + \ln\left(1 - \frac{\tau}{M}\right) = 0, \qquad
    \tau = M \left(1 + W(-e^{-1 - \delta/M})\right)$$

    The left side falls and is concave in $\tau$; Newton's method falls from $M (1 - e^{-1-\delta/M})$ to the root.

    Args:
        stall_s: $\delta$, what one checkpoint stalls the run (s), above zero.
        mtbf_s: $M$, mean time between failures of the job (s).

    Source: derivative of :func:`segment_s` over $\tau$; Daly (2006), eq. 33.

    >>> tau, stall, mtbf = best_interval_s(2.0, 400.0), 2.0, 400.0
    >>> abs((tau + stall) / mtbf + float(np.log(1 - tau / mtbf))) < 1e-12, round(tau, 2)
    (True, 38.68)
    """
    d = np.minimum(np.asarray(stall_s / mtbf_s, dtype=float), LONGEST)
    u = -np.expm1(-1.0 - d)
    for _ in range(NEWTON):
        u = u + (u + d + np.log1p(-u)) * (1.0 - u) / u
    found = u * mtbf_s
    return found if isinstance(found, np.ndarray) and found.ndim else float(found)


def segment_s(interval_s: Num, stall_s: Num, lag_s: Num, restart_s: Num, mtbf_s: Num) -> Num:
    r"""Expected time from one safe checkpoint to the next, failures included.

    $$t = M e^{(R + L)/M} \left(e^{(\tau + \delta)/M} - 1\right)$$

    From a safe checkpoint on, $P = \tau + \delta$ without a failure makes the next one safe. A failure leads to a
    restart (which may fail too), and then $P + L$ have to pass without one, as the copy that was being written is lost:
    $t = (1 - e^{-P/M}) (M + f + t_0)$ with $f = M (e^{R/M} - 1)$ and $t_0 = (e^{(P+L)/M} - 1)(M + f)$.

    Args:
        interval_s: $\tau$, work between checkpoints (s).
        stall_s: $\delta$, what one checkpoint stalls the run (s).
        lag_s: $L \le \tau + \delta$, from the end of the stall until the checkpoint is safe (s).
        restart_s: $R$, from a failure until the run works again (s).
        mtbf_s: $M$, mean time between failures of the job (s).

    Source: Daly (2006), eq. 20, for $L = 0$; with a lag by the argument above.

    Failures that never come cost nothing: 90 s of work and 10 s of stall are 100 s.

    >>> round(segment_s(90.0, 10.0, 0.0, 60.0, 1e12), 3)
    100.0
    >>> round(segment_s(90.0, 10.0, 0.0, 0.0, 100.0), 3) == round(100 * (exp(1.0) - 1), 3)
    True
    """
    return mtbf_s * exp((restart_s + lag_s) / mtbf_s) * (exp((interval_s + stall_s) / mtbf_s) - 1.0)


def stretch(interval_s: Num, stall_s: Num, lag_s: Num, restart_s: Num, mtbf_s: Num) -> Num:
    r"""Expected time of a long run over the time of its work: $t(\tau) / \tau$ of :func:`segment_s`.

    >>> round(stretch(90.0, 10.0, 0.0, 60.0, 1e12), 6)
    1.111111
    """
    return segment_s(interval_s, stall_s, lag_s, restart_s, mtbf_s) / interval_s


def restarting_share(restart_s: Num, mtbf_s: Num) -> Num:
    r"""Share of the time of a run that restarts take: $1 - e^{-R/M}$.

    A restart of $R$ = `restart_s` is repeated when it fails, after $M$ = `mtbf_s` on average (s).
    A run of $T$ has $T/M$ failures, each begins a restart, and one lasts $M (1 - e^{-R/M})$ on average until it is
    through or fails again.

    Source: Wald's identity.

    >>> round(restarting_share(10.0, 1000.0), 5)
    0.00995
    """
    return 1.0 - exp(-restart_s / mtbf_s)


def spare_wait_s(mtbf_s: float, repair_s: float, spares: int) -> float:
    r"""Mean wait for a working node when one has failed.

    Nodes fail at $1/M$ while the job works and take $r$ on average to repair, all at once. A failure finds all $S$
    spares under repair with the probability of Erlang's loss formula; the job then waits for the first of $S + 1$:

    $$w = \frac{a^S / S!}{\sum_{k \le S} a^k / k!} \cdot \frac{r}{S + 1}, \qquad a = \frac{r}{M}$$

    Args:
        mtbf_s: $M$, mean time between failures that take a node out (s).
        repair_s: $r$, mean time until a node is back (s).
        spares: $S$, nodes more than the job needs.

    Source: Erlang (1917), formula B, by its recursion; exponential repairs, of which the least of $j$ takes $r/j$.

    Without spares every failure waits for its repair; one spare, with $a = 1$, is under repair half of the time:

    >>> spare_wait_s(1e6, 3600.0, 0), spare_wait_s(100.0, 100.0, 1)
    (3600.0, 25.0)
    """
    busy, load = 1.0, repair_s / mtbf_s
    for k in range(1, spares + 1):
        busy = load * busy / (k + load * busy)
    return busy * repair_s / (spares + 1)


def slowest_of(ranks: Num, spread: Num) -> Num:
    r"""Mean time of the slowest of many ranks over that of one, where times vary from step to step and rank to rank.

    $$1 + \sigma\, \Phi^{-1}\left(\frac{n - 0.375}{n + 0.25}\right)$$

    Args:
        ranks: $n$, ranks that wait for each other.
        spread: $\sigma$, standard deviation of the time of one rank over its mean; normal and independent.

    Source: Blom, Statistical estimates and transformed beta-variables (1958): mean of the largest of $n$ normal values.

    >>> slowest_of(1, 0.05), round(slowest_of(1000, 0.01), 4)
    (1.0, 1.0323)
    """
    quantile = np.vectorize(NormalDist().inv_cdf, otypes=[float])((ranks - 0.375) / (ranks + 0.25))
    return 1.0 + spread * (quantile if quantile.ndim else float(quantile))


def lost_work_s(wall_s: Num, work_s: Num, stalls_s: Num, restarts_s: Num) -> Num:
    r"""Time of a run lost to failures, which undo work and stalls: the remainder of its time, not below zero (s).

    $$t = [T - W - S - R]_+$$

    where $T$ = `wall_s` is the time of the run, of which $W$ = `work_s`, $S$ = `stalls_s` and $R$ = `restarts_s`
    are known.

    >>> lost_work_s(120.0, 100.0, 5.0, 10.0)
    5.0
    """
    return maximum(wall_s - work_s - stalls_s - restarts_s, 0.0)
