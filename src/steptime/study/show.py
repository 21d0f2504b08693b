"""Printed tables of results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from steptime.errors import counted
from steptime.report import text as t
from steptime.study.tables import LABELS, Results, missing_text

MOST_ROWS: Final = 200
MOST_OWN: Final = 8
"""Largest number of own columns of a table that are shown in full; of more, only those that vary."""
_POINT: Final = ("grid", "model", "cluster", "asked_strategy", "gpus", "global_batch", "seq_len", "mode", "framework")
"""Labels that are shown if they vary between points, in addition to swept hardware."""


def print_plans(found: Results, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the fastest plan of each point: labels, step, days, MFU, memory."""
    best = [row for row in rows if row["rank"] == 1]
    out = t.console()
    out.print(t.printable(found.study.title or "study"), style="bold")
    labels = [name for name in _labels(best) if name == "gpus" or len({row[name] for row in best}) > 1]
    days = any(row["training_days"] is not None for row in best)
    unit, scale = t.memory_unit(row["peak_memory_bytes"] for row in best) if best else ("GiB", 2.0**30)
    table = t.grid([*labels, "plan", "step", *(["days"] if days else []), "MFU", unit], left=(len(labels),))
    for row in best[:MOST_ROWS]:
        cells = [t.number(row[name]) for name in labels]
        cells += [t.plan_label(json.loads(row["plan_json"])), t.seconds(row["step_time_s"])]
        cells += [f"{row['training_days']:.2f}" if row["training_days"] is not None else ""] if days else []
        table.add_row(*cells, t.percent(row["mfu"]), f"{row['peak_memory_bytes'] / scale:.1f}")
    out.print(table)
    _finish(out, found, len(best))


def _labels(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    from steptime.study.hardware import PARAMETERS

    swept = [p.column for p in PARAMETERS.values() if _varies_alone(rows, p.column)]
    return [*_POINT, *swept]


def _varies_alone(rows: Sequence[Mapping[str, Any]], column: str) -> bool:
    """True if a number varies between points of the same cluster."""
    values: dict[str, set[Any]] = {}
    for row in rows:
        values.setdefault(row["cluster"], set()).add(row[column])
    return any(len(several) > 1 for several in values.values())


def print_table(found: Results, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows of a table: labels that vary, always the devices, own columns; no JSON of plans."""
    shown = [name for name in _labels(rows) if name == "gpus" or len({row[name] for row in rows}) > 1]
    own = [name for name in (rows[0] if rows else ()) if name not in LABELS and name != "plan_json"]
    if len(own) > MOST_OWN:
        own = [name for name in own if len({row[name] for row in rows}) > 1]
    print_rows(found, [{name: row[name] for name in (*shown, *own)} for row in rows])


def print_rows(found: Results, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print any rows, without columns that are empty everywhere."""
    out = t.console()
    names = [name for name in (rows[0] if rows else ()) if any(row[name] is not None for row in rows)]
    table = t.grid(names, left=tuple(i for i, n in enumerate(names) if any(isinstance(row[n], str) for row in rows)))
    for row in rows[:MOST_ROWS]:
        table.add_row(*("" if row[name] is None else t.printable(t.number(row[name])) for name in names))
    out.print(table)
    _finish(out, found, len(rows))


def _finish(out: Any, found: Results, number: int) -> None:
    if number > MOST_ROWS:
        out.print(f"{counted(number - MOST_ROWS, 'more row')} with --json or steptime study export")
    text = missing_text(found)
    if text:
        out.print(text)
