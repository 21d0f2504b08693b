"""The loops over single accesses: caches of several levels, and distances of reuse.

A cache is a part of one flat sequence `tags`: `ways` entries per set, the most recently used first. An entry is twice
the number of a line, plus one if the line is dirty; `EMPTY` is an unused way. `geometry` has a head of four numbers
(bits of an offset in a line, levels, whether the levels are inclusive, 0), then four per level (sets, a mask of the
index or -1 where the sets are no power of two, ways, first entry in `tags`). `counts` has `COUNTED` numbers per level,
then for each instruction the accesses that each level and memory served.
"""

from __future__ import annotations

from typing import Any, Final

from steptime_lab.hierarchy.compiled import jit

EMPTY: Final = -2
REQUEST: Final = 0
INSERT: Final = 1
HITS, MISSES, STORE_HITS, STORE_MISSES, WRITE_BACKS, INVALIDATED, COUNTED = range(7)
"""Counts of a level: loads and the processor's stores that hit and miss, write-backs from the level above that hit and
miss, lines written back below, lines invalidated by a level below (inclusive levels)."""
DEEPEST: Final = 256
"""Length of the stack of pending requests and insertions."""
EVENT: Final = 3
"""Length of an event: ordinal of its access, twice the level plus one for a fill, line."""


@jit
def first_of(geometry: Any, level: int, line: int) -> int:
    """Index in `tags` of the first way of the set of a line."""
    at = 4 * level + 4
    mask = geometry[at + 1]
    index = line & mask if mask >= 0 else line % geometry[at]
    return geometry[at + 3] + index * geometry[at + 2]  # type: ignore[no-any-return]


@jit
def find(tags: Any, first: int, ways: int, line: int) -> int:
    """Way that holds a line, or -1."""
    for way in range(ways):
        if tags[first + way] >> 1 == line:
            return way
    return -1


@jit
def touch(tags: Any, first: int, way: int, entry: int) -> None:
    """Put an entry first; the entries before `way` move back by one."""
    for place in range(first + way, first, -1):
        tags[place] = tags[place - 1]
    tags[first] = entry


@jit
def log(events: Any, level: int, fill: int, line: int) -> None:
    """Append an event, if events are logged."""
    if len(events) > 2:
        at = events[0]
        events[at] = events[1]
        events[at + 1] = 2 * level + fill
        events[at + 2] = line
        events[0] = at + 3


@jit
def insert(level: int, entry: int, geometry: Any, tags: Any, counts: Any, events: Any) -> int:
    """Put an entry into a level; returns the entry it replaces, dirty if an invalidated copy above was dirty."""
    first, ways = first_of(geometry, level, entry >> 1), geometry[4 * level + 6]
    victim = tags[first + ways - 1]
    if victim >= 0:
        if geometry[2] == 1:
            for above in range(level):
                start, size = first_of(geometry, above, victim >> 1), geometry[4 * above + 6]
                way = find(tags, start, size, victim >> 1)
                if way >= 0:
                    victim |= tags[start + way] & 1
                    for place in range(start + way, start + size - 1):
                        tags[place] = tags[place + 1]
                    tags[start + size - 1] = EMPTY
                    counts[above * COUNTED + INVALIDATED] += 1
        log(events, level, 0, victim >> 1)
    touch(tags, first, ways - 1, entry)
    log(events, level, 1, entry >> 1)
    return victim  # type: ignore[no-any-return]


@jit
def push(stack: Any, top: int, kind: int, level: int, entry: int) -> int:
    """Push a request or insertion onto the stack; returns its new height."""
    stack[top], stack[top + 1], stack[top + 2] = kind, level, entry
    return top + 3


@jit
def serve(entry: int, geometry: Any, tags: Any, counts: Any, events: Any, stack: Any) -> int:
    """Serve a load or store (a dirty entry), fill the levels above, write back; returns the level that had the line."""
    levels, served = geometry[1], -1
    top = push(stack, 0, REQUEST, 0, entry)
    while top > 0:
        top -= 3
        kind, level, entry = stack[top], stack[top + 1], stack[top + 2]
        if kind == INSERT:
            victim = insert(level, entry, geometry, tags, counts, events)
            if victim >= 0 and victim & 1 == 1:
                counts[level * COUNTED + WRITE_BACKS] += 1
                if level + 1 < levels:
                    top = push(stack, top, REQUEST, level + 1, victim)
            continue
        way = -1
        if level < levels:
            first = first_of(geometry, level, entry >> 1)
            way = find(tags, first, geometry[4 * level + 6], entry >> 1)
            store = STORE_HITS if level > 0 and entry & 1 == 1 else HITS
            counts[level * COUNTED + store + (1 if way < 0 else 0)] += 1
        if way >= 0:
            touch(tags, first, way, tags[first + way] | (entry & 1))
        elif level < levels:
            top = push(stack, top, INSERT, level, entry)
            top = push(stack, top, REQUEST, level + 1, entry >> 1 << 1)
        if served < 0 and (way >= 0 or level == levels):
            served = level
    return served


@jit
def simulate_block(
    addresses: Any, kinds: Any, geometry: Any, tags: Any, counts: Any, served: Any, events: Any, stack: Any
) -> None:
    """Play accesses in order, from the ordinal `events[1]` on.

    `counts` gets, after the counts of the levels, how many accesses of each instruction each level served. `served`
    gets the level that served each access, unless it is empty.
    """
    shift, levels = geometry[0], geometry[1]
    table, each = levels * COUNTED, len(served) > 0
    for i in range(len(addresses)):
        line, kind = addresses[i] >> shift, int(kinds[i])
        first = first_of(geometry, 0, line)
        level = 0
        if tags[first] >> 1 == line:
            tags[first] |= kind & 1
            counts[HITS] += 1
        else:
            level = serve(2 * line + (kind & 1), geometry, tags, counts, events, stack)
        counts[table + (kind >> 1) * (levels + 1) + level] += 1
        if each:
            served[i] = level
        events[1] += 1


@jit
def reuse_block(lines: Any, keys: Any, times: Any, tree: Any, histogram: Any, head: Any) -> None:
    """Add the reuse distances of accesses to a histogram: other lines touched since the last access to the same line.

    `keys` and `times` are a hash table of lines and their last access; `tree` is a Fenwick tree that counts, by time,
    the accesses that are the last to their line. `head` has the number of lines, the present time and the number of
    first accesses of lines.
    """
    mask, size = len(keys) - 1, len(tree)
    for i in range(len(lines)):
        line = lines[i]
        slot = ((line * 2654435761) >> 8) & mask
        while keys[slot] != line and keys[slot] >= 0:
            slot = (slot + 1) & mask
        now = head[1]
        if keys[slot] == line:
            before, older = times[slot] + 1, 0
            at = before
            while at > 0:
                older += tree[at]
                at &= at - 1
            histogram[head[0] - older] += 1
            while before < size:
                tree[before] -= 1
                before += before & -before
        else:
            keys[slot] = line
            head[0] += 1
            head[2] += 1
        times[slot] = now
        at = now + 1
        while at < size:
            tree[at] += 1
            at += at & -at
        head[1] = now + 1
