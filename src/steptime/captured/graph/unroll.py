"""Unrolling of a program with a few recorded blocks of a run to the program of all blocks.

The template of a run has the calls of an interior block, with every storage as a place relative to the block. Two
interior blocks are compared call by call. A storage that both use is shared by all blocks; any other has to be at the
same place (segment, distance in periods, position) for both, or the run is no repetition.

Operators of an optimiser on lists have one element for each parameter, so more blocks make their lists longer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from steptime.captured.graph.program import BEFORE, OUTSIDE, Call, Node, Parameter, Program, Storage
from steptime.captured.graph.segments import KEPT, Run, Stretch, below, is_wide, stretches


class Unlike(Exception):
    """The interior blocks of a run differ, so it cannot be unrolled."""


@dataclass(frozen=True, slots=True)
class Place:
    """A storage or call relative to a block; `group` is a stretch, or `BEFORE` for what exists before the step."""

    group: int
    offset: int
    """Distance in periods: -1 the previous block, 0 the block itself, 1 the next one."""
    local: int
    """Position among the storages or calls of its group and period."""


Reference = Place | int
"""A place, or the number of a storage or call that all blocks share."""


References = tuple[tuple[Reference, ...], tuple[Reference, ...]]
"""References to the storages that a call reads, and to those that it writes."""


@dataclass(frozen=True, slots=True)
class Home:
    """Group, period and position in which a storage is allocated, or a call runs."""

    group: int
    period: int
    local: int


@dataclass(slots=True)
class Template:
    """Tables from which further blocks are made."""

    run: Run
    stretches: list[Stretch]
    storages: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """(group, period) -> storages allocated there, in order."""
    home: dict[int, Home] = field(default_factory=dict)
    """Storage of the run -> its home."""
    where: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Call of the run -> (stretch, period)."""
    calls: list[list[References]] = field(default_factory=list)
    """References of each call, by stretch and position."""
    ends: dict[tuple[int, int], Reference | None] = field(default_factory=dict)
    """(group, local) -> the call during which this storage of a block is freed; None: it is not freed."""


