"""Layers that are not attention and MLP alone: what each mixer is made of, before ranks cut it.

A mixer is a function from the hidden width and its own dimensions to operators; its row in :data:`MIXERS` is the name
under which a model file asks for it. A form in :data:`FORMS` is what an operator does; its rows and its tensor-parallel
cut are in :mod:`steptime.plan.declared`, its formulas in :mod:`steptime.cost.recurrence`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from steptime.model.spec import LayerKind, LayerOperator, ModelSpec

Operators = tuple[LayerOperator, ...]
FORMS: Final[Mapping[str, str]] = {
    "norm": "norm of the residual stream, `parameters` wide",
    "residual": "its sum with what an operator returned",
    "into": "product from the stream, columns cut",
    "out": "product to the stream, rows cut",
    "whole": "product with the same weights on every rank",
    "up": "product from a narrow tensor, columns cut",
    "narrow": "product from a cut tensor to a narrow one that all ranks need",
    "blocks": "product with a block-diagonal matrix, blocks cut",
    "inner_norm": "norm of a tensor inside the layer; `rows` of it per token",
    "convolution": "causal convolution of each channel",
    "gate": "product of two tensors element by element, one after an activation function",
    "pass": "elementwise pass: an activation function",
    "table": "parameters that are looked up or added, without work worth counting",
    "selective_scan": "state of each channel, token by token",
    "ssd": "state-space duality: states of heads, chunk by chunk",
    "delta_rule": "delta rule of linear attention, chunk by chunk",
    "linear_attention": "linear attention with decay, chunk by chunk",
    "linear_recurrence": "gated recurrence of each channel",
    "index_scores": "scores of an indexer over all earlier keys, and the choice of the best",
    "cross": "attention to the tokens of another stack",
    "core": "attention on the heads of the layer's dimensions",
    "stated": "work that the model file states",
}
"""Form of an operator -> what it is."""


def _op(
    name: str, form: str, width: int = 0, *, sizes: Mapping[str, float] | None = None, **more: int
) -> LayerOperator:  # fmt: skip
    further = {key: bool(value) if key in ("bias", "kept") else value for key, value in more.items()}
    return LayerOperator(name=name, form=form, width=width, sizes=tuple((sizes or {}).items()), **further)  # type: ignore[arg-type]


def _convolution(name: str, channels: int, kernel: int, bias: bool) -> LayerOperator:
    return _op(name, "convolution", channels, parameters=channels * (kernel + bias), sizes={"kernel": kernel})


def _in_block(name: str, inner: Iterable[LayerOperator], norm: int) -> Operators:
    """Operators between a norm of the stream (``norm`` parameters; 0: none) and the sum with it."""
    before = (_op(f"{name}_input_norm", "norm", parameters=norm),) if norm else ()
    return (*before, *inner, _op(f"{name}_residual", "residual"))


def mamba1(
    hidden: int, *, channels: int = 0, state: int = 16, kernel: int = 4, rank: int = 0, bias: bool = False,
    conv_bias: bool = True, norms: bool = False, norm: int = -1,
) -> Operators:  # fmt: skip
    """Mamba (arXiv 2312.00752, section 3.4): products in, convolution, selective scan, product out.

    Args:
        hidden: width of the stream.
        channels: inner width; 0: twice the hidden width.
        state: states of a channel.
        kernel: taps of the convolution.
        rank: of the step size; 0: a sixteenth of the hidden width, rounded up.
        bias: on the products in and out.
        conv_bias: on the convolution.
        norms: RMS norms with weights on step size, input and output matrices (Jamba).
        norm: parameters of the norm before it; -1: one per column, 0: no norm.
    """
    channels, rank = channels or 2 * hidden, rank or math.ceil(hidden / 16)
    narrow = rank + 2 * state
    inner_norms = (_op("ssm_norms", "inner_norm", narrow, parameters=narrow, sizes={"whole": 1}),) if norms else ()
    return _in_block("mamba", (
        _op("mamba_in", "into", 2 * channels, bias=bias),
        _convolution("mamba_conv", channels, kernel, conv_bias),
        _op("mamba_x", "narrow", narrow, depth=channels),
        *inner_norms,
        _op("mamba_dt", "up", channels, depth=rank, bias=True),
        _op("mamba_scan", "selective_scan", channels, parameters=channels * (state + 1), sizes={"state": state}),
        _op("mamba_gate", "gate", channels),
        _op("mamba_out", "out", hidden, depth=channels, bias=bias),
    ), hidden if norm < 0 else norm)  # fmt: skip


def mamba2(
    hidden: int, *, heads: int, head_dim: int = 64, state: int = 128, groups: int = 1, kernel: int = 4,
    chunk: int = 256, bias: bool = False, conv_bias: bool = True, gated_norm: bool = True, norm: int = -1,
    residual: bool = True,
) -> Operators:  # fmt: skip
    """Mamba-2 (arXiv 2405.21060, section 7): one product in, convolution, state-space duality, gated norm, product out.

    Args:
        hidden: width of the stream.
        heads: of the state-space model.
        head_dim: width of a head.
        state: states of a column of a head.
        groups: of heads that share input and output matrices.
        kernel: taps of the convolution.
        chunk: tokens of a chunk.
        bias: on the products in and out.
        conv_bias: on the convolution.
        gated_norm: whether the gated output is normed.
        norm: parameters of the norm before it; -1: one per column, 0: no norm.
        residual: whether its output is added to the stream by itself.
    """
    inner, mixed = heads * head_dim, heads * head_dim + 2 * groups * state
    after = _op("ssm_norm", "inner_norm", inner, parameters=inner)
    found = _in_block("mamba", (
        _op("mamba_in", "into", inner + mixed + heads, bias=bias),
        _convolution("mamba_conv", mixed, kernel, conv_bias),
        _op("mamba_ssd", "ssd", inner, parameters=3 * heads, sizes={
            "heads": heads, "head_dim": head_dim, "state": state, "groups": groups, "chunk": chunk}),
        _op("mamba_gate", "gate", inner),
        *((after,) if gated_norm else ()),
        _op("mamba_out", "out", hidden, depth=inner, bias=bias),
    ), hidden if norm < 0 else norm)  # fmt: skip
    return found if residual else found[:-1]


def gated_delta(
    hidden: int, *, key_heads: int, value_heads: int, key_dim: int = 128, value_dim: int = 128, kernel: int = 4,
    chunk: int = 64, gated: bool = True, decay: bool = True,
) -> Operators:  # fmt: skip
    """Gated DeltaNet (arXiv 2412.06464) as Qwen3-Next has it; without gate and decay DeltaNet (arXiv 2406.06484).

    Args:
        hidden: width of the stream.
        key_heads: heads of queries and keys.
        value_heads: heads of values, a multiple of those of keys.
        key_dim: width of a head of keys.
        value_dim: width of a head of values.
        kernel: taps of the convolution on queries, keys and values.
        chunk: tokens of a chunk.
        gated: whether a further projection gates the output.
        decay: whether states decay.
    """
    keys, values = key_heads * key_dim, value_heads * value_dim
    mixed = 2 * keys + values
    into = mixed + values * gated + value_heads * (1 + decay)
    sizes = {"heads": value_heads, "key_dim": key_dim, "value_dim": value_dim, "chunk": chunk}
    gate = (_op("delta_gate", "gate", values),) if gated else ()
    return _in_block("delta", (
        _op("delta_in", "into", into),
        _convolution("delta_conv", mixed, kernel, False),
        _op("delta_rule", "delta_rule", values, parameters=2 * value_heads * decay, sizes=sizes),
        _op("delta_norm", "inner_norm", values, parameters=value_dim, sizes={"rows": value_heads}),
        *gate,
        _op("delta_out", "out", hidden, depth=values),
    ), hidden)  # fmt: skip


def kimi_delta(
    hidden: int, *, heads: int, head_dim: int = 128, kernel: int = 4, chunk: int = 64, rank: int = 0
) -> Operators:
    """Kimi delta attention (arXiv 2510.26692, section 3): a delta rule with a decay of each column of the keys.

    Args:
        hidden: width of the stream.
        heads: of queries, keys and values.
        head_dim: width of a head.
        kernel: taps of the convolution.
        chunk: tokens of a chunk.
        rank: of decay and output gate; 0: the width of a head.
    """
    inner, rank = heads * head_dim, rank or head_dim
    sizes = {"heads": heads, "key_dim": head_dim, "value_dim": head_dim, "chunk": chunk}
    return _in_block("delta", (
        _op("delta_in", "into", 3 * inner + heads),
        _convolution("delta_conv", 3 * inner, kernel, False),
        _op("decay_down", "whole", rank, kept=False),
        _op("decay_up", "up", inner, depth=rank),
        _op("delta_rule", "delta_rule", inner, parameters=inner + heads, sizes=sizes),
        _op("gate_down", "whole", rank, kept=False),
        _op("gate_up", "up", inner, depth=rank),
        _op("delta_norm", "inner_norm", inner, parameters=head_dim, sizes={"rows": heads}),
        _op("delta_gate", "gate", inner),
        _op("delta_out", "out", hidden, depth=inner),
    ), hidden)  # fmt: skip


def gated_linear(
    hidden: int, *, heads: int, key_dim: int = 0, value_dim: int = 0, rank: int = 16, chunk: int = 64
) -> Operators:
    """Gated linear attention (arXiv 2312.06635, section 4.4): decay of rank ``rank``, output norm and gate.

    Args:
        hidden: width of the stream.
        heads: of queries, keys and values.
        key_dim: width of a head of keys; 0: half of the hidden width over the heads.
        value_dim: width of a head of values; 0: the hidden width over the heads.
        rank: of the decay.
        chunk: tokens of a chunk.
    """
    key_dim, value_dim = key_dim or hidden // heads // 2, value_dim or hidden // heads
    keys, values = heads * key_dim, heads * value_dim
    sizes = {"heads": heads, "key_dim": key_dim, "value_dim": value_dim, "chunk": chunk}
    return _in_block("linear", (
        _op("linear_in", "into", 2 * keys + 2 * values),
        _op("decay_down", "whole", rank, kept=False),
        _op("decay_up", "up", keys, depth=rank, bias=True),
        _op("linear_attention", "linear_attention", values, sizes=sizes),
        _op("linear_norm", "inner_norm", values, parameters=value_dim, sizes={"rows": heads}),
        _op("linear_gate", "gate", values),
        _op("linear_out", "out", hidden, depth=values),
    ), hidden)  # fmt: skip


def lightning(hidden: int, *, heads: int, head_dim: int, chunk: int = 256) -> Operators:
    """Lightning attention (arXiv 2501.08313, section 2.2): linear attention of fixed decay, an output norm and gate.

    Args:
        hidden: width of the stream.
        heads: of queries, keys and values.
        head_dim: width of a head.
        chunk: tokens of a block.
    """
    inner = heads * head_dim
    sizes = {"heads": heads, "key_dim": head_dim, "value_dim": head_dim, "chunk": chunk}
    return _in_block("linear", (
        _op("linear_in", "into", 4 * inner),
        _op("linear_attention", "linear_attention", inner, sizes=sizes),
        _op("linear_norm", "inner_norm", inner, parameters=inner),
        _op("linear_gate", "gate", inner),
        _op("linear_out", "out", hidden, depth=inner),
    ), hidden)  # fmt: skip


def recurrent(hidden: int, *, width: int = 0, blocks: int, kernel: int = 4) -> Operators:
    """Real-gated linear recurrent unit of Griffin (arXiv 2402.19427, section 2.4).

    Args:
        hidden: width of the stream.
        width: of the recurrence; 0: the hidden width.
        blocks: of the block-diagonal matrices of its two gates.
        kernel: taps of the convolution.
    """
    width = width or hidden
    gates = 2 * (width * width // blocks + width)
    return _in_block("recurrent", (
        _op("recurrent_in", "into", 2 * width, bias=True),
        _convolution("recurrent_conv", width, kernel, True),
        _op("recurrent_gates", "blocks", 2 * width, parameters=gates, depth=width, sizes={"blocks": blocks}),
        _op("recurrence", "linear_recurrence", width, parameters=width),
        _op("recurrent_gate", "gate", width),
        _op("recurrent_out", "out", hidden, depth=width, bias=True),
    ), hidden)  # fmt: skip


def indexer(hidden: int, *, heads: int, head_dim: int = 128, rank: int, top_k: int) -> Operators:
    """Indexer of DeepSeek sparse attention (DeepSeek-V3.2, arXiv 2512.02556, section 2.1): scores all earlier keys.

    The attention of the layer itself has ``window`` = ``top_k``: as many keys as are chosen.

    Args:
        hidden: width of the stream.
        heads: of the indexer.
        head_dim: width of a head.
        rank: of the compressed queries, from which those of the indexer are made.
        top_k: keys that are chosen for a query.
    """
    sizes = {"heads": heads, "head_dim": head_dim, "top_k": top_k}
    return (
        _op("index_keys", "whole", head_dim, kept=False),
        _op("index_norm", "inner_norm", head_dim, parameters=2 * head_dim, sizes={"whole": 1}),
        _op("index_weights", "whole", heads, kept=False),
        _op("index_queries", "whole", heads * head_dim, depth=rank, kept=False),
        _op("index_scores", "index_scores", sizes=sizes),
    )


def cross_attention(
    spec: ModelSpec, context: int, width: int = 0, *, bias: bool = False, key_bias: bool = True, norm: int = -1,
    extra: int = 0,
) -> Operators:  # fmt: skip
    """Attention of a layer's tokens to ``context`` tokens of another stack that are ``width`` wide.

    Args:
        spec: dimensions of the layer: heads, key-value heads, head width.
        context: tokens per sample of the other stack; 0: as many as the sequence has.
        width: of them; 0: the hidden width.
        bias: on queries, keys, values and output.
        key_bias: whether the keys have one too.
        norm: parameters of the norm before it; -1: those of the model's norms.
        extra: further parameters: norms of queries and keys, gates.
    """
    queries, keys = spec.query_width, spec.kv_width
    lacking = keys if bias and not key_bias else 0
    return _in_block("cross", (
        _op("cross_q", "into", queries, bias=bias),
        _op("cross_kv", "into", 2 * keys, depth=width or spec.hidden, bias=bias, tokens=context, parameters=-lacking),
        _op("cross_attention", "cross", parameters=extra, sizes={"context": context}),
        _op("cross_out", "out", spec.hidden, depth=queries, bias=bias),
    ), spec.norm_width if norm < 0 else norm)  # fmt: skip


def stated(
    hidden: int, *, parameters: int = 0, flops_per_token: float = 0.0, bytes_per_token: float = 0.0,
    kept_bytes_per_token: float = 0.0, cut: bool = True,
) -> Operators:  # fmt: skip
    """A layer of which only its work is known, as the model file states it.

    Args:
        hidden: width of the stream.
        parameters: of a layer.
        flops_per_token: of its products forward.
        bytes_per_token: that it moves forward.
        kept_bytes_per_token: that it keeps for the backward pass.
        cut: whether tensor ranks share all of this; false: each has it whole.
    """
    sizes = {"flops": flops_per_token, "moved": bytes_per_token, "kept": kept_bytes_per_token, "cut": float(cut)}
    return (_op("stated", "stated", hidden, parameters=parameters, sizes=sizes),)


MIXERS: Final[Mapping[str, Callable[..., Operators]]] = {
    "mamba": mamba1,
    "mamba2": mamba2,
    "delta_net": gated_delta,
    "kimi_delta": kimi_delta,
    "gated_linear": gated_linear,
    "lightning": lightning,
    "recurrent": recurrent,
    "indexer": indexer,
    "stated": stated,
}
"""Name in a model file -> what the mixer is made of. A further kind of layer is a further row."""


def with_kinds(spec: ModelSpec, kinds: Iterable[LayerKind], pattern: Iterable[str]) -> ModelSpec:
    """A specification with layers of these kinds in this order; kinds without a layer are left out.

    >>> from steptime.model.known import load_catalogue_model
    >>> gpt = load_catalogue_model("gpt2")
    >>> with_kinds(gpt, [LayerKind(name="a", block=gpt, mlp=False)], ["a"] * 3).layers
    3
    """
    from dataclasses import replace

    order = tuple(pattern)
    held = [
        replace(kind, block=replace(kind.block, **_of_block(kind.block, order.count(kind.name))))
        for kind in kinds
        if kind.name in order
    ]
    return replace(spec, layers=len(order), kinds=tuple(held), pattern=order)


def _of_block(block: ModelSpec, layers: int) -> dict[str, object]:
    """What a specification of equal blocks has where ``layers`` of them are one kind of a model."""
    from dataclasses import replace

    experts = None if block.experts is None else replace(block.experts, moe_layers=layers)
    windowed = layers if block.windowed_layers else 0
    return {"layers": layers, "experts": experts, "windowed_layers": windowed, "vocab": 0, "kinds": (), "pattern": (),
            "stem": (), "mtp_depth": 0}  # fmt: skip
