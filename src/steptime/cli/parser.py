"""Commands as functions: an argparse parser for each, from the names, types and defaults of its parameters.

A parameter of a command is annotated with an :class:`Arg`, or is a row of :data:`steptime.options.OPTIONS` given to
:func:`takes` and passed to the function as a keyword argument.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache, cached_property
from inspect import Parameter, getdoc, signature
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn, TypeVar, get_args, get_origin

from steptime.errors import FieldError, UnknownNameError, UserError, shorten
from steptime.options import KEYS, OPTIONS, Count, Flag, Named, OneOf, Option, Place, Ratio, digits
from steptime.registry import Registry, loaded

F = TypeVar("F", bound=Callable[..., Any])
WIDEST: Final = 80
"""Largest number of columns of help."""
FIRST: Final = "Most used"
OWN: Final = "Options of this command"
ANSWER: Final = "Answer"


@dataclass(frozen=True, slots=True)
class Arg:
    """One argument of a command line; name, type and default come from the annotated parameter."""

    flag: str = ""
    """Spelling; empty: by position."""
    metavar: str = ""
    help: str = ""
    parse: Callable[[str], Any] | None = None
    """Parser of the value; None: by the type of the parameter."""
    group: str = OWN
    envvar: str = ""
    """Environment variable with the default value."""
    catalogue: str = ""
    """Catalogue of names for shell completion."""
    switch: bool = False
    """True: a switch without a value."""
    optional: bool = False
    """True: the value may be missing, and is the empty text then."""


def positional(metavar: str = "", help: str = "", catalogue: str = "") -> Any:
    """An argument by position."""
    return Arg("", metavar, help, catalogue=catalogue)


def flag(*flags: str, metavar: str = "", help: str = "", **more: Any) -> Any:
    """An argument with a name, or two."""
    return Arg(" ".join(flags), metavar, help, **more)


def number(flag: str, metavar: str, help: str, low: int = 1, high: int = 10**7) -> Any:
    """An option whose value is a whole number."""
    return Arg(flag, metavar, help, whole(flag, low, high))


def real(flag: str, metavar: str, help: str) -> Any:
    """An option whose value is a number; its range is checked later."""
    return Arg(flag, metavar, help, _real(flag))


def whole(flag: str, low: int, high: int) -> Callable[[str], int]:
    """Parser of a whole number from ``low`` to ``high``."""

    def parse(text: str) -> int:
        value = digits(text)
        if not low <= value <= high:
            raise FieldError("", flag, f"{shorten(text, 40)!r} is not a whole number from {low} to {high}")
        return value

    return parse


def _real(flag: str) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            return float(text)
        except ValueError:
            raise FieldError("", flag, f"{shorten(text, 40)!r} is not a number") from None

    return parse


def _integer(flag: str) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
            raise FieldError("", flag, f"{shorten(text, 40)!r} is not a whole number")
        return int(text)

    return parse


def _one_of(flag: str, names: Sequence[str], kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        if text not in names:
            raise FieldError("", flag, f"{shorten(text, 40)!r} is not one of {', '.join(names)}")
        return kind(text)

    return parse


def row(name: str) -> Any:
    """The option of a job or plan by name, as the annotation of a parameter.

    >>> row("micro_batch").flag
    '--micro-batch'
    """
    return _arg_of(OPTIONS[name])


def _arg_of(of: Option) -> Arg:
    takes = of.takes
    parse: Callable[[str], Any] | None = None
    if isinstance(takes, Count):
        parse = whole(of.flag, *takes)
    elif isinstance(takes, Ratio):  # its range is checked with the plan
        parse = _real(of.flag)
    elif isinstance(takes, OneOf) and of.place is Place.JOB:  # what a plan takes follows from its mode
        parse = _one_of(of.flag, takes.names, str)
    catalogue = takes.kind if isinstance(takes, Named) else ""
    group = FIRST if of.first else of.group
    metavar = of.metavar or ("|".join(takes.names) if isinstance(takes, OneOf) else "")
    return Arg(of.flag, metavar, of.help, parse, group, catalogue=catalogue, switch=isinstance(takes, Flag))


def takes(rows: Mapping[str, Arg]) -> Callable[[F], F]:
    """Decorator that adds arguments to a command, passed as keyword arguments; None: not given."""

    def marked(function: F) -> F:
        function.rows = rows  # type: ignore[attr-defined]
        return function

    return marked


class _Parser(argparse.ArgumentParser):
    """A parser that raises errors instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        """Raise UserError."""
        raise UserError(message, hint=f"{self.prog} --help says what it takes")


class _Field(NamedTuple):
    """A parameter of a command, for argparse."""

    name: str
    arg: Arg
    many: bool
    needed: bool
    default: Any


