"""What the rows of layers keep, hold and send, by counts that papers print or that fit on the back of an envelope."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from steptime.api.models import load_model
from steptime.estimate.evaluate import recomputed_flops_per_step
from steptime.estimate.sizes import sizes_of
from steptime.plan.framework_file import memory_profile_of
from steptime.plan.job import OPTIMIZERS, PRECISIONS, Adapter, Job
from steptime.plan.plans import RECOMPUTE_CODES, Plans
from steptime.plan.rows import Block, Row, Shape
from steptime.plan.strategies import CORRECTED

TOKENS = 4096
FP32, BF16 = 4, 2


def job_of(name: str, **changes: Any) -> Job:
    return Job(model=replace(load_model(name), **changes), gpus=64, global_batch=64, seq_len=TOKENS,
               precision=PRECISIONS["bf16"], optimizer=OPTIMIZERS["adam"])  # fmt: skip


def block_of(name: str, plans: Plans, **changes: Any) -> Block:
    return CORRECTED.strategies["1d"].block(job_of(name, **changes), plans)


def rows_of(name: str, plans: Plans, **changes: Any) -> dict[str, Row]:
    block = block_of(name, plans, **changes)
    return {row.name: row for row in (*block.layer, *block.last)}


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_a_loss_over_a_cut_vocabulary_sends_three_numbers_per_token(tp: int) -> None:
    """Megatron-LM, arXiv 1909.08053, section 3: the largest logit, the one of the target and the sum of exponentials,
    in fp32, instead of all logits."""
    (sent,) = rows_of("llama3-8b", Plans(tp=tp))["cross_entropy"].forward
    assert (sent.collective, sent.axis, sent.size_bytes) == ("all_reduce", "tp", 3 * TOKENS * FP32)


@pytest.mark.parametrize("tp", [1, 4])
def test_queries_and_keys_are_rotated_and_values_are_not(tp: int) -> None:
    """Llama 3 8B has 32 heads of queries, 8 of keys and 8 of values, 128 wide."""
    assert rows_of("llama3-8b", Plans(tp=tp))["rope"].shape["elements"] == TOKENS * (32 + 8) * 128 / tp


@pytest.mark.parametrize("tp", [1, 8])
def test_latent_attention_keeps_one_input_and_two_latents(tp: int) -> None:
    """DeepSeek-V3, arXiv 2412.19437: queries from 1536 numbers per token, keys and values from 512, of 7168."""
    rows = rows_of("deepseek-v3", Plans(tp=tp))
    each = {name: rows[name].kept_bytes / (TOKENS / tp * BF16) for name in rows if name[:2] in ("q_", "kv")}
    assert each == {"q_down": 7168, "q_norm": 1536, "q_up": 1536, "kv_down": 0, "kv_norm": 512, "kv_up": 512}


@pytest.mark.parametrize("tp", [1, 8])
def test_a_router_scores_every_expert_and_the_shared_one_is_a_small_mlp(tp: int) -> None:
    """DeepSeek-V3: 256 routed experts, and a shared one of 2048; both read the same 7168 numbers per token."""
    rows = rows_of("deepseek-v3", Plans(tp=tp))
    own = TOKENS // tp
    router = rows["router"]
    assert (router.shape["m"], router.shape["n"], router.shape["k"]) == (own, 256, 7168)
    assert (router.kept_bytes, rows["shared_in"].kept_bytes) == (own * 7168 * BF16, 0)
    scores = own * 256 * FP32
    assert {rows["router_top_k"].shape[name] for name in ("read_bytes", "written_bytes")} == {scores}
    assert rows["router_top_k"].kept_bytes == scores
    assert rows["shared_activation"].shape["elements"] == TOKENS * 2048 / tp
    assert (rows["shared_in"].weights, rows["shared_out"].weights) == (2 * 7168 * 2048 / tp, 7168 * 2048 / tp)


def test_a_gate_of_the_shared_expert_keeps_what_it_scales() -> None:
    """Qwen1.5-MoE: one sigmoid per token, hidden 2048."""
    rows = rows_of("qwen1.5-moe-a2.7b", Plans(tp=4))
    assert (rows["shared_gate"].shape["n"], rows["shared_gate"].shape["m"]) == (1, TOKENS / 4)
    assert rows["shared_scale"].kept_bytes == TOKENS / 4 * 2048 * BF16


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (8, 1), (1, 4)])
def test_a_further_token_joins_two_states_and_shares_the_table(tp: int, pp: int) -> None:
    """DeepSeek-V3, section 2.2: a projection of 2 x 7168 to 7168; embedding and head are those of the model, of which
    another stage than the first needs a copy of the former."""
    rows = rows_of("deepseek-v3", Plans(tp=tp, pp=pp), mtp_depth=1)
    joined = rows["mtp_projection"]
    assert joined.weights == 2 * 7168 * 7168 and joined.kept_bytes == 2 * 7168 * TOKENS / tp * BF16
    assert rows["mtp_logits"].weights == 0
    assert rows["mtp_embedding"].weights == (pp > 1) * rows["logits"].weights


@pytest.mark.parametrize("vpp", [1, 2, 4, 8])
def test_llama_405b_has_one_layer_less_at_each_end(vpp: int) -> None:
    """Llama 3, arXiv 2407.21783, section 3.3.2: 126 layers on 16 stages, one less on the first and on the last."""
    split = CORRECTED.stage_split(job_of("llama3.1-405b"), Plans(pp=16, vpp=vpp))
    assert (split.first, split.middle, split.last) == (7, 8, 7)


def test_the_head_takes_more_places_than_the_embedding() -> None:
    """61 layers on 16 stages of two virtual ones with two layers each: three places are left over."""
    split = CORRECTED.stage_split(job_of("deepseek-v3"), Plans(pp=16, vpp=2))
    assert (split.first, split.middle, split.last) == (3, 4, 2) and 3 + 14 * 4 + 2 == 61


@pytest.mark.parametrize(("cp", "context", "tokens"), [(1, "all_gather", 0), (2, "all_gather", TOKENS),
                                                       (8, "all_gather", TOKENS), (8, "ring", 0)])  # fmt: skip
def test_context_ranks_that_gather_hold_all_keys_and_values(cp: int, context: str, tokens: int) -> None:
    """Llama 3, arXiv 2407.21783, section 3.3.2: keys and values of the whole sequence; a ring holds none."""
    job = replace(job_of("llama3-8b"), context=context)
    assert Shape(job, Plans(cp=cp), "cp").gathered_kv == 2 * tokens * 8 * 128


@pytest.mark.parametrize("tp", [1, 8])
def test_the_backward_pass_of_a_head_holds_three_gradients(tp: int) -> None:
    """Of its weight, of its input, and where tensor ranks gather the sequence of their shard of it, with the gathered
    input; the logits' own is written over them."""
    job = replace(job_of("llama3-8b"), memory=memory_profile_of("megatron-core"))
    stream = TOKENS * 4096 * BF16
    gathered = stream + stream / tp if tp > 1 else 0
    loss = CORRECTED.strategies["1d"].block(job, Plans(tp=tp)).loss_bytes
    assert loss == 128256 / tp * 4096 * BF16 + stream + gathered


