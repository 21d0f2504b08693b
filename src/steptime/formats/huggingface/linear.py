"""Families with linear, recurrent or sparse attention in some layers or all."""

from __future__ import annotations

from typing import Any, Final

from steptime.formats.huggingface.dense import gated_rms
from steptime.formats.huggingface.experts import EXPERTS
from steptime.formats.huggingface.fields import LLAMA, QWEN, Family, Fields, Values, activation
from steptime.formats.huggingface.hybrids import FULL, MAMBA, kind, layer_names, of_kinds
from steptime.model.kinds import DeltaNet, Indexer, KimiDelta, Lightning, Recurrent
from steptime.model.spec import Experts, LatentAttention


def _qwen3_next(f: Fields) -> Values:
    """Qwen3-Next and Qwen3.5-MoE: experts in all layers."""
    step, dense = f.count("decoder_sparse_step"), set(f.items("mlp_only_layers", int) or ())
    if dense or step != 1:
        raise f.error("mlp_only_layers", "or decoder_sparse_step leave layers without experts: not supported yet")
    f.default("intermediate_size", f.count("moe_intermediate_size"), "no layer has an MLP without experts")
    experts = Experts(
        experts=f.count("num_experts"),
        experts_per_token=f.count("num_experts_per_tok"),
        expert_ffn_hidden=f.count("moe_intermediate_size"),
        shared_ffn_hidden=f.count("shared_expert_intermediate_size"),
        moe_layers=f.count("num_hidden_layers"),
        shared_gate=True,
    )
    return _gated_delta(f, gated_rms(f) | {"experts": experts})


def _gated_delta(f: Fields, values: Values) -> Values:
    """Gated DeltaNet but for every fourth layer, whose attention has a gate unless the file says otherwise."""
    gate = not f.has("attn_output_gate") or f.flag("attn_output_gate")
    values = values | {"qk_norm": "head", "attention_gate": gate}
    layers, every = values["layers"], f.count("full_attention_interval")
    usual = [FULL if (layer + 1) % every == 0 else MAMBA for layer in range(layers)]
    pattern = layer_names(f, layers, usual)
    mixer = DeltaNet(
        key_heads=f.count("linear_num_key_heads"),
        value_heads=f.count("linear_num_value_heads"),
        key_dim=f.count("linear_key_head_dim"),
        value_dim=f.count("linear_value_head_dim"),
        kernel=f.count("linear_conv_kernel_dim"),
    )
    return of_kinds(
        values,
        [kind("linear", values, mixer, attention=False), kind(FULL, values)],
        ["linear" if name == MAMBA else name for name in pattern],
    )


def _qwen3_5(f: Fields) -> Values:
    """Qwen3.5 with an MLP in all layers."""
    f.items("mlp_only_layers", int)
    return _gated_delta(f, gated_rms(f))


def _kimi_latent(f: Fields) -> LatentAttention:
    f.force("head_dim", f.count("qk_nope_head_dim") + f.count("qk_rope_head_dim"), "both parts of a head")
    return LatentAttention(
        q_lora_rank=f.optional("q_lora_rank"),
        kv_lora_rank=f.count("kv_lora_rank"),
        qk_nope_head_dim=f.count("qk_nope_head_dim"),
        qk_rope_head_dim=f.count("qk_rope_head_dim"),
        v_head_dim=f.count("v_head_dim"),
    )


def _kimi_linear(f: Fields) -> Values:
    """Kimi-Linear (arXiv 2510.26692): Kimi delta attention but for every fourth layer, which is latent attention."""
    latent = _kimi_latent(f)
    values = gated_rms(f) | {"latent": latent}
    layers, given = values["layers"], f.table("linear_attn_config")
    own = Fields(given or {}, where=f.where, prefix=f"{f.prefix}linear_attn_config.", defaults=_KDA)
    full = own.items("full_attn_layers", int) or [layer + 1 for layer in range(1, layers) if layer % 4 == 0]
    own.items("kda_layers", int)
    usual = [FULL if layer + 1 in full else MAMBA for layer in range(layers)]
    names = ["linear" if name == MAMBA else name for name in layer_names(f, layers, usual)]
    if f.count("moe_layer_freq") != 1:
        raise f.error("moe_layer_freq", "is not 1, which is not supported yet", hint="supported: 1")
    listed = f.items("mlp_layer_types", str, layers)
    first = f.count("first_k_dense_replace", low=0)
    routed = [layer >= first for layer in range(layers)] if listed is None else [name == "sparse" for name in listed]
    width = f.count("moe_intermediate_size")
    moe = Experts(
        experts=f.count("num_experts"),
        experts_per_token=f.count("num_experts_per_tok"),
        expert_ffn_hidden=width,
        shared_ffn_hidden=width * f.count("n_shared_experts", low=0),
        moe_layers=sum(routed),
        router_bias=True,
        groups=f.optional("n_group") or 1,
        groups_per_token=f.optional("topk_group") or 1,
    )
    heads, width, kernel = (
        own.count(theirs) if given else f.count(ours)
        for ours, theirs in zip(_KDA_NAMES, ("num_heads", "head_dim", "short_conv_kernel_size"), strict=True)
    )
    mixer = KimiDelta(heads=heads, head_dim=width, kernel=kernel)
    kinds = [
        kind(f"{name}{end}", values, () if name == FULL else mixer, attention=name == FULL, experts=experts)
        for name in ("linear", FULL)
        for end, experts in (("_dense", None), ("_moe", moe))
    ]
    pattern = [f"{name}_{'moe' if one else 'dense'}" for name, one in zip(names, routed, strict=True)]
    return of_kinds(values | {"experts": moe if any(routed) else None}, kinds, pattern)


