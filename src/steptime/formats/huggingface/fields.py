"""Fields of one ``config.json``: typed access with aliases and defaults, and a record of which keys were used.

Also here: the reason why a key is not used, the model types that are known but not supported, and what many families
share (dimensions of a decoder, windows, context length, quantisation).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from steptime.errors import FieldError, shorten, shown
from steptime.model.spec import LIMITS

#: No quantity of a model file is above this; a larger number is a typing error.
LARGEST = max(LIMITS.values())


class Fields:
    """One JSON object being read.

    Every access marks the key as used, so that :meth:`unused` can name the rest. A key that is missing or null
    takes the default of the family and is noted in ``assumed``.
    """

    def __init__(
        self,
        raw: Mapping[str, Any],
        *,
        where: str,
        prefix: str = "",
        defaults: Mapping[str, Any] | None = None,
        aliases: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.where = where
        self.prefix = prefix
        self.assumed: dict[str, str] = {}
        self.chosen: set[str] = set()
        """Keys in ``assumed`` that could be taken otherwise, and are no default of the family."""
        self._raw = raw
        self._defaults = dict(defaults or {})
        self._aliases = dict(aliases or {})
        self._why: dict[str, str] = {}
        self._used: set[str] = set()
        self._nested: dict[str, Fields] = {}

    def nested(
        self, key: str, raw: Mapping[str, Any], defaults: Mapping[str, Any], aliases: Mapping[str, Sequence[str]]
    ) -> Fields:
        """Fields of an object under a key, whose notes and unused keys are those of this one."""
        made = Fields(raw, where=self.where, prefix=f"{self.prefix}{key}.", defaults=defaults, aliases=aliases)
        made.assumed, made.chosen = self.assumed, self.chosen
        self._nested[key] = made
        return made

    def _find(self, key: str) -> tuple[str, Any]:
        """The name under which the file has that key, and its value (None where it has none)."""
        names = (key, *self._aliases.get(key, ()))
        self._used.update(names)
        for name in names:
            if self._raw.get(name) is not None:
                return name, self._raw[name]
        return names[0] if key in self._raw or len(names) == 1 else names[-1], None

    def _value(self, key: str, needed: bool) -> tuple[str, Any]:
        name, value = self._find(key)
        if value is not None:
            return name, value
        if key in self._defaults:
            value = self._defaults[key]
            if value is not None:
                self.assumed[self.prefix + name] = f"{value} ({self._why.get(key, 'default of the family')})"
            return name, value
        if needed:
            raise self.error(name, "is missing")
        return name, None

    def error(self, name: str, problem: str, hint: str | None = None) -> FieldError:
        """An error about one key of this file."""
        return FieldError(self.where, shorten(self.prefix + name), problem, hint=hint)

    def assume(self, name: str, value: str) -> None:
        """Note a choice that the file leaves open."""
        self.assumed[self.prefix + name] = value
        self.chosen.add(self.prefix + name)

    def default(self, key: str, value: Any, why: str) -> None:
        """Set the value that a missing key takes, and how it comes about."""
        self._defaults[key] = value
        self._why[key] = why

    def force(self, key: str, value: Any, why: str) -> None:
        """Set a value that follows from other keys, in place of the file's own."""
        names = (key, *self._aliases.get(key, ()))
        self._raw = {name: given for name, given in self._raw.items() if name not in names}
        self.default(key, value, why)

    def is_null(self, key: str) -> bool:
        """Whether the file has that key with the value null; does not mark it as used."""
        return not self.has(key) and any(name in self._raw for name in (key, *self._aliases.get(key, ())))

    def has(self, key: str) -> bool:
        """Whether the file has a value for that key; does not mark it as used."""
        return any(self._raw.get(name) is not None for name in (key, *self._aliases.get(key, ())))

    def optional(self, key: str, *, low: int = 1, high: int = LARGEST) -> int | None:
        """A whole number; None where the file says null, or where neither file nor family has one."""
        if self.is_null(key):
            self._find(key)
            return None
        name, value = self._value(key, needed=False)
        return None if value is None else self._whole(name, value, low, high)

    def count(self, key: str, *, low: int = 1, high: int = LARGEST) -> int:
        """A whole number that file or family must have."""
        name, value = self._value(key, needed=True)
        if value is None:
            raise self.error(name, "is null", hint="give a whole number")
        return self._whole(name, value, low, high)

    def _whole(self, name: str, value: Any, low: int, high: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(name, f"is {shown(value, 40)}", hint="allowed: a whole number")
        if not low <= value <= high:
            raise self.error(name, f"is {shorten(str(value), 40)}", hint=f"allowed: {low} to {high}")
        return value

    def automatic(self, key: str, *, high: int = LARGEST) -> int | None:
        """A whole number; None where the file says ``auto`` or nothing."""
        name, value = self._value(key, needed=False)
        return None if value is None or value == "auto" else self._whole(name, value, 1, high)

    def flag(self, key: str) -> bool:
        """A truth value; false where neither file nor family has one."""
        name, value = self._value(key, needed=False)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.error(name, f"is {shown(value, 40)}", hint="allowed: true or false")
        return value

    def text(self, key: str) -> str | None:
        """A text, or None."""
        name, value = self._value(key, needed=False)
        if value is not None and not isinstance(value, str):
            raise self.error(name, f"is {shown(value, 40)}", hint="allowed: a text")
        return value

    def number(self, key: str) -> float:
        """A finite number that is not negative; zero where neither file nor family has one."""
        name, value = self._value(key, needed=False)
        if value is None:
            return 0.0
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(name, f"is {shown(value, 40)}", hint="allowed: a number")
        if not 0 <= value <= LARGEST or not math.isfinite(value):
            raise self.error(name, f"is {shorten(str(value), 40)}", hint=f"allowed: 0 to {LARGEST}")
        return float(value)

    def items(self, key: str, of: type, length: int | None = None) -> list[Any] | None:
        """A list whose entries have one type (and whose length is known), or None."""
        name, value = self._value(key, needed=False)
        if value is None:
            return None
        kind = {int: "whole numbers", str: "texts"}[of]
        if not isinstance(value, list) or not all(type(item) is of for item in value):
            raise self.error(name, f"is {shown(value, 40)}", hint=f"allowed: a list of {kind}")
        if length is not None and len(value) != length:
            raise self.error(name, f"has {len(value)} entries for {length} layers", hint="give one entry per layer")
        return value

    def table(self, key: str) -> Mapping[str, Any] | None:
        """A JSON object, or None."""
        name, value = self._value(key, needed=False)
        if value is not None and not isinstance(value, dict):
            raise self.error(name, f"is {shown(value, 40)}", hint="allowed: an object")
        return value

    def unused(self) -> list[str]:
        """Keys of the file that nobody asked for."""
        inner = [f"{key}.{each}" for key, fields in self._nested.items() for each in fields.unused()]
        return [key for key in self._raw if key not in self._used] + inner


_NO_COST = "does not change the cost"
_VALUES = "changes values, not the cost"
_GENERATION = "matters when generating, not when training"
_SMALL_LOSS = "adds a loss of negligible cost"
WITHOUT_COST = frozenset({_NO_COST, _VALUES, _GENERATION, _SMALL_LOSS})
"""Reasons that nobody has to know who uses a model's numbers."""

#: Reason -> keys, separated by blanks.
_KEYS_BY_REASON = {
    _NO_COST: "_name_or_path _attn_implementation _attn_implementation_autoset add_bos_token architectures auto_map "
    "bos_token_id chunk_size_feed_forward decoder_start_token_id do_sample dtype eos_token_id finetuning_task "
    "forced_bos_token_id forced_eos_token_id id2label is_decoder is_encoder_decoder label2id model_type n_ctx "
    "num_labels output_attentions output_hidden_states output_past pad_token_id prefix problem_type "
    "pretraining_tp return_dict sep_token_id slow_but_exact skip_bias_add skip_bias_add_qkv "
    "task_specific_params tie_encoder_decoder tokenizer_class torch_dtype torchscript transformers_version "
    "type_vocab_size offset_alibi bias_dropout_fusion masked_softmax_fusion attention_softmax_in_fp32 "
    "unk_token_id attn_config image_token_index boi_token_index eoi_token_index mm_tokens_per_image "
    "image_token_id video_token_id vision_start_token_id vision_end_token_id vision_token_id audio_token_id "
    "vision_feature_layer vision_feature_select_strategy image_seq_length multimodal_projector_bias "
    "projector_hidden_act spatial_merge_size ep_size initial_context_length _remove_final_layer_norm "
    "add_cross_attention logit_scale_init_value encoder_stride for_llm_compressor cache_implementation "
    "max_window_layers use_sliding_window sliding_window projection_dim use_bfloat16 model_max_length "
    "apply_layernorm reshape_hidden_states out_features out_indices stage_names order_of_interleaved_layers "
    "use_embedding_sharing use_gated_activation use_parallel_block use_parallel_embedding max_model_len "
    "shared_moe_mode mlp_intermediate_size residual_in_fp32 rescale_prenorm_residual use_mambapy use_associative_scan "
    "use_mamba_kernels num_logits_to_keep use_mem_eff_path use_falcon_mambapy hidden_act_fn ssm_cfg "
    "fused_add_norm rms_norm pad_vocab_size_multiple mamba_ssm_cache_dtype mamba_hidden_act kv_channels "
    "num_query_groups attention_hidden_size attention_head_dim mamba_headdim use_long_context layers_block_type "
    "num_attn_heads moe_shared_expert_overlap mamba_proj_fusion router_dtype add_scale_bias num_image_tokens "
    "vision_use_head expand mamba_expand time_step_rank mamba_proj_bias qk_head_dim mamba_ssm_dtype "
    "mtp_use_dedicated_embeddings pos_emb_time init_pos_emb_time pos_emb_type merge_type video_attn_type "
    "mm_projector_type mm_hidden_size text_hidden_size projection_hidden_size media_placeholder_token_id ignore_index "
    "use_unified_vision_chunk multi_modal_projector_bias",
    _VALUES: "alibi_bias_max apply_residual_connection_post_layernorm attn_logit_softcapping attn_scale "
    "attn_temperature_tuning embedding_multiplier final_logit_softcapping floor_scale initializer_factor "
    "initializer_range layer_norm_eps layer_norm_epsilon layer_norm_rms_epsilon layernorm_epsilon "
    "moe_renormalize n_group norm_epsilon norm_topk_prob original_max_position_embeddings "
    "partial_rotary_factor query_pre_attn_scalar rms_norm_eps rope_interleave rope_local_base_freq "
    "rope_parameters rope_scaling rope_theta rotary rotary_dim rotary_emb_base rotary_pct "
    "routed_scaling_factor scale_attn_weights scale_attn_by_inverse_layer_idx reorder_and_upcast_attn "
    "scoring_func summary_activation summary_first_dropout summary_proj_to_labels summary_type "
    "summary_use_proj swiglu_limit topk_group topk_method use_qk_norm router_jitter_noise head_dim_scale "
    "use_bidirectional_attention rotary_embedding_base clip_qkv input_jitter_noise layerscale_value "
    "logit_scale no_rope_layers no_rope_layer_interval norm_eps position_embedding_type rope_percent projector_ln_eps "
    "projection_layer_norm_eps "
    "attention_multiplier residual_multiplier logits_scaling time_step_min time_step_max time_step_floor "
    "time_step_limit time_step_scale time_step_init_scheme mixer_rms_eps mamba_dt_min mamba_dt_max mamba_dt_init_floor "
    "mamba_dt_limit mamba_norm_before_gate lm_head_multiplier mlp_multipliers key_multiplier attention_out_multiplier "
    "attention_in_multiplier ssm_multipliers ssm_in_multiplier ssm_out_multiplier logits_soft_cap "
    "w_init_variance_scale final_w_init_variance_scale moe_router_activation_func mla_use_nope use_grouped_topk "
    "full_attn_alpha_factor full_attn_beta_factor linear_attn_alpha_factor linear_attn_beta_factor mlp_alpha_factor "
    "mlp_beta_factor layernorm_full_attention_alpha layernorm_full_attention_beta layernorm_linear_attention_alpha "
    "layernorm_linear_attention_beta layernorm_mlp_alpha layernorm_mlp_beta postnorm linear_layer_ids hybrid_layer_ids "
    "tie_embedding_scale mamba_norm_eps",
    _SMALL_LOSS: "z_loss_coefficient aux_loss_alpha output_router_logits router_aux_loss_coef router_z_loss_coef "
    "seq_aux z_loss",
    "layers dropped at random are counted as run": "layerdrop layer_dropout drop_path_rate",
    _GENERATION: "use_cache generation_config max_length temperature top_k top_p max_new_tokens",
    "multi-token prediction is read for DeepSeek-V3, Kimi K2 and GLM-4.5 only": ""
    "num_nextn_predict_layers num_mtp_layers use_mtp num_mtp_modules mtp_transformer_layers mtp_layers_block_type "
    "mtp_num_hidden_layers",
    "only the language model is read": "vision_config audio_config",
}

REASONS = {key: reason for reason, keys in _KEYS_BY_REASON.items() for key in keys.split()}
UNKNOWN_KEY = "unknown to steptime, and not counted"

_ENCODER_DECODER = "an encoder-decoder model"
_STATE_SPACE = "a state-space model"
_HYBRID = "a model with linear or state-space attention in some layers"
_ENCODER = "an encoder for text"
_BARE_NORMS = "a model with norms without weights"
_SPARSE = "a model with an attention indexer (sparse attention)"
_STREAMS = (
    "a model with four residual streams (hyper-connections), keys compressed over 4 or 128 tokens, output projections "
    "in groups and experts chosen by a hash"
)

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
    model_type: kind
    for kind, model_types in {
        _ENCODER_DECODER: "longt5 marian pegasus m2m_100 t5gemma",
        _STATE_SPACE: "rwkv",
        _HYBRID: "zamba olmo_hybrid lfm2",
        _ENCODER: "bert roberta distilbert deberta-v2 modernbert",
        _BARE_NORMS: "olmo",
        _SPARSE: "glm_moe_dsa",
        _STREAMS: "deepseek_v4",
    }.items()
    for model_type in model_types.split()
}

