"""Reads TOML files into the records of :mod:`steptime.hardware.records`.

A file becomes a :class:`Layer` (numbers in SI, each with its source); layers are stacked, the base of a file
below the file itself and the defaults at the bottom, and the stack becomes a record.

The fields of a hardware file: TOML key, record field, unit and the range that is not absurd, as rows of
:mod:`steptime.schema`. The catalogue is checked when the package is built.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from steptime.errors import FieldError, InputFileError, shown
from steptime.hardware.records import MAKERS, Cluster, Device, Kind, Level, Profile, Source
from steptime.hardware.search_path import CATALOGUE
from steptime.hardware.topology import KINDS, LARGEST, MOST_DIMS, PLACEMENTS
from steptime.schema import Each, Field, Row, Table, checked, flag, text
from steptime.store.compiled import compiled
from steptime.store.files import parse_toml, read_text


def _share(record: str) -> Field:
    return Field(record=record, low=1e-4, high=1.0, example="0.7")


#: Keys of a device file (apart from the tables ``matrix`` and ``vector``).
DEVICE: Final[Mapping[str, Field]] = {
    "memory": Field(record="memory_bytes", dimension="bytes", low=1e6, high=1e15, example="80 GB"),
    "memory_bandwidth": Field(record="memory_Bps", dimension="Bps", low=1e6, high=1e17, example="3.35 TB/s"),
    "l2": Field(record="l2_bytes", dimension="bytes", low=1e3, high=1e13, required=False, example="50 MiB"),
    "sm_count": Field(record="sm_count", low=1, high=1e6, whole=True, required=False, example="132"),
    "clock": Field(record="clock_Hz", dimension="Hz", low=1e6, high=1e12, required=False, example="1830 MHz"),
    "power": Field(record="power_W", dimension="W", low=0.01, high=1e6, required=False, example="700 W"),
    "idle_power": Field(record="idle_W", dimension="W", low=0.0, high=1e6, required=False, example="80 W"),
    "host_bandwidth": Field(record="host_link_Bps", dimension="Bps", low=1e6, high=1e15, example="64 GB/s"),
    "host_efficiency": _share("host_efficiency"),
    "devices_per_cpu": Field(record="devices_per_cpu", low=1, high=64, whole=True, required=False, example="2"),
    "matrix_efficiency": _share("matrix_efficiency"),
    "vector_efficiency": _share("vector_efficiency"),
    "memory_efficiency": _share("memory_efficiency"),
    "issue": Field(record="issue_s", dimension="s", low=0.0, high=1.0, required=False, example="20 us"),
    "kernel_latency": Field(record="kernel_latency_s", dimension="s", low=0.0, high=1.0, example="4.5 us"),
}

#: A peak rate in ``[matrix]`` or ``[vector]``.
RATE: Final = Field(record="", dimension="flops_per_s", low=1e6, high=1e20, example="989.4 TFLOP/s")

#: Table of a device file -> (record field, dtypes that it may hold).
RATES: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "matrix": ("matrix_flops_per_s", ("fp32", "tf32", "fp16", "bf16", "fp8", "int8", "fp4")),
    "vector": ("vector_flops_per_s", ("fp32", "fp16", "bf16")),
}

#: Keys of a link file; a level may override them.
LINK: Final[Mapping[str, Field]] = {
    "bandwidth": Field(record="link_Bps", dimension="Bps", low=1e3, high=1e16, example="450 GB/s"),
    "efficiency": _share("efficiency"),
    "latency": Field(record="latency_s", dimension="s", low=0.0, high=1.0, example="2.5 us"),
}

#: Keys of one level of a cluster.
LEVEL: Final[Mapping[str, Field]] = {
    "devices": Field(record="devices", low=1, high=1e8, whole=True, required=False, example="8"),
    "links_per_device": Field(record="links_per_device", low=1e-4, high=1e4, required=False, example="0.5"),
    "oversubscription": Field(record="oversubscription", low=1.0, high=1e4, required=False, example="2"),
    **LINK,
}


_ORIGIN: Final[Mapping[str, Row]] = {"source": text(), "kind": text(*(str(kind) for kind in Kind))}


def _file(numbers: Mapping[str, Row], *texts: str, fields: Iterable[str] = (), **more: Row) -> Table:
    """Rows of a table with numbers, texts, and where they are from, for all of it and for single fields."""
    entry = Table(rows={"fields": Each(row=text(*numbers, *fields)), **_ORIGIN}, required=("fields",))
    return Table(rows={**dict.fromkeys(texts, text()), **numbers, **more, **_ORIGIN, "sources": Each(row=entry)})


_RATES: Final = {table: Table(rows=dict.fromkeys(dtypes, RATE)) for table, (_, dtypes) in RATES.items()}
_DEVICE: Final = replace(
    _file(
        DEVICE,
        *("base", "name", "title", "vendor", "architecture", "notes", "cluster", "curves"),
        fields=(*RATES, *(f"{table}.{dtype}" for table, (_, dtypes) in RATES.items() for dtype in dtypes)),
        **_RATES,
    ),
    short="base",
)
_LINK: Final = _file(LINK, "base", "title", "notes")
_SIZE: Final = Field(low=1, high=LARGEST, whole=True, example="8")
_TOPOLOGY: Final = Table(
    rows={
        **dict.fromkeys(("notes", "source"), text()),
        "kind": text(*KINDS),
        "shape": Each(row=_SIZE, least=1, most=MOST_DIMS, called=f"a list of 1 to {MOST_DIMS} sizes, as [4, 4, 4]"),
        **dict.fromkeys(("rails", "groups", "pool", "wraps"), _SIZE),
        "forwarding": flag,
        "placement": text(*PLACEMENTS),
    },
    required=("kind",),
)
_CLUSTER: Final = Table(
    rows={
        **dict.fromkeys(("base", "name", "title", "notes"), text()),
        "device": _DEVICE,
        "levels": Table(named=_file(LEVEL, "link", "notes")),
        "topology": _TOPOLOGY,
        **_ORIGIN,
    },
)
FILES: Final[Mapping[str, Table]] = {
    "device": replace(_DEVICE, short=""),
    "link": _LINK,
    "cluster": _CLUSTER,
    "defaults": Table(rows={"device": replace(_DEVICE, short=""), "link": _LINK}),
}
"""Kind of file -> its rows."""
MODEL_KEYS: Final = {"layers", "hidden", "heads"}
"""Keys that every model file has."""
MAX_BYTES: Final = 2**20
"""Larger files are refused unread."""
CODE: Final = (Path(__file__), Path(__file__).with_name("topology.py"), Path(__file__).parents[1] / "schema.py")
"""Sources of checked files of the catalogue in addition to their text: rows, checks."""
Tables = Mapping[str, Any]


def check(raw: object, kind: str, where: str) -> dict[str, Any]:
    """The values of a parsed file, numbers in SI.

    Raises:
        FieldError: it is not a well-formed ``kind`` ("device", "link", "cluster"): names the first wrong field; up to
            ten problems stand in the message.
    """
    if isinstance(raw, Mapping) and set(raw) >= MODEL_KEYS:
        raise FieldError(where, "layers", f"this file describes a model, not a {kind}", hint="give it as MODEL")
    found: dict[str, Any] = checked(raw, FILES[kind], where)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One parsed file."""

    path: Path
    table: Tables
    """Its values, numbers in SI."""
    trusted: bool
    """True if it belongs to the catalogue, whose files were checked when the package was built."""

    @property
    def where(self) -> str:
        """The path as errors show it."""
        return str(self.path)


