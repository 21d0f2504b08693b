"""The models of the suite and the algebra of the passes: ONNX Runtime on the exported file and on the rewritten one.

    steptime calibrate machine --quick --out mine.toml
    python benchmarks/bench_rewrite_suite.py mine.toml [--only NAME] [--seconds 6] [--write]
    python benchmarks/bench_rewrite_suite.py --inductor [--only NAME] [--write]

Both files run in one process, by turns, on one thread with all optimisations of ONNX Runtime, in CPU time of the
thread; the 20th percentile counts, since a shared machine only adds time. The exported file is PyTorch's own
(`torch.onnx.export`); the rewritten one is what `steptime rewrite --measure -o FILE.onnx` writes for this machine.
`--inductor` compiles the narrow models of the suite instead and counts kernels and guards, as `--compile` does.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import math
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from models.suite import SMALL, SUITE
from steptime.hardware import device_within
from steptime.rewrite.engine import apply_passes
from steptime.rewrite.export_onnx import onnx_model
from steptime.rewrite.measuring import gain_here
from steptime.rewrite.trace import trace
from steptime_lab.compiling import broken, generated, inductor_here

HERE = Path(__file__).parent
R = torch.randn
ALLOWED = 0.98
"""The least ratio: 2 % slower."""


class Of(nn.Module):
    """A function as a module, with weights by name."""

    def __init__(self, function: Callable[..., Any], weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        for name, weight in weights.items():
            setattr(self, name, nn.Parameter(weight))

    def forward(self, *args: Any) -> Any:
        """The function."""
        return self.function(self, *args)


def case(function: Callable[..., Any], *inputs: Any, **weights: Any) -> Callable[[], tuple[Any, Any]]:
    """A factory as those of the suite."""
    return lambda: (Of(function, weights).eval(), inputs)


def normed(variance: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """A layer norm written out, with the variance of x and of x less its mean."""

    def f(m: Any, x: Any) -> Any:
        c = x - x.mean(-1, keepdim=True)
        return c * torch.rsqrt(variance(x, c) + 1e-5) * m.w + m.b

    return f


def gelu(m: Any, x: Any) -> Any:
    """The form with tanh, the cube as a product, between two products."""
    y = x @ m.a
    return (0.5 * y * (1 + torch.tanh(0.7978845608 * (y + 0.044715 * y * y * y)))) @ m.b


def attention(m: Any, q: Any, k: Any, v: Any) -> Any:
    """Written out."""
    return torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, -1) @ v


def lora(m: Any, x: Any) -> Any:
    """A projection with an adapter of rank 16."""
    return x @ m.w + (x @ m.a @ m.b) * 0.5


T, D, ROW = 128, 512, {"w": R(1024), "b": R(1024)}
HEADS = tuple(R(1, 8, 256, 64) for _ in range(3))
ALGEBRA: Mapping[str, Callable[[], tuple[Any, Any]]] = MappingProxyType(
    {
        "x (B C)": case(lambda m, x, b, c: x @ (b @ c), R(16, D), R(D, D), R(D, D)),
        "(a b) c": case(lambda m, a, b, c: a @ b @ c, R(256, 8), R(8, 256), R(256, 8)),
        "x A + x B": case(lambda m, x: x @ m.a + x @ m.b, R(T, D), a=R(D, D), b=R(D, D)),
        "x A + y A": case(lambda m, x, y: x @ m.a + y @ m.a, R(T, D), R(T, D), a=R(D, D)),
        "LoRA": case(lora, R(T, D), w=R(D, D), a=R(D, 16), b=R(16, D)),
        "three adapters": case(
            lambda m, x: sum((x @ a @ b for a, b in ((m.a, m.b), (m.c, m.d), (m.e, m.f))), x @ m.w), R(T, D), w=R(D, D),
            a=R(D, 64), b=R(64, D), c=R(D, 64), d=R(64, D), e=R(D, 64), f=R(64, D),
        ),
        "duplicated siblings": case(
            lambda m, x, y: ((x + y) @ m.a).relu() * ((y + x) @ m.a).sigmoid(), R(T, D), R(T, D), a=R(D, D)
        ),
        "one weight over steps": case(
            lambda m, x: torch.stack([(row @ m.a).tanh() for row in x.unbind(0)]), R(16, 1, D), a=R(D, D)
        ),
        "layer norm, mean of squares": case(normed(lambda x, c: (c * c).mean(-1, keepdim=True)), R(T, 1024), **ROW),
        "layer norm, var": case(normed(lambda x, c: x.var(-1, unbiased=False, keepdim=True)), R(T, 1024), **ROW),
        "GELU, tanh": case(gelu, R(T, 128), a=R(128, 1024), b=R(1024, 128)),
        "softmax": case(
            lambda m, x: (lambda e: e / e.sum(-1, keepdim=True))((x - x.amax(-1, keepdim=True)).exp()), R(T, 1024)
        ),
        "attention": case(attention, *HEADS),
    }
)  # fmt: skip
"""What the passes know and ONNX Runtime may miss."""


@dataclass(frozen=True)
class Row:
    """A model in ONNX Runtime: seconds of the exported and of the rewritten file, and what was rewritten."""

    name: str
    exported_s: float
    rewritten_s: float
    error: float
    runs: int
    applied: Mapping[str, int]

    @property
    def ratio(self) -> float:
        """Time of the exported file over that of the rewritten one."""
        return self.exported_s / self.rewritten_s


def session(data: bytes | str) -> Any:
    """One thread, all optimisations."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def measured(name: str, factory: Callable[[], tuple[Any, Any]], device: Any, seconds: float) -> Row:
    """One model, both files by turns."""
    module, inputs = factory()
    traced = trace(module, inputs, name=name)
    found = apply_passes(traced.flow, device, measure=partial(gain_here, backend="onnxruntime"))
    applied = Counter[str]()
    for step in found.steps:
        applied[step.name] += step.count * (step.applied and not step.tidy)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        path = str(Path(folder) / "exported.onnx")
        torch.onnx.export(module, inputs, path, dynamo=True, verbose=False)
        sessions = [session(path), session(onnx_model(found.after, traced.weights()).SerializeToString())]
    del module
    runs = []
    for each in sessions:
        given = {put.name: tensor.numpy() for put, tensor in zip(each.get_inputs(), inputs, strict=True)}
        runs.append(lambda each=each, given=given: each.run(None, given))
    times, outputs = by_turns(runs, seconds)
    error = max(float(np.abs(a - b).max() / np.abs(a).max()) for a, b in zip(*outputs, strict=True))
    exported_s, rewritten_s = (float(np.quantile(each, 0.2)) for each in times)
    return Row(name, exported_s, rewritten_s, error, len(times[0]), +applied)


