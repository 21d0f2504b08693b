"""How collectives really run on a fabric: fitted coefficients of one machine and one library, with provenance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from steptime.errors import FieldError
from steptime.hardware.checks import count_in, number, refuse_unknown, table_in, text_in
from steptime.hardware.load import read_toml
from steptime.hardware.profile import Fitted
from steptime.hardware.profiles import fitted_in, toml_key, toml_text
from steptime.hardware.search_path import named_files
from steptime.store.files import write_whole

FOLDER: Final = "fabrics"
Value = float | tuple[float, ...]
#: Coefficients that are lists (:class:`steptime.cost.collective_fabric.Fabric`); the rest are single numbers.
_LISTS: Final = ("links_by_group",)
_TRIPLES: Final = (
    "Bps", "start_s", "hop_s", "direct_start_s", "direct_hop_s", "direct_share", "direct_pair_Bps", "outer_start_s",
    "outer_hop_s", "outer_Bps", "tree_hop_s",
)  # fmt: skip
_POSITIVE: Final = ("nics", "dispatch_Bps", "combine_Bps", "dispatch_message_Bps", "combine_message_Bps")
#: Coefficients that no formula can do without: of collectives, and of each direction of the exchange of experts.
_OF_FABRIC: Final = ("start_s", "hop_s", "Bps")
_OF_EXCHANGE: Final = ("start_s", "expert_s", "Bps", "message_s", "message_Bps")


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricProfile(Fitted):
    """Coefficients of the collectives of one machine under one library; ranges are of `bytes` and `ranks`."""

    name: str
    device: str
    """Catalogue name; for a device that is not in the catalogue, its name in the measurements."""
    library: str
    """What ran: ``nccl``, ``nccl-kernel`` (as a profiler saw it), ``xla``, ``custom-graph``, ..."""
    sources: tuple[str, ...] = ()
    """Measurement sources that it was fitted to."""
    link_Bps: float
    """Datasheet bandwidth of a device inside its domain, one direction."""
    nic_Bps: float = 0.0
    """Datasheet bandwidth of one NIC (or host bridge) of a domain, one direction; 0: not measured."""
    coefficients: Mapping[str, Value]
    """Fields of :class:`steptime.cost.collective_fabric.Fabric`, in SI units."""


def load_fabric_profiles() -> tuple[FabricProfile, ...]:
    """All profiles in ``fabrics`` of the search path, in the order of their names.

    >>> [profile.device for profile in load_fabric_profiles() if profile.name == "h100-sxm-nccl"]
    ['h100-sxm']
    """
    files = named_files(FOLDER)
    return tuple(read_fabric_profile(files[name]) for name in sorted(files))


def read_fabric_profile(path: Path) -> FabricProfile:
    """The profile in a file.

    Raises:
        InputFileError: the file cannot be read or is not TOML.
        FieldError: a field is missing, unknown or not allowed.
    """
    where = str(path)
    table = read_toml(path)
    refuse_unknown(table, [f.name for f in fields(FabricProfile)], where, "")
    coefficients = table_in(table, "coefficients", where, "")
    _refuse_incomplete(coefficients, where)
    return FabricProfile(
        name=text_in(table, "name", where, ""),
        device=text_in(table, "device", where, ""),
        library=text_in(table, "library", where, ""),
        sources=_texts(table.get("sources", []), where, "sources"),
        link_Bps=_rate(table.get("link_Bps"), where, "link_Bps"),
        nic_Bps=number(table.get("nic_Bps", 0.0), where, "nic_Bps"),
        coefficients={name: _coefficient(name, value, where) for name, value in coefficients.items()},
        **fitted_in({"kind": "fitted"} | dict(table), where, ""),
    )


def _refuse_incomplete(coefficients: Mapping[str, Any], where: str) -> None:
    """Refuses a table without what a formula must have: that of collectives, or that of the exchange of experts."""
    ways = {name.partition("_")[0] for name in coefficients} & {"dispatch", "combine"}
    needed = [f"{way}_{name}" for way in sorted(ways) for name in _OF_EXCHANGE] or _OF_FABRIC
    for name in ("domain", *needed):
        if name not in coefficients:
            raise FieldError(where, f"coefficients.{name}", "is missing")


def _coefficient(name: str, value: Any, where: str) -> Value:
    """A switch, a number for each protocol, a list of numbers, or a number, by the name of the coefficient."""
    at = f"coefficients.{name}"
    if name == "trees":
        if not isinstance(value, bool):
            raise FieldError(where, at, "must be true or false")
        return value
    if name in _TRIPLES or name in _LISTS:
        if not isinstance(value, list) or (name in _TRIPLES and len(value) != 3):
            raise FieldError(where, at, "must be three numbers" if name in _TRIPLES else "must be a list of numbers")
        return tuple(_rate(one, where, at) if name == "Bps" else number(one, where, at) for one in value)
    if name == "domain" and count_in({at: value}, at, where, "") < 1:
        raise FieldError(where, at, "must be 1 or more")
    _rate(value, where, at) if name in _POSITIVE else number(value, where, at)
    kept: float = value  # a whole number stays one
    return kept


def _rate(value: object, where: str, at: str) -> float:
    found = number(value, where, at)
    if found <= 0:
        raise FieldError(where, at, f"{found:g} is not positive")
    return found


def _texts(value: object, where: str, at: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise FieldError(where, at, "must be a list of texts")
    return tuple(value)


def save_fabric_profile(profile: FabricProfile, folder: str | Path) -> Path:
    """Writes ``NAME.toml`` into a folder and returns the file.

    Raises:
        InputFileError: it cannot be written.
    """
    lines = []
    tables: list[tuple[str, Mapping[str, Any]]] = []
    inherited = fields(Fitted)
    for item in (*fields(profile)[len(inherited) :], *inherited):
        value = getattr(profile, item.name)
        if isinstance(value, Mapping):
            tables.append((item.name, value))
        else:
            lines.append(f"{item.name} = {_text(value)}")
    for name, table in tables:
        lines += ["", f"[{name}]", *(f"{toml_key(k)} = {_text(v)}" for k, v in table.items())]
    path = Path(folder) / f"{profile.name}.toml"
    write_whole(path, "\n".join(lines) + "\n", make_folder=True)
    return path


def _text(value: Any) -> str:
    if isinstance(value, str):
        return toml_text(value)
    if isinstance(value, Sequence):
        return "[" + ", ".join(_text(v) for v in value) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    return repr(float(f"{float(value):.4g}"))
