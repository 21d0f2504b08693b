"""Rules compiled for e-graphs: found by the operators at and below the root, sizes as whole numbers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import Final, TypeAlias

from steptime.rewrite.rules.rule import Rule
from steptime.rewrite.rules.sizes import Condition, Quotient, Size
from steptime.rewrite.rules.terms import VARIABLE, Term
from steptime.rewrite.saturation.egraph import Attribute, EGraph, ENode
from steptime.rewrite.saturation.language import NO_KERNEL

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
    attributes: tuple[int, ...]
    """Numbers of the equations of its attributes."""
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
    number: int
    pattern: Pattern
    equations: tuple[Equation, ...]
    dims: tuple[tuple[str, tuple[Equation, ...], bool], ...]
    """Variables in order: their declared dims, and whether they have to be weights."""
    needs: tuple[tuple[Evaluate, bool], ...]
    target: Term
    targets: Mapping[Term, tuple[Evaluate, ...]]
    """Attributes of the terms of the target."""
    free: bool
    """Its variables may be broadcast: dims say nothing."""
    lifts: bool

    def matches(self, graph: EGraph, number: int, node: ENode) -> Iterator[Found]:
        """All matches at one e-node of a class."""
        for classes, values in self._walk(graph, [(self.pattern, number, node)], {}, []):
            found = self._solved(graph, classes, values)
            if found is not None:
                yield found

    def _walk(
        self,
        graph: EGraph,
        rest: Sequence[tuple[Pattern, int, ENode | None]],
        classes: dict[str, int],
        values: list[tuple[int, Attribute]],
    ) -> Iterator[tuple[dict[str, int], list[tuple[int, Attribute]]]]:
        if not rest:
            yield classes, values
            return
        pattern, number, given = rest[0]
        if pattern.op == VARIABLE:
            known = classes.get(pattern.name)
            if known is None:
                yield from self._walk(graph, rest[1:], {**classes, pattern.name: number}, values)
            elif known == number:
                yield from self._walk(graph, rest[1:], classes, values)
            return
        if graph.classes[number].steady and pattern.op not in NO_KERNEL:
            return  # what is made of weights costs nothing, however it is made
        for node in list(graph.nodes(number, pattern.op)) if given is None else (given,):
            if len(node[2]) != len(pattern.children) or len(node[1]) != len(pattern.attributes):
                continue
            if any(
                (constant := self.equations[at].size.number) is not None and constant != value
                for at, value in zip(pattern.attributes, node[1], strict=True)
            ):
                continue
            more = [(p, graph.find(c), None) for p, c in zip(pattern.children, node[2], strict=True)]
            found = [*values, *zip(pattern.attributes, node[1], strict=True)]
            yield from self._walk(graph, [*more, *rest[1:]], classes, found)

    def _solved(
        self, graph: EGraph, classes: Mapping[str, int], values: Sequence[tuple[int, Attribute]]
    ) -> Found | None:
        equations: list[tuple[Equation, int | float]] = []
        for at, value in values:
            if isinstance(value, str):
                return None
            equations.append((self.equations[at], value))
        lead: tuple[int, ...] | None = None
        for name, declared, weight in self.dims:
            found = graph.classes[classes[name]]
            if weight and not found.steady:
                return None
            if self.free:
                continue
            cut = len(found.sort.shape) - len(declared)
            if cut < 0 or (cut and not self.lifts):
                return None
            above = found.sort.shape[:cut]
            if lead is not None and above != lead:
                return None
            lead = above
            equations += zip(declared, found.sort.shape[cut:], strict=True)
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


def compiled(rule: Rule, number: int = 0) -> Compiled:
    """A rule of one output as it is matched in e-graphs."""
    (source,), (target,) = rule.sources, rule.targets
    equations: list[Equation] = []

    def pattern(term: Term) -> Pattern:
        at = len(equations)
        equations.extend(map(_equation, term.attributes))
        numbers = tuple(range(at, at + len(term.attributes)))
        return Pattern(term.op, term.name, numbers, tuple(map(pattern, term.children)))

    table = rule.table
    return Compiled(
        rule=rule,
        number=number,
        pattern=pattern(source),
        equations=tuple(equations),
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
    number: int

    @cached_property
    def compiled(self) -> Compiled:
        """As it is matched."""
        return compiled(self.rule, self.number)

    @property
    def source(self) -> Term:
        """What it matches."""
        return self.rule.sources[0]

    @property
    def target(self) -> Term:
        """What it makes of it."""
        return self.rule.targets[0]

    @property
    def growth(self) -> int:
        """Operators that it adds."""
        return self.target.operators - self.source.operators

    @property
    def expands_products(self) -> bool:
        """Whether its target has no operator that its source has not, products of matrices among them.

        Of the ways that add operators only these make terms cheap enough later to be worth their number.
        """
        ops = {each.op for each in self.source.walk()}
        return {each.op for each in self.target.walk()} <= ops and bool(ops & {"matmul", "conv"})


def ways_of(rules: Iterable[Rule]) -> tuple[Way, ...]:
    """Both ways of rules, each where it is usable, and once."""
    ways: dict[tuple[object, ...], Rule] = {}
    for rule in rules:
        for way in (rule, rule.reverse()):
            if is_usable(way):
                ways.setdefault((way.sources, way.targets, way.variables, way.where), way)
    return tuple(Way(way, number) for number, way in enumerate(ways.values()))


class Index:
    """Compiled rules by the operators at the root and of its arguments.

    >>> from steptime.rewrite.rules.declared import rule_of
    >>> index = Index(ways_of([rule_of("twice", "x[n]", "neg(neg(x))", "x")]))
    >>> [len(index.below("neg", ops)) for ops in ([{"neg"}], [{"relu"}])]
    [1, 0]
    """

    def __init__(self, ways: Iterable[Way]) -> None:
        self._rows: dict[tuple[str, int], dict[tuple[str, ...], list[Way]]] = {}
        for each in ways:
            key = tuple(child.op for child in each.source.children)
            self._rows.setdefault((each.source.op, len(key)), {}).setdefault(key, []).append(each)

    def below(self, op: str, children: Sequence[Collection[str]]) -> list[Way]:
        """Rules whose root is an operator and whose arguments have operators that are there."""
        rows = self._rows.get((op, len(children)), {})
        if prod(1 + len(each) for each in children) > len(rows):  # many arguments have too many combinations
            fits = (all(k == VARIABLE or k in c for k, c in zip(key, children, strict=True)) for key in rows)
            return [way for ways, fit in zip(rows.values(), fits, strict=True) if fit for way in ways]
        keys = product(*[(VARIABLE, *each) for each in children])
        return [way for key in keys if key in rows for way in rows[key]]

    def at(self, graph: EGraph, number: int, op: str) -> Iterator[tuple[Compiled, ENode]]:
        """Rules that may match at an e-node of a class."""
        for node in list(graph.nodes(number, op)):
            children = [graph.classes[graph.find(child)].nodes for child in node[2]]
            for way in self.below(op, children):
                yield way.compiled, node
