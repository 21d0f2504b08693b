"""Report of plans over several groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from steptime.jobs.mixed.run import STAGES, WAYS, Mixed
from steptime.report import text as t


def print_mixed(found: Mixed) -> None:
    """Print the plans, fastest first, with the work and the wait of every group."""
    out = t.console()
    out.print(t.printable(found.parties.title), style="bold")
    for plan in found.plans:
        _print_plan(out, plan)
    out.print()
    for name, time_s in found.alone.items():
        out.print(t.printable(f"{name} alone: {t.seconds(time_s)}"))
    for note in found.notes:
        out.print(t.printable(f"note: {note}"))


def _print_plan(out: Any, plan: Mapping[str, Any]) -> None:
    out.print()
    even = plan["even_step_time_s"]
    against = "even split: does not fit" if even is None else f"even split: {t.seconds(even)}"
    title = f"{plan['way']} ({WAYS[plan['way']]}): {t.seconds(plan['step_time_s'])} a step; {against}"
    out.print(t.printable(title), style="bold")
    table = t.grid(("group", "plan", "share", "busy", "waits"), left=(0, 1, 2))
    for name, own in plan["groups"].items():
        share = _runs(own["layers"]) if plan["way"] == STAGES else f"{own['sequences']} sequences"
        table.add_row(t.printable(name), _plan(plan, own), share, t.seconds(own["busy_s"]), t.seconds(own["waiting_s"]))
    out.print(table)
    link = "a message between groups" if plan["way"] == STAGES else "gradients between groups"
    out.print(t.printable(f"slower: {plan['slower']}; {link}: {t.seconds(plan['link_s'])}"))


def _plan(plan: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    stages = own["stages"] if plan["way"] == STAGES else own["pp"]
    source = plan if plan["way"] == STAGES else own
    again = "" if source["recompute"] == "none" else f" recompute={source['recompute']}"
    cp = f" cp={own['cp']}" if own.get("cp", 1) > 1 else ""
    zero = f" zero={own['zero']}" if own.get("zero") else ""
    return f"tp={own['tp']}{cp} dp={own['dp']} pp={stages} mbs={source['micro_batch']}{zero}{again}"


def _runs(layers: list[int]) -> str:
    """Layers of stages as text, with equal consecutive stages counted.

    >>> _runs([5, 6, 6, 4])
    '5, 2 x 6, 4 layers'
    """
    out: list[tuple[int, int]] = []
    for each in layers:
        if out and out[-1][1] == each:
            out[-1] = (out[-1][0] + 1, each)
        else:
            out.append((1, each))
    return ", ".join(f"{n} x {each}" if n > 1 else str(each) for n, each in out) + " layers"
