"""Families with a mixture of experts, and those with latent attention."""

from __future__ import annotations

from typing import Any

from steptime.formats.huggingface.dense import ERNIE, ernie, gated_rms, qwen_windows
from steptime.formats.huggingface.fields import (
    LLAMA,
    QWEN,
    Family,
    Fields,
    Values,
    activation,
    dimensions,
    window_width,
    windows,
)
from steptime.model.spec import LIMITS, Experts, LatentAttention

_NEXT_TOKENS = "num_nextn_predict_layers"


def _local_experts(f: Fields, values: Values, **others: Any) -> Experts:
    """Experts in every layer, as wide as the configuration's MLP; ``others``: further fields."""
    return Experts(
        experts=f.count("num_local_experts"),
        experts_per_token=f.count("num_experts_per_tok"),
        expert_ffn_hidden=values["ffn_hidden"],
        moe_layers=values["layers"],
        **others,
    )


def _shared_width(f: Fields) -> int:
    """Width of the expert that all tokens use; 0 where there is none."""
    return f.optional("shared_intermediate_size", low=0, high=LIMITS["shared_ffn_hidden"]) or 0


def _mixtral(f: Fields) -> Values:
    values = gated_rms(f)
    window = windows(f, values["layers"], lambda layer: True, window_width(f))
    return values | window | {"experts": _local_experts(f, values)}


def _gpt_oss(f: Fields) -> Values:
    values = gated_rms(f)
    experts = _local_experts(f, values, router_bias=True, expert_bias=True)
    sliding = windows(f, values["layers"], lambda layer: layer % 2 == 0, window_width(f))
    return values | sliding | {"attention_sinks": True, "experts": experts}


def _granitemoe(f: Fields) -> Values:
    """Granite 3: as Mixtral without a window; in the shared kind an additional expert of its own width."""
    values = gated_rms(f)
    return values | {"experts": _local_experts(f, values, shared_ffn_hidden=_shared_width(f))}


def _dbrx(f: Fields) -> Values:
    """DBRX: gated experts in every layer, layer norms without biases; widths stand in tables of their own."""
    heads, mlp = (
        Fields(f.table(key) or {}, where=f.where, prefix=f"{f.prefix}{key}.", defaults=_DBRX[key]) for key in _DBRX
    )
    f.force("num_key_value_heads", heads.count("kv_n_heads"), "attn_config.kv_n_heads")
    f.force("intermediate_size", mlp.count("ffn_hidden_size"), "ffn_config.ffn_hidden_size")
    values = dimensions(f)
    function = Fields(
        mlp.table("ffn_act_fn") or {}, where=f.where, prefix=f"{mlp.prefix}ffn_act_fn.", defaults={"name": "silu"}
    )
    experts = Experts(
        experts=mlp.count("moe_num_experts"),
        experts_per_token=mlp.count("moe_top_k"),
        expert_ffn_hidden=values["ffn_hidden"],
        moe_layers=values["layers"],
    )
    block = {"gated_mlp": True, "activation": activation(function, "name"), "norm": "layernorm"}
    dropout = values["dropout"] or heads.number("attn_pdrop") > 0 or f.number("emb_pdrop") > 0
    return values | block | {"dropout": dropout, "experts": experts}


def _ernie_moe(f: Fields) -> Values:
    """ERNIE 4.5 with experts from one layer to another, a bias of the router, and shared experts as wide as others."""
    values = ernie(f)
    layers, width = values["layers"], f.count("moe_intermediate_size", high=LIMITS["expert_ffn_hidden"])
    first = f.count("moe_layer_start_index", low=0, high=LIMITS["layers"])
    last = f.count("moe_layer_end_index", low=-1, high=LIMITS["layers"])
    step = f.count("moe_layer_interval", high=LIMITS["layers"])
    held = range(first, layers if last == -1 else min(last + 1, layers))
    experts = Experts(
        experts=f.count("moe_num_experts", high=LIMITS["experts"]),
        experts_per_token=f.count("moe_k"),
        expert_ffn_hidden=width,
        shared_ffn_hidden=width * (f.optional("moe_num_shared_experts", low=0, high=LIMITS["experts"]) or 0),
        moe_layers=sum((layer + 1) % step == 0 for layer in held),
        router_bias=True,
        expert_bias=values["mlp_bias"],
    )
    return _with_experts(f, values, experts)


