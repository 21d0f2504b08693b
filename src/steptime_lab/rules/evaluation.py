"""Values of terms in a number system."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from steptime_lab.rules.domains import Array, Domain
from steptime_lab.rules.operators import OPERATORS, Numbers, Operator
from steptime_lab.rules.sizes import size
from steptime_lab.rules.terms import Term


def evaluated(
    given: Term, domain: Domain, values: Mapping[str, Array], at: Mapping[str, int], known: dict[Term, Array]
) -> Array:
    """The value of a term in a number system, given values of its variables and numbers for names of sizes."""
    if given in known:
        return known[given]
    if not given.operators:
        return values[given.name]
    row = OPERATORS[given.op]
    arrays = [evaluated(child, domain, values, at, known) for child in given.children]
    out = run(row, domain, tuple(each.value(at) for each in given.attributes), arrays)
    known[given] = out
    return out


def run(row: Operator, domain: Domain, attributes: Numbers, arrays: Sequence[Array]) -> Array:
    """Apply one operator to arrays."""
    if row.aligns and len({array.ndim for array in arrays}) > 1:
        widest, lead = max(array.ndim for array in arrays), domain.lead
        arrays = [a.reshape(*a.shape[:lead], *[1] * (widest - a.ndim), *a.shape[lead:]) for a in arrays]
    rank = NEEDS_SHAPE.get(row.name)
    if rank is None:
        return row.value(domain, attributes, arrays, ())
    shapes = [tuple(map(size, array.shape[-rank:])) for array in arrays]
    out = row.shape(tuple(map(size, attributes)), shapes, [])
    return row.value(domain, attributes, arrays, tuple(each.number or 0 for each in out))


NEEDS_SHAPE: Final = {"conv": 4, "avgpool": 2, "maxpool": 2}
"""Operators whose value needs the shape of the result -> number of last dims to which they apply."""
