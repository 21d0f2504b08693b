"""A sharding plan as a Python file for PyTorch's DTensor: how parameters and inputs lie, and what modules redistribute.

The file has the tables of a plan and the text of :mod:`steptime.sharding.dtensor`. DTensor propagates shardings from
operator to operator; other redistributions of a plan are made where a tensor enters or leaves a module. Inside the
forward function of a module, and in the backward pass, DTensor decides by itself. The results are those of one device
in each case.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from steptime.captured.graph import Node as Operator
from steptime.captured.graph import Value
from steptime.captured.ops import of_family
from steptime.captured.ops.placement import Placement, Sharding
from steptime.errors import UserError, first_few
from steptime.sharding.build import Built, Way
from steptime.sharding.flow import Flow, root_of
from steptime.sharding.options import options
from steptime.sharding.paths import legs_of
from steptime.sharding.planner import ShardingPlan

Shape = tuple[int, ...]
BY_IMAGES: Final = of_family("convolution") | {"native_group_norm", "native_group_norm_backward"}
"""Operators that DTensor splits by images alone."""
FINISHED: Final[Mapping[str, str]] = {"embedding": "rows", "nll_loss_forward": "rows"}
"""Operator -> prefix of the dims by which DTensor splits it although devices communicate or mask indices.

All differences: ``docs/sharding_operators.md``.
"""


def runs(node: Operator, way: Way) -> bool:
    """True if DTensor splits an operator in this way: without communication inside and without masked indices."""
    if way.strategy is None:
        return True
    split = set(way.strategy.dims)
    if node.op in BY_IMAGES:  # over one axis: DTensor refuses a dim that two of them divide
        return split <= {"", "images"} and way.strategy.dims.count("images") < 2
    apart = {option.dim for option in options(node) if option.exchange is not None or option.masked}
    return not any(dim in apart and not dim.startswith(FINISHED.get(node.op, dim + " ")) for dim in split)


def followed(built: Built, keep: Callable[[str, Way], bool] | None = None) -> Built:
    """The problem with only the options that DTensor follows.

    Operators are split as DTensor splits them. A value that stays inside the forward function of one module is read in
    the sharding in which it was made, except for partial sums, which DTensor adds up.

    Args:
        built: the problem.
        keep: predicate on the name and a way of an item; an item of which it keeps no way has all.
    """
    allowed: dict[int, list[int]] = {}
    for number, (item, ways) in enumerate(zip(built.flow.items, built.ways, strict=True)):
        fitting = [n for n, way in enumerate(ways) if item.kind != "operator" or runs(item.node, way)]
        allowed[number] = [n for n in fitting if keep is None or keep(item.name, ways[n])] or fitting
    masks = {}
    for source, target in _inside(built.flow):
        pair = (min(source, target), max(source, target))
        matrix = built.seconds.moved.get(pair)
        if matrix is not None:
            terms = np.array([any(p.partial for out in way.outputs for p in out) for way in built.ways[source]])
            masks[pair] = (matrix == 0) | (terms[:, None] if source < target else terms[None, :])
    return built.only(allowed, masks)


def _inside(flow: Flow) -> set[tuple[int, int]]:
    """Maker and reader of values that stay in one module in the forward pass, with the copies between them."""
    crossing: dict[tuple[int, int], bool] = {}
    copies = {(read.call, read.place): copy.item for copy in flow.copies for read in copy.reads}
    for trip in _trips(flow):
        maker, reader = flow.made_by[trip.call][trip.place][0], flow.of_call[trip.call]
        copy = copies.get((trip.call, trip.place))
        for pair in ((maker, reader),) if copy is None else ((maker, copy), (copy, reader)):
            crossing[pair] = crossing.get(pair, False) or len(set(trip.modules)) > 1
    return {pair for pair, crosses in crossing.items() if not crosses}


class Trip(NamedTuple):
    """The way of a value from the operator that makes it, through views, to one that reads it in the forward pass."""

    call: int
    """Call of the reader."""
    place: int
    """Number of the input at the reader."""
    values: tuple[Value, ...]
    """The value that is made, then the result of each view."""
    modules: tuple[str, ...]
    """Modules whose forward functions make it, run each view, and read it; before the step: the outermost module."""


def _trips(flow: Flow) -> Iterator[Trip]:
    """Trips of all values that operators of the forward pass read, without weights and buffers."""
    made_in: dict[tuple[int, Value], str] = {}
    for number, call in enumerate(flow.program.calls):
        if call.phase != "forward":
            continue
        if number in flow.of_call:
            for place, (value, storage) in enumerate(zip(call.node.inputs, call.reads, strict=True)):
                root, looks = root_of(value)
                if root.node.op in ("parameter", "buffer"):
                    continue
                values = (root, *(look.node.value(look.output) for look in looks))
                first, *rest = (made_in.get((storage, each), "") for each in values)
                yield Trip(number, place, values, (first, *(each or call.module for each in rest), call.module))
        for output, storage in enumerate(call.writes):
            made_in[storage, call.node.value(output)] = call.module


LISTS: Final = frozenset({"ModuleList", "ModuleDict", "ParameterList", "ParameterDict"})
"""Modules that are never called, so that no tensor enters or leaves them."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A tensor on its way to an operator of the forward pass, where it crosses the boundary of a module."""

    made: str
    """Module whose forward function made it; the outermost one if it was made before the step."""
    read: str
    """Module whose forward function reads it."""
    storage: int
    value: Value
    lies: Sharding
    """Sharding in which it is read."""
    moved: bool
    """True if the plan redistributes it there or in the module before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundaries:
    """Redistributions where tensors enter or leave modules, and the shardings in which modules read weights."""

    entering: Mapping[str, Mapping[Shape, Sharding]]
    """Module -> shape of an argument -> sharding to which it is redistributed."""
    leaving: Mapping[str, Mapping[Shape, Sharding]]
    weights: Mapping[str, Mapping[str, Sharding]]
    """Module -> name of a parameter -> sharding in which the forward pass reads it, if it is stored in another."""


def boundaries_of(plan: ShardingPlan) -> Boundaries:
    """The redistributions of a plan at the boundaries of modules.

    The outermost module in which all readers take the same sharding redistributes the tensor. A table has one sharding
    for each shape; DTensor decides for a module that takes two tensors of one shape in different shardings.
    """
    modules = plan.built.flow.program.modules
    called = frozenset(path for path, kind in modules.items() if kind not in LISTS)
    found = list(_passages(plan))
    readers: dict[tuple[int, Value], list[Passage]] = defaultdict(list)
    for each in found:
        readers[each.storage, each.value].append(each)
    entering: dict[str, dict[Shape, Sharding | None]] = defaultdict(dict)
    leaving: dict[str, dict[Shape, Sharding | None]] = defaultdict(dict)
    for each in found:
        if not each.moved:
            continue
        table, shape = (leaving if _within(each.made, each.read) else entering), each.value.type.shape
        others = readers[each.storage, each.value]
        place = _left(called, each) if table is leaving else _entered(called, each, others)
        agreed = table[place].setdefault(shape, each.lies) == each.lies
        if table is leaving:
            agreed &= all(one.lies == each.lies for one in others if one.read == each.read)
        if not agreed:
            table[place][shape] = None
    return Boundaries(entering=_agreed(entering), leaving=_agreed(leaving), weights=_weights(plan))


def _agreed(
    table: Mapping[str, Mapping[Shape, Sharding | None]],
) -> dict[str, dict[Shape, Sharding]]:
    """The tables without entries left to DTensor, which include partial sums: only DTensor makes these."""
    rows = {path: {shape: to for shape, to in shapes.items() if to and _given(to)} for path, shapes in table.items()}
    return {path: shapes for path, shapes in rows.items() if shapes}


def _passages(plan: ShardingPlan) -> Iterator[Passage]:
    """Tensors of the forward pass, without weights, where they cross boundaries of modules."""
    flow, mesh = plan.built.flow, plan.built.mesh
    for trip in _trips(flow):
        storage, node = flow.program.calls[trip.call].reads[trip.place], flow.program.calls[trip.call].node
        lies, asked = plan.sharding_of(*flow.made_by[trip.call][trip.place]), _way(plan, trip.call).inputs[trip.place]
        (root, looks), moved = root_of(node.inputs[trip.place]), False
        for at, leg in enumerate(legs_of(root.type, looks, lies, asked, mesh)):
            to = asked if leg.strategy is None else leg.strategy.inputs[0]
            made, read = trip.modules[at : at + 2]
            moved |= to != lies  # a move before a view inside a module is made where the tensor leaves it
            if made != read:
                yield Passage(made, read, storage, trip.values[at], to, moved)
                moved = False
            if leg.look is not None and leg.strategy is not None:
                lies = leg.strategy.outputs[leg.look.output]


def _way(plan: ShardingPlan, call: int) -> Way:
    item = plan.built.flow.of_call[call]
    return plan.built.ways[item][int(plan.choice[item])]


def _weights(plan: ShardingPlan) -> dict[str, dict[str, Sharding]]:
    """Shardings in which modules read weights, if not as stored; DTensor decides where one module has two."""
    flow, stored = plan.built.flow, plan.parameters
    names = {parameter.storage: parameter.name for parameter in flow.program.parameters}
    found: dict[tuple[str, str], set[Sharding]] = defaultdict(set)
    for number in flow.of_call:
        call, way = flow.program.calls[number], _way(plan, number)
        if call.phase != "forward":
            continue
        for place, (value, storage) in enumerate(zip(call.node.inputs, call.reads, strict=True)):
            name = names.get(storage)
            if name not in stored:
                continue
            root, looks = root_of(value)
            first = legs_of(root.type, looks, stored[name], way.inputs[place], plan.built.mesh)[0]
            asked = way.inputs[place] if first.strategy is None else first.strategy.inputs[0]
            found[call.module, name].add(asked)
    out: dict[str, dict[str, Sharding]] = defaultdict(dict)
    for (module, name), asked_for in found.items():
        if len(asked_for) == 1 and (only := next(iter(asked_for))) != stored[name] and _given(only):
            out[module][name] = only
    return dict(out)


def _given(sharding: Sharding) -> bool:
    return not any(placement.partial for placement in sharding)


def _within(path: str, outer: str) -> bool:
    """True if a module is ``outer`` or inside it.

    >>> _within("h.0.mlp", "h.0"), _within("h.0", ""), _within("h.10", "h.1")
    (True, True, False)
    """
    return not outer or path == outer or path.startswith(f"{outer}.")


def _around(called: Set[str], path: str) -> Iterator[str]:
    """A module and those that contain it, from the inside, without lists, which have no forward function."""
    while path:
        if path in called:
            yield path
        path = path.rpartition(".")[0]


def _left(called: Set[str], passage: Passage) -> str:
    """The outermost module that a tensor leaves before it is read."""
    return [path for path in _around(called, passage.made) if not _within(passage.read, path)][-1]


def _entered(called: Set[str], passage: Passage, readers: Sequence[Passage]) -> str:
    """The outermost module that a tensor enters and in which all readers take it in one sharding."""
    best = passage.read
    for path in _around(called, passage.read):
        same = all(each.lies == passage.lies for each in readers if _within(each.read, path))
        if same and not _within(passage.made, path):
            best = path
    return best


def _check_known(plan: ShardingPlan) -> None:
    """Check that DTensor can run the step.

    Raises:
        UserError: this version of PyTorch has no sharding strategy for an operator of the step.
    """
    import torch

    from steptime.captured import torch_parts

    calls = plan.built.flow.program.calls
    names = dict.fromkeys(call.node.op for call in calls if call.phase != "optimizer" and call.node.inputs)
    missing = [name for name in names if not torch_parts.spread_by_dtensor(name)]
    if missing:
        raise UserError(
            f"DTensor of PyTorch {torch.__version__} has no rule for {first_few(missing, 6)}",
            hint="leave --export out: the times hold; or write the module with operators that DTensor has",
        )


HEAD: Final = '''"""Shardings of {model} over {devices} devices, for PyTorch's DTensor.

