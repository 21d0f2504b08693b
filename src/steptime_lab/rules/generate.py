"""Generation of substitutions: terms of up to four operators with equal fingerprints, if not derivable, give rules.

Terms are enumerated by number of operators. Only one representative per fingerprint class is extended, at two
assignments of sizes at once. A term that equals an earlier one is a candidate, unless a known rule rewrites it at its
root into a smaller term, so that its equality follows (ordered rewriting; the order of :func:`terms.order` is total,
well-founded and preserved by contexts). A candidate is generalised in its sizes, tested, proved, and kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

import numpy as np

from steptime.errors import UserError
from steptime_lab.rules.certify import checked
from steptime_lab.rules.domains import MERSENNE, SAFE, Array, Domain, FieldPair, Residues
from steptime_lab.rules.evaluation import run
from steptime_lab.rules.generalise import general
from steptime_lab.rules.operators import OPERATORS
from steptime_lab.rules.rule import Rule, matches
from steptime_lab.rules.sizes import Condition
from steptime_lab.rules.terms import VARIABLE, Shape, Term, Variable, order, replaced, term, variable
from steptime_lab.rules.universes import Template, Universe
from steptime_lab.rules.verify_egraph import proved_together

COMMUTES: Final = frozenset(("add", "mul", "maximum"))
CHUNK: Final = 1 << 15
"""Number of candidates that are evaluated at once."""
MOST: Final = 3_000_000
"""Largest number of candidates with one number of operators in one universe."""


@dataclass(slots=True)
class Bucket:
    """Representatives of one type and one number of operators, with their values at each assignment."""

    terms: list[Term]
    values: list[Array]


Level: TypeAlias = dict[Shape, Bucket]


@dataclass(frozen=True, slots=True)
class Candidates:
    """Candidates of one template on one or two buckets: fingerprints, and positions of their arguments."""

    template: Template
    buckets: tuple[Bucket, ...]
    places: tuple[Array, ...]
    keys: Array
    shape: Shape

    def term(self, at: int) -> Term:
        """The term of one candidate."""
        children = tuple(b.terms[int(p[at])] for b, p in zip(self.buckets, self.places, strict=True))
        return term(self.template.op, children, self.template.attributes)


@dataclass(slots=True)
class Found:
    """Results of an enumeration: rules, also by root, and counts for the report."""

    rules: list[Rule] = field(default_factory=list)
    texts: set[str] = field(default_factory=set)
    by_root: dict[str, list[tuple[Rule, list[Condition]]]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, rule: Rule) -> None:
        """Add a rule in both directions."""
        self.rules.append(rule)
        self.texts.add(str(rule))
        for way in (rule, rule.reverse()):
            source, *more = way.sources
            if not more and source.op != VARIABLE and way.applicable:
                self.by_root.setdefault(source.op, []).append((way, way.needs()))

    def count(self, name: str, number: int = 1) -> None:
        """Add to a counter."""
        self.counts[name] = self.counts.get(name, 0) + number

    def reduces(self, given: Term, universe: Universe, variables: Mapping[str, Variable]) -> bool:
        """True if a rule rewrites a term at its root into a smaller one."""
        key = order(given)

        def holds(condition: Condition) -> bool:
            return condition.certain or all(condition.holds(at) for at in universe.assignments)

        for rule, needs in self.by_root.get(given.op, ()):
            if not _alike(rule.sources[0], given):
                continue
            found = matches(rule, (given,), variables, None, needs, holds)
            if found is not None and order(replaced(rule.targets[0], found.terms, found.sizes)) < key:
                return True
        return False


def _alike(pattern: Term, given: Term) -> bool:
    """True if the operators of a pattern match those of a term; sizes and variables are not compared."""
    if pattern.op == VARIABLE:
        return True
    return (
        pattern.op == given.op
        and len(pattern.children) == len(given.children)
        and all(map(_alike, pattern.children, given.children))
    )


def domain_of(universe: Universe) -> Domain:
    """Residues, or a pair of fields if a template contains exp."""
    return FieldPair() if {"exp", "softmax"} & {each.op for each in universe.templates} else Residues()


def explored(universe: Universe, found: Found, seed: int, operators: int, progress: Callable[[str], None]) -> None:
    """Find all rules of one universe up to a number of operators, and add them to ``found``."""
    domain, variables = domain_of(universe), {v.name: v for v in universe.variables}
    levels: list[Level] = [_leaves(universe, domain, seed)]
    known: dict[int, Term] = {}
    for shape, bucket in levels[0].items():
        keys = _typed(_fingerprint(bucket.values, domain, seed), universe.types.index(shape))
        known |= dict(zip(keys.tolist(), bucket.terms, strict=True))
    for number in range(1, operators + 1):
        made = list(_candidates(universe, domain, levels, number, seed))
        found.count("candidates", sum(len(each.keys) for each in made))
        collisions, fresh = _resolved(made, known, last=number == operators)
        found.count("equalities", len(collisions))
        before = len(found.rules)
        for given, other in sorted(collisions, key=_generality):
            _consider(given, other, universe, variables, found)
        progress(
            f"{universe.name}: {number} operators, {sum(len(c.keys) for c in made):,} candidates, "
            f"{len(collisions):,} equal, {len(found.rules) - before} rules"
        )
        if number < operators:
            levels.append(_extended(made, fresh, universe, domain))


def _generality(pair: tuple[Term, Term]) -> tuple[object, ...]:
    """Sort key: small terms first; among equal sizes, more variables first, as others are their instances."""
    given, other = pair
    return given.operators, given.leaves, -len(given.variables()), order(given), order(other)


def _consider(given: Term, other: Term, universe: Universe, variables: Mapping[str, Variable], found: Found) -> None:
    if given is other or found.reduces(given, universe, variables):
        return
    found.count("underivable")
    rules = general(given, other, universe)
    if not rules:
        found.count("false")
    for rule in rules:
        if str(rule) in found.texts:
            continue
        try:
            verdict = checked(rule)
        except UserError:  # sizes that satisfy all conditions are too rare
            found.count("false")
            continue
        if verdict.counterexample is not None or not verdict.rule.certificate.exact:
            found.count("false")
            continue
        found.add(replace(verdict.rule, origin=universe.name))
        if found.reduces(given, universe, variables):
            return


def _leaves(universe: Universe, domain: Domain, seed: int) -> Level:
    out: Level = {}
    for each in universe.variables:
        values = [
            np.expand_dims(domain.random(tuple(d.value(at) for d in each.dims), each.name, seed), domain.lead)
            for at in universe.assignments
        ]
        bucket = out.setdefault(each.dims, Bucket([], [v[:0] if not domain.lead else v[:, :0] for v in values]))
        bucket.terms.append(variable(each.name))
        bucket.values = [np.concatenate(pair, axis=domain.lead) for pair in zip(bucket.values, values, strict=True)]
    return out


def _fingerprint(arrays: Sequence[Array], domain: Domain, seed: int) -> Array:
    """A 64-bit fingerprint for each term from its values at all assignments."""
    total: Array | None = None
    prime = np.uint64(0x9E3779B97F4A7C15)
    for number, array in enumerate(arrays):
        values = array[0] if domain.lead else array
        modulus = SAFE if domain.lead else MERSENNE
        flat = values.reshape(values.shape[0], -1)
        weights = np.random.default_rng((seed, number)).integers(1, modulus, (2, flat.shape[1]), dtype=np.int64)
        for row in weights:
            part = ((flat * row % modulus).sum(axis=1) % modulus).astype(np.uint64)
            total = part if total is None else (total ^ (total >> np.uint64(29))) * prime + part
    assert total is not None
    return total


def _typed(keys: Array, kind: int) -> Array:
    """Fingerprints mixed with the number of the type."""
    return np.asarray(keys ^ np.uint64((kind + 1) * 0x9E3779B97F4A7C15 % 2**64))


def _candidates(
    universe: Universe, domain: Domain, levels: Sequence[Level], number: int, seed: int
) -> Iterator[Candidates]:
    total = 0
    for template in universe.templates:
        arity = template.arity
        splits: list[tuple[int, ...]] = [(i, number - 1 - i) for i in range(number)] if arity == 2 else [(number - 1,)]
        for split in splits:
            if number > 1 and template.op in COMMUTES and split[0] < split[-1]:
                continue
            for buckets in _typed_buckets(levels, split):
                shape = _result(template, tuple(shape for shape, _ in buckets), universe)
                if shape is None:
                    continue
                places = _places(template, [b for _, b in buckets], split)
                keys = _evaluated(template, [b for _, b in buckets], places, universe, domain, seed)
                total += len(keys)
                if total > MOST:
                    raise UserError(f"{universe.name}: more than {MOST:,} candidates of {number} operators")
                keys = _typed(keys, universe.types.index(shape))
                yield Candidates(template, tuple(b for _, b in buckets), places, keys, shape)


def _typed_buckets(levels: Sequence[Level], split: tuple[int, ...]) -> Iterator[tuple[tuple[Shape, Bucket], ...]]:
    if len(split) == 1:
        yield from ((item,) for item in levels[split[0]].items())
        return
    yield from ((a, b) for a in levels[split[0]].items() for b in levels[split[1]].items())


def _result(template: Template, shapes: tuple[Shape, ...], universe: Universe) -> Shape | None:
    """The result type of a template; None: arguments do not fit, or the type is not in the universe."""
    needs: list[Condition] = []
    try:
        out = OPERATORS[template.op].shape(template.attributes, list(shapes), needs)
    except UserError:
        return None
    if any(each.equal and each.size.terms for each in needs) or out not in universe.types:
        return None
    good = all(each.holds(at) for each in needs for at in universe.assignments)
    return out if good and template.fits(shapes) else None


def _places(template: Template, buckets: Sequence[Bucket], split: tuple[int, ...]) -> tuple[Array, ...]:
    sizes = [len(bucket.terms) for bucket in buckets]
    if len(sizes) == 1:
        return (np.arange(sizes[0]),)
    left, right = np.indices(sizes).reshape(2, -1)
    if template.op in COMMUTES and buckets[0] is buckets[1] and sum(split) > 0:
        keep = left <= right
        left, right = left[keep], right[keep]
    return left, right


def _evaluated(
    template: Template,
    buckets: Sequence[Bucket],
    places: tuple[Array, ...],
    universe: Universe,
    domain: Domain,
    seed: int,
) -> Array:
    parts = [np.zeros(0, dtype=np.uint64)]
    for start in range(0, len(places[0]), CHUNK):
        here = [each[start : start + CHUNK] for each in places]
        parts.append(_fingerprint(_values(template, buckets, here, universe, domain), domain, seed))
    return np.concatenate(parts)


def _values(
    template: Template, buckets: Sequence[Bucket], places: Sequence[Array], universe: Universe, domain: Domain
) -> list[Array]:
    out = []
    for number, at in enumerate(universe.assignments):
        arrays = [np.take(b.values[number], p, axis=domain.lead) for b, p in zip(buckets, places, strict=True)]
        attributes = tuple(each.value(at) for each in template.attributes)
        if len({array.ndim for array in arrays}) > 1:  # dims of one after the axis of candidates
            rank = max(array.ndim for array in arrays)
            lead = domain.lead + 1
            arrays = [a.reshape(*a.shape[:lead], *[1] * (rank - a.ndim), *a.shape[lead:]) for a in arrays]
        out.append(run(OPERATORS[template.op], domain, attributes, arrays))
    return out


def _resolved(
    made: Sequence[Candidates], known: dict[int, Term], last: bool
) -> tuple[list[tuple[Term, Term]], dict[int, list[int]]]:
    """Pairs of a term and its class representative, and the candidates that are new representatives.

    New representatives are added to ``known``, except at the last number of operators.
    """
    groups: dict[int, list[tuple[int, int]]] = {}
    out: list[tuple[Term, Term]] = []
    for number, each in enumerate(made):
        for at, key in enumerate(each.keys.tolist()):
            if key in known:
                out.append((each.term(at), known[key]))
            else:
                groups.setdefault(key, []).append((number, at))
    fresh: dict[int, list[int]] = {}
    for key, members in groups.items():
        if last and len(members) == 1:
            continue
        terms = [made[number].term(at) for number, at in members]
        best = min(range(len(terms)), key=lambda i: order(terms[i])) if len(terms) > 1 else 0
        out += [(each, terms[best]) for each in terms if each is not terms[best]]
        if not last:
            known[key] = terms[best]
            fresh.setdefault(members[best][0], []).append(members[best][1])
    return out, fresh


def _extended(
    made: Sequence[Candidates], fresh: Mapping[int, Sequence[int]], universe: Universe, domain: Domain
) -> Level:
    """The next level: new representatives with their values."""
    terms: dict[Shape, list[Term]] = {}
    values: dict[Shape, list[list[Array]]] = {}
    for number, places in fresh.items():
        each = made[number]
        chosen = [p[np.array(places)] for p in each.places]
        terms.setdefault(each.shape, []).extend(each.term(at) for at in places)
        values.setdefault(each.shape, []).append(_values(each.template, each.buckets, chosen, universe, domain))
    return {
        shape: Bucket(
            terms[shape], [np.concatenate(parts, axis=domain.lead) for parts in zip(*values[shape], strict=True)]
        )
        for shape in terms
    }


def minimal(rules: Sequence[Rule], progress: Callable[[str], None]) -> list[Rule]:
    """Rules that do not follow from smaller ones in an e-graph within two rounds (one from three operators on).

    Rules are added by number of operators, and in batches of one number so that later ones can follow from earlier
    ones.
    """
    kept: list[Rule] = []
    ordered = sorted(rules, key=lambda rule: (rule.operators, *_generality((rule.sources[0], rule.targets[0]))))
    sizes = sorted({rule.operators for rule in ordered})
    for number in sizes:
        here = [rule for rule in ordered if rule.operators == number]
        width = max(1, -(-len(here) // BATCHES))
        for start in range(0, len(here), width):
            batch = here[start : start + width]
            derived = proved_together(batch, kept, 2 if number < LARGE else 1)
            kept += [rule for rule, follows in zip(batch, derived, strict=True) if not follows]
        progress(f"{number} operators: {len(here)} rules, {sum(r.operators == number for r in kept)} do not follow")
    return kept


LARGE: Final = 3
"""Number of operators from which a second round of the e-graph takes too long."""
BATCHES: Final = 8
"""Number of batches of rules with one number of operators."""
