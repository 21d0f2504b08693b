"""Layers of several kinds on the stages of a pipeline, and on tensor ranks."""

from __future__ import annotations

import numpy as np
import pytest

from steptime.model import load_catalogue_model, parameter_terms
from steptime.model.known import catalogue_names
from steptime.plan.job import OPTIMIZERS, PRECISIONS, Job
from steptime.plan.plans import Plans
from steptime.plan.stage_kinds import stage_shares
from steptime.plan.strategies import CORRECTED

KINDS = [name for name in catalogue_names() if load_catalogue_model(name).kinds]


def job_of(name: str, seq_len: int = 2048) -> Job:
    return Job(model=load_catalogue_model(name), gpus=64, global_batch=64, seq_len=seq_len,
               precision=PRECISIONS["bf16"], optimizer=OPTIMIZERS["adam"])  # fmt: skip


@pytest.mark.each("name", KINDS)
def test_one_stage_has_all_layers(name: str) -> None:
    job = job_of(name)
    shares = stage_shares(job, Plans())
    assert {kind.name: shares[kind.name] * job.model.layers for kind in job.model.kinds} == pytest.approx(
        {kind.name: kind.layers for kind in job.model.kinds}
    )


@pytest.mark.each(
    ("seq_len", "pp", "vpp", "held"),
    [
        # 32 layers in periods of 8: four stages are equal.
        (2048, 4, 1, {"mamba_moe": 4 / 8, "mamba_dense": 3 / 8, "attention_dense": 1 / 8}),
        # Chunks of 4, of which the second half of each period has the attention: all of it is on the second rank. A
        # layer with states has 281 million parameters, one with attention 218 million and 4096 x T for its scores.
        (2048, 2, 4, {"mamba_moe": 8 / 16, "mamba_dense": 8 / 16, "attention_dense": 0.0}),
        (65536, 2, 4, {"mamba_moe": 8 / 16, "mamba_dense": 4 / 16, "attention_dense": 4 / 16}),
        # Stages of 2: one in four has the attention.
        (2048, 16, 1, {"mamba_moe": 1 / 2, "mamba_dense": 1 / 2, "attention_dense": 0.0}),
        (65536, 16, 1, {"mamba_moe": 1 / 2, "mamba_dense": 0.0, "attention_dense": 1 / 2}),
    ],
)
def test_the_busiest_stage_of_jamba(seq_len: int, pp: int, vpp: int, held: dict[str, float]) -> None:
    assert stage_shares(job_of("jamba-v0.1", seq_len), Plans(pp=pp, vpp=vpp)) == held


def test_the_ends_may_have_no_layer() -> None:
    """32 layers in 34 virtual stages: the first rank has one layer, no. 17 of the pattern, the next ones two."""
    job = job_of("jamba-v0.1")
    shares = stage_shares(job, Plans(pp=17, vpp=2))
    assert sum(shares.values()) == 1.0
    assert all(value in (0.0, 0.5, 1.0) for value in shares.values())


def test_encoder_and_decoder_are_stages_of_their_own() -> None:
    """Whisper's encoder has 1500 tokens, its decoder 448 and attention to the encoder: 32 layers each."""
    shares = stage_shares(job_of("whisper-large-v3"), Plans(pp=2))
    assert sorted(shares.values()) == [0.0, 1.0]


@pytest.mark.each("name", ["jamba-v0.1", "kimi-linear-48b-a3b", "nemotron-nano-9b-v2", "t5-11b"])
def test_a_block_of_plans_is_as_single_plans(name: str) -> None:
    job = job_of(name)
    pp, vpp = np.array([1, 2, 2, 4, 8, 16, 3]), np.array([1, 1, 2, 3, 1, 1, 1])
    block = stage_shares(job, Plans(pp=pp, vpp=vpp))
    for place, (ranks, chunks) in enumerate(zip(pp, vpp, strict=True)):
        single = stage_shares(job, Plans(pp=int(ranks), vpp=int(chunks)))
        assert {kind: float(np.asarray(values)[place]) for kind, values in block.items()} == pytest.approx(single)


@pytest.mark.each("name", KINDS)
def test_tensor_ranks_hold_the_parameters_together(name: str) -> None:
    """What is cut adds up over the ranks, what is replicated counts once: the parameters of the model."""
    job = job_of(name)
    model = job.model
    for tp in (1, 2, 4):
        if model.heads % tp or model.kv_heads % tp or model.vocab % tp:
            continue
        block = CORRECTED.strategies["1d"].block(job, Plans(tp=tp))
        parts = ((block.layer, job.model.layers), (block.first, 1), (block.last, 1))
        total = 0.0
        for rows, times in parts:
            for row in rows:
                ranks = 1 if row.expert else tp  # experts are cut over axes of their own
                total += float((row.weights * ranks - row.replicated * (ranks - 1)) * row.share) * times
        assert total == pytest.approx(parameter_terms(job.model).total, rel=1e-12), (name, tp)
