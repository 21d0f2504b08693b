"""Rows of experts, latent attention, windows, adapters, recomputed parts and narrow formats, against hand numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from steptime.api.models import load_model
from steptime.cost.attention import causal_pairs, windowed_pairs
from steptime.estimate.evaluate import forward_flops_per_sequence, model_flops_per_step, recomputed_flops_per_step
from steptime.estimate.memory import stage_terms
from steptime.estimate.result import planned_job
from steptime.estimate.sizes import Sizes, sizes_of
from steptime.model import catalogue_names
from steptime.model.parameters import active_parameter_terms, parameter_terms
from steptime.model.spec import ModelSpec
from steptime.plan.job import OPTIMIZERS, PRECISIONS, Adapter, Job
from steptime.plan.plans import RECOMPUTE_CODES, Plans
from steptime.plan.recompute import recompute_code, recompute_text
from steptime.plan.rows import Block, Row
from steptime.plan.space import CorrectedSpace
from steptime.plan.strategies import CORRECTED


def _job(name: str, **changes: Any) -> Job:
    model = load_model(name)
    job = Job(model=model, gpus=64, global_batch=64, seq_len=4096, precision=PRECISIONS["bf16"],
              optimizer=OPTIMIZERS["adam"])  # fmt: skip
    return replace(job, **changes)


def _block(job: Job, strategy: str = "context", **plan: int) -> Block:
    return CORRECTED.strategies[strategy].block(job, Plans(**plan))


def _rows(job: Job, **plan: int) -> dict[str, Row]:
    return {row.name: row for row in _block(job, **plan).layer}


def _parameters(sizes: Sizes, layers: int, plans: Plans) -> float:
    """Parameters of the whole model from those of one rank."""
    total = 0.0
    for part, count in ((sizes.layer, layers), (sizes.first, 1), (sizes.last, 1)):
        dense = (part.weights - part.replicated) * plans.tp + part.replicated
        total += count * float(dense + part.expert_weights * plans.ep * plans.etp)
    return total


FAMILIES = [name for name in catalogue_names() if load_model(name).experts or load_model(name).latent]


@pytest.mark.each("degrees", [{}, {"tp": 2, "ep": 4, "dp": 2}, {"tp": 4, "ep": 2, "dp": 2, "sp": 1}])
@pytest.mark.each("name", FAMILIES)
def test_weights_over_ranks_make_the_model(name, degrees):
    degrees = degrees | {"tp": min(degrees.get("tp", 1), load_model(name).kv_heads)}  # ranks beyond them hold copies
    job, plans = _job(name), Plans(**degrees)
    sizes = sizes_of(_block(job, **degrees))
    assert _parameters(sizes, job.model.layers, plans) == pytest.approx(parameter_terms(job.model).total, rel=1e-12)


def test_weights_of_shared_experts():
    """Two ranks share each expert: each has half of its width."""
    sizes = sizes_of(_block(_job("mixtral-8x7b"), tp=2, ep=2, etp=2, dp=2))
    assert sizes.layer.expert_weights == 8 / 2 * 3 * 4096 * 14336 / 2


def test_mixtral_on_eight_expert_ranks():
    """One expert a rank: 3 x 4096 x 14336 weights; a rank's 2 x 4096 copies of tokens go out and come back."""
    rows = _rows(_job("mixtral-8x7b"), dp=8, ep=8)
    assert rows["expert_in"].weights + rows["expert_out"].weights == 3 * 4096 * 14336
    assert rows["expert_in"].shape["m"] == 2 * 4096
    (exchange,) = rows["permute"].forward
    assert (exchange.collective, exchange.axis, exchange.size_bytes) == ("all_to_all", "ep", 2 * 4096 * 4096 * 2)
    assert rows["unpermute"].forward == rows["permute"].backward == rows["permute"].forward


def test_tensor_ranks_send_their_own_tokens():
    rows = _rows(_job("mixtral-8x7b"), tp=4, dp=2, ep=8)
    assert rows["expert_in"].shape["m"] == 2 * 4096 / 4
    gathered = _rows(_job("mixtral-8x7b"), tp=4, dp=2, ep=4, etp=2)
    assert gathered["expert_in"].shape["m"] == 2 * 2 * 4096 / 4
    assert gathered["sort_by_expert"].forward[0].size_bytes == 2 * 2 * 4096 / 4 * 4096 * 2


