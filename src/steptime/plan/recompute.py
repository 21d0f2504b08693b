"""Recomputation of parts of a layer: the rows that run again in the backward pass, and the bytes that are not kept.

Each bit of the column ``recompute`` names a part whose output is dropped after forward and made again from the kept
input of the part's first row. Whole layers (``full``) are not marked here: the step repeats their forward pass.

Temporaries are alive for a moment in addition to the kept activations (in the backward pass of a layer, and at the
loss); there are also kept copies of operators that could be one kernel. Each function names some moments and gives the
largest sum over them of new tensors, less kept ones that are already free. Symbols: $t$ tokens of a rank, $h$ hidden,
$f$ and $f_i$ local width of the MLP and of its first product, $g$ = 1 if tensor ranks gather the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from steptime.errors import UnknownNameError
from steptime.model.spec import ModelSpec
from steptime.num import Num, ceil_div, maximum, minimum, where
from steptime.plan.attention import Heads
from steptime.plan.framework_file import habits_of
from steptime.plan.job import Job
from steptime.plan.memory_profile import MemoryProfile
from steptime.plan.plans import FULL_RECOMPUTE, RECOMPUTE_CODES, Plans, is_set
from steptime.plan.rows import WEIGHT_PRODUCTS, Row, Shape, over, tensor_shares

#: Rows that ``outputs`` runs again as a whole.
AGAIN: Final = frozenset(
    {
        "attention_norm",
        "mlp_norm",
        "qk_norm",
        "q_norm",
        "kv_norm",
        "post_attention_norm",
        "rope",
        "q",
        "q_up",
        "kv_up",
        "attention_out",
        "attention_dropout",
        "attention_residual",
        "activation",
        "expert_activation",
        "shared_activation",
        "mlp_inner_dropout",
        "q_down_bias",
        "kv_down_bias",
        "qkv_bias",
        "attention_out_bias",
        "mlp_in_bias",
        "expert_in",
        "expert_in_bias",
        "attention_inputs_copy",
        "attention_quantise",
        "attention_context_copy",
    }
)
#: Products into an MLP, of which ``outputs`` runs one half again if the MLP is gated.
INTO: Final = ("mlp_in", "shared_in")
OUT_OF: Final = ("mlp_out", "shared_out")
#: Rows whose input ``outputs`` makes again.
DROPPED: Final = frozenset(
    {
        "q",
        "q_down",
        "q_up",
        "kv_down",
        "kv_up",
        "qkv",
        "qk_norm",
        "post_attention_norm",
        "mlp_in",
        "router",
        *OUT_OF,
        "expert_activation",
        "expert_out",
    }
)
ATTEND: Final = ("attend", "unaligned_attend")
CORE: Final = ("fused_attention", "scores", "unaligned_scores", *ATTEND)
READS_DOWN: Final = ("post_mlp_norm", "shared_scale")


def by_outputs(row: Row, chosen: Any, model: ModelSpec, plans: Plans) -> Iterator[Row]:
    """The row under recomputation ``outputs`` in the ``chosen`` plans; a product out of an MLP also keeps its output.

    Recomputation ``outputs`` is selective checkpointing by operator: it keeps the output of every second product. A
    layer keeps its input and the outputs of attention and of every second product: in the order query, key, value, out,
    gate, up, down these are query, value, gate and down; without a gate query, value and the first product of the MLP.
    Everything else that backward reads is made again: norms, rotations, keys, the stream after attention, the other
    half of the MLP's first product and the activation. Latent attention keeps the compressed forms and makes queries,
    keys and values again. Routed experts keep what was dispatched to them and run all of their products but the last
    again: the policy does not count grouped products. What tensor ranks scatter is kept as it arrives, and the inputs
    of products are gathered again in any backward pass, so that no transfer is repeated.

    Source: torchtitan, policy of selective activation checkpointing (``op``), which counts the products of a layer.
    """
    share = share_again(row, model)
    kept = where(chosen, kept_bytes(row, model, plans), row.kept_bytes)
    again, sent = row.recomputed, row.sent_again
    if share:
        again, sent = where(chosen, maximum(again, share), again), where(chosen, 0.0, sent)
    yield row.keeping(kept, recomputed=again, sent_again=sent)
    if row.name in OUT_OF and model.gated_mlp:
        output = row.shape["m"] * row.shape["n"] * row.shape["element_bytes"]
        yield Row(
            name=f"{row.name}_output",
            block=row.block,
            operator="nothing",
            shape={},
            share=row.share,
            kept_bytes=where(chosen, output, 0.0 * output),
        )


def share_again(row: Row, model: ModelSpec) -> float:
    """Share of a row's forward pass that backward repeats; for a joint query, key and value product the keys' share."""
    if row.name == "qkv":
        return model.kv_heads / (model.heads + 2 * model.kv_heads)
    if row.name in INTO:
        return 0.5 if model.gated_mlp else 0.0
    return 1.0 if row.name in AGAIN else 0.0


def kept_bytes(row: Row, model: ModelSpec, plans: Plans) -> Num:
    """Kept bytes of a row under ``outputs``, at most as many as without it; a norm behind experts keeps its input."""
    reads_kept = row.name in READS_DOWN and model.gated_mlp and (model.experts is None or row.name == "shared_scale")
    if row.name in DROPPED or reads_kept:
        return 0.0 * row.kept_bytes
    if row.name == "mlp_norm":
        return where(plans.tp > 1, row.kept_bytes, 0.0 * row.kept_bytes)
    if row.operator == "gated_activation":
        return minimum(row.kept_bytes, row.shape["elements"] * row.shape["element_bytes"])
    return without_inputs(row, model) if row.operator in CORE else row.kept_bytes


def without_inputs(row: Row, model: ModelSpec) -> Num:
    """Kept bytes of a row of :data:`CORE` without the queries, keys and values that are made again."""
    return maximum(row.kept_bytes - _remade_elements(row, model) * row.shape["element_bytes"], 0.0)


def _remade_elements(row: Row, model: ModelSpec) -> Num:
    """Elements of a rank's own queries, keys and values that are made again instead of kept."""
    shape, latent = row.shape, model.latent
    queries, local = shape["rows"], shape["kv_rows"] * shape["rows"] / shape["keys"]
    keys = local * model.head_dim
    if row.operator in ATTEND:
        return 0.0 * local if latent is None else local * latent.v_head_dim
    if latent is None:
        return keys
    values = local * latent.v_head_dim if row.operator == "fused_attention" else 0.0
    return queries * model.head_dim + keys + values


