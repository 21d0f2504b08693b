"""Terms as an indented tree with shares; small ones are folded into one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from steptime.report.text import grid, printable, share

if TYPE_CHECKING:
    from rich.table import Table

#: Terms, or modules, below this share of the total are folded unless everything is wanted.
FOLD: Final = 0.005


@dataclass(slots=True)
class _Node:
    value: float = 0.0
    children: dict[str, _Node] = field(default_factory=dict)


def term_table(terms: Mapping[str, float], unit: Callable[[float], str], *, title: str, show_all: bool) -> Table:
    """Table of a term tree: name (indented), value, share of the total; largest first within a parent."""
    root = _tree(terms)
    table = grid((title, "", "share"))
    fold_below = 0.0 if show_all else FOLD * abs(root.value)
    for depth, name, value in _rows(root, 0, fold_below):
        table.add_row("  " * depth + printable(name), unit(value), share(value, root.value))
    table.add_row("total", unit(root.value), share(root.value, root.value))
    return table


def _tree(terms: Mapping[str, float]) -> _Node:
    root = _Node()
    for path, value in terms.items():
        node = root
        node.value += value
        for part in path.split("/"):
            node = node.children.setdefault(part, _Node())
            node.value += value
    return root


def _rows(node: _Node, depth: int, fold_below: float) -> Iterator[tuple[int, str, float]]:
    children = sorted(node.children.items(), key=lambda item: -abs(item[1].value))
    small = [(n, c) for n, c in children if abs(c.value) < fold_below or (not c.value and fold_below)]
    folded = len(small) > 1
    for name, child in children[: len(children) - len(small)] if folded else children:
        while len(child.children) == 1:
            (part, child), *_ = child.children.items()
            name = f"{name}/{part}"
        yield depth, name, child.value
        if abs(child.value) >= fold_below:
            yield from _rows(child, depth + 1, fold_below)
    if folded and (depth == 0 or len(small) < len(children)):
        yield depth, f"({len(small)} smaller)", sum(child.value for _, child in small)