def template_of(program: Program, run: Run, stretches: list[Stretch]) -> Template:
    """The template of the interior blocks.

    Raises:
        Unlike: the interior blocks differ.
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
    where = template.where
    for group, stretch in enumerate(template.stretches):
        for period in range(KEPT):
            where.update(dict.fromkeys(stretch.segment(period), (group, period)))
    single = _read_by_one_period(program, where)
    for number, storage in enumerate(program.storages):
        key = where.get(storage.born)
        if storage.born == BEFORE:
            inside = single[number] if number in single else template.run.period_of(storage.name)
            key = None if inside is None else (BEFORE, inside)
        if key is not None:
            members = template.storages.setdefault(key, [])
            template.home[number] = Home(*key, len(members))
            members.append(number)


def _read_by_one_period(program: Program, where: dict[int, tuple[int, int]]) -> dict[int, int | None]:
    """Unnamed storage (a constant, an empty cache) -> the one period whose calls use it, else None."""
    periods: dict[int, set[int | None]] = {
        number: set()
        for number, storage in enumerate(program.storages)
        if storage.born == BEFORE and storage.name.startswith(OUTSIDE)
    }
    for number, call in enumerate(program.calls if periods else ()):
        period = where[number][1] if number in where else None
        for storage in periods.keys() & (*call.reads, *call.writes):
            periods[storage].add(period)
    return {number: next(iter(each)) if len(each) == 1 else None for number, each in periods.items()}


def _same_call(program: Program, template: Template, first: int, second: int) -> References:
    one, two = program.calls[first], program.calls[second]
    if not _alike(one, two, template.run):
        raise Unlike
    reads = tuple(_reference(template, a, b) for a, b in zip(one.reads, two.reads, strict=True))
    writes = tuple(_reference(template, a, b) for a, b in zip(one.writes, two.writes, strict=True))
    return reads, writes


def _alike(one: Call, two: Call, run: Run) -> bool:
    a, b = one.node, two.node
    attributes = [
        tuple((name, _kind(node.op, value)) for name, value in node.attributes if name != "draw") for node in (a, b)
    ]
    return (
        a.op == b.op and a.outputs == b.outputs and a.names == b.names and attributes[0] == attributes[1]
        and len(one.writes) == len(two.writes) and run.moved(one.module, 1) == two.module
        and (one.view, one.inplace, one.recomputed, one.scratch_bytes)
        == (two.view, two.inplace, two.recomputed, two.scratch_bytes)
    )  # fmt: skip


def _kind(op: str, value: object) -> object:
    """Attribute for comparison: factors and rates (floats except exponents) may differ, but not in being 0."""
    return bool(value) if isinstance(value, float) and op != "pow" else value


def _reference(template: Template, first: int, second: int) -> Reference:
    if first == second:
        return first
    one, two = template.home.get(first), template.home.get(second)
    if one is None or two is None:
        raise Unlike
    return _place(one, two)


def _place(one: Home, two: Home) -> Place:
    """The place that both homes stand for; positions in an end block may differ, so the interior one is used."""
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
    if number not in template.where:
        return None
    group, period = template.where[number]
    return Home(group, period, number - template.stretches[group].segment(period).start)


class Lists:
    """Extension of list operators to the parameters of all blocks.

    An element belongs to a parameter, and so to a block, if its storage is that parameter or was computed from it.
    Elements of copies follow the last one of period 1. Results of one list operator are elements of the next, so their
    storages are copied too.
    """

    def __init__(
        self, program: Program, template: Template, copied: dict[tuple[int, int, int], int], copies: range
    ) -> None:
        self._program = program
        self._copied = copied
        self._copies = copies
        self._home = template.home
        self._template = template
        self._next = max(copied.values(), default=len(program.storages) - 1) + 1
        self._register()

    def _register(self) -> None:
        """Give the results of list operators the homes of their parameters, so that they are copied with these."""
        for group, call in enumerate(self._program.calls):
            if not is_wide(call):
                continue
            fresh = [s for s in call.writes if self._program.storages[s].born == group]
            if not fresh:
                continue
            aligned = next((names for _, names in _named_groups(call) if len(names) == len(call.writes)), None)
            if aligned is None:
                if len(fresh) > 1:
                    raise Unlike
                continue
            self._adopt(-2 - group, call.writes, [self._home.get(s) for s in aligned])

    def _adopt(self, group: int, writes: tuple[int, ...], homes: list[Home | None]) -> None:
        counts: dict[int, int] = {}
        for storage, home in zip(writes, homes, strict=True):
            if home is None or storage in self._home:
                continue
            local = counts.get(home.period, 0)
            counts[home.period] = local + 1
            self._home[storage] = Home(group, home.period, local)
            self._template.storages.setdefault((group, home.period), []).append(storage)
            if home.period == 1:
                self._template.ends[group, local] = self._program.storages[storage].freed
                for new in self._copies:
                    self._copied[group, new, local] = self._next
                    self._next += 1

    def longer(self, call: Call) -> Call:
        """The call on the extended lists."""
        reads: list[int] = []
        names: list[str] = []
        picked: list[int] = []
        position = 0
        for name, group in _named_groups(call):
            order = self._order(group)
            for offset, storage in order:
                reads.append(storage)
                names.append(name)
                picked.append(position + offset)
            position += len(group)
        out = self._order(call.writes)
        node = call.node
        longer = Node(
            node.op, tuple(node.inputs[n] for n in picked), tuple(names), node.attributes,
            tuple(node.outputs[n] for n, _ in out), node.number,
        )  # fmt: skip
        return replace(call, node=longer, reads=tuple(reads), writes=tuple(storage for _, storage in out))

    def _order(self, storages: tuple[int, ...]) -> list[tuple[int, int]]:
        """(position of the recorded element, storage) of each element, with copies after the elements of period 1."""
        ones = {n for n, s in enumerate(storages) if s in self._home and self._home[s].period == 1}
        if not ones or len(storages) < 2:
            return list(enumerate(storages))
        out: list[tuple[int, int]] = []
        group: list[int] = []
        for n, storage in enumerate(storages):
            out.append((n, storage))
            if n not in ones:
                continue
            group.append(n)
            if n + 1 not in ones:
                out += [(each, self._copy(storages[each], new)) for new in self._copies for each in group]
                group = []
        return out

    def _copy(self, storage: int, new: int) -> int:
        home = self._home[storage]
        return self._copied[home.group, new, home.local]


def _named_groups(call: Call) -> list[tuple[str, tuple[int, ...]]]:
    """Arguments with their storages, in order."""
    groups: dict[str, list[int]] = {}
    for name, storage in zip(call.node.names, call.reads, strict=True):
        groups.setdefault(name, []).append(storage)
    return [(name, tuple(members)) for name, members in groups.items()]


def unroll(program: Program, run: Run) -> Program | None:
    """The program of all blocks, as if each had been recorded; None if the blocks are not a repetition.

    The recorded periods 0, 1, 2, 3 become periods 0, 1, m + 2, m + 3, with m = `run.missing` copies of the interior
    ones in between. A copy calls the same nodes, so their cost is computed once.
    """
    if run.missing <= 0:
        return program if run.missing == 0 else None
    found = stretches(program, run)
    if found is None:
        return None
    try:
        return _Unrolled(program, template_of(program, run, found)).program()
    except Unlike:
        return None


class _Unrolled:
    """The tables of one unrolling: new numbers of storages and calls."""

    def __init__(self, program: Program, template: Template) -> None:
        self.old = program
        self.template = template
        self.run = template.run
        self.copies = range(2, 2 + template.run.missing)
        """New periods that are copies; recorded periods 2 and 3 come after them."""
        self.copied: dict[tuple[int, int, int], int] = {}
        """(group, new period, local) -> number of the storage of a copy."""
        number = len(program.storages)
        self.members: dict[tuple[int, int], Sequence[int]] = {}
        """(group, new period) -> storages, in order."""
        for (group, period), members in template.storages.items():
            self.members[group, period if period < 2 else period + self.run.missing] = tuple(members)
            for new in self.copies if period == 1 else ():
                own = self.members[group, new] = range(number, number + len(members))
                self.copied.update(((group, new, local), one) for local, one in enumerate(own))
                number = own.stop
        self.lists = Lists(program, template, self.copied, self.copies)
        self.calls: list[Call] = []
        self.new_call: dict[int, int] = {}
        self.taken: dict[tuple[str, int], set[int]] = {}
        """(phase, group) -> interior periods whose storages are used by calls outside the blocks."""
        self.start: dict[tuple[int, int], int] = {}
        """(stretch, new period) -> first call."""
        self.moved: dict[tuple[str, int | None], str] = {}
        """(recorded path, periods by which a copy is later or None for a recorded block) -> path in the new program."""

    def recorded(self, new: int) -> int | None:
        """The recorded period of a new period; None for a copy."""
        if new < 2:
            return new
        return None if new in self.copies else new - self.run.missing

    # -- storages -----------------------------------------------------------------------------------------------------

    def call(self, reference: Reference | None, new: int) -> int | None:
        """New number of the call during which a storage of a new period is freed."""
        if reference is None or isinstance(reference, int):
            return None if reference is None else self.new_call[reference]
        return self.start[reference.group, new + reference.offset] + reference.local

    # -- the program --------------------------------------------------------------------------------------------------

    def program(self) -> Program:
        """The unrolled program; calls come first, since storages are allocated and freed at their new numbers."""
        self._emit_calls()
        storages = self._storages()
        members = f"{below(self.run.container)}{self.run.first}-{self.run.first + self.run.count - 1}"
        return replace(
            self.old, calls=tuple(self.calls), storages=storages, parameters=self._parameters(),
            modules=self._modules(), folded=(*self.old.folded, members),
        )  # fmt: skip

    def _emit_calls(self) -> None:
        number, calls = 0, self.old.calls
        by_start = {min(stretch.starts): (group, stretch) for group, stretch in enumerate(self.template.stretches)}
        while number < len(calls):
            if number in by_start:
                group, stretch = by_start[number]
                self._emit_stretch(group)
                number = stretch.end
                continue
            self._keep(number, calls[number])
            number += 1

    def _keep(self, number: int, call: Call) -> None:
        """Keep a call outside the blocks; calls that use storages of both interior blocks would use more, so refuse."""
        for storage in () if is_wide(call) else (*call.reads, *call.writes):
            home = self.template.home.get(storage)
            if home is not None and home.period in (1, 2):
                taken = self.taken.setdefault((call.phase, home.group), set())
                taken.add(home.period)
                if len(taken) > 1:
                    raise Unlike
        self.new_call[number] = len(self.calls)
        call = call.copy(self._path(call.module), call.reads, call.writes)
        self.calls.append(self.lists.longer(call) if is_wide(call) else call)

    def _emit_stretch(self, group: int) -> None:
        stretch = self.template.stretches[group]
        order = range(KEPT + self.run.missing)
        for new in reversed(order) if stretch.backward else order:
            self.start[group, new] = len(self.calls)
            recorded = self.recorded(new)
            segment = stretch.segment(1 if recorded is None else recorded)
            for local, number in enumerate(segment):
                call = self.old.calls[number]
                if recorded is not None:
                    self.new_call[number] = len(self.calls)
                if recorded in (0, 3):
                    self.calls.append(call.copy(self._path(call.module), call.reads, call.writes))
                    continue
                self.calls.append(self._interior(group, new, local, call))

    def _interior(self, group: int, new: int, local: int, call: Call) -> Call:
        reads, writes = self.template.calls[group][local]
        recorded = self.recorded(new)
        outward = {1: -1, 2: 1}.get(recorded or 0, 0)
        """Offset towards the recorded end block, whose storages keep their numbers."""
        module = self._path(call.module, new - 1 if recorded is None else None)
        read, written = (
            self._meant(before, places, new, outward) for before, places in ((call.reads, reads), (call.writes, writes))
        )
        return call.copy(module, read, written)

    def _meant(self, before: tuple[int, ...], places: tuple[Reference, ...], new: int, outward: int) -> tuple[int, ...]:
        """Storages of a new period at the given places."""
        return tuple(
            [
                place
                if isinstance(place, int)
                else old
                if outward and place.offset == outward
                else self.members[place.group, new + place.offset][place.local]
                for old, place in zip(before, places, strict=True)
            ]
        )

    def _path(self, path: str, later: int | None = None) -> str:
        """Path in the new program: `later` periods on for a copy; paths of the last two recorded periods move back."""
        found = self.moved.get((path, later))
        if found is None:
            found = self.moved[path, later] = self.run.moved(path, self._shift(path) if later is None else later)
        return found

    def _shift(self, path: str) -> int:
        period = self.run.period_of(path)
        index = self.run.index_of(path)
        beyond = index is not None and index >= self.run.first + KEPT * self.run.period
        return self.run.missing if beyond or (period is not None and period >= 2) else 0

    def _storages(self) -> tuple[Storage, ...]:
        born: dict[int, int] = {}
        for number, call in enumerate(self.calls):
            for storage in call.writes:
                born.setdefault(storage, number)
        out = [self._recorded_storage(number, storage) for number, storage in enumerate(self.old.storages)]
        for (group, new, local), number in self.copied.items():
            model = self.old.storages[self.template.storages[group, 1][local]]
            start = BEFORE if model.born == BEFORE else born[number]
            end = self.call(self.template.ends[group, local], new)
            out.append(model.copy(start, end, self._path(model.name, new - 1)))
        return self._numbered(out)

    def _numbered(self, storages: list[Storage]) -> tuple[Storage, ...]:
        """Number the unnamed storages in the order in which calls first read them."""
        read = dict.fromkeys(s for call in self.calls for s in call.reads if storages[s].name.startswith(OUTSIDE))
        for number, storage in enumerate(read):
            storages[storage] = replace(storages[storage], name=f"{OUTSIDE}{number}")
        return tuple(storages)

    def _recorded_storage(self, number: int, storage: Storage) -> Storage:
        born = BEFORE if storage.born == BEFORE else self.new_call[storage.born]
        freed = None if storage.freed is None else self.new_call.get(storage.freed, BEFORE)
        home = self.template.home.get(number)
        if home is not None and home.period in (1, 2):
            end = self.template.ends[home.group, home.local]
            inward = 1 if home.period == 1 else -1
            if isinstance(end, Place) and end.offset == inward:
                freed = self.call(end, 1 if home.period == 1 else 2 + self.run.missing)
        return storage.copy(born, freed, self._path(storage.name))

    def _parameters(self) -> tuple[Parameter, ...]:
        home = self.template.home
        copies: dict[int, list[Parameter]] = defaultdict(list)
        out: list[Parameter] = []
        for parameter in self.old.parameters:
            place = home.get(parameter.storage)
            out.append(replace(parameter, name=self._path(parameter.name)))
            if place is None or place.period != 1:
                continue
            for new in self.copies:
                number = self.copied[place.group, new, place.local]
                name = self.run.moved(parameter.name, new - 1)
                copies[new].append(replace(parameter, storage=number, name=name))
        return _in_order(out, copies, self.run)

    def _modules(self) -> dict[str, str]:
        modules = {self._path(path): kind for path, kind in self.old.modules.items()}
        for path, kind in self.old.modules.items():
            if self.run.period_of(path) == 1:
                modules |= {self.run.moved(path, new - 1): kind for new in self.copies}
        return modules


def _in_order(out: list[Parameter], copies: dict[int, list[Parameter]], run: Run) -> tuple[Parameter, ...]:
    """Parameters with the copies after those of period 1."""
    last = max((n for n, p in enumerate(out) if run.period_of(p.name) == 1), default=len(out) - 1)
    middle: Sequence[Parameter] = [parameter for new in sorted(copies) for parameter in copies[new]]
    return (*out[: last + 1], *middle, *out[last + 1 :])
