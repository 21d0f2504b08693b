"""A captured step as a chain of units, and the costs of the whole step's shardings in each unit.

Units are head, equal blocks and tail, or the parts of a module without equal blocks.

The time of an item belongs to the units that run it, in equal parts; the time between two items to the later one; the
time of parameters and their gradients to the unit of the parameter. Each micro-batch has computation and traffic of
activations and weights; each step has one reduction of gradients and one update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from steptime.captured.cut.chains import chain_of
from steptime.captured.graph import BEFORE
from steptime.num import Array
from steptime.sharding.build import Built
from steptime.sharding.flow import Flow, longest_known
from steptime.sharding.planner import ShardingPlan, local_bytes

FORWARD, BACKWARD, WEIGHTS = range(3)
"""Passes: forward, gradients of inputs, gradients of weights."""


def of_micro_batch(built: Built, micro_batches: int) -> Built:
    """The problem of one micro-batch, with its share of the step's traffic of gradients and of the update."""
    items, seconds = built.flow.items, built.seconds
    data = {
        pair: matrix / micro_batches if "update" in (items[pair[0]].kind, items[pair[1]].kind) else matrix
        for pair, matrix in seconds.data.items()
    }
    inside = tuple(
        each / micro_batches if item.kind == "update" else each
        for item, each in zip(items, seconds.inside, strict=True)
    )
    return replace(built, seconds=replace(seconds, data=data, inside=inside))


class Shared(NamedTuple):
    """A parameter that several units read, of which each stage with such a unit has a copy."""

    units: tuple[int, ...]
    storages: tuple[int, ...]
    """Storages of weights, gradients and states."""
    gradient: int
    """Storage of the gradient, which the copies exchange; -1: it is not trained."""


class Branches(NamedTuple):
    """A run of units in parts that can run at the same time on different devices, as no activation passes between.

    After the branches meet, the last one runs alone and reads the results of the others.
    """

    bounds: tuple[int, ...]
    """First unit of each branch, and the unit after the last one."""
    meet: int
    """First unit that reads results of several branches, or the unit after the last one."""

    def to(self, end: int) -> Branches:
        """The branches with the last one extended."""
        return Branches((*self.bounds[:-1], end), self.meet)


@dataclass(frozen=True, kw_only=True)
class Units:
    """A chain of units; unit 0 is the head."""

    flow: Flow
    names: tuple[str, ...]
    blocks: Array
    """True for units that are one of equal blocks."""
    of_call: Array
    """Unit of each call; -1: the optimiser."""

    @property
    def count(self) -> int:
        """Number of units."""
        return len(self.names)

    @cached_property
    def runs(self) -> Array:
        """Share of each item that each unit runs, [item, unit]."""
        out = np.zeros((len(self.flow.items), self.count))
        for call, item in self.flow.of_call.items():
            out[item, self.of_call[call]] += 1
        for name, item in self.flow.update_of.items():
            out[item, self.of_parameter[name][0]] += 1
        for copy in self.flow.copies:
            out[copy.item, self.of_call[copy.reads[0].call]] += 1
        share: Array = out / np.maximum(out.sum(axis=1, keepdims=True), 1)
        return share

    @cached_property
    def readers(self) -> dict[int, tuple[int, ...]]:
        """Units whose forward passes read each storage."""
        found: dict[int, set[int]] = {}
        for number, call in enumerate(self.flow.program.calls):
            if call.phase == "forward":
                for storage in call.reads:
                    found.setdefault(storage, set()).add(int(self.of_call[number]))
        return {storage: tuple(sorted(units)) for storage, units in found.items()}

    @cached_property
    def of_parameter(self) -> dict[str, tuple[int, ...]]:
        """Units that read each parameter; a parameter that none reads is in the first."""
        return {each.name: self.readers.get(each.storage, (0,)) for each in self.flow.program.parameters}

    @cached_property
    def held(self) -> tuple[dict[int, int], tuple[Shared, ...]]:
        """Storages that a stage holds permanently: storage -> its unit, and parameters of several units."""
        own: dict[int, int] = {}
        shared: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        storages = self.flow.program.storages
        for number, storage in enumerate(storages):
            if storage.born != BEFORE and storage.category not in ("gradient", "state"):
                continue
            name = longest_known(storage.name, self.of_parameter)
            units = self.of_parameter[name] if name else self.readers.get(number, ())
            if len(units) == 1:
                own[number] = units[0]
            elif units and storage.category != "input":
                shared.setdefault((name, units), []).append(number)
        return own, tuple(
            Shared(units, tuple(all_of), next((n for n in all_of if storages[n].category == "gradient"), -1))
            for (_, units), all_of in shared.items()
        )

    @cached_property
    def made(self) -> dict[int, int]:
        """Storage that the forward pass makes -> its unit."""
        born = {n: each.born for n, each in enumerate(self.flow.program.storages) if each.born != BEFORE}
        calls = self.flow.program.calls
        return {n: int(self.of_call[call]) for n, call in born.items() if calls[call].phase == "forward"}

    @cached_property
    def kept(self) -> dict[int, int]:
        """Activation that is kept for the backward pass -> the unit that makes it."""
        return {n: unit for n, unit in self.made.items() if self.flow.program.storages[n].category == "activation"}

    @cached_property
    def crossing(self) -> list[tuple[int, ...]]:
        """Storages that cross the boundary before each unit: made before it, read in it or later; unit 0: none."""
        out: list[list[int]] = [[] for _ in range(self.count)]
        for storage, units in self.readers.items():
            for unit in range(self.made.get(storage, self.count) + 1, units[-1] + 1):
                out[unit].append(storage)
        return [tuple(each) for each in out]

    @cached_property
    def boundary_bytes(self) -> Array:
        """Bytes of whole tensors of a micro-batch that enter each unit."""
        return np.array([sum(self.flow.program.storages[n].size_bytes for n in each) for each in self.crossing], float)

    @cached_property
    def branches(self) -> dict[tuple[int, int], Branches]:
        """First unit and unit after the last -> branches of the run, such as two towers up to where they meet.

        If branches meet inside a run, they are as long as possible.
        """
        between = np.zeros((self.count, self.count), bool)
        for unit, each in enumerate(self.crossing):
            for storage in each:
                between[self.made[storage], unit] |= unit in self.readers[storage]
        starts = [unit for unit in range(1, self.count) if not between[unit - 1, unit]]
        out: dict[tuple[int, int], Branches] = {}
        for low in range(self.count) if starts else ():
            for high in range(low + 2, self.count + 1):
                cuts = tuple(at for at in starts if low < at < high and not between[low:at, at:high].any())
                known = out.get((low, high - 1))
                if cuts or known is not None:
                    out[low, high] = Branches((low, *cuts, high), high) if cuts or known is None else known.to(high)
        return out

    def read_bytes(self, size_bytes: Array) -> Array:
        """Bytes of earlier activations that a run of units itself reads, [first unit, unit after the last].

        Args:
            size_bytes: bytes of each storage.
        """
        out = np.zeros((self.count, self.count + 1))
        for storage, made in self.made.items():
            for first in range(made + 1, self.count):
                reader = next((unit for unit in self.readers.get(storage, ()) if unit >= first), self.count)
                out[first, reader + 1 :] += size_bytes[storage]
        return out


