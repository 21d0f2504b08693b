"""Time of an iteration: on a processor from its profile, on several nodes with their communication."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any, Final

import numpy as np

from steptime.errors import UserError
from steptime.estimate.result import SCHEMA_VERSION
from steptime.simulation.collectives.times import collective
from steptime_lab.hierarchy.caches import processor
from steptime_lab.hierarchy.tiles import caches_of
from steptime_lab.iterate.loop import BASIS, OPS, WORD, Loop, array_bytes, loop_of, served_bytes
from steptime_lab.iterate.machine import GATHERS, Profile, Work
from steptime_lab.iterate.matrices import Sparse, gathers, matrix_of, streamed_share

VECTORS: Final = 20
"""Default number of vectors of a basis at its mean length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One kernel of an iteration."""

    op: str
    arrays: str
    time_s: float
    sent_s: float
    """Communication between nodes, included in `time_s`."""
    memory_bytes: float
    """Bytes served by memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """Time of an iteration by kernel."""

    algorithm: str
    title: str
    matrix: str
    rows: int
    nonzeros: int
    nodes: int
    halo_rows: int
    """Elements of x that the node with most elements receives from others."""
    kernels: tuple[Timed, ...]
    error: float
    """Mean relative error of the profile on held-out families."""
    processor: str
    provenance: str

    @property
    def time_s(self) -> float:
        """Time of the iteration."""
        return sum(kernel.time_s for kernel in self.kernels)

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``."""
        own = asdict(self)
        return {"schema_version": SCHEMA_VERSION, "time_s": self.time_s, **own, "kernels": list(own["kernels"])}


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """Counts of a product with a matrix, independent of the loop."""

    nonzeros: float
    rows: float
    uneven_rows: float
    gathered: tuple[float, float, float]


def structure_of(matrix: Sparse, name: str) -> Structure:
    """Counts of a matrix on the caches of a processor."""
    caches = caches_of(processor(name))
    found = gathers(matrix, caches)
    alone = 1.0 - streamed_share(matrix)
    levels = [0.0] * (len(GATHERS) - len(found)) + [count * alone for count in found]
    lengths = np.diff(matrix.starts)
    return Structure(
        nonzeros=float(matrix.nonzeros),
        rows=float(matrix.rows),
        uneven_rows=float(np.count_nonzero(np.diff(lengths))),
        gathered=tuple(levels[-len(GATHERS) :]),  # type: ignore[arg-type]
    )


def works_of(loop: Loop, shape: Structure, name: str, vectors: int, last_share: float) -> list[Work]:
    """Work of every kernel of a loop on a processor of whose last cache the loop can use a share."""
    above, last = [float(level.size_bytes) for level in processor(name).levels][-2:]
    capacities = [above, last * last_share]
    sizes = array_bytes(loop, int(shape.rows), int(shape.nonzeros), vectors)
    out = []
    for kernel, levels in zip(loop.kernels, served_bytes(loop, sizes, capacities), strict=True):
        near, far = levels
        if kernel.op == "spmv":
            work = Work(
                op="spmv",
                elements=shape.rows,
                level_bytes=(near, far),
                nonzeros=shape.nonzeros,
                uneven_rows=shape.uneven_rows,
                gathered=shape.gathered,
            )
        else:
            times = vectors if OPS[kernel.op].basis else 1
            work = Work(op=kernel.op, elements=shape.rows * times, level_bytes=(near, far))
        out.append(work)
    return out


def iteration(
    algorithm: str,
    matrix: str | Sparse,
    profile: Profile,
    *,
    vectors: int = VECTORS,
    nodes: int = 1,
    cluster: str | None = None,
) -> Iteration:
    """Time of an iteration of an algorithm on a matrix.

    Args:
        algorithm: ``lanczos``, ``lanczos-full``, ``cg``, ``power`` or a TOML file.
        matrix: ``FAMILY:ROWS`` or a MatrixMarket file.
        profile: profile of the processor.
        vectors: vectors of the basis at its mean length.
        nodes: number of nodes over which rows are divided in order.
        cluster: cluster with the links between nodes; each device stands for a node.

    Raises:
        UserError: a name is unknown, the matrix is invalid, or nodes are given without a cluster.
    """
    loop, whole = loop_of(algorithm), matrix_of(matrix) if isinstance(matrix, str) else matrix
    if nodes > 1 and cluster is None:
        raise UserError(f"{nodes} nodes need links", hint="give --cluster NAME")
    if not 1 <= nodes <= whole.rows:
        raise UserError(f"{nodes} nodes for {whole.rows:,} rows", hint="1 to the number of rows")
    part, halo, neighbours = _part(whole, nodes)
    shape = structure_of(part, profile.processor)
    works = works_of(loop, shape, profile.processor, vectors, profile.last_share)
    kernels = []
    for kernel, work in zip(loop.kernels, works, strict=True):
        sent = 0.0 if nodes == 1 else _sent_s(kernel.op, cluster or "", nodes, halo, neighbours, vectors)
        names = " ".join(dict.fromkeys((*kernel.reads, *kernel.writes)))
        kernels.append(
            Timed(
                op=kernel.op,
                arrays=names,
                time_s=profile.seconds(work) + sent,
                sent_s=sent,
                memory_bytes=work.level_bytes[1],
            )
        )
    return Iteration(
        algorithm=algorithm,
        title=loop.title,
        matrix=whole.name,
        rows=whole.rows,
        nonzeros=whole.nonzeros,
        nodes=nodes,
        halo_rows=halo,
        kernels=tuple(kernels),
        error=profile.error,
        processor=profile.processor,
        provenance=f"{profile.source}, {profile.date}",
    )


def _part(matrix: Sparse, nodes: int) -> tuple[Sparse, int, int]:
    """Rows of the node with most elements; how many elements of x it needs from others, and from how many nodes."""
    if nodes == 1:
        return matrix, 0, 0
    size = ceil(matrix.rows / nodes)
    starts = [matrix.starts[min(n * size, matrix.rows)] for n in range(nodes + 1)]
    node = int(np.argmax(np.diff(starts)))
    first, last = node * size, min((node + 1) * size, matrix.rows)
    columns = matrix.columns[starts[node] : starts[node + 1]]
    inside = (columns >= first) & (columns < last)
    others = np.unique(columns[~inside])
    local = np.where(inside, columns - first, last - first + np.searchsorted(others, columns))
    part = Sparse(
        name=matrix.name,
        rows=last - first,
        starts=matrix.starts[first : last + 1] - starts[node],
        columns=local.astype(np.int32),
    )
    return part, len(others), len(np.unique(others // size))


def _sent_s(op: str, cluster: str, nodes: int, halo: int, neighbours: int, vectors: int) -> float:
    """Communication time of a kernel: a product exchanges elements of x in an all-to-all, sums are all-reduced."""
    if op == "spmv":
        ranks, size, kind = min(neighbours + 1, nodes), float(halo * WORD), "all_to_all"
    else:
        ranks, size, kind = nodes, float(WORD * (vectors if OPS[op].basis else 1)), "all_reduce"
    if ranks < 2 or not (OPS[op].sums or op == "spmv"):
        return 0.0
    return collective(kind, cluster, ranks=ranks, size_bytes=size, least_bytes=WORD).times[0].time_s


def by_kind(found: Iteration) -> Mapping[str, float]:
    """Seconds of an iteration by the kind of kernel."""
    out: dict[str, float] = {}
    for kernel in found.kernels:
        out[kernel.op] = out.get(kernel.op, 0.0) + kernel.time_s
    return out


__all__ = ["BASIS", "Iteration", "Structure", "Timed", "by_kind", "iteration", "structure_of", "works_of"]
