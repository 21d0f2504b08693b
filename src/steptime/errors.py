"""Errors that tell the user what to do.

::

    SteptimeError
    ├── UserError             the input is wrong: exit code 2
    │   ├── UnknownNameError  a name that is in no catalogue; carries the nearest ones
    │   ├── FieldError        one field of one file or option
    │   ├── InputFileError    a file that cannot be read or parsed at all
    │   └── PlanError         degrees that contradict each other or the model
    └── InternalError         a defect of ours: exit code 1

An infeasible plan is no error: it is data (see :mod:`steptime.plan.plans`).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final


class SteptimeError(Exception):
    """Base of everything that steptime raises on purpose."""


class InternalError(SteptimeError):
    """An invariant of steptime's own does not hold."""


class UserError(SteptimeError):
    """The user's input is wrong; the message says what to change."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        hint = None if hint is None else bounded(hint)
        super().__init__(bounded(message) if hint is None else f"{bounded(message)}\n  {hint}")
        self.hint = hint


SIMILAR: Final = 0.7
"""Smallest share of letters, in order, that a proposed name has in common with the given one (the ratio of difflib); a
letter too many, too few or wrong in a name of four is near enough."""
VALID: Final = 40
"""Valid names that a hint lists at most: all keys of any table, and most of the longer lists."""
PREFIX: Final = 2
"""Shortest beginning of a name that stands for it."""
MEASURED: Final = "steptime calibrate machine writes a file of the machine it runs on, to give instead"
LISTED: Final[Mapping[str, str]] = {
    "device": f"steptime devices lists them; {MEASURED}",
    "cluster": f"steptime clusters and steptime devices list what there is; {MEASURED}",
    "model": "steptime models lists them",
    "framework": "steptime frameworks lists them",
}
"""Kind of name -> hint if no name is near."""


class UnknownNameError(UserError):
    """A name that is not in a catalogue, with the nearest names that are.

    If none is near, the hint is ``otherwise``, else the command that lists the names of the kind. ``always`` is a hint
    below the nearest names too.
    """

    def __init__(
        self,
        kind: str,
        given: object,
        allowed: Iterable[str],
        *,
        where: str = "",
        otherwise: str = "",
        always: str = "",
    ) -> None:
        self.kind = kind
        self.given = given if isinstance(given, str) else shown(given)
        self.allowed = sorted(allowed)
        name = repr(shorten(given)) if isinstance(given, str) else shown(given)
        hint = did_you_mean(self.given, self.allowed, always or otherwise or LISTED.get(kind, ""))
        super().__init__(
            f"{where + ': ' if where else ''}there is no {kind} {name}",
            hint=hint if always in hint else f"{hint}\n  {always}",
        )


class FieldError(UserError):
    """One field has a value that is not allowed."""

    def __init__(self, where: str, field: str, problem: str, *, hint: str | None = None) -> None:
        self.where = where
        self.field = field
        self.problem = bounded(problem)
        super().__init__(f"{where}: {field}: {problem}" if where else f"{field}: {problem}", hint=hint)


class InputFileError(UserError):
    """A file that cannot be opened, decoded or parsed."""

    def __init__(self, path: str, problem: str, *, hint: str | None = None) -> None:
        self.path = path
        super().__init__(f"{path}: {problem}", hint=hint)


class PlanError(UserError):
    """Degrees that contradict each other, the model or the cluster."""


WORD: Final = 400
"""Letters of a message without a space between them that are shown at most; a path may be that long."""
MESSAGE: Final = 6000
"""Letters of a message that are shown at most."""


def bounded(message: str) -> str:
    """A message in which long quotations are cut to their beginning and their end.

    Every message goes through it, also one whose quotations are expected to be short.

    >>> bounded(f"tp: {'[' * 100_000} is no number")[-20:], len(bounded("a b " * 100_000)) <= MESSAGE
    ('[[[[[[[ is no number', True)
    >>> len(bounded("[" * 100_000))
    283
    """
    if len(message) > WORD:
        message = _LONG.sub(lambda found: f"{found[0][:200]}...{found[0][-80:]}", message)
    return message if len(message) <= MESSAGE else f"{message[: MESSAGE - 1000]} ... {message[-900:]}"


_LONG: Final = re.compile(rf"\S{{{WORD + 1},}}")


def shorten(text: str, limit: int = 80) -> str:
    """Cut a text from outside so that an error stays within one screen.

    >>> shorten("a" * 100, 10)
    'aaaaaaa...'
    """
    return text if len(text) <= limit else text[: limit - 3] + "..."


def shown(given: object, limit: int = 80) -> str:
    """A value from outside as Python writes it, cut as by :func:`shorten`.

    >>> shown("a"), shown(16**5000)
    ("'a'", 'a huge number')
    """
    try:
        return shorten(repr(given), limit)
    except ValueError:  # a whole number of more digits than Python writes
        return "a huge number"
    except Exception:  # a value whose class cannot say what it is, or nests too deeply
        return f"a {type(given).__name__}"


def counted(number: float, noun: str, shown: object = None) -> str:
    """A number with its noun, in the singular for one; ``shown``: text in place of the number.

    >>> counted(1, "GPU"), counted(8, "GPU"), counted(2048, "GPU", "2,048")
    ('1 GPU', '8 GPUs', '2,048 GPUs')
    """
    return f"{number if shown is None else shown} {noun}{'' if number == 1 else 's'}"


def first_few(names: Sequence[str], most: int) -> str:
    """Names in a sentence, with the number of names left out.

    >>> first_few(["tp", "pp"], 2), first_few(["tp", "pp", "cp"], 2)
    ('tp, pp', 'tp, pp and 1 more')
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def nearest(given: str, allowed: Iterable[str], count: int = 3) -> list[str]:
    """Names of ``allowed`` with a similar spelling to ``given``, best first; then those that begin or end with it.

    >>> nearest("llama3-8", ["gpt3-175b", "llama3-8b", "llama3-70b"])
    ['llama3-8b', 'llama3-70b']
    >>> nearest("b2", ["b200-sxm", "a100-sxm"]), nearest("cohere", ["starcoder2"])
    (['b200-sxm'], [])
    >>> nearest("ndr", ["infiniband-hdr", "infiniband-ndr"])
    ['infiniband-ndr']
    """
    names, key = {_spelling(name): name for name in allowed}, _spelling(given[:80])
    close = difflib.get_close_matches(key, names, n=count, cutoff=SIMILAR)
    begun = [name for name in names if len(key) >= PREFIX and name.startswith(key) and name not in close]
    ended = [name for name in names if len(key) > PREFIX and name.endswith(f"-{key}") and name not in close]
    return [names[name] for name in (*close, *begun, *ended)[:count]]


def _spelling(name: str) -> str:
    """A name without differences of case and of ``-`` and ``_``."""
    return name.lower().replace("_", "-")


def did_you_mean(given: str, allowed: Iterable[str], otherwise: str = "") -> str:
    """A hint with the nearest valid names; if none is near ``otherwise``, or some valid names if it is empty.

    >>> did_you_mean("b20", ["b200-sxm", "h100-sxm"])
    'did you mean b200-sxm?'
    >>> did_you_mean("cohere", ["starcoder2"], "steptime models lists them")
    'steptime models lists them'
    >>> did_you_mean("zzz", [f"a{n}" for n in range(45)]).partition("a38, ")[2]
    'a39 and 5 more'
    """
    names = list(allowed)
    close = nearest(given, names)
    if close:
        return f"did you mean {' or '.join(close)}?"
    if otherwise:
        return otherwise
    return f"valid: {first_few(names, VALID)}" if names else "there are none"
