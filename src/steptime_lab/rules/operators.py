"""Operators of terms as rows: shape with conditions, value in a number system, element at an index, names.

Axes are negative, so that an operator can also apply below leading dims; ``lifts`` is True if it does. Reductions keep
their dim with size one. Source: PyTorch's reference of ``torch`` and ``torch.nn.functional``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final, TypeAlias

import numpy as np

from steptime.errors import UserError
from steptime_lab.rules.domains import FUNCTIONS, Array, Domain
from steptime_lab.rules.forms import (
    Call,
    Elements,
    Form,
    Piece,
    applied,
    guarded,
    inside,
    largest,
    multiplied,
    scaled,
    summed,
)
from steptime_lab.rules.sizes import ONE, ZERO, Condition, Size, at_least, equal, size
from steptime_lab.rules.terms import Shape, Term, require_dims
from steptime_lab.rules.windows import (
    avgpool_element,
    avgpool_value,
    bordered,
    conv_element,
    conv_shape,
    conv_value,
    inverse,
    maxpool_element,
    maxpool_value,
    pool_shape,
)

Attributes: TypeAlias = tuple[Size, ...]
Numbers: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operator with its shape, value and element functions, and its names in ATen and LaTeX."""

    name: str
    arity: int
    attributes: tuple[str, ...] = ()
    shape: Callable[[Attributes, Sequence[Shape], list[Condition]], Shape]
    value: Callable[[Domain, Numbers, Sequence[Array], tuple[int, ...]], Array]
    element: Callable[[Elements, Term, Shape], Form]
    aten: str
    tex: str
    lifts: bool = True
    aligns: bool = False
    """Arguments of fewer dims are broadcast along leading dims."""


def axis_of(given: Size, rank: int) -> int:
    """A negative axis as a number.

    Raises:
        UserError: it is not a number, or out of range.
    """
    axis = given.number
    if axis is None or not -rank <= axis < 0:
        raise UserError(f"axis {given} of {rank} dims", hint=f"axes count from the last dim: -1 to -{rank}")
    return axis


def put(shape: Sequence[Size], axis: int, value: Size) -> Shape:
    """A shape or index with one entry replaced."""
    at = axis % len(shape)
    return (*shape[:at], value, *shape[at + 1 :])


def broadcast(shapes: Sequence[Shape], needs: list[Condition]) -> Shape:
    """Broadcast dims; a dim of one stretches, and others must be equal."""
    rank = max(map(len, shapes))
    out: list[Size] = []
    for axis in range(-rank, 0):
        dims = [shape[axis] for shape in shapes if len(shape) >= -axis and shape[axis] != ONE]
        needs += [equal(dims[0], dim) for dim in dims[1:] if dim != dims[0]]
        out.append(dims[0] if dims else ONE)
    return tuple(out)


# Element by element


def _elementwise(
    name: str,
    arity: int,
    value: Callable[[Domain, Sequence[Array]], Array],
    element: Callable[[Sequence[Form]], Form],
    aten: str,
    tex: str,
) -> Operator:
    return Operator(
        name=name,
        arity=arity,
        shape=lambda _, shapes, needs: broadcast(shapes, needs),
        value=lambda d, _, arrays, __: value(d, arrays),
        element=lambda e, t, i: element([e.at(c, i[len(i) - len(e.dims(c)) :]) for c in t.children]),
        aten=aten,
        tex=tex,
        aligns=True,
    )


def _minus(d: Domain, arrays: Sequence[Array]) -> Array:
    return d.add(arrays[0], d.apply("neg", arrays[1]))


def _larger(d: Domain, arrays: Sequence[Array]) -> Array:
    stacked = np.stack(np.broadcast_arrays(*arrays), axis=-1)
    return np.asarray(d.largest(stacked, -1)[..., 0])


def _larger_element(forms: Sequence[Form]) -> Form:
    marked: list[Piece] = []
    for form in forms:
        single = largest(form, {})
        if len(single) != 1 or single[0].guards:
            return _larger_cases(forms)
        marked += [piece for factor in single[0].factors if isinstance(factor, Call) for piece in factor.of]
    return (Piece(factors=(Call("max", tuple(marked)),)),)


