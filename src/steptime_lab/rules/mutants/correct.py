"""Corrections that make a mutant exact, with proofs.

There are three corrections. ``zero rows``: zeros after each image, so that a window that leaves an image does not reach
the next one. ``halo rows``: blocks of an image get the rows of their neighbours that their windows reach. ``boxes``:
where the mutant is wrong, the program itself is computed on the part of the input that its windows reach, and joined
with the correct part of the mutant. The result is a rule like any other: it agrees on random values modulo a prime for
at least 50 assignments of sizes, and as exact polynomials.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from steptime.errors import UserError
from steptime_lab.rules.certify import Verdict
from steptime_lab.rules.mutants.generate import Mutant, Trial, mutants
from steptime_lab.rules.mutants.moves import blocks, cut, ordered, padded, rounded, shaped, spread
from steptime_lab.rules.mutants.programs import (
    Convolution,
    Program,
    convolution,
    convolved,
    product,
    sizes_for,
    transposed,
)
from steptime_lab.rules.mutants.regions import Interval, Regions, larger, regions, spans_of
from steptime_lab.rules.rule import LEAST_ASSIGNMENTS, Certificate, Rule, unified
from steptime_lab.rules.sizes import Condition, at_least, size
from steptime_lab.rules.terms import Term, replaced, term, variable
from steptime_lab.rules.verify_exact import proved_exactly
from steptime_lab.rules.verify_random import Counterexample, fuzzed

EXACT, ZERO_ROWS, HALO_ROWS, BOXES = "none", "zero rows", "halo rows", "boxes"
AXES: Final = {2: "h", 3: "v"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrected:
    """An exact replacement of a program, with its certificate."""

    program: Program
    path: str
    """Moves and operator of the mutant."""
    correction: str
    rule: Rule
    regions: Regions | None = None

    @property
    def certificate(self) -> Certificate:
        """Certificate of the rule."""
        return self.rule.certificate


def verified(program: Program, name: str, target: Term, where: tuple[Condition, ...] = ()) -> Verdict:
    """Check a replacement of a program by random values and polynomials.

    Args:
        program: the program.
        name: name of the rule.
        target: the replacement.
        where: conditions on sizes.

    Raises:
        UserError: no sizes satisfy the conditions of the operators of both sides.
    """
    fitted = unified(
        Rule(
            name=name,
            variables=program.variables,
            sources=(program.source,),
            targets=(target,),
            where=where,
            origin="Wang et al., PET, OSDI 2021",
        )
    )
    if fitted is None:
        raise UserError(f"{name}: no sizes fulfil what the operators of both sides need")
    result = fuzzed(fitted)
    if isinstance(result, Counterexample):
        return Verdict(rule=fitted, counterexample=result)
    return Verdict(rule=replace(fitted, certificate=Certificate(random=result, exact=proved_exactly(fitted) or 0)))


def sound(verdict: Verdict, program: Program) -> bool:
    """True if both sides agree on enough assignments of sizes and as polynomials.

    The assignments of a certificate are small; the sizes of the mutant search, and larger ones, must agree too.
    """
    rule, made = verdict.rule, verdict.rule.certificate
    sizes = tuple(at for at in (*sizes_for(program), larger(program)) if all(each.holds(at) for each in rule.needs()))
    same = all(bool(mask.all()) for mask in Trial(program, sizes, seed=2).masks(rule.targets[0]))
    return same and verdict.counterexample is None and made.random >= LEAST_ASSIGNMENTS and made.exact > 0


def corrections(mutant: Mutant, *, boxes: bool = True) -> Iterator[Corrected]:
    """All verified corrections of a mutant; for an exact mutant, the mutant itself.

    Args:
        mutant: a mutant that equals its program on a part of the output.
        boxes: also find its regions, and try to recompute the wrong boxes.
    """
    program = mutant.program
    found = None if mutant.exact or not boxes else regions(mutant)
    candidates: list[tuple[str, Term, tuple[Condition, ...]]] = []
    if mutant.exact:
        candidates.append((EXACT, mutant.term, ()))
    else:
        candidates += [(ZERO_ROWS, made, ()) for axis in AXES if (made := with_zero_rows(mutant, axis)) is not None]
        if "H2B" in mutant.before:
            candidates.append((HALO_ROWS, with_halo_rows(program), ()))
        boxed = None if found is None else with_boxes(found)
        if boxed is not None:
            candidates.append((BOXES, *boxed))
    for correction, target, where in candidates:
        verdict = verified(program, f"{program.kind}: {mutant} ({correction})", target, where)
        if sound(verdict, program):
            yield Corrected(program=program, path=str(mutant), correction=correction, rule=verdict.rule, regions=found)


def with_zero_rows(mutant: Mutant, axis: int) -> Term | None:
    """The mutant on images with zeros appended along an axis, cropped to the result; None: it does not apply."""
    program, conv = mutant.program, mutant.program.convolution
    joins = {2: "N2H", 3: "N2W"}[axis]
    if conv is None or mutant.before != (joins,):
        return None
    reach = conv.halo[axis - 2]
    more = max(conv.pad, reach - conv.pad)
    extent = program.table["x"].dims[axis]
    name = AXES[axis]
    wide = replaced(mutant.term, {"x": padded(variable("x"), axis - 4, 0, more)}, {name: size(name) + more})
    assert extent.name == name
    return cut(wide, axis - 4, 0, program.shape[axis])


def with_halo_rows(program: Program) -> Term:
    """Blocks of rows of each image as separate images, with the further rows that their windows reach."""
    conv = program.convolution
    if conv is None:
        raise UserError("halo rows of a product", hint="they are of a convolution")
    m, p, (reach, _), (n, o, high, wide) = blocks(program), conv.pad, conv.halo, program.shape
    rows = rounded(high, m) // m
    full = padded(padded(variable("x"), -2, p, p + rows * m - high), -1, p, p)
    parts = tuple(cut(full, -2, rows * each, rows * (each + 1) + reach) for each in range(m))
    y = convolved(conv, term("concat", parts, (-4,)), variable("w"), pad=0)
    y = shaped(ordered(shaped(y, m, n, o, rows, wide), 1, 2, 0, 3, 4), n, o, rows * m, wide)
    return y if rows * m == high else cut(y, -2, 0, high)


def with_boxes(found: Regions) -> tuple[Term, tuple[Condition, ...]] | None:
    """The mutant with its wrong boxes computed by the program, and the conditions on sizes; None: no box is right.

    Whole slices are recomputed along the axis of which the smallest part is wrong, because a slice costs one operator.
    """
    program, mutant = found.mutant.program, found.mutant.term
    conv = program.convolution
    if conv is None:
        return None
    choices = {axis: spans_of(found, axis) for axis in AXES}
    usable = {axis: spans for axis, spans in choices.items() if any(equal for _, equal in spans)}
    if not usable:
        return None
    axis = min(usable, key=lambda each: (_wrong(usable[each], found), each))
    parts: list[Term] = []
    where: list[Condition] = []
    for (start, end), equal in usable[axis]:
        where.append(at_least(end, start + 1))
        if equal:
            parts.append(cut(mutant, axis - 4, start, end))
            continue
        made, needs = recomputed(program, axis, (start, end))
        parts.append(made)
        where += needs
    made = term("concat", tuple(parts), (axis - 4,)) if len(parts) > 1 else parts[0]
    return made, tuple(each for each in dict.fromkeys(where) if not each.certain)


def _wrong(spans: list[tuple[Interval, bool]], found: Regions) -> int:
    at = larger(found.mutant.program)
    return sum((end - start).value(at) for (start, end), equal in spans if not equal)


def recomputed(program: Program, axis: int, span: Interval) -> tuple[Term, list[Condition]]:
    """The program on one slice of the output, from the input that its windows reach, and the conditions on sizes."""
    conv = program.convolution
    assert conv is not None
    extent, (start, end) = program.table["x"].dims[axis], span
    reach, p = conv.halo[axis - 2], conv.pad
    first, last = start - p, end + (reach - p)
    before = -(first.number or 0) if first.number is not None and first.number < 0 else 0
    over = (last - extent).number
    after = over if over is not None and over > 0 else 0
    x = cut(variable("x"), axis - 4, first + before, last - after)
    x = padded(x, axis - 4, before, after)
    other = 5 - axis
    x = padded(x, other - 4, p, p)
    needs = [at_least(first + before, 0), at_least(extent, last - after), at_least(last - after, first + before + 1)]
    return convolved(conv, x, variable("w"), pad=0), needs


# -- all that is known of a program --------------------------------------------------------------------------------

PLAIN: Final = frozenset(
    {"convolution", "dense convolution", "product", "product of rows", "product of patches", "turned product"}
)
"""Cores whose mutants are corrected and offered; other cores only add copies to one of them."""
FILLERS: Final = {"fill", "border", "transpose", "even rows"}
"""Moves that alone do not affect the cost of a kernel."""


def offered(mutant: Mutant) -> bool:
    """True if a mutant may gain: it has another operator on the same images, or the same one on other shapes."""
    moved = set(mutant.before) - FILLERS
    if mutant.core not in PLAIN or "transpose" in mutant.before or (mutant.before and not moved):
        return False
    other = mutant.core != ("product" if mutant.program.convolution is None else "convolution")
    return bool(moved) != other or mutant.core == "dense convolution"


@lru_cache(maxsize=256)
def corrected(given: Convolution, *, boxes: bool = True) -> tuple[Corrected, ...]:
    """All verified replacements of a convolution, cached by geometry."""
    return _all(convolution(given), boxes)


@lru_cache(maxsize=4)
def corrected_product(*, batched: bool) -> tuple[Corrected, ...]:
    """All verified replacements of a matrix product."""
    return _all(product(batched=batched), False)


def _all(program: Program, boxes: bool) -> tuple[Corrected, ...]:
    every = (mutant for mutant in mutants(program) if offered(mutant))
    return tuple(each for mutant in every for each in corrections(mutant, boxes=boxes))


@lru_cache(maxsize=16)
def corrected_spread(kernel: int, *, bias: bool) -> tuple[Corrected, ...]:
    """A transposed convolution as a product at every pixel and a channels-to-space move, if verified."""
    program = transposed(kernel, bias=bias)
    verdict = verified(program, f"transposed convolution {kernel}", spread(kernel, bias=bias))
    path = "product at every pixel, channels to space"
    made = Corrected(program=program, path=path, correction=EXACT, rule=verdict.rule)
    return (made,) if sound(verdict, program) else ()
