"""Recomputation of parts of a layer: which rows run again in the backward pass, and what is then not kept.

Each bit of the column ``recompute`` names a part whose output is dropped after forward and made again from what the
part's first row keeps. Whole layers (``full``) are not marked here: the step repeats their forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from steptime.errors import UnknownNameError
from steptime.num import Num, where
from steptime.plan.plans import FULL_RECOMPUTE, RECOMPUTE_CODES, is_set
from steptime.plan.rows import Row

ACTIVATIONS = ("activation", "gated_activation")
OUTER_NORMS = ("attention_norm", "mlp_norm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one bit recomputes."""

    again: Callable[[Row], bool]
    """Rows whose forward runs once more."""
    dropped: Callable[[Row], bool]
    """Rows whose kept bytes are the output of those."""
    left: Callable[[Row, Num], Num] | None = None
    """Bytes that a row keeps instead of so many; None: nothing of the dropped ones, all of the others."""


def _named(*names: str) -> Callable[[Row], bool]:
    return lambda row: row.name in names


def _alternate_outputs(row: Row, kept_bytes: Num) -> Num:
    """Kept bytes where a layer keeps its input, the output of every second product and of attention.

    In the order query, key, value, out, gate, up, down these are query, value, gate and down. Keys, the stream after
    attention and the inputs of products are made again; the output of ``down`` stays beside the next layer's input.
    """
    element = row.shape.get("element_bytes", 0.0)
    if row.operator == "fused_attention":
        return kept_bytes - row.shape["kv_rows"] * row.shape["head_dim"] * element
    if row.operator == "gated_activation":
        return row.shape["elements"] * element
    if row.name in ("mlp_out", "expert_out", "shared_out"):
        return row.shape["m"] * row.shape["n"] * element
    return 0.0 * kept_bytes if row.name in ("mlp_norm", "qkv", "mlp_in", "router") else kept_bytes


#: Name of a bit -> rows. Fused attention keeps its inputs; its statistics are too small to be worth a rule.
PARTS: dict[str, Part] = {
    "attention": Part(again=lambda row: row.operator == "fused_attention", dropped=lambda row: False),
    "norm": Part(again=_named(*OUTER_NORMS), dropped=_named("qkv", "q", "q_down", "mlp_in", "router")),
    "activation": Part(
        again=lambda row: row.operator in ACTIVATIONS, dropped=_named("mlp_out", "shared_out", "expert_out")
    ),
    "up_projection": Part(
        again=_named("q_up", "kv_up", "rope"), dropped=_named("fused_attention", "windowed_attention", "scores")
    ),
    "mlp": Part(
        again=lambda row: row.name in ("mlp_in", "mlp_in_bias", "activation"),
        dropped=_named("activation", "mlp_out", "mlp_inner_dropout"),
    ),
    "experts": Part(
        again=lambda row: row.block == "experts",
        dropped=lambda row: row.block == "experts" and row.name != "router",
    ),
    # Selective checkpointing by operator, as in torchtitan: which rows run again is a matter of the other bits.
    "outputs": Part(again=lambda row: False, dropped=lambda row: False, left=_alternate_outputs),
}


def recomputed(rows: Iterable[Row], codes: Num) -> list[Row]:
    """The rows with those of the chosen parts marked, and without what is not kept."""
    names = [name for name in PARTS if _any_set(codes, RECOMPUTE_CODES[name])]
    if not names:
        return list(rows)
    partly = ~is_set(codes, FULL_RECOMPUTE)
    parts = [(PARTS[name], is_set(codes, RECOMPUTE_CODES[name]) & partly) for name in names]
    return [_marked(row, parts) for row in rows]


def _any_set(codes: Num, bit: int) -> bool:
    found = is_set(codes, bit)
    return bool(found.any()) if isinstance(found, np.ndarray) else bool(found)


def _marked(row: Row, parts: Iterable[tuple[Part, Any]]) -> Row:
    """A row with what each part makes of it in the plans that recompute the part."""
    again, kept = row.recomputed, row.kept_bytes
    for part, chosen in parts:
        if part.again(row):
            again = where(chosen, 1.0, again)
        if part.dropped(row):
            kept = where(chosen, 0.0, kept)
        if part.left is not None:
            kept = where(chosen, part.left(row, kept), kept)
    if again is row.recomputed and kept is row.kept_bytes:
        return row
    return replace(row, recomputed=again, kept_bytes=kept)


OTHER_WORDS: Final = {
    "selective": "attention", "core_attn": "attention", "layernorm": "norm", "mla_up_proj": "up_projection",
    "moe_act": "activation", "moe": "experts", "off": "none",
}  # fmt: skip
"""Words of Megatron-Core (``--recompute-granularity``, ``--recompute-modules``) -> name of the bit."""


def recompute_code(text: str) -> int:
    """The code of ``none``, ``full``, or parts joined by ``+``; parts may have the names of Megatron-Core.

    Raises:
        UnknownNameError: no such part.

    >>> recompute_code("attention+norm"), recompute_code("selective+layernorm"), recompute_code("none")
    (5, 5, 0)
    """
    code = 0
    for word in text.split("+"):
        name = OTHER_WORDS.get(word.strip(), word.strip())
        if name not in RECOMPUTE_CODES:
            raise UnknownNameError("recompute", name, (*RECOMPUTE_CODES, "selective"))
        code |= RECOMPUTE_CODES[name]
    return code


def recompute_text(code: int) -> str:
    """The text of a code; the inverse of :func:`recompute_code`.

    >>> recompute_text(5), recompute_text(0)
    ('attention+norm', 'none')
    """
    return "+".join(name for name, bit in RECOMPUTE_CODES.items() if code & bit) or "none"
