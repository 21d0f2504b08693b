r"""Proofs for all sizes by cases, for programs that pad images, cut them into blocks or phases, and crop.

A size that is divided by a number $m$ is replaced by $m q - r$ for each remainder $r$, so that attributes contain no
floor. An axis of the output of length $m q$, or up to three less, is split: index $i = q p + j$ (blocks) or
$i = m j + p$ (phases), $0 \\le j < q$, for each $p < m$. At such an index both sides are polynomial or linear, and are
compared as in :mod:`steptime_lab.rules.verify_generic`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Final

from steptime.errors import UserError
from steptime_lab.rules.forms import Elements, Unprovable
from steptime_lab.rules.rule import Rule
from steptime_lab.rules.sizes import Condition, Quotient, Size, size
from steptime_lab.rules.terms import VARIABLE, Shape, Term, replaced, term
from steptime_lab.rules.verify_generic import same_at

MOST_PARTS: Final = 4
"""Largest number of blocks or phases of an axis."""


def proved_by_cases(rule: Rule) -> bool:
    """True if both sides are proved equal in every case, for all sizes that the rule's conditions allow."""
    return all(_proved(each, phases=False) or _proved(each, phases=True) for each in _by_rests(rule))


def _proved(rule: Rule, *, phases: bool) -> bool:
    try:
        return all(
            same_at(rule, a, b, elements, index)
            for a, b in zip(rule.sources, rule.targets, strict=True)
            for elements, index in _indices(rule, a, phases)
        )
    except (Unprovable, UserError):
        return False


def _indices(rule: Rule, of: Term, phases: bool) -> Iterator[tuple[Elements, Shape]]:
    """Indices that together cover the output, with the ranges of their names."""
    parts = []
    for extent in Elements(rule.table).dims(of):
        long = [each for each in extent.terms if each[0]]
        number = int(long[0][1]) if len(long) == 1 else 1
        few = 1 < number <= MOST_PARTS and -number < ((extent - Size((long[0],))).number or 0) <= 0
        parts.append((number, Size(((long[0][0], 1),))) if few else (1, extent))
    for case in product(*(range(number) for number, _ in parts)):
        elements = Elements(rule.table)
        names = [elements.fresh(extent, "i") for _, extent in parts]
        yield (
            elements,
            tuple(
                name * number + part if phases else extent * part + name
                for name, part, (number, extent) in zip(names, case, parts, strict=True)
            ),
        )


def _by_rests(rule: Rule) -> Iterator[Rule]:
    """The rule for every remainder of the sizes that are divided by a number."""
    numbers: dict[str, int] = {}
    sides = (*rule.sources, *rule.targets)
    for atom in (atom for side in sides for each in side.walk() for given in each.attributes for atom in _atoms(given)):
        for name in atom.numerator.names() if atom.denominator.number else ():
            numbers[name] = max(numbers.get(name, 1), atom.denominator.number or 1)
    for rests in product(*map(range, numbers.values())):
        by = {name: size(name) * m - rest for (name, m), rest in zip(numbers.items(), rests, strict=True)}
        sources, targets = (
            tuple(_whole(replaced(each, {}, by)) for each in side) for side in (rule.sources, rule.targets)
        )
        variables = tuple(replace(v, dims=tuple(divided(dim.replace(by)) for dim in v.dims)) for v in rule.variables)
        where = tuple(Condition(divided(each.size.replace(by)), each.equal) for each in rule.where)
        yield replace(rule, variables=variables, sources=sources, targets=targets, where=where)


def _atoms(given: Size) -> Iterator[Quotient]:
    for monomial, _ in given.terms:
        for atom in monomial:
            if isinstance(atom, Quotient):
                yield from (*_atoms(atom.numerator), atom)


def _whole(given: Term) -> Term:
    """The term with floors in its attributes resolved by :func:`divided`."""
    if given.op == VARIABLE:
        return given
    return term(given.op, tuple(map(_whole, given.children)), tuple(map(divided, given.attributes)))


def divided(given: Size) -> Size:
    """A size with floor quotients by numbers resolved if only a number is not a multiple of the divisor.

    >>> str(divided(size("(2*h + 1)//2")))
    'h'
    """
    out = size(0)
    for monomial, value in given.terms:
        part: Size = Size((((), value),))
        for atom in monomial:
            part = part * (size(atom) if isinstance(atom, str) else _floor(atom))
        out = out + part
    return out


def _floor(atom: Quotient) -> Size:
    numerator, by, whole = divided(atom.numerator), divided(atom.denominator), size(0)
    number = by.number
    if number and number > 0 and all(value == int(value) for _, value in numerator.terms):
        for monomial, value in numerator.terms:
            whole = whole + Size(((monomial, 1),)) * (int(value) // number)
    return whole + (numerator - whole * by) // by
