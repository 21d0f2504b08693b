"""Closed forms of pipeline schedules that a simulation is held against: bubble, activations, weights, staleness."""

from __future__ import annotations

from steptime.num import Num, ceil_div, maximum, minimum


def naive_bubble_s(all_stages_s: Num, slowest_stage_s: Num, micro_batches: Num) -> Num:
    r"""Time in which a rank waits where one micro-batch passes all stages forward and back before the next one starts.

    $$t = m \left(\sum_i t_i - t_{\max}\right)$$

    where $\sum_i t_i$ = `all_stages_s` is one micro-batch through all stages forward and backward, $t_{\max}$ =
    `slowest_stage_s` the part of the slowest stage, in seconds, and $m$ = `micro_batches`. With $p$ equal stages it is
    $1 - 1/p$ of the step.

    Source: Huang et al., arXiv 1811.06965, figure 2b.

    >>> naive_bubble_s(12.0, 3.0, 8)
    72.0
    """
    return micro_batches * (all_stages_s - slowest_stage_s)


def breadth_first_bubble_s(all_stages_s: Num, slowest_stage_s: Num, micro_batches: Num, virtual_stages: Num) -> Num:
    r"""Time in which a rank waits where all micro-batches pass a virtual stage before the next one of the rank begins.

    $$t = \frac{\sum_i t_i - t_{\max} + (v - 1) \left[\sum_i t_i - m\,t_{\max}\right]_+}{v}$$

    where $\sum_i t_i$ = `all_stages_s` is one micro-batch through all stages forward and backward, $t_{\max}$ =
    `slowest_stage_s` the part of the slowest rank, in seconds, $m$ = `micro_batches` and $v$ = `virtual_stages` per
    rank. With fewer micro-batches than equal stages a rank also waits for the first of them to come round, once for
    each further virtual stage.

    Source: Lamy-Poirier, arXiv 2211.05953, section 4; few micro-batches by the longest path.

    >>> breadth_first_bubble_s(12.0, 3.0, 8, 2), breadth_first_bubble_s(12.0, 3.0, 3, 2)
    (4.5, 6.0)
    """
    round_s = maximum(all_stages_s - micro_batches * slowest_stage_s, 0.0)
    return (all_stages_s - slowest_stage_s + (virtual_stages - 1) * round_s) / virtual_stages


def v_shaped_bubble_s(
    stages: Num,
    micro_batches: Num,
    forward_s: Num,
    inputs_s: Num,
    weights_s: Num,
    all_stages_s: Num,
    slowest_stage_s: Num,
) -> Num:
    r"""Longest wait of a rank under ZB-V, from its first pass to its last.

    $$t = \left[(p - 1)(T_I - T_W) + [2p - 1 - m]_+\,T_F - m\,(t_{\max} - \bar t)\right]_+$$

    where $p$ = `stages` is the number of ranks, $m$ = `micro_batches`, $T_F$ = `forward_s`, $T_I$ = `inputs_s` and
    $T_W$ = `weights_s` are the passes of a rank forward, for gradients of inputs and of weights, each the mean over the
    ranks, in seconds. The slowest rank takes $t_{\max}$ = `slowest_stage_s` for a micro-batch in place of the mean
    $\bar t$ = `all_stages_s` $/ p$, which the others wait for. Exact for equal ranks, $T_W \le T_F \le T_I$ and
    $m \ge 2p - 1$, and for any $m$ where all three are alike. Messages take no time.

    Source: Qi et al., arXiv 2401.10241, section 6 (no bubble where all three are alike); unequal ones and few
    micro-batches by the longest path.

    >>> v_shaped_bubble_s(4, 8, 1.0, 1.0, 1.0, 12.0, 3.0), v_shaped_bubble_s(4, 4, 1.0, 1.0, 1.0, 12.0, 3.0)
    (0.0, 3.0)
    >>> v_shaped_bubble_s(3, 8, 1.0, 1.5, 0.75, 9.75, 3.25)
    1.5
    """
    whole = (stages - 1) * (inputs_s - weights_s) + maximum(2 * stages - 1 - micro_batches, 0.0) * forward_s
    return maximum(whole - micro_batches * (slowest_stage_s - all_stages_s / stages), 0.0)


def v_shaped_in_flight(stages: Num, micro_batches: Num, stage: Num) -> Num:
    r"""Micro-batches whose activations a rank holds under ZB-V, each of a $p$-th part of the model.

    $$n = \min\left(p,\ m,\ \frac{m + 1 + r}{2}\right)$$

    where $p$ = `stages` is the number of ranks, $m$ = `micro_batches` and $r$ = `stage` is the rank, from 0.

    Source: Qi et al., arXiv 2401.10241, section 6 ($p$: the memory of 1F1B); few micro-batches by the schedule.

    >>> v_shaped_in_flight(4, 16, 0), v_shaped_in_flight(4, 4, 0)
    (4, 2.5)
    """
    return minimum(minimum(stages, micro_batches), (micro_batches + 1 + stage) / 2)


