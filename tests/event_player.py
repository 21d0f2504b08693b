"""Plays schedules event by event: what each stream does in its order, and what must have ended before."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import pairwise

Key = Hashable
Pass = tuple[str, int, int]
"""Kind (``F``, ``B``; of a split backward pass ``W``, the gradients of weights), micro-batch, virtual stage."""


def played(
    streams: Mapping[Key, Sequence[Key]], seconds: Mapping[Key, float], after: Mapping[Key, Iterable[Key]]
) -> dict[Key, float]:
    """When each action ends that starts once the one before it on its streams, and those it comes after, have ended.

    An action of several streams holds them all: both ends of a message for which both wait.
    """
    before = {key: list(after.get(key, ())) for key in seconds}
    for stream in streams.values():
        for one, following in pairwise(stream):
            before[following].append(one)
    followers: dict[Key, list[Key]] = {key: [] for key in seconds}
    for key, keys in before.items():
        for each in keys:
            followers[each].append(key)
    waits, starts = {key: len(keys) for key, keys in before.items()}, dict.fromkeys(seconds, 0.0)
    ends: dict[Key, float] = {}
    ready = [key for key, count in waits.items() if not count]
    while ready:
        key = ready.pop()
        ends[key] = starts[key] + seconds[key]
        for each in followers[key]:
            starts[each], waits[each] = max(starts[each], ends[key]), waits[each] - 1
            if not waits[each]:
                ready.append(each)
    assert len(ends) == len(seconds), "some actions wait for each other"
    return ends


def order_of(stage: int, stages: int, count: int, chunks: int = 1) -> list[Pass]:
    """Passes of a stage under 1F1B, or with several chunks under its interleaved form (arXiv 2104.04473)."""
    if chunks == 1:
        table, warm = [(i, 0) for i in range(count)], stages - 1 - stage
    else:
        rounds = range(0, count, stages)
        table = [(i, c) for r in rounds for c in range(chunks) for i in range(r, min(r + stages, count))]
        warm = 2 * (stages - 1 - stage) + (chunks - 1) * stages
    warm = min(warm, len(table))
    forward = [("F", i, c) for i, c in table]
    backward = [("B", i, chunks - 1 - c) for i, c in table]
    order = forward[:warm]
    for pair in zip(forward[warm:], backward, strict=False):
        order.extend(pair)
    return order + backward[len(table) - warm :]


def order_of_zero_bubble(stage: int, stages: int, count: int, depth: int) -> list[Pass]:
    """ZB-H1 (depth 1) and ZB-H2 (2): a stage makes as many forward passes ahead as stages are behind it, times the
    depth, and puts off as many gradients of weights as stages are before it, times the depth (arXiv 2401.10241)."""
    warm = min(depth * (stages - 1 - stage), count)
    order: list[Pass] = [("F", i, 0) for i in range(warm)]
    made = 0
    for i in range(count):
        order += [("F", warm + i, 0)] * (warm + i < count) + [("B", i, 0)]
        if i - made >= depth * stage:
            order.append(("W", made, 0))
            made += 1
    return order + [("W", i, 0) for i in range(made, count)]


def neighbour(kind: str, i: int, chunk: int, stage: int, stages: int, chunks: int) -> tuple[Pass, int] | None:
    """The pass whose result a pass needs, and its stage; None: the input of the model, or what the stage has itself."""
    if kind == "W":
        return ("B", i, chunk), stage
    step, end = (-1, 0) if kind == "F" else (1, stages - 1)
    if stage != end:
        return (kind, i, chunk), stage + step
    if 0 <= chunk + step < chunks:
        return (kind, i, chunk + step), stages - 1 - end
    return None if kind == "F" else (("F", i, chunk), stage)


def order_of_dual_pipe(rank: int, ranks: int, count: int) -> list[tuple[Pass, ...]]:
    """Passes of a rank of DualPipe, those that run beside each other as one (arXiv 2412.19437, figure 5).

    Lower case is the direction that enters at the nearer end, upper case the other; ``b-`` puts off the gradients of
    weights, for which ``w`` makes up. The passes of direction 0 have virtual stage 0, those of direction 1 have 1.
    """
    outward = min(rank, ranks - 1 - rank)
    inward = ranks // 2 - 1 - outward
    turns = ["B", "b"] * (outward + 1)
    paired = ["f|B", "F|b"] * (count // 2 - ranks + outward + 1)
    words = (
        ["f"] * (2 * inward) + ["f", "F"] * (outward + 1) + ["B-", "w", "F"] * inward
        + (paired if inward else ["f", "B", *paired[1:]]) + ["B", "F|b"] * inward
        + turns[: outward + 1] + [f"{word}-" for word in turns[outward + 1 :]] + ["w", "b-"] * inward
        + ["w"] * (outward + 1)
    )  # fmt: skip
    made: dict[tuple[str, int], int] = {}
    late: list[Pass] = []
    order: list[tuple[Pass, ...]] = []
    for word in words:
        if word == "w":
            order.append((late.pop(0),))
            continue
        action: list[Pass] = []
        for each in word.split("|"):
            kind, way = each[0].upper(), int(each[0].isupper() != (rank >= ranks // 2))
            number = made[kind, way] = made.get((kind, way), -1) + 1
            action.append((kind, number, way))
            if kind == "B":
                (late if each.endswith("-") else action).append(("W", number, way))
        order.append(tuple(action))
    return order
