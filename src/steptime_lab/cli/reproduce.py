"""``steptime reproduce``: published against computed figures, and the changes by each corrected defect."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final

from steptime.cli import options as o
from steptime.cli.parser import flag, positional

if TYPE_CHECKING:
    from steptime_lab.published.check import Change, Check, Point, Ratio

EXIT_DIFFERS: Final = 1
#: Relative error above which a figure counts as different.
TOLERANCE: Final = 1e-9
MISMATCHES = 5
"""Largest number of mismatches of a check that are printed."""


class Study(StrEnum):
    """Figures to reproduce."""

    CORRECTIONS = "corrections"
    LIMITS = "limits"
    PUBLISHED = "published"


def command(
    what: Annotated[
        Study,
        positional(
            help="corrections: what each fix changes; published: check against the paper's figures; limits: figures of "
            "the data-movement limits."
        ),
    ] = Study.CORRECTIONS,
    markdown: Annotated[bool, flag("--markdown", help="Print the table of corrections as Markdown.")] = False,
    json: o.Json = False,
) -> int:
    """Reproduce the performance model of arXiv 2410.00273, or list what its corrected defects change.

    ``published`` needs the figures of the paper's code; exits with 1 when one differs. ``limits`` compares the figures
    of arXiv 2411.01137 with the formulas.
    """
    if what is Study.PUBLISHED:
        return _published(json)
    if what is Study.LIMITS:
        _limits(json)
    else:
        _corrections(markdown, json)
    return 0


def _corrections(markdown: bool, json: bool) -> None:
    from steptime.cli.output import Progress
    from steptime_lab.published.check import corrections

    with Progress("searches") as progress:
        feasible, changes = corrections(progress)
    if json:
        from steptime.cli.output import document, print_json

        print_json(document(feasible_points=feasible, source="arXiv 2410.00273", changes=changes))
    elif markdown:
        print("\n".join(markdown_lines(feasible, changes)))
    else:
        _print_corrections(feasible, changes)


def table_rows(changes: Sequence[Change]) -> list[list[str]]:
    """Head and rows of the table."""
    from steptime_lab.published.check import MODELS

    head = ["switch turned off", "other best plan", "now fits", "no longer fits", *(f"{m} throughput" for m in MODELS)]
    rows = [
        [
            change.name,
            f"{change.plans}",
            f"{len(change.gained)}",
            f"{len(change.lost)}",
            *(ratio_text(change.ratios.get(model)) for model in MODELS),
        ]
        for change in changes
    ]
    return [head, *rows]


def ratio_text(ratio: Ratio | None) -> str:
    """Least, median and greatest ratio, and the number of points where it is not 1."""
    if ratio is None:
        return "same"
    return f"{percent(ratio.least)} / {percent(ratio.median)} / {percent(ratio.greatest)} at {ratio.points}"


def percent(ratio: float) -> str:
    """A ratio as a change.

    >>> percent(0.55), percent(1.0000025), percent(1.0000000025)
    ('-45 %', '+0.00025 %', '0 %')
    """
    if abs(ratio - 1) < 1e-7:
        return "0 %"
    return f"{100 * (ratio - 1):+.2g} %" if abs(ratio - 1) < 1 else f"{100 * (ratio - 1):+.0f} %"


def _intro(feasible: int) -> str:
    from steptime_lab.published import check

    total = len(check.MODELS) * len(check.STRATEGIES) * len(check.DEVICES) * len(check.FAST_DOMAINS) * len(check.GPUS)
    return (
        f"{feasible} of {total} points are feasible in the published model; each row turns one switch off. Throughput "
        "is that of the best plan after the fix against that before it: least, median and greatest change, and the "
        "number of points where it differs at all."
    )


def point_lines(points: Iterable[Point]) -> list[str]:
    """One line per model, strategy and device, with the numbers of devices by the size of the fast domain."""
    groups: dict[tuple[str, str, str], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for p in points:
        groups[p.model, p.strategy, p.device][p.fast_domain].append(p.gpus)
    return [f"{model} {strategy} on {device}: {_spans(by)}" for (model, strategy, device), by in groups.items()]


def _spans(gpus: Mapping[int, Sequence[int]]) -> str:
    """Numbers of devices by fast domain in words, such as ``16 to 64 GPUs in fast domains of 4, 8``."""
    same: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for domain, numbers in gpus.items():
        same[tuple(numbers)].append(f"{domain}")
    return "; ".join(
        f"{n[0]}{f' to {n[-1]}' if len(n) > 1 else ''} GPUs in fast domains of {', '.join(d)}" for n, d in same.items()
    )


def markdown_lines(feasible: int, changes: Sequence[Change]) -> list[str]:
    """The table as a Markdown page."""
    head, *rows = table_rows(changes)
    lines = ["# What each corrected defect changes", "", "Printed by `steptime reproduce corrections --markdown`.", ""]
    lines += [_intro(feasible), "", f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    lines += [f"| {' | '.join([f'`{row[0]}`', *row[1:]])} |" for row in rows]
    shown: dict[tuple[Point, ...], str] = {}
    for change in changes:
        for title, points in (("now fits", change.gained), ("no longer fits", change.lost)):
            if points in shown:
                lines += ["", f"`{change.name}`: {title} what `{shown[points]}` shows."]
            elif points:
                shown[points] = change.name
                lines += ["", f"`{change.name}`: {title}", "", *(f"- {line}" for line in point_lines(points))]
    return lines


def _print_corrections(feasible: int, changes: Sequence[Change]) -> None:
    from steptime.report.text import console, grid, heading

    out = console()
    out.print(_intro(feasible))
    out.print()
    points = grid(["switch turned off", "other plan", "now fits", "lost", "what the fix does"], left=(0, 4))
    points.columns[0].no_wrap = True
    for change in changes:
        points.add_row(change.name, f"{change.plans}", f"{len(change.gained)}", f"{len(change.lost)}", change.fix)
    out.print(points)
    heading(out, "Throughput of the best plan, where it differs")
    speed = grid(["switch turned off", "model", "points", "least", "median", "greatest"], left=(0, 1))
    speed.columns[0].no_wrap = True
    for change in changes:
        for model, ratio in change.ratios.items():
            shares = (percent(r) for r in (ratio.least, ratio.median, ratio.greatest))
            speed.add_row(change.name, model, f"{ratio.points}", *shares)
    out.print(speed)


def _published(json: bool) -> int:
    from steptime.cli.output import Progress
    from steptime_lab.published.check import check_all

    with Progress("figures") as progress:
        checks = check_all(progress)
    if json:
        from steptime.cli.output import document, print_json

        print_json(document(source="arXiv 2410.00273", checks=[_record(check) for check in checks]))
    else:
        _print_checks(checks)
    return EXIT_DIFFERS if any(differs(check) for check in checks) else 0


def differs(check: Check) -> bool:
    """Whether a figure is off by more than the tolerance, a mismatch was found, or nothing was compared."""
    return bool(check.mismatches) or not check.worst <= TOLERANCE or not check.figures


def _record(check: Check) -> dict[str, Any]:
    return {
        "name": check.name,
        "cases": check.cases,
        "figures": check.figures,
        "worst_relative_error": check.worst,
        "where": check.where,
        "mismatches": check.mismatches,
        "agrees": not differs(check),
    }


def _print_checks(checks: Sequence[Check]) -> None:
    from steptime.report.text import console, grid

    table = grid(["compared", "cases", "figures", "worst relative error", "other differences", ""])
    for check in checks:
        verdict = "differs" if differs(check) else "agrees"
        table.add_row(
            check.name,
            f"{check.cases:,}",
            f"{check.figures:,}",
            f"{check.worst:.1e}",
            f"{len(check.mismatches)}",
            verdict,
        )
    out = console()
    out.print(table)
    for check in checks:
        for line in check.mismatches[:MISMATCHES]:
            out.print(f"  {line}", highlight=False, markup=False)
        if len(check.mismatches) > MISMATCHES:
            out.print(f"  and {len(check.mismatches) - MISMATCHES} more (--json)", highlight=False, markup=False)


def _limits(json: bool) -> None:
    from steptime_lab.limits import figures, product_times

    stated, products = figures(), product_times()
    if json:
        from dataclasses import asdict

        from steptime.cli.output import document, print_json

        found = [asdict(figure) | {"error": figure.error} for figure in stated]
        print_json(document(source="arXiv 2411.01137", figures=found, products=[asdict(each) for each in products]))
        return
    from steptime_lab.cli.limits import print_figures

    print_figures(stated, products)
