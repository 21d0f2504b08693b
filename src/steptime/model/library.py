"""The border between a TOML model file and :class:`ModelSpec`: strict types, defaults, field paths in errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from steptime.errors import FieldError, did_you_mean, shorten, shown
from steptime.model.spec import Experts, LatentAttention, ModelSpec, Norm, Position, Vision, check_spec
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

    Raises:
        FieldError: a key is unknown, missing, of the wrong type, out of range, or contradicts another.
    """
    try:
        parsed = _ModelTable.model_validate(dict(table))
    except ValidationError as error:
        raise _field_error(error, where) from None
    values = parsed.model_dump(exclude={"latent", "experts", "vision"})
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
    return check_spec(ModelSpec(**values, latent=latent, experts=experts, vision=vision), where)


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
