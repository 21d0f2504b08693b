"""Mutants of a program: moves, the operator and moves, enumerated depth first, and kept if equal on a large part."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np

from steptime.errors import UserError
from steptime_lab.rules.domains import Array, Residues
from steptime_lab.rules.evaluation import evaluated
from steptime_lab.rules.mutants.moves import Core, Move, cores_of, moves_of
from steptime_lab.rules.mutants.programs import Program, sizes_for
from steptime_lab.rules.sizes import Condition
from steptime_lab.rules.terms import Shape, Term, shape_of, variable

DEPTH: Final = 5
"""Largest number of moves of a mutant, including the operator."""
MOST_MOVES: Final = 2
"""Largest number of moves before the operator, and of moves after it."""
LARGE: Final = 0.6
"""Least share of the output that must be equal."""
Path: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A program whose result has the same shape."""

    program: Program
    before: Path
    core: str
    after: Path
    term: Term
    share: float
    """Smallest equal share of the output over all tried sizes."""

    @property
    def exact(self) -> bool:
        """True if it was equal everywhere."""
        return self.share == 1.0

    def __str__(self) -> str:
        return ", ".join((*self.before, self.core, *self.after))


@dataclass(slots=True)
class Trial:
    """Values of a program, and of any term over its variables, for some sizes."""

    program: Program
    sizes: tuple[dict[str, int], ...]
    seed: int = 0
    _known: list[dict[Term, Array]] = field(default_factory=list)
    _values: list[dict[str, Array]] = field(default_factory=list)
    _domain: Residues = field(default_factory=Residues)

    def __post_init__(self) -> None:
        for at in self.sizes:
            shapes = {v.name: tuple(dim.value(at) for dim in v.dims) for v in self.program.variables}
            self._values.append({n: self._domain.random(s, n, self.seed) for n, s in shapes.items()})
            self._known.append({})

    def of(self, given: Term) -> list[Array]:
        """Values of a term, one array for each of the sizes."""
        rows = zip(self._values, self.sizes, self._known, strict=True)
        return [evaluated(given, self._domain, values, at, known) for values, at, known in rows]

    def masks(self, given: Term) -> list[Array]:
        """Masks of the elements where a term equals the program."""
        return [np.asarray(a == b) for a, b in zip(self.of(self.program.source), self.of(given), strict=True)]

    def fingerprint(self, given: Term) -> bytes:
        """A digest of the values."""
        digest = hashlib.blake2b(digest_size=16)
        for each in self.of(given):
            digest.update(str(each.shape).encode() + np.ascontiguousarray(each).tobytes())
        return digest.digest()

    def fits(self, given: Term) -> Shape | None:
        """Dims of a term; None: its operators do not accept their arguments for some of the sizes."""
        needs: list[Condition] = []
        try:
            shape = shape_of(given, self.program.table, {}, needs)
        except UserError:
            return None
        return shape if all(each.holds(at) for each in needs for at in self.sizes) else None


def mutants(program: Program, depth: int = DEPTH, large: float = LARGE) -> tuple[Mutant, ...]:
    """All mutants of a program up to a depth, one for each core and each result.

    They are sorted by falling equal share, then by length. Results are compared modulo a prime for two assignments of
    sizes; nothing is proved yet.
    """
    trial = Trial(program, sizes_for(program))
    found: dict[tuple[bytes, str, bytes], Mutant] = {}
    posts: dict[Shape, tuple[Path, ...]] = {}
    for before, x, shape in _moved(trial, depth - 1):
        for core in cores_of(program, x, shape):
            middle = trial.fits(core.term)
            if middle is None:
                continue
            if middle not in posts:
                posts[middle] = tuple(_ways(trial, core.term, middle, MOST_MOVES, ""))
            left = min(MOST_MOVES, depth - 1 - len(before))
            _collect(trial, before, x, core, [each for each in posts[middle] if len(each) <= left], large, found)
    return tuple(sorted(found.values(), key=lambda m: (-m.share, len(m.before) + len(m.after), m.core)))


def _collect(
    trial: Trial,
    before: Path,
    x: Term,
    core: Core,
    ways: list[Path],
    large: float,
    found: dict[tuple[bytes, str, bytes], Mutant],
) -> None:
    from steptime_lab.rules.mutants.moves import applied_moves

    program = trial.program
    for after in ways:
        made = applied_moves(program, core.term, after)
        if made is program.source or trial.fits(made) != program.shape:
            continue
        share = min(float(mask.mean()) for mask in trial.masks(made))
        key = (trial.fingerprint(x), core.name, trial.fingerprint(made))
        if share >= large and (key not in found or len(after) + len(before) < _moves(found[key])):
            found[key] = Mutant(program=program, before=before, core=core.name, after=after, term=made, share=share)


def _moves(mutant: Mutant) -> int:
    return len(mutant.before) + len(mutant.after)


def _moved(trial: Trial, most: int) -> Iterator[tuple[Path, Term, Shape]]:
    """All results of moves on the tensor ``x``, depth first and without duplicates or inverse pairs of moves."""
    program = trial.program
    rows = [move for move in moves_of(program) if not move.late]
    seen: set[bytes] = set()
    stack: list[tuple[Path, Term]] = [((), variable("x"))]
    while stack:
        path, x = stack.pop()
        shape, mark = trial.fits(x), None
        if shape is not None:
            mark = trial.fingerprint(x)
        if shape is None or mark is None or mark in seen:
            continue
        seen.add(mark)
        yield path, x, shape
        if len(path) < min(MOST_MOVES, most):
            stack += [
                ((*path, move.name), made)
                for move in rows
                if not (path and move.undone == path[-1]) and (made := move.make(program, x, shape)) is not None
            ]


def _ways(trial: Trial, x: Term, shape: Shape, most: int, last: str) -> Iterator[Path]:
    """Sequences of moves after the operator that lead to the shape of the result."""
    program = trial.program
    if shape == program.shape:
        yield ()
    rows: list[Move] = [move for move in moves_of(program) if not move.early and move.undone != last]
    for move in rows if most else ():
        made = move.make(program, x, shape)
        inner = None if made is None else trial.fits(made)
        if made is None or inner is None:
            continue
        for rest in _ways(trial, made, inner, most - 1, move.name):
            yield (move.name, *rest)
