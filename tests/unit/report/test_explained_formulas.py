"""What the explanation of a term reads from docstrings: every symbol that one gives an argument, wherever it wraps."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re

import pytest

from steptime import cost
from steptime.report.explain import formula_of, to_text

FUNCTIONS = [
    f"{module.name}.{name}"
    for module in pkgutil.iter_modules(cost.__path__)
    for name, function in vars(importlib.import_module(f"steptime.cost.{module.name}")).items()
    if inspect.isfunction(function) and function.__module__ == f"steptime.cost.{module.name}" and name[0] != "_"
]


@pytest.mark.each("function", FUNCTIONS)
def test_every_argument_that_a_docstring_equals_to_a_symbol_has_it(function: str) -> None:
    module, _, name = function.rpartition(".")
    found = getattr(importlib.import_module(f"steptime.cost.{module}"), name)
    doc = " ".join((inspect.getdoc(found) or "").split())
    stated = set(re.findall(r"\$ = `(\w+)`", doc)) & set(inspect.signature(found).parameters)
    assert stated <= set(formula_of(function).symbols)


PLAIN = ("fabric_of", "link_share", "short_chains", "exchange_of", "residual_table")
"""Functions that look something up; their arguments are no numbers of a formula."""


def told(function: str, seen: frozenset[str] = frozenset()) -> str:
    """What the docstrings of a function, of its module and of the functions that it names say, without examples."""
    module = importlib.import_module(f"steptime.cost.{function.rpartition('.')[0]}")
    doc = (inspect.getdoc(getattr(module, function.rpartition(".")[2])) or "").partition(">>> ")[0]
    others = {one for name in re.findall(r"`(?:[\w.]+\.)?(\w+)`", doc) for one in FUNCTIONS if one.endswith(f".{name}")}
    further = [told(other, seen | {function}) for other in sorted(others - seen - {function})]
    return "\n".join([doc, inspect.getdoc(module) or "", *further])


@pytest.mark.each("function", [one for one in FUNCTIONS if one.rpartition(".")[2] not in PLAIN])
def test_every_argument_is_named_in_a_docstring(function: str) -> None:
    module, _, name = function.rpartition(".")
    found, text = getattr(importlib.import_module(f"steptime.cost.{module}"), name), told(function)
    unnamed = [
        each for each in inspect.signature(found).parameters
        if not re.search(rf"`{each}`|\$[^$]*\b{each}\b[^$]*\$|^\s*{each}: ", text, re.MULTILINE)
    ]  # fmt: skip
    assert not unnamed


def test_a_wrapped_symbol_is_the_one_that_is_filled_in() -> None:
    assert formula_of("pipeline.pipeline_bubble_s").symbols["slowest_stage_s"] == "t_max"


@pytest.mark.parametrize(("formula", "text"), [
    (r"t = T \log_2 \max(n / 8, 1)", "t = 3 · log_2 max(64 / 8, 1)"), (r"t = \log_2(n)", "t = log_2(64)"),
    (r"t = T \max(n, 1) T", "t = 3 · max(64, 1) · 3"), (r"t = \min_{a} T n", "t = min_a 3 · 64"),
])  # fmt: skip
def test_a_function_is_not_multiplied_with_its_argument(formula: str, text: str) -> None:
    assert to_text(formula, {"T": "3", "n": "64"}) == text
