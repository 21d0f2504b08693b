"""Layers with more than attention and MLP: the operators of each mixer, before ranks cut them.

A mixer is a record of its own dimensions that makes operators for a layer; its row in :data:`MIXERS` is the name under
which a model file asks for it. A form in :data:`FORMS` is what an operator does; its rows and its tensor-parallel
cut are in :mod:`steptime.plan.declared`, its formulas in :mod:`steptime.cost.recurrence`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
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
    "opaque": "work that the model file gives",
}
"""Form of an operator -> description."""


NORMED: Final = {"factors": 1}
"""Size of a gate that is one kernel with the norm before it, which keeps the other factor."""


def _op(
    name: str, form: str, width: int = 0, *, sizes: Mapping[str, float] | None = None, **more: int
) -> LayerOperator:
    further = {key: bool(value) if key in ("bias", "kept") else value for key, value in more.items()}
    return LayerOperator(name=name, form=form, width=width, sizes=tuple((sizes or {}).items()), **further)  # type: ignore[arg-type]


def _convolution(
    name: str, channels: int, kernel: int, bias: bool, shared: Mapping[str, float] | None = None
) -> LayerOperator:
    sizes = {"kernel": kernel, **(shared or {})}
    return _op(name, "convolution", channels, parameters=channels * (kernel + bias), sizes=sizes)


def _in_block(name: str, inner: Iterable[LayerOperator], norm: int) -> Operators:
    """Operators between a norm of the stream (``norm`` parameters; 0: none) and the sum with it."""
    before = (_op(f"{name}_input_norm", "norm", parameters=norm),) if norm else ()
    return (*before, *inner, _op(f"{name}_residual", "residual"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixer(ABC):
    """Part of a layer in addition to attention and MLP, or in their place; its fields are those of a model file."""

    @abstractmethod
    def operators(self, block: ModelSpec) -> Operators:
        """Its operators in a layer of these dimensions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba(Mixer):
    """Mamba (arXiv 2312.00752, section 3.4): products in, convolution, selective scan, product out.

    One kernel does all but the product in; backward it makes the convolution, the step size and the gated output again.
    With ``norms`` each operator is a kernel of its own.
    """

    channels: int = 0
    """Inner width; 0: twice the hidden width."""
    state: int = 16
    """States of a channel."""
    kernel: int = 4
    """Taps of the convolution."""
    rank: int = 0
    """Rank of the step size; 0: a sixteenth of the hidden width, rounded up."""
    bias: bool = False
    """Bias on the products in and out."""
    conv_bias: bool = True
    """Bias on the convolution."""
    norms: bool = False
    """RMS norms with weights on step size, input and output matrices (Jamba)."""

    def operators(self, block: ModelSpec) -> Operators:
        """Its operators in a layer of these dimensions."""
        hidden = block.hidden
        channels, rank = self.channels or 2 * hidden, self.rank or math.ceil(hidden / 16)
        narrow = rank + 2 * self.state
        norms = _op("ssm_norms", "inner_norm", narrow, parameters=narrow, sizes={"whole": 1})
        scanned = channels * (self.state + 1)
        inner = (
            _op("mamba_in", "into", 2 * channels, bias=self.bias),
            _convolution("mamba_conv", channels, self.kernel, self.conv_bias),
            _op("mamba_x", "narrow", narrow, depth=channels, kept=self.norms),
            *((norms,) if self.norms else ()),
            _op("mamba_dt", "up", channels, depth=rank, bias=True),
            _op(
                "mamba_scan",
                "selective_scan",
                channels,
                parameters=scanned,
                sizes={"state": self.state},
                kept=self.norms,
            ),
            _op("mamba_gate", "gate", channels),
            _op("mamba_out", "out", hidden, depth=channels, bias=self.bias, kept=self.norms),
        )
        return _in_block("mamba", inner, block.norm_width)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2(Mixer):
    """Mamba-2 (arXiv 2405.21060, section 7): product in, convolution, state-space duality, gated norm, product out.

    Convolution, duality and gated norm are one kernel; it keeps the result of the product in and the output before the
    gate (mamba_ssm 2.2, ``MambaSplitConv1dScanCombinedFn``).
    """

    heads: int
    """Heads of the state-space model."""
    head_dim: int = 64
    """Width of a head."""
    state: int = 128
    """States of a column of a head."""
    groups: int = 1
    """Groups of heads that share input and output matrices."""
    kernel: int = 4
    """Taps of the convolution."""
    chunk: int = 256
    """Tokens of a chunk."""
    bias: bool = False
    """Bias on the products in and out."""
    conv_bias: bool = True
    """Bias on the convolution."""
    gated_norm: bool = True
    """True if the gated output is normed."""
    alone: bool = True
    """True if it has its own norm and residual addition; False: it shares those of attention (Falcon-H1)."""

    def operators(self, block: ModelSpec) -> Operators:
        """Its operators in a layer of these dimensions."""
        inner = self.heads * self.head_dim
        mixed = inner + 2 * self.groups * self.state
        sizes = {
            "heads": self.heads,
            "head_dim": self.head_dim,
            "state": self.state,
            "groups": self.groups,
            "chunk": self.chunk,
        }
        shared = {"groups": self.groups, "group_width": 2 * self.state}
        after = _op("ssm_norm", "inner_norm", inner, parameters=inner, kept=False)
        found = (
            _op("mamba_in", "into", inner + mixed + self.heads, bias=self.bias, sizes=shared),
            _convolution("mamba_conv", mixed, self.kernel, self.conv_bias, shared),
            _op("mamba_ssd", "ssd", inner, parameters=3 * self.heads, sizes=sizes),
            _op("mamba_gate", "gate", inner),
            *((after,) if self.gated_norm else ()),
            _op("mamba_out", "out", block.hidden, depth=inner, bias=self.bias),
        )
        return _in_block("mamba", found, block.norm_width) if self.alone else found


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet(Mixer):
    """Gated DeltaNet (arXiv 2412.06464) as Qwen3-Next has it; without gate and decay DeltaNet (arXiv 2406.06484)."""

    key_heads: int
    """Heads of queries and keys."""
    value_heads: int
    """Heads of values, a multiple of those of keys."""
    key_dim: int = 128
    """Width of a head of keys."""
    value_dim: int = 128
    """Width of a head of values."""
    kernel: int = 4
    """Taps of the convolution on queries, keys and values."""
    chunk: int = 64
    """Tokens of a chunk."""
    gated: bool = True
    """True if a further projection gates the output."""
    decay: bool = True
    """True if states decay."""

    def operators(self, block: ModelSpec) -> Operators:
        """Its operators in a layer of these dimensions."""
        values = self.value_heads * self.value_dim
        mixed = 2 * self.key_heads * self.key_dim + values
        into = mixed + values * self.gated + self.value_heads * (1 + self.decay)
        sizes = {"heads": self.value_heads, "key_dim": self.key_dim, "value_dim": self.value_dim, "chunk": self.chunk}
        inner = (
            _op("delta_in", "into", into),
            _convolution("delta_conv", mixed, self.kernel, False),
            _op("delta_rule", "delta_rule", values, parameters=2 * self.value_heads * self.decay, sizes=sizes),
            _op("delta_norm", "inner_norm", values, parameters=self.value_dim, sizes={"rows": self.value_heads}),
            *((_op("delta_gate", "gate", values, sizes=NORMED),) if self.gated else ()),
            _op("delta_out", "out", block.hidden, depth=values),
        )
        return _in_block("delta", inner, block.norm_width)


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDelta(Mixer):
    """Kimi delta attention (arXiv 2510.26692, section 3): a delta rule with a decay of each column of the keys."""

    heads: int
    """Of queries, keys and values."""
    head_dim: int = 128
    """Width of a head."""
    kernel: int = 4
    """Taps of the convolution."""
    chunk: int = 64
    """Tokens of a chunk."""
    rank: int = 0
    """Rank of decay and output gate; 0: the width of a head."""

    def operators(self, block: ModelSpec) -> Operators:
        """Its operators in a layer of these dimensions."""
        heads, width = self.heads, self.head_dim
        inner, rank = heads * width, self.rank or width
        sizes = {"heads": heads, "key_dim": width, "value_dim": width, "chunk": self.chunk}
        found = (
            _op("delta_in", "into", 3 * inner + heads),
            _convolution("delta_conv", 3 * inner, self.kernel, False),
            _op("decay_down", "whole", rank, kept=False),
            _op("decay_up", "up", inner, depth=rank),
            _op("delta_rule", "delta_rule", inner, parameters=inner + heads, sizes=sizes),
            _op("gate_down", "whole", rank, kept=False),
            _op("gate_up", "up", inner, depth=rank),
            _op("delta_norm", "inner_norm", inner, parameters=width, sizes={"rows": heads}),
            _op("delta_gate", "gate", inner, sizes=NORMED),
            _op("delta_out", "out", block.hidden, depth=inner),
        )
        return _in_block("delta", found, block.norm_width)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedLinear(Mixer):
    """Gated linear attention (arXiv 2312.06635, section 4.4): decay of low rank, output norm and gate."""

    heads: int
    """Of queries, keys and values."""
    key_dim: int = 0
    """Width of a head of keys; 0: half of the hidden width over the heads."""
    value_dim: int = 0
    """Width of a head of values; 0: the hidden width over the heads."""
    rank: int = 16
    """Rank of the decay."""
    chunk: int = 64
    """Tokens of a chunk."""

    def operators(self, block: ModelSpec) -> Operators:
        """Its operators in a layer of these dimensions."""
        hidden, heads = block.hidden, self.heads
        key_dim = self.key_dim or max(hidden // heads // 2, 1)
        value_dim = self.value_dim or max(hidden // heads, 1)
        keys, values = heads * key_dim, heads * value_dim
        sizes = {"heads": heads, "key_dim": key_dim, "value_dim": value_dim, "chunk": self.chunk}
        inner = (
            _op("linear_in", "into", 2 * keys + 2 * values),
            _op("decay_down", "whole", self.rank, kept=False),
            _op("decay_up", "up", keys, depth=self.rank, bias=True),
            _op("linear_attention", "linear_attention", values, sizes=sizes),
            _op("linear_norm", "inner_norm", values, parameters=value_dim, sizes={"rows": heads}),
            _op("linear_gate", "gate", values, sizes=NORMED),
            _op("linear_out", "out", hidden, depth=values),
        )
        return _in_block("linear", inner, block.norm_width)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lightning(Mixer):
    """Lightning attention (arXiv 2501.08313, section 2.2): linear attention of fixed decay, an output norm and gate."""

    heads: int
    """Of queries, keys and values."""
    head_dim: int
    """Width of a head."""
    chunk: int = 256
    """Tokens of a block."""

    def operators(self, block: ModelSpec) -> Operators:
        """Its operators in a layer of these dimensions."""
        inner = self.heads * self.head_dim
        sizes = {"heads": self.heads, "key_dim": self.head_dim, "value_dim": self.head_dim, "chunk": self.chunk}
        found = (
            _op("linear_in", "into", 4 * inner),
            _op("linear_attention", "linear_attention", inner, sizes=sizes),
            _op("linear_norm", "inner_norm", inner, parameters=inner),
            _op("linear_gate", "gate", inner, sizes=NORMED),
            _op("linear_out", "out", block.hidden, depth=inner),
        )
        return _in_block("linear", found, block.norm_width)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrent(Mixer):
    """Real-gated linear recurrent unit of Griffin (arXiv 2402.19427, section 2.4)."""

    blocks: int
    """Blocks of the block-diagonal matrices of its two gates."""
    width: int = 0
    """Width of the recurrence; 0: the hidden width."""
    kernel: int = 4
    """Taps of the convolution."""

    def operators(self, block: ModelSpec) -> Operators:
        """Its operators in a layer of these dimensions."""
        width = self.width or block.hidden
        gates = 2 * (width * width // self.blocks + width)
        inner = (
            _op("recurrent_in", "into", 2 * width, bias=True),
            _convolution("recurrent_conv", width, self.kernel, True),
            _op("recurrent_gates", "blocks", 2 * width, parameters=gates, depth=width, sizes={"blocks": self.blocks}),
            _op("recurrence", "linear_recurrence", width, parameters=width),
            _op("recurrent_gate", "gate", width),
            _op("recurrent_out", "out", block.hidden, depth=width, bias=True),
        )
        return _in_block("recurrent", inner, block.norm_width)


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexer(Mixer):
    """Indexer of DeepSeek sparse attention (DeepSeek-V3.2, arXiv 2512.02556, section 2.1): scores all earlier keys.

    The attention of the layer itself has ``window`` = ``top_k``: as many keys as are chosen.
    """

    heads: int
    """Heads of the indexer."""
    rank: int
    """Rank of the compressed queries, from which the indexer makes its own."""
    top_k: int
    """Keys that are chosen for a query."""
    head_dim: int = 128
    """Width of a head."""

    def operators(self, block: ModelSpec) -> Operators:
        """Its operators in a layer of these dimensions."""
        width = self.head_dim
        sizes = {"heads": self.heads, "head_dim": width, "top_k": self.top_k}
        return (
            _op("index_keys", "whole", width, kept=False),
            _op("index_norm", "inner_norm", width, parameters=2 * width, sizes={"whole": 1}),
            _op("index_weights", "whole", self.heads, kept=False),
            _op("index_queries", "whole", self.heads * width, depth=self.rank, kept=False),
            _op("index_scores", "index_scores", sizes=sizes),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cross(Mixer):
    """Attention to the tokens of another stack, with the heads of the layer (:func:`cross_attention`)."""

    context: int = 0
    """Tokens per sample of the other stack; 0: as many as the layer has."""
    width: int = 0
    """Width of these tokens; 0: the hidden width."""
    bias: bool = False
    """Bias on queries, keys, values and output."""

    def operators(self, block: ModelSpec) -> Operators:
        """Its operators in a layer of these dimensions."""
        return cross_attention(block, self.context, self.width, bias=self.bias, key_bias=block.key_bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class Modulation(Mixer):
    """Adaptive norms of DiT (arXiv 2212.09748, section 3.2): scales and shifts of both norms and gates of both sums
    follow from one vector per sample by a product. The norms themselves have no weights: ``norm_weights = false``."""

    parts: int = 6
    """Vectors that the product returns; 0: they are added to a table of 6 (PixArt)."""

    def operators(self, block: ModelSpec) -> Operators:
        """Its operators in a layer of these dimensions."""
        hidden = block.hidden
        product = _op("modulation", "whole", self.parts * hidden, tokens=1, bias=True)
        table = _op("modulation", "table", parameters=6 * hidden)
        passes = ("attention_scale", "attention_gate", "mlp_scale", "mlp_gate")
        return (product if self.parts else table, *(_op(name, "pass", hidden) for name in passes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Opaque(Mixer):
    """A layer of which only parameters, FLOPs and bytes are known, as the model file gives them."""

    parameters: int = 0
    """Parameters of a layer."""
    flops_per_token: float = 0.0
    """FLOPs of its forward products."""
    bytes_per_token: float = 0.0
    """Bytes of its forward memory traffic."""
    kept_bytes_per_token: float = 0.0
    """Bytes kept for the backward pass."""
    cut: bool = True
    """True if tensor ranks divide the layer; False: each has all of it."""

    def operators(self, block: ModelSpec) -> Operators:
        """Its operators in a layer of these dimensions."""
        sizes = {
            "flops": self.flops_per_token,
            "moved": self.bytes_per_token,
            "kept": self.kept_bytes_per_token,
            "cut": float(self.cut),
        }
        return (_op("opaque", "opaque", block.hidden, parameters=self.parameters, sizes=sizes),)


def cross_attention(
    spec: ModelSpec,
    context: int,
    width: int = 0,
    *,
    bias: bool = False,
    key_bias: bool = True,
    norm: int = -1,
    extra: int = 0,
) -> Operators:
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
    return _in_block(
        "cross",
        (
            _op("cross_q", "into", queries, bias=bias),
            _op(
                "cross_kv", "into", 2 * keys, depth=width or spec.hidden, bias=bias, tokens=context, parameters=-lacking
            ),
            _op("cross_attention", "cross", parameters=extra, sizes={"context": context}),
            _op("cross_out", "out", spec.hidden, depth=queries, bias=bias),
        ),
        spec.norm_width if norm < 0 else norm,
    )


MIXERS: Final[Mapping[str, type[Mixer]]] = {
    "mamba": Mamba,
    "mamba2": Mamba2,
    "delta_net": DeltaNet,
    "kimi_delta": KimiDelta,
    "gated_linear": GatedLinear,
    "lightning": Lightning,
    "recurrent": Recurrent,
    "indexer": Indexer,
    "cross": Cross,
    "modulation": Modulation,
    "opaque": Opaque,
}
"""Name in a model file -> mixer. A further kind of layer is a further row."""


def with_kinds(spec: ModelSpec, kinds: Iterable[LayerKind], pattern: Iterable[str]) -> ModelSpec:
    """A specification with layers of these kinds in this order; kinds without a layer are left out.

    >>> from steptime.model.known import load_catalogue_model
    >>> gpt = load_catalogue_model("gpt2")
    >>> with_kinds(gpt, [LayerKind(name="a", block=gpt, mlp=False)], ["a"] * 3).layers
    3
    """
    order = tuple(pattern)
    held = [replace(kind, block=_alone(kind.block, order.count(kind.name))) for kind in kinds if kind.name in order]
    return replace(spec, layers=len(order), kinds=tuple(held), pattern=order)


def _alone(block: ModelSpec, layers: int) -> ModelSpec:
    """Equal blocks as ``layers`` of one kind: where they are not all layers, each has the window and the experts."""
    experts, windowed = block.experts, block.windowed_layers
    if layers != block.layers:
        experts = None if experts is None else replace(experts, moe_layers=layers)
        windowed = layers if windowed else 0
    return replace(
        block,
        layers=layers,
        experts=experts,
        windowed_layers=windowed,
        vocab=0,
        kinds=(),
        pattern=(),
        stem=(),
        mtp_depth=0,
    )
