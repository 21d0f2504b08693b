"""Multi-linear programs that are mutated: convolutions, with or without a bias, and matrix products.

A program has numbers for kernel, padding, dilation and groups, and names for all other sizes, so that proofs for its
mutants hold for every batch, number of channels and image size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from steptime.errors import UserError
from steptime_lab.rules.sizes import Size, size
from steptime_lab.rules.terms import Shape, Term, Variable, Variables, parsed, shape_of, term, variable


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """Geometry of a two-dimensional convolution of stride one; only the kernel may differ between the dims."""

    kernel: tuple[int, int] = (3, 3)
    pad: int = 0
    dilation: int = 1
    groups: int = 1
    bias: bool = False

    def __post_init__(self) -> None:
        if min(*self.kernel, self.dilation, self.groups) < 1 or self.pad < 0:
            raise UserError(f"{self} is no convolution", hint="kernel, dilation and groups from 1, padding from 0")

    @property
    def halo(self) -> tuple[int, int]:
        """Rows and columns that a window reaches beyond its first: dilation times (kernel minus one)."""
        return self.dilation * (self.kernel[0] - 1), self.dilation * (self.kernel[1] - 1)

    @property
    def kind(self) -> str:
        """Class of the program, in words."""
        if self.groups > 1:
            return "grouped convolution"
        if self.kernel == (1, 1):
            return "1x1 convolution"
        if self.dilation > 1:
            return "dilated convolution"
        odd = all(k % 2 for k in self.kernel)
        return "convolution with an odd kernel" if odd else "convolution"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A term over named sizes that is mutated."""

    kind: str
    variables: tuple[Variable, ...]
    source: Term
    convolution: Convolution | None = None

    @property
    def table(self) -> Variables:
        """Variables by name."""
        return {each.name: each for each in self.variables}

    @property
    def shape(self) -> Shape:
        """Dims of the result."""
        return shape_of(self.source, self.table, {}, [])


def _variable(name: str, dims: str, kind: str = "tensor") -> Variable:
    return Variable(name=name, dims=tuple(size(each) for each in dims.split()), kind=kind)


def convolution(given: Convolution) -> Program:
    """The program of a convolution: images ``x`` of n x c x h x v, filters ``w``, a bias ``b``.

    >>> str(convolution(Convolution(pad=2, dilation=2)).source)
    'conv[1, 2, 2, 1](x, w)'
    """
    g, (high, wide) = given.groups, given.kernel
    variables = [_variable("x", f"n {g}*c h v"), _variable("w", f"{g}*o c {high} {wide}", "weight")]
    if given.bias:
        variables.append(_variable("b", f"{g}*o 1 1", "weight"))
    source = convolved(given, variable("x"), variable("w"))
    return Program(kind=given.kind, variables=tuple(variables), source=source, convolution=given)


def convolved(
    given: Convolution, x: Term, w: Term, *, pad: int | None = None, dilation: int | None = None, groups: int = 0
) -> Term:
    """A convolution of any tensor with the program's bias; other settings default to the program's."""
    attributes = (1, given.pad if pad is None else pad, dilation or given.dilation, groups or given.groups)
    return biased(given, term("conv", (x, w), attributes))


def biased(given: Convolution, y: Term) -> Term:
    """A result plus the bias, if the program has one."""
    return term("add", (y, variable("b"))) if given.bias else y


def product(*, batched: bool) -> Program:
    """The program of a matrix product of ``x``, b x m x k, with one matrix ``w`` or one for each batch entry."""
    w = _variable("w", "b k p") if batched else _variable("w", "k p", "weight")
    return Program(
        kind="batched product" if batched else "product",
        variables=(_variable("x", "b m k"), w),
        source=parsed("matmul(x, w)"),
    )


def transposed(kernel: int, *, bias: bool = False) -> Program:
    """The program of a transposed convolution with a stride equal to its kernel, by zeros and a flipped kernel.

    ``w`` is c x o x k x k as PyTorch stores it. Every pixel spreads over its own k x k pixels of the result.
    """
    k, last = kernel, kernel - 1
    x = f"reshape[n, c, h, 1, v, 1](x), -3, 0, {last}"
    spread = f"pad[-1, 0, {last}](pad[{x.partition('), ')[2]}]({x.partition(', -3')[0]}))"
    spread = f"reshape[n, c, {k}*h, {k}*v]({spread})"
    for axis in (-2, -1):
        spread = f"pad[{axis}, {last}, 0]({spread})"
    turned = "w"
    for axis in (-2, -1):
        turned = f"concat[{axis}]({', '.join(f'slice[{axis}, {i}, {i + 1}]({turned})' for i in reversed(range(k)))})"
    text = f"conv[1, 0, 1, 1]({spread}, permute[-3, -4, -2, -1]({turned}))"
    variables = [_variable("x", "n c h v"), _variable("w", f"c o {k} {k}", "weight")]
    if bias:
        variables.append(_variable("b", "o 1 1", "weight"))
        text = f"add({text}, b)"
    return Program(kind="transposed convolution", variables=tuple(variables), source=parsed(text))


SIZES: Final[tuple[dict[str, int], ...]] = (
    {"n": 2, "c": 2, "h": 6, "v": 7, "o": 2, "b": 2, "m": 3, "k": 2, "p": 3},
    {"n": 3, "c": 1, "h": 9, "v": 8, "o": 3, "b": 3, "m": 2, "k": 4, "p": 2},
)
"""Sizes at which programs and mutants are evaluated in the search."""


def sizes_for(given: Program) -> tuple[dict[str, int], ...]:
    """Numbers for the names of a program, large enough for its halo, with and without a remainder by its dilation."""
    conv = given.convolution
    more = 0 if conv is None else 2 * max(conv.halo)
    names = {name for each in given.variables for dim in each.dims for name in dim.names()}
    return tuple(
        {name: value + (more if name in "hv" else 0) for name, value in each.items() if name in names} for each in SIZES
    )


def numbers(shape: Shape, at: dict[str, int]) -> tuple[int, ...]:
    """The numeric shape for given numbers of its names."""
    return tuple(dim.value(at) for dim in shape)


def dim(of: Size | int | str) -> Size:
    """A size from a number, a name or a text."""
    return size(of)
