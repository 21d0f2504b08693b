"""The script that changes code: which changes it makes, and that it finds those that no test notices."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import mutants

CODE = '''\
"""Module."""
LIMIT = 1 + 1


class Kind:
    def area(self, a: int = 3, b=2.0):
        """1 + 1"""
        if a < b and not self:
            raise ValueError(f"{a + 1}")
        return max(a, b) if a is None else where(a, -b, ceil(b))


def plain(x):
    return lambda y: x // y
'''


def changed(number: int) -> str:
    tree = ast.parse(CODE)
    for n, (*_, deed) in enumerate(mutants.changes(tree)):
        if n == number:
            deed()
    new = ast.unparse(ast.fix_missing_locations(tree)).splitlines()
    old = ast.unparse(ast.parse(CODE)).splitlines()
    (line,) = [one for one, other in zip(new, old, strict=True) if one != other]
    return line.strip()


def test_every_change_of_a_file() -> None:
    found = [(function, what) for function, _, what, _ in mutants.changes(ast.parse(CODE))]
    assert [(name, what, changed(n)) for n, (name, what) in enumerate(found)] == [
        ("Kind.area", "condition negated", "if not (a < b and (not self)):"),
        ("Kind.area", "And -> Or", "if a < b or not self:"),
        ("Kind.area", "Lt -> LtE", "if a <= b and (not self):"),
        ("Kind.area", "condition negated", "return max(a, b) if not a is None else where(a, -b, ceil(b))"),
        ("Kind.area", "Is -> IsNot", "return max(a, b) if a is not None else where(a, -b, ceil(b))"),
        ("Kind.area", "max -> min", "return min(a, b) if a is None else where(a, -b, ceil(b))"),
        ("Kind.area", "branches of where exchanged", "return max(a, b) if a is None else where(a, ceil(b), -b)"),
        ("Kind.area", "sign left out", "return max(a, b) if a is None else where(a, +b, ceil(b))"),
        ("Kind.area", "ceil -> floor", "return max(a, b) if a is None else where(a, -b, floor(b))"),
        ("plain", "FloorDiv -> Mult", "return lambda y: x * y"),
    ]


NUMBERS = """\
def total(a, b):
    return a + b - 0


class Pair:
    def larger(self, a, b):
        return max(a, b)


def never():
    return 3
"""
TESTS = """\
import two_numbers

def test_sum():
    assert two_numbers.total(2, 2) == 4

def test_larger():
    assert two_numbers.Pair().larger(1, 2) == 2
"""
SCRIPT = """\
from pathlib import Path
import mutants

mutants.ROOT = Path.cwd()
mutants.main(["two_numbers.py", "--", "-p", "no:cacheprovider", "."])
"""


def test_what_no_test_notices_is_told(tmp_path: Path) -> None:
    for name, text in (("two_numbers.py", NUMBERS), ("test_two_numbers.py", TESTS), ("script.py", SCRIPT)):
        (tmp_path / name).write_text(text)
    places = os.pathsep.join([str(Path(mutants.__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=os.environ | {"PYTHONPATH": places}, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    assert "alive: two_numbers.py:2 total: Sub -> Add\n" in done.stdout, done.stdout + done.stderr
    assert "not called: two_numbers.py:11 never: 3 -> 4\n" in done.stdout
    assert done.stdout.endswith("two_numbers.py: 3 of 5 killed, 1 not called\nkilled: 3 of 5 (60.0%)\n")


@pytest.mark.parametrize("name", ["cost/roofline.py", "cost/pipeline.py"])
def test_every_change_of_a_real_file_can_be_compiled(name: str) -> None:
    path = mutants.ROOT / "src/steptime" / name
    for mutant in mutants.mutants_of(path):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        list(mutants.changes(tree))[mutant.number][-1]()
        compile(ast.fix_missing_locations(tree), str(path), "exec")
