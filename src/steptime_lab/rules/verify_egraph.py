"""Layer (iii): proofs of rules from other rules in an e-graph (egglog), also used to drop rules that follow.

Terms carry their dims as large random numbers, so that sizes are hardly ever equal by chance; a rule only fires if the
dims of its variables are as declared. The rules of the e-graph are the substitutions of :mod:`rule`, written from the
same declaration.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, permutations, product
from typing import Final

import numpy as np

from steptime.registry import needed
from steptime_lab.rules.operators import OPERATORS
from steptime_lab.rules.rule import Rule
from steptime_lab.rules.sizes import ZERO, Condition, Quotient, Size, size
from steptime_lab.rules.terms import VARIABLE, Term

RANK: Final = 4
"""Number of dims of a tensor in the e-graph; missing dims are zero."""
ROUNDS: Final = 3
LOW, HIGH = 40, 4000
DRAWS: Final = 4000


def proved_together(rules: Sequence[Rule], axioms: Sequence[Rule], rounds: int = ROUNDS) -> list[bool]:
    """True for each rule that follows from the axioms within a number of rounds of one common e-graph."""
    program = program_of(rules, axioms, rounds)
    graph = needed("egglog.bindings", "a proof in an e-graph").EGraph()
    # Line by line, because the parser keeps a copy of the whole text for every token.
    printed = "".join(
        str(out) for line in program.splitlines() for out in graph.run_program(*graph.parse_program(line))
    )
    done = {int(number) for number in re.findall(r"\(proved (\d+)\)", printed)}
    ends = np.cumsum([0, *(len(rule.sources) for rule in rules)]).tolist()
    return [done.issuperset(range(start, end)) for start, end in pairwise(ends)]


def program_of(rules: Sequence[Rule], axioms: Sequence[Rule], rounds: int) -> str:
    """The egglog program that proves rules from axioms."""
    sides = [t for rule in (*rules, *axioms) for side in (*rule.sources, *rule.targets) for t in side.walk()]
    used = sorted({(t.op, len(t.children), len(t.attributes)) for t in sides if t.op != VARIABLE})
    lines = [f"(datatype T (Var String) {' '.join(map(_constructor, used))})"]
    lines += [f"(function {_dim(i)} (T) i64 :merge (max old new))" for i in range(RANK)]
    lines += ["(relation task (i64 T T))", "(relation proved (i64))"]
    lines += ["(ruleset shapes)", "(ruleset rewrites)", "(ruleset ends)"]
    lines += [_shape_rule(*each) for each in used]
    lines += ["(rule ((task i a a)) ((proved i)) :ruleset ends)"]
    ways = (way for axiom in axioms for way in (axiom, axiom.reverse()) if len(way.sources) == 1)
    lines += dict.fromkeys(text for way in ways if (text := rewrite_of(way)))
    tasks = 0
    for number, rule in enumerate(rules):
        at, prefix = large_sizes(rule, number), f"{number}."
        if at is None:
            tasks += len(rule.sources)
            continue
        for variable in rule.variables:
            dims = [dim.value(at) for dim in variable.dims]
            padded = [0] * (RANK - len(dims)) + dims
            name = f'(Var "{prefix}{variable.name}")'
            lines += [f"(set ({_dim(i)} {name}) {value})" for i, value in enumerate(padded)]
        for a, b in zip(rule.sources, rule.targets, strict=True):
            lines.append(f"(task {tasks} {_ground(a, at, prefix)} {_ground(b, at, prefix)})")
            tasks += 1
    lines.append(f"(run-schedule (repeat {rounds} (saturate shapes) (run rewrites)) (run ends))")
    return "\n".join([*lines, f"(print-function proved {tasks + 1})"])


def large_sizes(rule: Rule, seed: int) -> dict[str, int] | None:
    """Large random numbers for the sizes that satisfy the rule's conditions; None: none were found.

    A rule with an equality as a condition (such as a division without remainder) has none, because a proof for special
    sizes is not a proof for all.
    """
    rng, names = np.random.default_rng((7, seed)), rule.names
    if any(each.equal for each in rule.needs()):
        return None
    needs = rule.needs() + [Condition(dim - 1, equal=False) for each in rule.variables for dim in each.dims]
    columns = dict(zip(names, rng.integers(LOW, HIGH, (len(names), DRAWS)), strict=True))
    good = np.ones(DRAWS, dtype=bool)
    with np.errstate(divide="ignore"):
        for each in needs:
            value = each.size.values(columns)
            good &= value == 0 if each.equal else value >= 0
    found = np.flatnonzero(good)
    return {name: int(columns[name][found[0]]) for name in names} if len(found) else None


def _constructor(of: tuple[str, int, int]) -> str:
    _, children, attributes = of
    return f"({_name(of)}{' i64' * attributes}{' T' * children})"


def _name(of: tuple[str, int, int]) -> str:
    return f"{of[0]}_{of[1]}_{of[2]}"


def _head(term: Term) -> str:
    return _name((term.op, len(term.children), len(term.attributes)))


def _dim(at: int) -> str:
    return f"dim{RANK - at}"


def _ground(term: Term, at: Mapping[str, int], prefix: str) -> str:
    if term.op == VARIABLE:
        return f'(Var "{prefix}{term.name}")'
    inside = [str(each.value(at)) for each in term.attributes]
    return f"({' '.join([_head(term), *inside, *(_ground(child, at, prefix) for child in term.children)])})"


def arithmetic(given: Size) -> str:
    """A size as an integer expression of egglog."""
    terms = []
    for monomial, value in given.terms:
        factors = [str(int(value)), *map(_atom, monomial)] if value != 1 or not monomial else [*map(_atom, monomial)]
        terms.append(_folded("*", factors))
    return _folded("+", terms) if terms else "0"


def _atom(atom: str | Quotient) -> str:
    if isinstance(atom, str):
        return f"s_{atom}"
    return f"(/ {arithmetic(atom.numerator)} {arithmetic(atom.denominator)})"


def _folded(op: str, parts: Iterable[str]) -> str:
    first, *rest = parts
    for each in rest:
        first = f"({op} {first} {each})"
    return first


def _shape_rule(op: str, children: int, attributes: int) -> str:
    """Rule that derives the dims of an operator's result from those of its arguments."""
    row = OPERATORS[op]
    given = tuple(size(f"a{i}") for i in range(attributes))
    if row.attributes[:1] == ("axis",) or op == "permute":
        return "\n".join(_axis_rules(op, children, attributes))
    args = [f"c{i}" for i in range(children)]
    head = f"({' '.join([_name((op, children, attributes)), *(f's_a{i}' for i in range(attributes)), *args])})"
    shapes = [tuple(size(f"{a}d{i}") for i in range(RANK)) for a in args]
    out = (ZERO,) * (RANK - len(row.shape(given, shapes, []))) + row.shape(given, shapes, [])
    texts = list(map(arithmetic, out))
    if row.aligns:
        last = RANK - 2 if op == "matmul" else RANK
        for i in range(last):
            texts[i] = _folded("max", [f"s_{a}d{i}" for a in args])
    reads = " ".join(f"(= s_{a}d{i} ({_dim(i)} {a}))" for a in args for i in range(RANK))
    sets = " ".join(f"(set ({_dim(i)} e) {text})" for i, text in enumerate(texts))
    return f"(rule ((= e {head}) {reads}) ({sets}) :ruleset shapes)"


