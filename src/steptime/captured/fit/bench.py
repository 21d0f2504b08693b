"""Captures of the variants of one module, each recorded once: programs, costs, memory of their phases.

Some variants are derived from the recorded step without a capture: gradients that exist before it, optimiser states in
8 bits or on the host, and narrow weights.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from inspect import Parameter
from typing import Any, Final, Literal, TypeVar

import numpy as np

from steptime.captured.cost import CostTable, KernelCall, Timer, Work, cost_table
from steptime.captured.fit.layout import Layout, layout_of
from steptime.captured.graph import BEFORE, Call, Program, Storage
from steptime.captured.graph.liveness import Liveness
from steptime.captured.graph.segments import Run as BlockRun
from steptime.captured.graph.segments import Saves, Tree, is_chained, plain, text
from steptime.captured.record import require_torch
from steptime.captured.record.factory import Target, load_target
from steptime.captured.record.inputs import InputSpec
from steptime.cost.host import issued_s
from steptime.cost.quantisation import LEAST_STATE_ELEMENTS, dequantised_bytes, nf4_element_bytes, state_8bit_bytes
from steptime.errors import UserError
from steptime.hardware.records import Device
from steptime.num import Array

T = TypeVar("T")


def accumulating(program: Program) -> Program:
    """A later micro-step of gradient accumulation: each new gradient is added to an existing sum.

    The new gradient lives from its first to its last write; the sum exists before the step.
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
    """The program with frozen weights in a narrow format; each call that reads one has a wide copy while it runs.

    Args:
        program: a recorded step.
        names: the weights.
        element_bytes: bytes per element of a stored weight, with its scales.
        wide_bytes: bytes per element of the copy.
    """
    elements = _frozen_elements(program, names)
    storages = list(program.storages)
    for number, count in elements.items():
        storages[number] = replace(storages[number], size_bytes=math.ceil(count * element_bytes))
    calls = tuple(
        call
        if call.view or elements.keys().isdisjoint(call.reads)
        else replace(call, scratch_bytes=call.scratch_bytes + wide_bytes * _read(call, elements))
        for call in program.calls
    )
    return replace(program, storages=tuple(storages), calls=calls)


def _frozen_elements(program: Program, names: Iterable[str]) -> dict[int, int]:
    """Storage -> elements, for the weights of these names that are not trained."""
    wanted = set(names)
    return {p.storage: p.elements for p in program.parameters if p.name in wanted and not p.trained}


def widened(program: Program, names: Iterable[str]) -> list[int]:
    """Elements of the named frozen weights that each call reads."""
    elements = _frozen_elements(program, names)
    return [0 if call.view else _read(call, elements) for call in program.calls]


def _read(call: Call, elements: Mapping[int, int]) -> int:
    return sum(elements.get(storage, 0) for storage in set(call.reads))


def _as_is(size_bytes: int, elements: int) -> int:
    return size_bytes


def _narrow(size_bytes: int, elements: int) -> int:
    """Bytes of a state in 8 bits; short states and step counters keep their size."""
    whole = elements >= LEAST_STATE_ELEMENTS and size_bytes >= elements
    return int(state_8bit_bytes(elements)) if whole else size_bytes


def _away(size_bytes: int, elements: int) -> int:
    return 0


#: Kind of optimiser states -> function that returns the bytes of one state on the device, from its recorded bytes and
#: the elements of its weight.
STATES: Final[Mapping[str, Callable[[int, int], int]]] = {
    "default": _as_is, "fused": _as_is, "8bit": _narrow, "paged": _away, "offload": _away,
}  # fmt: skip


def state_bytes(program: Program, kind: str = "fused") -> int:
    """Bytes of the optimiser states on the device."""
    return sum(_state_sizes(program, kind).values())


def _state_sizes(program: Program, kind: str) -> dict[int, int]:
    """Storage of each state -> its bytes on the device."""
    size, elements = STATES[kind], {one.name: one.elements for one in program.parameters}
    return {
        number: size(one.size_bytes, elements.get(one.name.rpartition(".")[0], 0))
        for number, one in enumerate(program.storages)
        if one.category == "state" and one.born == BEFORE
    }


