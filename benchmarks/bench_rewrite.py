"""Sign and size of predicted gains of rewrites against this machine's CPU: one thread, CPU time, by turns.

    steptime calibrate machine --quick --out mine.toml
    python benchmarks/bench_rewrite.py mine.toml [--seconds 0.12] [--only "layer norm"] [--no-inductor] [-o rewrite.md]

Every pair is a rewrite and a shape, losers included. The prediction is that of `steptime rewrite` for the device of the
calibrated file. ONNX Runtime runs both graphs too, with all its optimisations.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from steptime.errors import UserError
from steptime.hardware import device_within
from steptime.rewrite.engine import apply_passes
from steptime.rewrite.flow import Flow
from steptime.rewrite.measuring import by_turns, paired, runner
from steptime.rewrite.passes import products as own_products
from steptime.rewrite.pricing import Prices, timer_for
from steptime.rewrite.rewriting import unfused
from steptime.rewrite.trace import trace
from steptime_lab.compiling import compiled, inductor_here

HERE = Path(__file__).parent
R = torch.randn


class Of(nn.Module):
    """A function as a module, with weights by name."""

    def __init__(self, function: Callable[..., Any], weights: dict[str, Any]) -> None:
        super().__init__()
        self.function = function
        for name, weight in weights.items():
            setattr(self, name, weight if isinstance(weight, nn.Module) else nn.Parameter(weight))

    def forward(self, *args: Any) -> Any:
        """The function."""
        return self.function(self, *args)


@dataclass(frozen=True)
class Pair:
    """A rewrite at a shape."""

    name: str
    shape: str
    function: Callable[..., Any]
    inputs: tuple[Any, ...]
    weights: dict[str, Any]
    mutant: Callable[..., Any] | None = None
    """The rewritten function, where no pass makes it."""


def layer_norm(m: Any, x: Any) -> Any:
    """Written out."""
    c = x - x.mean(-1, keepdim=True)
    return c * torch.rsqrt((c * c).mean(-1, keepdim=True) + 1e-5) * m.w + m.b


def gelu(m: Any, x: Any) -> Any:
    """Written out."""
    return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3)))


def softmax(m: Any, x: Any) -> Any:
    """Written out."""
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def attention(m: Any, q: Any, k: Any, v: Any) -> Any:
    """Written out."""
    return torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, -1) @ v


def conv(c: int, k: int, groups: int = 1) -> nn.Module:
    """Convolution and batch norm."""
    return nn.Sequential(nn.Conv2d(c, c, k, padding=k // 2, groups=groups, bias=False), nn.BatchNorm2d(c))


def joined() -> Iterator[Pair]:
    """Products that share an input."""
    for t, d in product((1, 4, 16, 64, 128, 256), (128, 256, 512, 768)):
        three = {name: nn.Linear(d, d) for name in "qkv"}
        yield Pair("QKV joined", f"{t}x{d}", lambda m, x: (m.q(x), m.k(x), m.v(x)), (R(t, d),), three)
    for t, d in product((1, 16, 128), (256, 512)):
        two = {name: nn.Linear(d, 4 * d, bias=False) for name in ("g", "u")}
        yield Pair("gate and up joined", f"{t}x{d}", lambda m, x: (m.g(x), m.u(x)), (R(t, d),), two)


def algebra() -> Iterator[Pair]:
    """Products and sums."""
    for t, d in product((1, 8, 32, 128, 512), (128, 256, 512)):
        x, y, one, shape = R(t, d), R(t, d), {"a": R(d, d)}, f"{t}x{d}"
        yield Pair("x A + x B", shape, lambda m, x: x @ m.a + x @ m.b, (x,), {**one, "b": R(d, d)})
        yield Pair("x A + y A", shape, lambda m, x, y: x @ m.a + y @ m.a, (x, y), one)
        yield Pair("matmul + bias", shape, lambda m, x: x @ m.a + m.b, (x,), {**one, "b": R(d)})
        yield Pair("matmul + sum", shape, lambda m, x, y: x @ m.a + y, (x, y), one)
        yield Pair("c (x W)", shape, lambda m, x: (x @ m.a) * 0.5, (x,), one)
        lora = {"w": R(d, d), "a": R(d, 8), "b": R(8, d)}
        yield Pair("LoRA merged", shape, lambda m, x: x @ m.w + (x @ m.a @ m.b) * 0.5, (x,), lora)
    for n, r in product((64, 128, 256), (4, 16)):
        yield Pair("(a b) c", f"{n}x{r}", lambda m, a, b, c: a @ b @ c, (R(n, r), R(r, n), R(n, r)), {})
        yield Pair("a (b c)", f"{n}x{r}", lambda m, a, b, c: a @ (b @ c), (R(r, n), R(n, n), R(n, n)), {})


def layers() -> Iterator[Pair]:
    """Layers written out, and copies."""
    for rows, d in product((1, 16, 128, 512), (256, 768, 1024)):
        x, shape = R(rows, d), f"{rows}x{d}"
        yield Pair("layer norm", shape, layer_norm, (x,), {"w": R(d), "b": R(d)})
        yield Pair("GELU", shape, gelu, (x,), {})
        yield Pair("softmax", shape, softmax, (x,), {})
        yield Pair("SiLU", shape, lambda m, y: y * y.sigmoid(), (x,), {})
        yield Pair("constant folding", shape, lambda m, y: y * (1 + m.w.exp()), (x,), {"w": R(d)})
    for s, (h, d) in product((16, 64, 128, 256), ((4, 32), (8, 64))):
        heads = (R(1, h, s, d), R(1, h, s, d), R(1, h, s, d))
        yield Pair("attention", f"{h}x{s}x{d}", attention, heads, {})
    for c, size, k in product((16, 32, 64), (8, 14, 28), (1, 3)):
        own = {"f": conv(c, k).eval()}
        yield Pair("conv + batch norm", f"{c}x{size} k{k}", lambda m, x: m.f(x), (R(1, c, size, size),), own)
    for n in (32, 128, 256):
        two = (R(8, n, n), R(8, n, n))
        turned = Pair("view elimination", f"8x{n}", lambda m, x, y: torch.bmm(x.mT.contiguous(), y), two, {})
        yield turned


def fire(m: Any, x: Any) -> Any:
    """Two convolutions of a fire module, side by side."""
    return torch.cat([F.conv2d(x, m.one), F.conv2d(x, m.three, padding=1)], 1)


def dilated(m: Any, x: Any) -> Any:
    """Every second pixel."""
    return F.conv2d(x, m.w, padding=2, dilation=2)


def space_to_batch(m: Any, x: Any) -> Any:
    """The four images of every second pixel as a batch, and back."""
    n, c, h, w = x.shape
    parts = x.reshape(n, c, h // 2, 2, w // 2, 2).permute(3, 5, 0, 1, 2, 4).reshape(4 * n, c, h // 2, w // 2)
    y = F.conv2d(parts, m.w, padding=1).reshape(2, 2, n, -1, h // 2, w // 2)
    return y.permute(2, 3, 4, 0, 5, 1).reshape(n, -1, h, w)


def stacked(m: Any, x: Any) -> Any:
    """All images of a batch above each other, with a row of zeros between them."""
    n, c, h, w = x.shape
    tall = F.pad(x, (0, 0, 0, 1)).transpose(0, 1).reshape(1, c, n * (h + 1), w)
    return F.conv2d(tall, m.w, padding=1).reshape(-1, n, h + 1, w)[:, :, :h].transpose(0, 1)


def mutants() -> Iterator[Pair]:
    """Rewrites that lose on a processor: enlarged windows, and changes of layout around a convolution."""
    for (c, e), size in product(((16, 64), (32, 64), (48, 128)), (7, 14, 28)):
        one, three = R(e, c, 1, 1), R(e, c, 3, 3)
        own = {"one": one, "three": three, "both": torch.cat([F.pad(one, (1, 1, 1, 1)), three])}
        shape = f"{c}-{e}x{size}"
        yield Pair("enlarged and merged", shape, fire, (R(1, c, size, size),), own,
                   mutant=lambda m, x: F.conv2d(x, m.both, padding=1))  # fmt: skip
    for c, size in product((8, 16, 32, 64), (14, 28, 56)):
        own = {"w": R(c, c, 3, 3)}
        yield Pair("space to batch (PET)", f"{c}x{size}", dilated, (R(1, c, size, size),), own, mutant=space_to_batch)
    for n, c, size in product((2, 8), (8, 16, 32), (7, 14)):
        x, own = R(n, c, size, size), {"w": R(c, c, 3, 3)}
        yield Pair("batch to height (PET)", f"{n}x{c}x{size}", lambda m, x: F.conv2d(x, m.w, padding=1), (x,), own,
                   mutant=stacked)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """Predicted and measured ratios of a pair: time before over time after."""

    name: str
    shape: str
    predicted: float
    measured: float
    runtime: float | None
    applied: bool
    """Whether it is applied by default: the predicted gain exceeds the doubt."""


def rewritten(pair: Pair, device: Any) -> tuple[Flow, Flow, Prices, bool] | None:
    """The graph, what it becomes, their prices, and whether the rewrite is applied by default."""
    module = Of(pair.function, pair.weights).eval()
    flow = trace(module, pair.inputs).flow
    if pair.mutant is not None:
        mutant = Of(pair.mutant, pair.weights).eval()
        after = trace(mutant, pair.inputs).flow
        torch.testing.assert_close(module(*pair.inputs), mutant(*pair.inputs), rtol=1e-3, atol=1e-3)
        prices = Prices(timer_for(flow, device))
        old, new = (prices.sums(each, each.order) for each in (flow, after))
        return flow, after, prices, prices.change(old, old, new).band_s[0] > 0
    found = apply_passes(flow, device, everything=True, passes=PASSES)
    if not any(step.applied and not step.tidy for step in found.steps):
        return None
    chosen = apply_passes(flow, device, passes=PASSES)
    applied = any(step.applied and not step.tidy for step in chosen.steps)
    return flow, unfused(found.after), found.prices, applied


def measured(pair: Pair, device: Any, seconds: float) -> Row | None:
    """One pair; None where nothing matches."""
    found = rewritten(pair, device)
    if found is None:
        return None
    flow, after, price, applied = found
    old, new = (price.table(each).totals.step_s for each in (flow, after))
    before_s, after_s = paired(flow, after, seconds)
    try:
        runtime: tuple[float, float] | None = paired(flow, after, seconds / 4, "onnxruntime")
    except (UserError, ImportError, RuntimeError):
        runtime = None
    ratio = None if runtime is None else runtime[0] / runtime[1]
    return Row(pair.name, pair.shape, old / new, before_s / after_s, ratio, applied)


PASSES = ("constant folding", "identity", "stacked views", "view elimination", "softmax", "layer norm", "GELU", "SiLU",
          "attention", *(row.name for row in (*own_products.PASSES, *own_products.LAST)))  # fmt: skip

NEUTRAL = 0.03
"""Ratios this near to 1 have no sign: the noise of two runs."""


def same_sign(row: Row) -> bool:
    """Whether prediction and measurement agree on who is faster, where the measurement says."""
    return abs(row.measured - 1) <= NEUTRAL or (row.predicted > 1) == (row.measured > 1)


COMPILED = (
    "layer norm 128x768", "GELU 128x768", "softmax 128x768", "SiLU 128x768", "constant folding 128x768",
    "attention 8x64x64", "QKV joined 16x256", "LoRA merged 32x256",
)  # fmt: skip
"""Pairs whose first graph PyTorch's compiler gets too."""


