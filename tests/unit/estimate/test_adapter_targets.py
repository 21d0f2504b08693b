"""Adapters on chosen projections, and how many parameters they have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from steptime import api
from steptime.api.jobs import adapter_of
from steptime.api.models import load_model
from steptime.errors import FieldError, UserError
from steptime.estimate.single import trained_parameters
from steptime.estimate.sizes import sizes_of
from steptime.plan.job import OPTIMIZERS, PRECISIONS, Adapter, Job
from steptime.plan.plans import Plans
from steptime.plan.strategies import CORRECTED
from steptime.report.text import trained_label


def job_of(name: str, **changes: object) -> Job:
    job = Job(model=load_model(name), gpus=8, global_batch=8, seq_len=2048, precision=PRECISIONS["bf16"],
              optimizer=OPTIMIZERS["adam"])  # fmt: skip
    return replace(job, **changes)


@pytest.mark.each(
    ("name", "rank", "targets", "trained"),
    [
        # `print_trainable_parameters` of PEFT prints these.
        ("llama3.1-70b", 4, "q,v", 8_192_000),
        ("llama3.1-70b", 4, "q,k,v,o", 4 * 80 * (4 * 2 * 8192 - 2 * (8192 - 1024))),
        ("llama3-8b", 16, "gate,up,down", 16 * 32 * 3 * (4096 + 14336)),
        ("llama3-8b", 16, "linear", 41_943_040),
        ("gpt2", 8, "up", 8 * 12 * (768 + 3072)),
    ],
)
def test_trained_parameters_are_those_of_the_chosen_projections(
    name: str, rank: int, targets: str, trained: int
) -> None:
    job = job_of(name, adapter=Adapter(rank=rank, targets=targets))
    assert trained_parameters(job) == trained


def test_all_projections_of_tinyllama() -> None:
    tiny = replace(load_model("llama3-8b"), layers=22, hidden=2048, heads=32, kv_heads=4, head_dim=64, ffn_hidden=5632,
                   vocab=32000)  # fmt: skip
    assert trained_parameters(job_of("llama3-8b", model=tiny, adapter=Adapter(rank=64))) == 50_462_720


@pytest.mark.each("tp", [2, 8, 16])
def test_ranks_have_their_parts_of_the_chosen_columns(tp: int) -> None:
    """8 key-value heads: with 16 ranks two have copies of one, each its own adapter's columns."""
    job = job_of("llama3-8b", adapter=Adapter(rank=4, targets="q,v"))
    found = sizes_of(CORRECTED.strategy("1d").block(job, Plans(tp=tp))).layer.weights
    assert found == 4 * (2 * 4096 + 4096 / tp + 128 * max(8 / tp, 1))


def test_names_are_those_of_peft_too() -> None:
    both = [adapter_of({"rank": 8, "targets": text}) for text in ("v_proj, q_proj", "q,v", "all-linear", "linear")]
    assert both[0] == both[1] and both[2] == both[3]
    assert adapter_of({"rank": 8, "targets": "q_a_proj,kv_b_proj"}).targets == "q_down,kv_up"
    with pytest.raises(UserError, match="wings"):
        adapter_of({"rank": 8, "targets": "q,wings"})
    with pytest.raises(FieldError, match="linear stands alone"):
        adapter_of({"rank": 8, "targets": "q,linear"})


def test_an_estimate_says_what_is_trained() -> None:
    job = {"gpus": 8, "global_batch": 8, "framework": "ideal"}
    found = api.estimate("llama3.1-70b", "dgx-h100", **job, lora={"rank": 4, "targets": "q_proj,v_proj"})
    assert found.workload["trained_parameters"] == 8_192_000
    assert trained_label(found.workload) == "8,192,000 of 70,561,898,496 parameters (0.012 %)"
    all_of_attention = api.estimate("llama3.1-70b", "dgx-h100", **job, lora={"rank": 4, "targets": "attention"})
    assert found.step_time_s < all_of_attention.step_time_s
    assert found.peak_memory_bytes < all_of_attention.peak_memory_bytes
    with pytest.raises(FieldError, match="gpt2 has no projection gate"):
        api.estimate("gpt2", "dgx-h100", **job, lora={"rank": 4, "targets": "gate"})
