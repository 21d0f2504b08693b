"""Records of an estimate, which the API returns, the CLI prints and the page draws, and of a job under plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from steptime.estimate.sizes import Sizes
from steptime.num import Array, Num
from steptime.plan.job import Job
from steptime.plan.plans import Plans
from steptime.plan.strategies import Method, StageSplit, Strategy
from steptime.records import rows
from steptime.terms import Terms
from steptime.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from steptime.cost.collective_algorithms import Fabric

SCHEMA_VERSION = 1
Argument: TypeAlias = "float | str | Fabric"
"""Argument of a formula: a number, or for a fitted collective its kind and the machine's fabric."""

FLOPS_CONVENTION = (
    "a matrix product of m x k by k x n counts 2mnk; backward counts twice forward; attention of causal models "
    "counts the unmasked half of the score matrix once; norms, activations and the optimiser count nothing; "
    "recomputation counts in hfu only; choices of experts without a slot (expert_capacity below 1) count nothing"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Origin of the numbers of an estimate."""

    steptime_version: str
    mode: str
    """Method of the estimate: ``corrected`` or ``published``."""
    model: str
    model_source: str
    cluster: str
    device: str
    weakest_kind: str
    """The weakest kind of constant that entered: datasheet, measured, fitted or assumed."""
    constants: Mapping[str, Mapping[str, Any]]
    """Constant -> value, source, kind."""
    assumptions: tuple[str, ...] = ()
    band: str = "uncalibrated"
    framework: str = "ideal"
    """Training software whose slowdowns and overheads are applied."""
    is_gpu: bool | None = None
    """True if the device is a GPU; None: unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormulaCall:
    """A formula with its arguments, and the factors on its result."""

    function: str
    """Dotted name of the formula below ``steptime.cost``."""
    arguments: Mapping[str, Argument]
    """Value by argument name."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """Factor on the result by meaning: times per step, factor of the framework, a share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Detail:
    r"""Computation of one term, as ``--explain`` prints it.

    $$v = \sum_c f_c(a_c) \prod_k x_{c,k}$$

    where $v$ = `value` adds up the calls $c$ of :attr:`calls`, each a formula $f_c$ with arguments $a_c$ and factors
    $x_{c,k}$. Most terms have one call; its fields are those of the detail.
    """

    path: str
    function: str
    value: float
    arguments: Mapping[str, Argument]
    factors: Mapping[str, float] = field(default_factory=dict)
    basis: str = ""
    """Basis of the value: a fitted curve or fabric with its error, or a textbook formula."""
    further: tuple[FormulaCall, ...] = ()
    """Calls whose results are added to that of the first."""

    @property
    def calls(self) -> tuple[FormulaCall, ...]:
        """All calls."""
        return (FormulaCall(function=self.function, arguments=self.arguments, factors=self.factors), *self.further)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """One plan of one model on one cluster (SI units)."""

    step_time_s: float
    step_time_bracket_s: tuple[float, float]
    """Step time with everything overlapped, and with nothing overlapped."""
    step_time_band_s: tuple[float, float] | None
    """5th and 95th percentile of the step time; None for the ideal framework."""
    mfu: float
    hfu: float
    tokens_per_s_per_gpu: float
    samples_per_s: float
    model_flops: float
    """Model FLOPs of a step of the whole job."""
    time: Terms
    """Exposed seconds per step; they add up to ``step_time_s``."""
    overlapped: Terms
    """Seconds per step that overlap with other work."""
    peak_memory_bytes: float
    memory: Terms
    """Bytes on the fullest device; they add up to ``peak_memory_bytes``."""
    memory_capacity_bytes: float
    oom_probability: float
    feasible: bool
    reasons: tuple[str, ...]
    bottleneck: str
    """Largest group of exposed terms, with its share."""
    plan: Mapping[str, Any]
    provenance: Provenance
    workload: Mapping[str, Any] = field(default_factory=dict)
    """Workload of the job: gpus, global_batch, seq_len, dtype, optimizer."""
    what_if: Mapping[str, float] = field(default_factory=dict)
    """Step time in seconds on a machine that is better in one respect, by the factor in the name."""
    published: Mapping[str, Any] | None = None
    """Statistics under the names of the reproduced paper; only in published mode."""
    memory_by_definition: Mapping[str, float] = field(default_factory=dict)
    """Peak memory as ``allocated`` (live tensors, the peak above), ``reserved`` by the allocator, and used on the
    ``device`` with communication buffers and driver; ``oom_probability`` is that of the last. Empty where a paper is
    reproduced."""
    band_shares: Mapping[str, float] = field(default_factory=dict)
    """Share of the variance of the band by parameter of the framework, ``device`` (its own factor) and ``noise``
    (residual variance of runs that are known exactly), largest first."""
    training: Mapping[str, Any] = field(default_factory=dict)
    """Size of the whole run: its ``samples``, ``tokens`` and ``steps``; ``training_s``, ``training_days``,
    ``gpu_hours`` and ``gpu_days``, each with its band. Empty if its length is not given."""
    run: Mapping[str, Any] = field(default_factory=dict)
    """The whole run with failures, energy and money: ``goodput``, ``energy``, ``money``. Empty if neither failures nor
    prices are given."""
    notes: tuple[str, ...] = ()
    """Notes to read before using the numbers: defaults that were assumed, numbers that were rounded up."""
    details: tuple[Detail, ...] = ()
    """Computation of each term; part of the JSON only if explained."""

    def __repr__(self) -> str:
        """One line for a prompt or a notebook; :meth:`to_json` has everything."""
        fits = "feasible" if self.feasible else f"not feasible: {', '.join(self.reasons)}"
        memory = f"{format_bytes(self.peak_memory_bytes)} of {format_bytes(self.memory_capacity_bytes)}"
        job = f"{self.provenance.model} on {self.workload.get('gpus', '?')} devices of {self.provenance.cluster}"
        return f"<Estimate of {job}: {format_seconds(self.step_time_s)}, MFU {100 * self.mfu:.1f} %, {memory}, {fits}>"

    def to_json(self, *, explain: bool = False) -> dict[str, Any]:
        """Plain data for ``json.dumps``; keys as in the project's contract."""
        out: dict[str, Any] = {"schema_version": SCHEMA_VERSION}
        for name in self.__slots__:
            value = getattr(self, name)
            if name == "details":
                if explain:
                    out[name] = [_plain(detail) for detail in value]
            elif (name == "published" and value is None) or (name in ("training", "run") and not value):
                continue
            else:
                out[name] = _plain(value)
        out["flops_convention"] = FLOPS_CONVENTION
        return out


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    return value.item() if hasattr(value, "item") else value


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedJob:
    """A job under one plan, or column by column under a block of plans."""

    method: Method
    strategy: Strategy
    job: Job
    plans: Plans
    sizes: Sizes
    """Sizes of each part of the model on a device."""
    split: StageSplit
    micro_batches: Num
    """Micro-batches of the replica with most of them."""
    gradient_ranks: Num
    """Ranks that hold the same weights and sum their gradients, both copies of a mirrored stage among them."""
    expert_ranks: Num
    """Ranks that hold the same routed experts, both copies of a mirrored stage among them."""

    def take(self, index: Array, plans: Plans) -> PlannedJob:
        """The rows at ``index``, with ``plans`` that differ at most in their placement."""
        return PlannedJob(
            method=self.method,
            strategy=self.strategy,
            job=self.job,
            plans=plans,
            sizes=rows(self.sizes, index),
            split=rows(self.split, index),
            micro_batches=rows(self.micro_batches, index),
            gradient_ranks=rows(self.gradient_ranks, index),
            expert_ranks=rows(self.expert_ranks, index),
        )

    @property
    def copies_near(self) -> Any:
        """True if both copies of a mirrored stage share a fast domain, as they do if the whole pipeline does."""
        return copies_near(self.job, self.plans)


def copies_near(job: Job, plans: Plans) -> Any:
    """True if both copies of a mirrored stage share a fast domain, plan by plan; always true without copies."""
    return True if job.stages_held == 1 else plans.in_pp >= plans.pp


def planned_job(method: Method, strategy: Strategy, job: Job, plans: Plans, sizes: Sizes) -> PlannedJob:
    """A job under plans with known sizes (:func:`steptime.estimate.sizes.sizes_of`)."""
    return PlannedJob(
        method=method, strategy=strategy, job=job, plans=plans, sizes=sizes, split=method.stage_split(job, plans),
        micro_batches=method.micro_batches(job, plans), gradient_ranks=strategy.gradient_ranks(plans) * job.stages_held,
        expert_ranks=plans.edp * job.stages_held,
    )  # fmt: skip
