"""Training steps of public models for `bench_gpu.py`: what is built, how it is trained; no weights are downloaded."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

Built = tuple[Any, Any, Callable[[Any], Any]]
"""Module, arguments of its forward (a tuple or a mapping), and a function from its output to the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training step: all that it takes to run it again."""

    name: str
    package: str
    """``transformers``, ``torchvision`` or ``timm``."""
    model: str
    """Class of transformers, or name of the model in its package."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the configuration that are not its defaults."""
    batch: int
    size: int
    """Tokens of a sequence, or pixels of a side."""
    weights: str = "bf16"
    """Element type of the weights."""
    autocast: str | None = None
    optimizer: str = "adamw"
    """``adamw`` (lists of tensors, PyTorch's default) or ``adamw-fused``."""
    checkpointing: bool = False
    compiled: bool = False

    @property
    def title(self) -> str:
        """Name of the model and how it is trained, in one line."""
        kind = self.weights if self.autocast is None else f"autocast {self.autocast}"
        parts = [self.name, f"{self.batch} x {self.size}", kind]
        parts += ["fused"] if self.optimizer == "adamw-fused" else []
        parts += ["checkpointing"] if self.checkpointing else []
        parts += ["compiled"] if self.compiled else []
        return ", ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """All fields."""
        return {**asdict(self), "config": dict(self.config)}

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Case:
        """A case that :meth:`to_json` wrote."""
        return cls(**fields)


GPT2: dict[str, dict[str, Any]] = {
    "GPT-2": {},
    "GPT-2 medium": {"n_embd": 1024, "n_layer": 24, "n_head": 16},
    "GPT-2 large": {"n_embd": 1280, "n_layer": 36, "n_head": 20},
    "GPT-2 XL": {"n_embd": 1600, "n_layer": 48, "n_head": 25},
    "GPT-2, 50,304 tokens": {"vocab_size": 50304},
}
LLAMA: dict[str, dict[str, Any]] = {
    "Llama 3.2 1B": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
    },
    "Llama 3.2 3B": {
        "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
    },
}  # fmt: skip
QWEN: dict[str, dict[str, Any]] = {
    "Qwen2.5 0.5B": {
        "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "Qwen2.5 1.5B": {
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
        "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
    },
}  # fmt: skip
MISTRAL = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 6, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 32000, "sliding_window": None,
}  # fmt: skip
MIXTRAL = {
    "hidden_size": 2048, "intermediate_size": 7168, "num_hidden_layers": 4, "num_attention_heads": 16,
    "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000,
    "sliding_window": None,
}  # fmt: skip
QWEN_MOE = {
    "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 6,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 32,
    "num_experts_per_tok": 8, "vocab_size": 151936,
}  # fmt: skip
BERT = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
T5 = {
    "d_model": 768, "d_ff": 3072, "num_layers": 12, "num_decoder_layers": 12, "num_heads": 12, "d_kv": 64,
    "decoder_start_token_id": 0, "pad_token_id": 0,
}  # fmt: skip

CAUSAL = {"GPT-2": "GPT2LMHeadModel", "Llama": "LlamaForCausalLM", "Qwen": "Qwen2ForCausalLM"}
MIXED: dict[str, Any] = {"weights": "fp32", "autocast": "bf16"}
FUSED: dict[str, Any] = {"optimizer": "adamw-fused"}
AGAIN: dict[str, Any] = {"checkpointing": True}


def _text(name: str, batch: int, size: int, **more: Any) -> Case:
    """A decoder of transformers by the name of its configuration."""
    model = next(value for key, value in CAUSAL.items() if name.startswith(key))
    config = {**(GPT2 | LLAMA | QWEN)[name]}
    return Case(name=name, package="transformers", model=model, config=config, batch=batch, size=size, **more)


def _other(name: str, model: str, config: Mapping[str, Any], batch: int, size: int, **more: Any) -> Case:
    return Case(name=name, package="transformers", model=model, config=config, batch=batch, size=size, **more)


def _image(name: str, package: str, model: str, batch: int, **more: Any) -> Case:
    return Case(name=name, package=package, model=model, batch=batch, **{"size": 224, **more})


CASES: tuple[Case, ...] = (
    _text("GPT-2", 16, 1024),
    _text("Llama 3.2 1B", 2, 2048),
    _image("ResNet-50", "torchvision", "resnet50", 128, **MIXED),
    _text("GPT-2", 4, 256),
    _text("GPT-2", 16, 1024, **MIXED, **FUSED),
    _other("BERT-large", "BertForMaskedLM", BERT, 16, 512, **MIXED, **FUSED),
    _text("Llama 3.2 1B", 4, 1024, **MIXED, **FUSED),
    _text("Llama 3.2 1B", 4, 2048, **AGAIN),
    _other("Mixtral, cut", "MixtralForCausalLM", MIXTRAL, 4, 1024),
    _other("T5-base", "T5ForConditionalGeneration", T5, 16, 512),
    _image("ViT-B/16", "torchvision", "vit_b_16", 64),
    _image("ConvNeXt-T", "torchvision", "convnext_tiny", 64, **MIXED),
    _text("GPT-2", 8, 1024, weights="fp32"),
    _text("GPT-2 medium", 8, 1024, **FUSED),
    _text("GPT-2 medium", 8, 1024, **MIXED),
    _text("GPT-2 medium", 16, 512, **MIXED, **AGAIN),
    _text("GPT-2 large", 8, 1024),
    _text("GPT-2 XL", 4, 1024, **AGAIN),
    _text("Qwen2.5 0.5B", 4, 1024),
    _text("Qwen2.5 0.5B", 8, 2048, **FUSED, **AGAIN),
    _text("Qwen2.5 0.5B", 2, 2048, **MIXED, **FUSED),
    _text("Qwen2.5 1.5B", 2, 1024, **MIXED, **FUSED),
    _text("Llama 3.2 1B", 1, 512),
    _text("Llama 3.2 1B", 4, 1024, **FUSED),
    _text("Llama 3.2 3B", 1, 2048, **FUSED),
    _text("Llama 3.2 3B", 2, 2048, **AGAIN),
    _other("Mistral 7B, 6 layers", "MistralForCausalLM", MISTRAL, 2, 2048, **FUSED),
    _other("Qwen3-MoE, cut", "Qwen3MoeForCausalLM", QWEN_MOE, 4, 1024, **FUSED),
    _other("BERT-large", "BertForMaskedLM", BERT, 32, 128),
    _other("BERT-large", "BertForMaskedLM", BERT, 16, 512, **AGAIN),
    _other("T5-base", "T5ForConditionalGeneration", T5, 8, 512, **MIXED, **FUSED),
    _image("ViT-B/16", "torchvision", "vit_b_16", 128, **MIXED, **FUSED),
    _image("ResNet-50", "torchvision", "resnet50", 64, weights="fp32"),
    _image("ResNet-50", "torchvision", "resnet50", 16),
    _image("ConvNeXt-B", "torchvision", "convnext_base", 32),
    _image("Swin-S", "timm", "swin_small_patch4_window7_224", 32, **MIXED),
    _image("EfficientNet-B0", "timm", "efficientnet_b0", 64, **MIXED),
    _text("GPT-2, 50,304 tokens", 16, 1024),
    _text("GPT-2", 32, 512),
    _text("Llama 3.2 1B", 1, 4096),
    _text("Qwen2.5 1.5B", 4, 512),
    _other("BERT-large", "BertForMaskedLM", BERT, 64, 128, **MIXED),
    _text("GPT-2", 16, 1024, compiled=True),
    _text("Llama 3.2 1B", 2, 2048, compiled=True),
)


def built(case: Case, device: str) -> Built:
    """The module of a case on a device (``meta`` has no memory), its inputs and its loss."""
    import torch

    kind = {"bf16": torch.bfloat16, "fp32": torch.float32}[case.weights]
    torch.manual_seed(0)
    with torch.device(device):
        module = _module(case)
        inputs, loss = _inputs(case, module, kind, "cpu" if device == "meta" else device)
    return module.to(kind).train(), inputs, loss


def _module(case: Case) -> Any:
    if case.package == "transformers":
        made = getattr(importlib.import_module("transformers"), case.model)
        module = made(made.config_class(**{"use_cache": False, **case.config}))
        if case.checkpointing:
            module.gradient_checkpointing_enable({"use_reentrant": False})
        return module
    if case.package == "timm":
        return importlib.import_module("timm").create_model(case.model, pretrained=False, **case.config)
    return getattr(importlib.import_module("torchvision").models, case.model)(weights=None, **case.config)


def _inputs(case: Case, module: Any, kind: Any, device: str) -> tuple[Any, Callable[[Any], Any]]:
    """Random tokens or images, and a function from the output to the loss."""
    import torch

    with torch.device(device):
        if case.package != "transformers":
            images = torch.randn(case.batch, 3, case.size, case.size, dtype=kind)
            labels = torch.randint(0, 1000, (case.batch,))
            return (images,), lambda output: torch.nn.functional.cross_entropy(output, labels)
        tokens = torch.randint(3, int(module.config.vocab_size) - 1, (case.batch, case.size))
        return {"input_ids": tokens, "labels": tokens.clone()}, lambda output: output.loss
