"""Lines of CSV files: where the header is, what separates its cells, and which line breaks the form."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final, TextIO

from steptime.errors import InputFileError, counted
from steptime.store.files import BROKEN
from steptime.store.tables import delimiter_of

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
    """What is wrong with a line that has more or fewer cells than the header."""
    return f"line {line} has {counted(cells, 'cell')}, the header {header}"


def refuse_surplus(cells: Sequence[str], header: int, line: int, delimiter: str, where: str) -> None:
    """Refuses a line that says something beyond the cells of the header; empty cells there are left alone.

    Raises:
        InputFileError: it does; the message has the line.
    """
    if any(cell.strip() for cell in cells[header:]):
        raise InputFileError(where, unlike_header(line, len(cells), header), hint=in_quotes(delimiter))


def in_quotes(delimiter: str) -> str:
    """What to do about a line with more cells than were meant.

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
    """What the first line that breaks the form does, in words; None where no line does.

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
