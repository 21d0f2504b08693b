"""Generalisation of an equality at equal sizes to a rule with sizes as general as tests allow.

Every dim of a variable, every cut and every window gets a size of its own; equalities that shapes require are solved.
If the result fails a short test, sizes are identified again as far as needed: one after another is freed, and stays
free if the test holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from steptime.errors import UserError
from steptime_lab.rules.operators import OPERATORS, axis_of
from steptime_lab.rules.rule import Rule, unified
from steptime_lab.rules.sizes import ONE, ZERO, Size, size
from steptime_lab.rules.terms import VARIABLE, Shape, Term, Variable, replaced, shape_of, term, variable
from steptime_lab.rules.universes import Universe
from steptime_lab.rules.verify_random import fuzzed

TESTS: Final = 8
FREE: Final = frozenset(("stride", "pad", "dilation", "kernel", "before", "after", "border", "factor", "extent"))
"""Attributes that a rule may have as free sizes."""
BORDERS: Final = frozenset(("pad", "before", "after", "border"))
LETTERS: Final = "abcdefghijklmnopqrst"
TENSORS: Final = ("x", "y", "z", "w", "v", "u")


@dataclass(slots=True)
class _Opened:
    """Builder of a term with new sizes, which records the original of each."""

    universe: Universe
    cuts: str
    was: dict[str, Size] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    shared: dict[tuple[Size, Size], Size] = field(default_factory=dict)

    def new(self, before: Size) -> Size:
        """A new size in place of another."""
        name = f"{LETTERS[len(self.was) % 20]}{len(self.was)}"
        self.was[name] = before
        return size(name)

    def opened(self, name: str, before: Size) -> Size:
        """A new size for an attribute, shared by equal borders and by equal attributes of one name."""
        key = size(f"{'pad' if name in BORDERS else name}_"), before
        if key not in self.shared:
            self.shared[key] = self.new(before)
        return self.shared[key]

    def term(self, given: Term) -> Term:
        """The term with new sizes."""
        if given.op == VARIABLE:
            if given.name not in self.variables:
                declared = next(v for v in self.universe.variables if v.name == given.name)
                dims = tuple(d if d == ONE else self.new(d) for d in declared.dims)
                self.variables[given.name] = replace(declared, dims=dims)
            return variable(given.name)
        children = tuple(map(self.term, given.children))
        if given.op == "slice":
            return term("slice", children, self._cut(given, children[0]))
        names = OPERATORS[given.op].attributes
        attributes = tuple(
            self.opened(name, each) if name in FREE and not (name == "pad" and each == ZERO) else each
            for name, each in zip(names, given.attributes, strict=False)
        )
        return term(given.op, children, attributes if names != ("...",) else given.attributes)

    def _cut(self, given: Term, child: Term) -> tuple[Size, ...]:
        """Cuts of a slice: open ones share a size if equal; else those at zero and at the end stay there."""
        axis, start, end = given.attributes
        if self.cuts in ("open", "tied"):
            key = axis if self.cuts == "open" else ZERO
            for each in (start, end):
                if (key, each) not in self.shared:
                    self.shared[key, each] = self.new(each)
            return axis, self.shared[key, start], self.shared[key, end]
        before = self._dims(given.children[0], {v.name: v for v in self.universe.variables})
        now = self._dims(child, self.variables)
        at = axis_of(axis, len(now))
        whole = now[at]
        inner = _joint(child, at, self) if self.cuts == "joints" else None
        first = ZERO if start == ZERO else inner or self.new(start)
        last = whole if end == before[at] else inner or self.new(end)
        return axis, first, last

    @staticmethod
    def _dims(given: Term, variables: Mapping[str, Variable]) -> Shape:
        return shape_of(given, variables, {}, [])


def _joint(given: Term, axis: int, opened: _Opened) -> Size | None:
    """End of the first part of a concatenation below element-wise operators; None: there is no concatenation."""
    while given.op != VARIABLE and given.op != "concat":
        if not OPERATORS[given.op].aligns or given.op == "matmul":
            return None
        given = given.children[0]
    if given.op != "concat" or given.attributes[0].number != axis:
        return None
    return opened._dims(given.children[0], opened.variables)[axis]


def general(source: Term, target: Term, universe: Universe) -> list[Rule]:
    """The most general rules that tests allow for an equality in a universe; none if it is false.

    The first may have sizes in place of dims of one. It need not cover an equality with broadcasting; the last does.
    """
    slices = any(each.op == "slice" for side in (source, target) for each in side.walk())
    for cuts in ("open", "tied", "joints", "ends") if slices else ("ends",):
        opened = _Opened(universe, cuts)
        try:
            sides = opened.term(source), opened.term(target)
        except UserError:
            continue
        rule = Rule(name="", variables=tuple(opened.variables.values()), sources=sides[:1], targets=sides[1:])
        found = _holds(rule) or (None if cuts in ("open", "tied") else _narrowed(rule, opened.was))
        if found is not None:
            whole = _reopened(_split(_widened(found)))
            wide = _without_ones(whole)
            return [named(wide), named(whole)] if wide is not whole else [named(whole)]
    return []


def _without_ones(rule: Rule) -> Rule:
    """The rule with sizes in place of dims of one, as far as tests hold."""
    for number, each in enumerate(rule.variables):
        for at, dim in enumerate(each.dims):
            if dim == ONE:
                dims = (*each.dims[:at], size(f"o{number}_{at}"), *each.dims[at + 1 :])
                trial = (*rule.variables[:number], replace(each, dims=dims), *rule.variables[number + 1 :])
                found = _holds(replace(rule, variables=trial))
                if found is not None and _dims_of_one(found) < _dims_of_one(rule):
                    return _without_ones(found)
    return rule


def _dims_of_one(rule: Rule) -> int:
    return sum(dim == ONE for each in rule.variables for dim in each.dims)


def _widened(rule: Rule) -> Rule:
    """An element-wise rule without dims of one if tests hold, as it also covers broadcasting; else the rule."""
    if not rule.pointwise or not any(dim == ONE for each in rule.variables for dim in each.dims):
        return rule
    rank = max(len(each.dims) for each in rule.variables)
    dims = tuple(size(f"w{i}") for i in range(rank))
    return _holds(replace(rule, variables=tuple(replace(each, dims=dims) for each in rule.variables))) or rule


def _reopened(rule: Rule) -> Rule:
    """The rule with a new size for every dim, if attributes use no size of dims and tests hold; else the rule."""
    inside = {name for side in (*rule.sources, *rule.targets) for name in side.size_names()}
    if any(inside & dim.names() for each in rule.variables for dim in each.dims):
        return rule
    variables = tuple(
        replace(v, dims=tuple(d if d == ONE else size(f"d{n}_{i}") for i, d in enumerate(v.dims)))
        for n, v in enumerate(rule.variables)
    )
    return _holds(replace(rule, variables=variables)) or rule


def _split(rule: Rule) -> Rule:
    """The rule with separate variables for occurrences of one variable, as far as tests hold."""
    for name in rule.sources[0].variables():
        counts = [sum(t.name == name for t in side[0].walk()) for side in (rule.sources, rule.targets)]
        if min(counts) < 2:
            continue
        for i in range(1, counts[0]):
            for j in range(counts[1]):
                found = _apart(rule, name, i, j)
                if found is not None:
                    return _split(found)
    return rule


def _apart(rule: Rule, name: str, i: int, j: int) -> Rule | None:
    """The rule with a new variable at one occurrence on each side, if tests hold; with new dims if these hold too."""
    new = f"{name}_"
    while new in rule.table:
        new += "_"
    sides = _put(rule.sources[0], name, new, [i]), _put(rule.targets[0], name, new, [j])
    declared = rule.table[name]
    same = replace(rule, variables=(*rule.variables, replace(declared, name=new)), sources=sides[:1], targets=sides[1:])
    if _holds(same) is None:
        return None
    sizes = {each: size(f"{each}_{len(rule.variables)}") for dim in declared.dims for each in dim.names()}
    own = replace(declared, name=new, dims=tuple(dim.replace(sizes) for dim in declared.dims))
    return _holds(replace(same, variables=(*rule.variables, own))) or _holds(same)


def _put(given: Term, name: str, new: str, left: list[int]) -> Term:
    """The term with the occurrence to which ``left`` counts down renamed."""
    if given.op == VARIABLE:
        if given.name != name:
            return given
        left[0] -= 1
        return variable(new) if left[0] == -1 else given
    return term(given.op, tuple(_put(child, name, new, left) for child in given.children), given.attributes)


def _holds(rule: Rule) -> Rule | None:
    """The rule with unified sizes if a short test holds, else None."""
    try:
        out = unified(rule)
        if out is None:
            return None
        result = fuzzed(out, TESTS)
    except UserError:
        return None
    return out if isinstance(result, int) and result >= min(TESTS, 3) else None


def _narrowed(rule: Rule, was: Mapping[str, Size]) -> Rule | None:
    """The rule with as few sizes identified as needed."""
    together = {
        name: before.replace({each: size(f"{each}_") for each in before.names()}) for name, before in was.items()
    }
    best = _holds(_with(rule, together))
    if best is None:
        return None
    for name in sorted(was, key=lambda each: int(each[1:])):
        trial = {each: by for each, by in together.items() if each != name}
        here = _holds(_with(rule, trial))
        if here is not None:
            together, best = trial, here
    return best


def _with(rule: Rule, by: Mapping[str, Size]) -> Rule:
    sides = [tuple(replaced(each, {}, by) for each in side) for side in (rule.sources, rule.targets)]
    variables = tuple(replace(v, dims=tuple(dim.replace(by) for dim in v.dims)) for v in rule.variables)
    where = tuple(c for each in rule.where if not (c := each.replace(by)).certain)
    return replace(rule, variables=variables, sources=sides[0], targets=sides[1], where=where)


def named(rule: Rule) -> Rule:
    """The rule with variables x, y, .. and sizes a, b, .. in order of occurrence."""
    used = tuple(dict.fromkeys(n for side in (*rule.sources, *rule.targets) for n in side.variables()))
    table, letters = rule.table, iter(TENSORS)
    variables = {name: next(letters) for name in used}
    seen = list(dict.fromkeys(_occurring(rule, [table[name] for name in used])))
    sizes = {name: size(_letter(number)) for number, name in enumerate(seen)}
    terms = {old: variable(new) for old, new in variables.items()}
    sides = [tuple(replaced(each, terms, sizes) for each in side) for side in (rule.sources, rule.targets)]
    declared = tuple(
        Variable(name=variables[n], dims=tuple(d.replace(sizes) for d in table[n].dims), kind=table[n].kind)
        for n in used
    )
    where = tuple(each.replace(sizes) for each in rule.where)
    return replace(rule, variables=declared, sources=sides[0], targets=sides[1], where=where)


def _letter(number: int) -> str:
    return LETTERS[number] if number < len(LETTERS) else f"a{number}"


def _occurring(rule: Rule, variables: Sequence[Variable]) -> Iterator[str]:
    for each in variables:
        for dim in each.dims:
            yield from sorted(dim.names())
    for side in (*rule.sources, *rule.targets):
        for inner in side.walk():
            for attribute in inner.attributes:
                yield from sorted(attribute.names())
