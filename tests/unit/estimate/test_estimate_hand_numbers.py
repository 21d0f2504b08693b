"""Numbers of the engine that can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from explained_terms import lines_of
from machine_without_latencies import machine_of
from steptime.cost.collective import ring_all_gather_s, ring_all_reduce_s
from steptime.estimate.evaluate import Evaluation, evaluate, model_flops_per_step
from steptime.estimate.ledger import exposed_terms, fullest_stage, memory_terms
from steptime.estimate.memory import stage_terms
from steptime.estimate.single import Setting, estimate_plan, occupancy
from steptime.hardware import load_cluster
from steptime.model.parameters import parameter_terms
from steptime.model.spec import ModelSpec
from steptime.plan.framework import COPIES, Framework
from steptime.plan.job import OPTIMIZERS, PRECISIONS, Job
from steptime.plan.plans import ATTENTION_RECOMPUTE, Plans
from steptime.plan.strategies import CORRECTED

GPT = ModelSpec(
    name="gpt", family="gpt", source="test", layers=8, hidden=1024, heads=16, kv_heads=16, head_dim=64, ffn_hidden=4096,
    gated_mlp=False, activation="gelu", norm="layernorm", norm_bias=True, causal=True, seq_len=2048, vocab=0,
    dropout=True, final_norm=False, position="none",
)  # fmt: skip
FREE = machine_of(1e30, memory_bytes=1e11, host_Bps=1e30)


def _job(model: ModelSpec = GPT, batch: int = 16, dtype: str = "bf16", optimizer: str = "adam") -> Job:
    return Job(model=model, gpus=1, global_batch=batch, seq_len=model.seq_len, precision=PRECISIONS[dtype],
               optimizer=OPTIMIZERS[optimizer])  # fmt: skip


def _evaluated(plans: Plans, job: Job | None = None, strategy: str = "1d") -> Evaluation:
    return evaluate(CORRECTED, CORRECTED.strategies[strategy], job or _job(), FREE, plans)


@pytest.mark.each("tp", [1, 2, 4, 8])
@pytest.mark.each("batch", [1, 4])
def test_activation_bytes_of_korthikanti(tp, batch):
    """arXiv 2205.05198, table 2, selective recomputation and sequence parallelism: 34 s b h / t per layer.

    Fused attention keeps besides: two statistics of two bytes for each row of each head, 4 s b a / t.
    """
    s, h, a = GPT.seq_len, GPT.hidden, GPT.heads
    kept = _evaluated(Plans(tp=tp, micro_batch=batch)).sizes.layer.kept_bytes
    assert kept == (34 * s * batch * h + 4 * s * batch * a) / tp


def test_unfused_attention_keeps_five_bytes_per_score():
    """arXiv 2205.05198, equation 2: 34 s b h + 5 a s^2 b, of which recomputed attention keeps the first part."""
    s, h, a = GPT.seq_len, GPT.hidden, GPT.heads
    job = replace(_job(), attention="unfused")
    assert _evaluated(Plans(), job).sizes.layer.kept_bytes == 34 * s * h + 5 * a * s * s
    assert _evaluated(Plans(recompute=1), job).sizes.layer.kept_bytes == 34 * s * h


def test_scores_that_are_scaled_and_masked_apart_pass_memory_three_more_times():
    """Scaling reads and writes a s^2 b scores forward and backward, an added mask forward alone; neither keeps any."""
    job = replace(_job(), attention="unfused")
    plain, apart = (_evaluated(Plans(), replace(job, separate_kernels=separate)) for separate in (False, True))
    passes = {
        (time.row.name, time.phase): time.moved_bytes
        for time in apart.times["layer"]
        if time.row.name in ("score_scale", "score_mask")
    }
    scores = 2 * GPT.heads * GPT.seq_len**2
    assert passes == {
        ("score_scale", "forward"): 2 * scores, ("score_scale", "backward"): 2 * scores,
        ("score_mask", "forward"): 2 * scores,
    }  # fmt: skip
    assert apart.sizes.layer.kept_bytes == plain.sizes.layer.kept_bytes
    again = _evaluated(Plans(recompute=1), replace(job, separate_kernels=True)).times["layer"]
    assert {t.row.name for t in again if t.phase == "recompute"} >= {"score_scale", "score_mask"}


def _moved(job: Job, *names: str) -> dict[tuple[str, str], float]:
    """Bytes per element of two-byte tensors of one layer, by row and phase."""
    times = _evaluated(Plans(), job).times["layer"]
    return {
        (t.row.name, t.phase): t.moved_bytes / t.row.shape["elements"]
        for t in times
        if t.row.name in names and t.phase in ("forward", "backward")
    }


def test_a_dropout_that_adds_moves_the_stream_and_the_mask():
    """Forward reads two tensors and writes one and a mask byte; backward drops a gradient and adds two."""
    names = ("mlp_dropout", "mlp_residual")
    assert _moved(_job(), *names) == {("mlp_dropout", "forward"): 7, ("mlp_dropout", "backward"): 11}
    without = _moved(_job(replace(GPT, dropout=False)), *names)
    assert without == {("mlp_residual", "forward"): 6, ("mlp_residual", "backward"): 6}
    assert _moved(replace(_job(), separate_kernels=True), *names) == without | {
        ("mlp_dropout", "forward"): 5, ("mlp_dropout", "backward"): 5,
    }  # fmt: skip


def test_attention_copies_what_its_framework_says():
    """Of s b tokens: queries and 4 of 16 keys and values (1 + 2 / 4) h, what it returns h, each read and written."""
    tokens, h = GPT.seq_len, GPT.hidden
    job = replace(_job(replace(GPT, kv_heads=4)), fused_copies=frozenset(COPIES), unfused_copies=frozenset({"context"}))
    names = [f"attention_{name}_copy" for name in COPIES]

    def copied(job: Job, plans: Plans) -> dict[tuple[str, str], float]:
        times = _evaluated(plans, job).times["layer"]
        sizes = {(t.row.name, t.phase): t.row.share * t.moved_bytes / (2 * tokens * h) for t in times}
        return {key: size / plans.micro_batch for key, size in sizes.items() if key[0] in names}

    phases = ("forward", "backward")
    both = {(n, p): x for n, x in zip(names, (2 * (1 + 2 / 4), 2), strict=True) for p in phases}
    assert copied(job, Plans(micro_batch=2)) == both
    one = copied(job, Plans())
    assert one == both | {(names[1], p): 0 for p in phases}, "of one sequence both layouts are the same"
    unfused = replace(job, attention="unfused")
    assert copied(unfused, Plans(recompute=ATTENTION_RECOMPUTE)) == {
        ("attention_context_copy", phase): 2 for phase in ("forward", "recompute", "backward")
    }
    assert copied(replace(job, fused_copies=frozenset()), Plans()) == {}


def test_a_triangular_softmax_reads_half_of_the_scores():
    """Forward half read and all written; backward half of two read and all of one written."""
    job = replace(_job(), attention="unfused")
    scores = 2 * GPT.heads * GPT.seq_len**2

    def moved(job: Job) -> list[float]:
        times = _evaluated(Plans(), job).times["layer"]
        return [t.moved_bytes / scores for t in times if t.row.name == "softmax" and t.phase != "recompute"]

    assert (moved(job), moved(replace(job, triangular_softmax=True))) == ([2, 3], [1.5, 2])
    encoder = replace(_job(replace(GPT, causal=False)), attention="unfused", triangular_softmax=True)
    assert moved(encoder) == [2, 3]


def test_a_norm_in_one_pass_reads_its_input_and_gradient_once():
    """Backward two read and one written, where PyTorch's two kernels read both twice; forward nothing changes."""

    def moved(job: Job) -> list[float]:
        times = _evaluated(Plans(), job).times["layer"]
        elements = 2 * GPT.seq_len * GPT.hidden
        return [round(t.moved_bytes / elements) for t in times if t.row.name == "mlp_norm" and t.phase != "recompute"]

    assert (moved(_job()), moved(replace(_job(), one_pass_norms=True))) == ([2, 5], [2, 3])
    assert moved(replace(_job(replace(GPT, norm="rmsnorm")), one_pass_norms=True)) == [2, 3]


