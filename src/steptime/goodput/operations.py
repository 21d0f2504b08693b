"""Operations of a cluster: failure rates, checkpoints, restarts, spares, pauses; from the catalogue or a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from steptime.cost.failures import joined_mtbf_s
from steptime.errors import FieldError, UnknownNameError, shown
from steptime.goodput.tables import DATED, ORIGIN, catalogue, user_table
from steptime.schema import Field, Row, Table, checked, text
from steptime.units import parse

DEFAULT: Final = "llama3-h100"
"""Row of the catalogue for ``default``: the one with failures by component."""
NODE: Final = 8
"""Devices per host in the published runs."""
SPREAD: Final = 0.7
"""Standard deviation of the logarithm of failure rates per device between the published runs (see docs/goodput.md)."""
KINDS: Final = ("sync", "async", "memory")
"""Checkpoints: the run waits until one is in the store; until it is in host memory; kept in another host's memory."""


def _time(record: str, low: float = 1e-3) -> Field:
    return Field(record=record, dimension="s", low=low, high=1e12, required=False, example="10 min")


def _Bps(record: str) -> Field:
    return Field(record=record, dimension="Bps", low=1e3, high=1e18, required=False, example="2 GB/s")


#: Table of a file -> key -> number.
TABLES: Final[Mapping[str, Mapping[str, Field]]] = {
    "mtbf": {name: _time(name, 1.0) for name in ("device", "host", "switch", "software", "any")},
    "checkpoint": {
        "node_bandwidth": _Bps("node_Bps"),
        "store_bandwidth": _Bps("store_Bps"),
        "interval": _time("interval_s"),
        "stall": _time("stall_s", 0.0),
        "size": Field(record="saved_bytes", dimension="bytes", low=1.0, high=1e18, required=False, example="2.3 TB"),
        "lost_copies": Field(record="lost_copies", low=0.0, high=1.0, required=False, example="0.05"),
    },
    "restart": {"time": _time("restart_s", 0.0)},
    "spares": {
        "nodes": Field(record="spares", low=0, high=1e6, whole=True, required=False, example="4"),
        "repair": _time("repair_s", 0.0),
        "replaced": Field(record="replaced", low=0.0, high=1.0, required=False, example="0.5"),
    },
    "pauses": {
        "evaluation": _time("evaluation_s", 0.0),
        "evaluation_every": _time("evaluation_every_s"),
        "data": Field(record="data", low=0.0, high=10.0, required=False, example="0.01"),
        "jitter": Field(record="jitter", low=0.0, high=1.0, required=False, example="0.02"),
    },
}
_RATIOS: Final = {
    name: Field(record=name, low=0.0 if name == "spread" else 1.0, high=10.0 if name == "spread" else 1e6, example="16")
    for name in ("devices_per_switch", "devices_per_host", "spread")
}
_ROWS: Final[Mapping[str, Mapping[str, Row]]] = {
    **TABLES,
    "mtbf": {**TABLES["mtbf"], **_RATIOS},
    "checkpoint": {**TABLES["checkpoint"], "kind": text(*KINDS)},
}


def _check_origin(found: Any) -> None:
    missing = [key for key in ORIGIN if key not in found]
    if missing and TABLES["mtbf"].keys() & found.get("mtbf", {}).keys():
        raise FieldError("", missing[0], "is missing", hint=DATED)


