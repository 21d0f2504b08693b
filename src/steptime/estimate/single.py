"""One plan of one job on one cluster, evaluated and explained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from steptime.estimate.band import StepBand, band_of, bracket_s
from steptime.estimate.evaluate import (
    Evaluation,
    evaluate,
    least_step_s,
    model_flops_per_step,
    recomputed_flops_per_step,
    utilisation,
    winograd_flops_per_step,
)
from steptime.estimate.explain import bottleneck_of, what_if
from steptime.estimate.ledger import (
    details_of,
    explained,
    exposed_terms,
    fullest_stage,
    hidden_terms,
    memory_details,
    memory_terms,
)
from steptime.estimate.machine import (
    Constant,
    Machine,
    constants_of,
    curve_constants,
    kernel_constants,
    levels_left_out,
    machine_of,
    weakest,
)
from steptime.estimate.memory import STAGES, initialisation_bytes
from steptime.estimate.memory_definitions import memory_by_definition, oom_probability
from steptime.estimate.notes import (
    before_the_first_step,
    beyond_framework,
    changed_device,
    corrected,
    dropped_choices,
    idle_overlap,
    mostly_overhead,
    plain_operands,
    rate_stood_in,
    saved_copies,
    scattered,
    stood_in_schedule,
    unaligned_heads,
    uneven_batch,
    updates_in_step,
    winograd_note,
)
from steptime.estimate.result import Estimate, Provenance
from steptime.estimate.sizes import sizes_of
from steptime.hardware.records import Cluster
from steptime.hardware.topology import RANDOM, WORST
from steptime.model.parameters import parameter_terms
from steptime.options import CHOICES, OPTIONS, choices_of, usual_of
from steptime.plan.job import Job
from steptime.plan.placements import order_text
from steptime.plan.plans import BIT, FULL_RECOMPUTE, MEMORY, Plans, Rule, broken_rules, is_set, names_of
from steptime.plan.recompute import recompute_text
from steptime.plan.strategies import CORRECTED, Method, Strategy
from steptime.terms import Terms
from steptime.version import __version__

if TYPE_CHECKING:
    from steptime.estimate.learned import Correction

LINKS_APART = "data-parallel traffic does not slow down other traffic on the same links"
"""Assumption of estimates on machines that do not tell their links apart."""
ASSUMPTIONS = (
    "every pipeline stage and every micro-batch takes the same time from step to step, and nothing fails",
    LINKS_APART,
    "peak memory is what live tensors hold; memory_by_definition adds the allocator, communicators and the driver",
    "nothing else takes memory of the devices",
)
LARGEST_SHARES = 5
"""Largest number of entries of ``band_shares``."""

Statistics = Callable[[Evaluation], Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Everything that all plans of a job share: method, job, cluster, and values derived from them."""

    method: Method
    job: Job
    cluster: Cluster
    statistics: Statistics | None = None
    """Statistics under the names of a reproduced paper."""
    asked_overlap: frozenset[str] = frozenset()
    """Words of ``overlap`` that the user gave in addition to the framework's defaults."""
    switched: tuple[str, ...] = ()
    """Options of the job, such as ``graphs``, that are set to the fastest choice of its software."""
    oom_limit: float | None = None
    """Largest chance of running out of memory of a feasible plan of a search; None: its live tensors have to fit."""
    first_limit: float | None = None
    """Largest chance of running out of memory of a plan that a search ranks before others; None: no limit."""
    correction: Correction | None = None
    """Learned correction of the times of operators, for single estimates: the bounds of a search ignore it."""

    @cached_property
    def machine(self) -> Machine:
        """Numbers of the cluster for this job."""
        return self._machine if self.correction is None else replace(self._machine, correction=self.correction)

    @cached_property
    def _machine(self) -> Machine:
        machine = machine_of(
            self.cluster, self.job.gpus, self.job.precision,
            lone_rank_has_all_links=self.method.lone_rank_has_all_links, calibrated=self.method.calibrated,
        )  # fmt: skip
        if self.job.captured is None or not self.method.calibrated:
            return machine
        from steptime.estimate.further_kernels import with_further_models, with_usual_convolutions

        device, precision = self.cluster.device, self.job.precision
        return with_usual_convolutions(with_further_models(machine, device, precision), device, precision)

    @cached_property
    def constants(self) -> tuple[Constant, ...]:
        """Numbers that enter every estimate of the job."""
        fitted = self.machine.fabric is not None
        stated = constants_of(
            self.cluster, self.job.gpus, self.job.precision, fitted_links=fitted, offloads=bool(self.job.offload)
        )
        kernels = (
            kernel_constants(self.job.framework.name, self.cluster.device) if self.job.attention == "fused" else ()
        )
        return (*stated, *curve_constants(self.machine), *kernels)

    @cached_property
    def sources(self) -> Mapping[str, Mapping[str, Any]]:
        """Value, source and kind of the constants by name."""
        return {c.name: {"value": c.value, "source": c.source.text, "kind": str(c.source.kind)} for c in self.constants}

    @cached_property
    def weakest_kind(self) -> str:
        """The weakest kind among the constants."""
        return str(weakest(self.constants))

    @cached_property
    def model_flops(self) -> float:
        """Model FLOPs of a step."""
        return model_flops_per_step(self.job)

    @property
    def rules(self) -> tuple[Rule, ...]:
        """Rules that plans must keep."""
        return self.method.rules


