"""Joint search of substitutions and layouts: each graph has the cost of its best layouts.

Source: Jia et al., TASO, SOSP 2019, section 6 (joint optimisation).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Final

from steptime.captured.graph.program import SOURCES
from steptime.rewrite.flow import Flow
from steptime.rewrite.layout.model import Layouts
from steptime.rewrite.scene import Match, Pass, Scene, shape_text
from steptime.rewrite.search.problem import CostModel, Problem

OWNED: Final = ("view elimination",)
"""Passes that choose layouts, which a joint search leaves out."""


def _copies(scene: Scene) -> Iterator[Match]:
    for node in scene.each("clone"):
        if node.inputs[0].node.op not in SOURCES:
            yield Match(root=node, replace={node.value(): node.inputs[0]}, what=shape_text(node.outputs[0]))


COPIES: Final = Pass(
    name="copy left out",
    matches="a copy that changes nothing but the layout",
    condition="layouts are chosen afterwards, and put in the copies that are needed",
    makes="what was copied, so that patterns see through it",
    source="Jia et al., TASO, SOSP 2019, section 6",
    find=_copies,
)


@dataclass(frozen=True, kw_only=True)
class LaidModel(CostModel):
    """A cost model that prices graphs in their best layouts, including conversions."""

    fixed: bool = False
    """Every value keeps its recorded layout; copies that operators make themselves are counted."""
    layouts: Layouts = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        own = {each.name: getattr(self, each.name) for each in fields(CostModel)}
        object.__setattr__(self, "layouts", Layouts.under(CostModel(**own)))

    @property
    def is_additive(self) -> bool:
        """Always False, because the layouts of a graph are chosen together."""
        return False

    def of_parts(self) -> CostModel:
        """The model without layouts, because layouts of a part depend on its neighbours."""
        return self.layouts.model

    def guided(self, flow: Flow) -> float:
        """Cost of a graph; raises UserError if SciPy is missing or a region was not solved in time."""
        return self.layouts.cost(flow, fixed=self.fixed)

    def of_graph(self, flow: Flow) -> float:
        """Cost of a graph in its best layouts; infinite if it breaks a limit."""
        return self.guided(flow)


def with_layouts_priced(problem: Problem, *, fixed: bool = False) -> Problem:
    """The problem with graphs priced in their best layouts, and with a move that leaves out copies.

    Args:
        problem: graph, moves, cost.
        fixed: price graphs in recorded layouts instead, and keep copies.
    """
    moves = tuple(row for row in problem.moves if row.name not in OWNED) + (() if fixed else (COPIES,))
    own = {each.name: getattr(problem.cost, each.name) for each in fields(CostModel)}
    return replace(problem, moves=moves, cost=LaidModel(**own, fixed=fixed))
