r"""Boxes of the output in which a mutant equals its program, with borders that are symbolic in the sizes.

An element of either side is a sum of guarded products (:mod:`steptime_lab.rules.forms`). An axis of the output is split
where a guard or quotient changes along it. Between two splits the interval of every summation is constant or moves with
the index, so that both sides are equal multi-linear functions in the whole box, or differ at a corner or one of its
neighbours. These are m + 1 places for m dims; each is compared by random values modulo a prime, which miss a difference
of degree 2 with probability $2 / (2^{31} - 1)$. Source: Wang et al., PET, OSDI 2021, theorems 1 and 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Final, TypeAlias

from steptime_lab.rules.domains import Array
from steptime_lab.rules.forms import Element, Elements, Form, Unprovable
from steptime_lab.rules.mutants.generate import Mutant, Trial
from steptime_lab.rules.mutants.programs import Program, sizes_for
from steptime_lab.rules.sizes import Quotient, Size, size
from steptime_lab.rules.terms import Shape, Term

Interval: TypeAlias = tuple[Size, Size]
MULTIPLES: Final = (-1, 0, 1, 2)
"""Multiples of a dim at which an index merged from two is split."""
MOST_TAPS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A part of the output, from start to below end along each axis, in which the mutant is equal or wrong."""

    intervals: tuple[Interval, ...]
    equal: bool

    def __str__(self) -> str:
        sides = ", ".join(f"{start}:{end}" for start, end in self.intervals)
        return f"[{sides}] {'equal' if self.equal else 'wrong'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Regions:
    """The output of a program in boxes, for sizes for which the borders are in order."""

    mutant: Mutant
    borders: tuple[tuple[Size, ...], ...]
    """Borders of each axis: zero, split points, its extent."""
    boxes: tuple[Box, ...]
    """Boxes that are not empty for some of the tried sizes."""
    places: int
    """Number of elements compared, over all sizes."""

    def share(self, at: dict[str, int]) -> float:
        """Share of the output that is equal, for given sizes."""
        volumes = [(_volume(box, at), box.equal) for box in self.boxes]
        return sum(volume for volume, equal in volumes if equal) / sum(volume for volume, _ in volumes)


def _volume(box: Box, at: dict[str, int]) -> int:
    out = 1
    for start, end in box.intervals:
        out *= max(end.value(at) - start.value(at), 0)
    return out


def regions(mutant: Mutant, sizes: tuple[dict[str, int], ...] = ()) -> Regions | None:
    """The regions of a mutant; None: no boxes with borders for all sizes describe the equal part."""
    program = mutant.program
    trial = Trial(program, sizes or (*sizes_for(program), larger(program)), seed=1)
    borders = split_points(program, mutant.term, trial.sizes)
    if borders is None:
        return None
    masks = trial.masks(mutant.term)
    boxes: list[Box] = []
    places = 0
    for intervals in product(*(list(pairwise(each)) for each in borders)):
        answers = set()
        for at, mask in zip(trial.sizes, masks, strict=True):
            spans = [(start.value(at), end.value(at)) for start, end in intervals]
            if all(start < end for start, end in spans):
                seen = [bool(mask[place]) for place in corner_and_neighbours(spans)]
                places += len(seen)
                answers |= set(seen)
        if len(answers) > 1:
            return None
        if answers:
            boxes.append(Box(intervals=tuple(intervals), equal=answers.pop()))
    found = _merged_boxes(Regions(mutant=mutant, borders=borders, boxes=tuple(boxes), places=places))
    shifted = tuple({name: value + (name in "hv") for name, value in at.items()} for at in sizes_for(program))
    return found if found is not None and check_masks(found, shifted) else None


def _merged_boxes(found: Regions) -> Regions | None:
    """The regions with the fewest borders; None: merged boxes would differ."""
    kept = [_needed(each, axis, found.boxes) for axis, each in enumerate(found.borders)]
    parts = [
        {i: j for j in _intervals(few) for i in _intervals(many) if _within(i, j, many)}
        for many, few in zip(found.borders, kept, strict=True)
    ]
    answers: dict[tuple[Interval, ...], set[bool]] = {}
    for box in found.boxes:
        whole = tuple(part[interval] for part, interval in zip(parts, box.intervals, strict=True))
        answers.setdefault(whole, set()).add(box.equal)
    if any(len(each) > 1 for each in answers.values()):
        return None
    boxes = tuple(Box(intervals=whole, equal=each.pop()) for whole, each in answers.items())
    return replace(found, borders=tuple(kept), boxes=boxes)


def _intervals(points: tuple[Size, ...]) -> list[Interval]:
    return list(pairwise(points))


def _within(inner: Interval, outer: Interval, points: tuple[Size, ...]) -> bool:
    places = {point: number for number, point in enumerate(points)}
    return places[outer[0]] <= places[inner[0]] and places[inner[1]] <= places[outer[1]]


def larger(program: Program) -> dict[str, int]:
    """Sizes larger than those of the mutant search, for which borders have the order of large sizes."""
    return {name: value + 5 for name, value in sizes_for(program)[1].items()}