def with_states(program: Program, kind: str) -> Program:
    """The program with another kind of optimiser states."""
    storages = list(program.storages)
    for number, size in _state_sizes(program, kind).items():
        storages[number] = replace(storages[number], size_bytes=size)
    return replace(program, storages=tuple(storages))


WIDE_BYTES: Final = 2
"""Bytes of an element in products with narrow weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """Element types with which a precision is captured and timed."""

    weights: str | None = None
    """Element type of the weights; None: the one of the factory."""
    autocast: str | None = None
    tf32: Literal["convolutions", "all"] = "convolutions"
    adapters: int = 0
    """Rank of adapters on frozen weights in NF4; 0: the weights are trained."""


FORMATS: Final[Mapping[str, Format]] = {
    "fp32": Format(), "tf32": Format(tf32="all"), "bf16": Format(autocast="bf16"), "fp16": Format(autocast="fp16"),
    "pure-bf16": Format(weights="bf16"), "qlora": Format(weights="bf16", adapters=16),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """Times of one part of a step: on the device, and on the host that issues its kernels."""

    device_s: float
    host_s: float
    sharpness: float
    """Exponent of the smooth maximum of both times."""

    @property
    def seconds(self) -> float:
        """Time of the part, with host and device running concurrently."""
        return float(issued_s(self.device_s, 1.0, self.host_s, self.sharpness)) if self.device_s else self.host_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Peaks of live tensors of a step, with fp32 states on the device."""

    passes_bytes: float
    """Peak of the forward and backward pass."""
    optimizer_bytes: float
    state_bytes: float


