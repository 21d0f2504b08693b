"""The border between a TOML model file and :class:`ModelSpec`: strict types, defaults, field paths in errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from steptime.errors import FieldError, did_you_mean, shorten, shown
from steptime.model.kinds import MIXERS, with_kinds
from steptime.model.spec import (
    Experts,
    LatentAttention,
    LayerKind,
    LayerOperator,
    ModelSpec,
    Norm,
    Position,
    Vision,
    check_spec,
)
from steptime.store.files import keys_at

Count = Annotated[int, Field(ge=1, le=2**31)]
CountOrZero = Annotated[int, Field(ge=0, le=2**31)]
Text = Annotated[str, Field(min_length=1, max_length=500)]


class _Table(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class _LatentTable(_Table):
    q_lora_rank: Count | None = None
    kv_lora_rank: Count
    qk_nope_head_dim: Count
    qk_rope_head_dim: Count
    v_head_dim: Count


class _ExpertsTable(_Table):
    experts: Count
    experts_per_token: Count
    expert_ffn_hidden: Count
    shared_ffn_hidden: CountOrZero = 0
    moe_layers: Count | None = None
    router_bias: bool = False
    shared_gate: bool = False
    expert_bias: bool = False
    groups: Count = 1
    groups_per_token: Count = 1


class _VisionTable(_Table):
    image_size: Count
    patch_size: Count
    channels: Count = 3
    class_token: bool = True
    patch_bias: bool = True
    mask_token: bool = False
    head_outputs: CountOrZero = 0
    head_bias: bool = True


class _StemTable(_Table):
    """What runs once per sample; :class:`LayerOperator` says what the fields mean."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
    form: Literal["whole", "norm", "pass", "table"]
    width: CountOrZero = 0
    depth: CountOrZero = 0
    tokens: CountOrZero = 0
    bias: bool = False
    parameters: Annotated[int, Field(ge=0, le=2**40)] = 0