def _deepseek_v32(f: Fields) -> Values:
    """DeepSeek-V3.2 (arXiv 2512.02556): DeepSeek-V3 with attention to ``index_topk`` keys that an indexer chose."""
    values: dict[str, Any] = EXPERTS["deepseek_v3"].build(f) | {"mtp_depth": 0}
    top_k, layers = f.count("index_topk"), values["layers"]
    rank = values["latent"].q_lora_rank
    if rank is None:
        raise f.error("q_lora_rank", "is missing: the indexer reads the compressed queries")
    mixer = Indexer(heads=f.count("index_n_heads"), head_dim=f.count("index_head_dim"), rank=rank, top_k=top_k)
    values |= {"window": top_k, "windowed_layers": layers}
    dense = layers - (values["experts"].moe_layers if values.get("experts") else 0)
    kinds = [kind("dense", values, mixer, experts=None), kind("moe", values, mixer)]
    return of_kinds(values, kinds, ["dense"] * dense + ["moe"] * (layers - dense))


def _recurrent_gemma(f: Fields) -> Values:
    """RecurrentGemma (arXiv 2404.07839): two recurrent layers to one of local attention; the MLP has half its width."""
    f.default("num_key_value_heads", f.count("num_attention_heads"), "as many as heads")
    f.default("max_position_embeddings", 8192, "the model card")
    values = gated_rms(f) | {"activation": activation(f, "hidden_activation"), "out_bias": True, "mlp_bias": True}
    layers, window = values["layers"], f.count("attention_window_size")
    values |= {"ffn_hidden": values["ffn_hidden"] // 2, "window": window, "windowed_layers": layers}
    given = f.items("block_types", str) or ["recurrent", "recurrent", "attention"]
    if unknown := set(given) - {"recurrent", "attention"}:
        raise f.error("block_types", f"has {sorted(unknown)}", hint="known: recurrent, attention")
    pattern = (["recurrent" if name == "recurrent" else FULL for name in given] * layers)[:layers]
    mixer = Recurrent(width=f.optional("lru_width") or 0, blocks=values["heads"], kernel=f.count("conv1d_width"))
    return of_kinds(values, [kind("recurrent", values, mixer, attention=False), kind(FULL, values)], pattern)


def _minimax(f: Fields) -> Values:
    """MiniMax-01 (arXiv 2501.08313): lightning attention but for every eighth layer; experts in all."""
    values = gated_rms(f)
    layers = values["layers"]
    listed = f.items("attn_type_list", int, layers)
    usual = (
        [FULL if one else MAMBA for one in listed]
        if listed
        else [FULL if (layer + 1) % 2 else MAMBA for layer in range(layers)]
    )
    names = ["linear" if name == MAMBA else name for name in layer_names(f, layers, usual)]
    values["experts"] = Experts(
        experts=f.count("num_local_experts"),
        experts_per_token=f.count("num_experts_per_tok"),
        expert_ffn_hidden=values["ffn_hidden"],
        moe_layers=layers,
    )
    mixer = Lightning(heads=values["heads"], head_dim=values["head_dim"], chunk=f.count("block_size"))
    return of_kinds(values, [kind("linear", values, mixer, attention=False), kind(FULL, values)], names)


_KDA: Final = {"head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4}
_KDA_NAMES: Final = {"linear_num_heads": 32, "linear_head_dim": 128, "linear_conv_kernel_dim": 4}

#: model_type -> how its files are read. Defaults are those of the families' own configuration classes.
_DELTA: Final = QWEN | {
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_DELTA_EXPERTS: Final = _DELTA | {
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 10,
    "num_experts": 512,
}
LINEAR: dict[str, Family] = {
    "qwen3_next": Family(build=_qwen3_next, defaults=_DELTA_EXPERTS, aliases={"num_experts": ("num_local_experts",)}),
    "qwen3_5": Family(
        build=_qwen3_5,
        defaults=_DELTA | {"vocab_size": 248320, "max_position_embeddings": 32768, "num_key_value_heads": 4},
    ),
    "qwen3_5_moe": Family(
        build=_qwen3_next,
        defaults=_DELTA_EXPERTS
        | {"vocab_size": 248320, "max_position_embeddings": 32768, "num_experts_per_tok": 8, "num_experts": 256},
    ),
    "kimi_linear": Family(
        build=_kimi_linear,
        defaults=LLAMA
        | {
            "vocab_size": 163840,
            "max_position_embeddings": 1048576,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "moe_intermediate_size": 1024,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
        }
        | _KDA_NAMES,
        aliases={
            "num_experts": ("num_local_experts", "n_routed_experts"),
            "n_group": ("num_expert_group",),
            "num_experts_per_tok": ("num_experts_per_token",),
            "n_shared_experts": ("num_shared_experts",),
        },
    ),
    "deepseek_v32": Family(
        build=_deepseek_v32,
        defaults=dict(EXPERTS["deepseek_v3"].defaults)
        | {"max_position_embeddings": 163840, "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64},
        aliases=EXPERTS["deepseek_v3"].aliases,
    ),
    "recurrent_gemma": Family(
        build=_recurrent_gemma,
        defaults={
            "vocab_size": 256000,
            "hidden_act": "gelu",
            "hidden_activation": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "attention_window_size": 2048,
            "conv1d_width": 4,
        },
    ),
    "minimax": Family(
        build=_minimax,
        defaults=LLAMA
        | {
            "vocab_size": 32000,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "block_size": 256,
        },
        aliases={"num_local_experts": ("num_experts",)},
    ),
}
