"""Kinds of tables of measurements beyond training runs, which packages register: kernels and collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from steptime.measure.residuals import Predicted
from steptime.measure.table import Table
from steptime.registry import Registry


class ScoredTable(Protocol):
    """A table of measurements, its predictions and their errors."""

    def to_json(self) -> dict[str, Any]:
        """Counts, errors and groups."""

    def write(self, path: Path) -> None:
        """Writes one line per row; InputFileError where the file cannot be written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of table."""

    score: Callable[[str, Mapping[str, str | float]], ScoredTable]
    """Function from a path, and values of columns missing in the file, to the scored table."""
    predict: Callable[[Table], Predicted]
    """Function from a table to the predictions of its rows."""
    columns: Callable[[], dict[str, Any]]
    """Columns and names that such a table may have."""
    print_columns: Callable[[], None]
    """Prints these columns and names for people."""


KINDS: Final = Registry[Kind]("kind of table", "steptime.tables")
"""Name -> kind of table."""
