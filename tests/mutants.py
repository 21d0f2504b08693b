"""Change the package in one place after the other, and print the changes that no test notices.

A mutant is one changed operator, number, comparison, condition or choice in the body of a function. Tests run in copies
of one process that has loaded everything: a copy takes the changed code of the function, then the tests that call it,
the quickest first, until one fails. Which tests call a function, a first copy finds out.

usage: scripts/mutants [--sample N] [--seed N] [--all] [--limit SECONDS] [--json FILE] [PATH ...] [-- PYTEST ...]
       scripts/mutants --again FILE [--all] ...    those that FILE, written by --json, says are alive or not called

PATH: files or folders of the package, by default src/steptime/cost. Of their mutants 200 are drawn, or --sample; 0 is
all. Tests are those of the default suite, or with --all every test. --limit: CPU seconds of tests for one mutant, by
default 60; what is alive after them counts as alive. What follows ``--`` goes to pytest, as folders of tests.
"""

from __future__ import annotations

import argparse
import ast
import gc
import json
import os
import random
import resource
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, Final, NamedTuple

import pytest
from _pytest.runner import runtestprotocol

ROOT: Final = Path(__file__).resolve().parents[1]
HIT: Final = "__mutants_hit__"
BINARY: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
}  # fmt: skip
COMPARED: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
CALLED: Final = {
    "min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "ceil": "floor", "floor": "ceil",
    "any": "all", "all": "any",
}  # fmt: skip


LOADED: Final[dict[str, list[FunctionType]]] = defaultdict(list)
"""File -> its functions in this process; the collector does not tell of them any more once copies are made."""


class Mutant(NamedTuple):
    """One change of a function."""

    file: str
    function: str
    """Qualified name of the function or method of the module in which it lies."""
    line: int
    what: str
    number: int
    """Which of the changes of the file it is, in the order of :func:`changes`."""


def changes(tree: ast.Module) -> Iterator[tuple[str, ast.AST, str, Callable[[], None]]]:
    """Function, place, description and deed of every change of a module; a deed changes the tree that was given."""
    for name, function in functions(tree):
        body = function.body if isinstance(function.body, list) else [function.body]
        for statement in body:
            for node in walked(statement):
                yield from ((name, node, what, deed) for what, deed in changes_of(node))


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The outermost functions and the methods of a module; what stands in them belongs to them."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        elif not isinstance(node, ast.expr):
            yield from functions(node, prefix)


def walked(node: ast.AST) -> Iterator[ast.AST]:
    """A node and those below it, without annotations, texts and what an error is made of."""
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from walked(child)


def changes_of(node: ast.AST) -> Iterator[tuple[str, Callable[[], None]]]:
    """What may be changed at a node, in words, and what changes it."""

    def put(name: str, value: Any) -> Callable[[], None]:
        return lambda: setattr(node, name, value)

    match node:
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in BINARY:
            yield _words(op, BINARY[type(op)]), put("op", BINARY[type(op)]())
        case ast.Compare(ops=[op]):
            yield _words(op, COMPARED[type(op)]), put("ops", [COMPARED[type(op)]()])
        case ast.BoolOp(op=op):
            other = ast.Or if isinstance(op, ast.And) else ast.And
            yield _words(op, other), put("op", other())
        case ast.UnaryOp(op=ast.USub()):
            yield "sign left out", put("op", ast.UAdd())
        case ast.If() | ast.IfExp() | ast.While():
            yield "condition negated", put("test", ast.UnaryOp(ast.Not(), node.test))
        case ast.Constant(value=bool() | int() | float() as value):
            other_value = (
                not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else value * 2 or 1.0
            )
            yield f"{value} -> {other_value}", put("value", other_value)
        case ast.Call(func=ast.Name(id="where"), args=[condition, one, other]):
            yield "branches of where exchanged", put("args", [condition, other, one])
        case ast.Call(func=ast.Name(id=name)) if name in CALLED:
            yield f"{name} -> {CALLED[name]}", put("func", ast.Name(CALLED[name], ast.Load()))
        case ast.Call(func=ast.Attribute(attr=name, value=value)) if name in CALLED:
            yield f"{name} -> {CALLED[name]}", put("func", ast.Attribute(value, CALLED[name], ast.Load()))


def _words(one: ast.AST, other: type[ast.AST]) -> str:
    return f"{type(one).__name__} -> {other.__name__}"


