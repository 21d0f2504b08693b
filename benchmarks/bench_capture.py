"""CPU time and memory of capturing whole training steps: forward, backward, AdamW; nothing is allocated.

    python benchmarks/bench_capture.py                    prints the tables
    python benchmarks/bench_capture.py --write            also writes them to benchmarks/capture.md
    python benchmarks/bench_capture.py --before FOLDER    `steptime fit` also with another checkout, in alternating runs

Each case runs in a process of its own, since the largest resident size is that of a process. The first capture of a
process also pays for PyTorch's own warm-up; it is made with a tiny model and shown apart, as is the import.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from machine import report
from pairs import HERE, alternating, asked, before, change, checkouts, heads

#: Name -> layers, width, heads, key heads, inner width, vocabulary, tokens; folded or every block.
CASES: dict[str, tuple[tuple[int, int, int, int, int, int, int], bool]] = {
    "7B, 32 layers": ((32, 4096, 32, 32, 11008, 32000, 2048), True),
    "7B, 32 layers, every block": ((32, 4096, 32, 32, 11008, 32000, 2048), False),
    "7B width, 96 layers": ((96, 4096, 32, 32, 11008, 32000, 2048), True),
    "7B width, 96 layers, every block": ((96, 4096, 32, 32, 11008, 32000, 2048), False),
    "70B, 80 layers": ((80, 8192, 64, 8, 28672, 128256, 4096), True),
    "405B, 126 layers": ((126, 16384, 128, 8, 53248, 128256, 8192), True),
}


def measure(name: str) -> dict[str, Any]:
    """One case in this process."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    start = time.process_time()
    import torch

    from models.llama import llama
    from steptime.captured.graph.liveness import Liveness
    from steptime.captured.record import capture

    torch.set_num_threads(1)
    imported = time.process_time()
    module, inputs = llama(layers=1)
    capture(module, inputs)
    warm = time.process_time()
    (layers, width, heads, keys, inner, vocabulary, tokens), fold = CASES[name]
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        module, inputs = llama(
            layers=layers, width=width, heads=heads, kv_heads=keys, hidden=inner, vocabulary=vocabulary,
            tokens=tokens, batch=1,
        )  # fmt: skip
    built = time.process_time()
    program = capture(module, inputs, loss="cross-entropy", fold=fold)
    captured = time.process_time()
    peak = Liveness(program).peak().size_bytes
    return {
        "parameters": program.parameter_count, "calls": len(program.calls), "import_s": imported - start,
        "warm_up_s": warm - imported, "capture_s": captured - built, "liveness_s": time.process_time() - captured,
        "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "peak_bytes": peak,
    }  # fmt: skip


FIT = ("examples/gpt.py:gpt2", "rtx-4090", 32)
"""Module, device and batch of the example of `steptime fit` in the README."""
FIT_RUNS = 5


def measure_fit() -> dict[str, Any]:
    """The README's `steptime fit` in this process, its imports apart; the collector as the command sets it."""
    import gc

    from steptime.__main__ import ALLOCATIONS

    gc.set_threshold(ALLOCATIONS, 20, 20)
    start = time.process_time()

    from steptime.captured.fitting import fit

    imported = time.process_time()
    found = fit(str(HERE / FIT[0]), FIT[1], batch=FIT[2])
    return {
        "candidates": found.candidates, "captures": found.captures, "import_s": imported - start,
        "fit_s": time.process_time() - imported,
    }  # fmt: skip


def fit_table() -> list[str]:
    """Rows of `steptime fit`: the median of some processes."""
    each = checkouts()
    names, rules = heads(each)
    runs = alternating(__file__, "fit", each, FIT_RUNS)
    whole = [[run["import_s"] + run["fit_s"] for run in one] for one in runs]
    r = sorted(runs[0], key=lambda one: one["import_s"] + one["fit_s"])[FIT_RUNS // 2]
    more = "".join(f" {median(then):.1f} s | {change(whole[0], then)} |" for then in whole[1:])
    return [
        "", f"| `steptime fit` | combinations | captures | imports | the rest | together |{names}",
        f"|---|---:|---:|---:|---:|---:|{rules}",
        f"| {FIT[0]} on {FIT[1]}, batch {FIT[2]} | {r['candidates']} | {r['captures']} | {r['import_s']:.1f} s | "
        f"{r['fit_s']:.1f} s | {r['import_s'] + r['fit_s']:.1f} s |{more}", *(["", before(each)] if more else []),
    ]  # fmt: skip


def main() -> None:
    lines = [
        "| model | parameters | calls | capture | liveness | resident | import | warm-up | predicted peak |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name in CASES:
        r = alternating(__file__, name, [HERE], 1)[0][0]
        lines.append(
            f"| {name} | {r['parameters'] / 1e9:.2f} B | {r['calls']:,} | {r['capture_s']:.2f} s | "
            f"{r['liveness_s']:.2f} s | {r['resident_bytes'] / 1e6:.0f} MB | {r['import_s']:.1f} s | "
            f"{r['warm_up_s']:.1f} s | {r['peak_bytes'] / 2**30:.1f} GiB |"
        )
    lines += fit_table()
    notes = (
        "CPU seconds of one process, one thread. Forward, cross entropy, backward and AdamW (foreach) in bf16 of a\n"
        "Llama as in tests/models/llama.py, batch 1. Rows without `every block` record four blocks and unroll the\n"
        "rest, which gives the same program; import and first-call warm-up of PyTorch are not part of the capture.\n"
    )
    report("capture", "Capturing a training step", "\n".join(lines), notes)


if __name__ == "__main__":
    case = asked()
    if case is None:
        main()
    else:
        print(json.dumps(measure_fit() if case == "fit" else measure(case)))
