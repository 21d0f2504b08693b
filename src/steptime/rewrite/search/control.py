"""Early stop and progress reports of a search."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

INTERRUPTED: Final = "interrupted"
TIME: Final = "time limit"

Report = Callable[[str, int, float], None]
"""Function that is called with the name of the running part, the number of graphs priced, and the best cost."""


@dataclass(kw_only=True)
class Control:
    """Stop conditions and progress, shared by all parts of one search."""

    limit_s: float | None = None
    report: Report | None = None
    graphs: int = 0
    """Number of graphs priced by all parts."""
    interrupted: bool = False
    _start: float = field(default_factory=time.monotonic)

    def why(self) -> str | None:
        """The reason to stop now; None: continue."""
        if self.interrupted:
            return INTERRUPTED
        over = self.limit_s is not None and time.monotonic() - self._start > self.limit_s
        return TIME if over else None

    def saw(self, what: str, graphs: int, cost: float) -> None:
        """Count further priced graphs, and report progress."""
        self.graphs += graphs
        if self.report is not None:
            self.report(what, self.graphs, cost)

    @contextmanager
    def stops_at_interrupt(self) -> Iterator[None]:
        """Context in which the first Ctrl-C ends the search with the best graph so far, and the second the program."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(_number: int, _frame: Any) -> None:
            if self.interrupted:
                raise KeyboardInterrupt
            self.interrupted = True

        before = signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
