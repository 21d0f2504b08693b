"""Hash-consed terms over declared operators, with their texts and shapes.

The text of a term is like ``matmul(x, concat[-1](w, v))``: attributes are in square brackets, and axes count from the
last dim so that leading dims can be added to a rule. Equal terms are one object.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias
from weakref import WeakValueDictionary

from steptime.errors import UnknownNameError, UserError, shorten
from steptime_lab.rules.sizes import Condition, Size, from_syntax, size

Shape: TypeAlias = tuple[Size, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """A free input of a rule with its dims; a ``weight`` is constant in inference."""

    name: str
    dims: Shape
    kind: str = "tensor"

    def __str__(self) -> str:
        return f"{self.name}{'!' if self.kind == 'weight' else ''}[{', '.join(map(str, self.dims))}]"


Variables: TypeAlias = Mapping[str, Variable]
VARIABLE: Final = "var"


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Term:
    """An operator with attributes and arguments; made only by :func:`term` and :func:`variable`."""

    op: str
    attributes: tuple[Size, ...]
    children: tuple[Term, ...]
    name: str
    operators: int
    leaves: int

    def __str__(self) -> str:
        if self.op == VARIABLE:
            return self.name
        attributes = f"[{', '.join(map(str, self.attributes))}]" if self.attributes else ""
        return f"{self.op}{attributes}({', '.join(map(str, self.children))})"

    def __repr__(self) -> str:
        return f"Term({self})"

    def walk(self) -> Iterator[Term]:
        """The term and all its subterms, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()

    def variables(self) -> tuple[str, ...]:
        """Names of variables in order of first occurrence."""
        return tuple(dict.fromkeys(each.name for each in self.walk() if each.op == VARIABLE))

    def size_names(self) -> frozenset[str]:
        """Names of sizes in its attributes."""
        return frozenset(name for each in self.walk() for given in each.attributes for name in given.names())


_TERMS: WeakValueDictionary[tuple[object, ...], Term] = WeakValueDictionary()


def variable(name: str) -> Term:
    """The term of a variable."""
    return _interned(VARIABLE, (), (), name)


def term(op: str, children: tuple[Term, ...], attributes: tuple[Size | int | str, ...] = ()) -> Term:
    """The term of an operator with arguments and attributes."""
    return _interned(op, tuple(map(size, attributes)), children, "")


def _interned(op: str, attributes: tuple[Size, ...], children: tuple[Term, ...], name: str) -> Term:
    key = (op, attributes, tuple(map(id, children)), name)
    found = _TERMS.get(key)
    if found is None:
        operators = (op != VARIABLE) + sum(child.operators for child in children)
        leaves = sum(child.leaves for child in children) or 1
        found = Term(op, attributes, children, name, operators, leaves)
        _TERMS[key] = found
    return found


def replaced(given: Term, by: Mapping[str, Term], sizes: Mapping[str, Size]) -> Term:
    """The term with variables replaced by terms and names of sizes by sizes.

    >>> str(replaced(parsed("relu(x)"), {"x": parsed("neg(y)")}, {}))
    'relu(neg(y))'
    """
    if given.op == VARIABLE:
        return by.get(given.name, given)
    children = tuple(replaced(child, by, sizes) for child in given.children)
    return _interned(given.op, tuple(each.replace(sizes) for each in given.attributes), children, "")


def order(given: Term) -> tuple[object, ...]:
    """Key of a total order that contexts preserve: operators, leaves, then text.

    >>> order(parsed("add(x, y)")) < order(parsed("add(y, x)")) < order(parsed("add(x, relu(y))"))
    True
    """
    return (
        given.operators,
        given.leaves,
        given.op,
        tuple(map(str, given.attributes)),
        given.name,
        tuple(order(child) for child in given.children),
    )


def parsed(text: str) -> Term:
    """Parse a term.

    Raises:
        UserError: the text is not a term, or has an unknown operator.

    >>> parsed("concat[-1](x, y)") is parsed("concat[ -1 ](x,y)")
    True
    """
    try:
        return _term_of(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise UserError(f"{shorten(text)!r} is no term", hint="write matmul(x, concat[-1](w, v))") from None


def _term_of(node: ast.expr) -> Term:
    from steptime_lab.rules.operators import OPERATORS

    if isinstance(node, ast.Name):
        return variable(node.id)
    called = node.func if isinstance(node, ast.Call) and not node.keywords else None
    head = called.value if isinstance(called, ast.Subscript) else called
    if not isinstance(node, ast.Call) or not isinstance(head, ast.Name):
        raise UserError(f"{shorten(ast.unparse(node))!r} is no term", hint="write matmul(x, concat[-1](w, v))")
    if head.id not in OPERATORS:
        raise UnknownNameError("operator", head.id, OPERATORS)
    inside = called.slice if isinstance(called, ast.Subscript) else ast.Tuple([])
    attributes = tuple(map(from_syntax, inside.elts if isinstance(inside, ast.Tuple) else [inside]))
    children = tuple(map(_term_of, node.args))
    _check_counts(head.id, len(children), len(attributes))
    return _interned(head.id, attributes, children, "")


def _check_counts(op: str, children: int, attributes: int) -> None:
    from steptime_lab.rules.operators import OPERATORS

    row = OPERATORS[op]
    if row.arity not in (children, -1) or (row.arity == -1 and children < 1):
        raise UserError(f"{op} has {children} arguments", hint=f"it takes {row.arity if row.arity >= 0 else 'some'}")
    if row.attributes[-1:] != ("...",) and attributes != len(row.attributes):
        raise UserError(f"{op} has {attributes} attributes", hint=f"it takes {', '.join(row.attributes) or 'none'}")


def shape_of(given: Term, variables: Variables, known: dict[Term, Shape], needs: list[Condition]) -> Shape:
    """Dims of a term; conditions of its operators are added to ``needs``, dims of subterms to ``known``.

    Raises:
        UserError: an axis or a number of dims is invalid.
    """
    from steptime_lab.rules.operators import OPERATORS

    if given in known:
        return known[given]
    if given.op == VARIABLE:
        if given.name not in variables:
            raise UnknownNameError("variable", given.name, variables)
        out = variables[given.name].dims
    else:
        shapes = [shape_of(child, variables, known, needs) for child in given.children]
        out = OPERATORS[given.op].shape(given.attributes, shapes, needs)
    known[given] = out
    return out


def require_dims(rank: int, what: str, shape: Shape) -> None:
    """Check that a tensor has at least ``rank`` dims.

    Raises:
        UserError: it has fewer.
    """
    if len(shape) < rank:
        raise UserError(f"{what} of a tensor with {len(shape)} dims", hint=f"it needs at least {rank}")
