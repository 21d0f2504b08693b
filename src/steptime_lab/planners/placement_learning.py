r"""Placement by reinforcement learning: a policy that assigns layers to stages, rewarded by the simulated step time.

The state is the next item and the placement of the items before it, the action its stage (the stage of the item before,
or the next one), the reward minus the step time. The policy is a softmax of two actions,
$\Pr(\text{next}) = 1 / (1 + e^{-\theta \cdot x})$ with the features $x$ of the state; its gradient is that of REINFORCE
with the mean reward of a batch as baseline.

Source: Mirhoseini et al., arXiv 1706.04972, device placement by policy gradients; called ColocRL in
surveys. The policy here has no recurrent network, because a pipeline is a chain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from steptime.num import Array
from steptime.simulation.partition import Counts, SplitTask

BATCH: Final = 16
"""Splits of one step of learning."""
RATE: Final = 1.0
"""Step size of the parameters; the norm of the gradient is clipped to 1."""
OVERFULL: Final = 2.0
"""Step time, relative to the mean, of a split that does not fit into the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """Result of the learner."""

    counts: Counts
    """Items of each stage of the best split that was simulated."""
    seconds: float
    simulations: int
    """Number of different splits that were simulated."""
    history_s: Array
    """Mean step time of each batch (s)."""


def learnt(task: SplitTask, seconds_of: Callable[[Counts], float], batches: int, seed: int = 0) -> Learnt:
    """Learn to place items.

    Args:
        task: items, stages and memory.
        seconds_of: simulated step time of a split.
        batches: steps of learning, of :data:`BATCH` splits each.
        seed: seed of the choices.
    """
    random = np.random.default_rng(seed)
    weights = np.zeros(task.stages + 4)
    weights[-4:] = (0.0, 4.0, 0.0, 0.0)
    known: dict[Counts, float] = {}
    history = []
    for _ in range(batches):
        played = [_episode(task, weights, random) for _ in range(BATCH)]
        for counts, _ in played:
            if counts not in known:
                known[counts] = seconds_of(counts)
        times = np.array([known[counts] if task.fits(counts) else np.inf for counts, _ in played])
        mean_s = times[np.isfinite(times)].mean() if np.isfinite(times).any() else 1.0
        history.append(float(mean_s))
        reward = -np.where(np.isfinite(times), times / mean_s, OVERFULL)
        advantage = (reward - reward.mean()) / (reward.std() or 1.0)
        gradient = sum(each * slope for each, (_, slope) in zip(advantage, played, strict=True)) / BATCH
        weights = weights + RATE * gradient / max(float(np.linalg.norm(gradient)), 1.0)
    fitting = [each for each in known if task.fits(each)] or list(known)
    best = min(fitting, key=known.__getitem__)
    return Learnt(counts=best, seconds=known[best], simulations=len(known), history_s=np.array(history))


def _episode(task: SplitTask, weights: Array, random: np.random.Generator) -> tuple[Counts, Array]:
    """One split by the policy, and the gradient of its log probability."""
    counts, slope, stage, load = [0] * task.stages, np.zeros_like(weights), 0, 0.0
    share_s = task.seconds.mean(axis=0).sum() / task.stages
    for item in range(task.items):
        own_s = float(task.seconds[task.rank[stage], item])
        left, later = task.items - item, task.stages - 1 - stage
        may_go, must_go = later > 0 and counts[stage] > 0, later >= left
        go = must_go
        if may_go and not must_go:
            state = np.zeros_like(weights)
            state[stage] = 1.0
            state[-4:] = (1.0, (load + own_s / 2) / share_s - 1.0, own_s / share_s, left / task.items)
            chance = 1.0 / (1.0 + np.exp(-np.clip(weights @ state, -30, 30)))
            go = bool(random.random() < chance)
            slope += ((1.0 if go else 0.0) - chance) * state
        if go:
            stage, load = stage + 1, 0.0
            own_s = float(task.seconds[task.rank[stage], item])
        counts[stage] += 1
        load += own_s
    return tuple(counts), slope
