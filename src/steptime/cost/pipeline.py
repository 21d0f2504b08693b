"""Pipeline schedules in closed form: bubble, transfers between stages, micro-batches in flight."""

from __future__ import annotations

from steptime.num import Num, maximum, minimum, where


def mean_stage_link_s(stages: Num, inside: Num, fast_s: Num, slow_s: Num) -> Num:
    r"""Mean time of a message over the $p-1$ links of a pipeline.

    $$t = \frac{(p - p/t)\, t_f + (p/t - 1)\, t_s}{p - 1}\Big|_{p>1}$$

    where $p$ = `stages`, $t$ = `inside` of them share a fast domain, $t_f$ = `fast_s` is the time of a message inside
    a domain and $t_s$ = `slow_s` between domains.

    Source: arXiv 2410.00273, pipeline communication.

    >>> mean_stage_link_s(8, 4, 1.0, 8.0)   # six fast links, one slow
    2.0
    >>> mean_stage_link_s(2, 2, 1.0, 8.0), mean_stage_link_s(2, 1, 1.0, 8.0), mean_stage_link_s(1, 1, 1.0, 8.0)
    (1.0, 8.0, 0.0)
    """
    domains = stages / inside
    links = maximum(stages - 1, 1)
    return where(stages > 1, ((stages - domains) * fast_s + (domains - 1) * slow_s) / links, 0.0 * fast_s)


def waited_messages(stages: Num, micro_batches: Num, virtual_stages: Num, hides: Num) -> Num:
    r"""Messages between stages that a step waits for, without those that fill and drain the pipeline.

    $$n = 2\,m\,v \qquad
      n_h = \min\Big(n,\ 2\big[\tfrac{p-1}{p}\,m - 1\big]_+\Big|_{v=1},\ 2\,p\,(v-1)\Big|_{v>1}\Big)$$

    where $m$ = `micro_batches` pass $p$ = `stages` of $v$ = `virtual_stages` chunks each, one message per chunk and
    direction, and $n_h$ of them are waited for where messages may run beside computation (`hides` = 1). Interleaved,
    the first micro-batch still crosses all $p v - 1$ links either way; 1F1B waits for the round trip of every group of
    $p$ micro-batches, whose forward pass needs a backward pass to have come back. The $2(p-1)$ that fill and drain the
    pipeline are in its bubble.

    Source: longest path of the schedules of arXiv 2104.04473, section 2.2.

    >>> waited_messages(4, 8, 1, 0.0), waited_messages(4, 8, 1, 1.0), waited_messages(4, 8, 2, 1.0)
    (16.0, 10.0, 8.0)
    """
    shown = 2.0 * micro_batches * virtual_stages
    round_trips = 2 * maximum((stages - 1) / stages * micro_batches - 1, 0.0)
    waited = where(virtual_stages > 1, 2 * stages * (virtual_stages - 1), round_trips)
    return shown - hides * (shown - minimum(waited, shown))


def paired_messages(micro_batches: Num, virtual_stages: Num, hides: Num) -> Num:
    r"""Messages that a step of DualPipe waits for, without those that fill and drain the pipeline.

    $$n = 2\,m\,v\,(1 - h)$$

    where $m$ = `micro_batches` pass $v$ = `virtual_stages` chunks of a rank, and $h$ = `hides` is 1 where messages may
    run next to computation: what pairs of passes send or receive hides completely.

    Source: DeepSeek-V3, arXiv 2412.19437, section 3.2.1.

    >>> paired_messages(8, 1, 0.0), paired_messages(8, 1, 1.0)
    (16.0, 0.0)
    """
    return 2 * micro_batches * virtual_stages * (1.0 - hides)


