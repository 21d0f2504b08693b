"""Unrolling: a program in which a few blocks of a run were recorded becomes the program of all of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from steptime.captured.graph.program import BEFORE, OUTSIDE, Call, Parameter, Program, Storage
from steptime.captured.graph.segments import KEPT, Run, below, is_wide, stretches
from steptime.captured.graph.template import Place, Reference, Template, Unlike, template_of
from steptime.captured.graph.wide import Lists


def unroll(program: Program, run: Run) -> Program | None:
    """The program of all blocks, as if each had been recorded; None where the blocks are not a repetition.

    The recorded periods 0, 1, 2, 3 become 0, 1, m + 2, m + 3 of the whole, with m = `run.missing` copies of the
    interior ones in between. A copy calls the same nodes: what is known of them (their cost) is computed once.
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
        for (group, period), members in template.storages.items():
            if period != 1:
                continue
            for new in self.copies:
                for local in range(len(members)):
                    self.copied[group, new, local] = number
                    number += 1
        self.lists = Lists(program, template, self.copied, self.copies)
        self.calls: list[Call] = []
        self.new_call: dict[int, int] = {}
        self.taken: dict[tuple[str, int], set[int]] = {}
        """(phase, group) -> inner periods whose storages calls outside the blocks take."""
        self.start: dict[tuple[int, int], int] = {}
        """(stretch, new period) -> first call."""

    def recorded(self, new: int) -> int | None:
        """The recorded period that a new one is, None for a copy."""
        if new < 2:
            return new
        return None if new in self.copies else new - self.run.missing

    # -- storages -----------------------------------------------------------------------------------------------------

    def storage(self, reference: Reference, new: int) -> int:
        """Number of the storage that a block of that new period means."""
        if isinstance(reference, int):
            return reference
        target = new + reference.offset
        recorded = self.recorded(target)
        if recorded is None:
            return self.copied[reference.group, target, reference.local]
        return self.template.storages[reference.group, recorded][reference.local]

    def call(self, reference: Reference | None, new: int) -> int | None:
        """New number of the call at which a storage of that new period is freed."""
        if reference is None or isinstance(reference, int):
            return None if reference is None else self.new_call[reference]
        return self.start[reference.group, new + reference.offset] + reference.local

    # -- the program --------------------------------------------------------------------------------------------------

    def program(self) -> Program:
        """Calls first, since storages are born and freed at their new numbers."""
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
        """A call outside the blocks; where such calls take what both inner blocks made, they would take more."""
        for storage in () if is_wide(call) else (*call.reads, *call.writes):
            home = self.template.home.get(storage)
            if home is not None and home.period in (1, 2):
                taken = self.taken.setdefault((call.phase, home.group), set())
                taken.add(home.period)
                if len(taken) > 1:
                    raise Unlike
        self.new_call[number] = len(self.calls)
        call = replace(call, module=self._path(call.module))
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
                    self.calls.append(replace(call, module=self._path(call.module)))
                    continue
                self.calls.append(self._interior(group, new, local, call))

    def _interior(self, group: int, new: int, local: int, call: Call) -> Call:
        reads, writes = self.template.calls[group][local]
        recorded = self.recorded(new)
        outward = {1: -1, 2: 1}.get(recorded or 0, 0)
        """Towards the recorded end block, where what it names stays what it was."""

        def meant(before: tuple[int, ...], places: tuple[Reference, ...]) -> tuple[int, ...]:
            return tuple(
                old if outward and isinstance(place, Place) and place.offset == outward else self.storage(place, new)
                for old, place in zip(before, places, strict=True)
            )

        module = self.run.moved(call.module, new - 1) if recorded is None else self._path(call.module)
        return replace(call, module=module, reads=meant(call.reads, reads), writes=meant(call.writes, writes))

    def _path(self, path: str) -> str:
        """Path of a recorded module in the whole: the last two periods move to the end."""
        period = self.run.period_of(path)
        index = self.run.index_of(path)
        beyond = index is not None and index >= self.run.first + KEPT * self.run.period
        late = beyond or (period is not None and period >= 2)
        return self.run.moved(path, self.run.missing) if late else path

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
            out.append(replace(model, born=start, freed=end, name=self.run.moved(model.name, new - 1)))
        return self._numbered(out)

    def _numbered(self, storages: list[Storage]) -> tuple[Storage, ...]:
        """Storages that nobody named are numbered in the order in which calls first read them."""
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
        return replace(storage, born=born, freed=freed, name=self._path(storage.name))

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
    """Copies behind the parameters of period 1."""
    last = max((n for n, p in enumerate(out) if run.period_of(p.name) == 1), default=len(out) - 1)
    middle: Sequence[Parameter] = [parameter for new in sorted(copies) for parameter in copies[new]]
    return (*out[: last + 1], *middle, *out[last + 1 :])
