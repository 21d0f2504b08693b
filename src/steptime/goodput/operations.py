"""How a cluster is run: how often parts fail, how it saves and restarts, spares, pauses; of a catalogue or a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from steptime.cost.failures import joined_mtbf_s
from steptime.errors import FieldError, UnknownNameError, shown
from steptime.goodput.tables import catalogue, numbers, origin, subtable, user_table
from steptime.schema import Field
from steptime.units import parse

DEFAULT: Final = "llama3-h100"
"""Row of the catalogue that ``default`` means: the one with failures by component."""
NODE: Final = 8
"""Devices of a host in the published runs."""
SPREAD: Final = 0.7
"""Standard deviation of the logarithm of failure rates per device between the published runs (see docs/goodput.md)."""
KINDS: Final = ("sync", "async", "memory")
"""Checkpoints: the run waits until one is stored; until it is in the host's memory; it is kept in another host's."""


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
#: Keys of the tables that are words, or numbers without a unit; and all keys of a file.
_WORDS: Final = {"checkpoint": ("kind",), "mtbf": ("devices_per_switch", "devices_per_host", "spread")}
_TOP: Final = ("source", "date", "base", *TABLES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """How a cluster is run. The mean times are of one unit; what is not from the file or its base is assumed."""

    name: str
    source: str
    date: str
    mtbf_s: Mapping[str, float]
    """Kind of unit (``device``, ``host``, ``switch``, ``software``, ``any``: the last two per device) -> mean time."""
    devices_per_switch: float = 16.0
    devices_per_host: float | None = None
    """None: those of a node of the cluster."""
    spread: float = SPREAD
    """Standard deviation of the logarithm of the rate that another cluster may have."""
    kind: str = "async"
    node_Bps: float = 2e9
    store_Bps: float = 2e11
    interval_s: float | None = None
    """Work between checkpoints; None: the best."""
    stall_s: float = 1.0
    """What a checkpoint to memory stalls the run in addition to the copy: ranks wait for each other."""
    saved_bytes: float | None = None
    """Bytes of a checkpoint; None: weights and states of the optimiser."""
    lost_copies: float = 0.05
    """Share of the failures that lose both copies in memory."""
    restart_s: float = 600.0
    """From a failure until a checkpoint is read: detection, diagnosis, start of processes, first slow steps."""
    spares: int | None = None
    """Nodes more than the job needs; None: one in a hundred, at least one."""
    repair_s: float = 86400.0
    replaced: float = 0.5
    """Share of the failures of devices and hosts that take the node out."""
    evaluation_s: float = 0.0
    evaluation_every_s: float = 3600.0
    data: float = 0.0
    """Time that the run waits for data, over its work."""
    jitter: float = 0.0
    """Standard deviation of the step time of one node over its mean, in addition to what the estimate has."""
    assumed: tuple[str, ...] = ()
    """Fields that neither the file nor the catalogue gives."""

    def units(self, devices: int, node: int) -> dict[str, float]:
        """Units of each kind of a job."""
        counts: dict[str, float] = {"device": devices, "software": devices, "any": devices}
        counts |= {"host": devices / (self.devices_per_host or node), "switch": devices / self.devices_per_switch}
        return {kind: float(counts[kind]) for kind in self.mtbf_s}

    def job_mtbf_s(self, devices: int, node: int) -> float:
        """Mean time between failures of a job."""
        counts = self.units(devices, node)
        return float(joined_mtbf_s([counts[kind] for kind in self.mtbf_s], list(self.mtbf_s.values())))

    def outage_mtbf_s(self, devices: int, node: int) -> float:
        """Mean time between failures that take a node out; infinite where none does."""
        counts = self.units(devices, node)
        rate = sum(counts[kind] / each for kind, each in self.mtbf_s.items() if kind in ("device", "host", "any"))
        return 1.0 / (rate * self.replaced) if rate * self.replaced else float("inf")


def names() -> tuple[str, ...]:
    """Rows of the catalogue."""
    return tuple(catalogue("failures.toml"))


def published(name: str) -> Operations:
    """A row of the catalogue: hours of all units over their interruptions.

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
    for key in document:
        if key not in _TOP:
            raise UnknownNameError(f"key of {where}", str(key), _TOP)
    base = document.get("base", "default")
    if base != "default" and base not in names():
        raise UnknownNameError("base", str(base), ["default", *names()])
    out = published(DEFAULT if base == "default" else base)
    found: dict[str, Any] = {}
    for name, fields in TABLES.items():
        table = subtable(where, document, name)
        found |= {f"{name}:{key}": table[key] for key in _WORDS.get(name, ()) if key in table}
        own = {key: value for key, value in table.items() if key not in _WORDS.get(name, ())}
        values = numbers(where, own, fields, f"{name}.")
        if name == "mtbf" and values:
            stated = origin(where, document)
            out = replace(out, mtbf_s=values, name=where, source=stated["source"], date=stated["date"], spread=0.0)
        elif values:
            out = _with(out, {name: int(value) if name == "spares" else value for name, value in values.items()})
    return _worded(where, out, found)


def _worded(where: str, out: Operations, found: Mapping[str, Any]) -> Operations:
    """The keys of a file that are words, or numbers next to the mean times."""
    for key, value in found.items():
        table, _, name = key.partition(":")
        if name == "kind":
            if value not in KINDS:
                raise UnknownNameError("kind of checkpoint", str(value), KINDS)
            out = _with(out, {"kind": value})
        else:
            rule = Field(record=name, low=0.0 if name == "spread" else 1.0, high=1e6, example="16")
            out = _with(out, numbers(where, {name: value}, {name: rule}, f"{table}."))
    return out


def _with(out: Operations, given: Mapping[str, Any]) -> Operations:
    """The operations with fields of a file, which are assumed no more."""
    return replace(out, **given, assumed=tuple(name for name in out.assumed if name not in given))
