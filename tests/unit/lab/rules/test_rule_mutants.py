"""Shipped rules with one change in the target: what random values refute, no other layer proves."""

from __future__ import annotations

import random
from dataclasses import replace

from steptime.errors import UserError
from steptime_lab.rules.rule import Rule, unified
from steptime_lab.rules.store import proved_axioms, shipped
from steptime_lab.rules.terms import Term, term
from steptime_lab.rules.verify_egraph import proved_together
from steptime_lab.rules.verify_exact import proved_exactly
from steptime_lab.rules.verify_generic import proved_generically
from steptime_lab.rules.verify_random import Counterexample, fuzzed

MUTANTS = 120
OTHER = {"add": "mul", "mul": "add", "sub": "add", "maximum": "add", "sum": "max", "max": "sum", "mean": "sum"}


def changed(given: Term, at: Term, rng: random.Random) -> Term:
    if given is not at:
        return (
            term(given.op, tuple(changed(c, at, rng) for c in given.children), given.attributes)
            if given.operators
            else given
        )
    kind = rng.randrange(4)
    if kind == 0 and given.op in OTHER:
        return term(OTHER[given.op], given.children, given.attributes)
    if kind == 1 and len(given.children) == 2:
        return term(given.op, given.children[::-1], given.attributes)
    return term("neg" if kind == 2 else "relu", (given,))


def mutants() -> list[Rule]:
    rng, out = random.Random(3), []
    single = [rule for rule in shipped().rules if len(rule.sources) == 1]
    for rule in rng.sample(single, MUTANTS):
        target = rule.targets[0]
        wrong = changed(target, rng.choice(list(target.walk())), rng)
        try:
            mutant = unified(replace(rule, targets=(wrong,)))
            refuted = mutant is not None and isinstance(fuzzed(mutant, 30), Counterexample)
        except UserError:
            continue
        if mutant is not None and refuted:
            out.append(mutant)
    return out


def test_no_layer_proves_what_random_values_refute() -> None:
    found = mutants()
    assert len(found) > 0.7 * MUTANTS
    assert [str(each) for each in found if proved_generically(each)] == []
    assert [str(each) for each in found if proved_exactly(each)] == []
    assert proved_together(found, proved_axioms()) == [False] * len(found)
