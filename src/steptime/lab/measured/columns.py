"""Names of the columns of measured training runs: their own, those of the command line and of its JSON, the usual."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Final

from steptime.errors import shorten

OTHER_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "row_id": ("id", "run", "run_id"),
    "model": ("model_name",),
    "n_params": ("parameters", "num_parameters", "params"),
    "layers": ("num_layers", "num_hidden_layers", "n_layers"),
    "hidden": ("hidden_size", "d_model", "n_embd"),
    "ffn_hidden": ("ffn_hidden_size", "intermediate_size"),
    "heads": ("num_heads", "num_attention_heads", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_query_groups", "n_kv_heads"),
    "vocab": ("vocab_size",),
    "seq_len": ("seq", "seq_length", "sequence_length", "context_length", "max_seq_len"),
    "moe_experts": ("experts", "num_experts"),
    "moe_topk": ("experts_per_token", "topk", "top_k", "num_experts_per_tok"),
    "gpu": ("device", "accelerator", "gpu_type", "gpu_name", "cluster"),
    "n_gpus": ("gpus", "num_gpus", "world_size", "devices"),
    "gpus_per_node": ("devices_per_node", "nproc_per_node"),
    "dtype": ("precision",),
    "global_batch_sequences": ("global_batch", "global_batch_size", "gbs", "global_bs"),
    "micro_batch": ("micro_batch_size", "mbs"),
    "tp": ("tensor_parallel", "tensor_model_parallel_size", "tensor_parallel_size", "tp_size"),
    "pp": ("pipeline_parallel", "pipeline_model_parallel_size", "pipeline_parallel_size", "pp_size"),
    "cp": ("context_parallel", "context_parallel_size", "cp_size"),
    "ep": ("expert_parallel", "expert_model_parallel_size", "expert_parallel_size", "ep_size"),
    "dp": ("data_parallel", "data_parallel_size", "dp_size"),
    "vpp": ("virtual_pipeline", "interleave"),
    "zero_stage_or_fsdp": ("zero", "zero_stage", "fsdp", "sharding"),
    "sequence_parallel": ("sp",),
    "recompute": ("activation_checkpointing", "recomputation", "recompute_granularity"),
    "attention_impl": ("attention",),
    "attention_dtype": ("dtype_of_attention",),
    "context": ("cp_comm_type", "context_exchange"),
    "document_length": ("packed_document_length",),
    "expert_capacity": ("capacity_factor", "expert_capacity_factor", "moe_capacity_factor"),
    "outcome": ("result", "status"),
    "gradient_dtype": ("grad_dtype", "gradients_dtype"),
    "graphs": ("cuda_graphs", "cuda_graph", "cuda_graph_impl", "cuda_graph_scope", "cuda_graph_modules"),
    "dispatcher": ("moe_dispatcher", "moe_token_dispatcher_type", "moe_flex_dispatcher_backend"),
    "framework": ("software",),
    "metric_step_time_s": ("step_time_s", "step_time", "iteration_time_s", "iteration_time", "time_per_step_s"),
    "metric_tokens_per_s_per_gpu": ("tokens_per_s_per_gpu", "tokens_per_second_per_gpu", "tokens_s_gpu"),
    "metric_tflops_per_gpu": ("tflops_per_gpu", "tflops", "tflop_s_per_gpu", "tflop_s_gpu"),
    "metric_mfu": ("mfu",),
    "metric_peak_mem_gb": ("peak_mem_gb", "peak_memory_gb", "peak_memory", "peak_mem", "memory_gb"),
}
"""Column -> other names that it may have; its own name wins, then the first of these."""
FURTHER: Final = frozenset({
    "source", "source_key", "provenance", "workload", "notes", "qc_flags", "head_dim", "gated_mlp", "tied_embeddings",
    "internode", "schedule", "offload", "tflops_definition", "mem_definition", "mem_unit", "derived_step_time_s",
    "derived_tokens_per_s_per_gpu", "calc_model_tflops_noattnhalf", "calc_model_tflops_causal", "arch_filled",
})  # fmt: skip
"""Columns without other names: those that are read, and those that are worked out from others."""
SCALED: Final[Mapping[str, tuple[str, str]]] = {
    "step_time_ms": ("metric_step_time_s", "ms"), "iteration_time_ms": ("metric_step_time_s", "ms"),
    "step_time_us": ("metric_step_time_s", "us"), "iteration_time_us": ("metric_step_time_s", "us"),
    "s_per_step": ("metric_step_time_s", "s"), "s_per_iteration": ("metric_step_time_s", "s"),
    "ms_per_step": ("metric_step_time_s", "ms"), "ms_per_iteration": ("metric_step_time_s", "ms"),
    "peak_memory_mib": ("metric_peak_mem_gb", "MiB"), "peak_memory_mb": ("metric_peak_mem_gb", "MB"),
    "peak_memory_bytes": ("metric_peak_mem_gb", "B"), "peak_memory_gib": ("metric_peak_mem_gb", "GiB"),
    "mfu_percent": ("metric_mfu", "%"),
}  # fmt: skip
"""Name of a column with a unit of its own -> column, and the unit of its cells."""
WORDS: Final[Mapping[str, str]] = {
    "sec": "s", "second": "s", "seconds": "s", "tok": "tokens", "token": "tokens", "iter": "iteration",
    "mem": "memory", "percentage": "percent", "pct": "percent",
}  # fmt: skip
"""Other spellings of a word of a name."""
NEAR: Final[Mapping[str, str]] = {
    "tokens tgs tps": "tokens per second of one device stand in tokens_per_s_per_gpu",
    "sample samples sequences throughput": "step_time_s is the global batch / samples per second",
    "flops flop tflop tflops pflop pflops gflops": "TFLOP/s of one device stand in tflops_per_gpu",
    "hfu utilization": "the model's FLOP/s as a share of the peak stand in mfu",
    "memory allocated reserved": "peak memory of one device stands in peak_memory_gb (or _mb, _mib, _gib, _bytes)",
    "time latency duration elapsed runtime step iteration us ms s": "the time of a step stands in step_time_s "
    "(or _ms, _us)",
}
"""Words of a column that nothing reads -> what to write instead, the first that fits."""


def name_key(name: str) -> str:
    """A name of a column without case, and with ``_`` for all that joins its words.

    >>> name_key(" Step time (s)"), name_key("Tokens/s/GPU"), name_key("metric_mfu")
    ('step_time_s', 'tokens_s_gpu', 'metric_mfu')
    """
    return re.sub(r"[^a-z0-9]+", "_", name.strip().lower()).strip("_")


def _spelled(key: str) -> str:
    """A key in the spelling of :data:`WORDS`, without ``per``.

    >>> _spelled("tok_per_sec_per_gpu"), _spelled("peak_mem_gb")
    ('tokens_s_gpu', 'peak_memory_gb')
    """
    return "_".join(WORDS.get(word, word) for word in key.split("_") if word != "per")


@cache
def _known() -> Mapping[str, tuple[str, str, int]]:
    """Spelled key -> own name, unit of the cells, and rank among the names of that column."""
    found: dict[str, tuple[str, str, int]] = {}
    for own, others in OTHER_NAMES.items():
        for rank, other in enumerate((own, *others)):
            found.setdefault(_spelled(other), (own, "", rank))
    for rank, (other, (own, unit)) in enumerate(SCALED.items(), 100):
        found.setdefault(_spelled(other), (own, unit, rank))
    return found


def own_names(names: Sequence[str]) -> list[tuple[str, str]]:
    """Own name of each column of a file and the unit of its cells; a column that is taken already keeps its name.

    >>> own_names(["Model", "cluster", "gpus", "step_time_ms", "mine"])
    [('model', ''), ('gpu', ''), ('n_gpus', ''), ('metric_step_time_s', 'ms'), ('mine', '')]
    """
    meant = [_known().get(_spelled(name_key(name)), (name.strip(), "", 0)) for name in names]
    best: dict[str, int] = {}
    for own, _, rank in meant:
        best[own] = min(rank, best.get(own, rank))
    pairs = zip(names, meant, strict=True)
    return [(own, unit) if best[own] == rank else (name.strip(), "") for name, (own, unit, rank) in pairs]


def near_misses(names: Iterable[str]) -> str:
    """What to write instead of columns that nothing reads and that may be measurements; "" where there are none.

    >>> near_misses(["model", "tokens_per_sec", "loss"])
    "'tokens_per_sec' is not read: tokens per second of one device stand in tokens_per_s_per_gpu"
    """
    unread = [name for name in names if name not in OTHER_NAMES and name not in FURTHER]
    told = ((name, _instead(set(_spelled(name_key(name)).split("_")))) for name in unread)
    return "; ".join([f"{shorten(name)!r} is not read: {text}" for name, text in told if text][:3])


def _instead(words: set[str]) -> str:
    return next((text for near, text in NEAR.items() if words & set(near.split())), "")


def not_read(cells: Iterable[Mapping[str, str]], also: Callable[[str], bool] = lambda _: False) -> tuple[str, ...]:
    """Columns of a table, under their own names, that have a cell and that nothing reads.

    Args:
        cells: text by column, of each row.
        also: tells further columns that are read.

    >>> not_read([{"model": "x", "notes": "y", "loss": "", "optimizer": ""}, {"model": "x", "optimizer": "lion"}])
    ('optimizer',)
    """
    found: dict[str, None] = {}
    for row in cells:
        for name, text in row.items():
            if text.strip() and name not in OTHER_NAMES and name not in FURTHER and not also(name):
                found.setdefault(name)
    return tuple(found)
