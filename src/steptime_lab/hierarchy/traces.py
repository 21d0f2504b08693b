"""Traces of memory accesses by pattern: blocks of byte addresses, generated one after the other.

A block is two arrays of one length: addresses (bytes), and kinds. A kind is twice the index of the instruction in
`Trace.sites`, plus one for a store. Arrays of a pattern lie one behind the other, each at the start of a page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, TypeAlias

import numpy as np

from steptime.errors import UnknownNameError, UserError
from steptime.num import Array, round_up

Block: TypeAlias = tuple[Array, Array]
PAGE: Final = 4096
CHUNK: Final = 1 << 18
"""Accesses of a block, roughly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Accesses of a program, generated again by each call of `blocks`."""

    name: str
    accesses: int
    footprint_bytes: int
    """Bytes from address 0 to the end of the last array."""
    sites: tuple[str, ...]
    """Instructions, named by the array that each reads or writes."""
    blocks: Callable[[], Iterator[Block]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a pattern; each pattern uses the numbers that it needs."""

    n: int = 4096
    """Elements, or rows and columns of a matrix."""
    element_bytes: int = 8
    tile: int = 16
    """Rows and columns of a tile."""
    stride: int = 16
    """Elements from one access to the next."""
    table: int = 1 << 16
    """Elements of the table that a pattern gathers from."""
    passes: int = 2
    packed: bool = True
    """Whether each tile of a matrix is contiguous in memory."""
    leading: int = 0
    """Elements from one row of a matrix to the next; 0: its number of columns."""
    seed: int = 0


Column: TypeAlias = tuple[Array, int, int]
"""Addresses, 1 for stores, and the instruction."""


def _interleaved(columns: Sequence[Column]) -> Block:
    """Accesses in order of iterations; each column has one access an iteration."""
    addresses = np.stack([np.asarray(column, dtype=np.int64) for column, _, _ in columns], axis=1).reshape(-1)
    return addresses, np.tile(_kinds([(site, store) for _, store, site in columns]), len(columns[0][0]))


def _kinds(rows: Sequence[tuple[int, int]]) -> Array:
    """Kinds of accesses from their instructions and whether they store."""
    return np.array([2 * site + store for site, store in rows], dtype=np.uint8)


def _bases(*sizes_bytes: int) -> list[int]:
    """First byte of each array, and the end of the last."""
    out = [0]
    for size in sizes_bytes:
        out.append(out[-1] + round_up(size, PAGE))
    return out


