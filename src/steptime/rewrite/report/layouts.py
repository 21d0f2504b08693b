"""The report of layouts: layouts by module, inserted and removed copies, and the gain."""

from __future__ import annotations

from collections import Counter
from typing import Any

from steptime.report import text as t
from steptime.rewrite.layout.laid import Laid


def print_layouts(out: Any, laid: Laid) -> None:
    """Write the section to a console.

    Args:
        out: the console.
        laid: a graph in its layouts, at costs in seconds.
    """
    t.heading(out, "layouts")
    line = f"{t.seconds(laid.fixed)} as recorded, {t.seconds(laid.cost)} in the best layouts"
    proved = "proved" if laid.gap < 1e-6 else f"gap {t.percent(laid.gap)}"
    t.indented(out, f"{line} ({proved}), copies inside operators included", 2)
    by_names: dict[str, list[str]] = {}
    for module, names in laid.layouts.items():
        text = ", ".join(f"{count} {name}" for name, count in sorted(names.items()))
        by_names.setdefault(text, []).append(module or "(model)")
    for text, modules in by_names.items():
        t.indented(out, t.printable(f"{text}: {', '.join(modules)}"), 2)
    for line in copy_lines(laid):
        t.indented(out, t.printable(line), 2)


def copy_lines(laid: Laid) -> list[str]:
    """Lines on copies that are inserted, made by operators, made before the run, and removed."""
    lines = []
    rows = Counter((each.by, each.of, str(each.type), each.layout, each.module) for each in laid.copies())
    cost = {(each.by, each.of, str(each.type), each.layout, each.module): each.cost for each in laid.copies()}
    for key, count in rows.items():
        by, of, type, layout, module = key
        how = f"by {by} itself" if by else "put in"
        lines.append(
            f"copy {how}, {count}x: {type} of {of} to {layout}, {t.seconds(cost[key])} in {module or '(model)'}"
        )
    stored = Counter(each.layout for each in laid.conversions if each.constant)
    if stored:
        lines.append(f"weights stored otherwise: {', '.join(f'{n} {name}' for name, n in stored.items())}")
    if laid.removed:
        where = ", ".join(f"{n} in {module or '(model)'}" for module, n in laid.removed.items())
        lines.append(f"copies left out: {where}")
    return lines or ["no value moves"]