@cache
def _fields(function: Callable[..., Any]) -> tuple[_Field, ...]:
    return tuple(_each_field(function))


def _each_field(function: Callable[..., Any]) -> Iterator[_Field]:
    for each in signature(function, eval_str=True).parameters.values():
        if each.kind is Parameter.VAR_KEYWORD:
            for name, arg in function.rows.items():  # type: ignore[attr-defined]
                yield _Field(name, arg, False, False, None)
            continue
        kind, arg = get_args(each.annotation)[:2]
        many = False
        parse: Callable[[str], Any] = str
        for one in (kind, *get_args(kind)):
            if get_origin(one) is list:
                many, one = True, get_args(one)[0]
            if one is bool:
                arg = replace(arg, switch=True)
            elif one in (int, float):
                parse = _integer(arg.flag) if one is int else _real(arg.flag)
            elif one is Path:
                parse = Path
            elif isinstance(one, type) and issubclass(one, StrEnum):
                names = [str(value) for value in one]
                parse = _one_of(arg.flag, names, one)
                arg = arg if arg.metavar else replace(arg, metavar="|".join(names))
        needed = each.default is Parameter.empty
        filled = arg if arg.parse is not None else replace(arg, parse=parse)
        yield _Field(each.name, filled, many, needed, None if needed else each.default)


def parser_of(function: Callable[..., Any], words: str) -> argparse.ArgumentParser:
    """The parser of a command whose name is ``words``."""
    fields = _fields(function)
    by_place = [f.arg.metavar if f.needed else f"[{f.arg.metavar.strip('[]')}]" for f in fields if not f.arg.flag]
    parser = _Parser(
        prog=words,
        usage=" ".join([words, "[OPTIONS]", *by_place]),
        description=_filled(getdoc(function) or ""),
        formatter_class=_Formatter,
        allow_abbrev=False,
        add_help=False,
        exit_on_error=False,
    )
    groups: dict[str, Any] = {}
    between = [title for title in dict.fromkeys(f.arg.group for f in fields) if title != ANSWER]
    for title in ("Arguments", FIRST, OWN, *between, ANSWER):
        groups[title] = groups.get(title) or parser.add_argument_group(title)
    for field in fields:
        _add(groups, field)
    groups[ANSWER].add_argument("-h", "--help", action="help", help="Show this and exit.")
    return parser


def _add(groups: Mapping[str, Any], field: _Field) -> None:
    arg, default = field.arg, field.default
    words = arg.help if default in (None, False, "") or "default" in arg.help else f"{arg.help} [default: {default}]"
    said = words.replace("%", "%%")
    if not arg.flag:
        many = "*" if field.many else "?"
        made = groups["Arguments"].add_argument(
            field.name, metavar=arg.metavar, help=said, nargs=many, default=None, type=arg.parse
        )
    elif arg.switch:
        made = groups[arg.group].add_argument(
            *arg.flag.split(), dest=field.name, action="store_true", default=None, help=said
        )
    else:
        more = {"nargs": "?", "const": ""} if arg.optional else {}
        made = groups[arg.group].add_argument(
            *arg.flag.split(),
            dest=field.name,
            metavar=arg.metavar or field.name.upper(),
            help=said,
            type=arg.parse,
            action="append" if field.many else "store",
            default=None,
            **more,
        )
    made.completer = lambda **_: names_of_kind(arg.catalogue)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=_columns())

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: str | None = None) -> None:
        super().add_usage(usage, actions, groups, "Usage: ")


def _columns() -> int:
    return max(min(shutil.get_terminal_size().columns, WIDEST) - 2, 20)


def _filled(text: str) -> str:
    paragraphs = re.split(r"\n\s*\n", text.strip())
    return "\n\n".join(textwrap.fill(" ".join(each.split()), _columns()) for each in paragraphs).replace("%", "%%")


def given_to(function: Callable[..., Any], words: str, args: Sequence[str]) -> dict[str, Any]:
    """The arguments of a command, parsed from the words after its name.

    Raises:
        UserError: an option is unknown, a value wrong, or an argument missing.
    """
    parser = parser_of(function, words)
    try:
        found, rest = parser.parse_known_intermixed_args(list(args))
    except argparse.ArgumentError as error:
        raise FieldError("", error.argument_name or "", error.message) from None
    if rest:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        if rest[0].startswith("-") and len(rest[0]) > 1:
            given = rest[0].partition("=")[0]
            key = given.removeprefix("--").replace("-", "_")
            fixed = "--fix" in flags and key in KEYS
            hint = f"a search takes it as --fix {key}=VALUE" if fixed else f"{words} --help lists them"
            raise UnknownNameError("option", given, () if fixed else flags, where=words, otherwise=hint)
        raise UserError(f"{words}: {shorten(rest[0])!r} is one argument too many", hint=parser.format_usage().strip())
    out = {}
    for field in _fields(function):
        value = getattr(found, field.name)
        if value in (None, []):
            if field.needed:
                missing = field.arg.flag or field.arg.metavar
                raise FieldError("", missing, "missing", hint=parser.format_usage().strip())
            value = os.environ.get(field.arg.envvar) or field.default
        out[field.name] = value
    return out


