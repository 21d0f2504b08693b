"""Rows of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) under tensor parallelism.

The down projections work on the sequence shard with whole weights on every rank; the narrow latents, not the hidden
state, are gathered for the up projections, whose columns (heads) are cut. Keys and values are expanded for training.
"""

from __future__ import annotations

from steptime.model.spec import LatentAttention
from steptime.num import Num
from steptime.plan.rows import Row, bias, matmul, norm, rope
from steptime.plan.shapes import Shape

BLOCK = "attention"


def latent_rows(s: Shape, latent: LatentAttention, direct_query: Row) -> list[Row]:
    """From the normed input to rotated queries and keys; ``direct_query`` is used where queries have no latent."""
    head, rank = latent.qk_nope_head_dim + latent.qk_rope_head_dim, latent.q_lora_rank
    rows: list[Row] = [direct_query]
    if rank is not None:
        rows = [*_down(s, "q_down", rank, kept=1), _latent_norm(s, "q_norm", rank),
                _up(s, "q_up", rank, s.heads * head, rank)]  # fmt: skip
    wide = latent.kv_lora_rank + latent.qk_rope_head_dim
    rows += [*_down(s, "kv_down", wide, kept=0), _latent_norm(s, "kv_norm", latent.kv_lora_rank)]
    columns = s.heads * (latent.qk_nope_head_dim + latent.v_head_dim)
    rows.append(_up(s, "kv_up", latent.kv_lora_rank, columns, wide))
    turned = s.tokens * s.heads * (latent.qk_rope_head_dim + head)
    return [*rows, rope(BLOCK, turned, element_bytes=s.element_bytes, by_complex=False)]  # most of it is not rotated


def _down(s: Shape, name: str, width: Num, kept: int) -> list[Row]:
    """Whole weights on the sequence shard; both down projections keep the same input, counted once."""
    row = matmul(name, BLOCK, s.sharded_tokens, width, s.hidden, element_bytes=s.element_bytes,
                 kept_elements=kept * s.sharded_tokens * s.hidden, replicated=s.hidden * width)  # fmt: skip
    rows = [row]
    if s.model.qkv_bias:
        rows.append(bias(f"{name}_bias", BLOCK, s.sharded_tokens, width, element_bytes=s.element_bytes,
                         replicated=True))  # fmt: skip
    return rows


def _latent_norm(s: Shape, name: str, width: Num) -> Row:
    return norm(name, BLOCK, s.sharded_tokens, width, element_bytes=s.element_bytes, kind="rms_norm", weights=width,
                replicated=width)  # fmt: skip


def _up(s: Shape, name: str, rank: Num, columns: Num, gathered: Num) -> Row:
    """Columns cut over ``tp``; ``gathered`` is the width that is gathered: keys carry the rotary part along."""
    size = s.tokens * gathered * s.element_bytes
    return matmul(
        name, BLOCK, s.tokens, columns, rank, element_bytes=s.element_bytes, kept_elements=s.sharded_tokens * rank,
        forward=s.gather(size), backward=s.gather_again(size),
    )  # fmt: skip
