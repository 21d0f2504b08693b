"""How far the time models of attention, memory-bound and other kernels of training are off, on shapes not seen.

Every cell (family, device, dtype, timer) is fitted three times on two thirds of its shapes and judged on the rest;
all rows of a shape are on the same side. Cells with few shapes lean on the coefficients of other devices; what is
left is predicted by those alone (column "borrowed"). Rows that no training step launches are left out.

    python benchmarks/bench_kernels.py            prints the tables
    python benchmarks/bench_kernels.py --write    also writes them to benchmarks/kernels.md
    python benchmarks/bench_kernels.py --save     also fits all curves and writes the profiles of the catalogue
    python benchmarks/bench_kernels.py --transfer writes only what follows from the profiles: transferred curves
"""

from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

import sys  # noqa: E402
from collections.abc import Iterable, Mapping  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from pathlib import Path  # noqa: E402

import numpy as np  # noqa: E402

from lacking_curves import lacking_curves  # noqa: E402
from steptime.hardware.profiles import read_profile, save_curves  # noqa: E402
from steptime.hardware.records import Curve  # noqa: E402
from steptime.measure.residuals import errors_of  # noqa: E402
from steptime.measure.table import Table, read_table  # noqa: E402
from steptime.num import Array  # noqa: E402
from steptime_lab.calibrate.family import launched  # noqa: E402
from steptime_lab.calibrate.kernel_curves import GENERIC, Cell, borrowed, generic_curves  # noqa: E402
from steptime_lab.calibrate.kernel_families import FAMILIES, all_cells, kernel_curves  # noqa: E402
from steptime_lab.data_root import require_data  # noqa: E402

FOLDS = 3
OUT = Path(__file__).parent / "kernels.md"
PROFILES = Path(__file__).parents[1] / "src" / "steptime" / "hardware" / "catalogue" / "profiles"
OPS = sorted(frozenset[str]().union(*(family.ops for family in FAMILIES)))
NORMS = ("layernorm", "softmax", "elementwise", "activation", "rope", "embedding", "dropout")


@dataclass(frozen=True, slots=True)
class Judged:
    """Predictions of the rows of a table; NaN where there is none."""

    seconds: Array
    family: Array
    device: Array
    alone: Array
    """Whether the fit had only rows of that device."""


def judge(table: Table) -> tuple[Judged, list[tuple[Cell, Array]], dict[str, list[Curve]]]:
    """Held-out predictions of all rows; the cells that were fitted, with theirs; the curves of the fits."""
    found = [cell.with_best_tile() if cell.enough else cell for cell in all_cells(table)]
    curves: dict[str, list[Curve]] = {}
    for cell in found:
        if cell.enough:
            curves.setdefault(cell.device.name, []).append(cell.curve(folds=2))
    out = Judged(*(np.full(table.rows, value, dtype=object) for value in (np.nan, "", "", True)))
    rank = {family.name: i for i, family in enumerate(FAMILIES)}
    kept = []
    for cell in sorted(found, key=lambda c: -rank[c.family.name]):
        seconds = held_out(cell, borrowed(curves, cell))
        if seconds is None:
            continue
        kept.append((cell, seconds))
        for column, value in zip(
            (out.seconds, out.family, out.device, out.alone),
            (seconds, cell.family.name, cell.device.name, cell.enough), strict=True,
        ):  # fmt: skip
            column[cell.rows] = value
    return Judged(out.seconds.astype(float), out.family, out.device, out.alone.astype(bool)), kept, curves


def held_out(cell: Cell, known: Curve | None) -> Array | None:
    """Predictions of a cell from rows of other shapes, or of other devices only."""
    if cell.enough:
        return cell.held_out(FOLDS)
    if known is None:
        return None
    return cell.near(known).held_out(FOLDS) if cell.some else cell.predict(known.coefficients)


def line(name: str, predicted: Array, measured: Array, extra: str = "") -> str:
    """One row of a table: points, median, mean, bias."""
    s = errors_of(predicted, measured)
    figures = " | ".join(f"{100 * x:.1f}" for x in (s.median_ape, s.mean_ape))
    return f"| {name} | {s.points} | {figures} | {100 * s.bias:+.1f} |{extra}"


def table_of(title: str, head: str, lines: Iterable[str], extra: str = "") -> list[str]:
    """A Markdown table with the error columns."""
    columns = head.count("|") + 5 + extra.count("|")
    rule = "|" + " --- |" * columns
    return [f"## {title}", "", f"| {head} | rows | median % | mean % | bias % |{extra}", rule, *lines, ""]


def coverage(table: Table, judged: Judged) -> list[str]:
    """Share of the rows of training that get a prediction, by operator."""
    kept, has = launched(table), np.isfinite(judged.seconds)
    mine = kept & np.isin(table.text("op"), OPS)
    measured = table.number("latency_us") * 1e-6
    lines = []
    for op in OPS:
        rows = kept & (table.text("op") == op)
        extra = f" {100 * has[rows].mean():.0f} | {100 * (~judged.alone)[rows & has].mean():.0f} |"
        lines.append(line(op, judged.seconds[rows & has], measured[rows & has], extra))
    text = [f"{100 * has[mine].mean():.1f} % of these {mine.sum()} rows get a prediction.", ""]
    return table_of("All operators", "operator", lines, " covered % | borrowed % |") + text


