"""Closed forms of pipeline schedules that a simulation is held against: bubble, activations, weights, staleness."""

from __future__ import annotations

from steptime.num import Num, ceil_div, maximum, minimum


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


def split_backward_bubble_s(stages: Num, forward_s: Num, inputs_s: Num, weights_s: Num, filling: Num) -> Num:
    r"""Longest wait of a rank of equal stages under ZB-H1 and ZB-H2, from its first pass to its last.

    $$t = \big[(p - 1)(T_F + T_I) - f \min(T_F, T_W)\big]_+$$

    where $p$ = `stages`, $T_F$ = `forward_s`, $T_I$ = `inputs_s` and $T_W$ = `weights_s` are the passes of a stage
    forward, for gradients of inputs and of weights, in seconds, and $f$ = `filling`
    (:func:`~steptime.cost.pipeline.filling_passes`) passes fill the wait: before the first backward pass with forward
    passes, after the last forward pass with gradients of weights. For $T_W \le T_F$ it is
    :func:`~steptime.cost.pipeline.zero_bubble_s` of equal stages. Messages take no time.

    Source: Qi et al., arXiv 2401.10241, table 1 ($T_W \le T_F$); longer $T_W$ by the longest path.

    >>> [split_backward_bubble_s(4, 1.0, 1.0, 1.0, filling) for filling in (0, 3, 6)]
    [6.0, 3.0, 0.0]
    >>> split_backward_bubble_s(4, 1.0, 1.0, 2.0, 3)   # longer gradients of weights fill no more
    3.0
    """
    return maximum((stages - 1) * (forward_s + inputs_s) - filling * minimum(forward_s, weights_s), 0.0)


def v_shaped_bubble_s(stages: Num, micro_batches: Num, forward_s: Num, inputs_s: Num, weights_s: Num) -> Num:
    r"""Longest wait of a rank under ZB-V, from its first pass to its last.

    $$t = (p - 1)(T_I - T_W) + [2p - 1 - m]_+\,T_F$$

    where $p$ = `stages` is the number of ranks, $m$ = `micro_batches`, and $T_F$ = `forward_s`, $T_I$ = `inputs_s` and
    $T_W$ = `weights_s` are the passes of a rank forward, for gradients of inputs and of weights, in seconds. Exact for
    $T_W \le T_F \le T_I$ and $m \ge 2p - 1$, and for any $m$ where all three are alike. Messages take no time.

    Source: Qi et al., arXiv 2401.10241, section 6 (no bubble where all three are alike); unequal ones and few
    micro-batches by the longest path.

    >>> v_shaped_bubble_s(4, 8, 1.0, 1.0, 1.0), v_shaped_bubble_s(4, 4, 1.0, 1.0, 1.0)
    (0.0, 3.0)
    >>> v_shaped_bubble_s(3, 8, 1.0, 1.5, 0.75)
    1.5
    """
    return (stages - 1) * (inputs_s - weights_s) + maximum(2 * stages - 1 - micro_batches, 0.0) * forward_s


def paired_bubble_s(stages: Num, forward_s: Num, inputs_s: Num, weights_s: Num) -> Num:
    r"""Longest wait of a rank under DualPipe, from its first pass to its last, where pairs take as long as their parts.

    $$t = w\left(2\,T_F + [T_I - T_W]_+\right) + \left[w\,T_I - (w + 1)\,T_F\right]_+, \qquad w = \frac{p}{2} - 1$$

    where $p$ = `stages` (even), and $T_F$ = `forward_s`, $T_I$ = `inputs_s` and $T_W$ = `weights_s` are the passes of a
    stage forward, for gradients of inputs and of weights, in seconds. Where all three are alike it is
    :func:`~steptime.cost.pipeline.dual_pipe_bubble_s`. Messages take no time.

    Source: DeepSeek-V3, arXiv 2412.19437, table 2 (passes that are alike); unequal ones by the longest path of its
    schedule, figure 5.

    >>> paired_bubble_s(8, 1.0, 1.0, 1.0), paired_bubble_s(8, 1.0, 1.5, 0.75), paired_bubble_s(2, 1.0, 1.0, 1.0)
    (6.0, 8.75, 0.0)
    """
    waits = stages / 2 - 1
    late = maximum(waits * inputs_s - (waits + 1) * forward_s, 0.0)
    return waits * (2 * forward_s + maximum(inputs_s - weights_s, 0.0)) + late


