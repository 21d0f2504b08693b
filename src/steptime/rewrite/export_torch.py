"""Graphs as PyTorch modules: a ``torch.fx.GraphModule``, or a Python file that builds one from a state dict."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Mapping
from keyword import iskeyword
from typing import Any, Final

import torch

from steptime import __version__
from steptime.captured.graph import Node, Value, topological
from steptime.captured.graph.program import SOURCES
from steptime.captured.ops.calls import SKIPPED, CallSpec, spec
from steptime.captured.torch_parts import schema_of
from steptime.errors import UserError, shorten
from steptime.rewrite.flow import COMPOSITE, WEIGHTS, Flow
from steptime.rewrite.fused import opened, results_of
from steptime.rewrite.kernels import evaluate

MOST_NUMBERS: Final = 65536
"""Largest number of elements of a module's constant that is written into a file as text."""


class _Writer:
    """Writer of a graph's nodes as nodes of ``torch.fx``."""

    def __init__(self, flow: Flow, names: Mapping[Node, str]) -> None:
        self.graph = torch.fx.Graph()
        self._flow, self._names = flow, names
        self._made: dict[Value, torch.fx.Node] = {}
        self._place: torch.fx.Node | None = None

    def inputs(self, values: Iterable[Value]) -> None:
        """Add placeholders for the inputs in order."""
        for number, value in enumerate(values):
            self._made.setdefault(value, self.graph.placeholder(f"input_{number}"))

    def result(self, values: Iterable[Value]) -> torch.fx.Graph:
        """Add all nodes below the values, and return the graph that gives them."""
        outputs = list(values)
        for node in topological(value.node for value in outputs):
            self._node(node)
        found = [self._made[value] for value in outputs]
        self.graph.output(found[0] if len(found) == 1 else tuple(found))
        self.graph.lint()
        return self.graph

    def _node(self, node: Node) -> None:
        if not node.outputs or node.value() in self._made:
            return
        if node.op in SOURCES:
            if node not in self._names:
                raise UserError(
                    f"the graph reads {shorten(str(node.attribute('name')))!r}, which the module does not get"
                )
            self._made[node.value()] = self.graph.get_attr(self._names[node])
        elif node.op in COMPOSITE:
            steps = opened(self._flow.nodes, node)
            for step in steps:
                self._node(step)
            for index, at in enumerate(results_of(node)):
                self._made[node.value(index)] = self._made[steps[at].value()]
        else:
            self._call(node)

    def _call(self, node: Node) -> None:
        call = spec(node, portable=not self._flow.training)
        keywords = {name: self._argument(given) for name, given in call.keywords.items()}
        if _makes_from_nothing(call):
            keywords |= self._device()
        result = self.graph.call_function(call.function, tuple(map(self._argument, call.arguments)), keywords)
        for index, at in enumerate(call.taken):
            taken = result if at is None else self.graph.call_function(operator.getitem, (result, at))
            self._made[node.value(index)] = taken

    def _device(self) -> dict[str, torch.fx.Node]:
        """Device of the first input, on which new tensors are made, as a graph does not name a device."""
        first = next(iter(self._made.values()), None)
        if self._place is None and first is not None and first.op == "placeholder":
            self._place = self.graph.call_function(getattr, (first, "device"))
        return {} if self._place is None else {"device": self._place}

    def _argument(self, given: Any) -> Any:
        if isinstance(given, Value):
            return self._made[given]
        return [self._argument(item) for item in given] if isinstance(given, list) else given


def _makes_from_nothing(call: CallSpec) -> bool:
    """True if an operator reads no tensor and takes the device of its result as an argument."""
    known = schema_of(call.function) if hasattr(call.function, "namespace") else None
    if known is None or not any(each.name == "device" and each.kwarg_only for each in known.arguments):
        return False
    given = (*call.arguments, *call.keywords.values())
    return not any(isinstance(one, Value) for each in given for one in (each if isinstance(each, list) else [each]))


def weight_nodes(flow: Flow) -> tuple[Node, ...]:
    """Sources of a graph that are not inputs, in order of use."""
    kinds = (*WEIGHTS, "state")
    return tuple(
        node for node in flow.order if node.op in kinds or (node.op == "input" and node.value() not in flow.inputs)
    )


