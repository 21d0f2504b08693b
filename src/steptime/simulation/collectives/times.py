"""Times of one collective on a cluster: the estimate's for the communication library, and textbook algorithms'."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from steptime.api.request import NameOrPath, choice, name_or_path, text, whole
from steptime.cost.collective import BUS_SHARE, algorithm_Bps, bus_Bps
from steptime.cost.collective_algorithms import ALGORITHMS, alpha_beta_gamma_s
from steptime.cost.collective_schedules import added_bytes
from steptime.errors import UnknownNameError, UserError, counted
from steptime.estimate.communication import chosen_over_s, collective_basis
from steptime.estimate.machine import Machine, machine_of
from steptime.estimate.result import SCHEMA_VERSION
from steptime.hardware import load_cluster
from steptime.hardware.records import Cluster
from steptime.num import divisors
from steptime.options import MAX_DEVICES, number
from steptime.plan.job import PRECISIONS

OPERATIONS: Final = tuple(BUS_SHARE)
"""Collectives that the command knows."""
NCCL, ESTIMATE = "nccl", "estimate"
"""Names, among the algorithms, of the time that an estimate takes: with and without a fit to NCCL."""
TREE: Final = "mst"
"""The command's name for the minimum spanning tree, which is ``binomial`` in the table of algorithms."""
_DTYPES: Final = ("bf16", "fp16", "fp32", "tf32")
LEAST_BYTES, LARGEST_BYTES = 1.0, 1e15
SIZES: Final = 8
"""Sizes of the table of times, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmTime:
    """One algorithm of a collective at one size."""

    algorithm: str
    """``nccl`` or ``estimate``, ``mst``, or a name of :data:`steptime.cost.collective_algorithms.ALGORITHMS`."""
    time_s: float
    latency_s: float | None
    """Latency of the hops; None where the time is not split into parts, as in a fit to measurements."""
    transfer_s: float | None
    """Time of the bytes on the links."""
    reduction_s: float | None
    """Time of the additions."""
    algorithm_Bps: float
    """``algbw`` of nccl-tests."""
    bus_Bps: float
    """``busbw`` of nccl-tests."""
    chosen: str = ""
    """Algorithm and protocol that the estimate chose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective on a cluster: every algorithm at one size, and their times over the size."""

    operation: str
    cluster: str
    size_bytes: float
    """The whole tensor, as nccl-tests counts it: the bytes of a rank after a gather, before a scatter, or in an
    all-to-all."""
    ranks: int
    inside: int
    """Ranks in each fast domain."""
    inner_hop_s: float
    """Alpha inside a domain: latency of a hop."""
    outer_hop_s: float
    """Alpha between domains."""
    inner_Bps: float
    """1 / beta inside a domain: the rate at which one rank sends."""
    outer_Bps: float
    """1 / beta between domains: the rate at which all ranks of a domain send together."""
    reduction_s_per_byte: float
    """Gamma: time to add one byte to another."""
    library: str
    """``nccl`` where an estimate takes fitted times of NCCL, else ``estimate``."""
    basis: str
    """Basis of the estimate's time: a fit or a formula."""
    times: tuple[AlgorithmTime, ...]
    sizes_bytes: tuple[float, ...]
    """Sizes of the table."""
    seconds: Mapping[str, tuple[float, ...]]
    """Algorithm -> time at each size."""
    chosen: tuple[str, ...]
    """Algorithm and protocol of an estimate at each size."""

    @property
    def fastest(self) -> AlgorithmTime:
        """The fastest of the requested algorithms."""
        return min(self.times, key=lambda one: one.time_s)

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``."""
        return {"schema_version": SCHEMA_VERSION, **asdict(self), "fastest": self.fastest.algorithm}


def collective(
    operation: str,
    cluster: NameOrPath,
    *,
    ranks: int,
    size_bytes: float = 2.0**30,
    inside: int | None = None,
    algorithms: Sequence[str] = (),
    least_bytes: float = 1024.0,
) -> Collective:
    """Times of one collective on a cluster.

    ``nccl`` is the time that an estimate takes: that of the fastest fitted algorithm and protocol. On machines without
    a fit it is called ``estimate``. The other algorithms take the textbook's sum of latency, transfer and additions
    (alpha, beta, gamma) on the links of the catalogue.

    Args:
        operation: ``broadcast``, ``reduce``, ``scatter``, ``gather``, ``all_gather``, ``reduce_scatter``,
            ``all_reduce`` or ``all_to_all``.
        cluster: catalogue name or TOML file.
        ranks: devices of the group.
        size_bytes: size of the whole tensor, as nccl-tests counts it.
        inside: ranks in each fast domain; None: as many as divide the group.
        algorithms: ``nccl`` or ``estimate``, ``mst`` (minimum spanning tree), ``ring`` or another name of
            :data:`steptime.cost.collective_algorithms.ALGORITHMS`; none: ``nccl``, ``ring`` and ``mst``, of an
            all-to-all ``nccl``, ``direct`` and ``bruck``.
        least_bytes: smallest size of the table over sizes, which ends with ``size_bytes``.

    Raises:
        UserError: something in the input is wrong; the message says what to change.

    >>> found = collective("all_reduce", "dgx-h100", ranks=8, size_bytes=1e9)
    >>> [one.algorithm for one in found.times], found.times[0].chosen
    (['nccl', 'ring', 'mst'], 'switch, simple')
    """
    operation = choice("operation", text("operation", operation).replace("-", "_"), OPERATIONS)
    machines = load_cluster(name_or_path("cluster", cluster))
    count = whole("ranks", ranks, 2, MAX_DEVICES)
    _check_reach(machines, count)
    near = _inside(machines, count, inside)
    size = number("size_bytes", size_bytes, LEAST_BYTES, LARGEST_BYTES, "bytes of the whole tensor")
    least = number("least_bytes", least_bytes, LEAST_BYTES, size, "bytes of the smallest size of the table")
    machine = machine_for_links(machines, count)
    library = ESTIMATE if machine.fabric is None else NCCL
    names = _algorithms(operation, algorithms, library)
    sizes = _sizes(least, size)
    timed = {name: _times(name, operation, machine, sizes, count, near) for name in names}
    chosen = next((parts.chosen for name, parts in timed.items() if name == library), ())
    links = _links(machine, near)
    return Collective(
        operation=operation,
        cluster=machines.name,
        size_bytes=size,
        ranks=count,
        inside=near,
        inner_hop_s=links["inner_hop_s"],
        outer_hop_s=links["outer_hop_s"],
        inner_Bps=links["inner_Bps"],
        outer_Bps=links["outer_Bps"],
        reduction_s_per_byte=3 / machine.memory_Bps,
        library=library,
        basis=collective_basis(machine, operation, count, near),
        times=tuple(timed[name].last(name, operation, size, count) for name in names),
        sizes_bytes=tuple(sizes.tolist()),
        seconds={name: tuple(timed[name].seconds.tolist()) for name in names},
        chosen=chosen,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Times:
    """Times of one algorithm over sizes, and the parts of the time at the last size."""

    seconds: Any
    parts: tuple[float, float, float] | None = None
    chosen: tuple[str, ...] = ()

    def last(self, name: str, operation: str, size_bytes: float, ranks: int) -> AlgorithmTime:
        time_s = float(self.seconds[-1])
        latency_s, transfer_s, reduction_s = self.parts or (None, None, None)
        return AlgorithmTime(
            algorithm=name,
            time_s=time_s,
            latency_s=latency_s,
            transfer_s=transfer_s,
            reduction_s=reduction_s,
            algorithm_Bps=float(algorithm_Bps(size_bytes, time_s)),
            bus_Bps=float(bus_Bps(operation, size_bytes, ranks, time_s)),
            chosen=self.chosen[-1] if self.chosen else "",
        )


def _times(name: str, operation: str, machine: Machine, sizes: Any, ranks: int, inside: int) -> _Times:
    if name in (NCCL, ESTIMATE):
        seconds, algorithms, protocols = chosen_over_s(operation, machine, sizes, ranks, inside)
        pairs = np.broadcast_arrays(np.asarray(algorithms, object), np.asarray(protocols, object), sizes)[:2]
        chosen = [", ".join(filter(None, pair)) for pair in zip(*pairs, strict=True)]
        return _Times(seconds=seconds, chosen=tuple(chosen))
    own = "binomial" if name == TREE else name
    path = ALGORITHMS[operation][own](sizes, ranks, inside, 0.0)
    added = added_bytes(operation, own, sizes, ranks, inside)
    parts = alpha_beta_gamma_s(path, added, **_links(machine, inside), memory_Bps=machine.memory_Bps)
    wide = [np.broadcast_to(np.asarray(part, float), sizes.shape) for part in parts]
    return _Times(seconds=sum(wide), parts=(float(wide[0][-1]), float(wide[1][-1]), float(wide[2][-1])))


def _links(machine: Machine, inside: int) -> dict[str, float]:
    """Latencies and rates of the links: for one rank inside a domain, for all ranks of a domain between domains."""
    return {
        "inner_hop_s": machine.fast_latency_s,
        "outer_hop_s": machine.slow_latency_s,
        "inner_Bps": machine.fast_Bps,
        "outer_Bps": inside * float(machine.slow_link_Bps(inside)),
    }


def _sizes(least: float, size: float) -> Any:
    """Sizes from the smallest to the whole tensor, with a power of two between neighbours.

    >>> _sizes(1024, 2**20).tolist()
    [1024.0, 4096.0, 16384.0, 65536.0, 262144.0, 1048576.0]
    """
    doublings = math.log2(size / least)
    step = max(math.ceil(doublings / (SIZES - 1)), 1)
    return size / 2.0 ** (step * np.arange(int(doublings / step), -1, -1))


def _algorithms(operation: str, names: Sequence[str], library: str) -> tuple[str, ...]:
    known = (library, *(TREE if name == "binomial" else name for name in ALGORITHMS[operation]))
    for name in names:
        if text("algorithm", name) not in known:
            raise UnknownNameError(f"algorithm of {operation} on this cluster", name, known)
    usual = ("direct", "bruck") if operation == "all_to_all" else ("ring", TREE)
    return tuple(dict.fromkeys(names)) or (library, *usual)


def _inside(cluster: Cluster, ranks: int, inside: int | None) -> int:
    """Ranks in each fast domain: the number that the user gave, else the largest that divides the group."""
    fitting = [n for n in divisors(ranks) if n <= cluster.fast_domain]
    if inside is None:
        return fitting[-1]
    if whole("inside", inside, 1, ranks) not in fitting:
        allowed = ", ".join(map(str, fitting))
        raise UserError(
            f"inside {inside}: {ranks} ranks in fast domains of {counted(cluster.fast_domain, 'device')} do not lie so",
            hint=f"one of {allowed}",
        )
    return inside


def _check_reach(cluster: Cluster, ranks: int) -> None:
    outermost = cluster.levels[-1]
    if outermost.devices is not None and ranks > outermost.devices:
        raise UserError(
            f"{cluster.name}: its outermost level {outermost.name} joins {counted(outermost.devices, 'device')}, not "
            f"{ranks}",
            hint="ask for fewer ranks, or add a level without devices that joins any number",
        )


def machine_for_links(cluster: Cluster, devices: int) -> Machine:
    """Machine of a cluster, in any precision that its device has: links and memory do not depend on the precision."""
    rates = cluster.device.matrix_flops_per_s
    precision = PRECISIONS[next(dtype for dtype in _DTYPES if dtype in rates)]
    return machine_of(cluster, devices, precision, lone_rank_has_all_links=True, calibrated=True)
