"""What ``import steptime`` offers, and what it must not cost."""

from __future__ import annotations

import ast
import subprocess
import sys
import types

import pytest

import steptime

HEAVY = ("pydantic", "rich", "typer", "click", "matplotlib", "torch", "pandas", "scipy", "sympy", "pint")


def modules_after(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter has after running the code."""
    report = "\nimport sys; sys.__stderr__.write(repr(sorted({name.partition('.')[0] for name in sys.modules})))"
    done = subprocess.run([sys.executable, "-c", code + report], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(ast.literal_eval(done.stderr.splitlines()[-1]))


def test_export_list_has_no_name_twice():
    assert steptime.__all__, "steptime exports nothing"
    assert len(set(steptime.__all__)) == len(steptime.__all__)


def test_every_exported_name_exists():
    for name in steptime.__all__:
        assert getattr(steptime, name) is not None


def test_every_exported_name_has_a_docstring():
    for name in steptime.__all__:
        value = getattr(steptime, name)
        if isinstance(value, type | types.FunctionType):
            assert (value.__doc__ or "").strip(), f"steptime.{name} has no docstring"


def test_everything_public_is_exported():
    foreign = {"annotations", "TYPE_CHECKING"}
    public = {
        name
        for name, value in vars(steptime).items()
        if not name.startswith("_")
        and not isinstance(value, types.ModuleType)
        and getattr(value, "__module__", "steptime").startswith("steptime")
    }
    assert public - foreign <= set(steptime.__all__)


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
from steptime.surface.cli.main import run
sys.argv = ["steptime", "--help"]
try:
    run()
except SystemExit as stop:
    assert stop.code == 0, stop.code
"""
    assert not modules_after(code) & {"numpy", "pydantic", "matplotlib", "torch", "pandas", "scipy"}