def rules_broken(setting: Setting, e: Evaluation) -> int:
    """Bits of the rules that a plan breaks, memory included; 0: it is feasible."""
    over = BIT[MEMORY] if e.peak_bytes > e.machine.memory_bytes else 0
    return int(broken_rules(setting.job, e.plans, setting.rules)) | over


def chance_of(setting: Setting, e: Evaluation) -> float:
    """Chance that a plan runs out of memory; without a model of the chance, 1 if it exceeds the capacity, else 0.

    Args:
        setting: its method has a model of the chance or not.
        e: evaluation of the plan.
    """
    return oom_probability(e) if setting.method.calibrated else float(bool(rules_broken(setting, e) & BIT[MEMORY]))


def estimate_plan(
    setting: Setting, strategy: Strategy, plans: Plans, *, explain: bool = False, what_ifs: bool = True
) -> Estimate:
    """The estimate of one plan."""
    job, method, machine = setting.job, setting.method, setting.machine
    e, terms = explained(method, strategy, job, machine, plans)
    time = exposed_terms(terms)
    stage = fullest_stage(e)
    mask = rules_broken(setting, e)
    step_time_s = float(e.step_time_s)
    low, high = bracket_s(e)
    band, flops = band_of(e), setting.model_flops
    saved_flops = winograd_flops_per_step(job, machine)
    # Memory before the first step is a peak of its own, for software that needs any.
    before_bytes = float(initialisation_bytes(e))
    peaks = memory_by_definition(e) if method.calibrated else {}
    peaks |= {"initialisation": before_bytes} if peaks and before_bytes else {}
    hardware_flops = flops - saved_flops
    hardware_flops += recomputed_flops_per_step(job, int(plans.recompute), int(plans.recompute_every))
    return Estimate(
        step_time_s=step_time_s,
        step_time_bracket_s=(min(float(low), step_time_s), max(float(high), step_time_s)),
        step_time_band_s=band_s(band, step_time_s, least_step_s(hardware_flops, job.gpus, e.machine.peak_flops_per_s)),
        band_shares={} if band is None else dict(list(band.shares.items())[:LARGEST_SHARES]),
        mfu=utilisation(flops - saved_flops, step_time_s, job.gpus, e.machine.peak_flops_per_s),
        hfu=utilisation(hardware_flops, step_time_s, job.gpus, e.machine.peak_flops_per_s),
        tokens_per_s_per_gpu=job.global_batch * job.seq_len / step_time_s / job.gpus,
        samples_per_s=job.global_batch / step_time_s,
        model_flops=flops,
        time=time,
        overlapped=hidden_terms(terms),
        peak_memory_bytes=float(e.peak_bytes),
        memory=memory_terms(e, stage),
        memory_capacity_bytes=e.machine.memory_bytes,
        memory_by_definition={name: float(each) for name, each in peaks.items()},
        oom_probability=chance_of(setting, e),
        feasible=mask == 0,
        reasons=names_of(mask),
        bottleneck=bottleneck_of(time),
        plan=plan_record(setting, strategy, plans, stage) | {"fullest_phase": e.memory[stage].fullest_phase},
        provenance=_provenance(setting, band),
        workload=workload_record(job),
        what_if=what_if(e) if what_ifs else {},
        published=setting.statistics(e) if setting.statistics else None,
        notes=(
            *winograd_note(saved_flops, flops),
            *compared(setting, strategy, plans, e), *notes_on(setting, strategy, plans, time),
            *before_the_first_step(before_bytes, float(e.peak_bytes), machine.memory_bytes),
        ),
        details=(*details_of(terms), *memory_details(e, stage)) if explain else (),
    )  # fmt: skip


def band_s(band: StepBand | None, step_s: float, least_s: float) -> tuple[float, float] | None:
    """Edges of a band; the low one is at least the least time of a step, or the step time if that is shorter.

    >>> band = StepBand(low_s=0.5, high_s=3.0, shares={})
    >>> band_s(band, 2.0, 1.0), band_s(band, 2.0, 2.5), band_s(band, 2.0, 0.1)
    ((1.0, 3.0), (2.0, 3.0), (0.5, 3.0))
    """
    return None if band is None else (max(band.low_s, min(least_s, step_s)), band.high_s)


