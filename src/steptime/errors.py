"""Errors that tell the user what to do.

::

    SteptimeError
    ├── UserError             the input is wrong: exit code 2
    │   ├── UnknownNameError  a name that is in no catalogue; carries the nearest ones
    │   ├── FieldError        one field of one file or option
    │   ├── InputFileError    a file that cannot be read or parsed at all
    │   └── PlanError         degrees that contradict each other or the model
    └── InternalError         a defect of ours: exit code 1

An infeasible plan is no error: it is data (see :mod:`steptime.plan.legality`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SteptimeError(Exception):
    """Base of everything that steptime raises on purpose."""


class InternalError(SteptimeError):
    """An invariant of steptime's own does not hold."""


class UserError(SteptimeError):
    """The user's input is wrong; the message says what to change."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message if hint is None else f"{message}\n  {hint}")
        self.hint = hint


class UnknownNameError(UserError):
    """A name that is not in a catalogue, with the nearest names that are."""

    def __init__(self, kind: str, given: str, allowed: Iterable[str], *, where: str = "") -> None:
        self.kind = kind
        self.given = given
        self.allowed = sorted(allowed)
        super().__init__(
            f"{where + ': ' if where else ''}there is no {kind} {shorten(given)!r}",
            hint=did_you_mean(given, self.allowed),
        )


class FieldError(UserError):
    """One field has a value that is not allowed."""

    def __init__(self, where: str, field: str, problem: str, *, hint: str | None = None) -> None:
        self.where = where
        self.field = field
        self.problem = problem
        super().__init__(f"{where}: {field}: {problem}" if where else f"{field}: {problem}", hint=hint)


class InputFileError(UserError):
    """A file that cannot be opened, decoded or parsed."""

    def __init__(self, path: str, problem: str, *, hint: str | None = None) -> None:
        self.path = path
        super().__init__(f"{path}: {problem}", hint=hint)


class PlanError(UserError):
    """Degrees that contradict each other, the model or the cluster."""


def shorten(text: str, limit: int = 80) -> str:
    """Cut a text that came from outside so that an error stays one screen.

    >>> shorten("a" * 100, 10)
    'aaaaaaa...'
    """
    return text if len(text) <= limit else text[: limit - 3] + "..."


def nearest(given: str, allowed: Iterable[str], count: int = 3) -> list[str]:
    """Names of ``allowed`` that look most like ``given``, best first.

    >>> nearest("llama3-8", ["gpt3-175b", "llama3-8b", "llama3-70b"])
    ['llama3-8b', 'llama3-70b']
    """
    names = {name.lower(): name for name in allowed}
    close = difflib.get_close_matches(given.lower()[:80], names, n=count, cutoff=0.5)
    return [names[name] for name in close]


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """A hint with the nearest valid names, or with some valid ones if none is near.

    >>> did_you_mean("b20", ["b200-sxm", "h100-sxm"])
    'did you mean b200-sxm?'
    """
    names = list(allowed)
    close = nearest(given, names)
    if close:
        return f"did you mean {' or '.join(close)}?"
    listed = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
    return f"valid: {listed}" if names else "there are none"