#: Other names of a model_type, and types whose layers are those of another one. Granite differs from Llama by factors,
#: Seed-OSS by a bias that may be missing, the language models of Qwen-VL from Qwen by the positions of images, and
#: OLMo 3 from OLMo 2 by its windows.
SAME_TYPE = {
    "gemma3_text": "gemma3",
    "llama4_text": "llama4",
    "RefinedWeb": "falcon",
    "RefinedWebModel": "falcon",
    "kimi": "kimi_k2",
    "granite": "llama",
    "seed_oss": "llama",
    "olmo3": "olmo2",
    "ministral": "mistral",
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "qwen3_vl": "qwen3",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "qwen3_vl_moe_text": "qwen3_moe",
}

#: Our field -> the key that most families have for it; for messages.
THEIR_NAMES = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "ffn_hidden": "intermediate_size",
    "vocab": "vocab_size",
    "seq_len": "max_position_embeddings",
    "max_positions": "max_position_embeddings",
    "window": "sliding_window",
    "windowed_layers": "layer_types",
    "experts.experts": "num_experts",
    "experts.experts_per_token": "num_experts_per_tok",
    "experts.expert_ffn_hidden": "moe_intermediate_size",
    "experts.shared_ffn_hidden": "n_shared_experts",
    "experts.groups": "n_group",
    "experts.groups_per_token": "topk_group",
    "experts.moe_layers": "moe_layers",
    "vision.patch_size": "patch_size",
    "vision.image_size": "image_size",
    "vision.head_outputs": "num_labels",
}


