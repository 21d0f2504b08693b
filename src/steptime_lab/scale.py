"""Utilisation of a training run against its compute: the best plan of each size under a rule of overlap."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, log2
from typing import Any, Final

import numpy as np

from steptime.errors import FieldError, UnknownNameError
from steptime.hardware import load_cluster
from steptime.num import Array, Num
from steptime_lab.cost import limits as formulas
from steptime_lab.limits import (
    CHANGED,
    GROWTH,
    HIDDEN_FACTOR,
    NETWORK_LATENCY_S,
    REFERENCE_FLOPS,
    THREE_MONTHS_S,
    LimitDevice,
    TrainingRun,
    load_matmul_devices,
)

WORD_BYTES: Final = 2
"""Weights, gradients and activations of 16 bits."""
DEVICE: Final = "h100-sxm"
"""Default device, from the authors' table."""
SPAN: Final = 9
"""Powers of two of devices that are tried, from the fewest that can end in time; the last would run at 0.2 % of
the peak."""
CLIFF: Final = 0.8
"""The cliff is the compute up to which the utilisation is at least this share of the highest one."""
PER_DECADE: Final = 4
"""Runs in a decade of compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleDevice:
    """A device on two levels of links."""

    name: str
    peak_flops_per_s: float
    utilization: float
    """Share of the peak that long products sustain."""
    memory_Bps: float
    network_Bps: tuple[float, float]
    """Bandwidth of the fast and of the slow links, both directions together."""
    fast_domain: int
    """Devices on the fast links."""
    kernel_latency_s: float
    network_latency_s: tuple[float, float]
    passes: float = 3.0
    """Times that the data of a reduction passes a device (`steptime_lab.cost.limits.hierarchical_all_reduce_words`)."""


def known_device(name: str) -> ScaleDevice:
    """A device of the authors' table, in nodes of eight.

    >>> known_device("h100-sxm").fast_domain
    8
    """
    known = load_matmul_devices()[name]
    return ScaleDevice(
        name=known.title,
        peak_flops_per_s=known.peak_flops_per_s,
        utilization=known.utilization,
        memory_Bps=known.memory_Bps,
        network_Bps=(known.network_Bps[0], known.network_Bps[1]),
        fast_domain=8,
        kernel_latency_s=known.kernel_latency_s,
        network_latency_s=(known.network_latency_s[0], known.network_latency_s[1]),
    )


def scale_device(name: str) -> ScaleDevice:
    """A device of the catalogue with the innermost and the outermost links of its cluster.

    Raises:
        UserError: the device or cluster is unknown, or has no 16-bit rate.

    >>> scale_device("gb200-nvl72").fast_domain
    72
    """
    cluster = load_cluster(name)
    device, levels = cluster.device, (cluster.levels[0], cluster.levels[-1])
    peak = next((rate for dtype in ("bf16", "fp16") if (rate := device.matrix_rate(dtype))), None)
    if peak is None:
        raise FieldError("", "device", f"{device.name} has no 16-bit rate", hint="the limits are of 16-bit training")
    fast, slow = (2 * level.link_Bps * level.links_per_device for level in levels)
    return ScaleDevice(
        name=name,
        peak_flops_per_s=peak,
        utilization=device.matrix_efficiency,
        memory_Bps=device.memory_Bps,
        network_Bps=(fast, slow),
        fast_domain=cluster.fast_domain,
        kernel_latency_s=device.kernel_latency_s,
        network_latency_s=(NETWORK_LATENCY_S, NETWORK_LATENCY_S),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Laws:
    """Batch and depth of a run of some compute, and its longest duration."""

    duration_s: float = THREE_MONTHS_S
    batch_tokens: float = 2048**2
    """Tokens of a step of a run of 1e25 FLOP."""
    batch_growth: float = GROWTH
    """Power of the compute with which the tokens of a step grow."""
    layers: float = 120
    """Blocks of a run of 1e25 FLOP."""
    layer_growth: float = GROWTH
    tokens_per_parameter: float = 20


Parts = Sequence[Num]
"""Seconds of compute, memory, fast links, slow links, latency."""
Rule = Callable[[Parts, Parts, Num], Num]
"""Seconds of a phase from the parts of one micro-batch of a layer, the parts of the reduction of its gradients, and the
number of micro-batches."""


def _most(parts: Parts) -> Num:
    found: Num = np.maximum.reduce(np.broadcast_arrays(*parts))
    return found


def _all(step: Parts, end: Parts, micro_batches: Num) -> Num:
    return _most([micro_batches * a + b for a, b in zip(step, end, strict=True)])


def _bandwidth(step: Parts, end: Parts, micro_batches: Num) -> Num:
    return _all(step[:-1], end[:-1], micro_batches) + micro_batches * step[-1]


def _nothing(step: Parts, end: Parts, micro_batches: Num) -> Num:
    alone = _most(step[:2]) + step[2] + step[3] + step[4]
    # Activations and gradients share the links here too: no phase is shorter than with more overlap.
    shared = _bandwidth(step, end, micro_batches)
    return _most([micro_batches * alone, end[2] + end[3] + end[4], shared])


OVERLAPS: Final[Mapping[str, Rule]] = {"all": _all, "bandwidth": _bandwidth, "none": _nothing}
"""Rule of overlap -> time of a phase. ``all``: transfers and latencies overlap with compute and each other;
``bandwidth``: transfers overlap, latencies of products and activations add; ``none``: both add. Under each rule the
gradients of a layer are reduced while other layers compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The best plan of a run."""

    compute_flops: float
    utilization: float
    """FLOPs of the model over the peak of all devices; 0: no plan ends in time."""
    devices: int
    degrees: Mapping[str, int]
    """``pp``, ``dp``, ``tp_hidden``, ``tp_residual`` and ``micro_batches``, powers of two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Utilisation against compute under one rule of overlap."""

    overlap: str
    runs: tuple[Run, ...]

    def reaches(self, share: float) -> float | None:
        """FLOPs of the largest run that reaches a share of the highest utilisation, interpolated between runs on
        logarithmic compute; None: no run is feasible."""
        most = max((run.utilization for run in self.runs), default=0.0)
        kept = [i for i, run in enumerate(self.runs) if run.utilization >= share * most > 0]
        if not kept:
            return None
        here = self.runs[kept[-1]]
        if kept[-1] + 1 == len(self.runs):
            return here.compute_flops
        after = self.runs[kept[-1] + 1]
        part = (here.utilization - share * most) / (here.utilization - after.utilization)
        return float(here.compute_flops * (after.compute_flops / here.compute_flops) ** part)

    @property
    def last_flops(self) -> float | None:
        """FLOPs of the largest run that some plan ends in time."""
        return max((run.compute_flops for run in self.runs if run.utilization > 0), default=None)

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``, in columns."""
        return {
            "overlap": self.overlap,
            "compute_flops": [run.compute_flops for run in self.runs],
            "utilization": [run.utilization for run in self.runs],
            "devices": [run.devices for run in self.runs],
            "degrees": [dict(run.degrees) for run in self.runs],
            "cliff_flops": self.reaches(CLIFF),
            "flops_at_share": {f"{share:g}": self.reaches(share) for share in (0.9, 0.8, 0.5)},
            "last_feasible_flops": self.last_flops,
        }


