"""A program from a graph: the order in which its nodes run, and how long each storage lives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from steptime.captured.graph.program import (
    BEFORE,
    SOURCES,
    Call,
    Category,
    Graph,
    Node,
    Parameter,
    Phase,
    Program,
    Storage,
    Value,
)
from steptime.captured.ops import VIEWS
from steptime.model.spec import FLOATS

_CATEGORIES: Mapping[str, Category] = {
    "parameter": "parameter", "buffer": "buffer", "input": "input", "state": "state", "constant": "buffer",
}  # fmt: skip


def program_of(
    graph: Graph,
    *,
    name: str = "",
    module: Callable[[Node], str] | None = None,
    backward: Sequence[Node] = (),
    gradients: Mapping[Value, Value] | None = None,
    source: str = "",
    batch: int | None = None,
) -> Program:
    """The calls of a graph in the order in which its nodes were made, which is after their inputs.

    Parameters, buffers and inputs are there before the step and stay. Any other storage is allocated by the call that
    writes it and freed after the last call that reads it or a view of it; the outputs of the graph live to the end.
    Views are calls without a storage of their own.

    For a training step ``graph`` is the forward graph and its loss, ``backward`` the nodes of the backward pass and
    ``gradients`` the gradient of each parameter (:func:`steptime.captured.autodiff.gradients` gives both): what the
    backward pass reads stays from the forward pass until its last reader, and gradients live to the end.

    Args:
        graph: what is computed.
        name: name of the program.
        module: path of the module of a node; default: none is known.
        backward: nodes that run after the graph, each after its inputs.
        gradients: gradient of each parameter.
        source: where the graph came from.
        batch: samples of the step, where that is known.

    >>> from steptime.captured.graph.program import Nodes, TensorType
    >>> nodes, square = Nodes(), TensorType((4, 4), "fp32")
    >>> x, w = nodes.source("input", "x", square), nodes.source("parameter", "w", square)
    >>> y = nodes.apply("mm", {"self": x, "mat2": w}, outputs=[square]).value()
    >>> z = nodes.apply("relu", {"self": y}, outputs=[square]).value()
    >>> [(s.category, s.born, s.freed) for s in program_of(Graph((z,))).storages]
    [('input', -1, None), ('parameter', -1, None), ('temporary', 0, 1), ('temporary', 1, None)]
    """
    known = dict(gradients or {})
    forward = sorted(graph.nodes(), key=lambda node: node.number)
    calls: list[tuple[Node, Phase]] = [(node, "forward") for node in forward if node.op not in SOURCES]
    calls += [(node, "backward") for node in backward if node.op not in SOURCES]
    sources = [node for node in (*forward, *backward) if node.op in SOURCES]
    plan = _Storages(dict.fromkeys(sources))
    for number, (node, _) in enumerate(calls):
        plan.run(number, node)
    plan.keep(graph.outputs if not known else (), None)
    plan.keep(known.values(), "gradient")
    plan.activations([phase for _, phase in calls])
    made = tuple(plan.call(node, phase, "" if module is None else module(node)) for node, phase in calls)
    return Program(
        name=name, calls=made, storages=tuple(plan.storages()), parameters=plan.parameters(set(known)), source=source,
        batch=batch,
    )  # fmt: skip


class _Storages:
    """Numbers, births and last uses of storages."""

    def __init__(self, sources: Iterable[Node]) -> None:
        self._number: dict[Value, int] = {}
        self._size: list[int] = []
        self._born: list[int] = []
        self._freed: list[int | None] = []
        self._category: list[Category] = []
        self._name: list[str] = []
        self._parameters: list[Node] = []
        for node in sources:
            name = str(node.attribute("name", ""))
            self._new(node.value(), BEFORE, None, _CATEGORIES[node.op], name)
            if node.op == "parameter":
                self._parameters.append(node)

    def _new(self, value: Value, born: int, freed: int | None, category: Category, name: str = "") -> None:
        self._number[value] = len(self._size)
        self._size.append(value.type.size_bytes)
        self._born.append(born)
        self._freed.append(freed)
        self._category.append(category)
        self._name.append(name)

    def run(self, number: int, node: Node) -> None:
        """One call: its inputs are used, its outputs allocated unless they are views."""
        for value in node.inputs:
            storage = self._number[value]
            if self._born[storage] != BEFORE:
                self._freed[storage] = number
        for index in range(len(node.outputs)):
            value = node.value(index)
            if node.op in VIEWS and node.inputs:
                self._number[value] = self._number[node.inputs[0]]
            else:
                self._new(value, number, number, "temporary")

    def keep(self, values: Iterable[Value], category: Category | None) -> None:
        """Storages that are alive at the end."""
        for value in values:
            storage = self._number[value]
            self._freed[storage] = None
            if category is not None and self._born[storage] != BEFORE:
                self._category[storage] = category

    def activations(self, phases: Sequence[Phase]) -> None:
        """Name what lives from the forward into the backward pass."""
        if "backward" not in phases:
            return
        first = phases.index("backward")
        for storage, (born, freed) in enumerate(zip(self._born, self._freed, strict=True)):
            later = freed is None or freed >= first
            if self._category[storage] == "temporary" and born != BEFORE and born < first and later:
                self._category[storage] = "activation"

    def call(self, node: Node, phase: Phase, module: str) -> Call:
        """The call with the numbers of its storages."""
        reads = tuple(self._number[value] for value in node.inputs)
        writes = tuple(self._number[node.value(index)] for index in range(len(node.outputs)))
        return Call(node, phase, module, reads, writes, view=node.op in VIEWS and bool(node.inputs))

    def storages(self) -> list[Storage]:
        """All storages."""
        columns = zip(self._size, self._born, self._freed, self._category, self._name, strict=True)
        return [Storage(size, born, freed, category, name) for size, born, freed, category, name in columns]

    def parameters(self, trained: set[Value]) -> tuple[Parameter, ...]:
        """The weights; without gradients nothing is known of training, and floating-point ones count as trained."""
        out = []
        for node in self._parameters:
            value, type = node.value(), node.outputs[0]
            out.append(Parameter(
                name=str(node.attribute("name", "")), storage=self._number[value], elements=type.elements,
                size_bytes=type.size_bytes, trained=value in trained if trained else type.dtype in FLOATS,
                dtype=type.dtype,
            ))  # fmt: skip
        return tuple(out)