def by_device(kept: list[tuple[Cell, Array]], families: Iterable[str]) -> list[str]:
    """Errors of families by device and timer."""
    lines = []
    for name in families:
        for cell, seconds in kept:
            if cell.family.name == name:
                mark = "" if cell.enough else " (borrowed)"
                label = f"{name} | {cell.device.name}{mark} | {cell.dtype} | {cell.timer} | {cell.source}"
                lines.append(line(label, seconds, cell.measured_s))
    return lines


def pooled(table: Table, judged: Judged, title: str, rows_of: Mapping[str, Array]) -> list[str]:
    """Errors of groups of rows."""
    measured = table.number("latency_us") * 1e-6
    has = np.isfinite(judged.seconds)
    lines = [line(n, judged.seconds[r & has], measured[r & has]) for n, r in rows_of.items() if (r & has).any()]
    return table_of(title, "group", lines)


def summary(table: Table, judged: Judged) -> list[str]:
    """The figures asked for: attention forward by device, memory-bound operators by device and by operator."""
    op, device = table.text("op"), judged.device
    memory = np.isin(op, ("layernorm", "softmax", "elementwise"))
    eager = memory & (table.text("source") == "neusight")
    attention = {d: (op == "attention_fwd") & (device == d) for d in sorted(set(device[op == "attention_fwd"])) if d}
    operators = {f"NeuSight {n}": eager & (op == n) for n in ("elementwise", "layernorm", "softmax")}
    devices = {d: memory & (device == d) for d in sorted(set(device[memory])) if d}
    both = operators | {"NeuSight, all": eager, "all sources": memory} | devices
    return [
        *pooled(table, judged, "Attention forward, held-out shapes", attention),
        *pooled(table, judged, "Norms, softmax, maps and activations", both),
    ]


def left_out(
    kept: list[tuple[Cell, Array]], curves: dict[str, list[Curve]], names: Mapping[str, set[str]]
) -> list[str]:
    """Errors on each device by the curves of the others: medians of their coefficients, and of the most alike one."""
    lines = []
    for title, families in names.items():
        parts: dict[str, list[tuple[Array, Array, Array]]] = {}
        for cell in (c for c, _ in kept if c.family.name in families and c.enough):
            others = {d: known for d, known in curves.items() if d != cell.device.name}
            middle = {(c.family, c.dtype, c.timer): c for c in generic_curves(others)}
            key, alike = (cell.family.name, cell.dtype, cell.timer), borrowed(others, cell)
            if key in middle and alike is not None:
                row = (cell.predict(middle[key].coefficients), cell.predict(alike.coefficients), cell.measured_s)
                parts.setdefault(cell.device.name, []).append(row)
        for device, found in sorted(parts.items()):
            generic, near, measured = (np.concatenate(column) for column in zip(*found, strict=True))
            extra = f" {100 * errors_of(generic, measured).median_ape:.1f} |"
            lines.append(line(f"{title} | {device}", near, measured, extra))
    return table_of(
        "Devices left out: curve of the most alike device", "families | device", lines, " medians: median % |"
    )


def main() -> None:
    if "--transfer" in sys.argv:
        transfer_curves()
        return
    table = read_table(require_data("kernels.parquet"))
    judged, kept, curves = judge(table)
    head = "family | device | dtype | timer | source"
    names = [family.name for family in FAMILIES]
    core = [n for n in names if n.startswith(("attention", *NORMS))]
    transfer = {
        "attention forward": {"attention_fwd"},
        "memory-bound": {n for n in core if not n.startswith("attention")},
    }
    rest = [n for n in names if n not in core]
    text = [
        "# Time models of kernels on shapes that they did not see", "", (__doc__ or "").split("\n\n")[1], "",
        *summary(table, judged), *coverage(table, judged),
        *left_out(kept, curves, transfer),
        *table_of("Attention and memory-bound families", head, by_device(kept, core)),
        *table_of("Other families", head, by_device(kept, rest)),
    ]  # fmt: skip
    print("\n".join(text))
    if "--write" in sys.argv:
        OUT.write_text("\n".join(text) + "\n", encoding="utf-8")
    if "--save" in sys.argv:
        save(table)


def save(table: Table) -> None:
    """Fits all curves and writes them to the profiles of the catalogue."""
    for device, curves in kernel_curves(table).items():
        if device != GENERIC:
            save_curves(device, curves, PROFILES)
            print(f"{device}: {len(curves)} curves")
    transfer_curves()


def transfer_curves() -> None:
    """Writes curves for training to the profiles of devices that lack them, in place of those of an earlier time."""
    for path in sorted(PROFILES.glob("*.toml")):
        profile = read_profile(path)
        fitted = tuple(curve for curve in profile.curves if not curve.source.startswith("transferred from"))
        path.unlink()
        if fitted:
            save_curves(profile.device, fitted, PROFILES)
    for device, curves in lacking_curves():
        save_curves(device, curves, PROFILES)
        print(f"{device}: {len(curves)} transferred curves")


if __name__ == "__main__":
    main()
