"""What many families share: dimensions of a decoder, windows, context length, quantisation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from steptime.formats.huggingface.fields import Fields
from steptime.model.check import LIMITS

Values = dict[str, Any]
"""Fields of a ModelSpec by name."""

#: Longest sequence taken for training where a file only has the limit of its positions.
MAX_DEFAULT_SEQ_LEN = 8192

_ACTIVATIONS = {
    "gelu": ("gelu", "gelu_new", "gelu_fast", "gelu_python", "gelu_pytorch_tanh", "quick_gelu", "gelu_accurate"),
    "silu": ("silu", "swish"),
    "relu": ("relu",),
    "relu2": ("relu2", "relu_squared"),
    "tanh": ("tanh",),
    "sigmoid": ("sigmoid",),
}
_ACTIVATION_OF = {name: ours for ours, names in _ACTIVATIONS.items() for name in names}


_DROPOUT_KEYS = (
    "attention_dropout", "hidden_dropout", "resid_pdrop", "attn_pdrop", "embd_pdrop", "dropout", "residual_dropout",
    "resid_dropout", "embedding_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", "activation_dropout",
    "embd_dropout", "ffn_dropout", "classifier_dropout",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How the files of one ``model_type`` are read."""

    build: Callable[[Fields], Values]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Key -> value that the family's own configuration class gives where the file has none."""
    aliases: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Key -> the family's other names for it (its ``attribute_map``)."""


def dimensions(f: Fields) -> Values:
    """Layers, widths, heads and vocabulary of any decoder."""
    hidden = f.count("hidden_size", high=LIMITS["hidden"])
    heads = f.count("num_attention_heads", high=LIMITS["heads"])
    kv_heads = f.optional("num_key_value_heads", high=LIMITS["kv_heads"])
    return {
        "layers": f.count("num_hidden_layers", high=LIMITS["layers"]),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads if kv_heads is None else kv_heads,
        "head_dim": head_width(f, hidden, heads),
        "ffn_hidden": f.count("intermediate_size", high=LIMITS["ffn_hidden"]),
        "vocab": f.count("vocab_size", high=LIMITS["vocab"]),
        "tied_embeddings": f.flag("tie_word_embeddings"),
        "causal": True,
        "seq_len": context(f),
        "dropout": has_dropout(f),
        "weight_bytes": quantised_weight_bytes(f),
    }


def head_width(f: Fields, hidden: int, heads: int) -> int:
    """Width of one head: ``head_dim``, or the hidden width divided by the heads."""
    width = f.optional("head_dim", high=LIMITS["head_dim"])
    if width is not None:
        return width
    if hidden % heads:
        below = max(d for d in range(1, heads + 1) if hidden % d == 0)
        hint = f"give head_dim, or a number of heads that divides it, such as {below}"
        raise f.error("num_attention_heads", f"{heads} does not divide hidden_size {hidden}", hint=hint)
    return hidden // heads


def activation(f: Fields, key: str = "hidden_act") -> str:
    """Our name of the activation function."""
    given = f.text(key)
    if given is None:
        raise f.error(key, "is missing")
    if given not in _ACTIVATION_OF:
        raise f.error(key, f"unknown activation {given[:40]!r}", hint=f"known: {', '.join(sorted(_ACTIVATION_OF))}")
    return _ACTIVATION_OF[given]


def has_dropout(f: Fields) -> bool:
    """Whether any element-wise dropout of the blocks is on."""
    # Every key is read, so that each counts as used.
    rates = [f.number(key) for key in _DROPOUT_KEYS]
    return any(rate > 0 for rate in rates)


def context(f: Fields) -> int:
    """Sequence length to train with.

    The length before any stretching of the rotary positions, else ``max_position_embeddings``; at most
    :data:`MAX_DEFAULT_SEQ_LEN`, because the limit of the positions is not the length of pre-training.
    """
    limit = f.count("max_position_embeddings", high=LIMITS["max_positions"])
    places = [f.table("rope_parameters"), f.table("rope_scaling")]
    found = [(place or {}).get("original_max_position_embeddings") for place in places]
    for original in (*found, f.optional("original_max_position_embeddings")):
        if isinstance(original, int) and not isinstance(original, bool) and 0 < original < limit:
            f.assume("seq_len", f"{original} (positions before they were stretched to {limit})")
            return min(original, MAX_DEFAULT_SEQ_LEN)
    if limit > MAX_DEFAULT_SEQ_LEN:
        f.assume("seq_len", f"{MAX_DEFAULT_SEQ_LEN} (the limit of the positions is {limit}, not a training length)")
    return min(limit, MAX_DEFAULT_SEQ_LEN)


def windows(f: Fields, layers: int, default_sliding: Callable[[int], bool], width: int | None) -> Values:
    """Window and number of layers that have one.

    ``layer_types`` decides where the file has it; else the pattern of the family does.
    """
    types = f.items("layer_types", str, layers)
    if types is None:
        sliding = sum(map(default_sliding, range(layers))) if width is not None else 0
    else:
        for position, name in enumerate(types):
            if name not in ("full_attention", "sliding_attention", "chunked_attention"):
                raise f.error(
                    f"layer_types[{position}]",
                    f"{name[:40]!r} is not supported yet",
                    hint="supported: full_attention, sliding_attention, chunked_attention",
                )
        sliding = sum(name != "full_attention" for name in types)
        if sliding and width is None:
            raise f.error("sliding_window", "is missing, but layer_types has sliding layers")
    return {"window": width if sliding else None, "windowed_layers": sliding}


def windows_but_every(f: Fields, layers: int) -> Values:
    """A window on all but every ``sliding_window_pattern``-th layer; see :func:`windows`."""
    pattern = f.count("sliding_window_pattern")
    return windows(f, layers, lambda layer: (layer + 1) % pattern != 0, window_width(f))


def window_width(f: Fields, key: str = "sliding_window") -> int | None:
    """Width of the sliding window, or None."""
    return f.optional(key, high=LIMITS["window"])


#: quant_method -> bytes per weight where the file does not say more.
_METHOD_BYTES = {"fp8": 1.0, "fbgemm_fp8": 1.0, "mxfp4": 4.25 / 8, "eetq": 1.0}


def quantised_weight_bytes(f: Fields) -> float | None:
    """Bytes per weight of a quantised checkpoint: its bits, and the scales where their block is known.

    FP8 with blocks of m x n weights has one 4-byte scale per block; MXFP4 has one byte per 32 weights; other
    methods count their bits only.
    """
    config = f.table("quantization_config")
    if config is None:
        return None
    method = config.get("quant_method")
    if isinstance(method, str) and method in _METHOD_BYTES:
        block = config.get("weight_block_size")
        if method == "fp8" and isinstance(block, list) and len(block) == 2 and all(_is_count(n) for n in block):
            return float(1 + 4 / (block[0] * block[1]))
        return _METHOD_BYTES[method]
    if config.get("load_in_4bit") is True:
        return 0.5
    if config.get("load_in_8bit") is True:
        return 1.0
    bits = config.get("bits", config.get("w_bit"))
    if isinstance(bits, int) and _is_count(bits) and bits <= 32:
        return bits / 8
    f.assume("quantization_config", "weights in the dtype of the run (how they are quantised is not known)")
    return None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 2**20


#: What a configuration of the Llama family means where it says nothing; likewise of the Qwen family.
LLAMA = {"hidden_act": "silu", "tie_word_embeddings": False}
QWEN = LLAMA | {
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "sliding_window": 4096,
}
