"""Whole training steps of public models on one GPU: measured there, and predicted from their captures and configs.

    python benchmarks/bench_gpu.py --measure steps.jsonl                     on a machine with the GPU
    python benchmarks/bench_gpu.py --from steps.jsonl --profile gpu.toml     anywhere: prints the tables
    python benchmarks/bench_gpu.py --from steps.jsonl --profile gpu.toml --write     also writes benchmarks/gpu.md

Measuring needs PyTorch for CUDA, Transformers, torchvision and timm, and takes about six seconds a case; it goes on
where it was stopped. `--profile` is what `steptime calibrate machine --out gpu.toml` wrote on the same machine. Without
options the tables are those of the H100 in `tests/data/machines`; they take two to four minutes and need the same
packages, PyTorch without CUDA being enough. Predictions capture the models of the Transformers that is installed: the
page says where it is another than the one that was measured. Its operators may differ: with 5.23 in place of 5.17 the
allocated memory of T5-base is predicted 36 to 47 % too low.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from bench_gpu_rewrites import DATA as RESULTS
from bench_gpu_rewrites import table
from gpu_cases import CASES, Case, built
from gpu_steps import run, software

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
DATA = Path(__file__).parent.parent / "tests" / "data" / "machines"
PUBLIC = "h100-sxm"
CLUSTER = "dgx-h100"
BOUND = 0.9
"""Share of the step that the kernels of a device-bound case fill at least."""
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case: what was measured, and ratios of predicted to measured by what they were predicted with."""

    case: Case
    step_s: float
    kernels_s: float
    issued_s: float
    allocated: float
    reserved: float
    device: dict[str, float]
    step: dict[str, float]
    memory: dict[str, float]

    @property
    def busy(self) -> bool:
        """Whether the device, not the host, makes the step."""
        return self.kernels_s >= BOUND * self.step_s


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Lines of a file of measurements."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def compact(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is kept of a file of measurements: finished cases, device time by operator of a phase, the longest 15."""
    out = []
    for line in lines:
        if "step_s" not in line:
            out += [line] if "facts" in line and line not in out else []
            continue
        sums: dict[tuple[str, str], list[float]] = {}
        for name, phase, _, calls, seconds in line["operators"]:
            held = sums.setdefault((name, phase), [0, 0.0])
            held[0], held[1] = held[0] + calls, held[1] + seconds
        longest = sorted(sums.items(), key=lambda pair: -pair[1][1])[:15]
        kept = {name: value for name, value in line.items() if name not in ("kernel_names", "built_s", "whole_s")}
        kept["operators"] = [[*key, calls, round(seconds, 7)] for key, (calls, seconds) in longest]
        kept["step_s"] = [round(s, 5) for s in line["step_s"]]
        out.append(kept)
    return out


def predictions(line: dict[str, Any], devices: dict[str, tuple[str, str | None]]) -> Row:
    """Everything about one measured case."""
    import steptime

    case = Case.of(line["case"])
    module, inputs, loss = built(case, "meta")
    program = steptime.capture(
        module, inputs, optimizer=case.optimizer, loss=loss, autocast=case.autocast, target="cuda", name=case.title
    )
    step_s, kernels_s, held = median(line["step_s"]), line["kernel_sum_s"], line["memory"]
    device, step, memory = {}, {}, {}
    for name, (where, predictor) in devices.items():
        found = steptime.profile(program, where, predictor=predictor)
        device[name] = found.table.totals.device_s / kernels_s
        step[name] = found.table.totals.step_s / step_s
        memory = {
            "allocated": found.memory["allocated"] / held["peak_allocated"],
            "reserved": found.memory["reserved"] / held["peak_reserved"],
        }
    estimated = by_dimensions(case, module)
    if estimated is not None:
        step["estimate"] = estimated / step_s
    return Row(
        case=case, step_s=step_s, kernels_s=kernels_s, issued_s=line["issued_s"], allocated=held["peak_allocated"],
        reserved=held["peak_reserved"], device=device, step=step, memory=memory,
    )  # fmt: skip


def by_dimensions(case: Case, module: Any) -> float | None:
    """Seconds of a step by the configuration of the model alone; None where steptime estimates no such model."""
    from steptime.api.calls import estimate
    from steptime.errors import UserError

    if case.package != "transformers" or (case.weights == "fp32" and case.autocast is None):
        return None
    with tempfile.TemporaryDirectory() as folder:
        module.config.architectures = [type(module).__name__]
        module.config.save_pretrained(folder)
        plan = {"micro_batch": case.batch, "recompute": "full" if case.checkpointing else "none"}
        try:
            found = estimate(
                f"{folder}/config.json", CLUSTER, gpus=1, global_batch=case.batch, seq=case.size, plan=plan
            )
        except UserError:
            return None
    return float(found.step_time_s)


