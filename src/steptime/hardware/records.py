"""Records of machines: devices, the levels of a fabric, clusters; every number with its source.

A profile has coefficients of operator time models of a device, fitted to measurements, with their provenance. A mesh of
devices is found by measuring: axes, their links, the place of each device, and faults.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from steptime.hardware.topology import Topology

from dataclasses import dataclass

ALIKE: Final[Mapping[str, str]] = {"bf16": "fp16", "fp16": "bf16"}
"""The two 16-bit formats, which run in the same units at one rate: a curve of either stands for the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Data and quality of a fit; errors are on measurements outside the fit."""

    points: int
    """Measurements that it was fitted to."""
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Smallest and largest value of each argument that was measured."""
    median_ape: float
    """Median absolute relative error."""
    mean_ape: float
    bias: float
    """Mean signed relative error, predicted / measured - 1."""
    band: tuple[float, float]
    """5th and 95th percentile of measured / predicted."""
    source: str
    kind: str = "fitted"
    """``fitted``, or ``assumed`` if carried over from other devices or machines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve(Fitted):
    """Coefficients of one time model on one device; errors are cross-validated by shape."""

    family: str
    """Name of the model: ``gemm``, ``attention_forward``, ``elementwise``, ..."""
    dtype: str
    """``bf16``, ``fp16``, ``fp8``, ``nvfp4``, ``tf32``, ``fp32``."""
    timer: str = "kernel"
    """``kernel``: time on the device alone (graph replay, profiler); ``eager``: with the launch from the host."""
    coefficients: Mapping[str, float]
    scatter: float | None = None
    """Relative standard deviation of a measurement against those of nearly the same size; None: unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """All curves of one device."""

    device: str
    """Catalogue name."""
    curves: tuple[Curve, ...]

    def curve(self, family: str, dtype: str, timer: str = "kernel") -> Curve | None:
        """The curve of a family, or None."""
        for curve in self.curves:
            if (curve.family, curve.dtype, curve.timer) == (family, dtype, timer):
                return curve
        return None


UNLIMITED: Final = 2**31
"""Devices in a group of a level without a limit: more than any job has, and still a whole number."""