_FILE: Final = Table(
    rows={**ORIGIN, "base": text(), **{name: Table(rows=rows) for name, rows in _ROWS.items()}}, also=_check_origin
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """Operations of a cluster. Mean times are per unit; values that are not from the file or its base are assumed."""

    name: str
    source: str
    date: str
    mtbf_s: Mapping[str, float]
    """Kind of unit (``device``, ``host``, ``switch``, ``software``, ``any``: the last two per device) -> mean time."""
    devices_per_switch: float = 16.0
    devices_per_host: float | None = None
    """None: the devices of a node of the cluster."""
    spread: float = SPREAD
    """Standard deviation of the logarithm of the failure rate between clusters."""
    kind: str = "async"
    node_Bps: float = 2e9
    store_Bps: float = 2e11
    interval_s: float | None = None
    """Work between checkpoints; None: the best."""
    stall_s: float = 1.0
    """Stall of a checkpoint to memory in addition to the copy: ranks wait for each other."""
    saved_bytes: float | None = None
    """Bytes of a checkpoint; None: weights and optimiser states."""
    lost_copies: float = 0.05
    """Share of failures that lose both copies in memory."""
    restart_s: float = 600.0
    """Time from a failure until a checkpoint is read: detection, diagnosis, start of processes, first slow steps."""
    spares: int | None = None
    """Spare nodes; None: one in a hundred, at least one."""
    repair_s: float = 86400.0
    replaced: float = 0.5
    """Share of failures of devices and hosts that take the node out."""
    evaluation_s: float = 0.0
    evaluation_every_s: float = 3600.0
    data: float = 0.0
    """Waits for data over the work of the run."""
    jitter: float = 0.0
    """Standard deviation of the step time of one node over its mean, in addition to the estimate's."""
    assumed: tuple[str, ...] = ()
    """Fields that neither the file nor the catalogue gives."""

    def units(self, devices: int, node: int) -> dict[str, float]:
        """Number of units of each kind in a job."""
        counts: dict[str, float] = {"device": devices, "software": devices, "any": devices}
        counts |= {"host": devices / (self.devices_per_host or node), "switch": devices / self.devices_per_switch}
        return {kind: float(counts[kind]) for kind in self.mtbf_s}

    def job_mtbf_s(self, devices: int, node: int) -> float:
        """Mean time between failures of a job."""
        counts = self.units(devices, node)
        return float(joined_mtbf_s([counts[kind] for kind in self.mtbf_s], list(self.mtbf_s.values())))

    def outage_mtbf_s(self, devices: int, node: int) -> float:
        """Mean time between failures that take a node out; infinite if none does."""
        counts = self.units(devices, node)
        rate = sum(counts[kind] / each for kind, each in self.mtbf_s.items() if kind in ("device", "host", "any"))
        return 1.0 / (rate * self.replaced) if rate * self.replaced else float("inf")


def names() -> tuple[str, ...]:
    """Rows of the catalogue."""
    return tuple(catalogue("failures.toml"))


def published(name: str) -> Operations:
    """Operations of a catalogue row: mean time = hours of all units over their interruptions.

    >>> round(published("llama3-h100").job_mtbf_s(16384, 8) / 3600, 2)    # 54 days over 419
    3.09
    """
    row = catalogue("failures.toml")[name]
    devices, time_s, per_switch = row["devices"], parse(row["time"], "s"), row.get("devices_per_switch", 16)
    per = {"device": 1, "host": NODE, "switch": per_switch, "software": 1, "any": 1}
    mtbf = {kind: time_s * devices / per[kind] / row[kind] for kind in per if kind in row}
    return Operations(
        name=name,
        source=row["source"],
        date=row["date"],
        mtbf_s=mtbf,
        devices_per_switch=float(per_switch),
        assumed=tuple(sorted(_DEFAULTED)),
    )


_DEFAULTED: Final = frozenset(
    ("node_Bps", "store_Bps", "stall_s", "restart_s", "spares", "repair_s", "replaced", "kind", "lost_copies")
)


def operations_of(given: Any) -> Operations:
    """Operations by a name of the catalogue, ``default``, or the path of a file.

    Raises:
        UserError: the name is unknown, or the file is wrong; the message says what to change.
    """
    if isinstance(given, Operations):
        return given
    if not isinstance(given, str):
        raise FieldError("", "failures", f"{shown(given)} is no name and no path", hint=f"one of {', '.join(names())}")
    if given == "default":
        return published(DEFAULT)
    if given in names():
        return published(given)
    if not given.endswith(".toml"):
        raise UnknownNameError("failures", given, ["default", *names(), "FILE.toml"])
    return _read(given, user_table(given, "failures"))


def _read(where: str, document: Mapping[str, Any]) -> Operations:
    found = checked(document, _FILE, where)
    base = found.get("base", "default")
    if base != "default" and base not in names():
        raise UnknownNameError("base", base, ["default", *names()])
    out = published(DEFAULT if base == "default" else base)
    if mtbf := {key: value for key, value in found.get("mtbf", {}).items() if key in TABLES["mtbf"]}:
        out = replace(out, mtbf_s=mtbf, name=where, source=found["source"], date=found["date"], spread=0.0)
    rows = [(table, key) for table in _ROWS for key in found.get(table, ()) if key not in mtbf]
    given = {getattr(_ROWS[table][key], "record", key): found[table][key] for table, key in rows}
    return replace(out, **given, assumed=tuple(name for name in out.assumed if name not in given))