Written by steptime {version}: steptime shard --export. PARAMETERS are placements of the weights between two steps,
UPDATES of gradients and states of the optimiser, WEIGHTS of weights as modules read them, INPUTS of the tensors that
the module is given; ENTERING and LEAVING are those to which arguments and results of modules, told by their shapes,
are redistributed. parallelize() makes the module parallel; trainer() runs steps.
"""
'''
PLAN: Final = "# -- the plan "
RUN: Final = "# -- how it is run "


def python_file(plan: ShardingPlan) -> str:
    """A Python file that runs the module as a plan says and imports PyTorch alone.

    ``MESH`` has the names and sizes of the axes; the tables after it have PyTorch's placements by name.
    ``parallelize(module, mesh)`` spreads a module, ``trainer(module, optimizer)`` runs its steps.

    Raises:
        UserError: DTensor has no rule for an operator.
    """
    from steptime import __version__

    _check_known(plan)
    mesh, flow, found = plan.built.mesh, plan.built.flow, boundaries_of(plan)
    own = Path(__file__).with_name("dtensor.py").read_text(encoding="utf-8")  # importing it needs PyTorch
    imports = own[own.index("from __future__") : own.index(PLAN)]
    inputs = {item.name: plan.sharding_of(n) for n, item in enumerate(flow.items) if item.node.op == "input"}
    updates = {name: plan.sharding_of(item) for name, item in flow.update_of.items()}
    axes = dict(zip(mesh.names, mesh.sizes, strict=True))
    head = HEAD.format(model=flow.program.name.translate({34: 39, 92: 47}), devices=mesh.devices, version=__version__)
    tables = [
        f"MESH = {axes}",
        *(_table(title, rows) for title, rows in (("PARAMETERS", plan.parameters), ("UPDATES", updates))),
        _nested("WEIGHTS", found.weights),
        _table("INPUTS", inputs),
        _nested("ENTERING", found.entering),
        _nested("LEAVING", found.leaving),
    ]
    return "\n".join([head, imports, *tables, "", own[own.index(RUN) :]])


def _table(title: str, rows: Mapping[Any, Sharding], indent: str = "") -> str:
    """A table of placements as Python source."""
    inner = (f"{indent}    {key!r}: {torch_placements(each)}," for key, each in rows.items())
    return "\n".join([f"{title} = {{" if not indent else f"{indent}{title}: {{", *inner, f"{indent}}}"])


def _nested(title: str, tables: Mapping[str, Mapping[Any, Sharding]]) -> str:
    inner = (f"{_table(repr(path), rows, '    ')}," for path, rows in tables.items())
    return "\n".join([f"{title} = {{", *inner, "}"])


def torch_placements(sharding: Sharding) -> str:
    """A sharding as Python source for PyTorch.

    >>> from steptime.captured.ops.placement import R, partial, shard
    >>> torch_placements((shard(1), partial("max"), R))
    "(Shard(1), Partial('max'), Replicate())"
    """
    return f"({', '.join(map(_torch, sharding))}{',' if len(sharding) == 1 else ''})"


def _torch(placement: Placement) -> str:
    if placement.dim is not None:
        return f"Shard({placement.dim})"
    return "Replicate()" if placement.reduction is None else f"Partial({placement.reduction!r})"
