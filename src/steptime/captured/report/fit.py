"""The report of ``steptime fit``: the guide step by step, the cheapest point with its settings, the front."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from steptime.captured.fit.choice import Point
from steptime.captured.fit.driver import FitResult, GuideStep
from steptime.captured.fit.techniques import TECHNIQUES, Change
from steptime.errors import counted
from steptime.estimate.memory_definitions import LIKELY_FITS
from steptime.report import text as t
from steptime.search.accumulators import telling_points

if TYPE_CHECKING:
    from rich.console import Console

SHOWN: Final = 10
"""Largest number of points of the front that are shown by default."""
NOTICED: Final = 0.02
"""Least fraction of the device memory of the previous point that a shown point saves."""


def print_fit(result: FitResult, *, show_all: bool = False) -> None:
    """Write the report to standard output."""
    out = t.console()
    _print_header(out, result)
    _print_guide(out, result)
    _print_answer(out, result)
    _print_front(out, result, show_all=show_all)
    for note in result.notes:
        out.print(t.printable(f"note: {note}"))


def _print_header(out: Console, result: FitResult) -> None:
    words = [f"{result.model} on {result.device}", f"batch {t.count(result.batch)}"]
    words += [f"framework {result.baseline.framework}"] if result.baseline.framework else []
    words += [f"{counted(result.seq, 'token', t.count(result.seq))}"] if result.seq else []
    out.print(t.printable(", ".join([*words, result.optimizer, f"changes allowed: {result.allow}"])), style="bold")
    taken = f", of which the driver's context takes {t.memory(result.context_bytes)}" if result.context_bytes else ""
    out.print(f"device memory {t.memory(result.capacity_bytes)}{taken}")
    captured = f", {t.count(result.captures)} captured" if result.captures else ""
    out.print(f"{counted(result.candidates, 'combination', t.count(result.candidates))} weighed{captured}")


def _print_guide(out: Console, result: FitResult) -> None:
    t.heading(out, "step by step")
    first = result.baseline
    out.print(f"  as it is: {t.memory(first.memory_bytes)}, {t.seconds(first.step_s)} per step: {_verdict(first)}")
    for number, one in enumerate(result.guide, 1):
        t.indented(out, f"{number} {_guide_text(one)}", by=2)
    last = len(result.guide) + 1
    if result.fits:
        t.indented(out, f"{last} parallelism: not needed to fit; if a step takes too long, data parallelism (steptime "
                        "plan) shares the batch among devices", by=2)  # fmt: skip
    else:
        t.indented(out, f"{last} parallelism: needed, as nothing on one device is enough: intra-operator, pipeline or "
                        "sharded data parallelism (steptime plan)", by=2)  # fmt: skip


def _guide_text(one: GuideStep) -> str:
    after = one.after
    if after is None:
        return f"{one.step}: " + ("nothing to gain" if one.needed else "not needed")
    added = ", ".join(title for title in _titles(after, one.added) if title != one.step)
    gone = [key for key in one.before.choice.keys if key not in after.choice.keys]
    words = f"{one.step} ({added}): " if added else f"{one.step}: "
    words += f"{t.memory(one.before.memory_bytes)} -> {t.memory(after.memory_bytes)}, {_factor(one.time_factor)}"
    if gone:
        words += f", without {', '.join(TECHNIQUES[key].title for key in gone)}"
    changes = after.choice.changes
    words += f"; changes {changes}" if changes.rank > one.before.choice.changes.rank else ""
    if one.needed:
        return f"{words}: {_verdict(after)}"
    return f"{words}" if one.added and one.time_factor < 1 and after.fits else f"not needed: {words}"


def _titles(point: Point, keys: tuple[str, ...]) -> list[str]:
    """Titles of techniques, with their chosen values."""
    out = []
    for key in keys:
        title = TECHNIQUES[key].title
        if key == "accumulation":
            title = f"{point.choice.accumulation} micro-batches of {point.choice.micro_batch}"
        elif key == point.choice.checkpoints.key:
            title = point.choice.checkpoints.name
        out.append(title)
    return out


def _factor(factor: float) -> str:
    """A change of time in words.

    >>> _factor(0.5), _factor(1.25), _factor(1.001)
    ('2.00x faster', '1.25x slower', 'as fast')
    """
    if abs(factor - 1) < 5e-3:
        return "as fast"
    return f"{1 / factor:.2f}x faster" if factor < 1 else f"{factor:.2f}x slower"


def _verdict(point: Point) -> str:
    if not point.fits:
        return f"does not fit (needs {t.memory(point.device_bytes)})"
    risk = f", chance of running out {t.percent(point.oom_probability)}" if point.oom_probability > LIKELY_FITS else ""
    return f"fits (needs {t.memory(point.device_bytes)}{risk})"


def _print_answer(out: Console, result: FitResult) -> None:
    best = result.cheapest
    if best is None:
        t.heading(out, f"nothing fits: {t.memory(result.missing_bytes)} are missing")
        out.print(t.printable(f"least memory: {_describe(result.least)}"))
        _print_settings(out, result, result.least)
        if more := _left_out(result.allow):
            t.indented(out, more, by=0)
        return
    t.heading(out, t.printable(f"cheapest that fits: {_describe(best)}"))
    if best.oom_probability > LIKELY_FITS:
        roomier = [p for p in result.front if p.fits and p.oom_probability <= LIKELY_FITS]
        note = f"; with more room: {_describe(roomier[0])}" if roomier else ""
        t.indented(out, f"chance of running out {t.percent(best.oom_probability)}{note}", by=2)
    _print_settings(out, result, best)


def _left_out(allow: str) -> str:
    """Line on techniques with stronger changes than allowed; empty if all are allowed.

    >>> _left_out("rounding").partition(":")[0], _left_out("training")
    ('left out, as they may change what is learned (--allow training)', '')
    """
    titles = [one.title for one in TECHNIQUES.values() if one.changes.rank > Change(allow).rank]
    strongest = list(Change)[-1]
    effect = "may change what is learned" if allow == Change.ROUNDING else "change numbers"
    return f"left out, as they {effect} (--allow {strongest}): {', '.join(titles)}" if titles else ""


def _describe(point: Point) -> str:
    used = ", ".join(_titles(point, point.choice.keys)) or "nothing needed"
    return f"{used}: {t.memory(point.device_bytes)} on the device, {t.seconds(point.step_s)} per step"


def _print_settings(out: Console, result: FitResult, point: Point) -> None:
    for key, settings in point.choice.settings(result.device_type).items():
        technique = TECHNIQUES[key]
        out.print(t.printable(f"  {technique.title} ({technique.numerics})"))
        for framework, setting in settings.items():
            t.indented(out, f"{framework}: {setting}", by=6)
    for one in result.stacks:
        fits = "fits" if one.fits else "does not fit"
        needs = f"{t.memory(one.device_bytes)} on the device, {t.seconds(one.step_s)} per step"
        t.indented(out, f"with the defaults of {one.framework}: {needs}, {fits} (--framework {one.framework})", by=2)
    own = result.baseline.framework
    if own is not None and point.framework != own:
        t.indented(out, f"memory and time of this combination are those of {point.framework}, which has it", by=2)


def _print_front(out: Console, result: FitResult, *, show_all: bool) -> None:
    t.heading(out, "less memory for more time")
    shown = result.front if show_all else telling(result.front)
    table = t.grid(("step", "band 90 %", "tensors", "device", "fits", "techniques"), left=(5,))
    for point in shown:
        band = "" if point.band_s is None else f"{t.seconds(point.band_s[0])} .. {t.seconds(point.band_s[1])}"
        mark = "yes" if point.fits else "no"
        table.add_row(
            t.seconds(point.step_s), band, t.memory(point.memory_bytes), t.memory(point.device_bytes), mark,
            t.printable(", ".join(_titles(point, point.choice.keys)) or "none"),
        )  # fmt: skip
    out.print(table)
    simulated = sum(point.basis == "simulation" for point in shown)
    if simulated:
        out.print(f"{simulated} of these {'is' if simulated == 1 else 'are'} simulated on the captured chain of blocks")
    if len(shown) < len(result.front):
        more = len(result.front) - len(shown)
        out.print(f"{more} more {'point' if more == 1 else 'points'} with --all")


def telling(front: Sequence[Point]) -> Sequence[Point]:
    """Points of a front that need noticeably less device memory than the previous one, or are the first that fit."""
    apart = list(front[:1])
    for point in front[1:]:
        if point.device_bytes <= apart[-1].device_bytes * (1 - NOTICED) or point.fits != apart[-1].fits:
            apart.append(point)
    time_s, memory_bytes = (np.array([getattr(point, name) for point in apart]) for name in ("step_s", "device_bytes"))
    return [apart[i] for i in telling_points(time_s, memory_bytes, SHOWN)]
