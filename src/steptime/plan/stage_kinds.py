"""Layers of each kind on the busiest stage of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from steptime.model.parameters import layer_parameters
from steptime.model.spec import LayerKind
from steptime.num import Num
from steptime.plan.job import Job, equal_but_for_ends, virtual_stage
from steptime.plan.plans import Plans

Work = tuple[tuple[str, float, float], ...]
"""Per kind of layer: name, work per token, parameters."""


def stage_shares(job: Job, plans: Plans) -> Mapping[str, Num]:
    """Layers of each kind on the busiest stage, over the layers of the longest one.

    The busiest stage sets the pace of a pipeline, and every stage is costed like it. The work of a layer is
    proportional to the parameters that a token uses and to the keys that it attends to; of equally busy stages the one
    with most parameters counts.
    """
    model = job.model
    work = tuple((kind.name, *_work(kind, kind.tokens or job.seq_len)) for kind in model.kinds)
    if not isinstance(plans.pp, np.ndarray) and not isinstance(plans.vpp, np.ndarray):
        return dict(zip(_names(work), _busiest(model.pattern, work, int(plans.pp), int(plans.vpp)), strict=True))
    pairs = np.stack(np.broadcast_arrays(plans.pp, plans.vpp), axis=-1).astype(np.int64)
    distinct, inverse = np.unique(pairs, axis=0, return_inverse=True)
    rows = np.array([_busiest(model.pattern, work, int(pp), int(vpp)) for pp, vpp in distinct])
    return dict(zip(_names(work), rows.reshape(-1, len(work))[inverse.reshape(-1)].T, strict=True))


def _names(work: Work) -> tuple[str, ...]:
    return tuple(name for name, _, _ in work)


def _work(kind: LayerKind, tokens: int) -> tuple[float, float]:
    """Multiplications per token of a layer of a kind, and its parameters."""
    block = kind.block
    whole, active = layer_parameters(kind)
    seen = min(tokens, block.window) if block.window and block.windowed_layers else tokens / (1 + block.causal)
    attends = kind.attention or any(each.form in ("core", "cross") for each in kind.operators)
    return active + 2 * seen * block.query_width * attends, whole


@lru_cache(maxsize=4096)
def _busiest(pattern: tuple[str, ...], work: Work, ranks: int, chunks: int) -> tuple[float, ...]:
    """Layers of each kind on the busiest of the ranks, over the layers of the longest."""
    names, longest = _names(work), -(-len(pattern) // ranks)
    if ranks == 1 or ranks * chunks > len(pattern) + 2 * (chunks > 1):
        return tuple(pattern.count(name) / len(pattern) for name in names)
    held: list[list[str]] = [[] for _ in range(ranks)]
    at = 0
    for stage, count in enumerate(_sizes(len(pattern), ranks, chunks)):
        held[stage % ranks] += pattern[at : at + count]
        at += count
    longest = max(map(len, held))
    costs = {name: (cost, whole) for name, cost, whole in work}
    busiest = max(held, key=lambda layers: tuple(sum(costs[name][part] for name in layers) for part in (0, 1)))
    return tuple(busiest.count(name) / longest for name in names)


def _sizes(layers: int, ranks: int, chunks: int) -> list[int]:
    """Layers of each virtual stage, as the default method splits them."""
    count = ranks * chunks
    each, lacking = (int(value) for value in virtual_stage(layers, ranks, chunks))
    if chunks > 1 and equal_but_for_ends(each, lacking):
        last = min(each, -(-lacking // 2))
        return [each - (lacking - last), *[each] * (count - 2), each - last]
    least, over = divmod(layers, count)
    first = int(over > count - 2 and over > 0)
    return [least + first, *(least + (place < over - first) for place in range(count - 2)), least]
