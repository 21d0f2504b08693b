"""Plans of captured modules against plans of the same model as a specification; modules that are no transformers."""

from __future__ import annotations

import json
import re

import pytest

from cli_runner import CliRunner

torch = pytest.importorskip("torch")
import models  # noqa: E402
import steptime  # noqa: E402
from captured_modules import GPT, captured  # noqa: E402
from steptime import api, captured_model  # noqa: E402
from steptime.cli.main import main  # noqa: E402
from steptime.errors import PlanError  # noqa: E402

DEGREES = ("dp", "tp", "pp", "vpp", "micro_batch", "recompute", "zero")
TOLERANCE = 0.06
"""A module issues more operators than its dimensions tell, and half of the step of so small a model is the host."""
JOB = {"cluster": "dgx-h100", "gpus": 64, "global_batch": 256}
SPECIFICATION = """
layers = {layers}
hidden = {width}
heads = {heads}
kv_heads = {heads}
ffn_hidden = {ffn}
activation = "gelu"
norm = "layernorm"
seq_len = {tokens}
vocab = {vocabulary}
tied_embeddings = true
position = "learned"
qkv_bias = true
out_bias = true
mlp_bias = true
norm_bias = true
"""
PLANS = [
    {"dp": 64, "micro_batch": 4}, {"dp": 64, "micro_batch": 1, "zero": 3},
    {"dp": 64, "micro_batch": 4, "zero": 3, "recompute": "full"}, {"dp": 16, "tp": 4, "micro_batch": 4},
    {"dp": 16, "tp": 4, "micro_batch": 4, "sp": False}, {"dp": 16, "pp": 4, "micro_batch": 4},
    {"dp": 8, "tp": 2, "pp": 4, "vpp": 2, "micro_batch": 4}, {"dp": 8, "tp": 8, "micro_batch": 16},
]  # fmt: skip


@pytest.fixture
def specification(tmp_path):
    path = tmp_path / "gpt.toml"
    path.write_text(SPECIFICATION.format(**GPT, ffn=4 * GPT["width"]))
    return str(path)


def test_the_best_plan_of_a_gpt_is_that_of_its_specification(specification):
    module, spec = api.plan(captured("gpt"), **JOB, top=1), api.plan(specification, **JOB, top=1)
    chosen = {name: module.plans[0].plan[name] for name in DEGREES}
    same = api.estimate(specification, **JOB, plan=chosen)
    assert same.step_time_s <= 1.01 * spec.plans[0].step_time_s, "another plan only where they are as good as equal"
    assert module.plans[0].model_flops == spec.plans[0].model_flops
    assert module.plans[0].step_time_s == pytest.approx(spec.plans[0].step_time_s, rel=TOLERANCE)


@pytest.mark.each("plan", PLANS, ids=lambda plan: " ".join(f"{k}{v}" for k, v in plan.items()))
def test_a_plan_of_a_gpt_costs_what_its_specification_costs(specification, plan):
    module, spec = api.estimate(captured("gpt"), **JOB, plan=plan), api.estimate(specification, **JOB, plan=plan)
    assert module.step_time_s == pytest.approx(spec.step_time_s, rel=TOLERANCE)
    assert module.peak_memory_bytes == pytest.approx(spec.peak_memory_bytes, rel=TOLERANCE)
    assert sum(module.time.values()) == pytest.approx(module.step_time_s, rel=1e-9)
    assert sum(module.memory.values()) == pytest.approx(module.peak_memory_bytes, rel=1e-9)


def test_resnet_has_data_parallel_plans_and_says_why_not_others():
    result = api.plan(captured("resnet"), **{**JOB, "global_batch": 4096})
    assert {"no_blocks", "no_pairs"} <= set(result.reasons)
    assert {plan.plan["dp"] for plan in result.plans} == {64}
    assert {plan.plan["zero"] for plan in result.plans} == {1, 2, 3}


@pytest.mark.parametrize(("name", "plan", "reason"), [
    ("resnet", {"pp": 2}, "no_blocks"), ("resnet", {"tp": 2}, "no_pairs"), ("resnet", {"recompute": "full"},
    "recompute_blocks"), ("gpt", {"tp": 3}, "tensor_width"), ("gpt", {"pp": 16}, "stages"),
])  # fmt: skip
def test_what_cannot_be_has_a_reason(name, plan, reason):
    found = api.estimate(captured(name), "dgx-h100", plan=plan)
    assert not found.feasible and reason in found.reasons


