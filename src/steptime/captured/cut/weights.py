"""Which operator holds which weights, and what of them is on one tensor rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil

from steptime.captured.cut.cutting import Cutting, family
from steptime.captured.cut.sections import Sections
from steptime.captured.graph import Parameter
from steptime.model.captured import NOTHING, Line, Way, line


@dataclass(frozen=True, slots=True)
class Held:
    """Parameters of one operator, by way."""

    trained: Line
    replicated: Line
    frozen: Line
    tied: bool
    """They belong to another part too, which counts them on the same stage."""


def weights_of(
    sections: Sections, cutting: Cutting, ways: Sequence[Way], part: int, calls: Sequence[int]
) -> dict[int, Held]:
    """Parameters of a part by the first of its calls that reads them.

    A block has the parameters below its own path. Others belong to the head, but to the tail where only that reads
    them; those that both read are in both, the second time as tied. What no call reads is given to the first one.
    """
    program = sections.program
    read = [_first_reads(sections, calls)]
    if sections.blocks is not None:
        read += [_first_reads(sections, each) for each in (sections.head, sections.tail)]
    groups: dict[tuple[int, bool], list[Parameter]] = {}
    for parameter in _once(program.parameters):
        place = _place(sections, parameter, part, read)
        if place is not None:
            groups.setdefault((read[0].get(parameter.storage, calls[0]), place), []).append(parameter)
    out: dict[int, Held] = {}
    for (call, tied), members in groups.items():
        # A call that reads a tied and another weight counts both as its own.
        earlier = out.get(call)
        found = _held(members, sections, cutting, ways, tied)
        out[call] = found if earlier is None else Held(
            earlier.trained.plus(found.trained), earlier.replicated.plus(found.replicated),
            earlier.frozen.plus(found.frozen), False,
        )  # fmt: skip
    return out


def _once(parameters: Iterable[Parameter]) -> list[Parameter]:
    return list({parameter.storage: parameter for parameter in parameters}.values())


def _first_reads(sections: Sections, calls: Sequence[int]) -> dict[int, int]:
    """Storage -> first call that computes with it."""
    out: dict[int, int] = {}
    for number in sorted(calls):
        call = sections.program.calls[number]
        for storage in () if call.view else call.reads:
            out.setdefault(storage, number)
    return out


def _place(sections: Sections, parameter: Parameter, part: int, read: list[dict[int, int]]) -> bool | None:
    """Whether a parameter of the part is tied; None where it is of another part."""
    if sections.blocks is None:
        return False
    owner = sections.blocks.index_of(parameter.name)
    if owner is not None or 0 <= part < len(sections.each):
        return False if owner == part else None
    in_head, in_tail = parameter.storage in read[1], parameter.storage in read[2]
    if part == -1:
        return False if in_head or not in_tail else None
    return in_head if in_tail else None


def _held(members: Sequence[Parameter], sections: Sections, cutting: Cutting, ways: Sequence[Way], tied: bool) -> Held:
    sums = [[0.0] * len(ways) for _ in range(3)]
    cut = {family(name, sections.blocks) for name in cutting.weights}
    for parameter in members:
        whole = family(parameter.name, sections.blocks) not in cut
        for index, (tp, _) in enumerate(ways):
            # Only a vocabulary need not be a multiple of the ranks; a whole number of elements is near enough.
            local = float(parameter.elements if whole else ceil(parameter.elements / tp))
            sums[0 if parameter.trained else 2][index] += local
            if parameter.trained and whole:
                sums[1][index] += local
    zero = [0.0] * len(ways)
    trained, replicated, frozen = (line(each, zero) if any(each) else NOTHING for each in sums)
    return Held(trained, replicated, frozen, tied)
