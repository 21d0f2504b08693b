"""Measured collectives to fabric profiles, and predictions of the rows of a table of collectives."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Final

import numpy as np

from steptime.cost.collective_algorithms import fabric_of
from steptime.errors import UserError, counted
from steptime.estimate.communication import ROOTED, collective_over, message_time_s
from steptime.estimate.fabrics import FabricModel, fabric_model
from steptime.estimate.machine import Machine as EstimateMachine
from steptime.estimate.machine import machine_of, slow_level
from steptime.hardware import load_cluster
from steptime.hardware.library import NO_DEVICE, device_named
from steptime.hardware.profiles import FabricProfile
from steptime.hardware.records import UNLIMITED, Cluster
from steptime.measure.residuals import Predicted, errors_of
from steptime.measure.table import Table
from steptime.num import Array
from steptime.plan.job import PRECISIONS
from steptime_lab.calibrate.collective_fit import fit, predict
from steptime_lab.calibrate.collective_machines import BROKEN, MACHINES, Machine, Rows, at_place, library_of
from steptime_lab.calibrate.expert_exchange import is_exchange, predict_exchanges
from steptime_lab.calibrate.family import NAMES

TEXTBOOK_BAND: Final = (0.5, 2.0)
"""Band of the textbook formula on datasheet links, as a factor; assumed."""
LEAST_BAND: Final = 1.5
"""Narrowest band, as a factor, of coefficients that were carried over."""
DTYPES: Final = ("fp32", "bf16", "fp16", "tf32")
"""Dtypes for one of which a machine is built; the times of its links do not depend on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Textbook:
    """Textbook rings on datasheet links, where no fit is carried over."""

    machine: EstimateMachine
    band: tuple[float, float] = TEXTBOOK_BAND

    def seconds(self, rows: Rows) -> Array:
        """Time of each row."""
        out = np.full(len(rows.ranks), np.nan)
        for kind in np.unique(rows.kind.astype(str)).tolist():
            own = rows.kind == kind
            size, ranks, inside = rows.size_bytes[own], rows.ranks[own], rows.inside[own]
            if kind == "p2p":
                near, far = message_time_s(self.machine, size)
                out[own] = np.where(ranks > inside, far, near)
            else:
                out[own] = collective_over(ROOTED.get(kind, kind), self.machine, size, ranks, inside)
        return out


def estimated(cluster: Cluster, *, leaves_node: bool) -> FabricProfile | Textbook:
    """The model with which an estimate times the collectives of a cluster, for one group at a time.

    Args:
        cluster: the machine.
        leaves_node: true: groups cross all of its levels; false: the second at most.
    """
    gpus = cluster.beyond_domain(1)
    gpus = min(cluster.levels[-1].group, UNLIMITED if leaves_node else gpus)
    model = fabric_model(cluster, slow_level(cluster, gpus), gpus)
    if model is not None:
        return _profile(cluster, model)
    rated = next(dtype for dtype in DTYPES if dtype in cluster.device.matrix_flops_per_s)
    return Textbook(
        machine=machine_of(cluster, gpus, PRECISIONS[rated], lone_rank_has_all_links=True, calibrated=False)
    )


def _profile(cluster: Cluster, model: FabricModel) -> FabricProfile:
    """A fabric of an estimate as a profile."""
    near, level = model.inside.profile, cluster.levels[0]
    between = model.between.profile if model.between is not None else None
    assert near is not None
    at_word = any(basis.profile is None for basis in model.bases())
    outside = between.band[1] if between else 1.0
    sure = max(near.band[1], 1 / near.band[0], outside, TEXTBOOK_BAND[1] if at_word else LEAST_BAND)
    return FabricProfile(
        name=f"{cluster.name}-assumed",
        device=cluster.device.name,
        library=near.library,
        link_Bps=level.link_Bps * level.links_per_device,
        coefficients=asdict(model.fabric),
        nic_Bps=cluster.levels[1].link_Bps if between else 0.0,
        points=0,
        median_ape=near.median_ape,
        mean_ape=near.mean_ape,
        bias=near.bias,
        band=(1 / sure, sure),
        source="; ".join(basis.text for basis in model.bases()),
        kind="assumed",
    )


KINDS: Final[Mapping[str, str]] = NAMES["collectives"]
#: Sources in which the size of an all-to-all is that of the whole group's tensor: their times fall with the group.
WHOLE_EXCHANGES: Final = ("nnscaler_mi200",)
FOLDS: Final = 4
LARGEST_BYTES: Final = 1e15
"""Longest message that is accepted."""
TIMES_S: Final = (1e-12, 1e5)
"""Shortest and longest time of a collective that is accepted."""
LARGEST_GROUP: Final = 1e6
"""Largest group that is accepted."""
LEAST_ROWS, LEAST_SIZES = 12, 4
"""Fewest measurements, and sizes among them, of a fit: a size is in one fold only."""
FARTHEST: Final = 10.0
"""Median of measured over predicted, or its inverse, from which the units are taken to differ."""
MOST_ROWS: Final = 450
"""Largest number of rows of a fit."""
OWN, CARRIED, TEXTBOOK = "own", "transferred", "textbook"
"""Basis of a prediction: a fit to this machine, or to others, or rings on datasheet links."""
NO_FORMULA: Final = "this collective has no formula"
#: Words of the column ``interconnect`` that name a cluster of the catalogue.
_CLUSTERS: Final = {"p4de": "aws-p4d", "p5en": "aws-p5en", "p5": "aws-p5"}