def mutants_of(path: Path) -> list[Mutant]:
    """Every mutant of a file."""
    name = path.relative_to(ROOT).as_posix()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [
        Mutant(name, function, getattr(node, "lineno", 0), what, number)
        for number, (function, node, what, _) in enumerate(changes(tree))
    ]


def codes(code: CodeType) -> Iterator[tuple[str, CodeType]]:
    """The code of every function of a module by its qualified name, without those within functions."""
    for const in code.co_consts:
        if isinstance(const, CodeType):
            if "<locals>" not in const.co_qualname:
                yield const.co_qualname, const
            yield from codes(const)


def changed_codes(path: Path, change: Callable[[ast.Module], None]) -> dict[str, CodeType]:
    """The code of the functions of a file after a change of its tree."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    change(tree)
    return dict(codes(compile(ast.fix_missing_locations(tree), str(path), "exec", dont_inherit=True)))


def put_codes(path: Path, found: dict[str, CodeType]) -> None:
    """Give the functions of a file that this process has loaded other code."""
    for function in LOADED[str(path)]:
        code = found.get(function.__code__.co_qualname)
        if code is not None and code.co_freevars == function.__code__.co_freevars:
            function.__code__ = code


def watch_calls(path: Path) -> None:
    """Let every function of a file tell when it is called."""
    name = path.relative_to(ROOT).as_posix()

    def change(tree: ast.Module) -> None:
        for function, node in functions(tree):
            told = ast.parse(f"__import__('builtins').{HIT}.add(({name!r}, {function!r}))").body
            at = 1 if ast.get_docstring(node, clean=False) is not None else 0
            node.body[at:at] = told

    put_codes(path, changed_codes(path, change))


def mutate(mutant: Mutant) -> None:
    """Change the function of a mutant in this process."""
    path = ROOT / mutant.file

    def change(tree: ast.Module) -> None:
        for number, (*_, deed) in enumerate(changes(tree)):
            if number == mutant.number:
                deed()
                return

    found = changed_codes(path, change)
    put_codes(path, {mutant.function: found[mutant.function]})


class Copy:
    """A copy of this process that does something and ends."""

    def __init__(self, do: Callable[[], Any], seconds: float) -> None:
        read, write = os.pipe()
        self.id, self._read = os.fork(), read
        if self.id:
            os.close(write)
            return
        status = 3
        try:
            os.close(read)
            null = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(null, stream)
            resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 2))
            os.setsid()
            with os.fdopen(write, "w") as out:
                json.dump(do(), out)
            status = 0
        finally:
            os._exit(status)

    def answer(self) -> Any:
        """What it did; None where it ended too early."""
        with os.fdopen(self._read) as given:
            text = given.read()
        os.waitpid(self.id, 0)
        return json.loads(text) if text else None


class Mutants:
    """The plug-in that runs tests of mutants in place of pytest's loop."""

    def __init__(self, chosen: Sequence[Mutant], limit_s: float, profile: str) -> None:
        self.chosen, self.limit_s, self.profile = chosen, limit_s, profile
        self.paths = sorted({ROOT / mutant.file for mutant in chosen})
        self.outcome: dict[Mutant, str] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self) -> None:
        """Enter the profile of hypothesis: as many examples as in a suite, the same ones every time."""
        from hypothesis import HealthCheck, Phase, settings

        from suites import PROFILES

        settings.register_profile(
            "mutants", max_examples=PROFILES[self.profile], deadline=None, derandomize=True, database=None,
            phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck),
        )  # fmt: skip

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Find who calls what, then run the tests of each mutant."""
        if session.testsfailed or session.config.option.collectonly:
            raise session.Interrupted(f"{session.testsfailed} errors during collection")
        items = {item.nodeid: item for item in session.items}
        began = time.monotonic()
        print(f"{len(self.chosen)} mutants, {len(items)} tests", flush=True)
        for function in gc.get_objects():
            if type(function) is FunctionType:  # no __class__ of what is lazy
                LOADED[function.__code__.co_filename].append(function)
        gc.freeze()
        calls, seconds = self._calls(items)
        print(f"{len(seconds)} tests call the files, {sum(seconds.values()):.0f} CPU s", flush=True)
        running: list[tuple[Mutant, Copy]] = []
        for mutant in [*self.chosen, None, None]:
            if len(running) == 2 or (mutant is None and running):
                self._end(*running.pop(0))
            if mutant is None:
                continue
            tests = sorted(calls.get((mutant.file, mutant.function), ()), key=seconds.__getitem__)
            if tests:
                run = [items[name] for name in tests]
                running.append((mutant, Copy(lambda m=mutant, r=run: self._first_failure(m, r), 2 * self.limit_s + 60)))
            else:
                self.outcome[mutant] = "not called"
        print(f"{time.monotonic() - began:.0f} s")
        return True

    def _calls(self, items: dict[str, pytest.Item]) -> tuple[dict[tuple[str, str], set[str]], dict[str, float]]:
        """Function -> tests that call it and pass; test -> its CPU seconds."""

        def do() -> list[Any]:
            import builtins

            hit: set[tuple[str, str]] = set()
            setattr(builtins, HIT, hit)
            for path in self.paths:
                watch_calls(path)
            found = []
            for name, item in items.items():
                hit.clear()
                start = time.process_time()
                passed = _passes(item)
                if passed and hit:
                    found.append((name, time.process_time() - start, sorted(hit)))
            return found

        calls: dict[tuple[str, str], set[str]] = defaultdict(set)
        seconds = {}
        for name, cost, hit in Copy(do, 7200).answer() or ():
            seconds[name] = cost
            for file, function in hit:
                calls[file, function].add(name)
        return calls, seconds

    def _first_failure(self, mutant: Mutant, tests: Sequence[pytest.Item]) -> str | None:
        mutate(mutant)
        start = time.process_time()
        for item in tests:
            if not _passes(item):
                return item.nodeid
            if time.process_time() - start > self.limit_s:
                return None
        return None

    def _end(self, mutant: Mutant, copied: Copy) -> None:
        try:
            killed = copied.answer()
        except ValueError:
            killed = "ended early"
        self.outcome[mutant] = f"killed by {killed}" if killed else "alive"


def _passes(item: pytest.Item) -> bool:
    """Whether a test passes or is skipped."""
    return not any(report.failed for report in runtestprotocol(item, nextitem=None, log=False))


def told(outcome: dict[Mutant, str]) -> Iterator[str]:
    """A table of files and the list of what is alive."""
    by: dict[str, Counter[str]] = defaultdict(Counter)
    for mutant, end in outcome.items():
        by[mutant.file]["killed" if end.startswith("killed") else end] += 1
    for mutant, end in outcome.items():
        if not end.startswith("killed"):
            yield f"{end}: {mutant.file}:{mutant.line} {mutant.function}: {mutant.what}"
    for file, count in by.items():
        yield f"{file}: {count['killed']} of {count.total()} killed, {count['not called']} not called"
    whole = sum(by.values(), Counter())
    yield f"killed: {whole['killed']} of {whole.total()} ({whole['killed'] / max(whole.total(), 1):.1%})"


def main(arguments: Sequence[str]) -> int:
    """Run it; 0 whatever survives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", default=["src/steptime/cost"])
    parser.add_argument("--sample", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=60.0)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--json")
    parser.add_argument("--again")
    words = list(arguments)
    at = words.index("--") if "--" in words else len(words)
    rest = words[at + 1 :]
    given = parser.parse_args(words[:at])
    if given.again:
        rows = json.loads(Path(given.again).read_text(encoding="utf-8"))
        chosen = [Mutant(*list(row.values())[:-1]) for row in rows if not row["end"].startswith("killed")]
    else:
        paths = [Path(name).resolve() for name in given.paths]
        files = sorted(file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path]))
        every = [mutant for path in files for mutant in mutants_of(path)]
        chosen = random.Random(given.seed).sample(every, given.sample) if 0 < given.sample < len(every) else every
        print(f"{len(chosen)} of {len(every)} mutants")
    plugin = Mutants(sorted(chosen), given.limit, "thorough" if given.all else "quick")
    options = ["-p", "no:xdist", "-q", "--hypothesis-profile=mutants"]
    pytest.main([*options, *([] if given.all else ["-m", "not slow"]), *rest], plugins=[plugin])
    lines = list(told(plugin.outcome))
    print("\n".join(lines))
    if given.json:
        found = [{**mutant._asdict(), "end": end} for mutant, end in plugin.outcome.items()]
        Path(given.json).write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
