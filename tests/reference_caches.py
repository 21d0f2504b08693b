"""Caches and distances of reuse written down plainly, to hold the compiled ones against."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from steptime_lab.hierarchy.geometry import Hierarchy


class ReferenceCaches:
    """Levels of ordered dictionaries, the least recently used line first; recursive where the kernel has a stack."""

    def __init__(self, hierarchy: Hierarchy) -> None:
        self.hierarchy = hierarchy
        self.sets = [[OrderedDict[int, bool]() for _ in range(c.sets)] for c in hierarchy.caches]
        self.counts = [dict.fromkeys(("hits", "misses", "wb_hits", "wb_misses", "write_backs", "invalidated"), 0)
                       for _ in hierarchy.caches]  # fmt: skip

    def access(self, address: int, write: bool) -> int:
        return self._request(0, address // self.hierarchy.line_bytes, write)

    def _request(self, level: int, line: int, dirty: bool) -> int:
        """Serve from a level on; the level that had the line."""
        if level == len(self.sets):
            return level
        here, counts = self.sets[level][line % len(self.sets[level])], self.counts[level]
        written = "wb_" if dirty and level else ""
        if line in here:
            counts[f"{written}hits"] += 1
            here[line] |= dirty
            here.move_to_end(line)
            return level
        counts[f"{written}misses"] += 1
        served = self._request(level + 1, line, False)
        self._insert(level, line, dirty)
        return served

    def _insert(self, level: int, line: int, dirty: bool) -> None:
        here = self.sets[level][line % len(self.sets[level])]
        victim: tuple[int, bool] | None = None
        if len(here) == self.hierarchy.caches[level].ways:
            victim = here.popitem(last=False)
        if victim is not None and self.hierarchy.inclusive:
            for above in range(level):
                ways = self.sets[above][victim[0] % len(self.sets[above])]
                if victim[0] in ways:
                    victim = (victim[0], ways.pop(victim[0]) or victim[1])
                    self.counts[above]["invalidated"] += 1
        here[line] = dirty
        if victim is not None and victim[1]:
            self.counts[level]["write_backs"] += 1
            if level + 1 < len(self.sets):
                self._request(level + 1, victim[0], True)


def distances(lines: Iterable[int]) -> tuple[int, dict[int, int]]:
    """First accesses, and accesses by distance: a list with the most recent line at its end."""
    recent: list[int] = []
    cold, found = 0, dict[int, int]()
    for line in lines:
        if line in recent:
            at = len(recent) - 1 - recent.index(line)
            found[at] = found.get(at, 0) + 1
            recent.remove(line)
        else:
            cold += 1
        recent.append(line)
    return cold, found
