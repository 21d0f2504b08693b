"""Options of ``steptime rewrite`` that belong to a search, and its progress on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from steptime.errors import UserError

if TYPE_CHECKING:
    from steptime.rewrite.search.control import Report
    from steptime.rewrite.search.run import Options

QUIET_S: Final = 5.0
"""Seconds before the first line of progress, and between lines."""


def options_of(
    search: str | None,
    alpha: float,
    budget: int,
    weights: str | None,
    limits: list[str],
    limit_s: float | None,
    rules: str | None = None,
) -> Options | None:
    """Options of a search; None: no search was asked for.

    Raises:
        UserError: an option of a search is given without ``--search``, or a text is not a number.
    """
    if search is None:
        if weights is not None or limits or limit_s is not None or rules:
            raise UserError(
                "--weights, --limit, --rules and --search-seconds are of a search", hint="add --search recommended"
            )
        return None
    from steptime.rewrite.search.run import Options

    named = _numbers("--weights", (weights or "").split(",") if weights else ())
    return Options(
        search=search,
        alpha=alpha,
        budget=budget,
        weights=named,
        limits=_numbers("--limit", limits),
        limit_s=limit_s,
        rules=rules or "",
        report=progress(),
    )


def _numbers(option: str, given: Iterable[str]) -> dict[str, float]:
    """Parse ``name=number`` pairs."""
    out = {}
    for text in given:
        name, _, value = text.strip().partition("=")
        try:
            out[name.strip()] = float(value)
        except ValueError:
            raise UserError(f"{option} {text!r} is no NAME=NUMBER", hint="peak_bytes=2e9") from None
    return out


def progress() -> Report:
    """A progress report that writes a line every few seconds."""
    last = time.monotonic()

    def report(what: str, graphs: int, cost: float) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= QUIET_S:
            last = now
            print(f"{what}: {graphs:,} graphs priced, best cost {cost:.4g} (Ctrl-C takes it)", file=sys.stderr)

    return report
