"""Which of the moves that a search chose are made: those whose gain exceeds the doubt, and what they rest on."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from steptime.captured.graph import Node
from steptime.rewrite.engine import CERTAIN, Step, kinds
from steptime.rewrite.flow import Flow, removed_and_added
from steptime.rewrite.pricing import Change, Prices, Sums
from steptime.rewrite.scene import Match, Pass
from steptime.rewrite.search.problem import Found, Move, Problem
from steptime.rewrite.search.space import Space

DOUBTFUL: Final = "the gain is within the doubt"
TOGETHER: Final = "the gain of {} exceeds the doubt"

Kind = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class _Priced:
    move: Move
    old: list[Node]
    new: list[Node]


def decide(problem: Problem, found: Found, *, everything: bool, by_time: bool) -> tuple[Found, tuple[Step, ...]]:
    """The graph with the moves that are made, and every move with its gain and doubt.

    Args:
        problem: what was searched.
        found: the cheapest graph.
        everything: make moves within the doubt too.
        by_time: time is the objective, so that doubt decides; otherwise the cost is exact.

    Moves are grouped: one that takes what another made, and that one, are decided together, by what the whole group
    removes and adds. What a group makes and takes away again is not in its doubt. Of a group in doubt, the most moves
    from its first whose gain exceeds the doubt are made. What is left out is left out of the graph: the others are
    found again, and made.
    """
    prices = problem.cost.prices
    whole = prices.sums(problem.flow, problem.flow.operators)
    priced = [_Priced(move, *removed_and_added(move.flow, move.match.replace)) for move in found.path]
    steps: list[Step] = []
    accepted: list[_Priced] = []
    for group in _groups(priced):
        sure = len(group) if everything or not by_time else _sure(prices, whole, group)
        names = " and ".join(dict.fromkeys(each.move.row.name for each in group[:sure]))
        accepted += group[:sure]
        for n, each in enumerate(group):
            certain = n < sure
            own = _change(prices, whole, each)
            alone = own.band_s[0] > 0 or not by_time
            why = DOUBTFUL if not certain else CERTAIN if alone else TOGETHER.format(names)
            steps.append(_step(each, own, certain, "all rewrites were asked for" if everything else why))
    if len(accepted) == len(priced):
        return found, tuple(steps)
    chosen = {id(each) for each in accepted}
    flow = _replayed(problem, [each for each in priced if id(each) in chosen])
    return replace(found, flow=flow, cost=problem.cost.of_graph(flow)), tuple(steps)


def _step(each: _Priced, change: Change, applied: bool, why: str) -> Step:
    row, match = each.move.row, each.move.match
    return Step(
        name=row.name,
        what=match.what,
        count=each.move.count,
        modules=(each.move.flow.block(match.root),),
        applied=applied,
        why=why,
        change=change.times(each.move.count),
        fuses=row.fuses,
        reorders=row.reorders,
    )


def _change(prices: Prices, whole: Sums, each: _Priced) -> Change:
    flow = each.move.flow
    return prices.change(whole, prices.sums(flow, each.old), prices.sums(flow, each.new))


def _groups(priced: Sequence[_Priced]) -> list[list[_Priced]]:
    """Moves that take what others made, with those."""
    maker: dict[Kind, int] = {}
    label = list(range(len(priced)))
    for n, each in enumerate(priced):
        joined = {label[maker[kind]] for kind in kinds(each.old) if kind in maker}
        for m, old in enumerate(label[:n]):
            if old in joined:
                label[m] = n
        maker |= dict.fromkeys(kinds(each.new), n)
    found: dict[int, list[_Priced]] = defaultdict(list)
    for n, each in enumerate(priced):
        found[label[n]].append(each)
    return list(found.values())


def _sure(prices: Prices, whole: Sums, group: Sequence[_Priced]) -> int:
    """How many moves of a group, from the first, gain more than their doubt together."""
    counts = range(len(group), 0, -1)
    return next((n for n in counts if _group_change(prices, whole, group[:n]).band_s[0] > 0), 0)


def _group_change(prices: Prices, whole: Sums, group: Sequence[_Priced]) -> Change:
    """What a group removes and adds, without what it makes and takes away again."""
    count: Counter[Kind] = Counter()
    example: dict[Kind, tuple[Flow, Node]] = {}
    for each in group:
        for nodes, sign in ((each.old, -1), (each.new, 1)):
            for node in nodes:
                (kind,) = kinds([node])
                example.setdefault(kind, (each.move.flow, node))
                count[kind] += sign * each.move.count
    sides: list[Sums] = []
    for sign in (-1, 1):
        rows = [(prices.sums(*_one(example[kind])), abs(n)) for kind, n in count.items() if n * sign > 0]
        sides.append(_added(rows))
    return prices.change(whole, *sides)


def _one(example: tuple[Flow, Node]) -> tuple[Flow, list[Node]]:
    return example[0], [example[1]]


def _added(rows: Iterable[tuple[Sums, int]]) -> Sums:
    """Sums of several kinds of nodes, each a number of times."""
    seconds: dict[str, float] = defaultdict(float)
    rows = list(rows)
    for sums, count in rows:
        for name, value in sums.seconds.items():
            seconds[name] += value * count

    def total(name: str) -> float:
        return sum(float(getattr(sums, name)) * count for sums, count in rows)

    names = ("host_s", "launches", "moved_bytes", "flops")
    kernels = tuple(kernel for sums, count in rows for kernel in sums.kernels * count)
    return Sums(seconds=dict(seconds), kernels=kernels, **{name: total(name) for name in names})


def _replayed(problem: Problem, accepted: Sequence[_Priced]) -> Flow:
    """The graph with some of the moves, each found again by what it removes and adds."""
    space = Space(problem=problem)
    flow = space.tidied(problem.flow)
    for each in accepted:
        wanted = kinds(each.old), kinds(each.new)
        for _ in range(each.move.count):
            match = next(_alike(problem, flow, each.move.row, wanted), None)
            made = None if match is None else space.made(flow, match)
            if made is None:
                break
            flow = made
    return flow


def _alike(problem: Problem, flow: Flow, row: Pass, wanted: tuple[object, object]) -> Iterator[Match]:
    for match in row.find(problem.scene(flow)):
        old, new = removed_and_added(flow, match.replace)
        if (kinds(old), kinds(new)) == wanted:
            yield match