def _phimoe(f: Fields) -> Values:
    """Phi-3.5-MoE: layer norms with biases, and biases on queries, keys, values, output and head."""
    values = _mixtral(f) | {"norm": "layernorm", "norm_bias": True}
    return values | {"head_bias": f.flag("lm_head_bias")}


def _olmoe(f: Fields) -> Values:
    values = gated_rms(f) | {"qk_norm": "full"}
    experts = Experts(
        experts=f.count("num_experts"),
        experts_per_token=f.count("num_experts_per_tok"),
        expert_ffn_hidden=values["ffn_hidden"],
        moe_layers=values["layers"],
    )
    return values | {"experts": experts}


def _minimax_m2(f: Fields) -> Values:
    kinds = f.items("attn_type_list", int) or []
    if any(kind != 1 for kind in kinds):
        problem = "has layers with linear attention, which are not supported yet"
        raise f.error("attn_type_list", problem, hint="supported: 1 for every layer")
    values = gated_rms(f)
    norm = ("head" if f.text("qk_norm_type") == "per_head" else "full") if f.flag("use_qk_norm") else "none"
    bias = f.flag("use_routing_bias")
    experts = _local_experts(f, values, shared_ffn_hidden=_shared_width(f), router_bias=bias)
    return values | {"out_bias": False, "qk_norm": norm, "experts": experts}


def _sparse_layers(f: Fields, layers: int) -> int:
    """Layers of Qwen that have experts: every ``decoder_sparse_step``-th, without ``mlp_only_layers``."""
    step = f.count("decoder_sparse_step", high=LIMITS["layers"])
    dense = set(f.items("mlp_only_layers", int) or [])
    return sum(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))


def _with_experts(f: Fields, values: Values, experts: Experts) -> Values:
    """Values with experts, unless no layer has any."""
    if experts.moe_layers == 0:
        f.assume("experts", "none (no layer has experts)")
        return values
    return values | {"experts": experts}


def _qwen2_moe(f: Fields) -> Values:
    values = qwen_windows(f, gated_rms(f) | {"qkv_bias": True, "out_bias": False})
    shared = f.count("shared_expert_intermediate_size", low=0)
    experts = Experts(
        experts=f.count("num_experts"),
        experts_per_token=f.count("num_experts_per_tok"),
        expert_ffn_hidden=f.count("moe_intermediate_size"),
        shared_ffn_hidden=shared,
        moe_layers=_sparse_layers(f, values["layers"]),
        shared_gate=shared > 0,
    )
    return _with_experts(f, values, experts)


def _qwen3_moe(f: Fields) -> Values:
    values = qwen_windows(f, gated_rms(f) | {"qk_norm": "head"})
    experts = Experts(
        experts=f.count("num_experts"),
        experts_per_token=f.count("num_experts_per_tok"),
        expert_ffn_hidden=f.count("moe_intermediate_size"),
        moe_layers=_sparse_layers(f, values["layers"]),
    )
    return _with_experts(f, values, experts)


def _deepseek_experts(f: Fields, layers: int, *, router_bias: bool) -> Experts:
    """Experts from ``first_k_dense_replace`` on, in every ``moe_layer_freq``-th layer."""
    width = f.count("moe_intermediate_size")
    first = f.count("first_k_dense_replace", low=0, high=LIMITS["layers"])
    frequency = f.count("moe_layer_freq", high=LIMITS["layers"])
    groups = f.optional("n_group", high=LIMITS["groups"]) or 1
    listed = f.items("mlp_layer_types", str, layers)
    routed = [layer >= first and layer % frequency == 0 for layer in range(layers)]
    return Experts(
        experts=f.count("n_routed_experts", high=LIMITS["experts"]),
        experts_per_token=f.count("num_experts_per_tok"),
        expert_ffn_hidden=width,
        shared_ffn_hidden=width * (f.optional("n_shared_experts", low=0, high=LIMITS["experts"]) or 0),
        moe_layers=sum(routed) if listed is None else listed.count("sparse"),
        router_bias=router_bias,
        groups=groups,
        groups_per_token=f.optional("topk_group", high=LIMITS["groups_per_token"]) or groups,
    )


def _latent(f: Fields) -> LatentAttention:
    if not (f.has("q_lora_rank") or f.is_null("q_lora_rank")):
        raise f.error("q_lora_rank", "is missing", hint="give null where queries are projected directly")
    return LatentAttention(
        q_lora_rank=f.optional("q_lora_rank"),
        kv_lora_rank=f.count("kv_lora_rank"),
        qk_nope_head_dim=f.count("qk_nope_head_dim"),
        qk_rope_head_dim=f.count("qk_rope_head_dim"),
        v_head_dim=f.count("v_head_dim"),
    )


