"""Further sets of passes, which packages register under the entry point ``steptime.moves``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from steptime.registry import Registry
from steptime.rewrite.scene import Pass

MUTANTS: Final = "mutants"
RULES: Final = "rules"

SETS: Final = Registry[Callable[[str], tuple[Pass, ...]]]("set of moves", "steptime.moves")
"""Name -> function from the user's text (or an empty one) to passes."""


def added(name: str, given: str = "") -> tuple[Pass, ...]:
    """The passes of a set.

    Args:
        name: name of the set.
        given: argument from the user, such as the name of a file of rules.

    Raises:
        UnknownNameError: there is no set of this name.
        UserError: the argument is invalid.
    """
    return SETS[name](given)
