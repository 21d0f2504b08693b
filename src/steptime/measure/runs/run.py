"""One measured training run in the terms of steptime."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from steptime.hardware.library import cluster_names, load_cluster
from steptime.measure.runs.architecture import ModelFile, architecture
from steptime.measure.runs.canonical import (
    DtypeName,
    Recomputation,
    ScheduleName,
    Sharding,
    attention_kernel,
    catalogue_device,
    device_name,
    dtype_name,
    fused_kernel,
    network_Bps,
    offloaded,
    recomputation,
    schedule_name,
    sharding,
)
from steptime.measure.runs.meaning import (
    attention_dtype_called,
    choice_called,
    framework_default,
    framework_of,
    gradient_dtype_in,
    graphs_called,
    narrow_weights,
    not_recomputed,
    optimizer_called,
    selective,
    unknown_words,
)
from steptime.measure.runs.metrics import (
    MEMORY,
    MeasuredMemory,
    MeasuredTime,
    RateBasis,
    measured_memory,
    measured_time,
)
from steptime.measure.runs.read import NO_CLAIM, Flag, Reason, RowProblem, TableRow, is_blank, table
from steptime.model.spec import ModelSpec
from steptime.num import divisors

MOST_SEQUENCES: Final = 10**9
"""Largest batch in sequences; a larger number counts something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """Number of ranks of each axis; ``dp`` is the rest: gpus / (tp pp cp)."""

    tp: int
    pp: int
    cp: int
    dp: int
    vpp: int | None
    """Virtual stages per rank; None: the row has none."""
    ep: int | None
    """Expert-parallel ranks; None: the row has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Sequences per step, and per micro-batch and replica where the row has these."""

    global_batch: int
    micro_batch: int | None


