"""Models as torch modules and as specifications, and every difference between what the two say of a block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from steptime.model.known import load_catalogue_model
from steptime.model.spec import ModelSpec

torch = pytest.importorskip("torch")
import models  # noqa: E402

BATCH = 2
ELEMENT = 2
"""Bytes of bf16."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Bytes, or matrix operations, that one side has more than the other, per block (or end) and micro-batch."""

    what: str
    reason: str
    amount: Callable[[ModelSpec, int], float]
    """From the specification and the tokens of a micro-batch; positive: the captured module has more."""
    quantity: str = "kept"
    """``kept`` bytes of a block, ``head_forward`` or ``head_backward`` operations before the blocks."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model both ways."""

    name: str
    spec: ModelSpec
    build: Callable[[], tuple[Any, tuple[Any, ...]]]
    loss: Any = None
    differences: tuple[Difference, ...]
    ends: bool = True
    """Whether both have the same embedding and head."""
    same_kernels: bool = True
    """Whether the module has the fused kernels of the formula; then kept bytes agree within 2 %."""

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return BATCH * self.spec.seq_len


LAYER_NORM = Difference(
    what="statistics of two LayerNorms",
    reason="PyTorch keeps mean and deviation of each row; the formula neglects them",
    amount=lambda s, t: 2 * 2 * t * ELEMENT,
)  # fmt: skip
RMS_STATISTIC = Difference(
    what="statistic of two RMSNorms", reason="PyTorch keeps one fp32 number of each row; the formula neglects it",
    amount=lambda s, t: 2 * t * 4,
)  # fmt: skip
SILU = Difference(
    what="output of SiLU", reason="two operators, `silu` and `mul`; the formula has one fused kernel",
    amount=lambda s, t: t * s.ffn_hidden * ELEMENT,
)  # fmt: skip
FLASH = Difference(
    what="random state of flash attention", reason="CUDA's flash attention keeps its random state even without dropout",
    amount=lambda s, t: 2 * 8 + 8,
)  # fmt: skip


def _patch_flops(s: ModelSpec, rows: int) -> float:
    assert s.vision is not None
    return 2.0 * rows * s.hidden * s.vision.channels * s.vision.patch_size**2


CLASS_TOKEN = Difference(
    what="patch product of the class token", reason="the class token has no patch; the formula has a row for it",
    amount=lambda s, t: -_patch_flops(s, BATCH), quantity="head_forward",
)  # fmt: skip
IMAGES = Difference(
    what="gradient of the images",
    reason="nobody asks for it, so the patch product has one product in its backward pass; the formula has two, as for "
    "any product, and the class token's",
    amount=lambda s, t: _patch_flops(s, t - BATCH) - 2 * _patch_flops(s, t), quantity="head_backward",
)  # fmt: skip


def _meta(factory: Callable[..., Any], **sizes: Any) -> Callable[[], Any]:
    def build() -> Any:
        with torch.device("meta"):
            module, inputs = factory(**sizes)
        return module.to(torch.bfloat16), tuple(i.bfloat16() if i.is_floating_point() else i for i in inputs)

    return build


class SwiGLU(torch.autograd.Function):
    """Gate and up as one kernel that keeps both and computes the activation again, as training frameworks have it."""

    @staticmethod
    def forward(ctx: Any, gate: Any, up: Any) -> Any:
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        gate, up = ctx.saved_tensors
        return torch.empty_like(gate), torch.empty_like(up)


def _fused(layer: Any) -> Callable[..., Any]:
    def forward(x: Any, cos: Any, sin: Any) -> Any:
        x = x + layer.attention(layer.input_norm(x), cos, sin)
        y = layer.post_norm(x)
        return x + layer.down_proj(SwiGLU.apply(layer.gate_proj(y), layer.up_proj(y)))

    return forward


def _llama(layers: int, fused: bool = False, **sizes: Any) -> Any:
    """With the norm that PyTorch has, and a fused SwiGLU on request."""
    module, inputs = models.llama(layers=layers, targets=True, **sizes)
    width = sizes["width"]
    for layer in module.layers:
        layer.input_norm, layer.post_norm = (torch.nn.RMSNorm(width) for _ in range(2))
        if fused:
            layer.forward = _fused(layer)
    module.norm = torch.nn.RMSNorm(width)
    return module, inputs


GPT2 = load_catalogue_model("gpt2")
GPT2_SIZES = {
    "layers": 12, "width": 768, "heads": 12, "vocabulary": 50257, "tokens": 1024, "batch": BATCH, "targets": True,
}  # fmt: skip
LLAMA3 = replace(load_catalogue_model("llama3-8b"), layers=8)
LLAMA3_SIZES = {
    "width": 4096, "heads": 32, "kv_heads": 8, "hidden": 14336, "vocabulary": 128256, "tokens": LLAMA3.seq_len,
    "batch": BATCH,
}  # fmt: skip
BERT = replace(
    GPT2, name="bert-base-uncased", family="bert", causal=False, seq_len=512, max_positions=512, vocab=0,
    position="none", final_norm=False, source="arXiv 1810.04805",
)  # fmt: skip

CASES = (
    Case(name="GPT-2", spec=replace(GPT2, dropout=False), build=_meta(models.gpt, **GPT2_SIZES),
         differences=(LAYER_NORM, FLASH)),
    Case(name="GPT-2 with dropout", spec=GPT2, build=_meta(models.gpt, dropout=0.1, **GPT2_SIZES),
         differences=(LAYER_NORM, FLASH)),
    Case(name="Llama 3 8B, 8 layers", spec=LLAMA3, build=_meta(_llama, layers=8, **LLAMA3_SIZES),
         differences=(RMS_STATISTIC, SILU, FLASH), same_kernels=False),
    Case(name="Llama 3 8B, fused SwiGLU", spec=LLAMA3, build=_meta(_llama, layers=8, fused=True, **LLAMA3_SIZES),
         differences=(RMS_STATISTIC, FLASH)),
    Case(name="BERT base (blocks)", spec=BERT, ends=False, loss=models.loss_of,
         build=_meta(models.bert, layers=12, width=768, heads=12, vocabulary=30522, tokens=512, batch=BATCH),
         differences=(LAYER_NORM, FLASH)),
    Case(name="ViT-B/16", spec=load_catalogue_model("vit-b16"), loss=models.loss_of,
         build=_meta(models.vit, pixels=224, patch=16, width=768, layers=12, heads=12, classes=1000, batch=BATCH),
         differences=(LAYER_NORM, FLASH, CLASS_TOKEN, IMAGES)),
)  # fmt: skip
