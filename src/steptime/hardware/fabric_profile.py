"""How collectives really run on a fabric: fitted coefficients of one machine and one library, with provenance."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from steptime.errors import FieldError, InputFileError, UnknownNameError
from steptime.hardware.load import parse_toml
from steptime.hardware.profiles import toml_text

_FOLDER: Final = Path(__file__).parent / "catalogue" / "fabrics"
Value = float | tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricProfile:
    """Coefficients of the collectives of one machine under one library."""

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
    points: int
    """Measurements that it was fitted to."""
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Smallest and largest message (``bytes``) and group (``ranks``) that were measured."""
    median_ape: float
    """Median absolute relative error on sizes that the fit did not see."""
    mean_ape: float
    bias: float
    """Mean of predicted / measured - 1 on those."""
    band: tuple[float, float]
    """5th and 95th percentile of measured / predicted on those."""
    source: str
    kind: str = "fitted"
    """``fitted``, or ``assumed`` where it was carried over from another machine."""


def fabric_profile_names() -> list[str]:
    """Names that :func:`load_fabric_profile` knows, in order."""
    return sorted({path.stem for root in _roots() if root.is_dir() for path in root.glob("*.toml")})


def load_fabric_profile(name_or_path: str | Path) -> FabricProfile:
    """The fabric profile of that name (in ``fabrics`` of ``$STEPTIME_PATH``, else in the catalogue) or file.

    Raises:
        UnknownNameError: no such profile.
        InputFileError: the file is not TOML.
        FieldError: a field is missing, unknown or not allowed.

    >>> load_fabric_profile("h100-sxm-nccl").device
    'h100-sxm'
    """
    text = str(name_or_path)
    if text.endswith(".toml"):
        return read_fabric_profile(Path(text))
    for root in _roots():
        path = root / f"{text}.toml"
        if path.is_file():
            return read_fabric_profile(path)
    raise UnknownNameError("fabric profile", text, fabric_profile_names())


def load_fabric_profiles() -> tuple[FabricProfile, ...]:
    """All profiles of the catalogue and of ``$STEPTIME_PATH``."""
    return tuple(load_fabric_profile(name) for name in fabric_profile_names())


def read_fabric_profile(path: Path) -> FabricProfile:
    """The profile in a file.

    Raises:
        InputFileError: the file cannot be read or is not TOML.
        FieldError: a field is missing, unknown or not allowed.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InputFileError(str(path), f"cannot be read: {error.strerror}") from error
    table = parse_toml(raw, str(path))
    known = {f.name: f for f in fields(FabricProfile)}
    for name in table:
        if name not in known:
            raise FieldError(str(path), name, f"is unknown; known are {', '.join(known)}")
    needed = ("name", "device", "library", "link_Bps", "coefficients", "points", "band", "source")
    for name in (*needed, "median_ape", "mean_ape", "bias"):
        if name not in table:
            raise FieldError(str(path), name, "is missing")
    return FabricProfile(**{k: _tuple(v) for k, v in table.items()})


@lru_cache(maxsize=1)
def catalogue_link_sources() -> frozenset[str]:
    """Sources of the efficiencies and latencies that the catalogue assumes for links, and of its defaults."""
    root = _FOLDER.parent
    tables = [parse_toml(path.read_bytes(), str(path)) for path in sorted((root / "links").glob("*.toml"))]
    tables.append(parse_toml((root / "defaults.toml").read_bytes(), "defaults.toml")["link"])
    return frozenset(entry["source"] for t in tables for entry in (t, *t.get("sources", ())) if "source" in entry)


def save_fabric_profile(profile: FabricProfile, folder: Path | None = None) -> Path:
    """Writes ``NAME.toml``; into the catalogue unless a folder is given."""
    lines = []
    tables: list[tuple[str, Mapping[str, Any]]] = []
    for item in fields(profile):
        value = getattr(profile, item.name)
        if isinstance(value, Mapping):
            tables.append((item.name, value))
        else:
            lines.append(f"{item.name} = {_text(value)}")
    for name, table in tables:
        lines += ["", f"[{name}]", *(f"{k} = {_text(v)}" for k, v in table.items())]
    path = (folder or _FOLDER) / f"{profile.name}.toml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _roots() -> list[Path]:
    given = [Path(p).expanduser() / "fabrics" for p in os.environ.get("STEPTIME_PATH", "").split(os.pathsep) if p]
    return [*given, _FOLDER]


def _tuple(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_tuple(v) for v in value)
    if isinstance(value, dict):
        return {k: _tuple(v) for k, v in value.items()}
    return value


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
