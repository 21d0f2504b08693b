"""Baselines that change a choice node by node: random, greedy, coordinate descent, Markov chain Monte Carlo."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from steptime.num import Array
from steptime.sharding.baselines import Budget, Meter, Spent, Walk
from steptime.sharding.problem import Problem

BATCH: Final = 64
"""Random choices evaluated at once."""
SHAKEN: Final = 0.05
"""Share of nodes that a restart of the descent draws again."""
BETA: Final = 1000.0
"""Inverse temperature of the chain, as a multiple of one over the total: 1/1000 more is accepted with odds 1/e."""
RETURN: Final = 2000
"""Proposals without a new best after which the Markov chain goes back to the best."""


def random_choice(meter: Meter, rng: np.random.Generator, count: int = 1) -> Array:
    """Choices with every option equally likely, one a row."""
    return rng.integers(0, meter.problem.sizes, (count, len(meter.problem.nodes)))


def at_random(meter: Meter, rng: np.random.Generator) -> None:
    """Independent random choices until the budget is spent."""
    while True:
        meter.scores_s(random_choice(meter, rng, BATCH))


def greedily(meter: Meter, rng: np.random.Generator) -> None:
    """One choice: see :func:`greedy`."""
    greedy(meter)


def greedy(meter: Meter) -> Array:
    """Node by node in the order of the problem, each takes its cheapest option given the nodes before it.

    Nodes that come later count with the least memory of their options.
    """
    soft = meter.soft
    choice = np.zeros(len(soft.nodes), int)
    memory = soft.tables.fixed_bytes.copy()
    for moments, taken in soft.held:
        memory[moments] += taken.min(axis=0)
    for node, (moments, taken) in enumerate(soft.held):
        row = soft.nodes[node].cost_s
        for other, matrix in soft.incident[node]:
            if other < node:
                row = row + matrix[:, choice[other]]
        rest = memory[moments] - taken.min(axis=0)
        if len(moments):
            row = row + meter.excess_s(rest + taken)
        choice[node] = int(row.argmin())
        memory[moments] = rest + taken[choice[node]]
        meter.evaluations += len(row)
    meter.offer(choice)
    return choice


def descend(meter: Meter, rng: np.random.Generator) -> None:
    """Coordinate descent from the greedy choice, then, until the budget is spent, from the best, shaken."""
    walk = Walk(meter, greedy(meter))
    best, least = walk.choice.copy(), math.inf
    while True:
        settle(walk, rng)
        score = float(meter.scores_s(walk.choice[None, :])[0])
        if score <= least:
            best, least = walk.choice.copy(), score
        shaken = rng.random(len(best)) < max(SHAKEN, 1 / len(best))
        walk = Walk(meter, np.where(shaken, random_choice(meter, rng)[0], best))


def descended(problem: Problem, starts: Sequence[Sequence[int]], evaluations: float) -> Array | None:
    """The best choice on the way of coordinate descents from some choices and from the greedy one.

    None: none is legal and fits.
    """
    meter = Meter(problem, Budget(cpu_s=math.inf, evaluations=evaluations))
    try:
        for start in (*map(np.array, starts), greedy(meter)):
            meter.offer(start)
            settle(Walk(meter, start), np.random.default_rng(0))
    except Spent:
        pass
    return meter.best


def settle(walk: Walk, rng: np.random.Generator) -> None:
    """Gives every node its best option, in random order, until no change of one node helps."""
    count = len(walk.choice)
    waiting = dict.fromkeys(rng.permutation(count).tolist())
    while waiting:
        node = next(iter(waiting))
        del waiting[node]
        change = walk.deltas_s(node)
        option = int(change.argmin())
        if change[option] < -1e-15 * walk.meter.illegal_s:
            walk.take(node, option)
            waiting.update(dict.fromkeys(other for other, _ in walk.meter.soft.incident[node]))
            walk.meter.offer(walk.choice)
        walk.meter.spend(len(change))


def mcmc(meter: Meter, rng: np.random.Generator) -> None:
    """Metropolis sampling as FlexFlow searches: one node's option is proposed at a time, and its change evaluated.

    A proposal is accepted with probability min(1, exp(-beta change)); after a while without a new best the chain goes
    back to the best. It starts from the greedy choice (FlexFlow: from known strategies, too).

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
