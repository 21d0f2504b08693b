"""How well the time model of matrix products does: curves on held-out shapes, and devices nobody measured.

    .venv/bin/python benchmarks/bench_gemm.py > benchmarks/gemm.md          # tables
    .venv/bin/python benchmarks/bench_gemm.py --save > benchmarks/gemm.md   # and the curves of the catalogue

The split is by shape (m, n, k, batch), hashed, in five folds: no shape is on both sides, whatever its dtype. The
truth for a shape is the median over repetitions and frameworks.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from unittest.mock import patch

import numpy as np

import steptime.errors
import steptime.hardware
from lacking_curves import nearest_at
from steptime.cost.gemm import NAMES
from steptime.hardware import load_device
from steptime.hardware.profiles import save_curves
from steptime.hardware.records import Curve, Device
from steptime.measure.residuals import errors_of
from steptime.measure.table import Table, read_table
from steptime.num import Array
from steptime_lab.calibrate import transfer
from steptime_lab.calibrate.fitting import fit, take
from steptime_lab.calibrate.gemm import BACKWARD, FAMILY, PRIORS, Truth, gemm_curve, preferred, truths
from steptime_lab.calibrate.transfer import (
    EXPONENTS,
    OF_THE_LIBRARY,
    OTHER_VENDOR,
    SCALED_ERROR,
    Z90,
    architecture,
    transferred_curve,
)
from steptime_lab.data_root import require_data

FOLDER = Path(steptime.hardware.__file__).parent / "catalogue" / "profiles"
POWER_LIMITED = ("p4", "l4", "t4")
#: Exponents of the process and distances of instructions that `nested` chooses from.
EXPONENT_GRID = (0.0, -0.1, -0.2, -0.3, -0.4)
DISTANCE_GRID = (0.0, 0.5, 1.0, 2.0)
EXTRAPOLATED = ("a100-sxm-80gb", "h100-sxm", "h200-sxm", "b200-sxm")
RULES = (
    "No curve of the same architecture enters, else all devices that were measured, by whatever source, as `steptime "
    "score` takes them; the catalogue leaves other vendors out. Beside it the mean error where no card of the whole "
    "generation enters (Ampere of data centres and of desks is one), and what bounds them: the mean error of the same "
    "curves if it were known which tiles the library has for batched products, and of the device's own curve on "
    "held-out shapes. DeepBench stands apart: 72 shapes of 2016 to 2018 whose launches from C++ say nothing of those "
    "from Python."
)
Curves = dict[tuple[str, str, str], Curve]
device_of = cache(load_device)


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
    print(f"\n## Unseen architectures\n\n{RULES}")
    fp32, sixteen = (curves_like(curves, kind) for kind in (("fp32",), ("bf16", "fp16")))
    sixteen_rows = [t for kind in ("bf16", "fp16") for t in rows_of(chosen, kind)]
    first = unseen("fp32, with launch (NeuSight)", rows_of(chosen, "fp32", "neusight"), fp32)
    second = unseen("16 bits", sixteen_rows, sixteen)
    nested(sixteen_rows, sixteen)
    apart = unseen("fp32, with launch (DeepBench)", rows_of(chosen, "fp32", "deepbench"), fp32)
    for dtype in ("tf32", "fp8"):
        unseen(dtype, rows_of(chosen, dtype), curves_like(curves, (dtype,)))
    over_all(first + second, apart)
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


def usual_timer(dtype: str) -> str:
    """The timer that most shapes of a dtype were measured with."""
    return "eager" if dtype == "fp32" else "kernel"


def rows_of(chosen: list[Truth], dtype: str, source: str = "") -> list[Truth]:
    """Measured shapes of one dtype (of one source), with its usual timer."""
    return [t for t in chosen if t.dtype == dtype and t.timer == usual_timer(dtype) and source in ("", t.source)]


def curves_like(curves: Curves, dtypes: tuple[str, ...]) -> Curves:
    """The curves of dtypes that stand for each other, with their usual timer."""
    return {key: c for key, c in curves.items() if key[1] in dtypes and key[2] == usual_timer(key[1])}


@dataclass(frozen=True, slots=True)
class Left:
    """One device whose architecture was left out, and one more time with its whole generation."""

    truth: Truth
    curve: Curve
    error: Array
    """Log of measured over predicted time of every shape."""
    generation: Array
    """The same where no card of the generation is known."""
    informed: Array
    """The same where the architecture is left out, but what its library has is known."""
    whole: Curve
    """The device's own."""

    @property
    def limited(self) -> bool:
        """Whether its power limit keeps it far from its peak."""
        return self.truth.device.name in POWER_LIMITED

    @property
    def means(self) -> tuple[float, float, float]:
        """Mean errors: architecture left out; generation left out; architecture left out but its library known."""
        errors = (self.error, self.generation, self.informed)
        one, two, three = (float(np.mean(np.abs(np.expm1(-e)))) for e in errors)
        return one, two, three


