"""Study files: TOML with values, lists and ranges, crossed or zipped.

::

    title = "Strong scaling"

    [job]
    model = "gpt3-1t"
    cluster = ["published-b200-nvs8", "published-b200-nvs64"]
    gpus = { from = 512, to = 16384, times = 2 }
    global_batch = 4096
    mode = "published"

    [hardware]
    memory_bandwidth = { factor = [0.5, 1.0, 2.0] }

    [training]
    tokens = "1T"

    [keep]
    top = 10

All fields are crossed, except those that ``zip = [["model", "training"]]`` names. A ``[[grid]]`` has tables of its own,
which override the tables of the file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, Final

from steptime.api.jobs import adapter_of, estimated_optimizer
from steptime.api.models import load_model
from steptime.api.request import checked_plan, choice, constraints_of, job_choices, oom_limit_of, whole
from steptime.errors import FieldError, UserError, counted
from steptime.goodput.training import check_training
from steptime.hardware import load_cluster
from steptime.hardware.search_path import is_path
from steptime.model.captured import is_target
from steptime.model.known import in_catalogue
from steptime.options import KEYS, MAX_DEVICES, MAX_GLOBAL_BATCH, MAX_SEQ
from steptime.plan.framework_file import framework_names
from steptime.plan.job import PRECISIONS
from steptime.schema import Each, Field, Row, Table, anything, checked, flag, letters, text
from steptime.search.modes import MODES
from steptime.store.files import parse_toml, read_text
from steptime.study.hardware import FACTOR, PARAMETERS, cluster_with, si_value
from steptime.study.points import Keep, Point, forget
from steptime.study.ranges import values_of

MAX_BYTES: Final = 2**20
MOST_POINTS: Final = 10**6
"""Largest number of points of a study."""
ASK_ABOVE: Final = 10_000
"""Number of points above which the command asks first."""
STRATEGIES: Final = ("auto", "1d", "context", "2d")


def _any(*names: str) -> Table:
    """A table whose values are checked one by one later."""
    return Table(rows=dict.fromkeys(names, anything))


_JOB: Final = (
    *("model", "mode", "strategy", "dtype", "optimizer", "framework", "lora", "limit", "seq"),
    *("cluster", "global_batch", "gpus"),
)
"""Fields of a job, slowest varying first, so that neighbouring points have most in common."""
_word: Final = text()
_DEGREES: Final = (*KEYS, "placement", "strategy")
_TABLES: Final[Mapping[str, Row]] = {
    "name": letters(200),
    "job": Table(rows={**_any(*_JOB).rows, **dict.fromkeys(("fix", "plan"), _any(*_DEGREES))}),
    "hardware": _any(*PARAMETERS),
    "training": anything,
    "zip": Each(row=Each(row=text(), least=2, called="a list of two or more fields"), called="a list of lists"),
}
"""Tables of a grid, and of a file that is one grid."""
_KEEP: Final = Table(rows={"top": Field(low=1, high=10_000, whole=True), "front": flag, "terms": flag})
_FILE: Final = Table(
    rows={
        "title": text(),
        "source": text(),
        "what": text("plan", "estimate"),
        "keep": _KEEP,
        **_TABLES,
        "grid": Each(row=Table(rows=_TABLES), called="a list of tables, written [[grid]]"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A point with its place in the study."""

    grid: str
    point: Point
    training: Mapping[str, float] = field(default_factory=dict)
    """Length of the whole run; stored results do not depend on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """Points of a study, with each value checked by itself."""

    title: str
    cases: tuple[Case, ...]

    @property
    def points(self) -> tuple[Point, ...]:
        """Points to compute, in order; two cases may have the same point."""
        return tuple(case.point for case in self.cases)


def read_study(path: str | os.PathLike[str]) -> Study:
    """The study of a TOML file; paths of models and clusters are relative to it.

    Raises:
        UserError: the file cannot be read, a field is unknown or wrong, or it has too many points; names the field.
    """
    where = os.fspath(path)
    table = parse_toml(read_text(path, MAX_BYTES, "a study"), where)
    return study_of(table, where=where, folder=Path(path).parent)


def study_of(table: Mapping[str, Any], *, where: str = "study", folder: Path | None = None) -> Study:
    """A study from the tables of its file.

    Args:
        table: tables of the file.
        where: name of the file in errors.
        folder: folder of relative paths; None: the working folder.

    Raises:
        UserError: as :func:`read_study`.
    """
    forget()
    file = checked(table, _FILE, where)
    grids = [_over(file, grid, n) for n, grid in enumerate(file.get("grid", ()))]
    keep = Keep(**file.get("keep", {}))
    readers = [
        _Reader(file.get("what", "plan"), keep, grid, where, folder)
        for grid in grids or [{"name": "all", "at": "", **file}]
    ]
    total = sum(reader.count for reader in readers)
    if total > MOST_POINTS:
        raise UserError(f"{where}: {counted(total, 'point', f'{total:,}')}, at most {MOST_POINTS:,}")
    return Study(title=file.get("title", ""), cases=tuple(case for reader in readers for case in reader.cases()))


def _over(file: Mapping[str, Any], grid: Mapping[str, Any], number: int) -> dict[str, Any]:
    """A grid with its own tables over the tables of its file."""
    tables = {name: {**file.get(name, {}), **grid.get(name, {})} for name in ("job", "hardware")}
    zipped = grid.get("zip") or file.get("zip", ())
    return {**file, "name": f"grid {number + 1}", **grid, **tables, "zip": zipped, "at": f"grid[{number}]."}


class _Reader:
    """The axes of one grid: field -> its values."""

    def __init__(self, what: str, keep: Keep, grid: Mapping[str, Any], where: str, folder: Path | None) -> None:
        self.what, self.keep, self.name = what, keep, grid["name"]
        self.where, self.at, self.folder = where, grid["at"], folder or Path()
        self.axes: dict[str, list[Any]] = {}
        self._read_job(grid.get("job", {}))
        self._read_degrees(grid.get("job", {}))
        self._read_hardware(grid.get("hardware", {}))
        training = grid.get("training")
        self.axes["training"] = [{}] if training is None else self._values("training", training, check_training)
        self.groups = self._grouped(grid.get("zip", ()))

    @property
    def count(self) -> int:
        """Number of points, without enumerating them."""
        return prod(len(self.axes[group[0]]) for group in self.groups)

    def _values(self, path: str, given: Any, convert: Callable[[Any], Any]) -> list[Any]:
        return values_of(given, self.where, f"{self.at}{path}", convert)

    def _read_job(self, job: Mapping[str, Any]) -> None:
        needed = ("model", "cluster", "gpus", *(("global_batch",) if self.what == "plan" else ()))
        for name in _JOB:
            given = job.get(name)
            if given is None:
                if name in needed:
                    raise FieldError(self.where, f"{self.at}job.{name}", f"missing; {self.what} needs it")
                continue
            if name == "limit" and isinstance(given, list) and not any(isinstance(one, list) for one in given):
                given = [given]
            self.axes[name] = self._values(f"job.{name}", given, self._checks()[name])

    def _checks(self) -> dict[str, Callable[[Any], Any]]:
        """Field of a job -> check of one of its values."""
        return {
            "model": self._model,
            "cluster": self._cluster,
            "gpus": lambda v: whole("gpus", v, 1, MAX_DEVICES),
            "global_batch": lambda v: whole("global_batch", v, 1, MAX_GLOBAL_BATCH),
            "seq": lambda v: whole("seq", v, 1, MAX_SEQ),
            "mode": lambda v: choice("mode", v, tuple(MODES)),
            "strategy": lambda v: choice("strategy", v, STRATEGIES),
            "dtype": lambda v: choice("dtype", v, tuple(PRECISIONS)),
            "optimizer": lambda v: estimated_optimizer(_word(v)) and v,
            "framework": lambda v: choice("framework", v, tuple(framework_names())),
            "lora": lambda v: adapter_of(v) and v,
            "limit": _limit,
        }

    def _model(self, given: Any) -> str:
        name = _word(given)
        if is_target(name) and not in_catalogue(name):
            hint = "steptime plan and steptime fit take one"
            raise FieldError("", "model", "a study has no modules, only models by their dimensions", hint=hint)
        path = self._path(name, in_catalogue(name) or not (is_path(name) or name.endswith(".json")))
        load_model(path)
        return path

    def _cluster(self, given: Any) -> str:
        name = _word(given)
        path = self._path(name, not is_path(name))
        load_cluster(path)
        return path

    def _path(self, name: str, of_catalogue: bool) -> str:
        return name if of_catalogue else str((self.folder / Path(name).expanduser()).resolve())

    def _read_degrees(self, job: Mapping[str, Any]) -> None:
        table, other = ("fix", "plan") if self.what == "plan" else ("plan", "fix")
        if other in job:
            problem = f'means nothing where what = "{self.what}"'
            raise FieldError(self.where, f"{self.at}job.{other}", problem, hint=f"its degrees stand in job.{table}")
        degrees = job.get(table, {})
        for key in (key for key in _DEGREES if key in degrees):
            path = f"{table}.{key}"
            self.axes[path] = self._values(f"job.{path}", degrees[key], _degree(key, self.what))

    def _read_hardware(self, hardware: Mapping[str, Any]) -> None:
        for name in PARAMETERS:
            given, path = hardware.get(name), f"hardware.{name}"
            if given is None:
                continue
            if isinstance(given, dict) and FACTOR in given:
                if len(given) > 1:
                    raise FieldError(self.where, f"{self.at}{path}", "a factor stands alone in its table")
                factors = self._values(f"{path}.factor", given[FACTOR], _factor)
                self.axes[path] = [{FACTOR: factor} for factor in factors]
            else:
                values = self._values(path, given, lambda v, name=name: si_value(name, v))  # type: ignore[misc]
                self.axes[path] = [{"value": float(value)} for value in values]
            for base in self.axes["cluster"]:
                for change in self.axes[path]:
                    cluster_with(base, {name: change}, f"{self.where}: {self.at.rstrip('.') or 'hardware'}")

    def _grouped(self, zipped: Sequence[list[str]]) -> list[list[str]]:
        """Axes in groups that are zipped, each at the place of its last member."""
        group_of: dict[str, list[str]] = {}
        for n, names in enumerate(zipped):
            path = f"{self.at}zip[{n}]"
            for name in names:
                if name not in self.axes:
                    hint = f"this study has {', '.join(self.axes)}"
                    raise FieldError(self.where, path, f"{name} has no values here", hint=hint)
                if name in group_of:
                    raise FieldError(self.where, path, f"{name} is zipped twice")
                group_of[name] = names
            lengths = {name: len(self.axes[name]) for name in names}
            if len(set(lengths.values())) > 1:
                shown = ", ".join(f"{name} has {length}" for name, length in lengths.items())
                raise FieldError(self.where, path, f"zipped fields have values one by one, but {shown}")
        order = [*(name for name in self.axes if name not in ("gpus",)), *(("gpus",) if "gpus" in self.axes else ())]
        groups = [group_of.get(name, [name]) for name in order]
        return [group for n, group in enumerate(groups) if group not in groups[n + 1 :]]

    def cases(self) -> Iterator[Case]:
        """Every combination, in order."""
        ranges = [range(len(self.axes[group[0]])) for group in self.groups]
        for at in product(*ranges):
            chosen = {name: self.axes[name][i] for group, i in zip(self.groups, at, strict=True) for name in group}
            yield self._case(chosen)

    def _case(self, chosen: dict[str, Any]) -> Case:
        training = chosen.pop("training")
        options: dict[str, Any] = {}
        hardware: dict[str, Any] = {}
        for name, value in chosen.items():
            table, _, key = name.partition(".")
            if table == "hardware":
                hardware[key] = value
            elif key:
                options.setdefault(table, {})[key] = value
            else:
                options[name] = value
        point = Point(what=self.what, options=options, hardware=hardware, keep=self.keep)
        return Case(grid=self.name, point=point, training=training)


def _limit(given: Any) -> list[str]:
    bounds = [given] if isinstance(given, str) else given
    constraints_of({}, bounds)
    oom_limit_of(bounds, MODES["corrected"])
    return list(bounds)


def _factor(given: Any) -> float:
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 < given < 1e9:
        raise FieldError("", FACTOR, f"{given!r} is not a number above zero")
    return float(given)


def _degree(key: str, what: str) -> Callable[[Any], Any]:
    """Check of one value of a degree or choice."""

    def check(given: Any) -> Any:
        if key == "strategy":
            return choice(key, given, STRATEGIES)
        if key == "placement" and what == "plan":
            raise FieldError("", key, "a search tries every placement")
        checked_plan({key: given}, MODES["published"] if given == "summa" else MODES["corrected"])
        if what == "plan":
            job_choices({key: given})
        return given

    return check