def test_the_fullest_rank_and_a_capacity():
    fuller = _rows(_job("mixtral-8x7b", expert_imbalance=1.5), dp=8, ep=8)
    assert fuller["expert_in"].shape["m"] == 1.5 * 2 * 4096
    assert fuller["permute"].forward[0].size_bytes == 1.5 * 2 * 4096 * 4096 * 2
    capped = _rows(_job("mixtral-8x7b", expert_imbalance=1.5, expert_capacity=1.25), dp=8, ep=8)
    assert capped["expert_in"].shape["m"] == 1.25 * 2 * 4096
    assert model_flops_per_step(_job("mixtral-8x7b", expert_imbalance=1.5)) == model_flops_per_step(
        _job("mixtral-8x7b")
    )


def test_dropped_choices_of_experts_are_no_model_flops():
    """Two of eight experts: two gated products of 3 h f per choice, of which a tenth has a slot."""
    full, dropped = _job("mixtral-8x7b"), _job("mixtral-8x7b", expert_capacity=0.1)
    experts = 3 * full.global_batch * 2 * 4096 * 2 * (3 * 4096 * 14336) * 32
    assert model_flops_per_step(full) - model_flops_per_step(dropped) == pytest.approx(0.9 * experts)
    assert model_flops_per_step(_job("mixtral-8x7b", expert_capacity=1.25)) == model_flops_per_step(full)
    again = recomputed_flops_per_step(dropped, RECOMPUTE_CODES["experts"])
    assert again < 0.2 * recomputed_flops_per_step(full, RECOMPUTE_CODES["experts"])
    assert recomputed_flops_per_step(dropped, RECOMPUTE_CODES["full"]) < model_flops_per_step(dropped) / 3


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v3", "qwen1.5-moe-a2.7b"])
def test_two_flops_per_active_weight_and_token(name):
    """Products of the active parameters that are matrices, and causal attention."""
    job = _job(name)
    model, tokens = job.model, job.seq_len
    terms = active_parameter_terms(model)
    weights = sum(n for path, n in terms.items() if "norm" not in path and "sinks" not in path)
    weights -= terms["embedding/token"] + _biases(job)
    value_dim = model.latent.v_head_dim if model.latent else model.head_dim
    pairs = _mean_pairs(model, tokens)
    expected = 2 * tokens * weights + model.layers * 2 * pairs * (model.head_dim + value_dim)
    assert sum(forward_flops_per_sequence(job).values()) == pytest.approx(expected, rel=1e-9)


def _mean_pairs(model: ModelSpec, tokens: int) -> float:
    """(query, key) pairs of a layer, the mean over those with and without a window."""
    whole = causal_pairs(model.heads * tokens, tokens)
    if model.window is None:
        return whole
    share = model.windowed_layers / model.layers
    return (1 - share) * whole + share * windowed_pairs(model.heads * tokens, tokens, model.window)


def _biases(job: Job) -> float:
    model, experts = job.model, job.model.experts
    count = model.layers * (model.qkv_bias * (model.query_width + 2 * model.kv_width) + model.out_bias * model.hidden)
    if experts is not None:
        wide = experts.expert_bias * (2 * experts.expert_ffn_hidden + model.hidden) * experts.experts_per_token
        count += experts.moe_layers * (wide + experts.router_bias * experts.experts)
    return count


def test_deepseek_v3_flops_per_token():
    """37.6 billion active parameters without the embedding of 0.93: 219.8 GFLOP a token, and attention at 4096."""
    job = _job("deepseek-v3", global_batch=1)
    core = 3 * 61 * 2 * (4097 / 2) * 128 * (192 + 128)
    per_token = model_flops_per_step(job) / 4096
    assert (per_token - core) / 1e9 == pytest.approx(219.7, abs=0.2)