def _chunks(count: int, width: int) -> Iterator[Array]:
    step = max(1, CHUNK // width)
    for start in range(0, count, step):
        yield np.arange(start, min(count, start + step), dtype=np.int64)


def stream(s: Shape) -> Trace:
    """The triad a[i] = b[i] + x c[i], `passes` times."""
    e, (b, c, a, end) = s.element_bytes, _bases(*[s.n * s.element_bytes] * 3)

    def blocks() -> Iterator[Block]:
        for _ in range(s.passes):
            for i in _chunks(s.n, 3):
                yield _interleaved([(b + i * e, 0, 0), (c + i * e, 0, 1), (a + i * e, 1, 2)])

    return Trace(name="stream", accesses=3 * s.n * s.passes, footprint_bytes=end, sites=("b", "c", "a"), blocks=blocks)


def strided(s: Shape) -> Trace:
    """Loads of every `stride`-th element, `n` of them, `passes` times."""
    step = s.stride * s.element_bytes

    def blocks() -> Iterator[Block]:
        for _ in range(s.passes):
            for i in _chunks(s.n, 1):
                yield _interleaved([(i * step, 0, 0)])

    return Trace(
        name="strided", accesses=s.n * s.passes, footprint_bytes=_bases(s.n * step)[-1], sites=("a",), blocks=blocks
    )


def stencil(s: Shape) -> Trace:
    """The five-point stencil over the inside of `n` x `n`: five loads and a store a point."""
    n, e, (a, b, end) = s.n, s.element_bytes, _bases(*[s.n * s.n * s.element_bytes] * 2)
    inner = n - 2

    def blocks() -> Iterator[Block]:
        for p in _chunks(inner * inner, 6):
            at = (p // inner + 1) * n + p % inner + 1
            near = [(a + (at + shift) * e, 0, k) for k, shift in enumerate((-n, -1, 0, 1, n))]
            yield _interleaved([*near, (b + at * e, 1, 5)])

    sites = ("north", "west", "centre", "east", "south", "out")
    return Trace(name="stencil", accesses=6 * inner * inner, footprint_bytes=end, sites=sites, blocks=blocks)


def transpose(s: Shape) -> Trace:
    """b[j][i] = a[i][j] over `n` x `n`, row by row of a."""
    n, e, (a, b, end) = s.n, s.element_bytes, _bases(*[s.n * s.n * s.element_bytes] * 2)

    def blocks() -> Iterator[Block]:
        for p in _chunks(n * n, 2):
            yield _interleaved([(a + p * e, 0, 0), (b + (p % n * n + p // n) * e, 1, 1)])

    return Trace(name="transpose", accesses=2 * n * n, footprint_bytes=end, sites=("a", "b"), blocks=blocks)


def _picked(s: Shape, exponent: float) -> Callable[[np.random.Generator, int], Array]:
    """Random elements of a table: uniform, or by a power law whose frequent elements are spread over the table."""
    if not exponent:
        return lambda random, count: random.integers(0, s.table, count)
    weights = np.arange(1, s.table + 1, dtype=np.float64) ** -exponent
    steps = np.cumsum(weights / weights.sum())
    where = np.random.default_rng(s.seed + 1).permutation(s.table)
    return lambda random, count: where[np.minimum(np.searchsorted(steps, random.random(count)), s.table - 1)]


def _gather(s: Shape, name: str, exponent: float, stores: bool) -> Trace:
    """Loads of index[i], then of table[index[i]], which a histogram also stores."""
    pick, e, (index, table, end) = (
        _picked(s, exponent),
        s.element_bytes,
        _bases(s.n * 4, s.table * s.element_bytes),
    )

    def blocks() -> Iterator[Block]:
        random = np.random.default_rng(s.seed)
        for i in _chunks(s.n, 2 + stores):
            at = table + pick(random, len(i)) * e
            yield _interleaved([(index + 4 * i, 0, 0), (at, 0, 1), *([(at, 1, 2)] if stores else [])])

    sites = ("index", "table", "table store")[: 2 + stores]
    return Trace(name=name, accesses=(2 + stores) * s.n, footprint_bytes=end, sites=sites, blocks=blocks)


def gather(s: Shape) -> Trace:
    """`n` loads from uniformly random elements of a table of `table` elements."""
    return _gather(s, "gather", 0.0, stores=False)


def zipf(s: Shape) -> Trace:
    """`n` loads from elements of a table by a power law of exponent 1, like words in an embedding."""
    return _gather(s, "zipf", 1.0, stores=False)


def histogram(s: Shape) -> Trace:
    """`n` increments of elements of a table by a power law of exponent 1, like gradients of an embedding."""
    return _gather(s, "histogram", 1.0, stores=True)


def chase(s: Shape) -> Trace:
    """`n` loads along a cycle of `table` elements in random order."""

    def blocks() -> Iterator[Block]:
        order = np.random.default_rng(s.seed).permutation(s.table).astype(np.int64) * s.element_bytes
        for i in _chunks(s.n, 1):
            yield _interleaved([(order[i % s.table], 0, 0)])

    end = _bases(s.table * s.element_bytes)[-1]
    return Trace(name="chase", accesses=s.n, footprint_bytes=end, sites=("next",), blocks=blocks)


PER_ROW: Final = 8
"""Elements of a row of a sparse matrix."""


def _spmv(s: Shape, name: str, columns: Callable[[np.random.Generator, Array], Array]) -> Trace:
    """y = A x of a sparse matrix in rows (CSR) of `PER_ROW` elements: value, column, x, then y of the row."""
    rows, e = s.n, s.element_bytes
    value, column, x, y, end = _bases(rows * PER_ROW * e, rows * PER_ROW * 4, s.table * e, rows * e)

    def blocks() -> Iterator[Block]:
        for _ in range(s.passes):  # the same matrix in every pass
            random = np.random.default_rng(s.seed)
            for r in _chunks(rows, 3 * PER_ROW + 1):
                at = np.repeat(r, PER_ROW) * PER_ROW + np.tile(np.arange(PER_ROW), len(r))
                chosen = columns(random, at) % s.table
                each, _ = _interleaved([(value + at * e, 0, 0), (column + at * 4, 0, 1), (x + chosen * e, 0, 2)])
                one = np.concatenate([each.reshape(len(r), -1), (y + r * e)[:, None]], axis=1).reshape(-1)
                yield one, np.tile(_kinds([(0, 0), (1, 0), (2, 0)] * PER_ROW + [(3, 1)]), len(r))

    accesses = (3 * PER_ROW + 1) * rows * s.passes
    return Trace(name=name, accesses=accesses, footprint_bytes=end, sites=("value", "column", "x", "y"), blocks=blocks)


def spmv(s: Shape) -> Trace:
    """A sparse product with uniformly random columns."""
    return _spmv(s, "spmv", lambda random, at: random.integers(0, s.table, len(at)))


def spmv_skewed(s: Shape) -> Trace:
    """A sparse product whose columns follow a power law."""
    pick = _picked(s, 1.0)
    return _spmv(s, "spmv-skewed", lambda random, at: pick(random, len(at)))


def spmv_banded(s: Shape) -> Trace:
    """A sparse product with columns near the diagonal."""
    return _spmv(s, "spmv-banded", lambda random, at: at // PER_ROW + random.integers(0, 64, len(at)))


def matmul_naive(s: Shape) -> Trace:
    """C = A B of `n` x `n`, one element of C after the other from a row of A and a column of B."""
    n, e, row = s.n, s.element_bytes, s.leading or s.n
    a, b, c, end = _bases(*[n * row * e] * 3)

    def blocks() -> Iterator[Block]:
        k, width = np.arange(n, dtype=np.int64), 2 * n + 1
        kinds = _kinds([(0, 0), (1, 0)] * n + [(2, 1)])
        for p in _chunks(n * n, width):
            i, j, out = p[:, None] // n, p[:, None] % n, np.empty((len(p), width), dtype=np.int64)
            out[:, 0:-1:2], out[:, 1::2] = a + (i * row + k) * e, b + (k * row + j) * e
            out[:, -1] = c + (i * row + j)[:, 0] * e
            yield out.reshape(-1), np.tile(kinds, len(p))

    return Trace(
        name="matmul-naive", accesses=n * n * (2 * n + 1), footprint_bytes=end, sites=("A", "B", "C"), blocks=blocks
    )


def matmul(s: Shape) -> Trace:
    """C += A B of `n` x `n` in square tiles; see :func:`tiled_matmul`."""
    return tiled_matmul((s.n, s.n, s.n), (s.tile, s.tile, s.tile), s.element_bytes, packed=s.packed, leading=s.leading)


def tiled_matmul(
    shape: tuple[int, int, int],
    tile: tuple[int, int, int],
    element_bytes: int,
    *,
    packed: bool = True,
    leading: int = 0,
) -> Trace:
    """C += A B with tiles: loops over tiles of C, over tiles of k, and inside a tile over i, k, j.

    An element of A is loaded once for a row of a tile; elements of B are loaded, and those of C loaded and stored, in
    the innermost loop.

    Args:
        shape: m, n, k.
        tile: rows of C, columns of C, and the depth of one tile.
        element_bytes: bytes of an element of each matrix.
        packed: each tile is contiguous in memory; else matrices lie row by row.
        leading: elements from a row to the next, where they are more than the columns.
    """
    (m, n, k), (bm, bn, bk), e = shape, tile, element_bytes
    rows = [max(columns, leading) for columns in (k, n, n)]
    a, b, c, end = _bases(*(high * row * e for high, row in zip((m, k, m), rows, strict=True)))

    def offsets(i: Array, j: Array, place: tuple[int, int, int], width: int, which: int) -> Array:
        """Byte offsets of elements in a matrix; `place` is the tile's first row, first column and columns."""
        top, left, columns = place
        if packed:
            return (top * width + len(i) * left + i[:, None] * columns + j) * e
        return ((top + i[:, None]) * rows[which] + left + j) * e

    def blocks() -> Iterator[Block]:
        for i0 in range(0, m, bm):
            i = np.arange(min(bm, m - i0), dtype=np.int64)
            for j0 in range(0, n, bn):
                j = np.arange(min(bn, n - j0), dtype=np.int64)
                at_c = c + offsets(i, j, (i0, j0, len(j)), n, 2)
                for k0 in range(0, k, bk):
                    q = np.arange(min(bk, k - k0), dtype=np.int64)
                    at_a = a + offsets(i, q, (i0, k0, len(q)), k, 0)
                    at_b = b + offsets(q, j, (k0, j0, len(j)), n, 1)
                    yield _tile_addresses(at_a, at_b, at_c), _tile_kinds(len(i) * len(q), len(j))

    tiles = -(-n // bn)
    return Trace(
        name="matmul",
        accesses=m * k * tiles + 3 * m * n * k,
        footprint_bytes=end,
        sites=("A", "B", "C load", "C store"),
        blocks=blocks,
    )


def _tile_addresses(a: Array, b: Array, c: Array) -> Array:
    """Addresses of one tile: for each i and k a load of A, then for each j loads of B and C and a store of C."""
    (i, k), j = a.shape, b.shape[1]
    out = np.empty((i, k, 1 + 3 * j), dtype=np.int64)
    out[:, :, 0], out[:, :, 1::3], out[:, :, 2::3], out[:, :, 3::3] = a, b[None], c[:, None], c[:, None]
    return out.reshape(-1)


@lru_cache(maxsize=8)
def _tile_kinds(pairs: int, j: int) -> Array:
    """Kinds of the accesses of one tile; all tiles of one size share them."""
    return np.tile(_kinds([(0, 0), *[(1, 0), (2, 0), (3, 1)] * j]), pairs)


def panel_matmul(n: int, cache_tile: tuple[int, int], register_tile: tuple[int, int], element_bytes: int) -> Trace:
    """C = A B^T with panels in the cache and tiles in registers: loads of panels, stores of C.

    Panels of `cache_tile` rows of A and of B stay over all n columns; in them, tiles of `register_tile` rows go through
    the columns with their sums in registers. Layouts are A[n/b1][b1/v1][n][v1] and B[n/b2][b2/v2][n][v2].

    Source: lecture notes on machine-learning systems, "Cache-aware" and "Register-aware tiling", combined.
    """
    (b1, b2), (v1, v2), e = cache_tile, register_tile, element_bytes
    a, b, c, end = _bases(*[n * n * e] * 3)
    per_tile = n * (v1 + v2) + v1 * v2
    columns = np.arange(n, dtype=np.int64)[:, None]
    inside = np.concatenate([columns * v1 + np.arange(v1), columns * v2 + np.arange(v2)], axis=1) * e
    kinds = _kinds([*([(0, 0)] * v1 + [(1, 0)] * v2) * n, *[(2, 1)] * (v1 * v2)])
    stored = ((np.arange(v1) * n)[:, None] + np.arange(v2)).reshape(-1) * e

    def blocks() -> Iterator[Block]:
        for i in range(0, n, b1):
            for j in range(0, n, b2):
                for x in range(i, i + b1, v1):
                    for y in range(j, j + b2, v2):
                        start = np.repeat(np.array([a + x * n * e, b + y * n * e], dtype=np.int64), (v1, v2))
                        loads = (inside + start).reshape(-1)
                        yield np.concatenate([loads, c + (x * n + y) * e + stored]), kinds

    tiles = (n // v1) * (n // v2)
    return Trace(
        name="matmul-panels", accesses=tiles * per_tile, footprint_bytes=end, sites=("A", "B", "C"), blocks=blocks
    )


PATTERNS: Final[Mapping[str, Callable[[Shape], Trace]]] = {
    "stream": stream,
    "strided": strided,
    "stencil": stencil,
    "transpose": transpose,
    "matmul": matmul,
    "matmul-naive": matmul_naive,
    "gather": gather,
    "zipf": zipf,
    "histogram": histogram,
    "chase": chase,
    "spmv": spmv,
    "spmv-skewed": spmv_skewed,
    "spmv-banded": spmv_banded,
}
MATRICES: Final = ("stencil", "transpose", "matmul", "matmul-naive")
"""Patterns whose size is the side of a matrix."""


def trace(pattern: str, shape: Shape) -> Trace:
    """The accesses of a pattern.

    Raises:
        UserError: an unknown pattern, or a size that it cannot have.

    >>> trace("stream", Shape(n=100, passes=1)).accesses
    300
    """
    if pattern not in PATTERNS:
        raise UnknownNameError("access pattern", pattern, PATTERNS)
    if pattern in MATRICES and not 3 <= shape.n <= 1 << 15:
        raise UserError(f"{pattern}: a matrix of {shape.n} x {shape.n}; its side is 3 to 32,768")
    if shape.leading and shape.leading < shape.n:
        raise UserError(f"{pattern}: rows are {shape.leading} elements apart, fewer than their {shape.n}")
    return PATTERNS[pattern](shape)