def kind_of(name: str) -> str:
    """The collective of a spelling, in any case and with any separators; "" for one without a formula.

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
        inside, share = ranks / np.ceil(ranks / np.maximum(most, 1)), table.number("bytes") / ranks
    element = np.where(np.isin(table.text("dtype"), ("int8", "uint8", "fp8")), 1.0, 2.0)
    whole = (kind == "all_to_all") & np.isin(table.text("source"), WHOLE_EXCHANGES)
    size = np.where(whole, share, table.number("bytes"))
    return Rows(kind, ranks, inside, size, element, table.number("time_us") * 1e-6)


def usable(rows: Rows) -> Array:
    """Rows that the formulas can read."""
    groups = np.isfinite(rows.ranks) & (rows.ranks > 1) & np.isfinite(rows.inside) & (rows.inside >= 1)
    good: Array = (rows.kind != "") & groups & (rows.size_bytes > 0) & (rows.size_bytes <= LARGEST_BYTES)
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


def machine_rows(machine: Machine, table: Table, library: Array | None = None) -> tuple[Array, Rows]:
    """Rows of a machine that can be read and are accepted: their positions in the table, and the rows."""
    places = np.flatnonzero(covered(machine, table, library))
    rows = _placed(machine, table.take(places))
    good = usable(rows) & (rows.measured_s >= TIMES_S[0]) & (rows.measured_s <= TIMES_S[1])
    good &= rows.ranks <= LARGEST_GROUP
    if machine.within:
        good &= rows.ranks <= rows.inside
    return places[good], rows.take(good)


def enough(rows: Rows) -> bool:
    """True if there are enough measurements, and sizes among them, for a fit."""
    return len(rows.ranks) >= LEAST_ROWS and len(np.unique(rows.size_bytes)) >= LEAST_SIZES


def machines_of(table: Table) -> tuple[Machine, ...]:
    """Machines that a table may have measured.

    A table of sources that are all unknown has measured the first machine with its device, library and interconnect;
    one whose domains were measured alone takes only the rows that stay in one.
    """
    sources = sorted(set(table.text("source").tolist()))
    if {source for machine in MACHINES for source in machine.sources} & set(sources):
        return MACHINES
    devices = {gpu: _device(gpu) for gpu in sorted(set(table.text("gpu").tolist()))}
    found: dict[tuple[str, ...], Machine] = {}
    for machine in MACHINES:
        gpus = tuple(gpu for gpu, device in devices.items() if device == machine.device or gpu in machine.gpus)
        if gpus and BROKEN not in machine.tags:
            key = (machine.device, machine.library, machine.interconnect, machine.without)
            found.setdefault(key, replace(machine, gpus=gpus, sources=tuple(sources), within=not machine.outer))
    return tuple(found.values())


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
        machine: the machine.
        rows: its measurements.
        held_out: their predictions by :func:`cross_validated`; computed if not given.

    Raises:
        UserError: too few rows, or times far from those of such links.
    """
    if not enough(rows):
        count, sizes = len(rows.ranks), len(np.unique(rows.size_bytes))
        hint = f"a fit needs {LEAST_ROWS} of {LEAST_SIZES} sizes"
        raise UserError(
            f"{machine.name}: {counted(count, 'usable measurement')} of {counted(sizes, 'size')} are too few", hint=hint
        )
    held_out = cross_validated(machine, rows) if held_out is None else held_out
    coefficients = fit(machine, rows.merged().thinned(MOST_ROWS), starts=2)
    off = float(np.median(rows.measured_s / held_out))
    if not 1 / FARTHEST <= off <= FARTHEST:
        hint = "are the units right? time_us is in microseconds, bytes is the size of the message"
        raise UserError(f"{machine.name}: measured times are {off:.3g} times what its links explain", hint=hint)
    errors = errors_of(held_out, rows.measured_s)
    return FabricProfile(
        name=machine.name,
        device=machine.device,
        library=machine.library,
        sources=machine.sources,
        link_Bps=machine.link_Bps,
        nic_Bps=machine.nic_Bps if machine.outer else 0.0,
        coefficients=coefficients,
        ranges={
            "bytes": (float(rows.size_bytes.min()), float(rows.size_bytes.max())),
            "ranks": (float(rows.ranks.min()), float(rows.ranks.max())),
        },
        **asdict(errors),
        source=f"steptime calibration of {', '.join(machine.sources)}",
    )