ACTIVATIONS = ("activation", "gated_activation")
OUTER_NORMS = ("attention_norm", "mlp_norm")
OUTPUTS: Final = "outputs"
UP_PROJECTION: Final = "up_projection"
"""Part of latent attention, which has a compressed form from which queries, keys and values are made again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Rows that one bit recomputes."""

    again: Callable[[Row], bool]
    """Rows whose forward pass runs again."""
    dropped: Callable[[Row], bool]
    """Rows whose kept bytes are the output of the recomputed rows."""
    left: Callable[[Row, ModelSpec], Num] = lambda row, model: 0.0
    """Bytes that a dropped row still keeps."""


def _named(*names: str) -> Callable[[Row], bool]:
    return lambda row: row.name in names


#: Name of a bit -> its rows. Fused attention keeps its inputs; its statistics are too small for a rule.
PARTS: dict[str, Part] = {
    "attention": Part(again=lambda row: row.operator == "fused_attention", dropped=lambda row: False),
    "norm": Part(again=_named(*OUTER_NORMS), dropped=_named("qkv", "q", "q_down", "mlp_in", "router")),
    "attention_out": Part(
        again=_named(
            "attention_out", "attention_out_bias", "attention_dropout", "attention_residual", "post_attention_norm"
        ),
        dropped=_named("post_attention_norm", "mlp_norm"),
    ),
    "activation": Part(
        again=lambda row: row.operator in ACTIVATIONS, dropped=_named("mlp_out", "shared_out", "expert_out")
    ),
    UP_PROJECTION: Part(
        again=_named("q_up", "kv_up", "rope", "attention_inputs_copy", "attention_quantise"),
        dropped=lambda row: row.operator in CORE,
        left=without_inputs,
    ),
    "mlp": Part(
        again=lambda row: row.name in ("mlp_in", "mlp_in_bias", "activation"),
        dropped=_named("activation", "mlp_out", "mlp_inner_dropout"),
    ),
    "experts": Part(
        again=lambda row: row.block == "experts",
        dropped=lambda row: row.block == "experts" and row.name != "router",
    ),
}