def units_of(flow: Flow) -> Units:
    """The chain of a captured step: head, equal blocks and tail.

    If it has no blocks, or some parts are branches: the parts of :func:`~steptime.captured.cut.chains.chain_of`.
    """
    sections, chain = flow.sections, chain_of(flow.program)
    if sections.blocks is None or chain.parallel:
        of_call, whole = np.array(chain.of_call, int), np.zeros(len(chain.names), bool)
        return Units(flow=flow, names=tuple(chain.names), blocks=whole, of_call=of_call)
    part = np.array(sections.of_calls(), int)
    forward = [n for n, call in enumerate(flow.program.calls) if call.phase == "forward"]
    present = np.unique(part[forward])
    # Only the backward pass may have a part, such as the last gradients of a model that begins with its blocks.
    place = np.clip(np.searchsorted(present, part), 0, len(present) - 1)
    count, container, first = len(sections.each), sections.blocks.container, sections.blocks.first
    names = ["head" if n < 0 else "tail" if n >= count else f"{container}.{first + n}" for n in present.tolist()]
    return Units(
        flow=flow,
        names=tuple(names),
        blocks=np.array([0 <= n < count for n in present.tolist()]),
        of_call=np.where(part == -2, -1, place),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class UnitCosts:
    """Costs of the whole step's shardings in each unit."""

    units: Units
    plan: ShardingPlan
    computing_s: Array
    """Computation of a micro-batch, [pass, unit]."""
    others_s: Array
    """Traffic of activations of a micro-batch, and of their gradients, [pass, unit]."""
    weights_s: Array
    """Traffic of weights of a micro-batch, by unit."""
    gradients_s: Array
    """Reduction of the gradients, once in a step, by unit."""
    update_s: Array
    """Optimiser, once in a step, by unit."""
    held_bytes: Array
    """Weights, gradients, states and inputs of a device, by unit."""
    shared_bytes: Array
    """Weights, gradients and states of each shared parameter."""
    exchanged_bytes: Array
    """Gradient of each shared parameter on a device."""
    kept_bytes: Array
    """Activations of a micro-batch, by unit."""
    passed_bytes: Array
    """Bytes of ``kept_bytes`` that a later unit reads, which stay if the unit is recomputed."""
    entering_bytes: Array
    """Bytes that enter a unit from the one before, with those that only pass through."""
    read_bytes: Array
    """Bytes that enter a run of units as a branch, [first unit, unit after the last]."""
    working_bytes: Array
    """Largest number of further bytes while a call of each unit runs."""

    @property
    def devices(self) -> int:
        """Devices of the sub-mesh."""
        return self.plan.built.mesh.devices

    @cached_property
    def again_s(self) -> Array:
        """Seconds of each unit's forward pass, which recomputation adds."""
        again: Array = self.computing_s[FORWARD] + self.others_s[FORWARD]
        return again


def unit_costs(
    units: Units, plan: ShardingPlan, micro_batches: int, paced: Callable[[Array, Array], Array] | None = None
) -> UnitCosts:
    """Costs by unit of shardings for one micro-batch (:func:`of_micro_batch`).

    ``paced``: function from device seconds and operators to seconds with waits for the host; None: no waits.
    """
    built, choice, runs = plan.built, plan.choice, units.runs
    computing, others = np.zeros((3, units.count)), np.zeros((3, units.count))
    weights, gradients, update = (np.zeros(units.count) for _ in range(3))
    operators = np.zeros((3, units.count))
    items, passes = built.flow.items, _passes(units)
    for number, item in enumerate(items):
        taken = float(built.seconds.inside[number][choice[number]]) * runs[number]
        if item.kind == "update":
            update += micro_batches * taken
        else:
            others[passes[number]] += taken
            operators[passes[number]] += runs[number] * (item.count if item.kind == "operator" else 0)
            computing[passes[number]] += float(built.seconds.operators[number][choice[number]]) * runs[number]
    for (u, v), matrix in built.seconds.moved.items():
        later = u if items[v].kind == "source" else v
        others[passes[later]] += float(matrix[choice[u], choice[v]]) * runs[later]
    for (u, v), matrix in built.seconds.data.items():
        seconds, kinds = float(matrix[choice[u], choice[v]]), (items[u].kind, items[v].kind)
        if "update" in kinds:
            gradients += micro_batches * seconds * runs[u if kinds[0] == "update" else v]
        else:
            weights += seconds * runs[u if kinds[0] == "operator" else v]
    if paced is not None:
        busy = computing + others
        others += paced(busy, operators) - busy
    return UnitCosts(
        units=units,
        plan=plan,
        computing_s=computing,
        others_s=others,
        weights_s=weights,
        gradients_s=gradients,
        update_s=update,
        **_memory(units, local_bytes(built, choice)),
    )


def _passes(units: Units) -> list[int]:
    """Pass of each item; backward items for which no other unit waits count as gradients of weights."""
    flow, made, reads = units.flow, dict[int, int](), dict[int, list[int]]()
    for number in sorted(flow.of_call):
        call = flow.program.calls[number]
        reads[number] = [made[storage] for storage in call.reads if storage in made]
        made.update(dict.fromkeys(call.writes, number))
    awaited: set[int] = set()
    for number in reversed(reads):
        awaited |= {n for n in reads[number] if number in awaited or units.of_call[n] != units.of_call[number]}
    out = [FORWARD if item.phase == "forward" else WEIGHTS for item in flow.items]
    for number in awaited:
        item = flow.of_call[number]
        out[item] = min(out[item], BACKWARD)
    for copy in flow.copies:
        out[copy.item] = min(out[copy.item], *(out[flow.of_call[read.call]] for read in copy.reads))
    return out


def _memory(units: Units, local: Array) -> dict[str, Array]:
    own, shared = units.held
    kept, passed, held = (np.zeros(units.count) for _ in range(3))
    following = {n for each in units.crossing for n in each}
    for number, unit in units.kept.items():
        kept[unit] += local[number]
        passed[unit] += local[number] * (number in following)
    for number, unit in own.items():
        held[unit] += local[number]
    return {
        "held_bytes": held,
        "kept_bytes": kept,
        "passed_bytes": passed,
        "shared_bytes": np.array([_sum(local, each.storages) for each in shared]),
        "exchanged_bytes": np.array([0.0 if each.gradient < 0 else local[each.gradient] for each in shared]),
        "entering_bytes": np.array([_sum(local, each) for each in units.crossing]),
        "read_bytes": units.read_bytes(local) if units.branches else np.zeros((units.count, units.count + 1)),
        "working_bytes": _working(units, local),
    }


def _sum(local: Array, storages: Iterable[int]) -> float:
    return float(local[list(storages)].sum())


def _working(units: Units, local: Array) -> Array:
    """Largest bytes alive in a call of each unit that are neither held nor kept, plus the largest new gradient."""
    own, shared = units.held
    apart = {*own, *units.kept, *(n for each in shared for n in each.storages)}
    calls = units.flow.program.calls
    change = np.zeros(len(calls) + 1)
    out = np.zeros(units.count)
    for number, storage in enumerate(units.flow.program.storages):
        if number not in apart and storage.born != BEFORE:
            change[storage.born] += local[number]
            change[len(calls) if storage.freed is None else storage.freed + 1] -= local[number]
    np.maximum.at(out, units.of_call[units.of_call >= 0], np.cumsum(change)[:-1][units.of_call >= 0])
    return out + _largest_gradients(units, local)


def _largest_gradients(units: Units, local: Array) -> Array:
    """The largest gradient of each unit; that of a further micro-batch is in memory until it is added."""
    out = np.zeros(units.count)
    own, shared = units.held
    owners: Sequence[tuple[int, tuple[int, ...]]] = [
        *((n, (unit,)) for n, unit in own.items()),
        *((each.gradient, each.units) for each in shared),
    ]
    for number, places in owners:
        if number >= 0 and units.flow.program.storages[number].category == "gradient":
            for unit in places:
                out[unit] = max(out[unit], local[number])
    return out
