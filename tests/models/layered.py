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
    "qwen3_5_text": "Qwen3_5ForCausalLM", "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM", "recurrent_gemma": "RecurrentGemmaForCausalLM",
    "minimax": "MiniMaxForCausalLM", "t5": "T5ForConditionalGeneration", "mt5": "MT5ForConditionalGeneration",
    "umt5": "UMT5ForConditionalGeneration", "bart": "BartForConditionalGeneration",
    "mbart": "MBartForConditionalGeneration", "whisper": "WhisperForConditionalGeneration",
    "llava": "LlavaForConditionalGeneration", "paligemma": "PaliGemmaForConditionalGeneration",
    "idefics3": "Idefics3ForConditionalGeneration", "smolvlm": "SmolVLMForConditionalGeneration",
    "qwen2_vl": "Qwen2VLForConditionalGeneration", "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration", "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration", "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "llama4": "Llama4ForConditionalGeneration", "kimi_k25": "Kimi_K25ForConditionalGeneration",
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
    """Parameters, and the biases that balance experts where they are buffers.

    The package ties the head of every T5; checkpoints of T5 v1.1, mT5 and Flan have one of their own.
    """
    module = module_of(config)
    tensors = dict(module.named_parameters())
    tensors |= {name: each for name, each in module.named_buffers() if name.endswith("e_score_correction_bias")}
    own_head = config["model_type"].endswith("t5") and not config.get("tie_word_embeddings", True)
    head = config["vocab_size"] * config["d_model"] if own_head else 0
    return sum(each.numel() for each in tensors.values()) + head


BATCH, TOKENS, CHUNK = 2, 128, 32
_TEXT = {
    "vocab_size": 512, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 192,
    "hidden_act": "silu", "max_position_embeddings": TOKENS, "tie_word_embeddings": False,
}  # fmt: skip
_BARE = {"vocab_size": 512, "hidden_size": 128}
_STATES = {
    "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": CHUNK,
    "mamba_d_conv": 4, "mamba_expand": 2,
}  # fmt: skip
_LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
_LATENT |= {"moe_intermediate_size": 32, "num_key_value_heads": 4}
_STACKS = {
    "vocab_size": 512, "d_model": 128, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 192, "decoder_ffn_dim": 256, "dropout": 0.0,
    "activation_function": "gelu",
}  # fmt: skip

NARROW = {
    "mamba": _BARE | {"num_hidden_layers": 2, "state_size": 16, "intermediate_size": 256},
    "mamba2": _BARE | {"num_hidden_layers": 2, "num_heads": 8, "head_dim": 32, "state_size": 16, "n_groups": 2,
                       "chunk_size": CHUNK},
    "jamba": _TEXT | {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4,
                      "expert_layer_period": 4, "expert_layer_offset": 3, "num_experts_per_tok": 2},
    "bamba": _TEXT | _STATES | {"num_hidden_layers": 2, "attn_layer_indices": [1]},
    "granitemoehybrid": _TEXT | _STATES | {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"],
                                           "num_local_experts": 0, "shared_intermediate_size": 192},
    "falcon_h1": _TEXT | _STATES | {"head_dim": 32, "num_hidden_layers": 2, "mamba_d_ssm": 256},
    "nemotron_h": {k: v for k, v in _TEXT.items() if k != "hidden_act"} | {
        "head_dim": 32, "hybrid_override_pattern": "M-*-", "num_hidden_layers": 4, "mamba_num_heads": 8,
        "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 16, "chunk_size": CHUNK, "mlp_hidden_act": "relu2"},
    "zamba2": _BARE | {
        "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 256, "hidden_act": "gelu",
        "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "n_mamba_heads": 8, "mamba_d_state": 16,
        "mamba_ngroups": 2, "mamba_expand": 2, "chunk_size": CHUNK, "adapter_rank": 8, "num_mem_blocks": 2,
        "use_shared_attention_adapter": False},
    "qwen3_next": _TEXT | {"head_dim": 32, "num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 4,
                           "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "mlp_only_layers": [],
                           "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
                           "linear_value_head_dim": 48, "decoder_sparse_step": 1},
    "recurrent_gemma": _BARE | {"num_attention_heads": 4, "num_key_value_heads": 1, "intermediate_size": 256,
                                "num_hidden_layers": 3, "lru_width": 128, "attention_window_size": TOKENS,
                                "block_types": ["recurrent", "recurrent", "attention"]},
    "minimax": _TEXT | {"head_dim": 32, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
                        "num_local_experts": 4, "num_experts_per_tok": 4, "block_size": CHUNK},
    "deepseek_v32": _TEXT | _LATENT | {"num_hidden_layers": 2, "first_k_dense_replace": 2, "n_routed_experts": 4,
                                       "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
                                       "q_lora_rank": 48, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 64},
    "kimi_linear": _TEXT | _LATENT | {
        "num_hidden_layers": 4, "num_experts": 4, "num_experts_per_token": 4, "num_shared_experts": 1,
        "first_k_dense_replace": 4, "moe_layer_freq": 1, "q_lora_rank": None, "pad_token_id": None, "v_head_dim": 24,
        "linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1, 2, 3], "head_dim": 32, "num_heads": 4,
                               "short_conv_kernel_size": 4}},
    "t5": {"vocab_size": 512, "d_model": 128, "d_kv": 32, "d_ff": 192, "num_layers": 2, "num_heads": 4,
           "dropout_rate": 0.0, "n_positions": TOKENS},
    "bart": _STACKS | {"max_position_embeddings": TOKENS},
    "whisper": _STACKS | {"num_mel_bins": 16, "max_source_positions": 64, "max_target_positions": TOKENS,
                          "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
    "llava": {"text_config": _TEXT | {"model_type": "llama", "num_hidden_layers": 2},
              "vision_config": {"model_type": "clip_vision_model", "hidden_size": 64, "intermediate_size": 96,
                                "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 56, "patch_size": 14,
                                "projection_dim": 64},
              "image_token_index": 3},
}  # fmt: skip
"""Configurations of small width, with every kind of layer of the family."""
