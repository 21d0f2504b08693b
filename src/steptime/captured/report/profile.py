"""The report of a recorded program on one device: time by module, operator and phase; memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from steptime.captured.cost import CostTable, Group
from steptime.captured.profiling import Profile
from steptime.errors import counted
from steptime.report import text as t
from steptime.report.text import FOLD, short_operator, short_path
from steptime.units import format_si

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


LISTED: Final = 6
MOST_CATEGORIES: Final = 16
"""Largest number of categories of a measured snapshot that are listed, since it may have its own."""


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
    """Write the comparison of a measured snapshot with the prediction: its peak, and for a CUDA device every size."""
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
    """Lines on the peak by definition, the capacity of the device, and the chance of running out."""
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


def predictor_lines(profile: Profile) -> list[str]:
    """Lines on the effect of a learned correction; none without one."""
    found = profile.predictor
    if found is None:
        return []
    before_s = found["step_time_before_s"]
    factors = [f"host x{found['host_factor']:.2f}"]
    factors += [f"{short_operator(name)} x{factor:.2f}" for name, factor in list(found["factors"].items())[:LISTED]]
    lines = [
        f"learned factors ({found['name']}): step {t.seconds(before_s)} x "
        f"{profile.table.totals.step_s / before_s if before_s else 1.0:.2f}; mean error {t.percent(found['error'])} on "
        f"unseen {found['provenance'].get('unseen', 'graphs')}; fitted to {found['provenance'].get('data', 'graphs')}",
        f"  {', '.join(factors)}",
    ]
    if strange := found["unseen_operators"]:
        lines.append(f"  never seen, corrected by size alone: {', '.join(strange[:NAMED_UNKNOWN])}")
    return lines


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


#: Number of operators that are listed by default.
SHOWN: Final = 12
NAMED_UNKNOWN: Final = 5
BASES: Final = 4
#: Width of the number columns of a table, in characters.
NUMBERS: Final = 52


def print_profile(table: CostTable, *, head: Sequence[str] = (), depth: int = 3, show_all: bool = False) -> None:
    """Write the profile to standard output.

    Args:
        table: costs of the program.
        head: lines on the settings, see :func:`settings_lines`.
        depth: levels of modules.
        show_all: show every module and operator, layers one by one.
    """
    out, device_s = t.console(), table.totals.device_s
    out.print(t.printable(f"{table.program.name} on {table.timer.device.title}"), style="bold")
    for line in (*head, *total_lines(table)):
        t.indented(out, line, 2)
    modules = table.by_module(depth, folded=not show_all)
    _section(out, "module", modules if show_all else folded(modules, FOLD * device_s), device_s)
    operators = table.by_operator()
    shown = operators if show_all else operators[:SHOWN]
    _section(out, "operator", [*shown, *_rest(operators[len(shown) :])], device_s)
    _section(out, "phase", table.by_phase(), device_s)
    _section(out, "bound by", table.by_bound(), device_s)
    out.print()
    t.indented(out, coverage_line(table), 0)
    t.indented(out, basis_line(table), 0)


def settings_lines(profile: Profile) -> list[str]:
    """Lines on the settings: weights, inputs, loss, optimiser, kernels, folded blocks, stored tensors."""
    program, s = profile.program, profile.settings
    dtypes = "/".join(profile.parameter_dtypes)
    weights = f"{t.big(program.parameter_count)} parameters{' in ' if dtypes else ''}{dtypes}"
    if profile.trained_parameters != program.parameter_count:
        weights += f" ({t.big(profile.trained_parameters)} trained)"
    words = [weights, f"inputs {', '.join(s.inputs) or 'none'}"]
    if program.batch is not None:
        rate = "" if profile.samples_per_s is None else f" ({profile.samples_per_s:.4g} samples/s)"
        words.append(f"batch {t.count(program.batch)}{rate}")
    how = ["training" if s.training else "inference"]
    for name, value in (("optimizer", s.optimizer), ("loss", s.loss), ("autocast", s.autocast)):
        how += [f"{name}: {value}"] if (value is not None and s.training) or value not in (None, "none") else []
    how += [f"{s.kernels} kernels"] if s.kernels is not None else []
    how += [f"folded: {', '.join(program.folded)}"] if program.folded else []
    how += [f"not folded: {program.unfolded}"] if program.unfolded else []
    lines = ["; ".join(words), "; ".join(how)]
    lines += [f"taken as true: {'; '.join(program.assumed)}"] if program.assumed else []
    if s.stored is not None:
        kinds = (f"{name} {t.count(k.elements)} ({t.memory(k.size_bytes)})" for name, k in s.stored.items())
        lines += [f"stored: {', '.join(kinds)}"]
    lines += predictor_lines(profile)
    if rates := profile.cache_hit_rates:
        hits = ", ".join(f"{level} {t.percent(rate)}" for level, rate in rates.items())
        lines += [f"caches in products with the best tiles: {hits} hit"]
    return [t.printable(line) for line in (*lines, *(f"note: {note}" for note in s.notes))]


def total_lines(table: CostTable) -> list[str]:
    """Lines on the step time with its bounds, the work, and the utilisation."""
    s = table.totals
    band = " .. ".join(t.seconds(value) for value in s.band_s)
    masked = " (a causal mask counted once)" if any(cost.work.family == "attention" for cost in table.kinds) else ""
    saved = f", {format_si(s.saved_flops, 'FLOP')} of them saved by Winograd's algorithm" if s.saved_flops else ""
    return [
        f"step {t.seconds(s.step_s)} (90 %: {band}; {_issued(table)})",
        f"MFU {t.percent(s.mfu)}, HFU {t.percent(s.hfu)}: {format_si(s.model_flops, 'FLOP')} of the model, "
        f"{format_si(s.executed_flops, 'FLOP')} run{masked}{saved}",
        f"{t.memory(s.moved_bytes)} moved, {t.number(s.intensity)} FLOP per byte",
    ]


def _issued(table: CostTable) -> str:
    """Text on the times of device and host, and their bounds."""
    s, launches = table.totals, t.count(table.totals.launches)
    if table.timer.in_turn:
        return f"operators {t.seconds(s.device_s)}, {t.seconds(s.host_s)} to issue {launches} on the same processor"
    low, high = (t.seconds(each) for each in s.bracket_s)
    return (
        f"device {t.seconds(s.device_s)}, host {t.seconds(s.host_s)} for {launches} launches; {low} side by side, "
        f"{high} one after the other"
    )


def coverage_line(table: CostTable) -> str:
    """Line on the coverage of the operators by formulas."""
    c = table.coverage
    line = (
        f"coverage: {t.percent(c.known_share_of_calls)} of {t.count(c.calls)} calls and "
        f"{t.percent(c.known_share_of_bytes)} of the traffic are operators with a formula"
    )
    if not c.unknown:
        return line
    named = [f"{u.op} ({counted(u.calls, 'call')}, {t.percent(u.share_of_bytes)} of the traffic)" for u in c.unknown]
    more = [] if len(named) <= NAMED_UNKNOWN else [f"{len(named) - NAMED_UNKNOWN} more"]
    return f"{line}; by their inputs and outputs alone: {', '.join([*named[:NAMED_UNKNOWN], *more])}"


def basis_line(table: CostTable) -> str:
    """Line on the basis of the times, largest share first."""
    bases = [group for group in table.by_basis() if group.seconds]
    whole = sum(group.seconds for group in bases)
    named = [f"{t.share(group.seconds, whole)} {group.name}" for group in bases[:BASES]]
    rest = sum(group.seconds for group in bases[BASES:])
    return "times rest on: " + "; ".join([*named, *([f"{t.share(rest, whole)} others"] if rest else [])])


def folded(groups: Sequence[Group], least_s: float) -> list[Group]:
    """A tree of modules in which members below `least_s` are one row; a single such member stays."""
    out: list[Group] = []
    start = 0
    while start < len(groups):
        depth = groups[start].depth
        starts = [n for n in range(start, len(groups)) if groups[n].depth == depth]
        end = next((n for n in range(start, len(groups)) if groups[n].depth < depth), len(groups))
        starts = [n for n in starts if n < end]
        small = [n for n in starts if groups[n].seconds < least_s]
        small = small if len(small) > 1 else []
        for first, last in zip(starts, [*starts[1:], end], strict=True):
            if first not in small:
                out += [groups[first], *folded(groups[first + 1 : last], least_s)]
        out += [replace(rest, depth=depth) for rest in _rest(tuple(groups[n] for n in small))]
        start = end
    return out


def _section(out: Console, title: str, groups: Iterable[Group], whole_s: float) -> None:
    rows = list(groups)
    if rows:
        out.print()
        out.print(_table(title, rows, whole_s, out.width - NUMBERS))


def _table(title: str, groups: list[Group], whole_s: float, room: int) -> Table:
    table = t.grid((title, "calls", "FLOP", "moved", "FLOP/B", "time", "share"))
    for group in groups:
        flops = format_si(group.flops, "") if group.flops else ""
        table.add_row(
            t.printable(_name(title, group, room)), t.count(group.calls), flops.strip(), t.memory(group.moved_bytes),
            t.number(round(group.intensity, 1)), t.seconds(group.seconds), t.share(group.seconds, whole_s),
        )  # fmt: skip
    return table


def _name(title: str, group: Group, room: int) -> str:
    """Name of a group, shortened so that it does not wrap."""
    before = "  " * group.depth
    return before + (short_path if title == "module" else short_operator)(group.name, room - len(before))


def _rest(groups: tuple[Group, ...]) -> list[Group]:
    """Groups that are not listed as one sum; a single group keeps its name."""
    if len(groups) < 2:
        return list(groups)
    names = ("calls", "flops", "vector_flops", "moved_bytes", "launches", "seconds")
    sums = {name: sum(getattr(group, name) for group in groups) for name in names}
    return [Group(name=f"({counted(len(groups), 'other')})", **sums)]
