"""Tables: CSV, CSV.gz and Parquet, by the ending of a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from steptime.errors import InputFileError, UserError, shorten
from steptime.store.files import refuse_unwritable

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
    """What separates the cells of a line: a comma unless a semicolon or a tab is more frequent.

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
