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
    """
    domains = stages / inside
    links = maximum(stages - 1, 1)
    return where(stages > 1, ((stages - domains) * fast_s + (domains - 1) * slow_s) / links, 0.0 * fast_s)


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
