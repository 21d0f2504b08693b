"""Modules of `transformers` whose layers are of several kinds, from published configurations, on the meta device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from public_models.rows import load_torchvision

CLASSES = {
    "mamba": "MambaForCausalLM", "falcon_mamba": "FalconMambaForCausalLM", "mamba2": "Mamba2ForCausalLM",
    "jamba": "JambaForCausalLM", "bamba": "BambaForCausalLM", "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM", "nemotron_h": "NemotronHForCausalLM", "zamba2": "Zamba2ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM", "kimi_linear": "KimiLinearForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM", "recurrent_gemma": "RecurrentGemmaForCausalLM",
    "minimax": "MiniMaxForCausalLM",
}  # fmt: skip
LETTERS = {"M": "mamba", "-": "mlp", "*": "attention", "E": "moe"}


def module_of(config: Mapping[str, Any]) -> Any:
    """The module of a configuration, on the meta device."""
    load_torchvision()
    import transformers

    made = getattr(transformers, CLASSES[config["model_type"]])
    keys = {key: value for key, value in config.items() if key != "model_type"}
    if "hybrid_override_pattern" in keys:
        keys["layers_block_type"] = [LETTERS[each] for each in keys.pop("hybrid_override_pattern")]
        del keys["num_hidden_layers"]
    with torch.device("meta"):
        return made(made.config_class(**keys))


def counted(config: Mapping[str, Any]) -> int:
    """Parameters, and the biases that balance experts where they are buffers."""
    module = module_of(config)
    tensors = dict(module.named_parameters())
    tensors |= {name: each for name, each in module.named_buffers() if name.endswith("e_score_correction_bias")}
    return sum(each.numel() for each in tensors.values())