def predict_rows(table: Table, profiles: Iterable[FabricProfile]) -> Predicted:
    """Predictions for the rows of a table of collectives.

    A row takes the profile of its own source, else that of its device and library, else of its device under NCCL,
    else the model with which an estimate times its collectives (:func:`estimated`):
    coefficients carried over in units of the datasheet links, or the textbook's rings.

    Args:
        table: with the columns of ``collectives.parquet``.
        profiles: profiles as :func:`steptime.hardware.profiles.load_fabric_profiles` returns them.
    """
    known = {p.name: p for p in profiles}
    seconds, low, high = (np.full(table.rows, np.nan) for _ in range(3))
    reason, origin = (np.full(table.rows, "", dtype=object) for _ in range(2))
    own = is_exchange(table)
    if own.any():
        found = predict_exchanges(table.take(own), known.values())
        seconds[own], low[own], high[own], reason[own], fitted = found
        origin[own] = np.where(fitted, OWN, CARRIED)
    others = np.flatnonzero(~own)
    for key, place in _keys(table.take(others)).items():
        index = others[place]
        part = table.take(index)
        choice = choose(key, known)
        if isinstance(choice, str):
            reason[index] = choice
            continue
        machine, model = choice
        rows = _placed(machine, part)
        good = usable(rows)
        reason[index] = np.where(good, "", np.where(rows.kind == "", NO_FORMULA, "size or group unknown"))
        time = _seconds(model, rows.take(good), part.text("notes")[good])
        seconds[index[good]] = time
        low[index[good]], high[index[good]] = time * model.band[0], time * model.band[1]
        origin[index[good]] = _origin(model)
    return Predicted(seconds=seconds, low_s=low, high_s=high, reason=reason, origin=origin)


def _seconds(model: FabricProfile | Textbook, rows: Rows, notes: Array) -> Array:
    """Time of rows (s); rows whose notes name the ring are timed by no other algorithm."""
    if isinstance(model, Textbook):
        return model.seconds(rows)
    time = predict(fabric_of(model.coefficients), rows)
    ring = np.array(["NCCL_ALGO=Ring" in note for note in notes], dtype=bool)
    if ring.any():
        only = replace(fabric_of(model.coefficients), trees=False, switch_Bps=0.0)
        time[ring] = predict(only, rows.take(ring))
    return time


def _origin(model: FabricProfile | Textbook) -> str:
    if isinstance(model, Textbook):
        return TEXTBOOK
    return CARRIED if model.kind == "assumed" else OWN


Key = tuple[str, str, str, str, float]
RACK: Final = 72
"""Devices of the largest NVLink domain; one that is wider than a node counts as one domain."""


def _keys(table: Table) -> dict[Key, Array]:
    """Source, GPU, interconnect, library, and a size that the group exceeds (0, a node, a rack) -> rows."""
    ranks, node = table.number("n_gpus"), table.number("gpus_per_node")
    spans = np.where(ranks > RACK, np.where(ranks > node, RACK, 0), np.where(ranks > node, 1, 0))
    columns = (table.text("source"), table.text("gpu"), table.text("interconnect"), libraries(table), spans)
    found: dict[Key, list[int]] = {}
    for i, key in enumerate(zip(*columns, strict=True)):
        found.setdefault(key, []).append(i)
    return {key: np.array(index) for key, index in found.items()}


def choose(key: Key, known: Mapping[str, FabricProfile]) -> tuple[Machine, FabricProfile | Textbook] | str:
    """The machine and profile for rows of one kind, or why there is none."""
    source, gpu, place, library, spans = key
    device = _device(gpu)
    here = [m for m in MACHINES if m.name in known and (gpu in m.gpus or (m.device == device and not m.links_by_group))]
    here = [m for m in here if BROKEN not in m.tags or source in m.sources]
    if device is None and not here:
        return NO_DEVICE
    nearest = min(here, key=lambda m: _distance(m, source, gpu, place, library), default=None)
    if nearest is not None and nearest.library == "host" != library:
        nearest = None  # times on the host do not model the kernels alone
    if nearest is not None and (nearest.outer or spans <= (1 if nearest.domain > 8 else 0)):
        return nearest, known[nearest.name]
    return _estimated(device or (nearest.device if nearest else ""), place, spans)


def _distance(machine: Machine, source: str, gpu: str, place: str, library: str) -> tuple[bool, ...]:
    """Sort key of the distance of a machine from a row: smaller is nearer."""
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
        device = device_named(gpu.split("(")[0].strip())
    except UserError:
        return None
    return None if device is None else device.name


def _estimated(device: str, place: str, spans: float) -> tuple[Machine, FabricProfile | Textbook] | str:
    """Machine and model of an estimate for links that were not measured; devices of one node are then one domain."""
    try:
        cluster = load_cluster(next((c for word, c in _CLUSTERS.items() if word in place), device))
    except UserError as error:
        return str(error)
    model, inner, domain = estimated(cluster, leaves_node=spans > 0), cluster.levels[0], cluster.fast_domain
    machine = Machine(
        name=cluster.name,
        device=device,
        library="nccl",
        gpus=(),
        sources=(),
        domain=RACK if spans == 0 and domain >= 8 else domain,
        link_Bps=inner.link_Bps * inner.links_per_device,
        outer=True,
    )
    return machine, model