Values = dict[str, Any]
"""Fields of a ModelSpec by name."""

#: Longest sequence taken for training where a file only has the limit of its positions.
MAX_DEFAULT_SEQ_LEN = 8192

_ACTIVATIONS = {
    "gelu": ("gelu", "gelu_new", "gelu_fast", "gelu_python", "gelu_pytorch_tanh", "quick_gelu", "gelu_accurate"),
    "silu": ("silu", "swish"),
    "relu": ("relu",),
    "relu2": ("relu2", "relu_squared"),
    "tanh": ("tanh",),
    "sigmoid": ("sigmoid",),
}
_ACTIVATION_OF = {name: ours for ours, names in _ACTIVATIONS.items() for name in names}


_DROPOUT_KEYS = """
    attention_dropout hidden_dropout resid_pdrop attn_pdrop embd_pdrop dropout residual_dropout resid_dropout
    embedding_dropout hidden_dropout_prob attention_probs_dropout_prob activation_dropout embd_dropout ffn_dropout
    classifier_dropout
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Reader of the files of one ``model_type``."""

    build: Callable[[Fields], Values]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Key -> value that the family's own configuration class gives where the file has none."""
    aliases: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Key -> the family's other names for it (its ``attribute_map``)."""


def dimensions(f: Fields) -> Values:
    """Layers, widths, heads and vocabulary of any decoder."""
    hidden = f.count("hidden_size", high=LIMITS["hidden"])
    heads = f.count("num_attention_heads", high=LIMITS["heads"])
    kv_heads = f.optional("num_key_value_heads", high=LIMITS["kv_heads"])
    return {
        "layers": f.count("num_hidden_layers", high=LIMITS["layers"]),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads if kv_heads is None else kv_heads,
        "head_dim": head_width(f, hidden, heads),
        "ffn_hidden": f.count("intermediate_size", high=LIMITS["ffn_hidden"]),
        "vocab": f.count("vocab_size", high=LIMITS["vocab"]),
        "tied_embeddings": f.flag("tie_word_embeddings"),
        "causal": True,
        "seq_len": context(f),
        "dropout": has_dropout(f),
        "weight_bytes": quantised_weight_bytes(f),
    }


