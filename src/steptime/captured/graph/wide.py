"""Operators of an optimiser that work on lists: one element for each parameter, more when there are more blocks."""

from __future__ import annotations

from dataclasses import replace

from steptime.captured.graph.node import Node
from steptime.captured.graph.program import Call, Program
from steptime.captured.graph.segments import is_wide
from steptime.captured.graph.template import Home, Template, Unlike


class Lists:
    """Makes longer lists.

    An element belongs to the parameter that the storage in it is or was made from, and so to a block. Elements of
    copies follow the last one of period 1; results of one list operator are elements of the next, so their storages
    get copies too.
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
        """Give the results of list operators a home: as many copies of theirs as of the parameter they stem from."""
        for group, call in enumerate(self._program.calls):
            if not is_wide(call):
                continue
            fresh = [s for s in call.writes if self._program.storages[s].born == group]
            if not fresh:
                continue
            aligned = next((names for names in _groups(call) if len(names) == len(call.writes)), None)
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
        """The same call on the longer lists."""
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
        """(position of the recorded element that it copies, storage), copies behind the elements of period 1."""
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


def _groups(call: Call) -> list[tuple[int, ...]]:
    return [members for _, members in _named_groups(call)]
