"""Parameters of lists of layers, counted under one name."""

from __future__ import annotations

import re
from collections.abc import Mapping


def by_name(shardings: Mapping[str, str]) -> dict[tuple[str, str], int]:
    """Number of parameters for each name, in which ``*`` replaces list indices, and sharding.

    >>> by_name({"h.0.w": "R S(0)", "h.1.w": "R S(0)", "norm": "R R"})
    {('h.*.w', 'R S(0)'): 2, ('norm', 'R R'): 1}
    """
    return {key: len(names) for key, names in _of_lists(shardings).items()}


def listed(shardings: Mapping[str, str]) -> list[tuple[str, int, str]]:
    """Rows of name, count and sharding; ``*`` replaces list indices where a row counts several parameters.

    >>> listed({"0.w": "S(0)", "2.w": "S(1)", "4.w": "S(1)"})
    [('0.w', 1, 'S(0)'), ('*.w', 2, 'S(1)')]
    """
    rows = _of_lists(shardings).items()
    return [(name if len(names) > 1 else names[0], len(names), sharding) for (name, sharding), names in rows]


def _of_lists(shardings: Mapping[str, str]) -> dict[tuple[str, str], list[str]]:
    """Names of parameters, grouped by the name with ``*`` for list indices and by sharding."""
    out: dict[tuple[str, str], list[str]] = {}
    for name, sharding in shardings.items():
        out.setdefault((re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name), sharding), []).append(name)
    return out