def head_width(f: Fields, hidden: int, heads: int) -> int:
    """Width of one head: ``head_dim``, or the hidden width divided by the heads."""
    width = f.optional("head_dim", high=LIMITS["head_dim"])
    if width is not None:
        return width
    if hidden % heads:
        below = max(d for d in range(1, heads + 1) if hidden % d == 0)
        hint = f"give head_dim, or a number of heads that divides it, such as {below}"
        raise f.error("num_attention_heads", f"{heads} does not divide hidden_size {hidden}", hint=hint)
    return hidden // heads


def activation(f: Fields, key: str = "hidden_act") -> str:
    """Our name of the activation function."""
    given = f.text(key)
    if given is None:
        raise f.error(key, "is missing")
    if given not in _ACTIVATION_OF:
        raise f.error(key, f"unknown activation {given[:40]!r}", hint=f"known: {', '.join(sorted(_ACTIVATION_OF))}")
    return _ACTIVATION_OF[given]


def has_dropout(f: Fields) -> bool:
    """Whether any element-wise dropout of the blocks is on."""
    # Every key is read, so that each counts as used.
    rates = [f.number(key) for key in _DROPOUT_KEYS.split()]
    return any(rate > 0 for rate in rates)


def context(f: Fields) -> int:
    """Sequence length to train with.

    The length before any stretching of the rotary positions, else ``max_position_embeddings``; at most
    :data:`MAX_DEFAULT_SEQ_LEN`, because the limit of the positions is not the length of pre-training.
    """
    limit = f.count("max_position_embeddings", high=LIMITS["max_positions"])
    places = [f.table("rope_parameters"), f.table("rope_scaling")]
    found = [(place or {}).get("original_max_position_embeddings") for place in places]
    for original in (*found, f.optional("original_max_position_embeddings")):
        if isinstance(original, int) and not isinstance(original, bool) and 0 < original < limit:
            f.assume("seq_len", f"{original} (positions before they were stretched to {limit})")
            return min(original, MAX_DEFAULT_SEQ_LEN)
    if limit > MAX_DEFAULT_SEQ_LEN:
        f.assume("seq_len", f"{MAX_DEFAULT_SEQ_LEN} (the limit of the positions is {limit}, not a training length)")
    return min(limit, MAX_DEFAULT_SEQ_LEN)


