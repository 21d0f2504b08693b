"""A recorded step with other memory: gradients that are there already, optimiser states in 8 bits or on the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Final

from steptime.captured.graph import BEFORE, Call, Program, Storage
from steptime.cost.quantisation import LEAST_STATE_ELEMENTS, state_8bit_bytes


def accumulating(program: Program) -> Program:
    """A later micro-step of gradient accumulation: each gradient is made beside the sum that is there, and added.

    What was the gradient lives from its first to its last write; the sum is there before the step.
    """
    last: dict[int, int] = {}
    for number, call in enumerate(program.calls):
        if call.phase == "backward":
            last.update(dict.fromkeys(call.writes, number))
    storages, sums = [], []
    for number, storage in enumerate(program.storages):
        if storage.category != "gradient" or storage.born == BEFORE:
            storages.append(storage)
            continue
        made = max(storage.born, last.get(number, storage.born))
        storages.append(replace(storage, freed=made, category="temporary", name=""))
        sums.append(Storage(storage.size_bytes, BEFORE, storage.freed, "gradient", storage.name))
    return replace(program, storages=(*storages, *sums))


def gradient_bytes(program: Program) -> int:
    """Bytes of all gradients."""
    return sum(storage.size_bytes for storage in program.storages if storage.category == "gradient")


def with_narrow_weights(program: Program, names: Iterable[str], element_bytes: float, wide_bytes: int) -> Program:
    """Frozen weights in a narrow format; each call that reads one has a wide copy of it while it runs.

    Args:
        program: a recorded step.
        names: the weights.
        element_bytes: of a stored weight, with its scales.
        wide_bytes: of an element of the copy.
    """
    elements = _frozen_elements(program, names)
    storages = list(program.storages)
    for number, count in elements.items():
        storages[number] = replace(storages[number], size_bytes=math.ceil(count * element_bytes))
    calls = tuple(
        call if call.view or elements.keys().isdisjoint(call.reads)
        else replace(call, scratch_bytes=call.scratch_bytes + wide_bytes * _read(call, elements))
        for call in program.calls
    )  # fmt: skip
    return replace(program, storages=tuple(storages), calls=calls)


def _frozen_elements(program: Program, names: Iterable[str]) -> dict[int, int]:
    """Storage -> elements of the weights of these names that are not trained."""
    wanted = set(names)
    return {p.storage: p.elements for p in program.parameters if p.name in wanted and not p.trained}


def widened(program: Program, names: Iterable[str]) -> list[int]:
    """Elements of those weights that each call reads."""
    elements = _frozen_elements(program, names)
    return [0 if call.view else _read(call, elements) for call in program.calls]


def _read(call: Call, elements: Mapping[int, int]) -> int:
    return sum(elements.get(storage, 0) for storage in set(call.reads))


def _as_is(size_bytes: int, elements: int) -> int:
    return size_bytes


def _narrow(size_bytes: int, elements: int) -> int:
    """A state in 8 bits; short ones stay as they are, and so do counters of steps."""
    whole = elements >= LEAST_STATE_ELEMENTS and size_bytes >= elements
    return int(state_8bit_bytes(elements)) if whole else size_bytes


def _away(size_bytes: int, elements: int) -> int:
    return 0


#: Where and how the states of an optimiser are kept -> bytes on the device of one state, from its bytes as they are and
#: the elements of its weight.
STATES: Final[Mapping[str, Callable[[int, int], int]]] = {
    "default": _as_is, "fused": _as_is, "8bit": _narrow, "paged": _away, "offload": _away,
}  # fmt: skip


def state_bytes(program: Program, kind: str = "fused") -> int:
    """Bytes that the states of the optimiser take on the device."""
    return sum(_state_sizes(program, kind).values())


def _state_sizes(program: Program, kind: str) -> dict[int, int]:
    """Number of each state's storage -> its bytes on the device."""
    size, elements = STATES[kind], {one.name: one.elements for one in program.parameters}
    return {
        number: size(one.size_bytes, elements.get(one.name.rpartition(".")[0], 0))
        for number, one in enumerate(program.storages) if one.category == "state" and one.born == BEFORE
    }  # fmt: skip


def with_states(program: Program, kind: str) -> Program:
    """The program with its states kept another way."""
    storages = list(program.storages)
    for number, size in _state_sizes(program, kind).items():
        storages[number] = replace(storages[number], size_bytes=size)
    return replace(program, storages=tuple(storages))
