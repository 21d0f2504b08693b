"""The file of fitted frameworks: where it is looked for, and what it has to hold.

``frameworks.toml`` is looked for in the user's directories (:mod:`steptime.hardware.search_path`); without one there,
it is that of the package. One file holds all frameworks, since
their doubts and bands come from one fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from steptime.errors import FieldError, InputFileError
from steptime.hardware.checks import refuse_unknown
from steptime.hardware.load import read_toml
from steptime.hardware.search_path import user_roots
from steptime.plan.framework import BUSY, IDEAL, PARAMETERS, SHARES

NAME: Final = "frameworks.toml"
PACKAGED: Final = Path(__file__).with_name(NAME)
NOTHING: Final = 1e-12
"""Stands for no seconds, no share and no doubt, whose logarithm must be finite."""
MANY: Final = 1e9
"""Stands for sources enough that their number says nothing."""
LARGEST: Final = 1e9
"""Largest parameter, count of sources and end of a band: above what any fit gives, below what formulas overflow at."""
LARGEST_DOUBT: Final = 10.0
"""Largest standard deviation of a logarithm: a factor of twenty thousand."""

KEYS: Final[Mapping[tuple[str, ...], tuple[str, ...]]] = {
    (): ("provenance", "common", "doubts", "generic", "band", "framework", "device"),
    ("generic",): ("slower",),
    ("common",): PARAMETERS,
    ("doubts",): PARAMETERS,
    ("band",): ("named", "generic", "model"),
    ("band", "named"): ("low", "high"),
    ("band", "generic"): ("low", "high"),
    ("band", "model"): ("noise", "experts", "unknown_device", "unmeasured_device", "unknown_sources"),
}
"""Path of a table -> its keys; those of the provenance are free."""
FRAMEWORK_KEYS: Final = (*PARAMETERS, "runs", "doubts")
DEVICE_KEYS: Final = (*BUSY, "doubt", "sources")


def framework_path() -> Path:
    """The file in use."""
    return next((path for root in user_roots() if (path := root / NAME).is_file()), PACKAGED)


def framework_table() -> Mapping[str, Any]:
    """The file in use, as it is.

    Raises:
        InputFileError: it cannot be read or is not TOML.
        FieldError: a value is missing or not allowed.
    """
    path = framework_path()
    try:
        return _tables(path, path.stat().st_mtime_ns)
    except OSError as error:
        raise InputFileError(str(path), f"cannot be read: {error.strerror}") from None


@lru_cache(maxsize=8)
def _tables(path: Path, changed: int) -> Mapping[str, Any]:
    """The tables of a file as it was when it was ``changed``."""
    tables = completed({"framework": {}, "device": {}, "generic": {"slower": 1.0}, **read_toml(path)})
    check_tables(tables, str(path))
    return tables


def completed(tables: Mapping[str, Any]) -> Mapping[str, Any]:
    """A file of an older steptime with the parameters that came later: without effect, as when it was fitted."""
    frameworks = tables["framework"].values() if isinstance(tables["framework"], dict) else ()
    parts = [part for part in (tables.get("common"), tables.get("doubts"), *frameworks) if isinstance(part, dict)]
    later = [name for name in PARAMETERS if not any(name in part for part in parts)]
    values = {name: float(getattr(IDEAL, name)) or NOTHING for name in later}
    doubts = dict.fromkeys(later, NOTHING)
    for part in parts:
        part |= doubts if part is tables.get("doubts") else values
        if isinstance(part.get("doubts"), dict):
            part["doubts"] |= doubts
    devices = tables["device"].values() if isinstance(tables["device"], dict) else ()
    for part in (part for part in devices if isinstance(part, dict)):
        part |= {name: 1.0 for name in BUSY if name in later}
        part.setdefault("sources", MANY)
    band = tables.get("band")
    model = band.get("model") if isinstance(band, dict) else None
    if isinstance(model, dict):
        model |= {"experts": NOTHING, "unknown_sources": MANY} | model
    return tables


def check_tables(tables: Mapping[str, Any], where: str) -> None:
    """Refuses a file that lacks something or holds what no fit gives.

    Raises:
        FieldError: names the file and the field.
    """
    _known_keys(tables, where)
    if not isinstance(_table(tables, "provenance", where).get("source"), str):
        raise FieldError(where, "provenance.source", "is missing or no text")
    _values(tables, "common", where)
    _positive(tables, "doubts", PARAMETERS, where, most=LARGEST_DOUBT)
    _positive(tables, "generic", ("slower",), where)
    _positive(
        tables, "band.model", ("noise", "experts", "unknown_device", "unmeasured_device"), where, most=LARGEST_DOUBT
    )
    _count(tables, "band.model", "unknown_sources", where)
    for title in ("named", "generic"):
        low, high = (_number(tables, f"band.{title}", end, where) for end in ("low", "high"))
        if low > high:
            raise FieldError(where, f"band.{title}", f"low is {low:g}, above high, {high:g}")
    for name in _table(tables, "framework", where):
        _values(tables["framework"], name, where, "framework.")
        _positive(tables["framework"][name], "doubts", PARAMETERS, where, f"framework.{name}.", LARGEST_DOUBT)
    for name in _table(tables, "device", where):
        _positive(tables["device"], name, BUSY, where, "device.")
        _positive(tables["device"], name, ("doubt",), where, "device.", LARGEST_DOUBT)
        _count(tables["device"], name, "sources", where, "device.")


def _known_keys(tables: Mapping[str, Any], where: str) -> None:
    """Refuses keys that nothing reads; what is no table is refused where it is read."""
    allowed = dict(KEYS)
    for name in _part(tables, ("framework",)):
        allowed |= {("framework", name): FRAMEWORK_KEYS, ("framework", name, "doubts"): PARAMETERS}
    allowed |= {("device", name): DEVICE_KEYS for name in _part(tables, ("device",))}
    for path, keys in allowed.items():
        refuse_unknown(_part(tables, path), keys, where, "".join(f"{name}." for name in path))


def _part(tables: Mapping[str, Any], path: tuple[str, ...]) -> Mapping[str, Any]:
    """The table at a path; an empty one where there is none."""
    found: Any = tables
    for name in path:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _values(tables: Mapping[str, Any], path: str, where: str, before: str = "") -> None:
    own = _positive(tables, path, PARAMETERS, where, before)
    for name in SHARES:
        if own[name] >= 1:
            raise FieldError(where, f"{before}{path}.{name}", f"{own[name]:g} is no share", hint="below 1")


def _positive(
    tables: Mapping[str, Any], path: str, names: tuple[str, ...], where: str, before: str = "", most: float = LARGEST
) -> dict[str, float]:
    found = {name: _number(tables, path, name, where, before) for name in names}
    for name, value in found.items():
        if not 0 < value <= most:
            problem = f"{value:g} is not positive" if value <= 0 else f"{value:g} is too large"
            raise FieldError(where, f"{before}{path}.{name}", problem, hint=f"at most {most:g}")
    return found


def _count(tables: Mapping[str, Any], path: str, name: str, where: str, before: str = "") -> None:
    value = _number(tables, path, name, where, before)
    if value < 0:
        raise FieldError(where, f"{before}{path}.{name}", f"{value:g} is negative")


def _number(tables: Mapping[str, Any], path: str, name: str, where: str, before: str = "") -> float:
    own = _table(tables, path, where, before)
    value = own.get(name)
    if (
        isinstance(value, bool) or not isinstance(value, (int, float)) or not -LARGEST <= value <= LARGEST
    ):  # nan as well
        problem = "is missing" if value is None else f"is not a finite number up to {LARGEST:g}"
        raise FieldError(where, f"{before}{path}.{name}", problem, hint="steptime calibrate frameworks writes the file")
    return float(value)


def _table(tables: Mapping[str, Any], path: str, where: str, before: str = "") -> Mapping[str, Any]:
    """A table; dots in ``path`` part the names of the package's own tables, names of users are one part."""
    found: Any = tables
    for part in path.split(".") if path.startswith("band.") else (path,):
        found = found.get(part) if isinstance(found, Mapping) else None
    if not isinstance(found, Mapping):
        raise FieldError(where, before + path, "is missing or no table",
                         hint="steptime calibrate frameworks writes the file")  # fmt: skip
    return found
