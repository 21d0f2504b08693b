"""The statistics that the published code prints for a configuration, under its names and in its units."""

from __future__ import annotations

from typing import Any

from steptime.estimate.evaluate import Evaluation
from steptime.estimate.layer import RECOMPUTE, PhaseTime, shown_s
from steptime.estimate.memory import stage_terms
from steptime.num import Num

TERA, GIGA = 1e-12, 1e-9


def flops_of(time: PhaseTime, e: Evaluation) -> Num:
    """Vector work of fused attention is counted as the matrix work that would take as long."""
    rate = e.machine.matrix_flops_per_s / e.machine.vector_flops_per_s
    return time.matrix_flops + time.vector_flops * (rate if time.row.operator == "fused_attention" else 1.0)


def statistics(e: Evaluation) -> dict[str, Any]:
    """Throughput, statistics and configuration of one plan in the words of the published code.

    Times in seconds, memory in GB (1e9 bytes), FLOPs in TFLOP per device. Attention recomputation is in `t` but, as
    in the published code, in none of the components.
    """
    times = [time for time in e.times["layer"] if time.phase != RECOMPUTE]
    count = e.step.micro_batches * e.step.stage.layers
    t = e.step_time_s
    parts = {
        "comp": sum(time.compute_s for time in times) * count,
        "mem": sum(time.exposed_memory_s for time in times) * count,
        "tp_comm": sum(sum(shown_s(time)) for time in times) * count,
        "dp_comm": e.step.data.gradient_s + e.step.data.weight_gather_s,
        "pp_comm": e.step.pipeline_comm_s,
        "bubble": e.step.bubble_s,
    }
    memory = stage_terms(e, "first")
    stats = {
        "t": t,
        "flops_per_gpu": sum(flops_of(time, e) for time in times) * count * TERA,
        "mem": e.peak_bytes * GIGA,
        **{f"t_{name}": value for name, value in parts.items()},
        **{f"{name}_frac": value / t for name, value in parts.items()},
        "wts_mem": memory["weights/parameter_bytes"] * GIGA,
        "wts_grad_mem": memory["gradients/parameter_bytes"] * GIGA,
        "wts_optimizer_states_mem": memory["optimizer/parameter_bytes"] * GIGA,
        "acts_mem": memory["activations/layers/activation_bytes"] * GIGA,
    }
    return {
        "throughput": float(e.job.global_batch / t),
        "stats": {name: float(value) for name, value in stats.items()},
        "config": _configuration(e),
    }


def _configuration(e: Evaluation) -> dict[str, int]:
    p, second = e.plans, e.strategy.tensor_axes[-1]
    other = second if second != "tp" else None
    return {
        "dp": int(p.dp), "tp": int(p.tp) * (int(getattr(p, other)) if other else 1), "pp": int(p.pp),
        "mbs": int(p.micro_batch), "tp1": int(p.tp), "tp2": int(getattr(p, other)) if other else 1,
        "nb": int(p.panels), "nv_tp1": int(p.in_tp), "nv_tp2": int(p.inside(other)) if other else 1,
        "nv_dp": int(p.in_dp), "nv_pp": int(p.in_pp),
    }  # fmt: skip
