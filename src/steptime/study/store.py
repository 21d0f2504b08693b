"""The store of a study's results: blocks of rows, whole or absent, and journals of what each block has.

::

    STORE/journal-0.jsonl       one line a block: its checksum, its points; one writer a journal
    STORE/blocks/CHECKSUM.parquet
    STORE/claims/CHUNK          locked by the run that computes the chunk

A block is written to a temporary file, brought to disk, renamed, and then named in a journal. A run that is killed
between any two of these leaves a file that no journal names, or a torn line that is dropped. Runs at the same time have
a journal each; locks go with their process.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from steptime.cli.output import plain
from steptime.errors import InputFileError, shorten
from steptime.store.files import BUSY, lock, prepare_folder, replace_file, unwritable
from steptime.store.journal import Journal, check_header, read_journal
from steptime.store.tables import connected
from steptime.study.evaluate import COLUMNS, Row

HEADER: Final = {"of": "results of studies", "store": 1}
JOURNALS: Final = "journal-*.jsonl"
CHECKSUM: Final = re.compile("[0-9a-f]{64}")
MOST_RUNS: Final = 1000
"""Runs on one store at a time."""
STALE_S: Final = 3600.0
"""Age from which a temporary file is of a run that was killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One file of rows."""

    checksum: str
    points: tuple[str, ...]


def _block(path: Path, record: Mapping[str, Any]) -> Block:
    """The block that a journal names.

    Raises:
        InputFileError: the name is no checksum, or its points are no texts.
    """
    checksum, points = record["key"], record.get("points")
    if not CHECKSUM.fullmatch(checksum) or not isinstance(points, list) or not all(isinstance(p, str) for p in points):
        hint = "delete the line, or the file, and run again"
        raise InputFileError(str(path), f"the line of {shorten(checksum, 70)!r} is damaged", hint=hint)
    return Block(checksum=checksum, points=tuple(points))


class Store:
    """A folder of results."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._blocks: dict[str, Block] = {}
        self._read: dict[Path, tuple[int, int]] = {}
        self._whole: dict[str, bool] = {}

    def path(self, checksum: str) -> Path:
        """File of a block."""
        return self.folder / "blocks" / f"{checksum}.parquet"

    def refresh(self) -> None:
        """Takes in what journals say now; those that did not change are not read again.

        Raises:
            InputFileError: a journal is damaged, or is that of another thing.
        """
        for path in sorted(self.folder.glob(JOURNALS)):
            found = path.stat()
            if not found.st_size or self._read.get(path) == (found.st_size, found.st_mtime_ns):
                continue  # empty: a run begins it
            stored = read_journal(path)
            check_header(path, {**stored.header, "journal": 1}, {"journal": 1, **HEADER})
            self._read[path] = (found.st_size, found.st_mtime_ns)
            for record in stored.records:
                self.add(_block(path, record))

    def add(self, block: Block) -> None:
        """Takes in one block."""
        known = self._blocks.get(block.checksum)
        if known is None or set(block.points) - set(known.points):
            self._blocks[block.checksum] = block

    def is_whole(self, checksum: str) -> bool:
        """Whether the file of a block is there and has the checksum that names it; looked at once."""
        if checksum not in self._whole:
            try:
                data = self.path(checksum).read_bytes()
            except OSError:
                data = b""
            self._whole[checksum] = checksum_of(data) == checksum
        return self._whole[checksum]

    def found(self, points: Sequence[str]) -> tuple[dict[str, str], tuple[str, ...]]:
        """Where the rows of points are: the block of each that has one, and blocks without which some are missing.

        A point that several blocks have is read from the first that is whole; the others may be damaged or gone.
        """
        wanted, at, broken = set(points), dict[str, str](), dict[str, set[str]]()
        for block in self._blocks.values():
            here = wanted.intersection(block.points)
            if not here:
                continue
            if self.is_whole(block.checksum):
                at.update((point, block.checksum) for point in here if point not in at)
            else:
                broken[block.checksum] = here
        return at, tuple(checksum for checksum, here in broken.items() if not here <= at.keys())

    @contextmanager
    def writing(self) -> Iterator[Writer]:
        """One run that adds to the store.

        Raises:
            InputFileError: the folder or a journal cannot be written.
        """
        for name in ("blocks", "claims"):
            prepare_folder(self.folder / name)
        self._sweep()
        journal = self._journal()
        try:
            self.refresh()
            yield Writer(self, journal)
        finally:
            journal.close()

    def _journal(self) -> Journal:
        """The first journal that no other run writes."""
        for number in range(MOST_RUNS):
            try:
                return Journal(self.folder / f"journal-{number}.jsonl", HEADER, resume=True)
            except InputFileError as error:
                if BUSY not in str(error):
                    raise
        raise InputFileError(str(self.folder), f"{MOST_RUNS} runs write to it")

    def _sweep(self) -> None:
        """Removes temporary files of runs that were killed."""
        for path in (self.folder / "blocks").glob(".*"):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > STALE_S:
                    path.unlink()