def recomputed(rows: Iterable[Row], codes: Num, model: ModelSpec, plans: Plans) -> list[Row]:
    """Rows of a layer with the recomputed ones marked and their dropped bytes removed.

    Args:
        rows: rows of one layer.
        codes: column ``recompute`` of the plans: bits of the chosen parts.
        model: model of the layer.
        plans: plans that keep or recompute.
    """
    out = list(rows)
    partly = ~is_set(codes, FULL_RECOMPUTE)
    names = [name for name in PARTS if name != UP_PROJECTION or model.latent is not None]
    parts = [
        (PARTS[name], is_set(codes, RECOMPUTE_CODES[name]) & partly)
        for name in names
        if _any_set(codes, RECOMPUTE_CODES[name])
    ]
    if parts:
        out = [_marked(row, parts, model) for row in out]
    if _any_set(codes, RECOMPUTE_CODES[OUTPUTS]):
        chosen = is_set(codes, RECOMPUTE_CODES[OUTPUTS]) & partly
        out = [each for row in out for each in by_outputs(row, chosen, model, plans)]
    return out


def _any_set(codes: Num, bit: int) -> bool:
    found = is_set(codes, bit)
    return bool(found.any()) if isinstance(found, np.ndarray) else bool(found)


def _marked(row: Row, parts: Iterable[tuple[Part, Any]], model: ModelSpec) -> Row:
    """A row under all ``parts``, each in the plans that recompute it."""
    again, kept = row.recomputed, row.kept_bytes
    for part, chosen in parts:
        if part.again(row):
            again = where(chosen, 1.0, again)
        if part.dropped(row):
            kept = where(chosen, part.left(row, model), kept)
    if again is row.recomputed and kept is row.kept_bytes:
        return row
    return row.keeping(kept, recomputed=again)


def stopped_early(rows: Iterable[Row]) -> list[Row]:
    """The rows of a layer whose full recomputation ends with the last tensor that the backward pass reads.

    Rows after the last one that keeps something do not run again, nor does that one if it is a product, as it keeps its
    input: without dropout the second product of an MLP. The router reads the output of experts. Rows of operator
    ``nothing`` stand for the kept bytes of another kind of recomputation.

    Source: `early_stop` of `torch.utils.checkpoint` without `use_reentrant` (its default).
    """
    out = list(rows)
    last = max((n for n, row in enumerate(out) if row.operator != "nothing" and np.any(row.kept_bytes)), default=None)
    if last is None:
        return out
    end = last if out[last].operator in WEIGHT_PRODUCTS else last + 1
    if any(row.expert for row in out[end:]):
        return out
    return [*out[:end], *(replace(row, runs_again=False) for row in out[end:])]


MODULES: Final = {
    "core_attn": "attention",
    "layernorm": "norm",
    "mla_up_proj": "up_projection",
    "moe_act": "activation",
    "moe": "experts",
    "mlp": "mlp",
}
"""Modules of Megatron-Core (``--recompute-modules``) -> name of the bit."""
OTHER_WORDS: Final = {word: name for word, name in MODULES.items() if word != name} | {"off": "none"}
"""Other word for a bit -> its name."""
SELECTIVE: Final = "selective"
"""Word whose parts depend on the framework (:attr:`steptime.plan.framework.Habits.selective`)."""


def says_selective(text: str) -> bool:
    """True if one of the parts is the word ``selective``, whose meaning depends on the framework.

    >>> says_selective("selective+norm"), says_selective("attention")
    (True, False)
    """
    return SELECTIVE in _words(text)


def spelled_out(text: str, framework: str) -> str:
    """Recomputation with ``selective`` replaced by the parts that it means in a framework.

    >>> spelled_out("selective", "megatron-core"), spelled_out("selective", "torchtitan"), spelled_out("full", "")
    ('attention', 'norm+activation+outputs', 'full')
    """
    return "+".join(habits_of(framework).selective if word == SELECTIVE else word for word in _words(text))


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split("+")]


def recompute_code(text: str, framework: str = "") -> int:
    """The code of ``none``, ``full``, or parts joined by ``+``; parts may have the names of Megatron-Core.

    Args:
        text: recomputation in words; ``selective`` has the framework's meaning.
        framework: name of the framework; empty: ``selective`` is attention, as in Megatron-LM.

    Raises:
        UnknownNameError: a part is unknown.

    >>> recompute_code("attention+norm"), recompute_code("selective+layernorm"), recompute_code("none")
    (5, 5, 0)
    """
    code = 0
    for word in _words(spelled_out(text, framework)):
        name = OTHER_WORDS.get(word, word)
        if name not in RECOMPUTE_CODES:
            raise UnknownNameError("recompute", name, (*RECOMPUTE_CODES, SELECTIVE))
        code |= RECOMPUTE_CODES[name]
    return code