def v_shaped_in_flight(stages: Num, micro_batches: Num, stage: Num) -> Num:
    r"""Micro-batches whose activations a rank holds under ZB-V, each of a $p$-th part of the model.

    $$n = \min\left(p,\ m,\ \frac{m + 1 + r}{2}\right)$$

    where $p$ = `stages` is the number of ranks, $m$ = `micro_batches` and $r$ = `stage` is the rank, from 0.

    Source: Qi et al., arXiv 2401.10241, section 6 ($p$: the memory of 1F1B); few micro-batches by the schedule.

    >>> v_shaped_in_flight(4, 16, 0), v_shaped_in_flight(4, 4, 0)
    (4, 2.5)
    """
    return minimum(minimum(stages, micro_batches), (micro_batches + 1 + stage) / 2)


def chimera_bubble_s(stages: Num, micro_batches: Num, forward_s: Num, backward_s: Num) -> Num:
    r"""Idle time of a rank under Chimera: two pipelines of opposite directions share the ranks.

    $$t = (p - 2)\left(\max(T_F, T_B) + \left(\frac{m}{p} - 1\right)\lvert T_F - T_B\rvert\right)$$

    where $p$ = `stages` (even), $m$ = `micro_batches` in groups of $p$ that follow each other directly, and $T_F$ =
    `forward_s` and $T_B$ = `backward_s` are the passes of a stage in seconds. Messages take no time.

    Source: Li and Hoefler, arXiv 2107.06925, table 2 ($T_B = T_F$: $p - 2$ of $2m + p - 2$ slots; one group and
    $T_B = 2\,T_F$: $p - 2$ of $3m/2 + p - 2$); several groups of unequal passes by the longest path.

    >>> chimera_bubble_s(4, 16, 1.0, 1.0), chimera_bubble_s(4, 4, 1.0, 2.0), chimera_bubble_s(4, 8, 1.0, 2.0)
    (2.0, 4.0, 6.0)
    """
    longer_s, shorter_s = maximum(forward_s, backward_s), minimum(forward_s, backward_s)
    return (stages - 2) * (longer_s + (micro_batches / stages - 1) * (longer_s - shorter_s))


def chimera_in_flight(stages: Num, stage: Num) -> Num:
    r"""Micro-batches whose activations a rank holds under Chimera, each of a $p$-th part of the model.

    $$n = \min\left(p,\ \frac{p}{2} + 1 + \min(r, p - 1 - r)\right)$$

    where $p$ = `stages` (even) and $r$ = `stage` is the rank, from 0.

    Source: Li and Hoefler, arXiv 2107.06925, table 2 ($p/2 + 1$ to $p$).

    >>> [chimera_in_flight(6, rank) for rank in range(6)]
    [4, 5, 6, 6, 5, 4]
    """
    nearer = minimum(stage, stages - 1 - stage)
    return minimum(stages, stages // 2 + 1 + nearer)


def sliced_bubble_s(stages: Num, slices: Num, each_s: Num) -> Num:
    r"""Time in which a rank waits where equal slices of sequences pass the stages one after another.

    $$t = (p - 1)\,\frac{t_1}{s}$$

    where $p$ = `stages`, $s$ = `slices` of each sequence and $t_1$ = `each_s` is the time of one micro-batch in one
    stage, forward and backward, in seconds.

    Source: Li et al. (TeraPipe), arXiv 2102.07988, section 3.2.

    >>> sliced_bubble_s(4, 8, 3.0)
    1.125
    """
    return (stages - 1) * each_s / slices


def stashed_versions(stages: Num, per_update: Num, stage: Num) -> Num:
    r"""Versions of its weights that a stage holds if each backward pass reads the weights of its forward pass.

    $$n = 1 + \left\lceil \frac{p - 1 - i}{k} \right\rceil$$

    where $p$ = `stages`, an update follows each $k$ = `per_update` micro-batches of a long run, and $i$ = `stage`
    counts from 0. The first stage of PipeDream ($k = 1$) holds as many versions as there are stages.

    Source: Harlap et al., arXiv 1806.03377, section 3.3.

    >>> [stashed_versions(4, 1, stage) for stage in range(4)], stashed_versions(4, 4, 0)
    ([4, 3, 2, 1], 2)
    """
    return 1 + ceil_div(stages - 1 - stage, per_update)


def mirrored_delay(stages: Num, per_update: Num, stage: Num) -> Num:
    r"""Updates between a forward pass that reads weights and the update by its gradient, in PipeMare.

    $$\tau = \frac{2(p - 1 - i) + 1}{k}$$

    where $p$ = `stages`, an update follows each $k$ = `per_update` micro-batches and $i$ = `stage` counts from 0. In
    each slot a stage makes a forward pass and the backward pass of an earlier micro-batch.

    Source: Yang et al., arXiv 1910.05124, table 1 (its stages count from 1).

    >>> [mirrored_delay(4, 1, stage) for stage in range(4)]
    [7.0, 5.0, 3.0, 1.0]
    """
    return (2 * (stages - 1 - stage) + 1) / per_update
