"""Search spaces of the generator: variables of few types and operators with attributes, one row per subject.

Within a universe sizes are equal where possible; rules are generalised afterwards (:mod:`generalise`). ``relu``
represents any unary function, because only the fact that it is a function is used.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from steptime_lab.rules.declared import variables_of
from steptime_lab.rules.operators import OPERATORS
from steptime_lab.rules.sizes import Size, size
from steptime_lab.rules.terms import Shape, Variable

_TEMPLATE: Final = re.compile(r"(\w+)(?:\[([^\]]*)\])?(?:@(.+))?")


@dataclass(frozen=True, slots=True)
class Template:
    """An operator with attributes; with ``extent`` it is only used if its axis has that extent."""

    op: str
    attributes: tuple[Size, ...]
    extent: Size | None

    @property
    def arity(self) -> int:
        """Number of arguments; two for a concatenation."""
        return abs(OPERATORS[self.op].arity) + (self.op == "concat")

    def fits(self, shapes: tuple[Shape, ...]) -> bool:
        """True if it is used on arguments of these types."""
        return self.extent is None or shapes[0][self.attributes[0].number or 0] == self.extent


@dataclass(frozen=True, slots=True, kw_only=True)
class Universe:
    """Variables, templates and allowed types of terms, with the sizes at which they are evaluated."""

    name: str
    variables: tuple[Variable, ...]
    templates: tuple[Template, ...]
    types: tuple[Shape, ...]
    assignments: tuple[Mapping[str, int], ...]
    operators: int


def template_of(text: str) -> Template:
    """Parse a template.

    >>> template_of("slice[-1, 0, a]@n").attributes[2] == size("a")
    True
    """
    found = _TEMPLATE.fullmatch(text)
    assert found is not None
    attributes = tuple(size(each) for each in (found[2] or "").split(",") if each.strip())
    return Template(found[1], attributes, size(found[3]) if found[3] else None)


def universe_of(row: Mapping[str, Any]) -> Universe:
    """A universe from a row of the table."""
    return Universe(
        name=row["name"],
        variables=variables_of(row["variables"]),
        templates=tuple(map(template_of, row["templates"].split())),
        types=tuple(tuple(size(dim) for dim in each.split(",")) for each in row["types"].split()),
        assignments=tuple(row["sizes"]),
        operators=row["operators"],
    )


TABLE: Final = Path(__file__).with_name("universes.toml")
UNIVERSES: Final = tuple(map(universe_of, tomllib.loads(TABLE.read_text(encoding="utf-8"))["universe"]))
