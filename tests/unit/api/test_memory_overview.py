"""The memory overview of GPT-3, the table of ZeRO and MFU against HFU, from a ledger without a cluster.

Rows are those of a course's notes ("Memory overview for GPT-3", "ZeRO Stages Overview", "MFU comparing to HFU"); the
table of ZeRO is that of arXiv 1910.02054. Where a number here differs from theirs the reason stands next to it.
"""

from __future__ import annotations

import json

import pytest

from cli_runner import CliRunner
from steptime import api
from steptime.cli.main import main
from steptime.cost.data_parallel import zero_sent_bytes
from steptime.errors import UserError

BATCH = {"seq": 2000, "global_batch": 1600}
"""3.2 million tokens, as the notes count GPT-3's batch."""
GB = 1e9
PARAMETERS = 174_604_259_328
"""The notes say 175 billion; these are the weights of table 2.1 of arXiv 2005.14165 one by one."""
ROUNDED = 175e9 / PARAMETERS


def ledger(dtype: str = "fp16", **more: object) -> api.Ledger:
    return api.ledger("gpt3-175b", dtype=dtype, **{**BATCH, **more})


@pytest.mark.parametrize(("dtype", "theirs"), [("fp16", 350), ("fp32", 700)])
def test_weights(dtype, theirs):
    assert ledger(dtype).bytes["weights/parameter_bytes"] * ROUNDED / GB == pytest.approx(theirs, rel=1e-12)


@pytest.mark.parametrize(("dtype", "theirs"), [("fp16", 78.64), ("fp32", 157.28)])
def test_activations_of_one_layer(dtype, theirs):
    assert ledger(dtype).activations["layer_input"] / GB == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize(("dtype", "each", "theirs"), [("fp16", 78, 7488), ("fp32", 156, 14976)])
def test_activations_at_the_boundaries_of_all_layers(dtype, each, theirs):
    """The notes cut 78.64 GB to 78 before they multiply by 96 layers: 7,488 GB where 7,550 GB are kept."""
    found = ledger(dtype).activations
    assert found["layer_inputs"] == 96 * found["layer_input"]
    cut = each / (found["layer_input"] / GB)
    assert found["layer_inputs"] * cut / GB == pytest.approx(theirs, rel=1e-12)
    assert found["layer_inputs"] / GB == pytest.approx(theirs, rel=0.009)


def test_what_layers_keep_inside_is_many_times_their_inputs():
    """The notes leave it out ("not accurate because transformers are composite layers").

    By hand, a token of one layer with fused attention and dropout masks, in widths of 2 bytes: norm 1, query, key and
    value 3, attention out 1, norm 1, wide part twice 4, two masks of a byte each (half a width), of which those read
    by the products are counted once: 16.5 widths and the sums of the softmax.
    """
    found = ledger().activations
    assert 16 < found["kept"] / found["layer_inputs"] < 18


def test_optimiser_states():
    """12 bytes a parameter: of mixed precision fp32 weights and two moments; of fp32 the gradient and two moments."""
    mixed, single = ledger().bytes, ledger("fp32").bytes
    assert mixed["adam_states/parameter_bytes"] * ROUNDED / GB == pytest.approx(2100, rel=1e-12)
    both = single["adam_states/parameter_bytes"] + single["gradients/parameter_bytes"]
    assert both * ROUNDED / GB == pytest.approx(2100, rel=1e-12)
    assert mixed.total / PARAMETERS == single.total / PARAMETERS == 16.0
    assert ledger(optimizer="sgd").bytes.total / PARAMETERS == 8.0


THEIRS = {0: lambda m, n: 16 * m, 1: lambda m, n: 4 * m + 12 * m / n, 2: lambda m, n: 2 * m + 14 * m / n,
          3: lambda m, n: 16 * m / n}  # fmt: skip


@pytest.mark.parametrize("stage", THEIRS)
@pytest.mark.parametrize("ranks", [1, 2, 64, 1000])
def test_a_stage_of_zero(stage, ranks):
    row = next(row for row in ledger(dp=ranks).zero if row.stage == stage)
    assert row.total_bytes == pytest.approx(THEIRS[stage](PARAMETERS, ranks), rel=1e-12)


def test_traffic_of_zero_against_an_all_reduce():
    """The notes: all-reduce(2M) under plain data parallelism and stages 1 and 2, 1.5 of it under stage 3."""
    rows = ledger(dp=64).zero
    all_reduce = 2 * 63 / 64 * 2 * PARAMETERS
    assert [row.sent_bytes / all_reduce for row in rows] == pytest.approx([1, 1, 1, 1.5], rel=1e-12)
    assert zero_sent_bytes(2.0, 4.0, 2, 0) == 4.0 and zero_sent_bytes(2.0, 4.0, 2, 1) == 3.0


def test_mfu_and_hfu_with_and_without_checkpointing():
    """The notes: 3 forward passes without, 4 with, so MFU = 3/4 HFU.

    Exact for the layers; the product with the vocabulary, 0.35 % of the FLOPs, is not run again.
    """
    found = ledger().recomputation
    assert found["none"] == 3.0
    forward = api.ledger("gpt3-175b", **BATCH).flops
    assert found["full"] == pytest.approx(3 + forward["layers"] / forward.total, rel=1e-12)
    assert found["none"] / found["full"] == pytest.approx(0.75, rel=1e-3)
    assert 3.0 < found["attention"] < 3.05


@pytest.mark.parametrize(("recompute", "name"), [("none", "none"), ("attention", "attention"), ("full", "full")])
def test_an_estimate_has_the_same_ratio(recompute, name):
    job = {"gpus": 64, "global_batch": 64, "plan": {"tp": 8, "pp": 8, "recompute": recompute}}
    e = api.estimate("gpt3-175b", "dgx-h100", **job)
    flops = api.ledger("gpt3-175b").recomputation
    assert e.mfu / e.hfu == pytest.approx(flops["none"] / flops[name], rel=1e-12)


def test_states_of_a_rank_are_those_of_an_estimate():
    e = api.estimate("gpt2", "dgx-h100", gpus=8, global_batch=8, plan={"zero": 2})
    row = next(row for row in api.ledger("gpt2", dp=8).zero if row.stage == 2)
    held = e.memory.rollup(1)
    assert (held["weights"], held["optimizer"]) == pytest.approx((row.weights_bytes, row.states_bytes), rel=1e-9)


def test_every_row_comes_from_a_command():
    arguments = ["estimate", "gpt3-175b", "--seq", "2000", "--global-batch", "1600", "--dtype", "fp16"]
    text = CliRunner().invoke(main, arguments).stdout
    for line in ("input of one layer", "inputs of all layers (full recomputation)", "ZeRO   8 ranks", "MFU / HFU"):
        assert line in text
    done = json.loads(CliRunner().invoke(main, [*arguments, "--dp", "64", "--json"]).stdout)
    assert done["activations_bytes"]["layer_inputs"] == 96 * 3_200_000 * 12288 * 2
    assert [row["ranks"] for row in done["zero"]] == [64] * 4 and done["mfu_over_hfu"]["full"] < 0.76


@pytest.mark.parametrize("wrong", [{"dp": 0}, {"global_batch": -1}, {"optimizer": "adamm"}, {"dp": "8"}])
def test_bad_input_is_named(wrong):
    with pytest.raises(UserError, match=next(iter(wrong))):
        ledger(**wrong)