@dataclass(frozen=True, kw_only=True)
class Run:
    """One captured variant."""

    program: Program
    """A step without accumulation."""
    table: CostTable
    layout: Layout | None = None
    more_s: Array | None = None
    """Time of each call for widening weights, in addition to its operator."""
    _known: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    def _once(self, key: Hashable, find: Callable[[], T]) -> T:
        """Value of a key, computed once and shared by many combinations."""
        if key not in self._known:
            self._known[key] = find()
        found: T = self._known[key]
        return found

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients."""
        return self._once("gradients", lambda: gradient_bytes(self.program))

    def state_bytes(self, kind: str = "fused") -> int:
        """Bytes of the optimiser states on the device."""
        return self._once(("states", kind), lambda: state_bytes(self.program, kind))

    def part(self, *phases: str) -> Issued:
        """Times of the given phases together."""
        return self._once(phases, lambda: self._part(phases))

    def _part(self, phases: tuple[str, ...]) -> Issued:
        chosen = [call.phase in phases for call in self.program.calls]
        device_s, host_s = float(self.table.seconds[chosen].sum()), float(self.table.host_s[chosen].sum())
        if self.more_s is not None:
            device_s += float(self.more_s[chosen].sum())
            host_s += self.table.timer.host_s * float((self.more_s[chosen] > 0).sum())
        return Issued(device_s=device_s, host_s=host_s, sharpness=self.table.timer.sharpness)

    def footprint(self, accumulate: bool) -> Footprint:
        """Memory of a step, or of a later micro-step with the optimiser after it."""
        return self._once(accumulate, lambda: self._footprint(accumulate))

    def _footprint(self, accumulate: bool) -> Footprint:
        program = accumulating(self.program) if accumulate else self.program
        peaks = Liveness(program).peak_bytes()
        optimizer = peaks.pop("optimizer", 0)
        return Footprint(passes_bytes=max(peaks.values()), optimizer_bytes=optimizer, state_bytes=self.state_bytes())


@dataclass(kw_only=True)
class Bench:
    """A module that is captured in its variants."""

    text: str
    """``pkg.module:factory`` or ``file.py:factory``."""
    device: Device
    optimizer: str = "adamw"
    loss: str | None = None
    """Loss; None: the one of the factory, else the loss that the module returns, else the sum of its output."""
    batch: int | None = None
    """Batch with which the module is inspected; None: the batch of the factory."""
    seq: int | None = None
    inputs: tuple[InputSpec, ...] = ()
    ran: Callable[[], None] = lambda: None
    """Called after each capture."""
    captures: int = 0
    _targets: dict[tuple[str | None, int | None, int], Target] = field(default_factory=dict)
    _programs: dict[tuple[object, ...], Program] = field(default_factory=dict)
    _runs: dict[tuple[object, ...], Run] = field(default_factory=dict)
    _failed: dict[tuple[object, ...], UserError] = field(default_factory=dict)
    _timers: dict[str, Timer] = field(default_factory=dict)
    _folded: dict[tuple[str | None, int, int], tuple[tuple[BlockRun, ...], bool]] = field(default_factory=dict)
    """(weights, adapters, batch) -> runs of blocks with equal forward passes, and True if nothing runs between them."""
    _frozen: tuple[str, ...] = ()

    @cached_property
    def _batch_parameter(self) -> Parameter | None:
        require_torch()
        from steptime.captured.record.variants import batch_parameter

        return batch_parameter(self.text)

    @property
    def resizes(self) -> bool:
        """True if inputs of another batch are resized from given ones, because the factory takes no batch."""
        return bool(self.inputs) or self._batch_parameter is None

    def target(self, weights: str | None, batch: int | None, adapters: int = 0) -> Target:
        """The module, made for a batch if the factory takes one; None: the default of the factory."""
        batch = batch if self._batch_parameter is not None else None
        key = (weights, batch, adapters)
        if key not in self._targets:
            sizes = {} if batch is None else {"batch": batch}
            sizes |= {} if self.seq is None else {"seq": self.seq}
            found = load_target(self.text, sizes=sizes, dtype=weights, inputs=self.inputs)
            self._targets[key] = self._adapted(found, adapters) if adapters else found
        return self._targets[key]

    def _adapted(self, found: Target, rank: int) -> Target:
        """The module with adapters; a copy of it, if the factory returns the same module each time."""
        from steptime.captured.record.problems import explaining
        from steptime.captured.record.variants import adapt

        paths = self.paths
        if any(found.module is one.module for one in self._targets.values()):
            with explaining(self.text):
                found = replace(found, module=copy.deepcopy(found.module))
        self._frozen = adapt(found.module, paths, rank)
        return found

    def own_batch(self) -> int:
        """Default batch of the factory; if it takes none, the leading dim of its inputs.

        Raises:
            UserError: there is no default, or the batch is unknown.
        """
        if self.resizes:
            return self._leading(self.target(None, None))
        parameter = self._batch_parameter
        default = None if parameter is None else parameter.default
        if not isinstance(default, int) or default < 1:
            raise UserError(f"{self.text}: its batch has no default", hint="give --batch")
        return default

    def _leading(self, target: Any) -> int:
        from steptime.captured.record.variants import leading_batch

        return leading_batch(self.text, target.module, target.inputs)

    @cached_property
    def blocks(self) -> tuple[tuple[str, ...], ...]:
        """Paths of the blocks of the module, grouped by the list that contains them."""
        from steptime.captured.record.variants import blocks_of

        return blocks_of(self.target(None, self.batch).module)

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """Paths of all blocks, in order."""
        return tuple(path for group in self.blocks for path in group)

    def timer(self, precision: str) -> Timer:
        """Timer of operators in a precision."""
        tf32 = FORMATS[precision].tf32
        if tf32 not in self._timers:
            self._timers[tf32] = Timer(device=self.device, tf32=tf32)
        return self._timers[tf32]

    @property
    def has_fused(self) -> bool:
        """True if the optimiser has a fused implementation."""
        from steptime.captured.record.training import FUSED

        return self.family in FUSED

    @property
    def family(self) -> str:
        """Name of the optimiser without its implementation."""
        from steptime.captured.record.variants import family_of

        return family_of(self.optimizer)

    def run(
        self, precision: str, batch: int, tree: Tree | None = None, saves: Saves = "all", *, fused: bool = True
    ) -> Run:
        """One variant, captured at its first use.

        Raises:
            UserError: the module cannot be captured in this variant.
        """
        tree = plain(len(self.paths)) if tree is None else tree
        fused = fused and self.has_fused
        key = (precision, batch, text(tree), saves, fused)
        if key not in self._runs:
            program = self._program(FORMATS[precision], batch, tree, saves, fused=fused)
            table = cost_table(program, self.timer(precision))
            whole = saves == "all" and tree == plain(len(self.paths)) and len(self.blocks) == 1
            layout = layout_of(program, table, self.paths) if whole else None
            more_s = self._widening_s(program, precision) if FORMATS[precision].adapters else None
            self._runs[key] = Run(program=program, table=table, layout=layout, more_s=more_s)
        return self._runs[key]

    def _program(self, form: Format, batch: int, tree: Tree, saves: Saves, *, fused: bool) -> Program:
        key = (form.weights, form.autocast, form.adapters, batch, text(tree), saves, fused)
        if key in self._failed:
            raise self._failed[key] from None
        if key not in self._programs:
            try:
                self._programs[key] = self._captured(form, batch, tree, saves, fused=fused)
            except UserError as error:
                self._failed[key] = error
                raise
            self.captures += 1
            self.ran()
        return self._programs[key]

    def _captured(self, form: Format, batch: int, tree: Tree, saves: Saves, *, fused: bool) -> Program:
        from steptime.captured.record.fold import runs
        from steptime.captured.record.step import StepOptions, as_module, record
        from steptime.captured.record.training import FUSED
        from steptime.captured.record.variants import arranged, caching

        target = self.target(form.weights, batch, form.adapters)
        module, unchanged = as_module(target.module), tree == plain(len(self.paths))
        key = (form.weights, form.adapters, batch)
        alike, chained = self._folded.get(key, ((), False)) if unchanged or not caching(module) else ((), False)
        options = StepOptions(
            optimizer=FUSED[self.family] if fused else self.optimizer, autocast=form.autocast,
            loss=target.loss if self.loss is None else self.loss, name=target.name,
            target="cuda" if self.device.runs_cuda else "cpu", alike=alike,
        )  # fmt: skip
        arrangement = arranged(target.module, self.paths, tree, saves, chained=chained)
        with self._inputs(target, batch) as inputs, arrangement:
            program = record(module, inputs, options)
        if program.folded and unchanged and saves == "all":
            found = tuple(runs(module))
            self._folded[key] = found, all(is_chained(program, run) for run in found)
        if form.adapters:
            program = with_narrow_weights(program, self._frozen, nf4_element_bytes(), WIDE_BYTES)
        return program

    @contextmanager
    def _inputs(self, target: Any, batch: int) -> Iterator[Any]:
        """Inputs of a batch; an error with resized inputs mentions that they were resized."""
        from steptime.captured.record.variants import TAKE_BATCH, resized

        given = self._leading(target) if self.resizes else batch
        try:
            yield resized(target.inputs, batch, given)
        except UserError as error:
            if given == batch:
                raise
            problem, _, rest = str(error).partition("\n")
            problem += f" (the leading dim of its inputs, {given}, was made {batch})"
            raise UserError("\n".join(filter(None, (problem, rest))), hint=TAKE_BATCH) from None

    def _widening_s(self, program: Program, precision: str) -> Array:
        """Time of widening the weights that each call reads."""
        timer, known = self.timer(precision), {0: 0.0}
        counts = widened(program, self._frozen)
        for count in set(counts) - {0}:
            moved = float(dequantised_bytes(count, nf4_element_bytes(), WIDE_BYTES))
            call = KernelCall(operator="move", shape={"read_bytes": moved, "written_bytes": 0.0})
            known[count] = timer.time("dequantize", Work(moved_bytes=moved, launches=1, kernels=(call,))).seconds
        return np.array([known[count] for count in counts])
