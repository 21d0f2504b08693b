"""Families with an encoder and a decoder, whose layers also attend to what the encoder returned."""

from __future__ import annotations

from functools import partial
from typing import Any

from steptime.formats.huggingface.fields import Family, Fields, Values, activation, has_dropout, quantised_weight_bytes
from steptime.formats.huggingface.hybrids import block_of, kind, of_kinds
from steptime.model.kinds import cross_attention
from steptime.model.spec import LIMITS, LayerOperator


def _halves(f: Fields, values: Values, layers: tuple[int, int], encoder: Values, **cross: Any) -> Values:
    """Values of layers of an encoder, which has no mask, and then of a decoder.

    Args:
        f: fields of the configuration.
        values: of a layer of the decoder.
        layers: of encoder and decoder.
        encoder: values that differ there; ``tokens`` among them are those of a sample, 0: as many as the decoder has.
        cross: arguments of :func:`~steptime.model.kinds.cross_attention`.
    """
    tokens = encoder.pop("tokens", 0)
    mixer = cross_attention(block_of(values | {"layers": 1}), tokens, **cross)
    if not tokens:
        f.assume("encoder tokens", "as many as the decoder has")
    kinds = [kind("encoder", values, causal=False, tokens=tokens, **encoder), kind("decoder", values, mixer)]
    return of_kinds(values, kinds, ["encoder"] * layers[0] + ["decoder"] * layers[1])


def _stem(name: str, form: str, width: int = 0, **more: Any) -> LayerOperator:
    return LayerOperator(name=f"encoder_{name}", form=form, width=width, **more)


def _t5(f: Fields, tables_in_all: bool = False) -> Values:
    """T5 (arXiv 1910.10683), mT5 and umT5: RMS norms without biases, positions as a bias of scores by distance."""
    how = (f.text("feed_forward_proj") or "relu").split("-")
    gated, hidden, heads = how[0] == "gated", f.count("d_model"), f.count("num_heads", high=LIMITS["heads"])
    if how[-1] not in ("relu", "gelu", "silu", "gelu_new"):
        raise f.error(
            "feed_forward_proj", f"is {'-'.join(how)[:40]!r}", hint="known: relu, gelu, gated-gelu, gated-silu"
        )
    f.text("dense_act_fn")
    f.flag("is_gated_act")
    first = f.count("num_layers", high=LIMITS["layers"])
    layers = (first, f.optional("num_decoder_layers", high=LIMITS["layers"]) or first)
    values: Values = {
        "layers": sum(layers),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": f.count("d_kv"),
        "ffn_hidden": f.count("d_ff"),
        "gated_mlp": gated,
        "activation": "relu" if how[-1] == "relu" else "gelu",
        "norm": "rmsnorm",
        "causal": True,
        "seq_len": f.count("n_positions", high=LIMITS["max_positions"]),
        "vocab": f.count("vocab_size", high=LIMITS["vocab"]),
        "tied_embeddings": f.flag("tie_word_embeddings"),
        "position": "none",
        "dropout": has_dropout(f) or f.number("dropout_rate") > 0,
        "weight_bytes": quantised_weight_bytes(f),
    }
    # One table for each half; of umT5 one for each layer.
    tables = sum(layers) if tables_in_all else 2
    rows = f.count("relative_attention_num_buckets")
    f.optional("relative_attention_max_distance")
    values["stem"] = (
        _stem("positions", "table", parameters=tables * rows * heads),
        _stem("final_norm", "norm", parameters=hidden),
    )
    return _halves(f, values, layers, {})


def _biased(f: Fields, key: str) -> Values:
    """The decoder's block of BART and Whisper: layer norms, a plain MLP, biases everywhere."""
    heads, hidden = f.count("decoder_attention_heads", high=LIMITS["heads"]), f.count("d_model")
    if hidden % heads:
        raise f.error("decoder_attention_heads", f"{heads} does not divide d_model {hidden}")
    positions = f.count(key, high=LIMITS["max_positions"])
    return {
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": hidden // heads,
        "ffn_hidden": f.count("decoder_ffn_dim"),
        "gated_mlp": False,
        "activation": activation(f, "activation_function"),
        "norm": "layernorm",
        "causal": True,
        "seq_len": positions,
        "vocab": f.count("vocab_size", high=LIMITS["vocab"]),
        "tied_embeddings": f.flag("tie_word_embeddings"),
        "position": "learned",
        "max_positions": positions,
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "norm_bias": True,
        "dropout": has_dropout(f),
        "weight_bytes": quantised_weight_bytes(f),
    }


