"""Steps of preference and reinforcement learning: phases by hand, memory by phase, generation by its roofline."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cli_runner import CliRunner
from steptime import api
from steptime.cli.main import main
from steptime.errors import UserError
from steptime.jobs.phases.generation import Responses, generation_of, kv_width
from steptime.jobs.phases.recipes import RECIPES
from steptime.jobs.phases.run import Options, forward_s, rl_step
from steptime.model import load_catalogue_model

SMALL = str(Path(__file__).parents[2] / "data" / "huggingface" / "qwen3-0.6b.json")
PLAN = {"tp": 2, "zero": 1}


def step(recipe, *, plan=PLAN, gpus=64, **given):
    return rl_step(recipe, "llama3-8b", "dgx-h100", gpus=gpus, options=Options(**given), plan=plan, framework="ideal")


def trained(sequences, seq, plan=PLAN):
    return api.estimate("llama3-8b", "dgx-h100", gpus=64, global_batch=sequences, seq=seq, plan=plan, framework="ideal")


def tuned(*, cluster="aws-g5", gpus=8, plan=None, recipe="grpo", framework="trl", **given):
    options = {"samples": 4, "models": {"reference": "none", "reward": "rule"}} if recipe == "grpo" else {}
    plan = plan or {"zero": 3, "micro_batch": 1}
    return rl_step(recipe, SMALL, cluster, gpus=gpus, options=Options(**options | given), plan=plan,
                   framework=framework)  # fmt: skip


def test_log_probabilities_need_whole_logits_of_responses():
    """20,000 x 151,936 logits in fp32 are 11.3 GiB, with their gradients 34: no A10G has them."""
    long = {"prompts": 2, "prompt_len": 480, "response_len": 20000}
    found, fused = tuned(**long), tuned(**long, fused_loss=True)
    assert found.reasons == ("memory",) and fused.feasible
    logits = 20000 * 151936
    assert 11 * logits < found.peak_bytes - fused.peak_bytes < 12 * logits
    assert any("--fused-loss" in note for note in found.notes) and not any("--fused-loss" in n for n in fused.notes)
    doubled = tuned(**long | {"prompt_len": 20480})
    assert doubled.peak_bytes < 1.2 * found.peak_bytes  # prompts have no logits
    assert tuned(**long, framework="unsloth").feasible


def test_grpo_on_one_device_as_reported():
    """TRL 0.17, four sequences of 2,048 + 1,024 tokens, nothing recomputed, with a reference: 48.1 GiB as the driver
    shows them, the allocator's reserve and context included; with the loss of SFTTrainer it would be 20 GiB."""
    given = {"cluster": "h100-sxm", "gpus": 1, "prompts": 1, "prompt_len": 2048, "response_len": 1024}
    plan = {"zero": 0, "micro_batch": 4, "recompute": "none"}
    found = tuned(plan=plan, models={"reward": "rule"}, **given)
    assert 0.7 < found.peak_bytes / 2**30 / 48.1 < 1.0


def test_pairs_take_log_probabilities_of_all_their_tokens():
    small, long = (tuned(recipe="dpo", prompts=8, prompt_len=n, response_len=1024) for n in (1024, 3072))
    logits = 2048 * 151936
    assert long.peak_bytes - small.peak_bytes > 11 * logits


def test_engines_do_not_load_layers_that_predict_further_tokens():
    main, asked = load_catalogue_model("deepseek-v3"), Responses(sequences=64, prompt=512, response=512)
    given = {"gpus": 64, "tp": 32, "free_bytes": 60e9}
    made = [generation_of(replace(main, mtp_depth=depth), "dgx-h100", asked, **given) for depth in (0, 1)]
    assert made[0] == made[1]


def test_pairs_are_an_update_and_a_forward_pass():
    found = step("dpo", prompts=128, prompt_len=512, response_len=1536)
    whole = trained(256, 2048)
    reference, update = found.phases
    assert update.time_s == pytest.approx(whole.step_time_s)
    assert 0.28 < reference.time_s / update.time_s < 0.4  # a third of the operations
    assert found.step_time_s == pytest.approx(reference.time_s + update.time_s)
    assert step("orpo", prompts=128, prompt_len=512, response_len=1536).step_time_s == pytest.approx(whole.step_time_s)
    assert step("dpo", prompts=128, models={"reference": "none"}).phases[0].name == "update"


def test_a_forward_pass_is_the_forward_terms():
    whole = trained(256, 2048, {"tp": 4, "pp": 2, "zero": 1, "micro_batch": 2})
    forward = sum(s for path, s in whole.time.items() if "/forward/" in path)
    assert forward < forward_s(whole.time) < 0.55 * whole.step_time_s


def test_updates_share_the_sequences_and_epochs_repeat_them():
    one = step("grpo", prompts=64, models={"reward": "rule"}, generation_s=3.0)
    assert one.phases[0].time_s == 3.0 and one.generation is None
    four = step("grpo", prompts=64, models={"reward": "rule"}, generation_s=3.0, updates=4, epochs=2)
    assert four.phases[-1].time_s == pytest.approx(8 * trained(128, 1024).step_time_s)
    assert four.sequences == one.sequences == 512


@pytest.mark.parametrize("updates", [2, 8])
def test_what_scores_does_not_depend_on_the_updates(updates):
    one, more = (step("grpo", models={"reward": "rule"}, updates=count) for count in (1, updates))
    assert [phase.kind for phase in one.phases] == ["generate", "forward", "forward", "train"]
    for before, after in zip(one.phases[:-1], more.phases[:-1], strict=True):
        assert (after.time_s, after.peak_bytes) == (before.time_s, before.peak_bytes)
    assert more.phases[-1].time_s > one.phases[-1].time_s


