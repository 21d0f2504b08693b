"""The data flow of a captured step: items that have a sharding each, and the values that link them.

Items are operators, sources, updates of parameters and copies. Equal blocks share their shardings, except for the first
and the last one. A view has no sharding of its own: its effect belongs to the link that passes through it.

A value that several operators of one pass read has a copy with a sharding of its own, so that three projections of one
tensor gather it once. Parameters have no copies: each operator gathers its own.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Final, Literal

import numpy as np

from steptime.captured.cut.sections import Sections, sections_of
from steptime.captured.graph import BEFORE, Call, Node, Nodes, Parameter, Program, TensorType, Value
from steptime.captured.graph.liveness import Liveness
from steptime.captured.ops import VIEWS

Kind = Literal["operator", "source", "update", "copy"]
EDGE_BLOCKS: Final = 1
"""Number of blocks at each end of a run of equal blocks that have shardings of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A holder of one sharding: an operator (the same one in all equal blocks), a source, an update or a copy."""

    name: str
    kind: Kind
    node: Node
    """The operator or the source; for an update the parameter; for a copy the operator ``copy``."""
    count: int
    """Number of runs in a step."""
    inplace: bool = False
    """Its output is written over an input."""
    phase: str = "forward"

    @property
    def types(self) -> tuple[TensorType, ...]:
        """Types of its outputs."""
        return self.node.outputs

    @property
    def widest(self) -> int:
        """Number of the largest output, or, negative, of the largest input (-1: the first) if that is larger.

        Scratch memory of an operator is divided as this tensor.
        """
        outputs = {number: type.size_bytes for number, type in enumerate(self.node.outputs)}
        inputs = {-1 - number: value.type.size_bytes for number, value in enumerate(self.node.inputs)}
        sizes = outputs | ({} if self.kind == "update" else inputs)
        return max(sizes, key=lambda number: sizes[number], default=0)


@dataclass(frozen=True, slots=True)
class Look:
    """A view that a value passes: the operator, and the number of its output."""

    node: Node
    output: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A value from the item that makes it to one that reads it; both are one item if it goes to the next block."""

    source: int
    """Item that makes the value."""
    output: int
    looks: tuple[Look, ...]
    """Views on the way, the first one first."""
    target: int
    """Item that reads it."""
    input: int
    count: int = 1
    """Number of times in a step."""
    gradient: bool = False
    """The value is the gradient of a parameter on its way to the update, or the new parameter on its way back."""


