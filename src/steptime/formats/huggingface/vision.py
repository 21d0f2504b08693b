"""Vision transformers: ViT, DINOv2, and the image tower of CLIP."""

from __future__ import annotations

from typing import Any

from steptime.formats.huggingface.fields import (
    Family,
    Fields,
    Values,
    activation,
    has_dropout,
    head_width,
    quantised_weight_bytes,
)
from steptime.model.spec import LIMITS, Vision
from steptime.num import round_up


def _tower(f: Fields, vision: Vision) -> Values:
    """What every image tower has: layer norms and biases everywhere, learned positions, no mask."""
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
