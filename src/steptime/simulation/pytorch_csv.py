"""Schedules in the CSV of PyTorch's pipelining: a row for each rank, a cell for each action."""

from __future__ import annotations

import csv
import re
from io import StringIO
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np

from steptime.errors import InputFileError, UserError, shown
from steptime.schedule.actions import COLUMNS, COPIES, LETTERS, MESSAGES, ActionTable, Kind
from steptime.simulation.legality import check
from steptime.simulation.waits import first_of_groups

_ACTION: Final = re.compile(r"(\d{1,9})([A-Z_]+)(\d{0,9})", re.ASCII)
_PAIR: Final = re.compile(r"\((.*)\)OVERLAP_F_B")
_KINDS: Final = {letters: Kind(place) for place, letters in enumerate(LETTERS) if place < Kind.UPDATE}
_EXAMPLES: Final = "cells are like 2F0, 2B0, 2I0, 2W0, 2SEND_F0, 2RECV_B0, 2UNSHARD, (2F1;1B0)OVERLAP_F_B, or empty"


def csv_text(table: ActionTable) -> str:
    """A table as PyTorch writes and loads it; it loads a table with messages as the format ``compute_comms``.

    A table with messages needs all other actions too: PyTorch adds nothing to a table that has messages, and divides
    gradients by the number of micro-batches at an action that sums them
    (:func:`~steptime.simulation.messages.with_messages`: `reduces`, and `gathered` for sharded weights). Updates at the
    end of a step are left out, because PyTorch's training loop makes them. PyTorch writes schedules like that of
    DualPipe, with a stage on two ranks, but runs only schedules that have each stage on one.

    Raises:
        UserError: the table has actions without a PyTorch notation: slices of sequences, updates within a step, copies
            to the host.
    """
    for cannot, what, hint in (
        (table.slices > 1, "slices of sequences", "choose a schedule without them"),
        (
            ((table.kind == Kind.UPDATE) & (table.micro_batch >= 0)).any(),
            "updates of weights within a step",
            "choose a schedule without them",
        ),
        ((table.kind >= COPIES[0]).any(), "copies to the host", "write the table without OFFLOAD and RELOAD"),
    ):
        if cannot:
            raise UserError(f"PyTorch's pipelining CSV has no {what}", hint=hint)
    table = table.taken(table.kind != Kind.UPDATE)
    first = first_of_groups(table)
    out = StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for begin, end in zip(table.starts[:-1].tolist(), table.starts[1:].tolist(), strict=True):
        cells: dict[int, list[str]] = {}
        for row in range(begin, end):
            cells.setdefault(int(first[row]), []).append(table.named(row))
        writer.writerow([cell[0] if len(cell) == 1 else f"({';'.join(cell)})OVERLAP_F_B" for cell in cells.values()])
    return out.getvalue()


def read_csv(path: Path) -> ActionTable:
    """The table of a file in PyTorch's notation, checked.

    Raises:
        InputFileError: the file cannot be read.
        UserError: ranks cannot run the schedule (:func:`table_of_csv`).
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputFileError(str(path), f"cannot be read: {error}") from None
    return table_of_csv(text, str(path))


def table_of_csv(text: str, where: str = "") -> ActionTable:
    """The table of a text in PyTorch's notation; stages and micro-batches are those named in the text.

    Args:
        text: a line for each rank, from rank 0; with messages (PyTorch's format ``compute_comms``) or without.
        where: name of the text in error messages, such as the path of a file.

    Raises:
        UserError: a cell is no action, or ranks cannot run the schedule: an action is missing or duplicated, or ranks
            wait for each other in a circle. The message has the rank, the action and the rule.
    """
    try:
        table = _parsed(text)
        check(table)
    except UserError as error:
        raise UserError(f"{where}: {error}" if where else str(error)) from None
    return table


def _parsed(text: str) -> ActionTable:
    try:
        rows = list(csv.reader(StringIO(text)))
    except csv.Error as error:
        raise UserError(f"no CSV: {error}") from None
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    found: list[tuple[int, ...]] = []
    pairs = 0
    for rank, cells in enumerate(rows):
        for place, cell in enumerate(each.strip() for each in cells):
            pair = _PAIR.fullmatch(cell)
            parts = pair[1].split(";") if pair else [cell] * bool(cell)
            for part in parts:
                stage, kind, number = _action(part.strip(), rank, place, cell)
                found.append((rank, kind, stage, number, 0, pairs if pair else -1))
            pairs += pair is not None
    columns: Any = np.array(found, np.int64).reshape(-1, len(COLUMNS)).T
    return ActionTable(
        ranks=len(rows),
        stages=int(columns[2].max(initial=0)) + 1,
        micro_batches=int(columns[3].max(initial=0)) + 1,
        **dict(zip(COLUMNS, columns, strict=True)),
    )


def _action(text: str, rank: int, place: int, cell: str) -> tuple[int, Kind, int]:
    """Stage, kind and micro-batch of an action; micro-batch -1: the action has none."""
    match = _ACTION.fullmatch(text)
    kind = _KINDS.get(match[2]) if match else None
    if match is None or kind is None:
        _refuse(rank, place, cell, "unknown action")
    if (kind <= MESSAGES[-1]) != bool(match[3]):
        _refuse(rank, place, cell, f"{match[2]} has {'a' if kind <= MESSAGES[-1] else 'no'} micro-batch")
    return int(match[1]), kind, int(match[3] or -1)


def _refuse(rank: int, place: int, cell: str, rule: str) -> NoReturn:
    raise UserError(f"rank {rank}, cell {place + 1}: {shown(cell)}: {rule}", hint=_EXAMPLES)
