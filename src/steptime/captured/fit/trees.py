"""Nests of checkpoints as schedules of a chain, and back."""

from __future__ import annotations

from collections.abc import Sequence

from steptime.captured.graph.checkpoints import Checkpoint, Tree, leaves
from steptime.captured.rematerialisation.chain import Action, Kind, Schedule, dropped


def schedule_of(tree: Tree) -> Schedule:
    """The actions that a nest of checkpoints runs: forward once, then each item backward, checkpoints after a rerun.

    >>> from steptime.captured.rematerialisation.chain import described
    >>> described(schedule_of((Checkpoint((0, 1)), 2)))
    'Fck0 Fn1 Fall2 B2 Fall0 Fall1 B1 B0'
    """
    out: list[Action] = []
    for item in tree:
        if isinstance(item, Checkpoint):
            out += dropped(tuple(leaves(item.items)))
        else:
            out.append(Action(Kind.SAVE, item))
    for item in reversed(tree):
        out += schedule_of(item.items) if isinstance(item, Checkpoint) else (Action(Kind.BACKWARD, item),)
    return tuple(out)


def tree_of(schedule: Sequence[Action]) -> Tree | None:
    """The nest of checkpoints that runs a schedule; None where there is none.

    >>> from steptime.captured.graph.checkpoints import text
    >>> text(tree_of(schedule_of((Checkpoint((0, Checkpoint((1, 2)), 3)), 4))))
    '[0 [1 2] 3] 4'
    """
    if not schedule:
        return ()
    reader = _Reader(schedule)
    tree = reader.items(max(action.segment for action in schedule))
    return (
        tree if tree is not None and reader.position == len(schedule) and schedule_of(tree) == tuple(schedule) else None
    )


class _Reader:
    """Reads a schedule from left to right."""

    def __init__(self, schedule: Sequence[Action]) -> None:
        self.schedule = schedule
        self.position = 0

    def _next(self, kind: Kind) -> int | None:
        if self.position < len(self.schedule) and self.schedule[self.position].kind is kind:
            self.position += 1
            return self.schedule[self.position - 1].segment
        return None

    def items(self, last: int) -> Tree | None:
        """Items up to a segment: what is forward now, and then what its backward says it was."""
        spans: list[tuple[int, int] | int] = []
        following = -1
        while following <= last:
            saved = self._next(Kind.SAVE)
            if saved is not None:
                spans.append(saved)
                following = saved + 1
            else:
                first = self._next(Kind.CHECKPOINT)
                if first is None:
                    return None
                end = first
                while self._following(end + 1):
                    end += 1
                spans.append((first, end))
                following = end + 1
        return self._backward(spans)

    def _following(self, segment: int) -> bool:
        at = self.position
        if at < len(self.schedule) and self.schedule[at] == Action(Kind.FORWARD, segment):
            self.position += 1
            return True
        return False

    def _backward(self, spans: Sequence[tuple[int, int] | int]) -> Tree | None:
        out: list[int | Checkpoint] = []
        for span in reversed(spans):
            if isinstance(span, int):
                if self._next(Kind.BACKWARD) != span:
                    return None
                out.append(span)
            else:
                inside = self.items(span[1])
                if inside is None:
                    return None
                out.append(Checkpoint(inside))
        return tuple(reversed(out))