def test_adapters_keep_what_lies_between_their_products() -> None:
    """LoRA of rank 16 on q, k, v, o, gate, up and down of Llama 3 8B: the inputs are kept as before, 16 numbers more
    per token and matrix."""
    job = job_of("llama3-8b")
    plain, adapted = (
        sizes_of(CORRECTED.strategies["1d"].block(one, Plans())).layer.kept_bytes
        for one in (job, replace(job, adapter=Adapter(rank=16)))
    )
    assert adapted - plain == TOKENS * 7 * 16 * BF16


@pytest.mark.parametrize("every", [1, 2, 4])
def test_of_every_so_many_layers_one_runs_forward_once_more(every: int) -> None:
    """Llama 3 8B: 6.98 billion weights in the products of 32 layers, and attention over half of all pairs."""
    weights = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    scores = 32 * 4 * 4096 * (TOKENS + 1) / 2
    found = recomputed_flops_per_step(job_of("llama3-8b"), RECOMPUTE_CODES["full"], every)
    assert found == pytest.approx(64 * TOKENS * (2 * weights + scores) / every, rel=1e-12)


def test_recomputed_experts_run_forward_once_more() -> None:
    """Mixtral: router over 8 experts, and two experts of three matrices of 4096 x 14336 for each token."""
    job, code = job_of("mixtral-8x7b"), RECOMPUTE_CODES["experts"]
    per_token = 2 * (4096 * 8 + 2 * 3 * 4096 * 14336)
    assert recomputed_flops_per_step(job, code) == 64 * TOKENS * 32 * per_token
    whole, left = (
        sizes_of(CORRECTED.strategies["1d"].block(job, Plans(recompute=recompute))).layer.kept_bytes
        for recompute in (0, code)
    )
    activations = TOKENS * 2 * (4096 + 3 * 14336) * BF16
    scores = TOKENS * 8 * FP32
    assert whole - left == activations + scores, "all but the input of the router"


@pytest.mark.parametrize("ranks", [1, 8])
def test_experts_need_room_for_the_gradients_around_their_activation(ranks: int) -> None:
    """Mixtral: two rows per token, of gate and up (2 x 14336) and of the input (4096), beside the residual stream."""
    block = block_of("mixtral-8x7b", Plans(dp=ranks, ep=ranks))
    assert block.working_bytes == TOKENS * (4096 + 2 * (4096 + 2 * 14336)) * BF16


@pytest.mark.parametrize("tp", [1, 8])
def test_of_latent_attention_two_statistics_per_row_are_kept_where_the_rest_is_made_again(tp: int) -> None:
    """DeepSeek-V3: 128 heads of queries and keys 192 wide and values 128 wide come from the latents once more."""
    rows, again = (rows_of("deepseek-v3", Plans(tp=tp, recompute=code)) for code in (0, RECOMPUTE_CODES["outputs"]))
    heads = TOKENS * 128 / tp
    assert rows["fused_attention"].kept_bytes == heads * ((192 + 192 + 128) * BF16 + 2 * BF16)
    assert again["fused_attention"].kept_bytes == heads * 2 * BF16
