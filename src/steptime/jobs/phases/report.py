"""Report of a step of preference or reinforcement learning."""

from __future__ import annotations

from steptime.errors import counted
from steptime.jobs.phases.generation import USED
from steptime.jobs.phases.run import RlStep
from steptime.plan.plans import MEMORY
from steptime.report import text as t
from steptime.report.estimate import shortfall


def print_rl(found: RlStep) -> None:
    """Print one line for each phase, then memory and generation."""
    out = t.console()
    out.print(t.printable(f"{found.recipe}: {found.title}"), style="bold")
    low, high = (t.seconds(each) for each in found.bracket_s)
    step = f"{found.sequences:,} sequences of {found.seq_len:,} tokens: {t.seconds(found.step_time_s)} a step"
    out.print(t.printable(f"{step} (bracket of what is trained {low} to {high})"))
    for line in _warnings(found):
        out.print(t.printable(line), style="bold")
    out.print()
    table = t.grid(("phase", "model", "time", "share", "memory"), left=(0, 1))
    for each in found.phases:
        share = f"{100 * each.time_s / found.step_time_s:.1f} %"
        table.add_row(each.name, t.printable(each.model), t.seconds(each.time_s), share, t.memory(each.peak_bytes))
    out.print(table)
    held = ", ".join(f"{role} {t.memory(size)}" for role, size in found.held.items())
    fits = "does not fit" if MEMORY in found.reasons else "fits"
    out.print(
        t.printable(
            f"held by a device: {held}; peak {t.memory(found.peak_bytes)} of {t.memory(found.capacity_bytes)}: {fits}"
        )
    )
    if (own := found.generation) is not None:
        waves = "" if own.waves == 1 else f" in {own.waves} waves"
        out.print(
            t.printable(
                f"generation: {counted(own.engines, 'engine')} of {own.tp}, "
                f"{counted(own.at_once, 'sequence', t.count(own.at_once))} each{waves}; a token takes "
                f"{t.seconds(own.step_s + own.exchange_s)}, {own.tokens_per_s:,.0f} tokens/s in all"
            )
        )
    for note in found.notes:
        out.print(t.printable(f"note: {note}"))


def _warnings(found: RlStep) -> list[str]:
    """Lines on why the step is not feasible, and warnings about its time."""
    out = []
    for name in found.reasons:
        where = ", ".join(phase.name for phase in found.phases if name in phase.reasons)
        out.append(f"not feasible: {shortfall(name, found.peak_bytes, found.capacity_bytes, where)}")
    own = found.generation
    if own is not None and own.held < own.at_once:
        held = counted(own.held, "sequence", t.count(own.held) if own.held else "no")
        out.append(
            f"warning: {USED:.0%} of the free memory holds {held} of an engine; generation is timed with "
            f"{own.at_once:,} at a time"
        )
    return out