class Entry(NamedTuple):
    """A command in a table of commands."""

    place: str | Callable[..., Any] | Group
    """Function or group, or the module that has it, which is imported when the command runs."""
    summary: str
    heading: str = "Commands"


ADDED: Final = Registry[Mapping[str, Mapping[str, Entry]]]("set of commands", "steptime.commands")
"""Installed package -> name of a group -> further commands, as ``{"steptime lab": {"tile": Entry(...)}}``."""


class Group:
    """A command that is a group of commands; those of :data:`ADDED` are read once a name is missing, or for a list."""

    def __init__(self, name: str, text: str, table: Mapping[str, Entry] | None = None) -> None:
        self.name, self.text, self._own = name, text, dict(table or {})

    @cached_property
    def table(self) -> dict[str, Entry]:
        """All commands, the group's own first."""
        table = dict(self._own)
        for commands in ADDED.values():
            table |= {name: entry for name, entry in commands.get(self.name, {}).items() if name not in table}
        return table

    def command(self, name: str = "") -> Callable[[F], F]:
        """Decorator that adds a function as a command, with its name and the first line of its docstring."""

        def entered(function: F) -> F:
            self._own[name or function.__name__] = Entry(function, (getdoc(function) or "").partition("\n")[0])
            return function

        return entered

    def found(self, name: str) -> Callable[..., Any] | Group:
        """The function, or the group, of a name.

        Raises:
            UnknownNameError: there is none.
        """
        entry = self._own.get(name) or self.table.get(name)
        if entry is None:
            raise UnknownNameError("command", name, self.table, otherwise=f"{self.name} --help lists them")
        place = entry.place
        if not isinstance(place, str):
            return place
        module = importlib.import_module(place)
        for attribute in ("GROUP", "command", name):
            if hasattr(module, attribute):
                return getattr(module, attribute)  # type: ignore[no-any-return]
        raise AttributeError(f"{place} has no command {name}")

    def help(self, words: str) -> str:
        """The list of commands under their headings, without importing them."""
        lines = [f"Usage: {words} COMMAND [OPTIONS] ...", "", _filled(self.text), ""]
        wide = max(map(len, self.table)) + 2
        for heading in dict.fromkeys(entry.heading for entry in self.table.values() if entry.heading):
            lines += [f"{heading}:"]
            for name, entry in self.table.items():
                if entry.heading == heading:
                    lines += textwrap.wrap(
                        entry.summary,
                        _columns() + 2,
                        initial_indent=f"  {name:{wide}}",
                        subsequent_indent=" " * (wide + 2),
                    )
        return "\n".join(lines)

    def run(self, words: str, args: Sequence[str]) -> Any:
        """Run the command named by the first argument, with the other arguments.

        Raises:
            UserError: the arguments are wrong.
        """
        if not args or args[0] in ("-h", "--help"):
            print(self.help(words))
            return None
        found, words = self.found(args[0]), f"{words} {args[0]}"
        if isinstance(found, Group):
            return found.run(words, args[1:])
        return found(**given_to(found, words, args[1:]))


def complete(root: Group) -> None:
    """Print shell completions in the protocol of argcomplete, and end the process."""
    import argcomplete

    start, line = int(os.environ["_ARGCOMPLETE"]), os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])]
    words = line.split()
    found: Group | Callable[..., Any] = root
    before = words[start:] if line.endswith(" ") else words[start:-1]
    for word in before:
        if not isinstance(found, Group) or word not in found.table:
            break
        found, start = found.found(word), start + 1
    os.environ["_ARGCOMPLETE"] = str(start)
    if isinstance(found, Group):
        parser = argparse.ArgumentParser(prog=root.name)
        parser.add_argument("command", choices=[name for name, entry in found.table.items() if entry.heading])
    else:
        parser = parser_of(found, words[start - 1])
    argcomplete.autocomplete(parser)


#: Kind of names -> where they are.
_CATALOGUES: Final = {
    "model": "steptime.model.known:catalogue_names",
    "cluster": "steptime.hardware:cluster_names",
    "device": "steptime.hardware:device_names",
    "framework": "steptime.plan.framework_file:framework_names",
    "schedule": "steptime.schedule:SCHEDULES",
}


def names_of_kind(kind: str) -> list[str]:
    """Names of a catalogue for shell completion; empty: the kind has no catalogue."""
    found = loaded(_CATALOGUES[kind]) if kind in _CATALOGUES else ()
    return list(found() if callable(found) else found)
