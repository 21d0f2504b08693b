"""A device whose kernels and links start at once, with rates that make numbers by hand round."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from steptime.estimate.machine import Machine


def machine_of(link_Bps: float, **changes: Any) -> Machine:
    """Links of all kinds have the same bandwidth."""
    machine = Machine(
        matrix_flops_per_s=1e15, attention_flops_per_s=1e15, vector_flops_per_s=1e14, peak_flops_per_s=1e15,
        memory_Bps=1e12, memory_bytes=1e12, kernel_latency_s=0.0, fast_Bps=link_Bps, fast_latency_s=0.0,
        slow_Bps=link_Bps, lone_slow_Bps=link_Bps, slow_latency_s=0.0, host_Bps=1e11, fast_domain=8,
    )  # fmt: skip
    return replace(machine, **changes)
