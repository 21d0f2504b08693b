"""One point of a study: a job for the API, and the key of its results."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from steptime.api.expert_load import expert_load_of
from steptime.api.models import load_model
from steptime.cli.output import plain
from steptime.errors import UserError
from steptime.hardware.search_path import named_files
from steptime.plan.framework import IDEAL
from steptime.plan.framework_file import FOLDER as FRAMEWORKS
from steptime.plan.framework_file import GENERIC, framework_table, framework_tables
from steptime.registry import entry_points
from steptime.search.modes import MODES
from steptime.store.journal import content_key
from steptime.study.hardware import cluster_with, columns_of, unchanged_cluster

PACKAGE: Final = Path(__file__).resolve().parents[1]
CODE: Final = ("api", "cost", "estimate", "formats", "hardware", "model", "plan", "schedule", "search")
"""Packages on which the numbers of a point depend, in addition to modes that other packages add."""
OPTIONS: Final = (
    *("model", "cluster", "gpus", "global_batch", "seq", "dtype", "optimizer", "strategy", "mode", "framework"),
    *("lora", "fix", "limit", "plan"),
)
"""Options that a point shares with a call of ``plan`` or ``estimate``, in the order of columns."""
USUAL: Final = {"dtype": "bf16", "optimizer": "adam", "strategy": "auto"}
"""Default options."""


@cache
def code_version() -> str:
    """Digest of the code and the catalogue: results of another version are computed again."""
    digest = hashlib.sha256()
    modes = [find_spec(entry.module) for entry in entry_points(group=MODES.group)]
    rooms = [
        *(PACKAGE / room for room in CODE),
        *(Path(found.origin).parent for found in modes if found and found.origin),
    ]
    files = [path for room in rooms for path in room.rglob("*") if path.suffix in (".py", ".toml")]
    for path in sorted([*files, *PACKAGE.glob("*.py"), PACKAGE / "study/evaluate.py", PACKAGE / "study/hardware.py"]):
        digest.update(f"{'/'.join(path.parts[-3:])}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:24]


def forget() -> None:
    """Clear the caches of models, clusters, frameworks and expert loads.

    Called when a study is read, run or looked up and when a block of points is solved: in between, each file is read
    once; an edited file is never taken from a cache.
    """
    for kept in (_model_key, _cluster_key, _frameworks_key, _load_key, unchanged_cluster):
        kept.cache_clear()


@cache
def _frameworks_key() -> str:
    own = {name: framework_tables(name) for name in named_files(FRAMEWORKS)}
    return content_key(plain({**framework_table(), "own": own}))


@cache
def _load_key(model: str, load: str) -> str:
    try:
        return content_key({"load": plain(expert_load_of(load, load_model(model)))})
    except UserError as error:  # the point is refused with this message
        return content_key({"refused": str(error)})


@cache
def _model_key(model: str) -> str:
    return content_key(plain(load_model(model)))


@cache
def _cluster_key(cluster: str, hardware: tuple[tuple[str, tuple[tuple[str, float], ...]], ...]) -> str:
    return content_key(plain(cluster_with(cluster, {name: dict(change) for name, change in hardware})))


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Results kept of each point in addition to its counts."""

    top: int = 1
    """Number of plans, the fastest first."""
    front: bool = False
    """True: keep the Pareto front of step time and memory."""
    terms: bool = False
    """True: keep the terms of time and memory of the kept plans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One job of a study."""

    what: str
    """``plan`` (a search) or ``estimate`` (one plan)."""
    options: Mapping[str, Any]
    """Given options, a subset of :data:`OPTIONS`."""
    hardware: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Changes to the named cluster."""
    keep: Keep = Keep()

    @property
    def key(self) -> str:
        """Key of the results: a digest of the content of everything that they depend on."""
        changes = tuple((name, tuple(change.items())) for name, change in sorted(self.hardware.items()))
        options = {name: value for name, value in self.options.items() if name not in ("model", "cluster")}
        return content_key(
            {
                "what": self.what,
                "model": _model_key(self.options["model"]),
                "cluster": _cluster_key(self.options["cluster"], changes),
                "options": plain(options),
                "read": self._read(),
                "keep": plain(self.keep),
                "code": code_version(),
            }
        )

    def _read(self) -> Mapping[str, str]:
        """Digests of the files that the job reads in addition to its model and cluster."""
        loads = [self.options.get(table, {}).get("expert_load") for table in ("plan", "fix")]
        load = next((found for found in loads if isinstance(found, str)), None)
        found = {} if load is None else {"expert_load": _load_key(self.options["model"], load)}
        return {"frameworks": _frameworks_key(), **found}

    def labels(self) -> dict[str, Any]:
        """Labels of the point in tables: its options, and the numbers of its cluster."""
        cluster = cluster_with(self.options["cluster"], self.hardware)
        model = load_model(self.options["model"])
        mode = self.options.get("mode", "corrected")
        usual = USUAL | {"mode": mode, "framework": GENERIC if MODES[mode].method.calibrated else IDEAL.name}
        given = {name: self.options.get(name, usual.get(name)) for name in OPTIONS}
        given |= {"model": model.name, "cluster": cluster.name, "asked_strategy": given.pop("strategy")}
        given["seq_len"] = given.pop("seq") or model.seq_len
        return {**given, "device": cluster.device.name, **columns_of(cluster)}