def _needed(points: tuple[Size, ...], axis: int, boxes: tuple[Box, ...]) -> tuple[Size, ...]:
    """The borders of an axis between boxes that differ."""

    def row(interval: Interval) -> dict[tuple[Interval, ...], bool]:
        return {b.intervals[:axis] + b.intervals[axis + 1 :]: b.equal for b in boxes if b.intervals[axis] == interval}

    kept = [points[0]]
    known = row((points[0], points[1]))
    for interval in _intervals(points)[1:]:
        here = row(interval)
        if any(here[key] != known[key] for key in here.keys() & known.keys()):
            kept.append(interval[0])
            known = here
        else:
            known |= here
    return (*kept, points[-1])


def corner_and_neighbours(spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, ...]]:
    """The first place of a box, and its neighbour along each axis that has one.

    >>> list(corner_and_neighbours([(0, 2), (5, 6)]))
    [(0, 5), (1, 5)]
    """
    spans = list(spans)
    corner = tuple(start for start, _ in spans)
    yield corner
    for axis, (start, end) in enumerate(spans):
        if start + 1 < end:
            yield (*corner[:axis], start + 1, *corner[axis + 1 :])


def split_points(
    program: Program, mutant: Term, sizes: tuple[dict[str, int], ...]
) -> tuple[tuple[Size, ...], ...] | None:
    """Split points of each axis of the output in order; None: an element cannot be written as a form."""
    elements = Elements(program.table)
    index = tuple(elements.fresh(dim, "i") for dim in program.shape)
    axes = {each.name: axis for axis, each in enumerate(index) if each.name}
    try:
        forms = [elements.at(each, index) for each in (program.source, mutant)]
    except Unprovable:
        return None
    found: list[dict[Size, None]] = [{} for _ in index]
    for form in forms:
        for expression in _expressions(form, elements):
            for name, point in thresholds(expression, frozenset(axes)):
                if point.names() <= sizes[0].keys():
                    found[axes[name]][point] = None
    return tuple(ordered_points(program.shape[axis], points, sizes) for axis, points in enumerate(found))


def ordered_points(extent: Size, points: Iterable[Size], sizes: tuple[dict[str, int], ...]) -> tuple[Size, ...]:
    """Points inside an axis in an order that holds for all sizes; a point with another order for some is left out.

    A point that is missing because of this leads to a box in which places differ.
    """
    values: dict[tuple[int, ...], Size] = {}
    ends = tuple(extent.value(at) for at in sizes)
    for point in points:
        at = tuple(point.value(each) for each in sizes)
        inside = any(0 < here < end for here, end in zip(at, ends, strict=True))
        inside &= all(0 <= here <= end for here, end in zip(at, ends, strict=True))
        if inside and (at not in values or len(str(point)) < len(str(values[at]))):
            values[at] = point
    chain: list[tuple[int, ...]] = []
    for at in sorted(values, key=lambda each: (sum(each), each)):
        if not chain or all(a <= b for a, b in zip(chain[-1], at, strict=True)):
            chain.append(at)
    return (size(0), *(values[at] for at in chain), extent)


def _expressions(form: Form, elements: Elements) -> Iterator[Size]:
    """Sizes that must stay at least zero, with every window position substituted for the indices of taps."""
    seen: set[Size] = set()
    for piece in form:
        bound: set[Size] = set(piece.guards)
        for guard in piece.guards:
            bound |= set(_joints(guard))
        for factor in piece.factors:
            for coordinate in factor.index if isinstance(factor, Element) else ():
                bound |= set(_joints(coordinate))
        for each in bound:
            names = sorted(name for name in each.names() if elements.ranges.get(name) and name.startswith("_k"))
            extents = [elements.ranges[name].number for name in names]
            if any(extent is None for extent in extents) or _product(extents) > MOST_TAPS:
                continue
            for taps in product(*(range(extent or 1) for extent in extents)):
                made = each.replace({name: size(tap) for name, tap in zip(names, taps, strict=True)})
                if made not in seen:
                    seen.add(made)
                    yield made


def _product(extents: Iterable[int | None]) -> int:
    out = 1
    for each in extents:
        out *= each or 1
    return out


def _joints(coordinate: Size) -> Iterator[Size]:
    """Sizes that change sign where quotients in an index step, at multiples of a symbolic divisor."""
    for monomial, _ in coordinate.terms:
        for atom in monomial:
            if not isinstance(atom, Quotient):
                continue
            yield from _joints(atom.numerator)
            if atom.denominator.number is None:
                yield from (atom.numerator - atom.denominator * m for m in MULTIPLES)


