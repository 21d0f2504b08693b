"""Tables: CSV, CSV.gz and Parquet, by the ending of a file.

Lines of CSV files: where the header is, what separates its cells, and which line breaks the form.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final, TextIO

from steptime.errors import InputFileError, UserError, counted, shorten
from steptime.store.files import BROKEN, refuse_unwritable

TABLES: Final = {".csv": "csv, header true", ".csv.gz": "csv, header true, compression gzip", ".parquet": "parquet"}


_INTERRUPTED: Final = ("Query interrupted", "INTERRUPT Error")
"""How DuckDB's words for Ctrl-C begin."""


@contextmanager
def connected() -> Iterator[Any]:
    """A connection of DuckDB, closed at the end.

    Raises:
        KeyboardInterrupt: Ctrl-C while it works, of which DuckDB makes an error.
    """
    import duckdb

    connection = duckdb.connect()
    try:
        yield connection
    except (duckdb.InterruptException, RuntimeError) as error:
        if str(error).startswith(_INTERRUPTED):
            raise KeyboardInterrupt from None
        raise
    finally:
        connection.close()


def delimiter_of(line: str) -> str:
    """Separator of the cells of a line: a comma unless a semicolon or a tab is more frequent.

    >>> delimiter_of("a;b;c,d"), delimiter_of("a")
    (';', ',')
    """
    return max(",;\t", key=line.count)


def refuse_table(path: str | Path) -> str:
    """Find out before the work that a table cannot be written; its ending, of :data:`TABLES`.

    Raises:
        UserError: the ending is none of these.
        InputFileError: as :func:`refuse_unwritable`.
    """
    ending = next((e for e in TABLES if Path(path).name.lower().endswith(e)), None)
    if ending is None:
        raise UserError(f"{shorten(str(path))} is not a table", hint=f"give a file that ends in {', '.join(TABLES)}")
    refuse_unwritable(path)
    return ending


def write_table(path: str | Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes rows as CSV, CSV.gz or Parquet, by the ending; columns are those of all rows, in order of appearance.

    Numbers become doubles, everything else text; what a row lacks is null.

    Raises:
        UserError: the ending is none of these, or there are no rows.
        InputFileError: it cannot be written.
    """
    import duckdb

    target, ending = Path(path), refuse_table(path)
    if not rows:
        raise UserError(f"there are no rows for {shorten(str(path))}")
    columns = list({name: None for row in rows for name in row})
    numeric = {c: all(isinstance(row.get(c), (int, float, type(None))) for row in rows) for c in columns}
    types = ", ".join(f"{_quoted(c)} {'double' if numeric[c] else 'varchar'}" for c in columns)
    values = [[_cell(row.get(c), numeric[c]) for c in columns] for row in rows]
    try:
        with connected() as connection:
            connection.execute(f"create table t ({types})")
            connection.executemany(f"insert into t values ({', '.join('?' * len(columns))})", values)
            literal = str(target).replace("'", "''")
            connection.execute(f"copy t to '{literal}' (format {TABLES[ending]})")
    except duckdb.Error as error:
        why = str(error).splitlines()[0].rpartition('": ')[2].partition('"')[0]  # behind the name of the file
        raise InputFileError(str(path), f"cannot be written: {why[:200]}") from None


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _cell(value: Any, numeric: bool) -> Any:
    return value if numeric or value is None else str(value)


LONGEST: Final = 2**20
"""Characters of a header that are looked at."""
FOREIGN: Final = frozenset("\0\ufffd")
"""Characters of a header that is not UTF-8."""
PREAMBLE: Final = 1000
"""Lines before a header that may be blank or comments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The first line of a file that is neither blank nor a comment."""

    skipped: int
    """Lines before it."""
    delimiter: str
    cells: int


def opened(file: Path, errors: str = "strict") -> TextIO:
    """The text of a CSV or CSV.gz file, lines ending as they do there; ``errors``: what becomes of no UTF-8."""
    if file.name.lower().endswith(".gz"):
        return gzip.open(file, "rt", encoding="utf-8-sig", errors=errors, newline="")
    return file.open(encoding="utf-8-sig", errors=errors, newline="")


def says_nothing(cells: Sequence[str]) -> bool:
    """Whether the cells of a line, or the line as one cell, are blank or a comment.

    >>> [says_nothing(cells) for cells in (["# by hand", "1"], ["", " "], [], ["1", "# by hand"])]
    [True, True, True, False]
    """
    return not any(cell.strip() for cell in cells) or cells[0].startswith("#")


def first_line(lines: Iterable[str]) -> tuple[int, str]:
    """The first line that is neither blank nor a comment, behind the number of lines before it; "" without one.

    >>> first_line(["# by hand", "", "a,b", "1,2"])
    (2, 'a,b')
    """
    return next(((number, line) for number, line in enumerate(lines) if not says_nothing([line])), (0, ""))


def beginning(stream: TextIO) -> Iterator[str]:
    """The lines in which a header is looked for, also in a file without line breaks."""
    return islice(iter(lambda: stream.readline(LONGEST), ""), PREAMBLE)


def unlike_header(line: int, cells: int, header: int) -> str:
    """Message on a line that has more or fewer cells than the header."""
    return f"line {line} has {counted(cells, 'cell')}, the header {header}"


def refuse_surplus(cells: Sequence[str], header: int, line: int, delimiter: str, where: str) -> None:
    """Refuses a line that says something beyond the cells of the header; empty cells there are left alone.

    Raises:
        InputFileError: it does; the message has the line.
    """
    if any(cell.strip() for cell in cells[header:]):
        raise InputFileError(where, unlike_header(line, len(cells), header), hint=in_quotes(delimiter))


def in_quotes(delimiter: str) -> str:
    """Hint for a line with more cells than were meant.

    >>> in_quotes(","), in_quotes(";")
    ("a cell that holds a ',', as 1,670 does, stands in quotes", "a cell that holds a ';' stands in quotes")
    """
    return f"a cell that holds a {delimiter!r}{', as 1,670 does,' if delimiter == ',' else ''} stands in quotes"


def header_of(file: Path) -> Header | None:
    """The header of a CSV or CSV.gz file; None where it is no UTF-8, or a single cell."""
    try:
        with opened(file, errors="replace") as stream:
            skipped, line = first_line(beginning(stream))
        if not line or not FOREIGN.isdisjoint(line):
            return None
        delimiter = delimiter_of(line)
        cells = len(next(csv.reader([line], delimiter=delimiter)))
        return Header(skipped=skipped, delimiter=delimiter, cells=cells) if cells > 1 else None
    except (*BROKEN, csv.Error):
        return None


def fault(file: Path, header: Header) -> str | None:
    """Message on the first line that breaks the form; None where no line does.

    Args:
        file: CSV or CSV.gz.
        header: what :func:`header_of` found.
    """
    line = header.skipped
    try:
        with opened(file, errors="replace") as stream:
            rows = csv.reader(islice(stream, header.skipped, None), delimiter=header.delimiter, strict=True)
            for row in rows:
                if row and len(row) != header.cells:
                    return unlike_header(line + 1, len(row), header.cells)
                line = header.skipped + rows.line_num
    except csv.Error as error:
        return f"line {line + 1} has a quote that is not closed, or text after one that is ({error})"
    except BROKEN:
        return None
    return None