def _attributes(nodes: Iterable[Node]) -> dict[Node, str]:
    """Distinct names of attributes, without dots."""
    found: dict[Node, str] = {}
    for node in nodes:
        name = "".join(c if c.isalnum() else "_" for c in str(node.attribute("name"))) or "weight"
        plain = name.isidentifier() and not iskeyword(name) and not hasattr(torch.nn.Module, name)
        name = name if plain and name not in ("training", "state", "folded") else f"w_{name}"
        found[node] = name if name not in found.values() else f"{name}_{len(found)}"
    return found


def _fx(flow: Flow, names: Mapping[Node, str]) -> torch.fx.Graph:
    writer = _Writer(flow, names)
    writer.inputs(flow.inputs)
    return writer.result(flow.outputs)


def graph_module(
    flow: Flow, contents: Mapping[str, Any], names: Mapping[Node, str] | None = None
) -> torch.fx.GraphModule:
    """A module that computes the graph, with the weights of ``contents`` and constants computed from them.

    Args:
        flow: the graph.
        contents: weights by name.
        names: attribute of each weight; None: its own name, without dots.

    Raises:
        UserError: an operator only runs on another device, or contents are missing.
    """
    nodes = weight_nodes(flow)
    names = names or _attributes(nodes)
    root = torch.nn.Module()
    for node in nodes:
        tensor = evaluate(flow, [node.value()], contents)[0]
        if node.op == "parameter":
            floats = tensor.is_floating_point()
            root.register_parameter(names[node], torch.nn.Parameter(tensor, requires_grad=floats and flow.training))
        else:
            root.register_buffer(names[node], tensor)
    return torch.fx.GraphModule(root, _fx(flow, names), class_name="Rewritten")


def python_text(flow: Flow, about: str = "") -> str:
    """A Python file with a module ``Rewritten(state)``, which is made from the state dict of the original module.

    Args:
        flow: the graph.
        about: a line on the origin of the graph.

    Raises:
        UserError: an operator only runs on another device, or a constant of the module is too large for a text.
    """
    nodes = weight_nodes(flow)
    names = _attributes(nodes)
    folded = [node for node in nodes if str(node.attribute("name")) in flow.definitions]
    numbers = [node for node in nodes if str(node.attribute("name")) in flow.numbers]
    plain = [node for node in nodes if node not in folded and node not in numbers]
    state = _attributes(_below_definitions(flow, folded))
    lines = [
        f'"""{about or flow.name}: written by steptime {__version__}.',
        "",
        "Rewritten(module.state_dict()) takes the place of the module. Chains of element-wise operators are written",
        "out: torch.compile(Rewritten(...)) makes a kernel of each.",
        '"""',
        "",
        "import torch",
        "from torch import device, inf, nan",
        "",
        f"INPUTS = {[str(value.node.attribute('name')) for value in flow.inputs]!r}",
        f"OUTPUTS = {list(flow.names)!r}",
        "",
        "",
        *_constants(flow, state, folded),
        "",
        "class Rewritten(torch.nn.Module):",
        "    def __init__(self, state):",
        "        super().__init__()",
        "        with torch.no_grad():",
        "            folded = constants(state)",
    ]
    lines += _registered(flow, names, (folded, plain, numbers))
    code = _code(_fx(flow, names)).splitlines()
    lines += ["", *(f"    {line}" if line.strip() else "" for line in code)]
    return "\n".join(lines) + "\n"


def _registered(flow: Flow, names: Mapping[Node, str], kinds: tuple[list[Node], list[Node], list[Node]]) -> list[str]:
    """Lines that register the weights of the module: folded ones, those of the state, and numbers."""
    folded, plain, numbers = kinds
    lines = []
    for number, node in enumerate(folded):
        lines.append(f"        self.register_buffer({names[node]!r}, folded[{number}])")
    for node in plain:
        kind = "torch.nn.Parameter({}, requires_grad=False)" if node.op == "parameter" else "{}"
        given = kind.format(f"state[{str(node.attribute('name'))!r}].detach()")
        register = "register_parameter" if node.op == "parameter" else "register_buffer"
        lines.append(f"        self.{register}({names[node]!r}, {given})")
    for node in numbers:
        lines.append(
            f"        self.register_buffer({names[node]!r}, {_literal(flow.numbers[str(node.attribute('name'))])})"
        )
    return lines


