"""How each term was computed: its formula, the numbers put in, the source."""

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
from steptime.report.latex import to_text

if TYPE_CHECKING:
    from rich.console import Console

_DISPLAY: Final = re.compile(r"\$\$(.+?)\$\$|\.\. math::[ \t]*(.*(?:\n[ \t]+\S.*)*)", re.DOTALL)
_SYMBOLS: Final = (
    re.compile(r"\$([^$]+)\$\s+=\s+`+(\w+)`+()"),
    re.compile(r"^\s*(\w+): :math:`([^`]+)`()", re.MULTILINE),
)
_SOURCE: Final = re.compile(r"^[ \t]*Source:\s*(.+(?:\n[ \t]*\S.*)*)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """What a docstring says about its formula."""

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
    """Every term with its function, formula, numbers and source."""
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
    """What the first result is multiplied by, and what is added to it."""
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
    """Arguments with their symbols; a fabric is named by what the number rests on."""
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
