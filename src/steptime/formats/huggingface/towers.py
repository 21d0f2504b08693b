"""Families that read images and text: a tower of layers for the image, a projector, a language model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
TOWERS = {"clip_vision_model": VISION["clip_vision_model"], "siglip_vision_model": SIGLIP}
"""model_type of a tower -> how it is read."""
_TEXTS = DENSE | EXPERTS
_LLAMA_2 = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}


def _part(f: Fields, key: str, default: str, families: dict[str, Family], **more: Any) -> Values:
    """Values of one of the two models inside a configuration."""
    table = f.table(key)
    if table is None:
        raise f.error(key, "is missing")
    name = table.get("model_type", default)
    name = SAME_TYPE.get(name, name) if isinstance(name, str) else default
    if name not in families:
        hint = f"supported: {', '.join(sorted(families))}"
        raise f.error(f"{key}.model_type", f"{name[:40]!r} is not supported here", hint=hint)
    family = families[name]
    if f.has("tie_word_embeddings"):
        table = {"tie_word_embeddings": f.flag("tie_word_embeddings"), **table}
    inner = f.nested(key, table, more | dict(family.defaults), dict(family.aliases) | {"model_type": ()})
    inner.text("model_type")
    return family.build(inner)


def _op(name: str, form: str, width: int = 0, **more: Any) -> LayerOperator:
    return LayerOperator(name=f"image_{name}", form=form, width=width, **more)


def _with_tower(f: Fields, text: Values, image: Values, projector: tuple[LayerOperator, ...]) -> Values:
    """Layers of the tower for one image per sample, then those of the language model, whose sequence has the image."""
    vision: Vision = image.pop("vision")
    tokens, width = vision.tokens, image["hidden"]
    norm, patch = 2 * width, vision.channels * vision.patch_size**2
    own = image | {"seq_len": text["seq_len"], "dropout": text["dropout"], "position": "none", "embedding_norm": False}
    tables = tokens * width + vision.class_token * width
    before = (_op("embedding_norm", "norm", width, parameters=norm, tokens=tokens),) * image.get(
        "embedding_norm", False
    )
    stem = (
        _op("patches", "whole", width, depth=patch, bias=vision.patch_bias, tokens=tokens - vision.class_token),
        _op("positions", "table", parameters=tables),
        *before,
        _op("final_norm", "norm", width, parameters=norm, tokens=tokens),
        *projector,
    )
    f.assume("images", f"one of {vision.image_size} x {vision.image_size} per sample, within its sequence")
    kinds = [kind("image", own, tokens=tokens), kind("text", text)]
    pattern = ["image"] * image["layers"] + ["text"] * text["layers"]
    return of_kinds(text | {"stem": stem}, kinds, pattern)


def _llava(f: Fields) -> Values:
    """LLaVA-1.5 (arXiv 2310.03744): CLIP, a projector of two layers, LLaMA."""
    text = _part(f, "text_config", "llama", _TEXTS, **_LLAMA_2)
    image = _part(f, "vision_config", "clip_vision_model", TOWERS)
    f.text("projector_hidden_act")
    tokens, hidden, width = image["vision"].tokens - image["vision"].class_token, text["hidden"], image["hidden"]
    return _with_tower(
        f,
        text,
        image,
        (
            _op("projector_in", "whole", hidden, depth=width, bias=True, tokens=tokens),
            _op("projector_gelu", "pass", hidden, tokens=tokens),
            _op("projector_out", "whole", hidden, bias=True, tokens=tokens),
        ),
    )


def _paligemma(f: Fields) -> Values:
    """PaliGemma (arXiv 2407.07726): SigLIP, a linear projector, Gemma."""
    text = _part(f, "text_config", "gemma", _TEXTS)
    image = _part(f, "vision_config", "siglip_vision_model", TOWERS)
    projector = _op(
        "projector", "whole", text["hidden"], depth=image["hidden"], bias=True, tokens=image["vision"].tokens
    )
    return _with_tower(f, text, image, (projector,))


def _family(build: Callable[[Fields], Values], **defaults: Any) -> Family:
    return Family(build=build, defaults=defaults)


#: model_type -> how its files are read.
WITH_TOWERS: dict[str, Family] = {"llava": _family(_llava), "paligemma": _family(_paligemma)}
