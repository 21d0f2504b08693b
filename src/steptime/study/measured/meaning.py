"""What the words of a run mean to the engine: one reading of them for rows of tables and for logs."""

from __future__ import annotations

import re
from typing import Final

from steptime.plan.framework import habits_of
from steptime.plan.job import OPTIMIZERS
from steptime.plan.recompute import SELECTIVE, spelled_out
from steptime.study.measured.canonical import dtype_name
from steptime.study.measured.tables import framework_default

#: Recomputation of a measured run -> names of the plan's bits.
RECOMPUTE: Final = {
    "none": (), "attention": ("attention",), "full": ("full",), "ops": ("norm", "activation", "outputs"),
    "norms": ("norm", "up_projection"), "modules": ("norm", "up_projection", "activation"),
    "beside_attention": ("norm", "attention_out", "mlp", "experts"),
    "beside_products": ("norm", "attention", "activation"),
    "beside_projections": ("norm", "attention", "mlp", "experts"),
}  # fmt: skip
#: What the estimate takes where nobody says it.
USUAL: Final = {"zero": 1, "sp": "on", "attention": "fused", "dtype": "bf16"}
_SHARDS_OF_DATA_AXIS: Final = frozenset({"torchtitan"})
"""Frameworks that state the shards of the data axis; their context ranks hold shards of their own beside."""


def recipe(precision: str, framework: str = "") -> str:
    """Recipe of :data:`~steptime.plan.job.PRECISIONS` that a precision of a run means; FP8 is the framework's own.

    >>> recipe("fp8"), recipe("fp8", "torchtitan"), recipe("mxfp8"), recipe("bf16")
    ('fp8-te', 'fp8-tensorwise', 'mxfp8', 'bf16')
    """
    return habits_of(framework).fp8 if precision == "fp8" else precision


def recipe_called(text: str, framework: str = "") -> str | None:
    """Recipe of a spelling in the words of a framework; None: it says none, or several.

    >>> [recipe_called(text) for text in ("fp8 hybrid delayed", "fp8 e4m3 mxfp8", "te_nvfp4", "bfloat16", "")]
    ['fp8-te', 'mxfp8', 'nvfp4', 'bf16', None]
    """
    found = dtype_name(text).precisions
    return recipe(found[0], framework) if len(found) == 1 else None


def recompute_words(kind: str) -> str:
    """What a plan calls a recomputation of :data:`RECOMPUTE`.

    >>> recompute_words("ops"), recompute_words("none")
    ('norm+activation+outputs', 'none')
    """
    return "+".join(RECOMPUTE[kind]) or "none"


def selective(framework: str) -> str:
    """Recomputation, of :data:`RECOMPUTE`, that a framework calls selective without further words.

    >>> selective("megatron-core"), selective("torchtitan")
    ('attention', 'ops')
    """
    words = spelled_out(SELECTIVE, framework)
    return next(kind for kind in RECOMPUTE if recompute_words(kind) == words)


def optimizer_called(text: str) -> str:
    """Optimiser of a text, adam unless it names another.

    >>> [optimizer_called(text) for text in ("pretrain", "paged_adamw_8bit", "Muon", "sgd, momentum 0.9", "AdamW")]
    ['adam', 'adam8bit', 'muon', 'momentum', 'adam']
    """
    rules = (
        (r"8[- ]?bit[-_ ]?adam|adam\w{0,20}?8[-_]?bit|adamw_bnb_8bit", "adam8bit"), (r"\bmuon\b", "muon"),
        (r"\blamb\b", "lamb"), (r"\badafactor\b", "adafactor"), (r"\bsgd\b[^;]{0,20}\bmomentum\b", "momentum"),
        (r"\bsgd\b", "sgd"),
    )  # fmt: skip
    return next((name for pattern, name in rules if re.search(pattern, text.lower())), "adam")


def modelled_optimizer(name: str) -> str:
    """The optimiser whose states stand for one of that name: itself, or adam where it is not modelled."""
    return name if name in OPTIMIZERS else "adam"


def shards_of(framework: str, ranks: int, cp: int) -> int:
    """Ranks of one sharding group, of all data-parallel and context ranks, where a run states so many.

    >>> shards_of("torchtitan", 4, 2), shards_of("fms-fsdp", 8, 2)
    (8, 8)
    """
    return ranks * cp if framework in _SHARDS_OF_DATA_AXIS else ranks


def sole_choice(framework: str, setting: str) -> str | None:
    """What a framework does without exception where a run does not state it; None: it may do several things.

    >>> sole_choice("megatron-2021", "attention"), sole_choice("megatron", "attention")
    ('unfused', None)
    """
    choices = [name for name, weight in framework_default(framework, setting).items() if weight > 0]
    return choices[0] if len(choices) == 1 else None
