"""Families whose layers are of several kinds: state-space models and hybrids of them with attention."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

from steptime.formats.huggingface.dense import gated_rms
from steptime.formats.huggingface.fields import LLAMA, Family, Fields, Values, activation, dimensions
from steptime.model.kinds import (
    Mamba,
    Mamba2,
    Mixer,
    Operators,
    with_kinds,
)
from steptime.model.spec import LIMITS, Experts, LayerKind, LayerOperator, ModelSpec

MAMBA, FULL = "mamba", "attention"
_LINEAR: Final = {
    "linear_attention": MAMBA,
    "mamba": MAMBA,
    "recurrent": MAMBA,
    "hybrid": "hybrid",
    "full_attention": FULL,
    "attention": FULL,
    "sliding_attention": FULL,
    "moe": "moe",
    "mlp": "mlp",
}
"""Name of a layer in a file -> ours."""


def block_of(values: Values, **changes: Any) -> ModelSpec:
    """The specification of equal blocks that values of a family are."""
    return ModelSpec(name="block", family="kind", source="", **(values | changes))


def kind(name: str, values: Values, mixer: Operators | Mixer = (), **changes: Any) -> LayerKind:
    """A kind whose attention and MLP have the values of the family but for ``changes``.

    ``attention``, ``mlp``, ``tokens`` and ``distinct`` among the changes are those of the kind.
    """
    own = {key: changes.pop(key) for key in ("attention", "mlp", "tokens", "distinct") if key in changes}
    block = block_of(values, **changes)
    operators = mixer.operators(block) if isinstance(mixer, Mixer) else mixer
    return LayerKind(name=name, block=block, operators=operators, **own)


def of_kinds(values: Values, kinds: Iterable[LayerKind], pattern: Iterable[str]) -> Values:
    """Values of a family with layers of several kinds."""
    found = with_kinds(block_of(values), kinds, pattern)
    return values | {"layers": found.layers, "kinds": found.kinds, "pattern": found.pattern}


def layer_names(f: Fields, layers: int, default: Iterable[str], keys: Iterable[str] = ("layer_types",)) -> list[str]:
    """Our name of each layer: as the file lists them under one of the keys, or as the family has them.

    Raises:
        FieldError: a name is not known.
    """
    for key in keys:
        given = f.items(key, str, layers)
        if given is None:
            continue
        for position, name in enumerate(given):
            if name not in _LINEAR:
                hint = f"known: {', '.join(_LINEAR)}"
                raise f.error(f"{key}[{position}]", f"{name[:40]!r} is no kind of layer that is known", hint=hint)
        return [_LINEAR[name] for name in given]
    return list(default)


def _alone(f: Fields, heads: int, head_dim: int) -> Values:
    """Values of a model without attention: ``heads`` and ``head_dim`` are those of its states."""
    f.default("max_position_embeddings", 2048, "state-space models have no limit")
    for key, value in (("num_attention_heads", heads), ("head_dim", head_dim)):
        f.force(key, value, "of the states")
    f.default("intermediate_size", f.count("hidden_size"), "no MLP")
    return dimensions(f) | {
        "gated_mlp": False,
        "activation": activation(f),
        "norm": "rmsnorm",
        "position": "none",
    }


def _rank(f: Fields, key: str) -> int:
    """Rank of the step size; ``auto`` is a sixteenth of the hidden width."""
    return f.automatic(key) or math.ceil(f.count("hidden_size") / 16)


def _mamba(f: Fields) -> Values:
    """Mamba and Falcon Mamba, whose norms inside the mixer have no weights."""
    given = f.optional("intermediate_size", high=LIMITS["ffn_hidden"])
    channels = given or int(f.number("expand") * f.count("hidden_size"))
    values = _alone(f, channels, 1)
    mixer = Mamba(
        channels=channels,
        state=f.count("state_size"),
        kernel=f.count("conv_kernel"),
        rank=_rank(f, "time_step_rank"),
        bias=f.flag("use_bias"),
        conv_bias=f.flag("use_conv_bias"),
    )
    layer = kind(MAMBA, values, mixer, attention=False, mlp=False)
    return of_kinds(values, [layer], [MAMBA] * values["layers"])


def _mamba2(f: Fields) -> Values:
    heads, head_dim = f.count("num_heads"), f.count("head_dim")
    mixer = Mamba2(
        heads=heads,
        head_dim=head_dim,
        state=f.count("state_size"),
        groups=f.count("n_groups"),
        kernel=f.count("conv_kernel"),
        chunk=f.count("chunk_size"),
        bias=f.flag("use_bias"),
        conv_bias=f.flag("use_conv_bias"),
    )
    f.number("expand")
    values = _alone(f, heads, head_dim)
    layer = kind(MAMBA, values, mixer, attention=False, mlp=False)
    return of_kinds(values, [layer], [MAMBA] * values["layers"])


def _jamba(f: Fields) -> Values:
    """Jamba (arXiv 2403.19887): attention every ``attn_layer_period``-th layer, experts every second."""
    values = gated_rms(f) | {"position": "none"}
    hidden, layers, experts = values["hidden"], values["layers"], f.count("num_experts")
    mixer = Mamba(
        channels=f.count("mamba_expand") * hidden,
        state=f.count("mamba_d_state"),
        kernel=f.count("mamba_d_conv"),
        rank=_rank(f, "mamba_dt_rank"),
        bias=f.flag("mamba_proj_bias"),
        conv_bias=f.flag("mamba_conv_bias"),
        norms=True,
    )
    moe = Experts(
        experts=experts,
        experts_per_token=f.count("num_experts_per_tok"),
        expert_ffn_hidden=values["ffn_hidden"],
        moe_layers=layers,
    )
    attends = _periodic(f, layers, "attn_layer_period", "attn_layer_offset")
    has_experts = _periodic(f, layers, "expert_layer_period", "expert_layer_offset")
    if experts == 1:
        has_experts = [False] * layers
    kinds = [
        kind(f"{name}{end}", values, () if name == FULL else mixer, attention=name == FULL, experts=own)
        for name in (MAMBA, FULL)
        for end, own in (("_dense", None), ("_moe", moe))
    ]
    pattern = [
        f"{FULL if own else MAMBA}_{'moe' if routed else 'dense'}"
        for own, routed in zip(attends, has_experts, strict=True)
    ]
    held = replace(moe, moe_layers=sum(has_experts)) if any(has_experts) else None
    return of_kinds(values | {"experts": held}, kinds, pattern)


def _periodic(f: Fields, layers: int, period: str, offset: str) -> list[bool]:
    every, first = f.count(period), f.count(offset, low=0)
    return [layer % every == first for layer in range(layers)]


def _ssd_of(f: Fields, hidden: int, **more: Any) -> Mamba2:
    """The Mamba-2 mixer under the names of Bamba, Granite 4 and Falcon-H1."""
    heads = f.count("mamba_n_heads")
    inner = f.optional("mamba_d_ssm") or f.count("mamba_expand") * hidden
    width = f.automatic("mamba_d_head")
    return Mamba2(
        heads=heads,
        head_dim=width or inner // heads,
        state=f.count("mamba_d_state"),
        groups=f.count("mamba_n_groups"),
        kernel=f.count("mamba_d_conv"),
        chunk=f.count("mamba_chunk_size"),
        **({"bias": f.flag("mamba_proj_bias"), "conv_bias": f.flag("mamba_conv_bias")} | more),
    )


def _bamba(f: Fields) -> Values:
    values = gated_rms(f)
    attends = set(f.items("attn_layer_indices", int) or ())
    usual = [FULL if layer in attends else MAMBA for layer in range(values["layers"])]
    pattern = layer_names(f, values["layers"], usual, ("layer_types", "layers_block_type"))
    mixer = _ssd_of(f, values["hidden"])
    return of_kinds(values, [kind(MAMBA, values, mixer, attention=False), kind(FULL, values)], pattern)


def _granite_hybrid(f: Fields) -> Values:
    """Granite 4: an MLP that all tokens use in every layer, with or without experts next to it."""
    count, width = f.count("num_local_experts", low=0), f.count("shared_intermediate_size")
    values = gated_rms(f)
    if f.text("position_embedding_type") != "rope":
        values["position"] = "none"
    if count:
        values["experts"] = Experts(
            experts=count,
            experts_per_token=f.count("num_experts_per_tok"),
            expert_ffn_hidden=values["ffn_hidden"],
            shared_ffn_hidden=width,
            moe_layers=values["layers"],
        )
    else:
        values["ffn_hidden"] = width
        f.optional("num_experts_per_tok", low=0)
    names = layer_names(f, values["layers"], [MAMBA] * values["layers"], ("layer_types", "layers_block_type"))
    mixer = _ssd_of(f, values["hidden"])
    return of_kinds(values, [kind(MAMBA, values, mixer, attention=False), kind(FULL, values)], names)


def _falcon_h1(f: Fields) -> Values:
    """Falcon-H1 (arXiv 2507.22448): attention and Mamba-2 read the same normed input in every layer."""
    values = gated_rms(f) | {"out_bias": f.flag("attention_bias")}
    if f.flag("projectors_bias") != f.flag("mamba_proj_bias"):
        raise f.error("projectors_bias", "differs from mamba_proj_bias, which is not supported yet")
    mixer = _ssd_of(f, values["hidden"], alone=False, gated_norm=f.flag("mamba_rms_norm"))
    return of_kinds(values, [kind("hybrid", values, mixer)], ["hybrid"] * values["layers"])


_LETTERS: Final = {"M": MAMBA, "-": "mlp", "*": FULL, "E": "moe"}


def _nemotron_pattern(f: Fields) -> list[str]:
    """The kind of each layer, from letters or a list of names."""
    letters = f.text("hybrid_override_pattern")
    listed = f.items("layers_block_type", str) or f.items("layer_types", str)
    if letters is None and listed is None:
        raise f.error("hybrid_override_pattern", "is missing")
    if unknown := set(letters or "") - set(_LETTERS):
        raise f.error("hybrid_override_pattern", f"has {sorted(unknown)}", hint=f"known: {' '.join(_LETTERS)}")
    count = len(letters or listed or ())
    return [_LETTERS[each] for each in letters] if letters else layer_names(f, count, (), ("layers_block_type",))


def _nemotron_h(f: Fields) -> Values:
    """Nemotron-H (arXiv 2504.03624): each layer is a mixer, attention, an MLP or experts alone."""
    pattern = _nemotron_pattern(f)
    f.force("num_hidden_layers", len(pattern), "layers of the pattern")
    values = gated_rms(f) | {"gated_mlp": False, "activation": activation(f, "mlp_hidden_act"), "position": "none"}
    if f.optional("moe_latent_size"):
        raise f.error("moe_latent_size", "is given: experts on a compressed stream are not supported yet")
    bias = f.flag("use_bias")
    mixer = Mamba2(
        heads=f.count("mamba_num_heads"),
        head_dim=f.count("mamba_head_dim"),
        state=f.count("ssm_state_size"),
        groups=f.count("n_groups"),
        kernel=f.count("conv_kernel"),
        chunk=f.count("chunk_size"),
        bias=bias,
        conv_bias=f.flag("use_conv_bias"),
    )
    routed = {}
    if "moe" in pattern:
        routed["experts"] = Experts(
            experts=f.count("n_routed_experts"),
            experts_per_token=f.count("num_experts_per_tok"),
            expert_ffn_hidden=f.count("moe_intermediate_size"),
            router_bias=True,
            shared_ffn_hidden=f.count("moe_shared_expert_intermediate_size") * f.count("n_shared_experts", low=0),
            moe_layers=pattern.count("moe"),
            groups=f.optional("n_group") or 1,
            groups_per_token=f.optional("topk_group") or 1,
        )
    kinds = [
        kind(MAMBA, values, mixer, attention=False, mlp=False),
        kind(FULL, values, mlp=False),
        kind("mlp", values, attention=False),
        kind("moe", values | routed, attention=False),
    ]
    return of_kinds(values | routed, kinds, pattern)


def _zamba2(f: Fields) -> Values:
    """Zamba2 (arXiv 2411.15242): blocks of attention and MLP that several layers share, on stream and embedding joined.

    Each layer that uses one has adapters on it and a product of its own from the block to the stream.
    """
    hidden, heads = f.count("hidden_size"), f.count("num_attention_heads")
    f.default("intermediate_size", 4 * hidden, "4 times the hidden width")
    f.force("head_dim", 2 * hidden // heads, "twice the hidden width over the heads")
    f.optional("attention_head_dim")
    values = gated_rms(f) | {"position": "rope" if f.flag("use_mem_rope") else "none"}
    layers, bias = values["layers"], f.flag("add_bias_linear")
    first = layer_names(f, layers, _zamba2_layers(layers), ("layers_block_type",))
    mamba_heads = f.count("n_mamba_heads")
    mixer = Mamba2(
        heads=mamba_heads,
        head_dim=f.count("mamba_expand") * hidden // mamba_heads,
        state=f.count("mamba_d_state"),
        groups=f.count("mamba_ngroups"),
        kernel=f.count("mamba_d_conv"),
        chunk=f.count("chunk_size"),
        bias=bias,
        conv_bias=f.flag("use_conv_bias"),
    )
    shared = _shared_block(f, values, bias)
    alone = {"attention": False, "mlp": False}
    blocks = f.count("num_mem_blocks")
    kinds = [
        kind(MAMBA, values, mixer, **alone),
        kind("hybrid", values, shared + mixer.operators(block_of(values)), **alone, distinct=blocks),
    ]
    return of_kinds(values, kinds, first)


def _zamba2_layers(layers: int) -> list[str]:
    usual = [MAMBA, *([*[MAMBA] * 5, "hybrid"] * 7), *([MAMBA] * 4), "hybrid", *([MAMBA] * 3), "hybrid", MAMBA, MAMBA]
    return usual[:layers]


def _shared_block(f: Fields, values: Values, bias: bool) -> Operators:
    hidden, heads, kv, wide = values["hidden"], values["heads"], values["kv_heads"], 2 * values["hidden"]
    inner, ffn, rank = heads * values["head_dim"], values["ffn_hidden"], f.count("adapter_rank")
    attention = [_op("shared_qkv", "into", inner + 2 * kv * values["head_dim"], depth=wide, shared=True)]
    if f.flag("use_shared_attention_adapter"):
        attention += [
            _op("qkv_adapter_down", "whole", 3 * rank, depth=wide, kept=False),
            _op("qkv_adapter_up", "up", 3 * wide, depth=rank),
        ]
    return (
        _op("shared_input_norm", "norm", wide, parameters=wide, shared=True),
        *attention,
        _op("shared_attention", "core"),
        _op("shared_out", "out", hidden, depth=inner, shared=True),
        _op("shared_mlp_norm", "norm", parameters=hidden, shared=True),
        _op("shared_mlp_in", "into", 2 * ffn, bias=bias, shared=True),
        _op("mlp_adapter_down", "whole", rank, kept=False),
        _op("mlp_adapter_up", "up", 2 * ffn, depth=rank),
        _op("shared_gate", "gate", ffn),
        _op("shared_mlp_out", "out", hidden, depth=ffn, bias=bias, shared=True),
        _op("shared_linear", "whole", hidden),
    )


def _op(name: str, form: str, width: int = 0, **more: Any) -> LayerOperator:
    return LayerOperator(name=name, form=form, width=width, **more)


_SSM: Final = {"hidden_act": "silu", "use_conv_bias": True, "conv_kernel": 4, "expand": 2}
_SSM_NAMES: Final = {"hidden_size": ("d_model",), "num_hidden_layers": ("n_layer",), "intermediate_size": ("d_inner",)}
_SSD: Final = LLAMA | {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
}
_NEMOTRON: Final = {
    "vocab_size": 131072,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
    "mlp_hidden_act": "relu2",
    "use_conv_bias": True,
    "conv_kernel": 4,
    "chunk_size": 128,
    "n_groups": 8,
    "ssm_state_size": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_shared_experts": 1,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
}
_ZAMBA2: Final = {
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "hidden_act": "gelu",
    "tie_word_embeddings": True,
    "use_conv_bias": True,
    "chunk_size": 256,
    "mamba_d_state": 64,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_ngroups": 1,
    "n_mamba_heads": 8,
    "num_mem_blocks": 1,
    "adapter_rank": 128,
}

#: model_type -> how its files are read. Defaults are those of the families' own configuration classes.
HYBRIDS: dict[str, Family] = {
    "mamba": Family(
        build=_mamba,
        aliases=_SSM_NAMES,
        defaults=_SSM | {"vocab_size": 50280, "state_size": 16, "tie_word_embeddings": True, "time_step_rank": "auto"},
    ),
    "falcon_mamba": Family(
        build=_mamba,
        aliases=_SSM_NAMES,
        defaults=_SSM | {"vocab_size": 50280, "state_size": 16, "tie_word_embeddings": True, "time_step_rank": "auto"},
    ),
    "mamba2": Family(
        build=_mamba2,
        aliases=_SSM_NAMES,
        defaults=_SSM
        | {"vocab_size": 32768, "state_size": 128, "num_heads": 128, "head_dim": 64, "n_groups": 8, "chunk_size": 256},
    ),
    "jamba": Family(
        build=_jamba,
        defaults=LLAMA
        | {
            "vocab_size": 65536,
            "max_position_embeddings": 262144,
            "num_key_value_heads": 8,
            "num_experts": 16,
            "num_experts_per_tok": 2,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "attn_layer_period": 8,
            "attn_layer_offset": 4,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_conv_bias": True,
            "mamba_dt_rank": "auto",
        },
        aliases={"num_experts": ("num_local_experts",)},
    ),
    "bamba": Family(
        build=_bamba,
        defaults=_SSD | {"vocab_size": 128000, "max_position_embeddings": 262144, "num_key_value_heads": 8},
    ),
    "granitemoehybrid": Family(
        build=_granite_hybrid,
        defaults=_SSD
        | {
            "vocab_size": 32000,
            "max_position_embeddings": 2048,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 1024,
        },
    ),
    "falcon_h1": Family(
        build=_falcon_h1,
        defaults=_SSD
        | {"vocab_size": 128000, "max_position_embeddings": 8192, "num_key_value_heads": 8, "mamba_d_ssm": 1024},
    ),
    "nemotron_h": Family(
        build=_nemotron_h,
        defaults=_NEMOTRON,
        aliases={
            "n_groups": ("mamba_n_groups",),
            "conv_kernel": ("mamba_d_conv",),
            "expand": ("mamba_expand",),
            "use_conv_bias": ("mamba_conv_bias",),
            "chunk_size": ("mamba_chunk_size",),
            "head_dim": ("attention_head_dim",),
            "n_routed_experts": ("num_local_experts",),
        },
    ),
    "zamba2": Family(build=_zamba2, defaults=_ZAMBA2),
}