def by_turns(runs: list[Callable[[], Any]], seconds: float) -> tuple[list[list[float]], list[Any]]:
    """CPU seconds of each run of each function, in an order that turns round, and their first results."""
    outputs = [run() for run in runs]
    times: list[list[float]] = [[] for _ in runs]
    spent, turn = 0.0, 0
    while spent < seconds or turn < 6:
        order = list(enumerate(runs))
        for number, run in order if turn % 2 else order[::-1]:
            start = time.thread_time()
            run()
            times[number].append(time.thread_time() - start)
            spent += times[number][-1]
        turn += 1
    return times, outputs


@dataclass(frozen=True)
class Kernels:
    """Predicted and real kernels of a compiled model."""

    name: str
    predicted: tuple[int, int]
    real: tuple[int, int]
    layouts: int
    nodes: int
    guards: int
    compile_s: float


def kernels(name: str) -> Kernels:
    """What Inductor makes of a narrow model, against the prediction."""
    module, inputs = SMALL[name]()
    flow = trace(module, inputs, name=name).flow
    pieces = broken(module, inputs)
    real = inductor_here(module, inputs)
    counts = (real.generated_kernels, real.library_kernels)
    guards = sum(piece.guards for piece in pieces)
    return Kernels(name, generated(flow), counts, real.layout_kernels, real.nodes_before_fusion, guards, real.compile_s)


