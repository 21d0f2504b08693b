"""A recorded step as a chain, and nested checkpoints as schedules of that chain.

The chain has one segment per block, and one for everything after the blocks.

Bytes are measured on the recorded step, so the schedule that saves everything has the peak of the step. Symbols are
defined in :mod:`~steptime.captured.rematerialisation.chain`. Two kinds of storages are outside the chain: those that
exist before the first block (states, embedding), and those that a backward leaves permanently (gradients of parameters,
and what the training loop holds).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from steptime.captured.cost import CostTable
from steptime.captured.graph import Program
from steptime.captured.graph.liveness import Liveness
from steptime.captured.graph.segments import Checkpoint, Tree, checkpoints, leaves
from steptime.captured.rematerialisation.chain import Action, Chain, Kind, Schedule, Segment, dropped, simulate
from steptime.num import Array


def schedule_of(tree: Tree) -> Schedule:
    """Actions of a tree of checkpoints: all items forward, then each item backward, a checkpoint after a rerun.

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
    """Tree of checkpoints that runs a schedule; None if there is none.

    >>> from steptime.captured.graph.segments import text
    >>> text(tree_of(schedule_of((Checkpoint((0, Checkpoint((1, 2)), 3)), 4))))
    '[0 [1 2] 3] 4'
    """
    if not schedule:
        return ()
    reader = _TreeReader(schedule)
    tree = reader.items(max(action.segment for action in schedule))
    return (
        tree if tree is not None and reader.position == len(schedule) and schedule_of(tree) == tuple(schedule) else None
    )


class _TreeReader:
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
        """Items up to a segment: spans from the forward actions, then inner checkpoints from the backward ones."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """Cost of a schedule, with everything outside the chain."""

    passes_bytes: float
    """Peak of forward and backward."""
    recomputed_s: float
    reissued_s: float
    """Time of the host to issue the kernels that run again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The chain of a step, and the storages outside it."""

    chain: Chain
    blocks: int
    beside_bytes: float
    """Bytes alive before the first block."""
    left_bytes: tuple[float, ...]
    """Bytes that the backward of each segment leaves permanently."""
    ends_bytes: float
    """Peak before the first block and after its backward."""
    host_s: tuple[float, ...]
    """Time of the host to issue each segment's forward."""
    unsaved_s: tuple[float, ...]
    """Time of each forward after the last result that it saves."""

    def weigh(self, tree: Tree) -> Weighed:
        """Peak and recomputation with some checkpoints; the tree ends with the segment after the blocks.

        A rerun stops once all saved tensors exist again: later operators of the last block of a checkpoint do not run
        again, nor does an inner checkpoint at its end, of which only the input is saved.
        """
        schedule = schedule_of(tree)
        run = simulate(self.chain, schedule)
        spared = self._spared(tree)
        left, peak = 0.0, self.ends_bytes
        for action, size in zip(schedule, run.action_bytes, strict=True):
            peak = max(peak, self.beside_bytes + size + left)
            if action.kind is Kind.BACKWARD:
                left += self.left_bytes[action.segment]
        again = sum((runs - 1) * n for runs, n in zip(run.forward_runs, self.host_s, strict=True))
        return Weighed(passes_bytes=peak, recomputed_s=run.recomputed_forward_s - spared, reissued_s=again)

    def _spared(self, tree: Tree) -> float:
        """Time of the parts of forwards that reruns of the checkpoints skip at their end."""
        out = 0.0
        for one in checkpoints(tree):
            last = one.items[-1]
            if isinstance(last, Checkpoint):
                out += sum(self.chain.segments[i].forward_s for i in leaves((last,)))
            else:
                out += self.unsaved_s[last]
        return out

    @property
    def left_total_bytes(self) -> float:
        """Bytes that all backwards leave permanently."""
        return sum(self.left_bytes)


def layout_of(program: Program, table: CostTable, paths: Sequence[str]) -> Layout | None:
    """Layout of blocks that run one after the other; None if they do not.

    Args:
        program: a step that saves everything.
        table: costs of the program.
        paths: modules of the blocks, in order.
    """
    spans = _spans(program, paths)
    return None if spans is None else _Reader(program, table, *spans).layout()