def test_rotation_by_complex_numbers_passes_memory_in_fp32():
    """Two bytes read and four written, four and four, four and two: 20 for each element, where one kernel moves 4."""
    turned = _job(replace(GPT, position="rope"))
    assert set(_moved(turned, "rope").values()) == {4}
    assert set(_moved(replace(turned, complex_rope=True), "rope").values()) == {20}
    plain = _job(replace(GPT, position="rope"), dtype="fp32")
    assert set(_moved(replace(plain, complex_rope=True), "rope").values()) == {8}, "no casts"


def test_full_recomputation_keeps_the_input_of_each_layer():
    """arXiv 2205.05198, table 2: 2 s b h per layer."""
    e = _evaluated(Plans(recompute=2))
    terms = stage_terms(e, "first")
    assert terms["activations/layers/activation_bytes"] == GPT.layers * 2 * GPT.seq_len * GPT.hidden
    assert e.inputs.recomputed == 1


@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 4), (4, 16), (8, 8)])
def test_bubble_of_1f1b(pp, micro_batches):
    """(p - 1) / m of the ideal time, with equal stages and free links."""
    step = _evaluated(Plans(pp=pp), _job(batch=micro_batches)).step
    assert step.bubble_s / step.steady_s == pytest.approx((pp - 1) / micro_batches, rel=1e-12)
    half = _evaluated(Plans(pp=2, vpp=2), _job(batch=micro_batches)).step
    assert half.bubble_s / half.steady_s == pytest.approx(1 / micro_batches / 2, rel=1e-12)


