"""Tables of measurements as columns, from CSV, CSV.gz and Parquet."""

from __future__ import annotations

import codecs
import gzip
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from steptime.errors import InputFileError
from steptime.num import Array
from steptime.store.files import BROKEN, is_file, refuse_endless, unreadable
from steptime.store.tables import PARQUET, cells_of, connected

READERS = (".parquet", ".csv", ".csv.gz", ".tsv")


def is_suspect(notes: str) -> bool:
    """True if the notes of a row say that it is suspect.

    >>> is_suspect("SUSPECT: clocks were low"), is_suspect("rotating buffers")
    (True, False)
    """
    return "SUSPECT" in notes


@dataclass(frozen=True, slots=True)
class Table(Mapping[str, Array]):
    """Columns of equal length: numbers as float64 with NaN for missing, text as objects with "" for missing."""

    columns: Mapping[str, Array]

    def __getitem__(self, name: str) -> Array:
        return self.columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(next(iter(self.columns.values()))) if self.columns else 0

    def take(self, index: Any) -> Table:
        """Rows by index or mask."""
        return Table({name: column[index] for name, column in self.columns.items()})

    def text(self, name: str) -> Array:
        """A text column; all empty if the table lacks it."""
        return self.columns[name] if name in self.columns else np.full(self.rows, "", dtype=object)

    @property
    def suspect(self) -> Array:
        """Rows that are suspect (:func:`is_suspect`)."""
        return np.array([is_suspect(notes) for notes in self.text("notes")], bool)

    def number(self, name: str) -> Array:
        """A numeric column; all NaN if the table lacks it."""
        return self.columns[name] if name in self.columns else np.full(self.rows, np.nan)

    def dim(self, name: str) -> Array:
        """A column of sizes, which are positive and finite; NaN for any other number."""
        column = self.number(name)
        return np.where(np.isfinite(column) & (column > 0), column, np.nan)


def _is_empty(file: Path, ending: str) -> bool:
    """True if a file, packed or not, holds nothing; one that cannot be unpacked is left to the reader of tables."""
    try:
        with gzip.open(file) if ending.endswith(".gz") else file.open("rb") as stream:
            return not stream.read(4096).removeprefix(codecs.BOM_UTF8).strip()
    except BROKEN:
        return False


def read_table(path: str | Path) -> Table:
    """Reads a CSV, CSV.gz or Parquet file.

    Raises:
        InputFileError: it is empty or cannot be read.
        UserError: it is Parquet, and DuckDB is not installed.
    """
    file = Path(path)
    ending = next((e for e in READERS if file.name.lower().endswith(e)), None)
    if ending is None:
        raise InputFileError(str(path), "is not a table", hint=f"give a file that ends in {', '.join(READERS)}")
    refuse_endless(file)
    try:
        file.stat()
    except OSError as error:
        raise unreadable(file, error) from None
    if not is_file(file):
        raise unreadable(file, IsADirectoryError() if file.is_dir() else FileNotFoundError())
    if _is_empty(file, ending):
        raise InputFileError(str(path), "is empty")
    if ending == ".parquet":
        return _read_parquet(file)
    try:
        header, *rows = cells_of(file)
    except (*BROKEN, UnicodeDecodeError) as error:
        hint = "save it as UTF-8" if isinstance(error, UnicodeDecodeError) else None
        raise InputFileError(str(path), f"cannot be read as a table: {str(error)[:200]}", hint=hint) from error
    return Table({name: _column(cells) for name, *cells in zip(header, *rows, strict=True)})


def _column(cells: list[str]) -> Array:
    """Numbers where all cells that are not empty are numbers, or all say yes or no; else text.

    >>> [_column(cells).tolist() for cells in (["1", ""], ["True", "false"], ["", ""], ["1", "many"], ["1_0"])]
    [[1.0, nan], [1.0, 0.0], ['', ''], ['1', 'many'], ['1_0']]
    """
    first = next((cell for cell in cells if cell), "")
    if first.lower() in _TRUTH and first and {cell.lower() for cell in cells} <= _TRUTH.keys():
        return np.array([_TRUTH[cell.lower()] for cell in cells])
    try:
        numbers = np.array([float(cell) if cell else np.nan for cell in cells])
    except ValueError:
        numbers = None
    if numbers is None or not first or "_" in "".join(cells):  # 1_0 is ten in Python alone
        return np.array(cells, dtype=object)
    return numbers


_TRUTH = {
    **dict.fromkeys(("true", "t", "yes", "y"), 1.0),
    **dict.fromkeys(("false", "f", "no", "n"), 0.0),
    "": np.nan,
}


def _read_parquet(file: Path) -> Table:
    def failed(why: str) -> InputFileError:
        return InputFileError(str(file), f"cannot be read as a table: {why[:200]}")

    with connected(PARQUET, failed) as connection:
        found = connection.execute("select * from read_parquet(?)", [str(file)]).fetchnumpy()
    columns = {}
    for name, values in found.items():
        data, mask = np.ma.getdata(values), np.ma.getmaskarray(values)
        if data.dtype.kind in "iufb":
            columns[name] = np.where(mask, np.nan, data.astype(np.float64))
        else:
            columns[name] = np.array(
                ["" if m or v is None else str(v) for v, m in zip(data, mask, strict=True)], dtype=object
            )
    return Table(columns)
