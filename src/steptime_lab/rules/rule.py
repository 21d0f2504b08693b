"""A substitution (variables with dims, source and target terms, conditions), its matching and its application.

One declaration gives all else: its text, its conditions on sizes, matching and rewriting in this module, the rule of an
e-graph (:mod:`verify_egraph`), its test (:mod:`verify_random`) and its row in a list (:mod:`store`). A rule with
several sources has several outputs; its sources are matched with common variables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from steptime.errors import UserError
from steptime_lab.rules.operators import OPERATORS
from steptime_lab.rules.sizes import Condition, Size, equal, size, solved
from steptime_lab.rules.terms import VARIABLE, Shape, Term, Variable, Variables, replaced, shape_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Proofs of a rule: numbers of random assignments and exact shapes that agree, and general proofs."""

    random: int = 0
    exact: int = 0
    egraph: bool = False
    generic: bool = False

    @property
    def complete(self) -> bool:
        """True if the rule may be shipped: both tests and at least one proof hold."""
        return self.random >= LEAST_ASSIGNMENTS and self.exact > 0 and (self.egraph or self.generic)

    def __str__(self) -> str:
        proofs = [name for name, closed in (("e-graph", self.egraph), ("all sizes", self.generic)) if closed]
        return f"{self.random} assignments, {self.exact} exact shapes, {' and '.join(proofs) or 'no proof'}"


LEAST_ASSIGNMENTS = 50
"""Least number of assignments of sizes on which random values of both sides must agree."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A substitution of ``sources`` by ``targets``, output by output; valid where all conditions hold."""

    name: str
    variables: tuple[Variable, ...]
    sources: tuple[Term, ...]
    targets: tuple[Term, ...]
    where: tuple[Condition, ...] = ()
    origin: str = ""
    certificate: Certificate = field(default_factory=Certificate)

    @cached_property
    def table(self) -> Variables:
        """Variables by name."""
        return {each.name: each for each in self.variables}

    @cached_property
    def lifts(self) -> bool:
        """True if the same leading dims can be added to all variables."""
        every = [each for side in (*self.sources, *self.targets) for each in side.walk()]
        ranks = {len(each.dims) for each in self.variables}
        return len(ranks) == 1 and all(each.op == VARIABLE or OPERATORS[each.op].lifts for each in every)

    @cached_property
    def pointwise(self) -> bool:
        """True if all operators are element-wise with the same variables on both sides, which may then be broadcast."""
        every = [each for side in (*self.sources, *self.targets) for each in side.walk() if each.op != VARIABLE]
        same = len(self.sources) == 1 and set(self.sources[0].variables()) == set(self.targets[0].variables())
        return same and all(each.op == "scale" or (OPERATORS[each.op].aligns and each.op != "matmul") for each in every)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all sizes."""
        inside = {name for each in self.variables for dim in each.dims for name in dim.names()}
        inside |= {name for side in (*self.sources, *self.targets) for name in side.size_names()}
        return tuple(sorted(inside | {name for each in self.where for name in each.size.names()}))

    @property
    def operators(self) -> int:
        """Number of operators of the larger side; shared terms of several outputs count once."""
        sides = [{t for term in side for t in term.walk() if t.op != VARIABLE} for side in (self.sources, self.targets)]
        return max(map(len, sides))

    @property
    def applicable(self) -> bool:
        """True if a match of the sources binds all variables and sizes of the targets and conditions."""
        bound = _bound(self.sources, self.table)
        return self.pointwise or bound >= {*self.names, *(name for each in self.targets for name in each.variables())}

    def reverse(self) -> Rule:
        """The rule from target to source."""
        return replace(self, sources=self.targets, targets=self.sources)

    def needs(self) -> list[Condition]:
        """All conditions: the rule's own, those of operators on both sides, and equal shapes of outputs."""
        out, known = list(self.where), dict[Term, Shape]()
        for a, b in zip(self.sources, self.targets, strict=True):
            left, right = (shape_of(side, self.table, known, out) for side in (a, b))
            if len(left) != len(right):
                raise UserError(f"{self.name}: the sides have {len(left)} and {len(right)} dims")
            out += [equal(x, y) for x, y in zip(left, right, strict=True)]
        return list(dict.fromkeys(each for each in out if not each.certain))

    def equation(self) -> str:
        """Text of both sides."""
        return f"{_outputs(self.sources)} = {_outputs(self.targets)}"

    def __str__(self) -> str:
        where = f" where {', '.join(map(str, self.where))}" if self.where else ""
        return f"{' '.join(map(str, self.variables))}: {self.equation()}{where}"


