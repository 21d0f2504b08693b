"""Sparse symmetric matrices from families by structure or from files, and the gathers of their products."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Final

import numpy as np

from steptime.errors import InputFileError, UserError
from steptime.num import Array
from steptime.registry import needed
from steptime.store.files import is_file
from steptime_lab.hierarchy.geometry import Hierarchy
from steptime_lab.hierarchy.simulate import simulate
from steptime_lab.hierarchy.traces import Trace
from steptime_lab.iterate.loop import INDEX, WORD

MOST_ROWS: Final = 2_000_000
"""Largest number of rows of a matrix of a family; its product is simulated in seconds."""
MOST_NONZEROS: Final = 30_000_000
MOST_BYTES: Final = 2**30
"""Largest number of bytes of the unpacked text of a matrix file."""
PER_ROW: Final = 12
"""Default of the mean number of elements in a row."""
LINE: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Sparse:
    """The pattern of a matrix in compressed rows (CSR)."""

    name: str
    rows: int
    starts: Array
    """Index of the first element of each row, and the end."""
    columns: Array

    @property
    def nonzeros(self) -> int:
        """Stored elements."""
        return len(self.columns)


def _symmetric(rows: int, i: Array, j: Array, name: str) -> Sparse:
    """The symmetric pattern of elements (i, j), their mirror images and the diagonal."""
    diagonal = np.arange(rows)
    key = np.unique(np.concatenate([i * rows + j, j * rows + i, diagonal * (rows + 1)]))
    row, column = key // rows, key % rows
    starts = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=rows))])
    return Sparse(name=name, rows=rows, starts=starts, columns=column.astype(np.int32))


def _offsets(n: int, offsets: list[int]) -> tuple[Array, Array]:
    pairs = [(np.arange(n - each), np.arange(each, n)) for each in offsets if each < n]
    return tuple(np.concatenate(side) for side in zip(*pairs, strict=True))  # type: ignore[return-value]


def _banded(n: int, random: np.random.Generator) -> tuple[int, Array, Array]:
    i = np.repeat(np.arange(n), PER_ROW // 2)
    return n, i, np.minimum(i + random.integers(1, 64, len(i)), n - 1)


def _stencil_2d(n: int, random: np.random.Generator) -> tuple[int, Array, Array]:
    side = max(int(n**0.5), 2)
    return side * side, *_offsets(side * side, [1, side])


def _stencil_3d(n: int, random: np.random.Generator) -> tuple[int, Array, Array]:
    side = max(round(n ** (1 / 3)), 2)
    return side**3, *_offsets(side**3, [1, side, side * side])


def _random(n: int, random: np.random.Generator) -> tuple[int, Array, Array]:
    i = np.repeat(np.arange(n), PER_ROW // 2)
    return n, i, random.integers(0, n, len(i))


def _power_law(n: int, random: np.random.Generator) -> tuple[int, Array, Array]:
    i = np.repeat(np.arange(n), PER_ROW // 2)
    return n, i, (n * random.random(len(i)) ** 4).astype(np.int64)


def _blocks(n: int, random: np.random.Generator) -> tuple[int, Array, Array]:
    size = 24
    i = np.repeat(np.arange(n), PER_ROW)
    return n, i, np.minimum(i // size * size + random.integers(0, size, len(i)), n - 1)


def _arrow(n: int, random: np.random.Generator) -> tuple[int, Array, Array]:
    heads = 4
    i = np.repeat(np.arange(n), heads)
    j = np.tile(np.arange(heads), n)
    near = np.arange(n - 1)
    return n, np.concatenate([i, near]), np.concatenate([j, near + 1])


def _kronecker(n: int, random: np.random.Generator) -> tuple[int, Array, Array]:
    bits = max(int(n).bit_length() - 1, 2)
    count = (1 << bits) * PER_ROW // 2
    i, j = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    for _ in range(bits):
        corner = random.choice(4, size=count, p=[0.57, 0.19, 0.19, 0.05])
        i, j = 2 * i + corner // 2, 2 * j + corner % 2
    return 1 << bits, i, j


FAMILIES: Final[dict[str, Callable[[int, np.random.Generator], tuple[int, Array, Array]]]] = {
    "banded": _banded,
    "stencil-2d": _stencil_2d,
    "stencil-3d": _stencil_3d,
    "random": _random,
    "power-law": _power_law,
    "blocks": _blocks,
    "arrow": _arrow,
    "kronecker": _kronecker,
}
"""Structure -> function of rows and random generator, which returns rows, i and j of elements off the diagonal."""


def matrix_of(text: str, *, seed: int = 0) -> Sparse:
    """A matrix from ``FAMILY:ROWS`` or a MatrixMarket file.

    Raises:
        UserError: the family is unknown, the size out of range, or the file holds no square symmetric matrix.
    """
    family, _, size = text.partition(":")
    if family in FAMILIES:
        if not size.isdigit() or not 2 <= int(size) <= MOST_ROWS:
            raise UserError(f"matrix {text}: rows are 2 to {MOST_ROWS:,}", hint=f"{family}:100000")
        rows, i, j = FAMILIES[family](int(size), np.random.default_rng(seed))
        return _symmetric(rows, np.asarray(i, dtype=np.int64), np.asarray(j, dtype=np.int64), text)
    if not text.endswith((".mtx", ".mtx.gz")):
        raise UserError(f"matrix {text!r} is no family and no file", hint=f"{', '.join(FAMILIES)} with :ROWS, or .mtx")
    return _of_file(text)


def _of_file(path: str) -> Sparse:
    scipy_io = needed("scipy.io", "reading a matrix")
    if not is_file(path):
        raise InputFileError(path, "is not there")
    try:
        text = _text(path)
        rows, columns, elements, *_ = scipy_io.mminfo(BytesIO(text))
        if not 0 < elements <= MOST_NONZEROS or max(rows, columns) > MOST_NONZEROS:
            problem = f"has {rows:,} rows and {elements:,} elements"
            raise InputFileError(path, problem, hint=f"1 to {MOST_NONZEROS:,} elements")
        found: Any = scipy_io.mmread(BytesIO(text))
    except (ValueError, OSError, OverflowError, TypeError) as error:
        raise InputFileError(path, f"is no MatrixMarket file: {' '.join(str(error).split())[:200]}") from None
    if not hasattr(found, "tocsr"):
        raise InputFileError(path, "is a dense matrix", hint="a sparse one is in coordinate format")
    matrix = found.tocsr()
    rows, columns = matrix.shape
    if rows != columns:
        raise InputFileError(path, f"is {rows} x {columns}", hint="an iteration needs a square matrix")
    if rows < 2 or matrix.nnz > MOST_NONZEROS:
        raise InputFileError(path, f"has {rows} rows and {matrix.nnz:,} elements", hint=f"at most {MOST_NONZEROS:,}")
    if abs(matrix - matrix.T).max() > 1e-9 * max(abs(matrix).max(), 1e-300):
        raise InputFileError(path, "is not symmetric", hint="Lanczos and conjugate gradients need a symmetric matrix")
    matrix.sort_indices()
    return Sparse(name=path, rows=rows, starts=matrix.indptr.astype(np.int64), columns=matrix.indices.astype(np.int32))


def _text(path: str) -> bytes:
    """The content of a MatrixMarket file with one newline at its end.

    Without the newline, SciPy's reader runs past the end of the text and ends the process.

    Raises:
        InputFileError: the file is too large, or has anything other than numbers after its comments.
    """
    opened = gzip.open if path.endswith(".gz") else open
    with opened(path, "rb") as file:
        text = bytes(file.read(MOST_BYTES + 1)).rstrip()
    if len(text) > MOST_BYTES:
        raise InputFileError(path, f"has more than {MOST_BYTES / 2**30:g} GiB of text", hint="a smaller matrix")
    numbers = re.search(rb"^\s*[^%\s]", text, re.M)
    odd = text[numbers.start() :].translate(None, b"0123456789+-.eE \t\r\n") if numbers else b""
    if odd:
        raise InputFileError(path, f"is no MatrixMarket file: {odd[:1].decode('latin-1')!r} among its numbers")
    return text + b"\n"


def streamed_share(matrix: Sparse) -> float:
    """Share of the gathers that a stream prefetcher predicts: near the gather at the same place in the row before.

    >>> streamed_share(matrix_of("stencil-2d:10000")) > 0.9, streamed_share(matrix_of("random:10000")) < 0.2
    (True, True)
    """
    lengths = np.diff(matrix.starts)
    row = np.repeat(np.arange(matrix.rows), lengths)
    place = np.arange(matrix.nonzeros) - matrix.starts[row]
    before = np.where(row > 0, matrix.starts[np.maximum(row - 1, 0)] + place, 0)
    known = (row > 0) & (place < lengths[np.maximum(row - 1, 0)])
    step = np.abs(matrix.columns - matrix.columns[np.minimum(before, matrix.nonzeros - 1)].astype(np.int64))
    return float(np.mean(known & (step <= LINE // WORD)))


def gathers(matrix: Sparse, caches: Hierarchy) -> tuple[float, ...]:
    """Simulated number of gathers of x served by each level after the first cache, in the second of two products."""
    trace = _trace(matrix, 1), _trace(matrix, 2)
    once, twice = (simulate(each, caches).served[2] for each in trace)
    return tuple(float(count) for count in (twice - once)[1:])


def _trace(matrix: Sparse, passes: int) -> Trace:
    """Trace of products one after the other: value, column and x of each element, then y of the row."""
    z, n = matrix.nonzeros, matrix.rows
    value, column, x, y = np.cumsum([0, z * WORD, z * INDEX, n * WORD]) // 4096 * 4096 + np.arange(4) * 4096
    chunk = 1 << 15

    def blocks() -> Iterator[tuple[Array, Array]]:
        for _ in range(passes):
            for first in range(0, n, chunk):
                last = min(first + chunk, n)
                at = np.arange(matrix.starts[first], matrix.starts[last])
                row = np.repeat(np.arange(first, last), np.diff(matrix.starts[first : last + 1]))
                each = np.stack(
                    [value + at * WORD, column + at * INDEX, x + matrix.columns[at].astype(np.int64) * WORD]
                )
                ends = y + np.arange(first, last) * WORD
                kinds = np.repeat([[0, 2, 4]], len(at), axis=0)
                order = np.concatenate([np.repeat(row, 3) * 2, np.arange(first, last) * 2 + 1])
                merged = np.argsort(order, kind="stable")
                yield (
                    np.concatenate([each.T.reshape(-1), ends])[merged].astype(np.int64),
                    np.concatenate([kinds.reshape(-1), np.full(last - first, 7)])[merged].astype(np.uint8),
                )

    return Trace(
        name=matrix.name,
        accesses=(3 * z + n) * passes,
        footprint_bytes=int(y) + n * WORD,
        sites=("value", "column", "x", "y"),
        blocks=blocks,
    )
