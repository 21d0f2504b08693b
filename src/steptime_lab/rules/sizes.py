"""Symbolic sizes: polynomials with integer or fractional coefficients over names and floor quotients.

Dims of tensors, attributes of operators and indices of elements are sizes. Arithmetic normalises, so that equal
polynomials compare equal.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Final, TypeAlias

from steptime.errors import UserError, shorten

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Quotient:
    r"""Floor quotient $\lfloor n / d \rfloor$ of two sizes whose division is not exact as polynomials."""

    numerator: Size
    denominator: Size

    def __str__(self) -> str:
        return f"({self.numerator})//({self.denominator})"


Atom: TypeAlias = str | Quotient
Monomial: TypeAlias = tuple[Atom, ...]
Number: TypeAlias = int | Fraction


@dataclass(frozen=True, slots=True)
class Size:
    """A polynomial as (monomial, coefficient) pairs in a fixed order; see :func:`size`."""

    terms: tuple[tuple[Monomial, Number], ...]

    def __add__(self, other: Size | int) -> Size:
        other = size(other)
        if not other.terms:
            return self
        out = dict(self.terms)
        for monomial, value in other.terms:
            out[monomial] = out.get(monomial, 0) + value
        return _made(out)

    def __radd__(self, other: int) -> Size:
        return self + other

    def __neg__(self) -> Size:
        return Size(tuple((monomial, -value) for monomial, value in self.terms))

    def __sub__(self, other: Size | int) -> Size:
        return self + -size(other)

    def __rsub__(self, other: int) -> Size:
        return size(other) - self

    def __mul__(self, other: Size | Number) -> Size:
        out: dict[Monomial, Number] = {}
        for left, a in self.terms:
            for right, b in size(other).terms:
                monomial = tuple(sorted(left + right, key=str))
                out[monomial] = out.get(monomial, 0) + a * b
        return _made(out)

    def __rmul__(self, other: Number) -> Size:
        return self * other

    def __floordiv__(self, other: Size | int) -> Size:
        by = size(other)
        if by.number == 1:
            return self
        a, b = self.number, by.number
        if a is not None and b is not None:
            return size(a // b) if b else _quotient(self, by)
        exact = _divided(self, by)
        return _quotient(self, by) if exact is None else exact

    @property
    def number(self) -> int | None:
        """The value of an integer without names; None: it has names or is a fraction."""
        if not self.terms:
            return 0
        monomial, value = self.terms[0]
        return int(value) if len(self.terms) == 1 and not monomial and value == int(value) else None

    @property
    def name(self) -> str | None:
        """The name if the size is a single name, else None."""
        if len(self.terms) != 1:
            return None
        (monomial, value), *_ = self.terms
        return monomial[0] if value == 1 and len(monomial) == 1 and isinstance(monomial[0], str) else None

    def names(self) -> frozenset[str]:
        """All names, including those inside quotients."""
        return frozenset(_names(self))

    def replace(self, by: Mapping[str, Size]) -> Size:
        """The polynomial with names replaced by sizes."""
        if not any(name in by for name in _names(self)):
            return self
        out = ZERO
        for monomial, value in self.terms:
            product: Size = Size((((), value),))
            for atom in monomial:
                product = product * _replaced(atom, by)
            out = out + product
        return out

    def value(self, at: Mapping[str, int]) -> int:
        """The number for given numbers of names.

        >>> size("2*n - m//2").value({"n": 5, "m": 7})
        7
        """
        total: Number = 0
        for monomial, coefficient in self.terms:
            product = coefficient
            for atom in monomial:
                if isinstance(atom, str):
                    product *= at[atom]
                else:
                    by = atom.denominator.value(at)
                    product *= atom.numerator.value(at) // by if by else 0
            total += product
        return int(total)

    def values(self, at: Mapping[str, npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
        """The numbers for arrays of numbers of names; a quotient by zero is zero."""
        import numpy as np

        total: npt.NDArray[np.int64] = np.zeros((), dtype=np.int64)
        for monomial, coefficient in self.terms:
            product: npt.NDArray[np.int64] = np.full((), int(coefficient), dtype=np.int64)
            for atom in monomial:
                if isinstance(atom, str):
                    product = product * at[atom]
                else:
                    product = product * (atom.numerator.values(at) // atom.denominator.values(at))
            total = total + product
        return total

    def __str__(self) -> str:
        if not self.terms:
            return "0"
        text = "".join(_monomial_text(monomial, value) for monomial, value in self.terms)
        return text.removeprefix("+")


def _monomial_text(monomial: Monomial, value: Number) -> str:
    head = "+" if value > 0 else "-"
    factors = [str(atom) for atom in monomial]
    if abs(value) != 1 or not factors:
        factors.insert(0, str(abs(value)))
    return head + "*".join(factors)


def _made(terms: Mapping[Monomial, Number]) -> Size:
    kept = [(monomial, value) for monomial, value in terms.items() if value]
    kept.sort(key=lambda item: (-len(item[0]), str(item[0])))
    return Size(tuple(kept))


def _quotient(numerator: Size, denominator: Size) -> Size:
    return Size((((Quotient(numerator, denominator),), 1),))


def _divided(numerator: Size, by: Size) -> Size | None:
    """The exact quotient if the divisor is a monomial that divides every term, else None."""
    if len(by.terms) != 1:
        return ONE if numerator == by else None
    (monomial, coefficient), *_ = by.terms
    out: dict[Monomial, Number] = {}
    for each, value in numerator.terms:
        rest = list(each)
        for atom in monomial:
            if atom not in rest:
                return None
            rest.remove(atom)
        fraction = Fraction(value) / Fraction(coefficient)
        if fraction.denominator != 1:
            return None
        out[tuple(rest)] = int(fraction)
    return _made(out)


def _names(given: Size) -> Iterator[str]:
    for monomial, _ in given.terms:
        for atom in monomial:
            if isinstance(atom, str):
                yield atom
            else:
                yield from _names(atom.numerator)
                yield from _names(atom.denominator)


def _replaced(atom: Atom, by: Mapping[str, Size]) -> Size:
    if isinstance(atom, str):
        return by.get(atom) or (ZERO if atom in by else Size((((atom,), 1),)))
    return atom.numerator.replace(by) // atom.denominator.replace(by)


def size(given: Size | Number | str) -> Size:
    """A size from a number or a text of names, integers, ``+ - * //`` and brackets.

    Raises:
        UserError: the text has another form.

    >>> str(size("2*(a + b) - a")), size("n*c//c") == size("n")
    ('a+2*b', True)
    """
    if isinstance(given, Size):
        return given
    if isinstance(given, int | Fraction):
        return Size((((), given),)) if given else ZERO
    try:
        return from_syntax(ast.parse(given.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _no_size(given) from None


def from_syntax(node: ast.expr) -> Size:
    """A size from the syntax tree of its text.

    Raises:
        UserError: the text has syntax that sizes do not allow.
    """
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value <= LARGEST:
        return size(node.value)
    if isinstance(node, ast.Name):
        return Size((((node.id,), 1),))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -from_syntax(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](from_syntax(node.left), from_syntax(node.right))
    raise _no_size(ast.unparse(node))


def _no_size(text: str) -> UserError:
    return UserError(f"{shorten(text)!r} is no size", hint="write names, whole numbers, + - * // and brackets")


_OPERATIONS: Final[dict[type, Callable[[Size, Size], Size]]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
}
LARGEST: Final = 10**6
"""Largest number in the text of a size."""
ZERO: Final = Size(())
ONE: Final = Size((((), 1),))


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on sizes: ``size == 0`` or ``size >= 0``."""

    size: Size
    equal: bool

    def holds(self, at: Mapping[str, int]) -> bool:
        """True if it holds for given numbers."""
        value = self.size.value(at)
        return value == 0 if self.equal else value >= 0

    def replace(self, by: Mapping[str, Size]) -> Condition:
        """The condition with names replaced."""
        return Condition(self.size.replace(by), self.equal)

    @property
    def certain(self) -> bool:
        """True if the signs of its coefficients show that it holds for all sizes of at least one.

        >>> Condition(size("a + b - 2"), equal=False).certain, Condition(size("a - b"), equal=False).certain
        (True, False)
        """
        if self.equal:
            return not self.size.terms
        least: Number = 0
        for monomial, value in self.size.terms:
            if monomial and (value < 0 or any(isinstance(atom, Quotient) for atom in monomial)):
                return False
            least += value
        return least >= 0

    def __str__(self) -> str:
        return f"{self.size} {'==' if self.equal else '>='} 0"


