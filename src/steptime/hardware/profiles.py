"""Profiles as TOML files: one file per device, a table per curve.

A profile is looked up like a device, in the folder ``profiles`` of the same directories. Writers of several
families share a file: :func:`save_curves` replaces the curves that it is given and keeps all others.

How collectives really run on a fabric: fitted coefficients of one machine and one library, with provenance.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Final

from steptime.errors import FieldError
from steptime.hardware.load import MAX_BYTES, read_toml
from steptime.hardware.records import Curve, Device, Fitted, Profile
from steptime.hardware.search_path import (
    CATALOGUE,
    band_in,
    count_in,
    is_path,
    named_files,
    number,
    one_of,
    pair,
    refuse_unknown,
    search_roots,
    table_in,
    text_in,
)
from steptime.store.compiled import compiled
from steptime.store.files import parse_toml, read_text, write_whole

FOLDER: Final = "profiles"
TIMERS: Final = ("kernel", "eager")
KINDS: Final = ("fitted", "assumed", "measured")
_TEXTS: Final = ("family", "dtype", "timer", "source", "kind")
_NUMBERS: Final = ("median_ape", "mean_ape", "bias")
_KEYS: Final = frozenset((*_TEXTS, *_NUMBERS, "points", "band", "scatter", "coefficients", "ranges"))


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
    where = str(path)
    return profile_from(read_toml(path), where)


def profile_from(table: Mapping[str, Any], where: str) -> Profile:
    """The profile of a parsed file.

    Raises:
        FieldError: a field is unknown, missing or not allowed.
    """
    refuse_unknown(table, ("device", "curves"), where, "")
    device = text_in(table, "device", where, "")
    curves = table.get("curves", [])
    if not isinstance(curves, list) or not all(isinstance(c, dict) for c in curves):
        raise FieldError(where, "curves", "must be tables, written [[curves]]")
    read = tuple(_curve(curve, where, f"curves[{i}].") for i, curve in enumerate(curves))
    seen: set[tuple[str, str, str]] = set()
    for i, curve in enumerate(read):
        if _key(curve) in seen:
            raise FieldError(where, f"curves[{i}]", f"there are two curves of {' '.join(_key(curve))}")
        seen.add(_key(curve))
    return Profile(device=device, curves=read)


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
    kept = {_key(c): c for c in (*saved_curves(device, folder), *curves)}
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


def _key(curve: Curve) -> tuple[str, str, str]:
    return curve.family, curve.dtype, curve.timer


def _curve(table: Mapping[str, Any], where: str, at: str) -> Curve:
    refuse_unknown(table, _KEYS, where, at)
    coefficients = table_in(table, "coefficients", where, at)
    return Curve(
        family=text_in(table, "family", where, at),
        dtype=text_in(table, "dtype", where, at),
        timer=one_of(table, "timer", TIMERS, where, at),
        coefficients={k: number(v, where, f"{at}coefficients.{k}") for k, v in coefficients.items()},
        scatter=number(table["scatter"], where, f"{at}scatter") if "scatter" in table else None,
        **fitted_in(table, where, at),
    )


def fitted_in(table: Mapping[str, Any], where: str, at: str) -> dict[str, Any]:
    """The fields of :class:`~steptime.hardware.records.Fitted` in a table.

    Raises:
        FieldError: one is missing or not allowed.
    """
    ranges = table_in(table, "ranges", where, at) if "ranges" in table else {}
    return {
        "points": count_in(table, "points", where, at),
        "ranges": {k: pair(v, where, f"{at}ranges.{k}") for k, v in ranges.items()},
        **{name: number(table.get(name), where, at + name) for name in _NUMBERS},
        "band": band_in(table, where, at),
        "source": text_in(table, "source", where, at),
        "kind": one_of(table, "kind", KINDS, where, at),
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
CODE: Final = (Path(__file__), Path(__file__).with_name("search_path.py"))
"""What fabrics follow from in addition to their files: checks."""
Value = float | tuple[float, ...]
#: Coefficients that are lists (:class:`steptime.cost.collective_algorithms.Fabric`); the rest are single numbers.
_LISTS: Final = ("links_by_group",)
_TRIPLES: Final = (
    "Bps",
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
    """Fields of :class:`steptime.cost.collective_algorithms.Fabric`, in SI units."""


def load_fabric_profiles() -> tuple[FabricProfile, ...]:
    """All profiles in ``fabrics`` of the search path, in the order of their names.

    >>> [profile.device for profile in load_fabric_profiles() if profile.name == "h100-sxm-nccl"]
    ['h100-sxm']
    """
    files = named_files(FABRIC_FOLDER)
    texts = {str(files[name]): read_text(files[name], MAX_BYTES, "a hardware file") for name in sorted(files)}
    checked = compiled(*texts.values(), *_code()) if texts else None
    if checked is not None:
        return tuple(map(_rebuilt, checked))
    return tuple(_profile_in(parse_toml(text, where), where) for where, text in texts.items())


def fabric_documents() -> Iterator[tuple[tuple[str, ...], Any]]:
    """All fabrics of the catalogue as one document, checked, with the texts that it follows from, for the build."""
    paths = sorted((CATALOGUE / FABRIC_FOLDER).glob("*.toml"), key=lambda path: path.stem)
    texts = tuple(path.read_text(encoding="utf-8") for path in paths)
    yield (*texts, *_code()), json.loads(json.dumps([asdict(read_fabric_profile(path)) for path in paths]))


@cache
def _code() -> tuple[str, ...]:
    return tuple(path.read_text(encoding="utf-8") for path in CODE)


def _rebuilt(values: Mapping[str, Any]) -> FabricProfile:
    pairs = {name: tuple(pair) for name, pair in values["ranges"].items()}
    numbers = {name: tuple(one) if isinstance(one, list) else one for name, one in values["coefficients"].items()}
    lists = {"sources": tuple(values["sources"]), "band": tuple(values["band"])}
    return FabricProfile(**{**values, **lists, "ranges": pairs, "coefficients": numbers})


def read_fabric_profile(path: Path) -> FabricProfile:
    """The profile in a file.

    Raises:
        InputFileError: the file cannot be read or is not TOML.
        FieldError: a field is missing, unknown or not allowed.
    """
    return _profile_in(read_toml(path), str(path))


def _profile_in(table: Mapping[str, Any], where: str) -> FabricProfile:
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
