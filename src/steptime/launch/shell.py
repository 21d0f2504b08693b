"""Launch scripts: reading a program's arguments from a shell script, and writing such a script.

The reader knows the part of the shell's language that launch scripts use: variables, arrays, defaults as ``${TP:-8}``,
integer arithmetic, loops and conditions over it, continued lines. Nothing is run.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any, Final

from steptime.errors import InputFileError
from steptime.launch.arithmetic import Unknown, calculated, changed

_ASSIGNED: Final = re.compile(r"(?:export\s+|local\s+|declare\s+(?:-\w+\s+)?)?([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_SHORT: Final = re.compile(r"-[A-Za-z]\w*")
_SEVERAL: Final = re.compile(r"--[\w-]+ ")
"""An option and its value in one pair of quotes, which the shell splits if the array is not quoted."""
_QUOTED_ARRAY: Final = re.compile(r'"(\$\{\w+\[[@*]\]\})"')
_VARIABLE: Final = re.compile(r"\$\{(\w+)(?:\[[@*]\])?(?::?[-=]([^}]*))?\}|\$([A-Za-z_]\w*)")
_ARITHMETIC: Final = re.compile(r"\$\(\(([\w\s*/%+()<>=!&|-]{1,200})\)\)")
_JOINED: Final = re.compile(r"""\$\(\s*IFS=(['"]?)(.)[^;]*;\s*echo\s+"?\$\{(\w+)\[\*\]\}"?\s*\)""")
"""An array joined by the first character of ``IFS``."""
_COUNTED: Final = re.compile(r"for\s*\(\((.*);(.*);(.*)\)\)", re.DOTALL)
_LISTED: Final = re.compile(r"for\s+([A-Za-z_]\w*)\s+in\s+(.*)", re.DOTALL)
_CONDITION: Final = re.compile(r"(?:if|elif)\s*\(\((.*)\)\)", re.DOTALL)
_PRINTED: Final = re.compile(r"""printf\s+-v\s+(\w+)\s+(["'])([^"'%]*)%s([^"'%]*)\2\s+(.*)""", re.DOTALL)
_HEAD: Final = re.compile(r"(then|do|else)\b\s*(.*)", re.DOTALL)
MAX_LINE: Final = 100_000
MAX_STATEMENTS: Final = 50_000
"""Largest number of statements that are followed; the statements of a loop count in each iteration."""


def write_shell(head: Iterable[str], launcher: str, options: Mapping[str, Any]) -> str:
    """A script that starts a program with options; a switch has no value, and is left out if it is off."""
    lines = ["#!/bin/bash", *head, "set -euo pipefail", "", "ARGUMENTS=("]
    for name, value in options.items():
        if value is True:
            lines.append(f"    {name}")
        elif value is not False:
            values = value if isinstance(value, (list, tuple)) else (value,)
            lines.append(f"    {name} {' '.join(shlex.quote(_text(each)) for each in values)}")
    return "\n".join([*lines, ")", f'{launcher} "${{ARGUMENTS[@]}}" "$@"', ""])


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def read_shell(text: str, where: str) -> dict[str, Any]:
    """Options of the command with the most options in a script, including the launcher's.

    Raises:
        InputFileError: no command has options, or quotes do not close.
    """
    script = _Script(_statements(text), where)
    script.follow(0, len(script.statements))
    best = script.best or max((shlex.split(value) for value in script.arrays()), key=_options, default=[])
    if not _options(best):
        raise InputFileError(where, "no command in it has options (--name value)")
    return options_of(best)


def _options(words: list[str]) -> int:
    return sum(word.startswith("--") for word in words)


class _Script:
    """Statements of a script; all branches are followed of conditions that the script's text does not decide."""

    def __init__(self, statements: list[str], where: str) -> None:
        self.statements = statements
        self.best: list[str] = []
        """Words of the command with the most options."""
        self._where = where
        self._variables: dict[str, str] = {}
        self._left = MAX_STATEMENTS

    def arrays(self) -> list[str]:
        """Values of variables that hold options and can be split into words."""
        return [value for value in self._variables.values() if value.count("--") > 1 and not _is_open(value)]

    def follow(self, start: int, end: int) -> None:
        """Follow the statements of a block."""
        at = start
        while at < end and self._left > 0:
            self._left -= 1
            text = self.statements[at]
            if text.startswith(("for ", "for(")) and (done := self._end(at, end, "do", "done")):
                self._loop(text, at + 1, done)
                at = done
            elif text.startswith("if ") and (done := self._end(at, end, "if", "fi")):
                self._branches(at, done)
                at = done
            else:
                self._one(text)
            at += 1

    def _end(self, at: int, end: int, opens: str, closes: str) -> int:
        """Index of the end of the block that opens at or after a statement; 0: it does not end."""
        depth = 0
        for i in range(at, end):
            word = self.statements[i].partition(" ")[0]
            depth += (word == opens) - (word == closes)
            if word == closes and depth == 0:
                return i
        return 0

    def _loop(self, head: str, start: int, end: int) -> None:
        counted, listed = _COUNTED.fullmatch(head), _LISTED.fullmatch(head)
        if counted is not None:
            try:
                self._change(counted[1])
                while self._left > 0 and calculated(counted[2], self._variables):
                    self.follow(start, end)
                    self._change(counted[3])
                    self._left -= 1
            except Unknown:
                self.follow(start, end)
        elif listed is not None and "$" not in (words := _substituted(listed[2], self._variables)):
            for word in words.split():
                self._variables[listed[1]] = _unquoted(word)
                self.follow(start, end)
        else:
            self.follow(start, end)

    def _branches(self, at: int, end: int) -> None:
        """Follow the branch that the condition chooses; all branches if the condition is not arithmetic."""
        depth, heads = 0, []
        for i in range(at, end):
            word = self.statements[i].partition(" ")[0]
            depth += (word == "if") - (word == "fi")
            if depth == 1 and word in ("if", "elif", "else"):
                heads.append(i)
        blocks = [(self.statements[i], i + 1, after) for i, after in zip(heads, (*heads[1:], end), strict=True)]
        for head, start, after in blocks:
            condition = _CONDITION.fullmatch(head)
            try:
                holds = head == "else" or (condition is not None and bool(self._calculated(condition[1])))
            except Unknown:
                holds, condition = True, None
            if holds or condition is None:
                self.follow(start, after)
            if holds and (condition is not None or (head == "else" and after == end)):
                return

    def _calculated(self, text: str) -> int:
        return calculated(_substituted(text, self._variables), self._variables)

    def _change(self, text: str) -> None:
        name, value = changed(_substituted(text, self._variables).strip(), self._variables)
        self._variables[name] = str(value)

    def _one(self, text: str) -> None:
        """Follow an assignment or a command."""
        alone = text[2:-2] if text.startswith("((") and text.endswith("))") else text.removeprefix("let ")
        if alone != text:
            try:
                self._change(alone)
            except Unknown:
                return
        elif (match := _ASSIGNED.fullmatch(text)) is not None:
            value = _substituted(match[3].strip(), self._variables)
            inner = value[1:-1] if value.startswith("(") and value.endswith(")") else _unquoted(value)
            self._assign(match[1], inner, more=bool(match[2]))
        elif (printed := _PRINTED.fullmatch(text)) is not None:
            value = _unquoted(_substituted(printed[5].strip(), self._variables))
            self._assign(printed[1], f"{printed[3]}{value}{printed[4]}", more=False)
        else:
            words = _words(_substituted(text, self._variables), self._where)
            if _options(words) > _options(self.best):
                self.best = words

    def _assign(self, name: str, value: str, *, more: bool) -> None:
        value = " ".join(value.split())
        held = f"{self._variables.get(name, '')} {value}".lstrip() if more else value
        self._variables[name] = held[:MAX_LINE]


def options_of(words: list[str]) -> dict[str, Any]:
    """Long options among the words of a command; without a value: True, with several values: a list.

    >>> options_of(["torchrun", "--nnodes=2", "-m", "titan", "train.py", "--bf16", "--modules", "a", "b", "--tp", "8"])
    {'--nnodes': '2', '--bf16': True, '--modules': ['a', 'b'], '--tp': '8'}
    """
    out: dict[str, Any] = {}
    name = ""
    for word in (part for each in words for part in (each.split() if _SEVERAL.match(each) else [each])):
        if word in ("$@", "$*"):
            name = ""
        elif word.startswith("--") and len(word) > 2:
            name, _, value = word.partition("=")
            out[name] = value if value else True
        elif (
            _SHORT.fullmatch(word)
            or word.endswith((".py", ".sh"))
            or word in ("|", ">", "2>&1", "&", "&&", "||", "&>", ";")
        ):
            name = ""
        elif name:
            held = out[name]
            out[name] = word if held is True else [*held, word] if isinstance(held, list) else [held, word]
    return out


def _statements(text: str) -> list[str]:
    """Statements with their continuation lines: after a backslash, or within quotes or brackets of an array."""
    out: list[str] = []
    held = ""
    for raw in text.splitlines():
        line = _uncommented(raw[:MAX_LINE])
        if line.rstrip().endswith("\\"):
            held += line.rstrip()[:-1] + " "
            continue
        held += line
        if _is_open(held):
            held += " "
            continue
        out += _split_statements(held)
        held = ""
    return [line for line in (*out, *_split_statements(held)) if line]


def _split_statements(line: str) -> list[str]:
    """The statements of a line, split at semicolons outside quotes and brackets, and after ``then`` and ``do``.

    >>> _split_statements("for ((i=0; i<2; i++)); do A+=(1); done")
    ['for ((i=0; i<2; i++))', 'do', 'A+=(1)', 'done']
    """
    if ";" not in line:
        parts = [line]
    else:
        parts, quote, depth, last = [], "", 0, 0
        for at, char in enumerate(line):
            if quote:
                quote = "" if char == quote else quote
            elif char in "'\"":
                quote = char
            elif char in "()":
                depth = max(depth + (1 if char == "(" else -1), 0)
            elif char == ";" and depth == 0:
                parts.append(line[last:at])
                last = at + 1
        parts.append(line[last:])
    out: list[str] = []
    for part in map(str.strip, parts):
        head = _HEAD.fullmatch(part)
        out += [head[1], head[2]] if head is not None else [part]
    return [part for part in out if part]


def _uncommented(line: str) -> str:
    """The line without its comment: from a ``#`` that begins a word outside of quotes."""
    quote = ""
    for at, char in enumerate(line):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char == "#" and (at == 0 or line[at - 1].isspace()):
            return line[:at]
    return line


def _is_open(text: str) -> bool:
    """True if a quote, or the bracket of an assigned array, is not closed."""
    bare = re.sub(r"\\.", "", text)
    double, single = bare.count('"'), re.sub(r'"[^"]*"', "", bare).count("'")
    if double % 2 == 1 or single % 2 == 1:
        return True
    opened = re.match(r"\s*(?:export\s+|declare\s+-\w+\s+)?\w+\+?=\(", bare)
    outside = re.sub(r"\"[^\"]*\"|'[^']*'", "", bare)
    return bool(opened) and outside.count("(") > outside.count(")")


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


def _substituted(text: str, variables: Mapping[str, str]) -> str:
    """The text with variables replaced that the script sets or gives a default."""

    def put(match: re.Match[str]) -> str:
        found = variables.get(match[1] or match[3], match[2])
        return match[0] if found is None else found

    def joined(match: re.Match[str]) -> str:
        held = variables.get(match[3])
        return match[0] if held is None else match[2].join(held.split())

    def number(match: re.Match[str]) -> str:
        try:
            return str(calculated(match[1], variables))
        except Unknown:
            return match[0]

    out = _VARIABLE.sub(put, _QUOTED_ARRAY.sub(r"\1", _JOINED.sub(joined, text)))
    return _ARITHMETIC.sub(number, out)[:MAX_LINE]


def _words(statement: str, where: str) -> list[str]:
    try:
        return shlex.split(statement)
    except ValueError as error:
        raise InputFileError(where, f"is no shell script that can be read: {error}: {statement[:60]!r}") from None
