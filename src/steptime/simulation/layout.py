"""Layouts of a pipeline (the layers of each stage) as text in the notation of Megatron-Core."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Final

from steptime.errors import UserError, counted, shorten

LETTERS: Final[Mapping[str, str]] = {
    "E": "embedding",
    "t": "decoder layer",
    "m": "multi-token-prediction layer",
    "L": "loss",
}
"""Meaning of each letter."""
MAX_LETTERS: Final = 100_000
"""Largest number of letters and of stages of a layout without repetitions (`*N`)."""
_TOKEN: Final = re.compile(r"\s*(?:\*\s*(\d+)|(.))", re.S)


def parse_layout(layout: str) -> tuple[str, ...]:
    """Letters of each stage, in the order of the model: all ranks of the first virtual stage, then of the second, ...

    ``|`` ends a stage, ``x*N`` repeats a letter and ``(...)*N`` a group; commas and spaces are ignored. A stage may be
    empty.

    Source: Megatron-Core, user guide, "Custom Pipeline Model Parallel Layout".

    >>> parse_layout("Et*3|(tt|)*2m|L")
    ('Ettt', 'tt', 'tt', 'm', 'L')

    Raises:
        UserError: a letter is unknown, a bracket or a number is missing, or the layout is too long.
    """
    groups: list[list[str]] = [[]]
    last = ""
    for number, letter in _TOKEN.findall(layout):
        if number:
            if not last:
                raise _wrong(layout, f"*{number} repeats nothing", "a letter, | or a group in brackets goes before it")
            last = _repeated(layout, last, number)
            groups[-1][-1] = last
        elif letter == "(":
            groups.append([])
            last = ""
        elif letter == ")":
            if len(groups) == 1:
                raise _wrong(layout, "a bracket is closed that none opens", "write a group as (tt|)*4")
            last = "".join(groups.pop())
            groups[-1].append(last)
        elif letter in LETTERS or letter == "|":
            last = letter
            groups[-1].append(letter)
        elif letter.strip(", \t\n"):
            known = ", ".join(f"{each} {name}" for each, name in LETTERS.items())
            raise _wrong(layout, f"{letter!r} is no letter of a layout", f"{known}; | ends a stage, x*N repeats")
    if len(groups) > 1:
        raise _wrong(layout, "a bracket is not closed", "write a group as (tt|)*4")
    return tuple("".join(groups[0]).split("|"))


def _repeated(layout: str, text: str, number: str) -> str:
    digits = number.lstrip("0")
    times = int(digits or 0) if len(digits) <= len(str(MAX_LETTERS)) else MAX_LETTERS + 1
    if times < 1 or len(text) * times > MAX_LETTERS:
        raise _wrong(
            layout, f"*{shorten(number, 12)} is no number of repetitions", f"1 to {MAX_LETTERS // len(text)} here"
        )
    return text * times


def _wrong(layout: str, why: str, hint: str) -> UserError:
    return UserError(f"layout {shorten(layout, 80)!r}: {why}", hint=hint)


def layout_text(stages: Sequence[str]) -> str:
    """A layout as short text: a letter three or more times as ``x*N``, consecutive equal stages as a group.

    >>> layout_text(["Ettt", "tt", "tt", "m", "L"])
    'Et*3|(tt|)*2m|L'
    >>> layout_text(["Etttt", "tttL"])
    'Et*4|t*3L'
    """
    parts = []
    for stage, equal in groupby([*stages[:-1]]):
        count, text = len(list(equal)), f"{_short(stage)}|"
        parts.append(f"({text})*{count}" if count > 1 else text)
    return "".join([*parts, _short(stages[-1])])


def _short(stage: str) -> str:
    runs = [(letter, len(list(equal))) for letter, equal in groupby(stage)]
    return "".join(f"{letter}*{count}" if count > 2 else letter * count for letter, count in runs)


def check_layout(layout: str, stages: Sequence[str], ranks: int, layers: int, predicted: int) -> None:
    """Refuse a layout that does not fit the model and the ranks.

    Args:
        layout: text of the layout, for error messages.
        stages: letters of each stage.
        ranks: ranks of the pipeline.
        layers: decoder layers of the model.
        predicted: its multi-token-prediction layers.

    Raises:
        UserError: the stages or letters do not fit; the message says which.
    """
    if len(stages) % ranks:
        raise _wrong(
            layout,
            f"{counted(len(stages), 'stage')} over {counted(ranks, 'rank')}",
            f"give a multiple of --pp {ranks} stages: {ranks}, {2 * ranks}, ...",
        )
    letters = "".join(stages)
    for letter, wanted in (("E", 1), ("t", layers), ("m", predicted), ("L", 1)):
        found = letters.count(letter)
        if found != wanted:
            raise _wrong(
                layout,
                f"{found} x {letter} ({LETTERS[letter]}); the model has {wanted}",
                f"{counted(abs(found - wanted), 'letter')} {letter} too {'many' if found > wanted else 'few'}",
            )
    if letters != "E" + "t" * layers + "m" * predicted + "L":
        raise _wrong(layout, "letters are out of order", "E first, then t, then m, L last")
    if not stages[0] or not stages[-1]:
        raise _wrong(layout, "the first or the last stage is empty", "the first has E, the last L")
