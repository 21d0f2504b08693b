"""Answers of the commands of the memory hierarchy, as records that print as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from steptime.errors import UserError
from steptime.estimate.result import SCHEMA_VERSION
from steptime.hardware import load_device
from steptime_lab.cost.cache import least_padding, rows_that_stay, sets_of_stride
from steptime_lab.hierarchy.caches import processor
from steptime_lab.hierarchy.geometry import Hierarchy, hierarchy
from steptime_lab.hierarchy.reuse import analysed, reuse, rows_of
from steptime_lab.hierarchy.tiles import (
    WORD_BYTES,
    TilePlan,
    caches_of,
    check_dtype,
    cpu_levels,
    planned,
    tiles_on_device,
    tiles_on_processor,
)
from steptime_lab.hierarchy.traces import MATRICES, Shape, trace

DEFAULT_PROCESSOR: Final = "zen4"
"""Processor whose caches are used by default."""
MIN_CONFLICT_SHARE: Final = 0.05
"""A report explains conflict misses that are more than this share of all misses."""


def chosen_caches(cache: str | None, name: str | None, *, line_bytes: int, inclusive: bool) -> tuple[str, Hierarchy]:
    """Caches as a user gives them, with their name.

    Args:
        cache: levels as text, or None.
        name: name of a processor, or None.
        line_bytes: length of a line of caches given as text; a processor has its own.
        inclusive: whether each level holds every line of the levels above.

    Raises:
        UserError: both are given, an unknown processor, or an impossible geometry.

    >>> chosen_caches(None, "zen4", line_bytes=64, inclusive=False)[0]
    'AMD Zen 4'
    """
    if cache is not None and name is not None:
        raise UserError("--cache and --processor both say which caches", hint="give one of them")
    if cache is not None:
        return cache, hierarchy(cache, line_bytes=line_bytes, inclusive=inclusive)
    found = processor(name or DEFAULT_PROCESSOR)
    return found.title, Hierarchy(caches=caches_of(found).caches, inclusive=inclusive)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReport:
    """A pattern through caches."""

    pattern: str
    caches: str
    accesses: int
    footprint_bytes: int
    levels: tuple[Mapping[str, Any], ...]
    """Counts of each level, with its geometry and the traffic to the level below."""
    served: Mapping[str, Mapping[str, float]]
    """Instruction -> share of its accesses that each level and memory served."""
    read_bytes: int
    written_bytes: int
    causes: Mapping[str, int]
    """Misses of the first level: cold, capacity, conflict."""
    conflict: str | None
    """Cause of the conflict misses, where they are many and rows at equal distances explain them."""

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""
        return {"schema_version": SCHEMA_VERSION, **{name: getattr(self, name) for name in self.__dataclass_fields__}}


def cache_report(pattern: str, shape: Shape, caches: Hierarchy, name: str) -> CacheReport:
    """Simulate a pattern: hits, traffic and causes of misses.

    Raises:
        UserError: an unknown pattern, a size that it cannot have, or a trace too long to be interpreted.

    >>> report = cache_report("stream", Shape(n=512, passes=1), hierarchy("4KiB:4"), "one")
    >>> report.causes
    {'cold': 192, 'capacity': 0, 'conflict': 0}
    """
    found = trace(pattern, shape)
    simulated, _, causes = analysed(found, caches)
    rows = []
    for place, (counts, cache) in enumerate(zip(simulated.levels, caches.caches, strict=True)):
        row = {key: getattr(counts, key) for key in counts.__dataclass_fields__}
        rows.append(
            {
                **row,
                "hit_rate": counts.hit_rate,
                "size_bytes": cache.size_bytes,
                "ways": cache.ways,
                "sets": cache.sets,
                "line_bytes": cache.line_bytes,
                "below_bytes": simulated.traffic_bytes(place),
            }
        )
    shares = simulated.served / simulated.served.sum(axis=1, keepdims=True).clip(1)
    return CacheReport(
        pattern=pattern,
        caches=name,
        accesses=found.accesses,
        footprint_bytes=found.footprint_bytes,
        levels=tuple(rows),
        served={
            site: dict(zip(caches.names, map(float, row), strict=True))
            for site, row in zip(found.sites, shares, strict=True)
        },
        read_bytes=simulated.read_bytes,
        written_bytes=simulated.written_bytes,
        causes={key: getattr(causes, key) for key in causes.__dataclass_fields__},
        conflict=_conflict_cause(pattern, shape, caches, causes.conflict, simulated.levels[0].misses),
    )


def _conflict_cause(pattern: str, shape: Shape, caches: Hierarchy, conflict: int, misses: int) -> str | None:
    """Explanation of conflict misses by rows or strides that map to few sets of the first level."""
    first = caches.caches[0]
    packed = pattern == "matmul" and shape.packed
    row_bytes = (shape.leading or shape.n if pattern in MATRICES else shape.stride) * shape.element_bytes
    many = conflict > MIN_CONFLICT_SHARE * misses
    if not many or packed or row_bytes % first.line_bytes or pattern not in (*MATRICES, "strided"):
        return None
    sets = int(sets_of_stride(row_bytes, first.sets, first.line_bytes))
    if sets == first.sets:
        return None
    stay = int(rows_that_stay(row_bytes, first.sets, first.ways, first.line_bytes))
    more = least_padding(row_bytes, first.sets, first.line_bytes)
    return (
        f"rows {row_bytes:,} bytes apart fall onto {sets} of {first.sets} sets, so that {stay} of them stay at a time; "
        f"{more} bytes more between rows use every set"
    )


def reuse_report(pattern: str, shape: Shape, line_bytes: int) -> dict[str, Any]:
    """Miss ratio curve and working sets of a pattern.

    Raises:
        UserError: an unknown pattern, a size that it cannot have, or a trace too long to be interpreted.

    >>> reuse_report("strided", Shape(n=4, stride=8, passes=2), 64)["working_sets"]
    [{'capacity_bytes': 256, 'miss_ratio': 0.5}]
    """
    found = trace(pattern, shape)
    distances = reuse(found, line_bytes)
    sets = [{"capacity_bytes": size, "miss_ratio": ratio} for size, ratio in distances.working_sets()]
    return {
        "schema_version": SCHEMA_VERSION,
        "pattern": pattern,
        "accesses": found.accesses,
        "lines": distances.cold,
        "line_bytes": line_bytes,
        "working_sets": sets,
        "curve": rows_of(distances),
    }


def tile_answer(
    shape: tuple[int, int, int], dtype: str, *, device: str | None, name: str | None, cache: str | None
) -> TilePlan:
    """Tiles of a product on a GPU, a processor, or a core with given caches.

    Raises:
        UserError: more than one machine, an unknown one, or a size or dtype that is not possible.

    >>> tile_answer((64, 64, 64), "fp32", device=None, name="zen4", cache=None).levels[-1].level
    'L3'
    """
    if sum(given is not None for given in (device, name, cache)) > 1:
        raise UserError("more than one machine is given", hint="one of --device, --processor, --cache")
    if device is not None:
        return tiles_on_device(shape, load_device(device), dtype)
    if cache is None:
        return tiles_on_processor(shape, name or DEFAULT_PROCESSOR, dtype)
    check_dtype(dtype)
    core = processor(DEFAULT_PROCESSOR)
    levels = cpu_levels(core.register_bytes, core.vector_bytes, hierarchy(cache), WORD_BYTES[dtype])
    return planned(shape, levels, dtype=dtype, machine=cache)
