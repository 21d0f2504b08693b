"""The groups of devices of a mixed job, and the link between them, from one TOML file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from steptime.errors import FieldError
from steptime.formats.estimate_file import as_user_error
from steptime.hardware import Cluster, load_cluster
from steptime.options import MAX_DEVICES
from steptime.store.files import parse_toml, read_text
from steptime.units import parse

MAX_BYTES: Final = 1 << 20
MOST: Final = 4
"""Groups of a job."""
EXAMPLE: Final = '[groups.new]\n  cluster = "dgx-h100"\n  gpus = 64\n  [link]\n  bandwidth = "12.5 GB/s"'


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Party:
    """Devices of one kind at one site; equal to itself alone, so that what is known of it can be kept."""

    name: str
    cluster: Cluster
    gpus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parties:
    """The groups of a job in the order of the file, and what joins them."""

    title: str
    groups: tuple[Party, ...]
    link_Bps: float
    """Bandwidth between two groups, one direction, all their devices together."""
    latency_s: float


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class _Group(_Strict):
    cluster: str
    gpus: Annotated[int, Field(ge=1, le=MAX_DEVICES)]
    notes: str | None = None


class _Link(_Strict):
    bandwidth: str
    latency: str = "0 s"
    source: str | None = None


class _File(_Strict):
    title: str | None = None
    source: str | None = None
    groups: dict[str, _Group]
    link: _Link


def read_parties(path: str | Path) -> Parties:
    """The groups of a file.

    Raises:
        UserError: the file is missing or no TOML, a key is unknown, a cluster is, fewer than two groups, no link, or a
            bandwidth that is none.
    """
    where = str(path)
    table = parse_toml(read_text(Path(path), MAX_BYTES, "a file of groups"), where)
    if "groups" not in table:
        raise FieldError(where, "groups", "is missing; a mixed job has groups", hint=f"for example {EXAMPLE}")
    if "link" not in table:
        raise FieldError(where, "link", "is missing: nothing joins the groups", hint=f"for example {EXAMPLE}")
    try:
        read = _File.model_validate(table)
    except ValidationError as error:
        raise as_user_error(error, where, _File) from None
    if not 2 <= len(read.groups) <= MOST:
        raise FieldError(where, "groups", f"has {len(read.groups)}; a mixed job has 2 to {MOST}", hint=EXAMPLE)
    groups = tuple(
        Party(name=name, cluster=load_cluster(_near(group.cluster, Path(path))), gpus=group.gpus)
        for name, group in read.groups.items()
    )
    return Parties(
        title=read.title or " and ".join(f"{g.gpus} of {g.cluster.name}" for g in groups),
        groups=groups,
        link_Bps=_number(read.link.bandwidth, "Bps", where, "link.bandwidth", 1e3, 1e16),
        latency_s=_number(read.link.latency, "s", where, "link.latency", 0.0, 10.0),
    )


def _near(cluster: str, path: Path) -> str:
    """A path inside the file is relative to it."""
    own = path.parent / cluster
    return str(own) if cluster.endswith(".toml") and not Path(cluster).is_absolute() else cluster


def _number(text: str, dimension: str, where: str, field: str, low: float, high: float) -> float:
    value = parse(text, dimension)
    if not low <= value <= high:
        raise FieldError(
            where, field, f"{text!r} is not between {low:g} and {high:g} (SI)", hint=f"for example {EXAMPLE}"
        )
    return value


def record_of(parties: Parties) -> Mapping[str, Any]:
    """The groups as plain data."""
    return {
        "title": parties.title,
        "link_Bps": parties.link_Bps,
        "latency_s": parties.latency_s,
        "groups": {
            g.name: {"cluster": g.cluster.name, "device": g.cluster.device.name, "gpus": g.gpus} for g in parties.groups
        },
    }
