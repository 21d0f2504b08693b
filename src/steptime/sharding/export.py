"""A sharding plan as a Python file: placements of the parameters as PyTorch has them, and the step to run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, Final

from steptime.captured.graph import Attribute, Nodes, TensorType
from steptime.captured.graph import Node as Operator
from steptime.captured.ops.placement import Placement, R, Sharding, text_of
from steptime.errors import UserError
from steptime.sharding.build import Built, Way
from steptime.sharding.flow import Flow, Look, Read, root_of
from steptime.sharding.ilp import Solution, solve
from steptime.sharding.local import local_node
from steptime.sharding.options import Strategy, options
from steptime.sharding.paths import legs_of
from steptime.sharding.planner import ShardingPlan, Solver
from steptime.sharding.problem import Problem, pinned
from steptime.sharding.reshard import COPY
from steptime.sharding.script import Plain, parse_sharding

FINISHED: Final = frozenset(
    {
        "nll_loss_forward",
        "nll_loss_backward",
        "_softmax",
        "_log_softmax",
        "_softmax_backward_data",
        "_log_softmax_backward_data",
        "native_layer_norm",
        "native_layer_norm_backward",
        "native_batch_norm",
        "native_batch_norm_backward",
        "embedding",
        "embedding_dense_backward",
    }
)
"""Operators that :mod:`steptime.sharding.run` finishes where devices exchange something or count their own indices."""


def runs(node: Operator, way: Way) -> bool:
    """Whether :mod:`steptime.sharding.run` has what an operator does inside under a sharding."""
    if way.strategy is None or node.op in FINISHED:
        return True
    inside = {option.dim for option in options(node) if option.exchange is not None or option.masked}
    return not inside & set(way.strategy.dims)


def runs_only(built: Built, solver: Solver = solve, keep: Callable[[str, Way], bool] | None = None) -> Solver:
    """A solver that takes only what can be run, for :func:`~steptime.sharding.planner.planned`.

    Args:
        built: the problem.
        solver: what solves it.
        keep: further choice among the ways of an item, by its name; an item of which it keeps none has all.
    """

    def solved(problem: Problem, **limits: Any) -> Solution:
        allowed: dict[str, list[int]] = {}
        for item, ways, node in zip(built.flow.items, built.ways, problem.nodes, strict=True):
            fitting = [n for n, way in enumerate(ways) if item.kind != "operator" or runs(item.node, way)]
            chosen = [n for n in fitting if keep is None or keep(node.name, ways[n])]
            if len(chosen or fitting) < len(ways):
                allowed[node.name] = chosen or fitting
        return solver(pinned(problem, allowed), **limits)

    return solved


class _Writer:
    """Numbers types, ways and copies, and writes calls."""

    def __init__(self, plan: ShardingPlan) -> None:
        self.plan, self.flow, self.mesh = plan, plan.built.flow, plan.built.mesh
        self.types: dict[TensorType, int] = {}
        self.ways: dict[object, tuple[int, Plain]] = {}
        self.nodes = Nodes()
        scalar = TensorType((), "fp32")
        whole = (R,) * len(self.mesh.sizes)
        self.no_way = self.way(scalar, (), whole, whole)
        first = len(self.flow.program.storages)
        self.copies = {first + number: copy for number, copy in enumerate(self.flow.copies)}
        """By the number of the copy, which follow those of the storages."""
        self.made_for: dict[int, list[int]] = defaultdict(list)
        """Call -> the copies that are made for it and later ones."""
        self.copy_of: dict[Read, int] = {}
        for number, copy in self.copies.items():
            self.made_for[copy.reads[0].call].append(number)
            self.copy_of |= dict.fromkeys(copy.reads, number)

    def type(self, type: TensorType) -> int:
        """Number of a type."""
        return self.types.setdefault(type, len(self.types))

    def way(self, type: TensorType, looks: tuple[Look, ...], source: Sharding, target: Sharding) -> int:
        """Number of a way."""
        key = (type, looks, source, target)
        if key not in self.ways:
            self.ways[key] = len(self.ways), tuple(self._steps(*key))
        return self.ways[key][0]

    def copy(self, number: int) -> Plain:
        """What makes a copy: storage, its own number, way."""
        copy = self.copies[number]
        first = copy.reads[0]
        type = root_of(self.flow.program.calls[first.call].node.inputs[first.place])[0].type
        made = self.flow.made_by[first.call][first.place]
        way = self.way(type, (), self.plan.sharding_of(*made), self.plan.sharding_of(copy.item))
        return copy.storage, number, way

    def _steps(self, type: TensorType, looks: tuple[Look, ...], source: Sharding, target: Sharding) -> Iterator[Plain]:
        names = self.mesh.names
        for leg in legs_of(type, looks, source, target, self.mesh):
            for step in leg.route.steps:
                if step.kind != COPY:
                    texts = step.source.text(names), step.target.text(names)
                    yield (step.kind, "+".join(step.axes), *texts, leg.type.shape, round(step.size_bytes))
            if leg.look is not None and leg.strategy is not None:
                node, output = leg.look.node, leg.look.output
                given = dict(local_node(node, leg.strategy, self.mesh.sizes, self.nodes).attributes)
                if node.op == "as_strided":
                    given["storage_offset"] = given.pop("offset", given.get("storage_offset"))
                    if leg.type.strides is not None:
                        raise UserError(
                            f"strides into a tensor of {leg.type} that is not contiguous cannot be run",
                            hint="call contiguous() before the tensor is changed in place",
                        )
                shape = node.outputs[output].shape
                yield ("view", node.op, given, output, text_of(leg.strategy.outputs[output]), shape)

    def changed(self, node: Operator, strategy: Strategy) -> dict[str, Attribute]:
        """Attributes of the local operator that are not those of the whole one."""
        local = local_node(node, strategy, self.mesh.sizes, self.nodes)
        return {name: given for name, given in local.attributes if given != node.attribute(name)}


def plain_step(plan: ShardingPlan) -> dict[str, list[Plain]]:
    """The step of a plan as plain data (:func:`steptime.sharding.script.script_of`).

    Raises:
        UserError: devices exchange something inside an operator that :mod:`steptime.sharding.run` cannot do.
    """
    for item, ways, option in zip(plan.built.flow.items, plan.built.ways, plan.choice, strict=True):
        if item.kind == "operator" and not runs(item.node, ways[option]):
            how = ", ".join(filter(None, getattr(ways[option].strategy, "dims", ())))
            raise UserError(
                f"{item.name}, split by {how}, cannot be run",
                hint="plan with runnable=True: only shardings that can be run",
            )
    _check_written(plan.built.flow)
    writer, calls = _Writer(plan), plan.built.flow.program.calls
    freed: dict[int, list[int]] = defaultdict(list)
    kept = {gradient.storage for gradient in plan.built.flow.gradients.values()}
    for number, storage in enumerate(plan.built.flow.program.storages):
        if storage.freed is not None and number not in kept:
            freed[storage.freed].append(number)
    for number, copy in writer.copies.items():
        freed[copy.reads[-1].call].append(number)
    steps = [
        _call(writer, number, tuple(freed.get(number, ())))
        for number, call in enumerate(calls)
        if call.phase != "optimizer"
    ]
    sources, updates = list(_sources(writer)), list(_updates(writer))
    return {
        "types": [(type.dtype, type.shape, type.strides) for type in writer.types],
        "ways": [way for _, way in writer.ways.values()],
        "sources": sources,
        "calls": steps,
        "updates": updates,
    }


RECURRENT: Final = frozenset({"RNN", "LSTM", "GRU", "RNNCell", "LSTMCell", "GRUCell"})
"""Modules of PyTorch whose operators are others on each kind of device, and change parts of tensors in place."""


def _check_written(flow: Flow) -> None:
    """What :mod:`steptime.sharding.run` cannot follow: it knows one piece of each storage.

    Raises:
        UserError: a module is recurrent, or a call changes a part of a tensor in place.
    """
    program = flow.program
    path, kind = next((row for row in program.modules.items() if row[1] in RECURRENT), ("", ""))
    if kind:
        hint = "leave --export out: the times hold; export a model without recurrent modules"
        raise UserError(f"a step with {path or 'the module'} ({kind}) cannot be exported", hint=hint)
    for call in (program.calls[number] for number in flow.of_call):
        for storage, type in zip(call.writes, call.node.outputs, strict=False):
            if storage in call.reads and type.size_bytes < program.storages[storage].size_bytes:
                hint = "make a new tensor (torch.cat, torch.where) in its place, or leave --export out: the times hold"
                where = call.module or "the module"
                raise UserError(f"{call.node.op} in {where} changes a part of a tensor in place", hint=hint)


def _call(writer: _Writer, number: int, freed: tuple[int, ...]) -> Plain:
    flow, plan = writer.flow, writer.plan
    call = flow.program.calls[number]
    node, item = call.node, flow.of_call.get(number)
    if item is None:
        plain = tuple((storage, storage, writer.no_way) for storage in call.reads)
        writes = tuple((s, writer.type(type), "") for s, type in zip(call.writes, node.outputs, strict=True))
        return (node.op, call.module, (), plain, writes, {}, freed, True)
    way = plan.built.ways[item][plan.choice[item]]
    reads, copies = [], [writer.copy(copy) for copy in writer.made_for[number]]
    for place, (value, storage, target) in enumerate(zip(node.inputs, call.reads, way.inputs, strict=True)):
        root, looks = root_of(value)
        piece = writer.copy_of.get(Read(number, place))
        made = flow.made_by[number][place] if piece is None else (writer.copies[piece].item, 0)
        there = writer.way(root.type, looks, plan.sharding_of(*made), target)
        reads.append((storage, storage if piece is None else piece, there))
    changed = {} if way.strategy is None else writer.changed(node, way.strategy)
    writes = tuple(
        (storage, writer.type(type), text_of(sharding))
        for storage, type, sharding in zip(call.writes, node.outputs, way.outputs, strict=True)
    )
    return (node.op, call.module, tuple(copies), tuple(reads), writes, changed, freed, False)


def _sources(writer: _Writer) -> Iterator[Plain]:
    """What is there before the step, in the order in which calls read it."""
    flow, plan, seen = writer.flow, writer.plan, set()
    for number, makers in flow.made_by.items():
        call = flow.program.calls[number]
        for storage, value, (item, output) in zip(call.reads, call.node.inputs, makers, strict=True):
            if flow.items[item].kind != "source" or storage in seen:
                continue
            seen.add(storage)
            known, type = flow.program.storages[storage], root_of(value)[0].type
            yield (storage, known.category, known.name, writer.type(type), text_of(plan.sharding_of(item, output)))


def _updates(writer: _Writer) -> Iterator[Plain]:
    flow, plan = writer.flow, writer.plan
    storages = {parameter.name: parameter.storage for parameter in flow.program.parameters}
    for name, gradient in flow.gradients.items():
        if name not in flow.update_of:
            continue
        root, looks = root_of(gradient.value)
        held, updated = plan.sharding_of(flow.of_parameter[name]), plan.sharding_of(flow.update_of[name])
        type = plan.built.flow.items[flow.of_parameter[name]].node.outputs[0]
        there = writer.way(root.type, looks, plan.sharding_of(*gradient.made), updated)
        back = writer.way(type, (), updated, held)
        yield (name, storages[name], gradient.storage, there, writer.type(type), text_of(updated), back)


HEAD: Final = '''"""Shardings of {model} over {devices} devices: placements, and the step to run.

