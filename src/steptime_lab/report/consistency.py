"""Report of modes of consistency: throughput, staleness, servers, failures, and the bounds of theory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steptime.errors import counted
from steptime.report import text as t
from steptime.units import format_bytes, format_si

if TYPE_CHECKING:
    from steptime_lab.replicas.updates import Consistency, ModeRun


def print_consistency(found: Consistency) -> None:
    """Write the report to standard output."""
    out = t.console()
    size = f"{counted(found.workers, 'worker')} of {counted(found.devices_per_worker, 'device')}"
    title = f"{found.model} on {found.cluster}: {size}, {counted(found.servers.count, 'parameter server')}"
    out.print(t.printable(title), style="bold")
    slow = f", {counted(found.slow_workers, 'worker')} {found.slow:g} times as slow" if found.slow_workers else ""
    lines = (
        f"step of the estimate {t.seconds(found.step_s)}: computing {t.seconds(found.compute_s)}, exposed "
        f"all-reduce {t.seconds(found.exchange_s)}",
        f"played: {counted(found.clocks, 'clock')}, jitter {t.percent(found.jitter)}{slow}, seed {found.seed}",
    )
    for line in lines:
        t.indented(out, line, by=0)
    out.print()
    table = t.grid(("mode", "samples/s", "updates/s", "compute", "exchange", "wait"))
    for one in found.modes:
        shares = (t.percent(part) for part in (one.compute_share, one.exchange_share, one.wait_share))
        table.add_row(mode_text(one), f"{one.samples_per_s:.4g}", f"{one.updates_per_s:.4g}", *shares)
    out.print(table)
    _print_servers(out, found)
    _print_staleness(out, found)
    if any(one.failures for one in found.modes):
        _print_failures(out, found)
    for note in found.notes:
        t.indented(out, f"note: {note}", by=0)


def mode_text(one: ModeRun) -> str:
    """Short name of a mode.

    >>> from types import SimpleNamespace
    >>> mode_text(SimpleNamespace(mode="ssp", bound=3)), mode_text(SimpleNamespace(mode="asp", bound=None))
    ('ssp s=3', 'asp')
    """
    return f"ssp s={one.bound}" if one.mode == "ssp" else one.mode


def _print_servers(out: Any, found: Consistency) -> None:
    s = found.servers
    t.heading(out, "Servers")
    shards = "equal bytes" if s.sharding == "even" else "whole tensors"
    slower = (
        f"their links are the bottleneck; {counted(s.enough, 'server')} with equal bytes would be enough"
        if s.bottleneck == "servers"
        else "the workers' links are the limit"
    )
    lines = (
        f"{shards}, {t.percent(s.largest_share)} on the fullest, which receives {format_bytes(s.received_bytes)} in a "
        f"clock over {format_si(s.server_Bps, 'B/s')}",
        f"a push of all workers at once takes {t.seconds(s.push_s)}, a pull {t.seconds(s.pull_s)}; a worker's own link "
        f"{t.seconds(s.worker_link_s)}: {slower}",
    )
    for line in lines:
        t.indented(out, line, by=0)


def _print_staleness(out: Any, found: Consistency) -> None:
    """Print the staleness of parameters, and their distance from the true ones on the small convex problem."""
    t.heading(out, "Staleness: clocks that pulls lack, other gradients before a push")
    table = t.grid(("mode", "none lacking", "mean", "most", "gradients"))
    for one in found.modes:
        row = (t.percent(one.behind[0]), f"{one.mean_behind:.2f}", f"{one.most_behind}", f"{one.mean_delay:.1f}")
        table.add_row(mode_text(one), *row)
    out.print(table)
    updates = found.modes[0].descent.updates
    t.heading(out, f"Stale against true parameters, small convex problem, {counted(updates, 'update')}")
    table = t.grid(("mode", "distance", "bound", "excess loss", "bound"))
    for one in found.modes:
        d = one.descent
        bounds = ("none" if bound is None else f"{bound:.4f}" for bound in (d.difference_bound, d.regret_bound))
        distance, regret = bounds
        table.add_row(mode_text(one), f"{d.mean_difference:.4f}", distance, f"{d.regret:.4f}", regret)
    out.print(table)


def _print_failures(out: Any, found: Consistency) -> None:
    for first in found.mode("asp").failures:
        t.heading(out, f"A {first.what} fails at {t.seconds(first.at_s)}")
        table = t.grid(("mode", "stands still", "gradients lost", "time lost"))
        for one in found.modes:
            effect = next((e for e in one.failures if (e.what, e.at_s) == (first.what, first.at_s)), None)
            if effect is None:  # an all-reduce has no server that could fail
                table.add_row(mode_text(one), "has no server", "", "")
                continue
            still = t.seconds(effect.stands_still_s) if effect.stops else "no"
            table.add_row(mode_text(one), still, t.count(effect.lost_gradients), t.seconds(max(effect.lost_s, 0.0)))
        out.print(table)
