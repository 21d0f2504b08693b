r"""The proof for all sizes, by cases, where the general one of rules does not close.

Programs that move pixels between images have floor quotients in their indices, which linear arithmetic knows nothing
of. They are taken apart: a size of which a rest is taken is written as $m q - r$ for every rest $r$; an index of the
output as $m j + a$ for every phase $a$, and its range is cut where a guard or a quotient changes, so that quotients are
numbers in each box; every place of the window is a product of its own. What is left are sums of products whose guards
are linear, as :mod:`steptime.lab.rules.verify_generic` compares them. Boxes from one border to the next cover an
axis in whatever order the borders are for some sizes, so that nothing is assumed of the order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Final

from steptime.errors import UserError
from steptime.lab.rules.forms import (
    Element,
    Elements,
    Form,
    Piece,
    Unprovable,
    inside,
    substituted,
)
from steptime.lab.rules.mutants.regions import long_division, ordered_points, thresholds
from steptime.lab.rules.rule import Rule
from steptime.lab.rules.sizes import ONE, Condition, Quotient, Size, size
from steptime.lab.rules.terms import Shape, Term, replaced
from steptime.lab.rules.verify_generic import Arithmetic, grouped

MOST_PARTS: Final = 32
"""Whole multiples of a size that an index is taken apart into."""
MOST_CASES: Final = 4096
STEPS: Final = (0, -1, 1, 2, 3)
"""Values that a quotient in a box is tried to be."""


class InRange(Elements):
    """Elements at indices that are in range, since what is out of range stands behind a guard that does not hold.

    An operator that looks at an element of a subterm names each coordinate again, with the range of its dim; what it
    stands for is put in afterwards. An index whose range is a whole multiple of a size is the sum of two.
    """

    def __init__(self, variables: Mapping[str, object]) -> None:
        super().__init__(variables)  # type: ignore[arg-type]
        self.parts: dict[str, tuple[str, ...]] = {}

    def fresh(self, extent: Size, name: str = "k") -> Size:
        """A new index; a sum of two where the extent is a whole multiple of a product of names."""
        times, one = multiple(extent)
        if times is None or one is None:
            return super().fresh(extent, name)
        outer, inner = super().fresh(size(times), name), super().fresh(one, name)
        made = outer * one + inner
        self.parts[str(made)] = tuple(each.name for each in (outer, inner) if each.name)
        return made

    def at(self, given: Term, index: Shape) -> Form:
        """The element of a term at an index, coordinates named again where they are not plain."""
        if not given.operators:
            return super().at(given, index)
        by: dict[str, Size] = {}
        named: list[Size] = []
        for each, dim in zip(index, self.dims(given), strict=True):
            plain = each.number is not None or (each.name in self.ranges and self.ranges[str(each.name)] == dim)
            coordinate = each if plain or self.within(each, dim) else Elements.fresh(self, dim, "u")
            if coordinate != each and coordinate.name:
                by[coordinate.name] = each
            named.append(coordinate)
        form = super().at(given, tuple(named))
        return tuple(substituted(piece, by) for piece in form) if by else form

    def quotient(self, numerator: Size, by: Size) -> Size:
        """A floor quotient by a polynomial, taken apart where the rest is in its range."""
        whole, rest = long_division(numerator, by) if by.number is None else (size(0), numerator)
        if self.within(rest, by):
            return whole
        for atom in _common(by) if len(by.terms) > 1 else ():
            one = Size((((atom,), 1),))
            exact = Size(tuple((m, v) for m, v in rest.terms if atom in m))
            if self.within(rest - exact, one):
                return whole + self.quotient(_over(exact, atom), _over(by, atom))
        return whole + super().quotient(rest, by) if len(by.terms) == 1 else whole + rest // by


def _common(of: Size) -> list[str | Quotient]:
    """Atoms of all terms."""
    first, *others = (monomial for monomial, _ in of.terms)
    return [atom for atom in dict.fromkeys(first) if all(atom in monomial for monomial in others)]


def _over(given: Size, atom: str | Quotient) -> Size:
    """A polynomial divided by an atom of all its terms."""
    out = size(0)
    for monomial, value in given.terms:
        at = monomial.index(atom)
        out = out + Size(((monomial[:at] + monomial[at + 1 :], value),))
    return out


def multiple(extent: Size) -> tuple[int | None, Size | None]:
    """The whole number and the product of names that an extent is, None where it is none.

    >>> multiple(size("3*c"))[0], multiple(size("c + 1"))[0]
    (3, None)
    """
    if len(extent.terms) != 1:
        return None, None
    (monomial, value), *_ = extent.terms
    if not monomial or not 1 < value <= MOST_PARTS or value != int(value):
        return None, None
    return int(value), Size(((monomial, 1),))


def divided(given: Size) -> Size:
    """A size whose quotients by numbers are taken apart: whole multiples of the divisor leave them.

    >>> str(divided(size("(2*h + 1)//2")))
    'h'
    """
    out = size(0)
    for monomial, value in given.terms:
        part: Size = Size((((), value),))
        for atom in monomial:
            part = part * (Size((((atom,), 1),)) if isinstance(atom, str) else _quotient(atom))
        out = out + part
    return out


def _quotient(atom: Quotient) -> Size:
    numerator, by = divided(atom.numerator), divided(atom.denominator)
    whole, rest = size(0), size(0)
    for monomial, value in numerator.terms:
        each = Size(((monomial, value),))
        number = by.number
        if number and value == int(value):
            whole = whole + Size(((monomial, int(value) // number),)) if int(value) // number else whole
            left = int(value) % number
            rest = rest + Size(((monomial, left),)) if left else rest
        else:
            rest = rest + each
    if by.number is None:
        more, rest = long_division(rest, by)
        whole = whole + more
    return whole + (rest // by if rest.terms else 0)


def proved_by_cases(rule: Rule, phases: int = 1) -> bool:
    """Whether both sides are shown to be equal for all sizes, by cases.

    Args:
        rule: of one output.
        phases: images of pixels of equal phase that a side makes along both dims of an image; one where it makes none.
    """
    try:
        return all(_proved(each, phases) for each in _by_rests(rule))
    except (Unprovable, UserError):
        return False


def _by_rests(rule: Rule) -> Iterator[Rule]:
    """The rule for every rest of the sizes that are divided by a number."""
    divisors: dict[str, int] = {}
    every = [each for side in (*rule.sources, *rule.targets) for term in side.walk() for each in term.attributes]
    for each in every:
        for numerator, number in _divisions(each):
            for name in numerator.names():
                divisors[name] = max(divisors.get(name, 1), number)
    for rests in product(*(range(number) for number in divisors.values())):
        by = {n: size(n) * m - r for (n, m), r in zip(divisors.items(), rests, strict=True)}
        sides = [tuple(_settled(replaced(t, {}, by)) for t in side) for side in (rule.sources, rule.targets)]
        variables = tuple(replace(v, dims=tuple(divided(d.replace(by)) for d in v.dims)) for v in rule.variables)
        where = tuple(Condition(divided(c.size.replace(by)), c.equal) for c in rule.where)
        yield replace(rule, variables=variables, sources=sides[0], targets=sides[1], where=where)


def _divisions(given: Size) -> Iterator[tuple[Size, int]]:
    for monomial, _ in given.terms:
        for atom in monomial:
            if isinstance(atom, Quotient):
                yield from _divisions(atom.numerator)
                if atom.denominator.number:
                    yield atom.numerator, atom.denominator.number


def _settled(given: Term) -> Term:
    """The term with its attributes taken apart."""
    from steptime.lab.rules.terms import VARIABLE, term

    if given.op == VARIABLE:
        return given
    return term(given.op, tuple(map(_settled, given.children)), tuple(map(divided, given.attributes)))


@dataclass(frozen=True, slots=True)
class _Axis:
    """One phase of an axis of the output: the index, the name in it, how many values the name has."""

    index: Size
    name: str | None
    extent: Size


def _proved(rule: Rule, phases: int) -> bool:
    (source,), (target,) = rule.sources, rule.targets
    shape = tuple(map(divided, Elements(rule.table).dims(source)))
    axes = [list(_axes(axis, extent, phases if axis > 1 else 1)) for axis, extent in enumerate(shape)]
    cases = list(product(*axes))
    return len(cases) <= MOST_CASES and all(_same(rule, source, target, case) for case in cases)


def _axes(axis: int, extent: Size, phases: int) -> Iterator[_Axis]:
    """The values of an index, by phase or by multiple of a size."""
    name = f"_j{axis}"
    times, one = multiple(extent)
    if phases > 1:
        for phase in range(phases):
            count = divided((extent - phase + (phases - 1)) // phases)
            yield _Axis(size(name) * phases + phase, name, count)
    elif times is not None and one is not None:
        yield from (_Axis(one * part + size(name), name, one) for part in range(times))
    elif extent == ONE:
        yield _Axis(size(0), None, ONE)
    else:
        yield _Axis(size(name), name, extent)


def _same(rule: Rule, source: Term, target: Term, case: tuple[_Axis, ...]) -> bool:
    elements = InRange(rule.table)
    elements.ranges |= {axis.name: axis.extent for axis in case if axis.name}
    index = tuple(axis.index for axis in case)
    forms = [_by_taps(elements.at(side, index), elements) for side in (source, target)]
    axes = {axis.name: axis for axis in case if axis.name}
    borders = {name: _borders(forms, axis, frozenset(axes)) for name, axis in axes.items()}
    spans = [list(pairwise(each)) for each in borders.values()]
    if _count(spans) > MOST_CASES:
        return False
    return all(_same_in(rule, forms, axes, dict(zip(borders, box, strict=True)), elements) for box in product(*spans))


def _count(spans: Iterable[list[tuple[Size, Size]]]) -> int:
    out = 1
    for each in spans:
        out *= len(each)
    return out


def _by_taps(form: Form, elements: InRange) -> Form:
    """Pieces without bound indices that have a number of values: one piece for each value."""
    out: list[Piece] = []
    for piece in form:
        plain = {n for each in piece.bounds for n in elements.parts.get(each, (each,))}
        few = sorted(n for n in plain if (elements.ranges[n].number or MOST_PARTS + 1) <= MOST_PARTS)
        guards = piece.guards | {g for n in plain for g in inside(size(n), elements.ranges[n])}
        bare = replace(piece, bounds=frozenset(plain - set(few)), guards=guards)
        for values in product(*(range(elements.ranges[n].number or 1) for n in few)):
            out += _kept(substituted(bare, dict(zip(few, map(size, values), strict=True))))
    return tuple(out)


def _kept(piece: Piece) -> list[Piece]:
    """The piece without guards that are numbers; none where one of them fails."""
    if any(g.number is not None and g.number < 0 for g in piece.guards):
        return []
    return [replace(piece, guards=frozenset(g for g in piece.guards if g.number is None))]


def _borders(forms: list[Form], axis: _Axis, names: frozenset[str]) -> tuple[Size, ...]:
    points: dict[Size, None] = {}
    for form in forms:
        for piece in form:
            for each in _expressions(piece):
                if each.names() & names and not any(n.startswith("_k") for n in each.names()):
                    found = thresholds(each, names)
                    points |= {divided(at): None for name, at in found if name == axis.name and not at.names() & names}
    return ordered_points(axis.extent, points, SIZES(axis.extent, points))


def SIZES(extent: Size, points: Iterable[Size]) -> tuple[dict[str, int], ...]:
    """Numbers for all names in some sizes: their order is no assumption, so that any do."""
    names = sorted(extent.names() | {name for each in points for name in each.names()})
    return tuple({name: value + number for number, name in enumerate(names)} for value in (9, 14, 23))


def _expressions(piece: Piece) -> Iterator[Size]:
    quotients = [q for g in piece.guards for q in _inner(g)]
    for factor in piece.factors:
        for coordinate in factor.index if isinstance(factor, Element) else ():
            quotients += _inner(coordinate)
    yield from piece.guards
    for atom in quotients:
        yield from (atom.numerator - atom.denominator * step for step in STEPS)


def _inner(given: Size) -> list[Quotient]:
    out: list[Quotient] = []
    for monomial, _ in given.terms:
        for atom in monomial:
            if isinstance(atom, Quotient):
                out += [*_inner(atom.numerator), atom]
    return out


def _same_in(
    rule: Rule,
    forms: list[Form],
    axes: Mapping[str, _Axis],
    box: Mapping[str, tuple[Size, Size]],
    elements: InRange,
) -> bool:
    by, facts = {}, rule.needs()
    for name, (start, end) in box.items():
        single = end - start == ONE
        by[name] = start if single else start + size(name)
        facts += [Condition(end - 1 - by[name], equal=False), Condition(by[name], equal=False)]
        facts.append(Condition(axes[name].extent - 1 - by[name], equal=False))
    facts += [Condition(d - 1, equal=False) for v in rule.variables for d in v.dims if d.number is None]
    facts = [each for each in dict.fromkeys(facts) if not each.certain]
    if any(each.size.number is not None for each in facts):
        return True  # No sizes have this box.
    known = Arithmetic(facts, frozenset(rule.names), frozenset(box))
    sides = [grouped(_resolved(form, by, known), known) for form in forms]
    left, right = sides
    return all(
        sorted(map(str, left.get(key, []))) == sorted(map(str, right.get(key, [])))
        or known.equal_sums(left.get(key, []), right.get(key, []))
        for key in sorted({*left, *right})
    )


def _resolved(form: Form, by: Mapping[str, Size], known: Arithmetic) -> Form:
    """The form in a box, quotients as the numbers that they are there."""
    out: list[Piece] = []
    for piece in form:
        here = substituted(piece, by)
        guards = frozenset(_numbered(each, known) for each in here.guards)
        factors = tuple(
            Element(f.name, tuple(_numbered(each, known) for each in f.index)) if isinstance(f, Element) else f
            for f in here.factors
        )
        out += _kept(replace(here, guards=guards, factors=factors))
    return tuple(out)


def _numbered(given: Size, known: Arithmetic) -> Size:
    """A size whose quotients are numbers where the facts say which."""
    out = size(0)
    for monomial, value in divided(given).terms:
        part: Size = Size((((), value),))
        for atom in monomial:
            part = part * (Size((((atom,), 1),)) if isinstance(atom, str) else _step(atom, known))
        out = out + part
    return out


def _step(atom: Quotient, known: Arithmetic) -> Size:
    numerator, by = _numbered(atom.numerator, known), _numbered(atom.denominator, known)
    for step in STEPS:
        rest = numerator - by * step
        if known.implied(rest, ()) and known.implied(by - 1 - rest, ()):
            return size(step)
    return numerator // by
