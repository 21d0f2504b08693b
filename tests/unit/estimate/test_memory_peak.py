"""Peak memory of a stage as frameworks have it, against numbers that can be summed by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from steptime import api
from steptime.api.models import load_model
from steptime.estimate.memory import (
    PHASES,
    STAGES,
    initialisation_bytes,
    peak_bytes,
    stage_memory,
    stage_terms,
    state_bytes,
)
from steptime.estimate.result import PlannedJob, planned_job
from steptime.estimate.sizes import Sizes, sizes_of
from steptime.model import parameter_terms
from steptime.plan.framework_file import FILES, memory_profile_of
from steptime.plan.job import OPTIMIZERS, PRECISIONS, Adapter, Job
from steptime.plan.plans import RECOMPUTE_CODES, Plans
from steptime.plan.rows import Row
from steptime.plan.strategies import CORRECTED

H, F, V, S = 4096, 14336, 128256, 4096
"""Llama-3-8B: hidden, width of the MLP, vocabulary; and tokens."""
LAYER = 2 * H * H + 2 * H * 1024 + 3 * H * F + 2 * H
STRATEGY = CORRECTED.strategies["context"]


def job_of(software: str = "plain", name: str = "llama3-8b", **changes: Any) -> Job:
    job = Job(model=load_model(name), gpus=64, global_batch=64, seq_len=S, precision=PRECISIONS["bf16"],
              optimizer=OPTIMIZERS["adam"], memory=memory_profile_of(software))  # fmt: skip
    return replace(job, **changes)


def sizes(job: Job, plans: Plans) -> Sizes:
    return sizes_of(STRATEGY.block(job, plans))


def planned(job: Job, plans: Plans) -> PlannedJob:
    return planned_job(CORRECTED, STRATEGY, job, plans, sizes(job, plans))


def terms(job: Job, plans: Plans, stage: str = "first", phase: str | None = None) -> dict[str, Any]:
    return stage_terms(planned(job, plans), stage, phase)


def rows(job: Job, **plan: int) -> dict[str, Row]:
    block = STRATEGY.block(job, Plans(**plan))
    return {row.name: row for row in (*block.layer, *block.last)}


def test_every_byte_of_a_step_under_megatron_core():
    """Llama-3-8B whole on one of eight data ranks: the sum of what Megatron Core with Transformer Engine holds."""
    job, plans = job_of("megatron-core", gradient_dtype="fp32"), Plans(dp=8)
    parameters = 32 * LAYER + 2 * V * H + H
    states = (2 + 4 + 12 / 8) * parameters
    placeholders = 2 * (H * (H + 2048) + H * H + H * 2 * F + H * F)
    layer = 2 * S * (2 * H + (H + 2048) + H + 2 * H + 3 * F) + 4 * S * 32
    head = 2 * S * 2 * H + 2 * S * V
    backward = 2 * V * H + 2 * S * H
    peak = states + placeholders + 64 * 2**20 + 32 * layer + head + backward
    assert peak_bytes(planned(job, plans)) == pytest.approx(peak, rel=1e-12)
    assert stage_memory(planned(job, plans), "first").fullest_phase == "loss"


def test_a_peak_is_one_phase_and_not_their_sum():
    for software in ("plain", *(path.stem for path in FILES.glob("*.toml"))):
        job, plans = job_of(software), Plans(dp=8, pp=4)
        totals = {(stage, phase): sum(terms(job, plans, stage, phase).values()) for stage in STAGES for phase in PHASES}
        peak = peak_bytes(planned(job, plans))
        assert peak == max(totals.values()) < sum(totals.values())
        assert sum(terms(job, plans, "last").values()) == max(totals["last", phase] for phase in PHASES)


def test_stages_in_the_middle_have_no_loss():
    found = terms(job_of("torchtitan"), Plans(dp=2, pp=4), "middle", "loss")
    assert found["working/loss/largest_temporary_bytes"] == 0
    assert terms(job_of("torchtitan"), Plans(dp=2, pp=4), "last")["working/loss/largest_temporary_bytes"] > 0


@pytest.mark.parametrize(
    ("software", "each"),
    [
        ("plain", (2, 2, 12)),
        ("torchtitan", (4, 2, 8)),
        ("torchtune", (2, 2, 4)),
        ("megatron-deepspeed", (2, 6, 12)),
        ("deepspeed", (2, 2, 12)),
    ],
)
def test_bytes_per_parameter(software, each):
    """Weights, gradients and states: fp32 shards are their own master copy; bf16 throughout has bf16 moments."""
    assert tuple(state_bytes(job_of(software)).values()) == each


def test_fp16_has_no_second_gradient_and_fp32_no_master():
    half = job_of("megatron-deepspeed", precision=PRECISIONS["fp16"])
    assert tuple(state_bytes(half).values()) == (2, 2, 12)
    full = job_of("torchtitan", precision=PRECISIONS["fp32"])
    assert tuple(state_bytes(full).values()) == (4, 4, 8)
    assert tuple(state_bytes(job_of("torchtune", precision=PRECISIONS["fp32"])).values()) == (4, 4, 8)


def test_offloaded_states_and_activations():
    states = frozenset({"optimizer"})
    assert tuple(state_bytes(job_of(offload=states)).values()) == (2, 2, 0)
    assert tuple(state_bytes(job_of("deepspeed", offload=states)).values()) == (2, 0, 0)
    found = terms(job_of(offload=frozenset({"activations"})), Plans(recompute=2))
    assert found["activations/layers/activation_bytes"] == 2 * 2 * S * H, "the inputs of two layers"


@pytest.mark.parametrize(("software", "kept", "peak"), [("plain", 6, 6), ("megatron-core", 2, 2), ("megatron", 4, 6),
                                                        ("torchtitan", 6, 14)])  # fmt: skip
def test_logits_at_the_loss(software, kept, peak):
    job = job_of(software)
    job = replace(job, memory=replace(job.memory, head_gradient_bytes=0.0))
    assert rows(job)["cross_entropy"].kept_bytes == kept * S * V
    loss = sizes(job, Plans()).loss_bytes
    assert loss == max((peak - kept) * S * V, 2 * S * H + (2 - kept) * S * V)


def test_a_fused_head_keeps_no_logits():
    job = job_of("deepspeed")
    assert rows(job)["cross_entropy"].kept_bytes == 0
    assert sizes(job, Plans()).loss_bytes == 2 * V * H + 6 * S * H


def test_gathered_weights_and_whole_gradients_of_a_layer():
    """FSDP2: two layers in bf16, head and embedding; in the backward pass gradients in bf16 and their fp32 copy."""
    job, plans = job_of("torchtitan"), Plans(dp=8, zero=3)
    loss, backward = (
        terms(job, plans, phase=phase)[f"working/{phase}/gathered_weights_bytes"] for phase in ("loss", "backward")
    )
    assert loss == 2 * (2 * LAYER + 2 * V * H + H)
    assert backward - loss == 6 * LAYER


@pytest.mark.parametrize(
    ("tp", "elements"), [(1, S * (H + 2 * F)), (2, S * (H // 2 + F)), (8, S * (H // 8 + 2 * H - F // 8))]
)
def test_temporaries_of_the_backward_pass(tp, elements):
    """One rank and two: the gradient of the gated activation's input; eight: the product into the MLP."""
    assert sizes(job_of(), Plans(tp=tp)).working_bytes == 2 * elements