class _ModelTable(_Table):
    name: Text | None = None
    family: Text = "custom"
    source: Text | None = None
    layers: Count
    hidden: Count
    heads: Count
    kv_heads: Count | None = None
    head_dim: Count | None = None
    ffn_hidden: Count | None = None
    gated_mlp: bool = False
    activation: Text | None = None
    norm: Norm = "layernorm"
    norms_per_layer: CountOrZero = 2
    qk_norm: Literal["none", "head", "full"] = "none"
    causal: bool = True
    seq_len: Count | None = None
    vocab: CountOrZero = 0
    tied_embeddings: bool = False
    position: Position = "rope"
    max_positions: CountOrZero | None = None
    qkv_bias: bool = False
    key_bias: bool = True
    out_bias: bool = False
    mlp_bias: bool = False
    norm_bias: bool = False
    final_norm: bool = True
    head_bias: bool = False
    attention_sinks: bool = False
    parallel_block: bool = False
    embedding_norm: bool = False
    layer_scale: bool = False
    dropout: bool = False
    mlp_dropout: bool = False
    window: Count | None = None
    windowed_layers: CountOrZero | None = None
    weight_bytes: Annotated[float, Field(gt=0)] | None = None
    latent: _LatentTable | None = None
    experts: _ExpertsTable | None = None
    mtp_depth: CountOrZero = 0
    vision: _VisionTable | None = None
    attention_gate: bool = False
    norm_weights: bool = True
    kinds: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=64)] | None = None
    pattern: list[str] | None = None
    stem: Annotated[list[_StemTable], Field(max_length=64)] = []


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
        FieldError: a key is unknown, missing, of the wrong type, out of range, or contradicts another.
    """
    for key in ("pattern", "stem"):
        if key in table and "kinds" not in table:
            raise FieldError(where, key, "is given without kinds", hint="give [[kinds]] with name, and their pattern")
    try:
        parsed = _ModelTable.model_validate(dict(table))
    except ValidationError as error:
        raise _field_error(error, where) from None
    values = parsed.model_dump(exclude={"latent", "experts", "vision", "kinds", "pattern", "stem"})
    latent = LatentAttention(**parsed.latent.model_dump()) if parsed.latent else None
    vision = Vision(**parsed.vision.model_dump()) if parsed.vision else None
    experts = None
    if parsed.experts:
        rest = parsed.experts.model_dump(exclude={"moe_layers"})
        experts = Experts(**rest, moe_layers=_or(parsed.experts.moe_layers, parsed.layers))
    seq_len = _or(parsed.seq_len, vision.tokens if vision and vision.patch_size <= vision.image_size else 2048)
    values |= {
        "name": parsed.name or name,
        "source": parsed.source or source,
        "kv_heads": _or(parsed.kv_heads, parsed.heads),
        "head_dim": _or(parsed.head_dim, _head_dim(parsed, latent, where)),
        "ffn_hidden": _or(parsed.ffn_hidden, 4 * parsed.hidden),
        "activation": parsed.activation or ("silu" if parsed.gated_mlp else "gelu"),
        "seq_len": seq_len,
        "causal": parsed.causal if vision is None or "causal" in table else False,
        "max_positions": _or(parsed.max_positions, seq_len if parsed.position == "learned" else 0),
        "windowed_layers": _or(parsed.windowed_layers, parsed.layers if parsed.window else 0),
    }
    for number, each in enumerate(parsed.stem):
        if each.form in ("whole", "pass") and not each.width:
            raise FieldError(where, f"stem[{number}].width", "is missing", hint="give the columns of the result")
    stem = tuple(LayerOperator(**each.model_dump()) for each in parsed.stem)
    spec = ModelSpec(**values, latent=latent, experts=experts, vision=vision, stem=stem)
    if parsed.kinds is not None:
        spec = _with_kinds(spec, dict(table), parsed, where)
    return check_spec(spec, where)


def _with_kinds(spec: ModelSpec, table: Mapping[str, Any], parsed: _ModelTable, where: str) -> ModelSpec:
    """The layers as kinds.

    A kind has ``name``, ``attention`` and ``mlp`` (true unless it has mixers, or says so), ``mixers`` (tables with
    ``form``, a name of :data:`~steptime.model.kinds.MIXERS`, and its dimensions), ``tokens`` per sample
    where these are not those of the sequence, ``distinct`` sets of shared weights, and any key of the model that
    differs. ``pattern`` names the kind of each layer, as ``NAME`` or ``NAME*COUNT``, and repeats where its length
    divides the layers.
    """
    kinds, common = [], {key: value for key, value in table.items() if key not in _OF_MODELS}
    for number, given in enumerate(parsed.kinds or ()):
        at = f"kinds[{number}]"
        name = given.get("name")
        if not isinstance(name, str) or not name.isidentifier():
            raise FieldError(where, f"{at}.name", f"is {shown(name, 40)}", hint="give a name of letters, digits and _")
        if of_model := [key for key in given if key in _OF_MODELS and key != "name"]:
            raise FieldError(where, f"{at}.{of_model[0]}", "is of the whole model", hint="give it outside of the kinds")
        own = common | {key: value for key, value in given.items() if key not in _OF_KINDS}
        own["layers"] = spec.layers
        block = spec_from_table(own, where=f"{where}: {at}", name=name, source=spec.source)
        operators = tuple(_mixers(given.get("mixers", []), block, where, at))
        tokens, distinct = (_count(given.get(key, 0), where, f"{at}.{key}") for key in ("tokens", "distinct"))
        attention, mlp = (_flag(given.get(key, not operators), where, f"{at}.{key}") for key in ("attention", "mlp"))
        kinds.append(
            LayerKind(
                name=name,
                block=block,
                operators=operators,
                attention=attention,
                mlp=mlp,
                tokens=tokens,
                distinct=distinct,
            )
        )
    found = with_kinds(
        spec, kinds, _pattern(parsed.pattern or [kind.name for kind in kinds], kinds, spec.layers, where)
    )
    routed = [(kind.block.experts, kind.layers) for kind in found.kinds if kind.block.experts and kind.mlp]
    held = replace(routed[0][0], moe_layers=sum(layers for _, layers in routed)) if routed else None
    return replace(found, experts=held)


_OF_MODELS: Final = ("kinds", "pattern", "stem", "name", "family", "source", "layers", "vocab", "tied_embeddings")
DIGITS: Final = 9
"""Most digits of a count in a pattern."""
_OF_KINDS: Final = ("name", "attention", "mlp", "mixers", "tokens", "distinct")


def _flag(value: Any, where: str, field: str) -> bool:
    if not isinstance(value, bool):
        raise FieldError(where, field, f"is {shown(value, 40)}", hint="allowed: true or false")
    return value


def _count(value: Any, where: str, field: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 2**31:
        raise FieldError(where, field, f"is {shown(value, 40)}", hint=f"allowed: a whole number from 0 to {2**31}")
    return value


def _pattern(given: Sequence[str], kinds: Sequence[LayerKind], layers: int, where: str) -> list[str]:
    """The kind of each layer."""
    names, out, whole = {kind.name for kind in kinds}, list[str](), 0
    for text in given:
        name, _, times = text.partition("*")
        if name.strip() not in names or not (times or "1").strip().isdigit() or len(times) > DIGITS:
            hint = f"write NAME or NAME*COUNT of {', '.join(sorted(names))}"
            raise FieldError(where, "pattern", f"has {shown(text, 40)}", hint=hint)
        count = int(times or "1")
        whole += count
        out += [name.strip()] * min(count, layers + 1)
    if not out or whole > layers or layers % whole:
        raise FieldError(where, "pattern", f"names {whole} layers, of {layers}", hint="its length divides layers")
    return out * (layers // len(out))


def _mixers(given: Any, block: ModelSpec, where: str, at: str) -> Iterator[LayerOperator]:
    """Operators of the mixers of one kind."""
    if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
        raise FieldError(where, f"{at}.mixers", f"is {shown(given, 40)}", hint="give a list of tables with form")
    for number, table in enumerate(given):
        place, form = f"{at}.mixers[{number}]", table.get("form")
        if not isinstance(form, str) or form not in MIXERS:
            known = f'known: {", ".join(MIXERS)}; form = "opaque" takes the FLOPs and bytes of any other'
            raise FieldError(where, f"{place}.form", f"{shown(form, 40)} is an unknown kind of layer", hint=known)
        takes = {each.name: each for each in fields(MIXERS[form])}
        values = {key: value for key, value in table.items() if key != "form"}
        for key, value in values.items():
            if key not in takes:
                hint = did_you_mean(key, list(takes))
                raise FieldError(where, f"{place}.{shorten(key)}", "unknown field", hint=hint)
            kind, least = str(takes[key].type), int(takes[key].default != 0)
            if not _fits(value, kind, least):
                raise FieldError(where, f"{place}.{key}", f"is {shown(value, 40)}", hint=_TYPES[kind].format(least))
        lacking = [name for name, each in takes.items() if each.default is MISSING and name not in values]
        if lacking:
            raise FieldError(where, f"{place}.{lacking[0]}", "is missing", hint=f"{form} needs {', '.join(lacking)}")
        yield from MIXERS[form](**values).operators(block)


_TYPES: Final = {
    "int": "allowed: a whole number from {} to 2^31",
    "bool": "allowed: true or false",
    "float": "allowed: a number from {} to 1e18",
}


def _fits(value: Any, kind: str, least: int) -> bool:
    if isinstance(value, bool) or kind == "bool":
        return kind == "bool" and isinstance(value, bool)
    if kind == "int":
        return isinstance(value, int) and least <= value <= 2**31
    return isinstance(value, (int, float)) and least <= value <= 1e18


def _head_dim(parsed: _ModelTable, latent: LatentAttention | None, where: str) -> int:
    if latent is not None:
        return latent.qk_nope_head_dim + latent.qk_rope_head_dim
    if parsed.head_dim is None and parsed.hidden % parsed.heads:
        raise FieldError(where, "heads", f"{parsed.heads} does not divide hidden {parsed.hidden}", hint="give head_dim")
    return max(parsed.hidden // parsed.heads, 1)


T = TypeVar("T")


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _field_error(error: ValidationError, where: str) -> FieldError:
    """The first problem in our words, and how many more there are."""
    problems = error.errors(include_url=False)
    first = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])  # a misspelt one is missing too
    field = ".".join(str(part) for part in first["loc"])
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    if first["type"] == "extra_forbidden":
        *path, name = first["loc"]
        hint = did_you_mean(str(name), keys_at(_ModelTable, path))
        return FieldError(where, shorten(field), f"unknown field{more}", hint=hint)
    if first["type"] == "missing":
        return FieldError(where, field, f"is missing{more}", hint="needed: layers, hidden, heads")
    given = shown(first["input"], 40)
    return FieldError(where, shorten(field), f"{first['msg'][0].lower()}{first['msg'][1:]}, not {given}{more}")
