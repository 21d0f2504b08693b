"""Measured collectives to fabric profiles, and predictions of the rows of a table of collectives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Final

import numpy as np

from steptime.calibrate.collective_fit import Rows, fit, predict
from steptime.calibrate.collective_machines import MACHINES, Machine, at_place, library_of
from steptime.calibrate.score import Predicted
from steptime.calibrate.table import Table
from steptime.cost.collective_fabric import Fabric, fabric_of
from steptime.errors import UserError
from steptime.hardware import load_cluster, load_device
from steptime.hardware.fabric_profile import FabricProfile
from steptime.num import Array

KINDS: Final = {
    "allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all", "p2p": "p2p", "permute": "p2p", "sendrecv": "p2p", "broadcast": "broadcast",
    "reduce": "reduce", "scatter": "scatter", "gather": "gather",
}  # fmt: skip
FOLDS: Final = 4
MOST_ROWS: Final = 450
"""Rows that a fit looks at."""
#: Share of a NIC that long transfers reach on InfiniBand and RoCE (nccl-tests of OCI with 16 ranks, A100 and MI300X:
#: 0.95 and 0.89; a host port that serves one GPU both ways reaches 0.64 to 0.73, GKE H200 and B200). The Slingshot
#: NICs of Perlmutter sit behind PCIe 4 and stay at 0.68.
NIC_SHARE: Final = 0.9
SINGLE_SHARE: Final = 0.7
#: Words of the column ``interconnect`` that name a cluster of the catalogue.
_CLUSTERS: Final = {"p4de": "aws-p4d", "p5en": "aws-p5en", "p5": "aws-p5"}


def rows_of(table: Table, domain: int | Array | None = None) -> Rows:
    """Rows of a table as arguments of the formulas; unknown kinds become "".

    Args:
        table: with the columns of ``collectives.parquet``.
        domain: devices of one inner domain; default the column ``gpus_per_node``.
    """
    kind = np.array([KINDS.get(name, "") for name in table.text("collective")], dtype=object)
    ranks, node = table.number("n_gpus"), table.number("gpus_per_node")
    node = np.where(np.isnan(node), ranks, node)
    most = node if domain is None else np.where(np.asarray(domain) < node, domain, node)
    with np.errstate(invalid="ignore", divide="ignore"):
        inside = ranks / np.ceil(ranks / np.maximum(most, 1))
    element = np.where(np.isin(table.text("dtype"), ("int8", "uint8", "fp8")), 1.0, 2.0)
    return Rows(kind, ranks, inside, table.number("bytes"), element, table.number("time_us") * 1e-6)


def usable(rows: Rows) -> Array:
    """Rows that the formulas can read."""
    good: Array = (rows.kind != "") & np.isfinite(rows.ranks) & (rows.ranks > 1) & (rows.size_bytes > 0)
    return good


def domain_of(machine: Machine, table: Table) -> Array:
    """Devices in one inner domain, per row: an NVLink domain of several hosts counts as one."""
    node = table.number("gpus_per_node")
    return np.full(table.rows, float(machine.domain)) if machine.domain > 8 else np.fmin(node, machine.domain)


def covered(machine: Machine, table: Table, library: Array | None = None) -> Array:
    """Rows that a machine is fitted to."""
    library = libraries(table) if library is None else library
    place = np.array([at_place(machine, text) for text in table.text("interconnect")], dtype=bool)
    mask: Array = (
        np.isin(table.text("gpu"), machine.gpus)
        & np.isin(table.text("source"), machine.sources)
        & (library == machine.library)
        & place
    )
    return mask


def libraries(table: Table) -> Array:
    """Library of each row."""
    pairs = zip(table.text("method"), table.text("notes"), strict=True)
    return np.array([library_of(method, notes) for method, notes in pairs], dtype=object)


def machine_rows(machine: Machine, table: Table, library: Array | None = None) -> Rows:
    """The rows of a machine, those that can be read and whose time is positive."""
    part = table.take(covered(machine, table, library))
    rows = _placed(machine, part)
    return rows.take(usable(rows) & (rows.measured_s > 0))


def _placed(machine: Machine, table: Table) -> Rows:
    """Rows with the domains of a machine."""
    if machine.domain > 8:
        wide = Table({**table.columns, "gpus_per_node": np.full(table.rows, float(machine.domain))})
        return rows_of(wide, machine.domain)
    return rows_of(table, machine.domain)


def cross_validated(machine: Machine, rows: Rows, folds: int = FOLDS) -> Array:
    """Predictions of each row by a fit that did not see its size."""
    fold, out = rows.folds(folds), np.full(len(rows.ranks), np.nan)
    for number in range(folds):
        own = fold == number
        if own.any() and not own.all():
            seen = rows.take(~own).merged().thinned(MOST_ROWS)
            out[own] = predict(fabric_of(fit(machine, seen, starts=2)), rows.take(own))
    return out


def calibrate(machine: Machine, rows: Rows, held_out: Array | None = None) -> FabricProfile:
    """The profile of a machine: coefficients from all rows, errors and band from sizes that were held out.

    Args:
        machine: which machine.
        rows: its measurements.
        held_out: what :func:`cross_validated` gives for them; computed if not given.

    Raises:
        UserError: too few rows.
    """
    if len(rows.ranks) < 12:
        raise UserError(f"{machine.name}: {len(rows.ranks)} measurements are too few")
    held_out = cross_validated(machine, rows) if held_out is None else held_out
    coefficients = fit(machine, rows.merged().thinned(MOST_ROWS), starts=4)
    error = held_out / rows.measured_s - 1
    low, high = np.nanpercentile(rows.measured_s / held_out, [5, 95])
    return FabricProfile(
        name=machine.name, device=machine.device, library=machine.library, sources=machine.sources,
        link_Bps=machine.link_Bps, nic_Bps=machine.nic_Bps if machine.outer else 0.0, coefficients=coefficients,
        points=len(rows.ranks),
        ranges={
            "bytes": (float(rows.size_bytes.min()), float(rows.size_bytes.max())),
            "ranks": (float(rows.ranks.min()), float(rows.ranks.max())),
        },
        median_ape=float(np.nanmedian(np.abs(error))), mean_ape=float(np.nanmean(np.abs(error))),
        bias=float(np.nanmean(error)), band=(float(low), float(high)),
        source=f"steptime calibration of {', '.join(machine.sources)}",
    )  # fmt: skip


def predict_rows(table: Table, profiles: Iterable[FabricProfile], machines: Sequence[Machine] = MACHINES) -> Predicted:
    """Predictions for the rows of a table of collectives.

    A row takes the profile of its own source, else that of its device and library, else of its device under NCCL,
    else that of the nearest machine with its coefficients carried over in units of the datasheet links.

    Args:
        table: with the columns of ``collectives.parquet``.
        profiles: what :func:`steptime.hardware.fabric_profile.load_fabric_profiles` gives.
        machines: how rows are recognised.
    """
    known = {p.name: p for p in profiles}
    rows_table = _keys(table)
    seconds, low, high = (np.full(table.rows, np.nan) for _ in range(3))
    reason = np.full(table.rows, "", dtype=object)
    for key, index in rows_table.items():
        part = table.take(index)
        choice = choose(key, known, machines)
        if isinstance(choice, str):
            reason[index] = choice
            continue
        machine, profile = choice
        rows = _placed(machine, part)
        good = usable(rows)
        reason[index] = np.where(good, "", _unreadable(rows))
        time = predict(fabric_of(profile.coefficients), rows.take(good))
        seconds[index[good]] = time
        low[index[good]], high[index[good]] = time * profile.band[0], time * profile.band[1]
    return Predicted(seconds=seconds, low_s=low, high_s=high, reason=reason)


def _unreadable(rows: Rows) -> Array:
    text = np.where(rows.kind == "", "this collective has no formula", "size or group unknown")
    return text.astype(object)


Key = tuple[str, str, str, str, float]
RACK: Final = 72
"""Devices of the largest NVLink domain; one that is wider than a node counts as one domain."""


def _keys(table: Table) -> dict[Key, Array]:
    """Source, GPU, interconnect, library, devices that it surely goes beyond (0, a node, a rack) -> rows."""
    ranks, node = table.number("n_gpus"), table.number("gpus_per_node")
    spans = np.where(ranks > RACK, np.where(ranks > node, RACK, 0), np.where(ranks > node, 1, 0))
    columns = (table.text("source"), table.text("gpu"), table.text("interconnect"), libraries(table), spans)
    found: dict[Key, list[int]] = {}
    for i, key in enumerate(zip(*columns, strict=True)):
        found.setdefault(key, []).append(i)
    return {key: np.array(index) for key, index in found.items()}


def choose(
    key: Key, known: Mapping[str, FabricProfile], machines: Sequence[Machine]
) -> tuple[Machine, FabricProfile] | str:
    """The machine and profile for rows of one kind, or why there is none."""
    source, gpu, place, library, spans = key
    device = _device(gpu)
    here = [m for m in machines if m.name in known and (gpu in m.gpus or (m.device == device and not m.links_by_group))]
    if device is None and not here:
        return "no such device in the catalogue"
    nearest = min(here, key=lambda m: _distance(m, source, gpu, place, library), default=None)
    if nearest is not None and (nearest.outer or spans <= (1 if nearest.domain > 8 else 0)):
        return nearest, known[nearest.name]
    return _carried(nearest, device or (nearest.device if nearest else ""), place, known)


def _distance(machine: Machine, source: str, gpu: str, place: str, library: str) -> tuple[bool, ...]:
    """How far a machine is from a row: smaller is nearer."""
    return (
        library != machine.library and not machine.library.startswith("nccl"),
        source not in machine.sources,
        library != machine.library,
        not at_place(machine, place),
        gpu not in machine.gpus,
        "vtrain" in machine.name,
    )


@cache
def _device(gpu: str) -> str | None:
    try:
        return load_device(gpu.split("(")[0].strip()).name
    except UserError:
        return None


def _carried(
    nearest: Machine | None, device: str, place: str, known: Mapping[str, FabricProfile],
) -> tuple[Machine, FabricProfile] | str:  # fmt: skip
    """A profile for links that were not measured."""
    try:
        name = next((c for word, c in _CLUSTERS.items() if word in place), device)
        profile = assumed(load_cluster(name), known.values(), nearest.name if nearest else None)
    except UserError as error:
        return str(error)
    level: Mapping[str, Any] = profile.coefficients
    machine = Machine(
        name=profile.name, device=device, library="nccl", gpus=(), sources=(), domain=int(float(level["domain"])),
        link_Bps=profile.link_Bps, nic_Bps=profile.nic_Bps, outer=True,
    )  # fmt: skip
    return machine, profile


def assumed(cluster: Any, profiles: Iterable[FabricProfile], inner: str | None = None) -> FabricProfile:
    """Coefficients for a cluster that was not measured: those of the nearest machines, scaled by datasheet links.

    Latencies stay; bandwidths are carried over as shares of the link. Inside a domain the nearest machine is `inner`,
    else the NCCL profile of the same device, else the one whose links are nearest in speed. Between domains
    the latencies are those of Perlmutter, the only measured network with all group sizes.

    Args:
        cluster: a :class:`steptime.hardware.records.Cluster`.
        profiles: measured profiles.
        inner: name of the profile for the inside of a domain.

    Raises:
        UserError: there is no NCCL profile at all.
    """
    nccl = [p for p in profiles if p.library == "nccl" and "l40s" not in p.name]
    if not nccl:
        raise UserError("no measured NCCL profile to carry over")
    level = cluster.levels[0]
    link = level.link_Bps * level.links_per_device

    domain = float(level.devices or 2**31)

    def distance(p: FabricProfile) -> tuple[bool, bool, bool, float, float]:
        width = float(p.coefficients["domain"])  # type: ignore[arg-type]
        wired = bool(p.coefficients.get("links_by_group")) and width != domain
        speed, size = abs(np.log(p.link_Bps / link)), abs(np.log(width / domain))
        return p.name != inner, wired, p.device != cluster.device.name, speed, size

    near = min(nccl, key=distance)
    network = next((p for p in nccl if p.name.startswith("perlmutter")), near)
    values = dict(near.coefficients) | {"domain": level.devices or 2**31, "trees": True}
    scale = link / near.link_Bps
    for name in ("Bps", "switch_Bps"):
        if name in values:
            values[name] = _scaled(values[name], scale)
    if len(cluster.levels) > 1:
        values |= _network(cluster, network)
    sure = max(near.band[1], 1 / near.band[0], network.band[1], 1.5)
    return FabricProfile(
        name=f"{cluster.name}-assumed", device=cluster.device.name, library="nccl", link_Bps=link,
        nic_Bps=cluster.levels[1].link_Bps if len(cluster.levels) > 1 else 0.0, coefficients=values,
        points=0, median_ape=near.median_ape, mean_ape=near.mean_ape, bias=near.bias, band=(1 / sure, sure),
        source=f"{near.name} inside a domain, {network.name} between, in units of the datasheet links", kind="assumed",
    )  # fmt: skip


def _network(cluster: Any, network: FabricProfile) -> dict[str, Any]:
    """Coefficients between domains, of another network, for the NICs of this one."""
    inner, outer = cluster.levels[0], cluster.levels[1]
    names = ("outer_start_s", "outer_hop_s", "single_share", "tree_hop_s", "tree_share")
    out: dict[str, Any] = {n: network.coefficients[n] for n in names if n in network.coefficients}
    per_device = outer.link_Bps * outer.links_per_device
    share = per_device / network.nic_Bps if network.nic_Bps else 1.0
    slow, middle, _ = _scaled(network.coefficients.get("outer_Bps", (per_device,) * 3), share)
    out |= {"outer_Bps": (slow, middle, NIC_SHARE * per_device), "single_share": SINGLE_SHARE / NIC_SHARE}
    return out | {"nics": float(inner.devices or 1)}


def _scaled(value: Any, factor: float) -> Any:
    return tuple(v * factor for v in value) if isinstance(value, tuple) else value * factor


def fabric(profile: FabricProfile) -> Fabric:
    """The coefficients of a profile as an argument of `collective_s`."""
    return fabric_of(profile.coefficients)
