"""Records of pipeline schedules: order of passes, requirements, closed forms, guarantees."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from inspect import signature
from math import inf
from typing import Any, Final, TypeAlias

import numpy as np

from steptime.cost.pipeline import filling_passes, waited_messages
from steptime.errors import UserError, counted
from steptime.num import Num, minimum
from steptime.registry import Registry
from steptime.schedule.actions import ActionTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of one micro-batch in an equal share of the model: of its $p$-th part, where there are $p$ ranks."""

    forward_s: float = 1.0
    input_gradient_s: float = 1.0
    weight_gradient_s: float = 1.0
    message_s: float = 0.0
    """Time from the end of a pass on one rank to the start of the pass of another rank that needs its result."""

    @property
    def backward_s(self) -> float:
        """Time of the whole backward pass."""
        return self.input_gradient_s + self.weight_gradient_s

    @property
    def all_s(self) -> float:
        """Time of all passes of a micro-batch."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Numbers of a pipeline for which a schedule makes its order."""

    ranks: int
    chunks: int = 1
    """Virtual stages of each rank."""
    micro_batches: int
    slices: int = 1
    """Pieces of each sequence (TeraPipe)."""
    times: Times = field(default_factory=Times)
    """Times for orders that depend on them; all other orders ignore them."""
    memory_limit: float = inf
    """Micro-batches whose activations, of a $p$-th part of the model, fit into the memory of a rank."""
    per_update: int | None = None
    """Micro-batches whose gradients make one update of the weights, in schedules that update within a step; None: the
    schedule's default."""

    def __str__(self) -> str:
        parts = [counted(self.ranks, "rank"), counted(self.chunks, "chunk"), f"{self.micro_batches} micro-batches"]
        parts += [counted(self.slices, "slice")] * (self.slices != 1)
        parts += [f"{self.per_update} micro-batches per update"] * (self.per_update is not None)
        return ", ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineBlock:
    """Numbers of a block of pipelines, as in :class:`Pipeline`."""

    ranks: Num
    chunks: Num
    micro_batches: Num
    slices: Num
    memory_limit: float = inf
    per_update: int | None = None


