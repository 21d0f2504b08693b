"""Profiles as TOML files: one file per device, a table per curve.

A profile is looked up like a device, in the folder ``profiles`` of the same directories. Writers of several
families share a file: :func:`save_curves` replaces the curves that it is given and keeps all others.

Profiles of fabrics have fitted coefficients of collectives on one machine and one library, with provenance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Final

from steptime.errors import FieldError, UserError
from steptime.hardware.load import MAX_BYTES, read_toml
from steptime.hardware.records import Curve, Device, Fitted, Profile
from steptime.hardware.search_path import CATALOGUE, is_path, named_files, search_roots
from steptime.schema import Each, Field, Row, Table, above, as_given, checked, filled, flag, letters, number, text
from steptime.store.compiled import compiled
from steptime.store.files import parse_toml, read_text, write_whole

FOLDER: Final = "profiles"
TIMERS: Final = ("kernel", "eager")
KINDS: Final = ("fitted", "assumed", "measured")
_TEXTS: Final = ("family", "dtype", "timer", "source", "kind")
_NUMBERS: Final = ("median_ape", "mean_ape", "bias")


def _in_order(band: Any) -> None:
    low, high = band
    if not 0 < low <= high:
        raise UserError("must be two positive numbers, the smaller first")


_FITTED: Final[Mapping[str, Row]] = {
    "points": Field(low=0, high=1e12, whole=True, example="120"),
    "ranges": Table(named=Each(row=number, least=2, most=2, called="two numbers"), also=filled),
    **dict.fromkeys(_NUMBERS, number),
    "band": Each(row=number, least=2, most=2, called="two numbers", also=_in_order),
    "source": letters(4096),
    "kind": text(*KINDS),
}
"""Rows of :class:`~steptime.hardware.records.Fitted`."""
_CURVE: Final = Table(
    rows={
        **_FITTED,
        "family": letters(4096),
        "dtype": letters(4096),
        "timer": text(*TIMERS),
        "coefficients": Table(named=number, also=filled),
        "scatter": number,
    },
    required=("family", "dtype", "timer", "coefficients", *_FITTED.keys() - {"ranges"}),
)


def _once(profile: Any) -> None:
    seen: set[tuple[str, ...]] = set()
    for i, curve in enumerate(profile.get("curves", ())):
        key = tuple(curve[name] for name in _KEY)
        if key in seen:
            raise FieldError("", f"curves[{i}]", f"there are two curves of {' '.join(key)}")
        seen.add(key)


_KEY: Final = ("family", "dtype", "timer")
_PROFILE: Final = Table(
    rows={"device": letters(4096), "curves": Each(row=_CURVE, called="tables, written [[curves]]")},
    required=("device",),
    also=_once,
)


def load_profile(device: str) -> Profile | None:
    """The profile of a device, by its catalogue name; None if there is none.

    Raises:
        InputFileError: the file is not TOML, or too large.
        FieldError: a field is unknown, missing or not allowed.

    >>> load_profile("no-such-device") is None
    True
    """
    if is_path(device):
        return None
    for root in search_roots():
        path = root / FOLDER / f"{device}.toml"
        if path.is_file():
            return read_profile(path)
    return None


def profile_names() -> list[str]:
    """Devices that have a profile, in order."""
    return sorted(named_files(FOLDER))


def read_profile(path: Path) -> Profile:
    """The profile of a file.

    Raises:
        InputFileError: the file cannot be read, is not TOML, or is too large.
        FieldError: a field is unknown, missing or not allowed.
    """
    given = read_text(path, MAX_BYTES, "a hardware file")
    found = compiled(given, *_code())
    return profile_from(parse_toml(given, str(path)), str(path)) if found is None else _profile_of(found)


def profile_from(table: Mapping[str, Any], where: str) -> Profile:
    """The profile of a parsed file.

    Raises:
        FieldError: a field is unknown, missing or not allowed.
    """
    return _profile_of(checked(table, _PROFILE, where))


def _profile_of(values: Mapping[str, Any]) -> Profile:
    """The profile of a checked file."""
    curves = tuple(Curve(**_paired(curve)) for curve in values.get("curves", ()))
    return Profile(device=values["device"], curves=curves)


def _paired(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a fit with its pairs as such."""
    ranges = {name: tuple(pair) for name, pair in values.get("ranges", {}).items()}
    return {**values, "band": tuple(values["band"]), "ranges": ranges}


