"""All graphs that the moves reach: the cheapest of them is proved."""

from __future__ import annotations

from collections import deque
from typing import Final

from steptime.rewrite.flow import Flow
from steptime.rewrite.search.best_first import Way, path_of
from steptime.rewrite.search.control import Control
from steptime.rewrite.search.problem import Found, Move, Problem
from steptime.rewrite.search.space import EPSILON, Space

LIMIT: Final = "limit of"
CLOSED: Final = "every reachable graph was priced"
MOST_GRAPHS: Final = 10_000


def exhaustive(problem: Problem, most: int = MOST_GRAPHS, control: Control | None = None) -> Found:
    r"""Close the set of reachable graphs, and give the cheapest.

    Args:
        problem: graph, moves, cost; up to some 20 operators.
        most: graphs that are made at most.
        control: when to stop before, and whom to tell.

    Where the set closes, $\min_{G} C(G)$ is taken over all of it, and the bound is the cost. Every graph of the set is
    tidied after each move. Where it does not close, the bound is zero. Source: definition.
    """
    control = control or Control()
    space = Space(problem=problem)
    start = space.tidied(problem.flow)
    waiting: deque[tuple[Flow, Way | None]] = deque([(start, None)])
    seen: set[object] = {Space.key(start)}
    best, best_cost, best_way = start, problem.cost.of_graph(start), None
    stop: str | None = None
    told = 0
    while waiting and stop is None:
        flow, way = waiting.popleft()
        scene = problem.scene(flow)
        for row, match in ((each, match) for each in space.rows for match in each.find(scene)):
            made = space.made(flow, match)
            if made is None or (key := Space.key(made)) in seen:
                continue
            if len(seen) >= most:
                stop = f"{LIMIT} {most:,} graphs"
                break
            seen.add(key)
            reached = Way(Move(row=row, flow=flow, match=match), way)
            waiting.append((made, reached))
            cost = problem.cost.of_graph(made)
            if cost < best_cost * (1 - EPSILON):
                best, best_cost, best_way = made, cost, reached
        stop = stop or control.why()
        control.saw("exhaustive", len(seen) - told, best_cost)
        told = len(seen)
    closed = stop is None
    return Found(
        flow=best,
        cost=best_cost,
        bound=best_cost if closed else 0.0,
        graphs=len(seen),
        stop=stop or CLOSED,
        path=path_of(best_way),
    )
