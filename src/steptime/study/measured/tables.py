"""The tables of this package: TOML files beside it, read once."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from steptime.plan.framework_library import bare_name
from steptime.study.measured.read import TableRow


@cache
def table(name: str) -> Mapping[str, Any]:
    """The table of that name, for example ``"frameworks"``."""
    file = resources.files("steptime.study.measured") / "tables" / f"{name}.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


@cache
def _named_frameworks() -> frozenset[str]:
    rules = table("frameworks")
    return frozenset([*rules["source_key"].values(), *(rule["framework"] for rule in rules["pattern"])])


def framework_of(row: TableRow) -> str:
    """Framework of a run: by its own name, or by the rules; ``generic`` where nothing says it.

    >>> framework_of(TableRow(1, {"source_key": "vtrain"})), framework_of(TableRow(1, {"framework": "NeMo 2.0"}))
    ('megatron-deepspeed', 'megatron-core')
    >>> framework_of(TableRow(1, {"framework": "Megatron-2021"}))
    'megatron-2021'
    """
    named = row.text("framework").lower()
    if named in _named_frameworks():
        return named
    rules = table("frameworks")
    if (near := _named_in(rules["nearest"], bare_name(named))) is not None:
        return str(near["framework"])
    source = row.text("source_key").lower()
    for rule in rules["pattern"]:
        if rule.get("source_key", source) == source and any(
            re.search(rule["match"], row.text(column), re.IGNORECASE) for column in rule["columns"]
        ):
            return str(rule["framework"])
    return str(rules["source_key"].get(source, "generic"))


def framework_called(text: str) -> str | None:
    """The framework that has exactly that name, spelling or older name in the rules; None: no framework has.

    >>> [framework_called(text) for text in ("NeMo", "Megatron-LM", "Megatron_DeepSpeed", "megatron", "megatrn")]
    ['megatron-core', 'megatron-core', 'megatron-deepspeed', 'megatron', None]
    """
    rule = _rule_called(text)
    return None if rule is None else str(rule["framework"])


def why_called(text: str) -> str:
    """Why a framework has that name of other software; empty where that goes without saying.

    >>> why_called("Megatron-LM"), why_called("torchtitan"), why_called("megatrn")
    ('Megatron-LM trains with Megatron-Core since 2023', '', '')
    """
    return str((_rule_called(text) or {}).get("why", ""))


def _rule_called(text: str) -> Mapping[str, Any] | None:
    """The rule by which a framework has that name."""
    rules: Mapping[str, Any] = table("frameworks")
    named = text.strip().lower()
    if (rule := _named_in(rules["today"], named)) is not None:
        return rule
    if named in _named_frameworks():
        return {"framework": named}
    if (rule := _named_in(rules["nearest"], bare_name(named))) is not None:
        return rule
    patterns: Sequence[Mapping[str, Any]] = rules["pattern"]
    whole = (p for p in patterns if "framework" in p["columns"] and "source_key" not in p)
    return next((p for p in whole if re.fullmatch(p["match"], named)), None)


def _named_in(rules: Sequence[Mapping[str, Any]], named: str) -> Mapping[str, Any] | None:
    return next((rule for rule in rules if named in rule["names"]), None)


def left_open(text: str) -> str:
    """What to give in place of a name that leaves open which framework it is; empty for any other name.

    >>> left_open("JAX"), left_open("megatron")
    ('name what runs on it: maxtext or paxml', '')
    """
    named = bare_name(text.strip())
    return next((str(rule["instead"]) for rule in table("frameworks")["open"] if named in rule["names"]), "")


def framework_default(framework: str, setting: str) -> dict[str, float]:
    """Choices of a setting and their weights where a row does not state it."""
    defaults = table("defaults")
    choices: dict[str, float] = defaults.get(framework, defaults["*"])[setting]
    return choices


def recompute_default(framework: str, *, experts: bool) -> dict[str, float]:
    """Choices of recomputation and their weights; those of models with experts where the framework has their own.

    >>> [recompute_default("megatron-core", experts=experts)["full"] for experts in (True, False)]
    [0.05, 0.2]
    """
    own: dict[str, float] | None = table("defaults").get(framework, {}).get("recompute_experts") if experts else None
    return framework_default(framework, "recompute") if own is None else own