TUNED: Final = ("efficiency", "latency")
"""Numbers of a level that say how well its links work."""
CLOCK: Final = "clock"
LIKE: Final = "like"
"""Key of a layer, in no file: name of the catalogue's file that the layer was read from."""
UNLIKE: Final = "unlike"
"""Key of a level of the catalogue with an efficiency or latency of its own, to which no fit of other links belongs."""


#: Numbers that no measured time depends on: they may be changed over a measured machine.
NO_RATES: Final = frozenset(["memory", "power"])
#: Relative difference of numbers that a file gives again.
ROUNDING: Final = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Numbers by TOML key (``memory``, ``matrix.bf16``), each with its source, and texts."""

    numbers: Mapping[str, float] = field(default_factory=dict)
    sources: Mapping[str, Source] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    catalogue: Mapping[str, float] = field(default_factory=dict)
    """Numbers that the catalogue has for devices or links of this kind, by the same keys."""
    measured: Mapping[str, float] = field(default_factory=dict)
    """Numbers with which the collectives of a machine were measured, by the same keys."""
    stated: frozenset[str] = frozenset()
    """Keys of the numbers that a user's file gives."""
    without_curves: bool = False
    """True if numbers of a machine with measured curves were changed."""

    def over(self, below: Layer) -> Layer:
        """This layer's entries, and those of ``below`` where it has none.

        Curves belong to a machine as it was measured: any changed number except :data:`NO_RATES` drops them.
        """
        other = any(key not in NO_RATES and not self._as_below(key, below) for key in self.numbers)
        drops = other and "curves" in below.texts
        kept = {key: text for key, text in below.texts.items() if key != "curves" or not drops}
        return Layer(
            numbers={**below.numbers, **self.numbers},
            sources={**below.sources, **self.sources},
            texts={**kept, **self.texts},
            catalogue={**below.catalogue, **self.catalogue},
            measured={**below.measured, **self.measured},
            stated=self.stated | (below.stated - self.numbers.keys()),
            without_curves=self.without_curves or below.without_curves or drops,
        )

    def _as_below(self, key: str, below: Layer) -> bool:
        return key in below.numbers and math.isclose(self.numbers[key], below.numbers[key], rel_tol=ROUNDING)