def idle_overlaps(setting: Setting, strategy: Strategy, plans: Plans, step_s: float) -> tuple[str, ...]:
    """Notes on words of ``overlap`` that the user gave but that do not change the step time."""
    method, job, machine = setting.method, setting.job, setting.machine
    without = {word: replace(job, overlap=job.overlap - {word}) for word in sorted(setting.asked_overlap)}
    return tuple(
        idle_overlap(word)
        for word, other in without.items()
        if float(evaluate(method, strategy, other, machine, plans).step_time_s) == step_s
    )


def compared(setting: Setting, strategy: Strategy, plans: Plans, e: Evaluation) -> tuple[str, ...]:
    """Notes from a comparison of the plan, evaluated as ``e``, with other choices."""
    own = idle_overlaps(setting, strategy, plans, float(e.step_time_s))
    own = (*_learned(setting, strategy, plans, e), *own)
    return (*own, *copies_saved(setting, strategy, plans, e), *if_scattered(setting, strategy, plans, e))


def _learned(setting: Setting, strategy: Strategy, plans: Plans, e: Evaluation) -> tuple[str, ...]:
    """A note on the effect of a learned correction on the step."""
    correction = setting.correction
    if correction is None:
        return ()
    plain = replace(setting, correction=None).machine
    before_s = float(evaluate(setting.method, strategy, setting.job, plain, plans).step_time_s)
    names = {row.operator for part in (e.block.layer, e.block.first, e.block.last) for row in part}
    return (corrected(correction, before_s, float(e.step_time_s), names),)


def if_scattered(setting: Setting, strategy: Strategy, plans: Plans, e: Evaluation) -> tuple[str, ...]:
    """A note on the worst case if the nodes of a job may lie anywhere."""
    topology = setting.cluster.topology
    if topology is None or topology.placement != RANDOM:
        return ()
    worst = replace(setting, cluster=replace(setting.cluster, topology=replace(topology, placement=WORST))).machine
    worst_s = float(evaluate(setting.method, strategy, setting.job, worst, plans).step_time_s)
    return (scattered(topology.pool, float(e.step_time_s), worst_s),)


def copies_saved(setting: Setting, strategy: Strategy, plans: Plans, e: Evaluation) -> tuple[str, ...]:
    """A note if full recomputation is faster than none, because it keeps less to copy to the host."""
    full = is_set(plans.recompute, FULL_RECOMPUTE)
    if "activations" not in setting.job.offload or (plans.recompute and not full):
        return ()
    columns = {"recompute": 0 if full else FULL_RECOMPUTE, "recompute_every": 1}
    other = evaluate(setting.method, strategy, setting.job, setting.machine, plans.with_columns(columns))
    without, again = (other, e) if full else (e, other)
    if again.step_time_s >= without.step_time_s:
        return ()
    shown = float(without.step.copies_s), float(again.step.copies_s)
    return (saved_copies(float(without.step_time_s), float(again.step_time_s), *shown),)


def notes_on(setting: Setting, strategy: Strategy, plans: Plans, time: Terms) -> tuple[str, ...]:
    """Notes that a reader should know before using the numbers of a plan."""
    job = setting.job
    if not setting.method.calibrated:
        return ()
    return (
        *mostly_overhead(time, job.framework.name), *changed_device(setting.cluster.device),
        *uneven_batch(job, plans), *dropped_choices(job), *unaligned_heads(job),
        *beyond_framework(job.framework.name, plans), *rate_stood_in(setting.cluster.device, job.precision),
        *plain_operands(strategy, job.precision), *levels_left_out(setting.cluster, job.gpus),
        *stood_in_schedule(job),
        *updates_in_step(job, float(job.updates(plans))),
    )  # fmt: skip


def plan_record(setting: Setting, strategy: Strategy, p: Plans, fullest_stage: str | None = None) -> dict[str, Any]:
    """The plan in the words of the command line, with values derived from it."""
    job, split = setting.job, setting.method.stage_split(setting.job, p)
    axes, sharded = (*strategy.tensor_axes, "dp", "pp"), None if job.captured is None else job.captured.sharded
    return {
        "strategy": strategy.name if sharded is None else "shardings",
        **({} if sharded is None else {"mesh": dict(sharded.mesh), "shardings": dict(sharded.placements)}),
        **{name: int(getattr(p, name)) for name in ("dp", "tp", "tp2", "cp", "pp", "vpp")},
        **{name: int(getattr(p, name)) for name in ("ep", "etp", "sp", "shard")},
        "micro_batch": int(p.micro_batch),
        "micro_batches": int(setting.method.micro_batches(job, p)),
        "panels": int(p.panels),
        "recompute": recompute_text(int(p.recompute)),
        "recompute_every": int(p.recompute_every),
        "zero": int(p.zero),
        **_choices_record(job, int(p.vpp)),
        "placement": {axis: int(p.inside(axis)) for axis in axes},
        **({"order": order_text(p, axes)} if setting.machine.levels_apart else {}),
        "stage_layers": {name: int(getattr(split, name)) for name in STAGES},
        **({} if fullest_stage is None else {"fullest_stage": fullest_stage}),
        **occupancy(int(p.ranks), int(p.domain_ranks), setting.machine.fast_domain),
    }


