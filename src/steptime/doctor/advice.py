"""Advice in the terms of each framework, chosen from the rows of ``advice.toml``."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Final, Self

from steptime.doctor import gather

NAMES: Final[Mapping[str, str]] = gather.NAMES["software"]
#: Frameworks that take the options of another.
_LIKE: Final[Mapping[str, str]] = {"megatron-deepspeed": "megatron"}


class Switch(str):
    """Advice that a run may follow already: it does if it declares all of ``names``."""

    names: tuple[str, ...]
    """Options of the framework, or entries of the plan."""

    def __new__(cls, text: str, *names: str) -> Self:
        """The text with its names."""
        switch = super().__new__(cls, text)
        switch.names = names
        return switch


def _advice() -> Mapping[str, Mapping[str, tuple[str, ...]]]:
    """The table of ``advice.toml``."""
    table = tomllib.loads(resources.files("steptime.doctor").joinpath("advice.toml").read_text(encoding="utf-8"))
    return {
        code: {
            name: tuple(w if isinstance(w, str) else Switch(w["try"], *w["unless"]) for w in words)
            for name, words in entry.items()
        }
        for code, entry in table.items()
    }


ADVICE: Final = _advice()
"""Code of a finding -> framework (``any``: all) -> advice."""


def untried(words: Sequence[str], said: Mapping[str, object]) -> tuple[str, ...]:
    """Advice without what the run declares that it does already.

    >>> untried((Switch("ZeRO stage 1 or more", "zero"), "FusedAdam (no torch_adam)"), {"zero": 3})
    ('FusedAdam (no torch_adam)',)
    """
    return tuple(
        word
        for word in words
        if not (
            isinstance(word, Switch)
            and all((str(said.get(name)).lower() not in ("none", "false", "off", "0", "")) for name in word.names)
        )
    )


def advice_for(code: str, framework: str) -> tuple[str, ...]:
    """Advice for a finding: the framework's own, then the general; for a trace, the advice of every framework.

    >>> advice_for("skipped", "megatron")[0][:40]
    'a smaller initial loss scale or a longer'
    """
    table = ADVICE.get(code, {})
    if framework:
        framework = _LIKE.get(framework, framework)
        return (*table.get(framework, ()), *table.get("any", ()))
    each = tuple(f"{NAMES[name]}: {'; '.join(words)}" for name, words in table.items() if name != "any")
    return (*table.get("any", ()), *each)