def of_catalogue(own: Layer) -> Layer:
    """A layer of the catalogue: its numbers count as no user's, and given numbers are compared with them."""
    return replace(own, catalogue=own.numbers, stated=frozenset())


def read(path: Path, kind: str, *, trusted: bool = False) -> Document:
    """Parse and check a file; one of the catalogue was checked when the package was built.

    Args:
        path: the file.
        kind: ``"device"``, ``"link"``, ``"cluster"`` or ``"defaults"``.
        trusted: the file belongs to the catalogue.

    Raises:
        InputFileError: it is missing, no regular file, unreadable, too large, not UTF-8 or not TOML.
        FieldError: it has an unknown key or a value that is not allowed.
    """
    given = read_text(path, MAX_BYTES, "a hardware file")
    found = compiled(given, kind, *_code()) if trusted else None
    if found is None:
        table = parse_toml(given, str(path))
        _refuse_other_kind(table, kind, str(path))
        found = check(table, kind, str(path))
    return Document(path=path, table=found, trusted=trusted)


@cache
def _code() -> tuple[str, ...]:
    return tuple(path.read_text(encoding="utf-8") for path in CODE)


def hardware_documents() -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every device, link and cluster of the catalogue, checked, with the texts that it follows from, for the build."""
    folders = {"device": "devices/*", "link": "links/*", "cluster": "clusters/*", "defaults": "defaults"}
    for kind, pattern in folders.items():
        for path in sorted(CATALOGUE.glob(f"{pattern}.toml")):
            given = path.read_text(encoding="utf-8")
            yield (given, kind, *_code()), check(parse_toml(given, str(path)), kind, str(path))


def read_toml(path: Path) -> Tables:
    """The tables of a TOML file about hardware.

    Raises:
        InputFileError: it is missing, no regular file, unreadable, too large, not UTF-8 or not TOML.
    """
    return parse_toml(read_text(path, MAX_BYTES, "a hardware file"), str(path))


def _refuse_other_kind(table: Tables, kind: str, where: str) -> None:
    if kind == "cluster" and "levels" not in table and {"memory", "memory_bandwidth", "matrix"} & table.keys():
        raise InputFileError(
            where,
            "describes a device, a cluster is needed",
            hint='write a cluster file with base = "..." or [levels.NAME] tables, and device = "<this file>"',
        )
    if kind == "cluster" and "groups" in table:
        raise InputFileError(
            where, "describes several groups of devices, one cluster is needed", hint="steptime mixed plans over groups"
        )
    if kind == "device" and "levels" in table:
        raise InputFileError(
            where,
            "describes a cluster, a device is needed",
            hint=f"steptime clusters {where} shows it, its device too; elsewhere name the device, or write a file with "
            "the fields of its [device] table alone",
        )


def layer(table: Tables, kind: str, default: Source) -> Layer:
    """The layer of one checked table.

    Args:
        table: a device, link or level table.
        kind: ``"device"``, ``"link"`` or ``"level"``.
        default: source of the numbers for which the table itself names none.
    """
    fields = {"device": DEVICE, "link": LINK, "level": LEVEL}[kind]
    found = {key: table[key] for key in fields if key in table}
    if kind == "device":
        found |= {f"{name}.{dtype}": given for name in RATES for dtype, given in table.get(name, {}).items()}
    own = origin(table, default)
    entries = [(set(entry["fields"]), origin(entry, own)) for entry in table.get("sources", ())]
    return Layer(
        stated=frozenset(found),
        numbers=found,
        sources={key: _source_of(key, entries, own) for key in found},
        texts={key: given for key, given in table.items() if isinstance(given, str) and key not in fields},
    )


def companion(given: str, file: Path, where: str, field: str) -> Path:
    """The file of curves that a hardware file names, as a full path: it lies in the same folder or below.

    Args:
        given: path as the file has it.
        file: the hardware file.
        where: the hardware file, as errors name it.
        field: key that has the path.

    Raises:
        FieldError: it is not a relative path to a TOML file, leads out of the folder, or the file does not exist.
    """
    folder = file.parent.resolve()
    hint = 'for example curves = "machine.curves.toml"'
    try:
        path = (folder / given).resolve()
        missing = not path.exists()
    except (OSError, ValueError, RuntimeError):
        raise FieldError(where, field, f"{shown(given)} is not a path", hint=hint) from None
    if not given.endswith(".toml") or Path(given).is_absolute():
        raise FieldError(where, field, f"{shown(given)} is not a relative path to a .toml file", hint=hint)
    if not path.is_relative_to(folder):
        raise FieldError(where, field, f"{shown(given)} leads out of the folder of this file", hint=hint)
    if missing:
        raise FieldError(
            where,
            field,
            f"there is no file {shown(given)} next to this one",
            hint="keep both files together; without this line the estimate uses the numbers of this file alone",
        )
    return path


def origin(table: Tables, default: Source) -> Source:
    """The ``source`` and ``kind`` of a table, each from ``default`` where it is left out.

    A table that names a source of its own but no kind does not inherit a strong kind: it is assumed.
    """
    kind = table.get("kind", Kind.ASSUMED if "source" in table else default.kind)
    return Source(text=table.get("source", default.text), kind=Kind(kind))


def _source_of(key: str, entries: Iterable[tuple[set[str], Source]], default: Source) -> Source:
    """The entry that lists the key, else the one that lists its table, else the default."""
    table = key.partition(".")[0]
    broad = default
    for keys, source in entries:
        if key in keys:
            return source
        if table in keys:
            broad = source
    return broad


def device_record(stack: Layer, name: str, *, where: str, prefix: str = "", curves: Profile | None = None) -> Device:
    """The device that a complete stack of layers describes.

    Args:
        stack: numbers and texts of all layers.
        name: of the device.
        where: file that errors name.
        prefix: of the keys in errors.
        curves: fitted curves; None: none.

    Raises:
        FieldError: a number that has no default is missing.
    """
    _require(stack, DEVICE, where, prefix)
    stack = _clocked(stack)
    rates: dict[str, Any] = {}
    for table, (record, dtypes) in RATES.items():
        rates[record] = {d: stack.numbers[f"{table}.{d}"] for d in dtypes if f"{table}.{d}" in stack.numbers}
        if not rates[record]:
            example = f'[{table}]\n  {dtypes[-1]} = "{RATE.example}"'
            raise FieldError(where, f"{prefix}{table}", "is missing or empty", hint=f"for example {example}")
    numbers: dict[str, Any] = {spec.record: stack.numbers.get(key) for key, spec in DEVICE.items()}
    return Device(
        name=name,
        title=stack.texts.get("title", name),
        vendor=_maker(stack.texts.get("vendor", "unknown")),
        architecture=stack.texts.get("architecture"),
        like=stack.texts.get(LIKE),
        curves=curves,
        without_curves=stack.without_curves and curves is None,
        sources={_record_key(key, DEVICE): source for key, source in stack.sources.items()},
        catalogue={_record_key(key, DEVICE): number for key, number in stack.catalogue.items()},
        **rates,
        **numbers,
    )


def _maker(given: str) -> str:
    """A vendor in the letters of the catalogue, whichever a file has."""
    return next((maker for maker in MAKERS if maker.lower() == given.strip().lower()), given)


def _clocked(stack: Layer) -> Layer:
    """Peak rates follow a given clock, except given rates; memory has a clock of its own."""
    known = stack.catalogue.get(CLOCK)
    if known is None or CLOCK not in stack.stated or stack.numbers[CLOCK] == known:
        return stack
    factor = stack.numbers[CLOCK] / known
    by = f"times {factor:.4g}, the given clock over the catalogue's"
    follow = [key for key in stack.numbers if key.partition(".")[0] in RATES and key not in stack.stated]
    return replace(
        stack,
        numbers={**stack.numbers, **{key: stack.numbers[key] * factor for key in follow}},
        sources={**stack.sources, **{key: Source(text=f"{stack.sources[key].text}; {by}", kind=Kind.ASSUMED)
                                     for key in follow}},
    )  # fmt: skip


def _record_key(key: str, fields: Mapping[str, Field]) -> str:
    table, _, dtype = key.partition(".")
    return f"{RATES[table][0]}.{dtype}" if dtype else fields[key].record


def _require(stack: Layer, fields: Mapping[str, Field], where: str, prefix: str) -> None:
    missing = [key for key, spec in fields.items() if spec.required and key not in stack.numbers]
    if missing:
        others = "".join(f"; so is {prefix}{key}" for key in missing[1:])
        example = fields[missing[0]].example
        raise FieldError(
            where, prefix + missing[0], f"is missing{others}", hint=f'for example {missing[0]} = "{example}"'
        )


def level_record(name: str, stack: Layer, *, where: str, inherited: Iterable[str] = ()) -> Level:
    """The level of a fabric that a complete stack of layers describes.

    Args:
        name: of the level.
        stack: numbers and texts of all layers.
        where: file that errors name.
        inherited: names of the levels that the base file has, for errors.

    Raises:
        FieldError: neither the level nor its link has a bandwidth.
    """
    if "bandwidth" not in stack.numbers:
        others = ", ".join(inherited)
        named = f"the base has {others}: to change one of these, write its name; a new one needs a link\n  "
        hint = f'{named if others else ""}for example link = "infiniband-ndr"'
        raise FieldError(where, f"levels.{name}", "has no link and no bandwidth", hint=hint)
    numbers: dict[str, Any] = {LEVEL[key].record: value for key, value in stack.numbers.items()}
    sources = {LEVEL[key].record: source for key, source in stack.sources.items()}
    own = UNLIKE in stack.texts or ("bandwidth" not in stack.catalogue and stack.stated.issuperset(TUNED))
    known = {} if own else {LEVEL[key].record: value for key, value in stack.catalogue.items()}
    measured = {LEVEL[key].record: value for key, value in stack.measured.items()}
    return Level(**{"name": name, "devices": None, **numbers}, sources=sources, catalogue=known, measured=measured)


def cluster_record(
    name: str, title: str, device: Device, levels: Iterable[Level], source: Source, where: str
) -> Cluster:
    """The cluster of these levels, ordered innermost first by their number of devices.

    Args:
        name: of the cluster.
        title: in words.
        device: that it is made of.
        levels: of its fabric, in any order.
        source: of the file.
        where: file that errors name.

    Raises:
        FieldError: no level, two levels of one size, or a size that the next smaller one does not divide.
    """
    ordered = sorted(levels, key=lambda level: float("inf") if level.devices is None else level.devices)
    if not ordered:
        raise FieldError(
            where, "levels", "is missing or empty", hint='for example [levels.nvlink] with link = "nvlink4"'
        )
    for inner, outer in pairwise(ordered):
        if inner.devices == outer.devices:
            size = "no limit of devices" if outer.devices is None else f"{outer.devices} devices"
            both = f"levels {inner.name!r} and {outer.name!r} both have {size}"
            raise FieldError(
                where, f"levels.{outer.name}.devices", both, hint="only the outermost may leave devices out"
            )
        if outer.devices is not None and inner.devices is not None and outer.devices % inner.devices:
            problem = f"{outer.devices} is not a multiple of the {inner.devices} devices of level {inner.name!r}"
            raise FieldError(where, f"levels.{outer.name}.devices", problem)
    return Cluster(name=name, title=title, device=device, levels=tuple(ordered), sources={"levels": source})
