"""Layer (i): comparison of both sides on random values for many assignments of sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from steptime_lab.rules.domains import Array, Domain, FieldPair, Floats, Residues
from steptime_lab.rules.evaluation import evaluated
from steptime_lab.rules.rule import LEAST_ASSIGNMENTS, Rule, assignments
from steptime_lab.rules.terms import Term

LEADS: Final[tuple[tuple[int, ...], ...]] = ((), (2,), (), (3, 1))
"""Leading dims that are added in turn to the variables of a rule that lifts."""
Shapes: TypeAlias = dict[str, tuple[int, ...]]
EXPONENTIAL: Final = frozenset(("exp", "softmax"))
SHOWN: Final = 40
"""Largest number of elements of a tensor that the text of a counter-example shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counterexample:
    """Sizes and values for which both sides of a rule differ: one element of one output."""

    sizes: dict[str, int]
    shapes: dict[str, tuple[int, ...]]
    values: dict[str, list[float]]
    output: int
    index: tuple[int, ...]
    source: float
    target: float

    def __str__(self) -> str:
        shapes = ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in self.shapes.items())
        values = "; ".join(f"{name} = {_numbers(each)}" for name, each in self.values.items())
        where = f"element {list(self.index)} of output {self.output}"
        return f"shapes {shapes}; values {values}; {where}: source {self.source:.6g}, target {self.target:.6g}"

    def to_json(self) -> dict[str, object]:
        """The counter-example as plain data for JSON."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def _numbers(values: list[float]) -> str:
    shown = ", ".join(f"{each:g}" for each in values[:SHOWN])
    return f"[{shown}{', ...' if len(values) > SHOWN else ''}]"


def domain_of(rule: Rule) -> Domain:
    """Residues, or a pair of fields if an operator contains exp."""
    every = {each.op for side in (*rule.sources, *rule.targets) for each in side.walk()}
    return FieldPair() if every & EXPONENTIAL else Residues()


def shapes_at(rule: Rule, at: dict[str, int], lead: tuple[int, ...] = ()) -> Shapes:
    """Shapes of a rule's variables for numbers of its sizes."""
    return {each.name: (*lead, *(dim.value(at) for dim in each.dims)) for each in rule.variables}


def both(rule: Rule, domain: Domain, values: dict[str, Array], at: dict[str, int]) -> list[tuple[Array, Array]]:
    """Values of source and target for each output."""
    known: dict[Term, Array] = {}
    sides = [[evaluated(t, domain, values, at, known) for t in side] for side in (rule.sources, rule.targets)]
    return list(zip(*sides, strict=True))


def fuzzed(rule: Rule, number: int = LEAST_ASSIGNMENTS, seed: int = 0) -> int | Counterexample:
    """Number of assignments of sizes on which both sides agree, or the first counter-example.

    A wrong rule that is a polynomial of degree d passes one assignment with probability at most d / 2^31 (Schwartz and
    Zippel).
    """
    domain, count = domain_of(rule), 0
    for count, at in enumerate(assignments(rule, number, seed), 1):
        shapes = shapes_at(rule, at, LEADS[count % len(LEADS)] if rule.lifts else ())
        if rule.pointwise and count % 2:
            shapes = stretched(shapes, seed + count)
        if not agrees(rule, domain, at, shapes, seed + count):
            return explained(rule, at, shapes)
    if count and not rule.names:
        fixed = shapes_at(rule, {})
        extra = (agrees(rule, domain, {}, fixed, seed + each) for each in range(number))
        return number if all(extra) else explained(rule, {}, fixed)
    return count


def stretched(shapes: Shapes, seed: int) -> Shapes:
    """The shapes with some dims set to one, which broadcasting stretches."""
    rng = np.random.default_rng(seed)
    return {name: tuple(1 if rng.integers(3) == 0 else dim for dim in shape) for name, shape in shapes.items()}


def agrees(rule: Rule, domain: Domain, at: dict[str, int], shapes: Shapes, seed: int) -> bool:
    """True if both sides have equal values for one assignment and given shapes of the variables."""
    values = {name: domain.random(shape, name, seed) for name, shape in shapes.items()}
    return all(domain.same(a, b) for a, b in both(rule, domain, values, at))


def explained(rule: Rule, at: dict[str, int], shapes: Shapes) -> Counterexample:
    """The counter-example for sizes that disagree, in floats with small integer values."""
    domain = Floats()
    for seed in range(20):
        rng = np.random.default_rng(seed)
        values = {name: rng.integers(-3, 4, shape).astype(float) for name, shape in shapes.items()}
        with np.errstate(all="ignore"):
            results = both(rule, domain, values, at)
        for number, (a, b) in enumerate(results):
            here = _difference(number, a, b)
            if here is None:
                continue
            lists = {name: each.ravel().tolist() for name, each in values.items()}
            return Counterexample(
                sizes=at, shapes=shapes, values=lists, output=number, index=here[0], source=here[1], target=here[2]
            )
    return Counterexample(sizes=at, shapes=shapes, values={}, output=0, index=(), source=np.nan, target=np.nan)


def _difference(number: int, a: Array, b: Array) -> tuple[tuple[int, ...], float, float] | None:
    if a.shape != b.shape:
        return (), float(a.size), float(b.size)
    away = ~np.isclose(a, b, rtol=1e-6, atol=1e-6, equal_nan=True)
    if not away.any():
        return None
    index = tuple(int(i) for i in np.argwhere(away)[0])
    return index, float(a[index]), float(b[index])