Counts: TypeAlias = Pipeline | PipelineBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Requirement of a schedule on a pipeline, or on each of a block."""

    name: str = "schedule"
    """Reason under which a search counts plans that break it; not for ``slices``, which a plan does not choose."""
    text: str
    """The requirement, as a message shows it."""
    holds: Callable[[Counts], Any]
    chunks: int | None = None
    """The only number of virtual stages that it allows; None: the rule is about other numbers."""


@lru_cache
def arguments_of(formula: Callable[..., Num]) -> tuple[str, ...]:
    """Names of the arguments that a closed form takes."""
    return tuple(signature(formula).parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A pipeline schedule: one row, which callers use without knowing which schedule it is.

    Closed forms take numbers or arrays. Messages take no time in them. Ranks count from 0. Activations are counted in
    micro-batches of a $p$-th part of the model, of $p$ ranks.
    """

    name: str
    source: str
    """Publication of the schedule."""
    order: Callable[[Pipeline], ActionTable]
    """Function that makes the table of passes, without messages."""
    rules: tuple[Rule, ...] = ()
    """Requirements beyond at least one rank, chunk and micro-batch."""
    bubble: Callable[..., Num] | None = None
    """Formula of :mod:`steptime.cost` for the seconds in which the slowest rank waits, from the start of its first pass
    to the end of its last; None: there is none. Steps that follow each other without a barrier repeat at that distance.
    Of an asynchronous schedule: in a long run. It takes, by name, any of:

    * ``stages`` (ranks), ``virtual_stages`` (of each), ``micro_batches``, ``slices``, ``filling`` (passes that fill);
    * ``all_stages_s``, ``slowest_stage_s``: one micro-batch through all ranks, and its part in the slowest rank;
      ``all_weights_s``, ``slowest_weights_s``, ``first_weights_s``: the parts of both, and of the first rank, that make
      gradients of weights; ``slowest_forward_s``: the forward pass of the slowest, but of the last its ``weights``;
    * ``forward_s``, ``inputs_s``, ``weights_s``: passes of a rank forward, for gradients of inputs and of weights,
      mean over the ranks; ``hidden_s``: what a pair of passes saves."""
    exact: Callable[[Pipeline], bool] = lambda _: True
    """True if the formula is exact for a pipeline of equal stages; otherwise it approximates."""
    held: Callable[[Counts, Num], Num] | None = None
    """Largest number of micro-batches whose activations a rank holds at once: from the start of a forward pass to the
    end of its backward pass (of the second part, if it is split); None: no closed form."""
    held_at_ends: Callable[[Num, Num, Num], Num] | None = None
    """For schedules with two copies of the model: micro-batches that the ranks of its first and last stage hold, over
    the kept bytes of one on both stages, by ranks, micro-batches and share of the first stage; None: :attr:`held`."""
    held_is_exact: bool = True
    """True if :attr:`held` is exact; else it is a bound, or the number of another schedule."""
    held_behind_head: Callable[[Counts], Num] = lambda _: 1.0
    """Micro-batches whose activations of the head are held at once: forward has run, and the backward pass (its second
    part, if it is split) has not ended."""
    fullest: Callable[[Num], Num] = lambda ranks: minimum(1, ranks - 1)
    """The middle rank that holds most, by the number of ranks."""
    weight_versions: Callable[[Counts, Num], Num] = lambda _, __: 1
    """Largest number of versions of its weights that a rank holds at once."""
    copies: int = 1
    """Copies of the model that the ranks hold together: 2, where half of the micro-batches go from the last rank to
    the first."""
    folded: bool = False
    """The first rank holds the first and the last stage: micro-batches go down the ranks and up again."""
    fills: float = 0.0
    """Gradients of weights that fill the bubble, per rank but one."""
    splits: bool = False
    """Gradients of weights have a pass of their own."""
    pairs: bool = False
    """A forward and a backward pass of two micro-batches run as a pair, each overlapped with the other's messages."""
    messages: Callable[..., Num] = waited_messages
    """Formula for the messages that a step waits for, without those that fill and drain the pipeline."""
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
    """Remark on facts that no field has."""
    bound: str = ""
    """Phrase on the closed forms that an estimate uses in place of missing ones."""
    usual_chunks: int = 1
    """Virtual stages of a rank where none are given."""
    interleaved_as: str = ""
    """The schedule that stands for it with several virtual stages; empty: itself."""
    follows: bool = False
    """An estimate chooses it by the number of virtual stages, which has to be given."""
    usual_slices: int = 1
    """Slices of a sequence where none are given."""
    usual_per_update: int | None = None
    """Default of micro-batches per update; None: the schedule decides."""
    updates: Callable[[Counts], Num] = lambda _: 1.0
    """Updates of the weights in a step of a long run; each has its optimiser's pass and its sum of gradients."""
    parameter: str = ""
    """Field that the number in a name such as ``terapipe:8`` sets: ``usual_slices``, ``usual_per_update``, or none."""
    one_rank: bool = False
    """It applies to an estimate on one rank too."""
    to_host: bool = False
    """An estimate can compute the effect of activations that are copied to the host on its bubble."""

    @property
    def only_chunks(self) -> int | None:
        """The only number of virtual stages that it supports; None: several."""
        return next((rule.chunks for rule in self.rules if rule.chunks is not None), None)

    def closed_forms(self) -> tuple[Callable[..., Num], Callable[[Counts, Num], Num]]:
        """Formulas of the bubble, and of micro-batches that ranks hold.

        Raises:
            UserError: the schedule lacks one of them.
        """
        if self.bubble is None or self.held is None:
            raise UserError(f"schedule {self.name} has no closed form", hint="steptime simulate plays it")
        return self.bubble, self.held

    def bubble_s(self, pipeline: Pipeline) -> float | None:
        """Seconds in which the rank that idles longest waits, of equal stages; None: no exact form for the pipeline."""
        if self.bubble is None or not self.exact(pipeline):
            return None
        p, times = pipeline.ranks, pipeline.times
        found: dict[str, Num] = {
            "stages": p,
            "virtual_stages": pipeline.chunks,
            "micro_batches": pipeline.micro_batches,
            "slices": pipeline.slices,
            "filling": filling_passes(self.fills, p, pipeline.micro_batches),
            "all_stages_s": p * times.all_s,
            "slowest_stage_s": times.all_s,
            "all_weights_s": p * times.weight_gradient_s,
            "slowest_weights_s": times.weight_gradient_s,
            "first_weights_s": times.weight_gradient_s,
            "slowest_forward_s": times.forward_s,
            "forward_s": times.forward_s,
            "inputs_s": times.input_gradient_s,
            "weights_s": times.weight_gradient_s,
            "hidden_s": 0.0,
        }
        return float(self.bubble(**{name: found[name] for name in arguments_of(self.bubble)}))

    def in_flight(self, pipeline: Pipeline, rank: int) -> float | None:
        """Micro-batches whose activations a rank holds; None: no exact form."""
        return None if self.held is None or not self.held_is_exact else float(self.held(pipeline, rank))

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
        requirements = [(text, holds(pipeline)) for text, holds in _OF_ALL]
        if all(held for _, held in requirements):
            requirements = [(rule.text, rule.holds(pipeline)) for rule in self.rules]
        for text, held in requirements:
            if not held:
                raise UserError(f"schedule {self.name} requires {text}; got {pipeline}")

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


