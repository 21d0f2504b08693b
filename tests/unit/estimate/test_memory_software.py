"""What software holds beyond fused kernels: Aleph Alpha's scaling, Hugging Face's Trainer, narrow and absent states."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fits import STACKS
from steptime.api.models import load_model
from steptime.estimate.memory import GRADIENTS, UPDATE, memory_of, peak_bytes, stage_memory, stage_terms, state_bytes
from steptime.estimate.result import PlannedJob, planned_job
from steptime.estimate.sizes import sizes_of
from steptime.plan.framework_file import framework_names, framework_tables, load_framework, memory_profile_of
from steptime.plan.job import OPTIMIZERS, PRECISIONS, QLORA_BYTES, Adapter, Job, with_habits
from steptime.plan.memory_profile import PLAIN
from steptime.plan.plans import Plans, concatenate
from steptime.plan.rows import Row
from steptime.plan.strategies import CORRECTED

H, F, V, S, LAYERS = 4096, 11008, 32000, 2048, 32
"""Llama-2-7B: hidden, width of the MLP, vocabulary, tokens, layers."""
PARAMETERS = 6738415616
STRATEGY = CORRECTED.strategies["context"]
SCALING, TRAINER = memory_profile_of("scaling"), memory_profile_of("hf-trainer")


def job_of(**changes: Any) -> Job:
    job = Job(model=load_model("llama2-7b"), gpus=8, global_batch=64, seq_len=S, precision=PRECISIONS["bf16"],
              optimizer=OPTIMIZERS["adam"])  # fmt: skip
    return replace(job, **changes)


def rows(job: Job, **plan: int) -> dict[str, Row]:
    block = STRATEGY.block(job, Plans(**plan))
    return {row.name: row for row in (*block.layer, *block.last)}


def planned(job: Job, plans: Plans) -> PlannedJob:
    return planned_job(CORRECTED, STRATEGY, job, plans, sizes_of(STRATEGY.block(job, plans)))


def test_operators_keep_copies_that_fused_kernels_do_not():
    plain, scaling = rows(job_of()), rows(job_of(memory=SCALING))
    for name in ("attention_norm", "mlp_norm"):
        assert scaling[name].kept_bytes - plain[name].kept_bytes == 6 * S * H
    assert scaling["activation"].kept_bytes - plain["activation"].kept_bytes == 2 * S * F
    unfused = [rows(job_of(attention="unfused", memory=memory)) for memory in (PLAIN, SCALING)]
    assert unfused[1]["softmax"].kept_bytes - unfused[0]["softmax"].kept_bytes == 4 * 32 * S * S
    assert plain["qkv"].kept_bytes == scaling["qkv"].kept_bytes


def test_inputs_that_ranks_gather_are_kept_whole():
    plain, scaling = rows(job_of(), tp=4, sp=1), rows(job_of(memory=SCALING), tp=4, sp=1)
    for name in ("qkv", "mlp_in"):
        assert scaling[name].kept_bytes == 4 * plain[name].kept_bytes == 2 * S * H
    assert rows(job_of(memory=SCALING), tp=4, sp=0)["qkv"].kept_bytes == 2 * S * H


@pytest.mark.parametrize(("tp", "each"), [(1, 16), (4, 22)])
def test_gathered_logits_are_those_of_the_whole_vocabulary(tp: int, each: int):
    job, plans = job_of(memory=SCALING), Plans(tp=tp)
    terms = stage_terms(planned(job, plans), "first", "loss")
    hidden_input = S * H * 2 * (1 if tp == 1 else 1 / tp)  # of the head, and of the last norm
    ends = terms["activations/ends/activation_bytes"] - 2 * hidden_input
    assert ends + terms["working/loss/largest_temporary_bytes"] == pytest.approx(each * S * V)


def test_a_block_of_plans_holds_what_each_plan_holds():
    job = job_of(memory=SCALING, attention="unfused")
    each = [Plans(tp=tp, pp=pp, sp=sp) for tp, pp, sp in ((1, 1, 1), (4, 1, 1), (4, 1, 0), (2, 2, 1))]
    together = peak_bytes(planned(job, concatenate(each, [1] * len(each))))
    assert np.asarray(together).tolist() == pytest.approx([peak_bytes(planned(job, plans)) for plans in each])


def test_the_update_needs_most_where_activations_are_few():
    job, plans = job_of(memory=TRAINER, seq_len=64, global_batch=8), Plans()
    memory = memory_of(planned(job, plans))["first"]
    assert memory.fullest_phase == UPDATE
    assert memory.totals[UPDATE] == pytest.approx(10 * PARAMETERS + 8 * 2**20, rel=1e-6)
    assert UPDATE not in stage_memory(planned(job_of(), plans), "first").totals


def test_the_update_is_that_of_the_shards_of_a_rank():
    each = [stage_terms(planned(job_of(memory=TRAINER), Plans(dp=8, zero=zero)), "first", UPDATE) for zero in (0, 1)]
    path = f"working/{UPDATE}/largest_temporary_bytes"
    assert each[0][path] == pytest.approx(8 * each[1][path])


def test_ends_beside_a_quantised_base_are_wide():
    """Embedding and head in fp32, the head in bf16 too: five bytes a weight on average."""
    job = job_of(memory=TRAINER, adapter=Adapter(rank=8, targets="attention", weight_bytes=QLORA_BYTES))
    plain = replace(job, memory=replace(TRAINER, quantised_ends_bytes=None))
    path = "frozen_weights/parameter_bytes"
    wide, narrow = (stage_terms(planned(each, Plans()), "first")[path] for each in (job, plain))
    assert wide - narrow == pytest.approx(3 * 2 * V * H, rel=1e-3)


def test_states_that_are_narrow_released_or_on_the_host():
    job = job_of(precision=PRECISIONS["fp8-te"], memory=replace(PLAIN, narrow_weights=True))
    weights = stage_terms(planned(job, Plans()), "first")["weights/parameter_bytes"]
    assert weights == pytest.approx(PARAMETERS + 2 * V * H, rel=1e-3)
    assert state_bytes(job_of(memory=replace(PLAIN, updates_in_backward=True)))["gradients"] == 0.0
    away = replace(PLAIN, offloads_weights=True, offloads_gradients=True)
    states = state_bytes(job_of(memory=away, offload=frozenset({"optimizer"})))
    assert states == {"weights": 0.0, "gradients": 0.0, "optimizer": 0.0}


def test_logits_of_evaluated_sequences_follow_their_mean_length():
    whole, half = (
        stage_terms(planned(job_of(memory=TRAINER, evaluated_share=share), Plans()), "first", "loss")
        for share in (1.0, 0.5)
    )
    path = "working/loss/largest_temporary_bytes"
    assert whole[path] - half[path] == pytest.approx(10 * S * V)


def stack(name: str, **changes: Any) -> Job:
    return with_habits(job_of(**changes), name)


def test_norms_of_operators_keep_their_copies_whatever_times_them():
    plain, scaling = (rows(job_of(plain_norms=True, memory=memory)) for memory in (PLAIN, SCALING))
    assert plain["attention_norm"].operator == "plain_rms_norm"
    assert scaling["attention_norm"].kept_bytes - plain["attention_norm"].kept_bytes == 6 * S * H


def test_a_frozen_norm_keeps_no_normalised_input():
    trained, frozen = rows(stack("transformers")), rows(stack("transformers", adapter=Adapter(rank=8)))
    assert trained["mlp_norm"].kept_bytes - frozen["mlp_norm"].kept_bytes == 2 * S * H


@pytest.mark.parametrize(("name", "each"), [("unsloth", 2 / 3), ("peft", 2.0), ("ms-swift", 3.0)])
def test_projections_with_adapters_keep_inputs_of_their_own(name: str, each: float):
    job = stack(name, adapter=Adapter(rank=8))
    assert rows(job)["qkv_adapter_down"].kept_bytes == pytest.approx(3 * each * S * H)


def test_autocast_keeps_a_copy_of_each_wide_weight():
    wide, narrow = rows(stack("llama-factory")), rows(stack("transformers"))
    assert wide["mlp_out"].kept_bytes - narrow["mlp_out"].kept_bytes == 2 * H * F
    adapted = rows(stack("trl", adapter=Adapter(rank=8)))
    assert adapted["mlp_out"].kept_bytes == 2 * H * F and adapted["mlp_out"].weight_bytes == 4.0


def test_a_single_micro_batch_has_no_gradients_at_the_loss():
    def gradients(micro_batch: int, phase: str) -> float:
        job = stack("transformers", gpus=1, global_batch=8)
        return stage_terms(planned(job, Plans(micro_batch=micro_batch, zero=0)), "first", phase)[GRADIENTS]

    assert gradients(8, "loss") == 0.0 and gradients(4, "loss") == gradients(8, UPDATE) == 2 * PARAMETERS
    assert 0.0 <= gradients(8, "backward") < 2 * PARAMETERS == gradients(4, "backward")


def test_quantised_weights_are_widened_one_at_a_time_and_their_stream_is_wide():
    adapter = Adapter(rank=8, weight_bytes=QLORA_BYTES)
    blocks = [STRATEGY.block(stack("peft", adapter=a), Plans()) for a in (Adapter(rank=8), adapter)]
    assert blocks[1].working_bytes - blocks[0].working_bytes == 2 * H * F
    assert [block.boundary_bytes for block in blocks] == [2 * S * H, 4 * S * H]
    assert STRATEGY.block(stack("unsloth", adapter=adapter), Plans()).boundary_bytes == 0.0


def test_adapters_are_in_fp32_whatever_the_weights_are():
    own = state_bytes(stack("transformers", adapter=Adapter(rank=8)))
    assert own == {"weights": 4.0, "gradients": 4.0, "optimizer": 8.0}
    assert state_bytes(stack("transformers")) == {"weights": 2.0, "gradients": 2.0, "optimizer": 4.0}


@pytest.mark.each("name", sorted(STACKS))
def test_every_stack_is_a_framework_with_a_source(name: str):
    assert (
        memory_profile_of(name).name == name
        and framework_tables(name)["defaults"]["source"]
        and name in framework_names()
    )
    assert load_framework(name, "h100-sxm").spread is not None
