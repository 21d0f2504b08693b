"""Real architectures of transformers and timm, built from their configurations without weights or network."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from public_models.rows import load_torchvision

TEXT: Mapping[str, tuple[str, str]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig"),
    "mistral": ("MistralForCausalLM", "MistralConfig"),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config"),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config"),
    "gemma": ("GemmaForCausalLM", "GemmaConfig"),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config"),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig"),
    "phi": ("PhiForCausalLM", "PhiConfig"),
    "phi3": ("Phi3ForCausalLM", "Phi3Config"),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig"),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config"),
    "opt": ("OPTForCausalLM", "OPTConfig"),
    "bloom": ("BloomForCausalLM", "BloomConfig"),
    "falcon": ("FalconForCausalLM", "FalconConfig"),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config"),
    "cohere": ("CohereForCausalLM", "CohereConfig"),
    "granite": ("GraniteForCausalLM", "GraniteConfig"),
    "starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config"),
    "stablelm": ("StableLmForCausalLM", "StableLmConfig"),
    "bert": ("BertForMaskedLM", "BertConfig"),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig"),
}
"""Name -> class of the model, class of its configuration."""
IMAGES: Mapping[str, tuple[str, str]] = {
    "vit": ("ViTForImageClassification", "ViTConfig"),
    "dinov2": ("Dinov2Model", "Dinov2Config"),
}
DEPTHS: Mapping[str, dict[str, Any]] = {
    "llama": {  # Llama 3 70B
        "num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
        "num_key_value_heads": 8, "vocab_size": 128256,
    },
    "gemma3": {"num_hidden_layers": 62},  # 27B
    "gemma2": {"num_hidden_layers": 46},  # 27B
    "bloom": {"n_layer": 24},
}  # fmt: skip
"""Settings where the default configuration is not the depth of a released model."""


def hub_model(name: str, tokens: int = 128, **settings: Any) -> tuple[Any, dict[str, Any] | tuple[Any, ...]]:
    """A model and its inputs; call it on the meta device. Names that begin with ``timm:`` are those of timm."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    load_torchvision()
    if name.startswith("timm:"):
        import timm

        size = settings.get("img_size", 224)
        return timm.create_model(name[5:], pretrained=False, **settings), (torch.empty(1, 3, size, size),)
    import transformers

    if name == "whisper":
        config = transformers.WhisperConfig(**settings)
        labels = torch.empty((1, tokens), dtype=torch.int64)
        sound = torch.empty(1, config.num_mel_bins, 2 * config.max_source_positions)
        return transformers.WhisperForConditionalGeneration(config), {"input_features": sound, "labels": labels}
    model, kind = {**TEXT, **IMAGES}[name]
    config = getattr(transformers, kind)(**{**DEPTHS.get(name, {}), **settings})
    module = getattr(transformers, model)(config)
    if name in IMAGES:
        return module, {"pixel_values": torch.empty(1, 3, config.image_size, config.image_size)}
    ids = torch.empty((1, tokens), dtype=torch.int64)
    return module, {"input_ids": ids, "labels": ids}