@dataclass(frozen=True)
class Fused:
    """What a compiler is predicted to gain, and what Inductor gains here."""

    name: str
    kernels: tuple[int, int]
    """Generated and called of a library, as predicted."""
    found: tuple[int, int]
    """As Inductor made them."""
    predicted: float
    measured: float


def fused(pair: Pair, device: Any, seconds: float) -> Fused:
    """A pair's first graph under PyTorch's compiler."""
    module = Of(pair.function, pair.weights).eval()
    flow = trace(module, pair.inputs).flow
    here = inductor_here(module, pair.inputs)
    gain = compiled(flow, device)
    eager_s, inductor_s = by_turns(runner(flow), runner(flow, "inductor"), seconds)
    return Fused(
        f"{pair.name} {pair.shape}", (gain.kernels, gain.library), (here.generated_kernels, here.library_kernels),
        gain.eager["step_time_s"] / gain.fused["step_time_s"], eager_s / inductor_s,
    )  # fmt: skip


def compiled_text(rows: list[Fused]) -> str:
    """The section on PyTorch's compiler."""
    error = median(abs(row.predicted / row.measured - 1) for row in rows)
    lines = f"""
## What Inductor fuses and gains

The graphs before the rewrite under `torch.compile`, weights not frozen. Kernels are generated + called of a library;
gains are time in eager mode over time compiled, guards included. Predicted as `steptime rewrite --compile` predicts;
off by {100 * error:.0f} % in the median.

| graph | kernels predicted | by Inductor | gain predicted | measured |
|---|--:|--:|--:|--:|""".splitlines()
    lines += [
        f"| {row.name} | {row.kernels[0]} + {row.kernels[1]} | {row.found[0]} + {row.found[1]} | "
        f"{row.predicted:.2f} | {row.measured:.2f} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def _all() -> Iterator[Pair]:
    return chain(joined(), algebra(), layers(), mutants())


def report(rows: list[Row], device: Any, spent: float) -> str:
    """The page."""
    agree = sum(map(same_sign, rows)) / len(rows)
    chosen = [row for row in rows if row.applied]
    right = sum(row.measured > 1 - NEUTRAL for row in chosen) / max(len(chosen), 1)
    error = median(abs(row.predicted / row.measured - 1) for row in rows)
    version = torch.__version__.split("+")[0]
    text = f"""# Predicted and measured gains of rewrites

`steptime calibrate machine --quick --out mine.toml`, then
`python benchmarks/bench_rewrite.py mine.toml -o benchmarks/rewrite.md`: one CPU thread, CPU time, runs by turns,
the fastest fifth, PyTorch {version} eager; predicted for {device.title} from operators that were
measured one by one at other shapes. Ratios are time before over time after. ONNX Runtime has all its optimisations.

{len(rows)} pairs of a rewrite and a shape in {spent:.0f} s of CPU time. The sign is right in {100 * agree:.0f} %
(ratios within {100 * NEUTRAL:.0f} % of 1 have none); the ratio is off by {100 * error:.0f} % in the median.
By default {len(chosen)} of them are applied, since the gain exceeds the doubt; {100 * right:.0f} % of these are not
slower than before.

| rewrite | pairs | applied | predicted | measured | ONNX Runtime | sign right | median error |
|---|--:|--:|--:|--:|--:|--:|--:|"""
    lines = text.splitlines()
    for name in dict.fromkeys(row.name for row in rows):
        own = [row for row in rows if row.name == name]
        runs = [row.runtime for row in own if row.runtime is not None]
        lines.append(
            f"| {name} | {len(own)} | {sum(row.applied for row in own)} | "
            f"{median(r.predicted for r in own):.2f} | {median(r.measured for r in own):.2f} | "
            f"{f'{median(runs):.2f}' if runs else '-'} | {100 * sum(map(same_sign, own)) / len(own):.0f} % | "
            f"{100 * median(abs(r.predicted / r.measured - 1) for r in own):.0f} % |"
        )
    wrong = sorted((row for row in rows if not same_sign(row)), key=lambda row: row.measured)
    lines += ["", "Pairs with the wrong sign:", ""] if wrong else []
    lines += [f"* {r.name} {r.shape}: predicted {r.predicted:.2f}, measured {r.measured:.2f}" for r in wrong[:20]]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("device", help="cluster file of this machine, as `steptime calibrate machine` writes it")
    parser.add_argument("--seconds", type=float, default=0.12)
    parser.add_argument("--only", default="", help="rewrites whose name begins so")
    parser.add_argument("--no-inductor", action="store_true", help="leave out PyTorch's compiler")
    parser.add_argument("--budget", type=float, default=300.0, help="CPU seconds in all")
    parser.add_argument("-o", dest="output", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = device_within(given.device)
    start, rows = time.process_time(), []
    for pair in _all():
        if time.process_time() - start > given.budget:
            print("the budget is spent", file=sys.stderr)
            break
        if not pair.name.startswith(given.only):
            continue
        row = measured(pair, device, given.seconds)
        if row is not None:
            rows.append(row)
            print(f"{row.name:22} {row.shape:12} {row.predicted:6.2f} {row.measured:6.2f} {row.runtime or 0:6.2f}",
                  file=sys.stderr)  # fmt: skip
    text = report(rows, device, time.process_time() - start)
    wanted = [pair for pair in _all() if f"{pair.name} {pair.shape}" in COMPILED and pair.name.startswith(given.only)]
    if wanted and not given.no_inductor:
        text += compiled_text([fused(pair, device, given.seconds) for pair in wanted])
    if given.output is None:
        print(text)
    else:
        given.output.write_text(text)


if __name__ == "__main__":
    main()
