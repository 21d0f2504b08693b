"""Rows of kinds of layers: weights add up to the model's, and what ranks that share a sequence exchange."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from steptime.formats.huggingface import read_huggingface
from steptime.model.spec import ModelSpec
from steptime.plan.job import OPTIMIZERS, PRECISIONS, Job
from steptime.plan.plans import Plans
from steptime.plan.rows import Block, Row
from steptime.plan.strategies import CORRECTED

CHECKPOINTS = json.loads((Path(__file__).parents[2] / "data" / "layered_checkpoints.json").read_text(encoding="utf-8"))


def spec_of(name: str, folder: Path, **changes: Any) -> ModelSpec:
    path = folder / "config.json"
    path.write_text(json.dumps(CHECKPOINTS[name]["config"] | changes), encoding="utf-8")
    return read_huggingface(path)[0]


def block_of(spec: ModelSpec, strategy: str = "1d", **degrees: Any) -> Block:
    job = Job(model=spec, gpus=16, global_batch=16, seq_len=4096, precision=PRECISIONS["bf16"],
              optimizer=OPTIMIZERS["adam"])  # fmt: skip
    return CORRECTED.strategies[strategy].block(job, Plans(**{"micro_batch": 1, **degrees}))


def weights(spec: ModelSpec, tp: int) -> float:
    """Weights of all ranks of ``tp``, without copies."""
    block = block_of(spec, tp=tp)
    parts = ((spec.layers, block.layer), (1, block.first), (1, block.last))
    return float(sum(times * row.share * ((row.weights - row.replicated) * tp + row.replicated)
                     for times, rows in parts for row in rows))  # fmt: skip


def row_named(block: Block, name: str) -> Row:
    return next(row for row in (*block.first, *block.layer) if row.name == name)


def test_weights_of_all_rows_are_the_parameters(tmp_path: Path) -> None:
    for name, row in CHECKPOINTS.items():
        assert weights(spec_of(name, tmp_path), 1) == pytest.approx(row["parameters"], abs=0.5), name


@pytest.mark.parametrize("name", ["mamba-2.8b", "falcon-h1-34b", "nemotron-h-8b", "zamba2-7b", "flan-t5-xl",
                                  "whisper-large-v3", "llava-1.5-7b"])  # fmt: skip
def test_tensor_ranks_hold_the_model_once(name: str, tmp_path: Path) -> None:
    assert weights(spec_of(name, tmp_path), 2) == pytest.approx(CHECKPOINTS[name]["parameters"], abs=0.5)


def test_ranks_that_share_a_sequence_hand_over_the_states(tmp_path: Path) -> None:
    """Of 128 heads 64 x 128 states in fp32, from each of 4 ranks; twice as many ranks of heads send half."""
    spec = spec_of("nemotron-h-8b", tmp_path)
    sent = row_named(block_of(spec, "context", cp=4), "mamba_mamba_ssd").forward
    states = 4 * 128 * 64 * 128
    assert [(each.axis, each.collective, each.size_bytes) for each in sent] == [("cp", "all_gather", states * 4)]
    half = row_named(block_of(spec, "context", cp=4, tp=2), "mamba_mamba_ssd").forward
    assert half[0].size_bytes == sent[0].size_bytes / 2
    assert row_named(block_of(spec, "context", cp=1), "mamba_mamba_ssd").forward[0].size_bytes == 0


def test_cross_attention_exchanges_and_keeps_a_share_of_the_keys(tmp_path: Path) -> None:
    spec = spec_of("whisper-tiny", tmp_path)
    whole, shared = (row_named(block_of(spec, "context", cp=cp), "decoder_cross_attention") for cp in (1, 2))
    assert shared.kept_bytes < whole.kept_bytes
    keys = 6 * 1500 * 64
    assert whole.kept_bytes == 2 * (6 * 4096 * 64 + 2 * keys + 2 * 6 * 4096)
    assert shared.kept_bytes == whole.kept_bytes / 2
    assert sum(float(each.size_bytes) for each in shared.forward) == 2 * keys * 2


def test_a_chosen_window_is_what_sparse_attention_reads(tmp_path: Path) -> None:
    """Rows see at most 2,048 of 4,096 keys, and the indexer all of them."""
    block = block_of(spec_of("deepseek-v3.2", tmp_path))
    pairs = row_named(block, "moe_windowed_attention").shape["pairs"]
    assert pairs == 128 * 4096 * (2048 - 2048 * 2047 / 8192)
    scores = row_named(block, "moe_index_scores").shape
    assert (scores["pairs"], scores["chosen"]) == (4096 * 4097 / 2, pairs / 128)


def test_a_block_of_no_plans_has_no_shares(tmp_path: Path) -> None:
    """A search asks for rows of no candidate where all costs are kept."""
    none = np.zeros(0)
    block = block_of(spec_of("jamba-v0.1", tmp_path), pp=none, vpp=none)
    assert all(np.size(row.share) == 0 for row in block.layer)


def test_only_layers_of_a_kind_have_its_rows(tmp_path: Path) -> None:
    spec = spec_of("jamba-v0.1", tmp_path)
    shares = {row.name: row.share for row in block_of(spec).layer}
    assert shares["attention_dense_fused_attention"] + shares.get("attention_moe_fused_attention", 0) == 4 / 32
    assert shares["mamba_moe_mamba_scan"] + shares["mamba_dense_mamba_scan"] == 28 / 32
    assert replace(spec, name="same").layers == 32
