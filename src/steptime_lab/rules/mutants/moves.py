"""Parts of mutants: moves of a tensor, and cores that compute the multi-linear operator on a moved tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Final

from steptime_lab.rules.mutants.programs import Convolution, Program, biased, convolved
from steptime_lab.rules.sizes import ONE, Size, size
from steptime_lab.rules.terms import Shape, Term, term, variable


def padded(x: Term, axis: int, before: Size | int, after: Size | int) -> Term:
    """A tensor padded with zeros along an axis; the tensor itself if there are none."""
    nothing = size(before) == size(after) == size(0)
    return x if nothing else term("pad", (x,), (axis, before, after))


def cut(x: Term, axis: int, start: Size | int, end: Size | int) -> Term:
    """A slice along an axis."""
    return term("slice", (x,), (axis, start, end))


def shaped(x: Term, *dims: Size | int) -> Term:
    """The tensor reshaped."""
    return term("reshape", (x,), tuple(dims))


def ordered(x: Term, *dims: int) -> Term:
    """The tensor with dims permuted, counted from the front."""
    return term("permute", (x,), tuple(each - len(dims) for each in dims))


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A movement of elements of a tensor."""

    name: str
    undone: str
    """Name of the inverse move."""
    make: Callable[[Program, Term, Shape], Term | None]
    """Function that moves a tensor; None: the move does not apply to the shape."""
    late: bool = False
    """Used only after the operator."""
    early: bool = False
    """Used only before the operator."""


def blocks(program: Program) -> int:
    """Number of parts into which a dim of an image is cut: the dilation, or two."""
    conv = program.convolution
    return conv.dilation if conv is not None and conv.dilation > 1 else 2


def over(extent: Size, by: Size | int) -> Size | None:
    """The exact quotient of sizes; None: there may be a remainder."""
    part = extent // by
    return part if part * by == extent else None


def rounded(extent: Size, by: int) -> Size:
    """The extent rounded up to a multiple of ``by``."""
    return (extent + (by - 1)) // by * by


def _filled(program: Program, x: Term, s: Shape) -> Term | None:
    m = blocks(program)
    if len(s) != 4 or all(over(each, m) is not None for each in s[2:]):
        return None
    return padded(padded(x, -2, 0, rounded(s[2], m) - s[2]), -1, 0, rounded(s[3], m) - s[3])


def _bordered(program: Program, x: Term, s: Shape) -> Term | None:
    conv = program.convolution
    if conv is None or not conv.pad or s[2:] != program.table["x"].dims[2:]:
        return None
    return padded(padded(x, -2, conv.pad, conv.pad), -1, conv.pad, conv.pad)


def _cropped(program: Program, x: Term, s: Shape) -> Term | None:
    result = program.shape
    if len(s) != len(result) or s == result or any(a != b for a, b in zip(s[:-2], result[:-2], strict=True)):
        return None
    for axis in (-2, -1):
        x = x if s[axis] == result[axis] else cut(x, axis, 0, result[axis])
    return x


def _batch_to(axis: int) -> Callable[[Program, Term, Shape], Term | None]:
    def make(_: Program, x: Term, s: Shape) -> Term | None:
        if len(s) != 4 or s[0] == ONE:
            return None
        order = (1, 0, 2, 3) if axis == 2 else (1, 2, 0, 3)
        joined = (ONE, s[1], s[0] * s[2], s[3]) if axis == 2 else (ONE, s[1], s[2], s[0] * s[3])
        return shaped(ordered(x, *order), *joined)

    return make


def _to_batch(axis: int) -> Callable[[Program, Term, Shape], Term | None]:
    def make(program: Program, x: Term, s: Shape) -> Term | None:
        images = program.table["x"].dims[0]
        part = over(s[axis], images) if len(s) == 4 and s[0] == ONE else None
        if part is None:
            return None
        if axis == 2:
            return ordered(shaped(x, s[1], images, part, s[3]), 1, 0, 2, 3)
        return ordered(shaped(x, s[1], s[2], images, part), 2, 0, 1, 3)

    return make


def _space_to_batch(program: Program, x: Term, s: Shape) -> Term | None:
    m = blocks(program)
    high, wide = (over(each, m) for each in s[2:]) if len(s) == 4 else (None, None)
    if high is None or wide is None:
        return None
    split = ordered(shaped(x, s[0], s[1], high, m, wide, m), 3, 5, 0, 1, 2, 4)
    return shaped(split, s[0] * m * m, s[1], high, wide)


