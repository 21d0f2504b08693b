"""The published mode: its exact search space, and the statistics that the published code prints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np

from steptime.estimate.evaluate import Evaluation
from steptime.estimate.layer import RECOMPUTE, PhaseTime, exposed_transfers_s
from steptime.estimate.memory import stage_terms
from steptime.num import Array, Num, divisors
from steptime.plan.job import Job, replica_sequences
from steptime.plan.plans import Plans
from steptime.plan.space import (
    CorrectedSpace,
    Space,
    dividing,
    expand,
    factorisations,
    micro_batch_choices,
    panel_counts,
)
from steptime.plan.strategies import Strategy
from steptime.search.modes import Mode
from steptime_lab.published.rows import PUBLISHED, Defects

LEAST_WIDTH = 128
"""Least width of a shard of the hidden dimension, of 3 x hidden, or of the sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedSpace(Space):
    """Search space with degrees that divide evenly and exactly filled fast domains, while the defects are kept."""

    name: ClassVar[str] = "published"
    defects: Defects = Defects()  # noqa: RUF009 - frozen

    def fixed(self, values: Mapping[str, int]) -> PublishedSpace:
        """The unchanged space: constraints select from it."""
        return self

    def meshes(self, job: Job, strategy: Strategy) -> Plans:
        """Tensor grids, then pipelines that divide the layers, then replicas that divide the batch."""
        grids = self._grids(job, strategy)
        columns: list[tuple[int, int, int, int]] = []
        for tp, second in grids:
            rest = job.gpus // (tp * second)
            for pp in self._stages(rest, job.model.layers):
                dp = rest // pp
                if dp <= job.global_batch and (job.global_batch % dp == 0 or not self.defects.equal_shares):
                    columns.append((tp, second, pp, dp))
        table = np.array(columns, dtype=np.int64).reshape(-1, 4)
        second_axis = strategy.tensor_axes[-1]
        seconds = {second_axis: table[:, 1]} if second_axis != "tp" else {}
        return Plans(tp=table[:, 0], pp=table[:, 2], dp=table[:, 3], **seconds)

    def _stages(self, devices: int, layers: int) -> list[int]:
        if self.defects.equal_stages:
            return divisors(math.gcd(devices, layers))
        return [pp for pp in divisors(devices) if pp <= layers]

    def _grids(self, job: Job, strategy: Strategy) -> list[tuple[int, int]]:
        model, out = job.model, []
        for tp in divisors(job.gpus):
            if model.heads % tp or model.hidden % tp:
                continue
            if strategy.name == "1d":
                if 3 * model.hidden // tp >= LEAST_WIDTH:
                    out.append((tp, 1))
            elif model.hidden // tp >= LEAST_WIDTH:
                out += [(tp, tp2) for tp2 in divisors(job.gpus // tp) if self._second(job, strategy, tp2)]
        return out

    @staticmethod
    def _second(job: Job, strategy: Strategy, ranks: int) -> bool:
        whole = strategy.name != "2d" or job.model.hidden % ranks == 0
        return whole and job.seq_len // ranks >= LEAST_WIDTH

    def configurations(self, job: Job, strategy: Strategy, meshes: Plans) -> tuple[Array, Plans]:
        """Micro-batches that divide the share and spread over the sequence axis; SUMMA panels."""
        tp, second = np.asarray(meshes.tp), np.asarray(getattr(meshes, strategy.tensor_axes[-1]))
        spread = {"1d": tp, "context": tp * second, "2d": second}[strategy.name]
        share = replica_sequences(job.global_batch, np.asarray(meshes.dp))
        choices = divisors if self.defects.equal_shares else micro_batch_choices
        shares, share_of = np.unique(share, return_inverse=True)
        listed = [choices(int(n)) for n in shares]
        sizes = np.array(sorted(set().union(*listed)), dtype=np.int64)
        admitted = np.zeros((len(shares), len(sizes)), dtype=bool)
        for n, sizes_of_share in enumerate(listed):
            admitted[n, np.searchsorted(sizes, sizes_of_share)] = True
        mesh_of, size_of = np.nonzero(((sizes * job.seq_len) % spread[:, None] == 0) & admitted[share_of])
        micro_batch, panels = sizes[size_of], {}
        if strategy.name == "2d":
            longer = np.maximum(tp, second)
            options = {int(s): panel_counts(job.model.hidden, int(s)) for s in np.unique(longer)}
            position, chosen = expand(mesh_of, options, longer[mesh_of])
            mesh_of, micro_batch, panels = mesh_of[position], micro_batch[position], {"panels": chosen}
        return mesh_of, meshes.take(mesh_of).with_columns({"micro_batch": micro_batch, **panels})

    def placements(
        self, strategy: Strategy, meshes: Plans, gpus: int, fast_domain: int, *, nearer_is_faster: bool
    ) -> tuple[Array, Plans]:
        """Everything inside if it fits; else all ways to fill a domain exactly, or as far as possible."""
        if not self.defects.exact_filling:
            return CorrectedSpace().placements(strategy, meshes, gpus, fast_domain, nearer_is_faster=nearer_is_faster)
        axes = (*strategy.tensor_axes, "dp", "pp")
        degrees = np.stack([np.asarray(getattr(meshes, axis)) for axis in axes])
        if gpus <= fast_domain:
            return np.arange(degrees.shape[1]), Plans(**{f"in_{a}": d for a, d in zip(axes, degrees, strict=True)})
        ways = factorisations(fast_domain, len(axes))
        placed, way = np.nonzero(dividing(degrees, ways))
        return placed, Plans(**{f"in_{a}": ways[way, i] for i, a in enumerate(axes)})


TERA, GIGA = 1e-12, 1e-9


def flops_of(time: PhaseTime, e: Evaluation) -> Num:
    """FLOPs of a phase; vector work of fused attention counts as the matrix work that takes equally long."""
    rate = e.machine.matrix_flops_per_s / e.machine.vector_flops_per_s
    return time.matrix_flops + time.vector_flops * (rate if time.row.operator == "fused_attention" else 1.0)


def statistics(e: Evaluation) -> dict[str, Any]:
    """Throughput, statistics and configuration of one plan in the words of the published code.

    Times in seconds, memory in GB (1e9 bytes), FLOPs in TFLOP per device. Attention recomputation is in `t` but, as
    in the published code, in none of the components.
    """
    times = [time for time in e.times["layer"] if time.phase != RECOMPUTE]
    count = e.step.micro_batches * e.step.counts["layer"]
    t = e.step_time_s
    parts = {
        "comp": sum(time.compute_s for time in times) * count,
        "mem": sum(time.exposed_memory_s for time in times) * count,
        "tp_comm": sum(sum(exposed_transfers_s(time)) for time in times) * count,
        "dp_comm": e.step.data_s["gradients"] + e.step.data_s["weights"],
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
        "dp": int(p.dp),
        "tp": int(p.tp) * (int(getattr(p, other)) if other else 1),
        "pp": int(p.pp),
        "mbs": int(p.micro_batch),
        "tp1": int(p.tp),
        "tp2": int(getattr(p, other)) if other else 1,
        "nb": int(p.panels),
        "nv_tp1": int(p.in_tp),
        "nv_tp2": int(p.inside(other)) if other else 1,
        "nv_dp": int(p.in_dp),
        "nv_pp": int(p.in_pp),
    }


MODE: Final = Mode(
    method=PUBLISHED,
    space=PublishedSpace(),
    attentions=("fused", "unfused", "summa"),
    statistics=statistics,
    auto={"1d": (), "context": (), "2d": ()},
)