def _sides(f: Fields, values: Values) -> tuple[tuple[int, int], Values]:
    """Layers of encoder and decoder, and the values of the encoder's own."""
    heads = f.count("encoder_attention_heads", high=LIMITS["heads"])
    if values["hidden"] % heads:
        raise f.error("encoder_attention_heads", f"{heads} does not divide d_model {values['hidden']}")
    layers = (f.count("encoder_layers", high=LIMITS["layers"]), f.count("decoder_layers", high=LIMITS["layers"]))
    values["layers"] = sum(layers)
    own = {"heads": heads, "kv_heads": heads, "head_dim": values["hidden"] // heads}
    return layers, own | {"ffn_hidden": f.count("encoder_ffn_dim")}


def _bart(f: Fields) -> Values:
    """BART (arXiv 1910.13461), with a norm after each embedding and none at the end; mBART has both.

    Tables of positions have two rows before the first one.
    """
    values = _biased(f, "max_position_embeddings") | {"embedding_norm": True, "final_norm": f.flag("final_norms")}
    values["max_positions"] += 2
    norm = 2 * values["hidden"]
    layers, own = _sides(f, values)
    values["stem"] = (
        _stem("positions", "table", parameters=values["max_positions"] * values["hidden"]),
        _stem("embedding_norm", "norm", parameters=norm),
        *((_stem("final_norm", "norm", parameters=norm),) if values["final_norm"] else ()),
    )
    return _halves(f, values, layers, own, bias=True)


def _whisper(f: Fields) -> Values:
    """Whisper (arXiv 2212.04356): two convolutions make 1500 tokens of 3000 frames; keys have no bias."""
    values, tokens = _biased(f, "max_target_positions") | {"key_bias": False}, f.count("max_source_positions")
    hidden, channels = values["hidden"], f.count("num_mel_bins")
    layers, own = _sides(f, values)
    values["stem"] = (
        _stem("convolution_1", "whole", hidden, depth=3 * channels, bias=True, tokens=2 * tokens),
        _stem("gelu_1", "pass", hidden, tokens=2 * tokens),
        _stem("convolution_2", "whole", hidden, depth=3 * hidden, bias=True, tokens=tokens),
        _stem("gelu_2", "pass", hidden, tokens=tokens),
        _stem("positions", "table", parameters=tokens * hidden),
        _stem("final_norm", "norm", parameters=2 * hidden, tokens=tokens),
    )
    return _halves(f, values, layers, own | {"tokens": tokens}, bias=True, key_bias=False)


_T5 = {
    "vocab_size": 32128,
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 2048,
    "num_layers": 6,
    "num_heads": 8,
    "n_positions": 512,
    "relative_attention_num_buckets": 32,
    "dropout_rate": 0.1,
    "tie_word_embeddings": True,
}
_MT5 = _T5 | {
    "vocab_size": 250112,
    "d_ff": 1024,
    "num_layers": 8,
    "num_heads": 6,
    "tie_word_embeddings": False,
    "feed_forward_proj": "gated-gelu",
}
_BART = {
    "vocab_size": 50265,
    "max_position_embeddings": 1024,
    "encoder_layers": 12,
    "decoder_layers": 12,
    "d_model": 1024,
    "encoder_ffn_dim": 4096,
    "decoder_ffn_dim": 4096,
    "encoder_attention_heads": 16,
    "decoder_attention_heads": 16,
    "activation_function": "gelu",
    "dropout": 0.1,
    "tie_word_embeddings": True,
}

#: model_type -> how its files are read. Defaults are those of the families' own configuration classes.
ENCODERS: dict[str, Family] = {
    "t5": Family(build=_t5, defaults=_T5),
    "mt5": Family(build=_t5, defaults=_MT5),
    "umt5": Family(build=partial(_t5, tables_in_all=True), defaults=_MT5),
    "bart": Family(build=_bart, defaults=_BART),
    "mbart": Family(build=_bart, defaults=_BART | {"final_norms": True}),
    "whisper": Family(
        build=_whisper,
        defaults={
            "vocab_size": 51865,
            "num_mel_bins": 80,
            "encoder_layers": 4,
            "decoder_layers": 4,
            "d_model": 384,
            "encoder_attention_heads": 6,
            "decoder_attention_heads": 6,
            "encoder_ffn_dim": 1536,
            "decoder_ffn_dim": 1536,
            "max_source_positions": 1500,
            "max_target_positions": 448,
            "activation_function": "gelu",
            "tie_word_embeddings": True,
        },
    ),
}
