"""Parts of the runs to keep aside in turn: a source, the rows of one model in a source, a model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from steptime.lab.measured.architecture import known_model
from steptime.lab.measured.run import MeasuredRun
from steptime.num import Array


def model_key(run: MeasuredRun) -> Hashable:
    """What makes two runs ones of the same model, however it is spelt: catalogue name, or shape."""
    known = known_model(run.model_name)
    m = run.model
    return (known["catalogue"] if known else "", m.layers, m.hidden, m.heads, m.ffn_hidden, m.causal)


#: Name of a way to fold -> what runs of one fold have in common.
FOLDINGS: Final[dict[str, Callable[[MeasuredRun], Hashable]]] = {
    "source": lambda run: run.source_key,
    "source_and_model": lambda run: (run.source_key, run.model_name),
    "model": model_key,
    "device": lambda run: run.device,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """One part to keep aside: positions in the sequence of runs."""

    name: str
    kept_aside: Array
    rest: Array


def folds(runs: Sequence[MeasuredRun], by: str = "source", parts: int | None = None) -> list[Fold]:
    """Every group in turn kept aside; runs of one group are never on both sides.

    Args:
        runs: the runs.
        by: ``source``, ``source_and_model``, ``model`` or ``device``.
        parts: deal the groups out to at most so many folds, the largest first to the emptiest; None: one each.

    Raises:
        KeyError: no such folding.
    """
    key = FOLDINGS[by]
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for index, run in enumerate(runs):
        groups[key(run)].append(index)
    bins: list[tuple[list[str], list[int]]] = [([], []) for _ in range(min(parts or len(groups), len(groups)))]
    for name, members in sorted(groups.items(), key=lambda item: (-len(item[1]), str(item[0]))):
        names, indices = min(bins, key=lambda b: len(b[1]))
        names.append(" / ".join(map(str, name)) if isinstance(name, tuple) else str(name))
        indices += members
    every = np.arange(len(runs))
    made = [(" + ".join(names), np.array(sorted(indices), np.int64)) for names, indices in bins]
    return [Fold(name=name[:200], kept_aside=index, rest=np.setdiff1d(every, index)) for name, index in made]
