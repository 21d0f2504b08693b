"""Comparison of golden files: what moved, where, and by how much; and how they are written."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DIGITS = 12
TOLERANCE = 1e-10
SHOWN = 10

#: Case -> what steptime said: nested JSON, or the lines of a report.
Cases = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One value that differs; `change` is relative, and infinite where there is no number before and after."""

    family: str
    case: str
    path: str
    before: str
    after: str
    change: float

    def __str__(self) -> str:
        by = f" ({100 * self.change:+.3g} %)" if math.isfinite(self.change) else ""
        return f"{self.family}: {self.case}\n    {self.path}: {self.before} -> {self.after}{by}"


def moves(family: str, before: Cases, now: Cases) -> list[Move]:
    """All values that differ."""
    found: list[Move] = []
    for case in dict.fromkeys((*before, *now)):
        old, new = before.get(case), now.get(case)
        if old is None or new is None:
            changes = [("", "absent" if old is None else "stored", "absent" if new is None else "new", math.inf)]
        else:
            changes = list(_lines(old, new) if isinstance(old, str) else _values(old, new))
        found += [
            Move(family=family, case=case, path=path or "the case", before=one, after=other, change=change)
            for path, one, other, change in changes
        ]
    return found


def lines_of(found: Sequence[Move], shown: int = SHOWN) -> list[str]:
    """The largest moves of numbers, the first moves of texts, and the count."""
    numbers = sorted((move for move in found if math.isfinite(move.change)), key=lambda move: -abs(move.change))
    texts = [move for move in found if not math.isfinite(move.change)]
    lines = [str(move) for move in (*numbers[:shown], *texts[:shown])]
    families = dict.fromkeys(move.family for move in found)
    for family in families:
        mine = [move for move in found if move.family == family]
        lines.append(f"{family}: {len(mine)} values of {len({move.case for move in mine})} cases moved")
    return lines


def _values(old: Any, new: Any) -> Iterator[tuple[str, str, str, float]]:
    before, now = dict(_leaves(old)), dict(_leaves(new))
    for path in dict.fromkeys((*before, *now)):
        one, other = before.get(path, "absent"), now.get(path, "absent")
        if _is_number(one) and _is_number(other):
            if one != other and not abs(other - one) <= TOLERANCE * max(abs(one), abs(other)):
                yield path, f"{one:.8g}", f"{other:.8g}", (other - one) / abs(one) if one else math.copysign(1, other)
        elif one != other or type(one) is not type(other):
            yield path, str(one), str(other), math.inf


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Path and value of every number, text, truth value and empty container."""
    if isinstance(value, Mapping | list) and value:
        for name, one in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _leaves(one, f"{path} > {name}" if path else str(name))
    else:
        yield path, value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _lines(old: str, new: str) -> Iterator[tuple[str, str, str, float]]:
    """Lines that differ, numbered as they are now."""
    before, now = old.split("\n"), new.split("\n")
    for kind, a, b, c, d in difflib.SequenceMatcher(a=before, b=now, autojunk=False).get_opcodes():
        if kind != "equal":
            for n in range(max(b - a, d - c)):
                one = repr(before[a + n]) if a + n < b else "absent"
                other = repr(now[c + n]) if c + n < d else "absent"
                yield f"line {c + n + 1}", one, other, math.inf


def rounded(value: Any) -> Any:
    """With numbers of 12 digits."""
    if isinstance(value, Mapping):
        return {name: rounded(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(one) for one in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) and math.isfinite(value) else value


def packed(cases: Cases) -> Cases:
    """Cases whose rows are lists of cells below one list of columns, as they are written."""
    found = {}
    for case, answer in cases.items():
        if "rows" in answer:
            columns = list(dict.fromkeys(name for row in answer["rows"].values() for name in row))
            rows = {number: [row.get(name) for name in columns] for number, row in answer["rows"].items()}
            answer = {**answer, "columns": columns, "rows": rows}
        found[case] = answer
    return found


def unpacked(cases: Cases) -> Cases:
    """The inverse of :func:`packed`."""
    found = {}
    for case, answer in cases.items():
        if "columns" in answer:
            answer = dict(answer)
            columns = answer.pop("columns")
            answer["rows"] = {
                number: {name: cell for name, cell in zip(columns, cells, strict=True) if cell is not None}
                for number, cells in answer["rows"].items()
            }
        found[case] = answer
    return found


def as_json(cases: Cases, width: int) -> str:
    """Text of a golden file of JSON: what fits into a line of this width stands in one."""
    body = ",\n".join(f"{json.dumps(key)}: {_laid_out(value, 1, width)}" for key, value in cases.items())
    return f"{{\n{body}\n}}\n"


def _laid_out(value: Any, depth: int, width: int) -> str:
    text = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, Mapping | list) or len(text) + depth <= width:
        return text
    keys = [f"{json.dumps(key)}: " for key in value] if isinstance(value, Mapping) else [""] * len(value)
    parts = list(value.values()) if isinstance(value, Mapping) else value
    body = ",\n".join(
        " " * depth + key + _laid_out(one, depth + 1, width) for key, one in zip(keys, parts, strict=True)
    )
    first, last = "{}" if isinstance(value, Mapping) else "[]"
    return f"{first}\n{body}\n{' ' * (depth - 1)}{last}"


def as_text(cases: Mapping[str, str]) -> str:
    """Text of a golden file of reports: each below the command that prints it."""
    return "".join(f"$ steptime {command}\n{report}\n\n" for command, report in cases.items())


def from_text(text: str) -> dict[str, str]:
    """The reports of such a file."""
    blocks = ("\n" + text).split("\n$ steptime ")[1:]
    return {command: report.rstrip("\n") for command, _, report in (block.partition("\n") for block in blocks)}
