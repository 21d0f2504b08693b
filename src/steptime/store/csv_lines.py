"""Lines of CSV files: where the header is, what separates its cells, and which line breaks the form."""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final, TextIO

from steptime.errors import counted
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


@contextmanager
def _opened(file: Path) -> Iterator[TextIO]:
    opener = gzip.open if file.name.lower().endswith(".gz") else open
    with opener(file, "rt", encoding="utf-8-sig", errors="replace", newline="") as stream:
        yield stream


def header_of(file: Path) -> Header | None:
    """The header of a CSV or CSV.gz file; None where it is no UTF-8, or a single cell."""
    try:
        with _opened(file) as stream:
            for number, line in enumerate(islice(iter(lambda: stream.readline(LONGEST), ""), PREAMBLE)):
                if line.strip() and not line.startswith("#"):
                    if not FOREIGN.isdisjoint(line):
                        return None
                    delimiter = delimiter_of(line)
                    cells = len(next(csv.reader([line], delimiter=delimiter)))
                    return Header(skipped=number, delimiter=delimiter, cells=cells) if cells > 1 else None
    except (OSError, EOFError, zlib.error, csv.Error):
        return None
    return None


def fault(file: Path, header: Header) -> str | None:
    """What the first line that breaks the form does, in words; None where no line does.

    Args:
        file: CSV or CSV.gz.
        header: what :func:`header_of` found.
    """
    line = header.skipped
    try:
        with _opened(file) as stream:
            rows = csv.reader(islice(stream, header.skipped, None), delimiter=header.delimiter, strict=True)
            for row in rows:
                if row and len(row) != header.cells:
                    return f"line {line + 1} has {counted(len(row), 'cell')}, the header {header.cells}"
                line = header.skipped + rows.line_num
    except csv.Error as error:
        return f"line {line + 1} has a quote that is not closed, or text after one that is ({error})"
    except (OSError, EOFError, zlib.error):
        return None
    return None
