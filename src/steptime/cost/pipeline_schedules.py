"""Closed forms of pipeline schedules that a simulation is held against: bubble, activations, weights, staleness."""

from __future__ import annotations

from steptime.num import Num, maximum


def naive_bubble_s(stages: Num, micro_batches: Num, each_s: Num) -> Num:
    r"""Time in which a rank waits where one micro-batch passes all stages forward and back before the next one starts.

    $$t = m\,(p - 1)\,t_1$$

    where $p$ = `stages`, $m$ = `micro_batches` and $t_1$ = `each_s` is the time of one micro-batch in one stage,
    forward and backward, in seconds: $1 - 1/p$ of the step.

    Source: Huang et al., arXiv 1811.06965, figure 2b.

    >>> naive_bubble_s(4, 8, 3.0)
    72.0
    """
    return micro_batches * (stages - 1) * each_s


def breadth_first_bubble_s(stages: Num, micro_batches: Num, virtual_stages: Num, each_s: Num) -> Num:
    r"""Time in which a rank waits where all micro-batches pass a virtual stage before the next one of the rank begins.

    $$t = \big(p - 1 + (v - 1)\,[p - m]_+\big)\,\frac{t_1}{v}$$

    where $p$ = `stages`, $m$ = `micro_batches`, $v$ = `virtual_stages` per rank and $t_1$ = `each_s` is the time of one
    micro-batch on one rank, forward and backward, in seconds. With fewer micro-batches than stages a rank also waits
    for the first of them to come round, once for each further virtual stage.

    Source: Lamy-Poirier, arXiv 2211.05953, section 4; few micro-batches by the longest path.

    >>> breadth_first_bubble_s(4, 8, 2, 3.0), breadth_first_bubble_s(4, 3, 2, 3.0)
    (4.5, 6.0)
    """
    return (stages - 1 + (virtual_stages - 1) * maximum(stages - micro_batches, 0)) * each_s / virtual_stages


def chimera_bubble_s(stages: Num, forward_s: Num, backward_s: Num) -> Num:
    r"""Idle time of a rank under Chimera, two pipelines of opposite directions with as many micro-batches as stages.

    $$t = \left(\frac{p}{2} - 1\right)(T_F + T_B)$$

    where $p$ = `stages` (even), $T_F$ = `forward_s` and $T_B$ = `backward_s` are the passes of a stage in seconds. With
    more micro-batches in groups that follow each other directly it stays so where $T_F = T_B$.

    Source: Li and Hoefler, arXiv 2107.06925, section 3.1 and table 2.

    >>> chimera_bubble_s(4, 1.0, 2.0), chimera_bubble_s(2, 1.0, 2.0)
    (3.0, 0.0)
    """
    return (stages / 2 - 1) * (forward_s + backward_s)