def serial_messages(stages: Num, micro_batches: Num) -> Num:
    r"""Messages that a step waits for where one micro-batch passes all stages before the next one starts.

    $$n = 2\,(m - 1)\,(p - 1)$$

    where $m$ = `micro_batches` cross the $p - 1$ links of $p$ = `stages` there and back; those of the first micro-batch
    are counted as filling and draining the pipeline.

    Source: Huang et al., arXiv 1811.06965, figure 2b.

    >>> serial_messages(4, 8)
    42
    """
    return 2 * (micro_batches - 1) * (stages - 1)


def pipeline_bubble_s(all_stages_s: Num, slowest_stage_s: Num, virtual_stages: Num) -> Num:
    r"""Idle time of the slowest stage while the pipeline fills and drains (GPipe, 1F1B, interleaved 1F1B).

    $$t = \frac{\sum_i t_i - t_{\max}}{v}$$

    where $\sum_i t_i$ = `all_stages_s` is one micro-batch through all stages forward and backward, $t_{\max}$ =
    `slowest_stage_s` the part of the slowest stage, $v$ = `virtual_stages` per rank. With $p$ equal stages it is the
    familiar $(p-1)\,t/v$.

    Source: Narayanan et al., arXiv 2104.04473, section 2.2; unequal stages by the same argument.

    >>> pipeline_bubble_s(8.0, 2.0, 1)   # four equal stages of 2 s
    6.0
    """
    return (all_stages_s - slowest_stage_s) / virtual_stages


def zero_bubble_s(
    all_stages_s: Num,
    slowest_stage_s: Num,
    all_weights_s: Num,
    slowest_weights_s: Num,
    first_weights_s: Num,
    slowest_forward_s: Num,
    filling: Num,
    virtual_stages: Num,
) -> Num:
    r"""Bubble of schedules that move the gradients of weights out of the way of the other stages.

    $$t = \frac{1}{v}\left[\sum_i (t_i - w_i) - (t_{\max} - w_{\max}) + w_1 - w_{\max}
      - f \min(w_{\max}, t_F)\right]_+$$

    where $\sum_i t_i$ = `all_stages_s` and $t_{\max}$ = `slowest_stage_s` are as in :func:`pipeline_bubble_s`,
    $\sum_i w_i$ = `all_weights_s`, $w_{\max}$ = `slowest_weights_s` and $w_1$ = `first_weights_s` the parts of all
    stages, of the slowest and of the first that make gradients of weights, $t_F$ = `slowest_forward_s` the forward pass
    of the slowest stage, $f$ = `filling` (:func:`filling_passes`) and $v$ = `virtual_stages`. The slowest stage waits
    for the other passes of all others. It fills the wait with $f$ of its own passes: before its first backward pass
    with forward passes, after its last forward pass with gradients of weights. The last stage has the latter alone, so
    that its $t_F$ is $w_{\max}$. The last gradient of weights falls in the time of that of the first stage. With equal
    stages and enough micro-batches it is $(p-1)(T_F + T_B - T_W)$ for ZB-H1 ($f = p-1$) and
    $(p-1)(T_F + T_B - 2\,T_W)$ for ZB-H2 ($f = 2(p-1)$), $T_B$ without $T_W$ and $T_W \le T_F$. Steps follow each
    other without a barrier.

    Source: Qi et al., arXiv 2401.10241, table 1 ($T_W \le T_F$); longer $T_W$ and unequal stages by the longest path.

    >>> [zero_bubble_s(12.0, 3.0, 4.0, 1.0, 1.0, 1.0, filling, 1) for filling in (0, 3, 6)]   # F = B = W = 1
    [6.0, 3.0, 0.0]
    >>> zero_bubble_s(13.5, 4.5, 4.5, 1.5, 1.0, 1.5, 3, 1)   # the last of four stages half as slow again
    1.0
    >>> zero_bubble_s(16.0, 4.0, 8.0, 2.0, 2.0, 1.0, 3, 1)   # gradients of weights of 2 s fill as much as those of 1 s
    3.0
    """
    others_s = pipeline_bubble_s(all_stages_s - all_weights_s, slowest_stage_s - slowest_weights_s, 1)
    unfilled_s = filling * maximum(slowest_weights_s - slowest_forward_s, 0.0)
    return maximum(others_s + first_weights_s - (filling + 1) * slowest_weights_s + unfilled_s, 0.0) / virtual_stages