class Kind(StrEnum):
    """Kind of source of a number, strongest first."""

    DATASHEET = "datasheet"
    MEASURED = "measured"
    FITTED = "fitted"
    ASSUMED = "assumed"

    @property
    def weakness(self) -> int:
        """Rank in the order above; a report shows the weakest kind that entered it."""
        return list(Kind).index(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Source of a number."""

    text: str
    """Document and place in it."""
    kind: Kind


CPU: Final = "cpu"
"""Architecture of a device that is the processor of its host itself."""
CUDA_MAKER: Final = "NVIDIA"
GPU_MAKERS: Final = (CUDA_MAKER, "AMD")
MAKERS: Final = (*GPU_MAKERS, "AWS", "Google", "Intel")
"""Vendors of the catalogue: a file that writes one in other letters, as ``Nvidia``, means it."""
HOST_LINK: Final = ("host_link_Bps", "host_efficiency")
"""Numbers of a device that matter only if something is kept on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator as software sees it (one die or package with its own memory)."""

    name: str
    title: str
    vendor: str
    """Its maker, one of `MAKERS` or as a file names another; ``unknown`` where it names none."""
    architecture: str | None = None
    """Design of the chip: devices that share it differ in memory, links and clock (``hopper``: H100, H200, H20);
    ``cpu``: the processor of the host itself."""
    like: str | None = None
    """Device of the catalogue that this one is, or whose numbers it changes; None: no device of the catalogue."""
    matrix_flops_per_s: Mapping[str, float]
    """Dense peak of the matrix units by dtype (``fp32 tf32 fp16 bf16 fp8 int8 fp4``); no sparsity."""
    vector_flops_per_s: Mapping[str, float]
    """Peak of the vector units by dtype (``fp32``, ``fp16``, ``bf16``)."""
    memory_bytes: float
    memory_Bps: float
    l2_bytes: float | None = None
    sm_count: int | None = None
    """Streaming multiprocessors, compute units, cores: whatever the vendor calls them."""
    clock_Hz: float | None = None
    """Boost clock."""
    power_W: float | None = None
    """Power limit (TDP)."""
    idle_W: float | None = None
    """Power when idle; None: unknown."""
    host_link_Bps: float
    """Datasheet bandwidth of its link to the host (PCI Express, or a link between chips), one direction."""
    host_efficiency: float
    """Share of the bandwidth to the host that copies of a training step sustain."""
    devices_per_cpu: int | None = None
    """Devices that share one processor of the host; None: those of a node share its two."""
    matrix_efficiency: float
    """Share of the matrix peak that a large product sustains."""
    vector_efficiency: float
    memory_efficiency: float
    """Share of the memory bandwidth that a large streaming operator sustains."""
    kernel_latency_s: float
    """Time that every operator costs in addition to its work."""
    issue_s: float | None = None
    """Time of its host to issue one operator of a training step, framework and gradients included; None: unknown."""
    curves: Profile | None = None
    """Time models fitted to this very machine, which take precedence over the profile of the catalogue."""
    without_curves: bool = False
    """True if a file changes numbers of a measured machine, whose curves are therefore left out."""
    catalogue: Mapping[str, float] = field(default_factory=dict)
    """Numbers of the catalogue by field as in `sources`, of which a user's file may have changed some: fitted curves
    belong to these."""
    sources: Mapping[str, Source] = field(default_factory=dict)
    """Field name (``memory_Bps``, ``matrix_flops_per_s.bf16``) to the source of its number."""

    @property
    def measured_as(self) -> str:
        """Name under which its time models and the factors of frameworks on it are kept: its own if it has curves."""
        return self.name if self.curves is not None else self.like or self.name

    @property
    def is_host(self) -> bool:
        """True if the device is the processor of the host: it uses host memory, of which no driver keeps a part."""
        return self.architecture == CPU

    @property
    def is_gpu(self) -> bool:
        """True if the device is a GPU: an accelerator of a maker of GPUs."""
        return self.vendor in GPU_MAKERS and not self.is_host

    @property
    def runs_cuda(self) -> bool:
        """True if PyTorch runs its CUDA kernels and allocator on it."""
        return self.vendor == CUDA_MAKER and not self.is_host

    @property
    def host_Bps(self) -> float:
        """Sustained bandwidth between the device and its host, in each direction."""
        return self.host_link_Bps * self.host_efficiency

    def with_host_link(self, host_Bps: float) -> Device:
        """The device with a given bandwidth (bytes/s, each way) of its link to the host."""
        given = dict.fromkeys(HOST_LINK, Source(text="given", kind=Kind.ASSUMED))
        return replace(self, host_link_Bps=host_Bps, host_efficiency=1.0, sources={**self.sources, **given})

    @property
    def peak_vector_flops_per_s(self) -> float:
        """Datasheet rate of the vector units in fp32, in which kernels compute on them; else in their fastest dtype."""
        rates = self.vector_flops_per_s
        return rates.get("fp32", max(rates.values()))

    def matrix_dtype(self, dtype: str) -> str:
        """Dtype whose matrix rate stands for that of another: int8 for fp8 on devices without fp8."""
        rates = self.matrix_flops_per_s
        return "int8" if dtype == "fp8" and dtype not in rates and "int8" in rates else dtype

    @property
    def scales_blocks(self) -> bool:
        """True if the matrix units apply a scale per block of elements, as those that multiply 4 bits do.

        Source: PTX ISA, `tcgen05.mma` with `.block_scale` (Blackwell, not Hopper); AMD CDNA4 instruction set, scaled
        MFMA (MI350, not MI300).
        """
        return "fp4" in self.matrix_flops_per_s

    @property
    def takes_either_layout(self) -> bool:
        """True if the matrix units take both operands of a narrow product in either layout: data-centre Blackwell.

        Source: Transformer Engine, `common/gemm/cublaslt_gemm.cu`: FP8 products of cuBLASLt want the first operand
        transposed and the second not, but on compute capability 10.x take any layout.
        """
        return self.architecture == "blackwell"

    @property
    def fetches_operands(self) -> bool:
        """True if the matrix units fetch operands from shared memory themselves: Hopper, data-centre Blackwell.

        All others wait for their threads to load operands into registers. The two need different kernels.

        Source: CUTLASS documentation, programming guides of `wgmma` (SM90a) and `tcgen05` (SM100) against warp-level
        `mma.sync` (SM80, SM89, SM120); AMD MFMA reads registers.
        """
        return self.architecture in ("hopper", "blackwell")

    def matrix_rate(self, dtype: str) -> float | None:
        """Peak of the matrix units in a dtype (FLOP/s), None where they lack it."""
        return self.matrix_flops_per_s.get(self.matrix_dtype(dtype))


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of the fabric: the groups of devices that it joins, and how fast."""

    name: str
    devices: int | None
    """Devices in one group of this level; None: no limit (the outermost level)."""
    link_Bps: float
    """Datasheet bandwidth of one link (NIC, or all NVLinks of a device), one direction."""
    links_per_device: float = 1.0
    """Links of this level that a device has to itself (8 NICs for 8 devices: 1; 4 for 8: 0.5)."""
    efficiency: float
    """Share of the datasheet bandwidth that large collectives reach."""
    latency_s: float
    """Latency of one hop."""
    oversubscription: float = 1.0
    """Bandwidth into the level divided by bandwidth across it; 1: full bisection."""
    catalogue: Mapping[str, float] = field(default_factory=dict)
    """Numbers of the catalogue for such links by field, of which a user's file may have changed some: fitted
    collectives belong to these. Empty: the level has only its own numbers."""
    measured: Mapping[str, float] = field(default_factory=dict)
    """Numbers by field in the file that names the curves of a measured machine, to which its collectives belong.

    Empty: none were measured."""
    sources: Mapping[str, Source] = field(default_factory=dict)

    @property
    def group(self) -> int:
        """Devices in one group of this level, as a number."""
        return self.devices or UNLIMITED

    @property
    def rank_Bps(self) -> float:
        """Sustained bandwidth that one device has across the level."""
        return self.link_Bps * self.links_per_device * self.efficiency / self.oversubscription


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Devices of one kind joined by levels, innermost (fastest) first."""

    name: str
    title: str
    device: Device
    levels: tuple[Level, ...]
    sources: Mapping[str, Source] = field(default_factory=dict)
    topology: Topology | None = None
    """Topology of its links; None: the levels beyond the fast domains are not told apart."""

    @property
    def fast_domain(self) -> int:
        """Devices in the innermost domain (NVLink or NVSwitch domain, ICI slice, one node); of a torus with a
        topology one, since no two of its pairs have the same links."""
        return 1 if self.topology is not None and self.topology.is_torus else self.levels[0].group

    def beyond_domain(self, devices: int) -> int:
        """The devices of a job, or as many more as leave the innermost domain: its collectives between domains."""
        return max(devices, self.fast_domain + 1)

    def crossed_levels(self, devices: int) -> tuple[Level, ...]:
        """The levels that a job of some number of devices spans beyond the innermost, inner ones first."""
        pairs = zip(self.levels, self.levels[1:], strict=False)
        return tuple(level for inner, level in pairs if inner.devices is not None and devices > inner.devices)

    def outer_level(self, devices: int) -> Level:
        """The slowest level that a job of some number of devices spans beyond the innermost.

        Returns the innermost level for a job that fits in it.
        """
        return min(self.crossed_levels(devices), key=lambda level: level.rank_Bps, default=self.levels[0])


class AxisKind(StrEnum):
    """Kind of network that joins the devices along one axis."""

    SWITCH = "switch"
    """All pairs have the same links."""
    RAIL = "rail"
    """A switch per place inside the group: pairs with the same inner coordinates are faster than others."""
    RING = "ring"
    """Neighbours are joined; cost grows with the hops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshAxis:
    """One axis of a mesh and its links: of a ring, those between neighbours; of rails, those along a rail."""

    size: int
    kind: AxisKind
    links: int
    """Pairs of devices whose link belongs to this axis."""
    latency_s: float | None
    """Time of an empty message; None if nothing measured tells it from the bandwidth."""
    latency_error_s: float | None = None
    """Standard error of the latency."""
    Bps: float | None
    """Bandwidth of a link, one direction; None if nothing measured tells it from the latency."""
    Bps_error: float | None = None
    step: float | None = None
    """Cost of these links over those of the axis before."""
    separation: float | None = None
    """Logarithm of ``step`` in units of the noise of one link (taken as 0.02 at least)."""
    growth: float | None = None
    """Rings: cost of two hops over one."""
    cross_latency_s: float | None = None
    """Rails: latency of pairs on different rails."""
    cross_Bps: float | None = None
    cross_step: float | None = None
    """Rails: cost of pairs on different rails over that of pairs on one rail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OddLink:
    """A link that is slower than its kind, or slower one way than the other."""

    source: str
    target: str
    factor: float
    """Cost over what links of its kind cost; of an asymmetric link, over that of the way back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Devices on an N-dimensional mesh; pairs that differ along one axis have similar links."""

    axes: tuple[MeshAxis, ...]
    """Innermost (fastest) first."""
    devices: tuple[str, ...]
    coordinates: tuple[tuple[int, ...], ...]
    """Place of each device along every axis; which place is called 0 is arbitrary."""
    confidence: float
    """Probability that this is the shape, judged against merging, splitting and re-wiring its axes."""
    noise: float
    """Standard deviation of the logarithm of the cost of equal links."""
    broken_links: tuple[OddLink, ...] = ()
    asymmetric_links: tuple[OddLink, ...] = ()
    slow_devices: tuple[str, ...] = ()
    """Devices most of whose links are broken."""
    missing_pairs: int = 0
    """Pairs that were not measured in either direction."""
    notes: tuple[str, ...] = ()
    """Notes to read before trusting the mesh."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Devices along each axis, innermost first."""
        return tuple(axis.size for axis in self.axes)

    def levels(self) -> tuple[Level, ...]:
        """The axes as levels of a fabric, innermost first; empty if a latency or bandwidth is unknown.

        A level holds all devices of its axis and of those before it. The bandwidth is what was measured, so nothing
        is taken off it.
        """
        out, devices = [], 1
        source = Source(text=f"measured between {math.prod(self.shape)} devices", kind=Kind.MEASURED)
        for number, axis in enumerate(self.axes):
            devices *= axis.size
            if axis.Bps is None or axis.latency_s is None:
                return ()
            out.append(
                Level(
                    name=f"axis{number}",
                    devices=devices,
                    link_Bps=axis.Bps,
                    efficiency=1.0,
                    latency_s=axis.latency_s,
                    sources={"link_Bps": source, "latency_s": source},
                )
            )
        return tuple(out)
