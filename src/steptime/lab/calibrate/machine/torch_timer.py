"""Clocks: how long one call takes on a CPU core or on a CUDA device.

A CPU is usually shared. The clock of a single thread counts only what the thread itself ran, so another program makes
it slower through the caches but not by taking the core away. On CUDA the host only queues work: the device's own
events are read, and a replayed graph leaves the launches from the host out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np

from steptime.errors import UserError
from steptime.lab.calibrate.machine.torch_ops import OperatorRun

#: A sample lasts at least this long, so that reading the clock does not show.
SAMPLE_S: Final = 1e-4
#: Share of the samples that are faster than the one that is reported: on a busy machine the rest is noise.
QUANTILE: Final = 0.25
#: Most calls in one sample.
MAX_CALLS: Final = 2000


class Timer(Protocol):
    """Takes samples of a call."""

    @property
    def clock(self) -> str:
        """``thread``, ``wall`` or ``cuda``."""
        ...

    def samples_s(self, call: OperatorRun, budget_s: float) -> list[float]:
        """Seconds of one call, several times over, in about ``budget_s`` in all."""
        ...


@dataclass(frozen=True, slots=True)
class CpuTimer:
    """Time of the calling thread, or of the wall if torch runs several threads."""

    clock: str = "thread"
    """``thread`` or ``wall``."""
    least: int = 5
    most: int = 15

    def samples_s(self, call: OperatorRun, budget_s: float) -> list[float]:
        """Seconds of one call; the first calls warm up and are not counted."""
        now = time.thread_time if self.clock == "thread" else time.perf_counter
        call(0)
        once_s, index = float("inf"), 1
        for batch in (1, 10):  # the first call is often slow: look again where it decides how many make a sample
            begin = now()
            for i in range(index, index + batch):
                call(i)
            once_s = min(once_s, max(now() - begin, 1e-9) / batch)
            index += batch
            if once_s > SAMPLE_S:
                break
        calls = max(1, min(MAX_CALLS, round(SAMPLE_S / once_s)))
        count = max(self.least, min(self.most, int(budget_s / (once_s * calls))))
        out = []
        for _ in range(count):
            begin = now()
            for i in range(index, index + calls):
                call(i)
            out.append((now() - begin) / calls)
            index += calls
        return out


@dataclass(frozen=True, slots=True)
class CudaTimer:
    """Time between two events on the device; calls are replayed from a graph where one can be captured.

    All work is on the current stream, which must not be the default one: gradients run on the stream of their forward,
    and a graph can only be captured where all of its work is.
    """

    torch: Any
    graphs: bool = True
    clock: str = "cuda"
    least: int = 5
    most: int = 20

    def samples_s(self, call: OperatorRun, budget_s: float) -> list[float]:
        """Seconds of one call on the device."""
        once_s = self._warm(call)
        calls = max(1, min(100, round(10 * SAMPLE_S / once_s)))
        run = self._graph(call, calls) if self.graphs else None
        if run is None:
            run = self._loop(call, calls)
        run()
        self.torch.cuda.synchronize()
        count = max(self.least, min(self.most, int(budget_s / (once_s * calls))))
        return [self._between_events_s(run) / calls for _ in range(count)]

    def _warm(self, call: OperatorRun) -> float:
        """Three calls, as capturing a graph wants it; seconds of the last."""
        cuda = self.torch.cuda
        for i in range(3):
            cuda.synchronize()
            begin = time.perf_counter()
            call(i)
            cuda.synchronize()
            once_s = time.perf_counter() - begin
        return max(once_s, 1e-6)

    def _graph(self, call: OperatorRun, calls: int) -> Callable[[], object] | None:
        """Replay of so many calls; None if the operator cannot be captured."""
        graph = self.torch.cuda.CUDAGraph()
        try:
            with self.torch.cuda.graph(graph, stream=self.torch.cuda.current_stream()):
                for i in range(calls):
                    call(i)
        except RuntimeError:
            self.torch.cuda.synchronize()
            return None
        return lambda: graph.replay()

    def _loop(self, call: OperatorRun, calls: int) -> Callable[[], object]:
        def run() -> None:
            for i in range(calls):
                call(i)

        return run

    def _between_events_s(self, run: Callable[[], object]) -> float:
        cuda = self.torch.cuda
        begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What the samples of one call say."""

    seconds: float
    """Lower quartile."""
    spread: float
    """Relative distance from the lower quartile to the median: the noise within a visit."""
    samples: int
    rejected: int
    """Samples that were zero, negative or not finite."""


def summary(samples_s: Iterable[float], quantile: float = QUANTILE) -> Sampled:
    """Lower quartile (or another quantile) and noise of samples.

    Raises:
        UserError: no sample is a positive time.

    >>> summary([1.0, 1.0, 1.0, 1.0, 5.0, 0.0]).seconds
    1.0
    """
    given = np.fromiter(samples_s, float)
    good = given[np.isfinite(given) & (given > 0)]
    if not len(good):
        raise UserError(
            f"none of {len(given)} samples is a positive time", hint="the clock of this machine is too coarse"
        )
    low, middle = np.quantile(good, [quantile, 0.5], method="nearest")
    return Sampled(
        seconds=float(low), spread=float(middle / low - 1), samples=len(good), rejected=len(given) - len(good)
    )