def test_latents_are_gathered_instead_of_the_hidden_state():
    """DeepSeek-V3: 1536 for queries, 512 + 64 for keys and values."""
    rows = _rows(_job("deepseek-v3"), tp=4)
    assert rows["q_down"].replicated == rows["q_down"].weights == 7168 * 1536
    assert rows["q_down"].shape["m"] == 4096 / 4
    assert rows["q_up"].forward[0].size_bytes == 4096 * 1536 * 2
    assert rows["kv_up"].forward[0].size_bytes == 4096 * 576 * 2
    assert rows["kv_up"].weights == 512 * 32 * (128 + 128)
    heads = 4096 * 32
    assert rows["fused_attention"].kept_bytes == 2 * (heads * 192 + heads * (192 + 128) + 2 * heads)
    assert rows["attention_out"].shape["k"] == 32 * 128


def test_further_tokens_add_a_layer_and_a_head():
    """DeepSeek-V3's own: 11.6 billion parameters beside embedding and head."""
    model = replace(load_model("deepseek-v3"), mtp_depth=1)
    job = replace(_job("deepseek-v3"), model=model)
    block = _block(job)
    plain = parameter_terms(load_model("deepseek-v3")).total
    assert (parameter_terms(model).total - plain) / 1e9 == pytest.approx(11.61, abs=0.01)
    assert _parameters(sizes_of(block), 61, Plans()) == pytest.approx(parameter_terms(model).total, rel=1e-12)
    heads = [row for row in block.last if row.name.endswith("logits")]
    assert [row.weights for row in heads] == [129280 * 7168, 0]
    twice = _block(replace(job, model=replace(model, mtp_depth=2)))
    assert sum(row.share for row in twice.last if row.name == "mtp_expert_in") == 2


def test_states_of_experts_are_shared_over_their_own_ranks():
    """Eight data ranks and four expert ranks: two ranks hold the same experts."""
    job, plans = _job("mixtral-8x7b", gradient_dtype="fp32"), Plans(dp=8, ep=4)
    strategy = CORRECTED.strategies["context"]
    sizes = sizes_of(strategy.block(job, plans))
    terms = stage_terms(planned_job(CORRECTED, strategy, job, plans, sizes), "first")
    experts = 32 * 8 / 4 * 3 * 4096 * 14336
    assert terms["expert_weights/parameter_bytes"] == 2 * experts
    assert terms["expert_gradients/parameter_bytes"] == 4 * experts
    assert terms["expert_optimizer/parameter_bytes"] == 12 * experts / 2
    dense = parameter_terms(job.model).total - 4 * experts
    assert terms["optimizer/parameter_bytes"] == pytest.approx(12 * dense / 8)
    assert terms["gradients/parameter_bytes"] == pytest.approx(4 * dense)


def test_shards_of_fewer_ranks():
    assert Plans(dp=64, shard=8).sharing_ranks(64) == 8
    assert Plans(dp=64, shard=8).sharing_ranks(4) == 4
    assert Plans(shard=np.array([0, 8])).sharing_ranks(64).tolist() == [64, 8]


def test_layers_with_a_window_have_a_row_of_their_own():
    """Half of the layers of Gemma 2 see 4096 tokens."""
    rows = _rows(_job("gemma2-9b", seq_len=8192))
    both = [rows["fused_attention"], rows["windowed_attention"]]
    assert [row.share for row in both] == [0.5, 0.5]
    heads = 16
    assert both[0].shape["pairs"] == heads * causal_pairs(8192, 8192)
    assert both[1].shape["pairs"] == heads * windowed_pairs(8192, 8192, 4096)
    assert rows["windowed_attention"].shape["window"] == 4096
    assert rows["fused_attention"].shape["causal"] == 1


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_without_sequence_parallelism(tp):
    """arXiv 2205.05198, section 4.2: each tensor rank keeps all of what norms see, and of what they put out."""
    job = _job("megatron-gpt-22b")
    whole, cut = (_block(job, tp=tp, sp=sp) for sp in (0, 1))
    size = 4096 * 6144 * 2
    for a, b in zip(whole.layer, cut.layer, strict=True):
        replicated = "norm" in a.name or a.name in ("qkv", "mlp_in") or a.name.endswith("_dropout")
        assert a.kept_bytes == (tp * b.kept_bytes if replicated and a.name != "qk_norm" else b.kept_bytes), a.name
    transfers = [(t.collective, t.size_bytes) for row in whole.layer for t in (*row.forward, *row.backward)]
    tensor = [t for t in transfers if t[0] == "all_reduce"]
    assert tensor == [("all_reduce", size)] * 4
    assert whole.boundary_bytes == tp * cut.boundary_bytes


