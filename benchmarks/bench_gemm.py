"""How well the time model of matrix products does: curves on held-out shapes, and devices nobody measured.

    .venv/bin/python benchmarks/bench_gemm.py > benchmarks/gemm.md          # tables
    .venv/bin/python benchmarks/bench_gemm.py --save > benchmarks/gemm.md   # and the curves of the catalogue

The split is by shape (m, n, k, batch), hashed, in five folds: no shape is on both sides, whatever its dtype. The
truth for a shape is the median over repetitions and frameworks.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

import steptime.errors
import steptime.hardware
from steptime.calibrate.fitting import fit, take
from steptime.calibrate.gemm import BACKWARD, FAMILY, PRIORS, Truth, gemm_curve, preferred, truths
from steptime.calibrate.score import errors_of
from steptime.calibrate.table import Table, read_table
from steptime.calibrate.transfer import OF_THE_LIBRARY, OTHER_VENDOR, SCALED_ERROR, Z90, transferred_curve
from steptime.cost.gemm_residual import NAMES
from steptime.hardware.profile import Curve
from steptime.hardware.profiles import save_curves
from steptime.num import Array
from steptime.study.data_root import require_data

FOLDER = Path(steptime.hardware.__file__).parent / "catalogue" / "profiles"
ARCHITECTURES = {
    "p4": "Pascal GP104", "p100-pcie-16gb": "Pascal GP100", "v100-pcie-32gb": "Volta", "t4": "Turing",
    "a100-pcie-40gb": "Ampere", "a100-pcie-80gb": "Ampere", "a100-sxm-80gb": "Ampere", "h100-sxm": "Hopper",
    "h200-sxm": "Hopper", "b200-sxm": "Blackwell", "b300-sxm": "Blackwell", "gb300": "Blackwell", "l4": "Ada",
    "l40s": "Ada", "mi100": "CDNA", "mi210": "CDNA 2", "rtx-pro-6000": "Blackwell RTX", "arc-b60": "Xe2",
}  # fmt: skip
POWER_LIMITED = ("p4", "l4", "t4")
EXTRAPOLATED = ("a100-sxm-80gb", "h100-sxm", "h200-sxm", "b200-sxm")
BOUNDS = (
    "What bounds them: the mean error of the same curves if it were known which tiles the library has for batched "
    "products, and of the device's own curve on held-out shapes."
)
Curves = dict[tuple[str, str, str], Curve]


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", action="store_true", help="write the curves into the catalogue")
    save = parser.parse_args().save
    table = read_table(require_data("kernels.parquet"))
    every = [t for t in truths(table.take(np.isin(table.text("op"), list(FAMILY.ops)))) if known(t)]
    chosen = preferred(every)
    print("# Matrix products\n\nPrinted by `python benchmarks/bench_gemm.py`.\n")
    curves = held_out(chosen)
    extrapolated([t for t in chosen if t.dtype == "bf16" and t.device.name in EXTRAPOLATED])
    other_sources(every, chosen, curves)
    backward(table, curves)
    for title, source, dtype in (
        ("NeuSight, fp32, with launch", "neusight", "fp32"), ("aiconfigurator, bf16", "aiconfigurator_gemm", "bf16"),
    ):  # fmt: skip
        unseen(title, [t for t in every if t.source == source and t.dtype == dtype], curves)
    if save:
        for device in sorted({name for name, _, _ in curves}):
            save_curves(device, [c for key, c in curves.items() if key[0] == device], FOLDER)


def known(truth: Truth) -> bool:
    """Whether the datasheet has a peak for the dtype."""
    try:
        return bool(truth.arguments)
    except steptime.errors.UserError:
        return False


def held_out(chosen: list[Truth]) -> Curves:
    """Errors of every curve, cross-validated."""
    print("## Held-out shapes\n\nPercent; band: 5th and 95th percentile of measured / predicted.\n")
    print("| device | dtype | timer | source | shapes | roofline median | median | mean | bias | band |")
    print("|---|---|---|---|---:|---:|---:|---:|---:|---|")
    curves: Curves = {}
    for truth in chosen:
        curve = gemm_curve(truth)
        curves[truth.device.name, truth.dtype, truth.timer] = curve
        roof = errors_of(roofline_s(truth), truth.measured_s)
        print(
            f"| {truth.device.name} | {truth.dtype} | {truth.timer} | {truth.source} | {curve.points} "
            f"| {100 * roof.median_ape:.1f} | {100 * curve.median_ape:.1f} | {100 * curve.mean_ape:.1f} "
            f"| {100 * curve.bias:+.1f} | {curve.band[0]:.2f} to {curve.band[1]:.2f} |",
            flush=True,
        )
    return curves


def extrapolated(chosen: list[Truth]) -> None:
    """The largest and the smallest tenth of the shapes, by fits that saw neither; with and without the residual."""
    print("\n## Held-out tenths: largest and smallest products\n\nMedian and mean error, percent.\n")
    print("| device | tenth | shapes | without the residual | with it |\n|---|---|---:|---:|---:|")
    for truth in chosen:
        work = truth.shape["m"] * truth.shape["n"] * truth.shape["k"]
        for name, test in (("largest", work >= np.quantile(work, 0.9)), ("smallest", work <= np.quantile(work, 0.1))):
            seen = take(truth.shape, ~test)
            values = fit(FAMILY, seen, truth.arguments, truth.measured_s[~test], priors=PRIORS)
            bare = {n: v for n, v in values.items() if n not in NAMES}
            found = [
                errors_of(FAMILY.predict(take(truth.shape, test), truth.arguments, v), truth.measured_s[test])
                for v in (bare, values)
            ]
            cells = " | ".join(f"{100 * s.median_ape:.1f} / {100 * s.mean_ape:.1f}" for s in found)
            print(f"| {truth.device.name} | {name} | {test.sum()} | {cells} |", flush=True)


def roofline_s(truth: Truth) -> Array:
    """Datasheet roofline, the naive alternative."""
    least: Array = np.maximum(*truth.datasheet_s)
    return least


def other_sources(every: list[Truth], chosen: list[Truth], curves: Curves) -> None:
    """Sources that no curve was fitted to, predicted by the curve of the same device and dtype."""
    print("\n## Sources that the curve was not fitted to\n")
    print("| device | dtype | source | shapes | median | mean | bias |\n|---|---|---|---:|---:|---:|---:|")
    fitted = {id(t) for t in chosen}
    for truth in every:
        curve = curves.get((truth.device.name, truth.dtype, truth.timer))
        if id(truth) in fitted or curve is None or len(truth.measured_s) < 10:
            continue
        print_row(truth, FAMILY.predict(truth.shape, truth.arguments, curve.coefficients))


def backward(table: Table, curves: Curves) -> None:
    """Both gradients, as two products."""
    for truth in truths(table.take(np.isin(table.text("op"), list(BACKWARD.ops))), BACKWARD.ops):
        curve = curves.get((truth.device.name, truth.dtype, truth.timer))
        if curve is not None:
            seconds = BACKWARD.predict(truth.shape, truth.arguments, curve.coefficients)
            print_row(truth, seconds, " backward")


def print_row(truth: Truth, predicted_s: object, what: str = "") -> None:
    s = errors_of(np.asarray(predicted_s), truth.measured_s)
    print(
        f"| {truth.device.name} | {truth.dtype} | {truth.source}{what} | {s.points} | {100 * s.median_ape:.1f} "
        f"| {100 * s.mean_ape:.1f} | {100 * s.bias:+.1f} |"
    )


def unseen(title: str, measured: list[Truth], curves: Curves) -> None:
    """Leave one architecture out: coefficients from the nearest others, the band from the errors of the others."""
    print(f"\n## Unseen architecture: {title}\n\nNo curve of the same architecture enters. {BOUNDS}\n")
    print(
        "| device | nearest first | roofline mean | median | mean | bias | in the 90 % band | library known | own |\n"
        "|---|---|---:|---:|---:|---:|---:|---:|---:|"
    )
    found = [(truth, curve, log_ratio(truth, curve)) for truth, curve in transfers(measured, curves)]
    means: list[tuple[float, float]] = []
    covers: dict[str | None, list[float]] = {}
    for truth, curve, error in found:
        s, roof = (
            errors_of(truth.measured_s / np.exp(error), truth.measured_s),
            errors_of(roofline_s(truth), truth.measured_s),
        )
        own = ARCHITECTURES.get(truth.device.name)
        rest = {t.device.name: e for t, _, e in found if ARCHITECTURES.get(t.device.name) != own and related(t, found)}
        low, high = np.array(pooled_band(rest)) * (1.0 if related(truth, found) else OTHER_VENDOR)
        inside = float(np.mean((error >= low) & (error <= high)))
        limited = truth.device.name in POWER_LIMITED
        whole = curves[truth.device.name, truth.dtype, truth.timer]
        informed = informed_error(truth, curve, whole)
        print(
            f"| {truth.device.name}{' (power-limited)' if limited else ''} | {curve.source.split('from ')[1]} "
            f"| {100 * roof.mean_ape:.1f} | {100 * s.median_ape:.1f} | {100 * s.mean_ape:.1f} | {100 * s.bias:+.1f} "
            f"| {100 * inside:.0f} | {100 * informed:.1f} | {100 * whole.mean_ape:.1f} |"
        )
        covers.setdefault(own, []).append(inside)
        if not limited:
            means.append((s.mean_ape, informed))
    low, high = pooled_band({t.device.name: e for t, _, e in found if related(t, found)})
    plain, informed = 100 * np.median(means, axis=0)
    print(f"\nMedian of the means without power-limited parts: {plain:.1f} %; library known: {informed:.1f} %.")
    covered = np.mean([np.mean(shares) for shares in covers.values()])
    print(f"Mean coverage over architectures by the pooled errors of the others: {100 * covered:.0f} %.")
    print(f"Log of measured / predicted, pooled over all that have a relative: {low:+.2f} to {high:+.2f}.")


def informed_error(truth: Truth, curve: Curve, whole: Curve) -> float:
    """Mean error of a transferred curve that has from the device's own what says which kernels its library has."""
    known_of_it = {name: whole.coefficients[name] for name in OF_THE_LIBRARY[FAMILY.name]}
    error = log_ratio(truth, replace(curve, coefficients={**curve.coefficients, **known_of_it}))
    return errors_of(truth.measured_s / np.exp(error), truth.measured_s).mean_ape


