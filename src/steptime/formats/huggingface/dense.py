"""Families with a dense MLP in every layer: decoders, decoders with parallel blocks, vision transformers.

One builder per block structure, one row per ``model_type``.
"""

from __future__ import annotations

from typing import Any

from steptime.formats.huggingface.fields import (
    LLAMA,
    QWEN,
    Family,
    Fields,
    Values,
    activation,
    dimensions,
    has_dropout,
    head_width,
    quantised_weight_bytes,
    window_width,
    windows,
    windows_but_every,
)
from steptime.model.spec import LIMITS, Vision
from steptime.num import round_up


def gated_rms(f: Fields) -> Values:
    """The block of LLaMA: RMS norms, rotary positions, gated MLP; biases only where the file has them."""
    bias = f.flag("attention_bias")
    return dimensions(f) | {
        "gated_mlp": True,
        "activation": activation(f),
        "norm": "rmsnorm",
        "qkv_bias": bias,
        "out_bias": f.flag("attention_out_bias") if f.has("attention_out_bias") else bias,
        "mlp_bias": f.flag("mlp_bias"),
    }


def _mistral(f: Fields) -> Values:
    values = gated_rms(f)
    return values | windows(f, values["layers"], lambda layer: True, window_width(f))


def qwen_windows(f: Fields, values: Values) -> Values:
    """Qwen has a window only if ``use_sliding_window``, and then only from ``max_window_layers`` on."""
    width = window_width(f) if f.flag("use_sliding_window") else None
    first = f.optional("max_window_layers", low=0)
    start = values["layers"] if first is None else first
    types = windows(f, values["layers"], lambda layer: layer >= start, width)
    return values | types


def _qwen2(f: Fields) -> Values:
    return qwen_windows(f, gated_rms(f) | {"qkv_bias": True, "out_bias": False})


def _qwen3(f: Fields) -> Values:
    return qwen_windows(f, gated_rms(f) | {"qk_norm": "head"})


def _olmo2(f: Fields) -> Values:
    """OLMo 2, and OLMo 3, which has a window on three of four layers."""
    values = gated_rms(f) | {"qk_norm": "full"}
    return values | windows(f, values["layers"], lambda layer: (layer + 1) % 4 != 0, window_width(f))


def _smollm3(f: Fields) -> Values:
    """SmolLM3: a window, if ``use_sliding_window``, on the layers that have no rotary positions."""
    values, rotary = gated_rms(f), f.items("no_rope_layers", int) or []
    width = window_width(f) if f.flag("use_sliding_window") else None
    return values | windows(f, values["layers"], lambda i: not (rotary[i] if i < len(rotary) else (i + 1) % 4), width)


def ernie(f: Fields) -> Values:
    """ERNIE 4.5: the block of LLaMA, where one key says whether products have biases, the head's too."""
    values, bias = gated_rms(f), f.flag("use_bias")
    biases = dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), bias)
    return values | biases | {"head_bias": bias and not values["tied_embeddings"]}


def _glm4(f: Fields) -> Values:
    return gated_rms(f) | {"out_bias": False, "norms_per_layer": 4}


def _nemotron(f: Fields) -> Values:
    """Nemotron (arXiv 2402.16819): squared ReLU without a gate, layer norms with biases."""
    return gated_rms(f) | {"gated_mlp": False, "norm": "layernorm", "norm_bias": True}


def _gemma(f: Fields) -> Values:
    return gated_rms(f) | {"activation": _gemma_activation(f)}


def _gemma_activation(f: Fields) -> str:
    key = "hidden_activation" if f.has("hidden_activation") else "hidden_act"
    return activation(f, key)


def _gemma2(f: Fields) -> Values:
    values = gated_rms(f) | {"activation": _gemma_activation(f), "norms_per_layer": 4}
    return values | windows(f, values["layers"], lambda layer: layer % 2 == 0, window_width(f))


