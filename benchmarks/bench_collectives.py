"""Errors of the collective models on measurements: sizes held out, group sizes held out, bands, other sets.

python benchmarks/bench_collectives.py [NAME ...]          prints the tables, of all machines or of these
python benchmarks/bench_collectives.py --fit [NAME ...]    also writes the fitted profiles into the catalogue
python benchmarks/bench_collectives.py --fit --write       also writes benchmarks/collectives.md
"""

from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

import sys  # noqa: E402
from pathlib import Path  # noqa: E402

import numpy as np  # noqa: E402

from steptime.cost.collective_algorithms import fabric_of  # noqa: E402
from steptime.hardware.profiles import FABRIC_FOLDER, load_fabric_profiles, save_fabric_profile  # noqa: E402
from steptime.hardware.search_path import CATALOGUE  # noqa: E402
from steptime.measure.table import Table, read_table  # noqa: E402
from steptime.num import Array  # noqa: E402
from steptime_lab.calibrate import expert_exchange as exchange  # noqa: E402
from steptime_lab.calibrate.collective_fit import (  # noqa: E402
    fit,
    predict,
    undetermined,
)
from steptime_lab.calibrate.collective_machines import (  # noqa: E402
    MACHINES,
    Machine,
    Rows,
)
from steptime_lab.calibrate.collectives import (  # noqa: E402
    MOST_ROWS,
    calibrate,
    cross_validated,
    libraries,
    machine_rows,
    predict_rows,
)
from steptime_lab.data_root import require_data  # noqa: E402

Line = tuple[str, ...]
FABRICS = CATALOGUE / FABRIC_FOLDER
EXCHANGE_HEAD = (
    "device", "rows", "tokens: median %", "mean %", "bias %", "experts: median %", "hidden size: median %",
    "ranks: median %",
)  # fmt: skip


def figures(predicted: Array, measured: Array) -> Line:
    """Median, mean and bias in percent."""
    error = predicted / measured - 1
    error = error[np.isfinite(error)]
    if not len(error):
        return "-", "-", "-"
    return tuple(f"{100 * x:.1f}" for x in (np.median(np.abs(error)), np.mean(np.abs(error)), np.mean(error)))


def coverage(predicted: Array, rows: Rows) -> Line:
    """Band of measured / predicted from three folds, and its coverage on the fourth."""
    ratio, fold = rows.measured_s / predicted, rows.folds(4)
    low, high = np.nanpercentile(ratio, [5, 95])
    inside = np.zeros(len(ratio), bool)
    for number in range(4):
        own = fold == number
        if own.any() and not own.all():
            bottom, top = np.nanpercentile(ratio[~own], [5, 95])
            inside[own] = (ratio[own] >= bottom) & (ratio[own] <= top)
    return f"{low:.2f} to {high:.2f}", f"{100 * inside.mean():.0f}"


def repeats(rows: Rows) -> str:
    """Median distance of a row from the median of its repetitions (other versions, 8-bit apart), in percent."""
    middle = rows.merged()
    tags = [list(zip(r.kind, r.ranks, r.inside, r.size_bytes, r.element_bytes, strict=True)) for r in (middle, rows)]
    time = dict(zip(tags[0], middle.measured_s, strict=True))
    return figures(np.array([time[tag] for tag in tags[1]]), rows.measured_s)[0]


def held_out_groups(machine: Machine, rows: Rows) -> str:
    """Median error of each group size when the fit did not see it; of kinds that no other group has, apart."""
    out = []
    groups = sorted(set(rows.ranks))
    for size in groups if len(groups) > 1 and not machine.library.startswith("custom") else []:
        own = rows.ranks == size
        seen, unseen = rows.take(~own), rows.take(own)
        time = predict(fabric_of(fit(machine, seen.merged().thinned(MOST_ROWS), starts=1)), unseen)
        known = np.isin(unseen.kind, list(set(seen.kind)))
        text = f"{size:.0f}: {figures(time[known], unseen.measured_s[known])[0]}"
        if not known.all():
            text += f" (other kinds {figures(time[~known], unseen.measured_s[~known])[0]})"
        out.append(text + ("*" if set(undetermined(machine, seen)) - set(undetermined(machine, rows)) else ""))
    return ", ".join(out)