def _larger_cases(forms: Sequence[Form]) -> Form:
    """A maximum of two forms with guards, by cases over both."""
    left, right = (largest(form, {}) for form in forms)
    out: list[Piece] = []
    for a in left:
        for b in right:
            (one, *_), (two, *_) = a.factors, b.factors
            of = (one.of if isinstance(one, Call) else ()) + (two.of if isinstance(two, Call) else ())
            out += guarded((Piece(factors=(Call("max", of),)),), a.guards | b.guards)
    return tuple(out)


def _function(name: str) -> Operator:
    return _elementwise(
        name,
        1,
        lambda d, arrays: d.apply(name, arrays[0]),
        lambda forms: applied(name, forms[0]),
        FUNCTIONS[name][0],
        rf"\operatorname{{{name}}}({{0}})" if name != "neg" else "-{0}",
    )


# Products


def _matmul_shape(_: Attributes, shapes: Sequence[Shape], needs: list[Condition]) -> Shape:
    a, b = shapes
    require_dims(2, "a matrix product", a)
    require_dims(2, "a matrix product", b)
    needs.append(equal(a[-1], b[-2]))
    lead = broadcast([a[:-2], b[:-2]], needs) if len(a) > 2 or len(b) > 2 else ()
    return (*lead, a[-2], b[-1])


def _matmul_value(d: Domain, _: Numbers, arrays: Sequence[Array], __: tuple[int, ...]) -> Array:
    a, b = arrays
    return np.asarray(d.total(d.mul(a[..., :, :, None], b[..., None, :, :]), -2)[..., 0, :])


def _matmul_element(e: Elements, t: Term, index: Shape) -> Form:
    a, b = t.children
    k = e.fresh(e.dims(a)[-1])
    left = e.at(a, (*index[len(index) - len(e.dims(a)) : -2], index[-2], k))
    right = e.at(b, (*index[len(index) - len(e.dims(b)) : -2], k, index[-1]))
    return summed(multiplied(left, right), k, e.dims(a)[-1])


# Movements


def _concat_shape(attributes: Attributes, shapes: Sequence[Shape], needs: list[Condition]) -> Shape:
    first = shapes[0]
    axis = axis_of(attributes[0], len(first))
    if any(len(shape) != len(first) for shape in shapes):
        raise UserError("a concatenation of different numbers of dims", hint="add dims of one first")
    for shape in shapes[1:]:
        needs += [equal(first[i], shape[i]) for i in range(-len(first), 0) if i != axis and shape[i] != first[i]]
    return put(first, axis, sum((shape[axis] for shape in shapes), ZERO))


def _concat_element(e: Elements, t: Term, index: Shape) -> Form:
    axis = axis_of(t.attributes[0], len(index))
    out: Form = ()
    start = ZERO
    for number, child in enumerate(t.children):
        extent = e.dims(child)[axis]
        at = index[axis] - start
        guards = ({at} if number else set()) | ({extent - 1 - at} if number < len(t.children) - 1 else set())
        out += guarded(e.at(child, put(index, axis, at)), guards)
        start = start + extent
    return out


def _slice_shape(attributes: Attributes, shapes: Sequence[Shape], needs: list[Condition]) -> Shape:
    axis, start, end = axis_of(attributes[0], len(shapes[0])), *attributes[1:]
    needs += [at_least(start, 0), at_least(end, start + 1), at_least(shapes[0][axis], end)]
    return put(shapes[0], axis, end - start)


def _slice_value(d: Domain, given: Numbers, arrays: Sequence[Array], _: tuple[int, ...]) -> Array:
    axis, start, end = given
    return np.take(arrays[0], np.arange(start, end), axis=axis)


def _slice_element(e: Elements, t: Term, index: Shape) -> Form:
    axis = axis_of(t.attributes[0], len(index))
    return e.at(t.children[0], put(index, axis, index[axis] + t.attributes[1]))


def _pad_shape(attributes: Attributes, shapes: Sequence[Shape], needs: list[Condition]) -> Shape:
    axis, before, after = axis_of(attributes[0], len(shapes[0])), *attributes[1:]
    needs += [at_least(before, 0), at_least(after, 0)]
    return put(shapes[0], axis, shapes[0][axis] + before + after)


