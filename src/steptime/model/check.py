"""What has to hold between the fields of a model, whatever file they came from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields

from steptime.errors import FieldError
from steptime.model.spec import Experts, ModelSpec

#: Field -> largest value that is taken for a real model. Far above any of today; a typing error is caught.
LIMITS = {
    "layers": 100_000, "hidden": 2**24, "heads": 2**20, "kv_heads": 2**20, "head_dim": 2**20, "ffn_hidden": 2**26,
    "norms_per_layer": 16, "seq_len": 2**31, "vocab": 2**28, "max_positions": 2**31, "window": 2**31,
    "windowed_layers": 100_000, "weight_bytes": 64, "mtp_depth": 1000,
    "experts": 2**20, "experts_per_token": 2**20, "expert_ffn_hidden": 2**26, "shared_ffn_hidden": 2**26,
    "groups": 2**20, "groups_per_token": 2**20,
    "moe_layers": 100_000, "q_lora_rank": 2**24, "kv_lora_rank": 2**24, "qk_nope_head_dim": 2**20,
    "qk_rope_head_dim": 2**20, "v_head_dim": 2**20,
    "image_size": 2**20, "patch_size": 2**20, "channels": 2**20, "head_outputs": 2**28,
}  # fmt: skip
#: Fields for which zero means "none".
MAY_BE_ZERO = frozenset(
    {"vocab", "max_positions", "windowed_layers", "shared_ffn_hidden", "head_outputs", "norms_per_layer", "mtp_depth"}
)


def check_spec(spec: ModelSpec, where: str, names: Mapping[str, str] | None = None) -> ModelSpec:
    """The same specification, once every rule between its fields holds.

    Args:
        spec: any specification.
        where: file or name to put in front of the message.
        names: what the file calls our fields, where that differs.

    Raises:
        FieldError: the first field that contradicts another, or is out of range.
    """

    def called(field: str) -> str:
        return (names or {}).get(field, field)

    parts = {"": spec, "latent.": spec.latent, "experts.": spec.experts, "vision.": spec.vision}
    for prefix, part in parts.items():
        for entry in fields(part) if part is not None else ():
            value = getattr(part, entry.name)
            if entry.name in LIMITS and isinstance(value, (int, float)):
                _check_range(where, called(prefix + entry.name), entry.name, value)
    for field, problem, hint in _contradictions(spec):
        raise FieldError(where, called(field), problem, hint=hint)
    return spec


def _check_range(where: str, field: str, name: str, value: float) -> None:
    low = 0 if name in MAY_BE_ZERO else 0.0625 if name == "weight_bytes" else 1
    if not low <= value <= LIMITS[name]:
        raise FieldError(where, field, f"is {value}", hint=f"allowed: {low} to {LIMITS[name]}")


def _contradictions(spec: ModelSpec) -> Iterator[tuple[str, str, str]]:
    """Field, what is wrong with it, what to do."""
    if spec.kv_heads > spec.heads or spec.heads % spec.kv_heads:
        below = max(d for d in range(1, min(spec.kv_heads, spec.heads) + 1) if spec.heads % d == 0)
        yield "kv_heads", f"{spec.kv_heads} does not divide the {spec.heads} heads", f"nearest that does: {below}"
    if spec.windowed_layers > spec.layers:
        yield "windowed_layers", f"{spec.windowed_layers} of {spec.layers} layers", f"at most {spec.layers}"
    if spec.windowed_layers and spec.window is None:
        yield "window", f"is missing, with windowed_layers {spec.windowed_layers}", "give the width of the window"
    if spec.position == "learned" and spec.vocab and not spec.max_positions:
        yield "max_positions", "is 0, with learned positions", f"give the rows of the table, such as {spec.seq_len}"
    if spec.vision is not None:
        image, patch = spec.vision.image_size, spec.vision.patch_size
        if patch > image:
            yield "vision.patch_size", f"{patch} is larger than the image, {image}", "give the size in pixels"
        if spec.vocab:
            yield "vocab", f"is {spec.vocab}, with a vision part", "a ViT has no token embedding: 0"
    if spec.latent is not None and spec.kv_heads != spec.heads:
        yield "kv_heads", "differs from heads, with latent attention", f"give {spec.heads}"
    if spec.experts is not None:
        yield from _expert_contradictions(spec, spec.experts)


def _expert_contradictions(spec: ModelSpec, experts: Experts) -> Iterator[tuple[str, str, str]]:
    if experts.experts_per_token > experts.experts:
        yield (
            "experts.experts_per_token",
            f"is {experts.experts_per_token}, with {experts.experts} experts",
            f"at most {experts.experts}",
        )
    if experts.moe_layers > spec.layers:
        yield "experts.moe_layers", f"{experts.moe_layers} of {spec.layers} layers", f"at most {spec.layers}"
    if experts.experts % experts.groups:
        yield "experts.groups", f"is {experts.groups}, with {experts.experts} experts", "give a divisor of them"
    if experts.groups_per_token > experts.groups:
        yield (
            "experts.groups_per_token", f"is {experts.groups_per_token}, with {experts.groups} groups",
            f"at most {experts.groups}",
        )  # fmt: skip
    if experts.shared_gate and not experts.shared_ffn_hidden:
        yield "experts.shared_gate", "is true without a shared expert", "give shared_ffn_hidden"
