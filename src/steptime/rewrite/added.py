"""Sets of passes beyond the own ones, which packages enter under the entry point ``steptime.moves``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from steptime.registry import Registry
from steptime.rewrite.scene import Pass

MUTANTS: Final = "mutants"
RULES: Final = "rules"

SETS: Final = Registry[Callable[[str], tuple[Pass, ...]]]("set of moves", "steptime.moves")
"""Name -> a function from what the user gives with it, or nothing, to passes."""


def added(name: str, given: str = "") -> tuple[Pass, ...]:
    """The passes of a set.

    Args:
        name: of the set.
        given: what the user says of it; the name of a file of rules, for one.

    Raises:
        UnknownNameError: there is no set of this name.
        UserError: what was given is wrong.
    """
    return SETS[name](given)
