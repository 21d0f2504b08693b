"""The bottleneck of a plan, and its step time on machines that are better in one respect."""

from __future__ import annotations

from steptime.estimate.evaluate import Evaluation, passes_of, works_of
from steptime.estimate.layer import part_times
from steptime.estimate.machine import Machine
from steptime.estimate.step import compose
from steptime.estimate.step_inputs import inputs_of
from steptime.terms import Terms

#: Name of a what-if -> factors of the machine's rates.
WHAT_IF: dict[str, dict[str, float]] = {
    "matrix_rate_x2": {"matrix_flops_per_s": 2.0, "attention_flops_per_s": 2.0},
    "memory_bandwidth_x2": {"memory_Bps": 2.0},
    "fast_links_x2": {"fast_Bps": 2.0},
    "slow_links_x2": {"slow_Bps": 2.0, "lone_slow_Bps": 2.0},
    "latencies_x0.5": {"kernel_latency_s": 0.5, "fast_latency_s": 0.5, "slow_latency_s": 0.5},
}
#: Further what-ifs of jobs that keep something on the host.
WHAT_IF_OFFLOADED = {**WHAT_IF, "host_link_x2": {"host_Bps": 2.0}}


def bottleneck_of(time: Terms) -> str:
    """The largest group of exposed terms, with its share.

    >>> bottleneck_of(Terms({"compute/x_s": 3.0, "bubble/y_s": 1.0}))
    'compute (75 %)'
    """
    groups = time.rollup(1)
    name = max(groups, key=lambda group: groups[group])
    return f"{name} ({100 * groups[name] / time.total:.0f} %)"


def what_if(e: Evaluation) -> dict[str, float]:
    """Step time of the same plan on a machine that is better in one respect."""
    known = WHAT_IF_OFFLOADED if e.job.offload else WHAT_IF
    return {name: step_time_on(e, e.machine.faster(**factors)) for name, factors in known.items()}


def step_time_on(e: Evaluation, machine: Machine) -> float:
    """Step time of the same plan on another machine."""
    passes = passes_of(works_of(part_times(e.block, e.plans, machine), e.job, e.plans), e.job.framework)
    return float(compose(inputs_of(e, machine), passes, e.job.framework).total_s)
