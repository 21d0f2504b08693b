"""The numbers of a cluster that formulas take as arguments."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from steptime.cost.host import IN_TURN, NODE, SHARPNESS, SOCKETS
from steptime.errors import UserError
from steptime.estimate.fabrics import LARGEST_NODE, FabricModel, fabric_model
from steptime.estimate.kernels import Models, memory_models, models_of, profile_of
from steptime.estimate.measured import Groups, groups_of
from steptime.estimate.network import Network, network_of
from steptime.estimate.stated_device import as_measured, restated
from steptime.hardware.library import architecture_of
from steptime.hardware.records import HOST_LINK, Cluster, Curve, Device, Kind, Level, Source
from steptime.num import Num, where
from steptime.plan.copies import NARROW_DTYPES
from steptime.plan.framework import kernel_factor
from steptime.plan.framework_file import habits_of
from steptime.plan.job import Precision

if TYPE_CHECKING:
    from steptime.estimate.learned import Correction

UNSTATED = Source(text="no source stated", kind=Kind.ASSUMED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Sustained rates of one device and of the two kinds of link that a job uses (SI)."""

    matrix_flops_per_s: float
    attention_flops_per_s: float
    """Rate of the matrix units in the dtype of the attention products."""
    vector_flops_per_s: float
    peak_flops_per_s: float
    """Dense peak of the fastest dtype of the products, mostly the matrix dtype: the reference of MFU."""
    memory_Bps: float
    memory_bytes: float
    kernel_latency_s: float
    fast_Bps: float
    fast_latency_s: float
    slow_Bps: float
    """Bandwidth between domains per rank, over the links that each rank has to itself."""
    lone_slow_Bps: float
    """Bandwidth between domains per rank of a group with one rank in each domain."""
    slow_latency_s: float
    host_Bps: float
    """Bandwidth between a device and its host in one direction."""
    fast_domain: int
    unaligned_flops_per_s: float | None = None
    """Vector rate in fp32 for products that the matrix units do not take; None: the vector rate."""
    matrix_efficiency: float = 1.0
    """Rates of the matrix units over their peaks."""
    wide_share: float = 1.0
    """Matrix rate of products that stay wide where others are narrow, over :attr:`attention_flops_per_s`."""
    models: Models = field(default_factory=dict)
    """Fitted time models by operator; the roofline times operators without one."""
    device: str = ""
    """Name of the device in the catalogue."""
    correction: Correction | None = None
    """Learned correction of the times of operators."""
    fabric: FabricModel | None = None
    """Fitted collectives; without them transfers are textbook rings."""
    groups: Groups | None = None
    """Collectives that were measured on this machine itself."""
    network: Network | None = None
    """Separate tiers between domains, whose first tier gives the rates between domains. None: a single tier."""
    nearer: Machine | None = None
    """Machine for groups inside the last level but one that the job spans: its links between domains are those of the
    levels up to that one. None: one level joins all domains, or they are tiers of a network."""
    joined: float = math.inf
    """Fast domains that the outermost level of these links joins; no limit for the outermost level of the cluster."""
    host_basis: str = ""
    """Basis of the rate between a device and its host."""
    host_ranks: float = float(NODE)
    """Devices of the job that share a host of two sockets."""
    is_host: bool = False
    """True if the device is the processor of the host itself, as :attr:`steptime.hardware.Device.is_host`."""
    narrow: bool = False
    """True if products run in a format narrower than 16 bits."""
    bound: Machine | None = None
    """Machine with the datasheet's rates, no latencies and no fitted models: no step is faster. None: uncalibrated."""

    def slow_link_Bps(self, inside: Num) -> Num:
        """Bandwidth between domains per rank of a group with ``inside`` ranks in each."""
        if self.slow_Bps == self.lone_slow_Bps:
            return self.slow_Bps
        return where(inside > 1, self.slow_Bps, self.lone_slow_Bps)

    @property
    def levels_apart(self) -> bool:
        """True if the time of a group depends on the levels that it crosses beyond its fast domains."""
        return self.network is not None or self.nearer is not None

    @property
    def farthest(self) -> int:
        """Fast domains in the largest block of the network: beyond it the order of the axes makes no difference."""
        if self.network is not None:
            return self.network.farthest
        return 1 if self.nearer is None else int(self.nearer.joined)

    @property
    def nearer_is_faster(self) -> bool:
        """True if links inside a domain are at least as fast as links between domains."""
        if self.fabric is not None:
            return self.fabric.nearer_is_faster
        if self.groups is not None and self.groups.between:
            return False
        slow_Bps = max(self.slow_Bps, self.lone_slow_Bps)
        return self.fast_Bps >= slow_Bps and self.fast_latency_s <= self.slow_latency_s

    def faster(self, **factors: float) -> Machine:
        """The same machine with some rates multiplied."""
        models = {name: model.faster(factors) for name, model in self.models.items()}
        rates = {name: getattr(self, name) * factor for name, factor in factors.items()}
        fabric = None if self.fabric is None else self.fabric.faster(factors)
        groups = None if self.groups is None else self.groups.faster(factors)
        bound, nearer = (None if each is None else each.faster(**factors) for each in (self.bound, self.nearer))
        return replace(self, models=models, fabric=fabric, groups=groups, bound=bound, nearer=nearer, **rates)