def test_1f1b_holds_one_micro_batch_per_stage():
    one = _evaluated(Plans(pp=1)).sizes.layer.kept_bytes
    e = _evaluated(Plans(pp=4), _job(batch=16))
    kept = {
        stage: stage_terms(e, stage)["activations/layers/activation_bytes"] for stage in ("first", "middle", "last")
    }
    assert kept == {"first": 4 * 2 * one, "middle": 3 * 2 * one, "last": 2 * one}


@pytest.mark.parametrize("n", [2, 4, 8, 64])
def test_ring_all_reduce_sends_twice_n_minus_one_over_n(n):
    inside = min(n, 8)
    assert ring_all_reduce_s(1e9, n, inside, 1e9, 1e9, 0.0, 0.0) == pytest.approx(2 * (n - 1) / n, rel=1e-12)
    assert ring_all_gather_s(1e9, n, 1, 1e9, 1e9, 0.0, 0.0) == pytest.approx((n - 1) / n, rel=1e-12)


@pytest.mark.each(
    ("dtype", "optimizer", "each"),
    [
        ("bf16", "adam", 16),
        ("fp16", "adam", 16),
        ("fp32", "adam", 16),
        ("tf32", "adam", 16),
        ("fp8-te", "adam", 16),
        ("mxfp8", "adam", 16),
        ("nvfp4", "adam", 16),
        ("bf16", "sgd", 8),
        ("fp32", "momentum", 12),
        ("bf16", "adam8bit", 10 + 2 * 4 / 256),
    ],
)
def test_bytes_per_parameter(dtype, optimizer, each):
    """Adam in mixed precision: 2 weights + 2 gradients + 4 + 4 + 4 (ZeRO, arXiv 1910.02054, section 3.1).

    In 32 bits, and where only products are in TF32, 4 of each; narrow products leave the weights in 16 bits. In 8 bits
    two states of one byte and an fp32 scale for 256 elements.
    """
    e = _evaluated(Plans(zero=0), _job(dtype=dtype, optimizer=optimizer))
    memory = memory_terms(e, fullest_stage(e))
    states = sum(value for path, value in memory.items() if path.endswith("parameter_bytes"))
    assert states == each * parameter_terms(GPT).total


def test_zero_1_on_64_replicas():
    """ZeRO-1 (P_os): 4 + 12 / N bytes per parameter."""
    e = _evaluated(Plans(dp=64), _job(batch=64))
    memory = memory_terms(e, fullest_stage(e))
    states = sum(value for path, value in memory.items() if path.endswith("parameter_bytes"))
    assert states == pytest.approx((4 + 12 / 64) * parameter_terms(GPT).total, rel=1e-12)


