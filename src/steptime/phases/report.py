"""Steps of preference and reinforcement learning for people."""

from __future__ import annotations

from steptime.phases.run import RlStep
from steptime.report import text as t


def print_rl(found: RlStep) -> None:
    """One line for each phase, then memory and how responses come about."""
    out = t.console()
    out.print(t.printable(f"{found.recipe}: {found.title}"), style="bold")
    low, high = (t.seconds(each) for each in found.bracket_s)
    step = f"{found.sequences:,} sequences of {found.seq_len:,} tokens: {t.seconds(found.step_time_s)} a step"
    out.print(t.printable(f"{step} (bracket of what is trained {low} to {high})"))
    out.print()
    table = t.grid(("phase", "model", "time", "share", "memory"), left=(0, 1))
    for each in found.phases:
        share = f"{100 * each.time_s / found.step_time_s:.1f} %"
        table.add_row(each.name, t.printable(each.model), t.seconds(each.time_s), share, t.memory(each.peak_bytes))
    out.print(table)
    held = ", ".join(f"{role} {t.memory(size)}" for role, size in found.held.items())
    fits = "fits" if found.feasible else "does not fit"
    out.print(
        t.printable(
            f"held by a device: {held}; peak {t.memory(found.peak_bytes)} of {t.memory(found.capacity_bytes)}: {fits}"
        )
    )
    if (own := found.generation) is not None:
        waves = "" if own.waves == 1 else f" in {own.waves} waves"
        out.print(
            t.printable(
                f"generation: {own.engines} engines of {own.tp}, {own.at_once:,} sequences each{waves}; a token takes "
                f"{t.seconds(own.step_s + own.exchange_s)}, {own.tokens_per_s:,.0f} tokens/s in all"
            )
        )
    for note in found.notes:
        out.print(t.printable(f"note: {note}"))
