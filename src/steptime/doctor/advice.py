"""What to try, in the words of each framework. Rows, no logic beyond choosing them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Self

NAMES: Final[Mapping[str, str]] = {
    "megatron": "Megatron-LM",
    "megatron-deepspeed": "Megatron-DeepSpeed",
    "nemo": "NeMo",
    "deepspeed": "DeepSpeed",
    "torchtitan": "torchtitan",
    "maxtext": "MaxText",
    "trainer": "Lightning or the Transformers Trainer",
    "pytorch": "PyTorch",
}
#: Frameworks that take the options of another.
_LIKE: Final[Mapping[str, str]] = {"megatron-deepspeed": "megatron"}


class Switch(str):
    """What to try that a run may do already: it does where it says so under all of ``names``."""

    names: tuple[str, ...]
    """Of its framework's options, or of its plan."""

    def __new__(cls, text: str, *names: str) -> Self:
        """The text, with the names."""
        switch = super().__new__(cls, text)
        switch.names = names
        return switch


#: Code of a finding -> framework (``""``: any) -> what to try.
ADVICE: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "dp_comm": {
        "megatron": (
            Switch(
                "--overlap-grad-reduce, with --use-distributed-optimizer also --overlap-param-gather",
                "overlap_grad_reduce",
                "overlap_param_gather",
            ),
            "a larger --ddp-bucket-size if the reductions are many and short",
        ),
        "nemo": ("MegatronCommOverlapCallback, or ddp with overlap_grad_reduce=True and overlap_param_gather=True",),
        "deepspeed": (
            Switch('"zero_optimization": {"overlap_comm": true}', "overlap_comm"),
            "a larger reduce_bucket_size and allgather_bucket_size; for stage 3 stage3_prefetch_bucket_size, "
            "zero_hpz_partition_size or a lower stage",
        ),
        "torchtitan": (
            "parallelism.data_parallel_replicate_degree: shard inside a node, replicate across nodes",
            'parallelism.fsdp_reshard_after_forward = "never" if memory allows',
        ),
        "": ("more micro-batches per step: the same traffic behind more computation",),
    },
    "tp_comm": {
        "megatron": (
            Switch("--sequence-parallel with --tp-comm-overlap", "sequence_parallel", "tp_comm_overlap"),
            "a smaller --tensor-model-parallel-size",
        ),
        "nemo": ("MegatronCommOverlapCallback(tp_comm_overlap=True) with sequence_parallel=True",),
        "deepspeed": ("a smaller tensor_parallel.autotp_size",),
        "torchtitan": ("parallelism.enable_async_tensor_parallel with compile", "a smaller tensor_parallel_degree"),
        "": ("keep the tensor ranks of a group inside one NVLink domain",),
    },
    "cp_comm": {
        "megatron": ("--cp-comm-type p2p or a2a+p2p", "a smaller --context-parallel-size"),
        "torchtitan": ("a smaller context_parallel_degree",),
        "": ("keep the context ranks of a group inside one NVLink domain",),
    },
    "ep_comm": {
        "megatron": (
            Switch("--overlap-moe-expert-parallel-comm", "overlap_moe_expert_parallel_comm"),
            "--moe-token-dispatcher-type flex with --moe-enable-deepep",
        ),
        "": ("keep the expert ranks of a group inside one NVLink domain",),
    },
    "pp_comm": {
        "megatron": (
            "--num-layers-per-virtual-pipeline-stage (interleaving), or more micro-batches",
            "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers: stages of equal time",
        ),
        "torchtitan": (
            'parallelism.pipeline_parallel_schedule = "Interleaved1F1B" or "ZBVZeroBubble"',
            "pipeline_parallel_first_stage_less_layers and ..._last_stage_less_layers: stages of equal time",
        ),
        "": ("more micro-batches per step, or fewer stages",),
    },
    "unassigned_comm": {
        "": ("name the process groups (group_desc), or give the degrees, so that the traffic gets an axis",),
    },
    "launch": {
        "megatron": ("--cuda-graph-impl", Switch("--manual-gc with a --manual-gc-interval", "manual_gc")),
        "torchtitan": ("compile.enable", "training.gc_freq"),
        "deepspeed": ("engine.compile()",),
        "": ("CUDA graphs, or torch.compile(mode='reduce-overhead')", "a larger micro-batch: fewer, longer kernels"),
    },
    "idle": {
        "": (
            "look at the longest gap: data loading, a host synchronisation (.item(), a print of the loss), "
            "or a stream that waits for another",
        ),
    },
    "stall": {
        "": (
            "record with with_stack=True: the Python function that runs during the pause is the cause",
            "usual ones: a data loader without workers, garbage collection (gc.disable() and gc.collect() every few "
            "hundred steps), .item() or a print of a tensor, a checkpoint, an optimiser on the host",
            "CUDA graphs and larger micro-batches do not help: the other kernels run back to back",
        ),
    },
    "between_steps": {
        "megatron": ("a larger --num-workers; --manual-gc; a larger --log-interval",),
        "torchtitan": ("training.gc_freq, metrics.log_freq; a data loader with workers",),
        "": (
            "what runs between two steps: the data loader (workers, prefetching, pinned memory), logging of the loss, "
            "garbage collection, checkpoints, the learning-rate scheduler",
            "record with with_stack=True: the Python function that runs during the pause is the cause",
        ),
    },
    "host_sync": {
        "": (
            "read losses and norms with .item() or .cpu() once per logging interval, not per step; "
            "non_blocking=True copies",
            "what the host does between the read and the next launch is on the critical path: move it behind the "
            "launches",
        ),
    },
    "host_optimizer": {
        "megatron": ("--optimizer-cpu-offload off, or --overlap-cpu-optimizer-d2h-h2d",),
        "deepspeed": ("no offload_optimizer, or more cores for DeepSpeedCPUAdam; FusedAdam on the device",),
        "torchtitan": ('optimizer.implementation = "fused"',),
        "": ("a fused optimiser (fused=True) instead of a loop over parameters; clip_grad_norm_ with foreach=True",),
    },
    "compile": {
        "": ("fixed shapes (dynamic=False, padded batches): TORCH_LOGS=recompiles says what changes; warm up first",),
    },
    "synchronise": {
        "": ("remove .item(), .cpu(), nonzero() and prints of tensors from the step; use non_blocking=True copies",),
    },
    "allocator": {
        "": (
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
            "keep the shapes of the batches fixed, or free memory (recomputation, smaller micro-batch)",
        ),
    },
    "copies": {
        "": ("pinned host memory and non_blocking=True", "check that no offload is on that is not needed"),
        "deepspeed": ("zero_optimization.offload_optimizer / offload_param: drop them, or pin_memory: true",),
    },
    "memory_bound": {
        "megatron": ("the fused kernels (--no-*-fusion flags are off), Transformer Engine layers",),
        "torchtitan": ("compile.enable: fuses element-wise kernels",),
        "": ("fused norm, rotary, activation and cross-entropy kernels; torch.compile",),
    },
    "compute": {
        "": (
            "check the clocks (power or heat limits: nvidia-smi -q -d PERFORMANCE), and the dtype of the products",
            "hidden sizes and vocabulary per rank that are multiples of 128",
        ),
    },
    "attention": {
        "megatron": ("--attention-backend flash or fused",),
        "": ("a fused attention kernel: scaled_dot_product_attention, FlashAttention",),
    },
    "optimizer": {
        "megatron": (
            Switch("--use-distributed-optimizer: each data rank updates its share", "use_distributed_optimizer"),
        ),
        "deepspeed": ("FusedAdam (no torch_adam)", Switch("ZeRO stage 1 or more", "zero")),
        "torchtitan": ('optimizer.implementation = "fused"',),
        "": ("a fused optimiser (fused=True)",),
    },
    "checkpoint": {
        "megatron": ("--async-save, a larger --save-interval",),
        "torchtitan": ('checkpoint.async_mode = "async", a larger checkpoint.interval',),
        "": ("save less often, asynchronously, or to a fast local path first",),
    },
    "evaluation": {
        "megatron": ("a larger --eval-interval, fewer --eval-iters",),
        "torchtitan": ("a larger validation.freq, fewer validation.steps",),
        "": ("evaluate less often",),
    },
    "garbage_collection": {
        "megatron": ("--manual-gc --manual-gc-interval 100: all ranks collect at the same step",),
        "torchtitan": ("a larger training.gc_freq",),
        "": ("gc.disable(), and gc.collect() every few hundred steps on all ranks together",),
    },
    "spikes": {
        "": (
            "look at what happens at these steps: checkpoint, evaluation, logging, garbage collection, data shards",
            "irregular ones on many nodes: network congestion, or other jobs on the file system",
        ),
    },
    "drift": {
        "": (
            "watch clocks and temperatures over the run; restart to see whether it begins anew",
            "growing host memory, lists of tensors kept for logging, a fragmenting allocator",
        ),
    },
    "outside": {
        "megatron": ("a larger --num-workers", "--async-save, larger --save-interval and --eval-interval"),
        "deepspeed": ("more workers of the data loader; the engine's timer leaves out everything between the steps",),
        "": ("more workers and prefetching in the data loader, pinned memory",),
    },
    "halt": {
        "": ("see what the job did then: a restart, a hang of a collective or of storage, a suspended machine",),
    },
    "data": {
        "megatron": ("a larger --num-workers, data on a local disk",),
        "": ("more workers and prefetching in the data loader, pinned memory",),
    },
    "stragglers": {
        "megatron": ("--log-straggler, or --timing-log-option all, names the ranks",),
        "": (
            "compare the slowest ranks' clocks, ECC errors and links; take the node out if it stays slow",
            "with pipeline stages: stages of unequal work look the same",
        ),
    },
    "skipped": {
        "": ("a smaller initial loss scale or a longer loss-scale window; bf16 needs no loss scale",),
    },
    "memory": {
        "": (
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
            "recomputation, a smaller micro-batch, or a higher ZeRO stage",
        ),
    },
    "memory_more": {
        "megatron": (
            "hold the printed arguments against what was predicted: use_distributed_optimizer, recompute_granularity, "
            "sequence_parallel, accumulate_allreduce_grads_in_fp32, micro_batch_size",
        ),
        "deepspeed": (
            "hold the printed configuration against what was predicted: stage, bucket sizes, "
            "stage3_max_live_parameters, and whether activation checkpointing is on",
        ),
        "torchtitan": (
            "hold the configuration against what was predicted: activation_checkpoint.mode, "
            "parallelism.fsdp_reshard_after_forward, training.local_batch_size",
        ),
        "": (
            "torch.cuda.memory._record_memory_history(), then _dump_snapshot() after a step, shows what is alive at "
            "the peak",
            "see whether the peak comes with an evaluation or a checkpoint, which allocate beside the step",
        ),
    },
    "memory_less": {
        "": (
            "check that the run recomputes, shares out (ZeRO), and keeps its optimiser as predicted",
            "the log may state the memory of another rank than the fullest, or before the optimiser's first step",
        ),
    },
    "inputs": {
        "": (
            "give what the run has: with another model, device, batch, dtype or plan the rest says little of this run",
            "check model, sequence length, batch, GPUs and their kind, dtype and recomputation against the run",
        ),
    },
    "variant": {
        "": ("check that this choice of the plan is what the run uses; give it, or change the run",),
    },
    "unexplained": {
        "megatron": ("--timing-log-level 2 for timers, or --profile --use-pytorch-profiler for a trace",),
        "deepspeed": ('"wall_clock_breakdown": true for timers, or a trace of torch.profiler',),
        "torchtitan": ("profiling.enable_profiling for a trace",),
        "": ("steptime doctor on a trace shows where the rest goes",),
    },
}


def untried(words: Sequence[str], said: Mapping[str, object]) -> tuple[str, ...]:
    """What to try but for what a run says that it does.

    >>> untried((Switch("ZeRO stage 1 or more", "zero"), "FusedAdam (no torch_adam)"), {"zero": 3})
    ('FusedAdam (no torch_adam)',)
    """
    return tuple(
        word for word in words if not (isinstance(word, Switch) and all(_is_on(said.get(name)) for name in word.names))
    )


def _is_on(value: object) -> bool:
    return str(value).lower() not in ("none", "false", "off", "0", "")


def advice_for(code: str, framework: str) -> tuple[str, ...]:
    """What to try: the framework's own words, then what holds for all; of a trace, the words of each framework.

    >>> advice_for("skipped", "megatron")[0][:40]
    'a smaller initial loss scale or a longer'
    """
    table = ADVICE.get(code, {})
    if framework:
        framework = _LIKE.get(framework, framework)
        return (*table.get(framework, ()), *table.get("", ()))
    each = tuple(f"{NAMES[name]}: {'; '.join(words)}" for name, words in table.items() if name)
    return (*table.get("", ()), *each)
