"""The marker ``each``: one test for all values, whose failure names every value that failed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]
CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"
TESTS = """
import pytest

@pytest.mark.each("name", ["a", "b"], ids=str.upper)
@pytest.mark.each(("n", "m"), [(1, 1), pytest.param(2, 3, id="unequal"), (4, 5), pytest.param(6, 6, id="six")])
def test_equal(name, n, m):
    if n == 4:
        pytest.skip("no single value is left out in silence")
    assert n == m

@pytest.mark.each("folder", [int, dict])
def test_raises(folder):
    raise ValueError(f"of {folder.__name__}")

@pytest.mark.each("n", range(3))
def test_fresh(n, tmp_path, monkeypatch, capsys):
    import os
    assert list(tmp_path.iterdir()) == [] and "EACH" not in os.environ
    (tmp_path / "file").touch()
    monkeypatch.setenv("EACH", "1")
    print(n)
    assert capsys.readouterr().out == f"{n}\\n"

@pytest.mark.each("n", [])
def test_of_nothing(n):
    pass
"""
QUICK = """
import pytest

@pytest.mark.quick("1-2", "2-2", "1-three", "2-three")
@pytest.mark.each("n", [1, 2, pytest.param(3, id="three")])
@pytest.mark.each("m", [1, 2])
def test_apart(n, m):
    print(f"<{n} {m}>")

@pytest.mark.quick(every=2)
@pytest.mark.parametrize("n", ["u", "v", "w"])
def test_every_second(n):
    print(f"<e {n}>")

@pytest.mark.quick("1")
@pytest.mark.each("n", [2])
def test_unknown(n):
    pass

@pytest.mark.quick(without=["x-a", "y-a"])
@pytest.mark.parametrize("n", ["a", "b"])
@pytest.mark.parametrize("m", ["x", "y"])
def test_of_parametrize(n, m):
    print(f"<{m} {n}>")
"""


def test_one_test_goes_through_all_values_and_tells_what_failed(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST.read_text(encoding="utf-8"))
    pytester.makepyfile(TESTS)
    done = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-p", "no:xdist")
    done.assert_outcomes(passed=1, failed=3)
    told = done.stdout.str()
    for line in (
        "4 of 8 values failed", "[unequal-A] ", "[unequal-B] ", "assert 2 == 3", "Skipped: no single value is left out",
        "2 of 2 values failed", "[int] ", "ValueError: of int", "[dict] ", "ValueError: of dict",
        "no value to go through",
    ):  # fmt: skip
        assert line in told, line
    assert "[six" not in told and "[1-1" not in told


@pytest.mark.parametrize(
    ("chosen", "values", "passed", "deselected"),
    [
        ("not slow", {"2 1", "2 2", "3 1", "3 2", "x b", "y b", "e u", "e w"}, 5, 5),
        ("slow", {"1 1", "1 2", "x a", "y a", "e v"}, 4, 6),
    ],
)  # fmt: skip
def test_quick_values_and_slow_ones_are_apart(
    pytester: pytest.Pytester, chosen: str, values: set[str], passed: int, deselected: int
) -> None:
    pytester.makeconftest(CONFTEST.read_text(encoding="utf-8"))
    pytester.makepyfile(QUICK)
    done = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-p", "no:xdist", "-m", chosen, "-rA")
    done.assert_outcomes(passed=passed, failed=1, deselected=deselected)
    told = done.stdout.str()
    assert set(re.findall(r"<(\w \w)>", told)) == values
    assert "the marker quick names ['1']; there are ['2']" in told


def test_a_quick_value_that_is_none_is_an_error(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST.read_text(encoding="utf-8"))
    pytester.makepyfile(QUICK.replace('"x-a"', '"x-c"'))
    done = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-p", "no:xdist")
    assert done.ret and "the marker quick names ['x-c']; there are ['x-a', 'x-b', 'y-a', 'y-b']" in done.stdout.str()
