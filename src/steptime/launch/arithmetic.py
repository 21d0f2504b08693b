"""Shell arithmetic on 64-bit integers, with variables by their bare names."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

_SIGNS: Final[Mapping[type[ast.AST], Callable[[int, int], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    ast.Mod: lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1),
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.And: lambda a, b: bool(a) and bool(b),
    ast.Or: lambda a, b: bool(a) or bool(b),
}
_CHANGE: Final = re.compile(r"(\w+)\s*(?:(\+\+|--)|([+*/%-]?)=(?!=)(.*))|(\+\+|--)(\w+)")
LARGEST: Final = 2**63
LONGEST: Final = 200
DEEPEST: Final = 10
"""Largest number of levels of variables that refer to variables."""


class Unknown(Exception):
    """Error: the value is not in the script, or no 64-bit integer."""


def calculated(text: str, variables: Mapping[str, str], depth: int = 0) -> int:
    """The value of an expression.

    Raises:
        Unknown: it has a name that the script does not set, or anything but integers.

    >>> calculated("A + 2*(B-1)", {"A": "B + 1", "B": "4"}), calculated("7 / -2", {}), calculated("2 < 3 && 1", {})
    (11, -3, 1)
    """
    if len(text) > LONGEST or depth > DEEPEST:
        raise Unknown(text[:40])
    named = re.sub(r"!(?!=)", " not ", text.replace("&&", " and ").replace("||", " or "))
    try:
        tree = ast.parse(f"({named.strip()})", mode="eval").body
        return _value(tree, variables, depth)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError, OverflowError):
        raise Unknown(text[:40]) from None


def _value(node: ast.expr, variables: Mapping[str, str], depth: int) -> int:
    def of(inner: ast.expr) -> int:
        return _value(inner, variables, depth)

    out: Any = None
    match node:
        case ast.Constant(value=int()):
            out = node.value
        case ast.Name() if node.id in variables:
            out = calculated(variables[node.id], variables, depth + 1)
        case ast.UnaryOp():
            inner = of(node.operand)
            out = {ast.USub: -inner, ast.UAdd: inner, ast.Not: not inner}.get(type(node.op))
        case ast.BinOp(op=ast.Pow()):
            base, power = of(node.left), of(node.right)
            out = base**power if abs(base) <= LARGEST and 0 <= power <= 64 else None
        case ast.BinOp() if type(node.op) in _SIGNS:
            out = _SIGNS[type(node.op)](of(node.left), of(node.right))
        case ast.BoolOp():
            out = of(node.values[0])
            for each in node.values[1:]:
                out = _SIGNS[type(node.op)](out, of(each))
        case ast.Compare() if len(node.ops) == 1 and type(node.ops[0]) in _SIGNS:
            out = _SIGNS[type(node.ops[0])](of(node.left), of(node.comparators[0]))
    if out is None or not -LARGEST <= out < LARGEST:
        raise Unknown
    return int(out)


def changed(text: str, variables: Mapping[str, str]) -> tuple[str, int]:
    """The variable that an expression sets, and its new value.

    Raises:
        Unknown: it sets no variable, or its value is not in the script.

    >>> changed("i++", {"i": "2"}), changed("n += 2 * i", {"i": "2", "n": "1"}), changed("i = 0", {})
    (('i', 3), ('n', 5), ('i', 0))
    """
    match = _CHANGE.fullmatch(text.strip())
    if match is None:
        raise Unknown(text[:40])
    name, step = match[1] or match[6], match[2] or match[5]
    if step:
        return name, calculated(f"{name} {step[0]} 1", variables)
    before = f"{name} {match[3]} " if match[3] else ""
    return name, calculated(f"{before}({match[4]})", variables)
