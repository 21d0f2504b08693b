"""Element-wise operators that run as one kernel, and the cost of such a kernel.

A fused node has its operators in the attribute ``steps``: each is (operator, element type of its result, shape,
argument names, arguments, attributes), where an argument is the number of an input (0 and up) or of an earlier step
(-1 for the first, -2 for the second, ...). The attribute ``results`` has the numbers of the steps that it writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Final

from steptime.captured.cost import OperatorCost, Timer, Work
from steptime.captured.cost.timing import direct_call, work_of
from steptime.captured.graph import Attribute, Node, Nodes, TensorType, Value
from steptime.captured.ops import OPERATORS, labelled_by
from steptime.captured.ops.norms import norm_dims
from steptime.captured.ops.work import STREAM, KernelCall, dtype_of, stored_bytes
from steptime.estimate.measured import CPU_TWO
from steptime.rewrite.flow import CONV_RELU, FUSED

OPERATIONS: Final[Mapping[str, int]] = {
    name: row.operations for name, row in OPERATORS.items() if row.operations is not None
}
"""Operator that a fused kernel may have -> vector operations per element."""


@cache
def is_map(node: Node) -> bool:
    """True if a node is an element-wise operator with one result."""
    return node.op in OPERATIONS and len(node.outputs) == 1 and bool(node.inputs)


ROWS_AT_ONCE: Final = frozenset(name for name in labelled_by(norm_dims) if not name.endswith("_backward"))
"""Operators over the last dims that can be fused into a kernel of whole rows."""


def is_member(node: Node, uses: Mapping[Value, int]) -> bool:
    """True if an element-wise kernel can include a node: a map, or a norm of which only the result is read."""
    others = (uses.get(node.value(index), 0) for index in range(1, len(node.outputs)))
    return is_map(node) or (node.op in ROWS_AT_ONCE and not any(others))


def fuse(nodes: Nodes, members: Sequence[Node], results: Sequence[Node]) -> Node:
    """One node for several element-wise nodes, which are given in topological order.

    Args:
        nodes: the table of nodes.
        members: element-wise nodes.
        results: the members whose values are written.

    >>> nodes, row = Nodes(), TensorType((4,), "fp32")
    >>> a, b, c = (nodes.source("input", name, row) for name in "abc")
    >>> s = nodes.apply("add", {"self": a, "other": b}, outputs=[row])
    >>> p = nodes.apply("mul", {"self": s.value(), "other": c}, outputs=[row])
    >>> made = fuse(nodes, [s, p], [p])
    >>> len(made.inputs), [step[0] for step in made.attribute("steps")]
    (3, ['add', 'mul'])
    """
    at = {node.value(): -1 - n for n, node in enumerate(members)}
    inputs: dict[Value, int] = {}
    steps: list[Attribute] = []
    for node in members:
        arguments = tuple(at[v] if v in at else inputs.setdefault(v, len(inputs)) for v in node.inputs)
        type = node.outputs[0]
        steps.append((node.op, type.dtype, type.shape, node.names, arguments, node.attributes))
    chosen = tuple(-1 - at[node.value()] for node in results)
    attributes: tuple[tuple[str, Attribute], ...] = (("steps", tuple(steps)), ("results", chosen))
    names = tuple(f"input{n}" for n in range(len(inputs)))
    return nodes.node(FUSED, tuple(inputs), names, attributes, tuple(node.outputs[0] for node in results))


def opened(nodes: Nodes, node: Node) -> list[Node]:
    """The operators of a fused node as single nodes in order; for any other node, the node itself."""
    if node.op == CONV_RELU:
        return _convolved(nodes, node)
    if node.op != FUSED:
        return [node]
    made: list[Node] = []
    for step in _steps(node):
        op, dtype, shape, names, arguments, attributes = step
        inputs = tuple(node.inputs[a] if a >= 0 else made[-1 - a].value() for a in arguments)
        made.append(nodes.node(op, inputs, names, attributes, (TensorType(shape, dtype),)))
    return made


def _convolved(nodes: Nodes, node: Node) -> list[Node]:
    """The convolution and the ReLU of a fused node."""
    given = dict(zip(node.names, node.inputs, strict=True))
    inputs = {"input": given["self"], "weight": given["weight"], "bias": given.get("bias")}
    attributes = {**dict(node.attributes), "transposed": False, "output_padding": (0,)}
    made = nodes.apply("convolution", inputs, attributes, outputs=node.outputs)
    return [made, nodes.apply("relu", {"self": made.value()}, outputs=node.outputs)]


def results_of(node: Node) -> tuple[int, ...]:
    """Numbers of the steps that a fused node writes."""
    if node.op == CONV_RELU:
        return (1,)
    found = node.attribute("results")
    return tuple(int(str(step)) for step in found) if isinstance(found, tuple) else ()


Step = tuple[str, str, tuple[int, ...], tuple[str, ...], tuple[int, ...], tuple[tuple[str, Attribute], ...]]


def _steps(node: Node) -> Iterable[Step]:
    found = node.attribute("steps")
    return found if isinstance(found, tuple) else ()  # type: ignore[return-value]


def loop_steps(elements: int, lanes: int) -> int:
    r"""Steps of a vectorised loop over elements: $\lceil n / w \rceil$.

    $n$ = ``elements``, $w$ = ``lanes`` (4 for a float4). Vectorisation saves instructions but no traffic. Source:
    definition.

    >>> loop_steps(256, 1), loop_steps(256, 4)
    (256, 64)
    """
    return -(-elements // lanes)


def _stream(node: Node, moved_bytes: float, flops: float) -> Work:
    call = KernelCall(operator=STREAM, shape={"read_bytes": moved_bytes, "written_bytes": 0.0})
    return Work(
        vector_flops=flops, moved_bytes=moved_bytes, launches=1.0, kernels=(call,), dtype=dtype_of(node), family="map"
    )


def fused_work(node: Node) -> Work:
    r"""Work of a fused kernel, which reads every input once and writes every result once, with one launch.

    $$B = \sum_i b_i + \sum_o b_o, \qquad F = \sum_k f_k\,n_k$$

    where $b_i$ and $b_o$ = bytes of inputs and results, $f_k$ = operations per element of step $k$ and $n_k$ its
    elements; those of a convolution are on the matrix units. Source: definition.
    """
    read = {value: stored_bytes(value.type) for value in node.inputs}
    works = [work_of(step) for step in opened(Nodes(), node)]
    moved = sum(read.values()) + sum(stored_bytes(type) for type in node.outputs)
    streamed = _stream(node, float(moved), sum(float(work.vector_flops) for work in works))
    return replace(streamed, matrix_flops=sum(float(work.matrix_flops) for work in works))


@dataclass(frozen=True, kw_only=True)
class FusedTimer(Timer):
    """A :class:`Timer` that also times fused kernels, by their traffic and their expensive steps.

    A step whose own kernel takes longer than its traffic (such as an exponential on a CPU) adds the difference: fusion
    saves traffic and launches, not arithmetic.
    """

    graphed: bool = False
    """The whole step is one launch (a CUDA graph)."""
    _fused: dict[Node, OperatorCost] = field(default_factory=dict, repr=False, compare=False)
    _scratch: Nodes = field(default_factory=Nodes, repr=False, compare=False)

    def cost(self, node: Node, *, inplace: bool = False) -> OperatorCost:
        """Cost of a node, fused or not."""
        if node.op != FUSED:
            found = super().cost(node, inplace=inplace)
            return replace(found, host_s=0.0) if self.graphed else found
        known = self._fused.get(node)
        if known is None:
            known = self._fused[node] = self._time_fused(node)
        return known

    def _time_fused(self, node: Node) -> OperatorCost:
        work = fused_work(node)
        whole = self.time(FUSED, replace(work, matrix_flops=0.0))
        arithmetic_s = 0.0
        for step in opened(self._scratch, node):
            alone = super().cost(step)
            moved = self.time(FUSED, _stream(step, float(alone.work.moved_bytes), 0.0))
            arithmetic_s += max(alone.seconds - moved.seconds, 0.0)
        host_s = 0.0 if self.graphed else whole.host_s
        if not self.recorded and self.measured_s(CPU_TWO) is not None:
            return replace(whole, work=work, seconds=self._looped_s(node), host_s=0.0)
        return replace(whole, work=work, seconds=whole.seconds + arithmetic_s, host_s=host_s)

    def _looped_s(self, node: Node) -> float:
        r"""Seconds of a fused kernel on a processor that was measured operator by operator.

        $$t = t_2(B) + \sum_k \max\big(t_k - \tau_k - (t_2(B_k) - \tau_2),\ 0\big)$$

        with $t_2(B)$ the seconds of a map of two tensors that moves $B$ bytes, $\tau_2$ those without bytes, $B$ the
        bytes of the kernel, and for each step $t_k$ its seconds alone, $\tau_k$ those of its call and $B_k$ its bytes.
        Source: definition.
        """
        empty_s, arithmetic_s = self.measured_s(CPU_TWO) or 0.0, 0.0
        for step in opened(self._scratch, node):
            alone = Timer.cost(self, step)
            call = direct_call(step, alone.work, self.working_bytes)
            call_s = None if call is None else self.measured_s(call.operator)
            moved_s = (self.measured_s(CPU_TWO, float(alone.work.moved_bytes)) or 0.0) - empty_s
            arithmetic_s += max(alone.seconds - (call_s or 0.0) - moved_s, 0.0)
        return arithmetic_s + (self.measured_s(CPU_TWO, float(fused_work(node).moved_bytes)) or 0.0)
