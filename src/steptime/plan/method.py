"""A method: how one mode (corrected, or a reproduced paper) turns a plan into rows and a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from steptime.errors import UnknownNameError
from steptime.num import Num
from steptime.plan.job import Job
from steptime.plan.legality import Rule
from steptime.plan.plans import Plans
from steptime.plan.rows import Block


class Strategy(ABC):
    """How the tensors of a block are cut: a table of rows in terms of the degrees."""

    name: ClassVar[str]
    tensor_axes: ClassVar[tuple[str, ...]]
    """Axes that cut tensors inside a layer."""
    gradient_axes: ClassVar[tuple[str, ...]]
    """Axes over which gradients are reduced and optimiser states shared out."""
    replicated_axis: ClassVar[str] = "tp"
    """Axis whose ranks all hold the weights that a row calls replicated."""

    def gradient_ranks(self, plans: Plans) -> Num:
        """Ranks that reduce a gradient together."""
        ranks: Num = 1
        for axis in self.gradient_axes:
            ranks = ranks * getattr(plans, axis)
        return ranks

    @abstractmethod
    def block(self, job: Job, plans: Plans) -> Block:
        """Rows of one layer and of what surrounds the layers, for one micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSplit:
    """Layers on the first, on a middle (the fullest) and on the last stage."""

    first: Num
    middle: Num
    last: Num


class Method(ABC):
    """Rules of one mode that are the same for all its strategies."""

    name: ClassVar[str]
    strategies: ClassVar[Mapping[str, Strategy]]
    calibrated: ClassVar[bool]
    """Whether fitted time models replace the roofline where a device has them."""
    optimizer_step: ClassVar[bool]
    """Whether the optimiser's own time is counted."""
    lone_rank_has_all_links: ClassVar[bool]
    """Whether a group with one rank per domain still has `links_per_device` links."""
    rules: ClassVar[tuple[Rule, ...]]
    """What makes a plan impossible, memory apart."""
    share_replicated_gradients: ClassVar[bool]
    """Whether gradients of weights that tensor-parallel ranks replicate are reduced over them."""

    def strategy(self, name: str) -> Strategy:
        """The strategy of that name.

        Raises:
            UnknownNameError: there is none; the message has the nearest names.
        """
        if name not in self.strategies:
            raise UnknownNameError("strategy", name, self.strategies)
        return self.strategies[name]

    @abstractmethod
    def micro_batches(self, job: Job, plans: Plans) -> Num:
        """Micro-batches of the replica that has most of them."""

    @abstractmethod
    def stage_split(self, job: Job, plans: Plans) -> StageSplit:
        """Layers per stage."""

    @abstractmethod
    def slow_link_share(self, plans: Plans) -> Num:
        """Share of a message that a link between domains is charged in the pipeline: 1, or a reproduced defect."""
