"""Decision on the moves of a search: those whose gain exceeds the doubt are made, with the moves they depend on."""

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
    """The graph with the accepted moves, and every move with its gain and doubt.

    Args:
        problem: the searched problem.
        found: the cheapest graph.
        everything: make moves within the doubt too.
        by_time: time is the objective, so that doubt decides; if False, the cost is exact.

    A move that removes nodes of another move is in one group with it, and a group is decided together, by all that it
    removes and adds. Nodes that a group adds and removes again have no part in its doubt. Of a group in doubt, the
    longest prefix of moves whose gain exceeds the doubt is made. If moves are dropped, the others are found again in
    the original graph, and made.
    """
    prices = problem.cost.prices
    whole = prices.sums(problem.flow, problem.flow.operators)
    priced = [_Priced(move, *removed_and_added(move.flow, move.match.replace)) for move in found.path]
    steps: list[Step] = []
    accepted: list[_Priced] = []
    for group in _groups(priced):
        sure = len(group) if everything or not by_time else _sure(prices, whole, group)
        names = " and ".join(dict.fromkeys(each.move.rewrite_pass.name for each in group[:sure]))
        accepted += group[:sure]
        for n, each in enumerate(group):
            certain = n < sure
            old, new = (prices.sums(each.move.flow, nodes) for nodes in (each.old, each.new))
            own = prices.change(whole, old, new)
            alone = own.band_s[0] > 0 or not by_time
            why = DOUBTFUL if not certain else CERTAIN if alone else TOGETHER.format(names)
            steps.append(_step(each, own, certain, "all rewrites were asked for" if everything else why))
    if len(accepted) == len(priced):
        return found, tuple(steps)
    chosen = {id(each) for each in accepted}
    flow = _replayed(problem, [each for each in priced if id(each) in chosen])
    return replace(found, flow=flow, cost=problem.cost.of_graph(flow)), tuple(steps)


def _step(each: _Priced, change: Change, applied: bool, why: str) -> Step:
    row, match = each.move.rewrite_pass, each.move.match
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


def _groups(priced: Sequence[_Priced]) -> list[list[_Priced]]:
    """Groups of moves that remove nodes of each other."""
    maker: dict[Kind, int] = {}
    label = list(range(len(priced)))
    for n, each in enumerate(priced):
        merged = {label[maker[kind]] for kind in kinds(each.old) if kind in maker}
        for m, old in enumerate(label[:n]):
            if old in merged:
                label[m] = n
        maker |= dict.fromkeys(kinds(each.new), n)
    found: dict[int, list[_Priced]] = defaultdict(list)
    for n, each in enumerate(priced):
        found[label[n]].append(each)
    return list(found.values())


def _sure(prices: Prices, whole: Sums, group: Sequence[_Priced]) -> int:
    """Length of the longest prefix of a group whose gain exceeds its doubt."""
    counts = range(len(group), 0, -1)
    return next((n for n in counts if _group_change(prices, whole, group[:n]).band_s[0] > 0), 0)


def _group_change(prices: Prices, whole: Sums, group: Sequence[_Priced]) -> Change:
    """Change by a group, without nodes that it adds and removes again."""
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
        kept = [(*example[kind], abs(n)) for kind, n in count.items() if n * sign > 0]
        sides.append(_added([(prices.sums(flow, [node]), times) for flow, node, times in kept]))
    return prices.change(whole, *sides)


def _added(rows: Iterable[tuple[Sums, int]]) -> Sums:
    """Weighted total of sums, each counted a number of times."""
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
    """The graph with some of the moves, each found again by the kinds of nodes that it removes and adds."""
    space = Space(problem=problem)
    flow = space.tidied(problem.flow)
    for each in accepted:
        kind = kinds(each.old), kinds(each.new)
        for _ in range(each.move.count):
            match = next(_alike(problem, flow, each.move.rewrite_pass, kind), None)
            made = None if match is None else space.applied(flow, match)
            if made is None:
                break
            flow = made
    return flow


def _alike(problem: Problem, flow: Flow, row: Pass, kind: tuple[object, object]) -> Iterator[Match]:
    for match in row.find(problem.scene(flow)):
        old, new = removed_and_added(flow, match.replace)
        if (kinds(old), kinds(new)) == kind:
            yield match
