"""One plan of one job on one cluster, evaluated and explained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from steptime.estimate.bracket import bracket_s
from steptime.estimate.evaluate import Evaluation, evaluate
from steptime.estimate.explain import bottleneck_of, what_if
from steptime.estimate.machine import Machine, constants_of, curve_constants, machine_of, weakest
from steptime.estimate.metrics import model_flops_per_step, recomputed_flops_per_step, utilisation
from steptime.estimate.result import Estimate, Provenance
from steptime.estimate.terms_of import (
    details_of,
    exposed_terms,
    fullest_stage,
    hidden_terms,
    lines_of,
    memory_details,
    memory_terms,
)
from steptime.hardware.records import Cluster
from steptime.plan.job import Job
from steptime.plan.legality import BIT, MEMORY, Rule, broken_rules, names_of
from steptime.plan.method import Method, Strategy
from steptime.plan.plans import Plans
from steptime.plan.recompute import recompute_text
from steptime.version import __version__

ASSUMPTIONS = (
    "every pipeline stage and every micro-batch takes the same time from step to step (no stragglers, no failures)",
    "data-parallel traffic does not slow down other traffic on the same links",
    "memory counts no allocator fragmentation, communication buffers or driver context",
    "memory capacity is the datasheet's decimal figure",
    "gradients are kept and reduced in the dtype of the run",
)

Statistics = Callable[[Evaluation], Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What stays the same for all plans of a job: method, job, cluster."""

    method: Method
    job: Job
    cluster: Cluster
    statistics: Statistics | None = None
    """Statistics under the names of a reproduced paper."""

    @property
    def machine(self) -> Machine:
        """Numbers of the cluster for this job."""
        return machine_of(
            self.cluster, self.job.gpus, self.job.precision,
            lone_rank_has_all_links=self.method.lone_rank_has_all_links, calibrated=self.method.calibrated,
        )  # fmt: skip

    @property
    def rules(self) -> tuple[Rule, ...]:
        """Rules that plans must keep."""
        return self.method.rules


def estimate_plan(
    setting: Setting, strategy: Strategy, plans: Plans, *, explain: bool = False, what_ifs: bool = True
) -> Estimate:
    """Everything about one plan."""
    job, method = setting.job, setting.method
    e = evaluate(method, strategy, job, setting.machine, plans)
    lines = lines_of(e)
    time = exposed_terms(lines)
    stage = fullest_stage(e)
    kept = memory_details(e, stage)
    mask = int(broken_rules(job, plans, setting.rules)) | (BIT[MEMORY] if e.peak_bytes > e.machine.memory_bytes else 0)
    step_time_s = float(e.step_time_s)
    low, high = bracket_s(e)
    flops = model_flops_per_step(job)
    hardware_flops = flops + recomputed_flops_per_step(job, int(plans.recompute), int(plans.recompute_every))
    tokens = job.global_batch * job.seq_len
    return Estimate(
        step_time_s=step_time_s,
        step_time_bracket_s=(min(float(low), step_time_s), max(float(high), step_time_s)),
        step_time_band_s=None,
        mfu=utilisation(flops, step_time_s, job.gpus, e.machine.peak_flops_per_s),
        hfu=utilisation(hardware_flops, step_time_s, job.gpus, e.machine.peak_flops_per_s),
        tokens_per_s_per_gpu=tokens / step_time_s / job.gpus,
        samples_per_s=job.global_batch / step_time_s,
        model_flops=flops,
        time=time,
        overlapped=hidden_terms(lines),
        peak_memory_bytes=float(e.peak_bytes),
        memory=memory_terms(kept),
        memory_capacity_bytes=e.machine.memory_bytes,
        oom_probability=1.0 if mask & BIT[MEMORY] else 0.0,
        feasible=mask == 0,
        reasons=names_of(mask),
        bottleneck=bottleneck_of(time),
        plan=plan_record(e, stage),
        provenance=_provenance(setting),
        workload={
            "gpus": job.gpus, "global_batch": job.global_batch, "seq_len": job.seq_len, "dtype": job.precision.name,
            "optimizer": job.optimizer.name,
        },
        what_if=what_if(e) if what_ifs else {},
        published=setting.statistics(e) if setting.statistics else None,
        details=(*details_of(lines), *kept) if explain else (),
    )  # fmt: skip


def plan_record(e: Evaluation, fullest_stage: str | None = None) -> dict[str, Any]:
    """The plan in the words of the command line, and what follows from it."""
    p, job = e.plans, e.job
    axes = (*e.strategy.tensor_axes, "dp", "pp")
    split = e.method.stage_split(job, p)
    return {
        "strategy": e.strategy.name,
        **{name: int(getattr(p, name)) for name in ("dp", "tp", "tp2", "cp", "pp", "vpp")},
        **{name: int(getattr(p, name)) for name in ("ep", "etp", "sp", "shard")},
        "micro_batch": int(p.micro_batch),
        "micro_batches": int(e.step.micro_batches),
        "panels": int(p.panels),
        "recompute": recompute_text(int(p.recompute)),
        "recompute_every": int(p.recompute_every),
        "zero": int(p.zero),
        "schedule": "interleaved" if p.vpp > 1 else "1f1b",
        "attention": job.attention,
        "overlap": sorted(job.overlap),
        "placement": {axis: int(p.inside(axis)) for axis in axes},
        "stage_layers": {"first": int(split.first), "middle": int(split.middle), "last": int(split.last)},
        **({} if fullest_stage is None else {"fullest_stage": fullest_stage}),
        **occupancy(int(p.ranks), int(p.domain_ranks), e.machine.fast_domain),
    }


def occupancy(ranks: int, domain_ranks: int, fast_domain: int) -> dict[str, int]:
    """Fast domains that a placement occupies, and devices in them that stay idle.

    >>> occupancy(2048, 64, 72)
    {'domains': 32, 'idle_devices': 256}
    """
    blocks = -(-ranks // domain_ranks)
    domains = -(-blocks // max(fast_domain // domain_ranks, 1))
    idle = max(domains * fast_domain - ranks, 0) if domains > 1 else 0
    return {"domains": domains, "idle_devices": idle}


def _provenance(setting: Setting) -> Provenance:
    machine = setting.machine
    constants = constants_of(
        setting.cluster, setting.job.gpus, setting.job.precision, fitted_links=machine.fabric is not None
    )
    constants += curve_constants(machine)
    return Provenance(
        steptime_version=__version__,
        mode=setting.method.name,
        model=setting.job.model.name,
        model_source=setting.job.model.source,
        cluster=setting.cluster.name,
        device=setting.cluster.device.name,
        weakest_kind=str(weakest(constants)),
        constants={c.name: {"value": c.value, "source": c.source.text, "kind": str(c.source.kind)} for c in constants},
        assumptions=ASSUMPTIONS,
    )
