"""Output of commands: one JSON document, or a report.

A progress bar on standard error for work of more than a second.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final

from steptime.estimate.result import SCHEMA_VERSION


def plain(value: Any) -> Any:
    """Records, tuples and NumPy numbers as plain data; infinite and NaN values become None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        return {name: plain(getattr(value, name)) for name in value.__dataclass_fields__}
    return plain(value.item()) if hasattr(value, "item") else str(value)


def print_json(document: Mapping[str, Any]) -> None:
    """Write the document, and nothing else, to standard output; ASCII, no NaN, no Infinity."""
    text = json.dumps(plain(document), indent=2, allow_nan=False)
    if sys.stdout is not None:
        sys.stdout.write(text + "\n")


def document(**content: Any) -> dict[str, Any]:
    """A JSON document with its version first."""
    return {"schema_version": SCHEMA_VERSION, **content}


DELAY_S: Final = 1.0


class Progress:
    """Callback ``progress(done, total)``; draws only on a terminal and after the first second."""

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
