"""Why a key of a configuration is not used, and model types that are known but not supported."""

from __future__ import annotations

_NO_COST = "does not change the cost"
_VALUES = "changes values, not the cost"
_GENERATION = "matters when generating, not when training"
_SMALL_LOSS = "adds a loss of negligible cost"
WITHOUT_COST = frozenset({_NO_COST, _VALUES, _GENERATION, _SMALL_LOSS})
"""Reasons that nobody has to know who uses a model's numbers."""

_KEYS_BY_REASON = {
    _NO_COST: (
        "_name_or_path", "_attn_implementation", "_attn_implementation_autoset", "add_bos_token", "architectures",
        "auto_map", "bos_token_id", "chunk_size_feed_forward", "decoder_start_token_id", "do_sample", "dtype",
        "eos_token_id", "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "id2label", "is_decoder",
        "is_encoder_decoder", "label2id", "model_type", "n_ctx", "num_labels", "output_attentions",
        "output_hidden_states", "output_past", "pad_token_id", "prefix", "problem_type", "pretraining_tp",
        "return_dict", "sep_token_id", "slow_but_exact", "skip_bias_add", "skip_bias_add_qkv", "task_specific_params",
        "tie_encoder_decoder", "tokenizer_class", "torch_dtype", "torchscript", "transformers_version",
        "type_vocab_size",
        "offset_alibi", "bias_dropout_fusion", "masked_softmax_fusion", "attention_softmax_in_fp32", "unk_token_id",
        "attn_config", "image_token_index", "boi_token_index", "eoi_token_index", "mm_tokens_per_image",
        "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "vision_token_id",
        "audio_token_id", "vision_feature_layer", "vision_feature_select_strategy", "image_seq_length",
        "multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size",
        "ep_size", "initial_context_length", "_remove_final_layer_norm", "add_cross_attention",
        "logit_scale_init_value",
        "encoder_stride", "for_llm_compressor", "cache_implementation", "max_window_layers", "use_sliding_window",
        "sliding_window", "projection_dim", "use_bfloat16", "model_max_length", "apply_layernorm",
        "reshape_hidden_states", "out_features", "out_indices", "stage_names", "order_of_interleaved_layers",
        "use_embedding_sharing", "use_gated_activation", "use_parallel_block", "use_parallel_embedding",
        "max_model_len", "shared_moe_mode", "mlp_intermediate_size",
    ),
    _VALUES: (
        "alibi_bias_max", "apply_residual_connection_post_layernorm", "attn_logit_softcapping", "attn_scale",
        "attn_temperature_tuning", "embedding_multiplier", "final_logit_softcapping", "floor_scale",
        "initializer_factor", "initializer_range", "layer_norm_eps", "layer_norm_epsilon", "layer_norm_rms_epsilon",
        "layernorm_epsilon", "moe_renormalize", "n_group", "norm_epsilon", "norm_topk_prob",
        "original_max_position_embeddings",
        "partial_rotary_factor", "query_pre_attn_scalar", "rms_norm_eps", "rope_interleave", "rope_local_base_freq",
        "rope_parameters", "rope_scaling", "rope_theta", "rotary", "rotary_dim", "rotary_emb_base", "rotary_pct",
        "routed_scaling_factor", "scale_attn_weights", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn",
        "scoring_func", "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type",
        "summary_use_proj", "swiglu_limit", "topk_group", "topk_method", "use_qk_norm", "router_jitter_noise",
        "head_dim_scale", "use_bidirectional_attention", "rotary_embedding_base", "clip_qkv", "input_jitter_noise",
        "layerscale_value", "logit_scale", "no_rope_layers", "no_rope_layer_interval", "norm_eps",
        "position_embedding_type", "rope_percent", "attention_multiplier", "residual_multiplier", "logits_scaling",
    ),
    _SMALL_LOSS: (
        "aux_loss_alpha", "output_router_logits", "router_aux_loss_coef", "router_z_loss_coef", "seq_aux", "z_loss",
    ),
    "layers dropped at random are counted as run": ("layerdrop", "layer_dropout", "drop_path_rate"),
    _GENERATION: ("use_cache", "generation_config", "max_length", "temperature", "top_k", "top_p", "max_new_tokens"),
    "multi-token prediction is read for DeepSeek-V3, Kimi K2 and GLM-4.5 only": (
        "num_nextn_predict_layers", "num_mtp_layers", "use_mtp", "num_mtp_modules", "mtp_transformer_layers",
    ),
    "only the language model is read": (
        "vision_config", "audio_config",
    ),
}  # fmt: skip