def _choices_record(job: Job, virtual_stages: int) -> dict[str, Any]:
    """The choices of a job that hold for all candidates; defaults only if they are always recorded."""
    narrow, load = job.precision.attention_dtype, job.expert_load
    of_load = {} if load is None else {"expert_load": load.name, "expert_imbalance": None}
    values = {
        **{name: getattr(job, name) for name in CHOICES if hasattr(job, name)},
        "schedule": job.schedule_with(virtual_stages),
        "attention_dtype": narrow if narrow in choices_of("attention_dtype") else None,
        "document_length": job.document_length if job.attended < job.seq_len else None,
        **of_load,
    }
    out = {}
    for name, value in values.items():
        row = OPTIONS[name]
        without = value is None or (not row.recorded and value == usual_of(name))
        if not without and (job.model.experts is not None or not row.of_experts):
            out[name] = sorted(value) if isinstance(value, frozenset) else value
    return out


def workload_record(job: Job) -> dict[str, Any]:
    """The job in the words of the command line, without its plan."""
    out: dict[str, Any] = {
        "gpus": job.gpus, "global_batch": job.global_batch, "seq_len": job.seq_len, "dtype": job.precision.name,
        "optimizer": job.optimizer.name, "framework": job.framework.name,
    }  # fmt: skip
    if job.model.vision is not None:
        out["sample"] = job.sample
    if job.adapter is not None:
        adapter = job.adapter
        lora = {"rank": adapter.rank, "targets": adapter.targets, "qlora": adapter.weight_bytes is not None}
        out["lora"] = lora | ({"dora": True} if adapter.dora else {})
        trained = trained_parameters(job)
        out |= {"trained_parameters": trained, "parameters": trained + int(parameter_terms(job.model).total)}
    return out


def trained_parameters(job: Job) -> int:
    """Parameters of the adapters of a model over all its devices."""
    sizes = sizes_of(CORRECTED.strategy("1d").block(replace(job, captured=None), Plans()))
    return round(float(sizes.layer.weights * job.model.layers + sizes.first.weights + sizes.last.weights))


def occupancy(ranks: int, domain_ranks: int, fast_domain: int) -> dict[str, int]:
    """Fast domains that a placement occupies, and devices in them that stay idle.

    >>> occupancy(2048, 64, 72)
    {'domains': 32, 'idle_devices': 256}
    """
    blocks = -(-ranks // domain_ranks)
    domains = -(-blocks // max(fast_domain // domain_ranks, 1))
    idle = max(domains * fast_domain - ranks, 0) if domains > 1 else 0
    return {"domains": domains, "idle_devices": idle}


def _provenance(setting: Setting, band: StepBand | None) -> Provenance:
    spread = setting.job.framework.spread
    return Provenance(
        steptime_version=__version__,
        mode=setting.method.name,
        model=setting.job.model.name,
        model_source=setting.job.model.source,
        cluster=setting.cluster.name,
        device=setting.cluster.device.name,
        is_gpu=setting.cluster.device.is_gpu,
        weakest_kind=setting.weakest_kind,
        constants=setting.sources,
        assumptions=(
            *(text for text in ASSUMPTIONS if setting.machine.network is None or text != LINKS_APART),
            *_assumed(setting.job),
        ),
        framework=setting.job.framework.name,
        band="uncalibrated" if band is None or spread is None else f"90 %, fitted to {spread.source}",
    )


def _assumed(job: Job) -> tuple[str, ...]:
    """Assumptions about this job in particular."""
    dtype = job.gradient_dtype or f"the dtype of the run ({job.precision.gradient_bytes:g} bytes)"
    stragglers = "ranks that lag and links that others share slow a step by the framework's fitted growth with devices"
    out = [stragglers if job.framework.growth else "no rank lags, and no others use the links"]
    out.append(f"gradients are kept and reduced in {dtype}")
    if (
        job.model.experts is not None
        and job.expert_capacity is None
        and job.expert_load is None
        and job.expert_imbalance == 1.0
    ):
        out.append("every expert rank has the same number of tokens, and none is dropped")
    return tuple(out)