@dataclass(frozen=True, slots=True)
class Read:
    """The read of a value by an operator: the call, and the number of its input."""

    call: int
    place: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A value that is resharded for several reads, once."""

    item: int
    """Item of the copy, which has its sharding."""
    storage: int
    reads: tuple[Read, ...]
    """Reads in the order of the step, all in one pass and of one version of the storage."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Memory that depends on the sharding of an output of an item."""

    item: int
    output: int
    """Number of the output; negative: an input (:attr:`Item.widest`)."""
    size_bytes: float
    """Bytes of all whole tensors that are alive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The contents of memory while a call runs."""

    call: int
    name: str
    kept: tuple[Kept, ...]
    fixed_bytes: float = 0.0
    """Bytes that no sharding divides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """The gradient of a parameter where it is complete."""

    storage: int
    value: Value
    made: tuple[int, int]
    """Item and output that wrote it last."""


@dataclass(frozen=True, kw_only=True)
class Flow:
    """Items of a step, and the values between them."""

    program: Program
    sections: Sections
    items: tuple[Item, ...]
    links: tuple[Link, ...]
    of_parameter: dict[str, int]
    """Name of a parameter -> its source item."""
    update_of: dict[str, int]
    optimizer_calls: tuple[int, ...]
    owners: dict[int, tuple[int, int]]
    """Storage -> item and output whose sharding decides the share of it that a device has."""
    of_call: dict[int, int]
    """Call -> its item; views and the optimiser have none."""
    made_by: dict[int, tuple[tuple[int, int], ...]]
    """Call -> item and output that made each of its inputs."""
    gradients: dict[str, Gradient]
    """Name of a parameter -> its complete gradient."""
    copies: tuple[Copy, ...] = ()
    """Every copy of the step, in the order of their first reads."""

    def of_weights(self, link: Link) -> bool:
        """True if a link carries a parameter or its gradient, whose traffic computation may overlap."""
        return link.gradient or self.items[link.source].node.op == "parameter"

    def moment(self, call: int) -> Moment:
        """The contents of memory while a call runs, by item and output."""
        sizes: Counter[tuple[int, int] | None] = Counter()
        for number, storage in enumerate(self.program.storages):
            end = len(self.program.calls) if storage.freed is None else storage.freed
            if storage.born <= call <= end:
                sizes[self.owners.get(number)] += storage.size_bytes
        run = self.program.calls[call] if call >= 0 else None
        name = "start" if run is None else f"{run.phase}: {run.module or '(outside modules)'}: {run.node.op}"
        if run is not None and run.scratch_bytes:
            item = self.of_call.get(call)
            sizes[None if item is None else (item, self.items[item].widest)] += run.scratch_bytes
        fixed_bytes = float(sizes.pop(None, 0))
        kept = tuple(Kept(*owner, float(size)) for owner, size in sizes.items() if owner is not None)
        return Moment(call=call, name=name, kept=kept, fixed_bytes=fixed_bytes)


def flow_of(program: Program) -> Flow:
    """Items and links of a captured step."""
    return _Reader(program, sections_of(program)).flow()


class _Reader:
    """Reads a program call by call; items are keyed by what equal blocks have in common.

    Equal blocks call the same nodes, so that the node does not identify a value; the last call that wrote its storage
    does.
    """

    def __init__(self, program: Program, sections: Sections) -> None:
        self.program, self.sections = program, sections
        self.nodes = Nodes()
        self.keys: dict[object, int] = {}
        self.items: list[Item] = []
        self.links: Counter[tuple[int, int, tuple[Look, ...], int, int, bool]] = Counter()
        self.made: dict[int, tuple[int, int]] = {}
        """Storage -> item and output that wrote it last."""
        self.places = _places(sections)
        self.owners: dict[int, tuple[int, int]] = {}
        self.of_call: dict[int, int] = {}
        self.of_parameter: dict[str, int] = {}
        self.update_of: dict[str, int] = {}
        self.made_by: dict[int, tuple[tuple[int, int], ...]] = {}
        self.versions: Counter[int] = Counter()
        """Storage -> number of writes."""
        self.reads: dict[tuple[int, int, str, tuple[Look, ...]], list[Read]] = defaultdict(list)
        """Storage, its version, pass, and views that leave some of it out -> reads."""

    def flow(self) -> Flow:
        """The flow of the whole program."""
        storages = self.program.storages
        gradients: dict[str, Gradient] = {}
        for number, call in enumerate(self.program.calls):
            if call.phase == "optimizer":
                continue
            if not call.view and call.node.op not in VIEWS:
                self._run(number, call)
            for output, storage in enumerate(call.writes):
                if storages[storage].category == "gradient" and storage in self.made:
                    name = storages[storage].name.removesuffix(".grad")
                    gradients[name] = Gradient(storage=storage, value=call.node.value(output), made=self.made[storage])
        for parameter in self.program.parameters:
            if parameter.trained and parameter.name in gradients:
                self._update(parameter, gradients[parameter.name])
        copies = self._linked()
        self._own_states()
        self._own_temporaries()
        return Flow(
            program=self.program,
            sections=self.sections,
            items=tuple(self.items),
            links=tuple(
                Link(source=s, output=o, looks=looks, target=t, input=i, gradient=gradient, count=count)
                for (s, o, looks, t, i, gradient), count in self.links.items()
            ),
            of_parameter=self.of_parameter,
            update_of=self.update_of,
            optimizer_calls=tuple(n for n, call in enumerate(self.program.calls) if call.phase == "optimizer"),
            owners=self.owners,
            of_call=self.of_call,
            made_by=self.made_by,
            gradients=gradients,
            copies=copies,
        )

    def _item(self, key: object, item: Item) -> int:
        """Number of the item of a key: a new one, or the known one with its count raised by one."""
        found = self.keys.setdefault(key, len(self.items))
        if found == len(self.items):
            self.items.append(item)
        else:
            self.items[found] = replace(self.items[found], count=self.items[found].count + 1)
        return found

    def _run(self, number: int, call: Call) -> None:
        name = f"{call.module or '(outside modules)'}: {call.node.op}"
        item = self._item(
            self.places.get(number, number),
            Item(name=name, kind="operator", node=call.node, count=1, inplace=call.inplace, phase=call.phase),
        )
        makers = []
        for place, (value, storage) in enumerate(zip(call.node.inputs, call.reads, strict=True)):
            root, looks = root_of(value)
            makers.append(self._maker(root, storage))
            self.reads[storage, self.versions[storage], call.phase, _parts(looks)].append(Read(number, place))
        self.of_call[number], self.made_by[number] = item, tuple(makers)
        for output, storage in enumerate(call.writes):
            self.made[storage] = item, output
            self.versions[storage] += 1
            self.owners.setdefault(storage, (item, output))

    def _linked(self) -> tuple[Copy, ...]:
        """Links to everything that operators read, and the copies for what several of them read."""
        copies = []
        for (storage, _, phase, _), reads in self.reads.items():
            maker = self.made_by[reads[0].call][reads[0].place]
            readers = tuple((self.of_call[each.call], each.place, self._looks(each)) for each in reads)
            if len(reads) > 1 and self.items[maker[0]].node.op != "parameter":
                key = ("copy", maker, phase, readers)
                value = root_of(self.program.calls[reads[0].call].node.inputs[reads[0].place])[0]
                node = self.nodes.node("copy", (value,), ("self",), (), (value.type,))
                name = f"{self.items[maker[0]].name} (copy)"
                copy = self._item(key, Item(name=name, kind="copy", node=node, count=1, phase=phase))
                self.links[(*maker, (), copy, 0, False)] += 1
                maker = copy, 0
                copies.append(Copy(item=copy, storage=storage, reads=tuple(reads)))
            for item, place, looks in readers:
                self.links[(*maker, looks, item, place, False)] += 1
        return tuple(sorted(copies, key=lambda each: each.reads[0].call))

    def _looks(self, read: Read) -> tuple[Look, ...]:
        return root_of(self.program.calls[read.call].node.inputs[read.place])[1]

    def _maker(self, root: Value, storage: int) -> tuple[int, int]:
        """Item and output that wrote a storage last; a source if nothing has written it."""
        if storage in self.made:
            return self.made[storage]
        known = self.program.storages[storage]
        name = known.name or str(root.node.attribute("name", root.node.op))
        key = ("source", self._inside(name)) if known.category == "parameter" else ("source", storage)
        item = self._item(key, Item(name=name, kind="source", node=root.node, count=1))
        self.made[storage] = self.owners[storage] = item, 0
        if known.category == "parameter":
            self.of_parameter[name] = item
        return item, 0

    def _inside(self, name: str) -> tuple[str, str]:
        """Block of a parameter (as :func:`_end_of`), and its name inside the block."""
        blocks = self.sections.blocks
        number = None if blocks is None else blocks.index_of(name)
        if blocks is None or number is None:
            return "", name
        return _end_of(number, blocks.count), blocks.inside(name)

    def _update(self, parameter: Parameter, gradient: Gradient) -> None:
        own = self.of_parameter.get(parameter.name)
        if own is None:
            return
        item = self._item(
            ("update", own),
            Item(
                name=f"{parameter.name} (update)", kind="update", node=self.items[own].node, count=1, phase="optimizer"
            ),
        )
        self.update_of[parameter.name] = item
        self.links[(*gradient.made, root_of(gradient.value)[1], item, 0, True)] += 1
        self.links[(item, 0, (), own, 0, True)] += 1

    def _own_temporaries(self) -> None:
        """Temporaries of the optimiser have the sharding of their inputs, the n-th of a list that of the n-th."""
        for call in self.program.calls:
            if call.phase != "optimizer":
                continue
            for number, storage in enumerate(call.writes):
                for place in range(number, len(call.reads), len(call.writes)):
                    owner = self.owners.get(call.reads[place])
                    same = call.node.inputs[place].type.shape == call.node.outputs[number].shape
                    if owner is not None and same:
                        self.owners.setdefault(storage, owner)

    def _own_states(self) -> None:
        """Gradients and states of the optimiser have the sharding of their parameter's update."""
        for number, storage in enumerate(self.program.storages):
            if storage.category in ("gradient", "state") and storage.name:
                name = longest_known(storage.name, self.update_of)
                if name in self.update_of:
                    self.owners[number] = (self.update_of[name], 0)


