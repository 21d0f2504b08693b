"""A progress bar on standard error for what takes longer than a second."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Final

DELAY_S: Final = 1.0


class Progress:
    """Callback ``progress(done, total)`` that draws nothing in the first second, nor off a terminal."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._start_s = time.monotonic()
        self._visible = sys.stderr is not None and sys.stderr.isatty()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` candidates are finished."""
        if not self._visible or time.monotonic() - self._start_s < DELAY_S:
            return
        if self._bar is None:
            self._open()
        self._bar.update(self._task, completed=done, total=total)

    def _open(self) -> None:
        from rich.console import Console
        from rich.progress import Progress as Bar

        self._bar = Bar(console=Console(file=sys.stderr), transient=True)
        self._task = self._bar.add_task(self._title, total=None)
        self._bar.start()
