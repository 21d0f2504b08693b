"""Step times of hybrids of Mamba-2 and attention as NVIDIA measured them; no hybrid had a part in any fit.

Nemotron-H-56B (arXiv 2504.03624, table 1: 54 Mamba-2 layers, 54 MLPs, 10 attentions) in FP8 on H100, tensor parallel
over 8, one sequence a micro-batch, 24 micro-batches. Source: NVIDIA/dgxc-benchmarking v25.05.05, nemotronh/README.md.
The order of its layers is ours: with one pipeline stage it changes nothing.
"""

from __future__ import annotations

import json
from pathlib import Path

from steptime import api

MEASURED_S = {32: 15.119, 64: 15.058, 128: 15.496, 256: 15.892, 512: 15.586, 1024: 15.678, 2048: 15.723}
"""GPUs -> seconds of a step."""
CONFIG = {
    "model_type": "nemotron_h", "hidden_size": 8192, "hybrid_override_pattern": "M" * 54 + "-" * 54 + "*" * 10,
    "intermediate_size": 32768, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
    "mamba_num_heads": 256, "mamba_head_dim": 64, "ssm_state_size": 256, "n_groups": 8, "conv_kernel": 4,
    "chunk_size": 128, "vocab_size": 131072, "mlp_hidden_act": "relu2", "tie_word_embeddings": False,
    "max_position_embeddings": 8192,
}  # fmt: skip


def test_nemotron_h_is_predicted(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG), encoding="utf-8")
    errors = []
    for gpus, measured_s in MEASURED_S.items():
        estimate = api.estimate(str(file), "dgx-h100", gpus=gpus, global_batch=3 * gpus, seq=8192, dtype="fp8",
                                framework="nemo", plan={"tp": 8, "micro_batch": 1, "zero": 1})  # fmt: skip
        low_s, high_s = estimate.step_time_band_s or (0.0, 0.0)
        assert low_s < measured_s < high_s
        errors.append(estimate.step_time_s / measured_s - 1)
    print([f"{error:+.1%}" for error in errors])
    assert max(map(abs, errors)) < 0.10


NANO = [
    ("gb300-nvl72", 8, "mxfp8", 4, [13.1282, 12.8, 13.19, 13.8378, 13.7601, 13.9201]),
    ("gb200-nvl72", 8, "mxfp8", 2, [15.0588, 15.6401, 16.0, 16.02, 15.4502]),
    ("dgx-b300", 8, "mxfp8", 4, [14.05, 14.6286, 14.8599, 14.62]),
    ("dgx-b200", 8, "mxfp8", 2, [16.0]),
    ("dgx-h100", 16, "fp8", 1, [35.6198, 36.5714, 36.1403, 35.2107]),
]
"""Cluster, GPUs, dtype, micro-batch, seconds of a step in several releases of Megatron-Bridge
(docs/performance-summary.md and its archive), experts over 8 ranks, 64 sequences of 8,192 tokens a GPU."""


def test_nemotron_3_nano_is_predicted() -> None:
    """A hybrid with 128 experts; recomputation is not said, none is assumed."""
    errors = []
    for cluster, gpus, dtype, micro_batch, measured_s in NANO:
        plan = {"ep": 8, "micro_batch": micro_batch, "zero": 1}
        estimate = api.estimate("nemotron-3-nano-30b-a3b", cluster, gpus=gpus, global_batch=64 * gpus, seq=8192,
                                dtype=dtype, framework="nemo", plan=plan)  # fmt: skip
        low_s, high_s = estimate.step_time_band_s or (0.0, 0.0)
        assert all(low_s < each < high_s for each in measured_s)
        errors += [estimate.step_time_s / each - 1 for each in measured_s]
    assert len(errors) == 20
    assert sum(map(abs, errors)) / 20 < 0.08
    assert max(map(abs, errors)) < 0.18
