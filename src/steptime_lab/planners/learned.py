"""Baselines that learn from the choices they evaluate: policy gradient, Bayesian optimisation, a learned cost model."""

from __future__ import annotations

from typing import Final

import numpy as np

from steptime.num import Array
from steptime.registry import needed
from steptime.sharding.local_search import Meter, greedy, random_choice

BATCH: Final = 32
"""Choices of one update of the policy."""
RATE: Final = 2.0
"""Step size of the policy's own logits; the weights shared by all nodes have 1/10 of it over the number of nodes."""
FIRST: Final = 256
"""Random choices for the first fit of the cost model."""
PROPOSED, TAKEN = 1024, 64
"""Changed choices that the cost model ranks in a round, and the number of them that are evaluated."""
KEPT: Final = 4096
"""The cost model is fitted to at most this many evaluated choices, the latest."""


def policy_gradient(meter: Meter, rng: np.random.Generator) -> None:
    r"""REINFORCE over one categorical distribution per node, rewarded with minus the logarithm of the seconds.

    The logit of an option is its features times weights that all nodes share, plus a value of its own. The advantage is
    the reward less the mean of its batch, over the standard deviation of the batch. ColocRL has a recurrent network
    over operators in place of the shared weights, the square root of the time in its reward, and measures each choice
    on a machine.

    Source: Mirhoseini et al., "Device placement optimization with reinforcement learning", arXiv 1706.04972.
    """
    features, legal = _features(meter)
    own, shared = np.zeros(legal.shape), np.zeros(features.shape[-1])
    count = len(legal)
    while True:
        logits = np.where(legal, own + features @ shared, -np.inf)
        chance = np.exp(logits - logits.max(axis=1, keepdims=True))
        chance /= chance.sum(axis=1, keepdims=True)
        draws = rng.random((BATCH, count, 1))
        choices = np.minimum((chance.cumsum(axis=1) < draws).sum(axis=2), meter.problem.sizes - 1)
        reward = -np.log(np.maximum(meter.scores_s(choices), 1e-300))
        advantage = (reward - reward.mean()) / (reward.std() + 1e-9)
        chosen = np.zeros((BATCH, *legal.shape))
        np.put_along_axis(chosen, choices[:, :, None], 1.0, axis=2)
        slope = np.einsum("b,bno->no", advantage, chosen - chance) / BATCH
        own += RATE * slope
        shared += RATE / 10 / count * np.einsum("no,nof->f", slope, features)


def _features(meter: Meter) -> tuple[Array, Array]:
    """Features (nodes, options, features): cost, edges and bytes relative to the node's largest, tags; and a mask."""
    soft, sizes = meter.soft, meter.problem.sizes
    axes = max((node.tags.shape[1] for node in soft.nodes if node.tags is not None), default=0)
    out = np.zeros((len(sizes), int(sizes.max(initial=0)), 3 + axes))
    for node, (moments, held_bytes) in enumerate(soft.held):
        edges = sum((matrix.mean(axis=1) for _, matrix in soft.incident[node]), np.zeros(sizes[node]))
        rows = (soft.nodes[node].cost_s, edges, held_bytes.sum(axis=1) if len(moments) else np.zeros(sizes[node]))
        for at, row in enumerate(rows):
            out[node, : sizes[node], at] = row / (np.abs(row).max() or 1.0)
        tags = soft.nodes[node].tags
        if tags is not None:
            out[node, : sizes[node], 3:] = tags > 0
    return out, np.arange(out.shape[1]) < sizes[:, None]


def bayesian(meter: Meter, rng: np.random.Generator) -> None:
    """Tree-structured Parzen estimator of Optuna, one categorical variable a node, from the greedy choice.

    Source: Bergstra et al., "Algorithms for hyper-parameter optimization", 2011.
    """
    optuna = needed("optuna", "this baseline")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=int(rng.integers(2**31))))
    names = [f"{at}" for at in range(len(meter.problem.nodes))]
    study.enqueue_trial(dict(zip(names, map(int, greedy(meter)), strict=True)))
    sizes = meter.problem.sizes.tolist()
    while True:
        trial = study.ask()
        choice = [
            trial.suggest_int(name, 0, size - 1) if size > 1 else 0 for name, size in zip(names, sizes, strict=True)
        ]
        study.tell(trial, float(meter.scores_s(np.array([choice]))[0]))


def learned_cost(meter: Meter, rng: np.random.Generator) -> None:
    """Extremely randomised trees learn the cost from evaluated choices and rank changed ones; the best are evaluated.

    Proposals are mutations of the best choices so far, two nodes on average; three in ten are crossed with another one.
    """
    ensemble = needed("sklearn.ensemble", "this baseline")
    choices = np.concatenate([greedy(meter)[None, :], random_choice(meter, rng, FIRST)])
    scores = meter.scores_s(choices)
    count = choices.shape[1]
    while True:
        model = ensemble.ExtraTreesRegressor(
            24, min_samples_leaf=2, max_features=1 / 3, random_state=int(rng.integers(2**31))
        )
        model.fit(choices[-KEPT:], np.log(np.maximum(scores[-KEPT:], 1e-300)))
        best = choices[np.argsort(scores, kind="stable")[:TAKEN]]
        parents = best[rng.integers(len(best), size=(2, PROPOSED))]
        crossed = (rng.random((PROPOSED, 1)) < 0.3) & (rng.random((PROPOSED, count)) < 0.5)
        proposed = np.where(crossed, parents[1], parents[0])
        changed = rng.random(proposed.shape) < 2 / count
        proposed = np.where(changed, random_choice(meter, rng, PROPOSED), proposed)
        new = proposed[np.argsort(model.predict(proposed), kind="stable")[:TAKEN]]
        choices, scores = np.concatenate([choices, new]), np.concatenate([scores, meter.scores_s(new)])