def percent(ratio: float) -> str:
    """An error in words of a table."""
    return f"{100 * (ratio - 1):+.0f} %"


def summary(name: str, ratios: Sequence[float]) -> str:
    """Errors as a line of a table."""
    errors = [abs(ratio - 1) for ratio in ratios]
    return (
        f"| {name} | {len(ratios)} | {100 * median(errors):.1f} % | {100 * fmean(errors):.1f} % | "
        f"{100 * max(errors):.0f} % | {100 * (median(ratios) - 1):+.1f} % |"
    )


HEAD = ["| what | cases | median error | mean | largest | bias (median) |", "|---|--:|--:|--:|--:|--:|"]
NOTES = """One training step of each model with random weights: forward, backward, AdamW. *step*: the median of ten or
more, each waited for. *kernels*: the sum of all kernels of one step in a trace of PyTorch's profiler. *host issues*: a
step in a row that is not waited for, until the host has issued it. A case is **device-bound** where the kernels fill
nine tenths of the step. Predictions are of the captured module (`steptime profile`): *public* with the catalogue's
`h100-sxm`, *measured* with what `steptime calibrate machine --device cuda --quick` wrote on a machine of the same kind
(`tests/data/machines/h100.toml`), *learned* the public one with `--predictor learned`. *estimate* has the
`config.json` alone, which knows neither the element type of the states nor the copies of autocast, and the generic
framework. Errors are predicted / measured - 1. No number of a profile was fitted to these steps.

What misses:

* **The host.** This machine is a virtual one whose host takes some 70 us an operator, by the calibration and by the
  steps of small models. Without a measurement 20 us are assumed, so that steps that wait for the host are predicted up
  to three times too fast. The measured number is of a small perceptron, modules and autograd included: casts of
  autocast, and the single operators that rotary embedding and RMS norm are written in, take about half of it, and steps
  that consist of these are predicted up to twice too long.
* **Odd vocabularies.** The three products of a head of 50,257 tokens run at a fifth of the rate in bf16, because rows
  do not begin at multiples of 16 bytes. The measured profile knows; the sources of the public one have no such
  products, and it is a third too fast for GPT-2. With 50,304 tokens the same model takes four fifths of the time.
* **Images.** Batch norm in bf16 runs in kernels of one block a channel, not in cuDNN: the public profile, which knows
  their bytes alone, is two to four times too fast for nets made of it. ConvNeXt permutes its images to channels last,
  where depthwise convolutions are faster than those that the calibration measured.
* **Optimisers and sums.** Lists of tensors (`_foreach`) move about 15 % fewer bytes a second than single maps, and sums
  over columns (gradients of biases) take two to three times as long as their bytes.
* **Mixtures of experts** are predicted a fifth too fast by both profiles.
* **cuDNN's attention.** PyTorch 2.11 prefers it to flash attention on Hopper. Times are alike. Its scratch memory is
  not predicted, nor that of convolutions: image models reserve up to a tenth more.
"""
REWRITES = """Ratios of the original graph's time to that of the rewritten one, as
`python benchmarks/bench_gpu_rewrites.py` prints them: inference of one image in fp32. *device*: a replayed CUDA graph.
*eager*: a call that is waited for. NasRNN and BERT were not measured: what was written of them
made tensors on the CPU, which has been mended since.
"""
LABELS = {
    "public": "public profile", "measured": "measured profile", "learned": "public profile, learned factors",
    "estimate": "`steptime estimate` by dimensions",
}  # fmt: skip


