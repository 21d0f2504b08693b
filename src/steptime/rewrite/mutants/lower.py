"""A verified term as nodes of a graph, for numbers in the place of its names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from steptime.captured.aten import layers, maths, views
from steptime.captured.graph import Value
from steptime.rewrite.rules.terms import VARIABLE, Term
from steptime.rewrite.scene import Scene


class Lowering:
    """Makes the nodes of terms over given values; subterms of weights alone are computed before the run."""

    def __init__(self, scene: Scene, values: Mapping[str, Value], sizes: Mapping[str, int]) -> None:
        self._scene, self._nodes, self._values, self._sizes = scene, scene.nodes, values, sizes
        self._made: dict[Term, Value] = {}

    def value(self, given: Term) -> Value:
        """The value of a term."""
        if given.op == VARIABLE:
            return self._values[given.name]
        if given not in self._made:
            made = self._row(given)
            weights = all(self._scene.is_weight(self._values[name]) for name in given.variables())
            self._made[given] = self._scene.constant(made) if weights and given.variables() else made
        return self._made[given]

    def _row(self, given: Term) -> Value:
        bias = given.children[1].name if given.op == "add" else ""
        if bias.startswith("b") and given.children[0].op == "conv":
            return self._convolution(given.children[0], self._values[bias])
        if given.op == "conv":
            return self._convolution(given, None)
        return ROWS[given.op](self, given)

    def numbers(self, given: Term) -> tuple[int, ...]:
        """Attributes of a term as numbers."""
        return tuple(each.value(dict(self._sizes)) for each in given.attributes)

    def _convolution(self, given: Term, bias: Value | None) -> Value:
        stride, padding, dilation, groups = self.numbers(given)
        x, w = (self._dense(self.value(child)) for child in given.children)
        return layers.convolution(
            self._nodes,
            x,
            w,
            bias,
            stride=(stride,) * 2,
            padding=(padding,) * 2,
            dilation=(dilation,) * 2,
            groups=groups,
        )

    def _dense(self, value: Value) -> Value:
        """A kernel of a convolution takes a tensor without gaps: PyTorch copies any other one first."""
        return value if views.is_dense(value.type) else views.clone(self._nodes, value)

    def padded(self, given: Term) -> Value:
        """Zeros around a tensor: terms that pad one after the other are one node."""
        inner, before, after = given, dict[int, int](), dict[int, int]()
        while inner.op == "pad":
            axis, low, high = self.numbers(inner)
            before[axis], after[axis] = before.get(axis, 0) + low, after.get(axis, 0) + high
            inner = inner.children[0]
        x = self.value(inner)
        axes = range(-x.type.rank, 0)
        return self._padded(x, [before.get(a, 0) for a in axes], [after.get(a, 0) for a in axes])

    def enlarged(self, given: Term) -> Value:
        """Zeros around both last dims of a kernel."""
        x, (border,) = self.value(given.children[0]), self.numbers(given)
        both = [0] * (x.type.rank - 2) + [border] * 2
        return self._padded(x, both, both)

    def _padded(self, x: Value, before: Sequence[int], after: Sequence[int]) -> Value:
        """Zeros before and after each dim; PyTorch takes both of the last dim first."""
        pairs = list(zip(before, after, strict=True))
        if not any(map(any, pairs)):
            return x
        shape = [size + sum(pair) for size, pair in zip(x.type.shape, pairs, strict=True)]
        pad = tuple(n for pair in reversed(pairs) for n in pair)
        output = views.tensor_type(shape, x.type.dtype)
        return self._nodes.apply("constant_pad_nd", {"self": x}, {"pad": pad, "value": 0.0}, outputs=[output]).value()

    def sliced(self, given: Term) -> Value:
        """A part of an axis."""
        axis, start, end = self.numbers(given)
        return views.slice(self._nodes, self.value(given.children[0]), axis, start, end)

    def product(self, given: Term) -> Value:
        """A product of matrices, batched where one of them is."""
        nodes, (a, b) = self._nodes, (self.value(child) for child in given.children)
        if a.type.rank == b.type.rank == 2:
            return maths.mm(nodes, a, b)
        if b.type.rank == 2:
            rows = views.reshape(nodes, a, (a.type.shape[0] * a.type.shape[1], a.type.shape[2]))
            return views.reshape(nodes, maths.mm(nodes, rows, b), (*a.type.shape[:2], b.type.shape[1]))
        if a.type.rank == 2:
            a = views.expand(nodes, views.unsqueeze(nodes, a, 0), (b.type.shape[0], *a.type.shape))
        return maths.bmm(nodes, a, b)

    def moved(self, make: Callable[..., Value], given: Term) -> Value:
        """A view that takes the attributes of the term."""
        return make(self._nodes, self.value(given.children[0]), self.numbers(given))

    def turned(self, given: Term) -> Value:
        """Two dims exchanged."""
        return views.transpose(self._nodes, self.value(given.children[0]), *self.numbers(given))

    def joined(self, given: Term) -> Value:
        """Tensors one after the other."""
        return views.cat(self._nodes, self._all(given), *self.numbers(given))

    def added(self, given: Term) -> Value:
        """A sum; a bias is a column for each channel."""
        a, b = self._all(given)
        b = views.reshape(self._nodes, b, (b.type.elements, 1, 1)) if b.type.rank == 1 else b
        return maths.add(self._nodes, a, b)

    def _all(self, given: Term) -> Sequence[Value]:
        return [self.value(child) for child in given.children]

    def mapped(self, given: Term) -> Value:
        """A function of every element."""
        return maths.unary(self._nodes, given.op, self.value(given.children[0]))


ROWS: Final[Mapping[str, Callable[[Lowering, Term], Value]]] = {
    "pad": Lowering.padded,
    "enlarge": Lowering.enlarged,
    "slice": Lowering.sliced,
    "matmul": Lowering.product,
    "reshape": lambda made, given: made.moved(views.reshape, given),
    "permute": lambda made, given: made.moved(views.permute, given),
    "transpose": Lowering.turned,
    "concat": Lowering.joined,
    "add": Lowering.added,
    "relu": Lowering.mapped,
}
