"""Step times of a hybrid of Mamba-2 and attention as NVIDIA measured them; no hybrid had a part in any fit.

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
