"""Time that folding saves on real architectures, each compared call by call with the capture of every block.

    python benchmarks/bench_folding.py            prints the table
    python benchmarks/bench_folding.py --write    also writes it to benchmarks/folding.md

Names of architectures as further arguments take the place of the list.
"""

from __future__ import annotations

import gc
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from machine import report

ARCHITECTURES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi", "phi3", "gpt-neox", "gpt2", "opt",
    "bloom", "falcon", "olmo2", "cohere", "granite", "starcoder2", "stablelm", "bert", "roberta", "whisper", "vit",
    "dinov2",
    "timm:vit_base_patch16_224", "timm:mixer_b16_224", "timm:convnext_base", "timm:deit_base_patch16_224",
)  # fmt: skip


def differences(a: Any, b: Any) -> list[str]:
    """In what two programs differ: calls, memory at every call, storages, parameters, cost on a device."""
    from steptime.captured.cost import Timer, cost_table
    from steptime.captured.graph.liveness import Liveness
    from steptime.hardware import load_device

    out = []
    calls = [[(c.node.op, c.node.outputs, c.module, c.phase, c.recomputed, c.view) for c in p.calls] for p in (a, b)]
    if calls[0] != calls[1]:
        return ["calls"]
    if (Liveness(a).in_use_bytes != Liveness(b).in_use_bytes).any():
        out.append("memory")
    held = [Counter((s.size_bytes, s.born, s.freed, s.category) for s in p.storages if s.size_bytes) for p in (a, b)]
    out += ["storages"] if held[0] != held[1] else []
    names = [[(q.name, q.elements) for q in p.parameters] for p in (a, b)]
    out += ["parameters"] if names[0] != names[1] else []
    totals = [cost_table(p, Timer(device=load_device("h100-sxm"))).totals for p in (a, b)]
    pairs = [(t.executed_flops, t.moved_bytes, t.step_s) for t in totals]
    if any(abs(x - y) > 1e-9 * abs(y) for x, y in zip(*pairs, strict=True)):
        out.append("cost")
    return out


def row(name: str) -> str:
    """One architecture: folded, then every block."""
    import torch

    from models.hub import hub_model
    from steptime.captured.record import capture

    with torch.device("meta"):
        module, inputs = hub_model(name)
    seconds, programs = [], []
    for fold in (True, False):
        start = time.process_time()
        programs.append(capture(module, inputs, fold=fold, target="cuda"))
        seconds.append(time.process_time() - start)
    folded, whole = programs
    equal = ", ".join(differences(folded, whole)) or "equal"
    cells = (
        name, f"{whole.parameter_count / 1e9:.2f} B", f"{len(whole.calls):,}", ", ".join(folded.folded) or "none",
        f"{seconds[0]:.2f} s", f"{seconds[1]:.2f} s", f"{seconds[1] / seconds[0]:.1f}", equal,
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    lines = [
        "| architecture | parameters | calls | folded | capture | every block | saved, times | compared |",
        "|---|---:|---:|---|---:|---:|---:|---|",
    ]
    for name in [a for a in sys.argv[1:] if not a.startswith("-")] or ARCHITECTURES:
        lines.append(row(name))
        print(lines[-1], file=sys.stderr, flush=True)
        gc.collect()
    notes = (
        "CPU seconds of one process, one thread, forward, backward and AdamW of one sequence of 128 tokens (or one\n"
        "image) with the kernels of CUDA. The configurations are the defaults of the classes, with the depth of a\n"
        "released model where the default is none; `llama` is Llama 3 70B. `equal`: operators, shapes, modules,\n"
        "storages, memory in use at every call and parameters are the same, and executed FLOPs, moved bytes and step\n"
        "time on an H100 agree to 1e-9.\n"
    )
    report("folding", "Folding of equal blocks", "\n".join(lines), notes)


if __name__ == "__main__":
    main()