def chimera_bubble_s(
    stages: Num,
    micro_batches: Num,
    forward_s: Num,
    inputs_s: Num,
    weights_s: Num,
    all_stages_s: Num,
    slowest_stage_s: Num,
) -> Num:
    r"""Idle time of a rank under Chimera: two pipelines of opposite directions share the ranks.

    $$t = \left[(p - 2)\left(\max(T_F, T_B) + \left(\frac{m}{p} - 1\right)\lvert T_F - T_B\rvert\right)
      - m\,(t_{\max} - \bar t)\right]_+, \quad T_B = T_I + T_W$$

    where $p$ = `stages` (even), $m$ = `micro_batches` in groups of $p$ that follow each other directly, and $T_F$ =
    `forward_s`, $T_I$ = `inputs_s` and $T_W$ = `weights_s` are the passes of a stage forward, for gradients of inputs
    and of weights, each the mean over the stages, in seconds. The slowest rank takes $t_{\max}$ = `slowest_stage_s` for
    a micro-batch in place of the mean $\bar t$ = `all_stages_s` $/ p$, which the others wait for. Messages take no
    time.

    Source: Li and Hoefler, arXiv 2107.06925, table 2 ($T_B = T_F$: $p - 2$ of $2m + p - 2$ slots; one group and
    $T_B = 2\,T_F$: $p - 2$ of $3m/2 + p - 2$); several groups of unequal passes by the longest path.

    >>> chimera_bubble_s(4, 16, 1.0, 0.5, 0.5, 8.0, 2.0), chimera_bubble_s(4, 8, 1.0, 1.0, 1.0, 12.0, 3.0)
    (2.0, 6.0)
    """
    backward_s = inputs_s + weights_s
    longer_s, shorter_s = maximum(forward_s, backward_s), minimum(forward_s, backward_s)
    whole = (stages - 2) * (longer_s + (micro_batches / stages - 1) * (longer_s - shorter_s))
    return maximum(whole - micro_batches * (slowest_stage_s - all_stages_s / stages), 0.0)


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


def chimera_doubled_bubble_s(
    stages: Num,
    micro_batches: Num,
    forward_s: Num,
    inputs_s: Num,
    weights_s: Num,
    all_stages_s: Num,
    slowest_stage_s: Num,
) -> Num:
    r"""Idle time of a rank under Chimera with forward doubling: forward passes come in pairs.

    $$t = \left[(p - 2)\left(\frac{T_F + T_B}{2} + \left(\frac{m}{2p} - 1\right)[T_B - 2 T_F]_+\right)
      - m\,(t_{\max} - \bar t)\right]_+, \quad T_B = T_I + T_W$$

    where $p$ = `stages` (even), $m$ = `micro_batches` in groups of $2p$ that follow each other directly, and $T_F$ =
    `forward_s`, $T_I$ = `inputs_s` and $T_W$ = `weights_s` are the passes of a stage forward, for gradients of inputs
    and of weights, each the mean over the stages, in seconds. Two forward passes fill the slot of one backward pass, so
    that groups join without a gap where $T_B \le 2 T_F$. The slowest rank takes $t_{\max}$ = `slowest_stage_s` for a
    micro-batch in place of the mean $\bar t$ = `all_stages_s` $/ p$, which the others wait for. Messages take no time.

    Source: Li and Hoefler, arXiv 2107.06925, section 3.5 (forward doubling); a pair's first result goes on at once, by
    the longest path.

    >>> chimera_doubled_bubble_s(8, 32, 1.0, 1.0, 1.0, 24.0, 3.0)
    9.0
    >>> chimera_doubled_bubble_s(8, 32, 1.0, 2.0, 1.0, 32.0, 4.0)
    18.0
    """
    backward_s = inputs_s + weights_s
    gap_s = maximum(backward_s - 2 * forward_s, 0.0)
    whole = (stages - 2) * ((forward_s + backward_s) / 2 + (micro_batches / (2 * stages) - 1) * gap_s)
    return maximum(whole - micro_batches * (slowest_stage_s - all_stages_s / stages), 0.0)


def chimera_doubled_in_flight(stages: Num, stage: Num) -> Num:
    r"""Micro-batches whose activations a rank holds under Chimera with forward doubling, each of a $p$-th of the model.

    $$n = \min\left(2 p,\ \frac{3 p}{2} + 1 + \min(r, p - 1 - r)\right)$$

    where $p$ = `stages` (even) and $r$ = `stage` is the rank, from 0.

    Source: Li and Hoefler, arXiv 2107.06925, section 3.5 (twice the activations); by the schedule.

    >>> [chimera_doubled_in_flight(6, rank) for rank in range(6)]
    [10, 11, 12, 12, 11, 10]
    """
    nearer = minimum(stage, stages - 1 - stage)
    return minimum(2 * stages, stages + stages // 2 + 1 + nearer)


def sliced_bubble_s(all_stages_s: Num, slowest_stage_s: Num, slices: Num) -> Num:
    r"""Time in which a rank waits where equal slices of sequences pass the stages one after another.

    $$t = \frac{\sum_i t_i - t_{\max}}{s}$$

    where $\sum_i t_i$ = `all_stages_s` is one micro-batch through all stages forward and backward, $t_{\max}$ =
    `slowest_stage_s` the part of the slowest stage, in seconds, and $s$ = `slices` of each sequence.

    Source: Li et al. (TeraPipe), arXiv 2102.07988, section 3.2.

    >>> sliced_bubble_s(12.0, 3.0, 8)
    1.125
    """
    return (all_stages_s - slowest_stage_s) / slices


def continuous_bubble_s(slowest_stage_s: Num) -> Num:
    r"""Idle time of the slowest stage under an asynchronous schedule in a long run: none, whatever its passes take.

    $$t = 0 \cdot t_{\max}$$

    where $t_{\max}$ = `slowest_stage_s` is one micro-batch in the slowest stage, in seconds. Steps run into each other,
    so that the pipeline neither fills nor drains.

    Source: Harlap et al. (PipeDream), arXiv 1806.03377, section 3.

    >>> continuous_bubble_s(3.0)
    0.0
    """
    return 0.0 * slowest_stage_s


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