def _deepseek(f: Fields, *, router_bias: bool) -> Values:
    latent = _latent(f)
    f.force("head_dim", latent.qk_nope_head_dim + latent.qk_rope_head_dim, "qk_nope_head_dim + qk_rope_head_dim")
    values = gated_rms(f)
    if values["kv_heads"] != values["heads"]:
        problem = f"{values['kv_heads']} differs from num_attention_heads, with latent attention"
        raise f.error("num_key_value_heads", problem, hint=f"give {values['heads']}")
    experts = _deepseek_experts(f, values["layers"], router_bias=router_bias)
    return _with_experts(f, values | {"latent": latent}, experts)


def _deepseek_v2(f: Fields) -> Values:
    return _deepseek(f, router_bias=f.text("topk_method") == "noaux_tc")


def _deepseek_v3(f: Fields) -> Values:
    return _deepseek(f, router_bias=True) | _further_tokens(f)


def _further_tokens(f: Fields) -> Values:
    """Multi-token prediction (arXiv 2412.19437, section 2.2): layers that predict further tokens, trained with the
    model."""
    depth = f.optional(_NEXT_TOKENS, low=0, high=LIMITS["mtp_depth"]) or 0
    if depth:
        f.assume(
            _NEXT_TOKENS,
            f"mtp_depth = {depth}: further layers with their projections and norms are trained with the main model "
            "and share its embedding and head; mtp_depth = 0 is the main model alone",
        )
    return {"mtp_depth": depth}


def _glm4_moe(f: Fields) -> Values:
    values = gated_rms(f) | {"out_bias": False, "qk_norm": "head" if f.flag("use_qk_norm") else "none"}
    values |= _further_tokens(f)
    return _with_experts(f, values, _deepseek_experts(f, values["layers"], router_bias=True))


def _llama4(f: Fields) -> Values:
    """LLaMA 4: one shared expert as wide as a routed one; dense layers have their own width."""
    values = gated_rms(f)
    layers, width = values["layers"], values["ffn_hidden"]
    values["ffn_hidden"] = f.count("intermediate_size_mlp", high=LIMITS["ffn_hidden"])
    listed = f.items("moe_layers", int)
    step = f.count("interleave_moe_layer_step", high=LIMITS["layers"])
    moe_layers = len(set(listed) & set(range(layers))) if listed else sum((i + 1) % step == 0 for i in range(layers))
    experts = Experts(
        experts=f.count("num_local_experts"),
        experts_per_token=f.count("num_experts_per_tok"),
        expert_ffn_hidden=width,
        shared_ffn_hidden=width,
        moe_layers=moe_layers,
    )
    return _with_experts(f, values | _chunks(f, layers), experts)


def _chunks(f: Fields, layers: int) -> Values:
    """Layers with rotary positions attend within chunks; those without attend to everything."""
    chunk = window_width(f, "attention_chunk_size")
    rotary = f.items("no_rope_layers", int) or []
    interval = f.count("no_rope_layer_interval")
    if rotary and len(rotary) != layers:
        raise f.error("no_rope_layers", f"has {len(rotary)} entries for {layers} layers", hint="give one per layer")
    found = windows(f, layers, lambda i: bool(rotary[i]) if rotary else (i + 1) % interval != 0, chunk)
    if found["windowed_layers"]:
        f.assume("attention_chunk_size", f"counted as a sliding window of {chunk}, an upper bound of its cost")
    return found


_DEEPSEEK = LLAMA | {"first_k_dense_replace": 0, "moe_layer_freq": 1, "vocab_size": 102400}
_DEEPSEEK_V2 = _DEEPSEEK | {"max_position_embeddings": 2048}
_DEEPSEEK_V3 = _DEEPSEEK | {"first_k_dense_replace": 3, "max_position_embeddings": 4096, "vocab_size": 129280}
_DEEPSEEK_NAMES = {"n_routed_experts": ("num_experts", "num_local_experts"), _NEXT_TOKENS: ("num_mtp_layers",)}

