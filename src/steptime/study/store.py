"""The store of a study's results: one SQLite file, and locks on chunks that are being computed.

::

    STORE/results.sqlite    a row per point: its key, and its rows as packed JSON, which has a checksum
    STORE/claims/CHUNK      locked by the run that computes the chunk; a lock ends with its process

Points computed together are committed in one transaction. If a run is killed in a transaction, SQLite rolls it back
when the file is next opened, so that a point has all of its rows or none.
"""

from __future__ import annotations

import json
import os
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from steptime.cli.output import plain
from steptime.errors import InputFileError
from steptime.store.files import BUSY, ROOM_HINT, lock, prepare_folder, unwritable

Row = Mapping[str, Any]
FILE: Final = "results.sqlite"
FORM: Final = 0x57E90002
"""The file's ``application_id``: a store of the second format."""
WAIT_S: Final = 60.0
"""Longest wait for the transaction of another process."""


class Store:
    """A folder of results.

    Raises:
        InputFileError: it has results of the format before SQLite.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.file = self.folder / FILE
        if any(self.folder.glob("journal-*.jsonl")):
            problem = "has results of an older steptime"
            raise InputFileError(str(folder), problem, hint="give another --store, or delete it, and run again")

    def prepare(self) -> None:
        """Create the store if it is missing.

        Raises:
            InputFileError: it cannot be written.
        """
        prepare_folder(self.folder / "claims")
        with self._transaction("begin immediate", "rwc"):
            pass

    def read(self, points: Iterable[str]) -> Iterator[tuple[str, list[dict[str, Any]] | None]]:
        """Pairs of point and rows for the given points that the store has; rows are None if damaged.

        Raises:
            InputFileError: the file cannot be read.
        """
        if not self.file.exists():
            return
        query = "select point, rows from results where point in (select value from json_each(?))"
        with self._transaction() as database:
            found = database.execute(query, [json.dumps(list(points))]).fetchall()
        for point, packed in found:
            try:
                yield point, json.loads(zlib.decompress(packed))
            except (zlib.error, ValueError, TypeError):
                yield point, None

    def commit(self, rows: Sequence[Row]) -> None:
        """Add all rows of some points; they are on disk on return.

        Raises:
            InputFileError: they cannot be written; the store is unchanged.
        """
        found: dict[str, list[Row]] = {}
        for row in rows:
            found.setdefault(row["point"], []).append({name: row[name] for name in row if name != "point"})
        packed = [
            (point, zlib.compress(json.dumps(plain(own), allow_nan=False).encode())) for point, own in found.items()
        ]
        with self._transaction("begin immediate") as database:
            database.executemany("insert or replace into results values (?, ?)", packed)

    @contextmanager
    def _transaction(self, begin: str = "begin", mode: str = "rw") -> Iterator[sqlite3.Connection]:
        """A transaction on a connection of its own, so that no forked process inherits a connection.

        The journal is SQLite's default, which rolls back. A write-ahead log would be shared memory of one machine: runs
        of two machines on a network file system would damage the file, and a read-only folder could not be read.
        """
        place = f"{self.file.absolute().as_uri()}?mode={mode}"
        try:
            with closing(sqlite3.connect(place, uri=True, timeout=WAIT_S, isolation_level=None)) as database:
                database.execute(begin)
                (form,) = database.execute("pragma application_id").fetchone()
                if not database.execute("select count(*) from sqlite_master").fetchone()[0]:
                    database.execute("create table results (point text primary key, rows blob not null)")
                    database.execute(f"pragma application_id = {FORM}")
                elif form != FORM:
                    raise InputFileError(str(self.file), "is no store of studies", hint="give another --store")
                yield database
                database.execute("commit")
        except sqlite3.Error as error:
            raise self._failure(error) from None

    def _failure(self, error: sqlite3.Error) -> InputFileError:
        name = getattr(error, "sqlite_errorname", "")
        if name.startswith("SQLITE_BUSY"):
            return InputFileError(str(self.file), BUSY, hint="run again once it has ended")
        if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
            return InputFileError(str(self.file), "is damaged", hint="delete it, and run again")
        if name.startswith("SQLITE_IOERR_LOCK"):
            hint = "give a --store on a disk whose files can be locked"
            return InputFileError(str(self.file), "cannot be locked", hint=hint)
        full = name.startswith(("SQLITE_FULL", "SQLITE_IOERR"))
        return InputFileError(str(self.file), f"cannot be used: {error}", hint=ROOM_HINT if full else None)

    @contextmanager
    def claiming(self) -> Iterator[Claims]:
        """Context of one run's claims, which end with it."""
        claims = Claims(self.folder / "claims")
        try:
            yield claims
        finally:
            claims.close()


class Claims:
    """Chunks that this run computes, locked against other runs while it lives."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[str, int] = {}

    def take(self, name: str) -> bool:
        """Claim a chunk; False: another run has it.

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
        """End a claim."""
        handle = self._held.pop(name)
        with suppress(OSError):
            (self._folder / name).unlink()
        os.close(handle)

    def close(self) -> None:
        """End all claims."""
        for name in [*self._held]:
            self.drop(name)
