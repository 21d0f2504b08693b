r"""Layer (iv): proofs that both sides are equal for all sizes, by index functions and linear integer arithmetic (z3).

The element of each side at a symbolic index is a sum of guarded products (:mod:`forms`). Bound indices are named by the
factors that contain them. Pieces with equal factors form a group; the sides are equal if for every group the sums of
coefficients over all guards agree for all integer indices and sizes, $\sum_j c_j [g_j] = \sum_l c_l [g_l]$, which z3
decides. Products of names count as independent integers, which can only make a proof fail.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from steptime.registry import needed
from steptime_lab.rules.forms import (
    Call,
    Elements,
    Form,
    Piece,
    Unprovable,
    canonical,
    collected,
    contradictory,
    nonnegative,
    unit,
)
from steptime_lab.rules.rule import Rule
from steptime_lab.rules.sizes import ONE, Condition, Quotient, Size, at_least, size
from steptime_lab.rules.terms import Shape, Term

TIMEOUT_MS: Final = 2000


@dataclass(slots=True)
class Arithmetic:
    """Queries on sizes under known facts, with cached answers."""

    facts: list[Condition]
    positive: frozenset[str]
    indices: frozenset[str]
    queries: int = 0
    _solver: Any = None
    _known: dict[Any, Any] = field(default_factory=dict)
    _answers: dict[tuple[frozenset[Size], Size], bool] = field(default_factory=dict)

    def implied(self, guard: Size, others: Iterable[Size]) -> bool:
        """True if a guard holds wherever the facts and the other guards hold."""
        if self._plain(guard, ()):
            return True
        known = frozenset(others)
        near = frozenset(each for each in known if each.names() & guard.names())
        if self._plain(guard, near):
            return True
        if not any(self._related(guard, each) for each in near) and not self._has_facts(guard):
            return False
        key = (known, guard)
        if key not in self._answers:
            self._answers[key] = self._unsatisfiable([self.number(each) >= 0 for each in known], self.number(guard) < 0)
        return self._answers[key]

    def _plain(self, guard: Size, others: Iterable[Size]) -> bool:
        known = (*(c.size for c in self.facts if not c.equal), *others)
        return (nonnegative(guard, self.indices) and not guard.names() - self.positive - self.indices) or any(
            not (guard - each).names() - self.positive - self.indices and nonnegative(guard - each, self.indices)
            for each in known
        )

    def _has_facts(self, guard: Size) -> bool:
        return bool(guard.names() & (self.positive | self.indices))

    @staticmethod
    def _related(a: Size, b: Size) -> bool:
        return bool(a.names() & b.names())

    def simplified(self, guards: frozenset[Size]) -> frozenset[Size] | None:
        """Guards without those that the others imply; None: they exclude each other."""
        if contradictory(guards) or self.impossible(guards):
            return None
        kept = {each for each in guards if each.number is None or each.number < 0}
        for guard in sorted(kept, key=lambda each: (-len(each.terms), str(each))):
            if self.implied(guard, kept - {guard}):
                kept.discard(guard)
        return frozenset(kept)

    def impossible(self, guards: frozenset[Size]) -> bool:
        """True if guards exclude each other under the facts."""
        if len(guards) < 2 or any(self._fits(guards, name) for name in {n for each in guards for n in each.names()}):
            return False
        return self._unsatisfiable([self.number(each) >= 0 for each in sorted(guards, key=str)], None)

    @staticmethod
    def _fits(guards: frozenset[Size], name: str) -> bool:
        """True if the guards are the plain range of one index."""
        return (
            len(guards) == 2
            and size(name) in guards
            and sum(name in each.names() for each in guards) == 2
            and all(dict(each.terms).get((name,)) == -1 for each in guards if each != size(name))
            and all(nonnegative(each + size(name), frozenset()) for each in guards if each != size(name))
        )

    def number(self, given: Size) -> Any:
        """A size as a z3 expression; products and quotients of names are variables of their own."""
        z3 = needed("z3", "a proof for all sizes")
        total: Any = z3.IntVal(0)
        for monomial, value in given.terms:
            factor = self._atom(monomial) if monomial else z3.IntVal(1)
            total = total + factor * int(value)
        return total

    def _atom(self, monomial: Any) -> Any:
        z3 = needed("z3", "a proof for all sizes")
        if self._solver is None:
            self.start()
        if monomial in self._known:
            return self._known[monomial]
        name = z3.Int("*".join(map(str, monomial)))
        self._known[monomial] = name
        solver = self._solver
        if all(isinstance(a, str) and a in self.positive for a in monomial):
            solver.add(name >= 1)
        if all(isinstance(a, str) and a in self.positive | self.indices for a in monomial):
            solver.add(name >= 0)
        if len(monomial) == 1 and isinstance(monomial[0], Quotient):
            quotient, by = size_of(monomial[0]), monomial[0].denominator
            low = monomial[0].numerator - quotient * by
            solver.add(z3.Implies(self.number(by) >= 1, z3.And(self.number(low) >= 0, self.number(by - 1 - low) >= 0)))
        return name

    def start(self) -> None:
        """Make the solver and add the facts."""
        z3 = needed("z3", "a proof for all sizes")
        self._solver = z3.SolverFor("QF_LIA")
        self._solver.set("timeout", TIMEOUT_MS)
        for name in sorted(self.positive):
            self.number(size(name))
        for fact in self.facts:
            left = self.number(fact.size)
            self._solver.add(left == 0 if fact.equal else left >= 0)

    def _unsatisfiable(self, assumed: list[Any], refuted: Any) -> bool:
        if self._solver is None:
            self.start()
        self.queries += 1
        self._solver.push()
        for each in [*assumed, *([] if refuted is None else [refuted])]:
            self._solver.add(each)
        answer = str(self._solver.check())
        self._solver.pop()
        return answer == "unsat"

    def equal_sums(self, left: list[Piece], right: list[Piece]) -> bool:
        """True if sums of coefficients over guards agree wherever the facts hold."""
        z3 = needed("z3", "a proof for all sizes")
        if self._solver is None:
            self.start()
        monomials = {monomial for piece in (*left, *right) for monomial, _ in piece.coefficient.terms}
        return all(
            self._unsatisfiable([], self._sum(left, m, z3) != self._sum(right, m, z3))
            for m in sorted(monomials, key=str)
        )

    def _sum(self, pieces: list[Piece], monomial: Any, z3: Any) -> Any:
        total: Any = z3.RealVal(0)
        for piece in pieces:
            value = dict(piece.coefficient.terms).get(monomial)
            if value is not None:
                holds = z3.And([self.number(each) >= 0 for each in sorted(piece.guards, key=str)])
                total = total + z3.If(holds, z3.RealVal(str(value)), z3.RealVal(0))
        return total


def size_of(quotient: Quotient) -> Size:
    """The size that consists of one quotient."""
    return Size((((quotient,), 1),))


def proved_generically(rule: Rule) -> bool:
    """True if both sides are proved equal for all sizes that the rule's conditions allow.

    False: the rule may be true or false, as the method does not apply to all rules.
    """
    try:
        return all(_same(rule, a, b) for a, b in zip(rule.sources, rule.targets, strict=True))
    except Unprovable:
        return False


def _same(rule: Rule, a: Term, b: Term) -> bool:
    elements = Elements(rule.table)
    return same_at(rule, a, b, elements, tuple(elements.fresh(dim, "i") for dim in elements.dims(a)))


def same_at(rule: Rule, a: Term, b: Term, elements: Elements, index: Shape) -> bool:
    """True if an element of both sides is equal for all sizes, and for all values of the names in its index."""
    names = frozenset(name for each in index for name in each.names() if name in elements.ranges)
    facts = [at_least(dim, i + 1) for dim, i in zip(elements.dims(a), index, strict=True) if i.names() and not i.name]
    facts += rule.needs() + [Condition(elements.ranges[n] - 1 - size(n), equal=False) for n in sorted(names)]
    facts += [
        Condition(d - 1, equal=False) for v in rule.variables for d in v.dims if d.number is None and d.name is None
    ]
    sides = elements.at(a, index), elements.at(b, index)
    arithmetic = Arithmetic(facts, frozenset(rule.names), names)
    left, right = (grouped(form, arithmetic) for form in sides)
    for key in sorted({*left, *right}):
        x, y = left.get(key, []), right.get(key, [])
        if sorted(map(str, x)) != sorted(map(str, y)) and not arithmetic.equal_sums(x, y):
            return False
    return True


def grouped(form: Form, arithmetic: Arithmetic) -> dict[str, list[Piece]]:
    """Canonical pieces, grouped by their factors."""
    named = (canonical(piece, arithmetic.simplified) for piece in form)
    pieces = collected(unit(each) for each in named if each is not None)
    pieces = collected(p for piece in pieces for p in _flat(piece))
    out: dict[str, list[Piece]] = {}
    for piece in pieces:
        key = f"{'*'.join(map(str, piece.factors))} {sorted(piece.bounds)}"
        out.setdefault(key, []).append(piece)
    return out


def _flat(piece: Piece) -> Form:
    """A piece with each maximum over a single unguarded value replaced by the value."""
    for number, factor in enumerate(piece.factors):
        if isinstance(factor, Call) and factor.function == "max" and len(factor.of) == 1:
            inner = factor.of[0]
            single = not inner.bounds and not inner.guards and len(inner.factors) == 1
            value = inner.factors[0] if single else None
            if (
                isinstance(value, Call)
                and value.function == "value"
                and len(value.of) == 1
                and value.of[0].coefficient == ONE
            ):
                rest = (*piece.factors[:number], *value.of[0].factors, *piece.factors[number + 1 :])
                if not value.of[0].guards and not value.of[0].bounds:
                    return _flat(Piece(piece.coefficient, piece.guards, piece.bounds, tuple(sorted(rest, key=str))))
    return (piece,)