def _outputs(terms: Sequence[Term]) -> str:
    return "; ".join(map(str, terms))


def _bound(terms: Sequence[Term], table: Variables) -> set[str]:
    """Variables and names of sizes that a match of the terms binds."""
    names = {name for each in terms for name in each.variables()}
    sizes = {name for each in names for dim in table[each].dims for name in dim.names()}
    return names | sizes | {name for each in terms for name in each.size_names()}


def unified(rule: Rule) -> Rule | None:
    """The rule with sizes replaced such that its linear equalities hold; None: they contradict each other."""
    by = solved(rule.needs())
    if by is None:
        return None
    if not by:
        return rule
    sides = [tuple(replaced(each, {}, by) for each in side) for side in (rule.sources, rule.targets)]
    variables = tuple(replace(v, dims=tuple(dim.replace(by) for dim in v.dims)) for v in rule.variables)
    where = tuple(dict.fromkeys(c for each in rule.where if not (c := each.replace(by)).certain))
    return replace(rule, variables=variables, sources=sides[0], targets=sides[1], where=where)


@dataclass(frozen=True, slots=True)
class Match:
    """A match of a rule: terms of its variables, and sizes of its names."""

    terms: Mapping[str, Term]
    sizes: Mapping[str, Size]


def matches(
    rule: Rule,
    given: Sequence[Term],
    variables: Variables,
    weights: Callable[[Term], bool] | None = None,
    needs: Sequence[Condition] | None = None,
    holds: Callable[[Condition], bool] | None = None,
    known: dict[Term, Shape] | None = None,
    closed: Callable[[Term, Term], bool] | None = None,
) -> Match | None:
    """The match of a rule's sources with terms at their roots, or None.

    Conditions must hold for certain, unless ``holds`` decides them. ``weights``: predicate of terms that are constant
    in inference; default: terms of weights alone. ``needs``: conditions of the rule, if known. ``known``: shapes of
    terms. ``closed``: predicate of a pattern and a term, True if the pattern may not look into the term.
    """
    terms: dict[str, Term] = {}
    equations: list[tuple[Size, Size]] = []
    for pattern, term in zip(rule.sources, given, strict=True):
        if not _matched(pattern, term, terms, equations, closed):
            return None
    known = {} if known is None else known
    table, free, leads = rule.table, rule.pointwise, set[Shape]()
    for name, term in terms.items():
        dims, declared = shape_of(term, variables, known, []), table[name]
        if declared.kind == "weight" and not (weights or _weights_of(variables))(term):
            return None
        if free:
            continue
        cut = len(dims) - len(declared.dims)
        leads.add(dims[: max(cut, 0)])
        if cut < 0 or len(leads) > 1 or (cut and not rule.lifts):
            return None
        equations += zip(declared.dims, dims[cut:], strict=True)
    sizes = _bindings(equations)
    if sizes is None or not all(
        map(holds or _holds, (c.replace(sizes) for c in (rule.needs() if needs is None else needs)))
    ):
        return None
    return Match(terms, sizes)


def _weights_of(variables: Variables) -> Callable[[Term], bool]:
    return lambda term: all(variables[name].kind == "weight" for name in term.variables())


def _holds(condition: Condition) -> bool:
    return condition.certain or (condition.size.number is not None and condition.holds({}))


