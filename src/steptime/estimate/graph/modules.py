"""The tree of modules: what is above a path, and what ran outside all modules."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, Protocol, TypeVar

from steptime.workload.graph import Call

WHOLE: Final = "(model)"
LOSS: Final = "(loss)"
OPTIMIZER: Final = "(optimizer)"
OUTSIDE: Final = "(outside modules)"
TOPS: Final = (WHOLE, LOSS, OPTIMIZER, OUTSIDE)
NUMBER: Final = re.compile(r"(?<![^.])\d+(?![^.])")
"""Number of a member of a list of modules."""


class Named(Protocol):
    """Anything with a name."""

    @property
    def name(self) -> str:
        """Path of a module, or one of `TOPS`."""
        ...


T = TypeVar("T", bound=Named)


def labels(calls: Sequence[Call]) -> list[str]:
    """Module of each call; for calls outside any submodule what they belong to.

    In training, what runs after the last submodule of the forward and before the first of the backward pass is the
    loss; what the root module itself does in between is not told apart from other calls outside. A program without
    submodules is the model's, all but its optimiser.
    """
    inside = [number for number, call in enumerate(calls) if call.module and call.phase == "forward"]
    back = [number for number, call in enumerate(calls) if call.module and call.phase == "backward"]
    elsewhere = OUTSIDE if inside or back else WHOLE
    trains = any(call.phase == "backward" for call in calls)
    between = range(inside[-1] + 1, back[0]) if trains and inside and back else range(0)
    return [
        call.module or (OPTIMIZER if call.phase == "optimizer" else LOSS if number in between else elsewhere)
        for number, call in enumerate(calls)
    ]


def ancestors(path: str, depth: int) -> list[str]:
    """A path and what is above it, from the root, down to a depth; numbers of members do not count as levels.

    >>> ancestors("layers.0.attn.q", 2)
    ['(model)', 'layers', 'layers.0', 'layers.0.attn']
    >>> ancestors("(loss)", 2)
    ['(loss)']
    """
    if path in TOPS:
        return [path]
    words, out, levels = path.split("."), [WHOLE], 0
    for number, word in enumerate(words, 1):
        levels += not (word == "*" or word.isdigit())
        if levels > depth:
            break
        out.append(".".join(words[:number]))
    return out


def tree_order(groups: Mapping[str, T]) -> list[T]:
    """Parents before their members, members in the order in which they came."""
    members: dict[str, list[str]] = {}
    for name in groups:
        if name not in TOPS:
            members.setdefault(name.rpartition(".")[0] or WHOLE, []).append(name)
    out: list[T] = []

    def visit(name: str) -> None:
        out.append(groups[name])
        for member in members.get(name, ()):
            visit(member)

    for top in TOPS:
        if top in groups:
            visit(top)
    return out
