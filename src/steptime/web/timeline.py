"""A simulated step as columns to draw: one entry per pass, by rank."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from steptime.schedule.actions import COMPUTE, LETTERS, STREAM
from steptime.simulation.run import SimulatedStep

MAX_ACTIONS: Final = 60_000
"""Largest number of passes of a timeline; more cannot be distinguished on a screen."""


def columns_of(found: SimulatedStep) -> dict[str, Any]:
    """Passes and updates of all ranks: start and end in nanoseconds, rank, stage, micro-batch (-1: none), letter."""
    table, played = found.table, found.simulation
    rows = np.flatnonzero(STREAM[table.kind] == COMPUTE)
    rows = rows[played.end_s[rows] > played.start_s[rows]]
    order = rows[np.lexsort((played.start_s[rows], table.rank[rows]))]
    return {
        "rank": table.rank[order].tolist(),
        "start_ns": np.rint(1e9 * played.start_s[order]).astype(np.int64).tolist(),
        "end_ns": np.rint(1e9 * played.end_s[order]).astype(np.int64).tolist(),
        "kind": [LETTERS[int(kind)] for kind in table.kind[order]],
        "stage": table.stage[order].tolist(),
        "micro_batch": table.micro_batch[order].tolist(),
    }