def curve(device: ScaleDevice, laws: Laws, overlap: str, compute_flops: Sequence[float] | None = None) -> Curve:
    """Utilisation of the best plan of each run.

    Args:
        device: device that the runs use.
        laws: batch, depth and duration of runs.
        overlap: a name of :data:`OVERLAPS`.
        compute_flops: FLOPs of each run; None: from 1e25 up to the first run that no plan ends in time.
    """
    if compute_flops is not None:
        return Curve(overlap=overlap, runs=tuple(best_run(device, laws, overlap, flops) for flops in compute_flops))
    runs: list[Run] = []
    for flops in _decades():
        runs.append(best_run(device, laws, overlap, flops))
        if not runs[-1].utilization:
            break
    return Curve(overlap=overlap, runs=tuple(runs))


def _decades() -> Iterator[float]:
    for i in range(PER_DECADE * 11 + 1):
        yield float(10 ** (25 + i / PER_DECADE))


def best_run(device: ScaleDevice, laws: Laws, overlap: str, compute_flops: float) -> Run:
    """The plan with the highest utilisation that ends in time, over all powers of two of every degree.

    >>> run = best_run(known_device("h100-sxm"), Laws(), "all", 1e25)
    >>> run.devices, run.degrees["dp"], round(run.utilization, 3)
    (2048, 2048, 0.7)
    """
    tokens = float(formulas.optimal_tokens(compute_flops, laws.tokens_per_parameter))
    batch = _grown(compute_flops, laws.batch_tokens, laws.batch_growth)
    layers = _grown(compute_flops, laws.layers, laws.layer_growth)
    least = log2(compute_flops / (laws.duration_s * device.peak_flops_per_s * device.utilization))
    grid = _grid(max(0, ceil(least - 1e-9)), layers, batch)
    width = float(formulas.block_width(tokens / laws.tokens_per_parameter, layers, HIDDEN_FACTOR))
    time_s = tokens / batch * batch_s(device, overlap, grid, batch, layers, width)
    devices = grid["pp"] * grid["dp"] * grid["tp_hidden"] * grid["tp_residual"]
    share = np.where(time_s <= laws.duration_s, compute_flops / (devices * time_s * device.peak_flops_per_s), 0.0)
    at = int(np.argmax(share)) if len(share) else 0
    if not len(share) or not share[at]:
        return Run(compute_flops=compute_flops, utilization=0.0, devices=0, degrees={})
    return Run(
        compute_flops=compute_flops,
        utilization=float(share[at]),
        devices=int(devices[at]),
        degrees={name: int(values[at]) for name, values in grid.items()},
    )