def _matched(
    pattern: Term,
    term: Term,
    terms: dict[str, Term],
    equations: list[tuple[Size, Size]],
    closed: Callable[[Term, Term], bool] | None,
) -> bool:
    if pattern.op == VARIABLE:
        return terms.setdefault(pattern.name, term) is term
    if pattern.op != term.op or len(pattern.children) != len(term.children):
        return False
    if closed is not None and closed(pattern, term):
        return False
    if len(pattern.attributes) != len(term.attributes):
        return False
    for a, b in zip(pattern.attributes, term.attributes, strict=True):
        if a.number is not None and a != b:
            return False
        equations.append((a, b))
    return all(_matched(a, b, terms, equations, closed) for a, b in zip(pattern.children, term.children, strict=True))


def _bindings(equations: Sequence[tuple[Size, Size]]) -> dict[str, Size] | None:
    """Sizes for the names of the left sides that satisfy all equations; None: there are none."""
    out: dict[str, Size] = {}
    left = [(a, b) for a, b in equations if a != b or a.number is None]
    while left:
        rest = []
        for a, b in left:
            known = a.names() <= out.keys()
            if known and a.replace(out) != b:
                return None
            if known:
                continue
            name = a.name
            if name is not None:
                out[name] = b
            elif not _solve(a, b, out):
                rest.append((a, b))
        if len(rest) == len(left):
            return None
        left = rest
    return out


def _solve(a: Size, b: Size, out: dict[str, Size]) -> bool:
    unknown = a.names() - out.keys()
    if len(unknown) != 1:
        return False
    (name,) = unknown
    coefficient = dict(a.terms).get((name,), 0)
    rest = a - size(name) * int(coefficient)
    if abs(coefficient) != 1 or name in rest.names():
        return False
    out[name] = (b - rest.replace(out)) * int(coefficient)
    return True


def applied_to(rule: Rule, given: Sequence[Term], variables: Variables) -> tuple[Term, ...] | None:
    """The targets of a rule for terms that match its sources; None: they do not match."""
    found = matches(rule, given, variables)
    return None if found is None else tuple(replaced(each, found.terms, found.sizes) for each in rule.targets)


def rewrites(rule: Rule, given: Term, variables: Variables) -> Iterator[Term]:
    """All results of a rule with one output on a term, at the root or inside."""
    here = applied_to(rule, (given,), variables)
    if here is not None:
        yield here[0]
    for number, child in enumerate(given.children):
        for new in rewrites(rule, child, variables):
            children = (*given.children[:number], new, *given.children[number + 1 :])
            from steptime_lab.rules.terms import term

            yield term(given.op, children, given.attributes)


def assignments(rule: Rule, number: int, seed: int, largest: int = 5) -> Iterator[dict[str, int]]:
    """Distinct numbers for the names of a rule's sizes that satisfy all its conditions.

    Small numbers come first; the range grows if there are too few. The iterator ends early if no more are found.
    """
    names, needs = rule.names, rule.needs()
    # Dims that are differences of names must be at least one too.
    needs += [Condition(dim - 1, equal=False) for each in rule.variables for dim in each.dims]
    needs = [each for each in dict.fromkeys(needs) if not each.certain]
    rng, seen = np.random.default_rng(seed), set[tuple[int, ...]]()
    for top in (2, 3, 4, *[largest] * 3, *range(largest, 4 * largest), *[16 * largest] * (len(names) < 3)):
        columns = dict(zip(names, rng.integers(1, top + 1, (len(names), DRAWS)), strict=True))
        good = np.ones(DRAWS, dtype=bool)
        with np.errstate(divide="ignore"):
            for each in needs:
                value = each.size.values(columns)
                good &= value == 0 if each.equal else value >= 0
        share = max(1, number // 3) if top < largest else number
        for at in np.flatnonzero(good).tolist():
            if len(seen) >= share:
                break
            drawn = tuple(int(columns[name][at]) for name in names)
            if drawn not in seen:
                seen.add(drawn)
                yield dict(zip(names, drawn, strict=True))
        if not names or len(seen) >= number:
            return


DRAWS = 800
"""Number of assignments that are drawn at once."""
