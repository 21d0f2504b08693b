"""Products in formats below 16 bits: devices that nobody measured, and frameworks that the curve was not fitted to.

    python benchmarks/bench_narrow.py            prints the tables (benchmarks/narrow.md)

A layer of a serving framework converts its activations first, in a kernel of its own; rows of other sources are of the
product alone. Frameworks differ by factors in both; the curve is fitted to the one in the middle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import numpy as np

from steptime.errors import UserError
from steptime.hardware import load_device
from steptime.hardware.profiles import load_profile, profile_names
from steptime.hardware.records import Curve, Profile
from steptime.measure.table import read_table
from steptime_lab.calibrate.gemm import FAMILY, NARROW, Truth, truths
from steptime_lab.calibrate.transfer import OTHER_IMPLEMENTATION, architecture, of_others, predict, transferred_curve
from steptime_lab.data_root import require_data

HEAD = "| curve | dtype | cells | mean % | bias % | in band % |\n|---|---|---:|---:|---:|---:|"
Cells = dict[tuple[str, str], list[tuple[float, float, float]]]


def main() -> None:
    """Prints the tables."""
    table = read_table(require_data("kernels.parquet"))
    every = [t for t in truths(table.take(np.isin(table.text("op"), list(FAMILY.ops)))) if t.dtype in NARROW]
    profiles = {n: p for n in profile_names() if (p := load_profile(n)) is not None}
    print("# Products in formats below 16 bits\n\nPrinted by `python benchmarks/bench_narrow.py`; a cell is a device")
    print("and a framework.\n\n## Devices left out\n\nCurves of other devices.")
    for name, like in (("device", lambda t: t.device.name), ("architecture", lambda t: architecture(t.device))):
        print(f"\n### {name.capitalize()} left out\n\n{HEAD}")
        print_cells(left_out(every, profiles, like))
    print(f"\n## Implementations that the curve of the product was not fitted to\n\n{HEAD}")
    print_cells(of_other_implementations(every, profiles))


def left_out(every: Iterable[Truth], profiles: Mapping[str, Profile], like: Callable[[Truth], str]) -> Cells:
    """Errors by curves of devices that are not like that of a cell."""
    records, found = {name: load_device(name) for name in profiles}, defaultdict(list)
    for truth in every:
        others = {
            name: curve for name, profile in profiles.items()
            if (curve := profile.curve("gemm", truth.dtype)) is not None and curve.kind == "fitted"
            and like(replace(truth, device=records[name])) != like(truth)
        }  # fmt: skip
        if others and "/" in truth.source:
            found["gemm", truth.dtype] += errors(truth, transferred_curve(truth.device, others, records))
    return found


def of_other_implementations(every: Iterable[Truth], profiles: Mapping[str, Profile]) -> Cells:
    """Errors by the device's own curve of the product, with the band for implementations that it does not know."""
    found: Cells = defaultdict(list)
    logs: dict[str, list[tuple[str, np.ndarray]]] = defaultdict(list)
    for truth in every:
        profile = profiles.get(truth.device.name)
        curve = None if profile is None else profile.curve("gemm", truth.dtype, truth.timer)
        if curve is None or curve.source == truth.source:
            continue
        cell = errors(truth, replace(curve, band=of_others(curve)))
        found["gemm", truth.dtype] += cell
        if cell:
            seconds = FAMILY.predict(truth.shape, truth.arguments, curve.coefficients)
            logs[truth.dtype].append((truth.device.name, np.log(truth.measured_s / seconds)))
    for dtype, parts in logs.items():
        low, high = pooled([log for _, log in parts])
        print(f"<!-- {dtype}: pooled {low:+.2f} to {high:+.2f}, in use {OTHER_IMPLEMENTATION[dtype]} -->")
    return found


def pooled(parts: list[np.ndarray]) -> tuple[float, float]:
    """5th and 95th percentile of several samples, each with the weight of at most 200 shapes."""
    values = np.concatenate(parts)
    weights = np.concatenate([np.full(len(p), min(len(p), 200) / len(p)) for p in parts])
    order = np.argsort(values)
    shares = np.cumsum(weights[order]) / weights.sum()
    low, high = (float(values[order][np.searchsorted(shares, q)]) for q in (0.05, 0.95))
    return low, high


def errors(truth: Truth, curve: Curve) -> list[tuple[float, float, float]]:
    """Mean magnitude and mean of the relative error, and the share in the band; nothing without a peak of the dtype."""
    try:
        made = predict(FAMILY, curve, truth.device, truth.shape)
    except UserError:
        return []
    relative = np.asarray(made.seconds) / truth.measured_s - 1
    inside = (made.low_s <= truth.measured_s) & (truth.measured_s <= made.high_s)
    return [(float(np.mean(np.abs(relative))), float(np.mean(relative)), float(np.mean(inside)))]


def print_cells(found: Cells) -> None:
    """One line for each curve and dtype: means over its cells."""
    for (family, dtype), cells in sorted(found.items()):
        mean, bias, inside = 100 * np.mean(cells, axis=0)
        print(f"| {family} | {dtype} | {len(cells)} | {mean:.1f} | {bias:+.1f} | {inside:.0f} |")


if __name__ == "__main__":
    main()
