"""A loop of kernels over named arrays, read from TOML, and the traffic of every kernel from each level of memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from steptime.errors import FieldError, InputFileError, UnknownNameError, did_you_mean
from steptime.store.files import parse_toml, read_text
from steptime_lab.cost.iterate import missed_share

FOLDER: Final = Path(__file__).with_name("algorithms")
MAX_BYTES: Final = 1 << 20
WORD: Final = 8
"""Bytes of an element: double precision."""
INDEX: Final = 4
"""Bytes of a column index."""
MATRIX, BASIS = "matrix", "basis"


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """A kind of kernel."""

    reads: int
    """Number of arrays read."""
    writes: int
    """Number of arrays written."""
    sums: bool = False
    """Whether it ends in one number, or one for each vector of the basis: an all-reduce over nodes."""
    basis: bool = False
    """Whether it passes over the basis."""


OPS: Final = {
    "spmv": Op(reads=1, writes=1),
    "dot": Op(reads=2, writes=0, sums=True),
    "norm": Op(reads=1, writes=0, sums=True),
    "axpy": Op(reads=2, writes=1),
    "scale": Op(reads=1, writes=1),
    "copy": Op(reads=1, writes=1),
    "project": Op(reads=2, writes=0, sums=True, basis=True),
    "subtract": Op(reads=2, writes=1, basis=True),
}
"""Kind of kernel -> its row. ``project`` is $V^T w$, ``subtract`` $w - V c$, over the vectors of a basis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel of a loop."""

    op: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]

    @property
    def touched(self) -> tuple[str, ...]:
        """Arrays that the kernel passes over, including the matrix."""
        own = (MATRIX,) if self.op == "spmv" else ()
        return tuple(dict.fromkeys((*own, *self.reads, *self.writes)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """The kernels of one iteration and their arrays."""

    name: str
    title: str
    arrays: tuple[str, ...]
    basis: bool
    kernels: tuple[Kernel, ...]


def algorithm_names() -> tuple[str, ...]:
    """Names of the packaged algorithms."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def loop_of(text: str) -> Loop:
    """An algorithm by name, or from a TOML file with ``arrays`` and ``[[kernels]]``.

    Raises:
        UserError: the name is unknown, or the file describes no loop.
    """
    if text in algorithm_names():
        path = FOLDER / f"{text}.toml"
        return _read(parse_toml(path.read_text(encoding="utf-8"), text), text)
    if not text.endswith(".toml"):
        raise UnknownNameError("algorithm", text, algorithm_names())
    return _read(parse_toml(read_text(text, MAX_BYTES, "an algorithm"), text), text)


def _read(table: Mapping[str, Any], where: str) -> Loop:
    if unknown := set(table) - {"title", "arrays", "basis", "kernels"}:
        raise FieldError(where, sorted(unknown)[0], "is no field", hint="title, arrays, basis, [[kernels]]")
    arrays, rows = table.get("arrays"), table.get("kernels")
    if not isinstance(arrays, list) or not all(isinstance(each, str) for each in arrays) or not arrays:
        raise FieldError(where, "arrays", "is no list of names of vectors", hint='arrays = ["x", "y"]')
    if not isinstance(rows, list) or not rows:
        raise FieldError(where, "kernels", "missing", hint="[[kernels]] with op, reads and writes")
    basis = bool(table.get("basis", False))
    kernels = tuple(
        _kernel(row, {*arrays, *((BASIS,) if basis else ())}, f"{where}, kernel {n}") for n, row in enumerate(rows, 1)
    )
    return Loop(name=where, title=str(table.get("title", where)), arrays=tuple(arrays), basis=basis, kernels=kernels)


def _kernel(row: object, known: set[str], where: str) -> Kernel:
    if not isinstance(row, Mapping):
        raise InputFileError(where, "is no table")
    name = str(row.get("op", ""))
    if name not in OPS:
        raise FieldError(where, "op", f"{name!r} is no kernel", hint=did_you_mean(name, list(OPS)))
    op, found = OPS[name], {}
    for field, count in (("reads", op.reads), ("writes", op.writes)):
        given = row.get(field, [])
        if not isinstance(given, list) or len(given) != count:
            raise FieldError(where, field, f"{name} {field} {count} arrays", hint=f"{field} = [...]")
        if unknown := [each for each in given if not isinstance(each, str) or each not in known]:
            raise FieldError(where, field, f"{unknown[0]!r} is no array", hint=f"arrays: {', '.join(sorted(known))}")
        found[field] = tuple(map(str, given))
    if op.basis != (BASIS in found["reads"]):
        raise FieldError(where, "reads", f"{name} and the basis do not go together", hint="basis = true, and project")
    return Kernel(op=name, **found)


def array_bytes(loop: Loop, rows: int, nonzeros: int, vectors: int) -> dict[str, float]:
    """Bytes of every array: vectors, the matrix in rows, the basis at its mean length."""
    sizes = dict.fromkeys(loop.arrays, float(rows * WORD))
    sizes[MATRIX] = float(nonzeros * (WORD + INDEX) + rows * INDEX)
    if loop.basis:
        sizes[BASIS] = float(rows * WORD * vectors)
    return sizes


def served_bytes(loop: Loop, sizes: Mapping[str, float], capacities: Sequence[float]) -> list[tuple[float, ...]]:
    """Bytes of every kernel served by each level after the first cache, in an iteration after others.

    An array that is only written counts twice where memory serves it, because its lines are read before they are
    written.

    >>> loop = loop_of("power")
    >>> sizes = {"matrix": 100.0, "x": 10.0, "y": 10.0}
    >>> served_bytes(loop, sizes, [1.0, 1000.0])[0]
    (120.0, 0.0)
    """
    order = [each for kernel in loop.kernels for each in kernel.touched]
    twice = order + order
    at, out = len(order), []
    for kernel in loop.kernels:
        levels = [0.0] * len(capacities)
        for name in kernel.touched:
            distance = _distance(twice, at, sizes)
            lost = [float(missed_share(distance, capacity)) for capacity in capacities] + [0.0]
            for level in range(len(capacities)):
                beyond = lost[level + 1] if level + 1 < len(capacities) else 0.0
                passes = 2.0 if name in kernel.writes and name not in kernel.reads and level else 1.0
                levels[level] += sizes[name] * max(lost[level] - beyond, 0.0) * passes
            at += 1
        out.append(tuple(levels))
    return out


def _distance(order: Sequence[str], at: int, sizes: Mapping[str, float]) -> float:
    """Reuse distance of the array at an index: bytes of all arrays touched since its last touch, itself included."""
    seen: set[str] = {order[at]}
    for name in reversed(order[:at]):
        if name == order[at]:
            break
        seen.add(name)
    return sum(sizes[name] for name in seen)