@pytest.mark.parametrize(("change", "message"), [
    ({"strategy": "2d"}, "a captured module has"), ({"mode": "published"}, "mode published"),
    ({"dtype": "fp32"}, "captured in bf16"), ({"dtype": "mxfp8"}, "not modelled"), ({"seq": 7}, "tokens a sample"),
    ({"lora": {"rank": 8}}, "captured as it is"),
])  # fmt: skip
def test_what_a_captured_module_cannot_be_asked_is_refused(change, message):
    with pytest.raises(PlanError, match=message):
        api.plan(captured("gpt"), **JOB, **change)


def test_frozen_weights_have_no_states():
    module = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
    module[1].requires_grad_(False)
    model = captured_model(module, lambda batch: (torch.empty(batch, 64),), dtype="bf16")
    memory = api.estimate(model, "dgx-h100", gpus=1, global_batch=1).memory
    each = 64 * 65
    assert memory["frozen_weights/parameter_bytes"] == each * 2
    assert memory["optimizer/parameter_bytes"] == 2 * each * 12


def test_a_convolution_is_timed_by_its_curve_where_the_device_has_one():
    result = api.estimate(captured("resnet"), "dgx-h100", gpus=1, global_batch=64, plan={"micro_batch": 64})
    assert any(path.endswith("convolution_s") for path in result.time)


@pytest.mark.slow
def test_every_kernel_of_an_operator_counts():
    """Gradients of data and of weights are two kernels: their times are those of `steptime profile`."""
    job = {"gpus": 1, "global_batch": 64, "dtype": "fp32", "framework": "ideal", "plan": {"micro_batch": 64}}
    found = api.estimate("models:resnet_small", "v100-sxm2-16gb", **job)
    module, inputs = models.resnet_small(batch=64)
    program = steptime.capture(module, inputs, optimizer="adamw", loss=models.loss_of, target="cuda")
    groups = steptime.profile(program, "v100-sxm2-16gb").table.by_operator()
    expected = sum(group.seconds for group in groups if group.name == "convolution_backward")
    in_plan = sum(seconds for path, seconds in found.time.items() if "convolution_backward" in path)
    assert in_plan == pytest.approx(expected, rel=0.05), "sizes between those captured are on lines"


@pytest.mark.quick(every=7)
@pytest.mark.parametrize("operator", ["embedding", "softmax", "softmax_backward_data", "native_dropout",
                                      "native_dropout_backward", "bmm", "native_layer_norm"])  # fmt: skip
def test_an_operator_has_the_curve_that_it_has_in_a_profile(operator):
    """Names of operators that are those of curves, too."""
    module, inputs = models.gpt_eager(batch=2)
    module = module.to(torch.bfloat16)
    model = captured_model(module, lambda batch: models.gpt_eager(batch=batch)[1], loss=models.loss_of)
    job = {"gpus": 1, "global_batch": 2, "framework": "ideal", "plan": {"micro_batch": 2}}
    time = api.estimate(model, "h100-sxm", **job).time
    program = steptime.capture(module, inputs, optimizer=None, loss=models.loss_of, target="cuda")
    groups = steptime.profile(program, "h100-sxm").table.by_operator()
    expected = sum(group.seconds for group in groups if group.name.strip("_") == operator)
    in_plan = sum(seconds for path, seconds in time.items() if re.search(rf"\.{operator}(\.\d+)?/", path))
    assert in_plan == pytest.approx(expected, rel=1e-6) and expected > 0


def test_a_factory_is_a_model_of_the_command():
    words = ["plan", "models:gpt", "--cluster", "dgx-h100", "--gpus", "8", "--global-batch", "16", "--json"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["feasible"] and found["plans"][0]["provenance"]["model"] == "GPT"


def test_a_change_of_the_micro_batch_changes_what_is_kept_alike():
    kept = {
        n: api.estimate(captured("llama"), "dgx-h100", gpus=1, global_batch=8, plan={"micro_batch": n}).memory
        for n in (2, 4)
    }
    names = [path for path in kept[2] if path.startswith("activations/")]
    assert names
    for path in names:
        assert kept[4][path] == pytest.approx(2 * kept[2][path], rel=0.01)
