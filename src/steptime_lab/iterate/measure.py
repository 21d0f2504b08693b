"""Kernels timed on this machine within their loops, and a profile fitted to them."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from statistics import mean
from time import thread_time
from typing import Any, Final

import numpy as np

from steptime.errors import UserError
from steptime.registry import needed
from steptime_lab.iterate.loop import BASIS, Loop, array_bytes, loop_of
from steptime_lab.iterate.machine import Profile, Work, fitted
from steptime_lab.iterate.matrices import FAMILIES, Sparse, matrix_of
from steptime_lab.iterate.run import Structure, structure_of, works_of

SIZES: Final = (20_000, 100_000, 400_000, 1_000_000)
ALGORITHMS: Final = ("lanczos", "lanczos-full")
BASIS_VECTORS: Final = 20
REPEATS: Final = 12
LAST_SHARES: Final = (0.125, 0.1875, 0.25, 0.375, 0.5, 0.75, 1.0)
BASIS_BYTES: Final = 400_000_000
"""Size of the largest basis that is measured."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measured times of the kernels of one loop on one matrix."""

    family: str
    matrix: str
    algorithm: str
    shape: Structure
    vectors: int
    seconds: tuple[float, ...]
    """CPU time of the thread for each kernel, first quartile of half of the repetitions."""
    again_s: float
    """Time of the whole iteration from the other half of the repetitions; the difference is the noise."""
    bytes_moved: float
    """Bytes of the arrays of every kernel, as a memory roofline counts them."""


def measured(
    name: str, progress: Progress | None = None, *, sizes: Sequence[int] = SIZES, families: Sequence[str] = ()
) -> list[Measured]:
    """Measure every family at every size under every algorithm.

    Args:
        name: processor whose caches this machine has.
        progress: called with a line after each matrix.
        sizes: numbers of rows.
        families: families to measure; empty: all.

    Raises:
        UserError: scipy is not installed.
    """
    out = []
    for family in families or FAMILIES:
        for rows in sizes:
            matrix = matrix_of(f"{family}:{rows}")
            shape = structure_of(matrix, name)
            for algorithm in ALGORITHMS:
                loop = loop_of(algorithm)
                vectors = BASIS_VECTORS if loop.basis else 0
                if loop.basis and matrix.rows * 8 * vectors > BASIS_BYTES:
                    continue
                times = _timed(loop, matrix, vectors)
                half = len(times) // 2
                whole = float(np.percentile(times[half:].sum(axis=1), 25))
                array_sizes = array_bytes(loop, matrix.rows, matrix.nonzeros, vectors)
                out.append(
                    Measured(
                        family=family,
                        matrix=matrix.name,
                        algorithm=algorithm,
                        shape=shape,
                        vectors=vectors,
                        seconds=tuple(np.percentile(times[:half], 25, axis=0).tolist()),
                        again_s=whole,
                        bytes_moved=sum(array_sizes[name] for kernel in loop.kernels for name in kernel.touched),
                    )
                )
            if progress is not None:
                progress(f"{matrix.name}: {matrix.nonzeros:,} elements")
    return out


def _timed(loop: Loop, matrix: Sparse, vectors: int) -> Any:
    """Seconds of every kernel in every repetition of the loop."""
    steps = _steps(loop, matrix, vectors)
    for step in steps:
        step()
    out = np.empty((2 * REPEATS, len(steps)))
    for repeat in range(2 * REPEATS):
        for n, step in enumerate(steps):
            start = thread_time()
            step()
            out[repeat, n] = thread_time() - start
    return out


def _steps(loop: Loop, matrix: Sparse, vectors: int) -> list[Callable[[], object]]:
    """The kernels as calls of BLAS and of SciPy's sparse product."""
    blas, sparse = (needed(f"scipy.{name}", "measuring") for name in ("linalg.blas", "sparse"))
    multiply = sparse._sparsetools.csr_matvec
    random = np.random.default_rng(0)
    arrays = {name: random.random(matrix.rows) for name in loop.arrays}
    if loop.basis:
        arrays[BASIS] = np.asfortranarray(random.random((matrix.rows, vectors)))
    a = sparse.csr_matrix((np.full(matrix.nonzeros, 0.5), matrix.columns, matrix.starts.astype(np.int32)))
    small = np.full(vectors, 1e-9)

    def made(kernel: Any) -> Callable[[], object]:
        reads, writes = [arrays[name] for name in kernel.reads], [arrays[name] for name in kernel.writes]
        if kernel.op == "spmv":
            x, y = reads[0], writes[0]

            def product() -> None:
                y.fill(0.0)
                multiply(matrix.rows, matrix.rows, a.indptr, a.indices, a.data, x, y)

            return product
        calls: dict[str, Callable[[], object]] = {
            "dot": lambda: blas.ddot(*reads),
            "norm": lambda: blas.dnrm2(reads[0]),
            "axpy": lambda: blas.daxpy(reads[0], reads[1], a=-1e-9),
            "scale": lambda: blas.dscal(1.0000001, writes[0]),
            "copy": lambda: blas.dcopy(reads[0], writes[0]),
            "project": lambda: blas.dgemv(1.0, reads[0], reads[1], trans=1),
            "subtract": lambda: blas.dgemv(-1.0, reads[0], small, beta=1.0, y=reads[1], overwrite_y=1),
        }
        return calls[kernel.op]

    return [made(kernel) for kernel in loop.kernels]


def profile_of(rows: Sequence[Measured], name: str) -> tuple[Profile, list[tuple[Measured, float]]]:
    """A profile, and the time of every iteration predicted by a fit to the other families.

    Raises:
        UserError: fewer than two families were measured.
    """
    families = tuple(dict.fromkeys(row.family for row in rows))
    if len(families) < 2:
        raise UserError(f"{len(families)} family is too few to leave one out", hint="measure two or more")
    left_out = []
    for family in families:
        own = _fit([row for row in rows if row.family != family], name)
        left_out += [(row, _predicted(row, own)) for row in rows if row.family == family]
    error = mean(abs(predicted / sum(row.seconds) - 1) for row, predicted in left_out)
    return replace(_fit(rows, name), error=error), left_out


def _works(row: Measured, name: str, last_share: float) -> list[Work]:
    return works_of(loop_of(row.algorithm), row.shape, name, max(row.vectors, 1), last_share)


def _predicted(row: Measured, profile: Profile) -> float:
    return sum(profile.seconds(work) for work in _works(row, profile.processor, profile.last_share))


def _fit(rows: Sequence[Measured], name: str) -> Profile:
    """A profile fitted to all rows; its share of the last cache is the one of `LAST_SHARES` with the least error."""
    seconds = [max(each, 1e-9) for row in rows for each in row.seconds]
    tried = []
    for share in LAST_SHARES:
        works = [work for row in rows for work in _works(row, name, share)]
        values, left = fitted(works, seconds)
        tried.append((left, share, values))
    _, share, values = min(tried, key=lambda each: each[0])
    date = datetime.now(UTC).date().isoformat()
    source = f"kernels timed on {platform.machine()} ({platform.system()})"
    return Profile(
        processor=name, last_share=share, values=values, source=source, date=date, rows=len(seconds), error=0.0
    )