def windows(f: Fields, layers: int, default_sliding: Callable[[int], bool], width: int | None) -> Values:
    """Window and number of layers that have one.

    ``layer_types`` decides where the file has it; else the pattern of the family does.

    Args:
        f: fields of the configuration.
        layers: number of layers.
        default_sliding: whether the layer of an index has a window by the pattern of the family.
        width: of the window in tokens; None: no window.
    """
    types = f.items("layer_types", str, layers)
    if types is None:
        sliding = sum(map(default_sliding, range(layers))) if width is not None else 0
    else:
        for position, name in enumerate(types):
            if name not in ("full_attention", "sliding_attention", "chunked_attention"):
                raise f.error(
                    f"layer_types[{position}]",
                    f"{name[:40]!r} is not supported yet",
                    hint="supported: full_attention, sliding_attention, chunked_attention",
                )
        sliding = sum(name != "full_attention" for name in types)
        if sliding and width is None:
            raise f.error("sliding_window", "is missing, but layer_types has sliding layers")
    return {"window": width if sliding else None, "windowed_layers": sliding}


def windows_but_every(f: Fields, layers: int) -> Values:
    """A window on all but every ``sliding_window_pattern``-th layer; see :func:`windows`."""
    pattern = f.count("sliding_window_pattern")
    return windows(f, layers, lambda layer: (layer + 1) % pattern != 0, window_width(f))


