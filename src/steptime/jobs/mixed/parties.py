"""The groups of devices of a mixed job, and the link between them, from one TOML file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from steptime.errors import FieldError, UserError
from steptime.hardware import Cluster, load_cluster
from steptime.options import MAX_DEVICES
from steptime.schema import Field, Table, checked, letters, text
from steptime.store.files import parse_toml, read_text

MAX_BYTES: Final = 1 << 20
MOST: Final = 4
"""Largest number of groups of a job."""
EXAMPLE: Final = '[groups.new]\n  cluster = "dgx-h100"\n  gpus = 64\n  [link]\n  bandwidth = "12.5 GB/s"'


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Party:
    """Devices of one kind at one site; compared by identity, so that it can be the key of a cache."""

    name: str
    cluster: Cluster
    gpus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parties:
    """The groups of a job in the order of the file, and the link between them."""

    title: str
    groups: tuple[Party, ...]
    link_Bps: float
    """Bandwidth between two groups, one direction, all their devices together."""
    latency_s: float


def _counted(groups: Mapping[str, Any]) -> None:
    if not 2 <= len(groups) <= MOST:
        raise UserError(f"has {len(groups)}; a mixed job has 2 to {MOST}", hint=EXAMPLE)


_GROUP: Final = Table(
    rows={
        "cluster": letters(4096),
        "gpus": Field(low=1, high=MAX_DEVICES, whole=True, example="64"),
        "notes": text(),
    },
    required=("cluster", "gpus"),
    hint=f"for example {EXAMPLE}",
)
_LINK: Final = Table(
    rows={
        "bandwidth": Field(dimension="Bps", low=1e3, high=1e16, example="12.5 GB/s"),
        "latency": Field(dimension="s", low=0.0, high=10.0, example="50 us"),
        "source": text(),
    },
    required=("bandwidth",),
    hint=f"for example {EXAMPLE}",
)
_FILE: Final = Table(
    rows={"title": text(), "source": text(), "groups": Table(named=_GROUP, also=_counted), "link": _LINK},
)


def read_parties(path: str | Path) -> Parties:
    """The groups of a file.

    Raises:
        UserError: the file is missing or no TOML, a key or a cluster is unknown, there are fewer than two groups or no
            link, or the bandwidth is invalid.
    """
    where = str(path)
    table = parse_toml(read_text(Path(path), MAX_BYTES, "a file of groups"), where)
    if "groups" not in table:
        raise FieldError(where, "groups", "is missing; a mixed job has groups", hint=f"for example {EXAMPLE}")
    if "link" not in table:
        raise FieldError(where, "link", "is missing: nothing joins the groups", hint=f"for example {EXAMPLE}")
    read = checked(table, _FILE, where)
    groups = tuple(
        Party(name=name, cluster=load_cluster(_near(group["cluster"], Path(path))), gpus=group["gpus"])
        for name, group in read["groups"].items()
    )
    return Parties(
        title=read.get("title") or " and ".join(f"{g.gpus} of {g.cluster.name}" for g in groups),
        groups=groups,
        link_Bps=read["link"]["bandwidth"],
        latency_s=read["link"].get("latency", 0.0),
    )


def _near(cluster: str, path: Path) -> str:
    """A cluster file's path, relative to the file of groups unless absolute."""
    own = path.parent / cluster
    return str(own) if cluster.endswith(".toml") and not Path(cluster).is_absolute() else cluster


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