def report(models: list[Row], algebra: list[Row], device: Any) -> str:
    """The page."""
    import onnxruntime

    slower = [row.name for row in models if row.ratio < ALLOWED]
    more = f" (not {', '.join(slower)})" if slower else ""
    won = [row.name for row in algebra if row.ratio >= 1.5]
    lost = [row.name for row in algebra if row.ratio < ALLOWED]
    text = f"""# The suite in ONNX Runtime

`steptime calibrate machine --quick --out mine.toml`, then
`python benchmarks/bench_rewrite_suite.py mine.toml --write`: ONNX Runtime
{onnxruntime.__version__} with all its optimisations on one thread of {device.title}; the file that
`torch.onnx.export` (PyTorch {torch.__version__.split("+")[0]}) writes and the one that `steptime rewrite` writes, by
turns in one process; 20th percentile of CPU time. Each kind of rewrite was timed in ONNX Runtime first and applied
where it gained more than the noise (`--measure`). A ratio above 1 is a gain.

{len(models) - len(slower)} of {len(models)} models are at most 2 % slower{more}.
{len(won)} of {len(algebra)} cases of algebra gain at least 1.5x, {len(lost)} lose more than 2 %."""
    lines = text.splitlines()
    for title, rows in (("model", models), ("algebra", algebra)):
        lines += [
            "",
            f"| {title} | exported | rewritten | ratio | runs | error | rewrites |",
            "|---|--:|--:|--:|--:|--:|---|",
        ]
        lines += [
            f"| {r.name} | {1e3 * r.exported_s:.3f} ms | {1e3 * r.rewritten_s:.3f} ms | {r.ratio:.2f} | {r.runs} "
            f"| {r.error:.0e} | {', '.join(f'{n} {count}' for n, count in r.applied.items()) or 'none'} |"
            for r in rows
        ]
    return "\n".join(lines) + "\n"


def report_of_kernels(rows: list[Kernels]) -> str:
    """The page of what Inductor fuses."""
    off = [abs(math.log(row.predicted[0] / (row.real[0] - row.layouts))) for row in rows]
    typical = math.expm1(sorted(off)[len(off) // 2])
    text = f"""# What Inductor fuses, and what is predicted

`python benchmarks/bench_rewrite_suite.py --inductor --write`: the narrow models of the suite, compiled for this CPU by
PyTorch {torch.__version__.split("+")[0]} without freezing; generated kernels and calls of libraries in the code that it
writes, and the guards of its tracer. Kernels that only bring images and weights into the layout of the CPU's
convolutions stand apart; a prediction is for devices that have none. The median error of the predicted number is
{100 * typical:.0f} %.

| model | predicted | Inductor | for layouts | libraries | Inductor | nodes before fusion | guards | compiled in |
|---|--:|--:|--:|--:|--:|--:|--:|--:|
"""
    lines = [
        f"| {r.name} | {r.predicted[0]} | {r.real[0] - r.layouts} | {r.layouts} | {r.predicted[1]} | {r.real[1]} "
        f"| {r.nodes} | {r.guards:,} "
        f"| {r.compile_s:.0f} s |"
        for r in rows
    ]
    return text + "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "device", nargs="?", help="cluster file of this machine, as `steptime calibrate machine` writes it"
    )
    parser.add_argument("--seconds", type=float, default=6.0, help="CPU time of a model")
    parser.add_argument("--only", action="append", help="a model or a case; again for more")
    parser.add_argument("--inductor", action="store_true", help="count Inductor's kernels")
    parser.add_argument("--write", action="store_true", help="to the page")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    chosen = [name for name in SMALL if not given.only or name in given.only]
    if given.inductor:
        rows = []
        for name in chosen:
            rows.append(kernels(name))
            print(rows[-1], file=sys.stderr, flush=True)
        emit(report_of_kernels(rows), "rewrite_compiled.md", given.write)
        return
    if given.device is None:
        parser.error("name the cluster file of this machine")
    device = device_within(given.device)
    parts: list[list[Row]] = []
    for table, seconds in ((SUITE, given.seconds), (ALGEBRA, given.seconds / 4)):
        rows = []
        for name, factory in table.items():
            if given.only and name not in given.only:
                continue
            row = measured(name, factory, device, seconds)
            rows.append(row)
            print(f"{name:28} {row.exported_s:9.6f} {row.rewritten_s:9.6f} {row.ratio:6.3f} {row.error:.0e} "
                  f"{dict(row.applied)}", file=sys.stderr, flush=True)  # fmt: skip
        parts.append(rows)
    emit(report(parts[0], parts[1], device), "rewrite_suite.md", given.write)


def emit(text: str, name: str, write: bool) -> None:
    """To the page, or to standard output."""
    if write:
        (HERE / name).write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
