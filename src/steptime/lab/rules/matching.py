"""Rules compiled for graphs: found by the operators at and below the root, sizes as whole numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Final, TypeAlias

from steptime.lab.rules.graphs import Attribute, Terms
from steptime.lab.rules.lowering import NO_KERNEL
from steptime.lab.rules.rule import Rule
from steptime.lab.rules.sizes import Condition, Quotient, Size
from steptime.lab.rules.terms import VARIABLE, Term

Numbers: TypeAlias = dict[str, int | float]
Evaluate: TypeAlias = Callable[[Mapping[str, int | float]], int | float]
PARTIAL: Final = frozenset({"sqrt", "recip"})
"""Functions that are not defined everywhere: a rule that adds or drops one is not used."""
MADE_OF_NOTHING: Final = frozenset({"zero", "one", "identity"})


def evaluator(given: Size) -> Evaluate:
    """A function of the numbers of names."""
    if given.number is not None:
        constant = given.number
        return lambda at: constant
    if given.name is not None:
        name = given.name
        return lambda at: at[name]
    terms = [(float(v) if v != int(v) else int(v), [_atom(atom) for atom in m]) for m, v in given.terms]

    def value(at: Mapping[str, int | float]) -> int | float:
        total: int | float = 0
        for coefficient, atoms in terms:
            product: int | float = coefficient
            for atom in atoms:
                product *= atom(at)
            total += product
        return total

    return value


def _atom(atom: str | Quotient) -> Evaluate:
    if isinstance(atom, str):
        return lambda at: at[atom]
    above, below = evaluator(atom.numerator), evaluator(atom.denominator)

    def quotient(at: Mapping[str, int | float]) -> int | float:
        by = below(at)
        return above(at) // by if by else 0

    return quotient


@dataclass(frozen=True, slots=True)
class Equation:
    """A size of a rule that a match has a number for."""

    size: Size
    evaluate: Evaluate
    names: frozenset[str]


@dataclass(frozen=True, slots=True)
class Pattern:
    """A term of a rule's source."""

    op: str
    name: str
    attributes: tuple[Equation, ...]
    children: tuple[Pattern, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """A match: classes of variables, numbers of names."""

    classes: Mapping[str, int]
    numbers: Numbers


@dataclass(frozen=True, slots=True)
class Compiled:
    """One way of a rule of one output."""

    rule: Rule
    pattern: Pattern
    dims: tuple[tuple[str, tuple[Equation, ...], bool], ...]
    """Variables in order: their declared dims, and whether they have to be weights."""
    needs: tuple[tuple[Evaluate, bool], ...]
    target: Term
    targets: Mapping[Term, tuple[Evaluate, ...]]
    """Attributes of the terms of the target."""
    free: bool
    """Its variables may be broadcast: dims say nothing."""
    lifts: bool

    def matches(self, terms: Terms, number: int) -> Found | None:
        """The match at a term."""
        classes: dict[str, int] = {}
        values: list[tuple[Equation, Attribute]] = []
        return (
            self._solved(terms, classes, values) if self._walked(terms, self.pattern, number, classes, values) else None
        )

    def _walked(
        self,
        terms: Terms,
        pattern: Pattern,
        number: int,
        classes: dict[str, int],
        values: list[tuple[Equation, Attribute]],
    ) -> bool:
        """Whether a term has the form of a pattern; its variables and attributes are put in."""
        if pattern.op == VARIABLE:
            return classes.setdefault(pattern.name, number) == number
        row = terms.rows[number]
        if row.op != pattern.op or (row.steady and pattern.op not in NO_KERNEL):
            return False  # what is made of weights costs nothing, however it is made
        if len(row.children) != len(pattern.children) or len(row.attributes) != len(pattern.attributes):
            return False
        for equation, value in zip(pattern.attributes, row.attributes, strict=True):
            if equation.size.number not in (None, value):
                return False
            values.append((equation, value))
        pairs = zip(pattern.children, row.children, strict=True)
        return all(self._walked(terms, each, child, classes, values) for each, child in pairs)

    def _solved(
        self, terms: Terms, classes: Mapping[str, int], values: Sequence[tuple[Equation, Attribute]]
    ) -> Found | None:
        equations: list[tuple[Equation, int | float]] = []
        for equation, value in values:
            if isinstance(value, str):
                return None
            equations.append((equation, value))
        lead: tuple[int, ...] | None = None
        for name, declared, weight in self.dims:
            found = terms.rows[classes[name]]
            if weight and not found.steady:
                return None
            if self.free:
                continue
            cut = len(found.shape) - len(declared)
            if cut < 0 or (cut and not self.lifts):
                return None
            above = found.shape[:cut]
            if lead is not None and above != lead:
                return None
            lead = above
            equations += zip(declared, found.shape[cut:], strict=True)
        numbers = _numbers(equations)
        if numbers is None or not all((v == 0 if equal else v >= 0) for v, equal in self._needed(numbers)):
            return None
        return Found(classes, numbers)

    def _needed(self, numbers: Numbers) -> Iterator[tuple[int | float, bool]]:
        if not self.free:
            yield from ((evaluate(numbers), equal) for evaluate, equal in self.needs)


def _numbers(equations: Sequence[tuple[Equation, int | float]]) -> Numbers | None:
    """Numbers of names that make all equations hold; None where there are none."""
    out: Numbers = {}
    left = equations
    while left:
        rest: list[tuple[Equation, int | float]] = []
        for equation, value in left:
            name = equation.size.name
            if equation.names <= out.keys():
                if equation.evaluate(out) != value:
                    return None
            elif name is not None:
                out[name] = value
            elif not _solve(equation, value, out):
                rest.append((equation, value))
        if len(rest) == len(left):
            return None
        left = rest
    return out


def _solve(equation: Equation, value: int | float, out: Numbers) -> bool:
    unknown = equation.names - out.keys()
    if len(unknown) != 1:
        return False
    (name,) = unknown
    coefficient = dict(equation.size.terms).get((name,), 0)
    if abs(coefficient) != 1 or sum(name in _names(m) for m, _ in equation.size.terms) != 1:
        return False
    rest = equation.evaluate({**out, name: 0})
    out[name] = (value - rest) * int(coefficient)
    return True


def _names(monomial: Sequence[str | Quotient]) -> set[str]:
    out: set[str] = set()
    for atom in monomial:
        out |= {atom} if isinstance(atom, str) else atom.numerator.names() | atom.denominator.names()
    return out


def compiled(rule: Rule) -> Compiled:
    """A rule of one output as it is matched."""
    (source,), (target,) = rule.sources, rule.targets

    def pattern(term: Term) -> Pattern:
        return Pattern(term.op, term.name, tuple(map(_equation, term.attributes)), tuple(map(pattern, term.children)))

    table = rule.table
    return Compiled(
        rule=rule,
        pattern=pattern(source),
        dims=tuple(
            (name, tuple(map(_equation, table[name].dims)), table[name].kind == "weight") for name in source.variables()
        ),
        needs=tuple((evaluator(each.size), each.equal) for each in _conditions(rule)),
        target=target,
        targets={each: tuple(map(evaluator, each.attributes)) for each in target.walk()},
        free=rule.pointwise,
        lifts=rule.lifts,
    )


def _equation(given: Size) -> Equation:
    return Equation(given, evaluator(given), given.names())


def _conditions(rule: Rule) -> list[Condition]:
    return [] if rule.pointwise else rule.needs()


def is_usable(way: Rule) -> bool:
    """Whether a way of a rule can be applied to graphs: a match says all that its target has, and it has a kernel."""
    source = way.sources[0]
    if len(way.sources) > 1 or source.op == VARIABLE or not way.applicable:
        return False
    sides = [[each.op for each in side.walk()] for side in (source, way.targets[0])]
    counts = [sorted(op for op in side if op in PARTIAL) for side in sides]
    return counts[0] == counts[1] and not MADE_OF_NOTHING & {*sides[0], *sides[1]}


@dataclass(frozen=True)
class Way:
    """One way of a rule; compiled when it is first tried."""

    rule: Rule

    @cached_property
    def compiled(self) -> Compiled:
        """As it is matched."""
        return compiled(self.rule)

    @property
    def source(self) -> Term:
        """What it matches."""
        return self.rule.sources[0]

    @property
    def target(self) -> Term:
        """What it makes of it."""
        return self.rule.targets[0]


def ways_of(rules: Iterable[Rule]) -> tuple[Way, ...]:
    """Both ways of rules, each where it is usable, and once."""
    ways: dict[tuple[object, ...], Rule] = {}
    for rule in rules:
        for way in (rule, rule.reverse()):
            if is_usable(way):
                ways.setdefault((way.sources, way.targets, way.variables, way.where), way)
    return tuple(map(Way, ways.values()))


class Index:
    """Compiled rules by the operators at the root and of its arguments.

    >>> from steptime.lab.rules.declared import rule_of
    >>> index = Index(ways_of([rule_of("twice", "x[n]", "neg(neg(x))", "x")]))
    >>> [len(index.below("neg", [op])) for op in ("neg", "relu")]
    [1, 0]
    """

    def __init__(self, ways: Iterable[Way]) -> None:
        self._rows: dict[tuple[str, ...], list[Way]] = {}
        for each in ways:
            self._rows.setdefault((each.source.op, *(child.op for child in each.source.children)), []).append(each)

    def below(self, op: str, children: Sequence[str]) -> list[Way]:
        """Rules whose root is an operator and whose arguments are of the operators that are there, or variables."""
        if 2 ** len(children) > len(self._rows):  # many arguments have too many combinations
            wanted = (op, *children)
            fits = (len(key) == len(wanted) and all(map(_covers, key, wanted)) for key in self._rows)
            return [way for ways, fit in zip(self._rows.values(), fits, strict=True) if fit for way in ways]
        keys = product(*[(VARIABLE, each) for each in children])
        return [way for key in keys for way in self._rows.get((op, *key), ())]

    def at(self, terms: Terms, number: int) -> Iterator[Compiled]:
        """Rules that may match at a term."""
        row = terms.rows[number]
        for way in self.below(row.op, [terms.rows[child].op for child in row.children]):
            yield way.compiled


def _covers(key: str, op: str) -> bool:
    return key in (VARIABLE, op)
