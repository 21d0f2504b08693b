"""What is trained: the shape of a model, whatever file it came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Norm = Literal["layernorm", "rmsnorm"]
MASKED_SHARE = 80 / 512
"""Predictions per token of BERT pre-training (Devlin et al., arXiv 1810.04805: at most 80 per sequence of 512)."""
Position = Literal["rope", "learned", "alibi", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    q_lora_rank: int | None
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
    """One learnt or balancing bias per expert beside the router's weights."""
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
    channels: int
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
class ModelSpec:
    """A decoder-only or ViT transformer of equal blocks.

    A block is: norm, attention (qkv projection, scores, output projection), norm, MLP. Widths are
    elements, ``layers`` blocks.
    """

    name: str
    family: str
    source: str
    """Where the dimensions come from."""
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
    qk_norm: Literal["none", "head", "full"] = "none"
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
    out_bias: bool = False
    mlp_bias: bool = False
    norm_bias: bool = False
    final_norm: bool = True
    head_bias: bool = False
    """Bias on the language-model head (GPT-J)."""
    attention_sinks: bool = False
    """One learnt score per head beside those of the keys (gpt-oss)."""
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

    @property
    def predicted_share(self) -> float:
        """Share of the tokens whose logits are computed: all, or of a masked language model those that are masked."""
        return 1.0 if self.causal else MASKED_SHARE

    @property
    def mlp_inputs(self) -> int:
        """Products into an MLP, which run as one: of a gated one 2 (gate and up), else 1."""
        return 2 if self.gated_mlp else 1

    @property
    def query_width(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key heads together (equal to that of all value heads)."""
        return self.kv_heads * self.head_dim
