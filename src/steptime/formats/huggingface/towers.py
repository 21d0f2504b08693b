"""Families that read images and text: a tower of layers for the image, a projector, a language model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from steptime.formats.huggingface.dense import DENSE, VISION, bare_tower
from steptime.formats.huggingface.experts import EXPERTS
from steptime.formats.huggingface.fields import SAME_TYPE, Family, Fields, Values
from steptime.formats.huggingface.hybrids import kind, of_kinds
from steptime.formats.huggingface.linear import LINEAR
from steptime.model.spec import LayerKind, LayerOperator, Vision

SIGLIP = Family(
    build=bare_tower,
    defaults={
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "image_size": 224,
        "patch_size": 16,
        "num_channels": 3,
        "hidden_act": "gelu_pytorch_tanh",
    },
)
IDEFICS = Family(build=bare_tower, defaults=dict(SIGLIP.defaults) | {"patch_size": 32})
TOWERS = {"clip_vision_model": VISION["clip_vision_model"], "siglip_vision_model": SIGLIP}
TOWERS |= dict.fromkeys(("idefics3_vision", "smolvlm_vision"), IDEFICS)
"""model_type of a tower -> how it is read."""
_TEXTS = DENSE | EXPERTS | LINEAR
_LLAMA_2 = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}


def _part(f: Fields, key: str, default: str, families: dict[str, Family], **more: Any) -> Values:
    """Values of one of the two models inside a configuration."""
    table = f.table(key)
    if table is None and key == "text_config" and f.has("hidden_size"):  # older files have it without a name
        return _flat(f, families[default])
    if table is None:
        raise f.error(key, "is missing")
    name = table.get("model_type", default)
    name = name if isinstance(name, str) else default
    name = name if name in families else SAME_TYPE.get(name, name)
    if name not in families:
        hint = f"supported: {', '.join(sorted(families))}"
        raise f.error(f"{key}.model_type", f"{name[:40]!r} is not supported here", hint=hint)
    family = families[name]
    if key == "text_config" and f.has("tie_word_embeddings"):
        table = {"tie_word_embeddings": f.flag("tie_word_embeddings"), **table}
    inner = f.nested(key, table, more | dict(family.defaults), dict(family.aliases) | {"model_type": ()})
    inner.text("model_type")
    return family.build(inner)


def _flat(f: Fields, family: Family) -> Values:
    for key, value in family.defaults.items():
        f.default(key, value, "default of the family")
    return family.build(f)


def _op(name: str, form: str, width: int = 0, **more: Any) -> LayerOperator:
    return LayerOperator(name=f"image_{name}", form=form, width=width, **more)


def _norm(name: str, image: Values, tokens: int) -> LayerOperator:
    width = image["hidden"]
    return _op(name, "norm", width, parameters=width * (1 + image.get("norm_bias", False)), tokens=tokens)


def _with_tower(
    f: Fields, text: Values, image: Values, stem: Sequence[LayerOperator], windows: Sequence[int] = ()
) -> Values:
    """Layers of the tower for one image per sample, then those of the language model, whose sequence has the image.

    Args:
        f: fields of the configuration.
        text: values of the language model.
        image: values of the tower, with its ``vision``.
        stem: what runs once.
        windows: layers of the tower without a window, where the others have one.
    """
    vision: Vision = image.pop("vision")
    layers = image.pop("layers")
    own = image | {"seq_len": text["seq_len"], "dropout": text["dropout"], "embedding_norm": False, "layers": layers}
    f.assume("images", f"one of {vision.image_size} x {vision.image_size} per sample, within its sequence")
    kinds = [kind("image", own | {"window": None, "windowed_layers": 0}, tokens=vision.tokens)]
    pattern = ["image"] * layers
    if image.get("window"):
        kinds.insert(0, kind("image_window", own | {"windowed_layers": layers}, tokens=vision.tokens))
        pattern = ["image" if layer in windows else "image_window" for layer in range(layers)]
    if text.get("mtp_depth"):
        f.assume("mtp_depth", "0: layers that predict further tokens are not counted next to a tower")
    more, names = _text_kinds(text)
    return of_kinds(text | {"stem": tuple(stem), "mtp_depth": 0}, [*kinds, *more], pattern + names)


def _text_kinds(text: Values) -> tuple[list[LayerKind], list[str]]:
    """Kinds of the language model's layers, and the name of each layer's kind.

    Few layers without experts stand first (DeepSeek-V3); more alternate with others, as windows do (Llama 4).
    """
    if text.get("kinds"):
        return list(text["kinds"]), list(text["pattern"])
    layers, experts = text["layers"], text.get("experts")
    dense = layers - experts.moe_layers if experts else 0
    if not 0 < dense < layers:
        return [kind("text", text)], ["text"] * layers
    has = [layer >= dense for layer in range(layers)] if dense <= _MOST_LEADING else _spread(layers - dense, layers)
    whole = _spread(layers - text.get("windowed_layers", 0), layers)
    pattern = [f"text_{'moe' if moe else 'dense'}{'' if on else '_window'}" for moe, on in zip(has, whole, strict=True)]
    kinds = [
        kind(name, text, experts=experts if "_moe" in name else None, windowed_layers=layers * ("_window" in name))
        for name in dict.fromkeys(pattern)
    ]
    return kinds, pattern


def _spread(count: int, layers: int) -> list[bool]:
    """Which layers are the ``count`` at equal distances, the last one included."""
    return [(layer + 1) * count // layers > layer * count // layers for layer in range(layers)]


_MOST_LEADING: Final = 3


def _vit_stem(image: Values) -> list[LayerOperator]:
    """Patches, positions and norms of CLIP and SigLIP."""
    vision: Vision = image["vision"]
    tokens, width = vision.tokens, image["hidden"]
    before = [_norm("embedding_norm", image, tokens)] * bool(image.get("embedding_norm"))
    return [
        _op(
            "patches",
            "whole",
            width,
            depth=vision.channels * vision.patch_size**2,
            bias=vision.patch_bias,
            tokens=tokens - vision.class_token,
        ),
        _op("positions", "table", parameters=(tokens + vision.class_token) * width),
        *before,
        _norm("final_norm", image, tokens),
    ]


def _two_products(depth: int, between: int, width: int, tokens: int) -> list[LayerOperator]:
    """A projector of two products with a function between them."""
    return [
        _op("projector_in", "whole", between, depth=depth, bias=True, tokens=tokens),
        _op("projector_gelu", "pass", between, tokens=tokens),
        _op("projector_out", "whole", width, depth=between, bias=True, tokens=tokens),
    ]


def _llava(f: Fields) -> Values:
    """LLaVA-1.5 (arXiv 2310.03744): CLIP, a projector of two layers, LLaMA."""
    text = _part(f, "text_config", "llama", _TEXTS, **_LLAMA_2)
    image = _part(f, "vision_config", "clip_vision_model", TOWERS)
    f.text("projector_hidden_act")
    tokens, hidden = image["vision"].tokens - image["vision"].class_token, text["hidden"]
    projector = _two_products(image["hidden"], hidden, hidden, tokens)
    return _with_tower(f, text, image, [*_vit_stem(image), *projector])


def _paligemma(f: Fields) -> Values:
    """PaliGemma (arXiv 2407.07726): SigLIP, a linear projector, Gemma."""
    text = _part(f, "text_config", "gemma", _TEXTS)
    image = _part(f, "vision_config", "siglip_vision_model", TOWERS)
    projector = _op(
        "projector", "whole", text["hidden"], depth=image["hidden"], bias=True, tokens=image["vision"].tokens
    )
    return _with_tower(f, text, image, [*_vit_stem(image), projector])


def _idefics3(f: Fields) -> Values:
    """Idefics 3 (arXiv 2408.12637) and SmolVLM: SigLIP, squares of its tokens joined by one product, LLaMA."""
    text = _part(f, "text_config", "llama", _TEXTS, **_LLAMA_2)
    image = _part(f, "vision_config", "idefics3_vision", TOWERS)
    square = f.count("scale_factor") ** 2
    projector = _op(
        "projector",
        "whole",
        text["hidden"],
        depth=image["hidden"] * square,
        tokens=max(image["vision"].tokens // square, 1),
    )
    return _with_tower(f, text, image, [*_vit_stem(image), projector])


def _qwen_vl(f: Fields, text_type: str, tower: str) -> Values:
    """Qwen2-VL (arXiv 2409.12191), 2.5-VL (arXiv 2502.13923), 3-VL (arXiv 2511.21631) and 3.5: squares of four patches
    become one token; the third also hands tokens of some of its layers to the language model (DeepStack)."""
    text = _part(f, "text_config", text_type, _TEXTS)
    image = _part(f, "vision_config", tower, QWEN_TOWERS)
    windows, square, out = image.pop("whole"), image.pop("square"), image.pop("out")
    positions, deep = image.pop("positions", 0), image.pop("deep", 0)
    vision: Vision = image["vision"]
    tokens, joined = vision.tokens // square, image["hidden"] * square
    table = [_op("positions", "table", parameters=positions * image["hidden"])] * bool(positions)
    depth = vision.channels * vision.patch_size**2
    stem = [
        _op("patches", "whole", image["hidden"], depth=depth, bias=bool(positions), tokens=vision.tokens),
        *table,
        _norm("merger_norm", image, vision.tokens),
        *_two_products(joined, joined, out, tokens),
    ]
    for place in range(deep):
        norm = _norm("merger_norm", image | {"hidden": joined}, tokens)
        stem += [replace(op, name=f"{op.name}_{place}") for op in (norm, *_two_products(joined, joined, out, tokens))]
    return _with_tower(f, text, image, stem, windows)


def _qwen3_tower(f: Fields) -> Values:
    """The tower of Qwen3-VL and Qwen3.5: a ViT with a table of positions that is stretched to the image."""
    f.default("image_size", 448, "the model takes any resolution")
    f.default("num_channels", f.count("in_channels") * f.count("temporal_patch_size"), "two frames make one patch")
    return bare_tower(f) | {
        "position": "rope",
        "max_positions": 0,
        "out": f.count("out_hidden_size"),
        "whole": (),
        "square": f.count("spatial_merge_size") ** 2,
        "positions": f.count("num_position_embeddings"),
        "deep": len(f.items("deepstack_visual_indexes", int) or ()),
    }


def _llama4(f: Fields) -> Values:
    """Llama 4: a ViT with norms before and after, squares of its tokens joined by two products, a linear projector."""
    text = _part(f, "text_config", "llama4", _TEXTS)
    image = _part(f, "vision_config", "llama4_vision_model", LLAMA4_TOWERS)
    own, vision = image.pop("adapter"), image["vision"]
    tokens = max(int((vision.tokens - vision.class_token) * own["share"]), 1)
    between, out = own["projector_input_dim"], own["projector_output_dim"]
    adapter = [
        _op("adapter_in", "whole", between, depth=own["joined"], tokens=tokens),
        _op("adapter_gelu", "pass", between, tokens=tokens),
        _op("adapter_out", "whole", out, depth=out, tokens=tokens),
        _op("projector", "whole", text["hidden"], depth=own["vision_output_dim"], tokens=tokens),
    ]
    return _with_tower(f, text, image, [*_vit_stem(image), *adapter])


def _llama4_tower(f: Fields) -> Values:
    own = {"joined": f.count("intermediate_size"), "share": f.number("pixel_shuffle_ratio") ** 2}
    own |= {name: f.count(name) for name in ("projector_input_dim", "projector_output_dim", "vision_output_dim")}
    return bare_tower(f, class_token=True, patch_bias=False) | {"embedding_norm": True, "adapter": own}


def _kimi_k25(f: Fields) -> Values:
    """Kimi K2.5: MoonViT (arXiv 2504.07491) for images and video, squares of its tokens joined by two products."""
    text = _part(f, "text_config", "deepseek_v3", _TEXTS)
    image = _part(f, "vision_config", "kimi_k25", KIMI_TOWERS)
    square, positions, vision = image.pop("square"), image.pop("positions"), image["vision"]
    joined, tokens = image["hidden"] * square, vision.tokens // square
    depth = vision.channels * vision.patch_size**2
    stem = [
        _op("patches", "whole", image["hidden"], depth=depth, bias=True, tokens=vision.tokens),
        _op("positions", "table", parameters=positions * image["hidden"]),
        _norm("final_norm", image, vision.tokens),
        _norm("projector_norm", image, vision.tokens),
        *_two_products(joined, joined, text["hidden"], tokens),
    ]
    return _with_tower(f, text, image, stem)


def _kimi_tower(f: Fields) -> Values:
    f.default("image_size", 448, "the model takes any resolution")
    square = f.items("merge_kernel_size", int, 2) or [2, 2]
    return bare_tower(f) | {
        "position": "rope",
        "max_positions": 0,
        "square": square[0] * square[1],
        "positions": f.count("pos_emb_height") * f.count("pos_emb_width"),
    }


def _qwen_tower(f: Fields, newer: bool) -> Values:
    """The tower takes any resolution; two frames make one patch."""
    hidden, channels = f.count("hidden_size" if newer else "embed_dim"), f.count("in_channels")
    if not newer:
        f.force("intermediate_size", f.count("mlp_ratio") * hidden, "mlp_ratio times the width")
    out = f.count("out_hidden_size" if newer else "hidden_size")
    f.force("hidden_size", hidden, "of the tower")
    f.default("image_size", 448, "the model takes any resolution")
    f.default("num_channels", channels * f.count("temporal_patch_size"), "two frames make one patch")
    image = bare_tower(f) | {"position": "rope", "max_positions": 0, "out": out, "whole": ()}
    image["square"] = f.count("spatial_merge_size") ** 2
    if newer:
        side = max(f.count("window_size") // f.count("patch_size"), 1)
        image |= {
            "norm": "rmsnorm",
            "norm_bias": False,
            "gated_mlp": True,
            "window": side**2,
            "whole": tuple(f.items("fullatt_block_indexes", int) or ()),
        }
    return image


_QWEN: Final = {
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_QWEN_NAMES: Final = {
    "num_hidden_layers": ("depth",),
    "num_attention_heads": ("num_heads",),
    "in_channels": ("in_chans",),
}
_QWEN3: Final = _QWEN | {
    "num_hidden_layers": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "patch_size": 16,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
    "hidden_act": "gelu_pytorch_tanh",
}
QWEN_TOWERS = {
    "qwen2_vl": Family(
        build=partial(_qwen_tower, newer=False),
        aliases=_QWEN_NAMES,
        defaults=_QWEN | {"embed_dim": 1280, "hidden_size": 3584, "mlp_ratio": 4, "hidden_act": "quick_gelu"},
    ),
    "qwen2_5_vl": Family(
        build=partial(_qwen_tower, newer=True),
        aliases=_QWEN_NAMES,
        defaults=_QWEN
        | {
            "hidden_size": 3584,
            "out_hidden_size": 3584,
            "intermediate_size": 3420,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "hidden_act": "silu",
        },
    ),
    "qwen3_5": Family(build=_qwen3_tower, aliases=_QWEN_NAMES, defaults=_QWEN3),
    "qwen3_vl": Family(
        build=_qwen3_tower, aliases=_QWEN_NAMES, defaults=_QWEN3 | {"deepstack_visual_indexes": [8, 16, 24]}
    ),
}
QWEN_TOWERS |= dict.fromkeys(("qwen3_vl_vision", "qwen3_vl_moe", "qwen3_vl_moe_vision"), QWEN_TOWERS["qwen3_vl"])
QWEN_TOWERS |= dict.fromkeys(("qwen3_5_vision", "qwen3_5_moe", "qwen3_5_moe_vision"), QWEN_TOWERS["qwen3_5"])
LLAMA4_TOWERS = {
    "llama4_vision_model": Family(
        build=_llama4_tower,
        defaults={
            "hidden_size": 768,
            "num_hidden_layers": 34,
            "num_attention_heads": 16,
            "intermediate_size": 5632,
            "num_channels": 3,
            "image_size": 448,
            "patch_size": 14,
            "hidden_act": "gelu",
            "pixel_shuffle_ratio": 0.5,
            "vision_output_dim": 7680,
            "projector_input_dim": 4096,
            "projector_output_dim": 4096,
        },
    )
}
KIMI_TOWERS = {
    "kimi_k25": Family(
        build=_kimi_tower,
        aliases={
            "hidden_size": ("vt_hidden_size",),
            "intermediate_size": ("vt_intermediate_size",),
            "num_attention_heads": ("vt_num_attention_heads",),
            "num_hidden_layers": ("vt_num_hidden_layers",),
            "pos_emb_height": ("init_pos_emb_height",),
            "pos_emb_width": ("init_pos_emb_width",),
        },
        defaults={
            "hidden_size": 1152,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "intermediate_size": 4304,
            "num_channels": 3,
            "patch_size": 14,
            "pos_emb_height": 64,
            "pos_emb_width": 64,
            "hidden_act": "gelu_pytorch_tanh",
        },
    )
}
KIMI_TOWERS |= dict.fromkeys(("kimi_k25_vision", "moonvit"), KIMI_TOWERS["kimi_k25"])


def _family(build: Callable[[Fields], Values], **defaults: Any) -> Family:
    return Family(build=build, defaults=defaults)


#: model_type -> how its files are read.
WITH_TOWERS: dict[str, Family] = {
    "llava": _family(_llava),
    "paligemma": _family(_paligemma),
    "idefics3": _family(_idefics3, scale_factor=2),
    "smolvlm": _family(_idefics3, scale_factor=2),
    "llama4": _family(_llama4),
    "kimi_k25": _family(_kimi_k25),
} | {
    name: _family(partial(_qwen_vl, text_type=text, tower=tower))
    for name, text, tower in (
        ("qwen2_vl", "qwen2", "qwen2_vl"),
        ("qwen2_5_vl", "qwen2", "qwen2_5_vl"),
        ("qwen3_vl", "qwen3", "qwen3_vl"),
        ("qwen3_vl_moe", "qwen3_moe", "qwen3_vl"),
        ("qwen3_5", "qwen3_5", "qwen3_5"),
        ("qwen3_5_moe", "qwen3_5_moe", "qwen3_5"),
    )
}
