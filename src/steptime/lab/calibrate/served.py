"""Layers of served models: measured rows that name a model and a layer instead of a shape."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import numpy as np

from steptime.lab.calibrate.table import Table
from steptime.num import Array

SERVED: Final = "^llmservingsim"
NOTE: Final = re.compile(r"layer=([\w.]+);model=([^;]+);tp=(\d+)")


@dataclass(frozen=True, slots=True)
class Model:
    """Widths of a published model (its config.json)."""

    hidden: int
    feedforward: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    experts: int = 1


MODELS: Final = {
    "meta-llama/Llama-3.1-8B": Model(4096, 14336, 32, 8, 128, 128256),
    "meta-llama/Llama-3.1-70B": Model(8192, 28672, 64, 8, 128, 128256),
    "mistralai/Mixtral-8x7B-v0.1": Model(4096, 14336, 32, 8, 128, 32000, 8),
    "microsoft/Phi-mini-MoE-instruct": Model(4096, 960, 32, 8, 128, 32064, 16),
    "Qwen/Qwen3-32B": Model(5120, 25600, 64, 8, 128, 151936),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": Model(2048, 768, 32, 4, 128, 151936, 128),
}


def width_of(layer: str, model: Model, devices: int) -> float:
    """Elements per token that a memory-bound layer holds on one of `devices` devices.

    >>> width_of("act_fn", MODELS["meta-llama/Llama-3.1-8B"], 2)
    7168.0
    """
    heads = (model.heads + model.kv_heads) * model.head_dim
    if "act_fn" in layer:
        return model.feedforward / devices
    return heads / devices if "ro" in layer or "qk_norm" in layer else float(model.hidden)


def product_of(layer: str, model: Model, devices: int) -> tuple[float, float]:
    """Columns and depth of a layer that is a product; NaN for one that is not.

    >>> product_of("down_proj", MODELS["meta-llama/Llama-3.1-8B"], 1)
    (4096.0, 14336.0)
    """
    hidden, wide = float(model.hidden), model.feedforward / devices
    queries, keys = (h * model.head_dim / devices for h in (model.heads, model.kv_heads))
    known = {
        "lm_head": (model.vocabulary / devices, hidden),
        "q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden), "o_proj": (hidden, queries),
        "gate_proj": (wide, hidden), "up_proj": (wide, hidden), "down_proj": (hidden, wide),
        "expert.w1": (wide, hidden), "expert.w3": (wide, hidden), "expert.w2": (hidden, wide),
        "gate": (float(model.experts), hidden), "sampler": (1.0, float(model.vocabulary)),
    }  # fmt: skip
    return known.get(layer, (np.nan, np.nan))


def named(table: Table) -> list[tuple[str, Model, int] | None]:
    """Layer, model and devices of each row; None where the row names none that is known."""
    found = (NOTE.search(notes) for notes in table.text("notes"))
    return [(m[1], MODELS[m[2]], int(m[3])) if m and m[2] in MODELS else None for m in found]


def served(table: Table) -> Array:
    """`width_of` each row; NaN where the model is unknown."""
    return np.array([width_of(*row) if row else np.nan for row in named(table)], np.float64)


def products(table: Table) -> tuple[Array, Array]:
    """`product_of` each row."""
    both = np.array([product_of(*row) if row else (np.nan, np.nan) for row in named(table)], np.float64)
    return both.reshape(-1, 2)[:, 0], both.reshape(-1, 2)[:, 1]
