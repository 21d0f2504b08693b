"""Number systems in which terms are evaluated: residues, a pair of fields with exp, exact polynomials, floats.

Arrays have any leading dims; axes of terms count from the last dim. A function without axioms is a fixed random cubic
of residues, and a symbol of its own for polynomials.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import cache, lru_cache
from itertools import count
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
MERSENNE: Final = 2**31 - 1
SAFE: Final = 2147483579
"""A prime p for which (p - 1) / 2 is also prime; exponents are elements of this second field."""


class Domain(Protocol):
    """Arithmetic on arrays of one number system."""

    lead: int

    def add(self, a: Array, b: Array) -> Array:
        """Sum, with broadcasting."""

    def mul(self, a: Array, b: Array) -> Array:
        """Product, with broadcasting."""

    def total(self, a: Array, axis: int) -> Array:
        """Sum along an axis, which is kept with size one."""

    def largest(self, a: Array, axis: int) -> Array:
        """Maximum along an axis, which is kept with size one; proofs only use that it is a semilattice."""

    def apply(self, name: str, a: Array) -> Array:
        """A unary function, applied to each element."""

    def full(self, shape: tuple[int, ...], value: int) -> Array:
        """An array of one number."""

    def lowest(self, shape: tuple[int, ...]) -> Array:
        """An array that no maximum selects, for the border of a pool."""

    def random(self, shape: tuple[int, ...], name: str, seed: int) -> Array:
        """Random values of a variable."""

    def same(self, a: Array, b: Array) -> bool:
        """True if two results are equal."""


@lru_cache(maxsize=4096)
def _cubic(name: str) -> tuple[int, int, int, int]:
    seed = int.from_bytes(name.encode(), "little") % (2**63)
    a, b, c, d = np.random.default_rng(seed).integers(1, 2**30, 4).tolist()
    return a, b, c, d


class Residues:
    """Integers modulo a prime of 31 bits."""

    lead = 0

    def __init__(self, prime: int = MERSENNE) -> None:
        self.prime = prime

    def _mod(self, a: Array) -> Array:
        return a % self.prime

    def add(self, a: Array, b: Array) -> Array:
        """Sum modulo the prime."""
        return self._mod(a + b)

    def mul(self, a: Array, b: Array) -> Array:
        """Product modulo the prime; both factors are below 2^31."""
        return self._mod(a * b)

    def total(self, a: Array, axis: int) -> Array:
        """Sum along an axis."""
        return self._mod(a.sum(axis=axis, keepdims=True))

    def largest(self, a: Array, axis: int) -> Array:
        """The largest residue, which is only associative, commutative and idempotent."""
        return np.asarray(a.max(axis=axis, keepdims=True))

    def apply(self, name: str, a: Array) -> Array:
        """Negation, inverse, or the random cubic for a name."""
        if name == "neg":
            return self._mod(-a)
        if name == "recip":
            return self._power(a)
        out = np.zeros_like(a)
        for coefficient in _cubic(name):
            out = self._mod(self._mod(out * a) + coefficient)
        return out

    def _power(self, a: Array) -> Array:
        return _powers(a, self.prime - 2, self.prime)

    def full(self, shape: tuple[int, ...], value: int) -> Array:
        """An array of one residue."""
        return np.full(shape, value % self.prime, dtype=np.int64)

    def lowest(self, shape: tuple[int, ...]) -> Array:
        """An array below every residue."""
        return np.full((2,) * self.lead + shape, -1, dtype=np.int64)

    def random(self, shape: tuple[int, ...], name: str, seed: int) -> Array:
        """Uniform residues."""
        key = int.from_bytes(name.encode(), "little") % (2**31)
        return np.random.default_rng((seed, key)).integers(0, self.prime, shape, dtype=np.int64)

    def same(self, a: Array, b: Array) -> bool:
        """Equality of every element."""
        return a.shape == b.shape and bool((a == b).all())


def _powers(a: Array, exponent: int, prime: int) -> Array:
    out, square = np.ones_like(a), a
    while exponent:
        if exponent & 1:
            out = out * square % prime
        square, exponent = square * square % prime, exponent >> 1
    return out


class FieldPair(Residues):
    """Pairs of residues modulo p = SAFE and q = (p - 1) / 2, along a first axis of size two.

    The exp of a pair is a root of unity of order q to the power of the second part, so exp(a + b) = exp(a) exp(b)
    holds. The second part of an exp is unknown; a random cubic takes its place.
    """

    lead = 1
    order: Final = (SAFE - 1) // 2

    def _mod(self, a: Array) -> Array:
        primes = np.array([SAFE, self.order], dtype=np.int64).reshape(2, *[1] * (a.ndim - 1))
        return a % primes

    def apply(self, name: str, a: Array) -> Array:
        """Exp by the root of unity; other functions as residues."""
        if name != "exp":
            return super().apply(name, a)
        out = super().apply("exp of exp", a)
        power, exponent = 4, a[1]
        first = np.ones_like(exponent)
        for bit in range(30):
            first = np.where(exponent >> bit & 1, first * power % SAFE, first)
            power = power * power % SAFE
        return np.stack([first, out[1]])

    def _power(self, a: Array) -> Array:
        return np.stack([_powers(a[0], SAFE - 2, SAFE), _powers(a[1], self.order - 2, self.order)])

    def full(self, shape: tuple[int, ...], value: int) -> Array:
        """An array of one number in both fields."""
        return self._mod(np.full((2, *shape), value, dtype=np.int64))

    def random(self, shape: tuple[int, ...], name: str, seed: int) -> Array:
        """Uniform residues, independent in both fields."""
        return self._mod(super().random((2, *shape), name, seed))

    def same(self, a: Array, b: Array) -> bool:
        """Equality of the first parts; after an exp the second part is not the value."""
        return a.shape == b.shape and bool((a[0] == b[0]).all())


FUNCTIONS: Final[dict[str, tuple[str, Callable[[Array], Array]]]] = {
    "relu": ("aten.relu", lambda a: np.maximum(a, 0.0)),
    "exp": ("aten.exp", np.exp),
    "tanh": ("aten.tanh", np.tanh),
    "sigmoid": ("aten.sigmoid", lambda a: 1 / (1 + np.exp(-a))),
    "gelu": ("aten.gelu", lambda a: 0.5 * a * (1 + np.vectorize(math.erf, otypes=[float])(a / math.sqrt(2.0)))),
    "silu": ("aten.silu", lambda a: a / (1 + np.exp(-a))),
    "sqrt": ("aten.sqrt", lambda a: np.sqrt(np.abs(a))),
    "neg": ("aten.neg", np.negative),
    "recip": ("aten.reciprocal", lambda a: 1 / a),
}
"""Unary functions: name in PyTorch, and function of floats. ``sqrt`` takes the absolute value first."""


class Floats:
    """64-bit floating-point numbers, which equal the results of a device up to rounding."""

    lead = 0
    tolerance = 1e-9

    def add(self, a: Array, b: Array) -> Array:
        """Sum."""
        return np.asarray(a + b)

    def mul(self, a: Array, b: Array) -> Array:
        """Product."""
        return np.asarray(a * b)

    def total(self, a: Array, axis: int) -> Array:
        """Sum along an axis."""
        return np.asarray(a.sum(axis=axis, keepdims=True))

    def largest(self, a: Array, axis: int) -> Array:
        """Maximum along an axis."""
        return np.asarray(a.max(axis=axis, keepdims=True))

    def apply(self, name: str, a: Array) -> Array:
        """The function of floats."""
        return np.asarray(FUNCTIONS[name][1](a))

    def full(self, shape: tuple[int, ...], value: int) -> Array:
        """An array of one number."""
        return np.full(shape, float(value))

    def lowest(self, shape: tuple[int, ...]) -> Array:
        """Minus infinity."""
        return np.full(shape, -np.inf)

    def random(self, shape: tuple[int, ...], name: str, seed: int) -> Array:
        """Normal numbers."""
        key = int.from_bytes(name.encode(), "little") % (2**31)
        return np.random.default_rng((seed, key)).standard_normal(shape)

    def same(self, a: Array, b: Array) -> bool:
        """Equality up to rounding, relative to the largest element."""
        if a.shape != b.shape:
            return False
        scale = max(1.0, float(np.max(np.abs(a), initial=0.0)))
        return bool(np.allclose(a, b, rtol=0.0, atol=self.tolerance * scale))


Powers: TypeAlias = tuple[tuple[int, int], ...]
_ATOMS: dict[object, int] = {}
_NUMBERS = count()


def _atom(key: object) -> int:
    if key not in _ATOMS:
        _ATOMS[key] = next(_NUMBERS)
    return _ATOMS[key]


class Polynomial:
    """A polynomial with exact coefficients, in which exponents may be negative and unknown functions are symbols.

    The exp of a sum is the product of the exps of its terms. The inverse of a sum is taken after its common factor is
    extracted. With both, softmax is invariant under shifts in exact arithmetic.
    """

    __slots__ = ("terms",)

    def __init__(self, terms: dict[Powers, Fraction | int]) -> None:
        self.terms = terms

    def __add__(self, other: Polynomial) -> Polynomial:
        out = dict(self.terms)
        for powers, value in other.terms.items():
            total = out.get(powers, 0) + value
            if total:
                out[powers] = total
            else:
                del out[powers]
        return Polynomial(out)

    def __mul__(self, other: Polynomial) -> Polynomial:
        out: dict[Powers, Fraction | int] = {}
        for a, x in self.terms.items():
            for b, y in other.terms.items():
                powers = _product(a, b)
                out[powers] = out.get(powers, 0) + x * y
        return Polynomial({powers: value for powers, value in out.items() if value})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Polynomial) and self.terms == other.terms

    def key(self) -> frozenset[tuple[Powers, Fraction | int]]:
        """Key that is equal for equal polynomials."""
        return frozenset(self.terms.items())

    __hash__ = None  # type: ignore[assignment]


@cache
def _product(a: Powers, b: Powers) -> Powers:
    if not a or not b:
        return a or b
    powers = dict(a)
    for atom, power in b:
        powers[atom] = powers.get(atom, 0) + power
    return tuple(sorted((atom, power) for atom, power in powers.items() if power))


def _function(name: str, of: Polynomial) -> Polynomial:
    if name == "neg":
        return Polynomial({powers: -value for powers, value in of.terms.items()})
    if name == "exp":
        out = Polynomial({(): 1})
        for powers, value in of.terms.items():
            whole = isinstance(value, int) or value.denominator == 1
            key = _atom(("exp", powers if whole else (powers, value)))
            out = out * Polynomial({((key, int(value) if whole else 1),): 1})
        return out
    if name == "recip" and of.terms:
        return _inverse(of)
    return Polynomial({((_atom((name, of.key())), 1),): 1})


def _inverse(of: Polynomial) -> Polynomial:
    lowest = dict(next(iter(of.terms)))
    for powers in of.terms:
        here = dict(powers)
        lowest = {atom: min(lowest.get(atom, 0), here.get(atom, 0)) for atom in {*lowest, *here}}
    common = tuple(sorted((atom, -power) for atom, power in lowest.items() if power))
    first = min(of.terms.items(), key=lambda item: _product(item[0], common))[1]
    rest = Polynomial(
        {_product(powers, common): Fraction(value) / Fraction(first) for powers, value in of.terms.items()}
    )
    scale = Polynomial({common: Fraction(1) / Fraction(first)})
    if rest.terms == {(): 1}:
        return scale
    return scale * Polynomial({((_atom(("recip", rest.key())), 1),): 1})


class Polynomials:
    """Arrays of polynomials in the elements of the variables; equality means equality for all values."""

    lead = 0

    def add(self, a: Array, b: Array) -> Array:
        """Sum."""
        return np.asarray(a + b)

    def mul(self, a: Array, b: Array) -> Array:
        """Product."""
        return np.asarray(a * b)

    def total(self, a: Array, axis: int) -> Array:
        """Sum along an axis."""
        out = np.add.reduce(a, axis=axis, keepdims=True, initial=Polynomial({}))
        return np.asarray(out)

    def largest(self, a: Array, axis: int) -> Array:
        """A symbol for the set of elements; the maximum of maxima is the symbol of the union."""
        moved = np.moveaxis(a, axis, -1)
        out = np.empty(moved.shape[:-1], dtype=object)
        for at in np.ndindex(*out.shape):
            out[at] = _largest_of([each for each in moved[at] if each is not None])
        return np.expand_dims(out, axis)

    def apply(self, name: str, a: Array) -> Array:
        """The function, or a symbol for it."""
        out = np.empty(a.shape, dtype=object)
        for at in np.ndindex(*a.shape):
            element: Polynomial = a[at]  # type: ignore[assignment]
            out[at] = _function(name, element)
        return out

    def full(self, shape: tuple[int, ...], value: int) -> Array:
        """An array of one number."""
        out = np.empty(shape, dtype=object)
        out.fill(Polynomial({(): value} if value else {}))
        return out

    def lowest(self, shape: tuple[int, ...]) -> Array:
        """An array of None, which a maximum ignores."""
        return np.full(shape, None, dtype=object)

    def random(self, shape: tuple[int, ...], name: str, seed: int) -> Array:
        """An array with a distinct symbol for each element."""
        out = np.empty(shape, dtype=object)
        for at in np.ndindex(*shape):
            out[at] = Polynomial({((_atom((name, at)), 1),): 1})
        return out

    def same(self, a: Array, b: Array) -> bool:
        """Equality of every polynomial."""
        return a.shape == b.shape and all(x == y for x, y in zip(a.flat, b.flat, strict=True))


_SETS: dict[int, frozenset[object]] = {}


def _largest_of(elements: list[Polynomial]) -> Polynomial:
    members: set[object] = set()
    for each in elements:
        (powers, value), *more = each.terms.items() or [((), 0)]
        atom = powers[0][0] if len(powers) == 1 and value == 1 and not more and powers[0][1] == 1 else None
        members |= _SETS.get(atom, frozenset([each.key()])) if atom is not None else {each.key()}
    if len(members) == 1:
        return elements[0]
    atom = _atom(("max", frozenset(members)))
    _SETS[atom] = frozenset(members)
    return Polynomial({((atom, 1),): 1})
