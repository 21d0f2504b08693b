"""From a CSV file to rows of text, the names of their columns, and why a row cannot be used."""

from __future__ import annotations

import csv
import gzip
import io
import math
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Final

from steptime.errors import InputFileError, shorten
from steptime.store.files import BROKEN, read_bytes, unreadable
from steptime.store.tables import delimiter_of, first_line, refuse_surplus, says_nothing


@cache
def table(name: str) -> Mapping[str, Any]:
    """The table ``name`` of the folder ``tables``, for example ``"defaults"``."""
    file = resources.files("steptime.measure.runs") / "tables" / f"{name}.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


OTHER_NAMES: Final[Mapping[str, tuple[str, ...]]] = table("columns")["other_names"]
"""Column -> other names that it may have; its own name wins, then the first of these."""
FURTHER: Final[frozenset[str]] = frozenset(table("columns")["columns"]["further"])
"""Columns without other names: those that are read, and those that are derived from others."""
SCALED: Final[Mapping[str, tuple[str, str]]] = table("columns")["scaled"]
"""Name of a column with a unit of its own -> column, and the unit of its cells."""
WORDS: Final[Mapping[str, str]] = table("columns")["words"]
"""Spelling of a word in the name of a column -> its usual spelling."""
NEAR: Final[Mapping[str, str]] = table("columns")["near"]
"""Words of a column that nothing reads -> what to write instead, the first that fits."""


def name_key(name: str) -> str:
    """A name of a column without case, and with ``_`` for all that joins its words.

    >>> name_key(" Step time (s)"), name_key("Tokens/s/GPU"), name_key("metric_mfu")
    ('step_time_s', 'tokens_s_gpu', 'metric_mfu')
    """
    return re.sub(r"[^a-z0-9]+", "_", name.strip().lower()).strip("_")


def _spelled(key: str) -> str:
    """A key in the spelling of :data:`WORDS`, without ``per``.

    >>> _spelled("tok_per_sec_per_gpu"), _spelled("peak_mem_gb")
    ('tokens_s_gpu', 'peak_memory_gb')
    """
    return "_".join(WORDS.get(word, word) for word in key.split("_") if word != "per")


@cache
def _known() -> Mapping[str, tuple[str, str, int]]:
    """Spelled key -> own name, unit of the cells, and rank among the names of its column."""
    found: dict[str, tuple[str, str, int]] = {}
    for own, others in OTHER_NAMES.items():
        for rank, other in enumerate((own, *others)):
            found.setdefault(_spelled(other), (own, "", rank))
    for rank, (other, (own, unit)) in enumerate(SCALED.items(), 100):
        found.setdefault(_spelled(other), (own, unit, rank))
    return found


def own_names(names: Sequence[str]) -> list[tuple[str, str]]:
    """Own name of each column of a file and the unit of its cells; a column that is taken already keeps its name.

    >>> own_names(["Model", "cluster", "gpus", "step_time_ms", "mine"])
    [('model', ''), ('gpu', ''), ('n_gpus', ''), ('metric_step_time_s', 'ms'), ('mine', '')]
    """
    meant = [_known().get(_spelled(name_key(name)), (name.strip(), "", 0)) for name in names]
    best: dict[str, int] = {}
    for own, _, rank in meant:
        best[own] = min(rank, best.get(own, rank))
    pairs = zip(names, meant, strict=True)
    return [(own, unit) if best[own] == rank else (name.strip(), "") for name, (own, unit, rank) in pairs]


def near_misses(names: Iterable[str]) -> str:
    """Hints for unread columns that may be measurements; "" where there are none.

    >>> near_misses(["model", "tokens_per_sec", "loss"])
    "'tokens_per_sec' is not read: tokens per second of one device stand in tokens_per_s_per_gpu"
    """
    unread = [name for name in names if name not in OTHER_NAMES and name not in FURTHER]
    hints = (
        (
            name,
            next(
                (text for near, text in NEAR.items() if set(_spelled(name_key(name)).split("_")) & set(near.split())),
                "",
            ),
        )
        for name in unread
    )
    return "; ".join([f"{shorten(name)!r} is not read: {text}" for name, text in hints if text][:3])


