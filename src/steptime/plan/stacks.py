"""Fine-tuning stacks: defaults as their public configuration classes have them, with the version they were read in.

What a stack allocates is its row of :data:`~steptime.plan.memory_profile.PROFILES`, how it runs that of
:data:`~steptime.plan.framework.HABITS`. No run of a stack is in a fit: what its host and device make of time is that of
software which nobody named (`generic`), on top of its own kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Defaults of one fine-tuning stack; the source says which of them are assumed."""

    title: str
    micro_batch: int
    """Sequences of a micro-batch."""
    seq_len: int | None = None
    """Longest sequence in tokens; None: that of the data."""
    optimizer: str = "adamw"
    """In the words of the command line."""
    paged: bool = False
    """Its states are in pages that leave the device where memory is short."""
    weights: str = "bf16"
    """Format that trained weights are loaded in."""
    lora_rank: int | None = 8
    lora_targets: str = "linear"
    lora_dropout: float = 0.0
    checkpointing: str = "none"
    """What it recomputes, and where what is kept waits."""
    padding: str = "longest of a batch"
    packing: bool = False
    """Sequences are joined to the longest length unless told otherwise."""
    source: str


STACKS: Mapping[str, Stack] = {
    "transformers": Stack(
        title="Trainer of Hugging Face's transformers",
        micro_batch=8,
        lora_rank=None,
        source="transformers 5.23.0: TrainingArguments (per_device_train_batch_size 8, optim adamw_torch_fused, "
        "activation_checkpointing off), from_pretrained dtype auto, ForCausalLMLoss, LlamaRMSNorm",
    ),
    "peft": Stack(
        title="PEFT's adapters under that Trainer",
        micro_batch=8,
        lora_targets="attention",
        source="peft 0.21.2: LoraConfig (r 8, lora_dropout 0.0, target_modules of the architecture: q_proj, v_proj), "
        "autocast_adapter_dtype True; use_dora False",
    ),
    "trl": Stack(
        title="SFTTrainer of TRL",
        micro_batch=8,
        seq_len=1024,
        weights="fp32",
        lora_rank=16,
        checkpointing="layers",
        source="trl at 016013e, trainer/sft_config.py: max_length 1024, packing False, gradient_checkpointing True, "
        "bf16 True, loss_type chunked_nll; ModelConfig lora_r 16; weights in fp32 are assumed (dtype of "
        "model_init_kwargs)",
    ),
    "ms-swift": Stack(
        title="ModelScope SWIFT",
        micro_batch=1,
        lora_dropout=0.05,
        checkpointing="layers",
        source="ms-swift, swift/llm/argument/tuner_args.py at 08bd05b: lora_rank 8, lora_dropout 0.05; assumed: "
        "target_modules all-linear, gradient_checkpointing True, torch_dtype of the checkpoint",
    ),
    "llama-factory": Stack(
        title="LLaMA-Factory",
        micro_batch=8,
        seq_len=2048,
        weights="fp32",
        checkpointing="layers (reentrant)",
        source="LLaMA-Factory, hparams/model_args.py: disable_gradient_checkpointing False, "
        "use_reentrant_gc True, pure_bf16 False, upcast_layernorm False, lora_rank 8, lora_dropout 0.0, "
        "lora_target all, cutoff_len 2048 (the last five assumed)",
    ),
    "axolotl": Stack(
        title="Axolotl",
        micro_batch=1,
        packing=False,
        source="assumed of axolotl, utils/schemas/config.py: bf16 auto, optimizer adamw_torch_fused, "
        "sample_packing and gradient_checkpointing as the file of the run says; adapters have no defaults",
    ),
    "unsloth": Stack(
        title="Unsloth",
        micro_batch=2,
        seq_len=2048,
        optimizer="adam8bit",
        lora_rank=16,
        checkpointing="layers, their inputs on the host (use_gradient_checkpointing unsloth)",
        source="unsloth, its notebooks: r 16, lora_dropout 0, use_gradient_checkpointing unsloth; assumed: "
        "max_seq_length 2048, load_in_4bit True, optim adamw_8bit",
    ),
    "litgpt": Stack(
        title="LitGPT",
        micro_batch=4,
        lora_targets="attention",
        lora_dropout=0.05,
        source="litgpt at 01fe959, finetune/lora.py: bf16-true, micro_batch_size 4, lora_r 8, lora_dropout 0.05, query "
        "and value, lm_head_chunk_size 128, PagedAdamW of quantised weights, checkpoints of blocks with FSDP alone",
        paged=True,
    ),
    "torchtune": Stack(
        title="torchtune",
        micro_batch=2,
        checkpointing="layers",
        lora_targets="linear",
        source="assumed of torchtune, recipes/configs/llama3_1/8B_lora_single_device.yaml: lora_rank 8, lora_dropout "
        "0.0, q_proj, v_proj, output_proj and the MLP, batch_size 2, enable_activation_checkpointing, packed "
        "False, dtype bf16",
    ),
    "paddlenlp": Stack(
        title="PaddleNLP",
        micro_batch=1,
        seq_len=2048,
        source="PaddleNLP, llm/config/llama/sft_argument.json at 98187ec and lora_argument.json at 1e3fba3: "
        "per_device_train_batch_size 1, max_length 2048, bf16 with fp16_opt_level O2, recompute False (lora: True), "
        "sharding stage2 (lora: stage1); lora_rank 8 is assumed",
    ),
}
"""Rows by the name that ``--framework`` takes."""