def _matrix_rate(device: Device, dtype: str) -> float:
    rate = device.matrix_rate(dtype)
    if rate is None:
        raise _no_rate(device.matrix_flops_per_s, dtype, device, "matrix")
    return rate


def _no_rate(rates: Mapping[str, float], dtype: str, device: Device, what: str) -> UserError:
    return UserError(f"{device.name} has no {what} rate for {dtype}", hint=f"it has {', '.join(rates)}")


def _vector_rate(device: Device, dtype: str) -> float:
    """Vector rate of the dtype, else that of fp32, in which the vector units then work."""
    rates = device.vector_flops_per_s
    found = rates.get(dtype, rates.get("fp32"))
    if found is None:
        raise _no_rate(rates, "fp32", device, "vector")
    return found


def _unaligned_rate(device: Device, precision: Precision) -> float:
    """Vector rate in fp32; for devices without one, that of the precision."""
    return device.vector_flops_per_s.get("fp32") or _vector_rate(device, precision.vector_dtype)


def machine_of(
    cluster: Cluster, gpus: int, precision: Precision, *, lone_rank_has_all_links: bool, calibrated: bool
) -> Machine:
    """Numbers of a cluster for a job of ``gpus`` devices; ``calibrated``: with the profile of its device, if any.

    Raises:
        UserError: the device has no rate for the dtype.
    """
    device, fast, slow = cluster.device, cluster.levels[0], slow_level(cluster, gpus)
    matrix = _matrix_rate(device, precision.matrix_dtype)
    attention = _matrix_rate(device, precision.attention_dtype)
    wide = _matrix_rate(device, precision.wide_dtype)
    crossed = levels_crossed(cluster, gpus)
    one_link_Bps = min(level.rank_Bps / level.links_per_device for level in crossed)
    lone_Bps = slow.rank_Bps if lone_rank_has_all_links else one_link_Bps
    network = network_of(cluster, gpus)
    lone_Bps = lone_Bps if network is None else network.link_Bps
    machine = Machine(
        device=device.name,
        network=network,
        matrix_flops_per_s=matrix * device.matrix_efficiency,
        attention_flops_per_s=attention * device.matrix_efficiency,
        wide_share=wide / attention,
        vector_flops_per_s=_vector_rate(device, precision.vector_dtype) * device.vector_efficiency,
        unaligned_flops_per_s=_unaligned_rate(device, precision) * device.vector_efficiency,
        peak_flops_per_s=max(matrix, attention),
        matrix_efficiency=device.matrix_efficiency,
        memory_Bps=device.memory_Bps * device.memory_efficiency,
        memory_bytes=device.memory_bytes,
        kernel_latency_s=device.kernel_latency_s,
        fast_Bps=fast.link_Bps * fast.efficiency * fast.links_per_device / fast.oversubscription,
        fast_latency_s=fast.latency_s,
        slow_Bps=slow.rank_Bps if network is None else network.rank_Bps,
        lone_slow_Bps=lone_Bps,
        slow_latency_s=max(level.latency_s for level in crossed) if network is None else network.latency_s,
        host_Bps=device.host_Bps,
        host_ranks=host_ranks(device, cluster.levels[0].group, gpus),
        host_basis=host_basis(device),
        fast_domain=cluster.fast_domain,
        is_host=device.is_host,
        narrow=precision.matrix_dtype in NARROW_DTYPES,
    )
    machine = _calibrated(machine, cluster, gpus, precision) if calibrated else machine
    if network is not None or len(crossed) < 2:
        return machine
    within = crossed[-2].group
    nearer = machine_of(
        cluster, within, precision, lone_rank_has_all_links=lone_rank_has_all_links, calibrated=calibrated
    )
    nearer = replace(nearer, joined=within / cluster.fast_domain)
    bound = None if machine.bound is None else replace(machine.bound, nearer=nearer.bound)
    return replace(machine, nearer=nearer, bound=bound)


