"""Families whose attention and gated or plain MLP read one norm side by side: Phi, Cohere."""

from __future__ import annotations

from steptime.formats.huggingface.dense import biased_layernorm, computed_positions, gated_rms
from steptime.formats.huggingface.fields import Family, Fields, Values, windows_but_every

_ONE_NORM = {"norms_per_layer": 1, "parallel_block": True}


def _phi(f: Fields) -> Values:
    """Phi-1, Phi-1.5 and Phi-2: biases everywhere, on the head too; rotary positions on a part of each head."""
    if f.flag("qk_layernorm"):
        raise f.error("qk_layernorm", "is true, which is not supported yet", hint="supported: false")
    return computed_positions(biased_layernorm(f)) | _ONE_NORM | {"head_bias": True}


def _cohere(f: Fields) -> Values:
    """Command R: layer norms without biases; norms of queries and keys have weights of each head."""
    qk_norm = "full" if f.flag("use_qk_norm") else "none"
    return gated_rms(f) | _ONE_NORM | {"norm": "layernorm", "qk_norm": qk_norm}


def _cohere2(f: Fields) -> Values:
    """Command R7B and A: a window on all but every ``sliding_window_pattern``-th layer."""
    values = _cohere(f)
    return values | windows_but_every(f, values["layers"])


_COHERE = {"hidden_act": "silu", "vocab_size": 256000, "max_position_embeddings": 8192, "tie_word_embeddings": True}

#: model_type -> how its files are read. Defaults are those of the families' own configuration classes.
PARALLEL: dict[str, Family] = {
    "phi": Family(
        build=_phi,
        defaults={"vocab_size": 51200, "max_position_embeddings": 2048, "hidden_act": "gelu_new"}
        | {"tie_word_embeddings": False},
    ),
    "cohere": Family(build=_cohere, defaults=_COHERE),
    "cohere2": Family(
        build=_cohere2,
        defaults=_COHERE | {"sliding_window": 4096, "sliding_window_pattern": 4},
        aliases={"sliding_window_pattern": ("_sliding_window_pattern", "layer_switch")},
    ),
}
