"""Table of all schedules: their effect on time, memory and convergence, in closed form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from steptime.errors import UserError
from steptime.schedule.schedules import SCHEDULES, Pipeline, Schedule, Times

T = TypeVar("T", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One schedule for a number of ranks and micro-batches; None: no closed form, or pipeline not served."""

    name: str
    chunks: int
    """Virtual stages of each rank."""
    copies: int
    """Copies of the model that the ranks hold together."""
    bubble_fraction: float | None
    """Share of a rank's time, from its first to its last pass, in which it waits."""
    in_flight: float | None
    """Micro-batches whose activations, of a $p$-th part of the model, the fullest of the $p$ ranks holds."""
    weight_versions: int | None
    """Versions of its weights that the fullest rank holds."""
    staleness: float | None
    """Age of the weights on the rank with the oldest ones, in updates."""
    any_graph: bool
    bubble_free: bool
    synchronous: bool
    requires: tuple[str, ...]
    note: str
    source: str
    refused: str | None
    """Why the schedule cannot serve the pipeline; None: it does."""


def summary(ranks: int, micro_batches: int, times: Times | None = None) -> list[Row]:
    """A row for each schedule, with its usual number of virtual stages.

    Args:
        ranks: ranks of the pipeline.
        micro_batches: micro-batches of a step.
        times: times of passes; by default all three take the same.
    """
    return [
        _row(
            schedule,
            Pipeline(
                ranks=ranks,
                chunks=schedule.usual_chunks,
                micro_batches=micro_batches,
                slices=schedule.usual_slices,
                times=times or Times(),
            ),
        )
        for schedule in SCHEDULES.values()
    ]


def _row(schedule: Schedule, pipeline: Pipeline) -> Row:
    row = Row(
        name=schedule.name,
        chunks=pipeline.chunks,
        copies=schedule.copies,
        bubble_fraction=None,
        in_flight=None,
        weight_versions=None,
        staleness=None,
        any_graph=schedule.any_graph,
        bubble_free=schedule.bubble_free,
        synchronous=schedule.synchronous,
        requires=tuple(rule.text for rule in schedule.rules),
        note=schedule.note,
        source=schedule.source,
        refused=None,
    )
    try:
        schedule.check(pipeline)
    except UserError as error:
        return replace(row, refused=str(error))
    every = range(pipeline.ranks)
    return replace(
        row,
        bubble_fraction=schedule.bubble_fraction(pipeline),
        in_flight=_most([schedule.in_flight(pipeline, rank) for rank in every]),
        weight_versions=max(int(schedule.weight_versions(pipeline, rank)) for rank in every),
        staleness=_most([schedule.staleness(pipeline, rank) for rank in every]),
    )


def _most(values: Sequence[T | None]) -> T | None:
    known = [value for value in values if value is not None]
    return max(known) if known else None


_HEADS = (
    "schedule",
    "chunks",
    "copies",
    "bubble",
    "in flight",
    "versions",
    "stale",
    "any graph",
    "no bubble",
    "converges",
)


def text_of(rows: Sequence[Row]) -> str:
    """The rows as a table of text; `-`: no closed form, or not served."""
    lines = [_HEADS, *(_cells(row) for row in rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(_HEADS))]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        )
        for line in lines
    )


def notes_of(rows: Sequence[Row]) -> str:
    """Lines for each schedule: its requirements, notes and source."""
    lines = []
    for row in rows:
        requires = f"requires {', '.join(row.requires)}" if row.requires else ""
        lines += [f"{row.name}: {row.source}", *(f"    {text}" for text in (requires, row.note) if text)]
    return "\n".join(lines)


def _cells(row: Row) -> tuple[str, ...]:
    fraction = "-" if row.bubble_fraction is None else f"{row.bubble_fraction:.1%}"
    numbers = (row.in_flight, row.weight_versions, row.staleness)
    return (
        row.name,
        str(row.chunks),
        str(row.copies),
        fraction,
        *("-" if each is None else f"{each:g}" for each in numbers),
        *("yes" if each else "no" for each in (row.any_graph, row.bubble_free, row.synchronous)),
    )
