"""Run of a study: points missing in the store are computed chunk by chunk, and each chunk is committed at once."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any, Final

from steptime.errors import InternalError, UserError
from steptime.store.journal import content_key
from steptime.study.evaluate import REFUSED
from steptime.study.executors import Engine, Rows, engine_of, lost_too_often
from steptime.study.file import Study
from steptime.study.points import Point, forget
from steptime.study.store import Claims, Store

CHUNK: Final = 32
"""Points that are computed and committed together: a fraction of a second of searches."""
WINDOW: Final = 2
"""Chunks in flight per worker, so that no worker waits for the next."""
TRIES: Final = 5
"""Largest number of workers lost on one chunk before the run stops."""
POLL_S: Final = 0.2
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Counts of a run."""

    points: int
    """Distinct points of the study."""
    computed: int
    found: int
    """Points that the store already had, or another run computed meanwhile."""
    refused: int
    """Points with a contradictory job; their message is in the results."""
    damaged: tuple[str, ...]
    """Points whose rows were damaged; they were computed again."""
    lost_workers: int

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``."""
        return {name: getattr(self, name) for name in self.__slots__} | {"damaged": list(self.damaged)}


@dataclass(slots=True)
class _Chunk:
    """Points computed together; ``missing`` is known once the chunk is claimed."""

    name: str
    points: dict[str, Point]
    missing: list[str] = field(default_factory=list)
    lost: int = 0


def chunks_of(points: dict[str, Point]) -> list[_Chunk]:
    """Chunks of all points of a study; equal studies have equal chunks, independent of their stores."""
    keys = list(points)
    parts = [keys[start : start + CHUNK] for start in range(0, len(keys), CHUNK)]
    return [_Chunk(name=content_key({"points": part}), points={key: points[key] for key in part}) for part in parts]


def run(
    study: Study,
    store: str | os.PathLike[str] | Store,
    *,
    executor: str = "local",
    workers: int | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Compute the points of a study that are missing in a store.

    Args:
        study: its points.
        store: folder, created if missing. Other runs may write to it at the same time.
        executor: ``local``, ``ray``, ``dask`` or ``mpi``.
        workers: number of processes; None: the number of processors.
        progress: called with points done and all points.

    Raises:
        UserError: the store cannot be written, an executor is missing, or its workers die repeatedly; committed points
            are kept.
    """
    kept = store if isinstance(store, Store) else Store(store)
    kept.prepare()
    return _Run(study, kept, progress).through(executor, workers)


class _Run:
    def __init__(self, study: Study, store: Store, progress: Progress | None) -> None:
        self.store, self.progress = store, progress
        forget()
        self.points = {point.key: point for point in study.points}
        whole = {key: rows is not None for key, rows in store.read(self.points)}
        self.damaged = tuple(sorted(key for key, found in whole.items() if not found))
        self.open = {key for key in self.points if not whole.get(key)}
        self.computed, self.lost = 0, 0
        self.waiting = deque(chunk for chunk in chunks_of(self.points) if self.open.intersection(chunk.points))
        self.busy: dict[Future[Rows], _Chunk] = {}

    def through(self, executor: str, workers: int | None) -> Outcome:
        """Compute all open points."""
        self._tell()
        if self.waiting:
            few = min(len(self.waiting), workers) if workers and executor == "local" else workers
            with engine_of(executor, few) as engine, self.store.claiming() as claims:
                while self.waiting or self.busy:
                    self._submit(engine, claims)
                    self._collect(engine, claims)
        return Outcome(
            points=len(self.points),
            computed=self.computed,
            found=len(self.points) - self.computed,
            refused=self._refused(),
            damaged=self.damaged,
            lost_workers=self.lost,
        )

    def _submit(self, engine: Engine, claims: Claims) -> None:
        """Submit chunks until each worker has enough; chunks claimed by another run come last."""
        for _ in range(len(self.waiting)):
            if len(self.busy) >= WINDOW * engine.workers:
                return
            chunk = self.waiting.popleft()
            if not claims.take(chunk.name):
                self.waiting.append(chunk)
                continue
            missing = self.open.intersection(chunk.points)
            self._close({key for key, rows in self.store.read(missing) if rows is not None})
            chunk.missing = [key for key in chunk.points if key in self.open]
            if chunk.missing:
                self.busy[engine.submit([chunk.points[key] for key in chunk.missing])] = chunk
            else:
                claims.drop(chunk.name)

    def _collect(self, engine: Engine, claims: Claims) -> None:
        """Commit finished chunks; chunks of lost workers wait again."""
        if not self.busy:
            time.sleep(POLL_S if self.waiting else 0)  # another run computes the rest
            return
        done, _ = wait(self.busy, return_when=FIRST_COMPLETED, timeout=POLL_S)
        broken = False
        for future in done:
            chunk = self.busy.pop(future)
            error = future.exception()
            if isinstance(error, engine.lost):
                broken = True
                self._again(chunk, claims)
            elif error is not None:
                raise error
            else:
                self._commit(chunk, future.result())
                claims.drop(chunk.name)
        if broken:
            for chunk in self.busy.values():
                chunk.lost -= 1  # they may have been unharmed
                self._again(chunk, claims)
            self.busy.clear()
            self.lost += 1
            engine.restart()

    def _again(self, chunk: _Chunk, claims: Claims) -> None:
        claims.drop(chunk.name)
        chunk.lost += 1
        if chunk.lost >= TRIES:
            raise lost_too_often([chunk.points[key] for key in chunk.missing], chunk.lost)
        self.waiting.append(chunk)

    def _commit(self, chunk: _Chunk, rows: Rows) -> None:
        keys = {row["point"] for row in rows}
        if keys != set(chunk.missing):
            raise UserError(
                "a worker has another steptime, or other files of models and clusters, than this process",
                hint="install the same version everywhere, and give files under one path that nobody edits meanwhile",
            )
        self.store.commit(rows)
        self.computed += len(chunk.missing)
        self._close(chunk.missing)

    def _close(self, keys: Iterable[str]) -> None:
        self.open.difference_update(keys)
        self._tell()

    def _tell(self) -> None:
        if self.progress:
            self.progress(len(self.points) - len(self.open), len(self.points))

    def _refused(self) -> int:
        found = {key: rows for key, rows in self.store.read(self.points) if rows is not None}
        if set(found) != set(self.points):
            raise InternalError("a run ended with points that its store has not")
        return sum(row.get("status") == REFUSED for rows in found.values() for row in rows)
