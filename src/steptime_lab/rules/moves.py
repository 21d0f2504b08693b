"""Rules of the package or of a user's file as passes for every search, grouped by the operator at their root."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from steptime.errors import UserError
from steptime.rewrite.flow import Flow
from steptime.rewrite.retype import RefusedError
from steptime.rewrite.scene import Match, Pass, Scene, shape_text
from steptime_lab.rules.certify import certified
from steptime_lab.rules.declared import read
from steptime_lab.rules.graphs import MOVEMENTS, Terms
from steptime_lab.rules.lowering import Lowering
from steptime_lab.rules.matching import Index, Way, ways_of
from steptime_lab.rules.rule import Match as RuleMatch
from steptime_lab.rules.rule import Rule
from steptime_lab.rules.store import proved_axioms, shipped
from steptime_lab.rules.terms import VARIABLE, Term, replaced

EXACT: Final = MOVEMENTS | {VARIABLE, "maximum", "max", "maxpool", "relu", "neg"}
"""Operators without rounding; a rule of these alone gives bit-equal results."""


@cache
def shipped_ways() -> tuple[Way, ...]:
    """The usable directions of the shipped rules."""
    return ways_of(shipped().rules)


def reorders(way: Way) -> bool:
    """True if a rule may change the last bits.

    It may if its source has rounding operators, and the target has others, the source has several, or its one is
    matmul or conv.
    """
    pair = (way.source, way.target)
    sides = [sorted(each.op for each in side.walk() if each.op not in EXACT) for side in pair]
    return bool(sides[0]) and (sides[0] != sides[1] or len(sides[0]) > 1 or bool({"matmul", "conv"} & {*sides[0]}))


_LAST: list[tuple[Flow, Terms]] = []
"""Cache of the last graph, which all passes of a search share."""


def _terms_of(flow: Flow) -> Terms:
    if not _LAST or _LAST[0][0] is not flow:
        _LAST[:] = [(flow, Terms(flow))]
    return _LAST[0][1]


@dataclass(frozen=True, slots=True)
class RuleFinder:
    """The ``find`` function of a pass for rules with one operator at their root."""

    root: str
    index: Index

    def __call__(self, scene: Scene) -> Iterator[Match]:
        """All matches in a graph."""
        terms = _terms_of(scene.flow)
        for given in list(terms.having[self.root]):
            if given not in terms.values or given in terms.steady:
                continue
            for way in self.index.at(given):
                found = way.match(terms, given)
                match = None if found is None else _match(scene, terms, given, way, found)
                if match is not None:
                    yield match


def _match(scene: Scene, terms: Terms, given: Term, way: Way, found: RuleMatch) -> Match | None:
    """A match as replacements of values; None: the target is already there, or its types do not fit."""
    old = terms.values[given]
    try:
        target = replaced(way.target, found.terms, found.sizes)
        made = Lowering(scene, terms.first, steady=terms.steady.__contains__).value(target)
    except (RefusedError, ValueError, KeyError, IndexError):
        return None
    same = made.type.shape == old[0].type.shape and made.type.dtype == old[0].type.dtype
    if not same or made in old:
        return None
    types = [value.type for value in old[0].node.inputs] or [old[0].type]
    return Match(root=old[0].node, replace=dict.fromkeys(old, made), what=f"{way.rule.name}: {shape_text(*types)}")


def passes_of(ways: Iterable[Way], origin: str) -> tuple[Pass, ...]:
    """Rules as passes, grouped by the operator at their root and by :func:`reorders`."""
    groups: dict[tuple[str, bool], list[Way]] = {}
    for way in ways:
        groups.setdefault((way.source.op, reorders(way)), []).append(way)
    return tuple(
        Pass(
            name=f"rules of {root}{', reordered' if reordered else ''}",
            matches=f"the sources of {len(members)} rules with {root} at their root",
            condition="the sizes, axes and weights of each rule; one float type, or the rule only moves data",
            makes="their targets; what is made of weights alone is computed before the run",
            source=origin,
            find=RuleFinder(root, Index(members)),
            reorders=reordered,
        )
        for (root, reordered), members in sorted(groups.items(), key=lambda item: item[0])
    )


@cache
def rule_moves() -> tuple[Pass, ...]:
    """The shipped rules as passes."""
    return passes_of(shipped_ways(), "generated and proved; `steptime rules`")


def rules(given: str) -> tuple[Pass, ...]:
    """Rules as a set of moves: ``shipped``, or a user's file."""
    return rule_moves() if given == "shipped" else rules_of_file(Path(given))


def rules_of_file(path: Path) -> tuple[Pass, ...]:
    """The certified rules of a user's file as passes.

    Raises:
        InputFileError: it cannot be read.
        UserError: a rule is unsound (the message has sizes and values that show it), or has no proof.
    """
    return passes_of(ways_of(certified_rules(path)), str(path))


def certified_rules(path: Path) -> list[Rule]:
    """The rules of a user's file with certificates.

    Raises:
        InputFileError: it cannot be read.
        UserError: a rule is unsound, or has no proof.
    """
    out = []
    for verdict in certified(read(path), proved_axioms()):
        if verdict.counterexample is not None:
            raise UserError(f"{verdict.rule.name} in {path} is unsound: {verdict.counterexample}")
        if verdict.word != "proved":
            raise UserError(
                f"{verdict.rule.name} in {path} has no proof: {verdict.rule.certificate}",
                hint="state its conditions in its `where` entry, or write it in smaller steps",
            )
        out.append(verdict.rule)
    return out
