"""Executors of blocks of points: this process, processes of this machine, Ray, Dask, MPI.

Tasks are blocks, never single points; workers write nothing, so that only one process commits to a store.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from typing import Any, ClassVar, Final

from steptime.errors import UserError, counted
from steptime.registry import Registry, needed
from steptime.study.evaluate import solve
from steptime.study.points import Point

Rows = list[dict[str, Any]]
MOST_WORKERS: Final = 100_000
STARTS: Final = 2
"""Attempts to start Ray."""


class Engine(ABC):
    """Interface of an executor: futures of ``concurrent.futures``, and a restart after lost workers."""

    #: Exceptions of a future whose worker is lost; the block is computed again.
    lost: tuple[type[BaseException], ...] = ()

    def __init__(self, workers: int) -> None:
        self.workers = workers

    @abstractmethod
    def submit(self, points: Sequence[Point]) -> Future[Rows]:
        """Compute the rows of some points."""

    def restart(self) -> Engine:
        """The engine to use after workers were lost; most engines replace workers on their own."""
        return self

    @abstractmethod
    def close(self) -> None:
        """Ends the workers."""

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()


class Here(Engine):
    """This process, one block after the other."""

    def submit(self, points: Sequence[Point]) -> Future[Rows]:
        """Compute the points at once."""
        future: Future[Rows] = Future()
        try:
            future.set_result(solve(points))
        except Exception as error:
            future.set_exception(error)
        return future

    def close(self) -> None:
        """Do nothing: there are no workers."""


class Local(Engine):
    """Processes of this machine, which end with their parent, even if it is killed."""

    lost = (BrokenProcessPool,)

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self._pool = self._started()

    def _started(self) -> ProcessPoolExecutor:
        context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        return ProcessPoolExecutor(self.workers, mp_context=context, initializer=end_with_parent)

    def submit(self, points: Sequence[Point]) -> Future[Rows]:
        """Compute the points in one of the processes."""
        try:
            return self._pool.submit(solve, points)
        except BrokenProcessPool as error:  # a process was lost since the last one was collected
            future: Future[Rows] = Future()
            future.set_exception(error)
            return future

    def restart(self) -> Engine:
        """Start all processes again."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool = self._started()
        return self

    def close(self) -> None:
        """End the processes once their blocks are done."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:  # what they compute is lost anyway
            for process in list(self._pool._processes.values()):
                process.terminate()
        self.close()


def end_with_parent() -> None:
    """End this process when its parent has ended, for whatever reason."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class _Pooled(Engine):
    """An executor of ``concurrent.futures``."""

    pool: Executor

    def submit(self, points: Sequence[Point]) -> Future[Rows]:
        """Compute the points in one of the workers."""
        return self.pool.submit(solve, points)

    def close(self) -> None:
        """End the workers."""
        self.pool.shutdown(wait=True, cancel_futures=True)


class RayEngine(Engine):
    """Tasks of Ray, on the cluster at ``RAY_ADDRESS``, else on a cluster started on this machine."""

    retries: ClassVar[int] = 4

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        ray = needed("ray", "executor ray")
        self._ray, self._own = ray, not ray.is_initialized()
        if self._own:
            self._start(None if os.environ.get("RAY_ADDRESS") else workers)
        self.lost = (ray.exceptions.WorkerCrashedError, ray.exceptions.RaySystemError, ray.exceptions.ObjectLostError)
        self._solve = ray.remote(num_cpus=1, max_retries=self.retries)(solve)

    def _start(self, cpus: int | None) -> None:
        """Start or join a cluster; a busy machine may need a second attempt.

        Raises:
            UserError: Ray does not start.
        """
        for _ in range(STARTS):
            try:
                self._ray.init(num_cpus=cpus, include_dashboard=False, log_to_driver=False, configure_logging=False)
                return
            except Exception as error:
                self._ray.shutdown()
                because = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"Ray did not start: {because}", hint="a busy machine needs longer; or --executor local")

    def submit(self, points: Sequence[Point]) -> Future[Rows]:
        """Compute the points in a task; Ray itself repeats the task if its worker is lost."""
        future: Future[Rows] = self._solve.remote(points).future()
        return future

    def close(self) -> None:
        """End the cluster if this engine started it."""
        if self._own:
            self._ray.shutdown()


class DaskEngine(_Pooled):
    """Tasks of Dask, under the scheduler at ``DASK_SCHEDULER_ADDRESS``, else in processes of this machine."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        dask = needed("distributed", "executor dask")
        address = os.environ.get("DASK_SCHEDULER_ADDRESS")
        self._cluster = None
        if address is None:
            self._cluster = dask.LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=None)
        self._client = dask.Client(address or self._cluster)
        self.pool = self._client.get_executor(pure=False)
        self.lost = (dask.KilledWorker,)

    def close(self) -> None:
        """End the client, and the cluster if this engine started it."""
        with suppress(Exception):  # a task that is cancelled says so here
            super().close()
        self._client.close()
        if self._cluster is not None:
            self._cluster.close()


class MpiEngine(_Pooled):
    """Ranks of MPI: ``mpiexec -n N python -m mpi4py.futures -m steptime study run ...``; rank 0 writes."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self.pool = needed("mpi4py.futures", "executor mpi").MPIPoolExecutor(max_workers=workers)


def usual_workers() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


EXECUTORS: Final[Registry[Callable[[int], Engine]]] = Registry("executor", "steptime.executors")
EXECUTORS.add("local", lambda workers: Here(1) if workers == 1 else Local(workers))
EXECUTORS.add("ray", RayEngine)
EXECUTORS.add("dask", DaskEngine)
EXECUTORS.add("mpi", MpiEngine)


def engine_of(name: str, workers: int | None) -> Engine:
    """An executor with its workers started.

    Args:
        name: name in :data:`EXECUTORS`.
        workers: number of processes; None: the number of processors.

    Raises:
        UserError: the name is unknown, or its package is missing.
    """
    start = EXECUTORS[name]
    count = usual_workers() if workers is None else workers
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MOST_WORKERS:
        raise UserError(f"{count!r} workers: a whole number from 1 to {MOST_WORKERS:,}")
    return start(count)


def lost_too_often(points: Sequence[Point], times: int) -> UserError:
    """Error for a block of points whose workers die each time."""
    first = points[0].options
    return UserError(
        f"{counted(times, 'worker')} died on the same {counted(len(points), 'point')}, the first of {first['model']} "
        f"on {first['gpus']} devices of {first['cluster']}",
        hint="their memory may be short: give fewer --workers; what was computed before is kept",
    )
