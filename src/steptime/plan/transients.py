"""What is alive for a moment beside the kept activations (in the backward pass of a layer, and at the loss), and copies
that are kept where operators do what one kernel could.

Each is the largest sum over the moments named below of what is made, less what was kept and is freed by then. Symbols:
$t$ tokens of a rank, $h$ hidden, $f$ and $f_i$ local width of the MLP and of its first product, $g$ = 1 where tensor
ranks gather the sequence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from steptime.model.spec import ModelSpec
from steptime.num import Num, ceil_div, maximum, minimum, where
from steptime.plan.attention import Heads
from steptime.plan.memory_profile import MemoryProfile
from steptime.plan.plans import Plans
from steptime.plan.rows import Row, over
from steptime.plan.shapes import Shape, tensor_shares

LOGIT_BYTES = 4.0
"""Logits are turned into probabilities in fp32."""
MOST_LEADING = 3
NORMS = ("layer_norm", "one_pass_layer_norm", "rms_norm")


def layer_elements(s: Shape) -> Num:
    """Largest temporary in the backward pass of a layer.

    Moments: the activation function ($t f_i$ of gradient, and the residual stream's), the product out of the MLP
    (its gathered gradient, $t f$ of input gradient), the product into the MLP (gathered input and gradient, $2 t h$;
    $t f$ kept are free), gathered keys and values with their gradients, unfused scores (gradients before and after
    the softmax; what the MLP kept is free).
    """
    stream = s.sharded_tokens * s.model.hidden
    most: Num = 2 * s.gathered_kv
    for local in _mlp_widths(s):
        most = maximum(most, stream + _mlp_elements(s, local))
    experts = s.model.experts
    if experts is not None:
        most = maximum(most, stream + s.expert_rows * (s.hidden + s.expert_in))
    if s.job.attention == "unfused":
        most = maximum(most, stream + 2 * Heads(s).rows * s.seq_len - _freed_elements(s))
    return most


def _mlp_widths(s: Shape) -> list[Num]:
    """Local widths of the MLPs of all tokens that layers have: the dense one, and of experts the shared one."""
    experts = s.model.experts
    widths = [s.ffn] if s.dense_share else []
    if experts is not None and experts.shared_ffn_hidden:
        widths.append(ceil_div(experts.shared_ffn_hidden, s.tp))
    return widths


def _inner(s: Shape, local: Num) -> Num:
    """Columns of the first product of an MLP of some local width."""
    return local * s.model.mlp_inputs


def _mlp_elements(s: Shape, local: Num) -> Num:
    """Largest temporary in the backward pass of an MLP, beside the gradient of the residual stream."""
    hidden, gathers = s.model.hidden, where(s.plans.tp > 1, 1.0, 0.0)
    out = s.tokens * (gathers * hidden + local)
    into = s.tokens * ((1.0 + gathers) * hidden - local)
    return maximum(s.tokens * _inner(s, local), maximum(out, into))


def _freed_elements(s: Shape) -> Num:
    """What products out of MLPs and activation functions kept and is free in the backward pass of attention.

    Where layers differ, of the kind that kept least.
    """
    freed: list[Num] = [s.tokens * (s.ffn_in + s.ffn)] if s.dense_share else []
    experts = s.model.experts
    if experts is not None:
        shared = ceil_div(experts.shared_ffn_hidden, s.tp)
        freed.append(s.expert_rows * (s.expert_in + s.expert_width) + s.tokens * (_inner(s, shared) + shared))
    return freed[0] if len(freed) == 1 else minimum(freed[0], freed[1])


def loss_bytes(s: Shape) -> Num:
    """Largest temporary from the loss to the backward pass of the head, beside what their rows keep.

    Moments: the loss; the head's backward product (gradients of its input, gathered and scattered, and of its weight).
    """
    profile, element = s.job.memory, s.element_bytes
    logits = s.tokens * s.model.predicted_share * held_vocab(s)
    kept = kept_per_logit(s)
    weight = s.vocab * s.model.hidden * profile.head_gradient_bytes
    stream = s.tokens * s.model.hidden * element
    gathered = where(s.plans.tp > 1, stream + s.sharded_tokens * s.model.hidden * element, 0.0)
    if profile.fused_head:
        return weight + 6.0 * s.tokens * s.model.hidden
    peak: Num = kept if profile.logit_peak_bytes is None else profile.logit_peak_bytes
    if profile.gathered_logits:  # the parts of all ranks, and them joined
        peak = peak + where(s.plans.tp > 1, 2 * element, 0.0)
    head = weight + stream + gathered + (element - kept) * logits
    evaluated = profile.evaluated_logit_bytes * s.job.evaluated_share
    return maximum((peak + evaluated - kept) * logits, head)


def kept_by_operators(rows: Iterable[Row], profile: MemoryProfile, plans: Plans) -> list[Row]:
    """The rows of a layer with what software keeps beyond the fused kernels of the rows (:class:`MemoryProfile`)."""
    extra = profile.norm_bytes or profile.gate_bytes or profile.score_bytes or profile.gathered_inputs
    return [_with_copies(row, profile, plans) for row in rows] if extra else list(rows)


def _with_copies(row: Row, profile: MemoryProfile, plans: Plans) -> Row:
    if row.operator in NORMS:
        return replace(row, kept_bytes=row.kept_bytes + row.shape["elements"] * profile.norm_bytes)
    if row.operator == "gated_activation":
        return replace(row, kept_bytes=row.kept_bytes + row.shape["elements"] * profile.gate_bytes)
    if row.operator == "softmax":
        scores = row.shape["elements"] * profile.score_bytes
        return replace(row, kept_bytes=row.kept_bytes + (1.0 - row.recomputed) * scores,
                       remade_bytes=row.remade_bytes + row.recomputed * scores)  # fmt: skip
    gathers = any(each.collective == "all_gather" and each.axis == "tp" for each in row.forward)
    if profile.gathered_inputs and gathers and row.operator == "matmul":
        return replace(row, kept_bytes=row.kept_bytes * tensor_shares(plans))
    return row


def leading_dense(model: ModelSpec) -> int:
    """First layers without experts. So few as these stand first (DeepSeek-V3, Kimi K2, GLM-4.5); more are spread."""
    dense = 0 if model.experts is None else model.layers - model.experts.moe_layers
    return dense if dense <= MOST_LEADING and model.experts is not None and model.experts.moe_layers else 0


def held_vocab(s: Shape) -> Num:
    """Logits of a token that a rank holds at the loss: of its part of the vocabulary, or gathered those of all."""
    return s.model.vocab if s.job.memory.gathered_logits else s.vocab


def kept_per_logit(s: Shape) -> float:
    """Bytes per logit from the loss to its backward pass."""
    profile = s.job.memory
    if profile.fused_head:
        return 0.0
    return 4.0 + s.element_bytes if profile.logit_kept_bytes is None else profile.logit_kept_bytes


def loss_row(s: Shape, predicted: Num) -> Row:
    """Row of the loss over the logits of so many tokens; what its kernels move is a fact of the framework."""
    logits, profile = predicted * s.vocab, s.job.memory
    turned = profile.loss_conversion_bytes if s.element_bytes < LOGIT_BYTES else 0.0
    return Row(
        name="cross_entropy", block="head", operator="cross_entropy",
        shape={"elements": logits, "forward_bytes": profile.loss_forward_bytes + turned,
               "backward_bytes": profile.loss_backward_bytes + turned},
        kept_bytes=predicted * held_vocab(s) * kept_per_logit(s),
        forward=(over("tp", "all_reduce", 3 * predicted * LOGIT_BYTES),),
    )  # fmt: skip
