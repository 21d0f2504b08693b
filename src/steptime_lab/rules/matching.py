"""Index of the rules that may match a term of a graph, by the operators at its root and of its arguments."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from itertools import product
from typing import Final

from steptime_lab.rules.graphs import Terms
from steptime_lab.rules.rule import Match, Rule, matches
from steptime_lab.rules.sizes import Condition
from steptime_lab.rules.terms import VARIABLE, Term

PARTIAL: Final = frozenset({"sqrt", "recip"})
"""Partial functions; a rule that adds or drops one is not used."""
MADE_OF_NOTHING: Final = frozenset({"zero", "one", "identity"})


def is_usable(way: Rule) -> bool:
    """True if a direction of a rule applies to graphs: a match binds all of its target, which can be lowered."""
    source = way.sources[0]
    if len(way.sources) > 1 or source.op == VARIABLE or not way.applicable:
        return False
    sides = [[each.op for each in side.walk()] for side in (source, way.targets[0])]
    counts = [sorted(op for op in side if op in PARTIAL) for side in sides]
    return counts[0] == counts[1] and not MADE_OF_NOTHING & {*sides[0], *sides[1]}


class Way:
    """One direction of a rule with one output."""

    def __init__(self, rule: Rule) -> None:
        self.rule, self.source, self.target = rule, rule.sources[0], rule.targets[0]

    @cached_property
    def needs(self) -> list[Condition]:
        """Conditions on sizes; none if all variables may be broadcast."""
        return [] if self.rule.pointwise else self.rule.needs()

    def match(self, terms: Terms, given: Term) -> Match | None:
        """The match at a term of a graph, or None."""
        weights = terms.steady.__contains__
        return matches(self.rule, (given,), {}, weights, self.needs, known=terms.shapes, closed=terms.closed)


def ways_of(rules: Iterable[Rule]) -> tuple[Way, ...]:
    """The usable directions of rules, without duplicates."""
    ways: dict[tuple[object, ...], Rule] = {}
    for rule in rules:
        for way in (rule, rule.reverse()):
            if is_usable(way):
                ways.setdefault((way.sources, way.targets, way.variables, way.where), way)
    return tuple(map(Way, ways.values()))


class Index:
    """Rules by the operators at the root of their source and of its arguments.

    >>> from steptime_lab.rules.declared import rule_of
    >>> from steptime_lab.rules.terms import parsed
    >>> index = Index(ways_of([rule_of("twice", "x[n]", "neg(neg(x))", "x")]))
    >>> [len(index.at(parsed(text))) for text in ("neg(neg(y))", "neg(relu(y))")]
    [1, 0]
    """

    def __init__(self, ways: Iterable[Way]) -> None:
        self._rows: dict[tuple[str, ...], list[Way]] = {}
        for each in ways:
            self._rows.setdefault(_key(each.source), []).append(each)

    def at(self, given: Term) -> list[Way]:
        """Rules that may match at a term."""
        key_of_term = _key(given)
        if 2 ** len(given.children) > len(self._rows):  # many arguments have too many combinations
            fits = (len(key) == len(key_of_term) and all(map(_covers, key, key_of_term)) for key in self._rows)
            return [way for ways, fit in zip(self._rows.values(), fits, strict=True) if fit for way in ways]
        keys = product(*[dict.fromkeys((VARIABLE, each)) for each in key_of_term[1:]])
        return [way for key in keys for way in self._rows.get((given.op, *key), ())]


def _key(given: Term) -> tuple[str, ...]:
    return (given.op, *(child.op for child in given.children))


def _covers(key: str, op: str) -> bool:
    return key in (VARIABLE, op)