def not_read(cells: Iterable[Mapping[str, str]], also: Callable[[str], bool] = lambda _: False) -> tuple[str, ...]:
    """Columns of a table, under their own names, that have text and that nothing reads.

    Args:
        cells: text by column, of each row.
        also: true for further columns that are read.

    >>> not_read([{"model": "x", "notes": "y", "loss": "", "optimizer": ""}, {"model": "x", "optimizer": "lion"}])
    ('optimizer',)
    """
    found: dict[str, None] = {}
    for row in cells:
        for name, text in row.items():
            if text.strip() and name not in OTHER_NAMES and name not in FURTHER and not also(name):
                found.setdefault(name)
    return tuple(found)


class Reason(StrEnum):
    """Why a row gives no :class:`~steptime.measure.runs.run.MeasuredRun`; one per row, the first that applies."""

    DUPLICATE = "the same line stands earlier in the file"
    NO_DEVICE = "the accelerator is not named"
    UNKNOWN_DEVICE = "the accelerator is not in the catalogue"
    AMBIGUOUS_DEVICE = "the accelerator is one of several"
    NO_GPUS = "the number of accelerators is not stated"
    UNSUPPORTED_ARCHITECTURE = "not a transformer of equal blocks"
    NO_ARCHITECTURE = "neither a known model nor layers, hidden and heads"
    MODEL_FILE = "the file of the model cannot be used"
    BAD_ARCHITECTURE = "the shape contradicts itself"
    NO_SEQUENCE = "the sequence length is not stated"
    NO_BATCH = "the global batch is not stated"
    BAD_NUMBER = "a number that is needed cannot be read"
    DEGREES_CONTRADICT = "the degrees do not multiply to the accelerators"
    BATCH_CONTRADICTS = "the batch does not divide among the replicas"
    BAD_MEASUREMENT = "a measurement is no positive number with a known unit"
    NO_MEASUREMENT = "no time, rate or memory is given"
    NO_STAGES = "fewer than two pipeline stages, or their micro-batches are not stated"
    MORE_STAGES = "more pipeline stages than layers"
    NO_OUTCOME = "the outcome is neither that it ran nor that it ran out of memory"
    INTERNAL = "not understood"


class Flag(StrEnum):
    """An assumption or a doubt about a row; rows with one of :data:`NO_CLAIM` count but support no claim."""

    DEVICE_ASSUMED = "variant of the accelerator assumed"
    ARCHITECTURE_GUESSED = "shape guessed from the number of parameters"
    LAYERS_DERIVED = "layers derived from the number of parameters"
    HEADS_ASSUMED = "heads assumed"
    FFN_ASSUMED = "width of the MLP assumed"
    VOCAB_ASSUMED = "vocabulary assumed"
    DTYPE_ASSUMED = "dtype not stated"
    DTYPE_UNREAD = "spelling of the dtype unknown"
    TEXT_UNREAD = "spelling of a setting unknown"
    CELL_UNREAD = "a number that is not needed cannot be read"
    DEGREES_ASSUMED = "degrees not stated"
    DP_REDERIVED = "printed data-parallel degree does not fit; derived from the others"
    MICRO_BATCH_REPLACED = "printed micro-batch does not divide the batch; the largest that does"
    BATCH_DERIVED = "global batch derived from micro-batch, replicas and accumulation"
    NODE_ASSUMED = "accelerators per node assumed"
    TIME_INCONSISTENT = "printed time and rate differ by more than 2 %"
    TIME_UNITS = "printed time and rate differ a hundredfold or more: a wrong unit?"
    TIME_IMPLAUSIBLE = "faster than the peak of the accelerators"
    FLOPS_UNDEFINED = "time from a rate whose FLOPs are not defined"
    MEMORY_UNREAD = "printed memory is no positive number with a known unit"
    STAGES_ABOVE_LAYERS = "more pipeline stages than layers"
    MEMORY_ABOVE_DEVICE = "memory above that of the device"
    MEMORY_UNIT_ASSUMED = "GB or GiB not stated; GiB taken"
    OUTLIER = "marked as an outlier in the table"
    LOW_TRUST = "the source or its reader doubts the number"
    FROM_MEMORY = "figures partly from memory"
    ROW_ID_REPEATED = "another row has the same row_id"
    SCRIPT = "settings from the script behind the source"
    COMPUTED = "times of equal runs lie on one exact line: computed, not measured"