def _pad_value(d: Domain, given: Numbers, arrays: Sequence[Array], shape: tuple[int, ...]) -> Array:
    axis, before, after = given
    (x,) = arrays

    def zeros(extent: int) -> Array:
        return d.full((*x.shape[d.lead : x.ndim + axis], extent, *x.shape[x.ndim + axis + 1 :]), 0)

    return np.concatenate([zeros(before), x, zeros(after)], axis=axis)


def _pad_element(e: Elements, t: Term, index: Shape) -> Form:
    axis = axis_of(t.attributes[0], len(index))
    at = index[axis] - t.attributes[1]
    guards = inside(at, e.dims(t.children[0])[axis])
    return guarded(e.at(t.children[0], put(index, axis, at)), guards)


def _enlarge_shape(attributes: Attributes, shapes: Sequence[Shape], needs: list[Condition]) -> Shape:
    (w,) = shapes
    require_dims(2, "an enlarged kernel", w)
    needs.append(at_least(attributes[0], 0))
    return (*w[:-2], *(dim + 2 * attributes[0] for dim in w[-2:]))


def _enlarge_value(d: Domain, given: Numbers, arrays: Sequence[Array], shape: tuple[int, ...]) -> Array:
    (w,) = arrays
    return bordered(w, given[0], d.full((*w.shape[d.lead : -2], *(n + 2 * given[0] for n in w.shape[-2:])), 0))


def _enlarge_element(e: Elements, t: Term, index: Shape) -> Form:
    at = index[-2] - t.attributes[0], index[-1] - t.attributes[0]
    dims = e.dims(t.children[0])
    return guarded(e.at(t.children[0], (*index[:-2], *at)), inside(at[0], dims[-2]) | inside(at[1], dims[-1]))


def _swapped(attributes: Attributes, given: Shape) -> Shape:
    a, b = (axis_of(each, len(given)) for each in attributes)
    return put(put(given, a, given[b]), b, given[a])


def _reshape_shape(attributes: Attributes, shapes: Sequence[Shape], needs: list[Condition]) -> Shape:
    needs.append(equal(prod(shapes[0], start=ONE), prod(attributes, start=ONE)))
    return attributes


def _reshape_element(e: Elements, t: Term, index: Shape) -> Form:
    linear, dims = ZERO, e.dims(t.children[0])
    for i, dim in zip(index, t.attributes, strict=True):
        linear = linear * dim + i
    at: list[Size] = []
    for number in range(len(dims)):
        stride = prod(dims[number + 1 :], start=ONE)
        at.append(e.quotient(linear, stride))
        linear = linear - at[-1] * stride
    return e.at(t.children[0], tuple(at))


def _expand_shape(attributes: Attributes, shapes: Sequence[Shape], needs: list[Condition]) -> Shape:
    axis = axis_of(attributes[0], len(shapes[0]))
    needs.append(equal(shapes[0][axis], 1))
    return put(shapes[0], axis, attributes[1])


# Reductions


def _kept(attributes: Attributes, shapes: Sequence[Shape], _: list[Condition]) -> Shape:
    return put(shapes[0], axis_of(attributes[0], len(shapes[0])), ONE)


def _sum_element(e: Elements, t: Term, index: Shape) -> Form:
    (x,) = t.children
    axis = axis_of(t.attributes[0], len(index))
    k = e.fresh(e.dims(x)[axis])
    return summed(e.at(x, put(index, axis, k)), k, e.dims(x)[axis])


def _mean_element(e: Elements, t: Term, index: Shape) -> Form:
    extent = e.dims(t.children[0])[axis_of(t.attributes[0], len(index))]
    return multiplied(_sum_element(e, t, index), inverse(extent))


def _mean_value(d: Domain, given: Numbers, arrays: Sequence[Array], _: tuple[int, ...]) -> Array:
    total = d.total(arrays[0], given[0])
    return d.mul(total, d.apply("recip", d.full((1,) * (total.ndim - d.lead), arrays[0].shape[given[0]])))


def _max_element(e: Elements, t: Term, index: Shape) -> Form:
    (x,) = t.children
    axis = axis_of(t.attributes[0], len(index))
    k = e.fresh(e.dims(x)[axis])
    return largest(e.at(x, put(index, axis, k)), {str(k): e.dims(x)[axis]} if k.name else {})


def _softmax_value(d: Domain, given: Numbers, arrays: Sequence[Array], _: tuple[int, ...]) -> Array:
    powers = d.apply("exp", arrays[0])
    return d.mul(powers, d.apply("recip", d.total(powers, given[0])))


