"""Devices and clusters by name or by file.

A name is looked up in the folders ``devices``, ``clusters`` and ``links`` of the directories of
:mod:`steptime.hardware.search_path`. What contains a path separator or ends in ``.toml`` is a path.

Names of devices as tables of measurements and drivers write them: words in any order, memory, form of the module.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final

from steptime.errors import FieldError, UnknownNameError
from steptime.hardware.load import (
    LIKE,
    TUNED,
    UNLIKE,
    Document,
    Layer,
    check,
    cluster_record,
    companion,
    device_record,
    layer,
    level_record,
    of_catalogue,
    origin,
    read,
    read_toml,
)
from steptime.hardware.profiles import read_profile
from steptime.hardware.records import Cluster, Device, Kind, Level, Profile, Source
from steptime.hardware.search_path import CATALOGUE, is_path, named_files
from steptime.hardware.topology import topology_of

MAKERS: Final = frozenset(
    {"nvidia", "tesla", "geforce", "quadro", "amd", "radeon", "instinct", "intel", "habana", "google", "cloud", "aws"}
)
"""Words before the name of a chip that do not distinguish chips."""
NOISE: Final = frozenset(
    {"gpu", "gpus", "accelerator", "card", "graphics", "module", "tensor", "core", "ac", "generation", "edition"}
)
"""Words after the name of a chip that do not distinguish chips."""
FORMS: Final = frozenset({"sxm", "pcie", "oam", "nvl", "nvl72", "nvl36"})
"""Forms of a module, which distinguish devices if the catalogue has several of one chip."""
RACKS: Final = frozenset({"nvl72", "nvl36"})
"""Forms that name the rack of a module, not the module itself."""
LONGEST: Final = 200
"""Largest number of letters of a name that are read."""
MEMORY_TOLERANCE: Final = 0.075
"""Relative difference up to which a memory matches a datasheet: GB or GiB, total or usable."""
_MEMORY: Final = re.compile(r"\b(\d{1,4}) ?gi?b?\b")
_BOUNDARY: Final = re.compile(r"^(rtx|gtx)(?=\d)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelling:
    """Facts that the name of a device gives."""

    words: frozenset[str]
    """Words that distinguish chips, without the form."""
    forms: frozenset[str]
    memory_gb: float | None
    """Memory in the name, in GB or GiB; None: the name has none."""


def spelling_of(name: str) -> Spelling:
    """Facts that the name of a device gives, in any order of its words.

    >>> found = spelling_of("NVIDIA A100-SXM4-80GB")
    >>> sorted(found.words), sorted(found.forms), found.memory_gb
    (['a100'], ['sxm'], 80.0)
    >>> sorted(spelling_of("rtx4090").words), spelling_of("NVIDIA H100 80GB HBM3").forms
    (['4090', 'rtx'], frozenset())
    """
    plain = re.sub(r"[\s_\-,()]+", " ", name.lower()[:LONGEST]).strip()
    memory = _MEMORY.search(plain)
    rest = _MEMORY.sub(" ", plain, count=1) if memory else plain
    words = {re.sub(r"^sxm\d$", "sxm", word) for word in _BOUNDARY.sub(r"\1 ", rest).split()}
    words = {word for word in words if not re.fullmatch(r"hbm\d\w?|gddr\d\w?|gen\d", word)} - MAKERS - NOISE
    return Spelling(
        words=frozenset(words - FORMS),
        forms=frozenset(words & FORMS) - RACKS,
        memory_gb=float(memory[1]) if memory else None,
    )


def is_memory(given_gb: float, memory_bytes: float) -> bool:
    """True if a given memory, in GB or GiB, matches the memory of a device (bytes).

    >>> is_memory(80, 80 * 2**30), is_memory(141, 141e9), is_memory(40, 80e9)
    (True, True, False)
    """
    return any(abs(given_gb * unit / memory_bytes - 1) <= MEMORY_TOLERANCE for unit in (1e9, 2.0**30))


NO_DEVICE: Final = "device not in the catalogue"
"""Remark on a row of measurements whose device :func:`device_named` does not find."""
_FOLDERS: Final = {"device": "devices", "cluster": "clusters", "link": "links"}


def load_device(name_or_path: str | Path) -> Device:
    """The device of a name, alias or file.

    Raises:
        UnknownNameError: the name is unknown; carries the nearest names.
        InputFileError: the file cannot be read or is not TOML.
        FieldError: a field of the file is unknown, missing or not allowed.

    >>> load_device("h100").matrix_flops_per_s["bf16"]
    989400000000000.0
    """
    return _device(_find(str(name_or_path), "device"))


def device_within(name_or_path: str | Path) -> Device:
    """The device of a name, alias or file; for the name or file of a cluster, the device that it is made of.

    Raises:
        UserError: as of :func:`load_device` and :func:`load_cluster`; an unknown name gets the nearest devices.

    >>> device_within("dgx-h100") == device_within("h100-sxm") == load_device("h100-sxm")
    True
    """
    given = str(name_or_path)
    if is_path(given):
        table = read_toml(Path(given).expanduser())
        cluster = not {"levels", "device"}.isdisjoint(table)
    else:
        cluster = _resolve(given, "device") is None and _resolve(given, "cluster") is not None
    return load_cluster(given).device if cluster else load_device(given)


def load_cluster(name_or_path: str | Path) -> Cluster:
    """The cluster of a name, alias or file; the name of a device stands for its common node.

    Raises:
        UnknownNameError: neither a cluster nor a device has the name.
        InputFileError: the file cannot be read or is not TOML.
        FieldError: a field of the file is unknown, missing or not allowed.

    >>> [(level.name, level.devices) for level in load_cluster("dgx-h100").levels]
    [('nvlink', 8), ('network', None)]
    >>> load_cluster("h100").name
    'dgx-h100'
    """
    given = str(name_or_path)
    if is_path(given) or _resolve(given, "cluster") is not None:
        return _cluster(_find(given, "cluster"))
    if _resolve(given, "device") is None:
        raise UnknownNameError("cluster", given, [*cluster_names(), *device_names()])
    return _node_of(_find(given, "device"))


def changed_cluster(base: str | Path, changes: Mapping[str, Any], where: str) -> Cluster:
    """A cluster with other numbers, as a file with that ``base`` and these tables would describe it.

    Args:
        base: name, alias or file of the cluster; a device stands for its common node.
        changes: tables ``device`` and ``levels`` of such a file, values with their units.
        where: what errors and sources name in place of the file.

    Raises:
        UserError: the base is unknown, or a change is not allowed.

    >>> changed_cluster("dgx-h100", {"levels": {"nvlink": {"devices": 4}}}, "an example").fast_domain
    4
    >>> changed_cluster("h100", {"levels": {"nvlink": {"devices": 4}}}, "an example").name
    'dgx-h100'
    """
    named = load_cluster(base)
    node = not is_path(str(base)) and _resolve(str(base), "cluster") is None  # a device stands for its common node
    table = {"base": named.name if node else str(base), **changes}
    changed = _cluster(Document(path=Path(where), table=check(table, "cluster", where), trusted=False))
    return replace(changed, name=named.name, title=named.title)


def device_names() -> list[str]:
    """Names that :func:`load_device` knows, without aliases, in order."""
    return sorted(_files("device"))


def cluster_names() -> list[str]:
    """Names that :func:`load_cluster` knows, without aliases and devices, in order."""
    return sorted(_files("cluster"))


def device_named(name: str) -> Device | None:
    """The device of the catalogue that a table of measurements or a driver names, None where there is none.

    A table cannot name files. Names that the catalogue does not have are read word by word: maker, memory and form of
    the module may stand anywhere. Another memory than the device's, a form that the catalogue lacks for a chip with
    other forms, or an unknown word (`Laptop`, `Max-Q`, `MIG`) makes it another device.

    >>> device_named("h100-sxm") == load_device("h100-sxm"), device_named("no-such-gpu"), device_named("A100/80GB")
    (True, None, None)
    >>> [device_named(name).name for name in ("NVIDIA H100 80GB HBM3", "NVIDIA A100 80GB PCIe", "Tesla V100-SXM2-16GB")]
    ['h100-sxm', 'a100-pcie-80gb', 'v100-sxm2-16gb']
    >>> device_named("NVIDIA GH200 SXM").name, device_named("H100 40GB"), device_named("RTX 4090 Laptop GPU")
    ('gh200-96gb', None, None)
    """
    if is_path(name):
        return None
    return load_device(name) if _resolve(name, "device") is not None else _spelled(spelling_of(name))


def _spelled(given: Spelling) -> Device | None:
    """The only device of the catalogue that fits a spelling; None if none or several fit."""
    if not given.words:
        return None
    of_chip = {
        name: own
        for name in (*_files("device"), *_aliases("device"))
        if (own := spelling_of(name)).words == given.words
    }
    forms = {form for own in of_chip.values() for form in own.forms}
    wanted = given.forms if forms else frozenset()  # a name may state any form of a chip that has one form only
    fitting = {name: own.memory_gb for name, own in of_chip.items() if own.forms == wanted}
    called = [load_device(name) for name, memory in fitting.items() if memory == given.memory_gb]
    every = [load_device(name) for name in fitting]
    if given.memory_gb is None:
        choices = called or every
    else:
        choices = called or [each for each in every if is_memory(given.memory_gb, each.memory_bytes)]
    return choices[0] if len({each.name for each in choices}) == 1 else None


def _files(kind: str) -> dict[str, Path]:
    """Name in lower case -> file; the first directory of the search path that has it wins."""
    found: dict[str, Path] = {}
    for name, path in named_files(_FOLDERS[kind]).items():
        found.setdefault(name.lower(), path)
    return found


def _resolve(name: str, kind: str) -> Path | None:
    """File of a name or alias, None if there is none."""
    files = _files(kind)
    key = "-".join(name.lower().replace("_", " ").split())
    if key in files:
        return files[key]
    return files.get(_aliases(kind).get(key, ""))


def _aliases(kind: str) -> dict[str, str]:
    """Other spellings -> name, of the catalogue."""
    found: dict[str, str] = read_toml(CATALOGUE / "aliases.toml").get(_FOLDERS[kind], {})
    return found


@lru_cache(maxsize=256)
def architecture_of(device: str) -> str | None:
    """Design of the chip of a device of the catalogue; None where the name is unknown, or the device does not say."""
    path = _resolve(device, "device")
    if path is None:
        return None
    chain = _chain(read(path, "device", trusted=CATALOGUE in path.parents), "device")
    return next((document.table["architecture"] for document in chain if "architecture" in document.table), None)


def _find(name: str, kind: str, *, near: Document | None = None, field: str = "") -> Document:
    """The document of a name or path; a path inside a file is relative to that file."""
    if is_path(name):
        path = Path(name).expanduser() if name.startswith("~") else Path(name)
        path = near.path.parent / path if near is not None else path
    else:
        found = _resolve(name, kind)
        if found is None:
            where, known = f"{near.where}: {field}" if near is not None else "", sorted(_files(kind))
            every = f"valid: {', '.join(known)}" if kind == "link" else ""  # no command lists them
            called = device_named(name) if kind == "device" else None
            every = f"did you mean {called.name}?" if called is not None else every
            raise UnknownNameError(kind, name, known, where=where, otherwise=every)
        path = found
    return read(path, kind, trusted=not is_path(name) and CATALOGUE in path.parents)


def _own_source(document: Document) -> Source:
    return Source(text=document.where, kind=Kind.ASSUMED)


def _chain(document: Document, kind: str) -> list[Document]:
    """The document and its bases, itself first.

    Raises:
        FieldError: the bases form a circle.
    """
    chain = [document]
    while (base := chain[-1].table.get("base")) is not None:
        following = _find(base, kind, near=chain[-1], field="base")
        if any(following.path.resolve() == seen.path.resolve() for seen in chain):
            raise FieldError(document.where, "base", f"{base!r} leads back to this file")
        chain.append(following)
    return chain


@cache
def _defaults(kind: str) -> Layer:
    """Defaults where no file gives a number: efficiencies and latencies, all assumed."""
    document = read(CATALOGUE / "defaults.toml", "defaults", trusted=True)
    return of_catalogue(layer(document.table[kind], kind, _own_source(document)))


@lru_cache(maxsize=1)
def usual_latency_s() -> float:
    """Latency of a hop of links that do not say theirs.

    >>> usual_latency_s() == load_cluster("perlmutter").levels[-1].latency_s
    True
    """
    return _defaults("link").numbers["latency"]


def _layers(chain: list[Document], kind: str, bottom: Layer) -> Layer:
    stack = bottom
    for document in reversed(chain):
        own = layer(document.table, kind, _own_source(document))
        if document.trusted:
            own = of_catalogue(own)
            own = replace(own, texts={**own.texts, LIKE: _name(document)}) if kind == "device" else own
        stack = _with_companion(own, document, "").over(stack)
    return stack


def _with_companion(own: Layer, document: Document, prefix: str) -> Layer:
    """The layer with the full path of the curves that it names."""
    if "curves" not in own.texts:
        return own
    path = companion(own.texts["curves"], document.path, document.where, f"{prefix}curves")
    return replace(own, texts={**own.texts, "curves": str(path)})


def _curves(stack: Layer) -> Profile | None:
    """The measured curves of a device, if a file names some."""
    if "curves" not in stack.texts:
        return None
    return read_profile(Path(stack.texts["curves"]))


def _name(document: Document) -> str:
    name: str = document.table.get("name", document.path.stem)
    return name


def _device(document: Document) -> Device:
    stack = _layers(_chain(document, "device"), "device", _defaults("device"))
    return device_record(stack, _name(document), where=document.where, curves=_curves(stack))


def _node_of(document: Document) -> Cluster:
    """The common node of a device, with that device in it."""
    device = _device(document)
    stack = _layers(_chain(document, "device"), "device", Layer())
    named = stack.texts.get("cluster")
    if named is None:
        hint = (
            f'name one in {document.where}: cluster = "dgx-h100", or write a cluster file with device = "{device.name}"'
        )
        raise FieldError(device.name, "cluster", "this device has no cluster of its own", hint=hint)
    cluster = _cluster(_find(named, "cluster", near=document, field="cluster"))
    if cluster.device.name == device.name:
        return cluster
    title = f"{device.title}, wired as {cluster.name}"
    return replace(cluster, name=device.name, title=title, device=device)


def _cluster(document: Document) -> Cluster:
    chain = _chain(document, "cluster")
    titled = next((link.table["title"] for link in chain if "title" in link.table), _name(document))
    source = origin(document.table, _own_source(document))
    title = document.table.get("title", titled)
    made = cluster_record(_name(document), title, _cluster_device(chain), _levels(chain), source, document.where)
    laid = next((link for link in chain if "topology" in link.table), None)
    if laid is None:
        return made
    own = origin(laid.table, _own_source(laid))
    return replace(made, topology=topology_of(laid.table["topology"], made.levels, own, document.where))


def _cluster_device(chain: list[Document]) -> Device:
    """The device of a cluster: a name, or a table that may change single fields of a base."""
    stack: Layer | None = None
    name = ""
    for document in reversed(chain):
        given: Any = document.table.get("device")
        if given is None:
            continue
        table = {"base": given} if isinstance(given, str) else given
        default = origin(document.table, _own_source(document))
        own = _with_companion(layer(table, "device", default), document, "device.")
        own = of_catalogue(own) if document.trusted else own
        of_cluster = "base" not in table and stack is None
        if "base" in table:
            base = _find(table["base"], "device", near=document, field="device.base")
            stack = _layers(_chain(base, "device"), "device", _defaults("device"))
            name = _name(base)
        elif stack is None:
            stack, name = _defaults("device"), f"{_name(document)}-device"
        if own.numbers and not of_cluster and not name.endswith("-changed"):
            name = f"{name}-changed"
        name = table.get("name", name)
        stack = own.over(stack)
    if stack is None:
        hint = 'for example device = "h100-sxm"'
        raise FieldError(chain[0].where, "device", "is missing", hint=hint)
    return device_record(stack, name, where=chain[0].where, prefix="device.", curves=_curves(stack))


def _levels(chain: list[Document]) -> list[Level]:
    """The levels of a cluster; a file changes single fields of the levels of its base, by name."""
    bottom = _defaults("link")
    stacks: dict[str, Layer] = {}
    for document in reversed(chain):
        default = origin(document.table, _own_source(document))
        for name, table in document.table.get("levels", {}).items():
            below = stacks.get(name, bottom)
            if "link" in table:
                below = _link(table["link"], document, name, bottom).over(below)
            own = layer(table, "level", default)
            stacks[name] = _of_cluster(own).over(below) if document.trusted else own.over(below)
        device = document.table.get("device")
        if isinstance(device, Mapping) and "curves" in device:
            stacks = {name: replace(stack, measured=stack.numbers) for name, stack in stacks.items()}
    inherited = [name for document in chain[1:] for name in document.table.get("levels", {})]
    return [level_record(name, stack, where=chain[0].where, inherited=inherited) for name, stack in stacks.items()]


def _of_cluster(own: Layer) -> Layer:
    """A level of a cluster of the catalogue; with an efficiency or latency of its own it is like no others."""
    own = of_catalogue(own)
    return own if own.numbers.keys().isdisjoint(TUNED) else replace(own, texts={**own.texts, UNLIKE: "others"})


def _link(name: str, near: Document, level: str, bottom: Layer) -> Layer:
    document = _find(name, "link", near=near, field=f"levels.{level}.link")
    return _layers(_chain(document, "link"), "link", bottom)
