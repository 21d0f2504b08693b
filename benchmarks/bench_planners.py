"""The planner of shardings next to other searches and manual recipes, over a grid of models, clusters and devices.

    python benchmarks/bench_planners.py                 prints the table
    python benchmarks/bench_planners.py --write         also writes it to benchmarks/planners.md
    python benchmarks/bench_planners.py --cpu 2         CPU seconds of each search; default 0.1
    python benchmarks/bench_planners.py --seconds 600   starts no case after as many seconds of wall time

Ends with 1 if any search or recipe is better than the planner by more than rounding.
"""

from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

import argparse  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from collections import Counter  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from math import inf  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from torch import nn  # noqa: E402

from machine import report  # noqa: E402
from steptime.captured.cost import Timer  # noqa: E402
from steptime.captured.graph import Program  # noqa: E402
from steptime.captured.record import capture  # noqa: E402
from steptime.errors import UserError  # noqa: E402
from steptime.hardware import load_cluster  # noqa: E402
from steptime.sharding.build import built  # noqa: E402
from steptime.sharding.comparison import METHODS, Comparison, compared  # noqa: E402
from steptime.sharding.flow import Flow, flow_of  # noqa: E402
from steptime.sharding.ilp import least_limit  # noqa: E402
from steptime.sharding.mesh import mesh_on, parse_axes  # noqa: E402
from steptime.units import format_seconds  # noqa: E402

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "examples")]

import gpt  # noqa: E402

from public_models.rows import ids, loss_of  # noqa: E402

PLACES = (("dgx-h100", "4"), ("dgx-h100", "8"), ("dgx-a100", "2x8"), ("rtx4090-8", "32"))
"""Cluster and mesh: 4, 8, 16 and 32 devices; the last over a slow network."""
TIGHT = 1.15
ROUNDING = 1e-6


class UNet(nn.Module):
    """Two levels down and up with a skip."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 2 * width, 3, 2, padding=1)
        self.middle = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.last, self.out = nn.Conv2d(2 * width, width, 3, padding=1), nn.Conv2d(width, 3, 1)

    def forward(self, x: Any) -> Any:
        """Of images to images."""
        skip = torch.relu(self.first(x))
        y = self.up(torch.relu(self.middle(torch.relu(self.down(skip)))))
        return self.out(torch.relu(self.last(torch.cat([y, skip], 1))))


class WideBlock(nn.Module):
    """Two convolutions with batch norms and a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm_1, self.norm_2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Any) -> Any:
        """Of images to images of the same shape."""
        return torch.relu(x + self.norm_2(self.two(torch.relu(self.norm_1(self.one(x))))))


def wide(width: int, batch: int, size: int) -> Any:
    """A wide ResNet of small images: stem, two blocks, head."""
    blocks = (WideBlock(width) for _ in range(2))
    module = nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1024)
    )
    return module, (torch.randn(batch, 3, size, size),), loss_of


def of_gpt(width: int, batch: int, tokens: int) -> Any:
    return gpt.GPT(2, width, width // 64, 16384, tokens), (torch.zeros(batch, tokens, dtype=torch.int64),), gpt.loss


def of_text(kind: str, batch: int, tokens: int, **settings: Any) -> Any:
    import transformers

    made = getattr(transformers, kind)
    module = made(made.config_class(**{"num_hidden_layers": 2, "vocab_size": 16384, **settings}))
    return module, {"input_ids": ids(module.config, batch, tokens)}, loss_of


def of_images(name: str, batch: int, size: int, **settings: Any) -> Any:
    import torchvision

    return getattr(torchvision.models, name)(weights=None, **settings), (torch.randn(batch, 3, size, size),), loss_of


def of_vit(batch: int) -> Any:
    import transformers

    module = transformers.ViTModel(transformers.ViTConfig(num_hidden_layers=2))
    return module, {"pixel_values": torch.randn(batch, 3, 224, 224)}, loss_of


LLAMA = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 8}
MODELS: dict[str, Callable[[], Any]] = {
    "GPT-2": lambda: of_gpt(768, 32, 1024),
    "wide ResNet": lambda: wide(1024, 32, 16),
    "ResNet-18": lambda: of_images("resnet18", 64, 128),
    "GPT, 32 k tokens": lambda: of_gpt(1024, 1, 32768),
    "BERT": lambda: of_text("BertModel", 64, 512),
    "ViT": lambda: of_vit(64),
    "U-Net": lambda: (UNet(64), (torch.randn(32, 3, 128, 128),), loss_of),
    "Llama": lambda: of_text("LlamaForCausalLM", 8, 2048, **LLAMA),
    "MoE": lambda: of_text(
        "MixtralForCausalLM", 8, 1024, hidden_size=1024, intermediate_size=3584, num_attention_heads=16,
        num_key_value_heads=8, num_local_experts=8),
}  # fmt: skip


