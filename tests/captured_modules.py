"""Captured modules that several tests share: recorded once."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import models  # noqa: E402
from steptime.captured.workload import captured_model  # noqa: E402
from steptime.model.captured import CapturedModel  # noqa: E402

GPT = {"layers": 8, "width": 1024, "heads": 16, "vocabulary": 50304, "tokens": 512, "targets": True}
LLAMA = {"layers": 6, "width": 512, "heads": 8, "kv_heads": 4, "hidden": 1408, "vocabulary": 32000, "tokens": 256,
         "targets": True}  # fmt: skip


class UsesRmsNorm(torch.nn.Module):
    """Products that are paired around a norm of the head, and a router that is not paired."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.into = heads, torch.nn.Linear(width, width)
        self.norm, self.out = torch.nn.RMSNorm(width // heads), torch.nn.Linear(width, width)
        self.gate = torch.nn.Linear(width, 4)

    def forward(self, x: Any) -> Any:
        b, t, c = x.shape
        y = self.norm(self.into(x).view(b, t, self.heads, c // self.heads)).reshape(b, t, c)
        return x + self.out(y) * self.gate(x).softmax(-1)[..., :1]


class Checkpointed(torch.nn.Module):
    """Blocks whose forward runs again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        make = torch.nn.Linear
        self.into = make(64, 64)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(make(64, 256), torch.nn.GELU(), make(256, 64)) for _ in range(4)
        )

    def forward(self, x: Any) -> Any:
        x = self.into(x)
        for block in self.blocks:
            x = x + torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return x


def encoder(batch: int = 2) -> Any:
    """PyTorch's own encoder: one weight for queries, keys and values, tokens before samples inside."""
    layer = torch.nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), (torch.empty(batch, 16, 64),)


def checkpointed(batch: int = 2) -> Any:
    """The above."""
    return Checkpointed(), (torch.empty(batch, 16, 64),)


def _meta(factory: Any, sizes: dict[str, Any]) -> tuple[Any, Any]:
    with torch.device("meta"):
        module, _ = factory(**sizes)

    def inputs_of_batch(batch: int) -> Any:
        with torch.device("meta"):
            return factory(**{**sizes, **({"layers": 1} if "layers" in sizes else {}), "batch": batch})[1]

    return module, inputs_of_batch


def _llama(**sizes: Any) -> Any:
    module, inputs = models.llama(**sizes)
    for layer in module.layers:
        layer.input_norm, layer.post_norm = (torch.nn.RMSNorm(sizes["width"]) for _ in range(2))
    module.norm = torch.nn.RMSNorm(sizes["width"])
    return module, inputs


@cache
def captured(name: str) -> CapturedModel:
    """One of the modules below as a workload in bf16."""
    makes: dict[str, tuple[Any, dict[str, Any], Any]] = {
        "gpt": (models.gpt, GPT, None), "llama": (_llama, LLAMA, None),
        "resnet": (models.resnet50, {}, "cross-entropy"),
        "bert": (models.bert, {"layers": 4, "width": 128}, models.loss_of), "moe": (models.moe, {}, models.loss_of),
        "gpt_eager": (models.gpt_eager, {"layers": 4}, models.loss_of), "mlp": (models.mlp, {}, "mse"),
        "encoder": (encoder, {}, "sum"), "checkpointed": (checkpointed, {}, "sum"),
        "vit": (models.vit, {"layers": 4}, "cross-entropy"), "unet": (models.unet, {}, "sum"),
    }  # fmt: skip
    factory, sizes, loss = makes[name]
    module, inputs_of_batch = _meta(factory, sizes)
    return captured_model(module, inputs_of_batch, dtype="bf16", loss=loss)


def asserts(y: Any) -> Any:
    """Checks values by statements that pytest does not rewrite here."""
    assert (y > -5).all() and not (y > 5).any(), "outside"
    assert y.min() > 0 or y.max() < 0
    assert all((part > -5).all() for part in y)
    torch._assert((y < 9).all(), "large")
    return y