def _gemma3(f: Fields) -> Values:
    values = gated_rms(f) | {"activation": _gemma_activation(f), "norms_per_layer": 4, "qk_norm": "head"}
    return values | windows_but_every(f, values["layers"])


def biased_layernorm(f: Fields) -> Values:
    """The block of GPT-2: layer norms, learned positions, a plain MLP, biases everywhere."""
    values = dimensions(f)
    return values | {
        "gated_mlp": False,
        "activation": activation(f),
        "norm": "layernorm",
        "position": "learned",
        "max_positions": f.count("max_position_embeddings"),
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "norm_bias": True,
    }


def computed_positions(values: Values, kind: str = "rope") -> Values:
    """Values with computed positions in place of a table of positions."""
    return values | {"position": kind, "max_positions": 0}


def _four_times(f: Fields) -> None:
    """Families whose MLP is four times as wide as the model where the file is silent."""
    f.default("intermediate_size", 4 * f.count("hidden_size"), "4 times the hidden width")


def _gpt2(f: Fields) -> Values:
    _four_times(f)
    return biased_layernorm(f)


def _gptj(f: Fields) -> Values:
    _four_times(f)
    values = computed_positions(biased_layernorm(f))
    attention = {"qkv_bias": False, "out_bias": False, "norms_per_layer": 1, "parallel_block": True}
    return values | attention | {"head_bias": not values["tied_embeddings"]}


def _gpt_neox(f: Fields) -> Values:
    bias = f.flag("attention_bias")
    values = computed_positions(biased_layernorm(f))
    return values | {"qkv_bias": bias, "out_bias": bias, "parallel_block": f.flag("use_parallel_residual")}


def _opt(f: Fields) -> Values:
    values = biased_layernorm(f)
    bias, affine = f.flag("enable_bias"), f.flag("layer_norm_elementwise_affine")
    width = f.optional("word_embed_proj_dim")
    if width not in (None, values["hidden"]):
        hint = "supported: word_embed_proj_dim equal to hidden_size"
        raise f.error("word_embed_proj_dim", f"{width} differs from hidden_size {values['hidden']}", hint=hint)
    if not affine:
        raise f.error("layer_norm_elementwise_affine", "is false, which is not supported yet", hint="supported: true")
    if not f.flag("do_layer_norm_before"):
        raise f.error("do_layer_norm_before", "is false, which is not supported yet", hint="supported: true")
    # The table of OPT has two rows before the first position.
    return values | {"max_positions": values["max_positions"] + 2, "qkv_bias": bias, "out_bias": bias, "mlp_bias": bias}


def _bloom(f: Fields) -> Values:
    _four_times(f)
    return computed_positions(biased_layernorm(f), "alibi") | {"embedding_norm": True}


def _falcon(f: Fields) -> Values:
    _four_times(f)
    new, shared = f.flag("new_decoder_architecture"), f.flag("multi_query")
    if not new:
        heads = 1 if shared else f.count("num_attention_heads")
        f.force("num_key_value_heads", heads, f"multi_query is {str(shared).lower()}")
    values = computed_positions(biased_layernorm(f), "alibi" if f.flag("alibi") else "rope")
    bias, parallel = f.flag("bias"), f.flag("parallel_attn") or new
    norms = f.optional("num_ln_in_parallel_attn") or (2 if new or not parallel else 1)
    return values | {
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": bias,
        "norms_per_layer": norms,
        "parallel_block": parallel,
    }


def _starcoder2(f: Fields) -> Values:
    bias = f.flag("use_bias")
    if f.text("mlp_type") not in (None, "default"):
        raise f.error("mlp_type", "is not supported yet", hint="supported: default")
    if f.text("norm_type") not in (None, "layer_norm"):
        raise f.error("norm_type", "is not supported yet", hint="supported: layer_norm")
    values = computed_positions(biased_layernorm(f)) | {"qkv_bias": bias, "out_bias": bias, "mlp_bias": bias}
    return values | windows(f, values["layers"], lambda layer: True, window_width(f))


