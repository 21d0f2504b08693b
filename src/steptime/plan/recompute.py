"""Recomputation of parts of a layer: which rows run again in the backward pass, and what is then not kept.

Each bit of the column ``recompute`` names a part whose output is dropped after forward and made again from what the
part's first row keeps. Whole layers (``full``) are not marked here: the step repeats their forward pass. What
``outputs`` keeps and makes again is in :mod:`steptime.plan.alternate`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from steptime.errors import UnknownNameError
from steptime.model.spec import ModelSpec
from steptime.num import Num, where
from steptime.plan.alternate import CORE, by_outputs, without_inputs
from steptime.plan.framework import habits_of
from steptime.plan.plans import FULL_RECOMPUTE, RECOMPUTE_CODES, Plans, is_set
from steptime.plan.rows import WEIGHT_PRODUCTS, Row

ACTIVATIONS = ("activation", "gated_activation")
OUTER_NORMS = ("attention_norm", "mlp_norm")
OUTPUTS: Final = "outputs"
UP_PROJECTION: Final = "up_projection"
"""Part of latent attention; others have no compressed form from which queries, keys and values could be made again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one bit recomputes."""

    again: Callable[[Row], bool]
    """Rows whose forward runs once more."""
    dropped: Callable[[Row], bool]
    """Rows whose kept bytes are the output of those."""
    left: Callable[[Row, ModelSpec], Num] = lambda row, model: 0.0
    """What such a row keeps all the same."""


def _named(*names: str) -> Callable[[Row], bool]:
    return lambda row: row.name in names


#: Name of a bit -> rows. Fused attention keeps its inputs; its statistics are too small to be worth a rule.
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
    """The rows with those of the chosen parts marked, and without what is not kept."""
    out = list(rows)
    partly = ~is_set(codes, FULL_RECOMPUTE)
    names = [name for name in PARTS if name != UP_PROJECTION or model.latent is not None]
    parts = [(PARTS[name], is_set(codes, RECOMPUTE_CODES[name]) & partly) for name in names
             if _any_set(codes, RECOMPUTE_CODES[name])]  # fmt: skip
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
    """A row with what each part makes of it in the plans that recompute the part."""
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
    """The rows of a layer whose recomputation in full ends with the last tensor that the backward pass reads.

    What follows the last row that keeps something does not run again, nor does that row if it is a product, which keeps
    its input: without dropout the second product of an MLP. What experts return, their router reads. Rows of operator
    ``nothing`` stand for what another kind of recomputation keeps.

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
    "core_attn": "attention", "layernorm": "norm", "mla_up_proj": "up_projection", "moe_act": "activation",
    "moe": "experts", "mlp": "mlp",
}  # fmt: skip
"""Modules of Megatron-Core (``--recompute-modules``) -> name of the bit."""
OTHER_WORDS: Final = {word: name for word, name in MODULES.items() if word != name} | {"off": "none"}
"""Other words than a bit's own -> its name."""
SELECTIVE: Final = "selective"
"""The word that each framework has for a choice of its own (:attr:`steptime.plan.framework.Habits.selective`)."""


def says_selective(text: str) -> bool:
    """Whether one of the parts is the word whose meaning depends on the framework.

    >>> says_selective("selective+norm"), says_selective("attention")
    (True, False)
    """
    return SELECTIVE in _words(text)


def spelled_out(text: str, framework: str) -> str:
    """The same recomputation with ``selective`` in the words that mean one thing whatever the framework.

    >>> spelled_out("selective", "megatron-core"), spelled_out("selective", "torchtitan"), spelled_out("full", "")
    ('attention', 'norm+activation+outputs', 'full')
    """
    return "+".join(habits_of(framework).selective if word == SELECTIVE else word for word in _words(text))


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split("+")]


def recompute_code(text: str, framework: str = "") -> int:
    """The code of ``none``, ``full``, or parts joined by ``+``; parts may have the names of Megatron-Core.

    Args:
        text: what is recomputed; ``selective`` is what the framework calls so.
        framework: its name; empty: none is named, and ``selective`` is attention, as in Megatron-LM.

    Raises:
        UnknownNameError: no such part.

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
