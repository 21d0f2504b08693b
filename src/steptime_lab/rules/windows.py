"""Shapes, values and elements of convolutions and pools, which slide a window over the last two dims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, TypeAlias

import numpy as np

from steptime.errors import UserError
from steptime_lab.rules.domains import Array, Domain
from steptime_lab.rules.forms import Call, Elements, Form, Piece, guarded, inside, largest, multiplied, summed
from steptime_lab.rules.sizes import ONE, ZERO, Condition, Size, at_least, equal, size
from steptime_lab.rules.terms import Shape, Term, require_dims

Attributes: TypeAlias = tuple[Size, ...]
Numbers: TypeAlias = tuple[int, ...]


def windows(extent: Size, kernel: Size, stride: Size, pad: Size, dilation: Size) -> Size:
    r"""Number of window positions: $\lfloor (n + 2p - d (k - 1) - 1) / s \rfloor + 1$ (PyTorch's Conv2d)."""
    return (extent + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1


def conv_shape(attributes: Attributes, shapes: Sequence[Shape], needs: list[Condition]) -> Shape:
    """Shape of a convolution in NCHW with a kernel in OIHW; its conditions are added to ``needs``."""
    stride, pad, dilation, groups = attributes
    x, w = shapes
    if len(x) != 4 or len(w) != 4:
        raise UserError(f"a convolution of {len(x)} and {len(w)} dims", hint="it takes four and four")
    needs.append(equal(x[1], groups * w[1]))
    needs.append(equal(w[0], groups * (w[0] // groups)))
    out = [windows(n, k, stride, pad, dilation) for n, k in zip(x[2:], w[2:], strict=True)]
    needs += [at_least(n + 2 * pad, dilation * (k - 1) + 1) for n, k in zip(x[2:], w[2:], strict=True)]
    return (x[0], w[0], *out)


def conv_value(d: Domain, given: Numbers, arrays: Sequence[Array], shape: tuple[int, ...]) -> Array:
    """Values of a convolution, by group and window position."""
    stride, pad, dilation, groups = given
    x, w = arrays
    x = bordered(x, pad, d.full((*x.shape[d.lead : -2], x.shape[-2] + 2 * pad, x.shape[-1] + 2 * pad), 0))
    high, wide = shape[-2:]
    each, filters = x.shape[-3] // groups, w.shape[-4] // groups
    out = []
    for g in range(groups):
        xs, ws = x[..., g * each : (g + 1) * each, :, :], w[..., g * filters : (g + 1) * filters, :, :, :]
        total: Array | None = None
        for r in range(w.shape[-2]):
            for s in range(w.shape[-1]):
                y, z = r * dilation, s * dilation
                part = xs[..., y : y + stride * (high - 1) + 1 : stride, z : z + stride * (wide - 1) + 1 : stride]
                products = d.mul(part[..., None, :, :, :], ws[..., None, :, :, r, s, None, None])
                summand = d.total(products, -3)[..., 0, :, :]
                total = summand if total is None else d.add(total, summand)
        out.append(total)
    return np.concatenate([each for each in out if each is not None], axis=-3)


def bordered(x: Array, pad: int, into: Array) -> Array:
    """An array set into the middle of a larger one; the array itself if there is no border."""
    if pad:
        into[..., pad:-pad, pad:-pad] = x
        return into
    return x


def conv_element(e: Elements, t: Term, index: Shape) -> Form:
    """An element of a convolution: a sum over channels of its group and window taps."""
    stride, pad, dilation, groups = t.attributes
    x, w = t.children
    n, o, h, v = index
    high, wide = e.dims(x)[2:]
    channels, kernel = e.dims(w)[1], e.dims(w)[2:]
    filters = e.dims(w)[0] // groups
    few = groups.number if groups.number is not None and groups.number <= FEW_GROUPS else None
    out: Form = ()
    for group in map(size, range(few)) if few else (e.quotient(o, filters),):
        c, r, s = e.fresh(channels), e.fresh(kernel[0]), e.fresh(kernel[1])
        at = h * stride + r * dilation - pad, v * stride + s * dilation - pad
        form = multiplied(e.at(x, (n, group * channels + c, *at)), e.at(w, (o, c, r, s)))
        if pad != ZERO:
            form = guarded(form, inside(at[0], high) | inside(at[1], wide))
        if few and few > 1:
            form = guarded(form, inside(o - group * filters, filters))
        out += summed(summed(summed(form, c, channels), r, kernel[0]), s, kernel[1])
    return out


FEW_GROUPS: Final = 4
"""Largest number of groups of a convolution that are separate cases, so that each has linear indices."""


def pool_shape(attributes: Attributes, shapes: Sequence[Shape], needs: list[Condition]) -> Shape:
    """Shape of a pool over the last two dims; its conditions are added to ``needs``."""
    kernel, stride, pad = attributes
    (x,) = shapes
    require_dims(2, "a pool", x)
    needs += [at_least(n + 2 * pad, kernel) for n in x[-2:]]
    needs.append(at_least(kernel, 2 * pad))
    return (*x[:-2], *(windows(n, kernel, stride, pad, ONE) for n in x[-2:]))


def _windows_of(x: Array, given: Numbers, shape: tuple[int, ...], border: Array) -> Array:
    kernel, stride, pad = given
    x = bordered(x, pad, border)
    high, wide = stride * (shape[-2] - 1) + 1, stride * (shape[-1] - 1) + 1
    parts = [x[..., r : r + high : stride, s : s + wide : stride] for r in range(kernel) for s in range(kernel)]
    return np.stack(parts, axis=-1)


def avgpool_value(d: Domain, given: Numbers, arrays: Sequence[Array], shape: tuple[int, ...]) -> Array:
    """Means of windows; the border counts as zeros (``count_include_pad`` of PyTorch)."""
    (x,) = arrays
    border = (*x.shape[d.lead : -2], x.shape[-2] + 2 * given[2], x.shape[-1] + 2 * given[2])
    total = d.total(_windows_of(x, given, shape, d.full(border, 0)), -1)[..., 0]
    return d.mul(total, d.apply("recip", d.full((1,) * (total.ndim - d.lead), given[0] ** 2)))


def maxpool_value(d: Domain, given: Numbers, arrays: Sequence[Array], shape: tuple[int, ...]) -> Array:
    """Maxima of windows, without the border."""
    (x,) = arrays
    border = (*x.shape[d.lead : -2], x.shape[-2] + 2 * given[2], x.shape[-1] + 2 * given[2])
    return np.asarray(d.largest(_windows_of(x, given, shape, d.lowest(border)), -1)[..., 0])


def _window_element(e: Elements, t: Term, index: Shape) -> tuple[Form, dict[str, Size]]:
    kernel, stride, pad = t.attributes
    (x,) = t.children
    r, s = e.fresh(kernel), e.fresh(kernel)
    at = index[-2] * stride + r - pad, index[-1] * stride + s - pad
    form = e.at(x, (*index[:-2], *at))
    if pad != ZERO:
        high, wide = e.dims(x)[-2:]
        form = guarded(form, inside(at[0], high) | inside(at[1], wide))
    return form, {str(each): kernel for each in (r, s) if each.name}


def avgpool_element(e: Elements, t: Term, index: Shape) -> Form:
    """An element of an average pool."""
    form, ranges = _window_element(e, t, index)
    for name, extent in ranges.items():
        form = summed(form, size(name), extent)
    return multiplied(form, inverse(t.attributes[0] * t.attributes[0]))


def maxpool_element(e: Elements, t: Term, index: Shape) -> Form:
    """An element of a maximum pool."""
    kernel, stride, pad = t.attributes
    (x,) = t.children
    r, s = e.fresh(kernel), e.fresh(kernel)
    at = index[-2] * stride + r - pad, index[-1] * stride + s - pad
    pieces = largest(e.at(x, (*index[:-2], *at)), {str(each): kernel for each in (r, s) if each.name})
    if pad == ZERO:
        return pieces
    high, wide = e.dims(x)[-2:]
    guards = inside(at[0], high) | inside(at[1], wide)
    calls = [Call(f.function, guarded(f.of, guards)) for p in pieces for f in p.factors if isinstance(f, Call)]
    return tuple(replace(p, factors=(call,)) for p, call in zip(pieces, calls, strict=True))


def inverse(of: Size) -> Form:
    """One over a size."""
    return (Piece(factors=(Call("inv", (Piece(of),)),)),)
