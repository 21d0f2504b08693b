"""The plans of one model by its dimensions and by its module, side by side; the argument is the model's TOML."""

import sys

import gpt
import torch
from torch import nn

import steptime

JOB = {"gpus": 64, "global_batch": 256, "seq": 2048}
PLANS = (
    {"micro_batch": 1, "zero": 3},
    {"micro_batch": 4, "zero": 3, "recompute": "full"},
    {"micro_batch": 2, "tp": 8},
    {"micro_batch": 2, "tp": 4, "sp": False},
    {"micro_batch": 2, "tp": 4, "pp": 2},
    {"micro_batch": 2, "tp": 2, "pp": 8, "vpp": 2},
)


class Trained(nn.Module):
    """A model whose output is the loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens):
        """Of (batch, tokens) to a number."""
        return gpt.loss(self.model(tokens))


def main(dimensions: str) -> None:
    """Print the best plan of both, and the module's time and memory of each plan against the formula's."""
    with torch.device("meta"):
        module = Trained(gpt.GPT(32, 4096, 32, 50257, 2048))
    captured = steptime.captured_model(
        module, lambda batch: (torch.zeros(batch, 2048, dtype=torch.int64),), dtype="bf16"
    )
    job = {name: value for name, value in JOB.items() if name != "seq"}
    for name, best in (
        ("formula", steptime.api.plan(dimensions, "dgx-h100", top=1, **JOB).plans[0]),
        ("module", steptime.api.plan(captured, "dgx-h100", top=1, **job).plans[0]),
    ):
        degrees = " ".join(f"{key} {best.plan[key]}" for key in ("dp", "tp", "pp", "micro_batch", "zero"))
        print(f"best by {name}: {degrees}, {best.step_time_s:.3f} s, {best.peak_memory_bytes / 1e9:.1f} GB")
    print(f"{'module against formula':42s} {'step time':>10s} {'memory':>8s}")
    for plan in PLANS:
        a = steptime.api.estimate(dimensions, "dgx-h100", plan=plan, **JOB)
        b = steptime.api.estimate(captured, "dgx-h100", plan=plan, **job)
        time, memory = b.step_time_s / a.step_time_s - 1, b.peak_memory_bytes / a.peak_memory_bytes - 1
        print(f"{' '.join(f'{key} {value}' for key, value in plan.items()):42s} {time:+10.1%} {memory:+8.1%}")


if __name__ == "__main__":
    main(sys.argv[1])
