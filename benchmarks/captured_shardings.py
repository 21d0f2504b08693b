"""Models whose whole way from a file to a plan is timed: factories as `steptime shard FILE:NAME` takes them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "examples")]


def llama_8b(batch: int = 64, seq: int = 2048) -> Any:
    """Llama 3 8B of ``transformers``."""
    from public_models.rows import load_torchvision

    load_torchvision()  # transformers imports it
    import transformers

    config = transformers.LlamaConfig(
        num_hidden_layers=32, hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256,
    )  # fmt: skip
    ids = torch.zeros(batch, seq, dtype=torch.int64)
    return transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


def gpt_96(batch: int = 64, seq: int = 2048) -> Any:
    """96 blocks of GPT-3's width 4096."""
    import gpt

    return gpt.GPT(96, 4096, 32, 51200, seq), torch.zeros(batch, seq, dtype=torch.int64), gpt.loss