def longest_known(name: str, known: Collection[str]) -> str:
    """The parameter of an optimiser state: ``layer.weight`` for ``layer.weight.exp_avg``."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name


def root_of(value: Value) -> tuple[Value, tuple[Look, ...]]:
    """The value before all views, and the views from it to the given value."""
    looks: list[Look] = []
    while value.node.op in VIEWS and value.node.inputs:
        looks.append(Look(value.node, value.index))
        value = value.node.inputs[0]
    return value, tuple(reversed(looks))


def _parts(looks: Sequence[Look]) -> tuple[Look, ...]:
    """The views if they leave out some of the value, else none; reads of the same part can share a copy."""
    sizes = {prod(look.node.outputs[look.output].shape) for look in looks}
    sizes |= {prod(look.node.inputs[0].type.shape) for look in looks}
    return tuple(looks) if len(sizes) > 1 else ()


def _end_of(number: int, count: int) -> str:
    """Key of the blocks that share shardings: the block's own number at the ends, ``*`` for all between them."""
    return str(number) if number < EDGE_BLOCKS or number >= count - EDGE_BLOCKS else "*"


def _places(sections: Sections) -> dict[int, tuple[str, int]]:
    """Call -> key and position in its block, equal in blocks that share shardings; none outside blocks."""
    count, found = len(sections.each), {}
    if count <= 2 * EDGE_BLOCKS:
        return {}
    signature = [list(_signatures(sections, calls)) for calls in sections.each]
    typical = signature[sections.typical]
    for number, calls in enumerate(sections.each):
        alike = signature[number] == typical
        end = _end_of(number, count) if alike else f"{number} alone"
        for place, call in enumerate(calls):
            found[call] = (end, place)
    return found


def _signatures(sections: Sections, calls: Sequence[int]) -> Iterator[tuple[object, ...]]:
    for number in calls:
        call = sections.program.calls[number]
        yield call.phase, call.node.op, call.view, tuple(v.type for v in call.node.inputs), call.node.outputs


def start_of_memory(flow: Flow, moments: int) -> list[int]:
    """Calls at which memory is limited: the start, then local maxima of memory in use, the largest first."""
    in_use = Liveness(flow.program).in_use_bytes[1:]
    rises, falls = np.diff(in_use, prepend=-1) > 0, np.diff(in_use, append=-1) <= 0
    peaks = np.flatnonzero(rises & falls).tolist()
    peaks.sort(key=lambda call: -in_use[call])
    return [BEFORE, *peaks[:moments]]