def test_unfused_scores_outweigh_the_mlp():
    """Two gradients of the scores, less what the MLP kept: 2 a s^2 + s h - s (f_i + f)."""
    job = job_of(name="gpt3-175b", attention="unfused", seq_len=8192)
    model = job.model
    scores = 2 * model.heads * 8192**2 + 8192 * (model.hidden - 2 * model.ffn_hidden)
    assert sizes(job, Plans()).working_bytes == 2 * scores


def test_a_ring_keeps_its_output_in_its_own_order():
    ring, gathered = (rows(job_of(context=kind), cp=4)["fused_attention"].kept_bytes for kind in ("ring", "all_gather"))
    assert ring - gathered == 2 * S / 4 * H
    assert rows(job_of(context="ring"))["fused_attention"].kept_bytes == gathered * 4
    assert sizes(job_of(context="ring"), Plans(cp=4)).working_bytes < 4 * S * H * 14


def test_every_second_product_keeps_its_output():
    """Selective checkpointing by operator: layer input, query, value, attention, gate and down are kept."""
    code = sum(RECOMPUTE_CODES[name] for name in ("norm", "activation", "outputs"))
    kept = sizes(job_of(), Plans(recompute=code)).layer.kept_bytes
    assert kept == 2 * S * (H + H + 1024 + H + F + H) + 4 * S * 32
    assert sizes(job_of(), Plans(recompute=RECOMPUTE_CODES["outputs"])).layer.kept_bytes == kept