def _batch_to_space(program: Program, x: Term, s: Shape) -> Term | None:
    m = blocks(program)
    images = over(s[0], m * m) if len(s) == 4 else None
    if images is None:
        return None
    split = ordered(shaped(x, m, m, images, s[1], s[2], s[3]), 2, 3, 4, 0, 5, 1)
    return shaped(split, images, s[1], s[2] * m, s[3] * m)


def _rows_to_batch(program: Program, x: Term, s: Shape) -> Term | None:
    m = blocks(program)
    high = over(s[2], m) if len(s) == 4 else None
    if high is None:
        return None
    return shaped(ordered(shaped(x, s[0], s[1], m, high, s[3]), 0, 2, 1, 3, 4), s[0] * m, s[1], high, s[3])


def _batch_to_rows(program: Program, x: Term, s: Shape) -> Term | None:
    m = blocks(program)
    images = over(s[0], m) if len(s) == 4 else None
    if images is None:
        return None
    return shaped(ordered(shaped(x, images, m, s[1], s[2], s[3]), 0, 2, 1, 3, 4), images, s[1], s[2] * m, s[3])


def _channels_to_rows(_: Program, x: Term, s: Shape) -> Term | None:
    return shaped(x, s[0], ONE, s[1] * s[2], s[3]) if len(s) == 4 and s[1] != ONE else None


def _rows_to_channels(program: Program, x: Term, s: Shape) -> Term | None:
    channels = program.shape[1]
    high = over(s[2], channels) if len(s) == 4 and s[1] == ONE else None
    return None if high is None else shaped(x, s[0], channels, high, s[3])


def _turned(_: Program, x: Term, s: Shape) -> Term | None:
    return term("transpose", (x,), (-2, -1))


def _rows_joined(_: Program, x: Term, s: Shape) -> Term | None:
    return shaped(x, s[0] * s[1], s[2]) if len(s) == 3 else None


def _rows_split(program: Program, x: Term, s: Shape) -> Term | None:
    b = program.table["x"].dims[0]
    rows = over(s[0], b) if len(s) == 2 else None
    return None if rows is None else shaped(x, b, rows, s[1])


def _even_rows(_: Program, x: Term, s: Shape) -> Term | None:
    return padded(x, -2, 0, rounded(s[-2], 8) - s[-2]) if len(s) == 3 and over(s[-2], 8) is None else None


_IMAGES: Final = (
    Move(name="fill", undone="crop", make=_filled, early=True),
    Move(name="border", undone="crop", make=_bordered, early=True),
    Move(name="N2H", undone="H2N", make=_batch_to(2)),
    Move(name="H2N", undone="N2H", make=_to_batch(2)),
    Move(name="N2W", undone="W2N", make=_batch_to(3)),
    Move(name="W2N", undone="N2W", make=_to_batch(3)),
    Move(name="S2B", undone="B2S", make=_space_to_batch, early=True),
    Move(name="B2S", undone="S2B", make=_batch_to_space, late=True),
    Move(name="H2B", undone="B2H", make=_rows_to_batch, early=True),
    Move(name="B2H", undone="H2B", make=_batch_to_rows, late=True),
    Move(name="C2H", undone="H2C", make=_channels_to_rows),
    Move(name="H2C", undone="C2H", make=_rows_to_channels),
    Move(name="transpose", undone="transpose", make=_turned),
    Move(name="crop", undone="fill", make=_cropped, late=True),
)
_MATRICES: Final = (
    Move(name="rows", undone="batch", make=_rows_joined),
    Move(name="batch", undone="rows", make=_rows_split),
    Move(name="even rows", undone="crop", make=_even_rows, early=True),
    Move(name="transpose", undone="transpose", make=_turned),
    Move(name="crop", undone="even rows", make=_cropped, late=True),
)


def moves_of(program: Program) -> tuple[Move, ...]:
    """Moves that are tried on tensors of a program."""
    return _MATRICES if program.convolution is None else _IMAGES


# -- the operator --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """One way to compute the multi-linear operator on a moved tensor."""

    name: str
    term: Term


def cores_of(program: Program, x: Term, s: Shape) -> Iterator[Core]:
    """All cores for the operator of a program on a tensor of a shape."""
    conv = program.convolution
    rows = _products(program, x, s) if conv is None else _convolutions(conv, x, s)
    yield from (Core(name=name, term=made) for name, made in rows.items())