def unseen(title: str, rows: list[Truth], curves: Curves) -> list[Left]:
    """Leave one architecture out: coefficients from the nearest others, the band from the errors of the others."""
    print(
        f"\n### {title}\n\n"
        "| device | source | nearest first | roofline mean | median | mean | bias | in the 90 % band "
        "| generation left out | library known | own |\n"
        "|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    )
    found = [left_out(truth, curves) for truth in rows]
    covers: dict[str, list[float]] = {}
    for left in found:
        inside = covered(left, found)
        covers.setdefault(architecture(left.truth.device), []).append(inside)
        print_left(left, inside)
    plain, generation, informed = 100 * np.median([left.means for left in found if not left.limited], axis=0)
    print(
        f"\nMedian of the means without power-limited parts: {plain:.1f} %; generation left out {generation:.1f} %; "
        f"library known: {informed:.1f} %."
    )
    by_architecture = {name: 100 * float(np.mean(shares)) for name, shares in covers.items()}
    print(
        f"In the band of the pooled errors of the others, mean over architectures: "
        f"{np.mean(list(by_architecture.values())):.0f} % "
        f"({', '.join(f'{name} {share:.0f}' for name, share in by_architecture.items())})."
    )
    low, high = pooled_band([left for left in found if related(left, found)])
    print(
        f"Log of measured / predicted, pooled over all that have a relative, at least 0.25 either way: "
        f"{low:+.2f} to {high:+.2f}."
    )
    return found


def left_out(truth: Truth, curves: Curves) -> Left:
    """A device by the curves of other architectures, and of other generations."""
    by_others, by_generations = (
        transferred(truth, {key: c for key, c in curves.items() if kind(device_of(key[0])) != kind(truth.device)})
        for kind in (architecture, generation)
    )
    whole = curves[truth.device.name, truth.dtype, truth.timer]
    library = {name: whole.coefficients[name] for name in OF_THE_LIBRARY[FAMILY.name]}
    informed = replace(by_others, coefficients={**by_others.coefficients, **library})
    one, two, three = (log_ratio(truth, curve) for curve in (by_others, by_generations, informed))
    return Left(truth=truth, curve=by_others, error=one, generation=two, informed=three, whole=whole)


def transferred(truth: Truth, curves: Curves) -> Curve:
    """The curve that a device gets which nobody measured: of two 16-bit formats the one with the nearer donor."""
    records = {name: device_of(name) for name, _, _ in curves}
    donors: dict[str, dict[str, Curve]] = {}
    for (name, dtype, _), curve in curves.items():
        donors.setdefault(dtype, {})[name] = curve
    nearest = min(donors, key=lambda dtype: (nearest_at(truth.device, donors[dtype], records), dtype != truth.dtype))
    return transferred_curve(truth.device, donors[nearest], records)


def generation(device: Device) -> str:
    """What the vendor calls by one name, chips for desks and for data centres alike: "ampere" of "ampere-rtx"."""
    return device.architecture.split("-")[0] if device.architecture else device.name


def print_left(left: Left, inside: float) -> None:
    truth, (mean, generation_mean, informed) = left.truth, left.means
    s = errors_of(truth.measured_s / np.exp(left.error), truth.measured_s)
    roof = errors_of(roofline_s(truth), truth.measured_s)
    print(
        f"| {truth.device.name}{' (power-limited)' if left.limited else ''} | {truth.source} "
        f"| {left.curve.source.split('from ')[1]} | {100 * roof.mean_ape:.1f} | {100 * s.median_ape:.1f} "
        f"| {100 * mean:.1f} | {100 * s.bias:+.1f} | {100 * inside:.0f} | {100 * generation_mean:.1f} "
        f"| {100 * informed:.1f} | {100 * left.whole.mean_ape:.1f} |"
    )


def over_all(found: list[Left], apart: list[Left]) -> None:
    """Medians over GPUs of 16 bits and fp32, each of them once whatever it was measured in."""
    counted, every = by_gpu(found), by_gpu(found + apart)
    plain, by_generation, _ = 100 * np.median(counted, axis=0)
    print(
        f"\n### 16 bits and fp32\n\nMedian over {len(counted)} GPUs, each with the mean of its rows, without "
        f"power-limited parts: {plain:.1f} %; generation left out {by_generation:.1f} %. With the devices of DeepBench "
        f"({len(every)} GPUs): {100 * np.median(every, axis=0)[0]:.1f} %."
    )


def by_gpu(found: list[Left]) -> Array:
    """Mean errors of each GPU that is not power-limited."""
    rows: dict[str, list[tuple[float, float, float]]] = {}
    for left in found:
        if not left.limited:
            rows.setdefault(left.truth.device.name, []).append(left.means)
    each: Array = np.array([np.mean(means, axis=0) for means in rows.values()])
    return each


def nested(rows: list[Truth], curves: Curves) -> None:
    """Errors where the rules of the transfer, too, were chosen without the architecture (or generation) in question."""
    tables = [means_with(rows, curves, exponent, away) for exponent in EXPONENT_GRID for away in DISTANCE_GRID]
    cells = []
    for column, kind in enumerate((architecture, generation)):
        kinds = np.array([kind(t.device) for t in rows])
        errors = np.array([table[:, column] for table in tables])
        chosen = [int(np.argmin(np.mean(errors[:, kinds != own], axis=1))) for own in kinds]
        cells.append(100 * float(np.median(errors[chosen, np.arange(len(rows))])))
    print(
        f"The exponent of the process and the distance between kinds of instructions were chosen on these rows. Chosen "
        f"by the mean error of all others instead, out of {len(tables)} pairs, they give {cells[0]:.1f} % with the "
        f"architecture left out, and {cells[1]:.1f} % with the generation left out."
    )


def means_with(rows: list[Truth], curves: Curves, exponent: float, away: float) -> Array:
    """Mean errors of all rows by other rules of the transfer."""
    rules = EXPONENTS[FAMILY.name]["compute_efficiency"]
    with patch.dict(rules, {"process": exponent}), patch.object(transfer, "OTHER_INSTRUCTIONS", away):
        found: Array = np.array([left_out(truth, curves).means for truth in rows])
    return found


def related(left: Left, found: list[Left]) -> bool:
    """Whether another architecture of the same vendor is among those measured."""
    device = left.truth.device
    others = (other.truth.device for other in found)
    return any(o.vendor == device.vendor and architecture(o) != architecture(device) for o in others)


def covered(left: Left, found: list[Left]) -> float:
    """Share of the shapes that lie in the band of the errors of other architectures."""
    own = architecture(left.truth.device)
    rest = [other for other in found if architecture(other.truth.device) != own and related(other, found)]
    low, high = np.array(pooled_band(rest)) * (1.0 if related(left, found) else OTHER_VENDOR)
    return float(np.mean((left.error >= low) & (left.error <= high)))


def log_ratio(truth: Truth, curve: Curve) -> Array:
    """Log of measured over predicted time."""
    predicted = np.asarray(FAMILY.predict(truth.shape, truth.arguments, curve.coefficients))
    error: Array = np.log(truth.measured_s / predicted)
    return error


def pooled_band(found: list[Left]) -> tuple[float, float]:
    """5th and 95th percentile, every architecture with the same weight; at least the usual error of a transfer."""
    counts = Counter(architecture(left.truth.device) for left in found)
    weights = [
        np.full(len(left.error), 1 / len(left.error) / counts[architecture(left.truth.device)]) for left in found
    ]
    every, weight = np.concatenate([left.error for left in found]), np.concatenate(weights)
    order = np.argsort(every)
    share = np.cumsum(weight[order]) / weight.sum()
    low, high = np.interp([0.05, 0.95], share, every[order])
    return min(float(low), -Z90 * SCALED_ERROR), max(float(high), Z90 * SCALED_ERROR)


if __name__ == "__main__":
    main()