def test_a_stated_time_leaves_the_memory_of_generation():
    timed, given = (step("grpo", generation_s=stated).phases[0] for stated in (None, 3.0))
    assert given.peak_bytes == timed.peak_bytes > step("grpo").phases[1].peak_bytes


def test_every_reason_of_the_estimates_is_told():
    heads = rl_step("dpo", "gpt2-xl", "dgx-h100", gpus=64, options=Options(), plan={"tp": 8}, framework="ideal")
    assert (heads.feasible, heads.reasons) == (False, ("heads", "kv_heads"))
    few = step("grpo", prompts=24, samples=2, updates=4, models={"reward": "rule"})
    assert few.reasons == ("batch",) and [phase.reasons for phase in few.phases] == [(), (), (), ("batch",)]
    assert few.peak_bytes < few.capacity_bytes and few.to_json()["reasons"] == ["batch"]
    assert step("grpo").reasons == ()


def test_what_does_not_fit_is_said_on_top():
    job = "rl grpo llama3-70b --cluster dgx-h100 --gpus 8 --tp 8 --zero 3 --prompts 10 --samples 3 --framework ideal"
    done = CliRunner().invoke(main, job.split(" "))
    top = " ".join(done.stdout.partition("phase ")[0].split())
    assert "not feasible: does not fit: " in top and "holds no sequences of an engine" in top and "with 1 at a" in top
    fits = CliRunner().invoke(main, ["rl", "dpo", "llama3-8b", "--cluster", "dgx-h100", "--gpus", "64"]).stdout
    assert "fits" in fits and "feasible" not in fits and "warning" not in fits


def test_a_device_without_bf16_generates_at_its_fp16_rate():
    asked, model = Responses(sequences=64, prompt=4096, response=1), load_catalogue_model("gpt2-xl")
    made = generation_of(model, "dgx-v100", asked, gpus=8, tp=1, free_bytes=30e9)
    assert made.held > 0 and 1e12 < 2 * 1.5e9 * 4096 * made.at_once / made.prefill_s < 125e12


def test_memory_of_a_phase_is_what_is_held_and_what_it_needs():
    whole = trained(256, 1024)
    found = step("dpo", prompts=128)
    held = {name: whole.memory[f"{name}/parameter_bytes"] for name in ("weights", "gradients", "optimizer")}
    assert found.held["policy"] == pytest.approx(sum(held.values()))
    assert found.held["reference"] == pytest.approx(held["weights"])
    assert found.phases[1].peak_bytes == pytest.approx(whole.peak_memory_bytes + held["weights"])
    away = step("dpo", prompts=128, offload_frozen=True)
    assert away.phases[1].peak_bytes == pytest.approx(whole.peak_memory_bytes)
    assert away.phases[0].peak_bytes == pytest.approx(found.phases[0].peak_bytes)


def test_a_token_by_hand():
    model = load_catalogue_model("llama3-8b")
    assert kv_width(model) == 2 * 8 * 128
    asked = Responses(sequences=64, prompt=100, response=200)
    made = generation_of(model, "dgx-h100", asked, gpus=8, tp=1, free_bytes=70e9)
    weights, cache = 2 * 8_030_261_248, 32 * 2048 * 2 * (100 + 100) * 8
    assert (made.engines, made.at_once, made.waves) == (8, 8, 1)
    assert made.step_s == pytest.approx((weights + cache) / (3.35e12 * 0.85), rel=1e-3)
    assert made.total_s == pytest.approx(made.prefill_s + 200 * made.step_s)
    two = generation_of(model, "dgx-h100", replace(asked, at_once=3), gpus=8, tp=1, free_bytes=70e9)
    assert (two.waves, two.at_once) == (3, 3) and two.total_s > made.total_s
    assert kv_width(load_catalogue_model("deepseek-v3")) == 512 + 64


def test_every_recipe_runs_and_is_json():
    for name in RECIPES:
        found = step(name, prompts=64, gpus=64, models={"reward": "rule"} if name == "grpo" else None)
        assert found.step_time_s == pytest.approx(sum(phase.time_s for phase in found.phases))
        assert found.bracket_s[0] <= found.step_time_s
        json.dumps(found.to_json())


@pytest.mark.parametrize(
    ("recipe", "given", "told"),
    [
        ("sft", {}, "no recipe"),
        ("dpo", {"samples": 4}, "2 sequences a prompt"),
        ("dpo", {"models": {"reward": "same"}}, "has no reward"),
        ("ppo", {"models": {"critic": "none"}}, "a critic is a model"),
        ("grpo", {"models": {"reference": "rule"}}, "a reference is a model"),
        ("grpo", {"prompts": 0}, "prompts"),
        ("grpo", {"generation_tp": 7}, "no multiple"),
        ("grpo", {"generation_s": -1.0}, "out of range"),
        ("dpo", {"generation_s": 3.0}, "generates nothing"),
        ("kto", {"at_once": 3}, "generates nothing"),
        ("grpo", {"updates": 7}, "no multiple of 7 updates"),
        ("grpo", {"models": {"reward": "no-such-model"}}, "no-such-model"),
    ],
)
def test_what_cannot_be_is_refused(recipe, given, told):
    with pytest.raises(UserError, match=told):
        step(recipe, **given)


def test_the_command():
    text = "--cluster dgx-h100 --gpus 64 --tp 2 --zero 1 --prompts 64 --reward rule"
    options = text.split(" ")
    done = CliRunner().invoke(main, ["rl", "grpo", "llama3-8b", *options, "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout)["phases"][0]["kind"] == "generate"
    refused = CliRunner().invoke(main, ["rl", "grpo", "llama3-8b", "--global-batch", "8", *options])
    assert refused.exit_code and "follows from the sequences" in refused.output + refused.stderr
