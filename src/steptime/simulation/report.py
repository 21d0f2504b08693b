"""A simulated step of a pipeline, and the table of schedules, for people."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import groupby

import numpy as np
from rich.table import Table

from steptime.report import text as t
from steptime.schedule import Kind
from steptime.simulation.layout import layout_text
from steptime.simulation.run import SimulatedStep
from steptime.simulation.summary import Row

SHOWN = 16
"""Largest number of ranks in the table; with more ranks it has the first, some between, and the last."""

FIXED, COLUMN = 16, 9
"""Width of rank and memory, and of a column of times with a space."""
WIDE = 6
"""Largest number of columns of times with two spaces between them; more columns have one space."""


def print_simulation(found: SimulatedStep) -> None:
    """Print the step time and its parts, and time and memory of each rank."""
    out, table = t.console(), found.table
    out.print(
        f"{found.model}, on {found.cluster}: {found.schedule}, {table.ranks} ranks, {table.stages} stages, "
        f"{table.micro_batches} micro-batches"
    )
    rows = [("step time", t.seconds(found.step_s)), ("pipeline", t.seconds(found.pipeline_s))]
    if found.updates:
        each = f"{found.updates:g} in a step, each {t.seconds(found.update_s)} of exposed traffic and optimizer"
        rows.append(("updates", f"{each}, in the pipeline's time"))
    if found.slices:
        alike = len(set(found.slices)) == 1
        sizes = f"{len(found.slices)} of {found.slices[0]:,}" if alike else "+".join(map(str, found.slices))
        rows.append(("slices", f"{sizes} tokens"))
    rows += [(name.replace("_", " "), t.seconds(value)) for name, value in found.once_s.items()]
    rows.append(("bubble", f"{100 * found.bubble_fraction:.1f} % of the pipeline's time, mean of the ranks"))
    if found.slow_ranks:
        more_s = found.pipeline_s - found.equal_ranks_s
        which = ", ".join(f"rank {rank} x {factor:g}" for rank, factor in found.slow_ranks.items())
        share = f"{100 * more_s / found.equal_ranks_s:.1f} %"
        rows.append(("stragglers", f"{t.seconds(more_s)} of the pipeline, {share} more: {which}"))
    if found.closed_form_s is not None:
        rows.append(("closed form", f"{t.seconds(found.closed_form_s)}: what estimate says"))
    if len(found.samples_s):
        low, high = found.samples_s.min(), found.samples_s.max()
        mean = t.seconds(float(found.samples_s.mean()))
        rows.append(("with jitter", f"pipeline {mean}, {t.seconds(float(low))} to {t.seconds(float(high))}"))
    if found.even_step_s is not None:
        rows += _split_rows(found, found.even_step_s)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        line = f"{name:{width}}  {value}"
        if len(line) > out.width and name != "layout":
            line = textwrap.fill(line, out.width, subsequent_indent=" " * (width + 2), break_long_words=False)
        out.print(line, soft_wrap=True)
    out.print()
    if found.even_step_s is not None:
        _print_stages(found)
        out.print()
    _print_ranks(found)
    for note in found.notes:
        out.print(f"note: {note}")


def _split_rows(found: SimulatedStep, even_s: float) -> list[tuple[str, str]]:
    """Rows for the layout and for the even split."""
    change = 100 * (found.step_s / even_s - 1)
    relation = "as long as" if abs(change) < 0.05 else f"{abs(change):.1f} % {'less' if change < 0 else 'more'} than"
    fits = "" if found.even_fits else ", more memory than there is"
    even = f"{layout_text(found.even_layout)}: step time {t.seconds(even_s)}{fits}; the layout takes {relation} that"
    return [("layout", layout_text(found.layout)), ("even split", even)]


def _print_stages(found: SimulatedStep) -> None:
    """Print the layers of each rank's stages."""
    out, table = t.console(), found.table
    passes = table.taken(table.kind == Kind.FORWARD)
    lines = []
    for rank in range(table.ranks):
        own = np.unique(passes.stage[passes.rank == rank]).tolist()
        lines.append(" | ".join(layout_text([found.layout[stage]]) or "-" for stage in own))
    out.print("ranks  stages")
    for text, ranks in groupby(range(table.ranks), key=lines.__getitem__):
        some = list(ranks)
        name = str(some[0]) if len(some) == 1 else f"{some[0]}-{some[-1]}"
        out.print(f"{name:>5}  {text}", highlight=False, markup=False)


def _print_ranks(found: SimulatedStep) -> None:
    """Print seconds and memory by rank."""
    of = found.spent
    columns = {
        "passes": of.passes_s,
        "tensor": of.tensor_s,
        "update": of.update_s,
        "fill": of.fill_s,
        "drain": of.drain_s,
        "peers": of.peers_s,
        "messages": of.message_s,
        "data": of.data_s,
        "copies": of.copy_s,
    }
    columns = {name: seconds for name, seconds in columns.items() if seconds.max() > 1e-9}
    out = t.console()
    fit = max((out.width - FIXED) // COLUMN, 1)
    left_out = list(columns)[fit:]
    columns = dict(list(columns.items())[:fit])
    narrow = len(columns) > WIDE or FIXED + len(columns) * (COLUMN + 1) > out.width
    table = Table(box=None, pad_edge=False, collapse_padding=narrow)
    for head in ("rank", *columns, "memory"):
        table.add_column(head, justify="right", no_wrap=True)
    count = found.table.ranks
    capacity = np.broadcast_to(found.capacity_bytes, (count,))
    shown = range(count) if count <= SHOWN else sorted({round(i * (count - 1) / (SHOWN - 1)) for i in range(SHOWN)})
    for rank in shown:
        peak = float(found.memory.peak_bytes[rank])
        mark = " !" if peak > capacity[rank] else ""
        table.add_row(
            str(rank), *(t.seconds(float(column[rank])) for column in columns.values()), t.memory(peak) + mark
        )
    out.print(table)
    if left_out:
        out.print(f"not shown at {out.width} columns: {', '.join(left_out)} (--json)")
    if (found.memory.peak_bytes > capacity).any():
        out.print(f"!: more than the {t.memory(float(capacity.min()))} of a device")


def print_schedules(rows: Sequence[Row], ranks: int, micro_batches: int) -> None:
    """Print the table of schedules."""
    out = t.console()
    out.print(f"{ranks} ranks, {micro_batches} micro-batches, F = I = W, no time for messages")
    table = Table(box=None, pad_edge=False)
    for number, head in enumerate(("schedule", "chunks", "bubble", "held", "versions", "stale", "graph", "sync")):
        table.add_column(head, justify="right" if number else "left", no_wrap=not number)
    for row in rows:
        numbers = (row.in_flight, row.weight_versions, row.staleness)
        table.add_row(
            row.name,
            str(row.chunks),
            "-" if row.bubble_fraction is None else f"{100 * row.bubble_fraction:.1f} %",
            *("-" if each is None else f"{each:g}" for each in numbers),
            "any" if row.any_graph else "causal",
            "yes" if row.synchronous else "no",
        )
    out.print(table)
    out.print("held: micro-batches whose activations the fullest rank holds; versions: of the weights;")
    out.print("stale: updates between reading weights and applying their gradient; -: no closed form, or not served")
