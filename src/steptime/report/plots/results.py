"""Saved results: files written with ``--json``, and tables of rows; values are checked on access."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from steptime.errors import FieldError, InputFileError, shown
from steptime.store.files import read_text

LARGEST: Final = 256 * 2**20
"""Largest number of bytes of a file of results."""
MOST: Final = 1e100
"""Largest accepted value; axes cannot show larger ones."""
KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "plan": ("plans", "pareto", "candidates"),
    "profile": ("by_operator", "moved_bytes", "roofs"),
    "simulate": ("spent_by_rank_s", "pipeline_s"),
    "limits": ("latency_wall_flops", "curve"),
    "tile": ("naive_bytes", "levels"),
    "estimate": ("step_time_s", "time", "memory", "plan"),
    "rows": ("rows",),
}
"""Kind of result -> keys that identify its document; checked in this order."""
WRITERS: Final[Mapping[str, str]] = {
    "plan": "steptime plan --json",
    "profile": "steptime profile --json",
    "simulate": "steptime simulate --json --timeline",
    "limits": "steptime limits --curve --json",
    "tile": "steptime tile matmul --device GPU --json",
    "estimate": "steptime estimate --json",
    "rows": "rows of a study as CSV, or as a JSON list of objects",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One result, with its name in charts."""

    name: str
    kind: str
    """A key of :data:`KEYS`."""
    data: Mapping[str, Any]

    def real(self, *path: str | int) -> float:
        """The number at a path of keys, below :data:`MOST`.

        Raises:
            FieldError: there is none.

        >>> Result(name="a", kind="rows", data={"time": {"x_s": 2}}).real("time", "x_s")
        2.0
        """
        value = self.at(*path)
        if isinstance(value, bool) or not isinstance(value, int | float) or not -MOST < value < MOST:
            raise self._wrong(path, value, f"a number below {MOST:g}")
        return float(value)

    def word(self, *path: str | int) -> str:
        """The text at a path of keys; FieldError: there is none."""
        value = self.at(*path)
        if not isinstance(value, str):
            raise self._wrong(path, value, "a text")
        return value

    def table(self, *path: str | int) -> Mapping[str, Any]:
        """The object at a path of keys; FieldError: there is none."""
        value = self.at(*path)
        if not isinstance(value, Mapping):
            raise self._wrong(path, value, "an object")
        return value

    def numbers(self, *path: str | int) -> dict[str, float]:
        """The object of numbers at a path of keys; FieldError: there is none."""
        return {key: self.real(*path, key) for key in self.table(*path)}

    def numbers_of(self, *path: str | int, key: str) -> dict[str, float]:
        """One number of each object below a path of keys; FieldError: an object does not have it."""
        return {name: self.real(*path, name, key) for name in self.table(*path)}

    def items(self, *path: str | int) -> Sequence[Any]:
        """The list at a path of keys; FieldError: there is none."""
        value = self.at(*path)
        if not isinstance(value, list):
            raise self._wrong(path, value, "a list")
        return value

    def reals(self, *path: str | int) -> tuple[float, ...]:
        """The list of numbers at a path of keys; FieldError: there is none."""
        return tuple(self.real(*path, i) for i in range(len(self.items(*path))))

    def has(self, *path: str | int) -> bool:
        """True if there is a value other than null at a path of keys."""
        value: Any = self.data
        for key in path:
            try:
                value = value[key]
            except (KeyError, IndexError, TypeError):
                return False
        return value is not None

    def at(self, *path: str | int) -> Any:
        """The value at a path of keys; FieldError: there is none."""
        value: Any = self.data
        for key in path:
            try:
                value = value[key]
            except (KeyError, IndexError, TypeError):
                raise self._wrong(path, None, "needed") from None
        return value

    def below(self, name: str, kind: str, *path: str | int) -> Result:
        """The object at a path of keys as a result of its own."""
        return Result(name=name, kind=kind, data=self.table(*path))

    def _wrong(self, path: Sequence[str | int], value: Any, wanted: str) -> FieldError:
        field = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).lstrip(".")
        problem = "missing" if wanted == "needed" else f"{shown(value)} is not {wanted}"
        return FieldError(self.name, field, problem, hint=f"{WRITERS[self.kind]} writes it")


def result(name: str, data: Any) -> Result:
    """A document of the API as a result, with its kind.

    Args:
        name: name in charts and messages.
        data: a document of a command, or a list of rows.

    Raises:
        InputFileError: it is neither.

    >>> result("a", [{"gpus": 8, "step_time_s": 1.0}]).kind
    'rows'
    """
    if isinstance(data, list):
        data = {"rows": data}
    found = kind_of(data) if isinstance(data, Mapping) else None
    if found is None:
        raise InputFileError(name, "not a result of a command", hint=f"it may be of {'; '.join(WRITERS.values())}")
    if found == "rows" and not (isinstance(data["rows"], list) and all(isinstance(r, Mapping) for r in data["rows"])):
        raise InputFileError(name, "rows must be a list of objects", hint=WRITERS["rows"])
    return Result(name=name, kind=found, data=data)


def kind_of(data: Mapping[str, Any]) -> str | None:
    """Kind of a document; None: unknown.

    >>> kind_of({"rows": []}), kind_of({"x": 1})
    ('rows', None)
    """
    return next((kind for kind, keys in KEYS.items() if all(key in data for key in keys)), None)


def read_result(path: Path) -> Result:
    """A file of results; it is named after the file.

    Raises:
        InputFileError: it cannot be read, or is no result.
    """
    if path.suffix.lower() == ".csv":
        return Result(name=path.stem, kind="rows", data={"rows": list(csv_rows(path))})
    try:
        data = json.loads(read_text(path, LARGEST, "a result"))
    except (ValueError, RecursionError) as error:
        raise InputFileError(str(path), f"not JSON: {str(error)[:80]}", hint="save one with --json > FILE") from None
    found = result(str(path), data)
    return Result(name=path.stem, kind=found.kind, data=found.data)


def csv_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a CSV file with a header; cells that are numbers are read as such, empty ones are left out."""
    import csv

    lines = read_text(path, LARGEST, "a table").splitlines()
    try:
        for row in csv.DictReader(lines, strict=True):
            yield {key: _cell(value) for key, value in row.items() if key is not None and value}
    except csv.Error as error:
        raise InputFileError(str(path), f"not a table: {error}") from None


def _cell(text: Any) -> Any:
    try:
        return float(text)
    except (TypeError, ValueError):
        return text
