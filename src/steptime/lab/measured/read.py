"""From a CSV file to rows of text, one record each."""

from __future__ import annotations

import csv
import gzip
import io
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from steptime.errors import InputFileError, shorten
from steptime.lab.measured.columns import near_misses, own_names
from steptime.lab.measured.reasons import Reason, RowProblem
from steptime.store.files import BROKEN, read_bytes, unreadable
from steptime.store.tables import delimiter_of, first_line, refuse_surplus, says_nothing

NEEDED: Final = ("model", "seq_len", "gpu", "n_gpus", "global_batch_sequences")
"""Columns that must be there, if only with empty cells; ``layers``, ``hidden`` and ``heads`` too unless the model is
known by its name."""
METRICS: Final = (
    "metric_step_time_s", "metric_tokens_per_s_per_gpu", "metric_tflops_per_gpu", "metric_mfu",
    "metric_peak_mem_gb", "derived_step_time_s",
)  # fmt: skip
"""Columns of which one must be there."""
LARGEST: Final = 1e18
MAX_BYTES: Final = 2**30
_BLANK: Final = frozenset({"", "-", "--", "n/a", "na", "nan", "none", "null", "?", "unknown", "not stated"})
UNITS: Final[Mapping[str, Mapping[str, float]]] = {
    "metric_step_time_s": {"s": 1.0, "sec": 1.0, "second": 1.0, "ms": 1e-3, "us": 1e-6, "\u00b5s": 1e-6, "min": 60.0},
    "metric_tokens_per_s_per_gpu": {"tokens/s": 1.0, "tok/s": 1.0, "tokens/s/gpu": 1.0, "tok/s/gpu": 1.0,
                                    "tokens/sec": 1.0, "k": 1e3, "ktokens/s": 1e3, "ktok/s": 1e3},
    "metric_tflops_per_gpu": {"tflops": 1.0, "tflop/s": 1.0, "tflop/s/gpu": 1.0, "gflop/s": 1e-3, "pflop/s": 1e3},
    "metric_mfu": {"%": 0.01},
    "metric_peak_mem_gb": {"gb": 1.0, "mb": 1e-3, "b": 1e-9, "gib": 1.0, "mib": 2.0**-10},
}  # fmt: skip
"""Units that a measurement may have behind its number -> factor to that of the column (memory: GB or GiB)."""
_QUANTITY: Final = re.compile(r"([-+]?[\d.,]+(?:e[-+]?\d+)?)\s*((?:[a-z%\u00b5/][a-z%\u00b5/ ]*)?)", re.IGNORECASE)
_GROUPED: Final = re.compile(r"\d{1,3}(,\d{3})+(\.\d*)?")


def is_blank(text: str) -> bool:
    """Whether a cell says nothing.

    >>> is_blank("N/A"), is_blank("not stated"), is_blank("0")
    (True, True, False)
    """
    return text.strip().lower() in _BLANK


def _value(text: str) -> float:
    """A number, with commas between groups of three digits or without; NaN for a text that is none."""
    try:
        return float(text.replace(",", "") if _GROUPED.fullmatch(text) else text)
    except ValueError:
        return math.nan


