"""The template of a run: what an interior block does, with every storage by its place relative to the block.

Two interior blocks are compared call by call. A storage that both name is shared by all blocks; any other is the
same place (which segment, how many blocks away, the how-manieth) for both, or the run is no repetition.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from steptime.captured.graph.program import BEFORE, OUTSIDE, Call, Program
from steptime.captured.graph.segments import KEPT, Run, Stretch


class Unlike(Exception):
    """The interior blocks of a run differ: it cannot be unrolled."""


@dataclass(frozen=True, slots=True)
class Place:
    """A storage, or a call, relative to a block: `group` is a stretch or `BEFORE` (what was there before the step)."""

    group: int
    offset: int
    """Periods away: -1 the block before, 0 the block itself, 1 the next."""
    local: int
    """Position among those of its group and period."""


Reference = Place | int
"""A place, or the number of a storage (a call) that all blocks share."""


References = tuple[tuple[Reference, ...], tuple[Reference, ...]]
"""What a call reads and what it writes."""


@dataclass(frozen=True, slots=True)
class Home:
    """Where a storage was born, or a call runs."""

    group: int
    period: int
    local: int


@dataclass(slots=True)
class Template:
    """Everything that is needed to make one more block."""

    run: Run
    stretches: list[Stretch]
    storages: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """(group, period) -> storages born there, in order."""
    home: dict[int, Home] = field(default_factory=dict)
    """Storage -> where it was born, for those of the run."""
    calls: list[list[References]] = field(default_factory=list)
    """By stretch and call: what it reads and writes."""
    ends: dict[tuple[int, int], Reference | None] = field(default_factory=dict)
    """(group, local) -> the call during which that storage of a block is freed; None: it lives on."""


def template_of(program: Program, run: Run, stretches: list[Stretch]) -> Template:
    """The template of the interior blocks.

    Raises:
        Unlike: they are not alike.
    """
    template = Template(run, stretches)
    _find_homes(program, template)
    for stretch in stretches:
        pairs = zip(stretch.segment(1), stretch.segment(2), strict=True)
        template.calls.append([_same_call(program, template, a, b) for a, b in pairs])
    groups = (BEFORE, *range(len(stretches)))
    for group in groups:
        one, two = template.storages.get((group, 1), []), template.storages.get((group, 2), [])
        if len(one) != len(two):
            raise Unlike
        for local, (a, b) in enumerate(zip(one, two, strict=True)):
            template.ends[group, local] = _same_end(program, template, a, b)
    return template


def _find_homes(program: Program, template: Template) -> None:
    where: dict[int, tuple[int, int]] = {}
    for group, stretch in enumerate(template.stretches):
        for period in range(KEPT):
            where.update(dict.fromkeys(stretch.segment(period), (group, period)))
    single = _read_by_one_period(program, where)
    for number, storage in enumerate(program.storages):
        key = where.get(storage.born)
        if storage.born == BEFORE:
            inside = single[number] if storage.name.startswith(OUTSIDE) else template.run.period_of(storage.name)
            key = None if inside is None else (BEFORE, inside)
        if key is not None:
            members = template.storages.setdefault(key, [])
            template.home[number] = Home(*key, len(members))
            members.append(number)


def _read_by_one_period(program: Program, where: dict[int, tuple[int, int]]) -> list[int | None]:
    """Of each storage the one period whose calls touch it, else None: a block's own constants and empty caches."""
    periods: list[set[int | None]] = [set() for _ in program.storages]
    for number, call in enumerate(program.calls):
        period = where[number][1] if number in where else None
        for storage in (*call.reads, *call.writes):
            periods[storage].add(period)
    return [next(iter(each)) if len(each) == 1 else None for each in periods]


def _same_call(program: Program, template: Template, first: int, second: int) -> References:
    one, two = program.calls[first], program.calls[second]
    if not _alike(one, two, template.run):
        raise Unlike
    reads = tuple(_reference(template, a, b) for a, b in zip(one.reads, two.reads, strict=True))
    writes = tuple(_reference(template, a, b) for a, b in zip(one.writes, two.writes, strict=True))
    return reads, writes


def _alike(one: Call, two: Call, run: Run) -> bool:
    a, b = one.node, two.node
    attributes = [tuple((name, _kind(node.op, value)) for name, value in node.attributes if name != "draw")
                  for node in (a, b)]  # fmt: skip
    return (
        a.op == b.op and a.outputs == b.outputs and a.names == b.names and attributes[0] == attributes[1]
        and len(one.writes) == len(two.writes) and run.moved(one.module, 1) == two.module
        and (one.view, one.inplace, one.recomputed, one.scratch_bytes)
        == (two.view, two.inplace, two.recomputed, two.scratch_bytes)
    )  # fmt: skip


def _kind(op: str, value: object) -> object:
    """A factor or a rate (a float, but for an exponent) may be another one in every block: only zero is special."""
    return bool(value) if isinstance(value, float) and op != "pow" else value


def _reference(template: Template, first: int, second: int) -> Reference:
    if first == second:
        return first
    one, two = template.home.get(first), template.home.get(second)
    if one is None or two is None:
        raise Unlike
    return _place(one, two)


def _place(one: Home, two: Home) -> Place:
    """The place that both mean; an end block may count otherwise, so the interior neighbour is asked."""
    offset = one.period - 1
    if one.group != two.group or offset != two.period - 2 or abs(offset) > 1:
        raise Unlike
    if offset == 0 and one.local != two.local:
        raise Unlike
    return Place(one.group, offset, two.local if offset < 0 else one.local)


def _same_end(program: Program, template: Template, first: int, second: int) -> Reference | None:
    a, b = program.storages[first], program.storages[second]
    if (a.size_bytes, a.category) != (b.size_bytes, b.category):
        raise Unlike
    if a.freed is None or b.freed is None:
        if a.freed is not b.freed:
            raise Unlike
        return None
    if a.freed == b.freed:
        return a.freed
    one, two = _call_home(template, a.freed), _call_home(template, b.freed)
    if one is None or two is None:
        raise Unlike
    return _place(one, two)


def _call_home(template: Template, number: int) -> Home | None:
    for group, stretch in enumerate(template.stretches):
        for period in range(KEPT):
            segment = stretch.segment(period)
            if number in segment:
                return Home(group, period, number - segment.start)
    return None
