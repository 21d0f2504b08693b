"""Nodes and constants of an ONNX graph in the making."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from steptime.captured.graph import Node, Value
from steptime.captured.graph.program import SOURCES
from steptime.errors import UserError
from steptime.registry import require
from steptime.rewrite.flow import Flow

if TYPE_CHECKING:
    from onnx import NodeProto, TensorProto

OPSET: Final = 23
"""Operator set that is written: it has Attention and RMSNormalization."""
IR_VERSION: Final = 10
CODES: Final[Mapping[str, int]] = {
    "fp32": 1,
    "uint8": 2,
    "int8": 3,
    "uint16": 4,
    "int16": 5,
    "int32": 6,
    "int64": 7,
    "bool": 9,
    "fp16": 10,
    "fp64": 11,
    "uint32": 12,
    "uint64": 13,
    "bf16": 16,
}
"""Element type -> number in ONNX."""
LARGEST_BYTES: Final = 2**31 - 2**20
"""The most that one protobuf message can have, with room for its nodes."""


class Emitter:
    """Nodes of an ONNX graph in the making."""

    def __init__(self, flow: Flow) -> None:
        require("onnx", "writing an ONNX file")
        self.flow = flow
        self.nodes: list[NodeProto] = []
        self.constants: dict[str, TensorProto] = {}
        self.domains: set[str] = set()
        self._names: dict[Value, str] = {}
        self.shown: dict[tuple[Value, tuple[int, ...]], str] = {}
        """Value and a shape of its elements -> the name of the reshape, where it was made on the way."""
        self._count = 0
        self._taken = {str(node.attribute("name")) for node in flow.order if node.op in SOURCES} | set(flow.names)

    def name(self, value: Value) -> str:
        """Name of a value that was made."""
        return self._names[value]

    def put(self, value: Value, name: str) -> None:
        """Say what a value is called."""
        self._names[value] = name

    def prune(self, results: set[str]) -> set[str]:
        """Leave out nodes whose outputs nobody reads; the names that the others read."""
        read, kept = set(results), []
        for node in reversed(self.nodes):
            if not read.isdisjoint(node.output):
                kept.append(node)
                read.update(node.input)
        self.nodes = kept[::-1]
        return read

    def fresh(self, op: str) -> str:
        """A new name."""
        while True:
            self._count += 1
            name = f"{op.lower()}_{self._count}"
            if name not in self._taken:
                return name

    def emit(self, op: str, inputs: Sequence[str], *, outputs: int = 1, domain: str = "", **attributes: Any) -> str:
        """One node; the name of its first output, of which those of the others follow as ``name.1``, ``name.2``."""
        from onnx import helper

        name = self.fresh(op)
        names = [name, *(f"{name}.{index}" for index in range(1, outputs))]
        given = {key: value for key, value in attributes.items() if value is not None}
        self.nodes.append(helper.make_node(op, list(inputs), names, name=name, domain=domain, **given))
        if domain:
            self.domains.add(domain)
        return name

    def numbers(self, values: Iterable[int]) -> str:
        """A list of integers, as shapes and axes are given."""
        return self.tensor(np.array(list(values), dtype=np.int64))

    def scalar(self, value: float, dtype: str) -> str:
        """One number of an element type."""
        from onnx import helper

        kind = CODES[dtype]
        key = f"number.{dtype}.{value!r}"
        if key not in self.constants:
            self.constants[key] = helper.make_tensor(key, kind, (), [value])
        return key

    def tensor(self, array: Any) -> str:
        """A constant tensor; equal ones are one."""
        from onnx import numpy_helper

        key = f"constant.{array.dtype}.{'x'.join(map(str, array.shape))}.{abs(hash(array.tobytes())):x}"
        if key not in self.constants:
            self.constants[key] = numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), key)
        return key

    def of(self, node: Node, name: str) -> str:
        """Name of an input of a node, the empty text where it is not given."""
        found = node.input(name)
        return "" if found is None else self.name(found)

    def operand(self, node: Node, name: str, dtype: str) -> str:
        """An argument that is a tensor or a number."""
        found = node.input(name)
        if found is not None:
            return self.cast(self.name(found), found.type.dtype, dtype)
        given = node.attribute(name)
        if not isinstance(given, (int, float)):
            raise UserError(f"{node.op} without {name!r} cannot be written as ONNX")
        return self.scalar(given, dtype)

    def cast(self, name: str, have: str, want: str) -> str:
        """A tensor in another element type."""
        return name if have == want else self.emit("Cast", [name], to=CODES[want])
