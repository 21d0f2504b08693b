"""Report of goodput, energy and money of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from steptime.report import text as t
from steptime.units import format_seconds, format_si

if TYPE_CHECKING:
    from rich.console import Console

    from steptime.estimate.result import Estimate

#: Most causes of losses to show.
SHOWN = 4
#: Least share of the run for a loss to be shown.
LEAST = 1e-4
#: Field -> description.
_WORDS = {
    "kind": "kind of checkpoint",
    "node_Bps": "bandwidth of a node to the store",
    "store_Bps": "bandwidth of the store",
    "restart_s": "time of a restart",
    "spares": "number of spares",
    "repair_s": "time of a repair",
    "replaced": "share of nodes replaced",
    "stall_s": "stall of a checkpoint",
    "lost_copies": "copies lost",
}


def print_run(out: Console, e: Estimate) -> None:
    """Print time, energy and money of a whole run, one line per number."""
    rows: list[tuple[str, str]] = []
    if "goodput" in e.run:
        rows += goodput_rows(e.run["goodput"])
    if "energy" in e.run:
        rows += energy_rows(e.run["energy"]) + money_rows(e.run["money"])
    t.heading(out, "the whole run")
    for name, value in rows:
        out.print(t.printable(f"{name:<16}{value}"), soft_wrap=False)


def goodput_rows(run: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Rows of the expected time of the run, and its losses."""
    low, high = run["wall_band_days"]
    few, many = run["failures_band"]
    causes = [(name, lost) for name, lost in run["losses_s"].items() if lost > LEAST * run["wall_s"]][:SHOWN]
    by = run["intervals_s"]
    words = ", ".join(f"{name} {format_seconds(value, 3)}" for name, value in by.items())
    effective = " .. ".join(map(t.percent, run["effective_band"]))
    out = [
        ("done in", f"{t.days(run['wall_days'])} days (90 %: {t.days(low)} .. {t.days(high)})"),
        ("effective", f"{t.percent(run['effective_ratio'])} of it trains (90 %: {effective})"),
        ("failures", f"{run['failures']:.3g} (90 %: {few:.0f} .. {many:.0f}), every {_time(run['mtbf_s'])}"),
        ("checkpoint", f"{run['kind']}, {run['saved_bytes'] / 1e12:.3g} TB, stored in {_time(run['write_s'])}"),
        ("saved after", f"{_time(run['interval_s'])} of work, a stall of {_time(run['stall_s'])} (best: {words})"),
        ("restart", f"{_time(run['restart_s'])}, {run['spares']} spare nodes"),
        ("losses", ", ".join(f"{name} {_time(value)}" for name, value in causes) or "none"),
        ("rates", run["source"]),
    ]
    assumed = ", ".join(_WORDS.get(name, name) for name in run["assumed"])
    return [*out, *([("assumed", assumed)] if assumed else [])]


def energy_rows(energy: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Rows of power and energy."""
    low, high = energy["device_band_W"]
    kWh = energy["kWh"]
    band = "" if energy["kWh_band"] is None else f" ({' .. '.join(map(_Wh, energy['kWh_band']))})"
    return [
        ("power", f"{energy['device_W']:.0f} W a device ({low:.0f} .. {high:.0f}) of {energy['tdp_W']:.0f} W"),
        ("energy", f"{_Wh(kWh)}{band}, {_Wh(energy['step_kWh'])} a step, PUE {energy['pue']:g}"),
        ("carbon", f"{t.count(energy['carbon_kg'] / 1e3)} t of CO2"),
        ("assumed", ", ".join(energy["assumed"])),
    ]


def _Wh(kWh: float) -> str:
    """Energy with a prefix.

    >>> _Wh(6.346e6)
    '6.35 GWh'
    """
    return format_si(kWh * 1e3, "Wh")


def money_rows(money: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Rows of money."""
    coin = money["currency"]
    band = "" if money["band"] is None else f" ({t.big(money['band'][0])} .. {t.big(money['band'][1])})"
    each = [f"{t.big(money['step_cost'])} a step"]
    if "cost_per_million_tokens" in money:
        each.append(f"{t.big(money['cost_per_million_tokens'])} a million tokens")
    origin = f"{'assumed, ' if money['assumed'] else ''}{money['date']}: {money['source']}"
    return [
        ("cost", f"{t.big(money['cost'])} {coin}{band}, {', '.join(each)}"),
        ("price", f"{money['device_hour']:g} {coin} a device hour ({origin})"),
    ]


def _time(value_s: float) -> str:
    """A time in a unit that fits.

    >>> _time(28.41), _time(11135.1), _time(150.0)
    ('28.4 s', '3.09 h', '2.5 min')
    """
    return f"{value_s / 60:.3g} min" if 100.0 <= value_s < 3600.0 else format_seconds(value_s, 3)
