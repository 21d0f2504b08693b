"""Report of fitted frameworks: every parameter with its doubt."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from steptime.plan.framework import PARAMETERS, SHARES
from steptime.surface.report.text import console, grid, heading, percent, printable

if TYPE_CHECKING:
    from rich.console import Console

WIDE: Final = 3
"""Frameworks beside each other."""


def print_frameworks(result: Mapping[str, Any], target: str) -> None:
    """Counts, bands, parameters of frameworks, factors of devices."""
    screen = console()
    screen.print(f"Fitted to {result['used']} runs of {result['sources']} sources; {result['rows']} rows were given "
                 f"({result['runs'] - result['used']} support no claim or have no time)", soft_wrap=True)  # fmt: skip
    heading(screen, "Parameters, with one standard deviation")
    columns = {"common": result["common"]}
    columns |= {f"{name} ({own['runs']})": own["parameters"] for name, own in result["frameworks"].items()}
    names = list(columns)
    for start in range(0, len(names), WIDE):
        _parameters(screen, {name: columns[name] for name in names[start : start + WIDE]})
    _devices(screen, result["devices"])
    _bands(screen, result["bands"])
    screen.print(printable(f"\nWritten to {target}"), soft_wrap=True)


def _parameters(screen: Console, columns: Mapping[str, Any]) -> None:
    table = grid(("", *map(printable, columns)))
    for name in PARAMETERS:
        table.add_row(name, *(_value(name, **own[name]) for own in columns.values()))
    screen.print(table)
    screen.print()


def _value(name: str, *, value: float, doubt: float) -> str:
    """A value with its standard deviation: in percent, as a factor where it is large, of a share absolute.

    >>> _value("matrix", value=1.2, doubt=0.1), _value("data_exposed", value=0.5, doubt=0.4)
    ('1.2 ±10 %', '0.5 ±0.1')
    """
    if name in SHARES:
        return f"{value:.2g} ±{value * (1 - value) * doubt:.1g}"
    return f"{value:.3g} ±{math.expm1(doubt) * 100:.0f} %" if doubt < 1 else f"{value:.3g} x/÷{math.exp(doubt):.2g}"


def _devices(screen: Console, devices: Mapping[str, Any]) -> None:
    heading(screen, "Factors of devices")
    table = grid(("", "runs", "matrix", "attention", "doubt"))
    for name, own in devices.items():
        table.add_row(name, str(own["runs"]), f"{own['matrix']:.3f}", f"{own['attention']:.3f}", f"{own['doubt']:.3f}")
    screen.print(table)


def _bands(screen: Console, bands: Mapping[str, Any]) -> None:
    heading(screen, "Bands, in standard deviations of the logarithm of time")
    for name, band in bands.items():
        text = "too few sources or runs for a band of their own; kept from the frameworks in use"
        if band["own"]:
            text = f"{percent(band['coverage90'])} of the runs of sources that it has not seen lie inside"
        word = "framework named" if name == "named" else "framework not named"
        screen.print(f"{word}: {band['low']:.2f} to {band['high']:+.2f}: {text}", soft_wrap=True)
