"""Models of the grid of planners, each with its inputs and its loss: real widths, few blocks.

Equal blocks have the same shardings in the planner, so that two or three of them stand for any number.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "examples")]

import gpt  # noqa: E402

from public_models.rows import ids, loss_of  # noqa: E402

Given = tuple[nn.Module, Any, Callable[[Any], torch.Tensor]]
"""A module, the arguments of its forward, its loss."""


class UNet(nn.Module):
    """Two levels down and up with skips."""

    def __init__(self, width: int) -> None:
        super().__init__()
        first, second, third = width, 2 * width, 4 * width
        self.first, self.down_1 = nn.Conv2d(3, first, 3, padding=1), nn.Conv2d(first, second, 3, 2, padding=1)
        self.inner, self.down_2 = nn.Conv2d(second, second, 3, padding=1), nn.Conv2d(second, third, 3, 2, padding=1)
        self.middle = nn.Conv2d(third, third, 3, padding=1)
        self.up_2, self.join_2 = nn.ConvTranspose2d(third, second, 2, 2), nn.Conv2d(third, second, 3, padding=1)
        self.up_1, self.join_1 = nn.ConvTranspose2d(second, first, 2, 2), nn.Conv2d(second, first, 3, padding=1)
        self.out = nn.Conv2d(first, 3, 1)

    def forward(self, x: Any) -> Any:
        """Of images to images."""
        outer = torch.relu(self.first(x))
        inner = torch.relu(self.inner(torch.relu(self.down_1(outer))))
        x = torch.relu(self.middle(torch.relu(self.down_2(inner))))
        x = torch.relu(self.join_2(torch.cat([self.up_2(x), inner], 1)))
        return self.out(torch.relu(self.join_1(torch.cat([self.up_1(x), outer], 1))))


class WideBlock(nn.Module):
    """Two convolutions with batch norms and a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm_1, self.norm_2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Any) -> Any:
        """Of images to images of the same shape."""
        return torch.relu(x + self.norm_2(self.two(torch.relu(self.norm_1(self.one(x))))))


def wide(width: int, batch: int, size: int) -> Given:
    """A wide ResNet of small images: stem, two blocks, head."""
    blocks = (WideBlock(width) for _ in range(2))
    module = nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1024)
    )
    return module, (torch.randn(batch, 3, size, size),), loss_of


def of_gpt(width: int, batch: int, tokens: int) -> Given:
    """A GPT of two blocks whose head is the token table."""
    return gpt.GPT(2, width, width // 64, 8192, tokens), (torch.zeros(batch, tokens, dtype=torch.int64),), gpt.loss


def of_text(kind: str, batch: int, tokens: int, **settings: Any) -> Given:
    """A transformer of ``transformers`` with two blocks."""
    import transformers

    made = getattr(transformers, kind)
    module = made(made.config_class(**{"num_hidden_layers": 2, "vocab_size": 8192, **settings}))
    return module, {"input_ids": ids(module.config, batch, tokens)}, loss_of


def of_images(batch: int, size: int, blocks: tuple[int, ...], bottleneck: bool = True) -> Given:
    """A ResNet of ``torchvision`` with some blocks in each of its stages."""
    from torchvision.models import resnet

    kind = resnet.Bottleneck if bottleneck else resnet.BasicBlock
    return resnet.ResNet(kind, list(blocks)), (torch.randn(batch, 3, size, size),), loss_of


def of_timm(batch: int, **settings: Any) -> Given:
    """A vision transformer of ``timm``."""
    import timm

    module = timm.create_model("vit_base_patch16_224", pretrained=False, **settings)
    return module, (torch.randn(batch, 3, 224, 224),), loss_of


LLAMA: Final = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 8
}  # fmt: skip
MIXTRAL: Final = {
    "hidden_size": 1024, "intermediate_size": 3584, "num_attention_heads": 16, "num_key_value_heads": 8,
    "num_local_experts": 8,
}  # fmt: skip
MODELS: Final[Mapping[str, Callable[[], Given]]] = {
    "GPT": lambda: of_gpt(1024, 16, 512),
    "GPT, 16 k tokens": lambda: of_gpt(1024, 1, 16384),
    "BERT": lambda: of_text("BertModel", 32, 512),
    "Llama": lambda: of_text("LlamaForCausalLM", 8, 1024, **LLAMA),
    "MoE": lambda: of_text("MixtralForCausalLM", 8, 512, **MIXTRAL),
    "ViT": lambda: of_timm(64, depth=2),
    "wide ResNet": lambda: wide(1024, 32, 16),
    "U-Net": lambda: (UNet(64), (torch.randn(32, 3, 128, 128),), loss_of),
    "ResNet-18": lambda: of_images(64, 128, (2, 2, 2, 2), bottleneck=False),
    "ResNet-50, 4 blocks": lambda: of_images(64, 224, (1, 1, 1, 1)),
}
"""Of the blocks of ResNet-50 the first of each stage, which are all different."""
