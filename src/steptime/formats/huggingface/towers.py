"""Families that read images and text: a tower of layers for the image, a projector, a language model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from steptime.formats.huggingface.dense import DENSE, VISION, bare_tower
from steptime.formats.huggingface.experts import EXPERTS
from steptime.formats.huggingface.fields import SAME_TYPE, Family, Fields, Values
from steptime.formats.huggingface.hybrids import kind, of_kinds
from steptime.model.spec import LayerOperator, Vision

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
_TEXTS = DENSE | EXPERTS
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
    kinds = [kind("image", own | {"window": None, "windowed_layers": 0}, tokens=vision.tokens), kind("text", text)]
    pattern = ["image"] * layers
    if image.get("window"):
        kinds.insert(0, kind("image_window", own | {"windowed_layers": layers}, tokens=vision.tokens))
        pattern = ["image" if layer in windows else "image_window" for layer in range(layers)]
    return of_kinds(text | {"stem": tuple(stem)}, kinds, pattern + ["text"] * text["layers"])


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


def _qwen_vl(f: Fields, newer: bool) -> Values:
    """Qwen2-VL (arXiv 2409.12191) and Qwen2.5-VL (arXiv 2502.13923): squares of four patches become one token."""
    text = _part(f, "text_config", "qwen2", _TEXTS)
    image = _part(f, "vision_config", "qwen2_5_vl" if newer else "qwen2_vl", QWEN_TOWERS)
    windows, square, out = image.pop("whole"), image.pop("square"), image.pop("out")
    vision: Vision = image["vision"]
    tokens, joined = vision.tokens // square, image["hidden"] * square
    return _with_tower(
        f,
        text,
        image,
        [
            _op(
                "patches", "whole", image["hidden"], depth=vision.channels * vision.patch_size**2, tokens=vision.tokens
            ),
            _norm("merger_norm", image, vision.tokens),
            *_two_products(joined, joined, out, tokens),
        ],
        windows,
    )


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
}


def _family(build: Callable[[Fields], Values], **defaults: Any) -> Family:
    return Family(build=build, defaults=defaults)


#: model_type -> how its files are read.
WITH_TOWERS: dict[str, Family] = {
    "llava": _family(_llava),
    "paligemma": _family(_paligemma),
    "idefics3": _family(_idefics3, scale_factor=2),
    "smolvlm": _family(_idefics3, scale_factor=2),
    "qwen2_vl": _family(partial(_qwen_vl, newer=False)),
    "qwen2_5_vl": _family(partial(_qwen_vl, newer=True)),
}