def recompute_text(code: int) -> str:
    """The text of a code; the inverse of :func:`recompute_code`.

    >>> recompute_text(5), recompute_text(0)
    ('attention+norm', 'none')
    """
    return "+".join(name for name, bit in RECOMPUTE_CODES.items() if code & bit) or "none"


LOGIT_BYTES = 4.0
"""Bytes of a logit at the loss, which computes probabilities in fp32."""
MOST_LEADING = 3
NORMS = ("layer_norm", "one_pass_layer_norm", "rms_norm", "plain_rms_norm")


def layer_elements(s: Shape) -> Num:
    """Largest temporary in the backward pass of a layer.

    Moments: the activation function ($t f_i$ of gradient, and the residual stream's), the product out of the MLP
    (its gathered gradient, $t f$ of input gradient), the product into the MLP (gathered input and gradient, $2 t h$;
    $t f$ kept are free), gathered keys and values with their gradients, unfused scores (gradients before and after
    the softmax; what the MLP kept is free).
    """
    stream = s.sharded_tokens * s.model.hidden
    most: Num = 2 * s.gathered_kv
    widths = _mlp_widths(s)
    for local in widths:
        most = maximum(most, stream + _mlp_elements(s, local))
    experts = s.model.experts
    if experts is not None:
        most = maximum(most, stream + s.expert_rows * (s.hidden + s.expert_in))
    if s.job.attention == "unfused":
        wide = 2.0 if s.job.memory.score_bytes else 1.0  # a softmax of fp32 has both gradients in fp32
        most = maximum(most, stream + 2 * wide * Heads(s).rows * s.seq_len - _freed_elements(s))
    return most + widened_bytes(s.job) / s.element_bytes * s.model.hidden * (widths[0] if widths else 0.0)


def widened_bytes(job: Job) -> float:
    """Bytes per parameter of the largest weight of a layer: copies that adapters make of it while a product runs.

    A quantised weight has a copy in the dtype of the run; DoRA's lengths need the weight, the adapter's part, the sum.
    """
    adapter, copied = job.adapter, job.memory.dequantised_bytes
    if adapter is None or not copied:
        return 0.0
    sums = 3 * (job.memory.adapter_bytes or copied) if adapter.dora else 0.0
    return sums + (copied if adapter.weight_bytes is not None else 0.0)


def _mlp_widths(s: Shape) -> list[Num]:
    """Local widths of the MLPs that see all tokens: the dense MLP, and the shared expert."""
    experts = s.model.experts
    widths = [s.ffn] if s.dense_share else []
    if experts is not None and experts.shared_ffn_hidden:
        widths.append(ceil_div(experts.shared_ffn_hidden, s.tp))
    return widths


def _inner(s: Shape, local: Num) -> Num:
    """Columns of the first product of an MLP of some local width."""
    return local * s.model.mlp_inputs


def _mlp_elements(s: Shape, local: Num) -> Num:
    """Largest temporary in the backward pass of an MLP, in addition to the gradient of the residual stream."""
    hidden, gathers = s.model.hidden, where(s.plans.tp > 1, 1.0, 0.0)
    out = s.tokens * (gathers * hidden + local)
    into = s.tokens * ((1.0 + gathers) * hidden - local)
    return maximum(s.tokens * _inner(s, local), maximum(out, into))


def _freed_elements(s: Shape) -> Num:
    """Elements that products out of MLPs and activation functions kept, free in the backward pass of attention.

    If layers differ, those of the kind that kept least.
    """
    freed: list[Num] = [s.tokens * (s.ffn_in + s.ffn)] if s.dense_share else []
    experts = s.model.experts
    if experts is not None:
        shared = ceil_div(experts.shared_ffn_hidden, s.tp)
        freed.append(s.expert_rows * (s.expert_in + s.expert_width) + s.tokens * (_inner(s, shared) + shared))
    return freed[0] if len(freed) == 1 else minimum(freed[0], freed[1])