def window_width(f: Fields, key: str = "sliding_window") -> int | None:
    """Width of the sliding window, or None."""
    return f.optional(key, high=LIMITS["window"])


#: quant_method -> bytes per weight where the file does not say more.
_METHOD_BYTES = {"fp8": 1.0, "fbgemm_fp8": 1.0, "mxfp4": 4.25 / 8, "eetq": 1.0}


def quantised_weight_bytes(f: Fields) -> float | None:
    """Bytes per weight of a quantised checkpoint: its bits, and the scales where their block is known.

    FP8 with blocks of m x n weights has one 4-byte scale per block; MXFP4 has one byte per 32 weights; other
    methods count their bits only.
    """
    config = f.table("quantization_config")
    if config is None:
        return None
    method = config.get("quant_method")
    if isinstance(method, str) and method in _METHOD_BYTES:
        block = config.get("weight_block_size")
        if method == "fp8" and isinstance(block, list) and len(block) == 2 and all(_is_count(n) for n in block):
            return float(1 + 4 / (block[0] * block[1]))
        return _METHOD_BYTES[method]
    if config.get("load_in_4bit") is True:
        return 0.5
    if config.get("load_in_8bit") is True:
        return 1.0
    bits = config.get("bits", config.get("w_bit"))
    if isinstance(bits, int) and _is_count(bits) and bits <= 32:
        return bits / 8
    f.assume("quantization_config", "weights in the dtype of the run (how they are quantised is not known)")
    return None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 2**20


#: What a configuration of the Llama family means where it says nothing, and one of the Qwen family.
LLAMA = {"hidden_act": "silu", "tie_word_embeddings": False}
QWEN = LLAMA | {
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "sliding_window": 4096,
}
