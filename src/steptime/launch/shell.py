"""Launch scripts: the arguments of a program out of a shell script, and such a script of arguments.

Of the shell's language only what launch scripts use is read: variables, arrays, defaults as ``${TP:-8}``, arithmetic of
whole numbers, joined lines. Nothing is run.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any, Final

from steptime.errors import InputFileError

_ASSIGNED: Final = re.compile(r"(?:export\s+|local\s+|declare\s+(?:-\w+\s+)?)?([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_SHORT: Final = re.compile(r"-[A-Za-z]\w*")
_SEVERAL: Final = re.compile(r"--[\w-]+ ")
"""An option and its value in one pair of quotes, which the shell splits where an array is not quoted."""
_QUOTED_ARRAY: Final = re.compile(r'"(\$\{\w+\[[@*]\]\})"')
_VARIABLE: Final = re.compile(r"\$\{(\w+)(?:\[[@*]\])?(?::?[-=]([^}]*))?\}|\$([A-Za-z_]\w*)")
_ARITHMETIC: Final = re.compile(r"\$\(\(([\w\s*/%+()-]{1,200})\)\)")
_SIGNS: Final = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv}
MAX_LINE: Final = 100_000


def write_shell(head: Iterable[str], launcher: str, options: Mapping[str, Any]) -> str:
    """A script that starts a program with options; a switch has no value, and is left out where it is off."""
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
    """Options of the command of a script that has most of them, the launcher's among them.

    Raises:
        InputFileError: no command has options, or quotes do not close.
    """
    variables: dict[str, str] = {}
    best: list[str] = []
    for statement in _statements(text):
        match = _ASSIGNED.fullmatch(statement)
        if match:
            value = _substituted(match[3].strip(), variables)
            inner = value[1:-1] if value.startswith("(") and value.endswith(")") else _unquoted(value)
            inner = " ".join(inner.split())
            variables[match[1]] = f"{variables.get(match[1], '')} {inner}" if match[2] else inner
            continue
        words = _words(_substituted(statement, variables), where)
        if sum(word.startswith("--") for word in words) > sum(word.startswith("--") for word in best):
            best = words
    if not best:
        raise InputFileError(where, "no command in it has options (--name value)")
    return options_of(best)


def options_of(words: list[str]) -> dict[str, Any]:
    """Options among the words of a command, short ones left out; one without a value is True, one with several a list.

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
    """Lines with what continues them: by a backslash, or within quotes or brackets of an array."""
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
        out.append(held.strip())
        held = ""
    return [line for line in (*out, held.strip()) if line]


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
    """Whether a quote, or the bracket of an assigned array, has not been closed."""
    bare = re.sub(r"\\.", "", text)
    double, single = bare.count('"'), re.sub(r'"[^"]*"', "", bare).count("'")
    opened = re.match(r"\s*(?:export\s+|declare\s+-\w+\s+)?\w+\+?=\(", bare)
    return double % 2 == 1 or single % 2 == 1 or bool(opened and not bare.rstrip().endswith(")"))


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


def _substituted(text: str, variables: Mapping[str, str]) -> str:
    """The text with variables replaced, as far as the script sets them or gives a default."""

    def put(match: re.Match[str]) -> str:
        found = variables.get(match[1] or match[3], match[2])
        return match[0] if found is None else found

    out = _VARIABLE.sub(put, _QUOTED_ARRAY.sub(r"\1", text))
    return _ARITHMETIC.sub(lambda match: _number(match, variables), out)[:MAX_LINE]


def _number(match: re.Match[str], variables: Mapping[str, str]) -> str:
    """The value of an expression of whole numbers; as it is where it has anything else."""
    named = re.sub(r"[A-Za-z_]\w*", lambda name: variables.get(name[0], name[0]), match[1])
    try:
        return str(_calculated(ast.parse(named.strip(), mode="eval").body))
    except (SyntaxError, ZeroDivisionError, KeyError, RecursionError):
        return match[0]


def _calculated(node: ast.expr) -> int:
    if isinstance(node, ast.BinOp):
        result: int = _SIGNS[type(node.op)](_calculated(node.left), _calculated(node.right))
        return result
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    raise KeyError(node)


def _words(statement: str, where: str) -> list[str]:
    try:
        return shlex.split(statement)
    except ValueError as error:
        raise InputFileError(where, f"is no shell script that can be read: {error}: {statement[:60]!r}") from None
