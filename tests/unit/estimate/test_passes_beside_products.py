"""Passes beside products, by hand: what quantises operands under each FP8 recipe, and the copies of FSDP2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from steptime.api.calls import estimate
from steptime.api.models import load_model
from steptime.api.searches import plan
from steptime.estimate.kernels import models_of, timed
from steptime.estimate.operators import OPERATORS
from steptime.hardware import load_cluster
from steptime.plan.job import OPTIMIZERS, PRECISIONS, QLORA_BYTES, Adapter, Job, with_habits
from steptime.plan.plans import Plans
from steptime.plan.recompute import recompute_code
from steptime.plan.rows import Row
from steptime.plan.strategies import CORRECTED

SEQ, HIDDEN, FFN_IN = 4096, 4096, 28672
INPUT, WEIGHTS = SEQ * HIDDEN, HIDDEN * FFN_IN


def _job(dtype: str = "bf16", **changes: Any) -> Job:
    job = Job(model=load_model("llama3-8b"), gpus=8, global_batch=64, seq_len=SEQ, precision=PRECISIONS[dtype],
              optimizer=OPTIMIZERS["adam"])  # fmt: skip
    return replace(job, **changes)


def _rows(job: Job, part: str = "layer", **degrees: Any) -> dict[str, Row]:
    block = CORRECTED.strategies["context"].block(job, Plans(**degrees))
    return {row.name: row for row in getattr(block, part)}


def _bytes(row: Row) -> tuple[float, float]:
    return row.shape["read_bytes"], row.shape["written_bytes"]


@pytest.mark.parametrize(
    ("dtype", "reads", "element"),
    [("fp8-te", 2, 1.0), ("fp8-tensorwise", 4, 1.0), ("fp8-blockwise", 2, 1 + 4 / 128), ("mxfp8", 2, 1 + 1 / 32)],
)
def test_an_operand_is_read_once_more_where_its_largest_magnitude_is_sought(dtype, reads, element):
    rows = _rows(_job(dtype), dp=8)
    assert _bytes(rows["mlp_in_quantise"]) == (reads * INPUT, 2 * element * INPUT)
    assert _bytes(rows["mlp_in_quantise_gradient"]) == (reads * SEQ * FFN_IN, 2 * element * SEQ * FFN_IN)
    assert _bytes(rows["mlp_in_quantise_weights"]) == (reads * WEIGHTS, 2 * element * WEIGHTS)
    assert rows["mlp_in"].kept_bytes == element * INPUT


def test_weights_are_quantised_once_a_step_but_after_each_gathering_of_zero_3():
    once = _rows(_job("fp8-te"), dp=8, micro_batch=2)
    assert once["mlp_in_quantise_weights"].share == 1 / 4  # of 64 sequences on 8 ranks, two at a time
    assert once["mlp_in_quantise_weights"].operator == "move_forward"
    assert "mlp_in_quantise_gathered" not in once
    each = _rows(_job("fp8-tensorwise"), dp=8, micro_batch=2, zero=3)
    assert "mlp_in_quantise_weights" not in each
    assert each["mlp_in_quantise_gathered"].operator == "move"  # forward as it is, backward transposed
    assert each["mlp_in_quantise_gathered"].share == 1
    assert _bytes(each["mlp_in_quantise_gathered"]) == (2 * WEIGHTS, WEIGHTS)


def test_one_rank_gathers_no_weights_and_quantises_them_once():
    alone = _rows(_job("fp8-te"), tp=8, zero=3)
    assert alone["mlp_in_quantise_weights"].share == 1 / 64 and "mlp_in_quantise_gathered" not in alone
    replicas = _rows(_job("fp8-te"), dp=8, zero=3, shard=1)  # each a whole copy
    assert replicas["mlp_in_quantise_weights"].share == 1 / 8 and "mlp_in_quantise_gathered" not in replicas
    context = _rows(_job("fp8-te"), tp=4, cp=2, zero=3)  # shares of its own
    assert "mlp_in_quantise_weights" not in context and context["mlp_in_quantise_gathered"].share == 1


def test_experts_are_gathered_among_those_that_hold_the_same():
    job = replace(_job("fp8-te"), model=load_model("mixtral-8x7b"))
    whole = _rows(job, dp=8, ep=8, zero=3)  # an expert each
    assert "expert_in_quantise_gathered" not in whole and "qkv_quantise_gathered" in whole
    shared = _rows(job, tp=8, zero=3)  # tensor ranks share experts that none of them cuts
    assert "expert_in_quantise_gathered" in shared and "qkv_quantise_gathered" not in shared


def test_frozen_weights_are_quantised_for_good_and_need_no_transposed_operands():
    rows = _rows(_job("fp8-te", adapter=Adapter(rank=8)), dp=8)
    assert _bytes(rows["mlp_in_quantise"]) == (2 * INPUT, INPUT) and "mlp_in_quantise_weights" not in rows
    assert _bytes(rows["mlp_in_quantise_gradient"]) == (2 * SEQ * FFN_IN, SEQ * FFN_IN)
    assert not any(
        "transpose" in name for name in _rows(_job("fp8-te", adapter=Adapter(rank=8)), tp=8) if "adapter" not in name
    )
    assert "mlp_in_adapter_down_quantise_weights" in rows


@pytest.mark.parametrize(
    ("recompute", "again"),
    [("none", {}), ("full", {}),
     ("norm", {"qkv": 1, "mlp_in": 1}),  # their inputs, the outputs of the norms, are made again
     ("activation", {"mlp_out": 1}), ("mlp", {"mlp_in": 1, "mlp_out": 1})],
)  # fmt: skip
def test_what_is_made_again_is_quantised_again(recompute, again):
    rows = _rows(_job("fp8-te"), dp=8, recompute=recompute_code(recompute))
    names = ("qkv", "attention_out", "mlp_in", "mlp_out")
    assert {name: rows[f"{name}_quantise"].recomputed for name in names} == {name: again.get(name, 0) for name in names}


def test_an_input_that_no_gradient_needs_is_not_quantised_again():
    frozen = _job("fp8-te", adapter=Adapter(rank=8, targets="attention"))
    rows = _rows(frozen, dp=8, recompute=recompute_code("norm"))
    assert rows["mlp_in_quantise"].recomputed == 0


LAYER = 4096 * (4096 + 2048) + 4096 * 4096 + WEIGHTS + 14336 * 4096 + 2 * 4096
"""Parameters of a layer of Llama 3 8B."""


def _copies(**degrees: Any) -> dict[str, tuple[float, float, float]]:
    rows = _rows(with_habits(_job(), "torchtitan"), **degrees)
    return {name: (*_bytes(row), row.share) for name, row in rows.items() if row.block == "fsdp"}


def test_fsdp2_copies_parameters_out_in_each_pass_and_gradients_into_fp32():
    assert _copies(dp=8, micro_batch=1, zero=3) == {
        "copy_out": (2 * LAYER, 2 * LAYER, 1), "copy_out_again": (2 * LAYER, 2 * LAYER, 1),
        "copy_in": (2 * LAYER, 4 * LAYER, 1),
    }  # fmt: skip


def test_what_stays_gathered_is_copied_once_a_step():
    assert {name: share for name, (_, _, share) in _copies(dp=8, zero=2).items()} == {"copy_out": 1 / 8, "copy_in": 1}
    assert {name: share for name, (_, _, share) in _copies(dp=8, zero=1).items()} == {
        "copy_out": 1 / 8, "copy_in": 1 / 8,
    }  # fmt: skip
    assert _copies(dp=8, zero=0) == {}


def test_a_forward_pass_in_full_again_finds_its_weights_gathered():
    full = recompute_code("full")
    assert "copy_out_again" not in _copies(dp=8, zero=3, recompute=full)
    assert _copies(dp=8, zero=3, recompute=full, recompute_every=4)["copy_out_again"][2] == 3 / 4


def test_one_rank_or_flat_parameters_copy_nothing():
    assert _copies(tp=8, zero=3) == {} and _copies(dp=8, zero=3, shard=1) == {}
    assert _copies(dp=8, zero=3, shard=2) == _copies(dp=8, zero=3)
    flat = with_habits(_job(), "fms-fsdp")
    assert not any(row.block == "fsdp" for row in _rows(flat, dp=8, zero=3).values())


def test_copies_of_the_ends_have_names_of_their_own():
    job = with_habits(_job(), "torchtitan")
    parts = ("layer", "first", "last")
    names = [{row for row in _rows(job, part, dp=8, zero=3) if "copy_" in row} for part in parts]
    assert [len(each) for each in names] == [3, 3, 3] and len(set.union(*names)) == 9


def test_the_ends_of_the_model_are_copied_too_and_frozen_weights_as_they_are_stored():
    job = with_habits(_job(adapter=Adapter(rank=8, weight_bytes=QLORA_BYTES)), "torchtune")
    rows, first = _rows(job, dp=8, zero=3), _rows(with_habits(_job(), "torchtitan"), "first", dp=8, zero=3)
    assert _bytes(first["embedding_copy_out"]) == (2 * 128256 * 4096, 2 * 128256 * 4096)
    assert QLORA_BYTES * LAYER < _bytes(rows["copy_out"])[0] < 0.3 * 2 * LAYER
    assert _bytes(rows["copy_in"])[0] < 0.05 * 2 * LAYER
    assert "embedding_copy_in" in first and "embedding_copy_in" not in _rows(job, "first", dp=8, zero=3)


@pytest.mark.parametrize(
    ("dtype", "quantised", "transposed", "gradient"),
    [("fp8-te", (2, 1), True, 1), ("fp8-tensorwise", (4, 1), True, 1),
     ("mxfp8", (2, 2 * (1 + 1 / 32)), False, 2 * (1 + 1 / 32))],
)  # fmt: skip
def test_what_tensor_ranks_gather_is_quantised_before_and_travels_narrow(dtype, quantised, transposed, gradient):
    """Each of 8 ranks quantises its 512 tokens; a second copy with one scale is made of the 4096 gathered ones."""
    rows, read, written = _rows(_job(dtype), tp=8), *quantised
    whole, narrow = SEQ * HIDDEN, PRECISIONS[dtype].quantised_bytes
    for name in ("mlp_in_quantise", "mlp_out_quantise_gradient"):
        assert _bytes(rows[name]) == pytest.approx((read * whole / 8, written * whole / 8))
        assert (f"{name}_transpose" in rows) == transposed
        if transposed:
            assert _bytes(rows[f"{name}_transpose"]) == (whole, whole)
            assert rows[f"{name}_transpose"].operator == "move_backward"
    wide = _rows(_job(), tp=8)
    assert _sizes(rows["mlp_in"].forward) == pytest.approx({"all_gather": narrow * whole})
    assert _sizes(rows["mlp_in"].backward) == pytest.approx(
        {"all_gather": narrow * whole, "reduce_scatter": _sizes(wide["mlp_in"].backward)["reduce_scatter"]}
    )
    assert rows["mlp_out"].forward == wide["mlp_out"].forward  # sums are scattered in 16 bits
    assert _sizes(rows["mlp_out"].backward) == pytest.approx({"all_gather": gradient * whole})


def _sizes(transfers: Any) -> dict[str, float]:
    return {each.collective: each.size_bytes for each in transfers}


def test_what_no_rank_gathers_is_quantised_whole():
    rows, inner = _rows(_job("fp8-te"), tp=8), SEQ * 14336 / 8
    assert _bytes(rows["mlp_out_quantise"]) == (2 * inner, 2 * inner)
    assert _bytes(rows["mlp_in_quantise_gradient"]) == (2 * 2 * inner, 2 * 2 * inner)
    assert "mlp_out_quantise_transpose" not in rows and "mlp_in_quantise_gradient_transpose" not in rows


def test_gradients_of_frozen_products_travel_once():
    """Their second copy is for the gradient of weights."""
    rows = _rows(_job("mxfp8", adapter=Adapter(rank=8)), tp=8)
    assert _sizes(rows["mlp_out"].backward) == pytest.approx({"all_gather": (1 + 1 / 32) * INPUT})


@pytest.mark.parametrize(
    ("zero", "passes"),
    [(1, {"quantise", "quantise_transpose", "quantise_gradient", "quantise_weights"}),
     (3, {"quantise", "quantise_transpose", "quantise_gradient", "quantise_gathered"})],
)  # fmt: skip
def test_passes_count_in_the_layers_that_have_their_product(zero, passes):
    """Of the 61 layers of DeepSeek-V3 three have a dense MLP."""
    job = replace(_job("fp8-te"), model=load_model("deepseek-v3"))
    rows = _rows(job, tp=4, dp=2, zero=zero)
    assert rows["mlp_in"].share == 3 / 61
    for name in passes:
        once = 32 if name == "quantise_weights" else 1  # micro-batches
        assert rows[f"mlp_in_{name}"].share == pytest.approx(3 / 61 / once), name


@pytest.mark.parametrize("degrees", [{"tp": 8, "sp": 0}, {"tp": 1, "dp": 8}])
def test_an_input_that_every_rank_has_is_quantised_whole(degrees):
    rows = _rows(_job("fp8-te"), **degrees)
    assert _bytes(rows["mlp_in_quantise"]) == (2 * INPUT, 2 * INPUT)
    assert not any("transpose" in name for name in rows)


def test_plans_of_one_table_are_quantised_as_each_alone():
    job, names = _job("fp8-te"), ("mlp_in_quantise", "mlp_in_quantise_transpose", "mlp_out_quantise_gradient")
    table = _rows(job, tp=np.array([1, 8, 8]), sp=np.array([1, 1, 0]), dp=np.array([8, 1, 1]))
    for index, (tp, sp) in enumerate([(1, 1), (8, 1), (8, 0)]):
        alone = _rows(job, tp=tp, sp=sp, dp=8 // tp)
        for name in names:
            row, one = table[name], alone.get(name)
            share = np.broadcast_to(row.share, 3)[index]
            assert share == (0 if one is None else one.share)
            if one is not None:
                assert [np.broadcast_to(each, 3)[index] for each in _bytes(row)] == list(_bytes(one))


@pytest.mark.parametrize(
    ("cluster", "copies"), [("dgx-h100", (2, 2, 2)), ("dgx-b200", (1, 1, 2)), ("rtx-5090", (2, 2, 2))]
)
def test_data_centre_blackwell_needs_no_transposed_copy_of_tensors_with_one_scale(cluster, copies):
    device = load_cluster(cluster).device
    for dtype, expected in zip(("fp8-te", "fp8-tensorwise", "mxfp8"), copies, strict=True):
        precision = PRECISIONS[dtype].on(device)
        rows = _rows(replace(_job(), precision=precision), dp=8)
        assert _bytes(rows["mlp_in_quantise"])[1] == expected * precision.quantised_bytes * INPUT


def test_an_estimate_asks_the_device_for_its_layouts():
    """A step of B200 in FP8 with tensor ranks has no pass that transposes; one of H100 has."""
    for cluster, expected in (("dgx-h100", True), ("dgx-b200", False)):
        found = estimate("llama3-8b", cluster, plan={"tp": 8}, gpus=8, global_batch=8, dtype="fp8-te").to_json()
        assert ("mlp_in_quantise_transpose" in str(found)) == expected


def test_the_head_and_the_router_are_products_in_another_dtype_and_no_attention():
    assert OPERATORS["wide_matmul"].wide and OPERATORS["wide_matmul"].kind == "matrix"
    assert OPERATORS["frozen_wide_matmul"].kind == "matrix" and OPERATORS["fused_attention"].kind == "attention"


def test_frozen_heads_and_routers_stay_in_the_dtype_of_attention():
    job = replace(_job("fp8-te", adapter=Adapter(rank=8)), model=load_model("mixtral-8x7b"))
    assert _rows(job, "last", dp=8)["logits"].operator == "frozen_wide_matmul"
    assert _rows(job, dp=8)["router"].operator == "frozen_wide_matmul"
    models = models_of(load_cluster("dgx-h100").device, job.precision)
    shape = {"m": 4096, "n": 4096, "k": 4096}
    each = {name: timed(models, name, shape, {}, backward=True) for name in ("wide_matmul", "frozen_wide_matmul")}
    frozen, trained = each["frozen_wide_matmul"], each["wide_matmul"]
    assert frozen is not None and trained is not None and frozen.model is trained.model
    assert (len(frozen.shapes), len(trained.shapes)) == (1, 2)


def test_experts_are_copied_where_ranks_hold_the_same_ones():
    job = replace(with_habits(_job(), "torchtitan"), model=load_model("mixtral-8x7b"))
    rows = _rows(job, dp=8, ep=8, zero=3)
    routed = sum(row.weights * row.share for row in rows.values() if row.expert)
    others = sum(row.weights * row.share for row in rows.values() if not row.expert)
    assert _bytes(rows["copy_out"])[0] == 2 * others  # each rank has an expert of its own
    assert _bytes(_rows(job, dp=8, ep=4, zero=3)["copy_out"])[0] == 2 * (others + 2 * routed)  # two ranks share two
    alone = _rows(job, tp=8, zero=3)  # the ranks share experts, not the rest
    assert _bytes(alone["copy_out"])[0] == 2 * sum(row.weights * row.share for row in alone.values() if row.expert)


def test_the_ends_are_gathered_again_though_layers_are_recomputed_in_full():
    job = with_habits(_job(), "torchtitan")
    for part, name in (("first", "embedding_copy"), ("last", "head_copy")):
        rows = _rows(job, part, dp=8, zero=3, recompute=recompute_code("full"))
        assert (rows[f"{name}_out"].share, rows[f"{name}_out_again"].share) == (1, 1)


@pytest.mark.parametrize(("every", "forwards"), [(1, 2.0), (4, 1.25)])
def test_what_is_done_once_a_step_is_not_done_again_with_the_forward_pass(every, forwards):
    degrees = {"dp": 8, "zero": 1, "recompute": recompute_code("full"), "recompute_every": every}
    assert _copies(**degrees)["copy_out"][2] == 1 / (8 * forwards)
    rows = _rows(_job("fp8-te"), **degrees)
    assert rows["mlp_in_quantise_weights"].share == 1 / (8 * forwards)
    assert rows["mlp_in_quantise"].share == 1


@pytest.mark.parametrize(("dtype", "framework"), [("bf16", "torchtitan"), ("fp8-te", "megatron-core")])
def test_a_search_ranks_plans_by_the_times_of_their_estimates(dtype, framework):
    """Layers of plans that gather or reduce otherwise do not cost the same."""
    found = plan("llama3-8b", "dgx-h100", gpus=16, global_batch=64, dtype=dtype, framework=framework, top=40).plans
    assert {each.plan["zero"] for each in found} == {1, 3}
    times_s = [each.step_time_s for each in found]
    assert times_s == pytest.approx(sorted(times_s))
