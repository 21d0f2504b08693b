"""Reports of fleets and of shadow prices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steptime.report import text as t
from steptime.units import format_seconds

if TYPE_CHECKING:
    from steptime.study.fleet import Fleets
    from steptime.study.shadow import Shadows


def print_fleets(found: Fleets) -> None:
    """Print the fleets, best first."""
    out = t.console()
    table = t.grid(
        ["", "devices", "plan", "done in", "effective", "MWh", f"cost, {found.currency}", "exceeds"], left=(1, 2, 7)
    )
    for n, one in enumerate(found.fleets):
        run, values = one.estimate.run, one.values
        table.add_row(
            f"{n + 1}{'*' if n in found.front else ' '}",
            f"{one.gpus} {one.cluster}",
            t.plan_label(one.estimate.plan),
            f"{t.days(run['goodput']['wall_days'])} d",
            t.percent(run["goodput"]["effective_ratio"]),
            t.count(values["energy"] / 1e3),
            t.big(values["cost"]),
            ", ".join(one.exceeds),
        )
    out.print(table)
    for name, why in found.left_out.items():
        out.print(t.printable(f"left out: {name}: {why}"))
    for line in found.advice:
        out.print(t.printable(f"advice: {line}"))
    assumed = sorted(
        {e.run["money"]["source"] for e in (one.estimate for one in found.fleets) if e.run["money"]["assumed"]}
    )
    for source in assumed:
        out.print(t.printable(f"assumed price: {source}"))


def print_shadows(found: Shadows) -> None:
    """Print shadow prices, highest worth first."""
    out = t.console()
    coin = found.currency
    out.print(t.printable(f"plan: {t.plan_label(found.plan)}"))
    out.print(f"step {t.seconds(found.step_s)}, run {format_seconds(found.run_s)}, {t.big(found.cost)} {coin}")
    for note in found.notes:
        out.print(t.printable(f"note: {note}"))
    out.print()
    table = t.grid(["one more", "of", "saves a step", "a run", coin, "holds to", "next at"], left=(0,))
    for one in found.prices:
        table.add_row(
            f"{one.unit} of {one.name}",
            f"{one.now:.5g}",
            _signed(one.worth_s),
            _signed(one.worth_run_s),
            f"{'-' if one.worth_money < 0 else ''}{t.big(abs(one.worth_money))}",
            f"{one.holds_to:.5g}",
            "" if one.next_at is None else f"{one.next_at:.5g}",
        )
    out.print(table)
    for one in found.prices:
        if one.note:
            out.print(t.printable(f"note: {one.name}: {one.note}"))


def _signed(value_s: float) -> str:
    return f"{'-' if value_s < 0 else ''}{format_seconds(abs(value_s), 3)}"
