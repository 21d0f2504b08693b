"""From a CSV file to rows of text, one record each."""

from __future__ import annotations

import csv
import gzip
import io
import math
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from steptime.errors import InputFileError, shorten
from steptime.study.measured.reasons import Reason, RowProblem

NEEDED: Final = ("model", "layers", "hidden", "heads", "seq_len", "gpu", "n_gpus", "global_batch_sequences")
"""Columns that must be there, if only with empty cells."""
METRICS: Final = (
    "metric_step_time_s", "metric_tokens_per_s_per_gpu", "metric_tflops_per_gpu", "metric_mfu",
    "metric_peak_mem_gb", "derived_step_time_s",
)  # fmt: skip
"""Columns of which one must be there."""
LARGEST: Final = 1e18
MAX_BYTES: Final = 2**30
_BLANK: Final = frozenset({"", "-", "--", "n/a", "na", "nan", "none", "null", "?", "unknown", "not stated"})
_GROUPED: Final = re.compile(r"\d{1,3}(,\d{3})+(\.\d*)?")


@dataclass(slots=True)
class Row:
    """One record: cells by column name, all text; a column that the file lacks is empty."""

    line: int
    cells: Mapping[str, str]
    unread: list[str] = field(default_factory=list)
    """Columns whose cell is no number though one was expected."""

    def text(self, name: str) -> str:
        """A cell without the space around it."""
        return (self.cells.get(name) or "").strip()

    def number(self, name: str) -> float | None:
        """A positive finite number; None where the cell is empty or, then noted in ``unread``, no such number.

        >>> [Row(1, {"a": text}).number("a") for text in ("1,024", "8.0", "-3", "1e999", "many", "")]
        [1024.0, 8.0, None, None, None, None]
        """
        text = self.text(name)
        if text.lower() in _BLANK:
            return None
        try:
            value = float(text.replace(",", "") if _GROUPED.fullmatch(text) else text)
        except ValueError:
            value = math.nan
        if not 0 < value <= LARGEST:  # false for NaN
            self.note(name)
            return None
        return value

    def note(self, name: str) -> None:
        """Remembers that a cell cannot be read."""
        if name not in self.unread:
            self.unread.append(name)

    def whole(self, name: str, at_most: float = 1e16) -> int | None:
        """A positive whole number, as :meth:`number`."""
        value = self.number(name)
        if value is None:
            return None
        if value != int(value) or value > at_most:
            self.note(name)
            return None
        return int(value)

    def need(self, name: str, reason: Reason, at_most: float = 1e16) -> int:
        """A positive whole number that must be there.

        Raises:
            RowProblem: with that reason if the cell is empty, with BAD_NUMBER if it cannot be read.
        """
        value = self.whole(name, at_most)
        if value is None:
            bad = name in self.unread
            raise RowProblem(Reason.BAD_NUMBER if bad else reason, f"{name}: {shorten(self.text(name))!r}")
        return value

    def flag(self, name: str) -> bool | None:
        """True, False, or None where the cell says neither."""
        text = self.text(name).lower()
        return True if text in ("true", "yes", "1", "on") else False if text in ("false", "no", "0", "off") else None


def read_rows(path: str | Path) -> list[Row]:
    """All records of a CSV or CSV.gz file with the columns of measured training runs.

    Raises:
        InputFileError: the file is missing, is no CSV, lacks a needed column, or has no rows.
    """
    where = str(path)
    reader = csv.reader(io.StringIO(_text(Path(path))), strict=True)
    try:
        header = next(reader, None)
        if header is None:
            raise InputFileError(where, "is empty", hint=_columns_hint())
        names = [name.strip() for name in header]
        _check_columns(where, names)
        rows = list(_records(reader, names))
    except csv.Error as error:
        raise InputFileError(where, f"is no CSV: line {reader.line_num}: {error}") from error
    if not rows:
        raise InputFileError(where, "has no rows")
    return rows


def _records(reader: Iterator[list[str]], names: list[str]) -> Iterator[Row]:
    for line, cells in enumerate(reader, 1):
        if any(cell.strip() for cell in cells):
            yield Row(line, dict(zip(names, cells, strict=False)))


def _text(path: Path) -> str:
    where = str(path)
    try:
        if path.is_file() and path.stat().st_size > MAX_BYTES:
            raise InputFileError(where, "is larger than 1 GiB")
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            with gzip.open(io.BytesIO(data)) as stream:
                data = stream.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise InputFileError(where, "is larger than 1 GiB")
    except FileNotFoundError:
        raise InputFileError(where, "does not exist") from None
    except IsADirectoryError:
        raise InputFileError(where, "is a folder", hint="give a .csv or .csv.gz file") from None
    except (OSError, ValueError, EOFError, zlib.error) as error:
        raise InputFileError(where, f"cannot be read: {error}") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputFileError(where, "is no CSV: it is not UTF-8 text", hint=_columns_hint()) from None
    if "\0" in text:
        raise InputFileError(where, "is no CSV: it holds zero bytes", hint=_columns_hint())
    return text


def _check_columns(where: str, names: list[str]) -> None:
    missing = [name for name in NEEDED if name not in names]
    if missing:
        raise InputFileError(where, f"lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}",
                             hint=_columns_hint())  # fmt: skip
    if not set(METRICS) & set(names):
        raise InputFileError(where, "has no measurement", hint=f"it needs one of {', '.join(METRICS)}")
    repeated = sorted({name for name in names if name and names.count(name) > 1})
    if repeated:
        raise InputFileError(where, f"has the column {shorten(repeated[0])!r} twice")


def _columns_hint() -> str:
    return f"needed: {', '.join(NEEDED)}, and one of {', '.join(METRICS)}"
