"""Captured models against a real NVIDIA GPU: reserved memory and step time, predicted without it and measured on it.

    python benchmarks/bench_captured_gpu.py --device auto            prints the table
    python benchmarks/bench_captured_gpu.py --device auto --write    also writes it to benchmarks/captured_gpu.md

Needs a CUDA build of PyTorch 2.13 and a GPU of the catalogue; `auto` finds it by its name. Memory is the peak of
`torch.cuda.max_memory_reserved()` over four steps, time the median of 20 steps after 5, each with its synchronisation.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median
from typing import Any

from machine import report

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

#: Name -> factory in tests/models, its sizes, element type of the weights, optimiser.
CASES: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "GPT-2 small, fp32": ("gpt2_small", {"batch": 8}, "fp32", "adamw"),
    "GPT-2 small, bf16": ("gpt2_small", {"batch": 16}, "bf16", "adamw"),
    "GPT 350M, bf16, fused AdamW": (
        "gpt", {"layers": 24, "width": 1024, "heads": 16, "vocabulary": 50304, "tokens": 1024, "batch": 8}, "bf16",
        "adamw-fused",
    ),
    "GPT, eager attention, dropout": (
        "gpt", {"layers": 12, "width": 768, "heads": 12, "vocabulary": 50304, "tokens": 512, "batch": 8, "fused": False,
                "dropout": 0.1}, "bf16", "adamw",
    ),
    "Llama 1B, bf16": (
        "llama", {"layers": 16, "width": 2048, "heads": 32, "kv_heads": 8, "hidden": 8192, "vocabulary": 128256,
                  "tokens": 2048, "batch": 2}, "bf16", "adamw",
    ),
    "BERT-base, fp32": ("bert_base", {"batch": 16}, "fp32", "adamw"),
    "ResNet-50, fp32": ("resnet50", {"batch": 64}, "fp32", "sgd-momentum"),
    "U-Net, fp32": ("unet", {"batch": 16, "pixels": 256, "width": 64}, "fp32", "adam"),
    "ViT, bf16": (
        "vit", {"pixels": 224, "patch": 16, "width": 768, "layers": 12, "heads": 12, "batch": 64}, "bf16", "adamw",
    ),
    "MoE, bf16": (
        "moe", {"layers": 8, "width": 1024, "heads": 16, "experts": 8, "vocabulary": 32000, "tokens": 1024, "batch": 8},
        "bf16", "adamw",
    ),
}  # fmt: skip
WARM, TIMED, MEMORY_STEPS = 5, 20, 4


def built(name: str, where: str) -> tuple[Any, Any, Callable[[Any], Any]]:
    """Module, inputs and loss of a case."""
    import torch

    import models

    factory, sizes, dtype, _ = CASES[name]
    torch.manual_seed(0)
    module, inputs = getattr(models, factory)(**sizes)
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    inputs = tuple(x.to(where, kind) if x.is_floating_point() else x.to(where) for x in inputs)
    return module.to(where, kind), inputs, models.loss_of


def measured(name: str) -> tuple[float, float]:
    """Peak of the reserved memory in bytes, and seconds of a step."""
    import torch

    from steptime.captured.record.training import OPTIMIZERS

    module, inputs, loss = built(name, "cuda")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    optimizer = OPTIMIZERS[CASES[name][3]](module.parameters())

    def step() -> None:
        loss(module(*inputs)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(MEMORY_STEPS):
        step()
    reserved = torch.cuda.max_memory_reserved()
    for _ in range(WARM):
        step()
    times = []
    for _ in range(TIMED):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return float(reserved), median(times)


def predicted(name: str, device: str) -> tuple[float, float, float, float]:
    """The same from the capture, and the band of the time."""
    import steptime

    module, inputs, loss = built(name, "cpu")
    program = steptime.capture(module, inputs, optimizer=CASES[name][3], loss=loss, keep_output=False, target="cuda")
    found = steptime.profile(program, device)
    return (found.memory["reserved"], found.table.totals.step_s, *found.table.totals.band_s)


def main() -> int:
    """Measure every case; a row that fails says so."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="auto", help="name in the catalogue, or auto")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    try:
        import torch
    except ImportError:
        print("bench_captured_gpu: PyTorch is not installed", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("bench_captured_gpu: there is no NVIDIA GPU, or PyTorch is a build without CUDA", file=sys.stderr)
        return 2
    from steptime.measure.machine.comparison import public_device

    device = public_device(given.device, torch.cuda.get_device_name())
    lines = ["| model | reserved, measured | predicted | error | step, measured | predicted | error | in its band |",
             "|---|---:|---:|---:|---:|---:|---:|---|"]  # fmt: skip
    errors: list[tuple[float, float]] = []
    for name in CASES:
        memory, seconds = measured(name)
        guess, step_s, low, high = predicted(name, device)
        errors.append((guess / memory - 1, step_s / seconds - 1))
        lines.append(
            f"| {name} | {memory / 2**30:.2f} GiB | {guess / 2**30:.2f} GiB | {100 * errors[-1][0]:+.1f} % | "
            f"{1e3 * seconds:.1f} ms | {1e3 * step_s:.1f} ms | {100 * errors[-1][1]:+.1f} % | "
            f"{'yes' if low <= seconds <= high else 'no'} |"
        )
    memory_error, time_error = (100 * fmean(abs(pair[i]) for pair in errors) for i in (0, 1))
    notes = (
        f"Device {device}. Mean absolute error: reserved memory {memory_error:.1f} %, step time {time_error:.1f} %.\n"
    )
    report("captured_gpu", "Captured models on a GPU", "\n".join(lines), notes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