def degrees(row: TableRow, gpus: int, schedule: ScheduleName, flags: set[Flag]) -> Degrees | None:
    """The degrees of a row; None where it has neither tp nor pp.

    Where the printed data-parallel degree differs from gpus / (tp pp cp) and that is whole, the latter is taken and
    flagged.

    Raises:
        RowProblem: tp pp cp does not divide the accelerators, or the experts' ranks do not.
    """
    tp, pp, cp, dp = (row.whole(name) for name in ("tp", "pp", "cp", "dp"))
    if tp is None and pp is None and cp is None:
        if dp != gpus:
            return None
    elif tp is None or pp is None:
        flags.add(Flag.DEGREES_ASSUMED)
    tp, pp, cp = tp or 1, pp or 1, cp or 1
    left, over = divmod(gpus, tp * pp * cp)
    if over or not left:
        raise RowProblem(Reason.DEGREES_CONTRADICT, f"tp {tp} x pp {pp} x cp {cp} on {gpus}")
    if dp is not None and dp != left:
        flags.add(Flag.DP_REDERIVED)
    ep = row.whole("ep")
    if ep is not None and (gpus // pp) % ep:
        raise RowProblem(Reason.DEGREES_CONTRADICT, f"ep {ep} on {gpus} / pp {pp}")
    vpp = row.whole("vpp")
    if schedule.name == "zb-v":  # both of its chunks together hold what one stage of ZB-H1 holds
        vpp = 1
    if vpp is None and (pp == 1 or schedule.name in ("1f1b", "zb-1p", "zb-2p", "gpipe", "dualpipe")):
        vpp = 1
    return Degrees(tp=tp, pp=pp, cp=cp, dp=left, vpp=vpp, ep=ep)


def batch(row: TableRow, found: Degrees | None, schedule: ScheduleName, flags: set[Flag]) -> Batch:
    """The batch of a row; without a printed one, micro-batch x replicas x accumulation.

    Raises:
        RowProblem: there is none, or it does not divide among the replicas.
    """
    micro = row.whole("micro_batch", MOST_SEQUENCES)
    total = row.whole("global_batch_sequences", MOST_SEQUENCES)
    if total is None and "global_batch_sequences" in row.unread:
        raise RowProblem(Reason.BAD_NUMBER, f"global_batch_sequences: {row.text('global_batch_sequences')!r}"[:120])
    if total is None and micro and found is not None and schedule.accumulation:
        total = micro * found.dp * schedule.accumulation
        flags.add(Flag.BATCH_DERIVED)
    if total is None:
        raise RowProblem(Reason.NO_BATCH)
    if found is None:
        return Batch(global_batch=total, micro_batch=micro)
    share, over = divmod(total, found.dp)
    if over or not share:
        raise RowProblem(Reason.BATCH_CONTRADICTS, f"batch {total} over dp {found.dp}")
    if micro is not None and share % micro:
        micro = max(d for d in divisors(share) if d <= micro)
        flags.add(Flag.MICRO_BATCH_REPLACED)
    return Batch(global_batch=total, micro_batch=micro)


def legal_micro_batches(share: int) -> list[int]:
    """Powers of two up to 8 that divide the sequences of one replica; at least one.

    >>> legal_micro_batches(12), legal_micro_batches(7)
    ([1, 2, 4], [1])
    """
    return [size for size in (1, 2, 4, 8) if share % size == 0] or [1]


def possible_degrees(gpus: int, global_batch: int, heads: int, layers: int, per_node: int) -> Iterator[Degrees]:
    """Degrees that a run without any in its row may have had: tensor ranks inside a node, cp only where needed."""
    for tp in (1, 2, 4, 8):
        if tp > min(per_node, gpus) or gpus % tp or heads % tp:
            continue
        for pp in (1, 2, 4, 8, 16):
            if (gpus // tp) % pp or layers % pp:
                continue
            replicas = gpus // (tp * pp)
            cp = next((c for c in (1, 2, 4, 8) if replicas % c == 0 and global_batch % (replicas // c) == 0), None)
            if cp is not None:
                yield Degrees(tp=tp, pp=pp, cp=cp, dp=replicas // cp, vpp=1 if pp == 1 else None, ep=None)


def sharded_degrees(gpus: int, global_batch: int, shard: Sharding | None) -> Degrees | None:
    """Plain (sharded) data parallelism, where the batch has a sequence for every device."""
    if global_batch % gpus or (shard is not None and shard.stages == (0,)):
        return None
    return Degrees(tp=1, pp=1, cp=1, dp=gpus, vpp=1, ep=None)


_BY_OPERATOR = re.compile(r"\btorch\b|\beager\b|\bnaive\b", re.IGNORECASE)
_STATED_ERROR = re.compile(r"(?:\+/-|\u00b1)\s{0,4}(\d{1,3}(?:\.\d{1,9})?)\s{0,4}%")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterName:
    """Low-rank adapters of frozen weights."""

    rank: int
    targets: str
    """``qkv``, ``attention`` (also the output projection) or ``all`` (also the MLP)."""
    assumed: bool
    """The row has no rank; it is the framework's or benchmark's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """A measured run. Fields that its row leaves open stay empty; :mod:`.candidates` fills them in."""

    line: int
    row_id: str
    source_key: str
    source: str
    provenance: str
    framework: str
    model_name: str
    model: ModelSpec
    model_kind: str
    """``dense``, ``moe``, ``encoder``, ``vision``; with adapters ``lora``."""
    workload: str
    """``pretrain``, ``sft``, ``lora``, ``qlora``."""
    adapter: AdapterName | None
    quantised_base: bool
    optimizer: str
    device: str
    """Name in the catalogue."""
    gpus: int
    gpus_per_node: int
    internode_Bps: float | None
    """Datasheet bandwidth between nodes per device and direction; None: the row has none."""
    precisions: tuple[str, ...]
    """Precisions that the text may mean; empty: the row names none."""
    seq_len: int
    global_batch: int
    micro_batch: int | None
    degrees: Degrees | None
    """Degrees; None: the row has neither tp nor pp nor cp."""
    schedule: str | None
    accumulation: int | None
    sharding: Sharding | None
    sequence_parallel: bool | None
    recompute: Recomputation | None
    attention: str | None
    """``fused`` or ``unfused``."""
    kernel: str | None
    """Fused attention kernel where the row names one: of :data:`~steptime.plan.framework.KERNELS`."""
    offload: frozenset[str]
    attention_dtype: str | None = None
    """Format of attention's products where it differs from that of its inputs."""
    context: str | None = None
    """Exchange of context ranks; None: the default of the framework."""
    gradient_dtype: str | None = None
    """Dtype of gradients; None: the default of the framework."""
    narrow_weights: bool = False
    """Trained weights of products are stored in the narrow format."""
    document_length: float | None = None
    """Tokens of one document of a packed sequence, which attention does not cross; None: a sequence is one document."""
    expert_capacity: float | None = None
    """Slots of an expert over its mean tokens; None: no token is dropped."""
    plain_norms: bool | None = None
    """The row lists the fused kernels of the run, and none is of its norms; None: it lists none, and the norms are
    those of the framework."""
    separate_kernels: bool = False
    """Attention runs as separate operators of PyTorch, each a kernel of its own."""
    graphs: str = "none"
    """Scope of one graph, of :data:`~steptime.plan.job.GRAPHS` or parts of a layer joined by ``+``."""
    dispatcher: str | None = None
    """Dispatcher of tokens to experts, a value of the option ``dispatcher``; None: the default of the framework."""
    time: MeasuredTime | None
    memory: MeasuredMemory | None
    flags: frozenset[Flag] = field(default_factory=frozenset)
    notes: str = ""

    @property
    def supports_claim(self) -> bool:
        """True if a claim of accuracy may rest on the row: it has no flag of :data:`NO_CLAIM`."""
        return not self.flags & NO_CLAIM

    @property
    def stated_error(self) -> float:
        """Relative error that the row states of its own figures, as in "+/-40%"; 0 where it states none."""
        said = _STATED_ERROR.search(self.notes)
        return float(said.group(1)) / 100 if said else 0.0

    @property
    def step_time_s(self) -> float | None:
        """The measured step time; None: only memory is known."""
        return self.time.step_time_s if self.time else None

    @property
    def memory_bytes(self) -> float | None:
        """The measured peak memory of the fullest device."""
        return self.memory.memory_bytes if self.memory else None


def run_of(row: TableRow, load: ModelFile | None = None) -> MeasuredRun:
    """The run of a row; ``load`` as for :func:`~steptime.measure.runs.architecture.architecture`.

    Raises:
        RowProblem: it cannot be used; says why.
    """
    flags: set[Flag] = set()
    device = _device(row, flags)
    gpus = row.need("n_gpus", Reason.NO_GPUS, at_most=10**7)
    seq_len = row.need("seq_len", Reason.NO_SEQUENCE, at_most=10**9)
    schedule = schedule_name(row.text("schedule"))
    found = degrees(row, gpus, schedule, flags)
    arch = architecture(row, seq_len, found.pp if found else 1, load)
    size = batch(row, found, schedule, flags)
    per_node, framework = _per_node(row, gpus, flags), framework_of(row)
    dtype, recompute = _dtype(row, flags), _recompute(row, framework)
    kind, adapter = _workload(row, framework)
    likely = framework_default(framework, "dtype")
    job: dict[str, Any] = {"gpus": gpus, "seq_len": seq_len, "device": device, "global_batch": size.global_batch}
    basis = RateBasis(
        spec=arch.spec,
        precision=dtype.precisions[0] if dtype.precisions else max(likely, key=lambda name: likely[name]),
        frozen=adapter is not None,
        recompute=recompute.kind if recompute else "none",
        **job,
    )
    measured = _measured(row, basis, flags)
    return MeasuredRun(
        **_described(row),
        **job,
        **measured,
        framework=framework,
        model=arch.spec,
        model_kind="lora" if adapter else arch.kind,
        workload=kind,
        adapter=adapter,
        quantised_base=dtype.quantised_base or kind == "qlora",
        gpus_per_node=per_node,
        internode_Bps=network_Bps(row.text("internode"), per_node),
        precisions=dtype.precisions,
        micro_batch=size.micro_batch,
        degrees=found,
        schedule=schedule.name,
        accumulation=schedule.accumulation,
        **_plan_choices(row, device, recompute, flags, experts=arch.spec.experts is not None),
        flags=frozenset(flags | arch.flags),
    )


def _described(row: TableRow) -> dict[str, Any]:
    """Texts of a row that name its run."""
    return {
        "line": row.line,
        "row_id": row.text("row_id") or f"line-{row.line}",
        "source_key": source_key(row),
        "model_name": row.text("model"),
        "optimizer": optimizer_called(f"{row.text('workload')} {row.text('notes')}"),
        **{name: row.text(name) for name in ("source", "provenance")},
        "notes": "; ".join(filter(None, (row.text("notes"), row.text("overlap")))),
    }


def _measured(row: TableRow, basis: RateBasis, flags: set[Flag]) -> dict[str, Any]:
    """Time and memory of a run.

    Raises:
        RowProblem: it has neither, and no outcome.
    """
    time = measured_time(row, basis, flags)
    memory = measured_memory(row, catalogue_device(basis.device), flags)
    if time is None and memory is None and not row.text("outcome"):
        if Flag.MEMORY_UNREAD in flags:
            raise RowProblem(Reason.BAD_MEASUREMENT, f"{MEMORY}: {row.text(MEMORY)!r}")
        raise RowProblem(Reason.NO_MEASUREMENT)
    return {"time": time, "memory": memory}


def _plan_choices(
    row: TableRow, device: str, recompute: Recomputation | None, flags: set[Flag], *, experts: bool
) -> dict[str, Any]:
    """Sharding, recomputation, attention and further choices of a run; doubts about them are flagged."""
    said, shard = _attention(row), sharding(row.text("zero_stage_or_fsdp"))
    attention, listed = attention_kernel(said), listed_kernels(row)
    further = _choices(row, device, experts=experts)
    _doubts(row, shard, recompute, attention, flags)
    return {
        "sharding": shard,
        "recompute": recompute,
        "attention": attention,
        "kernel": fused_kernel(said) or fused_kernel(listed),
        "plain_norms": _plain_norms(listed),
        "separate_kernels": attention == "unfused" and _BY_OPERATOR.search(said) is not None,
        **further,
    }


def _choices(row: TableRow, device: str, *, experts: bool) -> dict[str, Any]:
    """Settings of a row beyond sizes, degrees and recomputation."""
    capacity = _between(row, "expert_capacity", 0.01, 1e4)
    if capacity is not None and not experts:
        row.note("expert_capacity")
    return {
        "sequence_parallel": row.flag("sequence_parallel"),
        "offload": offloaded(row.text("offload"), row.text("source")) or _offloaded_by_notes(row),
        "attention_dtype": _own_format(row, device),
        "context": choice_called("context", row.text("context")),
        "gradient_dtype": choice_called("gradient_dtype", row.text("gradient_dtype"))
        or gradient_dtype_in(row.text("dtype")),
        "narrow_weights": narrow_weights(row.text("dtype")),
        "graphs": graphs_called(row.text("graphs")),
        "dispatcher": _dispatcher(row) if experts else None,
        "document_length": _between(row, "document_length", 1.0, 1e9),
        "expert_capacity": capacity if experts else None,
    }


def _dispatcher(row: TableRow) -> str | None:
    """Dispatcher of tokens to experts: by its column, else by words of the notes that name it."""
    said = re.search(r"hybrid[-_ ]?ep|deep[-_ ]?ep|all[-_ ]?to[-_ ]?all dispatcher", row.text("notes"), re.IGNORECASE)
    return choice_called("dispatcher", row.text("dispatcher") or (said.group() if said else ""))


def _recompute(row: TableRow, framework: str) -> Recomputation | None:
    """Recomputation of a row; its notes count where its cell is empty."""
    text = row.text("recompute")
    if not text and not_recomputed(row.text("notes")):
        return Recomputation(kind="none")
    return recomputation(text, selective(framework))


def _offloaded_by_notes(row: TableRow) -> frozenset[str]:
    """Offload that notes name: "CPU offload" of FSDP means all that is sharded: weights, gradients and states."""
    said = not row.text("offload") and re.search(r"\bcpu[- ]offload", row.text("notes"), re.IGNORECASE)
    fsdp = "fsdp" in row.text("zero_stage_or_fsdp").lower()
    return frozenset({"optimizer", "weights"}) if said and fsdp else frozenset()


def _own_format(row: TableRow, device: str) -> str | None:
    """Format of attention's products; one that the device has no rate for counts as unread."""
    dtype = attention_dtype_called(row.text("attention_dtype"))
    if dtype is None or catalogue_device(device).matrix_rate(dtype) is not None:
        return dtype
    row.note("attention_dtype")
    return None


def _between(row: TableRow, name: str, low: float, high: float) -> float | None:
    """A number of a row; what lies outside counts as unread."""
    value = row.number(name)
    if value is None or low <= value <= high:
        return value
    row.note(name)
    return None


def source_key(row: TableRow) -> str:
    """Key of the source; without one the source itself, or ``unnamed``."""
    return row.text("source_key") or row.text("source")[:60] or "unnamed"


def _device(row: TableRow, flags: set[Flag]) -> str:
    text = row.text("gpu")
    if is_blank(text):
        raise RowProblem(Reason.NO_DEVICE)
    found = device_name(text)
    if found.name is None and text.lower() in cluster_names():
        return load_cluster(text.lower()).device.name
    if found.ambiguous:
        raise RowProblem(Reason.AMBIGUOUS_DEVICE, text)
    if found.name is None:
        raise RowProblem(Reason.UNKNOWN_DEVICE, text)
    if found.assumed:
        flags.add(Flag.DEVICE_ASSUMED)
    return found.name


def _dtype(row: TableRow, flags: set[Flag]) -> DtypeName:
    text = row.text("dtype")
    found = dtype_name(text)
    if not found.precisions:
        flags.add(Flag.DTYPE_UNREAD if text and not found.quantised_base else Flag.DTYPE_ASSUMED)
    return found


def _attention(row: TableRow) -> str:
    """Text on the attention of a row; a run with layers of Transformer Engine (TE) has its attention too."""
    layers = re.search(r"(?<!no )(?<!without )(?:\bte\b|\btransformer engine\b)", row.text("dtype").lower())
    return row.text("attention_impl") or ("TE" if layers else "")


def listed_kernels(row: TableRow) -> str:
    """Fused kernels of a run where its notes list them, as in ``kernel=flash_attention2 + RMS kernel``; else empty."""
    said = re.search(r"\bkernels? ?[=:] ?([^;]{1,80})", row.text("notes"))
    return "" if said is None else said.group(1)


def _plain_norms(kernels: str) -> bool | None:
    """True if kernels are listed and none is of norms; None if none is listed (the text may be an option's name)."""
    if re.search(r"norm|\brms\b|\bte\b|transformer engine|compile", kernels, re.IGNORECASE):
        return False
    return True if re.search(r"attention|\btorch\b|softmax", kernels) else None


def _per_node(row: TableRow, gpus: int, flags: set[Flag]) -> int:
    stated = row.whole("gpus_per_node", at_most=10**6)
    if stated is None:
        flags.add(Flag.NODE_ASSUMED)
    return min(stated or 8, gpus)


def _workload(row: TableRow, framework: str) -> tuple[str, AdapterName | None]:
    rules = table("workloads")
    text = row.text("workload").lower()
    kind = next((str(rule["kind"]) for rule in rules["kind"] if re.search(rule["match"], text)), "pretrain")
    if kind not in ("lora", "qlora"):
        return kind, None
    stated = re.search(r"\blora[^.;]{0,20}?\b(?:r|rank|dim)\s{0,4}=?\s{0,4}(\d{1,4})\b", row.text("notes").lower())
    for rule in rules["adapter"]:
        of_source = rule.get("source_key", source_key(row)) == source_key(row)
        if of_source and rule.get("framework") in (None, "", framework):
            rank = int(stated.group(1)) if stated else int(rule["rank"])
            return kind, AdapterName(rank=max(1, rank), targets=str(rule["targets"]), assumed=stated is None)
    raise AssertionError("the last rule takes everything")


def _doubts(
    row: TableRow, shard: Sharding | None, recompute: Recomputation | None, attention: str | None, flags: set[Flag]
) -> None:
    """Adds the flags that unread cells and the table's own remarks give."""
    settings = {"zero_stage_or_fsdp": shard, "recompute": recompute, "attention_impl": attention}
    if any(value is None and row.text(name) for name, value in settings.items()) or unknown_words(row.text):
        flags.add(Flag.TEXT_UNREAD)
    if set(row.unread) - {MEMORY}:
        flags.add(Flag.CELL_UNREAD)
    if re.match(r"mem\b", row.text("provenance"), re.IGNORECASE):
        flags.add(Flag.FROM_MEMORY)
    if "outlier" in row.text("qc_flags").lower():
        flags.add(Flag.OUTLIER)
    doubtful = r"low trust|low use|do not use|source warns|source inconsistent|not comparable|upper bound|regression"
    if re.search(doubtful, row.text("notes"), re.IGNORECASE):
        flags.add(Flag.LOW_TRUST)