def host_ranks(device: Device, fast_domain: int, gpus: int) -> float:
    """Devices of a job that share a host of two sockets, as a rule those of a node.

    >>> from steptime.hardware import load_device
    >>> [host_ranks(load_device(name), domain, 64) for name, domain in (("h100", 8), ("gb200", 72), ("gh200-96gb", 4))]
    [8.0, 4.0, 2.0]
    """
    if device.devices_per_cpu is None:
        return float(min(NODE, fast_domain, gpus))
    return float(SOCKETS * min(device.devices_per_cpu, gpus))


def node_devices(cluster: Cluster) -> int:
    """Devices of one node; if the fast domain is no node, the devices of two processors, as a rule eight.

    >>> from steptime.hardware import load_cluster
    >>> [node_devices(load_cluster(name)) for name in ("dgx-h100", "perlmutter", "gb200-nvl72")]
    [8, 4, 4]
    """
    if cluster.levels[0].group <= LARGEST_NODE:
        return cluster.levels[0].group
    per_cpu = cluster.device.devices_per_cpu
    return NODE if per_cpu is None else SOCKETS * per_cpu


def host_basis(device: Device) -> str:
    """Basis of the rate to the host: the datasheet's link and its sustained share, each with its source."""
    link, share = (device.sources.get(name, UNSTATED) for name in HOST_LINK)
    return (
        f"host link of {device.host_link_Bps / 1e9:g} GB/s each way ({link.kind}: {link.text}), "
        f"{device.host_efficiency:g} of it sustained ({share.kind}: {share.text})"
    )


def _calibrated(machine: Machine, cluster: Cluster, gpus: int, precision: Precision) -> Machine:
    """The machine with the fitted models that its device and cluster have."""
    device, fast, slow = cluster.device, cluster.levels[0], slow_level(cluster, gpus)
    known = as_measured(device)
    models = {**memory_models(known, profile_of(device.measured_as)), **models_of(known, precision)}
    models = restated(device, models)
    groups = groups_of(device.curves)
    groups = None if groups is None else groups.restated({"local": fast, "node": slow})
    fabric = None if groups is not None else _fabric(cluster, slow, gpus)
    if not models and fabric is None and groups is None:
        return machine
    whole_Bps = min(level.rank_Bps / level.efficiency for level in levels_crossed(cluster, gpus))
    if machine.network is not None:
        whole_Bps = machine.slow_Bps / first_level(cluster).efficiency
    bound = replace(
        machine,
        matrix_efficiency=1.0,
        matrix_flops_per_s=machine.matrix_flops_per_s / device.matrix_efficiency,
        attention_flops_per_s=machine.attention_flops_per_s / device.matrix_efficiency,
        vector_flops_per_s=machine.vector_flops_per_s / device.vector_efficiency,
        unaligned_flops_per_s=_unaligned_rate(device, precision),
        memory_Bps=device.memory_Bps, kernel_latency_s=0.0, fast_latency_s=0.0, slow_latency_s=0.0,
        fast_Bps=machine.fast_Bps / fast.efficiency, slow_Bps=whole_Bps,
        lone_slow_Bps=whole_Bps * machine.lone_slow_Bps / machine.slow_Bps, host_Bps=device.host_link_Bps,
    )  # fmt: skip
    return replace(machine, models=models, fabric=fabric, groups=groups, bound=bound)