def thresholds(guard: Size, indices: frozenset[str]) -> Iterator[tuple[str, Size]]:
    """Indices, each with the point from which it makes a guard hold or fail while the others stay in a box.

    >>> from steptime_lab.rules.sizes import size
    >>> [(name, str(at)) for name, at in thresholds(size("i - 1"), frozenset("i"))]
    [('i', '1')]
    >>> [(name, str(at)) for name, at in thresholds(size("h - 1 - i"), frozenset("i"))]
    [('i', 'h')]
    """
    names = guard.names() & indices
    plain = [(m, v) for m, v in guard.terms if any(_has(atom, indices) for atom in m)]
    if len(plain) == 1 and len(names) == 1:
        yield from _single(guard, *plain[0], indices)
        return
    for name in sorted(names):
        by = _coefficient(guard, name)
        if by is not None and by.number is None and not by.names() & indices:
            yield from _linear_thresholds(guard, name, by, indices)
    for atom in dict.fromkeys(atom for monomial, _ in plain for atom in monomial if isinstance(atom, Quotient)):
        if _has(atom, indices) and atom.denominator.number is None:
            for m in MULTIPLES:
                yield from thresholds(_with(guard, atom, m), indices)


def _coefficient(guard: Size, name: str) -> Size | None:
    """Coefficient of an index; None: it is not linear."""
    out = size(0)
    for monomial, value in guard.terms:
        rest = tuple(atom for atom in monomial if atom != name)
        if len(monomial) - len(rest) > 1 or any(
            isinstance(atom, Quotient) and _has(atom, frozenset({name})) for atom in rest
        ):
            return None
        out = out + (Size(((rest, value),)) if len(rest) < len(monomial) else 0)
    return out


def _linear_thresholds(guard: Size, name: str, by: Size, indices: frozenset[str]) -> Iterator[tuple[str, Size]]:
    """Thresholds of sign x index x by + rest: where the rest crosses multiples of ``by``, and the index there."""
    sign = 1 if by.terms[0][1] > 0 else -1
    by = by * sign
    whole, rest = long_division(guard - size(name) * by * sign, by)
    for m in MULTIPLES:
        yield from thresholds(rest - by * m, indices)
        at = -whole - m if sign > 0 else whole + m + 1
        yield name, at


def long_division(given: Size, by: Size) -> tuple[Size, Size]:
    """Quotient and remainder of polynomials; the divisor's first term divides no term of the remainder.

    >>> [str(each) for each in long_division(size("n*h + n + i - 1"), size("h + 1"))]
    ['n', 'i-1']
    """
    first, whole, rest = Size(by.terms[:1]), size(0), given
    progress = True
    while progress:
        progress = False
        for term in rest.terms:
            each = Size((term,))
            part = each // first
            if part * first == each:
                whole, rest, progress = whole + part, rest - part * by, True
                break
    return whole, rest


def _with(given: Size, quotient: Quotient, number: int) -> Size:
    """A size with a quotient replaced by a number."""
    out = size(0)
    for monomial, value in given.terms:
        kept = tuple(atom for atom in monomial if atom != quotient)
        out = out + Size(((kept, value),)) * number ** (len(monomial) - len(kept))
    return out


def _has(atom: str | Quotient, indices: frozenset[str]) -> bool:
    return (
        atom in indices
        if isinstance(atom, str)
        else bool((atom.numerator.names() | atom.denominator.names()) & indices)
    )


def _single(
    guard: Size, monomial: tuple[str | Quotient, ...], value: int | object, indices: frozenset[str]
) -> Iterator[tuple[str, Size]]:
    """Thresholds of a guard with one monomial that has an index: the index or a quotient of it, times a number."""
    if len(monomial) != 1 or not isinstance(value, int):
        return
    (atom,) = monomial
    rest = guard - Size(((monomial, value),))
    if isinstance(atom, str):
        yield atom, (-rest + (value - 1)) // value if value > 0 else rest // -value + 1
        return
    if atom.denominator.names() & indices:
        return
    least = (-rest + (value - 1)) // value if value > 0 else rest // -value + 1
    yield from thresholds(atom.numerator - least * atom.denominator, indices)


def check_masks(found: Regions, sizes: tuple[dict[str, int], ...], seed: int = 3) -> bool:
    """True if the boxes agree with a comparison of every element of the output for some sizes."""
    trial = Trial(found.mutant.program, sizes, seed)
    return all(_agrees(found, mask, at) for mask, at in zip(trial.masks(found.mutant.term), sizes, strict=True))


def _agrees(found: Regions, mask: Array, at: dict[str, int]) -> bool:
    for box in found.boxes:
        part = mask[tuple(slice(start.value(at), max(end.value(at), 0)) for start, end in box.intervals)]
        if part.size and not (part == box.equal).all():
            return False
    return True


def spans_of(found: Regions, axis: int) -> list[tuple[Interval, bool]]:
    """Intervals of one axis, each with True if all of it is equal; adjacent intervals with one answer are merged."""
    out: list[tuple[Interval, bool]] = []
    points = found.borders[axis]
    for interval in pairwise(points):
        mine = [box.equal for box in found.boxes if box.intervals[axis] == interval]
        if not mine:
            continue
        equal = all(mine)
        if out and out[-1][1] == equal:
            out[-1] = ((out[-1][0][0], interval[1]), equal)
        else:
            out.append((interval, equal))
    return out


def dims_of(found: Regions) -> Shape:
    """Dims of the output."""
    return found.mutant.program.shape