def _softmax_element(e: Elements, t: Term, index: Shape) -> Form:
    (x,) = t.children
    axis = axis_of(t.attributes[0], len(index))
    k = e.fresh(e.dims(x)[axis])
    total = summed(applied("exp", e.at(x, put(index, axis, k))), k, e.dims(x)[axis])
    return multiplied(applied("exp", e.at(x, index)), applied("recip", total))


def _same(attributes: Attributes, shapes: Sequence[Shape], _: list[Condition]) -> Shape:
    axis_of(attributes[0], len(shapes[0]))
    return shapes[0]


def _given(attributes: Attributes, _: Sequence[Shape], needs: list[Condition]) -> Shape:
    needs += [at_least(each, 1) for each in attributes]
    return attributes


def _identity_value(d: Domain, given: Numbers, _: Sequence[Array], __: tuple[int, ...]) -> Array:
    out = d.full((given[0], given[0]), 0)
    one = d.full((1,), 1)
    for i in range(given[0]):
        out[..., i, i] = one[..., 0]
    return out


def _reordered(attributes: Attributes, given: Shape) -> Shape:
    return tuple(given[axis_of(each, len(given))] for each in attributes)


def _permute_element(e: Elements, t: Term, index: Shape) -> Form:
    at = list(index)
    for i, axis in zip(index, t.attributes, strict=True):
        at[axis_of(axis, len(index))] = i
    return e.at(t.children[0], tuple(at))


def _minus_element(forms: Sequence[Form]) -> Form:
    return forms[0] + scaled(forms[1], size(-1))


