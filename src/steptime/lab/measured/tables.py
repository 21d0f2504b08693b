"""The tables of this package: TOML files beside it, read once."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from steptime.lab.measured.read import TableRow
from steptime.plan.framework_file import bare_name, name_rules, own_names, rule_with


@cache
def table(name: str) -> Mapping[str, Any]:
    """The table of that name, for example ``"defaults"``."""
    file = resources.files("steptime.lab.measured") / "tables" / f"{name}.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


def framework_of(row: TableRow) -> str:
    """Framework of a run: by its own name, or by the rules; ``generic`` where nothing says it.

    >>> framework_of(TableRow(1, {"source_key": "vtrain"})), framework_of(TableRow(1, {"framework": "NeMo 2.0"}))
    ('megatron-deepspeed', 'megatron-core')
    >>> framework_of(TableRow(1, {"framework": "Megatron-2021"}))
    'megatron-2021'
    """
    named = row.text("framework").lower()
    if named in own_names():
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
    """Choices of recomputation and their weights; those of models with experts where the framework has their own.

    >>> [recompute_default("megatron-core", experts=experts)["full"] for experts in (True, False)]
    [0.05, 0.2]
    """
    own: dict[str, float] | None = table("defaults").get(framework, {}).get("recompute_experts") if experts else None
    return framework_default(framework, "recompute") if own is None else own
