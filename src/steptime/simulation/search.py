"""A searched pipeline schedule next to the named ones, for given times, messages and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from steptime.errors import UserError
from steptime.estimate.result import SCHEMA_VERSION
from steptime.num import Array
from steptime.schedule.schedules import Pipeline, Times
from steptime.simulation.memory import Footprint, memory_replay
from steptime.simulation.simulate import Durations, simulate
from steptime.simulation.synthesis import Interrupted, Synthesis, limits_of, named_tables, synthesised

CHUNKS = (1, 2)
"""Chunks of a rank that are searched by default."""
MOST: Final = 2**13
"""Largest product of ranks and micro-batches of a search: named schedules of more take minutes."""
SHORTEST_S, LONGEST_S = 1e-9, 1e9
Values = float | Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSpan:
    """A named schedule under the same times."""

    name: str
    chunks: int
    copies: int
    """Copies of the model on all ranks; the searched schedule has one and is compared with others that have one."""
    span_s: float
    held: float
    """Largest number of activations of a rank, in micro-batches of a p-th part of the model."""
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSchedule:
    """The searched schedule, and the named ones."""

    ranks: int
    micro_batches: int
    named: tuple[NamedSpan, ...]
    """Named schedules that serve the pipeline: first those that fit, fastest first, then the others."""
    found: Synthesis
    chunks: int
    bound_s: float
    """No schedule with one of the searched numbers of chunks is faster."""

    @property
    def best_named(self) -> NamedSpan | None:
        """The fastest named schedule of one copy that fits."""
        return next((each for each in self.named if each.fits and each.copies == 1), None)

    @property
    def gap(self) -> float:
        """Share of the span by which the bound is shorter."""
        return 1 - self.bound_s / self.found.span_s

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``."""
        return {
            "schema_version": SCHEMA_VERSION,
            "ranks": self.ranks,
            "micro_batches": self.micro_batches,
            "span_s": self.found.span_s,
            "bound_s": self.bound_s,
            "gap": self.gap,
            "chunks": self.chunks,
            "placement": self.found.placement,
            "held": list(self.found.held),
            "began": self.found.began,
            "stop": {"reason": type(self.found.stop).__name__, "text": str(self.found.stop)},
            "named": [
                {name: getattr(each, name) for name in ("name", "chunks", "copies", "span_s", "held", "fits")}
                for each in self.named
            ],
            "order": [self.found.table.of_rank(rank) for rank in range(self.ranks)],
        }


def search_schedule(
    ranks: int,
    micro_batches: int,
    *,
    times: tuple[Values, Values, Values] = (1.0, 1.0, 1.0),
    message_s: float = 0.0,
    memory: Values = np.inf,
    chunks: int | None = None,
    seconds: float | None = None,
    **search: Any,
) -> FoundSchedule:
    """Searches for the fastest pipeline schedule of one copy of the model, and compares it with the named ones.

    Args:
        ranks: ranks of the pipeline.
        micro_batches: micro-batches of a step.
        times: seconds of a forward, an input-gradient and a weight-gradient pass of one micro-batch: for a p-th part of
            the model, or one for each stage; the number of stages then fixes the chunks.
        message_s: seconds of a message between two ranks.
        memory: micro-batches whose activations, of a p-th part of the model, fit: a number, or one for each rank.
        chunks: virtual stages of a rank, 1 or 2; None: both are searched, one after the other, until the user stops
            the search.
        effort: passes that are timed, for each number of chunks.
        seconds: stop after this time, for all numbers of chunks together.
        search: other arguments of :func:`steptime.simulation.synthesis.synthesised`:
            deferred, effort (for each number of chunks), seed, progress.

    Raises:
        UserError: a number is out of range; the message has it.
    """
    if ranks * micro_batches > MOST:
        raise UserError(
            f"a search over {ranks:,} ranks x {micro_batches:,} micro-batches",
            hint=f"at most {MOST:,}; more micro-batches repeat what fewer do",
        )
    given = [*(float(each) for values in times for each in np.ravel(values)), message_s]
    if any(each > 0 and not SHORTEST_S <= each <= LONGEST_S for each in given):  # others are refused by name below
        raise UserError(
            "a time of a pass or a message is out of range",
            hint=f"0, or {SHORTEST_S:g} to {LONGEST_S:g} seconds; only their proportions matter",
        )
    if seconds is not None and not 0 < seconds < np.inf:
        raise UserError(f"a search of {seconds:g} seconds", hint="above 0; without it the work is limited")
    tried = _chunks(times, ranks, chunks)
    limits = limits_of(np.asarray(memory, np.float64), ranks)
    found, named = list[tuple[int, Synthesis]](), list[NamedSpan]()
    for number in tried:
        pipeline = Pipeline(
            ranks=ranks, chunks=number, micro_batches=micro_batches, times=_mean(times, ranks, message_s)
        )
        durations = _durations(times, message_s, number)
        one = synthesised(
            pipeline,
            durations,
            memory_limit=np.array(limits),
            seconds=None if seconds is None else seconds / len(tried),
            **search,
        )
        found.append((number, one))
        named += _named(pipeline, durations, np.array(limits), search.get("deferred", 1.0))
        if isinstance(one.stop, Interrupted):
            break
    best = min(found, key=lambda each: each[1].span_s)
    return FoundSchedule(
        ranks=ranks,
        micro_batches=micro_batches,
        named=tuple(sorted(named, key=lambda each: (not each.fits, each.span_s, each.held))),
        found=best[1],
        chunks=best[0],
        bound_s=min(each.bound_s for _, each in found),
    )


