"""What a pipeline schedule is: the order it makes, what it requires, its closed forms, what it promises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final

import numpy as np

from steptime.errors import UserError, counted
from steptime.registry import Registry
from steptime.schedule.actions import ActionTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of one micro-batch in an equal share of the model: of its $p$-th part, where there are $p$ ranks."""

    forward_s: float = 1.0
    input_gradient_s: float = 1.0
    weight_gradient_s: float = 1.0
    message_s: float = 0.0
    """From the end of a pass on one rank to the start of the pass of another rank that needs its result."""

    @property
    def backward_s(self) -> float:
        """The whole backward pass."""
        return self.input_gradient_s + self.weight_gradient_s

    @property
    def all_s(self) -> float:
        """All passes of a micro-batch."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """What a schedule is made for."""

    ranks: int
    chunks: int = 1
    """Virtual stages of each rank."""
    micro_batches: int
    slices: int = 1
    """Pieces of each sequence (TeraPipe)."""
    times: Times = field(default_factory=Times)
    """What the orders that depend on times are made for; none of the others looks at it."""
    memory_limit: float = inf
    """Micro-batches whose activations, of a $p$-th part of the model, fit into the memory of a rank."""
    per_update: int | None = None
    """Micro-batches whose gradients make one update of the weights, in schedules that update within a step; None: what
    the schedule does by itself."""

    def __str__(self) -> str:
        parts = [counted(self.ranks, "rank"), counted(self.chunks, "chunk"), f"{self.micro_batches} micro-batches"]
        parts += [counted(self.slices, "slice")] * (self.slices != 1)
        parts += [f"{self.per_update} micro-batches per update"] * (self.per_update is not None)
        return ", ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Something that a schedule requires of a pipeline."""

    text: str
    """The requirement, as a message shows it."""
    holds: Callable[[Pipeline], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A pipeline schedule: a row that no caller needs to tell from another.

    Closed forms are of equal stages without time for messages; `None` where there is none, or none for that pipeline.
    Ranks count from 0. Activations are counted in micro-batches of a $p$-th part of the model, of $p$ ranks.
    """

    name: str
    source: str
    """Where the schedule is published."""
    order: Callable[[Pipeline], ActionTable]
    """The table of passes, without messages."""
    rules: tuple[Rule, ...] = ()
    """What it requires beyond one rank, chunk and micro-batch at least."""
    bubble_s: Callable[[Pipeline], float | None] = lambda _: None
    """Seconds in which the rank that idles longest waits, from the start of its first pass to the end of its last.
    Steps that follow each other without a barrier repeat at that distance. Of an asynchronous schedule: in a long
    run."""
    in_flight: Callable[[Pipeline, int], float | None] = lambda _, __: None
    """Most micro-batches whose activations a rank holds at once: from the start of a forward pass to the end of the
    pass that ends its backward pass (of a backward pass in two parts: of the second)."""
    weight_versions: Callable[[Pipeline, int], int | None] = lambda _, __: 1
    """Most versions of its weights that a rank holds at once."""
    copies: int = 1
    """Copies of the model that the ranks hold together: 2, where half of the micro-batches go from the last rank to
    the first."""
    staleness: Callable[[Pipeline, int], float | None] = lambda _, __: 0.0
    """Updates between the moment at which a forward pass reads weights and the moment at which its gradient changes
    them."""
    any_graph: bool = True
    """Works for any computational graph that can be cut into stages, not only for attention that looks back."""
    bubble_free: bool = False
    """Ranks need not wait, but for filling and draining once, where all passes take the same time."""
    synchronous: bool = True
    """Converges as training on a single device does: each step applies the gradient of the weights it read."""
    note: str = ""
    """What the columns leave out."""
    usual_chunks: int = 1
    """Virtual stages of a rank with which a table of schedules shows it."""
    usual_slices: int = 1
    """Slices of a sequence with which a table of schedules shows it."""

    def actions(self, ranks: int, chunks: int, micro_batches: int, **further: Any) -> ActionTable:
        """The actions of a step, without messages.

        Args:
            ranks: ranks of the pipeline, $p$.
            chunks: virtual stages of each rank, $v$.
            micro_batches: micro-batches of a step, $m$.
            further: other fields of :class:`Pipeline`.

        Raises:
            UserError: the schedule requires something else of ranks, chunks or micro-batches; the message says what.
        """
        pipeline = Pipeline(ranks=ranks, chunks=chunks, micro_batches=micro_batches, **further)
        self.check(pipeline)
        return self.order(pipeline)

    def check(self, pipeline: Pipeline) -> None:
        """Refuse a pipeline that the schedule cannot serve.

        Raises:
            UserError: the message has the rule that is broken and the numbers that break it.
        """
        for rule in (*_OF_ALL, *self.rules):
            if not rule.holds(pipeline):
                raise UserError(f"schedule {self.name} requires {rule.text}; got {pipeline}")

    def bubble_fraction(self, pipeline: Pipeline) -> float | None:
        """Share of a rank's time from its first to its last pass in which it waits, in closed form; None: no form."""
        bubble_s = self.bubble_s(pipeline)
        if bubble_s is None:
            return None
        busy_s = pipeline.micro_batches * pipeline.times.all_s
        return bubble_s / (bubble_s + busy_s)


def _whole(pipeline: Pipeline) -> bool:
    numbers = [pipeline.ranks, pipeline.chunks, pipeline.micro_batches, pipeline.slices]
    numbers += [] if pipeline.per_update is None else [pipeline.per_update]
    return all(isinstance(number, int | np.integer) and number >= 1 for number in numbers)


def _timed(pipeline: Pipeline) -> bool:
    times = pipeline.times
    others_s = (times.input_gradient_s, times.weight_gradient_s, times.message_s)
    return 0 < times.forward_s < inf and all(0 <= each < inf for each in others_s)


_OF_ALL: Final = (
    Rule(
        text="whole numbers of ranks, chunks, micro-batches, slices and micro-batches per update from 1", holds=_whole
    ),
    Rule(text="times from 0 on, of forward passes above 0", holds=_timed),
)

SCHEDULES: Final = Registry[Schedule]("schedule", "steptime.schedules")
"""Schedules by name; an installed package adds its own in the group of entry points ``steptime.schedules``."""


def registered(schedule: Schedule) -> Schedule:
    """Enter a schedule under its name."""
    return SCHEDULES.add(schedule.name, schedule)


ONE_CHUNK: Final = Rule(text="1 chunk", holds=lambda p: p.chunks == 1)
TWO_CHUNKS: Final = Rule(text="2 chunks", holds=lambda p: p.chunks == 2)
WHOLE_SEQUENCES: Final = Rule(text="1 slice", holds=lambda p: p.slices == 1)
EVEN_RANKS: Final = Rule(text="an even number of ranks", holds=lambda p: p.ranks % 2 == 0)
EVEN_MICRO_BATCHES: Final = Rule(text="an even number of micro-batches", holds=lambda p: p.micro_batches % 2 == 0)
ROUNDS: Final = Rule(
    text="a number of micro-batches that the number of ranks divides, where there are several chunks",
    holds=lambda p: p.chunks == 1 or p.micro_batches % p.ranks == 0,
)
TWICE_THE_RANKS: Final = Rule(
    text="at least twice as many micro-batches as ranks", holds=lambda p: p.micro_batches >= 2 * p.ranks
)