_GPT2_NAMES = {
    "hidden_size": ("n_embd",),
    "num_hidden_layers": ("n_layer",),
    "num_attention_heads": ("n_head",),
    "max_position_embeddings": ("n_positions",),
    "intermediate_size": ("n_inner",),
    "hidden_act": ("activation_function",),
}
_OLD_NAMES = {
    "hidden_size": ("n_embed",),
    "num_hidden_layers": ("n_layer",),
    "num_attention_heads": ("n_head",),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv"),
    "intermediate_size": ("ffn_hidden_size",),
}
_GEMMA = LLAMA | {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, "head_dim": 256}

#: What a configuration of ERNIE 4.5 means where it says nothing.
ERNIE = LLAMA | {"vocab_size": 103424, "max_position_embeddings": 131072, "tie_word_embeddings": True}

#: model_type -> how its files are read. Defaults are those of the families' own configuration classes.
DENSE: dict[str, Family] = {
    "llama": Family(build=gated_rms, defaults=LLAMA | {"vocab_size": 32000, "max_position_embeddings": 2048}),
    "mistral": Family(
        build=_mistral,
        defaults=LLAMA
        | {"vocab_size": 32000, "max_position_embeddings": 131072}
        | {"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "qwen2": Family(build=_qwen2, defaults=QWEN | {"num_key_value_heads": 32}),
    "qwen3": Family(build=_qwen3, defaults=QWEN | {"num_key_value_heads": 32, "head_dim": 128}),
    "olmo2": Family(build=_olmo2, defaults=LLAMA | {"vocab_size": 50304, "max_position_embeddings": 2048}),
    "phi3": Family(build=_mistral, defaults=LLAMA | {"vocab_size": 32064, "max_position_embeddings": 4096}),
    "smollm3": Family(
        build=_smollm3,
        defaults=LLAMA
        | {"vocab_size": 128256, "max_position_embeddings": 32768, "tie_word_embeddings": True}
        | {"num_key_value_heads": 4},
    ),
    "ernie4_5": Family(build=ernie, defaults=ERNIE | {"head_dim": 128, "num_key_value_heads": 2}),
    "glm4": Family(
        build=_glm4,
        defaults=LLAMA
        | {"vocab_size": 151552, "max_position_embeddings": 131072, "num_key_value_heads": 2, "head_dim": 128},
    ),
    "nemotron": Family(
        build=_nemotron,
        defaults={"vocab_size": 256000, "max_position_embeddings": 4096, "hidden_act": "relu2"},
        aliases={"head_dim": ("kv_channels",)},
    ),
    "gemma": Family(
        build=_gemma,
        defaults=_GEMMA | {"vocab_size": 256000, "max_position_embeddings": 8192, "num_key_value_heads": 16},
    ),
    "gemma2": Family(
        build=_gemma2,
        defaults=_GEMMA
        | {"vocab_size": 256000, "max_position_embeddings": 8192, "sliding_window": 4096}
        | {"num_key_value_heads": 4},
    ),
    "gemma3": Family(
        build=_gemma3,
        defaults=_GEMMA
        | {"vocab_size": 262208, "max_position_embeddings": 131072, "sliding_window": 4096, "sliding_window_pattern": 6}
        | {"num_attention_heads": 8, "num_key_value_heads": 4},
        aliases={"sliding_window_pattern": ("_sliding_window_pattern",)},
    ),
    "gpt2": Family(
        build=_gpt2,
        defaults={"vocab_size": 50257, "max_position_embeddings": 1024, "hidden_act": "gelu_new"}
        | {"tie_word_embeddings": True, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
        aliases=_GPT2_NAMES,
    ),
    "gptj": Family(
        build=_gptj,
        defaults={"vocab_size": 50400, "max_position_embeddings": 2048, "hidden_act": "gelu_new"},
        aliases=_GPT2_NAMES,
    ),
    "gpt_neox": Family(
        build=_gpt_neox,
        defaults={"vocab_size": 50432, "max_position_embeddings": 2048, "hidden_act": "gelu"}
        | {"tie_word_embeddings": False, "attention_bias": True, "use_parallel_residual": True},
    ),
    "opt": Family(
        build=_opt,
        defaults={"vocab_size": 50272, "max_position_embeddings": 2048, "hidden_act": "relu", "dropout": 0.1}
        | {"tie_word_embeddings": True, "enable_bias": True, "layer_norm_elementwise_affine": True}
        | {"do_layer_norm_before": True},
        aliases={"intermediate_size": ("ffn_dim",), "hidden_act": ("activation_function",)},
    ),
    "bloom": Family(
        build=_bloom,
        defaults={"vocab_size": 250880, "max_position_embeddings": 2048, "hidden_act": "gelu"}
        | {"tie_word_embeddings": True},
        aliases=_OLD_NAMES | {"max_position_embeddings": ("seq_length",)},
    ),
    "falcon": Family(
        build=_falcon,
        defaults={"vocab_size": 65024, "max_position_embeddings": 2048, "hidden_act": "gelu"}
        | {"tie_word_embeddings": True, "parallel_attn": True, "multi_query": True},
        aliases=_OLD_NAMES | {"hidden_act": ("activation",)},
    ),
    "starcoder2": Family(
        build=_starcoder2,
        defaults={"vocab_size": 49152, "max_position_embeddings": 4096, "hidden_act": "gelu_pytorch_tanh"}
        | {"tie_word_embeddings": True, "use_bias": True, "num_key_value_heads": 2},
    ),
}


_ONE_NORM = {"norms_per_layer": 1, "parallel_block": True}


def _phi(f: Fields) -> Values:
    """Phi-1, Phi-1.5 and Phi-2: biases everywhere, on the head too; rotary positions on a part of each head."""
    if f.flag("qk_layernorm"):
        raise f.error("qk_layernorm", "is true, which is not supported yet", hint="supported: false")
    return computed_positions(biased_layernorm(f)) | _ONE_NORM | {"head_bias": True}


def _cohere(f: Fields) -> Values:
    """Command R: layer norms without biases; norms of queries and keys have weights of each head."""
    qk_norm = "full" if f.flag("use_qk_norm") else "none"
    return gated_rms(f) | _ONE_NORM | {"norm": "layernorm", "qk_norm": qk_norm}


def _cohere2(f: Fields) -> Values:
    """Command R7B and A: a window on all but every ``sliding_window_pattern``-th layer."""
    values = _cohere(f)
    return values | windows_but_every(f, values["layers"])


_COHERE = {"hidden_act": "silu", "vocab_size": 256000, "max_position_embeddings": 8192, "tie_word_embeddings": True}

#: model_type -> how its files are read. Defaults are those of the families' own configuration classes.
PARALLEL: dict[str, Family] = {
    "phi": Family(
        build=_phi,
        defaults={"vocab_size": 51200, "max_position_embeddings": 2048, "hidden_act": "gelu_new"}
        | {"tie_word_embeddings": False},
    ),
    "cohere": Family(build=_cohere, defaults=_COHERE),
    "cohere2": Family(
        build=_cohere2,
        defaults=_COHERE | {"sliding_window": 4096, "sliding_window_pattern": 4},
        aliases={"sliding_window_pattern": ("_sliding_window_pattern", "layer_switch")},
    ),
}


def _tower(f: Fields, vision: Vision) -> Values:
    """Values of every image tower: layer norms and biases everywhere, learned positions, no mask."""
    if vision.patch_size > vision.image_size:
        raise f.error("patch_size", f"{vision.patch_size} is larger than image_size {vision.image_size}")
    hidden = f.count("hidden_size", high=LIMITS["hidden"])
    heads = f.count("num_attention_heads", high=LIMITS["heads"])
    values: dict[str, Any] = {
        "layers": f.count("num_hidden_layers", high=LIMITS["layers"]),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": head_width(f, hidden, heads),
        "ffn_hidden": f.count("intermediate_size", high=LIMITS["ffn_hidden"]),
        "dropout": has_dropout(f),
        "weight_bytes": quantised_weight_bytes(f),
        "vision": vision,
    }
    return values | {
        "gated_mlp": False,
        "activation": activation(f),
        "norm": "layernorm",
        "causal": False,
        "seq_len": vision.tokens,
        "vocab": 0,
        "position": "learned",
        "max_positions": vision.tokens,
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "norm_bias": True,
    }


def _vision(f: Fields, **more: Any) -> Vision:
    return Vision(
        image_size=f.count("image_size", high=LIMITS["image_size"]),
        patch_size=f.count("patch_size", high=LIMITS["patch_size"]),
        channels=f.count("num_channels", high=LIMITS["channels"]),
        **more,
    )


def _vit(f: Fields) -> Values:
    vision = _vision(f, head_outputs=_classes(f))
    return _tower(f, vision) | {"qkv_bias": f.flag("qkv_bias")}


def bare_tower(f: Fields, **vision: bool) -> Values:
    """SigLIP (arXiv 2303.15343) without its head: no class token unless ``vision`` says so."""
    return _tower(f, _vision(f, **({"class_token": False} | vision)))


def _classes(f: Fields) -> int:
    """Classes of a classifier: the entries of ``id2label``; a bare backbone has none."""
    names = f.items("architectures", str) or []
    labels = f.table("id2label")
    count = f.optional("num_labels", high=LIMITS["head_outputs"])
    if "ViTForImageClassification" not in names:
        if "ViTModel" in names:
            f.assume("pooler", "none (the pooler of ViTModel is not counted)")
        return 0
    if labels is None and count is None:
        f.assume("num_labels", "2 (default of the family)")
        return 2
    return len(labels) if labels is not None else count or 0


def _dinov2(f: Fields) -> Values:
    """DINOv2 (arXiv 2304.07193): a ViT with layer scales; the largest has a gated MLP of two thirds of the width."""
    hidden = f.count("hidden_size", high=LIMITS["hidden"])
    width, gated = hidden * f.count("mlp_ratio", high=64), f.flag("use_swiglu_ffn")
    # Two thirds of the width, rounded up to a multiple of 8.
    width = round_up(width * 2 // 3, 8) if gated else width
    f.force("intermediate_size", width, "mlp_ratio times the hidden width" + ", two thirds of it, gated" * gated)
    if "Dinov2ForImageClassification" in (f.items("architectures", str) or []):
        f.assume("num_labels", "no head (the classifier of DINOv2 is not counted)")
    values = _tower(f, _vision(f, mask_token=f.flag("use_mask_token")))
    values |= {"qkv_bias": f.flag("qkv_bias"), "layer_scale": True, "gated_mlp": gated}
    return values | ({"activation": "silu"} if gated else {})


def _clip_vision(f: Fields) -> Values:
    outputs = 0
    if "CLIPVisionModelWithProjection" in (f.items("architectures", str) or []):
        outputs = f.count("projection_dim", high=LIMITS["head_outputs"])
    vision = _vision(f, patch_bias=False, head_outputs=outputs, head_bias=False)
    # CLIP normalises the embedding before the first block.
    return _tower(f, vision) | {"embedding_norm": True}


#: model_type -> how its files are read. Defaults are those of the families' own configuration classes.
VISION: dict[str, Family] = {
    "vit": Family(
        build=_vit,
        defaults={"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
        | {"image_size": 224, "patch_size": 16, "num_channels": 3, "hidden_act": "gelu", "qkv_bias": True},
    ),
    "dinov2": Family(
        build=_dinov2,
        defaults={"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "mlp_ratio": 4}
        | {"image_size": 224, "patch_size": 14, "num_channels": 3, "hidden_act": "gelu", "qkv_bias": True}
        | {"use_mask_token": True},
    ),
    "clip_vision_model": Family(
        build=_clip_vision,
        defaults={"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
        | {"image_size": 224, "patch_size": 32, "num_channels": 3, "hidden_act": "quick_gelu", "projection_dim": 512},
    ),
}