def loss_bytes(s: Shape) -> Num:
    """Largest temporary from the loss to the backward pass of the head, in addition to the kept bytes of their rows.

    Moments: the loss; the head's backward product (gradients of its input, gathered and scattered, and of its weight).
    """
    profile, element = s.job.memory, s.element_bytes
    logits = s.tokens * s.model.predicted_share * s.job.answered_share * held_vocab(s)
    kept = kept_per_logit(s)
    weight = s.vocab * s.model.hidden * profile.head_gradient_bytes
    stream = s.tokens * s.model.hidden * element
    gathered = where(s.plans.tp > 1, stream + s.sharded_tokens * s.model.hidden * element, 0.0)
    if profile.fused_head:
        return weight + 6.0 * s.tokens * s.model.hidden
    peak: Num = kept if profile.logit_peak_bytes is None else profile.logit_peak_bytes
    if profile.gathered_logits:  # gathered parts of all ranks, their concatenation, and the gradient of a rank's part
        peak = peak + where(s.plans.tp > 1, 3 * element, 0.0)
    head = weight + stream + gathered + (element - kept) * logits
    evaluated = profile.evaluated_logit_bytes * s.job.evaluated_share
    return maximum((peak + evaluated - kept) * logits, head)


def kept_by_operators(rows: Iterable[Row], profile: MemoryProfile, plans: Plans, *, trained: bool = True) -> list[Row]:
    """The rows of a layer with the bytes that software keeps beyond the fused kernels (:class:`MemoryProfile`).

    Args:
        rows: rows of a layer.
        profile: memory profile of the software.
        plans: how the job is parallelised.
        trained: the weights of norms are trained.
    """
    extra = profile.norm_bytes or profile.gate_bytes or profile.score_bytes or profile.gathered_inputs
    return [_with_copies(row, profile, plans, trained) for row in rows] if extra else list(rows)


def _with_copies(row: Row, profile: MemoryProfile, plans: Plans, trained: bool) -> Row:
    if row.operator in NORMS:
        own = profile.norm_bytes - (0.0 if trained else profile.trained_norm_bytes)
        return replace(row, kept_bytes=row.kept_bytes + row.shape["elements"] * own)
    if row.operator == "gated_activation":
        return replace(row, kept_bytes=row.kept_bytes + row.shape["elements"] * profile.gate_bytes)
    if row.operator == "softmax":
        scores = row.shape["elements"] * profile.score_bytes
        return replace(
            row,
            kept_bytes=row.kept_bytes + (1.0 - row.recomputed) * scores,
            remade_bytes=row.remade_bytes + row.recomputed * scores,
        )
    gathers = any(each.collective == "all_gather" and each.axis == "tp" for each in row.forward)
    if profile.gathered_inputs and gathers and row.operator == "matmul":
        return replace(row, kept_bytes=row.kept_bytes * tensor_shares(plans))
    return row


def leading_dense(model: ModelSpec) -> int:
    """Leading layers without experts: at most three are (DeepSeek-V3, Kimi K2, GLM-4.5); more are spread out."""
    dense = 0 if model.experts is None or model.kinds else model.layers - model.experts.moe_layers
    return dense if dense <= MOST_LEADING and model.experts is not None and model.experts.moe_layers else 0


def held_vocab(s: Shape) -> Num:
    """Logits of a token on a rank at the loss: its part of the vocabulary, or the whole one if logits are gathered."""
    return s.model.vocab if s.job.memory.gathered_logits else s.vocab


def kept_per_logit(s: Shape) -> float:
    """Bytes per logit from the loss to its backward pass."""
    profile = s.job.memory
    if profile.fused_head:
        return 0.0
    return 4.0 + s.element_bytes if profile.logit_kept_bytes is None else profile.logit_kept_bytes


def loss_row(s: Shape, predicted: Num) -> Row:
    """Row of the loss over the logits of ``predicted`` tokens; the traffic of its kernels depends on the framework."""
    logits, profile = predicted * s.vocab, s.job.memory
    turned = profile.loss_conversion_bytes if s.element_bytes < LOGIT_BYTES else 0.0
    return Row(
        name="cross_entropy",
        block="head",
        operator="cross_entropy",
        shape={
            "elements": logits,
            "forward_bytes": profile.loss_forward_bytes + turned,
            "backward_bytes": profile.loss_backward_bytes + turned,
        },
        kept_bytes=predicted * held_vocab(s) * kept_per_logit(s),
        forward=(over("tp", "all_reduce", 3 * predicted * LOGIT_BYTES),),
    )
