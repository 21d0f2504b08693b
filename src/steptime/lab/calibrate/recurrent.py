"""Families of recurrent layers: forward, gradient of the data, gradient of the weights."""

from __future__ import annotations

import re
from typing import Final

import numpy as np

from steptime.cost.recurrent import recurrent_s
from steptime.lab.calibrate import attention
from steptime.lab.calibrate.family import Coefficient, KernelFamily
from steptime.lab.calibrate.memory_bound import element_bytes
from steptime.lab.calibrate.table import Table
from steptime.num import Array

STEPS: Final = {
    ("Vanilla", 1760): 50, ("Vanilla", 2048): 50, ("Vanilla", 2560): 50, ("LSTM", 512): 25, ("LSTM", 1024): 25,
    ("LSTM", 2048): 25, ("LSTM", 4096): 25, ("LSTM", 1536): 50, ("LSTM", 256): 150, ("GRU", 512): 1,
    ("GRU", 1024): 1500,
}  # fmt: skip
"""Time steps of the benchmark by cell and width; those of the other widths are not unique (DeepBench, problem list)."""
GATES: Final = {"Vanilla": 1.0, "GRU": 3.0, "LSTM": 4.0}
CELL: Final = re.compile(r"cell=(\w+);hidden=(\d+)")
COEFFICIENTS: Final = (
    Coefficient(name="launch_s", start=5e-5, low=1e-6, high=1e-3),
    Coefficient(name="step_s", start=1e-5, low=1e-7, high=1e-3),
    Coefficient(name="efficiency", start=0.5, low=0.02, high=1.0),
    Coefficient(name="batch_half", start=20.0, low=0.1, high=300.0),
    Coefficient(name="weight_reuse", start=1.0, low=0.05, high=50.0),
)


def recurrent(table: Table) -> dict[str, Array]:
    """Arguments of :func:`recurrent_s`: one product per time step in each of the three passes."""
    cells = [CELL.search(notes) for notes in table.text("notes")]
    keys = [(m[1], int(m[2])) if m else ("", 0) for m in cells]
    batch = table.dim("b")
    return {
        "batch": batch,
        "hidden": np.array([float(h) for _, h in keys]),
        "gates": np.array([GATES.get(cell, np.nan) for cell, _ in keys]),
        "steps": np.array([float(STEPS.get(key, np.nan)) for key in keys]),
        "element_bytes": element_bytes(table),
        "products": np.ones(len(batch)),
    }


FAMILIES: Final = tuple(
    KernelFamily(
        name=op, ops=frozenset({op}), formula=recurrent_s, shape=recurrent, device=attention.device_arguments,
        coefficients=COEFFICIENTS,
    )
    for op in ("rnn_fwd", "rnn_bwd_data", "rnn_bwd_weight")
)  # fmt: skip
