"""Tables as CSV, CSV.gz and Parquet, by the ending of a file.

Lines of CSV files: place of the header, separator of cells, and lines that break the form.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import Any, Final, TextIO

from steptime.errors import InputFileError, UserError, counted, shorten
from steptime.registry import needed, require
from steptime.store.files import refuse_unwritable, write_bytes

TABLES: Final = (".csv", ".csv.gz", ".parquet")


_INTERRUPTED: Final = ("Query interrupted", "INTERRUPT Error")
"""Starts of DuckDB's messages for Ctrl-C."""


@contextmanager
def connected(what: str, failed: Callable[[str], UserError]) -> Iterator[Any]:
    """A connection of DuckDB, closed at the end.

    Args:
        what: feature that needs DuckDB, for the message if it is not installed.
        failed: makes the error from the first line of DuckDB's message.
    Raises:
        UserError: DuckDB is not installed, or the error of ``failed``.
        KeyboardInterrupt: Ctrl-C during a query, which DuckDB reports as an error.
    """
    duckdb = needed("duckdb", what)
    connection = duckdb.connect()
    try:
        yield connection
    except (duckdb.Error, RuntimeError) as error:
        if str(error).startswith(_INTERRUPTED):
            raise KeyboardInterrupt from None
        if not isinstance(error, duckdb.Error):
            raise
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise failed(lines[0] if lines else type(error).__name__) from None
    finally:
        connection.close()


def filled(connection: Any, table: str, rows: Iterable[Mapping[str, Any]], types: Mapping[str, str]) -> None:
    """Create a table of DuckDB from rows of plain data.

    Args:
        connection: connection from :func:`connected`.
        table: its name.
        rows: its rows; missing values are null.
        types: column -> SQL type.
    """
    columns = ", ".join(f"{_quoted(name)}: {_quoted(kind.upper())}" for name, kind in types.items())
    form = f"format = 'newline_delimited', columns = {{{columns}}}"
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", prefix="steptime-", suffix=".json") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in rows)
        file.flush()
        connection.execute(f"create table {table} as select * from read_json({_quoted(file.name)}, {form})")


def delimiter_of(line: str) -> str:
    """Separator of the cells of a line: a comma unless a semicolon, a tab or a bar is more frequent.

    >>> delimiter_of("a;b;c,d"), delimiter_of("a")
    (';', ',')
    """
    return max(",;\t|", key=line.count)


def refuse_table(path: str | PathLike[str]) -> str:
    """Check before the work that a table can be written; returns its ending, one of :data:`TABLES`.

    Raises:
        UserError: the ending is none of these, or it is Parquet and DuckDB is not installed.
        InputFileError: as :func:`refuse_unwritable`.
    """
    ending = next((e for e in TABLES if Path(path).name.lower().endswith(e)), None)
    if ending is None:
        raise UserError(f"{shorten(str(path))} is not a table", hint=f"give a file that ends in {', '.join(TABLES)}")
    if ending == ".parquet":
        require("duckdb", PARQUET)
    refuse_unwritable(path)
    return ending


def write_table(
    path: str | PathLike[str], rows: Sequence[Mapping[str, Any]], types: Mapping[str, str] | None = None
) -> None:
    """Write rows as CSV, CSV.gz or Parquet, by the ending; missing values are empty or null.

    Args:
        path: the file.
        rows: rows of plain data.
        types: column -> SQL type; None: the columns of all rows in order of appearance, doubles if all values are
            numbers, else text.

    Raises:
        UserError: the ending is none of these, it is Parquet and DuckDB is not installed, or there are neither rows nor
            types.
        InputFileError: it cannot be written.
    """
    ending = refuse_table(path)
    if types is None:
        if not rows:
            raise UserError(f"there are no rows for {shorten(str(path))}")
        names = {name: None for row in rows for name in row}
        numeric = {c: all(isinstance(row.get(c), (int, float, type(None))) for row in rows) for c in names}
        types = {c: "double" if numeric[c] else "varchar" for c in names}
        of = {"double": float, "varchar": str}
        rows = [{c: of[types[c]](value) for c, value in row.items() if value is not None} for row in rows]
    if ending == ".parquet":
        _write_parquet(path, rows, types)
        return
    out = io.StringIO()
    writer = csv.DictWriter(out, types, restval=None, lineterminator="\n")
    writer.writeheader()
    writer.writerows({c: str(v).lower() if isinstance(v, bool) else v for c, v in row.items()} for row in rows)
    data = out.getvalue().encode()
    write_bytes(path, gzip.compress(data, mtime=0) if ending == ".csv.gz" else data)


