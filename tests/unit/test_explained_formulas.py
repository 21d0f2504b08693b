"""What the explanation of a term reads from docstrings: every symbol that one gives an argument, wherever it wraps."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re

import pytest

from steptime import cost
from steptime.surface.report.explain import formula_of
from steptime.surface.report.latex import to_text

FUNCTIONS = [
    f"{module.name}.{name}"
    for module in pkgutil.iter_modules(cost.__path__)
    for name, function in vars(importlib.import_module(f"steptime.cost.{module.name}")).items()
    if inspect.isfunction(function) and function.__module__ == f"steptime.cost.{module.name}" and name[0] != "_"
]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_argument_that_a_docstring_equals_to_a_symbol_has_it(function: str) -> None:
    module, _, name = function.rpartition(".")
    found = getattr(importlib.import_module(f"steptime.cost.{module}"), name)
    doc = " ".join((inspect.getdoc(found) or "").split())
    stated = set(re.findall(r"\$ = `(\w+)`", doc)) & set(inspect.signature(found).parameters)
    assert stated <= set(formula_of(function).symbols)


def test_a_wrapped_symbol_is_the_one_that_is_filled_in() -> None:
    assert formula_of("pipeline.pipeline_bubble_s").symbols["slowest_stage_s"] == "t_max"


@pytest.mark.parametrize(("formula", "text"), [
    (r"t = T \log_2 \max(n / 8, 1)", "t = 3 · log_2 max(64 / 8, 1)"), (r"t = \log_2(n)", "t = log_2(64)"),
    (r"t = T \max(n, 1) T", "t = 3 · max(64, 1) · 3"), (r"t = \min_{a} T n", "t = min_a 3 · 64"),
])  # fmt: skip
def test_a_function_is_not_multiplied_with_its_argument(formula: str, text: str) -> None:
    assert to_text(formula, {"T": "3", "n": "64"}) == text
