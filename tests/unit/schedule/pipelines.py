"""Every schedule with pipelines that it serves, from a grid."""

from __future__ import annotations

from itertools import product

from steptime.errors import UserError
from steptime.schedule import SCHEDULES, ActionTable, Pipeline, Schedule, Times


def serves(schedule: Schedule, pipeline: Pipeline) -> bool:
    try:
        schedule.check(pipeline)
    except UserError:
        return False
    return True


GRID = tuple(
    Pipeline(ranks=p, chunks=v, micro_batches=m, slices=s)
    for p, v, m, s in product((1, 2, 3, 4, 6, 8), (1, 2, 3), (1, 2, 3, 4, 6, 8, 12, 16, 24), (1, 3))
)
SERVED = {name: [each for each in GRID if serves(SCHEDULES[name], each)] for name in SCHEDULES}
"""Pipelines of the grid by the name of a schedule that serves them."""
UNEQUAL = (
    Times(),
    Times(forward_s=1.0, input_gradient_s=1.5, weight_gradient_s=0.75),
    Times(forward_s=1.0, input_gradient_s=0.5, weight_gradient_s=1.5),
    Times(forward_s=2.0, input_gradient_s=1.0, weight_gradient_s=1.0),
)


def table_of(name: str, pipeline: Pipeline) -> ActionTable:
    p = pipeline
    return SCHEDULES[name].actions(
        p.ranks, p.chunks, p.micro_batches, slices=p.slices, times=p.times, memory_limit=p.memory_limit,
        per_update=p.per_update,
    )  # fmt: skip
