r"""Formulas of docstrings as plain text (``\frac{S}{n}`` becomes ``S/n``), symbols or numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

_TOKEN: Final = re.compile(r"\\[A-Za-z]+|\\.|[0-9]+(?:\.[0-9]+)?|[A-Za-z]|\S", re.DOTALL)
_SIZES: Final = (
    r"\left",
    r"\right",
    r"\displaystyle",
    *(rf"\{s}{d}" for s in ("big", "Big", "bigg", "Bigg") for d in ("", "l", "r")),
)
_SKIP: Final = frozenset((*_SIZES, "\\,", "\\;", "\\:", "\\!", "\\ ", r"\quad", r"\qquad"))
_TEXT: Final = frozenset((r"\text", r"\mathrm", r"\operatorname", r"\mathit", r"\mathbf"))
_WORDS: Final = {
    r"\cdot": "·", r"\times": "×", r"\le": "<=", r"\leq": "<=", r"\ge": ">=", r"\geq": ">=", r"\ne": "!=",
    r"\lceil": "ceil(", r"\rceil": ")", r"\lfloor": "floor(", r"\rfloor": ")", r"\{": "(", r"\}": ")", r"\\": ";",
    r"\approx": "~", r"\to": "->", r"\infty": "inf", r"\sum": "sum", r"\prod": "prod", r"\mid": "|", r"\ll": "<<",
    r"\%": "%", r"\_": "_",
}  # fmt: skip
_FUNCTIONS: Final = frozenset(("max", "min", "log", "exp", "sum", "prod", "ceil", "floor", "sqrt"))
_BINARY: Final = frozenset(("+", "-", "=", "<", ">", "<=", ">=", "!=", "·", "×", "~", "->", "|", "<<"))


def to_text(formula: str, values: Mapping[str, str] | None = None) -> str:
    r"""Formula as text; symbols that are in ``values`` (by their text, ``beta_f``) are replaced.

    >>> to_text(r"t = \frac{S (n - 1)}{n \beta_f}")
    't = (S (n - 1))/(n beta_f)'
    >>> to_text(r"F = 2 m n k", {"m": "8", "n": "4", "k": "2"})
    'F = 2 · 8 · 4 · 2'
    >>> to_text(r"t = g \log_2 \max(n / 8, 1)", {"g": "0.5", "n": "64"})
    't = 0.5 · log_2 max(64 / 8, 1)'
    >>> to_text(r"t = \sum_i t_i - t_{\max}", {"sum_i t_i": "3", "t_max": "1"})
    't = 3 - 1'
    """
    text = _Renderer(formula, values or {}).group(None)
    for symbol, value in (values or {}).items():
        if " " in symbol:
            text = text.replace(symbol, value)
    return text


class _Renderer:
    """One pass over the tokens of a formula."""

    def __init__(self, formula: str, values: Mapping[str, str]) -> None:
        self._tokens: list[str] = _TOKEN.findall(formula)
        self._at = 0
        self._values = values

    def _next(self) -> str:
        token = self._tokens[self._at] if self._at < len(self._tokens) else ""
        self._at += 1
        return token

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def group(self, end: str | None) -> str:
        """Everything up to the token ``end``, or to the end of the formula."""
        pieces: list[str] = []
        while self._at < len(self._tokens):
            token = self._next()
            if token == end:
                break
            piece = self._piece(token)
            if piece:
                pieces.append(piece)
        return _join(pieces, dots=bool(self._values))

    def _argument(self) -> str:
        token = self._next()
        return self.group("}") if token == "{" else self._piece(token)

    def _raw(self) -> str:
        """The letters of a group as one word."""
        out = []
        if self._peek() == "{":
            self._next()
            while (token := self._next()) not in ("}", ""):
                out.append(token if token != r"\_" else "_")
        else:
            out.append(self._next())
        return "".join(out)

    def _piece(self, token: str) -> str:
        if token in (r"\frac", r"\tfrac", r"\dfrac"):
            above, below = self._argument(), self._argument()
            return f"{_wrap(above)}/{_wrap(below)}"
        if token == r"\sqrt":
            return f"sqrt({self._argument()})"
        if token in (r"\begin", r"\end"):
            self._raw()
            return ""
        if token in _SKIP:
            return ""
        if token == "&":
            return ","
        if token == "^":
            return "^" + _wrap(self._argument())
        if token == "_":
            return "_" + _wrap(self._argument())
        if token == "{":
            return _wrap(self.group("}"))
        if token in _TEXT:
            return self._symbol(self._raw())
        if token in _WORDS:
            return _WORDS[token]
        if token.startswith("\\"):
            return self._symbol(token[1:])
        return self._symbol(token) if token.isalpha() else token

    def _symbol(self, name: str) -> str:
        """A letter or word with its subscript and primes, or the number that stands for it."""
        if name in _FUNCTIONS:
            return name + self._piece(self._next()) if self._peek() == "_" else name
        while self._peek() in ("_", "'"):
            name += "'" if self._next() == "'" else "_" + self._raw_subscript()
        return self._values.get(name, name)

    def _raw_subscript(self) -> str:
        kept, self._values = self._values, {}
        text = self._argument()
        self._values = kept
        return text.replace(" ", "")


def _wrap(text: str) -> str:
    return f"({text})" if " " in text or "/" in text else text


def _join(pieces: list[str], *, dots: bool) -> str:
    out = ""
    previous = ""
    for piece in pieces:
        out += _gap(previous, piece, dots=dots) + piece
        previous = piece
    return out


def _gap(left: str, right: str, *, dots: bool) -> str:
    """What stands between two pieces: nothing, a space, or a dot for a product of numbers."""
    tight = not left or left.endswith("(") or right in (")", ",", ";", "]", "!") or right.startswith(("^", "_"))
    function = left.partition("_")[0] in _FUNCTIONS
    if tight or left == "[" or (function and right.startswith("(")):
        return ""
    if left in _BINARY or right in _BINARY or left in (",", ";"):
        return " "
    factors = not function and (left[-1].isdigit() or left.endswith(")")) and (right[0].isalnum() or right[0] == "(")
    return " · " if dots and factors else " "
