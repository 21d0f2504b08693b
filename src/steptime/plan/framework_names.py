"""Names of training frameworks: their own, those of other software that trains with them, and older ones."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from steptime.plan.framework_library import bare_name


@cache
def framework_names() -> Mapping[str, Any]:
    """The rules: ``source_key``, ``pattern``, ``nearest``, ``today`` and ``open`` names."""
    file = resources.files("steptime.plan") / "framework_names.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


@cache
def own_names() -> frozenset[str]:
    """Names that the rules give frameworks."""
    rules = framework_names()
    return frozenset([*rules["source_key"].values(), *(rule["framework"] for rule in rules["pattern"])])


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
    rules: Mapping[str, Any] = framework_names()
    named = text.strip().lower()
    if (rule := rule_with(rules["today"], named)) is not None:
        return rule
    if named in own_names():
        return {"framework": named}
    if (rule := rule_with(rules["nearest"], bare_name(named))) is not None:
        return rule
    patterns: Sequence[Mapping[str, Any]] = rules["pattern"]
    whole = (p for p in patterns if "framework" in p["columns"] and "source_key" not in p)
    return next((p for p in whole if re.fullmatch(p["match"], named)), None)


def rule_with(rules: Sequence[Mapping[str, Any]], named: str) -> Mapping[str, Any] | None:
    """The first of some rules that lists a name."""
    return next((rule for rule in rules if named in rule["names"]), None)


def left_open(text: str) -> str:
    """What to give in place of a name that leaves open which framework it is; empty for any other name.

    >>> left_open("JAX"), left_open("megatron")
    ('name what runs on it: maxtext or paxml', '')
    """
    named = bare_name(text.strip())
    return next((str(rule["instead"]) for rule in framework_names()["open"] if named in rule["names"]), "")