def _chunks(times: tuple[Values, Values, Values], ranks: int, chunks: int | None) -> tuple[int, ...]:
    """Numbers of chunks to search.

    Raises:
        UserError: the number of times does not match the stages.
    """
    tried: tuple[int, ...] = CHUNKS if chunks is None else (chunks,)
    for name, each in zip(("forward", "input-gradient", "weight-gradient"), times, strict=True):
        stages = np.size(each)
        if stages == 1:
            continue
        tried = tuple(number for number in tried if number * ranks == stages)
        if not tried:
            raise UserError(
                f"{stages} times of {name} passes for {ranks} ranks",
                hint=f"one for all stages, or one for each of {ranks} stages, or of {2 * ranks} with 2 chunks a rank",
            )
    return tried


def _durations(times: tuple[Values, Values, Values], message_s: float, chunks: int) -> Durations:
    forward, inputs, weights = (np.asarray(each, np.float64) / (chunks if np.size(each) == 1 else 1) for each in times)
    return Durations(
        forward_s=forward.squeeze(),
        input_gradient_s=inputs.squeeze(),
        weight_gradient_s=weights.squeeze(),
        message_s=message_s,
    )


def _mean(times: tuple[Values, Values, Values], ranks: int, message_s: float) -> Times:
    """Times of a p-th part of the model, for orders that follow from times."""
    forward, inputs, weights = (float(np.sum(each)) / (ranks if np.size(each) > 1 else 1) for each in times)
    return Times(forward_s=forward, input_gradient_s=inputs, weight_gradient_s=weights, message_s=message_s)


def _named(pipeline: Pipeline, durations: Durations, limits: Array, deferred: float) -> list[NamedSpan]:
    """The named schedules that serve a pipeline, each with the fastest of its orders that fits."""
    best = dict[str, NamedSpan]()
    for schedule, table in named_tables(pipeline, float(limits.min())):
        if table.stages != pipeline.ranks * pipeline.chunks:
            continue
        played, each = simulate(table, durations), 1 / pipeline.chunks
        held = memory_replay(played, Footprint(activation_bytes=each, deferred_bytes=deferred * each)).peak_bytes
        row = NamedSpan(
            name=schedule.name,
            chunks=pipeline.chunks,
            copies=schedule.copies,
            span_s=float(played.rank_span_s.max()),
            held=float(held.max()),
            fits=bool((held <= limits * (1 + 1e-9)).all()),
        )
        other = best.get(row.name)
        if other is None or (not row.fits, row.span_s) < (not other.fits, other.span_s):
            best[row.name] = row
    return list(best.values())