AXIS: Final = ("axis",)
ROWS: Final = (
    _elementwise("add", 2, lambda d, a: d.add(*a), lambda f: f[0] + f[1], "aten.add", "{0} + {1}"),
    _elementwise("sub", 2, _minus, _minus_element, "aten.sub", "{0} - {1}"),
    _elementwise("mul", 2, lambda d, a: d.mul(*a), lambda f: multiplied(*f), "aten.mul", r"{0} \odot {1}"),
    _elementwise("maximum", 2, _larger, _larger_element, "aten.maximum", r"\max({0}, {1})"),
    *(_function(name) for name in FUNCTIONS),
    Operator(
        name="scale",
        arity=1,
        attributes=("factor",),
        aten="aten.mul",
        tex="{a0} {0}",
        shape=lambda _, s, __: s[0],
        value=lambda d, g, a, _: d.mul(a[0], d.full((1,) * (a[0].ndim - d.lead), g[0])),
        element=lambda e, t, i: scaled(e.at(t.children[0], i), t.attributes[0]),
    ),
    Operator(
        name="matmul",
        arity=2,
        shape=_matmul_shape,
        value=_matmul_value,
        element=_matmul_element,
        aten="aten.matmul",
        tex="{0} {1}",
        aligns=True,
    ),
    Operator(
        name="conv",
        arity=2,
        attributes=("stride", "pad", "dilation", "groups"),
        shape=conv_shape,
        value=conv_value,
        element=conv_element,
        aten="aten.conv2d",
        tex=r"{0} \ast_{{a0}} {1}",
        lifts=False,
    ),
    Operator(
        name="avgpool",
        arity=1,
        attributes=("kernel", "stride", "pad"),
        shape=pool_shape,
        value=avgpool_value,
        element=avgpool_element,
        aten="aten.avg_pool2d",
        tex=r"\operatorname{avg}_{{a0}}({0})",
    ),
    Operator(
        name="maxpool",
        arity=1,
        attributes=("kernel", "stride", "pad"),
        shape=pool_shape,
        value=maxpool_value,
        element=maxpool_element,
        aten="aten.max_pool2d",
        tex=r"\operatorname{maxpool}_{{a0}}({0})",
    ),
    Operator(
        name="concat",
        arity=-1,
        attributes=AXIS,
        shape=_concat_shape,
        value=lambda _, g, a, __: np.concatenate(a, axis=g[0]),
        element=_concat_element,
        aten="aten.cat",
        tex="[{*}]_{a0}",
    ),
    Operator(
        name="slice",
        arity=1,
        attributes=("axis", "start", "end"),
        shape=_slice_shape,
        value=_slice_value,
        element=_slice_element,
        aten="aten.slice",
        tex="{0}[{a1}:{a2}]_{a0}",
    ),
    Operator(
        name="pad",
        arity=1,
        attributes=("axis", "before", "after"),
        shape=_pad_shape,
        value=_pad_value,
        element=_pad_element,
        aten="aten.constant_pad_nd",
        tex=r"\operatorname{pad}({0})",
    ),
    Operator(
        name="enlarge",
        arity=1,
        attributes=("border",),
        shape=_enlarge_shape,
        value=_enlarge_value,
        element=_enlarge_element,
        aten="aten.constant_pad_nd",
        tex=r"\operatorname{enlarge}_{a0}({0})",
    ),
    Operator(
        name="transpose",
        arity=1,
        attributes=("axis", "axis"),
        aten="aten.transpose",
        tex="{0}^T",
        shape=lambda a, s, _: _swapped(a, s[0]),
        value=lambda _, g, a, __: np.swapaxes(a[0], g[0], g[1]),
        element=lambda e, t, i: e.at(t.children[0], _swapped(t.attributes, i)),
    ),
    Operator(
        name="permute",
        arity=1,
        attributes=("...",),
        aten="aten.permute",
        tex=r"\pi({0})",
        lifts=False,
        shape=lambda a, s, _: _reordered(a, s[0]),
        element=_permute_element,
        value=lambda d, g, a, __: np.transpose(a[0], (*range(a[0].ndim - len(g)), *(a[0].ndim + i for i in g))),
    ),
    Operator(
        name="reshape",
        arity=1,
        attributes=("...",),
        shape=_reshape_shape,
        element=_reshape_element,
        value=lambda d, g, a, _: a[0].reshape(*a[0].shape[: d.lead], *g),
        aten="aten.reshape",
        tex=r"\operatorname{reshape}({0})",
        lifts=False,
    ),
    Operator(
        name="expand",
        arity=1,
        attributes=("axis", "extent"),
        shape=_expand_shape,
        aten="aten.expand",
        value=lambda _, g, a, __: np.repeat(a[0], g[1], axis=g[0]),
        tex=r"\mathbf 1_{a1} {0}",
        element=lambda e, t, i: e.at(t.children[0], put(i, axis_of(t.attributes[0], len(i)), ZERO)),
    ),
    Operator(
        name="sum",
        arity=1,
        attributes=AXIS,
        shape=_kept,
        value=lambda d, g, a, _: d.total(a[0], g[0]),
        element=_sum_element,
        aten="aten.sum",
        tex=r"\sum_{a0} {0}",
    ),
    Operator(
        name="mean",
        arity=1,
        attributes=AXIS,
        shape=_kept,
        value=_mean_value,
        element=_mean_element,
        aten="aten.mean",
        tex=r"\overline{{0}}",
    ),
    Operator(
        name="max",
        arity=1,
        attributes=AXIS,
        shape=_kept,
        value=lambda d, g, a, _: d.largest(a[0], g[0]),
        element=_max_element,
        aten="aten.amax",
        tex=r"\max_{a0} {0}",
    ),
    Operator(
        name="softmax",
        arity=1,
        attributes=AXIS,
        shape=_same,
        value=_softmax_value,
        element=_softmax_element,
        aten="aten.softmax",
        tex=r"\operatorname{softmax}_{a0}({0})",
    ),
    Operator(
        name="zero",
        arity=0,
        attributes=("...",),
        shape=_given,
        value=lambda d, g, _, __: d.full(g, 0),
        element=lambda e, t, i: (),
        aten="aten.zeros",
        tex="0",
        lifts=False,
    ),
    Operator(
        name="one",
        arity=0,
        attributes=("...",),
        shape=_given,
        value=lambda d, g, _, __: d.full(g, 1),
        element=lambda e, t, i: (Piece(),),
        aten="aten.ones",
        tex="1",
        lifts=False,
    ),
    Operator(
        name="identity",
        arity=0,
        attributes=("extent",),
        value=_identity_value,
        aten="aten.eye",
        tex="I",
        shape=lambda a, _, needs: _given((*a, *a), (), needs),
        lifts=False,
        element=lambda e, t, i: guarded((Piece(),), {i[0] - i[1], i[1] - i[0]}),
    ),
)
OPERATORS: Final[Mapping[str, Operator]] = {row.name: row for row in ROWS}
