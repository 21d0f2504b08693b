"""What ``import steptime`` offers, and what it must not cost."""

from __future__ import annotations

import ast
import subprocess
import sys
import types
from pathlib import Path

import pytest

import steptime

HEAVY = ("pydantic", "rich", "click", "matplotlib", "torch", "pandas", "scipy", "sympy", "pint")


def modules_after(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter has after running the code."""
    report = "\nimport sys; sys.__stderr__.write(repr(sorted({name.partition('.')[0] for name in sys.modules})))"
    done = subprocess.run([sys.executable, "-c", code + report], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(ast.literal_eval(done.stderr.splitlines()[-1]))


def typed_exports(package: types.ModuleType) -> dict[str, str]:
    """Name -> place, as module:attribute, that the block for type checkers imports it from."""
    body = ast.parse(Path(str(package.__file__)).read_text(encoding="utf-8")).body
    block = next(one for one in body if isinstance(one, ast.If) and ast.unparse(one.test) == "TYPE_CHECKING")
    lines = [one for one in block.body if isinstance(one, ast.ImportFrom)]
    assert len(lines) == len(block.body)
    return {name.asname or name.name: f"{one.module}:{name.name}" for one in lines for name in one.names}


def test_type_checkers_see_what_is_loaded():
    assert typed_exports(steptime) == {**steptime.PLACES, "api": "steptime:api"}
    assert steptime.__all__ == ["__version__", *sorted(steptime.PLACES)]
    assert typed_exports(steptime.api) == steptime.api.PLACES
    assert sorted(steptime.api.PLACES) == steptime.api.__all__


def test_every_exported_name_exists():
    for name in steptime.__all__:
        assert getattr(steptime, name) is not None


def test_every_exported_name_has_a_docstring():
    for name in steptime.__all__:
        value = getattr(steptime, name)
        if isinstance(value, type | types.FunctionType):
            assert (value.__doc__ or "").strip(), f"steptime.{name} has no docstring"


def test_dir_lists_the_exports():
    assert set(steptime.__all__) <= set(dir(steptime))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = steptime.no_such_name  # type: ignore[attr-defined]


def test_import_is_cheap():
    assert not modules_after("import steptime") & {*HEAVY, "numpy"}


def test_help_imports_no_numerics():
    code = """
import sys
from steptime.__main__ import run
sys.argv = ["steptime", "--help"]
try:
    run()
except SystemExit as stop:
    assert stop.code == 0, stop.code
"""
    assert not modules_after(code) & {"numpy", "pydantic", "matplotlib", "torch", "pandas", "scipy"}
