"""One node of an ONNX graph, as the rows of the operator tables see it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from steptime.captured.aten import maths
from steptime.captured.aten.views import wrap
from steptime.captured.graph.node import Nodes, Value
from steptime.captured.graph.types import TensorType
from steptime.captured.onnx.tensor import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

#: What a row makes: one output, or several; an output is a value, an array that is known, or nothing.
Result = Any
OnnxRow = Callable[["OnnxCall"], Result]

ROWS: dict[tuple[str, str], OnnxRow] = {}
"""(domain, operator) -> its row. The standard domain is the empty text."""


def row(*names: str, domain: str = "") -> Callable[[OnnxRow], OnnxRow]:
    """Enter a function in the table of operators; it returns None where it cannot express the call."""

    def enter(function: OnnxRow) -> OnnxRow:
        for name in names:
            ROWS[(domain, name)] = function
        return function

    return enter


@dataclass(slots=True)
class OnnxCall:
    """Operator, inputs, attributes; problems of the file are raised as ``ValueError``."""

    nodes: Nodes
    op: str
    version: int
    """Version of the operator set."""
    inputs: list[Tensor | None]
    attributes: dict[str, Any]
    outputs: list[str]

    def has(self, index: int) -> bool:
        """Whether that input is given."""
        return index < len(self.inputs) and self.inputs[index] is not None

    def tensor(self, index: int) -> Tensor:
        """An input that must be given."""
        found = self.inputs[index] if index < len(self.inputs) else None
        if found is None:
            raise ValueError(f"input {index} is missing")
        return found

    def type(self, index: int = 0) -> TensorType:
        """Type of an input that must be given."""
        return self.tensor(index).type

    def value(self, index: int = 0) -> Value:
        """An input as a value."""
        return self.tensor(index).of(self.nodes)

    def maybe(self, index: int) -> Value | None:
        """An input as a value, None where it is not given."""
        return self.value(index) if self.has(index) else None

    def weight(self, index: int) -> Value:
        """An input that is a parameter if the file stores it, also where it is stored as a constant."""
        return self.tensor(index).of(self.nodes, "parameter")

    def maybe_weight(self, index: int) -> Value | None:
        """The same, None where it is not given."""
        return self.weight(index) if self.has(index) else None

    def values(self) -> list[Value]:
        """All inputs."""
        return [self.value(index) for index in range(len(self.inputs))]

    def operand(self, index: int, beside: int | None = None) -> maths.Operand:
        """An input of an element-wise operator: a number where it is one that is known, else a value."""
        given = self.tensor(index)
        rank = 0 if beside is None else self.type(beside).rank
        if given.array is not None and given.array.size == 1 and given.type.rank <= rank and not given.weight:
            number = given.array.reshape(-1)[0].item()
            if isinstance(number, (bool, int, float)):
                return number
        return self.value(index)

    def known(self, index: int) -> Array:
        """Numbers of an input; shapes and the like must not depend on data."""
        found = self.tensor(index)
        array = found.numbers()
        if array is None:
            text = f"input {index} ({found.name!r}) must be known before the model runs"
            if found.elsewhere is not None:
                text += f"; its data are in {found.elsewhere!r}: is that beside the file?"
            raise ValueError(text)
        return array

    def maybe_known(self, index: int) -> Array | None:
        """Numbers of an input that may be missing."""
        return self.known(index) if self.has(index) else None

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute."""
        return self.attributes.get(name, default)

    def ints(self, name: str, index: int | None = None) -> tuple[int, ...] | None:
        """Whole numbers from an attribute or, in later versions, from an input; None where neither is given."""
        given = self.attributes.get(name)
        if given is None and index is not None and self.has(index):
            given = self.known(index).reshape(-1).tolist()
        if isinstance(given, int):
            given = [given]
        return None if given is None else tuple(int(number) for number in given)

    def axes(self, index: int | None = 1, of: int = 0) -> tuple[int, ...] | None:
        """Dims from the attribute or input ``axes``, counted from the front."""
        given = self.ints("axes", index)
        return None if given is None else tuple(wrap(axis, self.type(of).rank) for axis in given)

    def axis(self, default: int, of: int = 0) -> int:
        """Dim from the attribute ``axis``."""
        return wrap(int(self.get("axis", default)), self.type(of).rank)


def chain(nodes: Nodes, op: str, values: Sequence[Value]) -> Value:
    """A binary operator over many values, from the left."""
    result = values[0]
    for value in values[1:]:
        result = maths.binary(nodes, op, result, value)
    return result