def _below_definitions(flow: Flow, folded: Iterable[Node]) -> list[Node]:
    """Weights from which folded constants are computed."""
    found: dict[Node, None] = {}
    waiting = [flow.definitions[str(node.attribute("name"))] for node in folded]
    while waiting:
        for node in topological([waiting.pop().node]):
            name = str(node.attribute("name", ""))
            if node.op in SOURCES and name in flow.definitions:
                waiting.append(flow.definitions[name])
            elif node.op in SOURCES:
                found.setdefault(node)
    return list(found)


def _constants(flow: Flow, state: Mapping[Node, str], folded: Iterable[Node]) -> list[str]:
    """Lines of the function that computes folded constants."""
    values = [_expanded(flow, flow.definitions[str(node.attribute("name"))], {}) for node in folded]
    lines = [
        "def constants(state):",
        '    """Constants that are computed from the weights once, in the order of their names."""',
    ]
    if not values:
        return [*lines, "    return ()", ""]
    graph = _Writer(flow, state).result(values)
    code = _code(graph)
    for node, attribute in state.items():
        name = str(node.attribute("name"))
        given = _literal(flow.numbers[name]) if name in flow.numbers else f"state[{name!r}]"
        lines.append(f"    {attribute} = {given}")
    body = [line.replace("= self.", "= ") for line in code.splitlines()[1:] if line.strip()]
    body = [line for line in body if line.partition(" = ")[0].strip() != line.partition(" = ")[2]]
    body[-1] = body[-1] if len(values) > 1 else body[-1].replace("return ", "return (", 1) + ",)"
    return [*lines, *body, ""]


def _expanded(flow: Flow, value: Value, known: dict[Value, Value]) -> Value:
    """An expression over weights only: its constants are replaced by their definitions."""
    if value in known:
        return known[value]
    node = value.node
    name = str(node.attribute("name", ""))
    if node.op in SOURCES:
        made = _expanded(flow, flow.definitions[name], known) if name in flow.definitions else value
    else:
        inputs = tuple(_expanded(flow, each, known) for each in node.inputs)
        made = Value(flow.nodes.node(node.op, inputs, node.names, node.attributes, node.outputs), value.index)
    known[value] = made
    return made


def _code(graph: torch.fx.Graph) -> str:
    return str(graph.python_code("self").src).strip("\n")


def _literal(given: Any) -> str:
    tensor = given if isinstance(given, torch.Tensor) else torch.tensor(given)
    if tensor.numel() > MOST_NUMBERS:
        raise UserError(
            f"a constant of the module has {tensor.numel()} elements, too many for a text",
            hint="register it with register_buffer",
        )
    return f"torch.tensor({tensor.tolist()!r}, dtype={tensor.dtype})"


def structure(flow: Flow) -> str:
    """Text of a graph's computation without names of weights: equal for graphs that differ only in these.

    Sources are numbered in the order of use; a tensor filled with one number counts as a source. Shapes of views are
    those of their results.
    """
    number: dict[Node, int] = {}
    lines: list[str] = []
    for node in topological(value.node for value in flow.outputs):
        number[node] = len(number)
        arguments = " ".join(f"{number[value.node]}.{value.index}" for value in node.inputs)
        attributes = () if node.op in SOURCES else tuple(p for p in node.attributes if p[0] not in SKIPPED)
        filled = not node.inputs and node.op in ("zeros", "ones", "full")
        attributes = () if filled or node.op in ("view", "_unsafe_view", "expand") else attributes
        kind = "weight" if node.op in WEIGHTS or filled else node.op
        lines.append(f"{kind} {node.names} {arguments} {attributes} {' '.join(map(str, node.outputs))}")
    lines.append(" ".join(f"{number[value.node]}.{value.index}" for value in flow.outputs))
    return "\n".join(lines)


def digest(flow: Flow) -> str:
    """A short hash of :func:`structure`."""
    return hashlib.sha256(structure(flow).encode()).hexdigest()[:16]
