"""Caches by their geometry: levels as a user writes them, of this machine, of devices of the catalogue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from steptime.errors import UserError, shown
from steptime.num import Array
from steptime.units import format_bytes, parse
from steptime_lab.hierarchy.kernels import EMPTY

MOST_LEVELS: Final = 6
EXAMPLE: Final = "32KiB:8,1MiB:8,32MiB:16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """One level: `size_bytes` in lines of `line_bytes`, `ways` of them in each set."""

    size_bytes: int
    ways: int
    line_bytes: int = 64

    @property
    def sets(self) -> int:
        """Sets of the cache; a line lies in the set of its number modulo the sets."""
        return self.size_bytes // (self.line_bytes * self.ways)

    @property
    def lines(self) -> int:
        """Lines of the cache."""
        return self.size_bytes // self.line_bytes

    @property
    def text(self) -> str:
        """The geometry in words.

        >>> Cache(size_bytes=32768, ways=8).text
        '32 KiB, 8 ways, 64 sets'
        """
        return f"{format_bytes(self.size_bytes)}, {self.ways} ways, {self.sets} sets"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hierarchy:
    """Caches from the processor to memory, least-recently-used, write-allocate and write-back.

    Not inclusive (default): a fill goes into every level on its way, and a level that evicts a line leaves the copies
    above alone; a line that is written back to a level that has evicted it is fetched there again. Inclusive: a level
    that evicts a line invalidates it in all levels above.

    Raises:
        UserError: no cache or too many, a geometry that is impossible, lines of different lengths.

    >>> hierarchy("32KiB:8,1MiB:16").sets
    (64, 1024)
    """

    caches: tuple[Cache, ...]
    inclusive: bool = False

    def __post_init__(self) -> None:
        if not 1 <= len(self.caches) <= MOST_LEVELS:
            raise UserError(f"{len(self.caches)} levels of cache; 1 to {MOST_LEVELS} are possible", hint=_example())
        for level, cache in enumerate(self.caches, 1):
            _check(level, cache)
        if len({cache.line_bytes for cache in self.caches}) > 1:
            sizes = ", ".join(str(cache.line_bytes) for cache in self.caches)
            raise UserError(f"lines of {sizes} bytes: all levels need lines of one length", hint=_example())

    @property
    def line_bytes(self) -> int:
        """Bytes of a line of every level."""
        return self.caches[0].line_bytes

    @property
    def sets(self) -> tuple[int, ...]:
        """Sets of each level."""
        return tuple(cache.sets for cache in self.caches)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the levels, and of the memory below them."""
        return (*(f"L{level}" for level in range(1, len(self.caches) + 1)), "memory")

    def geometry(self) -> Array:
        """Geometry as the flat sequence that kernels read (:mod:`steptime_lab.hierarchy.kernels`)."""
        out, start = [self.line_bytes.bit_length() - 1, len(self.caches), int(self.inclusive), 0], 0
        for cache in self.caches:
            power = cache.sets & (cache.sets - 1) == 0
            out += [cache.sets, cache.sets - 1 if power else -1, cache.ways, start]
            start += cache.lines
        return np.array(out, dtype=np.int64)

    def empty(self) -> Array:
        """Ways of all levels, all unused."""
        return np.full(sum(cache.lines for cache in self.caches), EMPTY, dtype=np.int64)


def _check(level: int, cache: Cache) -> None:
    """Raise UserError where a cache of this geometry cannot be built."""
    name, line, ways, size = f"cache level {level}", cache.line_bytes, cache.ways, cache.size_bytes
    if line < 4 or line & (line - 1):
        raise UserError(f"{name}: a line of {line} bytes; its length must be a power of two, 4 or more")
    if ways < 1:
        raise UserError(f"{name}: {ways} ways; a set has 1 or more")
    if size < line * ways or size % (line * ways):
        lines = max(1, round(size / (line * ways)))
        raise UserError(
            f"{name}: {size:,} bytes is no multiple of {line} bytes a line times {ways} ways",
            hint=f"the nearest possible size is {lines * line * ways:,} bytes ({lines} sets)",
        )
    if size > 2**36:
        raise UserError(f"{name}: {format_bytes(size)} is larger than any cache")


def hierarchy(text: str, *, line_bytes: int = 64, inclusive: bool = False) -> Hierarchy:
    """Levels as a user writes them: SIZE:WAYS, the innermost first, joined by commas.

    Args:
        text: sizes and ways; ``full`` in place of ways is one set.
        line_bytes: length of a line of every level.
        inclusive: whether each level holds every line of the levels above.

    Raises:
        UserError: not of this form, or impossible.

    >>> hierarchy("32KiB:8,1MiB:full").caches[1].text
    '1 MiB, 16384 ways, 1 sets'
    >>> hierarchy("48KiB:7")
    Traceback (most recent call last):
    steptime.errors.UserError: cache level 1: 49,152 bytes is no multiple of 64 bytes a line times 7 ways
      the nearest possible size is 49,280 bytes (110 sets)
    """
    caches = []
    for level, part in enumerate(text.split(","), 1):
        size, separator, ways = part.strip().partition(":")
        try:
            size_bytes = int(parse(size, "bytes"))
            number = size_bytes // max(line_bytes, 1) if ways == "full" else int(ways)
        except (UserError, ValueError):
            separator = ""
        if not separator:
            raise UserError(f"cache level {level}: {shown(part)} is not SIZE:WAYS", hint=_example())
        caches.append(Cache(size_bytes=size_bytes, ways=number, line_bytes=line_bytes))
    return Hierarchy(caches=tuple(caches), inclusive=inclusive)


def _example() -> str:
    return f"for example {EXAMPLE}: size and ways of each level, the innermost first"


def fully_associative(cache: Cache) -> Hierarchy:
    """A cache of the same size with one set."""
    return Hierarchy(caches=(Cache(size_bytes=cache.size_bytes, ways=cache.lines, line_bytes=cache.line_bytes),))


def of_caches(caches: Sequence[tuple[int, int, int]], *, inclusive: bool = False) -> Hierarchy:
    """Levels from sizes (bytes), ways and lengths of lines (bytes)."""
    return Hierarchy(
        caches=tuple(Cache(size_bytes=size, ways=ways, line_bytes=line) for size, ways, line in caches),
        inclusive=inclusive,
    )
