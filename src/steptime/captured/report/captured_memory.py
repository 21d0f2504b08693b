"""The report of a captured program's memory: its peak by phase, what makes it, and whether it fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from steptime.captured.profiling import Profile
from steptime.report import text as t

if TYPE_CHECKING:
    from rich.console import Console

LISTED: Final = 6
MOST_CATEGORIES: Final = 16
"""Most sizes of a measured snapshot that are listed; it may name its own."""


def print_captured_memory(profile: Profile) -> None:
    """Write the memory part of a profile to standard output."""
    out = t.console()
    out.print()
    out.print("memory", style="bold")
    for line in memory_lines(profile):
        t.indented(out, line, 2)
    _print_peaks(out, profile)
    _print_tensors(out, profile)


def print_measured(compared: Mapping[str, Any]) -> None:
    """Write a measured snapshot beside the prediction: its peak, and of a CUDA device every size."""
    out = t.console()
    peak, predicted = compared["peak_bytes"], compared["predicted_bytes"]
    out.print(f"measured peak {t.memory(peak)}, predicted {t.memory(predicted)}")
    for name, title in (("totals", "beside the snapshot"), ("by_category", "requested at the peak by")):
        if rows := compared.get(name):
            table = t.grid([title, "predicted", "measured", "difference"])
            for row in rows[:MOST_CATEGORIES]:
                error = "-" if row["relative"] is None else t.change(row["relative"])
                table.add_row(
                    t.number(row["name"]), t.memory(row["predicted_bytes"]), t.memory(row["measured_bytes"]), error
                )
            out.print()
            out.print(table)


def memory_lines(profile: Profile) -> list[str]:
    """Peak by definition, what the device has, and the chance that it does not suffice."""
    m = profile.memory
    parts = [f"{t.memory(m['allocated'])} allocated"]
    if "device" in m:
        parts[0] += f" ({t.memory(m['workspace'])} of it cuBLAS workspace)"
        parts += [f"{t.memory(m['reserved'])} reserved", f"{t.memory(m['device'])} of the device with its context"]
    capacity = profile.device.memory_bytes
    fits = "fits" if profile.needed_bytes <= capacity else "does not fit"
    planned = profile.arena_bytes
    arena = [f"activations in a static plan (buffers used again): {t.memory(planned)}"] if planned is not None else []
    return [
        f"peak {', '.join(parts)}",
        f"{fits} in {t.memory(capacity)} ({t.share(profile.needed_bytes, capacity)}); "
        f"chance of running out {t.percent(profile.oom_probability)}",
        *arena,
    ]


def _print_peaks(out: Console, profile: Profile) -> None:
    peaks = profile.live.peaks()
    kinds = list(dict.fromkeys(kind for peak in peaks.values() for kind in peak.by_category))
    table = t.grid(("in use at the peak of", *peaks))
    table.add_row("all", *(t.memory(peak.size_bytes) for peak in peaks.values()))
    for kind in kinds:
        table.add_row(f"  {kind}", *(t.memory(peak.by_category.get(kind, 0)) for peak in peaks.values()))
    out.print()
    out.print(table)
    for phase, peak in peaks.items():
        place = f"{peak.module}: {peak.operator}" if peak.module else peak.operator or "its start"
        t.indented(out, t.printable(f"{phase}: at {place}"), 2)


def _print_tensors(out: Console, profile: Profile) -> None:
    peak = profile.live.peak()
    table = t.grid((f"largest at the peak ({peak.phase})", "size", "holds"), left=(0, 2))
    for held in profile.largest(peak, LISTED):
        table.add_row(t.printable(held.made_by), t.memory(held.storage.size_bytes), held.storage.category)
    out.print()
    out.print(table)
