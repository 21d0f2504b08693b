"""From the words of a run to settings of the engine: one reading for rows of tables and for logs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

from steptime.measure.runs.canonical import RECOMPUTE, dtype_name
from steptime.measure.runs.read import TableRow, table
from steptime.options import choices_of
from steptime.plan.framework import IDEAL
from steptime.plan.framework_file import bare_name, framework_names, habits_of, name_rules, own_names, rule_with
from steptime.plan.job import PRECISIONS, Precision
from steptime.plan.optimizers import OPTIMIZERS
from steptime.plan.recompute import SELECTIVE, spelled_out


def framework_of(row: TableRow) -> str:
    """Framework of a run: by its own name, as estimates take it, or by the rules; ``generic`` where nothing says it.

    >>> framework_of(TableRow(1, {"source_key": "vtrain"})), framework_of(TableRow(1, {"framework": "NeMo 2.0"}))
    ('megatron-deepspeed', 'megatron-core')
    >>> framework_of(TableRow(1, {"framework": "Megatron-2021"}))
    'megatron-2021'
    """
    named = row.text("framework").lower()
    if named in own_names() or named in set(framework_names()) - {IDEAL.name}:
        return named
    rules = name_rules()
    if (near := rule_with(rules["nearest"], bare_name(named))) is not None:
        return str(near["framework"])
    source = row.text("source_key").lower()
    for rule in rules["pattern"]:
        if rule.get("source_key", source) == source and any(
            re.search(rule["match"], row.text(column), re.IGNORECASE) for column in rule["columns"]
        ):
            return str(rule["framework"])
    return str(rules["source_key"].get(source, "generic"))


def framework_default(framework: str, setting: str) -> dict[str, float]:
    """Choices of a setting and their weights where a row does not state it."""
    defaults = table("defaults")
    choices: dict[str, float] = defaults.get(framework, defaults["*"])[setting]
    return choices


def recompute_default(framework: str, *, experts: bool) -> dict[str, float]:
    """Choices of recomputation and their weights; a framework may have its own for models with experts.

    >>> [recompute_default("megatron-core", experts=experts)["full"] for experts in (True, False)]
    [0.05, 0.2]
    """
    own: dict[str, float] | None = table("defaults").get(framework, {}).get("recompute_experts") if experts else None
    return framework_default(framework, "recompute") if own is None else own


#: Schedule of a measured run -> schedule of its prediction, where they differ. ZB-V, whose rows are read as of one
#: chunk, is nearest to ZB-H1 (arXiv 2401.10241, section 6: its two chunks of each rank hold $p$ micro-batches of a
#: whole stage); GPipe and runs that name no schedule of a known number of chunks are taken as 1F1B.
SCHEDULE_OF: Final = {"zb-v": "zb-h1", "gpipe": "1f1b", "interleaved": "1f1b"}
#: Defaults of an estimate for settings that are not given.
USUAL: Final = {"zero": 1, "sp": "on", "attention": "fused", "dtype": "bf16"}
_SHARDS_OF_DATA_AXIS: Final = frozenset({"torchtitan"})
"""Frameworks that state the shards of the data axis; their context ranks hold shards of their own."""


def recipe(precision: str, framework: str = "") -> str:
    """Recipe of :data:`~steptime.plan.job.PRECISIONS` that a precision of a run means; FP8 is the framework's own.

    >>> recipe("fp8"), recipe("fp8", "torchtitan"), recipe("mxfp8"), recipe("bf16")
    ('fp8-te', 'fp8-tensorwise', 'mxfp8', 'bf16')
    """
    return habits_of(framework).fp8 if precision == "fp8" else precision


def recipe_called(text: str, framework: str = "") -> str | None:
    """Recipe that a text means for a framework; None if it names none or several.

    >>> [recipe_called(text) for text in ("fp8 hybrid delayed", "fp8 e4m3 mxfp8", "te_nvfp4", "bfloat16", "")]
    ['fp8-te', 'mxfp8', 'nvfp4', 'bf16', None]
    """
    found = dtype_name(text).precisions
    return recipe(found[0], framework) if len(found) == 1 else None


def recomputed_parts(kind: str) -> tuple[str, ...]:
    """Bits of a plan that a recomputation stands for: one of :data:`RECOMPUTE`, or parts joined by ``+``.

    >>> recomputed_parts("norms"), recomputed_parts("up_projection+mlp")
    (('norm', 'up_projection'), ('up_projection', 'mlp'))
    """
    return RECOMPUTE[kind] if kind in RECOMPUTE else tuple(kind.split("+"))


def recompute_words(kind: str) -> str:
    """Recomputation in the words of a plan.

    >>> recompute_words("ops"), recompute_words("none")
    ('norm+activation+outputs', 'none')
    """
    return "+".join(recomputed_parts(kind)) or "none"


def selective(framework: str) -> str:
    """Recomputation, of :data:`RECOMPUTE`, that a framework calls selective without further words.

    >>> selective("megatron-core"), selective("torchtitan")
    ('attention', 'ops')
    """
    words = spelled_out(SELECTIVE, framework)
    return next(kind for kind in RECOMPUTE if recompute_words(kind) == words)


def precision_called(precision: str, framework: str = "", attention_dtype: str | None = None) -> Precision:
    """The precision that :func:`recipe` names, with attention in a format of its own where the run states one."""
    found = PRECISIONS[recipe(precision, framework)]
    return found if attention_dtype is None or found.element_bytes > 2 else found.attending_in(attention_dtype)


_CONTEXTS: Final = ((r"a2a|all[-_ ]?to[-_ ]?all|ulysses", "ulysses"), (r"p2p|ring", "ring"), (r"gather", "all_gather"))
_DTYPES: Final = ((r"fp32|float32", "fp32"), (r"bf16|bfloat16", "bf16"), (r"fp16|float16|half", "fp16"))
_GRAPHS: Final = (
    (r"none|\bno\b|\bnot\b|off|false|^0$", "none"),
    (r"step|iteration|^full$", "step"),
    (r"local|transformer_engine|attn|attention|router|preprocess|moe|mlp|layer|block|partial", "none"),
)
_PARTS: Final = ((r"attn|attention", "attention"), (r"router", "router"), (r"preprocess", "preprocess"))
"""Words of a part of a layer that is one graph; router and preprocessing alone do not need the host in between."""
_DISPATCHERS: Final = (
    (r"hybrid[-_ ]?ep", "hybridep"),
    (r"deep[-_ ]?ep", "deepep"),
    (r"all[-_ ]?to[-_ ]?all|\ba2a\b", "all_to_all"),
)
_ATTENTION_DTYPES: Final = ((r"fp8|e4m3|e5m2", "fp8"), (r"16", "16"))
_WORDS: Final = {
    "context": _CONTEXTS,
    "gradient_dtype": _DTYPES,
    "graphs": _GRAPHS,
    "attention_dtype": _ATTENTION_DTYPES,
    "dispatcher": _DISPATCHERS,
}
"""Columns of choices -> patterns of the words that are known."""


def choice_called(column: str, text: str) -> str | None:
    """Choice that a text means in a column (``context``, ``gradient_dtype``, ``dispatcher``); None if it is unknown.

    >>> [choice_called("context", text) for text in ("cp_comm_type=a2a", "p2p", "")]
    ['ulysses', 'ring', None]
    >>> choice_called("gradient_dtype", "BF16"), choice_called("dispatcher", "kernel opts: TE + DeepEP")
    ('bf16', 'deepep')
    """
    return _first(_WORDS[column], text)


_STATED_GRADIENTS: Final = re.compile(
    r"(fp32|float32|bf16|bfloat16|fp16|float16)[- ](?:grad\w*|accum\w*)|"
    r"(?:grad\w*|accum\w*)[^,;()]{0,20}? in (fp32|float32|bf16|bfloat16|fp16|float16)"
)
_NARROW_WEIGHTS: Final = re.compile(r"(?:fp8|float8)[-_ ]?(?:params?|parameters|weights?|primary)\b")
_NOT_RECOMPUTED: Final = re.compile(
    r"\b(?:no|without|w/o) (?:activation |gradient |full )?(?:re-?comput\w*|checkpointing|remat\w*)\b|"
    r"\b(?:activation|gradient)[ _](?:re-?comput\w*|checkpointing)[ =:]{0,3}(?:none|off|false|disabled)\b|"
    r"\bre-?comput(?:e|ation)[ =:]{1,3}none\b|\brecompute-num-layers 0\b"
)


def gradient_dtype_in(dtype: str) -> str | None:
    """Dtype of gradients that the text of a run's dtype names in addition; None if it names none.

    >>> [gradient_dtype_in(text) for text in ("BF16 (fp32 grad accumulation)", "bf16, grads in fp32", "fp32")]
    ['fp32', 'fp32', None]
    """
    found = _STATED_GRADIENTS.search(dtype.lower()[:200])
    return choice_called("gradient_dtype", found.group(1) or found.group(2)) if found else None


def narrow_weights(dtype: str) -> bool:
    """True if a text says that trained weights are stored in FP8.

    >>> narrow_weights("FP8 (fp8 params)"), narrow_weights("FP8")
    (True, False)
    """
    return bool(_NARROW_WEIGHTS.search(dtype.lower()[:200]))


def not_recomputed(notes: str) -> bool:
    """True if notes say that nothing is recomputed.

    >>> [not_recomputed(t) for t in ("no activation recomputation", "recompute none assumed", "recompute not stated")]
    [True, True, False]
    """
    return bool(_NOT_RECOMPUTED.search(notes.lower()))


def graphs_called(text: str) -> str:
    """Scope of one graph by a text: of :data:`steptime.plan.job.GRAPHS`, or parts of a layer joined by ``+``.

    >>> graphs_called("full_iteration"), graphs_called("attn, moe_router, moe_preprocess"), graphs_called("local")
    ('step', 'attention+router+preprocess', 'none')
    """
    found = _first(_GRAPHS, text) or "none"
    parts = [name for pattern, name in _PARTS if re.search(pattern, text.lower()[:200])]
    off = re.search(r"\b(?:no|not|without|off)\b", text.lower()[:200])
    return found if found == "step" or off else "+".join(parts) or found


def attention_dtype_called(text: str) -> str | None:
    """Format of attention's products by a text, where it is not that of the other products; else None.

    >>> attention_dtype_called("FP8 forward and backward"), attention_dtype_called("bf16")
    ('fp8', None)
    """
    found = _first(_ATTENTION_DTYPES, text)
    return found if found in choices_of("attention_dtype") else None


def unknown_words(text: Callable[[str], str | None]) -> list[str]:
    """Columns of choices whose text has no known word.

    >>> unknown_words({"graphs": "true", "context": "zigzag", "attention_dtype": "bf16"}.get)
    ['context', 'graphs']
    """
    said = {name: text(name) for name in _WORDS}
    return [name for name, words in said.items() if words and _first(_WORDS[name], words) is None]


def _first(rules: Sequence[tuple[str, str]], text: str) -> str | None:
    return next((name for pattern, name in rules if re.search(pattern, text.lower()[:200])), None)


def optimizer_called(text: str) -> str:
    """Optimiser of a text, adam unless it names another.

    >>> [optimizer_called(text) for text in ("pretrain", "paged_adamw_8bit", "Muon", "sgd, momentum 0.9", "AdamW")]
    ['adam', 'adam8bit', 'muon', 'momentum', 'adam']
    """
    rules = (
        (r"8[- ]?bit[-_ ]?adam|adam\w{0,20}?8[-_]?bit|adamw_bnb_8bit", "adam8bit"),
        (r"\bmuon\b", "muon"),
        (r"\blamb\b", "lamb"),
        (r"\badafactor\b", "adafactor"),
        (r"\bsgd\b[^;]{0,20}\bmomentum\b", "momentum"),
        (r"\bsgd\b", "sgd"),
    )
    return next((name for pattern, name in rules if re.search(pattern, text.lower())), "adam")


def modelled_optimizer(name: str) -> str:
    """The optimiser that models ``name``: itself, or adam where it is not modelled."""
    return name if name in OPTIMIZERS else "adam"


def shards_of(framework: str, ranks: int, cp: int) -> int:
    """Ranks of one sharding group, counted over data-parallel and context ranks, of a run that states ``ranks``.

    >>> shards_of("torchtitan", 4, 2), shards_of("fms-fsdp", 8, 2)
    (8, 8)
    """
    return ranks * cp if framework in _SHARDS_OF_DATA_AXIS else ranks


def sole_choice(framework: str, setting: str) -> str | None:
    """The only choice that a framework has for a setting that a run leaves open; None if it has several.

    >>> sole_choice("megatron-2021", "attention"), sole_choice("megatron", "attention")
    ('unfused', None)
    """
    choices = [name for name, weight in framework_default(framework, setting).items() if weight > 0]
    return choices[0] if len(choices) == 1 else None
