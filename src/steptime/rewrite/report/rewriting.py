"""The report of a rewriting: totals by stage, applied and refused rewrites, opaque operators."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from steptime.report import text as t
from steptime.rewrite.added import MUTANTS, added
from steptime.rewrite.engine import CERTAIN, Step
from steptime.rewrite.passes import MOVES, PASSES
from steptime.rewrite.report.layouts import print_layouts
from steptime.rewrite.rewriting import Rewriting
from steptime.rewrite.search.run import Searched

SHOWN: Final = 8
WORDS: Final = {
    "captured": "as captured",
    "rewritten": "rewritten",
    "fused": "chains fused",
    "cuda graph": "one CUDA graph",
}
"""Name of a stage -> its title in the report."""


def print_rewriting(found: Rewriting, files: Sequence[Path] = (), *, show_all: bool = False) -> None:
    """Write the report to standard output.

    Args:
        found: the rewriting.
        files: files that were written.
        show_all: list every rewrite.
    """
    out = t.console()
    mode = "training step" if found.rewritten.before.training else "inference"
    out.print(t.printable(f"{found.name} on {found.device.title}: {mode}, objective {found.objective}"), style="bold")
    _print_stages(out, found)
    applied = [step for step in found.steps if step.applied]
    _print_steps(out, "applied", [step for step in applied if not step.tidy], show_all)
    tidy = ", ".join(f"{step.name} ({step.count})" for step in applied if step.tidy)
    if tidy:
        t.indented(out, f"without changing a kernel: {tidy}", 0)
    _print_steps(out, "not applied", [step for step in found.steps if not step.applied], show_all)
    if found.laid is not None:
        print_layouts(out, found.laid)
    for line in [*_search_lines(found.searched), *_lines(found)]:
        t.indented(out, t.printable(line), 0)
    for file in files:
        out.print(t.printable(f"written: {file}"), soft_wrap=True)


def _print_stages(out: Any, found: Rewriting) -> None:
    table = t.grid(("", "step", "90 %", "launches", "moved", "peak"))
    for name, totals in found.stages.items():
        band = f"{t.seconds(totals['low_s'])} .. {t.seconds(totals['high_s'])}"
        table.add_row(
            WORDS[name],
            t.seconds(totals["step_time_s"]),
            band,
            t.count(totals["launches"]),
            t.memory(totals["moved_bytes"]),
            t.memory(totals["peak_bytes"]),
        )
    out.print(table)


def _print_steps(out: Any, title: str, steps: list[Step], show_all: bool) -> None:
    if not steps:
        return
    t.heading(out, title)
    table = t.grid(("rewrite", "times", "gain", "90 %", "launches", "moved"))
    names = dict.fromkeys(step.name for step in steps)
    for name in names:
        rows = [step for step in steps if step.name == name]
        low, high = (sum(step.change.band_s[end] for step in rows) for end in (0, 1))
        table.add_row(
            name,
            t.count(sum(step.count for step in rows)),
            signed_seconds(sum(step.change.gain_s for step in rows)),
            f"{signed_seconds(low)} .. {signed_seconds(high)}",
            f"{sum(step.change.launches for step in rows):+,.0f}",
            signed_memory(sum(step.change.moved_bytes for step in rows)),
        )
    out.print(table)
    listed = steps if show_all else steps[:SHOWN]
    for step in listed:
        where = f" in {', '.join(part or '(model)' for part in step.modules[:2])}" if step.modules else ""
        why = "" if step.applied and step.why == CERTAIN else f": {step.why}"
        t.indented(out, t.printable(f"{step.name}, {step.count}x: {step.what}{where}{why}"), 2)
    if len(steps) > len(listed):
        t.indented(out, f"and {len(steps) - len(listed)} more (--all-rows)", 2)


def signed_seconds(value_s: float) -> str:
    """A gain with its sign.

    >>> signed_seconds(2e-5), signed_seconds(-0.001), signed_seconds(0.0)
    ('20 us', '-1 ms', '0 s')
    """
    return f"-{t.seconds(-value_s)}" if value_s < 0 else t.seconds(value_s)


def signed_memory(value_bytes: float) -> str:
    """Change of bytes with its sign.

    >>> signed_memory(-(2.0**21))
    '-2 MiB'
    """
    return f"-{t.memory(-value_bytes)}" if value_bytes < 0 else t.memory(value_bytes)


def _search_lines(found: Searched | None) -> list[str]:
    """Lines on a search: graphs priced, reason of the end, cost."""
    if found is None:
        return []
    best = found.found
    searched = f"search {found.options.search}: {best.graphs:,} graphs priced; {best.stop}"
    if found.broken:  # its cost counts what it is above the limits
        return [searched, "no graph was found that keeps the limits"]
    proof = "" if best.bound is None else "; proved the least that the moves reach"
    return [searched, f"cost {found.start:.4g} to {best.cost:.4g}{proof}"]


def _lines(found: Rewriting) -> list[str]:
    lines = []
    for row in found.repeats():
        word = "read by nobody" if row["dead"] else "computed before"
        lines.append(f"saved by the graph: {row['operator']}, {row['calls']}x {word}, {t.seconds(row['gain_s'])}")
    opaque = found.opaque()
    if opaque:
        named = [
            f"{row['operator']} ({row['calls']}x, {t.percent(row['share_of_time'])} of the time)" for row in opaque
        ]
        lines.append(f"opaque, never touched: {', '.join(named)}")
    if any(step.applied and step.fuses for step in found.steps):
        lines.append("fused chains need a compiler: torch.compile, or a runtime that fuses")
    if found.graph_refused:
        lines.append(f"no CUDA graph: {found.graph_refused}")
    if found.measured:
        a, b = found.measured["before_s"], found.measured["after_s"]
        lines.append(f"measured here, one CPU thread: {t.seconds(a)} before, {t.seconds(b)} after ({a / b:.2f}x)")
    if found.checked is not None:
        narrow = "" if found.checked.fp32 is None else f", {found.checked.fp32:.0e} in fp32"
        lines.append(f"checked on {found.checked.seeds} random inputs: {found.checked.fp64:.0e} in fp64{narrow}")
    return lines + [f"note: {note}" for note in found.notes]


def print_passes(*, mutants: bool = False) -> None:
    """List every pass with its condition and source, or only the mutants of partial equality."""
    out = t.console()
    for row in added(MUTANTS) if mutants else MOVES:
        out.print(t.printable(row.name), style="bold")
        for name, text in (
            ("matches", row.matches),
            ("when", f"{row.condition} ({', '.join(row.modes)}{'' if row in PASSES else '; searches only'})"),
            ("makes", row.makes),
            ("source", row.source),
        ):
            t.indented(out, t.printable(f"{name}: {text}"), 2)


def passes_json(*, mutants: bool = False) -> list[dict[str, Any]]:
    """Every pass as plain values, or every mutant."""
    fields = ("name", "matches", "condition", "makes", "source", "modes", "tidy", "reorders", "fuses", "only_cuda")
    rows = added(MUTANTS) if mutants else MOVES
    return [{name: getattr(row, name) for name in fields} | {"searches_only": row not in PASSES} for row in rows]