def _products(program: Program, x: Term, s: Shape) -> Mapping[str, Term]:
    w, k, shared = variable("w"), program.table["x"].dims[2], len(program.table["w"].dims) == 2
    if not shared and (len(s) != 3 or s[0] != program.table["x"].dims[0]):
        return {}
    out = {}
    if s[-1] == k:
        out["product"] = term("matmul", (x, w))
    if s[-2] == k:
        out["turned product"] = term("matmul", (term("transpose", (w,), (-2, -1)), x))
    if shared and len(s) == 2 and s[-1] == k:
        half = k // 2
        parts = [(cut(x, -1, a, b), cut(w, -2, a, b)) for a, b in ((0, half), (half, k))]
        out["split sum"] = term("add", tuple(term("matmul", pair) for pair in parts))
    return out


def _convolutions(conv: Convolution, x: Term, s: Shape) -> Mapping[str, Term]:
    w, c = variable("w"), size("c")
    if len(s) != 4 or s[1] != conv.groups * c:
        return {}
    turned = term("transpose", (w,), (-2, -1))
    out = {"convolution": convolved(conv, x, w), "convolution with a turned kernel": convolved(conv, x, turned)}
    if conv.pad:
        out["convolution without padding"] = convolved(conv, x, w, pad=0)
    if conv.dilation > 1:
        out["dense convolution without padding"] = convolved(conv, x, w, pad=0, dilation=1)
        if conv.pad % conv.dilation == 0:
            out["dense convolution"] = convolved(conv, x, w, pad=conv.pad // conv.dilation, dilation=1)
    if conv.groups > 1:
        return out
    if conv.kernel == (1, 1) and not conv.pad:
        out |= {"product": pointwise(conv, x, s), "product of rows": pointwise_rows(conv, x, s)}
    elif max(conv.kernel) > 1:
        out["product of patches"] = patches(conv, x, s)
    return out


def pointwise(conv: Convolution, x: Term, s: Shape) -> Term:
    """A 1x1 convolution as one product for each image: filters times channels x pixels."""
    flat = shaped(variable("w"), size("o"), size("c"))
    made = term("matmul", (flat, shaped(x, s[0], s[1], s[2] * s[3])))
    return biased(conv, shaped(made, s[0], size("o"), s[2], s[3]))


def pointwise_rows(conv: Convolution, x: Term, s: Shape) -> Term:
    """A 1x1 convolution as one product for all images: pixels x channels times filters."""
    flat = term("transpose", (shaped(variable("w"), size("o"), size("c")),), (-2, -1))
    made = term("matmul", (shaped(ordered(x, 0, 2, 3, 1), s[0] * s[2] * s[3], s[1]), flat))
    return biased(conv, ordered(shaped(made, s[0], s[2], s[3], size("o")), 0, 3, 1, 2))


def patches(conv: Convolution, x: Term, s: Shape) -> Term:
    """A convolution as a product of the filters with the pixels under each window position (im2col)."""
    p, d, (high, wide) = conv.pad, conv.dilation, conv.kernel
    full = padded(padded(x, -2, p, p), -1, p, p)
    rows, columns = (extent + 2 * p - reach for extent, reach in zip(s[2:], conv.halo, strict=True))
    taps = tuple(
        cut(cut(full, -2, r * d, rows + r * d), -1, q * d, columns + q * d) for r in range(high) for q in range(wide)
    )
    joined = shaped(term("concat", taps, (-3,)), s[0], high * wide * s[1], rows * columns)
    flat = shaped(ordered(variable("w"), 0, 2, 3, 1), size("o"), high * wide * size("c"))
    return biased(conv, shaped(term("matmul", (flat, joined)), s[0], size("o"), rows, columns))


def spread(kernel: int, *, bias: bool) -> Term:
    """A transposed convolution whose stride is its kernel: a product at every pixel, then channels to space."""
    n, c, h, v, o = (size(name) for name in "nchvo")
    flat = shaped(ordered(variable("w"), 1, 2, 3, 0), o * kernel**2, c, 1, 1)
    y = shaped(term("conv", (variable("x"), flat), (1, 0, 1, 1)), n, o, kernel, kernel, h, v)
    y = shaped(ordered(y, 0, 1, 4, 2, 5, 3), n, o, kernel * h, kernel * v)
    return term("add", (y, variable("b"))) if bias else y


def applied_moves(program: Program, x: Term, names: tuple[str, ...]) -> Term:
    """A tensor after named moves."""
    from steptime_lab.rules.terms import shape_of

    rows = {move.name: move for move in moves_of(program)}

    def step(now: Term, name: str) -> Term:
        made = rows[name].make(program, now, shape_of(now, program.table, {}, []))
        return now if made is None else made

    return reduce(step, names, x)
