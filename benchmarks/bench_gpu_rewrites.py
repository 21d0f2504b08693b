"""Rewritten graphs against the original ones on one GPU: predicted and measured gain.

    python benchmarks/bench_gpu_rewrites.py --pack pairs.pickle                  anywhere: both graphs of every model
    python benchmarks/bench_gpu_rewrites.py --measure pairs.pickle --out FILE    on a machine with the GPU
    python benchmarks/bench_gpu_rewrites.py --from FILE                          prints the table

The models are those of the rewriting suite, one sample in fp32, rewritten for the public profile as
`steptime rewrite --device h100-sxm` does by default, element-wise chains written out. Weights are random. *eager*: a
call of the module, waited for; *graph*: a replayed CUDA graph, so the device alone. A pack is read with pickle: use
your own.
"""

from __future__ import annotations

import argparse
import json
import operator
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
DATA = Path(__file__).parent.parent / "tests" / "data" / "machines" / "h100.rewrites.jsonl"
NAMES = ("ResNeXt-50", "Inception-v3", "ResNet-50", "SqueezeNet", "NasRNN", "BERT")
DEVICE = "h100-sxm"


def packed(flow: Any) -> dict[str, Any]:
    """A graph as code, and the shapes of what it reads; integers with their values."""
    from steptime.rewrite.export_torch import graph_module
    from steptime.rewrite.kernels import random_contents

    module = graph_module(flow, random_contents(flow))
    tensors = {
        name: (tuple(t.shape), str(t.dtype).split(".")[-1], None if t.is_floating_point() else t.tolist())
        for name, t in [*module.named_parameters(), *module.named_buffers()]
    }
    return {"code": module.code, "tensors": tensors, "inputs": [(v.type.shape, v.type.dtype) for v in flow.inputs]}


def pairs(names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Both graphs of every model, with what is predicted."""
    from models.suite import SUITE
    from steptime.hardware import device_within
    from steptime.rewrite.engine import apply_passes
    from steptime.rewrite.rewriting import unfused
    from steptime.rewrite.trace import trace

    out = []
    for name in names:
        flow = trace(*SUITE[name](), target="cuda").flow
        found = apply_passes(flow, device_within(DEVICE))
        after = unfused(found.after)
        totals = [found.prices.table(each).totals for each in (flow, after)]
        predicted = {
            key: [getattr(t, key) for t in totals] for key in ("step_s", "device_s", "host_s", "launches")
        }  # fmt: skip
        out.append({"name": name, "before": packed(flow), "after": packed(after), "predicted": predicted})
        print(name, predicted, file=sys.stderr, flush=True)
    return out


def built(part: dict[str, Any]) -> Callable[[], Any]:
    """A call of a packed graph on the GPU."""
    import torch

    root = torch.nn.Module()
    for name, (shape, dtype, values) in part["tensors"].items():
        kind = getattr(torch, dtype)
        if values is None:
            tensor = torch.randn(shape, dtype=kind, device="cuda").abs() * 0.05 + 0.01
        else:
            tensor = torch.tensor(values, dtype=kind, device="cuda").reshape(shape)
        root.register_buffer(name, tensor)
    space = {"torch": torch, "device": torch.device, "inf": float("inf"), "nan": float("nan"), "operator": operator}
    exec(part["code"].replace("type='cpu'", "type='cuda'"), space)
    inputs = [
        torch.randint(0, 2, shape, device="cuda") if dtype.startswith("int") else torch.randn(shape, device="cuda")
        for shape, dtype in part["inputs"]
    ]
    forward: Any = space["forward"]
    return lambda: forward(root, *inputs)


def eager_s(run: Callable[[], Any]) -> float:
    """Seconds of a call that is waited for."""
    import torch

    found = []
    for _ in range(30):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    return median(found)


def graph_s(run: Callable[[], Any]) -> float:
    """Seconds of a replayed CUDA graph of a call."""
    import torch

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    found = []
    for _ in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e-3)
    return median(found)


def measured(row: dict[str, Any]) -> dict[str, Any]:
    """Times of both graphs of a model, by turns."""
    import torch

    line = {"name": row["name"], "predicted": row["predicted"]}
    try:
        with torch.no_grad():
            runs = [built(row[part]) for part in ("before", "after")]
            turns = [[eager_s(run) for run in runs] for _ in range(3)]
            line["eager_s"] = [min(turn[i] for turn in turns) for i in range(2)]
            line["graph_s"] = [graph_s(run) for run in runs]
    except RuntimeError as error:
        line["error"] = str(error)[:300]
    return line


def table(lines: list[dict[str, Any]]) -> str:
    """Ratios of the original's time to that of the rewritten graph."""
    out = [
        "| model | launches | device, predicted | device, measured | eager, predicted | eager, measured |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for line in lines:
        known = line["predicted"]
        before, after = known["launches"]
        cells = [line["name"], f"{before:.0f} to {after:.0f}"]
        if "error" in line:
            out.append("| " + " | ".join([*cells, "", f"not run: {line['error'][:60]}", "", ""]) + " |")
            continue
        for predicted, found in (("device_s", "graph_s"), ("step_s", "eager_s")):
            ratios = [known[predicted][0] / known[predicted][1], line[found][0] / line[found][1]]
            cells += [f"{ratio:.2f}" for ratio in ratios]
        out.append("| " + " | ".join(cells) + " |")
    return "\n".join(out)


def main() -> int:
    """Pack, measure, or print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pack", type=Path, metavar="FILE")
    parser.add_argument("--measure", type=Path, metavar="FILE")
    parser.add_argument("--out", type=Path, metavar="FILE", default=Path("rewrites.jsonl"))
    parser.add_argument("--from", dest="source", type=Path, default=DATA)
    given = parser.parse_args()
    if given.pack is not None:
        given.pack.write_bytes(pickle.dumps(pairs(NAMES)))
        return 0
    if given.measure is not None:
        lines = [json.dumps(measured(row)) for row in pickle.loads(given.measure.read_bytes())]
        given.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return 0
    print(table([json.loads(line) for line in given.source.read_text(encoding="utf-8").splitlines()]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
