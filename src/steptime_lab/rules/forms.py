"""Elements of tensors as sums of guarded products, for all sizes at once.

An element at a symbolic index is a sum of monomials. A monomial has a coefficient, guards (it counts only where these
sizes are at least zero), bound indices that are summed over, and factors: elements of variables or functions of other
sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import permutations, product
from math import factorial, prod
from typing import Final, TypeAlias

from steptime_lab.rules.sizes import ONE, ZERO, Quotient, Size, size
from steptime_lab.rules.terms import VARIABLE, Shape, Term, Variables, shape_of

MOST_ORDERS: Final = 24
"""Largest number of orders of similar factors that are tried for the canonical form of a monomial."""
MOST_PIECES: Final = 64


class Unprovable(Exception):
    """The proof method does not apply to a rule, which may be true or false."""


@dataclass(frozen=True, slots=True)
class Element:
    """The element of a variable at an index."""

    name: str
    index: Shape

    def __str__(self) -> str:
        return f"{self.name}({','.join(map(str, self.index))})"


@dataclass(frozen=True, slots=True)
class Call:
    """A function of a sum; ``max`` is over its bound indices and pieces; ``inv`` is of a size."""

    function: str
    of: Form

    def __str__(self) -> str:
        return f"{self.function}<{'+'.join(sorted(map(str, self.of)))}>"


Factor: TypeAlias = Element | Call


@dataclass(frozen=True, slots=True)
class Piece:
    """One monomial of a form; in a ``max`` its coefficient is one, and its factor ``value`` holds the sum."""

    coefficient: Size = ONE
    guards: frozenset[Size] = frozenset()
    bounds: frozenset[str] = frozenset()
    factors: tuple[Factor, ...] = ()

    def __str__(self) -> str:
        guards = ";".join(sorted(map(str, self.guards)))
        return f"{self.coefficient}[{guards}]{'*'.join(map(str, self.factors))}"


Form: TypeAlias = tuple[Piece, ...]


class Elements:
    """Elements of the terms of one rule."""

    def __init__(self, variables: Variables) -> None:
        self.variables = variables
        self.ranges: dict[str, Size] = {}
        self._shapes: dict[Term, Shape] = {}

    def dims(self, given: Term) -> Shape:
        """Dims of a term."""
        return shape_of(given, self.variables, self._shapes, [])

    def fresh(self, extent: Size, name: str = "k") -> Size:
        """A new index from zero to below an extent; zero if the extent is one."""
        if extent == ONE:
            return ZERO
        name = f"_{name}{len(self.ranges)}"
        self.ranges[name] = extent
        return size(name)

    def at(self, given: Term, index: Shape) -> Form:
        """The element of a term at an index."""
        from steptime_lab.rules.operators import OPERATORS

        if given.op == VARIABLE:
            dims = self.dims(given)
            return (Piece(factors=(Element(given.name, clipped(index, dims)),)),)
        return OPERATORS[given.op].element(self, given, index)

    def quotient(self, numerator: Size, by: Size) -> Size:
        """A floor quotient, split if the remainder is provably below the divisor.

        floor((c u + r) / (c v)) is floor(u / v) if 0 <= r < c.
        """
        atoms, times = by.terms[0] if len(by.terms) == 1 else ((), 1)
        for atom, number in product(atoms, sorted({1, int(times)})):
            common = Size((((atom,), number),))
            exact = Size(tuple((m, v) for m, v in numerator.terms if atom in m and v % number == 0))
            if common != by and self.within(numerator - exact, common):
                return self.quotient(exact // common, by // common)
        whole, rest = ZERO, ZERO
        for monomial, value in numerator.terms:
            each = Size(((monomial, value),))
            part = each // by
            whole, rest = (whole + part, rest) if part * by == each else (whole, rest + each)
        if self.within(rest, by):
            return whole
        return whole + rest // by

    def within(self, rest: Size, by: Size) -> bool:
        """True if the ranges of its indices imply that a size is from zero to below ``by``."""
        if any(value < 0 for _, value in rest.terms):
            return False
        top = rest.replace({name: self.ranges[name] - 1 for name in rest.names() if name in self.ranges})
        return nonnegative(by - 1 - top, frozenset())


def clipped(index: Shape, dims: Shape) -> Shape:
    """The index into a broadcast tensor: its last dims, with zero where a dim is one.

    >>> [str(i) for i in clipped((size("i"), size("j")), (ONE,))]
    ['0']
    """
    return tuple(ZERO if dim == ONE else i for i, dim in zip(index[len(index) - len(dims) :], dims, strict=True))


def nonnegative(given: Size, zero_based: frozenset[str]) -> bool:
    """True if a size is at least zero when all names are at least one, or zero for those in ``zero_based``."""
    least: int | Fraction = 0
    for monomial, value in given.terms:
        if monomial and (value < 0 or any(isinstance(atom, Quotient) for atom in monomial)):
            return False
        if not any(atom in zero_based for atom in monomial):
            least += value
    return least >= 0


def inside(index: Size, extent: Size) -> frozenset[Size]:
    """Guards that keep an index in its range."""
    return frozenset((index, extent - 1 - index))


def guarded(form: Form, guards: Iterable[Size]) -> Form:
    """The form where the guards hold, and zero elsewhere."""
    more = frozenset(each for each in guards if each.number is None or each.number < 0)
    if any(each.number is not None for each in more):
        return ()
    return tuple(replace(piece, guards=piece.guards | more) for piece in form) if more else form


def summed(form: Form, index: Size, extent: Size) -> Form:
    """The sum over an index from zero to below an extent."""
    if extent == ONE:
        return form
    name = str(index)
    return tuple(
        replace(piece, bounds=piece.bounds | {name}, guards=piece.guards | inside(index, extent)) for piece in form
    )


def multiplied(a: Form, b: Form) -> Form:
    """The product of two forms, whose bound indices have distinct names."""
    return tuple(
        Piece(x.coefficient * y.coefficient, x.guards | y.guards, x.bounds | y.bounds, x.factors + y.factors)
        for x in a
        for y in b
    )


def scaled(form: Form, by: Size) -> Form:
    """The form times a size."""
    return tuple(replace(piece, coefficient=piece.coefficient * by) for piece in form)


def cases(form: Form) -> list[tuple[frozenset[Size], Form]]:
    """Case distinction over the guards without a bound index: pairs of guards and the form where they hold.

    Raises:
        Unprovable: there are too many cases.
    """
    free = sorted({guard for piece in form for guard in piece.guards if not guard.names() & piece.bounds}, key=str)
    if 2 ** len(free) > MOST_PIECES:
        raise Unprovable("too many cases")
    out: list[tuple[frozenset[Size], Form]] = []
    for chosen in product((True, False), repeat=len(free)):
        false = {guard for guard, yes in zip(free, chosen, strict=True) if not yes}
        guards = frozenset(-guard - 1 if guard in false else guard for guard in free)
        kept = tuple(replace(p, guards=p.guards - frozenset(free)) for p in form if not p.guards & false)
        if not contradictory(guards):
            out.append((guards, kept))
    return out


def contradictory(guards: frozenset[Size]) -> bool:
    """True if the sum of two guards shows that they exclude each other."""
    return any((number := (a + b).number) is not None and number < 0 for a in guards for b in guards)


def applied(function: str, form: Form) -> Form:
    """A function of a form, case by case."""
    if function == "neg":
        return scaled(form, size(-1))
    if function == "recip":
        return _reciprocal(form)
    if function == "exp":
        return tuple(piece for guards, of in cases(form) for piece in guarded(_exp(of), guards))
    return tuple(Piece(guards=guards, factors=(Call(function, of),)) for guards, of in cases(form))


def _reciprocal(form: Form) -> Form:
    """One over a form; factors common to all its pieces and independent of bound indices are extracted."""
    out: list[Piece] = []
    for guards, of in cases(form):
        common = [f for f in of[0].factors if all(f in p.factors for p in of)] if of else []
        common = [f for f in common if not any(c.names() & p.bounds for c in coordinates(f) for p in of)]
        rest = tuple(replace(p, factors=tuple(f for f in p.factors if f not in common)) for p in of)
        calls = [_inverted(factor) for factor in common]
        calls += [] if rest == (Piece(),) else [Call("recip", rest)]
        out += guarded((Piece(factors=tuple(calls)),), guards)
    return tuple(out)


def _inverted(factor: Factor) -> Factor:
    """One over a factor; for an inverse, its argument."""
    if isinstance(factor, Call) and factor.function == "recip":
        (piece, *more) = factor.of
        if not more and piece == Piece(factors=piece.factors) and len(piece.factors) == 1:
            return piece.factors[0]
    return Call("recip", (Piece(factors=(factor,)),))


def _exp(form: Form) -> Form:
    """Exp of a sum of unguarded monomials is the product of their exps."""
    return (Piece(factors=tuple(Call("exp", (piece,)) for piece in form)),)


def largest(form: Form, indices: Mapping[str, Size]) -> Form:
    """The maximum over indices with extents, as a set of pieces in which nested sets are merged."""
    names = frozenset(indices)
    ranges = frozenset(guard for name, extent in indices.items() for guard in inside(size(name), extent))
    outer = frozenset(g for piece in form for g in piece.guards if not g.names() & (names | piece.bounds))
    if outer:
        out: list[Piece] = []
        for guards, of in _outer_cases(form, outer):
            out += guarded(largest(of, indices), guards)
        return tuple(out)
    members: list[Piece] = []
    for guards, of in cases(form):
        for piece in _members(of):
            members.append(replace(piece, guards=piece.guards | guards | ranges, bounds=piece.bounds | names))
    return (Piece(factors=(Call("max", tuple(members)),)),)


def _outer_cases(form: Form, outer: frozenset[Size]) -> list[tuple[frozenset[Size], Form]]:
    out = []
    for chosen in product((True, False), repeat=len(outer)):
        false = {g for g, yes in zip(sorted(outer, key=str), chosen, strict=True) if not yes}
        guards = frozenset(-g - 1 if g in false else g for g in outer)
        if not contradictory(guards):
            out.append((guards, tuple(replace(p, guards=p.guards - outer) for p in form if not p.guards & false)))
    return out


def _members(of: Form) -> Form:
    """A value as members of a set: those of a plain maximum, else the value itself."""
    if len(of) == 1 and of[0].coefficient == ONE and not of[0].guards and not of[0].bounds and len(of[0].factors) == 1:
        factor = of[0].factors[0]
        if isinstance(factor, Call) and factor.function == "max":
            return factor.of
    return (Piece(factors=(Call("value", of),)),)


def renamed(factor: Factor, by: Mapping[str, Size]) -> Factor:
    """A factor with indices replaced."""
    if isinstance(factor, Element):
        return Element(factor.name, tuple(each.replace(by) for each in factor.index))
    return Call(factor.function, tuple(substituted(piece, by) for piece in factor.of))


def substituted(piece: Piece, by: Mapping[str, Size]) -> Piece:
    """A piece with indices replaced everywhere."""
    factors = tuple(sorted((renamed(each, by) for each in piece.factors), key=str))
    return Piece(piece.coefficient.replace(by), frozenset(g.replace(by) for g in piece.guards), piece.bounds, factors)


def coordinates(factor: Factor) -> list[Size]:
    """Indices of all elements in a factor, in order."""
    if isinstance(factor, Element):
        return list(factor.index)
    return [each for piece in factor.of for inner in piece.factors for each in coordinates(inner)]


Simplify: TypeAlias = Callable[[frozenset[Size]], frozenset[Size] | None]
"""Function that removes implied guards; None: they exclude each other."""


def canonical(piece: Piece, simplify: Simplify, depth: int = 0, member: bool = False) -> Piece | None:
    """The canonical form of a piece, in which bound indices are named by position: renaming and shifting has no effect.

    None: its guards exclude each other. A ``member`` of a maximum counts once, even if it occurs several times.

    Raises:
        Unprovable: there are too many similar factors.
    """
    piece = pinned(piece)
    factors = tuple(_canonical_call(each, simplify, depth + 1) for each in piece.factors)
    groups: dict[str, list[Factor]] = {}
    for factor in sorted(factors, key=lambda f: _masked(f, piece.bounds)):
        groups.setdefault(_masked(factor, piece.bounds), []).append(factor)
    if prod(factorial(len(group)) for group in groups.values()) > MOST_ORDERS:
        raise Unprovable("too many similar factors")
    orders = product(*(permutations(group) for group in groups.values()))
    if not piece.bounds:
        orders = iter([tuple(tuple(group) for group in groups.values())])  # type: ignore[assignment]
    found = [
        _named(replace(piece, factors=tuple(f for g in each for f in g)), simplify, depth, member) for each in orders
    ]
    return min((each for each in found if each is not None), key=str, default=None)


def pinned(piece: Piece) -> Piece:
    """The piece without bound indices that two opposite guards fix at one value."""
    for guard in sorted(piece.guards, key=str):
        if -guard not in piece.guards:
            continue
        for monomial, value in guard.terms:
            name = monomial[0] if len(monomial) == 1 else None
            if name in piece.bounds and isinstance(name, str) and abs(value) == 1:
                at = size(name) - guard * int(value)
                out = substituted(replace(piece, guards=piece.guards - {guard, -guard}), {name: at})
                return pinned(replace(out, bounds=out.bounds - {name}))
    return piece


def _canonical_call(factor: Factor, simplify: Simplify, depth: int) -> Factor:
    if isinstance(factor, Element) or factor.function == "inv":
        return factor
    largest_of = factor.function == "max"
    pieces = [each for piece in factor.of if (each := canonical(piece, simplify, depth, largest_of)) is not None]
    if largest_of:
        members = sorted(set(pieces), key=str)
        kept = [m for m in members if not any(_contains(other, m, simplify) for other in members if other is not m)]
        return Call("max", tuple(kept))
    return Call(factor.function, tuple(sorted(collected(pieces), key=str)))


def collected(pieces: Iterable[Piece]) -> list[Piece]:
    """Pieces with equal guards and factors added up."""
    sums: dict[tuple[frozenset[Size], frozenset[str], tuple[Factor, ...]], Size] = {}
    for piece in pieces:
        key = (piece.guards, piece.bounds, piece.factors)
        sums[key] = sums.get(key, ZERO) + piece.coefficient
    return [Piece(value, *key) for key, value in sums.items() if value.terms]


def _contains(many: Piece, one: Piece, simplify: Simplify) -> bool:
    """True if a member of a maximum is an instance of another member for some values of its bound indices."""
    if not many.bounds or len(one.bounds) >= len(many.bounds):
        return False
    left, right = ([c for factor in piece.factors for c in coordinates(factor)] for piece in (many, one))
    by = {a.name: b for a, b in zip(left, right, strict=False) if a.name in many.bounds and a.name}
    if by.keys() != many.bounds or len(left) != len(right):
        return False
    there = substituted(many, by)
    return there.factors == one.factors and simplify(there.guards | one.guards) == simplify(one.guards)


def _masked(factor: Factor, bounds: frozenset[str]) -> str:
    return str(renamed(factor, dict.fromkeys(bounds, size("__"))))


def _named(piece: Piece, simplify: Simplify, depth: int, member: bool) -> Piece | None:
    """Replace bound indices one after another by the coordinate in which each has a factor of one or minus one."""
    unsolved, by, names = set(piece.bounds), dict[str, Size](), list[str]()
    progress = True
    while progress and unsolved:
        progress = False
        for coordinate in (c.replace(by) for factor in piece.factors for c in coordinates(factor)):
            solvable = [
                m[0]
                for m, v in coordinate.terms
                if len(m) == 1 and isinstance(m[0], str) and m[0] in unsolved and abs(v) == 1
            ]
            solvable = [n for n in solvable if sum(n in Size(((m, v),)).names() for m, v in coordinate.terms) == 1]
            if not solvable:
                continue
            name = min(solvable) if len(solvable) == 1 else solvable[0]
            new = f"b{depth}_{len(names)}"
            sign = dict(coordinate.terms)[(name,)]
            value = (size(new) - coordinate) * int(sign) + size(name)
            by = {each: old.replace({name: value}) for each, old in by.items()} | {name: value}
            names.append(new)
            unsolved.discard(name)
            progress = True
            break
    out = substituted(replace(piece, bounds=frozenset(names) | unsolved), by)
    guards = simplify(out.guards)
    if guards is None:
        return None
    coefficient = out.coefficient
    for name in sorted(unsolved):
        mine = [guard for guard in guards if name in guard.names()]
        extent = _extent(mine, name)
        if extent is None:
            continue
        guards, coefficient = guards - frozenset(mine), coefficient if member else coefficient * extent
        out = replace(out, bounds=out.bounds - {name})
    return replace(out, guards=guards, coefficient=coefficient)


def _extent(guards: list[Size], name: str) -> Size | None:
    """Number of values of an index that no factor contains, if its two guards are a plain range; else None."""
    index = size(name)
    if len(guards) != 2 or index not in guards:
        return None
    other = next(guard for guard in guards if guard != index)
    top = other + index
    return None if name in top.names() or not nonnegative(top, frozenset()) else top + 1


def unit(piece: Piece) -> Piece:
    """The piece with sizes and factors cancelled against their inverses."""
    coefficient, kept = piece.coefficient, list[Factor]()
    rest = list(piece.factors)
    for factor in piece.factors:
        inverted = Call("recip", (Piece(factors=(factor,)),))
        if inverted in rest and factor in rest:
            rest.remove(inverted)
            rest.remove(factor)
    for factor in rest:
        if isinstance(factor, Call) and factor.function == "inv":
            by = factor.of[0].coefficient
            part = coefficient // by
            if part * by == coefficient:
                coefficient = part
                continue
        kept.append(factor)
    return replace(piece, coefficient=coefficient, factors=tuple(kept))
