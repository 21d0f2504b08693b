"""Rules as text: TOML files of the package or a user, and the axioms from which the e-graph proves others."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from steptime.errors import FieldError, UserError, shorten
from steptime.store.files import parse_toml, read_text
from steptime_lab.rules.rule import Rule
from steptime_lab.rules.sizes import Condition, size
from steptime_lab.rules.terms import Term, Variable, parsed

MAX_FILE_BYTES: Final = 2**21
FIELDS: Final = ("name", "variables", "source", "target", "where", "why")
_VARIABLE: Final = re.compile(r"\s*(\w+)(!?)\[([^\]]*)\]\s*")
_COMPARED: Final = re.compile(r"(.+?)(==|>=|<=|>|<)(.+)")


def variables_of(text: str) -> tuple[Variable, ...]:
    """Parse variables such as ``x[m, k] w![k, n]``; ``!`` marks a weight.

    Raises:
        UserError: the text has another form, or a name occurs twice.

    >>> [str(v) for v in variables_of("x[m, k] w![k, 2*n]")]
    ['x[m, k]', 'w![k, 2*n]']
    """
    out, at = [], 0
    while at < len(text):
        found = _VARIABLE.match(text, at)
        if found is None or not found[1].isidentifier():
            raise UserError(f"variables {shorten(text)!r}", hint="write them as x[m, k] w![k, n]; ! marks a weight")
        dims = tuple(size(each) for each in found[3].split(",") if each.strip())
        out.append(Variable(name=found[1], dims=dims, kind="weight" if found[2] else "tensor"))
        at = found.end()
    if len({each.name for each in out}) != len(out):
        raise UserError(f"variables {shorten(text)!r} have one name twice")
    return tuple(out)


def condition_of(text: str) -> Condition:
    """Parse a condition on sizes such as ``a + b >= c``.

    Raises:
        UserError: the text has another form.

    >>> str(condition_of("a < n"))
    '-a+n-1 >= 0'
    """
    found = _COMPARED.fullmatch(text.strip())
    if found is None:
        raise UserError(f"condition {shorten(text)!r}", hint="write a == b, a >= b, a <= b, a > b or a < b")
    a, b = size(found[1]), size(found[3])
    low = {"==": a - b, ">=": a - b, "<=": b - a, ">": a - b - 1, "<": b - a - 1}[found[2]]
    return Condition(low, equal=found[2] == "==")


def terms_of(text: str) -> tuple[Term, ...]:
    """Parse one term, or several outputs separated by semicolons."""
    return tuple(parsed(each) for each in text.split(";"))


def rule_of(name: str, variables: str, source: str, target: str, where: str = "", origin: str = "") -> Rule:
    """Parse a rule from its texts, without unification of sizes.

    Raises:
        UserError: a text is invalid, or the sides do not fit together.
    """
    conditions = tuple(condition_of(each) for each in where.split(",") if each.strip())
    rule = Rule(
        name=name,
        variables=variables_of(variables),
        sources=terms_of(source),
        targets=terms_of(target),
        where=conditions,
        origin=origin,
    )
    if len(rule.sources) != len(rule.targets):
        raise UserError(f"{name}: {len(rule.sources)} sources and {len(rule.targets)} targets")
    sizes = {s for each in rule.variables for dim in each.dims for s in dim.names()}
    for each in rule.variables:
        if each.name in sizes:
            raise UserError(f"{name}: {each.name} is a variable and a size")
    for needed in rule.needs():
        if needed.size.number is not None and not needed.holds({}):
            raise UserError(f"{name}: the shapes do not fit: {needed} does not hold")
    return rule


def read(path: Path) -> list[Rule]:
    """Rules of a TOML file with tables ``[[rule]]``.

    Raises:
        InputFileError: it cannot be read.
        FieldError: a row is not a valid rule.
    """
    document = parse_toml(read_text(path, MAX_FILE_BYTES, "a file of rules"), str(path))
    rows = document.get("rule")
    if not isinstance(rows, list) or not rows or len(document) > 1:
        raise FieldError(str(path), "rule", "no tables [[rule]]", hint="each has name, variables, source, target")
    return [_row(str(path), number, row) for number, row in enumerate(rows)]


def _row(path: str, number: int, row: object) -> Rule:
    where = f"rule[{number}]"
    if not isinstance(row, Mapping):
        raise FieldError(path, where, "is no table")
    for name, value in row.items():
        if name not in FIELDS:
            raise FieldError(path, f"{where}.{name}", "is unknown", hint=f"valid: {', '.join(FIELDS)}")
        if not isinstance(value, str):
            raise FieldError(path, f"{where}.{name}", "is no text")
    missing = [each for each in ("variables", "source", "target") if each not in row]
    if missing:
        raise FieldError(path, f"{where}.{missing[0]}", "is missing")
    variables, source, target = (row[each] for each in ("variables", "source", "target"))
    try:
        return rule_of(row.get("name", f"rule-{number}"), variables, source, target, row.get("where", ""), origin=path)
    except UserError as error:
        raise FieldError(path, where, str(error).replace("\n  ", "; ")) from None