class Writer:
    """What one run does to its store."""

    def __init__(self, store: Store, journal: Journal) -> None:
        self.store, self._journal = store, journal

    def commit(self, rows: Sequence[Row], points: Sequence[str]) -> Block:
        """Adds a block; it is on disk when this returns.

        Raises:
            InputFileError: it cannot be written; nothing that was there is changed.
        """
        data = packed(rows)
        block = Block(checksum=checksum_of(data), points=tuple(points))
        path = self.store.path(block.checksum)
        try:
            replace_file(path, data)
            _sync_folder(path.parent)
        except OSError as error:
            raise unwritable(path, error) from None
        self._journal.append({"key": block.checksum, "points": list(points), "rows": len(rows)})
        self.store._whole[block.checksum] = True
        self.store.add(block)
        return block

    @contextmanager
    def claiming(self) -> Iterator[Claims]:
        """Claims of this run, which end with it."""
        claims = Claims(self.store.folder / "claims")
        try:
            yield claims
        finally:
            claims.close()


class Claims:
    """Chunks that this run computes; other runs leave them alone while it lives."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[str, int] = {}

    def take(self, name: str) -> bool:
        """Claims a chunk; False where another run has it.

        Raises:
            InputFileError: the claim cannot be written.
        """
        path = self._folder / name
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise unwritable(path, error) from None
        if not lock(handle):
            os.close(handle)
            return False
        self._held[name] = handle
        return True

    def drop(self, name: str) -> None:
        """Ends a claim."""
        handle = self._held.pop(name)
        with suppress(OSError):
            (self._folder / name).unlink()
        os.close(handle)

    def close(self) -> None:
        """Ends all claims."""
        for name in [*self._held]:
            self.drop(name)


def checksum_of(data: bytes) -> str:
    """Name of a block: SHA-256 of its bytes."""
    return hashlib.sha256(data).hexdigest()


def packed(rows: Sequence[Row]) -> bytes:
    """Rows as a Parquet file; columns are those of :data:`COLUMNS`, and what a row lacks is null.

    Raises:
        InputFileError: there is no room for temporary files.
    """
    import duckdb

    with tempfile.TemporaryDirectory(prefix="steptime-") as name:
        source, target = Path(name, "rows.json"), Path(name, "rows.parquet")
        try:
            json_rows(rows, source)
            with connected() as connection:
                connection.execute("set threads = 1")
                connection.execute(f"copy ({select_json(source, COLUMNS)}) to {quoted(target)} (format parquet)")
            return target.read_bytes()
        except (OSError, duckdb.Error) as error:
            reason = str(getattr(error, "strerror", None) or error).splitlines()[0]
            raise InputFileError(name, f"temporary files cannot be written: {reason}") from None


def quoted(path: str | os.PathLike[str]) -> str:
    """A path as a text in SQL.

    >>> quoted("it's")
    "'it''s'"
    """
    return "'" + os.fspath(path).replace("'", "''") + "'"


def select_json(path: Path, columns: Mapping[str, str]) -> str:
    """Query of the rows of a file of JSON lines, with the types of their columns."""
    types = ", ".join(f"'{name}': '{kind.upper()}'" for name, kind in columns.items())
    return f"select * from read_json({quoted(path)}, format = 'newline_delimited', columns = {{{types}}})"


def _sync_folder(folder: Path) -> None:
    """Brings the names of a folder to disk."""
    if os.name != "posix":  # no folders to open on this system
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some file systems cannot
            os.fsync(handle)
    finally:
        os.close(handle)


def json_rows(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Writes rows as JSON lines."""
    path.write_text("".join(f"{json.dumps(plain(row), allow_nan=False)}\n" for row in rows), encoding="utf-8")