NO_CLAIM: Final = frozenset(
    {
        Flag.ARCHITECTURE_GUESSED,
        Flag.TIME_INCONSISTENT,
        Flag.TIME_UNITS,
        Flag.TIME_IMPLAUSIBLE,
        Flag.FLOPS_UNDEFINED,
        Flag.OUTLIER,
        Flag.LOW_TRUST,
        Flag.FROM_MEMORY,
        Flag.DP_REDERIVED,
    }
)
"""Flags of rows that are read and scored, but that no claim of accuracy should rest on."""
DOUBTS: Final = NO_CLAIM | {
    Flag.COMPUTED,
    Flag.MEMORY_UNREAD,
    Flag.CELL_UNREAD,
    Flag.TEXT_UNREAD,
    Flag.DTYPE_UNREAD,
    Flag.MEMORY_ABOVE_DEVICE,
    Flag.STAGES_ABOVE_LAYERS,
}
"""Flags that a report lists: its reader can do something about them."""


class RowProblem(Exception):
    """Raised while a row is read; never leaves the package."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail[:200]


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A row that is not used."""

    line: int
    """Line of the file on which the row begins; in a Parquet file its number, from 1."""
    row_id: str
    source_key: str
    reason: Reason
    detail: str
    """Text that was found, for example the unknown spelling."""
    measured: bool
    """The row prints batch, shape, and a step time or a number that gives one: it should be readable."""


def reason_counts(skipped: Iterable[Skipped]) -> dict[str, int]:
    """Number of skipped rows by reason, the most frequent first."""
    return dict(Counter(str(row.reason) for row in skipped).most_common())


NEEDED: Final = ("model", "seq_len", "gpu", "n_gpus", "global_batch_sequences")
"""Columns that must be there, if only with empty cells; ``layers``, ``hidden`` and ``heads`` too unless the model is
known by its name."""
METRICS: Final = (
    "metric_step_time_s",
    "metric_tokens_per_s_per_gpu",
    "metric_tflops_per_gpu",
    "metric_mfu",
    "metric_peak_mem_gb",
    "derived_step_time_s",
)
"""Columns of which one must be there."""
LARGEST: Final = 1e18
MAX_BYTES: Final = 2**30
_BLANK: Final = frozenset({"", "-", "--", "n/a", "na", "nan", "none", "null", "?", "unknown", "not stated"})
UNITS: Final[Mapping[str, Mapping[str, float]]] = table("columns")["units"]
"""Units that a measurement may have behind its number -> factor to that of the column (memory: GB or GiB)."""
_QUANTITY: Final = re.compile(r"([-+]?[\d.,]+(?:e[-+]?\d+)?)\s*((?:[a-z%\u00b5/][a-z%\u00b5/ ]*)?)", re.IGNORECASE)
_GROUPED: Final = re.compile(r"\d{1,3}(,\d{3})+(\.\d*)?")


def is_blank(text: str) -> bool:
    """True if a cell says nothing.

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
        """A positive finite number; None where the cell is empty or is not such a number (noted in ``unread``).

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
        """A positive whole number up to ``at_most``; None and noted as in :meth:`number`."""
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
    path: str | Path, check: Callable[[str, list[str]], None] | None = None, given: Mapping[str, str] | None = None
) -> list[TableRow]:
    """All records of a CSV or CSV.gz file with the columns of measured training runs.

    Commas, semicolons or tabs separate the cells, as in the first line; columns may have the names of
    :data:`~steptime.measure.runs.read.OTHER_NAMES`.

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
    """Cells by own name of their column; the unit of a column is appended to its bare numbers.

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
        raise InputFileError(
            where, f"lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}", hint=_columns_hint()
        )
    if not {*METRICS, "outcome"} & set(names):
        needed = f"it needs one of {', '.join(METRICS)}"
        raise InputFileError(where, "has no measurement", hint=near_misses(names) or needed)
    repeated = sorted(name for name, times in Counter(names).items() if name and times > 1)
    if repeated:
        raise InputFileError(where, f"has the column {shorten(repeated[0])!r} twice")


def _columns_hint() -> str:
    return f"needed: {', '.join(NEEDED)}, and one of {', '.join(METRICS)}; steptime score --columns lists all"