def equal(a: Size | int, b: Size | int) -> Condition:
    """The condition that two sizes are equal."""
    return Condition(size(a) - size(b), equal=True)


def at_least(a: Size | int, b: Size | int) -> Condition:
    """The condition that ``a`` is at least ``b``."""
    return Condition(size(a) - size(b), equal=False)


def solved(conditions: list[Condition]) -> dict[str, Size] | None:
    """Replacements that satisfy the linear equalities; None: they contradict each other.

    An equality is solved for a name that occurs once, with coefficient one or minus one, in no product.
    >>> {name: str(by) for name, by in (solved([equal(size("a"), size("b + 1"))]) or {}).items()}
    {'b': 'a-1'}
    """
    out: dict[str, Size] = {}
    for condition in conditions:
        left = condition.size.replace(out)
        if not condition.equal or not left.terms:
            continue
        if left.number is not None:
            return None
        name = _solvable(left)
        if name is None:
            continue
        coefficient = dict(left.terms)[(name,)]
        by = Size((((name,), 1),)) - left * Fraction(1, int(coefficient))
        by = Size(tuple((m, int(v) if v == int(v) else v) for m, v in by.terms))
        out = {each: value.replace({name: by}) for each, value in out.items()} | {name: by}
    return out


def _solvable(left: Size) -> str | None:
    every = list(_names(left))
    candidates = [
        monomial[0]
        for monomial, value in left.terms
        if len(monomial) == 1 and isinstance(monomial[0], str) and abs(value) == 1 and every.count(monomial[0]) == 1
    ]
    return max(candidates, default=None)
