"""Kernels and collectives as kinds of tables that ``steptime score`` takes."""

from __future__ import annotations

from typing import Any, Final

from steptime.measure.kinds import Kind
from steptime.report.text import console, grid, heading
from steptime_lab.scoring.kernels import predict_collectives, predict_kernels, score_collectives, score_kernels
from steptime_lab.scoring.tables import (
    COLLECTIVE_COLUMNS,
    KERNEL_COLUMNS,
    TEXTS,
    TIME_COLUMNS,
    columns_of_kernels,
    names_of_collectives,
    other_columns,
)

_NONE: Final = "-"


def _print_kernel_columns() -> None:
    screen = console()
    heading(screen, "Kernels: operators that need no source or kernel")
    kernels = grid(("op", "columns of its shape", "other names of the operator"), left=(0, 1, 2))
    for row in columns_of_kernels():
        kernels.add_row(row["op"], " ".join(row["columns"]), ", ".join(row["other_names"]) or _NONE)
    screen.print(kernels)
    screen.print("=: the value of an empty cell. Case, _, - and spaces of names do not matter.", soft_wrap=True)


def _collective_columns() -> dict[str, Any]:
    return {
        "collectives": {"needed": list(COLLECTIVE_COLUMNS), "names": names_of_collectives()},
        "kernels_and_collectives": {"text": list(TEXTS), "other_names": dict(other_columns())},
    }


def _print_collective_columns() -> None:
    screen = console()
    heading(screen, "Collectives")
    collectives = grid(("collective", "other names"), left=(0, 1))
    for name, spellings in names_of_collectives().items():
        collectives.add_row(name, ", ".join(spellings) or _NONE)
    screen.print(collectives)
    listed = "; ".join(f"{name}: {', '.join(names)}" for name, names in other_columns().items())
    screen.print(f"Columns of kernels and collectives with other names: {listed}; {TIME_COLUMNS}.", soft_wrap=True)


KERNELS: Final = Kind(
    score=lambda path, _: score_kernels(path),
    predict=predict_kernels,
    columns=lambda: {"kernels": {"needed": list(KERNEL_COLUMNS), "operators": columns_of_kernels()}},
    print_columns=_print_kernel_columns,
)
COLLECTIVES: Final = Kind(
    score=score_collectives,
    predict=predict_collectives,
    columns=_collective_columns,
    print_columns=_print_collective_columns,
)
