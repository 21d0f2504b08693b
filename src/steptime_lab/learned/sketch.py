"""The sketch of a recorded step: operators, tensors and memory as plain numbers, from which predictors take features.

A sketch has each distinct piece of work once, the order of calls, the edges between calls, and the memory in use during
each call. It does not depend on a device: the analytic time of each piece is computed for the device of a prediction.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from steptime.captured.cost.table import issuers
from steptime.captured.cost.timing import work_of
from steptime.captured.graph import PHASES, Program
from steptime.captured.graph.liveness import Liveness
from steptime.captured.graph.program import Call, Value
from steptime.captured.ops.work import KernelCall, Work, variant, whole_bytes
from steptime.estimate.learned import ISSUERS

COUNTS: Final = ("matrix_flops", "repeated_flops", "vector_flops", "moved_bytes", "launches")
"""Fields of a work that a file has."""
MOST: Final = 1e18
"""Largest number of a work in a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One distinct piece of work: an operator with its sizes."""

    op: str
    work: Work
    read_bytes: float
    """Bytes of all inputs."""
    written_bytes: float
    """Bytes of all outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sketch:
    """A step as pieces of work."""

    name: str
    pieces: tuple[Piece, ...]
    calls: tuple[int, ...]
    """Index into ``pieces`` of each call, in order, without views."""
    phases: tuple[int, ...]
    """Phase of each call, as an index into :data:`steptime.captured.graph.PHASES`."""
    issuers: tuple[int, ...]
    """Issuer of each call, as an index into :data:`steptime.estimate.learned.ISSUERS`."""
    edges: tuple[tuple[int, int, float], ...]
    """Call that writes a tensor, call that reads it (both indices into ``calls``), bytes of the tensor."""
    views: int
    """Number of calls without work, such as views."""
    held_bytes: tuple[int, ...]
    """Memory in use while each call runs, without the workspace of its kernel."""
    static_bytes: int
    """Memory in use before the step."""
    peak_bytes: int
    """Peak of the simulated allocator."""
    parameters: int

    @property
    def counts(self) -> Mapping[tuple[int, int], int]:
        """Piece and issuer -> number of calls."""
        return Counter(zip(self.calls, self.issuers, strict=True))

    def to_json(self) -> dict[str, Any]:
        """Plain data; :func:`sketch_from` reads it."""
        pieces = [
            [
                p.op,
                p.work.family,
                p.work.dtype,
                [float(getattr(p.work, n)) for n in COUNTS],
                p.read_bytes,
                p.written_bytes,
                [[k.operator, k.backward, {n: float(v) for n, v in k.shape.items()}] for k in p.work.kernels],
            ]
            for p in self.pieces
        ]
        plain = {n: v for n, v in asdict(self).items() if n != "pieces"}
        return {**plain, "pieces": pieces}


def sketch_from(data: Mapping[str, Any]) -> Sketch:
    """A sketch as :meth:`Sketch.to_json` wrote it.

    Raises:
        KeyError, ValueError, TypeError: `data` is something else.
    """
    pieces = tuple(
        Piece(
            op=op,
            read_bytes=read,
            written_bytes=written,
            work=Work(
                family=family,
                dtype=dtype,
                **dict(zip(COUNTS, counts, strict=True)),
                kernels=tuple(KernelCall(operator=o, backward=b, shape=s) for o, b, s in kernels),
            ),
        )
        for op, family, dtype, counts, read, written, kernels in data["pieces"]
    )
    numbers = [n for p in pieces for n in (p.read_bytes, p.written_bytes, *(getattr(p.work, c) for c in COUNTS))]
    numbers += [size for p in pieces for call in p.work.kernels for size in call.shape.values()]
    if not all(isinstance(n, (int, float)) and 0 <= n < MOST for n in numbers):
        raise ValueError("a number of its work is negative, too large or none")
    own: dict[str, Any] = {n: tuple(map(operator.index, data[n])) for n in ("calls", "phases", "issuers", "held_bytes")}
    for name, count in (("calls", len(pieces)), ("phases", len(PHASES)), ("issuers", len(ISSUERS))):
        if not own[name] or not all(0 <= each < count for each in own[name]):
            raise ValueError(f"its {name} are none, or out of range")
    if len({len(values) for values in own.values()}) != 1:
        raise ValueError("its calls do not fit together")
    edges = tuple((operator.index(a), operator.index(b), float(c)) for a, b, c in data["edges"])
    if not all(0 <= a < len(own["calls"]) and 0 <= b < len(own["calls"]) and 0 <= c < MOST for a, b, c in edges):
        raise ValueError("an edge leads nowhere")
    whole: dict[str, Any] = {n: operator.index(data[n]) for n in ("views", "static_bytes", "peak_bytes", "parameters")}
    return Sketch(name=str(data["name"]), pieces=pieces, edges=edges, **own, **whole)


def sketch(program: Program) -> Sketch:
    """The sketch of a recorded step."""
    liveness = Liveness(program)
    pieces: dict[tuple[Any, ...], int] = {}
    found: list[Piece] = []
    calls, phases, held, issued, places = list[int](), list[int](), list[int](), list[int](), dict[int, int]()
    who = issuers(program)
    views = 0
    for number, call in enumerate(program.calls):
        work = None if call.view else work_of(call.node, inplace=call.inplace)
        if work is None or not (work.launches or work.moved_bytes or work.matrix_flops):
            views += 1
            continue
        piece = _piece(call, work)
        key = (piece.op, piece.read_bytes, piece.written_bytes, work.dtype, str(work.kernels))
        at = pieces.setdefault(key, len(found))
        if at == len(found):
            found.append(piece)
        places[number] = len(calls)
        calls.append(at)
        phases.append(PHASES.index(call.phase))
        issued.append(who[number])
        held.append(int(liveness.in_use_bytes[number + 1]))
    return Sketch(
        name=program.name,
        pieces=tuple(found),
        calls=tuple(calls),
        phases=tuple(phases),
        views=views,
        issuers=tuple(issued),
        edges=tuple(_edges(program, places)),
        held_bytes=tuple(held),
        static_bytes=int(liveness.in_use_bytes[0]),
        peak_bytes=liveness.peak().size_bytes,
        parameters=program.parameter_count,
    )


def _piece(call: Call, work: Work) -> Piece:
    read, written = whole_bytes(call.node)
    return Piece(
        op=variant(call.node),
        work=work,
        read_bytes=read,
        written_bytes=written,
    )


def _edges(program: Program, places: Mapping[int, int]) -> list[tuple[int, int, float]]:
    """Edges between calls that do work; a view stands for the call that wrote its memory."""
    makers: dict[Value, int] = {}
    out: list[tuple[int, int, float]] = []
    for number, call in enumerate(program.calls):
        fed = {makers[value]: value.type.size_bytes for value in call.node.inputs if value in makers}
        here = places.get(number)
        maker = here if here is not None else next(iter(fed), None)
        if here is not None:
            out += [(source, here, float(size)) for source, size in fed.items() if source != here]
        if maker is not None:
            makers.update((call.node.value(index), maker) for index in range(len(call.node.outputs)))
    return out
