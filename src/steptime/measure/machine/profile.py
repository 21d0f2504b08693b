"""From measurements to numbers: curves of every operator, and the device and levels that all other commands read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np

from steptime.cost.matmul import LOOSE_BYTES, ODD_BYTES, off_boundary
from steptime.cost.regression import SENT
from steptime.errors import UserError, counted
from steptime.estimate.measured import (
    CONVOLVED,
    CPU,
    CPU_ATTENTION,
    CPU_CALL,
    CPU_CONVOLUTION,
    CPU_MAPS,
    CPU_PRODUCT,
    CPU_PRODUCTS,
    CPU_TURN,
    CPU_UNFOLDED,
    CPU_VIEW,
    LOOPED,
    NORMS,
    POOLS,
)
from steptime.hardware.records import Curve
from steptime.measure.machine import cpu_operators
from steptime.measure.machine.collectives import Mesh, Timed
from steptime.measure.machine.linear import MODELS, Model, cross_validated_s, nonnegative, rate
from steptime.measure.machine.runner import Host, Measured, noise_of
from steptime.measure.machine.torch_ops import copies_of, room_bytes
from steptime.measure.machine.work import (
    LAUNCHES,
    MAPS,
    TRAINED,
    TURNED,
    Task,
    convolution_sizes,
    loops_of,
    work_of,
)
from steptime.measure.residuals import errors_of, scatter_of
from steptime.num import Array, Num

#: Operators that stream two tensors and compute next to nothing.
STREAMS: Final = ("copy", "update")
#: A repeated sweep over this many times the last cache finds none of its data there.
PAST: Final = 1.5
#: A last cache is taken to be at most this many times as fast as memory; assumed, between the 2 to 4 of server CPUs.
CACHE_SPEEDUP: Final = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """Bandwidth of memory and its uncertainty."""

    best_Bps: float
    """Bandwidth of the best copy or update."""
    sustained: float
    """Share of ``best_Bps`` that copies and updates sustain, 0 to 1."""
    factor: float = 1.0
    """The true bandwidth may be lower by this; 1: a sweep past the cache was measured."""
    note: str = ""
    """Remark on what is unknown, for the user."""


def held_factor(swept_bytes: float, cache_bytes: float) -> float:
    r"""Factor by which the bandwidth of a repeated sweep may be too high because a cache holds part of its data.

    $$f = \frac{1}{1 - C / S} \text{ but at most } f_{max}, \qquad f = 1 \text{ for } S \ge 1.5\,C$$

    A cache of $C$ = ``cache_bytes`` holds at most the share $C / S$ of a sweep over $S$ = ``swept_bytes``, so at least
    the rest came from memory in the measured time; $f_{max}$ = :data:`CACHE_SPEEDUP`.

    >>> held_factor(3e9, 1e9), held_factor(1.25e9, 1e9), held_factor(0.5e9, 1e9)
    (1.0, 4.0, 4.0)
    >>> round(held_factor(1.4e9, 1e9), 2)
    3.5
    """
    if swept_bytes >= PAST * cache_bytes:
        return 1.0
    return min(CACHE_SPEEDUP, 1 / max(1 - cache_bytes / swept_bytes, 1 / CACHE_SPEEDUP))


def bandwidth_of(host: Host, operators: Sequence[Measured]) -> Bandwidth:
    """Best and sustained bandwidth of the copies and updates that move more than the last cache holds.

    Where no copy does, those count that sweep the most memory, all their sets of operands together. On a GPU updates
    count alone: it moves a whole tensor by the driver's copy, which is slower than kernels are.

    Raises:
        UserError: no copy was measured.
    """
    found = [(one, work_of(one.task).moved_bytes) for one in operators if one.task.kind in STREAMS]
    if not any(one.task.kind == "copy" for one, _ in found):
        raise UserError(
            "no copy was measured: the memory bandwidth is unknown", hint="--resume measures what is missing"
        )
    past = [(one, moved) for one, moved in found if swept_bytes(host, one) >= PAST * host.cache_bytes]
    chosen = [(one, moved) for one, moved in past if moved > host.cache_bytes]
    if not any(one.task.kind == "copy" for one, _ in chosen):
        most = max(swept_bytes(host, one) for one, _ in found if one.task.kind == "copy")
        chosen = [(one, moved) for one, moved in found if swept_bytes(host, one) >= most / 2]
    kernels = [pair for pair in chosen if host.device == "cpu" or pair[0].task.kind != "copy"]
    rates_Bps = [moved / one.seconds for one, moved in kernels or chosen]
    best_Bps = max(rates_Bps)
    share = float(np.median(rates_Bps)) / best_Bps
    swept = max(swept_bytes(host, one) for one, _ in chosen if one.task.kind == "copy")
    factor = held_factor(swept, host.cache_bytes)
    note = (
        ""
        if factor == 1
        else (
            f"memory bandwidth: the largest copies swept {swept / 1e6:,.0f} MB and the last cache holds "
            f"{host.cache_bytes / 1e6:,.0f} MB of them: the true bandwidth may be up to {factor:.1f} times lower"
        )
    )
    return Bandwidth(best_Bps=best_Bps, sustained=min(1.0, max(1e-3, share)), factor=factor, note=note)


def swept_bytes(host: Host, one: Measured) -> float:
    """Memory that the calls of a copy or an update go through before they come back to the first set of operands."""
    moved = work_of(one.task).moved_bytes
    return 2 * moved / MAPS[one.task.kind].passes * copies_of(one.task, host.cache_bytes, room_bytes(host.memory_bytes))


#: Models that are tried for each kind of operator; the one with the least cross-validated error is kept.
CANDIDATES: Final[Mapping[str, tuple[str, ...]]] = {
    "matmul": ("half_size_matmul", "linear_roofline"),
    "attention_forward": ("additive", "linear_roofline"),
    "attention_backward": ("additive", "linear_roofline"),
    **dict.fromkeys(CONVOLVED, ("blocked_convolution",)),
    **dict.fromkeys(NORMS, ("short_loops", "streaming")),
    **dict.fromkeys(POOLS, ("short_loops",)),
    **dict.fromkeys(MAPS, ("streaming", "linear")),
    **dict.fromkeys(CPU_MAPS, ("short_loops", "streaming")),
    **dict.fromkeys((CPU_VIEW, CPU_TURN, CPU_CALL), ("constant",)),
    **dict.fromkeys((CPU_PRODUCT, CPU_PRODUCTS), ("resident_matmul",)),
    **dict.fromkeys((CPU_ATTENTION, CPU_UNFOLDED), ("additive",)),
    CPU_CONVOLUTION: ("blocked_convolution",),
}
#: Hops of the rings of :mod:`steptime.cost.collective`, per rank beyond the first.
HOPS: Final[Mapping[str, float]] = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "broadcast": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelFit:
    """One axis of the mesh as a level of the fabric."""

    name: str
    devices: int | None
    link_Bps: float
    efficiency: float
    latency_s: float
    points: int
    """0: nothing was measured, the numbers are assumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFit:
    """The numbers of a device, as :class:`steptime.hardware.records.Device` has them."""

    matrix_flops_per_s: Mapping[str, float]
    vector_flops_per_s: Mapping[str, float]
    memory_bytes: float
    memory_Bps: float
    matrix_efficiency: float
    vector_efficiency: float
    memory_efficiency: float
    kernel_latency_s: float
    issue_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Result of a calibration."""

    host: Host
    device: DeviceFit
    levels: tuple[LevelFit, ...]
    curves: tuple[Curve, ...]
    operators: tuple[Measured, ...]
    collectives: tuple[Timed, ...]
    noise: float
    skipped: tuple[str, ...]
    """Notes on what could not be fitted or is unsure, and why."""
    memory_note: str = ""
    """Note on what is unknown about the bandwidth of memory."""
    date: str


def arguments_of(task: Task) -> dict[str, Num]:
    """Arguments of the models for a task."""
    work = work_of(task)
    dims = {**{name: float(value) for name, value in task.shape.items()}, "turned": float(task.layout == TURNED)}
    if task.kind == "matmul":
        rows = (dims["m"], dims["n"], dims["k"], dims["turned"], task.element_bytes)
        dims["loose"] = float(off_boundary(*rows, LOOSE_BYTES))
        dims["odd"] = float(off_boundary(*rows, ODD_BYTES))
    if task.kind in CONVOLVED:
        dims |= convolution_sizes(task)
    if task.kind in LOOPED:
        dims |= loops_of(task.kind, task.shape)
    if task.kind in CPU:
        sizes = cpu_operators.implicit if task.kind == CPU_CONVOLUTION else partial(cpu_operators.counts, task.kind)
        dims |= sizes(task.shape)
    return {
        **dims,
        "matrix_flops": work.matrix_flops,
        "vector_flops": work.vector_flops,
        "moved_bytes": work.moved_bytes,
        "result_bytes": work.result_bytes,
    }


def fit(
    host: Host, operators: Sequence[Measured], collectives: Sequence[Timed], mesh: Mesh | None, date: str
) -> Fitted:
    """Fits everything that the measurements support.

    Raises:
        UserError: there are too few matrix products to say anything.
    """
    skipped: list[str] = []
    source = f"{host.title}, torch {host.torch}, {date}"
    curves = [*_operator_curves(operators, source, skipped), *_collective_curves(collectives, source, skipped)]
    ranks = mesh.local if mesh is not None and host.device == "cpu" else 1  # which share the memory of the host
    device, memory = _device(host, operators, curves, ranks)
    curves = [_unsure(curve, memory.factor) for curve in curves]
    skipped += [memory.note] if memory.note else []
    return Fitted(
        host=host,
        device=device,
        memory_note=memory.note,
        levels=_levels(collectives, mesh, device),
        curves=tuple(curves),
        operators=tuple(operators),
        collectives=tuple(collectives),
        noise=noise_of(operators),
        skipped=tuple(skipped),
        date=date,
    )


def _unsure(curve: Curve, factor: float) -> Curve:
    """The curve; for a memory-bound operator with the upper end of its band raised by ``factor``."""
    if factor == 1 or curve.family.partition("/")[2] not in (*MAPS, *LOOPED):
        return curve
    return replace(curve, band=(curve.band[0], curve.band[1] * factor))


def _operator_curves(operators: Sequence[Measured], source: str, skipped: list[str]) -> list[Curve]:
    groups: dict[tuple[str, str], list[Measured]] = {}
    for one in operators:
        if one.task.kind not in LAUNCHES:
            groups.setdefault((one.task.kind, one.task.dtype), []).append(one)
    out = []
    for (kind, dtype), found in groups.items():
        rows = [arguments_of(one.task) for one in found]
        shape = {name: np.array([row[name] for row in rows], float) for name in rows[0]}
        shapes = [str(sorted(one.task.shape.items())) for one in found]
        names = [*found[0].task.shape, *(["moved_bytes"] if kind in CPU else [])]
        seconds = np.array([one.seconds for one in found])
        points = _Points(kind=kind, dtype=dtype, shape=shape, seconds=seconds, shapes=shapes, named=names)
        made = _curves(points, source, skipped)
        out += made if kind == "matmul" else made[:1]
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class _Points:
    """Measurements of one operator in one dtype."""

    kind: str
    dtype: str
    shape: Mapping[str, Array]
    seconds: Array
    shapes: Sequence[str]
    """Equal for measurements of equal shape."""
    named: Iterable[str]
    """Arguments whose range a curve states."""


def _curves(of: _Points, source: str, skipped: list[str], candidates: tuple[str, ...] | None = None) -> list[Curve]:
    """A curve for each candidate that can be fitted, best first."""
    out, problems = [], []
    ranges = {name: (float(of.shape[name].min()), float(of.shape[name].max())) for name in of.named}
    for name in candidates or CANDIDATES[of.kind]:
        model = MODELS[name]
        try:
            known_s = cross_validated_s(model, of.shape, of.seconds, of.shapes)
            values = {name: float(value) for name, value in model.fit(of.shape, of.seconds).items()}
        except UserError as error:
            problems.append(f"{of.kind} {of.dtype}: {error}")
            continue
        errors = asdict(errors_of(known_s, of.seconds)) | {"points": len(of.seconds)}
        about: dict[str, Any] = {"family": f"{name}/{of.kind}", "dtype": of.dtype, "timer": "kernel", "source": source}
        scatter = scatter_of(known_s, of.seconds) if of.kind in CPU else None
        out.append(Curve(coefficients=values, ranges=ranges, scatter=scatter, **about, **errors))
    skipped += problems[:1] if not out else []
    return sorted(out, key=lambda curve: curve.median_ape)


def _collective_curves(collectives: Sequence[Timed], source: str, skipped: list[str]) -> list[Curve]:
    groups: dict[tuple[str, str, int], list[Timed]] = {}
    for one in collectives:
        groups.setdefault((one.kind, one.axis, one.ranks), []).append(one)
    out = []
    for (kind, axis, ranks), found in groups.items():
        sent = np.array([one.size_bytes * SENT[kind](ranks) for one in found])
        shape = {
            "moved_bytes": sent,
            "result_bytes": np.zeros_like(sent),
            "ranks": np.full_like(sent, ranks),
            "bytes": np.array([float(one.size_bytes) for one in found]),
        }
        seconds = np.array([one.seconds for one in found])
        points = _Points(
            kind=f"{kind}/{axis}{ranks}",
            dtype="fp32",
            shape=shape,
            seconds=seconds,
            shapes=[str(one.size_bytes) for one in found],
            named=("ranks", "bytes"),
        )
        out += _curves(points, source, skipped, ("linear", "streaming"))[:1]
    return out


def _device(
    host: Host, operators: Sequence[Measured], curves: Sequence[Curve], ranks: int
) -> tuple[DeviceFit, Bandwidth]:
    best: dict[str, float] = {}
    for one in operators:
        if one.task.kind == "matmul":
            flops_per_s = work_of(one.task).matrix_flops / one.seconds
            best[one.task.dtype] = max(best.get(one.task.dtype, 0.0), flops_per_s)
    sustained = {c.dtype: float(c.coefficients["flops_per_s"]) for c in curves if c.family == "linear_roofline/matmul"}
    if not sustained:
        raise UserError(f"{counted(len(operators), 'measurement')} are too few: no matrix product could be fitted")
    shares = [min(1.0, flops_per_s / best[dtype]) for dtype, flops_per_s in sustained.items()]
    efficiency = min(1.0, max(1e-3, float(np.median(shares))))
    latency_s = _latency_s(host, operators, curves)
    memory = bandwidth_of(host, operators)
    vector, vector_share = _vector(host, operators, memory.best_Bps * memory.sustained, latency_s)
    device = DeviceFit(
        matrix_flops_per_s={dtype: flops_per_s / efficiency for dtype, flops_per_s in sustained.items()},
        vector_flops_per_s=vector,
        memory_bytes=host.memory_bytes / ranks,
        memory_Bps=memory.best_Bps,
        matrix_efficiency=efficiency,
        vector_efficiency=vector_share,
        memory_efficiency=memory.sustained,
        kernel_latency_s=min(latency_s, 1.0),
        issue_s=_issue_s(host, operators),
    )
    return device, memory


def _latency_s(host: Host, operators: Sequence[Measured], curves: Sequence[Curve]) -> float:
    """Time of the smallest operator once it is issued (s).

    On a CPU this includes the call. A GPU runs operators that were issued before: the curves of replayed operators
    give the latency, and the time of the host to issue one is another number (:func:`_issue_s`).
    """
    kinds = {"matmul", *MAPS} if host.device == "cuda" else {"matmul"}
    known = [c for c in curves if c.family.partition("/")[2] in kinds and "latency_s" in c.coefficients]
    latencies = [float(c.coefficients["latency_s"]) for c in known]
    launches = [one.seconds for one in operators if one.task.kind == "launch"] if host.device == "cpu" else []
    return float(np.median([*latencies, *launches])) if latencies or launches else 0.0


def _issue_s(host: Host, operators: Sequence[Measured]) -> float | None:
    """Time of the host per operator of both passes (s); on a CPU without the operators themselves."""
    found = {one.task.kind: one.seconds for one in operators if one.task.kind in LAUNCHES}
    passes_s, apart_s = (found.get(kind) for kind in ("training_passes", "training_operators"))
    if passes_s is None or apart_s is None:
        return None
    alone_s = max(passes_s - apart_s, 0.0) if host.device == "cpu" else passes_s
    return min(alone_s / TRAINED, 1.0)


def _vector(
    host: Host, operators: Sequence[Measured], memory_Bps: float, latency_s: float
) -> tuple[dict[str, float], float]:
    """Best rate by dtype, and the share of it that operators which are not bound by memory sustain.

    A GPU has none of these: an operator slower than memory has too few rows or columns to fill it. The best measured
    rate then counts as sustained, and the units may be faster.
    """
    found: dict[str, list[float]] = {}
    for one in operators:
        work = work_of(one.task)
        if one.task.kind in MAPS and work.vector_flops:
            busy_s = max(one.seconds - latency_s, one.seconds / 10)
            bound = busy_s > 1.3 * work.moved_bytes / memory_Bps
            found.setdefault(one.task.dtype, []).extend([work.vector_flops / busy_s] * (1 + 9 * bound))
    if not found:
        raise UserError("no operator outside the matrix products was measured")
    middle = {dtype: float(np.median(rates)) for dtype, rates in found.items()}
    best = {dtype: max(rates) for dtype, rates in found.items()}
    if host.device == "cuda":
        return {dtype: flops_per_s for dtype, flops_per_s in best.items() if dtype != "tf32"}, 1.0
    share = float(np.median([middle[dtype] / best[dtype] for dtype in found]))
    share = min(1.0, max(1e-3, share))
    return {dtype: flops_per_s / share for dtype, flops_per_s in middle.items() if dtype != "tf32"}, share


def _levels(collectives: Sequence[Timed], mesh: Mesh | None, device: DeviceFit) -> tuple[LevelFit, ...]:
    axes = [] if mesh is None else [("local", mesh.local if mesh.nodes > 1 or mesh.local > 1 else None)]
    axes += [("node", None)] if mesh is not None and mesh.nodes > 1 else []
    out = [made for axis, devices in axes if (made := _level(axis, devices, collectives)) is not None]
    if out:
        return tuple(out)
    assumed = LevelFit(
        name="local",
        devices=None,
        link_Bps=device.memory_Bps,
        efficiency=device.memory_efficiency / 2,
        latency_s=device.kernel_latency_s,
        points=0,
    )
    return (assumed,)


def _level(axis: str, devices: int | None, collectives: Sequence[Timed]) -> LevelFit | None:
    """Bandwidth and latency of the ring formulas, over all ring collectives and sizes of group together."""
    found = [one for one in collectives if one.axis == axis and one.kind in HOPS]
    sent = np.array([one.size_bytes * SENT[one.kind](one.ranks) for one in found])
    hops = np.array([HOPS[one.kind] * (one.ranks - 1) for one in found])
    seconds = np.array([one.seconds for one in found])
    try:
        x = nonnegative(np.stack([hops, sent], axis=1), seconds)
    except (UserError, ValueError):
        return None
    best = float((sent / seconds).max())
    sustained = rate(float(x[1])) if x[1] > 0 else best
    return LevelFit(
        name=axis,
        devices=devices,
        link_Bps=max(best, sustained),
        efficiency=sustained / max(best, sustained),
        latency_s=min(1.0, float(x[0])),
        points=len(found),
    )


class Predictor:
    """Times by the curves of a profile.

    >>> curve = Curve(family="linear/copy", dtype="fp32", coefficients={"latency_s": 0.0, "rate_per_s": 8.0}, points=9,
    ...               median_ape=0.0, mean_ape=0.0, bias=0.0, band=(1.0, 1.0), source="")
    >>> Predictor([curve]).seconds(Task(kind="copy", dtype="fp32", shape={"rows": 2, "width": 3}))
    6.0
    """

    def __init__(self, curves: Iterable[Curve]) -> None:
        self._best: dict[tuple[str, str], tuple[Model, Curve]] = {}
        for curve in sorted(curves, key=lambda c: c.median_ape, reverse=True):
            name, _, kind = curve.family.partition("/")
            if name in MODELS:
                self._best[kind, curve.dtype] = (MODELS[name], curve)

    def seconds(self, task: Task) -> float:
        """Predicted time of an operator.

        Raises:
            UserError: no curve covers this kind and dtype.
        """
        model, curve = self._find(task.kind, task.dtype)
        return float(model.predict(arguments_of(task), curve.coefficients))

    def collective_s(self, kind: str, axis: str, ranks: int, size_bytes: float) -> float:
        """Predicted time of a collective over groups that were measured.

        Raises:
            UserError: no curve covers it.
        """
        model, curve = self._find(f"{kind}/{axis}{ranks}", "fp32")
        sent = size_bytes * SENT[kind](ranks)
        return float(model.predict({"moved_bytes": sent, "result_bytes": 0.0}, curve.coefficients))

    def _find(self, kind: str, dtype: str) -> tuple[Model, Curve]:
        if (kind, dtype) not in self._best:
            known = ", ".join(sorted({f"{k} {d}" for k, d in self._best}))
            raise UserError(f"there is no curve for {kind} in {dtype}", hint=f"measured: {known or 'nothing'}")
        return self._best[kind, dtype]