def program_of(name: str) -> Program:
    module, inputs, loss = MODELS[name]()
    return capture(module, inputs, loss=loss, optimizer="adamw", training=True, target="cuda", fold=True)


def cases(flow: Flow, cpu_s: float) -> Iterator[tuple[str, str, Comparison | str]]:
    """Memory in words, mesh and comparison, for every place with and without a limit."""
    for cluster, axes in PLACES:
        machines = load_cluster(cluster)
        devices = 1
        for size in axes.split("x"):
            devices *= int(size)
        given = built(flow, mesh_on(machines, parse_axes(axes), devices), Timer(device=machines.device))
        place = f"{cluster} | {axes}"
        yield place, "free", compared(given, METHODS, cpu_s=cpu_s)
        least = least_limit(given.problem(None), time_limit_s=2.0)
        if least is None:
            yield place, "tight", "the least memory was not found in 2 s"
            continue
        limited = built_within(given, TIGHT * least[1])
        try:
            yield place, "tight", compared(limited, METHODS, cpu_s=cpu_s)
        except UserError as error:
            yield place, "tight", str(error)


def built_within(given: Any, limit_bytes: float) -> Any:
    from dataclasses import replace

    return replace(given, limit_bytes=limit_bytes)


def line(model: str, place: str, memory: str, found: Comparison | str) -> str:
    if isinstance(found, str):
        return f"| {model} | {place} | {memory} | - | - | {found} | - | - |"
    plan, other = found.plan, found.best_other
    assert other is not None and other.step_s is not None
    return (
        f"| {model} | {place} | {memory} | {format_seconds(plan.step_s)} | {plan.gap:.2%} | {other.name} | "
        f"{other.step_s / plan.step_s - 1:+.2%} | {found.entries[0].cpu_s:.1f} |"
    )


def loses(found: Comparison | str) -> bool:
    """Whether a method is better than the planner by more than rounding."""
    if isinstance(found, str):
        return False
    other = found.best_other
    return other is not None and (other.step_s or inf) < found.plan.step_s * (1 - ROUNDING)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--cpu", type=float, default=0.1)
    parser.add_argument("--seconds", type=float, default=inf)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    given = parser.parse_args()
    lines: list[str] = []
    lost: list[str] = []
    best: Counter[str] = Counter()
    counted, started, until = 0, time.process_time(), time.monotonic() + given.seconds
    for model in given.models:
        if time.monotonic() > until:
            break
        for place, memory, found in cases(flow_of(program_of(model)), given.cpu):
            lines.append(line(model, place, memory, found))
            print(f"{time.process_time() - started:6.0f} {lines[-1]}", flush=True)
            if isinstance(found, Comparison):
                counted += 1
                best[found.best_other.name if found.best_other else "none"] += 1
            if loses(found):
                lost.append(lines[-1])
            if time.monotonic() > until:
                break
    head = ["| model | cluster | mesh | memory | planner | gap | best other | its time | planner CPU s |",
            "|---|---|---|---|--:|--:|---|--:|--:|"]  # fmt: skip
    notes = (
        f"{counted} cases compared of {len(given.models) * len(PLACES) * 2}; in {len(lost)} of them another method "
        f"beats the planner by more than {ROUNDING:g}. Best others: "
        f"{', '.join(f'{name} {count}' for name, count in best.most_common())}.\n\n"
        f"Each search has {given.cpu:g} CPU s; nothing overlaps. Tight: {TIGHT} times the least memory with which "
        "anything fits, by the integer program. Gap: of the planner to the proved bound. Its time: of the best "
        "of all others, relative to the planner's. Models have two or three blocks.\n"
        f"{'' if given.seconds == inf else f'No case was started after {given.seconds:g} s. '}"
    )
    report("planners", "Planner, searches and recipes", "\n".join([*head, *lines]), notes)
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
