r"""Computation of each term: its formula, the numbers in it, the source.

Formulas of docstrings as plain text (``\frac{S}{n}`` becomes ``S/n``), symbols or numbers.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from steptime.estimate.result import Argument, Detail, FormulaCall
from steptime.report import text as t

if TYPE_CHECKING:
    from rich.console import Console

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
    r"\cdot": "·",
    r"\times": "×",
    r"\le": "<=",
    r"\leq": "<=",
    r"\ge": ">=",
    r"\geq": ">=",
    r"\ne": "!=",
    r"\lceil": "ceil(",
    r"\rceil": ")",
    r"\lfloor": "floor(",
    r"\rfloor": ")",
    r"\{": "(",
    r"\}": ")",
    r"\\": ";",
    r"\approx": "~",
    r"\to": "->",
    r"\infty": "inf",
    r"\sum": "sum",
    r"\prod": "prod",
    r"\mid": "|",
    r"\ll": "<<",
    r"\%": "%",
    r"\_": "_",
}
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
        """Text up to the token ``end``, or to the end of the formula."""
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
        """Characters of a group as one word."""
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
    """Text between two pieces of a formula: nothing, a space, or a dot for a product of numbers."""
    tight = not left or left.endswith("(") or right in (")", ",", ";", "]", "!") or right.startswith(("^", "_"))
    function = left.partition("_")[0] in _FUNCTIONS
    if tight or left == "[" or (function and right.startswith("(")):
        return ""
    if left in _BINARY or right in _BINARY or left in (",", ";"):
        return " "
    factors = not function and (left[-1].isdigit() or left.endswith(")")) and (right[0].isalnum() or right[0] == "(")
    return " · " if dots and factors else " "


_DISPLAY: Final = re.compile(r"\$\$(.+?)\$\$|\.\. math::[ \t]*(.*(?:\n[ \t]+\S.*)*)", re.DOTALL)
_SYMBOLS: Final = (
    re.compile(r"\$([^$]+)\$\s+=\s+`+(\w+)`+()"),
    re.compile(r"^\s*(\w+): :math:`([^`]+)`()", re.MULTILINE),
)
_SOURCE: Final = re.compile(r"^[ \t]*Source:\s*(.+(?:\n[ \t]*\S.*)*)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """Formula, symbols and source of a docstring."""

    name: str
    """Dotted name of the function."""
    math: str
    """First displayed formula in LaTeX; empty if there is none."""
    symbols: Mapping[str, str]
    """Argument -> its symbol, as text."""
    source: str


def formula_of(function: str) -> Formula:
    """The formula of a cost function, from its docstring; symbols may stand at the head of its module.

    >>> formula_of("collective.ring_all_gather_s").symbols["size_bytes"]
    'S'
    """
    name = function if function.startswith("steptime.") else f"steptime.cost.{function}"
    module, found = _find(name)
    if found is None:
        return Formula(name=name, math="", symbols={}, source="")
    doc = inspect.getdoc(found) or ""
    match = _DISPLAY.search(doc)
    latex = "" if match is None else (match.group(1) or match.group(2) or "")
    source = _SOURCE.search(doc) or _SOURCE.search(inspect.getdoc(module) or "")
    return Formula(
        name=name,
        math=" ".join(latex.split()),
        symbols={**_symbols(inspect.getdoc(module) or ""), **_symbols(doc)},
        source="" if source is None else _inline(" ".join(source.group(1).split()).rstrip(".")),
    )


def _find(name: str) -> tuple[ModuleType | None, Any]:
    module_name, _, attribute = name.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ImportError:
        return None, None
    return module, getattr(module, attribute, None)


def _inline(text: str) -> str:
    r"""A sentence with its formulas as text.

    >>> _inline(r"grows with $\log n$")
    'grows with log n'
    """
    return re.sub(r"\$([^$]+)\$", lambda found: to_text(found.group(1)), text)


def _symbols(doc: str) -> dict[str, str]:
    """Argument -> symbol, from "$B$ = `sent_bytes`" or from the list of arguments."""
    latex_first, name_first = _SYMBOLS
    out = {m.group(2): to_text(m.group(1)) for m in latex_first.finditer(doc)}
    return out | {m.group(1): to_text(m.group(2)) for m in name_first.finditer(doc)}


def print_details(out: Console, details: Sequence[Detail]) -> None:
    """Print every term with its function, formula, numbers and source."""
    if not details:
        out.print()
        out.print("no term was recorded")
    for detail in details:
        formula = formula_of(detail.function)
        t.heading(out, t.printable(f"{detail.path} = {_value(detail)}"))
        out.print(t.printable(f"  {formula.name}"))
        for line in (*_formula_lines(formula, detail.arguments), *_sum_lines(detail.calls)):
            t.indented(out, t.printable(line), 2)
        if formula.source:
            t.indented(out, f"source: {formula.source}", 2)
        if detail.basis:
            t.indented(out, t.printable(f"rests on: {detail.basis}"), 2)


def _value(detail: Detail) -> str:
    if detail.path.endswith("_bytes") or detail.function.endswith("_bytes"):
        return t.memory(detail.value)
    return t.seconds(detail.value) if detail.function.endswith("_s") else t.number(detail.value)


def _sum_lines(calls: Sequence[FormulaCall]) -> list[str]:
    """Lines on the factor of the first result and on the terms added to it."""
    lines, first, since = [], calls[0], 0
    for i, call in enumerate(calls):
        if i:
            same = call.function == first.function
            known = first.arguments if same else {}
            given = {name: value for name, value in call.arguments.items() if name not in known or known[name] != value}
            named = "the same" if same else f"steptime.cost.{call.function}"
            lines.append(" with ".join([f"plus {named}", *[text for text in [_named({}, given)] if text]]))
        if i + 1 < len(calls) and calls[i + 1].factors == call.factors:
            continue
        if call.factors:
            lines.append(f"{'each ' * (i > since)}multiplied by {_named({}, call.factors)}")
        since = i + 1
    return lines


def _named(symbols: Mapping[str, str], arguments: Mapping[str, Argument]) -> str:
    """Arguments with their symbols; a fabric is named by its basis."""
    named = []
    for name, value in arguments.items():
        symbol = symbols.get(name)
        if isinstance(value, (int, float, str)):
            text = value if isinstance(value, str) else t.number(value)
            named.append((f"{symbol} = " if symbol and symbol != name else "") + f"{name} = {text}")
    return ", ".join(named)


def _formula_lines(formula: Formula, arguments: Mapping[str, Argument]) -> list[str]:
    lines = []
    if formula.math:
        lines.append(to_text(formula.math))
        result, equals, right = formula.math.partition("=")
        numbers = {name: value for name, value in arguments.items() if isinstance(value, (int, float))}
        values = {formula.symbols.get(name, name): t.number(value) for name, value in numbers.items()}
        if equals and to_text(right, values) != to_text(right, {"": ""}):
            lines.append(f"{to_text(result)} = {to_text(right, values)}")
    named = _named(formula.symbols, arguments)
    return [*lines, f"with {named}"] if named else lines