def _write_parquet(path: str | PathLike[str], rows: Sequence[Mapping[str, Any]], types: Mapping[str, str]) -> None:
    def failed(why: str) -> InputFileError:
        reason = why.rpartition('": ')[2].partition('"')[0]  # behind the name of the file
        return InputFileError(str(path), f"cannot be written: {reason[:200]}")

    with connected(PARQUET, failed) as connection:
        filled(connection, "t", rows, types)
        connection.execute(f"copy t to {_quoted(str(path))} (format parquet)")


def _quoted(text: str) -> str:
    """A text in SQL.

    >>> _quoted("it's")
    "'it''s'"
    """
    return "'" + text.replace("'", "''") + "'"


PARQUET: Final = "a table in Parquet"
LONGEST: Final = 2**20
"""Largest number of characters of a header line."""
PREAMBLE: Final = 1000
"""Largest number of lines, blank or comments, before a header."""


def opened(file: Path) -> TextIO:
    """The open text of a CSV or CSV.gz file in UTF-8, with its own line endings."""
    if file.name.lower().endswith(".gz"):
        return gzip.open(file, "rt", encoding="utf-8-sig", newline="")
    return file.open(encoding="utf-8-sig", newline="")


def says_nothing(cells: Sequence[str]) -> bool:
    """True if the cells of a line, or the line as one cell, are blank or a comment.

    >>> [says_nothing(cells) for cells in (["# by hand", "1"], ["", " "], [], ["1", "# by hand"])]
    [True, True, True, False]
    """
    return not any(cell.strip() for cell in cells) or cells[0].startswith("#")


def first_line(lines: Iterable[str]) -> tuple[int, str]:
    """Number of lines before the first line that is neither blank nor a comment, and this line; "": there is none.

    >>> first_line(["# by hand", "", "a,b", "1,2"])
    (2, 'a,b')
    """
    return next(((number, line) for number, line in enumerate(lines) if not says_nothing([line])), (0, ""))


def beginning(stream: TextIO) -> Iterator[str]:
    """The lines among which the header is searched, also in a file without line breaks."""
    return islice(iter(lambda: stream.readline(LONGEST), ""), PREAMBLE)


def unlike_header(line: int, cells: int, header: int) -> str:
    """Message on a line that has more or fewer cells than the header."""
    return f"line {line} has {counted(cells, 'cell')}, the header {header}"


def refuse_surplus(cells: Sequence[str], header: int, line: int, delimiter: str, where: str) -> None:
    """Refuse a line with more nonempty cells than the header; surplus empty cells are ignored.

    Raises:
        InputFileError: the line has surplus cells; the message has its number.
    """
    if any(cell.strip() for cell in cells[header:]):
        raise InputFileError(where, unlike_header(line, len(cells), header), hint=in_quotes(delimiter))


def in_quotes(delimiter: str) -> str:
    """Hint for a line with more cells than were meant.

    >>> in_quotes(","), in_quotes(";")
    ("a cell that holds a ',', as 1,670 does, stands in quotes", "a cell that holds a ';' stands in quotes")
    """
    return f"a cell that holds a {delimiter!r}{', as 1,670 does,' if delimiter == ',' else ''} stands in quotes"


def cells_of(file: Path) -> Iterator[list[str]]:
    """The header of a CSV or CSV.gz file, then its rows, each with the same number of cells, without blank lines.

    Raises:
        InputFileError: a line breaks the form; the message has the line.
        OSError, EOFError, zlib.error, UnicodeDecodeError: the file cannot be read.
    """
    with opened(file) as stream:
        skipped, line = first_line(beginning(stream))
    delimiter, header, at = delimiter_of(line), 0, skipped
    with opened(file) as stream:
        rows = csv.reader(islice(stream, skipped, None), delimiter=delimiter, strict=True)
        try:
            for row in rows:
                header = header or len(row)
                if row and len(row) != header:
                    raise _broken(file, unlike_header(at + 1, len(row), header), delimiter)
                if row:
                    yield row
                at = skipped + rows.line_num
        except csv.Error as error:
            problem = f"line {at + 1} has a quote that is not closed, or text after one that is ({error})"
            raise _broken(file, problem, delimiter) from None


def _broken(file: Path, problem: str, delimiter: str) -> InputFileError:
    return InputFileError(str(file), problem, hint=f"every line has the cells of the header; {in_quotes(delimiter)}")
