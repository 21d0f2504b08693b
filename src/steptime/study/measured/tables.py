"""The tables of this package: TOML files beside it, read once."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from steptime.study.measured.read import Row


@cache
def table(name: str) -> Mapping[str, Any]:
    """The table of that name, for example ``"frameworks"``."""
    file = resources.files("steptime.study.measured") / "tables" / f"{name}.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


def framework_of(row: Row) -> str:
    """Framework of a run, ``generic`` where nothing says it.

    >>> framework_of(Row(1, {"source_key": "vtrain"})), framework_of(Row(1, {"framework": "NeMo 2.0"}))
    ('megatron-deepspeed', 'megatron-core')
    """
    rules = table("frameworks")
    for rule in rules["pattern"]:
        if any(re.search(rule["match"], row.text(column), re.IGNORECASE) for column in rule["columns"]):
            return str(rule["framework"])
    return str(rules["source_key"].get(row.text("source_key").lower(), "generic"))


def framework_default(framework: str, setting: str) -> dict[str, float]:
    """Choices of a setting and their weights where a row does not state it."""
    defaults = table("defaults")
    choices: dict[str, float] = defaults.get(framework, defaults["*"])[setting]
    return choices
