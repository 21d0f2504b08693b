"""Equality saturation with exact extraction on known graphs: size of the e-graph, time, gap, cost before and after.

    python benchmarks/bench_saturation.py [--seconds 20] [--device v100] [--write]

Rows with *rules* have the shipped rules and the merging of siblings; rows with *all* the template passes too. The cost
is the time of the device. Every result is run against its original in fp64.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from public_models.rows import load_torchvision  # noqa: E402
from steptime.hardware import device_within  # noqa: E402
from steptime.rewrite.checking import check  # noqa: E402
from steptime.rewrite.flow import Flow  # noqa: E402
from steptime.rewrite.fused import FusedTimer  # noqa: E402
from steptime.rewrite.passes import PASSES  # noqa: E402
from steptime.rewrite.pricing import Prices  # noqa: E402
from steptime.rewrite.saturation.moves import rule_moves  # noqa: E402
from steptime.rewrite.saturation.search import saturated  # noqa: E402
from steptime.rewrite.scene import Pass  # noqa: E402
from steptime.rewrite.search.problem import CostModel, Problem  # noqa: E402
from steptime.rewrite.trace import trace  # noqa: E402

HERE = Path(__file__).parent
HEAD = """# Equality saturation

Printed by `python benchmarks/bench_saturation.py --write`. Cost: predicted time of the device ({device}). *gap*:
between the cost and the bound of the integer program over the e-graph. *saturated*: no rule finds anything new.
Each result was run against its original in fp64 (relative 1e-10). Times are of this run on 2 shared cores, with a limit
of {seconds:.0f} s.

| graph | operators | moves | e-nodes | program | saturated | rules s | program s | all s | before us | after us | gap |
|---|--:|---|--:|--:|---|--:|--:|--:|--:|--:|--:|
"""


class Recurrent(nn.Module):
    """Steps of a cell with pairs of products, as NasRNN has them."""

    def __init__(self, steps: int, cells: int, width: int) -> None:
        super().__init__()
        self.steps, self.cells = steps, cells
        self.w, self.u = (nn.Parameter(torch.randn(2 * cells, width, width) / width**0.5) for _ in range(2))

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        """The last state."""
        for step in range(self.steps):
            gates = [x[step] @ self.w[i] + h @ self.u[i] for i in range(2 * self.cells)]
            parts = [torch.tanh(a) * torch.sigmoid(b) for a, b in zip(gates[::2], gates[1::2], strict=True)]
            while len(parts) > 1:
                parts = [torch.tanh(a + b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
            h = parts[0]
        return h


def of_recurrent(steps: int, cells: int, width: int) -> Callable[[], tuple[nn.Module, Any]]:
    """A recurrent graph at a size."""
    return lambda: (Recurrent(steps, cells, width), (torch.randn(steps, 16, width), torch.randn(16, width)))


def of_bert() -> tuple[nn.Module, Any]:
    """One layer of BERT base."""
    from tests.models.bert import Layer

    return Layer(768, 12), (torch.randn(1, 128, 768),)


def of_llama() -> tuple[nn.Module, Any]:
    """One block as Llama has it."""
    from tests.models.llama import llama

    return llama(layers=1, width=1024, heads=16, kv_heads=8, hidden=2816, tokens=128, batch=1)


def of_fire() -> tuple[nn.Module, Any]:
    """The first fire block of SqueezeNet."""
    load_torchvision()
    from torchvision.models.squeezenet import Fire

    return Fire(64, 16, 64, 64), (torch.randn(1, 64, 55, 55),)


def of_squeezenet() -> tuple[nn.Module, Any]:
    """The whole of SqueezeNet 1.1."""
    load_torchvision()
    from torchvision.models import squeezenet1_1

    return squeezenet1_1(), (torch.randn(1, 3, 224, 224),)


GRAPHS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "NasRNN-like, 1 step of 4 cells": of_recurrent(1, 4, 512),
    "NasRNN-like, 2 steps of 4 cells": of_recurrent(2, 4, 512),
    "NasRNN-like, 5 steps of 4 cells": of_recurrent(5, 4, 512),
    "NasRNN-like, 10 steps of 8 cells": of_recurrent(10, 8, 512),
    "BERT layer": of_bert,
    "Llama block": of_llama,
    "SqueezeNet fire block": of_fire,
    "SqueezeNet": of_squeezenet,
}


def row(name: str, flow: Flow, kind: str, moves: tuple[Pass, ...], given: argparse.Namespace) -> str:
    """One graph with some moves."""
    device = device_within(given.device)
    cost = CostModel(prices=Prices(FusedTimer(device=device), 512), weights={"device_s": 1.0})
    problem = Problem(flow=flow, moves=moves, cost=cost, on_cuda=True)
    started = perf_counter()
    out = saturated(problem, given.seconds)
    spent = perf_counter() - started
    found = out.found
    if check(flow, found.flow, seeds=1).fp64 > 1e-10:
        raise SystemExit(f"{name}: the graph differs from its original")
    rules_s, program_s = (out.seconds.get(each, 0.0) for each in ("rules", "program"))
    state = "yes" if found.stop.startswith("saturated") else "no"
    operators = sum(bool(node.inputs) for node in flow.order)
    return (
        f"| {name} | {operators} | {kind} | {out.nodes:,} | {out.extracted.nodes:,} "
        f"| {state} | {rules_s:.1f} | {program_s:.1f} | {spent:.1f} "
        f"| {problem.start * 1e6:.1f} | {found.cost * 1e6:.1f} | {found.gap:.1%} |"
    )


def matching() -> str:
    """How fast rules are matched in BERT of two layers."""
    from tests.models.bert import bert

    module, inputs = bert()
    flow = trace(module.eval(), inputs, target="cuda").flow
    cost = CostModel(prices=Prices(FusedTimer(device=device_within("h100-sxm"))), weights={"device_s": 1.0})
    scene = Problem(flow=flow, moves=(), cost=cost, on_cuda=True).scene(flow)
    rows = rule_moves()
    for _ in range(2):  # the first time compiles the rules
        started = perf_counter()
        found = sum(1 for each in rows for _ in each.find(scene))
        spent = perf_counter() - started
    speed = f"{found} matches, {found / spent:,.0f} a second ({spent * 1e3:.0f} ms)"
    return f"\nRules as passes on BERT of 2 layers: {speed}.\n"


def lines(given: argparse.Namespace) -> Iterator[str]:
    """All rows."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for name, build in GRAPHS.items():
        module, inputs = build()
        flow = trace(module.eval(), inputs, target="cuda").flow
        yield row(name, flow, "rules", rule_moves(), given)
        yield row(name, flow, "all", (*PASSES, *rule_moves()), given)


def main() -> None:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--device", default="h100-sxm")
    parser.add_argument("--write", action="store_true", help="write benchmarks/saturation.md")
    given = parser.parse_args()
    text = HEAD.format(device=given.device, seconds=given.seconds)
    for line in lines(given):
        text += line + "\n"
        print(line, flush=True)
    text += matching()
    print(text.splitlines()[-1])
    if given.write:
        (HERE / "saturation.md").write_text(text)


if __name__ == "__main__":
    main()
