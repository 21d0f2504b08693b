"""Which rows of measured kernels are of kernels that a training step launches.

Tables of measurements hold much that serves generation: attention with a cache in a format of its own, quantised
weights, layers of a served model. No estimate of a training step reads a curve of them. An operator that no family
and no estimate knows is none of a training step in the first place; what the rules of this module name are other
implementations of operators that are. Both fits and scores leave these rows out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from steptime.lab.calibrate.family import rows_like
from steptime.lab.calibrate.table import Table
from steptime.num import Array

NOT_LAUNCHED: Final = "no training step launches this kernel"
"""Reason of rows that fits and scores leave out."""
TEXTS: Final = ("source", "kernel", "notes", "dtype")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Rows of some operators by an implementation that no training step launches.

    The texts are regular expressions that have to be found in their column; "" is found in every cell.
    """

    what: str
    """The implementation, for a reader."""
    ops: tuple[str, ...]
    source: str = ""
    kernel: str = ""
    notes: str = ""
    dtype: str = ""

    @property
    def wanted(self) -> Mapping[str, str]:
        """Expression by column."""
        return {name: getattr(self, name) for name in TEXTS}


_FRAMEWORKS: Final = "^aiconfigurator"
"""Source that measured layers of serving frameworks."""
RULES: Final = (
    Rule(
        what="attention of Triton and FlashInfer, and attention of one query", ops=("attention_fwd",),
        source=_FRAMEWORKS, kernel="triton|decode|^(torch_flow_)?flashinfer$",
    ),
    Rule(what="attention of TensorRT-LLM", ops=("attention_fwd",), source=_FRAMEWORKS, notes="^fw=trtllm"),
    Rule(
        what="attention over a cache of 8 bits, queries in 16", ops=("attention_fwd",), source=_FRAMEWORKS,
        notes="kv_dtype=fp8", dtype="^(?!fp8|mxfp8)",
    ),
    Rule(what="attention of an older engine of vLLM", ops=("attention_fwd",), source="^llmservingsim", notes="^v0"),
    Rule(
        what="weights alone in integers, and integers scaled by SmoothQuant", ops=("gemm", "bmm", "conv_fwd"),
        dtype="^(int8|int8_wo|int4_wo|sq)$",
    ),
    Rule(what="blockwise scaled layers", ops=("gemm",), source=_FRAMEWORKS, dtype="^fp8_block$"),
    Rule(what="conversions to 8 bits", ops=("elementwise",), source=_FRAMEWORKS),
    Rule(what="layers of a served model", ops=("elementwise", "embedding", "layernorm"), source="^llmservingsim"),
    Rule(what="norms of cuDNN", ops=("layernorm", "layernorm_bwd"), source="^cudnn", kernel="^cudnn$"),
    Rule(
        what="benchmarks of a library of fused kernels", source="^liger",
        ops=("elementwise", "elementwise_bwd", "embedding", "layernorm", "layernorm_bwd", "softmax", "softmax_bwd"),
    ),
)  # fmt: skip


def launched(table: Table) -> Array:
    """Rows that no rule of :data:`RULES` names."""
    out, ops = np.ones(table.rows, bool), table.text("op").astype(str)
    texts = {name: table.text(name) for name in TEXTS}
    for rule in RULES:
        place = np.flatnonzero(np.isin(ops, rule.ops) & out)
        if len(place):
            out[place] = ~rows_like(Table({name: column[place] for name, column in texts.items()}), rule.wanted)
    return out