def test_what_outputs_does_not_keep_runs_again():
    """Of query, key and value together the key (8 of 48 heads), of gate and up one half; no transfer is repeated."""
    layer = STRATEGY.block(job_of(), Plans(recompute=RECOMPUTE_CODES["outputs"], tp=2)).layer
    again = {row.name: row.recomputed for row in layer if row.recomputed}
    assert again == {
        "attention_norm": 1, "qkv": pytest.approx(8 / 48), "rope": 1, "attention_out": 1, "attention_residual": 1,
        "mlp_norm": 1, "mlp_in": 0.5, "activation": 1,
    }  # fmt: skip
    assert all(row.sent_again == 0 for row in layer if row.recomputed)


def test_grouped_products_are_none_to_the_policy_of_outputs():
    """Experts keep what was dispatched to them; gate and up and the activation run again, the last product does not."""
    layer = STRATEGY.block(job_of(name="mixtral-8x7b"), Plans(recompute=RECOMPUTE_CODES["outputs"])).layer
    rows_of = {row.name: row for row in layer}
    again = {name: row.recomputed for name, row in rows_of.items() if name.startswith("expert_")}
    kept = {name: row.kept_bytes for name, row in rows_of.items() if name.startswith("expert_")}
    assert again == {"expert_in": 1, "expert_activation": 1, "expert_out": 0}
    assert kept == {"expert_in": 2 * 2 * S * H, "expert_activation": 0, "expert_out": 0}, "two rows per token, 16 bits"


@pytest.mark.each("context", ["all_gather", "ring", "ulysses"])
@pytest.mark.each("cp", [1, 2, 8])
@pytest.mark.each("name", ["llama3-8b", "phi3-mini", "deepseek-v3", "gpt3-175b", "mixtral-8x7b"])
def test_no_row_keeps_less_than_nothing_or_more_for_recomputation(name, cp, context):
    """Context ranks keep their own keys, and a share of everything: 1/cp of one rank's bytes."""
    job, whole = job_of(name=name, context=context), RECOMPUTE_CODES["outputs"]
    for code in (whole, whole + RECOMPUTE_CODES["up_projection"], whole + RECOMPUTE_CODES["mlp"]):
        plain, kept = rows(job, cp=cp), rows(job, cp=cp, recompute=code)
        for key, row in kept.items():
            assert row.kept_bytes >= 0
            assert key not in plain or row.kept_bytes <= plain[key].kept_bytes
        assert sum(row.kept_bytes for row in kept.values()) < sum(row.kept_bytes for row in plain.values())


def test_keys_that_are_made_again_are_those_of_the_rank():
    job = job_of()
    for cp in (1, 4):
        plain, kept = (rows(job, cp=cp, recompute=code)["fused_attention"].kept_bytes
                       for code in (0, RECOMPUTE_CODES["outputs"]))  # fmt: skip
        assert plain - kept == 2 * S / cp * 1024


def test_only_latent_attention_has_up_projections_to_recompute():
    code = RECOMPUTE_CODES["up_projection"]
    assert sizes(job_of(), Plans(recompute=code)).layer.kept_bytes == sizes(job_of(), Plans()).layer.kept_bytes
    latent = job_of(name="deepseek-v3")
    assert sizes(latent, Plans(recompute=code)).layer.kept_bytes < sizes(latent, Plans()).layer.kept_bytes


def test_later_stages_of_a_model_with_leading_dense_layers_have_only_experts():
    """DeepSeek-V3 has three dense layers: the second of two stages has 30 layers, all with 256 experts."""
    job, plans = job_of(name="deepseek-v3"), Plans(pp=2, ep=8, dp=8)
    expert = 3 * 7168 * 2048
    first, last = (terms(job, plans, stage)["expert_weights/parameter_bytes"] for stage in ("first", "last"))
    assert last == pytest.approx(2 * 30 * 256 / 8 * expert) and first == pytest.approx(2 * 28 * 256 / 8 * expert)
    whole = terms(job, Plans(ep=8, dp=8))["expert_weights/parameter_bytes"]
    assert whole == pytest.approx(2 * 58 * 256 / 8 * expert)
    kept = [terms(job, plans, stage, "backward")["activations/layers/activation_bytes"] for stage in ("first", "last")]
    assert kept[1] / 30 > kept[0] / 31 / 2


def test_alternating_experts_are_spread():
    model = load_model("mixtral-8x7b")
    assert model.experts is not None
    job = job_of(model=replace(model, experts=replace(model.experts, moe_layers=16)))
    assert STRATEGY.block(job, Plans()).leading_dense == 0 and sizes(job, Plans()).later is None


