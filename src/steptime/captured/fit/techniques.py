"""The table of techniques that save memory: effect, cost, and settings of each framework.

Settings: PyTorch 2.13, `transformers.TrainingArguments`, keys of DeepSpeed's JSON, torchtitan's TOML, torchtune, TRL,
bitsandbytes, torchao, peft.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final


class Change(StrEnum):
    """Change of the numerics by a technique, mildest first."""

    NONE = "none"
    """The same mathematics; the order of sums may differ."""
    ROUNDING = "rounding"
    """Some tensors have fewer bits; usually the same loss curve."""
    TRAINING = "training"
    """Training can differ: products in 8 bits, no fp32 copy of the weights, or other trained weights."""

    @property
    def rank(self) -> int:
        """Position in the order of severity, from 0."""
        return list(Change).index(self)


class Step(StrEnum):
    """Steps of the guide, in order."""

    PRECISION = "mixed precision"
    FUSED = "fused optimiser"
    CHECKPOINT = "gradient checkpointing"
    ACCUMULATE = "gradient accumulation"
    NARROW = "8-bit optimiser states"
    HOST = "the host's memory"
    FREEZE = "adapters on 4-bit weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class Technique:
    """One technique."""

    key: str
    title: str
    step: Step
    changes: Change
    memory: str
    time: str
    numerics: str
    settings: Mapping[str, str] = field(default_factory=dict)
    """Framework -> setting that enables it, with placeholders such as ``{device_type}`` and ``{k}``."""
    source: str = ""


_CHECKPOINT_NUMERICS = "none: the same operators run twice, random numbers are restored"
_ROWS: Final = (
    Technique(
        key="tf32", title="TF32 products", step=Step.PRECISION, changes=Change.ROUNDING,
        memory="none", time="fp32 products run on matrix units", numerics="inputs of products have 10 bits of mantissa",
        settings={
            "PyTorch": 'torch.set_float32_matmul_precision("high")', "Hugging Face": "tf32=True",
        }, source="NVIDIA A100 whitepaper",
    ),
    Technique(
        key="bf16", title="bf16 mixed precision", step=Step.PRECISION, changes=Change.ROUNDING,
        memory="activations of products take 2 bytes; bf16 copies of the weights come on top",
        time="products run at the bf16 rate", numerics="8 bits of mantissa in products; weights and states stay fp32",
        settings={
            "PyTorch": 'torch.autocast("{device_type}", dtype=torch.bfloat16)', "Hugging Face": "bf16=True",
            "DeepSpeed": '"torch_autocast": {{"enabled": true, "dtype": "bfloat16"}}',
            "torchtitan": '[training] mixed_precision_param = "bfloat16"',
        }, source="Micikevicius et al., arXiv 1710.03740; Kalamkar et al., arXiv 1905.12322",
    ),
    Technique(
        key="fp16", title="fp16 mixed precision", step=Step.PRECISION, changes=Change.ROUNDING,
        memory="as bf16", time="products run at the fp16 rate", numerics="10 bits of mantissa; the loss is scaled",
        settings={
            "PyTorch": 'torch.autocast("{device_type}", dtype=torch.float16) and torch.amp.GradScaler("{device_type}")',
            "Hugging Face": "fp16=True", "DeepSpeed": '"torch_autocast": {{"enabled": true, "dtype": "float16"}}',
        }, source="Micikevicius et al., arXiv 1710.03740",
    ),
    Technique(
        key="fp8", title="products in fp8", step=Step.PRECISION, changes=Change.TRAINING,
        memory="inputs of products are kept in 1 byte",
        time="products run at the fp8 rate; quantising passes come on top",
        numerics="2 or 3 bits of mantissa in products",
        settings={"PyTorch": "transformer_engine.pytorch.fp8_autocast(enabled=True)"},
        source="Micikevicius et al., arXiv 2209.05433",
    ),
    Technique(
        key="pure-bf16", title="weights and states in bf16", step=Step.PRECISION, changes=Change.TRAINING,
        memory="weights, gradients and states halve too", time="as bf16, and a faster optimiser",
        numerics="small updates of the weights are lost",
        settings={
            "PyTorch": "module.to(torch.bfloat16)", "Hugging Face": "from_pretrained(..., dtype=torch.bfloat16)",
            "torchtitan": '[training] dtype = "bfloat16"',
        },
    ),
    Technique(
        key="fused-optimizer", title="fused optimiser", step=Step.FUSED, changes=Change.NONE,
        memory="no temporaries as large as the weights", time="one pass over weights, gradients and states",
        numerics="none",
        settings={
            "PyTorch": "torch.optim.AdamW(..., fused=True)", "Hugging Face": 'optim="adamw_torch_fused"',
            "DeepSpeed": '"optimizer": {{"type": "AdamW"}}', "torchtitan": '[optimizer] implementation = "fused"',
        }, source="PyTorch, torch.optim",
    ),
    Technique(
        key="selective", title="selective checkpointing", step=Step.CHECKPOINT, changes=Change.NONE,
        memory="blocks keep results of products and attention only", time="norms and activation functions run twice",
        numerics=_CHECKPOINT_NUMERICS,
        settings={
            "PyTorch": "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, "
            "context_fn=partial(create_selective_checkpoint_contexts, policy))",
            "torchtitan": '[activation_checkpoint] mode = "selective", selective_ac_option = "op"',
        }, source="Korthikanti et al., arXiv 2205.05198",
    ),
    Technique(
        key="every", title="checkpoints around some blocks", step=Step.CHECKPOINT, changes=Change.NONE,
        memory="one block in {k} keeps its input only", time="that share of the forward pass runs twice",
        numerics=_CHECKPOINT_NUMERICS,
        settings={
            "PyTorch": "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) for one block in {k}",
            "torchtitan": '[activation_checkpoint] mode = "selective", selective_ac_option = "{k}"',
        }, source="Chen et al., arXiv 1604.06174",
    ),
    Technique(
        key="groups", title="checkpoints around groups of blocks", step=Step.CHECKPOINT, changes=Change.NONE,
        memory="N/k inputs and the activations of k blocks; least near k = sqrt(N)", time="the forward pass runs twice",
        numerics=_CHECKPOINT_NUMERICS,
        settings={
            "PyTorch": "torch.utils.checkpoint.checkpoint_sequential(blocks, {segments}, x, use_reentrant=False)",
            "DeepSpeed": '"activation_checkpointing": {{"number_checkpoints": {segments}}}',
        }, source="Chen et al., arXiv 1604.06174",
    ),
    Technique(
        key="all", title="checkpoints around all blocks", step=Step.CHECKPOINT, changes=Change.NONE,
        memory="blocks keep their inputs only", time="the forward pass runs twice", numerics=_CHECKPOINT_NUMERICS,
        settings={
            "PyTorch": "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)",
            "Hugging Face": 'gradient_checkpointing=True, gradient_checkpointing_kwargs={{"use_reentrant": False}}',
            "DeepSpeed": "deepspeed.checkpointing.checkpoint(block, x)",
            "torchtitan": '[activation_checkpoint] mode = "full"',
        }, source="Chen et al., arXiv 1604.06174",
    ),
    Technique(
        key="optimal", title="optimal checkpoints", step=Step.CHECKPOINT, changes=Change.NONE,
        memory="what the budget asks for", time="the least recomputation within the budget",
        numerics=_CHECKPOINT_NUMERICS,
        settings={
            "PyTorch": "torch.utils.checkpoint.checkpoint around the blocks in brackets, nested as they are: {tree}",
            "torch.compile": "torch._functorch.config.activation_memory_budget chooses by itself",
        }, source="Beaumont et al., arXiv 1911.13214",
    ),
    Technique(
        key="8bit-activations", title="saved activations in 8 bits", step=Step.CHECKPOINT, changes=Change.ROUNDING,
        memory="saved activations take 1 byte and a scale per 256", time="one pass to narrow, one to widen each",
        numerics="gradients of weights carry the error of 8 bits",
        settings={"PyTorch": "torch.autograd.graph.saved_tensors_hooks(pack, unpack) around each block"},
        source="ActNN, Chen et al., arXiv 2104.14129",
    ),
    Technique(
        key="accumulation", title="gradient accumulation", step=Step.ACCUMULATE, changes=Change.NONE,
        memory="activations of {micro} samples instead of {batch}; gradients live throughout",
        time="{count} smaller micro-steps per optimiser step",
        numerics="none, but statistics over the batch (BatchNorm) are taken per micro-batch",
        settings={
            "PyTorch": "(loss / {count}).backward() for {count} micro-batches of {micro}, then optimizer.step()",
            "Hugging Face": "per_device_train_batch_size={micro}, gradient_accumulation_steps={count}",
            "DeepSpeed": '"train_micro_batch_size_per_gpu": {micro}, "gradient_accumulation_steps": {count}',
            "torchtitan": "[training] local_batch_size = {micro}, global_batch_size = {batch}",
        },
    ),
    Technique(
        key="8bit-optimizer", title="8-bit optimiser states", step=Step.NARROW, changes=Change.ROUNDING,
        memory="states take 1 byte and a scale per 256 instead of 4", time="the optimiser moves fewer bytes",
        numerics="states are rounded block by block",
        settings={
            "PyTorch": "bitsandbytes.optim.AdamW8bit", "Hugging Face": 'optim="adamw_bnb_8bit"',
        }, source="Dettmers et al., arXiv 2110.02861",
    ),
    Technique(
        key="paged-optimizer", title="paged optimiser states", step=Step.HOST, changes=Change.NONE,
        memory="states are on the host but for the optimiser's step", time="states come and go over the host's link",
        numerics="none",
        settings={
            "PyTorch": "bitsandbytes.optim.PagedAdamW32bit", "Hugging Face": 'optim="paged_adamw_32bit"',
        }, source="QLoRA, arXiv 2305.14314, section 3",
    ),
    Technique(
        key="offload-optimizer", title="optimiser on the host", step=Step.HOST, changes=Change.NONE,
        memory="no states on the device", time="the host updates the weights; gradients go, weights come back",
        numerics="none",
        settings={
            "DeepSpeed": '"zero_optimization": {{"stage": 2, '
            '"offload_optimizer": {{"device": "cpu", "pin_memory": true}}}}',
            "PyTorch": "torchao.optim.CPUOffloadOptimizer",
        }, source="ZeRO-Offload, arXiv 2101.06840",
    ),
    Technique(
        key="swap", title="activations swapped to the host", step=Step.HOST, changes=Change.NONE,
        memory="activations of some blocks wait on the host", time="copies as far as no computation overlaps with them",
        numerics="none",
        settings={
            "PyTorch": "torch.autograd.graph.save_on_cpu(pin_memory=True) around these blocks (without overlap)",
            "torchtune": "enable_activation_offloading: True", "TRL": "activation_offloading=True",
        }, source="vDNN, Rhu et al., arXiv 1602.08124",
    ),
    Technique(
        key="qlora", title="adapters on frozen 4-bit weights", step=Step.FREEZE, changes=Change.TRAINING,
        memory="weights take 4.127 bits; gradients and states of the adapters only",
        time="weights are widened before each product",
        numerics="only low-rank adapters are trained, on rounded weights",
        settings={
            "Hugging Face": 'BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", '
            "bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16) and "
            'peft.LoraConfig(r={rank}, target_modules={targets})',
        }, source="QLoRA, arXiv 2305.14314",
    ),
)  # fmt: skip
STACKS: Final = {"Hugging Face": "transformers", "DeepSpeed": "deepspeed", "torchtitan": "torchtitan", "TRL": "trl"}
"""Framework in the settings of techniques -> framework of the estimate."""
TECHNIQUES: Final[Mapping[str, Technique]] = {row.key: row for row in _ROWS}
"""Key -> technique, in the order of the guide."""