def test_sequence_parallelism_in_a_block_of_plans():
    job = _job("llama3-8b")
    block = CORRECTED.strategies["1d"].block(job, Plans(tp=np.array([4.0, 4.0]), sp=np.array([1.0, 0.0])))
    row = next(row for row in block.layer if row.name == "mlp_out")
    sizes = {t.collective: t.size_bytes.tolist() for t in row.forward}
    size = 4096 * 4096 * 2.0
    assert sizes == {"reduce_scatter": [size, 0.0], "all_reduce": [0.0, size]}


def test_context_ranks_exchange_blocks_or_heads():
    """LLaMA 3 8B on four context ranks: 8 key-value heads of 128."""
    ring = _rows(_job("llama3-8b", context="ring"), cp=4)["fused_attention"]
    (block,) = ring.forward
    assert (block.collective, block.size_bytes, ring.overlaps) == ("ring_exchange", 2 * 1024 * 8 * 128 * 2, 0.75)
    assert ring.backward[0].size_bytes == 2 * block.size_bytes
    heads = _rows(_job("llama3-8b", context="ulysses"), cp=4)["fused_attention"]
    sizes = [t.size_bytes for t in heads.forward]
    assert sizes == [1024 * (32 + 2 * 8) * 128 * 2, 1024 * 32 * 128 * 2]
    assert heads.shape["heads"] == 8 and heads.shape["queries"] == 4096 and heads.shape["causal"] == 1
    gathered = _rows(_job("llama3-8b"), cp=4)["fused_attention"]
    assert gathered.shape["pairs"] == ring.shape["pairs"] == heads.shape["pairs"]
    assert gathered.kept_bytes == heads.kept_bytes


def test_adapters_of_llama3_8b():
    """Rank 16 on all products: 41.9 million weights, as the method's reference library counts them."""
    job = _job("llama3-8b", adapter=Adapter(rank=16))
    sizes = sizes_of(_block(job))
    assert 32 * sizes.layer.weights == 41_943_040
    whole = 32 * sizes.layer.frozen + sizes.first.frozen + sizes.last.frozen
    assert whole == parameter_terms(job.model).total
    assert sizes.layer.frozen_bytes == 2 * sizes.layer.frozen
    cut = sizes_of(_block(job, tp=4)).layer
    assert 4 * (cut.weights - cut.replicated) + cut.replicated == sizes.layer.weights


def test_frozen_products_have_two_passes_of_three():
    """2/3 but for attention, whose two operands both have gradients."""
    job, plain = _job("llama3-8b", adapter=Adapter(rank=1)), _job("llama3-8b")
    attention_flops = 64 * 32 * 4 * (4097 / 2) * 4096 * 4096
    products = model_flops_per_step(plain) - 3 * attention_flops
    ratio = (model_flops_per_step(job) - 3 * attention_flops) / products
    assert ratio == pytest.approx(2 / 3, rel=2e-3)


def test_quantised_base_weights():
    job = _job("llama3-8b", adapter=Adapter(rank=16, weight_bytes=0.516))
    rows = _rows(job)
    assert rows["qkv"].weight_bytes == 0.516
    assert rows["attention_norm"].weight_bytes == 2
    expanded = rows["qkv_dequantise"].shape
    assert (expanded["read_bytes"], expanded["written_bytes"]) == (0.516 * 4096 * 6144, 2 * 4096 * 6144)
    only = _job("llama3-8b", adapter=Adapter(rank=16, targets="attention"))
    assert {row.name for row in _block(only).layer if row.name.endswith("_up")} == {
        "qkv_adapter_up", "attention_out_adapter_up",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("part", "again", "dropped"),
    [
        ("attention", {"fused_attention"}, 0),
        ("norm", {"attention_norm", "mlp_norm"}, 2 * 2 * 4096 * 4096),
        ("activation", {"activation"}, 2 * 4096 * 14336),
        ("mlp", {"mlp_in", "activation"}, 3 * 2 * 4096 * 14336),
    ],
)
def test_recomputed_parts_of_llama3_8b(part, again, dropped):
    job, code = _job("llama3-8b"), RECOMPUTE_CODES[part]
    block = _block(job, recompute=code)
    assert {row.name for row in block.layer if row.recomputed} == again
    kept = sizes_of(_block(job)).layer.kept_bytes
    assert kept - sizes_of(block).layer.kept_bytes == dropped
    full = _block(job, recompute=code | RECOMPUTE_CODES["full"])
    assert not any(np.any(row.recomputed) for row in full.layer)
    flops = recomputed_flops_per_step(job, code)
    assert flops == (64 * 32 * 2 * 4096 * 4096 * 2 * 14336 if part == "mlp" else flops)
    assert flops > 0 or part in ("norm", "activation")


