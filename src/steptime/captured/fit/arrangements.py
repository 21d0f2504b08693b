"""Ways to make activations again or to keep them narrow, for a number of blocks and their chain."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from steptime.captured.fit.choice import Checkpoints
from steptime.captured.fit.layout import Layout
from steptime.captured.fit.trees import tree_of
from steptime.captured.graph.checkpoints import Saves, Tree, every, grouped, leaves, plain, text
from steptime.captured.rematerialisation import rotor

OPTIMAL: Final = 6
"""Schedules of the optimal chain that are proposed."""


class Arranged(NamedTuple):
    """Checkpoints as they are captured."""

    tree: Tree
    saves: Saves


def arrangements(count: int, layout: Layout | None, *, groups: bool, narrow: bool) -> dict[Checkpoints, Arranged]:
    """All that are tried, the simple ones first.

    Args:
        count: blocks.
        layout: their chain, if they form one.
        groups: whether a checkpoint may hold several blocks: they stand in one list.
        narrow: whether saved activations may have fewer bits.
    """
    return dict(_arrangements(count, layout, groups=groups, narrow=narrow))


def _arrangements(
    count: int, layout: Layout | None, *, groups: bool, narrow: bool
) -> Iterator[tuple[Checkpoints, Arranged]]:
    yield Checkpoints(), Arranged(plain(count), "all")
    if not count:
        return
    if narrow:
        yield _named("8bit-activations", "saved activations in 8 bits"), Arranged(plain(count), "8bit")
    yield _named("selective", "selective"), Arranged(grouped(count, 1), "products")
    if count > 2:
        yield _named("every", "every 2nd block", k="2"), Arranged(every(count, 2), "all")
    yield _named("all", "all blocks"), Arranged(grouped(count, 1), "all")
    if not groups:
        return
    for size in _sizes(count):
        words = {"k": str(size), "segments": str(-(-count // size))}
        yield _named("groups", f"groups of {size}", **words), Arranged(grouped(count, size), "all")
    seen = {text(grouped(count, size)) for size in (1, *_sizes(count))} | {text(plain(count)), text(every(count, 2))}
    for tree in _optimal(layout) if layout is not None else ():
        if text(tree) not in seen:
            name = f"optimal, {_again(tree)} of {count} blocks again"
            yield _named("optimal", f"{name}: {text(tree)}", tree=text(tree)), Arranged(tree, "all")


def _named(key: str, name: str, **values: str) -> Checkpoints:
    return Checkpoints(key=key, name=name, values=tuple(values.items()))


def _sizes(count: int) -> tuple[int, ...]:
    """Sizes of groups around the square root of the number of blocks."""
    root = max(round(count**0.5), 2)
    return tuple(sorted({size for size in (root // 2, root, 2 * root) if 1 < size < count}))


def _again(tree: Tree) -> int:
    """Blocks that run again."""
    return sum(1 for item in tree if not isinstance(item, int) for _ in leaves((item,)))


def _optimal(layout: Layout) -> Iterable[Tree]:
    """Some schedules of the front of memory and time, evenly spread."""
    front = rotor.front(layout.chain)
    step = max(len(front) / OPTIMAL, 1.0)
    for number in range(min(OPTIMAL, len(front))):
        tree = tree_of(front[int(number * step)].schedule)
        if tree and tree[-1] == layout.blocks:
            yield tree[:-1]
