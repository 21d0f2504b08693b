"""Which blocks of a module run again in the backward pass: a nest of checkpoints over the numbers of its blocks.

A tree is a sequence of blocks and checkpoints in forward order. A block that stands in no checkpoint saves what its
backward reads. A checkpoint keeps only its input; before its backward, what is in it runs again, with the checkpoints
inside it as they stand there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Saves = Literal["all", "products", "8bit"]
"""What a block saves: all that autograd asks for; in a checkpoint, results of products and attention only; or all, but
activations in 8 bits."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Blocks, and further checkpoints, of which only the first input is kept."""

    items: tuple[int | Checkpoint, ...]


Tree = tuple[int | Checkpoint, ...]


def leaves(tree: Tree) -> Iterator[int]:
    """Numbers of the blocks of a tree, in order.

    >>> list(leaves((Checkpoint((0, Checkpoint((1, 2)))), 3)))
    [0, 1, 2, 3]
    """
    for item in tree:
        if isinstance(item, Checkpoint):
            yield from leaves(item.items)
        else:
            yield item


def checkpoints(tree: Tree) -> Iterator[Checkpoint]:
    """All checkpoints of a tree, outer ones first.

    >>> len(list(checkpoints((Checkpoint((0, Checkpoint((1, 2)))), 3))))
    2
    """
    for item in tree:
        if isinstance(item, Checkpoint):
            yield item
            yield from checkpoints(item.items)


def plain(count: int) -> Tree:
    """No checkpoint.

    >>> plain(2)
    (0, 1)
    """
    return tuple(range(count))


def grouped(count: int, size: int) -> Tree:
    """A checkpoint around every group of so many blocks.

    >>> [list(leaves(one.items)) for one in grouped(5, 2)]
    [[0, 1], [2, 3], [4]]
    """
    return tuple(Checkpoint(tuple(range(i, min(i + size, count)))) for i in range(0, count, size))


def every(count: int, step: int) -> Tree:
    """A checkpoint around one block of so many; the others save.

    >>> text(every(4, 2))
    '[0] 1 [2] 3'
    """
    return tuple(Checkpoint((i,)) if i % step == 0 else i for i in range(count))


def text(tree: Tree) -> str:
    """A tree in one line, with brackets around checkpoints.

    >>> text((Checkpoint((0, Checkpoint((1, 2)))), 3))
    '[0 [1 2]] 3'
    """
    return " ".join(f"[{text(item.items)}]" if isinstance(item, Checkpoint) else str(item) for item in tree)