def exchange_lines(table: Table, names: list[str], save: bool) -> list[Line]:
    """One line per device: dispatch and combine of experts, with token counts and other sizes held out."""
    lines = []
    for device, gpu, link, domain in exchange.DEVICES:
        rows = exchange.device_rows(table, gpu)
        if (names and f"{device}-{exchange.LIBRARY}" not in names) or len(rows.way) < 12:
            continue
        processors = exchange.processors_of(device)
        parts = {"tokens": exchange.folds(rows)}
        for name, value in (("experts", rows.experts), ("hidden size", rows.row), ("ranks", rows.ranks)):
            parts[name] = np.unique(value, return_inverse=True)[1]
        time = {n: exchange.cross_validated(rows, processors, link, f) for n, f in parts.items() if len(set(f)) > 1}
        if save:
            save_fabric_profile(exchange.calibrate(device, link, domain, rows, time["tokens"]), FABRICS)
        found = {n: figures(time[n], rows.measured_s) if n in time else ("-",) * 3 for n in parts}
        lines.append((device, str(len(rows.way)), *found["tokens"], *(found[n][0] for n in list(parts)[1:])))
        print(" | ".join(lines[-1]), flush=True)
    return lines


def machine_lines(table: Table, names: list[str], save: bool) -> list[Line]:
    """One line per machine."""
    library, lines = libraries(table), []
    for machine in MACHINES:
        if names and machine.name not in names:
            continue
        _, rows = machine_rows(machine, table, library)
        if len(rows.ranks) < 12:
            continue
        time = cross_validated(machine, rows)
        if save:
            save_fabric_profile(calibrate(machine, rows, time), FABRICS)
        kinds = ", ".join(
            f"{k} {figures(time[rows.kind == k], rows.measured_s[rows.kind == k])[0]}" for k in sorted(set(rows.kind))
        )
        groups = held_out_groups(machine, rows)
        line = (
            machine.name,
            str(len(rows.ranks)),
            *figures(time, rows.measured_s),
            repeats(rows),
            *coverage(time, rows),
            kinds,
        )
        lines.append((*line, groups))
        print(" | ".join(lines[-1]), flush=True)
    return lines


def source_lines(table: Table) -> tuple[list[Line], Line]:
    """Predictions with the committed profiles by source, and how many rows are skipped."""
    predicted = predict_rows(table, load_fabric_profiles())
    measured, lines = table.number("time_us") * 1e-6, []
    for source in sorted(set(table.text("source"))):
        own = table.text("source") == source
        good = own & (predicted.reason == "") & (measured > 0)
        inside = (predicted.low_s <= measured) & (measured <= predicted.high_s)
        covered = f"{100 * inside[good].mean():.0f}" if good.any() else "-"
        reasons = sorted(set(predicted.reason[own]) - {""})
        line = (source, str(own.sum()), str(good.sum()), *figures(predicted.seconds[good], measured[good]), covered)
        lines.append((*line, "; ".join(reasons)))
    skipped = int((predicted.reason != "").sum())
    return lines, (str(table.rows), str(skipped), f"{100 * skipped / table.rows:.1f}")


def markdown(title: str, head: Line, lines: list[Line]) -> str:
    body = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"## {title}\n\n| {' | '.join(head)} |\n|{'---|' * len(head)}\n{body}\n"


def main(arguments: list[str]) -> None:
    table = read_table(require_data("collectives.parquet"))
    names = [a for a in arguments if not a.startswith("--")]
    machines = machine_lines(table, names, save="--fit" in arguments)
    exchanges = exchange_lines(table, names, save="--fit" in arguments)
    sources, (rows, skipped, share) = source_lines(table)
    head = ("machine", "rows", "median %", "mean %", "bias %", "repeats %", "band", "coverage %", "median by kind %")
    text = "\n".join(
        [
            "# Collectives: models against measurements\n",
            "Printed by `python benchmarks/bench_collectives.py --fit --write`. Errors are |predicted/measured - 1|.\n",
            markdown("Sizes held out, and groups held out", (*head, "group held out: median %"), machines),
            "Sizes held out: four folds; all rows of one size (any group, kind, dtype) are in one fold. Repeats:",
            "median distance of a row from the median of its repetitions (other versions of the library). Band:",
            "5th and 95th percentile of measured / predicted; coverage: of a band from three folds on the fourth.",
            "Group held out: all rows of that many ranks; a star marks groups where a whole level (inside a domain, or",
            "between domains) was then not measured, so that it is the prior of `collective_priors`; other kinds:",
            "kinds that no other group of the machine has.\n",
            markdown("Dispatch and combine of experts (low-latency kernels)", EXCHANGE_HEAD, exchanges),
            "Tokens: four folds of token counts; experts, hidden size, ranks: each value left out in turn (median).\n",
            markdown(
                "All rows of the table with the committed profiles",
                ("source", "rows", "scored", "median %", "mean %", "bias %", "in band %", "why skipped"),
                sources,
            ),
            f"{skipped} of {rows} rows ({share} %) are skipped. Rows of fitted machines are seen rows here.\n",
        ]
    )
    print(text)
    if "--write" in arguments:
        Path(__file__).with_name("collectives.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