def _grown(compute_flops: float, reference: float, growth: float) -> float:
    return float(formulas.scaled_with_compute(compute_flops, REFERENCE_FLOPS, reference, growth))


def _grid(least: int, layers: float, batch: float) -> dict[str, Array]:
    """All factorisations of 2^least and more devices into powers of two, with at least a token per replica."""
    deepest, most = floor(log2(layers)), floor(log2(batch))
    places = np.meshgrid(
        np.arange(least, least + SPAN),
        np.arange(deepest + 1),
        np.arange(13),
        np.arange(13),
        np.arange(most + 1),
        indexing="ij",
        sparse=True,
    )
    devices, pp, hidden, residual, micro = places
    dp = devices - pp - hidden - residual
    kept = (dp >= 0) & (dp + micro <= most) & (micro >= pp) & (hidden >= residual)
    columns = [np.broadcast_to(column, kept.shape)[kept] for column in (pp, dp, hidden, residual, micro)]
    names = ("pp", "dp", "tp_hidden", "tp_residual", "micro_batches")
    return {name: np.exp2(column.astype(np.float64)) for name, column in zip(names, columns, strict=True)}


def batch_s(
    device: ScaleDevice, overlap: str, grid: Mapping[str, Array], batch: float, layers: float, width: float
) -> Array:
    """Seconds of a step under each plan; every block is two linear layers, which mirror each other.

    The ranks of ``tp_hidden`` fill a fast domain first, then the ranks of ``tp_residual``, then the ranks of ``dp``. A
    product and the reduction after it wait for their inputs: their latency is that of a kernel plus that of the
    outermost links that the reduction crosses.
    """
    hidden, residual, dp, micro = (grid[name] for name in ("tp_hidden", "tp_residual", "dp", "micro_batches"))
    tokens, local = batch / (micro * dp), HIDDEN_FACTOR * width**2 / (hidden * residual)
    inside_hidden = np.minimum(hidden, device.fast_domain)
    inside_residual = np.minimum(residual, np.maximum(device.fast_domain // inside_hidden, 1))
    inside_dp = np.minimum(dp, np.maximum(device.fast_domain // (inside_hidden * inside_residual), 1))
    outputs = formulas.hierarchical_all_reduce_words(
        HIDDEN_FACTOR * width / hidden * tokens, inside_residual, residual / inside_residual, device.passes
    )
    inputs = formulas.hierarchical_all_reduce_words(
        width / residual * tokens, inside_hidden, hidden / inside_hidden, device.passes
    )
    latency = 2 * device.kernel_latency_s + _crossed_s(device, residual, inside_residual)
    latency = latency + _crossed_s(device, hidden, inside_hidden)
    step = (
        6 * local * tokens / (device.peak_flops_per_s * device.utilization),
        4 * local * WORD_BYTES / device.memory_Bps,
        *((a + b) * WORD_BYTES / rate for a, b, rate in zip(outputs, inputs, device.network_Bps, strict=True)),
        latency,
    )
    words = formulas.hierarchical_all_reduce_words(local, inside_dp, dp / inside_dp, device.passes)
    end = (
        0.0,
        0.0,
        *(w * WORD_BYTES / rate for w, rate in zip(words, device.network_Bps, strict=True)),
        _crossed_s(device, dp, inside_dp),
    )
    rule, nothing = OVERLAPS[overlap], (0.0,) * len(step)
    one, first, phase = rule(step, nothing, 1.0), rule(step, end, 1.0), rule(step, end, micro)
    return np.asarray(formulas.interleaved_batch_s(first, phase, one, 2 * layers, grid["pp"], micro))


def _crossed_s(device: ScaleDevice, ranks: Array, inside: Array) -> Array:
    """Latency of a reduction, set by the outermost links that it crosses."""
    fast, slow = device.network_latency_s
    return np.where(ranks > inside, slow, np.where(inside > 1, fast, 0.0))


def changed(device: ScaleDevice, *, fast_domain: int | None = None, latency_factor: float = 1.0) -> ScaleDevice:
    """The device with another fast domain, and with all latencies multiplied by a factor."""
    fast, slow = device.network_latency_s
    return replace(
        device,
        fast_domain=fast_domain or device.fast_domain,
        kernel_latency_s=latency_factor * device.kernel_latency_s,
        network_latency_s=(latency_factor * fast, latency_factor * slow),
    )


def curves_of(
    name: str | None,
    figures: LimitDevice,
    run: TrainingRun,
    overlap: Sequence[str],
    knobs: tuple[float, int | None, float],
) -> tuple[Curve, ...]:
    """A curve for each rule of overlap.

    Args:
        name: device of the catalogue; None: the authors' H100.
        figures: device of the layer; where its figures were changed, they replace those of the catalogue.
        run: laws and duration of the runs.
        overlap: names of :data:`OVERLAPS`.
        knobs: power of the compute with which the batch grows, devices of a fast domain, factor on latencies.

    Raises:
        UserError: an unknown rule or device.
    """
    for each in overlap:
        if each not in OVERLAPS:
            raise UnknownNameError("rule of overlap", each, OVERLAPS)
    growth, domain, factor = knobs
    device = changed(
        known_device(DEVICE) if name is None else scale_device(name), fast_domain=domain, latency_factor=factor
    )
    if figures.name.endswith(CHANGED):
        fast = (figures.network_Bps, device.network_Bps[1])
        device = replace(
            device,
            peak_flops_per_s=figures.flops_per_s_8bit / 2,
            utilization=figures.utilization,
            memory_Bps=figures.memory_Bps,
            network_Bps=fast,
        )
    laws = Laws(
        duration_s=run.duration_s,
        batch_tokens=run.reference_batch_tokens,
        batch_growth=growth,
        layers=run.reference_layers,
        tokens_per_parameter=run.tokens_per_parameter,
    )
    return tuple(curve(device, laws, each) for each in dict.fromkeys(overlap))