_GRANITE = LLAMA | {"vocab_size": 32000, "max_position_embeddings": 2048}
_GRANITE |= {"num_local_experts": 8, "num_experts_per_tok": 2}
_DBRX = {
    "attn_config": {"kv_n_heads": 1},
    "ffn_config": {"ffn_hidden_size": 3584, "moe_num_experts": 4, "moe_top_k": 1},
}

#: model_type -> how its files are read. Defaults are those of the families' own configuration classes.
EXPERTS: dict[str, Family] = {
    "mixtral": Family(
        build=_mixtral,
        defaults=LLAMA
        | {"vocab_size": 32000, "max_position_embeddings": 131072, "num_key_value_heads": 8}
        | {"num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "granitemoe": Family(build=_granitemoe, defaults=_GRANITE),
    "granitemoeshared": Family(build=_granitemoe, defaults=_GRANITE | {"shared_intermediate_size": 1024}),
    "dbrx": Family(
        build=_dbrx,
        defaults={"vocab_size": 32000, "max_position_embeddings": 2048, "tie_word_embeddings": False},
        aliases={
            "hidden_size": ("d_model",),
            "num_hidden_layers": ("n_layers",),
            "num_attention_heads": ("n_heads",),
            "max_position_embeddings": ("max_seq_len",),
        },
    ),
    "ernie4_5_moe": Family(
        build=_ernie_moe,
        defaults=ERNIE
        | {"num_key_value_heads": 4, "moe_num_experts": 64, "moe_k": 6, "moe_num_shared_experts": 2}
        | {"moe_intermediate_size": 1536, "moe_layer_start_index": 1, "moe_layer_end_index": -1}
        | {"moe_layer_interval": 1},
        aliases={"moe_num_experts": ("num_experts",), "moe_k": ("num_experts_per_tok",)},
    ),
    "phimoe": Family(
        build=_phimoe,
        defaults=LLAMA
        | {"vocab_size": 32064, "max_position_embeddings": 131072, "num_key_value_heads": 8}
        | {"num_local_experts": 16, "num_experts_per_tok": 2},
    ),
    "olmoe": Family(
        build=_olmoe,
        defaults=LLAMA
        | {"vocab_size": 50304, "max_position_embeddings": 4096, "num_experts": 64, "num_experts_per_tok": 8},
        aliases={"num_experts": ("num_local_experts",)},
    ),
    "minimax_m2": Family(
        build=_minimax_m2,
        defaults=LLAMA
        | {"vocab_size": 200064, "max_position_embeddings": 196608, "num_key_value_heads": 8, "head_dim": 128}
        | {"num_local_experts": 256, "num_experts_per_tok": 8, "use_qk_norm": True, "use_routing_bias": True},
        aliases={"num_local_experts": ("num_experts",)},
    ),
    "gpt_oss": Family(
        build=_gpt_oss,
        defaults=LLAMA
        | {"vocab_size": 201088, "max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 64}
        | {"attention_bias": True, "sliding_window": 128, "num_local_experts": 128, "num_experts_per_tok": 4},
        aliases={"num_experts_per_tok": ("experts_per_token",)},
    ),
    "qwen2_moe": Family(
        build=_qwen2_moe,
        defaults=QWEN | {"num_key_value_heads": 16, "decoder_sparse_step": 1},
    ),
    "qwen3_moe": Family(
        build=_qwen3_moe,
        defaults=QWEN | {"num_key_value_heads": 4, "decoder_sparse_step": 1},
        aliases={"num_experts": ("num_local_experts",)},
    ),
    "deepseek_v2": Family(build=_deepseek_v2, defaults=_DEEPSEEK_V2, aliases=_DEEPSEEK_NAMES),
    "deepseek_v3": Family(build=_deepseek_v3, defaults=_DEEPSEEK_V3, aliases=_DEEPSEEK_NAMES),
    "kimi_k2": Family(build=_deepseek_v3, defaults=_DEEPSEEK_V3, aliases=_DEEPSEEK_NAMES),
    "glm4_moe": Family(
        build=_glm4_moe,
        defaults=_DEEPSEEK
        | {"first_k_dense_replace": 1, "use_qk_norm": False, "vocab_size": 151552, "max_position_embeddings": 131072}
        | {"num_key_value_heads": 8},
        aliases=_DEEPSEEK_NAMES,
    ),
    "llama4": Family(
        build=_llama4,
        defaults=LLAMA
        | {"vocab_size": 202048, "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 131072}
        | {"num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "attention_chunk_size": 8192}
        | {"no_rope_layer_interval": 4},
    ),
}
