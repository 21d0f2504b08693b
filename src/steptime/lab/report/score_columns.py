"""Report of the columns and names that tables of measurements may have."""

from __future__ import annotations

from typing import Any, Final

from steptime.lab.measured.columns import OTHER_NAMES, SCALED
from steptime.lab.measured.read import METRICS, NEEDED
from steptime.lab.scoring.columns import TIME_COLUMNS, columns_of_kernels, names_of_collectives, other_columns
from steptime.lab.scoring.stages import NEEDED as STAGES_NEEDED
from steptime.lab.scoring.stages import stage_columns
from steptime.lab.scoring.tables import COLLECTIVE_COLUMNS, KERNEL_COLUMNS, TEXTS
from steptime.report.text import console, grid, heading

NONE: Final = "-"


def columns_document() -> dict[str, Any]:
    """Columns of the five tables with other names that they may have, operators, and collectives."""
    return {
        "runs": {"needed": list(NEEDED), "one_of": list(METRICS), "other_names": _other_names()},
        "stages": {"needed": list(STAGES_NEEDED), "one_of": stage_columns(), "others": "as runs"},
        "outcomes": {"needed": ["outcome"], "others": "as runs"},
        "kernels": {"needed": list(KERNEL_COLUMNS), "operators": columns_of_kernels()},
        "collectives": {"needed": list(COLLECTIVE_COLUMNS), "names": names_of_collectives()},
        "kernels_and_collectives": {"text": list(TEXTS), "other_names": dict(other_columns())},
    }


def _other_names() -> dict[str, list[str]]:
    found = {name: list(others) for name, others in OTHER_NAMES.items()}
    for other, (own, _) in SCALED.items():
        found[own].append(other)
    return found


def print_columns() -> None:
    """Five tables: columns of training runs, of stages and of layouts, operators of kernels, collectives."""
    screen = console()
    heading(screen, "Training runs: a column may have one of these names instead")
    runs = grid(("column", "other names"), left=(0, 1))
    for name, others in _other_names().items():
        runs.add_row(f"{name} *" if name in NEEDED else name, ", ".join(others))
    screen.print(runs)
    screen.print(f"* must be there, and one of {', '.join(METRICS)}", soft_wrap=True)
    heading(screen, "Times of stages: columns of training runs, without a time of the step")
    screen.print(f"needed: {', '.join(STAGES_NEEDED)}, and one of {', '.join(stage_columns())}", soft_wrap=True)
    heading(screen, "Layouts that ran or ran out of memory: columns of training runs, with or without a time")
    screen.print("needed: outcome (ok, or OOM)", soft_wrap=True)
    heading(screen, "Kernels: operators that need no source or kernel")
    kernels = grid(("op", "columns of its shape", "other names of the operator"), left=(0, 1, 2))
    for row in columns_of_kernels():
        kernels.add_row(row["op"], " ".join(row["columns"]), ", ".join(row["other_names"]) or NONE)
    screen.print(kernels)
    screen.print("=: the value of an empty cell. Case, _, - and spaces of names do not matter.", soft_wrap=True)
    heading(screen, "Collectives")
    collectives = grid(("collective", "other names"), left=(0, 1))
    for name, spellings in names_of_collectives().items():
        collectives.add_row(name, ", ".join(spellings) or NONE)
    screen.print(collectives)
    listed = "; ".join(f"{name}: {', '.join(names)}" for name, names in other_columns().items())
    screen.print(f"Columns of kernels and collectives with other names: {listed}; {TIME_COLUMNS}.",
                 soft_wrap=True)  # fmt: skip
