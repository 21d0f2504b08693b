"""Syntaxes of launch files, to flat tables of options and back: YAML, TOML, JSON, Python, shell.

A nested key is joined by dots: ``parallelism.tensor_parallel_degree``. Additions of steptime are comments that begin
with :data:`MARK`, or in JSON, which has no comments, entries under the key :data:`KEY`.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from steptime.errors import InputFileError
from steptime.launch.arithmetic import Unknown, calculated
from steptime.launch.shell import read_shell, write_shell
from steptime.launch.table import Python
from steptime.registry import needed
from steptime.store.files import parse_toml

MARK: Final = "# steptime: "
KEY: Final = "steptime"
_LAUNCH: Final = re.compile(r"^# launch: (.*)$", re.MULTILINE)
Options = dict[str, Any]
MAX_YAML_NODES: Final = 100_000
"""Largest number of nodes of a YAML document, each counted as often as its aliases repeat it."""
MAX_BRACKETS: Final = 200
MAX_VALUE: Final = 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """The parsed text of a launch file."""

    options: Options
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Concepts without an option, which steptime wrote in addition to the options."""
    launcher: str = ""
    """The command that starts the run, if the file has it in a comment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Content of a launch file to write."""

    options: Options
    head: tuple[str, ...]
    """Lines of comment."""
    extra: Mapping[str, Any]
    launcher: str
    python: Python


def value_text(value: Any) -> str:
    """A value as JSON, which YAML and TOML read too.

    >>> value_text(True), value_text("a b"), value_text((1, 2))
    ('true', '"a b"', '[1, 2]')
    """
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def comments(page: Page) -> list[str]:
    """The comment at the start of a file."""
    lines = [f"# {line}".rstrip() for line in page.head]
    return [*lines, *(f"{MARK}{name} = {value_text(value)}" for name, value in page.extra.items())]


def _text(options: Options, text: str, where: str) -> Text:
    """Options with the additions in the comments of a file."""
    launch = _LAUNCH.search(text)
    return Text(options=options, extra=extra_of(text, where), launcher=launch[1] if launch else "")


def extra_of(text: str, where: str) -> dict[str, Any]:
    """Concepts in the comments of a file.

    Raises:
        InputFileError: a comment of steptime is malformed.
    """
    out: dict[str, Any] = {}
    for line in text.splitlines():
        if line.startswith(MARK):
            name, _, value = line.removeprefix(MARK).partition(" = ")
            try:
                out[name.strip()] = json.loads(value)
            except ValueError:
                raise InputFileError(where, f"its line {line[:80]!r} is not {MARK}CONCEPT = VALUE") from None
    return out


def nested(options: Mapping[str, Any]) -> dict[str, Any]:
    """The nested tables of a flat table.

    >>> nested({"a.b": 1, "a.c.d": 2, "e": 3})
    {'a': {'b': 1, 'c': {'d': 2}}, 'e': 3}
    """
    out: dict[str, Any] = {}
    for path, value in options.items():
        *groups, name = path.split(".")
        table = out
        for group in groups:
            table = table.setdefault(group, {})
        table[name] = value
    return out


def flat(table: Mapping[Any, Any], prefix: str = "") -> Options:
    """The inverse of :func:`nested`, without nulls; values that options never have (dates, sets, bytes) become text.

    >>> flat({"a": {"b": 1, "c": {"d": None}}, "e": [1], "f": {2}})
    {'a.b': 1, 'e': [1], 'f': '{2}'}
    """
    out: Options = {}
    for name, value in table.items():
        key = f"{prefix}{plain_value(name)}"
        if isinstance(value, Mapping) and value:
            out |= flat(value, f"{key}.")
        elif value is not None and value != {}:
            out[key] = plain_value(value)
    return out