Spans = tuple[list[range], list[range]]


def _spans(program: Program, paths: Sequence[str]) -> Spans | None:
    """Calls of the forward and backward of each segment; the last segment is everything after the blocks."""
    owner = {path: number for number, path in enumerate(paths)}
    depth = {path.count(".") + 1 for path in paths}
    found: dict[str, dict[int, list[int]]] = {"forward": {}, "backward": {}}
    for number, call in enumerate(program.calls):
        words = call.module.split(".")
        block = next((owner[p] for n in depth if (p := ".".join(words[:n])) in owner), None)
        if block is not None and call.phase in found and not call.recomputed:
            span = found[call.phase].setdefault(block, [number, number])
            span[1] = number
    count = len(paths)
    if any(len(spans) != count for spans in found.values()):
        return None
    first = [found["forward"][i][0] for i in range(count)] + [found["forward"][count - 1][1] + 1]
    back = [found["backward"][i][0] for i in range(count)]
    begin = next(n for n, call in enumerate(program.calls) if call.phase == "backward")
    if first != sorted(first) or back != sorted(back, reverse=True) or not first[-1] <= begin <= back[-1]:
        return None
    ends = [found["backward"][0][1] + 1, *back]
    forward = [range(a, b) for a, b in zip(first, [*first[1:], begin], strict=True)]
    return forward, [range(a, b) for a, b in zip([*back, begin], ends, strict=True)]