def test_recomputed_parts_of_deepseek_v3():
    job = _job("deepseek-v3")
    kept = {name: sizes_of(_block(job, recompute=recompute_code(name))).layer.kept_bytes for name in RECOMPUTE_CODES}
    assert kept["none"] == kept["attention"] == kept["full"]
    heads = 4096 * 128 * 2
    assert kept["none"] - kept["up_projection"] == heads * (2 * 192 + 128)  # the statistics of the softmax stay
    assert kept["experts"] < kept["activation"] < kept["none"]


def test_every_third_layer_is_recomputed():
    job, strategy = _job("llama3-8b"), CORRECTED.strategies["1d"]

    def kept(plans: Plans) -> float:
        sizes = sizes_of(strategy.block(job, plans))
        terms = stage_terms(planned_job(CORRECTED, strategy, job, plans, sizes), "first")
        return float(terms["activations/layers/activation_bytes"])

    none, full = kept(Plans()), kept(Plans(recompute=2))
    assert kept(Plans(recompute=2, recompute_every=4)) == pytest.approx((full + 3 * none) / 4)


def test_texts_of_recomputation():
    assert [recompute_text(recompute_code(text)) for text in ("none", "full", "norm+activation")] == [
        "none", "full", "norm+activation",
    ]  # fmt: skip


@pytest.mark.parametrize(("dtype", "each"), [("fp8-te", 1.0), ("mxfp8", 1 + 1 / 32), ("nvfp4", 0.5625)])
def test_narrow_operands(dtype, each):
    """Two copies of the input are written forward, two of the gradient backward; the head stays wide."""
    job = _job("llama3-8b", precision=PRECISIONS[dtype])
    rows = _rows(job)
    x, y = 4096 * 4096, 4096 * 28672
    assert rows["mlp_in_quantise"].shape == {"read_bytes": 2 * x, "written_bytes": 2 * each * x}
    assert rows["mlp_in_quantise_gradient"].shape == {"read_bytes": 2 * y, "written_bytes": 2 * each * y}
    assert rows["mlp_in"].kept_bytes == each * x
    assert [row.operator for row in _block(job).last if row.name == "logits"] == ["wide_matmul"]
    assert not any("quantise" in row.name for row in _block(_job("llama3-8b")).layer)


def test_expert_ranks_that_are_tried():
    job = _job("mixtral-8x7b", gpus=16, global_batch=16)
    strategy = CORRECTED.strategies["1d"]
    listing = CorrectedSpace().list(job, strategy, 8, CORRECTED.rules)
    found = listing.configurations
    assert set(np.unique(found.ep)) == {1, 2, 4, 8}
    assert ((found.tp * found.dp) % found.ep == 0).all()
    fixed = CorrectedSpace().fixed({"ep": 4}).list(job, strategy, 8, CORRECTED.rules).configurations
    assert set(np.unique(fixed.ep)) == {1, 4}
    dense = CorrectedSpace().list(_job("llama3-8b", gpus=16, global_batch=16), strategy, 8, CORRECTED.rules)
    assert dense.configurations.ep == 1


def test_a_layer_scale_has_a_weight_per_channel_and_keeps_its_input():
    """DINOv2 with images of 518 pixels: 1370 tokens of 768."""
    model = load_model("dinov2-base")
    rows = _rows(_job("dinov2-base", seq_len=model.seq_len), dp=64)
    for name in ("attention_scale", "mlp_scale"):
        assert (rows[name].weights, rows[name].kept_bytes) == (768, 1370 * 768 * 2)
    assert "attention_scale" not in _rows(_job("vit-b16"), dp=64)