def plain_value(value: Any) -> Any:
    """A value as options have it: text, a number, a switch, or lists and tables of these; other values become text.

    >>> plain_value([True, 2.5, {"a": b"x"}, ...]), plain_value(10**30)
    ([True, 2.5, {'a': "b'x'"}, 'Ellipsis'], 'a whole number of 100 bits')
    """
    if isinstance(value, Mapping):
        return {str(plain_value(name)): plain_value(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(plain_value, value))
    if value is None or isinstance(value, (bool, float, str)):
        return value
    if isinstance(value, int):
        return value if -MAX_VALUE <= value < MAX_VALUE else f"a whole number of {value.bit_length()} bits"
    try:
        return str(value)[:200]
    except ValueError:  # a huge number inside
        return type(value).__name__


def _write_yaml(page: Page) -> str:
    return "\n".join([*comments(page), *_launch_line(page), "", *_yaml(nested(page.options), ""), ""])


def _launch_line(page: Page) -> list[str]:
    return [f"# launch: {page.launcher}"] if page.launcher else []


def _yaml(table: Mapping[str, Any], indent: str) -> list[str]:
    out = []
    for name, value in table.items():
        if isinstance(value, Mapping):
            out += [f"{indent}{name}:", *_yaml(value, indent + "  ")]
        else:
            out.append(f"{indent}{name}: {value_text(value)}")
    return out


def _read_yaml(text: str, where: str) -> Text:
    yaml = needed("yaml", f"{where}: a file of YAML")
    if _brackets(text) > MAX_BRACKETS:
        raise InputFileError(where, "not valid YAML: it is nested too deeply")
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if _nodes(root, {}) > MAX_YAML_NODES:
            raise InputFileError(where, f"its aliases make more than {MAX_YAML_NODES:,} values of it")
        found = None if root is None else loader.construct_document(root)
    except RecursionError:
        raise InputFileError(where, "not valid YAML: it is nested too deeply, or contains itself") from None
    except (yaml.YAMLError, ValueError, TypeError, KeyError) as error:
        raise InputFileError(where, f"not valid YAML: {' '.join(str(error).split())[:200]}") from None
    return _text(_table(found, where), text, where)


def _brackets(text: str) -> int:
    """Largest depth of brackets; brackets in texts count too."""
    deepest = depth = 0
    for bracket in re.findall(r"[\[\]{}]", text):
        depth = max(depth + (1 if bracket in "[{" else -1), 0)
        deepest = max(deepest, depth)
    return deepest


def _nodes(node: Any, known: dict[int, int]) -> int:
    """Number of nodes below a node of a YAML document, with repetitions by aliases.

    Raises:
        RecursionError: it contains itself.
    """
    if id(node) in known:
        if not known[id(node)]:
            raise RecursionError
        return known[id(node)]
    known[id(node)] = 0
    inside = node.value if isinstance(getattr(node, "value", None), list) else []
    each = (part for pair in inside for part in (pair if isinstance(pair, tuple) else (pair,)))
    known[id(node)] = 1 + sum(_nodes(part, known) for part in each)
    return known[id(node)]


def _table(found: object, where: str) -> Options:
    if not isinstance(found, Mapping):
        raise InputFileError(where, "is not a table of options")
    try:
        return flat(found)
    except RecursionError:
        raise InputFileError(where, "is nested too deeply") from None


def _write_toml(page: Page) -> str:
    sections: dict[str, list[str]] = {}
    for path, value in page.options.items():
        group, _, name = path.rpartition(".")
        sections.setdefault(group, []).append(f"{name} = {value_text(value)}")
    lines = [*comments(page), *_launch_line(page)]
    for group in sorted(sections, key=lambda each: each.partition(".")[0]):
        lines += ["", *([f"[{group}]"] if group else []), *sections[group]]
    return "\n".join([*lines, ""])


def tables_text(tables: Mapping[str, Any]) -> str:
    """A TOML file of tables.

    >>> tables_text({"layers": 2, "experts": {"experts": 8}})
    'layers = 2\\n\\n[experts]\\nexperts = 8\\n'
    """
    lines = [f"{name} = {value_text(value)}" for name, value in tables.items() if not isinstance(value, Mapping)]
    for group, table in tables.items():
        if isinstance(table, Mapping):
            lines += ["", f"[{group}]", *(f"{name} = {value_text(value)}" for name, value in table.items())]
    return "\n".join([*lines, ""])


def _read_toml(text: str, where: str) -> Text:
    return _text(_table(parse_toml(text, where), where), text, where)


def _write_json(page: Page) -> str:
    own: dict[str, Any] = {"about": list(page.head), "launch": page.launcher, **page.extra}
    return json.dumps({KEY: own, **nested(page.options)}, indent=2) + "\n"


def _read_json(text: str, where: str) -> Text:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputFileError(where, f"not valid JSON: {error}") from None
    own = found.pop(KEY, {}) if isinstance(found, dict) else {}
    extra = {k: v for k, v in own.items() if k not in ("about", "launch")} if isinstance(own, dict) else {}
    launch = own.get("launch", "") if isinstance(own, dict) else ""
    return Text(options=_table(found, where), extra=extra, launcher=str(launch))


def _python_text(value: Any) -> str:
    """A value as Python source; a text that names an attribute of ``torch`` is written without quotes."""
    if isinstance(value, str) and (value == "None" or value.startswith("torch.")):
        return value
    if isinstance(value, str) and value.endswith(".Config"):
        return f"{value}()"
    return repr(list(value) if isinstance(value, tuple) else value)


def _write_python(page: Page) -> str:
    how = page.python
    calls: dict[str, list[str]] = {}
    constants, attributes = [], []
    for path, value in page.options.items():
        group, _, name = path.rpartition(".")
        if group in how.calls:
            calls.setdefault(group, []).append(f"{name}={_python_text(value)}")
        elif not path.isupper():
            attributes.append(f"    {how.variable}.{path} = {_python_text(value)}")
        else:
            constants.append(f"{path} = {_python_text(value)}")
    passed = [how.calls[group].format(arguments=", ".join(given)) for group, given in calls.items()]
    inside = [line for line in passed if f"{how.variable}." in line]
    needs_torch = any(_python_text(value).startswith("torch.") for value in page.options.values())
    lines = [*comments(page), *_launch_line(page), "", *(["import torch"] if needs_torch else []), *how.setup]
    before = [*constants, *(line for line in passed if f"{how.variable}." not in line)]
    lines += ["", *before] if before else []
    lines += ["", "", f"def configure({how.variable}):", f'    """Set the plan on {how.variable}."""']
    inside = [f"    {part}" for line in inside for part in line.splitlines()]
    lines += [*attributes, *inside, f"    return {how.variable}", ""]
    return "\n".join(lines)


def _read_python(text: str, where: str) -> Text:
    reader = _Assignments()
    try:
        reader.visit(ast.parse(text))
    except (RecursionError, MemoryError):
        raise InputFileError(where, "not valid Python: it is nested too deeply") from None
    except (SyntaxError, ValueError) as error:
        raise InputFileError(where, f"not valid Python: {error}") from None
    return _text({name: plain_value(value) for name, value in reader.options.items()}, text, where)


class Unread(str):
    """Text of an expression whose value is not in the file."""

    __slots__ = ()


class _Assignments(ast.NodeVisitor):
    """Assignments to attributes, and keyword arguments of calls, in a Python file; nothing is run."""

    def __init__(self) -> None:
        self.options: Options = {}
        self._constants: dict[str, Any] = {}

    def visit_Assign(self, node: ast.Assign) -> None:
        """Take ``a.b.c = value`` and ``NAME = value``."""
        value = self._value(node.value)
        for target in node.targets:
            path = _path(target)
            if path is not None and isinstance(node.value, ast.Call):
                is_name = isinstance(target, ast.Name)
                if _ends(what := _path(node.value.func) or "") and not node.value.args:
                    self.options[path.partition(".")[2]] = what
                if not is_name and not node.value.keywords and not _is_configured(node.value) and not _ends(what):
                    called = ast.unparse(node.value) if node.value.args else what.rpartition(".")[2]
                    self.options[path.partition(".")[2]] = Unread(called[:80])
                    break
                if not is_name or _is_configured(node.value):
                    self._keywords(node.value, path if is_name else path.partition(".")[2])
                    return
            if path is not None and isinstance(node.value, ast.Constant) and node.value.value is None:
                value = "None"
            if path is None or value is None:
                continue
            if isinstance(target, ast.Name):
                self._constants[path] = value
                self.options |= {} if value in ({}, [], ()) else {path: value}
            else:
                self.options[path.partition(".")[2]] = value
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """Take the keywords of a call, under the name of the callee, or of the class that it configures."""
        self._keywords(node, _called(node))

    def _keywords(self, node: ast.Call, prefix: str) -> None:
        for argument in node.args:
            self.visit(argument)
        for keyword in node.keywords:
            if isinstance(keyword.value, ast.Call):
                if (what := _path(keyword.value.func) or "").endswith(".Config") and not keyword.value.args:
                    self.options[str(keyword.arg)] = what
                nested_in = f"{prefix}.{keyword.arg}" if _is_configured(keyword.value) else _called(keyword.value)
                self._keywords(keyword.value, nested_in)
            elif keyword.arg is not None and (value := self._value(keyword.value)) is not None:
                self.options.setdefault(f"{prefix}.{keyword.arg}", value)

    def _value(self, node: ast.expr) -> Any:
        """The value of an expression; its text if the value is not in the file."""
        if isinstance(node, ast.Name):
            return self._constants.get(node.id, Unread(node.id))
        if isinstance(node, ast.Attribute) and (path := _path(node)) is not None and path.startswith("torch."):
            return path
        if isinstance(node, ast.BinOp):
            return self._joined(node)
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return Unread(ast.unparse(node)[:80])

    def _joined(self, node: ast.BinOp) -> Any:
        """A sum, difference, product or quotient of integers, a sum of lists, or a repeated list."""
        left, right, plus = self._value(node.left), self._value(node.right), isinstance(node.op, ast.Add)
        lists = [len(each) for each in (left, right) if isinstance(each, list)]
        numbers = [each for each in (left, right) if type(each) is int and abs(each) < LONGEST_LIST**2]
        if len(lists) == 2 and plus and sum(lists) <= LONGEST_LIST:
            return left + right
        if len(lists) == len(numbers) == 1 and isinstance(node.op, ast.Mult) and lists[0] * numbers[0] <= LONGEST_LIST:
            return left * right
        if len(numbers) == 2 and isinstance(node.op, (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv)):
            try:
                return calculated(f"{left} {_SIGNS[type(node.op)]} ({right})", {})
            except Unknown:
                pass
        return Unread(ast.unparse(node)[:80])


_SIGNS: Final = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "/"}
LONGEST_LIST: Final = 10_000
#: Functions that make a configuration of the class that is their first argument (nemo_run).
_CONFIGURED: Final = ("Config", "Partial")


def _ends(path: str) -> bool:
    return path.endswith(".Config")


def _is_configured(node: ast.Call) -> bool:
    return bool(node.args) and (_path(node.func) or "").rpartition(".")[2] in _CONFIGURED


def _called(node: ast.Call) -> str:
    what = node.args[0] if _is_configured(node) else node.func
    return (_path(what) or "").removesuffix(".Config").rpartition(".")[2]


def _path(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (inner := _path(node.value)) is not None:
        return f"{inner}.{node.attr}"
    return None


def _write_script(page: Page) -> str:
    return write_shell(comments(page), page.launcher, page.options)


def _read_script(text: str, where: str) -> Text:
    return _text(read_shell(text, where), text, where)


WRITERS: Final[Mapping[str, Callable[[Page], str]]] = {
    "yaml": _write_yaml,
    "toml": _write_toml,
    "json": _write_json,
    "python": _write_python,
    "shell": _write_script,
}
READERS: Final[Mapping[str, Callable[[str, str], Text]]] = {
    "yaml": _read_yaml,
    "toml": _read_toml,
    "json": _read_json,
    "python": _read_python,
    "shell": _read_script,
}