def profile_documents() -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every profile of the catalogue, checked, with the texts that it follows from, for the build."""
    for path in sorted((CATALOGUE / FOLDER).glob("*.toml")):
        given = path.read_text(encoding="utf-8")
        yield (given, *_code()), checked(parse_toml(given, str(path)), _PROFILE, str(path))


def save_curves(device: str, curves: Iterable[Curve], folder: str | Path) -> Path:
    """Puts curves into the profile of a device; those of other family, dtype or timer stay.

    Args:
        device: catalogue name.
        curves: what to put.
        folder: folder of profiles.

    Returns:
        The file.

    Raises:
        UserError: the file that is there is no profile, or it cannot be written.
    """
    kept = {(c.family, c.dtype, c.timer): c for c in (*saved_curves(device, folder), *curves)}
    text = profile_toml(Profile(device=device, curves=tuple(kept[key] for key in sorted(kept))))
    path = Path(folder) / f"{device}.toml"
    write_whole(path, text, make_folder=True)
    return path


def saved_curves(device: str, folder: str | Path) -> tuple[Curve, ...]:
    """The curves that a folder of profiles has of a device; none where it has no file of it.

    Raises:
        UserError: the file that is there is no profile.
    """
    path = Path(folder) / f"{device}.toml"
    return read_profile(path).curves if path.is_file() else ()


def profile_toml(profile: Profile) -> str:
    """The text of a profile file; :func:`profile_from` reads it back."""
    parts = [f"device = {toml_text(profile.device)}"]
    for curve in profile.curves:
        lines = ["[[curves]]"]
        lines += [f"{name} = {toml_text(getattr(curve, name))}" for name in _TEXTS]
        lines += [f"points = {curve.points}"]
        lines += [f"{name} = {float(getattr(curve, name))!r}" for name in _NUMBERS]
        lines += [f"band = [{float(curve.band[0])!r}, {float(curve.band[1])!r}]"]
        lines += [] if curve.scatter is None else [f"scatter = {float(curve.scatter)!r}"]
        lines += ["[curves.coefficients]", *(f"{toml_key(k)} = {float(v)!r}" for k, v in curve.coefficients.items())]
        if curve.ranges:
            lines += ["[curves.ranges]"]
            lines += [f"{toml_key(k)} = [{float(a)!r}, {float(b)!r}]" for k, (a, b) in curve.ranges.items()]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def distance(one: Device, other: Device) -> float:
    r"""Distance between two architectures, from datasheets alone; 0 for equal ones.

    $$d = 3 [v \ne v'] + \sum_i w_i |\ln (x_i / x_i')|$$

    over work per byte of bandwidth, rate per multiprocessor, cache per multiprocessor, bandwidth, and single
    precision per watt (parts limited by power behave similarly), with $v$ the vendor; the logarithm
    of a figure that one of them lacks counts as 0.5.

    Source: choice of this program; the weights are not fitted.
    """
    first, second = _traits(one), _traits(other)
    total = 0.0 if one.vendor == other.vendor else 3.0
    for name, weight in (("intensity", 0.5), ("unit_rate", 1.0), ("cache", 0.5), ("bandwidth", 0.5), ("per_watt", 1.0)):
        a, b = first[name], second[name]
        total += weight * (abs(math.log(a / b)) if a and b else 0.5)
    return total


def nearest(device: Device, candidates: Iterable[Device]) -> list[Device]:
    """The candidates, the most similar first; the device itself is not among them."""
    return sorted((c for c in candidates if c.name != device.name), key=lambda c: (distance(device, c), c.name))


def _traits(device: Device) -> dict[str, float | None]:
    rates = device.matrix_flops_per_s
    peak = rates.get("bf16", rates.get("fp16", rates.get("fp32", 0.0)))
    units = device.sm_count
    return {
        "intensity": peak / device.memory_Bps if peak else None,
        "unit_rate": peak / units if peak and units else None,
        "cache": device.l2_bytes / units if device.l2_bytes and units else None,
        "bandwidth": device.memory_Bps,
        "per_watt": rates.get("fp32", 0.0) / device.power_W if device.power_W else None,
    }


def toml_key(key: str) -> str:
    """A key of TOML: bare where it may be, else quoted.

    >>> toml_key("l2_bytes"), toml_key("a.b")
    ('l2_bytes', '"a.b"')
    """
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else toml_text(key)


def toml_text(text: str) -> str:
    """A basic string of TOML.

    Source: TOML 1.0, section String: a quote, a backslash and control characters are escaped.
    """
    return '"' + "".join(_escaped(c) for c in text) + '"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    return f"\\u{ord(character):04x}" if ord(character) < 32 or ord(character) == 127 else character


FABRIC_FOLDER: Final = "fabrics"
CODE: Final = (Path(__file__), Path(__file__).parents[1] / "schema.py")
"""Sources of checked profiles and fabrics in addition to their files: checks."""
Value = float | tuple[float, ...]
#: Coefficients that are numbers for each protocol.
_TRIPLES: Final = (
    "start_s",
    "hop_s",
    "direct_start_s",
    "direct_hop_s",
    "direct_share",
    "direct_pair_Bps",
    "outer_start_s",
    "outer_hop_s",
    "outer_Bps",
    "tree_hop_s",
)
_POSITIVE: Final = ("nics", "dispatch_Bps", "combine_Bps", "dispatch_message_Bps", "combine_message_Bps")
#: Coefficients that no formula can do without: of collectives, and of each direction of the exchange of experts.
_OF_FABRIC: Final = ("start_s", "hop_s", "Bps")
_OF_EXCHANGE: Final = ("start_s", "expert_s", "Bps", "message_s", "message_Bps")


def _whole(coefficients: Any) -> None:
    """Refuses a table without what a formula must have: that of collectives, or that of the exchange of experts."""
    ways = {name.partition("_")[0] for name in coefficients} & {"dispatch", "combine"}
    needed = [f"{way}_{name}" for way in sorted(ways) for name in _OF_EXCHANGE] or _OF_FABRIC
    for name in ("domain", *needed):
        if name not in coefficients:
            raise FieldError("", name, "is missing")


_COEFFICIENTS: Final = Table(
    rows={
        "trees": flag,
        "domain": Field(low=1, high=1e9, whole=True, example="8"),
        "links_by_group": Each(row=number),
        "Bps": Each(row=above(0), least=3, most=3, called="three numbers"),
        **dict.fromkeys(_TRIPLES, Each(row=number, least=3, most=3, called="three numbers")),
        **dict.fromkeys(_POSITIVE, as_given(above(0))),
    },
    named=as_given(number),
    also=_whole,
)
_FABRIC: Final = Table(
    rows={
        **_FITTED,
        **dict.fromkeys(("name", "device", "library"), letters(4096)),
        "sources": Each(row=text()),
        "link_Bps": above(0),
        "nic_Bps": number,
        "coefficients": _COEFFICIENTS,
    },
    required=("name", "device", "library", "link_Bps", "coefficients", *_FITTED.keys() - {"ranges", "kind"}),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricProfile(Fitted):
    """Coefficients of the collectives of one machine under one library; ranges are of `bytes` and `ranks`."""

    name: str
    device: str
    """Catalogue name; for a device that is not in the catalogue, its name in the measurements."""
    library: str
    """Library of the collectives: ``nccl``, ``nccl-kernel`` (by a profiler), ``xla``, ``custom-graph``, ..."""
    sources: tuple[str, ...] = ()
    """Measurement sources that it was fitted to."""
    link_Bps: float
    """Datasheet bandwidth of a device inside its domain, one direction."""
    nic_Bps: float = 0.0
    """Datasheet bandwidth of one NIC (or host bridge) of a domain, one direction; 0: not measured."""
    coefficients: Mapping[str, Value]
    """Fields of :class:`steptime.cost.collective_algorithms.Fabric`, in SI units."""


def load_fabric_profiles() -> tuple[FabricProfile, ...]:
    """All profiles in ``fabrics`` of the search path, in the order of their names.

    >>> [profile.device for profile in load_fabric_profiles() if profile.name == "h100-sxm-nccl"]
    ['h100-sxm']
    """
    files = named_files(FABRIC_FOLDER)
    texts = {str(files[name]): read_text(files[name], MAX_BYTES, "a hardware file") for name in sorted(files)}
    found = compiled(*texts.values(), *_code()) if texts else None
    if found is None:
        found = [checked(parse_toml(text, where), _FABRIC, where) for where, text in texts.items()]
    return tuple(map(_fabric_of, found))


def fabric_documents() -> Iterator[tuple[tuple[str, ...], Any]]:
    """All fabrics of the catalogue as one document, checked, with the texts that it follows from, for the build."""
    paths = sorted((CATALOGUE / FABRIC_FOLDER).glob("*.toml"), key=lambda path: path.stem)
    texts = tuple(path.read_text(encoding="utf-8") for path in paths)
    pairs = zip(paths, texts, strict=True)
    yield (*texts, *_code()), [checked(parse_toml(text, str(path)), _FABRIC, str(path)) for path, text in pairs]


@cache
def _code() -> tuple[str, ...]:
    return tuple(path.read_text(encoding="utf-8") for path in CODE)


def _fabric_of(values: Mapping[str, Any]) -> FabricProfile:
    """The fabric of a checked file."""
    numbers = {name: tuple(one) if isinstance(one, list) else one for name, one in values["coefficients"].items()}
    return FabricProfile(**{**_paired(values), "sources": tuple(values.get("sources", ())), "coefficients": numbers})


def read_fabric_profile(path: Path) -> FabricProfile:
    """The profile in a file.

    Raises:
        InputFileError: the file cannot be read or is not TOML.
        FieldError: a field is missing, unknown or not allowed.
    """
    return _fabric_of(checked(read_toml(path), _FABRIC, str(path)))


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
