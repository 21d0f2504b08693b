"""The tree of modules: what is above a path, and what ran outside all modules."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Final, Protocol, TypeVar

from steptime.captured.graph import Call

WHOLE: Final = "(model)"
LOSS: Final = "(loss)"
OPTIMIZER: Final = "(optimizer)"
OUTSIDE: Final = "(outside modules)"
TOPS: Final = (WHOLE, LOSS, OPTIMIZER, OUTSIDE)
NUMBERED: Final = re.compile(r"\*|\d[\d,/+-]*")
"""Members of a list of modules: one, some of them (:func:`members_text`), all."""
PARTS: Final = 3
"""Runs of members that a name lists."""


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
        levels += not NUMBERED.fullmatch(word)
        if levels > depth:
            break
        out.append(".".join(words[:number]))
    return out


def folded_names(paths: Iterable[str], forward: Iterable[tuple[str, Hashable]]) -> dict[str, str]:
    """Path of each module -> the name that it shares with its like: members of one list that run the same.

    ``forward``: module and cost of each call of the forward pass, in order. The backward pass may differ: nobody asks
    for the gradient of the first block's input.

    >>> folded_names(["l.0.a", "l.1.a"], [("l.0.a", 7), ("l.1.a", 7)])
    {'l.0.a': 'l.*.a', 'l.1.a': 'l.*.a'}
    >>> folded_names(["l.0", "l.1", "l.2"], [("l.0", 7), ("l.1", 8), ("l.2", 8)])
    {'l.0': 'l.0', 'l.1': 'l.1-2', 'l.2': 'l.1-2'}
    """
    ran: dict[str, list[tuple[str, Hashable]]] = {}
    for path, cost in forward:
        for member, below in _members(path):
            ran.setdefault(member, []).append((below, cost))
    known = dict.fromkeys(paths)
    lists: dict[str, dict[int, Hashable]] = {}
    for path in known:
        for member, _ in _members(path):
            above, _, number = member.rpartition(".")
            lists.setdefault(above, {})[int(number)] = tuple(ran.get(member, ()))
    texts = {above: _texts(costs) for above, costs in lists.items()}
    return {path: _folded(path, texts) for path in known}


def _members(path: str) -> list[tuple[str, str]]:
    """Members of lists on the way to a module, and its path below each.

    >>> _members("layers.0.mlp.2.act")
    [('layers.0', 'mlp.2.act'), ('layers.0.mlp.2', 'act')]
    """
    words = path.split(".")
    return [(".".join(words[: n + 1]), ".".join(words[n + 1 :])) for n, word in enumerate(words) if word.isdecimal()]


def _texts(costs: Mapping[int, Hashable]) -> dict[int, str]:
    """Members of a list -> the name of all that cost the same."""
    alike: dict[Hashable, list[int]] = {}
    for number in sorted(costs):
        alike.setdefault(costs[number], []).append(number)
    if len(alike) == 1 and len(costs) > 1:
        return dict.fromkeys(costs, "*")
    return {number: members_text(like) for like in alike.values() for number in like}


def _folded(path: str, texts: Mapping[str, Mapping[int, str]]) -> str:
    words = path.split(".")
    return ".".join(texts[".".join(words[:n])][int(word)] if word.isdecimal() else word for n, word in enumerate(words))


def members_text(numbers: Sequence[int]) -> str:
    """Members of a list: runs, a step after ``/``, and after ``+`` how many more there are; no point, as in a path.

    >>> members_text([0, 1, 2, 5]), members_text([4, 12, 20, 28]), members_text([0, 1, 5, 8, 9, 11, 12, 13])
    ('0-2,5', '4-28/8', '0-1,5,8-9,+3')
    """
    steps = {after - before for before, after in pairwise(numbers)}
    if len(numbers) > 2 and len(steps) == 1 and 1 not in steps:
        return f"{numbers[0]}-{numbers[-1]}/{steps.pop()}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs[:PARTS]]
    more = sum(len(run) for run in runs[PARTS:])
    return ",".join([*parts, *([f"+{more}"] if more else [])])


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
