"""Formulas of :mod:`steptime.cost` for the page, from their docstrings; ``scripts/web`` makes MathML of the LaTeX."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from types import FunctionType

import steptime.cost
from steptime.report.explain import formula_of


def records() -> dict[str, dict[str, str | dict[str, str]]]:
    """Function below ``steptime.cost`` -> its first sentence, formula in LaTeX, symbols by argument, source.

    >>> records()["collective.ring_all_gather_s"]["symbols"]["size_bytes"]
    'S'
    """
    found: dict[str, dict[str, str | dict[str, str]]] = {}
    for name, function in _functions():
        formula = formula_of(name)
        if formula.math:
            summary = (inspect.getdoc(function) or "").partition("\n\n")[0]
            found[name] = {
                "summary": " ".join(summary.split()),
                "latex": formula.math,
                "symbols": dict(formula.symbols),
                "source": formula.source,
            }
    return found


def _functions() -> Iterator[tuple[str, FunctionType]]:
    for found in pkgutil.iter_modules(steptime.cost.__path__):
        module = importlib.import_module(f"steptime.cost.{found.name}")
        for name, value in sorted(vars(module).items()):
            if isinstance(value, FunctionType) and value.__module__ == module.__name__ and not name.startswith("_"):
                yield f"{found.name}.{name}", value