def test_frozen_weights_in_the_narrow_format():
    """NeMo stores the frozen weights of a run in fp8 in fp8; the head and the embedding stay wide."""
    changes: dict[str, Any] = {"adapter": Adapter(rank=16), "precision": PRECISIONS["fp8-te"]}
    products = 32 * (LAYER - 2 * H)
    narrow, wide = (
        terms(job_of(name, **changes), Plans())["frozen_weights/parameter_bytes"] for name in ("megatron-core", "plain")
    )
    assert wide - narrow == pytest.approx(products, rel=1e-12)
    bf16 = terms(job_of("megatron-core", adapter=Adapter(rank=16)), Plans())["frozen_weights/parameter_bytes"]
    assert bf16 == wide


def test_buffers_are_those_of_the_documented_settings() -> None:
    """cuBLAS takes 8 MiB of workspace up to Ampere and 32 MiB from Hopper on (PyTorch, CUDA semantics), Transformer
    Engine as much of its own. DeepSpeed, ZeRO-3: `stage3_max_live_parameters` of 1e9 and two buckets of 5e8 elements
    (`reduce_bucket_size`, `overlap_comm`), in 16 bits, as Megatron-DeepSpeed."""
    mib = 1 << 20
    workspaces = {"megatron-core": 64, "megatron": 8, "torchtitan": 32, "deepspeed": 32, "torchtune": 8}
    assert {name: memory_profile_of(name).workspace_bytes / mib for name in workspaces} == workspaces
    buckets = {"megatron-core": 0, "torchtitan": 0, "megatron-deepspeed": 2 * 5e8 * 2, "deepspeed": 2 * 5e8 * 2}
    assert {name: memory_profile_of(name).bucket_bytes for name in buckets} == buckets
    assert {memory_profile_of(name).live_bytes for name in ("megatron-deepspeed", "deepspeed")} == {1e9 * 2}
    plain = memory_profile_of("ideal")
    assert (plain.workspace_bytes, plain.bucket_bytes, plain.placeholder_bytes) == (0, 0, 0)


@pytest.mark.each("name", ["deepspeed", "megatron-deepspeed"])
def test_buffers_of_deepspeed_are_terms_of_their_stage(name):
    """Live parameters are those of ZeRO-3 alone, and no more than there are: 1e9 of 16 bits, or the model's."""
    live, buckets = (f"buffers/{each}/held_buffers_bytes" for each in ("live_parameters", "reduce_buckets"))
    job, small = job_of(name), job_of(name, model=load_model("gpt2"))
    for stage in range(4):
        found = terms(job, Plans(dp=8, zero=stage))
        assert (found[live], found[buckets]) == (2e9 if stage == 3 else 0.0, 2e9)
    assert terms(job, Plans(dp=8, zero=3, shard=1))[live] == 0.0
    assert terms(small, Plans(dp=8, zero=3))[live] == 2 * parameter_terms(small.model).total < 2e9


def test_deepspeed_turns_the_gradients_of_a_rank_to_fp32_before_it_steps():
    """Two bytes each of the joined gradients and four of those in fp32; none where the optimiser is on the host."""
    job, plans = job_of("deepspeed"), Plans(dp=4, zero=2)
    path = "working/update/largest_temporary_bytes"
    assert terms(job, plans, phase="update")[path] == 6 * parameter_terms(job.model).total / 4
    away = replace(job, offload=frozenset({"optimizer"}))
    assert terms(away, plans, phase="update")[path] == 0.0


def test_weights_are_copied_before_the_first_step():
    """DeepSpeed joins them with ZeRO-1 and ZeRO-2: twice 14.96 GiB of Llama-3-8B; others and ZeRO-3 do not."""
    whole = 2 * parameter_terms(load_model("llama3-8b")).total
    for stage, copies in ((0, 0), (1, 2), (2, 2), (3, 0)):
        assert initialisation_bytes(planned(job_of("deepspeed"), Plans(dp=2, zero=stage))) == copies * whole
    assert initialisation_bytes(planned(job_of("torchtitan"), Plans(dp=2, zero=2))) == 0.0
    adapter = job_of("deepspeed", adapter=Adapter(rank=16))
    assert whole < initialisation_bytes(planned(adapter, Plans(dp=2, zero=2))) < 1.03 * whole


def test_an_estimate_says_what_it_needs_before_the_first_step():
    given = {"framework": "deepspeed", "gpus": 2, "global_batch": 16, "seq": 1024}
    plan = {"micro_batch": 2, "zero": 2, "offload": "optimizer", "recompute": "full"}
    found = api.estimate("llama3-8b", "dgx-a100", **given, plan=plan)
    assert found.memory_by_definition["initialisation"] == 4 * parameter_terms(load_model("llama3-8b")).total
    assert found.memory_by_definition["initialisation"] > found.peak_memory_bytes
    assert any("before the first step" in note for note in found.notes)


