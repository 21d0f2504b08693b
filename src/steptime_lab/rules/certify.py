"""Certificates with all four layers, for shipped rules and a user's rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Final

from steptime.errors import UserError
from steptime_lab.rules.rule import LEAST_ASSIGNMENTS, Certificate, Rule, assignments, unified
from steptime_lab.rules.sizes import ZERO
from steptime_lab.rules.terms import VARIABLE, Shape, Term, shape_of, term
from steptime_lab.rules.verify_egraph import proved_together
from steptime_lab.rules.verify_exact import proved_exactly
from steptime_lab.rules.verify_generic import proved_generically
from steptime_lab.rules.verify_random import Counterexample, fuzzed

MOST_ELEMENTS: Final = 2**16
"""Largest number of elements of a tensor of a rule at its smallest sizes."""
BATCH: Final = 200
"""Number of rules in one e-graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of a check: a rule with its certificate, and a counter-example if it is unsound."""

    rule: Rule
    counterexample: Counterexample | None = None

    @property
    def word(self) -> str:
        """``proved``, ``unsound``, or ``open``: tests hold but no general proof was found."""
        if self.counterexample is not None:
            return "unsound"
        return "proved" if self.rule.certificate.complete else "open"


def checked(rule: Rule, number: int = LEAST_ASSIGNMENTS, seed: int = 0) -> Verdict:
    """Check layers (i), (ii) and (iv) of one rule.

    Raises:
        UserError: the shapes of both sides do not fit, or no sizes fulfil the conditions.
    """
    fitted = unified(rule)
    first = None if fitted is None else next(assignments(fitted, 1, seed), None)
    if fitted is None or first is None:
        raise UserError(f"{rule.name}: no sizes fulfil what the operators of both sides need", hint=str(rule))
    if _elements(fitted, first) > MOST_ELEMENTS:
        raise UserError(f"{rule.name}: a tensor has more than {MOST_ELEMENTS:,} elements", hint="give names for sizes")
    result = fuzzed(fitted, number, seed)
    if isinstance(result, Counterexample):
        return Verdict(rule=fitted, counterexample=result)
    exact = proved_exactly(fitted) or 0
    return Verdict(
        rule=replace(fitted, certificate=Certificate(random=result, exact=exact, generic=proved_generically(fitted)))
    )


def _elements(rule: Rule, at: dict[str, int]) -> int:
    """Number of elements of the largest tensor of both sides."""
    known: dict[Term, Shape] = {}
    for side in (*rule.sources, *rule.targets):
        shape_of(side, rule.table, known, [])
    return max(prod(dim.value(at) for dim in dims) for dims in known.values())


def certified(
    rules: Sequence[Rule], axioms: Sequence[Rule], progress: Callable[[str], None] | None = None
) -> list[Verdict]:
    """Check all four layers of many rules; the e-graph takes them in batches."""
    verdicts = []
    for number, rule in enumerate(rules, 1):
        verdicts.append(checked(rule))
        if progress and number % BATCH == 0:
            progress(f"checked {number} of {len(rules)} rules")
    return with_egraph(verdicts, axioms)


def with_egraph(verdicts: Sequence[Verdict], axioms: Sequence[Rule]) -> list[Verdict]:
    """The verdicts with layer (iii) added; unsound rules have no proof."""
    out: list[Verdict] = []
    for start in range(0, len(verdicts), BATCH):
        batch = verdicts[start : start + BATCH]
        proofs = proved_together([each.rule for each in batch], axioms)
        for each, proof in zip(batch, proofs, strict=True):
            certificate = replace(each.rule.certificate, egraph=proof and each.counterexample is None)
            out.append(replace(each, rule=replace(each.rule, certificate=certificate)))
    return out


def siblings(rule: Rule) -> Rule | None:
    """A rule of two outputs that merges siblings, from a rule with a side that joins two results of a shared input.

    concat(f(x, w), f(x, v)) = g(x, w, v) gives f(x, w); f(x, v) = slices of g(x, w, v). None: no side has this form.
    """
    for way in (rule, rule.reverse()):
        (source, *more), merged = way.sources, way.targets[0]
        if more or source.op != "concat" or len(source.children) != 2 or merged.op in ("concat", VARIABLE):
            continue
        first, second = source.children
        if first.op != second.op or not first.operators or not set(first.variables()) & set(second.variables()):
            continue
        axis = source.attributes[0]
        sizes = [shape_of(each, rule.table, {}, [])[axis.number or -1] for each in (first, second)]
        cuts = ((ZERO, sizes[0]), (sizes[0], sizes[0] + sizes[1]))
        targets = tuple(term("slice", (merged,), (axis, *cut)) for cut in cuts)
        return replace(
            rule, name=f"{rule.name}-siblings", sources=(first, second), targets=targets, certificate=Certificate()
        )
    return None