def dual_pipe_bubble_s(
    stages: Num,
    virtual_stages: Num,
    forward_s: Num,
    inputs_s: Num,
    weights_s: Num,
    hidden_s: Num,
    all_stages_s: Num,
    slowest_stage_s: Num,
) -> Num:
    r"""Idle time of a rank under DualPipe, whose pipeline runs from both ends at once, and under DualPipeV.

    $$t = \frac{1}{v} \max\Big(w\,(2\,T_F + [T_I - T_W]_+ - h) + \big[w\,T_I - (w + 1)\,T_F\big]_+
      - 2\,v\,(p-1)\,(t_{\max} - \bar t),\ w\,[T_I - T_W]_+\Big), \quad w = \frac{p\,v}{2} - 1$$

    where $p$ = `stages` is the number of ranks, $v$ = `virtual_stages` (1, or 2 for DualPipeV), $T_F$ = `forward_s`,
    $T_I$ = `inputs_s` and $T_W$ = `weights_s` are the passes of a rank forward, for gradients of inputs and of weights,
    each the mean over the ranks, and $h$ = `hidden_s` is what a forward and a backward pass save when they run as a
    pair, all in seconds. Where a rank takes $t_{\max}$ = `slowest_stage_s` in place of the mean $\bar t$ =
    `all_stages_s` $/ p$, the others catch up with it by the difference at each of the $2(p-1)$ passes that fill and
    drain the pipeline, but for the least that its ends wait for. With passes that are alike it is the published
    $w\,(T_{F\&B} + T_B - 3\,T_W)$. Messages take no time.

    Source: DeepSeek-V3, arXiv 2412.19437, table 2 (passes that are alike); other passes and unequal stages by the
    longest path of its schedule, figure 5.

    >>> dual_pipe_bubble_s(8, 1, 1.0, 1.0, 1.0, 0.0, 24.0, 3.0)
    6.0
    >>> dual_pipe_bubble_s(8, 1, 1.0, 1.5, 0.75, 0.0, 26.0, 3.25)
    8.75
    >>> dual_pipe_bubble_s(4, 2, 2.0, 2.0, 2.0, 0.0, 24.0, 6.0)   # DualPipeV on half of the ranks
    6.0
    >>> dual_pipe_bubble_s(8, 1, 1.0, 1.0, 1.0, 0.0, 25.6, 5.0)   # a rank that is slower by more than they wait
    0.0
    """
    waits = stages * virtual_stages / 2 - 1
    least = waits * maximum(inputs_s - weights_s, 0.0)
    late = maximum(waits * inputs_s - (waits + 1) * forward_s, 0.0)
    caught_up = 2 * virtual_stages * (stages - 1) * (slowest_stage_s - all_stages_s / stages)
    whole = waits * (2 * forward_s - hidden_s) + least + late
    return maximum(maximum(whole - caught_up, least), 0.0) / virtual_stages


def filling_passes(fills: Num, stages: Num, micro_batches: Num) -> Num:
    r"""Passes for gradients of weights with which a stage fills its bubble.

    $$f = \min\left(k\,(p - 1),\ n_m - 1\right)$$

    where $k$ = `fills` of them are put off per stage before (ZB-H1: 1, ZB-H2: 2) of the $p$ = `stages`, but no more
    than there are: of the $n_m$ = `micro_batches` of a step all but the last, whose backward pass ends the step on the
    first stage.

    Source: Qi et al., arXiv 2401.10241, table 1; few micro-batches by the longest path: forward to the last stage, its
    $n_m$ passes, and back.

    >>> [filling_passes(fills, 5, 64) for fills in (1.0, 2.0)], filling_passes(2.0, 5, 5)
    ([4.0, 8.0], 4)
    """
    return minimum(fills * (stages - 1), micro_batches - 1)


