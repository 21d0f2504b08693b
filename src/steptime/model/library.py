"""The border between a TOML model file and :class:`ModelSpec`: rows of its fields, and their defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Final, get_args

from steptime.errors import FieldError, UserError, shown
from steptime.model.kinds import MIXERS, Mixer, with_kinds
from steptime.model.spec import (
    LIMITS,
    MAY_BE_ZERO,
    Experts,
    LatentAttention,
    LayerKind,
    LayerOperator,
    ModelSpec,
    Norm,
    Position,
    QkNorm,
    Vision,
    check_spec,
)
from steptime.schema import Each, Field, Row, Table, checked, flag, letters, needed_by, rows_of, text

_ZERO_OR_MORE: Final = Field(low=0, high=2**31, whole=True)
_NUMBERS: Final = {
    name: Field(low=int(name not in MAY_BE_ZERO), high=most, whole=True) for name, most in LIMITS.items()
}
_TYPES: Final[Mapping[str, Row]] = {
    "bool": flag,
    "str": letters(500),
    "Norm": text(*get_args(Norm)),
    "Position": text(*get_args(Position)),
    "QkNorm": text(*get_args(QkNorm)),
}
_OF_MODELS: Final = ("kinds", "pattern", "stem", "family", "source", "layers", "vocab", "tied_embeddings")
DIGITS: Final = 9
"""Largest number of digits of a count in a pattern."""


def _part(record: type, *by_default: str) -> Table:
    """Rows of a part of a model."""
    return Table(rows=rows_of(record, _TYPES, _NUMBERS), required=set(needed_by(record)) - set(by_default))


def _mixer(given: object) -> Mixer:
    """Row of a mixer: ``form``, a name of :data:`~steptime.model.kinds.MIXERS`, and its dimensions."""
    form = given.get("form") if isinstance(given, Mapping) else given
    if not isinstance(form, str) or form not in MIXERS:
        known = f'known: {", ".join(MIXERS)}; form = "opaque" takes the FLOPs and bytes of any other'
        raise FieldError("", "form", f"{shown(form, 40)} is an unknown kind of layer", hint=known)
    record = MIXERS[form]
    counts: dict[str, Row] = {
        field.name: Field(
            low=int(field.default != 0), high=2**31 if field.type == "int" else 1e18, whole=field.type == "int"
        )
        for field in fields(record)
        if field.type in ("int", "float")
    }
    table = Table(rows={"form": text(), **rows_of(record, _TYPES, counts)}, required=needed_by(record))
    values = checked(given, table, "")
    return record(**{key: value for key, value in values.items() if key != "form"})


def _of_model(given: object) -> object:
    raise UserError("is of the whole model", hint="give it outside of the kinds")


def _with_width(stem: Any) -> None:
    if stem["form"] in ("whole", "pass") and not stem.get("width"):
        raise FieldError("", "width", "is missing", hint="give the columns of the result")


def _of_kinds(model: Any) -> None:
    for key in ("pattern", "stem"):
        if key in model and "kinds" not in model:
            raise FieldError("", key, "is given without kinds", hint="give [[kinds]] with name, and their pattern")


_STEM: Final = Table(
    rows={
        "name": text(pattern="[a-z][a-z0-9_]{0,63}", called="a name of small letters, digits and _"),
        "form": text("whole", "norm", "pass", "table"),
        **dict.fromkeys(("width", "depth", "tokens"), _ZERO_OR_MORE),
        "bias": flag,
        "parameters": Field(low=0, high=2**40, whole=True),
    },
    required=("name", "form"),
    also=_with_width,
)
"""Row of an operator that runs once per sample, with the fields of :class:`LayerOperator`."""
_BLOCK: Final = rows_of(
    ModelSpec,
    _TYPES,
    {
        **_NUMBERS,
        "weight_bytes": Field(low=0.0625, high=LIMITS["weight_bytes"]),
        "latent": _part(LatentAttention),
        "experts": _part(Experts, "moe_layers"),
        "vision": _part(Vision),
        "pattern": Each(row=text()),
        "stem": Each(row=_STEM, most=64, called="a list of up to 64 tables"),
        "kinds": _of_model,
    },
)
_OF_KIND: Final[Mapping[str, Row]] = {
    "name": text(pattern=r"[^\W\d]\w*", called="a name of letters, digits and _"),
    "attention": flag,
    "mlp": flag,
    "mixers": Each(row=_mixer),
    "tokens": _ZERO_OR_MORE,
    "distinct": _ZERO_OR_MORE,
}
_KIND: Final = Table(rows={**_BLOCK, **dict.fromkeys(_OF_MODELS, _of_model), **_OF_KIND}, required=("name",))
_MODEL: Final = Table(
    rows={**_BLOCK, "kinds": Each(row=_KIND, least=1, most=64, called="a list of 1 to 64 tables")},
    required=("layers", "hidden", "heads"),
    hint="needed: layers, hidden, heads",
    also=_of_kinds,
)


def spec_from_table(table: Mapping[str, Any], *, where: str, name: str, source: str) -> ModelSpec:
    """A specification from the keys of a TOML file.

    Only ``layers``, ``hidden`` and ``heads`` are needed. Defaults: ``kv_heads`` = heads, ``head_dim`` =
    hidden / heads, ``ffn_hidden`` = 4 hidden, ``vocab`` 0, ``seq_len`` 2048 (of a ViT: its tokens),
    ``windowed_layers`` = layers where a window is given, ``moe_layers`` = layers, ``causal`` true (of a ViT:
    false unless given).

    Args:
        table: of the file.
        where: the file, for errors.
        name: of the model.
        source: of its numbers.

    With ``kinds`` (:func:`_with_kinds`) the other keys are what the kinds have unless they say otherwise; ``stem``
    lists what runs once per sample: products (``whole``), norms, passes and tables of parameters.

    Raises:
        UserError: keys are unknown, missing, of the wrong type, out of range, or contradict each other.
    """
    values = checked(table, _MODEL, where)
    spec = _spec(values, where, name, source)
    return check_spec(_with_kinds(spec, values, where) if "kinds" in values else spec, where)


def _spec(values: Mapping[str, Any], where: str, name: str, source: str) -> ModelSpec:
    """The model of checked values, as if all its layers were equal blocks."""
    latent = LatentAttention(**values["latent"]) if "latent" in values else None
    vision = Vision(**values["vision"]) if "vision" in values else None
    layers, hidden, heads = values["layers"], values["hidden"], values["heads"]
    if latent is None and "head_dim" not in values and hidden % heads:
        raise FieldError(where, "heads", f"{heads} does not divide hidden {hidden}", hint="give head_dim")
    of_images = vision is not None and vision.patch_size <= vision.image_size
    seq_len = values.get("seq_len", vision.tokens if vision is not None and of_images else 2048)
    usual = {
        "name": name,
        "family": "custom",
        "source": source,
        "kv_heads": heads,
        "head_dim": latent.qk_nope_head_dim + latent.qk_rope_head_dim if latent else max(hidden // heads, 1),
        "ffn_hidden": 4 * hidden,
        "gated_mlp": False,
        "activation": "silu" if values.get("gated_mlp") else "gelu",
        "norm": "layernorm",
        "causal": vision is None,
        "seq_len": seq_len,
        "vocab": 0,
        "max_positions": seq_len if values.get("position") == "learned" else 0,
        "windowed_layers": layers if "window" in values else 0,
    }
    parts = {
        "latent": latent,
        "vision": vision,
        "experts": Experts(**{"moe_layers": layers, **values["experts"]}) if "experts" in values else None,
        "stem": tuple(LayerOperator(**each) for each in values.get("stem", ())),
    }
    return ModelSpec(**{**usual, **values, **parts, "kinds": (), "pattern": ()})


def _with_kinds(spec: ModelSpec, values: Mapping[str, Any], where: str) -> ModelSpec:
    """The layers as kinds.

    A kind has ``name``, ``attention`` and ``mlp`` (true unless it has mixers, or says so), ``mixers`` (:func:`_mixer`),
    ``tokens`` per sample where these are not those of the sequence, ``distinct`` sets of shared weights, and any key of
    the model that differs. ``pattern`` names the kind of each layer, as ``NAME`` or ``NAME*COUNT``, and repeats where
    its length divides the layers.
    """
    kinds, common = [], {key: value for key, value in values.items() if key not in (*_OF_MODELS, "name")}
    for number, given in enumerate(values["kinds"]):
        own = {key: value for key, value in given.items() if key not in _OF_KIND}
        at, name = f"{where}: kinds[{number}]", given["name"]
        block = check_spec(_spec({"layers": spec.layers, **common, **own}, at, name, spec.source), at)
        operators = tuple(each for mixer in given.get("mixers", ()) for each in mixer.operators(block))
        kinds.append(
            LayerKind(
                name=name,
                block=block,
                operators=operators,
                attention=given.get("attention", not operators),
                mlp=given.get("mlp", not operators),
                tokens=given.get("tokens", 0),
                distinct=given.get("distinct", 0),
            )
        )
    pattern = values.get("pattern") or [kind.name for kind in kinds]
    found = with_kinds(spec, kinds, _pattern(pattern, kinds, spec.layers, where))
    routed = [(kind.block.experts, kind.layers) for kind in found.kinds if kind.block.experts and kind.mlp]
    held = replace(routed[0][0], moe_layers=sum(layers for _, layers in routed)) if routed else None
    return replace(found, experts=held)


def _pattern(given: Sequence[str], kinds: Sequence[LayerKind], layers: int, where: str) -> list[str]:
    """The kind of each layer."""
    names, out, whole = {kind.name for kind in kinds}, list[str](), 0
    for part in given:
        name, _, times = part.partition("*")
        if name.strip() not in names or not (times or "1").strip().isdigit() or len(times) > DIGITS:
            hint = f"write NAME or NAME*COUNT of {', '.join(sorted(names))}"
            raise FieldError(where, "pattern", f"has {shown(part, 40)}", hint=hint)
        count = int(times or "1")
        whole += count
        out += [name.strip()] * min(count, layers + 1)
    if not out or whole > layers or layers % whole:
        raise FieldError(where, "pattern", f"names {whole} layers, of {layers}", hint="its length divides layers")
    return out * (layers // len(out))
