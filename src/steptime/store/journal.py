"""A journal of measurements that can be resumed.

A journal is JSON lines. The first line is its header, which names the measurement and the machine; every other line
is one record with a ``key``. A record is on disk when :meth:`Journal.append` returns, so an interrupted run loses at
most the measurement in progress. A last line that was torn by a crash is dropped.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from steptime.errors import InputFileError, counted, shorten
from steptime.store.files import BUSY, lock, read_bytes, refuse_special, unreadable, unwritable

#: Larger journals are refused unread.
MAX_BYTES: Final = 2**30

Record = Mapping[str, Any]


def content_key(content: Mapping[str, Any]) -> str:
    """A short name that depends on the content alone: equal contents have equal keys on every machine.

    Raises:
        ValueError: the content is not plain JSON data, or holds a number that is not finite.

    >>> content_key({"a": 1, "b": 2.5}) == content_key({"b": 2.5, "a": 1})
    True
    >>> len(content_key({}))
    24
    """
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Contents of a journal file."""

    header: Record
    records: tuple[Record, ...]
    whole_bytes: int
    """Length of the intact part; a torn line may follow."""


def read_journal(path: str | Path) -> Stored:
    """The header and the records of a journal; a torn last line is left out.

    Raises:
        InputFileError: the file is missing, it cannot be read, it is no journal, or a line in its middle is damaged.
    """
    data = read_bytes(path, MAX_BYTES, "a journal")
    whole, torn = data.rpartition(b"\n")[0], data.rpartition(b"\n")[2]
    lines = whole.split(b"\n") if whole else []
    parsed = [_parsed(line) for line in lines]
    if parsed and parsed[-1] is None:  # a crash may leave a last line of zeros that ends in a newline
        torn = lines.pop() + b"\n" + torn
        parsed.pop()
    for number, record in enumerate(parsed, 1):
        if record is None or (number > 1 and not isinstance(record.get("key"), str)):
            problem = f"line {number} is damaged" if number > 1 else "is not a journal of steptime"
            raise InputFileError(str(path), problem, hint="delete the line, or the file, and run again")
    if not parsed or parsed[0] is None or "journal" not in parsed[0]:
        raise InputFileError(str(path), "is not a journal of steptime", hint="give another file, or delete this one")
    records = tuple(record for record in parsed[1:] if record is not None)
    return Stored(header=parsed[0], records=records, whole_bytes=len(data) - len(torn))


def refuse_busy(path: str | Path) -> None:
    """Refuse a journal that another process is writing.

    Raises:
        InputFileError: it is being written, or cannot be opened.
    """
    try:
        with Path(path).open("rb") as file:
            free = lock(file.fileno())
    except OSError as error:
        raise unreadable(path, error) from None
    if not free:
        raise InputFileError(str(path), BUSY)


def _parsed(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


class Journal:
    """An append-only file of records, one writer at a time.

    >>> import tempfile, os
    >>> path = os.path.join(tempfile.mkdtemp(), "a.jsonl")
    >>> with Journal(path, {"of": "this machine"}) as journal:
    ...     journal.append({"key": "x", "seconds": 2.0})
    >>> with Journal(path, {"of": "this machine"}, resume=True) as journal:
    ...     [dict(record) for record in journal.records]
    [{'key': 'x', 'seconds': 2.0}]
    """

    def __init__(self, path: str | Path, header: Record, *, resume: bool = False) -> None:
        """Open a journal for writing.

        Args:
            path: the file.
            header: measurement and machine; a journal is resumed only under an equal header.
            resume: continue an existing file; otherwise it is emptied.

        Raises:
            InputFileError: it cannot be opened, another process writes it, it is damaged, or it has another header.
        """
        self.path = Path(path)
        self.header: Record = {"journal": 1, **header}
        self._records: list[Record] = []
        self._file = self._open()
        try:
            self._lock()
            if resume and self._size():
                self._resume()
            else:
                self._file.truncate(0)
                self._write(self.header)
        except BaseException:
            self._file.close()
            raise

    def _open(self) -> io.FileIO:
        """Open unbuffered: bytes that a full disk refused must not be written again when the file is closed."""
        refuse_special(self.path)
        try:
            return self.path.open("ab", buffering=0)
        except OSError as error:
            raise unwritable(self.path, error) from None

    def _lock(self) -> None:
        if not lock(self._file.fileno()):
            raise InputFileError(str(self.path), BUSY)

    def _size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def _resume(self) -> None:
        stored = read_journal(self.path)
        check_header(self.path, stored.header, self.header)
        self._file.truncate(stored.whole_bytes)
        self._records = list(stored.records)

    @property
    def records(self) -> tuple[Record, ...]:
        """Every record, oldest first."""
        return tuple(self._records)

    @property
    def keys(self) -> frozenset[str]:
        """Keys of the records."""
        return frozenset(record["key"] for record in self._records)

    def append(self, record: Record) -> None:
        """Write one record; it is on disk on return.

        Raises:
            ValueError: the record has no ``key`` or is not plain JSON data.
            InputFileError: the disk is full or the file cannot be written.
        """
        if not isinstance(record.get("key"), str):
            raise ValueError("a record needs a key")
        self._write(record)
        self._records.append(record)

    def _write(self, record: Record) -> None:
        line = json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n"
        before, rest = self._size(), line.encode()
        kept = counted(len(self._records), "record")
        try:
            while rest:  # a disk that fills up takes a part
                rest = rest[self._file.write(rest) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(before)
            raise InputFileError(
                str(self.path),
                f"cannot be written: {error.strerror or error}",
                hint=f"it keeps {kept}: make room and resume" if self._records else None,
            ) from None

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_header(path: str | Path, found: Record, wanted: Record) -> None:
    """Refuse to mix measurements of different things.

    Raises:
        InputFileError: the headers differ; the message names every field that does, with both values.
    """
    names = [name for name in {**wanted, **found} if found.get(name) != wanted.get(name)]
    if names:
        shown = "; ".join(f"{name}: {_shown(found.get(name))} there, {_shown(wanted.get(name))} now" for name in names)
        raise InputFileError(
            str(path), f"is the journal of another measurement ({shown})", hint="give another file, or start afresh"
        )


def _shown(value: object) -> str:
    return shorten(json.dumps(value), 60) if value is not None else "absent"