def _axis_rules(op: str, children: int, attributes: int) -> Iterable[str]:
    """One shape rule for each value of an operator's axes."""
    row = OPERATORS[op]
    axes = attributes if op == "permute" else sum(name == "axis" for name in row.attributes)
    every = permutations(range(-axes, 0)) if op == "permute" else product(range(-RANK, 0), repeat=axes)
    for chosen in every:
        given = (*map(size, chosen), *(size(f"a{i}") for i in range(axes, attributes)))
        args = [f"c{i}" for i in range(children)]
        inside = [*map(str, chosen), *(f"s_a{i}" for i in range(axes, attributes))]
        head = f"({' '.join([_name((op, children, attributes)), *inside, *args])})"
        shapes = [tuple(size(f"{a}d{i}") for i in range(RANK)) for a in args]
        if op == "permute":
            shapes = [each[RANK - axes :] for each in shapes]
        out = row.shape(given, shapes, [])
        out = (ZERO,) * (RANK - len(out)) + out
        reads = " ".join(f"(= s_{a}d{i} ({_dim(i)} {a}))" for a in args for i in range(RANK))
        sets = " ".join(f"(set ({_dim(i)} e) {arithmetic(each)})" for i, each in enumerate(out))
        yield f"(rule ((= e {head}) {reads}) ({sets}) :ruleset shapes)"


def rewrite_of(rule: Rule) -> str | None:
    """A substitution as an e-graph rule from source to target; None: the source is a variable or binds too little."""
    (source,), (target,) = rule.sources, rule.targets
    if source.op == VARIABLE:  # it would grow every term without bound
        return None
    bound: set[str] = set()
    guards: list[str] = []
    rests: list[tuple[str, Size]] = []
    pattern = _pattern(source, bound, rests)
    mine = source.variables()
    lifts = rule.lifts
    for name in mine if not rule.pointwise else ():
        dims = rule.table[name].dims
        for i in range(RANK):
            at = i - (RANK - len(dims))
            entry = f"({_dim(i)} t_{name})"
            if at < 0:
                guards.append(f"(= l{i} {entry})" if lifts else f"(= 0 {entry})")
            elif (new := dims[at].name) and new not in bound:
                bound.add(new)
                guards.append(f"(= s_{new} {entry})")
            else:
                rests.append((entry, dims[at]))
    needed = {n for _, each in rests for n in each.names()} | target.size_names()
    needs = [] if rule.pointwise else rule.needs()
    needed |= {n for each in needs for n in each.size.names()}
    if not set(target.variables()) <= set(mine) or not needed <= bound:
        return None
    guards += [f"(= {entry} {arithmetic(each)})" for entry, each in rests]
    guards += [f"({'=' if c.equal else '>='} {arithmetic(c.size)} 0)" for c in needs]
    made = _made(target)
    return f"(rule ((= e {pattern}) {' '.join(guards)}) ((union e {made})) :ruleset rewrites)"


def _pattern(term: Term, bound: set[str], rests: list[tuple[str, Size]]) -> str:
    if term.op == VARIABLE:
        return f"t_{term.name}"
    inside = []
    for each in term.attributes:
        if each.number is not None:
            inside.append(str(each.number))
        elif each.name:
            bound.add(each.name)
            inside.append(f"s_{each.name}")
        else:
            inside.append(f"x{len(rests)}")
            rests.append((inside[-1], each))
    children = [_pattern(child, bound, rests) for child in term.children]
    return f"({' '.join([_head(term), *inside, *children])})"


def _made(term: Term) -> str:
    if term.op == VARIABLE:
        return f"t_{term.name}"
    return f"({' '.join([_head(term), *map(arithmetic, term.attributes), *map(_made, term.children)])})"
