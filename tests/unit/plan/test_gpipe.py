"""GPipe: all forward passes, then all backward passes."""

from __future__ import annotations

import pytest

from steptime import UserError, api

PLAN = {"tp": 1, "pp": 4, "dp": 2, "micro_batch": 1}


def step(schedule: str, global_batch: int = 32):
    plan = {**PLAN, "schedule": schedule}
    return api.estimate("llama3-8b", "dgx-h100", gpus=8, global_batch=global_batch, plan=plan)


def test_stages_hold_all_micro_batches_and_wait_as_in_1f1b():
    one, all_first = step("1f1b"), step("gpipe")
    layers = "activations/mlp_out/activation_bytes"
    # 16 micro-batches per replica on 4 stages: 1F1B holds 4 of them on the first stage, GPipe all 16.
    assert all_first.memory[layers] == pytest.approx(4 * one.memory[layers])
    assert all_first.time["bubble/pipeline_bubble_s"] == pytest.approx(one.time["bubble/pipeline_bubble_s"])
    assert all_first.plan["schedule"] == "gpipe"


def test_more_micro_batches_need_more_memory():
    assert step("gpipe", 64).peak_memory_bytes > step("gpipe", 32).peak_memory_bytes
    assert step("1f1b", 64).peak_memory_bytes == pytest.approx(step("1f1b", 32).peak_memory_bytes, rel=1e-3)


def test_virtual_stages_are_refused_or_illegal():
    plan = {**PLAN, "schedule": "gpipe", "vpp": 2}
    with pytest.raises(UserError, match="gpipe contradicts vpp 2"):
        api.estimate("llama3-8b", "dgx-h100", gpus=8, global_batch=32, plan=plan)
    found = api.plan("llama3-8b", "dgx-h100", gpus=8, global_batch=32, fix={"schedule": "gpipe", "pp": 4})
    assert found.reasons["one_chunk"] > 0 and all(each.plan["vpp"] == 1 for each in found.plans)