def zero_bubble_in_flight(stages: Num, micro_batches: Num, depths: Num) -> Num:
    r"""Micro-batches whose activations a stage holds under ZB-H1 and ZB-H2.

    $$m = \min\left(n_m,\ d\,p - (d - 1)\right)$$

    where $p$ = `stages`, $n_m$ = `micro_batches` of a step and $d$ = `depths`: 1 for ZB-H1 ($p$), 2 for ZB-H2
    ($2p - 1$), on every stage.

    Source: Qi et al., arXiv 2401.10241, table 1 and section 2.

    >>> zero_bubble_in_flight(8, 64, 1), zero_bubble_in_flight(8, 64, 2), zero_bubble_in_flight(8, 4, 2)
    (8, 15, 4)
    """
    return minimum(micro_batches, depths * stages - (depths - 1))


def dual_pipe_in_flight(stages: Num, micro_batches: Num) -> Num:
    r"""Micro-batches whose activations a rank holds under DualPipe, of both of its stages together.

    $$m = \min\left(n_m,\ p + 1\right)$$

    where $p$ = `stages` and $n_m$ = `micro_batches` of a step: $p + 1$ passes of two equal stages.

    Source: DeepSeek-V3, arXiv 2412.19437, table 2.

    >>> dual_pipe_in_flight(8, 20)
    9
    """
    return minimum(micro_batches, stages + 1)


def dual_pipe_in_flight_at_ends(stages: Num, micro_batches: Num, share: Num) -> Num:
    r"""Micro-batches that the ranks of the first and the last stage hold under DualPipe, over what both keep of one.

    $$m = \max\Big(\big(\min(n_m, p) - 1\big)\,s + (1 - s),\ \min(n_m, p)\,s\Big)$$

    where $p$ = `stages`, $n_m$ = `micro_batches` of a step and the first stage keeps $s$ = `share` of what both keep:
    $p$ passes of the first, or one less (of $p = 2$ as many) and one of the last.

    Source: the schedule of DeepSeek-V3, arXiv 2412.19437, figure 5.

    >>> [dual_pipe_in_flight_at_ends(8, 20, share) for share in (0.5, 0.25)]
    [4.0, 2.5]
    """
    most = minimum(micro_batches, stages)
    return maximum(where(stages > 2, most - 1, most) * share + 1 - share, most * share)


def micro_batches_in_flight(stages: Num, micro_batches: Num, virtual_stages: Num, stage: Num) -> Num:
    r"""Micro-batches whose activations a stage holds at the peak of (interleaved) 1F1B.

    $$m = \min\left(n_m,\ p - i\right)\Big|_{v=1} \qquad
      m = \min\left(n_m,\ \frac{(v-1)p + 2(p-i-1) + 1}{v}\right)\Big|_{v>1}$$

    where $p$ = `stages`, $n_m$ = `micro_batches` of a step, $v$ = `virtual_stages` per rank and $i$ = `stage` counts
    from 0. Interleaving warms up with that many chunks of $1/v$ of a stage; the first stage then holds
    $1 + (p-1)/(pv)$ times what it holds under 1F1B.

    Source: Korthikanti et al., arXiv 2205.05198, section 4.2.3; Narayanan et al., arXiv 2104.04473, section 2.2.

    >>> micro_batches_in_flight(8, 64, 1, 0), micro_batches_in_flight(8, 4, 1, 0)
    (8, 4)
    >>> micro_batches_in_flight(4, 64, 2, 0), micro_batches_in_flight(4, 64, 2, 3)
    (5.5, 2.5)
    """
    chunks = (virtual_stages - 1) * stages + 2 * (stages - stage - 1) + 1
    return minimum(micro_batches, where(virtual_stages > 1, chunks / virtual_stages, stages - stage))
