"""Operators with sub-graphs, recorded by the rules of PyTorch's higher-order operators.

A node with known output types stays opaque if its sub-graph cannot be read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from steptime.captured.cost import work_of
from steptime.captured.graph.strides import wrap
from steptime.captured.onnx.call import OnnxCall, real, types_of_opaque
from steptime.captured.onnx.products import MAX_STEPS
from steptime.captured.onnx.tensor import Tensor, flat
from steptime.captured.record.higher_order import ALL_TURNS, MORE_WORK, ONE_TURN, RULES
from steptime.errors import UserError

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto

    from steptime.captured.onnx.reader import Reader

Names = dict[str, Tensor]


def _graph(node: NodeProto, name: str) -> GraphProto:
    for attribute in node.attribute:
        if attribute.name == name:
            graph: GraphProto = attribute.g
            return graph
    raise ValueError(f"it has no {name}")


def _tried(
    reader: Reader, call: OnnxCall, node: NodeProto, names: Names, graph: str, given: Sequence[Tensor] = ()
) -> tuple[Any, Any] | None:
    """FLOPs and bytes of a sub-graph, for comparison; None if it cannot be read and the node can stay opaque.

    Results are cached by node, since nodes inside sub-graphs recur in every turn and trial of the outer node.
    """
    key = (*node.output, graph)
    if key not in reader.trials:
        try:
            works = [work_of(each.node) for each in reader.tried(_graph(node, graph), names, given)]
            flops = sum(work.matrix_flops + work.vector_flops for work in works)
            reader.trials[key] = flops, sum(work.moved_bytes for work in works)
        except (UserError, ValueError):
            with contextlib.suppress(ValueError):
                types_of_opaque(call, node, reader.declared, reader.dims)
                reader.trials[key] = None
                return None
            raise
    return reader.trials[key]


def _if(reader: Reader, call: OnnxCall, node: NodeProto, names: Names) -> list[Any] | None:
    """Outputs of the branch of a known condition, else of the branch with more work."""
    branches = ("then_branch", "else_branch")
    condition = call.tensor(0).array
    if condition is not None:
        return reader.body(_graph(node, branches[not flat(condition)[0]]), names)()
    tried = [_tried(reader, call, node, names, name) for name in branches]
    works = [work for work in tried if work is not None]
    if len(works) < len(branches):
        return None
    reader.values.take(MORE_WORK)
    return reader.body(_graph(node, branches[works.index(max(works))]), names)()


def _loop(reader: Reader, call: OnnxCall, node: NodeProto, names: Names) -> list[Any] | None:
    """Outputs of a loop over the number of the turn, the condition and carried values; other outputs are stacked."""
    carried = [call.tensor(n) for n in range(2, len(call.inputs))]
    true = Tensor("", (), "bool", array=real(True, torch.bool))
    count, going = call.tensor(0) if call.has(0) else None, call.tensor(1) if call.has(1) else true
    trips = int(flat(count.array)[0]) if count is not None and count.array is not None else None
    trips = None if trips is not None and trips > MAX_STEPS else trips  # exporters write the largest number for none
    rows: list[list[Tensor]] = []
    unsure = False

    def goes_on(turn: int, going: Tensor, *_: Tensor) -> Any:
        nonlocal unsure
        if turn == trips or (going.array is not None and not flat(going.array)[0]):
            return False
        if turn >= MAX_STEPS:
            raise ValueError(f"it runs more than {MAX_STEPS} turns")
        if going.array is not None:
            return True if count is None or count.array is not None else reader.live(count)
        unsure = unsure or trips is not None or bool(rows)
        return trips is not None if unsure else reader.live(going)

    def turned(turn: int, *given: Tensor) -> Any:
        still, *made = run(Tensor("", (), "int64", array=real(turn)), *given)
        rows.append(made[len(carried) :])
        return turn + 1, still, *made[: len(carried)]

    graph = _graph(node, "body")
    fixed = {each.name for each in (*graph.input[1:2], *graph.initializer)}
    for each in graph.node:
        fixed |= set(each.output) if fixed.issuperset(filter(None, each.input)) else set()
    if trips is None and (count is None or count.array is not None) and graph.output[0].name in fixed:
        return None  # nothing ends it before the trip count
    first = Tensor("", (), "int64", array=real(0))
    if _tried(reader, call, node, names, "body", [first, going, *carried]) is None:
        return None
    run = reader.body(graph, names)
    _, _, *last = RULES["while_loop"](reader.values, goes_on, turned, (0, going, *carried))
    if unsure:
        reader.values.take(ALL_TURNS if trips is not None else ONE_TURN)
    if not rows and len(node.output) > len(carried):
        return None  # nothing says how large a row would be
    return [*last, *(torch.stack([reader.live(one) for one in each]) for each in zip(*rows, strict=True))]


def _scan(reader: Reader, call: OnnxCall, node: NodeProto, names: Names) -> list[Any] | None:
    """Outputs of every step along the scanned axes; results that a step does not carry are stacked."""
    count = int(call.get("num_scan_inputs", 0))
    if call.version < 9:
        return None  # of several batches
    carried, along = (
        [call.tensor(n) for n in numbers]
        for numbers in (range(len(call.inputs) - count), range(len(call.inputs) - count, len(call.inputs)))
    )
    made = len(node.output) - len(carried)
    axes, reverse = (call.ints(f"scan_input_{what}") or (0,) * count for what in ("axes", "directions"))
    axes = tuple(wrap(axis, len(one.shape)) for axis, one in zip(axes, along, strict=True))
    steps = {one.shape[axis] for axis, one in zip(axes, along, strict=True)}
    if len(steps) != 1 or not 0 < min(steps) <= MAX_STEPS:
        return None
    one_step = [
        Tensor("", one.shape[:axis] + one.shape[axis + 1 :], one.dtype) for axis, one in zip(axes, along, strict=True)
    ]
    if _tried(reader, call, node, names, "body", [*carried, *one_step]) is None:
        return None
    run, live = reader.body(_graph(node, "body"), names), reader.live
    parts = [_turned(live(one), axis, 0, back) for one, axis, back in zip(along, axes, reverse, strict=True)]
    found = RULES["scan"](reader.values, lambda *given: map(live, run(*given)), [live(one) for one in carried], parts)
    axes, reverse = (call.ints(f"scan_output_{what}") or (0,) * made for what in ("axes", "directions"))
    stacked = found[len(carried) :]
    turned = (
        _turned(one, 0, wrap(axis, one.dim()), back) for one, axis, back in zip(stacked, axes, reverse, strict=True)
    )
    return [*found[: len(carried)], *turned]


def _turned(x: torch.Tensor, source: int, target: int, reverse: int) -> torch.Tensor:
    """A tensor with a dim moved to another place, and reversed if ``reverse`` is 1."""
    x = x if source == target else x.movedim(source, target)
    return x.flip((target,)) if reverse else x


BODIES: Final[Mapping[str, Callable[[Reader, OnnxCall, NodeProto, Names], list[Any] | None]]] = {
    "If": _if,
    "Loop": _loop,
    "Scan": _scan,
}
"""Operator -> function that returns its outputs, or None if the node stays opaque."""
