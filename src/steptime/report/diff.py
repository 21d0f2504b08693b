"""The report of a comparison: headline, plan, then the terms that changed most."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from steptime.report import text as t

if TYPE_CHECKING:
    from rich.console import Console

SHOWN_TERMS: Final = 15
DASH: Final = "-"
#: Relative difference of sums of the same times in another order.
ROUNDING: Final = 1e-12
#: What a plan records although it follows from the degrees.
_FOLLOWS: Final = ("stage_layers", "fullest_stage", "fullest_phase", "domains", "micro_batches")
#: How a headline figure is written, by how its name ends; the first that fits.
_UNITS: Final[tuple[tuple[str, Callable[[float], str]], ...]] = (
    ("per_s_per_gpu", t.count),
    ("samples_per_s", t.number),
    ("_flops", t.number),
    ("mfu", t.percent),
    ("hfu", t.percent),
    ("_bytes", t.memory),
    ("_s", t.seconds),
)


def print_difference(difference: Any, a: str, b: str, *, show_all: bool = False) -> None:
    """Write the comparison to standard output; ``a`` and ``b`` are the names of the two sides."""
    out = t.console()
    out.print(t.printable(f"A: {a}"))
    out.print(t.printable(f"B: {b}"))
    _print_plan(out, difference.plan)
    out.print()
    table = t.grid(("headline", "A", "B", "B - A", "B / A"))
    for name, pair in difference.headline.items():
        _add(table, name, pair, _unit(name))
    out.print(table)
    _print_changes(out, "time", difference.time, t.seconds, show_all=show_all)
    _print_changes(out, "memory", difference.memory, t.memory, show_all=show_all)


def _print_plan(out: Console, plan: Mapping[str, Sequence[Any]]) -> None:
    changed = {key: pair for key, pair in plan.items() if pair[0] != pair[1] and key not in _FOLLOWS}
    out.print()
    if not changed:
        out.print("job and plan are equal")
        return
    table = t.grid(("plan", "A", "B"), left=(0, 1, 2))
    for key, (left, right) in changed.items():
        table.add_row(t.printable(key), *("absent" if value is None else _cell(value) for value in (left, right)))
    out.print(table)


def _cell(value: Any, unit: Callable[[float], str] = t.number) -> str:
    """What is no number to subtract: two numbers are a range, names a set; a dash for what an estimate left open."""
    if isinstance(value, (list, tuple)):
        if all(isinstance(each, str) for each in value):
            return "+".join(value) or "none"
        return " to ".join(_cell(each, unit) for each in value)
    if value is None or value != value:
        return DASH
    return unit(value) if _is_number(value) else t.number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


def _print_changes(
    out: Console, title: str, terms: Mapping[str, Sequence[Any]], unit: Callable[[float], str], *, show_all: bool
) -> None:
    """Terms by absolute difference, largest first."""
    changes = {path: (_value(pair[0]), _value(pair[1])) for path, pair in terms.items()}
    moved = [(path, pair) for path, pair in changes.items() if _change(*pair) and not all(map(math.isnan, pair))]
    moved.sort(key=lambda item: _order(item[1][1] - item[1][0]))
    out.print()
    if not moved:
        out.print(f"no term of {title} differs")
        return
    shown = moved if show_all else moved[:SHOWN_TERMS]
    table = t.grid((title, "A", "B", "B - A", "B / A"))
    for path, pair in shown:
        _add(table, path, pair, unit)
    out.print(table)
    if len(moved) > len(shown):
        out.print(f"{len(moved) - len(shown)} smaller differences with --all")


def _change(left: float, right: float) -> float:
    """Their difference; none where they differ by rounding alone."""
    return 0.0 if math.isclose(left, right, rel_tol=ROUNDING) else right - left


def _order(difference: float) -> float:
    """Unknown differences first, then the largest."""
    return -math.inf if math.isnan(difference) else -abs(difference)


def _value(value: Any) -> float:
    return 0.0 if value is None else float(value)


def _unit(name: str) -> Callable[[float], str]:
    return next((unit for ending, unit in _UNITS if name.endswith(ending)), t.number)


def _add(table: Any, name: str, pair: Sequence[Any], unit: Callable[[float], str]) -> None:
    left, right = pair
    if not (_is_number(left) and _is_number(right)):
        table.add_row(t.printable(name), _cell(left, unit), _cell(right, unit), "", "")
        return
    delta = _change(left, right)
    sign = "+" if delta > 0 else ""
    ratio = f"{right / left:.3f}" if left and math.isfinite(right / left) else ""
    shown = f"{delta * 100:.1f} points" if unit is t.percent else unit(delta)
    table.add_row(t.printable(name), unit(left), unit(right), sign + shown, ratio)
