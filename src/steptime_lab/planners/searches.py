"""Baselines by name: random, greedy, descent, Markov chain Monte Carlo, axis by axis, tree by tree, learned."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

import numpy as np

from steptime.num import Array
from steptime.registry import Registry
from steptime.sharding.local_search import Budget, Meter, Method, Trace, Walk, greedy, random_choice, searched
from steptime.sharding.portfolio import PRICES, priced, unit_of
from steptime.sharding.presolve import Conflict, presolve
from steptime.sharding.problem import Problem, feasible, memories_bytes, only, total_s

BATCH: Final = 64
"""Random choices evaluated at once."""
BETA: Final = 1000.0
"""Inverse temperature of the chain, over the total: an increase by 1/1000 is accepted with probability 1/e."""
RETURN: Final = 2000
"""Proposals without a new best after which the Markov chain returns to the best choice."""


def at_random(meter: Meter, rng: np.random.Generator) -> None:
    """Independent random choices until the budget is spent."""
    while True:
        meter.scores_s(random_choice(meter, rng, BATCH))


def greedily(meter: Meter, rng: np.random.Generator) -> None:
    """The single choice of :func:`greedy`."""
    greedy(meter)


def mcmc(meter: Meter, rng: np.random.Generator) -> None:
    """Metropolis sampling as in FlexFlow: the option of one node is proposed at a time, and its change evaluated.

    A proposal is accepted with probability min(1, exp(-beta change)); after :data:`RETURN` proposals without a new best
    the chain returns to the best. It starts from the greedy choice (FlexFlow: also from known strategies).

    Source: Jia et al., "Beyond data and model parallelism for deep neural networks", arXiv 1807.05358, section 6.2.
    """
    walk = Walk(meter, greedy(meter))
    score = least = float(meter.scores_s(walk.choice[None, :])[0])
    best, since, sizes = walk.choice.copy(), 0, meter.problem.sizes
    while True:
        node = int(rng.integers(len(best)))
        option = int(rng.integers(sizes[node]))
        change = float(walk.deltas_s(node)[option])
        if change <= 0 or rng.random() < math.exp(-min(BETA * change / max(abs(score), 1e-300), 700.0)):
            walk.take(node, option)
            score += change
        since += 1
        if score < least:
            best, least, since = walk.choice.copy(), score, 0
            meter.offer(best)
        elif since > RETURN:
            walk, score, since = Walk(meter, best), least, 0
        meter.spend(1)


def trees(meter: Meter, rng: np.random.Generator) -> None:
    """Dynamic programming: exact where reductions eliminate the whole graph, as they do for chains and trees.

    Otherwise the nodes of random trees are solved exactly, tree after tree, with the other nodes fixed, starting from
    the greedy choice: the total never increases. A price on memory is raised until the choice fits.
    """
    start = greedy(meter)
    unit_s = unit_of(meter)
    for share in PRICES if meter.problem.limited else PRICES[:1]:
        problem = priced(meter.soft, share * unit_s)
        whole = presolve(problem)
        if not isinstance(whole, Conflict) and not whole.problem.nodes:
            start = whole.recover([])
            meter.offer(start)
            meter.spend(1)
        else:
            start = _tree_by_tree(meter, problem, start, rng, forever=not meter.problem.limited)
        fits = (memories_bytes(meter.problem, start[None, :]) <= meter.problem.limit_bytes).all()
        if fits and feasible(meter.problem, start):
            return


STILL: Final = 8
"""The descent ends after this number of trees in a row without an improvement."""


def _tree_by_tree(meter: Meter, problem: Problem, choice: Array, rng: np.random.Generator, *, forever: bool) -> Array:
    still, score = 0, total_s(problem, choice)
    while forever or still < STILL:
        free = _forest(problem, rng)
        nodes = tuple(
            node if at in free else only(node, np.array([choice[at]])) for at, node in enumerate(problem.nodes)
        )
        part = presolve(replace(problem, nodes=nodes))
        if isinstance(part, Conflict):
            break
        better = part.recover([])
        new = total_s(problem, better)
        still = 0 if new < score * (1 - 1e-12) else still + 1
        if new <= score:
            choice, score = better, new
        meter.offer(choice)
        meter.spend(1)
    return choice


def _forest(problem: Problem, rng: np.random.Generator) -> set[int]:
    """Nodes whose subgraph has no cycle, added greedily in random order."""
    group = list(range(len(problem.nodes)))

    def root(node: int) -> int:
        while group[node] != node:
            group[node] = group[group[node]]
            node = group[node]
        return node

    free: set[int] = set()
    for node in rng.permutation(len(problem.nodes)).tolist():
        roots = [root(other) for other in {other for other, _ in problem.incident[node]} & free]
        if len(set(roots)) == len(roots):
            free.add(node)
            for each in roots:
                group[each] = node
    return free


BASELINES: Final = Registry[Method]("baseline", "steptime.sharding_baselines")
for _name, _place in {
    "random": "steptime_lab.planners.searches:at_random",
    "greedy": "steptime_lab.planners.searches:greedily",
    "local": "steptime.sharding.local_search:descend",
    "mcmc": "steptime_lab.planners.searches:mcmc",
    "rl": "steptime_lab.planners.learned:policy_gradient",
    "bayesian": "steptime_lab.planners.learned:bayesian",
    "learned": "steptime_lab.planners.learned:learned_cost",
    "hierarchical": "steptime.sharding.portfolio:axis_by_axis",
    "tree": "steptime_lab.planners.searches:trees",
    "exact": "steptime.sharding.ilp:exact",
}.items():
    BASELINES.later(_name, _place)


def search(method: str, problem: Problem, budget: Budget | None = None, seed: int = 0) -> Trace:
    """Run a baseline by its name; Ctrl-C ends it with its best choice so far.

    Raises:
        UnknownNameError: the name is unknown.

    >>> from steptime.sharding.problem import Node
    >>> nodes = tuple(Node(name=name, cost_s=np.array([2.0, 1.0])) for name in "ab")
    >>> trace = search("greedy", Problem(nodes=nodes))
    >>> trace.choice, trace.total_s, trace.stop
    ((1, 1), 2.0, 'finished')
    """
    return searched(BASELINES[method], problem, budget, seed, method)