class _Reader:
    """Reads the sizes of a chain from a program with known segments."""

    def __init__(self, program: Program, table: CostTable, forward: list[range], backward: list[range]) -> None:
        self.program, self.table, self.forward, self.backward = program, table, forward, backward
        self.live = Liveness(program)
        self.use = self.live.in_use_bytes
        last = len(program.calls)
        self.born: Array = np.array([s.born for s in program.storages], np.int64)
        self.freed: Array = np.array([last if s.freed is None else s.freed for s in program.storages], np.int64)
        self.size: Array = np.array([s.size_bytes for s in program.storages], np.int64)
        self.outputs = [self._read_later(i) for i in range(len(forward) - 1)]

    def _read_later(self, segment: int) -> set[int]:
        """Storages that the forward of a segment allocates and the forward of the next one reads."""
        span, following = self.forward[segment], self.forward[segment + 1]
        made = set(self._made(span, following.start - 1).tolist())
        return {s for n in following for s in self.program.calls[n].reads if s in made}

    def _made(self, span: range, alive: int) -> Array:
        """Storages that are allocated in a span and live beyond the call `alive`."""
        inside = (self.born >= span.start) & (self.born < span.stop) & (self.freed > alive)
        return np.flatnonzero(inside)

    def _bytes(self, numbers: Array | set[int]) -> float:
        return float(self.size[np.array(sorted(numbers), np.int64)].sum())

    def _peak(self, span: range) -> float:
        return float(self.use[span.start + 1 : span.stop + 1].max()) if len(span) else 0.0

    def layout(self) -> Layout:
        """Layout of the program: sizes of all segments, then the memory outside the chain."""
        count = len(self.forward)
        start = self.forward[0].start
        beside = float(self.size[(self.born < start) & (self.freed >= start)].sum())
        x = [0.0, *(self._bytes(numbers) for numbers in self.outputs)]
        saved, gradients, left, pins = [], [], [], []
        for i in range(count):
            made = set(self._made(self.forward[i], self.forward[i].stop - 1).tolist())
            out = self.outputs[i] if i < count - 1 else set()
            leaves, held = self._of_backward(i)
            if i == count - 1:
                held |= {n for n in made if self.freed[n] >= self.backward[i].stop}
            saved.append(self._bytes(made - out))
            gradients.append(self._bytes(leaves) if i else 0.0)
            left.append(self._bytes(held) + (0.0 if i else self._bytes(leaves)))
            pins.append(bool(out and any(s in out for n in self.backward[i] for s in self.program.calls[n].reads)))
        segments = self._segments(beside, x, saved, gradients, left, pins)
        stop = self.backward[0].stop
        optimizer = next((n for n, c in enumerate(self.program.calls) if c.phase == "optimizer"), stop)
        ends = max(self._peak(range(start)), self._peak(range(stop, optimizer)), 0.0)
        return Layout(
            chain=Chain(segments=segments), blocks=count - 1, beside_bytes=beside, left_bytes=tuple(left),
            ends_bytes=ends, host_s=tuple(self._sum(self.table.host_s, span) for span in self.forward),
            unsaved_s=tuple(self._unsaved_s(i) for i in range(count)),
        )  # fmt: skip

    def _of_backward(self, segment: int) -> tuple[set[int], set[int]]:
        """Storages that a backward passes on to the next backward, and those that it leaves permanently."""
        span = self.backward[segment]
        alive = self._made(span, span.stop - 1)
        before = self.backward[segment - 1] if segment else range(span.stop, span.stop)
        forever = {int(n) for n in alive if self.program.storages[n].category == "gradient"}
        forever |= {int(n) for n in alive if self.freed[n] >= (before.stop if segment else span.stop)}
        handed = set(alive.tolist()) - forever
        return handed, forever

    def _segments(
        self, beside: float, x: list[float], saved: list[float], gradients: list[float], left: list[float],
        pins: list[bool],
    ) -> tuple[Segment, ...]:  # fmt: skip
        count = len(self.forward)
        x = [*x, 0.0]
        gradients = [*gradients, 0.0]
        before, out = beside, []
        lived = []
        for i in range(count):
            lived.append(before)
            before += saved[i] + x[i + 1]
        done = 0.0
        transient = [0.0] * count
        for i in reversed(range(count)):
            now = lived[i] + saved[i] + pins[i] * x[i + 1] + gradients[i + 1] + done
            transient[i] = max(self._peak(self.backward[i]) - now - gradients[i], 0.0)
            done += left[i]
        for i, span in enumerate(self.forward):
            out.append(
                Segment(
                    forward_s=self._sum(self.table.seconds, span),
                    backward_s=self._sum(self.table.seconds, self.backward[i]), input_bytes=x[i], saved_bytes=saved[i],
                    gradient_bytes=gradients[i], backward_transient_bytes=transient[i], output_in_backward=pins[i],
                    saving_transient_bytes=max(self._peak(span) - lived[i] - x[i + 1] - saved[i], 0.0),
                    forward_transient_bytes=max(self._without_saving(span, i) - x[i + 1], 0.0),
                )
            )  # fmt: skip
        return tuple(out)

    def _without_saving(self, span: range, segment: int) -> float:
        """Peak of the storages that a forward allocates, if each is released after the last call that uses it."""
        keep = self.outputs[segment] if segment < len(self.outputs) else set()
        last: dict[int, int] = {}
        for number in span:
            call = self.program.calls[number]
            last.update(dict.fromkeys((*call.reads, *call.writes), number))
        change = np.zeros(len(span) + 1)
        for storage in self._made(span, span.start - 1).tolist():
            at = int(self.born[storage]) - span.start
            change[at] += self.size[storage]
            if storage not in keep:
                change[max(last.get(storage, span.start + at) - span.start, at) + 1] -= self.size[storage]
        scratch = [self.program.calls[number].scratch_bytes for number in span]
        return float((np.cumsum(change)[:-1] + np.array(scratch)).max()) if len(span) else 0.0

    def _unsaved_s(self, segment: int) -> float:
        """Time of a forward after its last result that only its backward reads."""
        span = self.forward[segment]
        out = self.outputs[segment] if segment < len(self.outputs) else set()
        made = set(self._made(span, span.stop - 1).tolist()) - out
        last = max((n for n in span if not made.isdisjoint(self.program.calls[n].writes)), default=span.stop)
        return self._sum(self.table.seconds, range(last + 1, span.stop))

    def _sum(self, values: Array, span: range) -> float:
        return float(values[span.start : span.stop].sum())