def _fabric(cluster: Cluster, slow: Level, gpus: int) -> FabricModel | None:
    """Fitted collectives; for separate levels those of the first one between domains, as if it were the only one."""
    if cluster.topology is None:
        return fabric_model(cluster, slow, gpus)
    if cluster.topology.is_torus or len(cluster.levels) < 2:
        return None
    first = replace(cluster.levels[1], devices=None, oversubscription=1.0)
    return fabric_model(replace(cluster, levels=(cluster.levels[0], first)), first, gpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """One number that entered an estimate, as written in the catalogue."""

    name: str
    value: float
    source: Source


def _level_constants(level: Level, fitted: bool) -> list[Constant]:
    """Constants of a level; ``fitted``: fitted coefficients replace the catalogue's efficiency and latency."""
    within = {n for n in ("efficiency", "latency_s") if fitted and level.catalogue.get(n) == getattr(level, n)}
    names = ("link_Bps", "links_per_device", "efficiency", "latency_s", "oversubscription")
    stated = [n for n in names if n not in within and (n in level.sources or getattr(level, n) != 1)]
    return [
        Constant(name=f"{level.name}.{n}", value=getattr(level, n), source=level.sources.get(n, UNSTATED))
        for n in stated
    ]


def _fitted_to(curve: Curve) -> str:
    return f"fitted to {curve.points} measurements of {curve.source}" if curve.points else curve.source


def curve_constants(machine: Machine) -> list[Constant]:
    """The fitted curves that an estimate rests on, each with its cross-validated median error."""
    groups = machine.groups.curves if machine.groups is not None else ()
    return [
        Constant(
            name=f"{one.curve.family}.median_error", value=one.curve.median_ape,
            source=Source(text=_fitted_to(one.curve), kind=Kind(one.curve.kind)),
        )
        for one in groups
    ] + [
        Constant(
            name=f"{name}.{model.curve.family}.{model.curve.dtype}.median_error", value=model.curve.median_ape,
            source=Source(text=_fitted_to(model.curve), kind=Kind(model.curve.kind)),
        )
        for name, model in machine.models.items()
    ] + [
        Constant(
            name=f"{basis.level}.{basis.profile.name}.median_error", value=basis.profile.median_ape,
            source=Source(text=f"collectives {basis.how} {basis.profile.points} measurements of "
                          f"{', '.join(basis.profile.sources)}",
                          kind=Kind.ASSUMED if basis.carried else Kind(basis.profile.kind)),
        )
        for basis in (machine.fabric.bases() if machine.fabric is not None else ()) if basis.profile is not None
    ]  # fmt: skip


def constants_of(
    cluster: Cluster, gpus: int, precision: Precision, *, fitted_links: bool = False, offloads: bool = False
) -> list[Constant]:
    """Every catalogue number that enters an estimate of the job, with its source.

    ``fitted_links``: fitted collectives replace the efficiencies and latencies of the links. ``offloads``: something
    is kept on the host.
    """
    device = cluster.device
    vector = precision.vector_dtype if precision.vector_dtype in device.vector_flops_per_s else "fp32"
    of_host = (*HOST_LINK, *(() if device.devices_per_cpu is None else ("devices_per_cpu",))) if offloads else ()
    matrix = precision.matrix_dtype
    values = {
        f"matrix_flops_per_s.{device.matrix_dtype(matrix)}": _matrix_rate(device, matrix),
        f"vector_flops_per_s.{vector}": device.vector_flops_per_s.get(vector, 0.0),
        **{
            name: getattr(device, name)
            for name in (
                "memory_bytes", "memory_Bps", "matrix_efficiency", "vector_efficiency", "memory_efficiency",
                "kernel_latency_s", *of_host,
            )
        },
    }  # fmt: skip
    out: list[Constant] = []
    out += [Constant(name=n, value=v, source=device.sources.get(n, UNSTATED)) for n, v in values.items()]
    slow = slow_level(cluster, gpus)
    crossed = levels_crossed(cluster, gpus) if gpus > cluster.fast_domain and slow is not cluster.levels[0] else ()
    return out + [c for level in (cluster.levels[0], *crossed) for c in _level_constants(level, fitted_links)]


def issue_sharpness(device: Device) -> float:
    """Exponent of the smooth maximum of the times of a device and its host (:func:`steptime.cost.host.issued_s`)."""
    return IN_TURN if device.is_host else SHARPNESS


def kernel_constants(framework: str, device: Device) -> list[Constant]:
    """Assumed slowdown of the fused attention of a framework against the newest kernel on a device, as constants.

    >>> from steptime.hardware import load_device
    >>> [(one.name, one.value) for one in kernel_constants("deepspeed", load_device("b200-sxm"))]
    [('attention_kernel.flash2', 2.5)]
    >>> kernel_constants("deepspeed", load_device("a100-sxm-80gb")), kernel_constants("ideal", load_device("b200-sxm"))
    ([], [])
    """
    kernel = habits_of(framework).kernel
    factor = kernel_factor(kernel, architecture_of(device.measured_as))
    text = (
        f"{framework} is taken to run {kernel}: its time over the newest kernel's, after arXiv 2307.08691 and "
        "2407.08608; on Blackwell after the growth of the matrix rate"
    )
    source = Source(text=text, kind=Kind.ASSUMED)
    return [] if factor == 1.0 else [Constant(name=f"attention_kernel.{kernel}", value=factor, source=source)]


def slow_level(cluster: Cluster, gpus: int) -> Level:
    """The slowest level that groups of a job of ``gpus`` devices cross once they leave a fast domain."""
    return cluster.outer_level(cluster.beyond_domain(gpus))


def levels_crossed(cluster: Cluster, gpus: int) -> tuple[Level, ...]:
    """Levels that groups of a job of ``gpus`` devices cross beyond a fast domain; the slowest sets the pace.

    >>> from steptime.hardware import load_cluster
    >>> [level.name for level in levels_crossed(load_cluster("h200-nvl-4"), 64)]
    ['pcie', 'network']
    """
    return cluster.crossed_levels(cluster.beyond_domain(gpus)) or cluster.levels[:1]


def first_level(cluster: Cluster) -> Level:
    """The innermost level that joins fast domains; for a torus its first level."""
    torus = cluster.topology is not None and cluster.topology.is_torus
    return cluster.levels[0] if torus or len(cluster.levels) < 2 else cluster.levels[1]


def levels_left_out(cluster: Cluster, gpus: int) -> tuple[str, ...]:
    """A note for jobs that cross several levels beyond their fast domains, which are timed as one for most groups.

    >>> from steptime.hardware import load_cluster
    >>> levels_left_out(load_cluster("frontier"), 64)[0].partition(":")[0]
    'level node is not told apart from network for groups that leave it'
    >>> levels_left_out(load_cluster("frontier"), 8), levels_left_out(load_cluster("dgx-h100"), 64)
    ((), ())
    """
    slow, fast = slow_level(cluster, gpus), cluster.levels[0]
    others = [level for level in levels_crossed(cluster, gpus) if level.rank_Bps > slow.rank_Bps]
    if gpus <= cluster.fast_domain or not others or cluster.topology is not None:
        return ()
    between = " and ".join(level.name for level in others)
    return (
        f"level {between} is not told apart from {slow.name} for groups that leave it: their traffic beyond "
        f"{fast.name} is timed at the rate of {slow.name}, the slowest, and the longest wait; groups inside {between} "
        "are timed on it alone",
    )


def weakest(constants: Iterable[Constant]) -> Kind:
    """The weakest kind of number among some constants."""
    return max((c.source.kind for c in constants), key=lambda kind: kind.weakness, default=Kind.ASSUMED)
