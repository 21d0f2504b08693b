"""Tables of measurements as columns; reading goes through DuckDB, so CSV, CSV.gz and Parquet are one."""

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
from steptime.store.tables import Header, connected, fault, header_of, in_quotes

_TYPES = "auto_type_candidates=['BOOLEAN', 'BIGINT', 'DOUBLE', 'VARCHAR'], sample_size=-1"  # "inf" is no date
_FORM = "header=true, quote='\"', escape='\"'"
READERS = {".parquet": "read_parquet(?)", ".csv": "read_csv", ".csv.gz": "read_csv", ".tsv": "read_csv"}


def is_suspect(notes: str) -> bool:
    """Whether a row says of itself, in its notes, that it is suspect.

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
        """A column of sizes, which are positive and finite; NaN for what is none."""
        column = self.number(name)
        return np.where(np.isfinite(column) & (column > 0), column, np.nan)


def _is_empty(file: Path, ending: str) -> bool:
    """Whether a file holds nothing, packed or not; what cannot be unpacked is left to the reader of tables."""
    try:
        with gzip.open(file) if ending.endswith(".gz") else file.open("rb") as stream:
            return not stream.read(4096).removeprefix(codecs.BOM_UTF8).strip()
    except BROKEN:
        return False


def read_table(path: str | Path) -> Table:
    """Reads a CSV, CSV.gz or Parquet file.

    Raises:
        InputFileError: it is empty or cannot be read.
    """
    import duckdb

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
    header = None if ending == ".parquet" else header_of(file)
    try:
        with connected() as connection:
            raw = connection.execute(f"select * from {_reader(ending, header)}", [str(file)]).fetchnumpy()
    except duckdb.Error as error:
        encoded = "not utf-8" not in str(error)
        if encoded and header is not None and (problem := fault(file, header)) is not None:
            hint = f"every line has the cells of the header; {in_quotes(header.delimiter)}"
            raise InputFileError(str(path), problem, hint=hint) from error
        problem = f"cannot be read as a table: {str(error).splitlines()[0][:200]}"
        raise InputFileError(str(path), problem, hint=None if encoded else "save it as UTF-8") from error
    return Table({name: _column(values) for name, values in raw.items()})


def _reader(ending: str, header: Header | None) -> str:
    """The function of DuckDB, told where the header is: left to find it, it skips lines that break the form."""
    if header is None:
        return READERS[ending].replace("read_csv", f"read_csv(?, {_TYPES})")
    return f"{READERS[ending]}(?, {_TYPES}, {_FORM}, skip={header.skipped}, delim='{header.delimiter}')"


def _column(values: Any) -> Array:
    mask = np.ma.getmaskarray(values) if isinstance(values, np.ma.MaskedArray) else None
    data = np.ma.getdata(values)
    if data.dtype.kind in "iufb":
        out = data.astype(np.float64)
        if mask is not None:
            out[mask] = np.nan
        return out
    text = np.asarray(data, dtype=object)
    if mask is not None:
        text[mask] = ""
    return np.array(["" if v is None or v is np.ma.masked else str(v) for v in text], dtype=object)