def related(truth: Truth, found: list[tuple[Truth, Curve, Array]]) -> bool:
    """Whether another architecture of the same vendor is among those measured."""
    own = ARCHITECTURES.get(truth.device.name)
    return any(t.device.vendor == truth.device.vendor and ARCHITECTURES.get(t.device.name) != own for t, _, _ in found)


def log_ratio(truth: Truth, curve: Curve) -> Array:
    """Log of measured over predicted time."""
    predicted = np.asarray(FAMILY.predict(truth.shape, truth.arguments, curve.coefficients))
    error: Array = np.log(truth.measured_s / predicted)
    return error


def pooled_band(errors: Mapping[str, Array]) -> tuple[float, float]:
    """5th and 95th percentile, every architecture with the same weight; at least the usual error of a transfer."""
    counts = Counter(ARCHITECTURES.get(name) for name in errors)
    weights = [np.full(len(e), 1 / len(e) / counts[ARCHITECTURES.get(name)]) for name, e in errors.items()]
    every, weight = np.concatenate(list(errors.values())), np.concatenate(weights)
    order = np.argsort(every)
    share = np.cumsum(weight[order]) / weight.sum()
    low, high = np.interp([0.05, 0.95], share, every[order])
    return min(float(low), -Z90 * SCALED_ERROR), max(float(high), Z90 * SCALED_ERROR)


def transfers(measured: list[Truth], curves: Mapping[tuple[str, str, str], Curve]) -> Iterator[tuple[Truth, Curve]]:
    """Each truth with the curve that other architectures give it."""
    devices = {t.device.name: t.device for t in measured}
    for truth in measured:
        own = ARCHITECTURES.get(truth.device.name)
        others = {
            t.device.name: curves[t.device.name, t.dtype, t.timer]
            for t in measured
            if ARCHITECTURES.get(t.device.name) != own and (t.device.name, t.dtype, t.timer) in curves
        }
        yield truth, transferred_curve(truth.device, others, devices)


if __name__ == "__main__":
    main()