@pytest.mark.parametrize("shard", [0, 1, 4])
def test_ranks_that_share_nothing_gather_nothing(shard):
    """ZeRO-3 over one rank is a whole copy on each: no second one is made for the computation."""
    gathered = terms(job_of(), Plans(dp=8, zero=3, shard=shard))["working/loss/gathered_weights_bytes"]
    assert gathered == (0.0 if shard == 1 else 2 * (2 * LAYER + 2 * V * H + H))


def test_experts_that_share_nothing_gather_nothing():
    job = job_of(name="mixtral-8x7b")
    both, dense = (
        terms(job, Plans(dp=8, ep=ep, zero=3, shard=2))["working/loss/gathered_weights_bytes"] for ep in (4, 8)
    )
    assert both - dense == 2 * 2 * 2 * 3 * H * F, "two layers of two experts"
    assert terms(job, Plans(dp=8, ep=4, zero=3, shard=1))["working/loss/gathered_weights_bytes"] == 0


def test_frozen_ends_are_gathered_as_frozen_layers_are():
    job, plans = job_of(adapter=Adapter(rank=16)), Plans(dp=8, zero=3)
    adapters = 16 * (4 * H + 2 * 1024 + 2 * H + 3 * (H + F))
    found = terms(job, plans, phase="loss")["working/loss/gathered_weights_bytes"]
    assert found == 2 * (2 * (LAYER + adapters) + 2 * V * H + H)


def test_temporaries_of_layers_with_experts_alone():
    """Llama 4 Scout: 5120 hidden; the routed expert outweighs the shared one of equal width, and none is dense."""
    job = job_of(name="llama4-scout")
    assert sizes(job, Plans()).working_bytes == 2 * S * (5120 + 5120 + 2 * 8192)


def test_temporaries_of_a_shared_expert_beside_narrow_ones():
    """Wide shared expert: the gradients of its gate and up outweigh one routed row per token."""
    model = load_model("llama4-scout")
    assert model.experts is not None
    job = job_of(model=replace(model, experts=replace(model.experts, shared_ffn_hidden=12288)))
    assert sizes(job, Plans()).working_bytes == 2 * S * (5120 + 2 * 12288)


def test_unfused_scores_of_layers_with_experts_free_what_the_experts_kept():
    job = job_of(name="mixtral-8x7b", attention="unfused", seq_len=8192)
    scores = 2 * 32 * 8192**2 + 8192 * H - 2 * 8192 * 3 * F
    assert sizes(job, Plans()).working_bytes == 2 * scores


REMADE = {
    "norm": 2 * 2 * S * H, "activation": 2 * S * F, "mlp": 2 * 3 * S * F, "attention": 0,
    "outputs": 2 * S * (H + 1024 + 2 * H + 2 * F),
}  # fmt: skip
"""Bytes of a layer that are made again: inputs of its products, what the MLP keeps, and of ``outputs`` the input of
query, key and value, the key, the stream after attention, the input of the MLP, one half of its first product and the
input of its last."""


@pytest.mark.parametrize("name", REMADE)
def test_what_is_made_again_of_a_layer_is_there_in_its_backward_pass(name: str) -> None:
    plans = Plans(recompute=RECOMPUTE_CODES[name])
    made, plain = sizes(job_of(), plans), sizes(job_of(), Plans())
    assert made.layer.remade_bytes == REMADE[name]
    if name != "outputs":
        assert plain.layer.kept_bytes - made.layer.kept_bytes == REMADE[name]
    path, phase = "working/backward/largest_temporary_bytes", "backward"
    assert terms(job_of(), plans, phase=phase)[path] == terms(job_of(), Plans(), phase=phase)[path] + REMADE[name]
    assert terms(job_of(), plans, phase="loss") != terms(job_of(), Plans(), phase="loss") or not REMADE[name]


def test_unfused_scores_that_are_made_again() -> None:
    """Probabilities, their mask and what dropout leaves of them: 5 a s^2 bytes (arXiv 2205.05198, section 4.1)."""
    job = job_of(name="gpt3-175b", attention="unfused", seq_len=2048)
    code = RECOMPUTE_CODES["attention"]
    made, plain = (sizes(job, Plans(tp=8, recompute=each)).layer for each in (code, 0))
    assert made.remade_bytes == plain.kept_bytes - made.kept_bytes == 5 * 12 * 2048**2
