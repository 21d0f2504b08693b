"""The simulator against pycachesim, exactly, on three traces; skipped where it is not installed.

pycachesim counts neither a store that hits, nor a line that the level above writes back, as a use of the line. So
traces of loads alone are compared over several levels, one with stores over one level, each store followed by a load.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from steptime_lab.hierarchy.geometry import Hierarchy, hierarchy
from steptime_lab.hierarchy.simulate import simulate
from steptime_lab.hierarchy.traces import Shape, Trace, tiled_matmul, trace

CASES: dict[str, tuple[Trace, str, bool]] = {
    "matmul": (tiled_matmul((48, 48, 48), (12, 12, 12), 8, packed=False), "4KiB:4,32KiB:8", False),
    "stream": (trace("stream", Shape(n=4000)), "4KiB:4,32KiB:8,256KiB:16", False),
    "histogram": (trace("histogram", Shape(n=20_000, table=1 << 14)), "4KiB:4", True),
}


def built(module: Any, caches: Hierarchy) -> Any:
    """The same levels in pycachesim: write-back, write-allocate, least recently used, the last one at memory."""
    levels: list[Any] = []
    for level in reversed(range(len(caches.caches))):
        cache = caches.caches[level]
        below = {"store_to": levels[-1], "load_from": levels[-1]} if levels else {}
        levels.append(module.Cache(f"L{level + 1}", cache.sets, cache.ways, cache.line_bytes, "LRU", **below))
    memory = module.MainMemory()
    memory.load_to(levels[0])
    memory.store_from(levels[0])
    return module.CacheSimulator(levels[-1], memory)


@pytest.mark.skipif(
    find_spec("cachesim") is None, reason="pycachesim is not installed (pip install pycachesim; AGPL, for tests alone)"
)
@pytest.mark.each("name", list(CASES))
def test_counts_are_those_of_pycachesim(name: str) -> None:
    module = import_module("cachesim")
    made, text, stores = CASES[name]
    blocks = [_compared(*block, stores=stores) for block in made.blocks()]
    theirs = built(module, hierarchy(text))
    for addresses, kinds in blocks:
        for address, kind in zip(addresses.tolist(), kinds.tolist(), strict=True):
            (theirs.store if kind & 1 else theirs.load)(address, length=1)
    stats = {row["name"]: row for row in theirs.stats()}
    ours = replace(made, accesses=sum(len(kinds) for _, kinds in blocks), blocks=lambda: iter(blocks))
    assert any((kinds & 1).any() for _, kinds in blocks) == stores
    for level in simulate(ours, hierarchy(text)).levels:
        assert level.misses + level.write_back_misses == stats[level.name]["MISS_count"]
        assert level.write_backs == stats[level.name]["EVICT_count"]


def _compared(addresses: Any, kinds: Any, *, stores: bool) -> tuple[Any, Any]:
    """A block as loads alone, or with a load after each store."""
    if not stores:
        return addresses, kinds & 0xFE
    stored = (kinds & 1).astype(int)
    after = np.repeat(np.arange(len(kinds)), 1 + stored)
    again = np.diff(after, prepend=-1) == 0
    return addresses[after], np.where(again, kinds[after] & 0xFE, kinds[after])
