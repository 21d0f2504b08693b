"""Shape of a model from any kind of file, and the rules between its fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Final, Literal

from steptime.errors import FieldError

Norm = Literal["layernorm", "rmsnorm"]
MASKED_SHARE = 80 / 512
"""Predictions per token of BERT pre-training (Devlin et al., arXiv 1810.04805: at most 80 per sequence of 512)."""
Position = Literal["rope", "learned", "alibi", "none"]
QkNorm = Literal["none", "head", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    q_lora_rank: int | None = None
    """Rank of the query compression; None: queries are projected directly."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Mixture of experts in place of the MLP of some layers."""

    experts: int
    experts_per_token: int
    expert_ffn_hidden: int
    shared_ffn_hidden: int = 0
    """Width of all shared experts together; 0: none."""
    moe_layers: int
    """Layers that have experts; the others keep the dense MLP."""
    router_bias: bool = False
    """One learnt or balancing bias per expert in addition to the router's weights."""
    shared_gate: bool = False
    """A hidden -> 1 gate on the shared expert (Qwen2-MoE)."""
    expert_bias: bool = False
    """Biases on the matrices of the routed experts (gpt-oss)."""
    groups: int = 1
    """Groups of experts, of which a token may choose from some alone (DeepSeek); 1: from all."""
    groups_per_token: int = 1
    """Groups that a token chooses from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vision:
    """Patch embedding of a ViT."""

    image_size: int
    patch_size: int
    channels: int = 3
    class_token: bool = True
    patch_bias: bool = True
    """Bias on the patch projection (CLIP has none)."""
    mask_token: bool = False
    """A learnt token that stands for patches which are hidden (DINOv2)."""
    head_outputs: int = 0
    """Outputs of the linear head on the class token (classes, or the width of a projection); 0: no head."""
    head_bias: bool = True

    @property
    def tokens(self) -> int:
        """Sequence length that one image makes."""
        return (self.image_size // self.patch_size) ** 2 + int(self.class_token)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOperator:
    """An operator that a kind of layer has in addition to attention and MLP, whole: before ranks cut it.

    ``form`` is one of :data:`steptime.model.kinds.FORMS`, which says what the other fields mean to it.
    """

    name: str
    form: str
    width: int = 0
    """Columns of the result on all ranks."""
    depth: int = 0
    """Columns of the input; 0: the hidden width."""
    bias: bool = False
    parameters: int = 0
    """Parameters other than a matrix of depth x width and its bias."""
    tokens: int = 0
    """Rows per sample; 0: the tokens of the layer."""
    shared: bool = False
    """True if layers of the kind share its weights (:attr:`LayerKind.distinct`)."""
    kept: bool = True
    """True if it keeps its input for the backward pass; False if an operator before it keeps the same."""
    sizes: tuple[tuple[str, float], ...] = ()
    """Arguments of the form's formulas by name."""

    @property
    def size(self) -> dict[str, float]:
        """The arguments as a table."""
        return dict(self.sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """Layers of one kind, which are costed once: attention, further operators, an MLP or experts; each may be absent.

    Their order in the model is that of :attr:`ModelSpec.pattern`.
    """

    name: str
    block: ModelSpec
    """Dimensions of its attention and its MLP, as if a model had these ``layers`` alone."""
    attention: bool = True
    mlp: bool = True
    operators: tuple[LayerOperator, ...] = ()
    """Operators between attention and MLP, with their own norms and residual additions."""
    tokens: int = 0
    """Tokens per sample that the kind works on; 0: the tokens of the sequence."""
    distinct: int = 0
    """Number of sets of weights of attention, MLP and shared operators in all its layers; 0: each has its own."""

    @property
    def layers(self) -> int:
        """Layers of the kind."""
        return self.block.layers

    @property
    def norms(self) -> int:
        """Norms of the residual stream around attention and MLP."""
        own = self.block.norms_per_layer
        return own if self.attention and self.mlp else (own + 1) // 2 if self.attention or self.mlp else 0

    @property
    def own_share(self) -> float:
        """Sets of shared weights per layer."""
        return 1.0 if not self.distinct else self.distinct / self.layers


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A transformer of equal blocks, or where ``kinds`` are given a model of layers of several kinds.

    A block is: norm, attention (qkv projection, scores, output projection), norm, MLP. Widths are
    elements, ``layers`` blocks. With kinds the dimensions here are those of the residual stream, the embedding and the
    head; what attention and MLP have is said by each kind.
    """

    name: str
    family: str
    source: str
    """Source of the dimensions."""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    """Width of one query head; of latent attention the sum of its two parts."""
    ffn_hidden: int
    gated_mlp: bool
    """Three MLP matrices (SwiGLU, GeGLU) instead of two."""
    activation: str
    norm: Norm
    norms_per_layer: int = 2
    qk_norm: QkNorm = "none"
    """Norm on queries and keys: per head (weights of width head_dim) or over the whole projection."""
    causal: bool
    seq_len: int
    """Sequence length to train with unless the user says otherwise."""
    vocab: int
    """Rows of the embedding; 0: the model has no embedding and no head (only its blocks are known)."""
    tied_embeddings: bool = False
    position: Position = "rope"
    max_positions: int = 0
    """Rows of the learned position table; 0 where positions are computed."""
    qkv_bias: bool = False
    key_bias: bool = True
    """False: with ``qkv_bias``, only queries and values have a bias (Whisper)."""
    out_bias: bool = False
    mlp_bias: bool = False
    norm_bias: bool = False
    final_norm: bool = True
    head_bias: bool = False
    """Bias on the language-model head (GPT-J)."""
    attention_sinks: bool = False
    """One learnt score per head in addition to the scores of the keys (gpt-oss)."""
    parallel_block: bool = False
    """Attention and MLP read the same input and their outputs are added (GPT-J, GPT-NeoX, Falcon)."""
    embedding_norm: bool = False
    layer_scale: bool = False
    """A learnt factor per channel on the outputs of attention and MLP (CaiT, arXiv 2103.17239; DINOv2)."""
    dropout: bool = False
    """Dropout on attention probabilities and on the outputs of attention and MLP."""
    mlp_dropout: bool = False
    """One more dropout inside the MLP, after the activation."""
    window: int | None = None
    """Sliding-window width of the layers that have one."""
    windowed_layers: int = 0
    weight_bytes: float | None = None
    """Bytes per weight element where the checkpoint is quantised; None: that of the dtype. No estimate of training
    depends on it."""
    latent: LatentAttention | None = None
    experts: Experts | None = None
    mtp_depth: int = 0
    """Further tokens that each position predicts, each by a layer of its own (arXiv 2412.19437, section 2.2)."""
    vision: Vision | None = None
    attention_gate: bool = False
    """A sigmoid of a further projection, as wide as the queries, multiplies the output of attention (Qwen3-Next)."""
    norm_weights: bool = True
    """False: norms of the residual stream have no weights."""
    kinds: tuple[LayerKind, ...] = ()
    """Kinds of layers, where not all are equal blocks of these dimensions."""
    pattern: tuple[str, ...] = ()
    """Kind of each layer, in order."""
    stem: tuple[LayerOperator, ...] = ()
    """Operators once per sample with the embedding: patches, convolutions, norms and tables of towers, projectors."""

    @property
    def norm_width(self) -> int:
        """Parameters of a norm of the residual stream."""
        return self.hidden * (1 + self.norm_bias) * self.norm_weights

    @property
    def predicted_share(self) -> float:
        """Share of the tokens whose logits are computed: all, or the masked tokens of a masked language model."""
        return 1.0 if self.causal else MASKED_SHARE

    @property
    def mlp_inputs(self) -> int:
        """Number of products into an MLP, which run as one: 2 (gate and up) if it is gated, else 1."""
        return 2 if self.gated_mlp else 1

    @property
    def query_width(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key heads together (equal to that of all value heads)."""
        return self.kv_heads * self.head_dim


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
    """Check every rule between the fields of a specification, and return it.

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
    if spec.kinds:
        yield from _kind_contradictions(spec)


def _kind_contradictions(spec: ModelSpec) -> Iterator[tuple[str, str, str]]:
    names = [kind.name for kind in spec.kinds]
    if len(spec.pattern) != spec.layers:
        yield "pattern", f"names {len(spec.pattern)} of {spec.layers} layers", "name as many, or a part that repeats"
    for name in dict.fromkeys(spec.pattern):
        if names.count(name) != 1:
            yield "pattern", f"{name!r} names {names.count(name)} kinds", f"kinds: {', '.join(names)}"
    for kind in spec.kinds:
        count = spec.pattern.count(kind.name)
        if kind.layers != count:
            yield f"kinds.{kind.name}", f"has {kind.layers} layers, and the pattern names {count}", "name it there"
    if spec.mtp_depth:
        yield "mtp_depth", f"is {spec.mtp_depth}, with kinds of layers", "further tokens need equal blocks: 0"


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
            "experts.groups_per_token",
            f"is {experts.groups_per_token}, with {experts.groups} groups",
            f"at most {experts.groups}",
        )
    if experts.shared_gate and not experts.shared_ffn_hidden:
        yield "experts.shared_gate", "is true without a shared expert", "give shared_ffn_hidden"


#: Element type -> bytes of one element. Complex numbers are pairs; ``bool`` takes a byte, as in PyTorch.
ELEMENT_BYTES: Final = {
    "fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "fp8_e5m2": 1, "complex64": 8, "complex128": 16,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8, "bool": 1,
}  # fmt: skip

FLOATS: Final = frozenset({"fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp8_e5m2"})
"""Element types that a gradient can have."""