REASONS = {key: reason for reason, keys in _KEYS_BY_REASON.items() for key in keys}
UNKNOWN_KEY = "unknown to steptime, and not counted"

_ENCODER_DECODER = "an encoder-decoder model"
_STATE_SPACE = "a state-space model"
_HYBRID = "a model with linear or state-space attention in some layers"
_ENCODER = "an encoder for text"
_BARE_NORMS = "a model with norms without weights"
_SPARSE = "a model with an attention indexer (sparse attention)"

CAPTURE = (
    "a torch module of it can be captured: steptime profile pkg.module:factory --device NAME, and pkg.module:factory "
    "in place of a model"
)
#: Kind of model -> how it can be given instead; of the others a module can be captured.
WAYS = {
    _ENCODER: f"its dimensions in a TOML file with causal = false describe it (docs/models.md); or {CAPTURE}",
}

#: model_type -> what it is; these are refused by name instead of being taken for a typing error.
NOT_YET = {
    "t5": _ENCODER_DECODER, "mt5": _ENCODER_DECODER, "umt5": _ENCODER_DECODER, "longt5": _ENCODER_DECODER,
    "whisper": _ENCODER_DECODER, "bart": _ENCODER_DECODER, "mbart": _ENCODER_DECODER, "marian": _ENCODER_DECODER,
    "pegasus": _ENCODER_DECODER, "m2m_100": _ENCODER_DECODER, "t5gemma": _ENCODER_DECODER,
    "mamba": _STATE_SPACE, "mamba2": _STATE_SPACE, "falcon_mamba": _STATE_SPACE, "rwkv": _STATE_SPACE,
    "qwen3_next": _HYBRID, "jamba": _HYBRID, "bamba": _HYBRID, "zamba2": _HYBRID, "falcon_h1": _HYBRID,
    "granitemoehybrid": _HYBRID, "nemotron_h": _HYBRID, "minimax": _HYBRID, "minimax_text_01": _HYBRID,
    "recurrent_gemma": _HYBRID, "zamba": _HYBRID, "kimi_linear": _HYBRID,
    "bert": _ENCODER, "roberta": _ENCODER, "distilbert": _ENCODER, "deberta-v2": _ENCODER, "modernbert": _ENCODER,
    "olmo": _BARE_NORMS,
    "deepseek_v32": _SPARSE, "glm_moe_dsa": _SPARSE,
}  # fmt: skip

#: Other names of a model_type, and types whose layers are those of another one. Granite differs from Llama by factors,
#: Seed-OSS by a bias that may be missing, the language models of Qwen-VL from Qwen by the positions of images, and
#: OLMo 3 from OLMo 2 by its windows.
SAME_TYPE = {
    "gemma3_text": "gemma3", "llama4_text": "llama4", "RefinedWeb": "falcon", "RefinedWebModel": "falcon",
    "kimi": "kimi_k2", "granite": "llama", "seed_oss": "llama", "olmo3": "olmo2", "ministral": "mistral",
    "qwen2_vl": "qwen2", "qwen2_vl_text": "qwen2", "qwen2_5_vl": "qwen2", "qwen2_5_vl_text": "qwen2",
    "qwen3_vl": "qwen3", "qwen3_vl_text": "qwen3", "qwen3_vl_moe": "qwen3_moe", "qwen3_vl_moe_text": "qwen3_moe",
}  # fmt: skip

#: Our field -> the key that most families have for it; for messages.
THEIR_NAMES = {
    "layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "ffn_hidden": "intermediate_size", "vocab": "vocab_size",
    "seq_len": "max_position_embeddings", "max_positions": "max_position_embeddings", "window": "sliding_window",
    "windowed_layers": "layer_types", "experts.experts": "num_experts",
    "experts.experts_per_token": "num_experts_per_tok", "experts.expert_ffn_hidden": "moe_intermediate_size",
    "experts.shared_ffn_hidden": "n_shared_experts", "experts.groups": "n_group",
    "experts.groups_per_token": "topk_group", "experts.moe_layers": "moe_layers",
    "vision.patch_size": "patch_size", "vision.image_size": "image_size", "vision.head_outputs": "num_labels",
}  # fmt: skip
