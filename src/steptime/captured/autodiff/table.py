"""What a rule of differentiation sees, the tables of rules, and which values share a storage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from steptime.captured.graph.program import Attribute, Node, Nodes, Value
from steptime.captured.ops import VIEWS
from steptime.errors import InternalError

#: Gradients by argument name; a list for an argument that is a list of tensors.
Pulled = Mapping[str, Value | Sequence[Value | None] | None]


@dataclass(frozen=True, slots=True)
class Step:
    """One node on the way back: its output gradients, and which inputs need one."""

    nodes: Nodes
    node: Node
    grads: tuple[Value | None, ...]
    """Gradient of each output; None where nothing flows back into it."""
    needed: frozenset[str]
    """Names of the arguments whose gradient is wanted."""

    @property
    def grad(self) -> Value:
        """Gradient of the first output."""
        first = self.grads[0]
        if first is None:
            raise InternalError(f"{self.node.op} has no gradient of its first output")
        return first

    def needs(self, name: str) -> bool:
        """Whether the gradient of an argument is wanted."""
        return name in self.needed

    def input(self, name: str) -> Value:
        """An argument that was given."""
        found = self.node.input(name)
        if found is None:
            raise InternalError(f"{self.node.op} has no input {name!r}")
        return found

    def maybe(self, name: str) -> Value | None:
        """An argument, None where it was not given."""
        return self.node.input(name)

    def output(self, index: int = 0) -> Value:
        """A result of the forward pass."""
        return self.node.value(index)

    def get(self, name: str, default: Attribute = None) -> Attribute:
        """A scalar argument."""
        return self.node.attribute(name, default)

    def number(self, name: str, default: float) -> float:
        """A scalar argument that is a number."""
        given = self.node.attribute(name, default)
        return given if isinstance(given, (int, float)) else default

    def ints(self, name: str, default: Sequence[int] = ()) -> tuple[int, ...]:
        """A scalar argument that is a whole number or a tuple of them."""
        given = self.node.attribute(name)
        if given is None:
            return tuple(default)
        return tuple(int(n) for n in (given if isinstance(given, tuple) else (given,)) if isinstance(n, (int, float)))

    def kept(self, *names: str) -> dict[str, Attribute]:
        """Scalar arguments that the backward operator takes too."""
        return {name: value for name, value in self.node.attributes if name in names}


Reverse = Callable[[Step], Pulled]
#: (nodes, node, tangent of each input or None) -> tangent of each output or None
Forward = Callable[[Nodes, Node, Sequence[Value | None]], Sequence[Value | None]]

REVERSE: dict[str, Reverse] = {}
"""Operator -> gradients of its arguments."""

MAPS: set[str] = set()
"""Operators that work on each element by itself: their rules give gradients in the shape of the result, and the engine
sums over what was broadcast."""

SYMMETRIC: set[str] = set()
"""Operators of one tensor whose Jacobian is symmetric: the reverse rule is the forward rule."""

FORWARD: dict[str, Forward] = {}
"""Operator -> tangents of its results, where neither linearity nor symmetry gives them."""

LINEAR: dict[str, tuple[str, ...]] = {}
"""Operator -> arguments in which it is linear together: its tangent is the operator on the tangents."""

BILINEAR: dict[str, tuple[str, str]] = {}
"""Operator -> the two arguments in each of which it is linear."""

CONSTANT = frozenset({
    "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor", "logical_not", "isnan", "isinf",
    "argmax", "argmin", "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "floor",
    "ceil", "round", "trunc", "sign", "floor_divide", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not",
    "new_zeros", "new_ones", "new_full", "new_empty", "nonzero", "bernoulli", "one_hot", "bucketize", "searchsorted",
    "argsort", "detach", "scalar_tensor", "arange", "lift_fresh_copy", "any", "all", "is_nonzero",
})  # fmt: skip
"""Operators through which no gradient flows: their results are whole numbers, truth values, or constant in pieces."""


def reverse(*names: str) -> Callable[[Reverse], Reverse]:
    """Enter a rule."""

    def enter(rule: Reverse) -> Reverse:
        REVERSE.update(dict.fromkeys(names, rule))
        return rule

    return enter


def elementwise(*names: str) -> Callable[[Reverse], Reverse]:
    """Enter the rule of an operator that works on each element by itself."""
    MAPS.update(names)
    return reverse(*names)


def forward(*names: str) -> Callable[[Forward], Forward]:
    """Enter a forward-mode rule."""

    def enter(rule: Forward) -> Forward:
        FORWARD.update(dict.fromkeys(names, rule))
        return rule

    return enter


def linear(op: str, *arguments: str) -> None:
    """Say that an operator is linear in its arguments of those names."""
    LINEAR[op] = arguments


def root(value: Value) -> Value:
    """The value whose storage this one shares; itself where it has its own."""
    while value.node.op in VIEWS and value.node.inputs:
        value = value.node.inputs[0]
    return value


def storages(values: Iterable[Value]) -> tuple[Value, ...]:
    """The values that own the storages of these, each once, in order."""
    return tuple(dict.fromkeys(root(value) for value in values))
