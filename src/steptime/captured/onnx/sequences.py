"""Rows of sequences of tensors whose length is known: they leave no trace in the graph."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from steptime.captured.aten import views
from steptime.captured.graph.node import Value
from steptime.captured.graph.types import TensorType
from steptime.captured.onnx.call import OnnxCall, Result, row
from steptime.captured.onnx.limits import MAX_PARTS
from steptime.captured.onnx.tensor import Tensor
from steptime.num import ceil_div


def _sequence(call: OnnxCall, parts: Sequence[Tensor]) -> Tensor:
    return Tensor(call.outputs[0], TensorType((len(parts),), "int64"), parts=list(parts))


def _parts(call: OnnxCall) -> list[Tensor]:
    parts = call.tensor(0).parts
    if parts is None:
        raise ValueError(f"{call.tensor(0).name!r} is no sequence")
    return parts


@row("SplitToSequence")
def _split(call: OnnxCall) -> Result:
    axis, given = call.axis(0), call.maybe_known(1)
    size = call.type().shape[axis]
    if given is None or given.ndim == 0:
        each = 1 if given is None else int(given)
        if each < 1:
            raise ValueError(f"parts cannot have {each} elements")
        if size > each * MAX_PARTS:
            raise ValueError(f"a sequence of {ceil_div(size, each)} tensors is too long; at most {MAX_PARTS}")
        sizes = [min(each, size - start) for start in range(0, size, each)]
    else:
        sizes = [int(n) for n in given]
    made: Sequence[Value] = views.split_with_sizes(call.nodes, call.value(), sizes, axis)
    if given is None and not call.get("keepdims", 1):
        made = [views.squeeze(call.nodes, part, (axis,)) for part in made]
    return _sequence(call, [Tensor.of_value(f"{call.outputs[0]}.{n}", part) for n, part in enumerate(made)])


@row("SequenceConstruct")
def _construct(call: OnnxCall) -> Result:
    return _sequence(call, [call.tensor(n) for n in range(len(call.inputs))])


@row("SequenceEmpty")
def _empty(call: OnnxCall) -> Result:
    return _sequence(call, [])


@row("SequenceInsert")
def _insert(call: OnnxCall) -> Result:
    parts, place = list(_parts(call)), call.maybe_known(2)
    parts.insert(len(parts) if place is None else int(place.reshape(-1)[0]), call.tensor(1))
    return _sequence(call, parts)


@row("SequenceAt")
def _at(call: OnnxCall) -> Result:
    return _parts(call)[int(call.known(1).reshape(-1)[0])]


@row("SequenceLength")
def _length(call: OnnxCall) -> Result:
    return np.array(len(_parts(call)), dtype=np.int64)


@row("ConcatFromSequence")
def _concat(call: OnnxCall) -> Result:
    parts = [part.of(call.nodes) for part in _parts(call)]
    join = views.stack if call.get("new_axis") else views.cat
    return join(call.nodes, parts, int(call.get("axis", 0)))