_OF_ALL: Final[tuple[tuple[str, Callable[[Pipeline], bool]], ...]] = (
    ("whole numbers of ranks, chunks, micro-batches, slices and micro-batches per update from 1", _whole),
    ("times from 0 on, of forward passes above 0", _timed),
)


class Schedules(Registry[Schedule]):
    """Schedules by name, of which some take a number behind a colon.

    >>> found = Schedules("schedule", "steptime.schedules")
    >>> row = Schedule(name="cut", source="", order=lambda p: None, parameter="usual_slices")
    >>> found.add("cut", row).usual_slices, found["cut:8"].usual_slices, found["cut:8"].name, "cut:0" in found
    (1, 8, 'cut:8', False)
    """

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or self._numbered(name) is not None

    def __getitem__(self, name: str) -> Schedule:
        """The schedule of a name, with its number where it has one.

        Raises:
            UnknownNameError: there is none; the message has the nearest names.
        """
        found = None if super().__contains__(name) else self._numbered(name)
        return super().__getitem__(name) if found is None else found

    def _numbered(self, name: object) -> Schedule | None:
        """The schedule of ``NAME:N``, 1 to 99999; None: the name has no number, or its schedule takes none."""
        base, colon, number = str(name).partition(":")
        if not colon or not re.fullmatch("[1-9][0-9]{0,4}", number) or not super().__contains__(base):
            return None
        row = super().__getitem__(base)
        given: dict[str, Any] = {"name": f"{base}:{number}", row.parameter: int(number)}
        return replace(row, **given) if row.parameter else None


SCHEDULES: Final = Schedules("schedule", "steptime.schedules")
"""Schedules by name; an installed package adds its own in the group of entry points ``steptime.schedules``."""


def registered(schedule: Schedule) -> Schedule:
    """Enter a schedule under its name."""
    return SCHEDULES.add(schedule.name, schedule)


SEVERAL_RANKS: Final = Rule(name="ranks", text="2 ranks or more", holds=lambda p: p.ranks >= 2)
ONE_CHUNK: Final = Rule(name="one_chunk", text="1 chunk", holds=lambda p: p.chunks == 1, chunks=1)
TWO_CHUNKS: Final = Rule(name="two_chunks", text="2 chunks", holds=lambda p: p.chunks == 2, chunks=2)
WHOLE_SEQUENCES: Final = Rule(name="slices", text="1 slice", holds=lambda p: p.slices == 1)
EVEN_RANKS: Final = Rule(name="even_ranks", text="an even number of ranks", holds=lambda p: p.ranks % 2 == 0)
EVEN_MICRO_BATCHES: Final = Rule(
    name="even_micro_batches", text="an even number of micro-batches", holds=lambda p: p.micro_batches % 2 == 0
)
ROUNDS: Final = Rule(
    name="interleaving",
    text="a number of micro-batches that the number of ranks divides, where there are several chunks",
    holds=lambda p: (p.chunks == 1) | (p.micro_batches % p.ranks == 0),
)
TWICE_THE_RANKS: Final = Rule(
    name="few_micro_batches",
    text="at least twice as many micro-batches as ranks",
    holds=lambda p: p.micro_batches >= 2 * p.ranks,
)
GROUPS: Final = Rule(
    name="groups",
    text="a number of micro-batches that the number of ranks divides",
    holds=lambda p: p.micro_batches % p.ranks == 0,
)
NAMED: Final = (ONE_CHUNK, TWO_CHUNKS, EVEN_RANKS, EVEN_MICRO_BATCHES, TWICE_THE_RANKS, GROUPS)
"""Rules of schedules that a search counts each under a name of its own."""