def test_six_flops_per_parameter_and_token():
    """6 N D where the sequence is short against the hidden dimension: attention adds s / (12 h) of causal pairs."""
    model = replace(GPT, hidden=16384, heads=128, kv_heads=128, head_dim=128, ffn_hidden=4 * 16384, seq_len=64)
    job = _job(model, batch=8)
    tokens = 8 * 64
    ratio = model_flops_per_step(job) / (6 * parameter_terms(model).total * tokens)
    assert ratio == pytest.approx(1, abs=1e-3)
    layer = 12 * model.hidden**2
    attention = 2 * (64 + 1) / 2 * model.hidden * 2
    assert model_flops_per_step(job) == pytest.approx(3 * tokens * model.layers * (2 * layer + attention), rel=1e-12)


def test_a_product_takes_its_flops_over_the_rate():
    """The MLP's first product of 2048 x 1024 by 1024 x 4096."""
    times = {(t.row.name, t.phase): t for t in _evaluated(Plans()).times["layer"]}
    assert times["mlp_in", "forward"].matrix_flops == 2 * 2048 * 1024 * 4096
    assert times["mlp_in", "forward"].compute_s == pytest.approx(2 * 2048 * 1024 * 4096 / 1e15)
    assert times["mlp_in", "backward"].matrix_flops == 4 * 2048 * 1024 * 4096
    assert times["mlp_in", "forward"].moved_bytes == 2 * (2048 * 1024 + 1024 * 4096 + 2048 * 4096)


def test_tensor_parallel_traffic_of_a_layer():
    """Forward two gathers and two scatters of s b h elements; backward twice the gathers (the kept shards)."""
    e = _evaluated(Plans(tp=4, micro_batch=2))
    size = 2 * GPT.seq_len * GPT.hidden * 2
    forward = [t for row in e.block.layer for t in row.forward]
    backward = [t for row in e.block.layer for t in row.backward]
    assert {t.size_bytes for t in (*forward, *backward)} == {size}
    assert sorted(t.collective for t in forward) == ["all_gather"] * 2 + ["reduce_scatter"] * 2
    assert sorted(t.collective for t in backward) == ["all_gather"] * 4 + ["reduce_scatter"] * 2


def test_optimizer_time_is_its_traffic():
    """Read and write 12 bytes of states, read 2 of the gradient three times, write it once, write 2 of the weight."""
    e = _evaluated(Plans(zero=0))
    assert e.step.optimizer_s == pytest.approx(parameter_terms(GPT).total * 34 / FREE.memory_Bps)


def test_mfu_of_a_known_time():
    job = replace(_job(), gpus=8)
    setting = Setting(method=CORRECTED, job=job, cluster=load_cluster("dgx-h100"))
    e = estimate_plan(setting, CORRECTED.strategies["1d"], Plans(dp=8, recompute=2))
    assert e.mfu == pytest.approx(e.model_flops / (e.step_time_s * 8 * 989.4e12), rel=1e-12)
    assert e.hfu == pytest.approx(e.mfu * 4 / 3, rel=1e-12)


def test_occupancy_of_partly_filled_domains():
    assert occupancy(8, 8, 8) == {"domains": 1, "idle_devices": 0}
    assert occupancy(16, 6, 8) == {"domains": 3, "idle_devices": 8}


def test_the_memory_terms_of_unfused_attention_with_dropout_add_up():
    e = _evaluated(Plans(), replace(_job(), attention="unfused"))
    names = [row.name for row in e.block.layer]
    memory = memory_terms(e, fullest_stage(e))
    assert memory.total == pytest.approx(float(e.peak_bytes), rel=1e-12)
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(("recompute", "again"), [(0, 0.0), (2, 1.0)])
def test_a_slow_host_issues_recomputed_layers_once_more(recompute, again):
    """One second per operator: the device waits for the host alone, forward, backward and forward again."""
    slow = replace(_job(), framework=Framework(name="slow", host_s=1.0))
    e = _evaluated(Plans(recompute=recompute), slow)
    terms = exposed_terms(lines_of(e))
    waited = {path.split("/")[1]: s for path, s in terms.items() if path.startswith("host/") and "/layer/" in path}
    assert waited.get("recompute", 0.0) == pytest.approx(again * waited["forward"])
    assert waited["forward"] == pytest.approx(e.works["layer"]["forward"].operators * GPT.layers * 16, rel=1e-3)
    assert terms.total == pytest.approx(float(e.step_time_s), rel=1e-12)