Written by steptime {version}: steptime shard --export. PARAMETERS, UPDATES and INPUTS need PyTorch alone;
trainer() runs the step with steptime.sharding.run: capture the module for the devices on which it runs.
"""

from torch.distributed.tensor import Partial, Replicate, Shard  # noqa: F401

MESH = {mesh}
'''


def python_file(plan: ShardingPlan) -> str:
    """A Python file with the placements of a plan, which a user imports.

    ``MESH`` has the names and sizes of the axes; ``PARAMETERS``, ``UPDATES`` (gradients and states of the optimiser)
    and ``INPUTS`` have PyTorch's placements by name; ``STEP`` has every call of forward and backward with the ways of
    what it reads; ``trainer(module, optimizer)`` runs it.
    """
    from steptime import __version__

    mesh = plan.built.mesh
    step = plain_step(plan)
    updates = {name: text for name, _, _, _, _, text, _ in step["updates"]}
    inputs = {name: text for _, kind, name, _, text in step["sources"] if kind == "input"}
    parameters = {name: text_of(each) for name, each in plan.parameters.items()}
    lines = [
        HEAD.format(
            model=plan.built.flow.program.name.translate({34: 39, 92: 47}),
            devices=mesh.devices,
            version=__version__,
            mesh=dict(zip(mesh.names, mesh.sizes, strict=True)),
        )
    ]
    for title, found in (("PARAMETERS", parameters), ("UPDATES", updates), ("INPUTS", inputs)):
        rows = (f"    {name!r}: {torch_placements(text)}," for name, text in found.items())
        lines.append("\n".join([f"{title} = {{", *rows, "}"]))
    lines.append("\n".join(["STEP = {", *_rows(step), "}"]))
    lines.append(TAIL)
    return "\n".join(lines)


TAIL: Final = '''

def trainer(module, optimizer, **options):
    """Runs steps of the module in this process of the job; see steptime.sharding.run.trainer."""
    from steptime.sharding.run import trainer as made

    return made(module, optimizer, MESH, STEP, **options)
'''

FIELDS: Final = {
    "types": "element type, shape, strides",
    "ways": "steps: kind, axes, from, to, whole shape, bytes; or view, operator, its arguments, output, to, shape",
    "sources": "storage, kind, name, type, placements",
    "calls": "operator, module, (storage, its number, way) of each copy that is made first, (storage, its number or "
    "that of a copy, way) of each input, (storage, type, placements) of each output, other arguments, what is freed, "
    "view",
    "updates": "parameter, its storage, that of the gradient, way of the gradient, type, placements, way back",
}
"""What the rows of a step have, as a comment in the file."""


def _rows(step: dict[str, list[Plain]]) -> Iterator[str]:
    for key, rows in step.items():
        yield f"    # {FIELDS[key]}"
        yield f"    {key!r}: ["
        yield from (f"        {row!r},  # {number}" for number, row in enumerate(rows))
        yield "    ],"


def torch_placements(text: str) -> str:
    """A sharding as PyTorch writes it.

    >>> torch_placements("S(1) P(max) R")
    "(Shard(1), Partial('max'), Replicate())"
    """
    each = [_torch(placement) for placement in parse_sharding(text)]
    return f"({', '.join(each)}{',' if len(each) == 1 else ''})"


def _torch(placement: Placement) -> str:
    if placement.dim is not None:
        return f"Shard({placement.dim})"
    return "Replicate()" if placement.reduction is None else f"Partial({placement.reduction!r})"
