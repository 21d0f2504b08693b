"""Rules on captured graphs, and equality saturation with exact extraction."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from steptime.rewrite.search.problem import Found, Problem


def saturate(problem: Problem, seconds: float = 20.0) -> Found:
    """The cheapest graph of an e-graph of the problem; see :func:`steptime.rewrite.saturation.search.saturate`."""
    from steptime.rewrite.saturation.search import saturate as search

    return search(problem, seconds)
