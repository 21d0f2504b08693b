"""What all logs share: numbers, times of day, ranks, and lines that several frameworks print."""

from __future__ import annotations

import math
import re
from datetime import datetime
from typing import Final

_ANSI: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
#: torchrun's ``[rank0]:`` and ``[default0]:``, srun's ``0: ``.
_RANK: Final = re.compile(r"^\s*(?:\[(?:default|rank)(\d{1,7})\]:\s?|(\d{1,7}):\s)")
_CLOCK: Final = re.compile(r"(\d{4}-\d{2}-\d{2})[ T](\d{2}:\d{2}:\d{2})(?:[.,](\d{1,6}))?")
NUMBER: Final = r"([-+]?(?:\d[\d,]{0,40}(?:\.\d{0,40})?|\.\d{1,40})(?:[eE][-+]?\d{1,9})?|nan|inf|-inf)"

#: What a switch says; anything else says nothing.
SAID: Final = ("True", "False")
#: Longer than any step, and shorter than any: figures beyond are no step times.
LONGEST_STEP_S: Final = 1e6
SHORTEST_STEP_S: Final = 1e-7


def plain(line: str) -> str:
    """The line without colours."""
    return _ANSI.sub("", line) if "\x1b" in line else line


def rank_of(line: str) -> tuple[int | None, str]:
    """The rank in front of a line that a launcher put there, and the rest.

    >>> rank_of("[rank3]:step: 1"), rank_of("0: step: 1"), rank_of("12:00 step: 1")
    ((3, 'step: 1'), (0, 'step: 1'), (None, '12:00 step: 1'))
    """
    match = _RANK.match(line)
    return (int(match[1] or match[2]), line[match.end() :]) if match else (None, line)


def number(text: str) -> float | None:
    """A number as logs write it; None where it is none, or not finite.

    >>> number("12,345.6"), number("nan"), number("1e999")
    (12345.6, None, None)
    """
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def count(text: str) -> int | None:
    """A whole number of reasonable size, or None."""
    value = number(text)
    return int(value) if value is not None and 0 <= value <= 1e12 and value == int(value) else None


def clock_s(line: str) -> float | None:
    """Seconds since 1970 of the time of day in a line (in whatever zone it was written); None: there is none."""
    match = _CLOCK.search(line, 0, 200)
    if match is None:
        return None
    try:
        day = datetime.fromisoformat(f"{match[1]}T{match[2]}")
    except ValueError:
        return None
    seconds = (day - datetime(1970, 1, 1)).total_seconds()
    return seconds + (float(f"0.{match[3]}") if match[3] else 0.0)


def step_time_s(value: float | None) -> float | None:
    """A step time, or None where no step can have taken so long or so short."""
    return value if value is not None and SHORTEST_STEP_S <= value <= LONGEST_STEP_S else None


def rate(value: float | None) -> float | None:
    """A throughput, or None where it is not positive and reasonable."""
    return value if value is not None and 1e-6 <= value <= 1e12 else None
