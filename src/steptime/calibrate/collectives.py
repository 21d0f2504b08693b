"""Measured collectives to fabric profiles, and predictions of the rows of a table of collectives."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Final

import numpy as np

from steptime.calibrate.collective_fit import fit, predict
from steptime.calibrate.collective_machines import MACHINES, Machine, at_place, library_of
from steptime.calibrate.collective_rows import Rows
from steptime.calibrate.expert_exchange import is_exchange, predict_exchanges
from steptime.calibrate.score import Predicted
from steptime.calibrate.table import Table
from steptime.cost.collective_fabric import Fabric, fabric_of
from steptime.errors import UserError
from steptime.estimate.fabrics import carried_between, carried_inside, nearest_profile, network_profile
from steptime.estimate.stated import scaled
from steptime.hardware import load_cluster, load_device
from steptime.hardware.fabric_profile import FabricProfile
from steptime.num import Array

KINDS: Final = {
    "allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all", "all2all": "all_to_all", "a2a": "all_to_all", "p2p": "p2p", "permute": "p2p",
    "sendrecv": "p2p", "broadcast": "broadcast", "bcast": "broadcast",
    "reduce": "reduce", "scatter": "scatter", "gather": "gather",
}  # fmt: skip
#: Sources whose size of an all-to-all is that of the tensor of the whole group: their times fall with the group.
WHOLE_EXCHANGES: Final = ("nnscaler_mi200",)
FOLDS: Final = 4
MOST_ROWS: Final = 450
"""Rows that a fit looks at."""
#: Latency of a network over that of Slingshot, by the start of the cluster's name: EFA delivers datagrams out of
#: order, and its receiver sorts them (nccl-tests on p4de and p5, two nodes: 1.5 to 3 times).
LATENCY: Final = {"aws": 2.0}
#: A second level of no more devices than this joins the domains of one node.
NODE: Final = 16
#: Words of the column ``interconnect`` that name a cluster of the catalogue.
_CLUSTERS: Final = {"p4de": "aws-p4d", "p5en": "aws-p5en", "p5": "aws-p5"}


def kind_of(name: str) -> str:
    """The collective of a spelling, whatever its case and what joins its words; "" for one without a formula.

    >>> [kind_of(name) for name in ("AllReduce", "all-to-all", "ncclReduceScatter", "sendrecv_perf", "gossip")]
    ['all_reduce', 'all_to_all', 'reduce_scatter', 'p2p', '']
    """
    return KINDS.get(re.sub(r"^(nccl|rccl)|perf$", "", re.sub(r"[\s_-]", "", name.lower())), "")


def rows_of(table: Table, domain: int | Array | None = None) -> Rows:
    """Rows of a table as arguments of the formulas; unknown kinds become "".

    Args:
        table: with the columns of ``collectives.parquet``.
        domain: devices of one inner domain; default the column ``gpus_per_node``.
    """
    kinds = {name: kind_of(name) for name in set(table.text("collective"))}
    kind = np.array([kinds[name] for name in table.text("collective")], dtype=object)
    ranks, node = table.number("n_gpus"), table.number("gpus_per_node")
    node = np.where(np.isnan(node), ranks, node)
    most = node if domain is None else np.where(np.asarray(domain) < node, domain, node)
    with np.errstate(invalid="ignore", divide="ignore"):
        inside = ranks / np.ceil(ranks / np.maximum(most, 1))
    element = np.where(np.isin(table.text("dtype"), ("int8", "uint8", "fp8")), 1.0, 2.0)
    whole = (kind == "all_to_all") & np.isin(table.text("source"), WHOLE_EXCHANGES)
    size = np.where(whole, table.number("bytes") / ranks, table.number("bytes"))
    return Rows(kind, ranks, inside, size, element, table.number("time_us") * 1e-6)


def usable(rows: Rows) -> Array:
    """Rows that the formulas can read."""
    good: Array = (rows.kind != "") & np.isfinite(rows.ranks) & (rows.ranks > 1) & (rows.size_bytes > 0)
    return good


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
    coefficients = fit(machine, rows.merged().thinned(MOST_ROWS), starts=2)
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


def predict_rows(table: Table, profiles: Iterable[FabricProfile]) -> Predicted:
    """Predictions for the rows of a table of collectives.

    A row takes the profile of its own source, else that of its device and library, else of its device under NCCL,
    else that of the nearest machine with its coefficients carried over in units of the datasheet links.

    Args:
        table: with the columns of ``collectives.parquet``.
        profiles: what :func:`steptime.hardware.fabric_profile.load_fabric_profiles` gives.
    """
    known = {p.name: p for p in profiles}
    seconds, low, high = (np.full(table.rows, np.nan) for _ in range(3))
    reason = np.full(table.rows, "", dtype=object)
    own = is_exchange(table)
    if own.any():
        seconds[own], low[own], high[own], reason[own] = predict_exchanges(table.take(own), known.values())
    others = np.flatnonzero(~own)
    for key, place in _keys(table.take(others)).items():
        index = others[place]
        part = table.take(index)
        choice = choose(key, known)
        if isinstance(choice, str):
            reason[index] = choice
            continue
        machine, profile = choice
        rows = _placed(machine, part)
        good = usable(rows)
        reason[index] = np.where(good, "", _unreadable(rows))
        time = predict(fabric_of(profile.coefficients), rows.take(good))
        ring = np.array(["NCCL_ALGO=Ring" in note for note in part.text("notes")[good]], dtype=bool)
        if ring.any():
            only = replace(fabric_of(profile.coefficients), trees=False, switch_Bps=0.0)
            time[ring] = predict(only, rows.take(good).take(ring))
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


def choose(key: Key, known: Mapping[str, FabricProfile]) -> tuple[Machine, FabricProfile] | str:
    """The machine and profile for rows of one kind, or why there is none."""
    source, gpu, place, library, spans = key
    device = _device(gpu)
    here = [m for m in MACHINES if m.name in known and (gpu in m.gpus or (m.device == device and not m.links_by_group))]
    if device is None and not here:
        return "no such device in the catalogue"
    nearest = min(here, key=lambda m: _distance(m, source, gpu, place, library), default=None)
    if nearest is not None and nearest.library == "host" != library:
        nearest = None  # what a host saw is no model of the kernels alone
    if nearest is not None and (nearest.outer or spans <= (1 if nearest.domain > 8 else 0)):
        return nearest, known[nearest.name]
    return _carried(nearest, device or (nearest.device if nearest else ""), place, known, spans)


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
    nearest: Machine | None, device: str, place: str, known: Mapping[str, FabricProfile], spans: float,
) -> tuple[Machine, FabricProfile] | str:  # fmt: skip
    """A profile for links that were not measured; a node with more devices than the cluster's is one domain too."""
    try:
        name = next((c for word, c in _CLUSTERS.items() if word in place), device)
        profile = assumed(load_cluster(name), known.values(), nearest.name if nearest else None)
    except UserError as error:
        return str(error)
    level: Mapping[str, Any] = profile.coefficients
    domain = int(float(level["domain"]))
    machine = Machine(
        name=profile.name, device=device, library="nccl", gpus=(), sources=(),
        domain=RACK if spans == 0 and domain >= 8 else domain,
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
    near = nearest_profile(cluster, nccl, inner)
    if near is None:
        raise UserError("no measured NCCL profile to carry over")
    levels = _without_packages(cluster.levels)
    level = levels[0]
    link = level.link_Bps * level.links_per_device
    network = network_profile(nccl, near)
    values = carried_inside(near, link, level.group)
    if len(levels) > 1:
        values |= carried_between(levels[1], network, level.devices)
        late = next((factor for word, factor in LATENCY.items() if cluster.name.startswith(word)), 1.0)
        for name in ("outer_start_s", "outer_hop_s", "tree_hop_s"):
            values[name] = scaled(values[name], late)
    sure = max(near.band[1], 1 / near.band[0], network.band[1], 1.5)
    return FabricProfile(
        name=f"{cluster.name}-assumed", device=cluster.device.name, library="nccl", link_Bps=link,
        nic_Bps=levels[1].link_Bps if len(levels) > 1 else 0.0, coefficients=values,
        points=0, median_ape=near.median_ape, mean_ape=near.mean_ape, bias=near.bias, band=(1 / sure, sure),
        source=f"{near.name} inside a domain, {network.name} between, in units of the datasheet links", kind="assumed",
    )  # fmt: skip


def _without_packages(levels: Sequence[Any]) -> Sequence[Any]:
    """The levels of a cluster without pairs of dies inside a node: the links between them are the slower ones."""
    inside = len(levels) > 2 and levels[1].devices is not None and levels[1].devices <= NODE
    return levels[1:] if inside else levels


def fabric(profile: FabricProfile) -> Fabric:
    """The coefficients of a profile as an argument of `collective_s`."""
    return fabric_of(profile.coefficients)