@dataclass(slots=True)
class TableRow:
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

        >>> [TableRow(1, {"a": text}).number("a") for text in ("1,024", "8.0", "-3", "1e999", "1e-320", "many", "")]
        [1024.0, 8.0, None, None, None, None, None]
        """
        text = self.text(name)
        if is_blank(text):
            return None
        value = _value(text)
        if not 1 / LARGEST <= value <= LARGEST:  # false for NaN
            self.note(name)
            return None
        return value

    def measured(self, name: str) -> tuple[float, str] | None:
        """A positive measurement in the unit of its column, and the unit that stands behind it ("" without one).

        >>> name, texts = "metric_step_time_s", ("1.67 s", "1670ms", "2", "-1")
        >>> [TableRow(1, {name: text}).measured(name) for text in texts]
        [(1.67, 's'), (1.67, 'ms'), (2.0, ''), None]
        """
        text = self.text(name)
        found = _QUANTITY.fullmatch(text)
        unit = re.sub(r"(?<=sec)s$|(?<=second)s$|\s", "", found[2].lower()) if found else ""
        if not unit:
            value = self.number(name)
            return None if value is None else (value, "")
        factor = UNITS.get(name, {}).get(unit, math.nan)
        value = factor * _value(found[1]) if found else math.nan
        if not 1 / LARGEST <= value <= LARGEST:
            self.note(name)
            return None
        return float(f"{value:.15g}"), unit

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


def read_rows(
    path: str | Path,
    check: Callable[[str, list[str]], None] | None = None,
    given: Mapping[str, str] | None = None,
) -> list[TableRow]:
    """All records of a CSV or CSV.gz file with the columns of measured training runs.

    Commas, semicolons or tabs separate the cells, as in the first line; columns may have the names of
    :data:`~steptime.lab.measured.columns.OTHER_NAMES`.

    Args:
        path: the file.
        check: refuses a file by its columns; by default as :func:`check_columns`.
        given: column -> text of its empty cells, also where the file lacks the column.

    Raises:
        InputFileError: the file is missing, is no CSV, lacks a needed column, or has no rows.
    """
    where = str(path)
    text = _text(Path(path))
    reader = csv.reader(io.StringIO(text), strict=True, delimiter=delimiter_of(first_line(io.StringIO(text))[1]))
    try:
        header = next((cells for cells in reader if not says_nothing(cells)), None)
        if header is None:
            raise InputFileError(where, "is empty", hint="" if check else _columns_hint())
        named = own_names(header)
        names = [name for name, _ in named]
        (check or check_columns)(where, names + [name for name in given or {} if name not in names])
        rows = [filled(row, given or {}) for row in _records(reader, named, where)]
    except csv.Error as error:
        raise InputFileError(where, f"is no CSV: line {reader.line_num}: {error}") from error
    if not rows:
        raise InputFileError(where, "has no rows")
    return rows


def filled(row: TableRow, given: Mapping[str, str]) -> TableRow:
    """The row with a text in empty cells.

    >>> filled(TableRow(2, {"tp": "2", "pp": ""}), {"tp": "1", "pp": "4"}).cells
    {'tp': '2', 'pp': '4'}
    """
    missing = {name: text for name, text in given.items() if not row.text(name)}
    return replace(row, cells={**row.cells, **missing}) if missing else row


def _records(reader: Any, named: list[tuple[str, str]], where: str) -> Iterator[TableRow]:
    """Rows with the line of the file on which each begins.

    Raises:
        InputFileError: one has more cells than the header.
    """
    before = reader.line_num
    for cells in reader:
        line, before = before + 1, reader.line_num
        refuse_surplus(cells, len(named), line, reader.dialect.delimiter, where)
        if any(cell.strip() for cell in cells):
            yield TableRow(line, named_cells(named, cells))


def named_cells(named: Sequence[tuple[str, str]], cells: Sequence[str]) -> dict[str, str]:
    """Cells by own name of their column; bare numbers of a column with a unit of its own have it behind them.

    >>> named_cells([("metric_step_time_s", "ms"), ("metric_mfu", "%")], ["1670", "45 %"])
    {'metric_step_time_s': '1670 ms', 'metric_mfu': '45 %'}
    """
    pairs = zip(named, cells, strict=False)
    return {name: f"{cell} {unit}" if unit and cell.strip()[-1:].isdigit() else cell for (name, unit), cell in pairs}


def _text(path: Path) -> str:
    where = str(path)
    data = read_bytes(path, MAX_BYTES, "a table of runs")
    try:
        if data[:2] == b"\x1f\x8b":
            with gzip.open(io.BytesIO(data)) as stream:
                data = stream.read(MAX_BYTES + 1)
    except BROKEN as error:
        raise unreadable(path, error) from error
    if len(data) > MAX_BYTES:
        raise InputFileError(where, "is larger than 1 GiB")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputFileError(where, "is no CSV: it is not UTF-8 text", hint="save it as UTF-8") from None
    if "\0" in text:
        raise InputFileError(where, "is no CSV: it holds zero bytes", hint=_columns_hint())
    return text


def check_columns(where: str, names: list[str]) -> None:
    """Refuses a table without the columns of measured training runs.

    Raises:
        InputFileError: a needed column or any measurement is missing, or a column is there twice.
    """
    missing = [name for name in NEEDED if name not in names]
    if missing:
        raise InputFileError(where, f"lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}",
                             hint=_columns_hint())  # fmt: skip
    if not {*METRICS, "outcome"} & set(names):
        needed = f"it needs one of {', '.join(METRICS)}"
        raise InputFileError(where, "has no measurement", hint=near_misses(names) or needed)
    repeated = sorted(name for name, times in Counter(names).items() if name and times > 1)
    if repeated:
        raise InputFileError(where, f"has the column {shorten(repeated[0])!r} twice")


def _columns_hint() -> str:
    return f"needed: {', '.join(NEEDED)}, and one of {', '.join(METRICS)}; steptime score --columns lists all"