def tables(rows: Sequence[Row]) -> str:
    """The page's tables."""
    groups: list[tuple[str, Callable[[Row], dict[str, float]], Sequence[Row]]] = [
        ("kernels of the device", lambda row: row.device, rows),
        ("step, device-bound", lambda row: row.step, [row for row in rows if row.busy]),
        ("step, host-bound", lambda row: row.step, [row for row in rows if not row.busy]),
    ]
    out = ["## Errors", "", *HEAD]
    for title, of, chosen in groups:
        for name, label in LABELS.items():
            ratios = [of(row)[name] for row in chosen if name in of(row)]
            out += [summary(f"{title}: {label}", ratios)] if ratios else []
    for name in ("allocated", "reserved"):
        out.append(summary(f"memory, {name}", [row.memory[name] for row in rows]))
    out += ["", "## Times, case by case", ""]
    out.append(
        "| case | step | kernels | host issues | kernels: public | measured | learned | step: public | measured | "
        "learned | estimate |"
    )
    out.append("|---|" + "--:|" * 10)
    for row in rows:
        found = [percent(row.device[n]) for n in ("public", "measured", "learned")]
        found += [percent(row.step[n]) if n in row.step else "" for n in LABELS]
        measured = " | ".join(f"{1e3 * s:.1f} ms" for s in (row.step_s, row.kernels_s, row.issued_s))
        out.append(f"| {row.case.title} | {measured} | {' | '.join(found)} |")
    out += ["", "## Memory, case by case", ""]
    out += ["| case | allocated | predicted | reserved | predicted |", "|---|--:|--:|--:|--:|"]
    for row in rows:
        out.append(
            f"| {row.case.title} | {row.allocated / GIB:.2f} GiB | {100 * (row.memory['allocated'] - 1):+.1f} % | "
            f"{row.reserved / GIB:.2f} GiB | {100 * (row.memory['reserved'] - 1):+.1f} % |"
        )
    return "\n".join(out)


def compiled_lines(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Cases under torch.compile next to the same ones without it; nothing predicts them."""
    plain = {Case.of(line["case"]).title: line for line in lines if "step_s" in line}
    out = []
    for line in plain.values():
        case = Case.of(line["case"])
        other = plain.get(case.title.removesuffix(", compiled"))
        if case.compiled and other is not None:
            times = [1e3 * median(each["step_s"]) for each in (line, other)]
            out.append(f"{case.title}: {times[0]:.1f} ms in place of {times[1]:.1f} ms.")
    return out


def page(given: argparse.Namespace) -> str:
    """Text of the page."""
    from machine import machine
    from public_models.rows import load_torchvision

    load_torchvision()
    lines = lines_of(given.source)
    facts = next(line["facts"] for line in lines if "facts" in line)
    devices = {
        "public": (given.device, None), "measured": (str(given.profile), None), "learned": (given.device, "learned")
    }  # fmt: skip
    rows = []
    for line in lines:
        if "step_s" in line and not line["case"]["compiled"]:
            rows.append(predictions(line, devices))
            print(rows[-1].case.title, rows[-1].step, file=sys.stderr, flush=True)
    ran = ", ".join(f"{name} {version}" for name, version in facts["software"].items())
    here = software()
    other = [n for n in ("transformers", "torchvision", "timm") if here.get(n) != facts["software"].get(n)]
    note = "".join(f" Predicted with {name} {here.get(name)}, another version." for name in other)
    return (
        f"# Training steps on a GPU\n\n{NOTES}\n{tables(rows)}\n\n"
        + "".join(f"{line}\n" for line in compiled_lines(lines))
        + f"\n## Rewritten graphs\n\n{REWRITES}\n{table(lines_of(RESULTS))}\n"
        + f"\nMeasured on {facts['gpu']}: {ran}.{note} Predicted on {machine()}.\n"
        f"Command: `python benchmarks/bench_gpu.py --write`\n"
    )


def main() -> int:
    """Measure, or print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--measure", type=Path, metavar="FILE", help="run the steps here and add them to a file")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no case later than this")
    parser.add_argument("--compact", type=Path, metavar="FILE", help="write the measurements of --from in short")
    parser.add_argument("--from", dest="source", type=Path, default=DATA / "h100.steps.jsonl")
    parser.add_argument("--profile", type=Path, default=DATA / "h100.toml", help="of `steptime calibrate machine`")
    parser.add_argument("--device", default=PUBLIC, help="name in the catalogue")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    if given.measure is not None:
        import torch

        if not torch.cuda.is_available():
            print("bench_gpu: there is no NVIDIA GPU, or PyTorch is a build without CUDA", file=sys.stderr)
            return 2
        run(CASES, given.measure, time.time() + given.seconds)
        return 0
    if given.compact is not None:
        kept = [json.dumps(line, separators=(",", ":")) for line in compact(lines_of(given.source))]
        given.compact.write_text("\n".join(kept) + "\n", encoding="utf-8")
        return 0
    text = page(given)
    print(text)
    if given.write:
        Path(__file__).with_name("gpu.md").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
