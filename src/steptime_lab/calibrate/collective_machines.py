"""Measured collectives as arrays, and the machine, library and links that each ran on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Self

import numpy as np

from steptime.num import Array
from steptime_lab.calibrate.fitting import hashed

GB: Final = 1e9
#: Rings that NCCL finds among the first 2, 3, ... 8 GPUs of a DGX-1V (hybrid cube mesh), of six links.
CUBE_MESH: Final = tuple(rings / 6 for rings in (1, 2, 4, 2, 2, 4, 6))
#: Rings among 2, 3, ... 16 dies of MI250 packages, of four links: the dies of a package share four links, packages are
#: joined by one or two, and all sixteen dies together form six rings (read off the measured ratios).
XGMI_16: Final = (1.0, *(0.25,) * 2, *(0.5,) * 4, *(1.5,) * 8)
#: Four GPUs wired pair by pair with a third of their links each.
FULL_MESH_4: Final = (1 / 3, 2 / 3, 1.0)

#: Devices of the nodes in which rings over NVLink were measured: one with 8 devices, a tray of a rack with 4.
NODE, TRAY = 8.0, 4.0

BROKEN: Final = "broken"
"""Tag of machines that are known not to represent their kind: they predict their own rows alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One machine under one library: the rows that it covers, its topology and datasheet links."""

    name: str
    device: str
    library: str
    gpus: tuple[str, ...]
    """Spellings in the column ``gpu``."""
    sources: tuple[str, ...]
    """Spellings in the column ``source`` that are fitted."""
    interconnect: str = ""
    """Text that the column ``interconnect`` holds."""
    without: str = ""
    """Text that it must not hold; "" for any."""
    domain: int
    """Devices in one inner domain."""
    known_ranks: float = 0.0
    """Ranks up to which hops of a ring are alike (:class:`steptime.cost.collective_algorithms.Fabric`); 0: all are."""
    nics: float = 1.0
    link_Bps: float
    nic_Bps: float = 0.0
    links_by_group: tuple[float, ...] = ()
    switch: bool = False
    """True if its switches can reduce."""
    trees: bool = True
    """True if its domains are nodes, between which the library builds trees."""
    outer: bool = False
    """True if the rows span several domains, so that the coefficients between domains are fitted."""
    within: bool = False
    """True if only rows of groups inside one domain belong to it."""
    tags: frozenset[str] = field(default_factory=frozenset)
    """Tags of the machine: :data:`BROKEN`."""


def at_place(machine: Machine, place: str) -> bool:
    """True if a text of the column ``interconnect`` describes the machine."""
    return machine.interconnect in place and not (machine.without and machine.without in place)


def library_of(method: str, notes: str) -> str:
    """Library and timer of a row.

    >>> library_of("nccl-tests out-of-place -a 1", ""), library_of("NCCL kernel time (kineto median)", "")
    ('nccl', 'nccl-kernel')
    """
    if "XLA" in method:
        return "xla"
    if "framework allreduce" in method:
        return "custom-trtllm" if "TRTLLM" in notes else "custom-graph" if "_graph" in notes else "custom-eager"
    if "kineto" in method:
        return "nccl-kernel"
    if "oneCCL" in method:
        return "oneccl"
    if "MLSL" in method or "nccom" in method or "MPI_" in method:
        return "other"
    if "mean; algo" in method:
        return "nccl2"
    return "host" if "host timer" in method else "nccl"


PAIRS: Final[Mapping[str, Any]] = {"domain": 2, "outer": True, "trees": False}
"""Fields of machines whose devices are joined in pairs, or not at all: links between pairs are fitted apart."""


def _machine(name: str, device: str, library: str, gpu: str, source: str, link: float, **more: Any) -> Machine:
    """A machine with links of ``link`` GB/s, by default of one domain of eight devices."""
    more = {"domain": 8, **more, "nic_Bps": more.get("nic_Bps", 0.0) * GB}
    return Machine(
        name=f"{name}-{library}",
        device=device,
        library=library,
        gpus=(gpu,),
        sources=(source,),
        link_Bps=link * GB,
        **more,
    )


def _nccl() -> Iterator[Machine]:
    """NCCL in one node (nccl-tests)."""
    source = "aiconfigurator_nccl"
    nv: dict[str, tuple[str, str, float, bool, int]] = {
        "a100-sxm": ("a100-sxm-80gb", "A100-SXM4-80GB", 300, False, 8),
        "h100-sxm": ("h100-sxm", "H100-SXM5-80GB", 450, True, 8),
        "h200-sxm": ("h200-sxm", "H200-SXM-141GB", 450, True, 8),
        "b200-sxm": ("b200-sxm", "B200-SXM", 900, True, 8),
        "b300-sxm": ("b300-sxm", "B300-SXM", 900, True, 8),
        "gb300": ("gb300", "GB300", 900, True, 72),
    }
    for name, (device, gpu, link, switch, domain) in nv.items():
        ranks = NODE if domain == NODE else TRAY
        yield _machine(name, device, "nccl", gpu, source, link, domain=domain, switch=switch, known_ranks=ranks)
    broken = frozenset({BROKEN})
    yield _machine("rtx-pro-6000", "rtx-pro-6000", "nccl", "RTX-PRO-6000-BSE", source, 63, nic_Bps=63, **PAIRS)
    yield _machine("l40s", "l40s", "nccl", "L40S", source, 31.5, nic_Bps=31.5, tags=broken, **PAIRS)
    yield _machine("arc-b60", "arc-b60", "oneccl", "Arc-Pro-B60", source, 31.5, nic_Bps=31.5, **PAIRS)


def _vtrain() -> Iterator[Machine]:
    a100 = _machine("", "a100-sxm-80gb", "nccl", "A100-SXM4(8-GPU node)", "vtrain_lut", 300, known_ranks=NODE)
    v100 = _machine(
        "",
        "v100-sxm2-32gb",
        "nccl",
        "V100-SXM2(8-GPU node)",
        "vtrain_lut",
        150,
        known_ranks=NODE,
        links_by_group=CUBE_MESH,
    )
    yield from (replace(a100, name="a100-sxm-vtrain"), replace(v100, name="v100-sxm2-vtrain"))


def _vidur() -> Iterator[Machine]:
    """NCCL timed by a profiler, in one node and, as other machines, between nodes (another campaign and network)."""
    base = Machine(
        name="a100-sxm-kernel",
        device="a100-sxm-80gb",
        library="nccl-kernel",
        gpus=("A100-SXM4-80GB",),
        sources=("vidur_network",),
        domain=8,
        link_Bps=300 * GB,
        without="inter-node",
    )
    h100 = replace(base, name="h100-sxm-kernel", device="h100-sxm", gpus=("H100-SXM5-80GB",), link_Bps=450 * GB)
    pairs = replace(base, **PAIRS)
    nvl = replace(
        pairs, name="h100-nvl-kernel", device="h100-nvl", gpus=("H100-NVL",), link_Bps=300 * GB, nic_Bps=63 * GB
    )
    a40 = replace(pairs, name="a40-kernel", device="a40", gpus=("A40",), link_Bps=56 * GB, outer=False)
    pcie = replace(pairs, name="a100-pcie-kernel", device="a100-pcie-80gb", gpus=("A100-PCIE-80GB",), nic_Bps=31.5 * GB)
    yield from (base, h100, nvl, pcie, a40)
    for machine, nics, nic in ((base, 4, 25), (h100, 8, 50), (nvl, 1, 12.5), (a40, 1, 12.5)):
        nodes = replace(machine, name=f"{machine.name}-nodes", interconnect="inter-node", without="", outer=True)
        yield replace(nodes, nics=nics, nic_Bps=nic * GB, trees=False)


def _custom() -> Iterator[Machine]:
    """All-reduce kernels of serving frameworks."""
    for base in _nccl():
        for library in ("custom-graph", "custom-eager", "custom-trtllm"):
            if base.library != "oneccl" or library == "custom-eager":
                name = f"{base.name.rsplit('-', 1)[0]}-{library}"
                own = replace(base, name=name, library=library, sources=("aiconfigurator_custom_ar",))
                yield replace(own, switch=False, known_ranks=0.0)


def _other() -> Iterator[Machine]:
    for base in _nccl():
        if base.name.split("-")[0] in ("h100", "b200", "gb300"):
            name = f"{base.name.rsplit('-', 1)[0]}-xla"
            yield replace(base, name=name, library="xla", sources=("xla_perf_table",), known_ranks=0.0)
    perlmutter = ("A100-SXM4(Perlmutter)", "perlmutter_transformer_perf_estimates")
    mesh: dict[str, Any] = {"domain": 4, "nics": 4, "nic_Bps": 25, "links_by_group": FULL_MESH_4, "outer": True}
    yield _machine("perlmutter", "a100-sxm-40gb", "nccl", *perlmutter, 300, **mesh)
    yield _machine("mi200", "mi250x", "host", "MI200 GCD", "nnscaler_mi200", 200, domain=16, links_by_group=XGMI_16)
    old = {
        "m40": "M40",
        "p100-pcie-16gb": "P100",
        "gtx-1080-ti": "GTX1080Ti",
        "titan-x-maxwell": "TITAN-X-Maxwell",
        "titan-x-pascal": "TITAN-X-Pascal",
    }
    for name, gpu in old.items():
        nodes: dict[str, Any] = {"nic_Bps": 12.5, "nics": 1, "outer": True, "trees": False}
        yield _machine(name, name, "nccl2", gpu, "deepbench", 15.75, **nodes)


MACHINES: Final = (*_nccl(), *_vtrain(), *_vidur(), *_other(), *_custom())


@dataclass(frozen=True, slots=True)
class Columns:
    """Rows as arrays of one length, one per field."""

    def take(self, index: Any) -> Self:
        """Rows by index or mask."""
        return type(self)(*(getattr(self, f.name)[index] for f in fields(self)))


@dataclass(frozen=True, slots=True)
class Rows(Columns):
    """Measured collectives as arguments of `collective_s`."""

    kind: Array
    ranks: Array
    inside: Array
    size_bytes: Array
    element_bytes: Array
    measured_s: Array

    def merged(self) -> Rows:
        """One row, the median time, for each repetition of the same collective."""
        key = hashed([self.kind_number(), self.ranks, self.inside, self.size_bytes, self.element_bytes])
        order = np.lexsort((self.measured_s, key))
        edges = np.flatnonzero(np.diff(key[order], prepend=key[order][0] - np.uint64(1)))
        counts = np.diff(edges, append=len(order))
        return self.take(order[edges + (counts - 1) // 2])

    def kind_number(self) -> Array:
        """The kinds as numbers."""
        return np.unique(self.kind.astype(str), return_inverse=True)[1].astype(np.float64)

    def folds(self, count: int) -> Array:
        """Fold of each row: the sizes in ascending order go to the folds in turn, so a size is in one fold only."""
        place: Array = np.unique(self.size_bytes, return_inverse=True)[1] % count
        return place

    def thinned(self, most: int) -> Rows:
        """At most ``most`` rows, spread over sizes, groups and kinds."""
        if len(self.ranks) <= most:
            return self
        order = np.lexsort((self.size_bytes, self.ranks, self.inside, self.kind_number()))
        return self.take(order[np.linspace(0, len(order) - 1, most).astype(np.int64)])
