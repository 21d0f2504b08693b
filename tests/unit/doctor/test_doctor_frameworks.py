"""Logs of frameworks beside Megatron-LM as their releases print them: what is read of the job."""

# ruff: noqa: E501 the lines of logs are long

from __future__ import annotations

from pathlib import Path

import pytest

from doctor_logs import HEAD, MODELS, STEPS
from steptime.doctor import catalogue_model, kind_of, read_log, series_of
from steptime.doctor.records import Log


def log_of(tmp_path: Path, text: str) -> Log:
    path = tmp_path / "x.log"
    path.write_text(text)
    return read_log(str(path))


# NeMo


def test_nemo_2_prints_one_line_per_step(tmp_path):
    lines = "".join(
        f"[NeMo I 2026-03-01 12:00:{i:02}] Training epoch 0, iteration {i}/249 | lr: 1.961e-06 | global_batch_size: 128 | "
        f"global_step: {i} | reduced_train_loss: 1.315 | train_step_timing in s: {7.126 if i == 0 else 1.505} | "
        f"TFLOPS_per_GPU: 512.3 | consumed_samples: {128 * (i + 1)}\n"
        for i in range(10)
    )
    log = log_of(tmp_path, lines)
    assert (log.framework, log.stated.framework) == ("nemo", "megatron-core")
    assert series_of(log, {}).median_s == pytest.approx(1.505)
    assert [step.number for step in log.steps] == list(range(10))
    assert log.stated.settings == {"global_batch": 128}
    assert log.tflops_per_gpu == 512.3


@pytest.mark.parametrize("end", ["\n", "\r"])
def test_nemo_in_the_progress_bar_of_lightning(tmp_path, end):
    bar = "".join(
        f"Epoch 0: :  {i}%|{'█' * (i // 10)}   | {i}/100 [0{i // 6}:48<00:00, reduced_train_loss=0.0172, "
        f"global_step={i - 1}.00, consumed_samples={256 * i}.0, train_step_timing in s=3.130]{end}"
        for i in range(1, 12)
    )
    log = log_of(tmp_path, bar)
    assert log.framework == "nemo"
    assert (len(log.steps), log.stated.settings) == (11, {"global_batch": 256})
    assert series_of(log, {}).median_s == pytest.approx(3.13)


def test_a_bar_of_nemo_that_counts_only_by_itself(tmp_path):
    bar = "".join(
        f"Epoch 0: :  {i}%|#  | {i}/100 [01:48<09:00, v_num=, train_step_timing in s=3.1{i}0]\r" for i in range(1, 9)
    )
    assert [step.number for step in log_of(tmp_path, bar).steps] == list(range(1, 9))


# torchtitan


@pytest.mark.parametrize("name", MODELS)
def test_torchtitan_names_its_model(tmp_path, name):
    log = log_of(tmp_path, f"{HEAD}Building 1-D device mesh with ['dp_shard'], [8]\n" + MODELS[name] + STEPS)
    assert log.stated.model == {
        "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "vocab": 128256, "ffn_hidden": 14336,
    }  # fmt: skip
    assert log.stated.model_name == "llama3 8B"
    assert catalogue_model(log.stated.model, log.stated.model_name) == "llama3-8b"
    assert log.stated.framework == "torchtitan"
    assert log.stated.settings["gpus"] == 8
    assert len(log.steps) == 6


def test_the_name_alone_is_enough_and_an_unknown_one_is_none(tmp_path):
    sized = f"{HEAD}\x1b[34mModel llama3 70B \x1b[31msize: 70,553,706,496 total parameters\x1b[39m\n"
    log = log_of(tmp_path, sized + STEPS)
    assert (log.stated.model, catalogue_model(log.stated.model, log.stated.model_name)) == ({}, "llama3-70b")
    assert catalogue_model({}, "llama3 debugmodel") is None
    assert catalogue_model({"layers": 6, "hidden": 256, "heads": 16}, "llama3 8B") is None
    assert catalogue_model({}, "qwen2.5-7b") == "qwen2.5-7b"
    assert catalogue_model({}, "qwen2-7b") == "qwen2-7b"
    assert catalogue_model({"layers": 32, "hidden": 4096, "heads": 32, "vocab": 128256}, "meta 8B") == "llama3-8b"


@pytest.mark.parametrize(
    ("lines", "plan", "note"),
    [
        ("Applied full activation checkpointing to the model", {"recompute": "full"}, 0),
        ("Applied selective activation checkpointing to the model", {"recompute": "norm+activation+outputs"}, 1),
        ("Running with args: {'activation_checkpoint': {'mode': 'selective', 'selective_ac_option': 'op'}}\n"
         "Applied selective activation checkpointing to the model", {"recompute": "norm+activation+outputs"}, 0),
        ("  \"selective_ac_option\": \"2\",\nApplied selective activation checkpointing to the model",
         {"recompute": "full", "recompute_every": 2}, 0),
    ],
)  # fmt: skip
def test_activation_checkpointing_of_torchtitan(tmp_path, lines, plan, note):
    log = log_of(tmp_path, "".join(HEAD + line + "\n" for line in lines.splitlines()) + STEPS)
    assert log.stated.plan == plan
    assert len(log.warnings) == note


def test_hybrid_shards_stages_and_float8_of_torchtitan(tmp_path):
    mesh = (
        f"{HEAD}Building 2-D device mesh with ['dp_replicate', 'dp_shard'], [4, 8]\n{HEAD}Applied HSDP to the model\n"
    )
    plan = log_of(tmp_path, mesh + STEPS).stated.plan
    assert plan == {"dp": 32, "shard": 8, "zero": 3}
    mesh = f"{HEAD}Building 2-D device mesh with ['pp', 'dp_shard'], [4, 8]\n{HEAD}Applied FSDP to the model\n"
    log = log_of(
        tmp_path, mesh + f"{HEAD}Swapped to Float8Linear layers with enable_fsdp_float8_all_gather=True\n" + STEPS
    )
    assert log.stated.plan == {"pp": 4, "dp": 8, "zero": 1}
    assert log.stated.settings["dtype"] == "fp8-tensorwise"


# MaxText


MAXTEXT = {
    "base_emb_dim": 8192, "base_mlp_dim": 28672, "base_num_decoder_layers": 80, "base_num_kv_heads": 8,
    "base_num_query_heads": 64, "dcn_data_parallelism": 2, "dtype": "bfloat16", "global_batch_size_to_train_on": 896,
    "max_target_length": 8192, "micro_batch_size_to_train_on": 896, "model_name": "llama2-70b", "opt_type": "adamw",
    "mesh_axes": "['data', 'stage', 'fsdp', 'fsdp_transpose', 'sequence', 'tensor', 'tensor_sequence', 'expert', 'autoregressive']",
    "quantization": "", "remat_policy": "full", "vocab_size": 32000,
}  # fmt: skip
COMPLETED = "".join(
    f"completed step: {i}, seconds: {44.923 if i == 0 else 18.5}, TFLOP/s/device: 305.127, Tokens/s/device: 3099.7, "
    "total_weights: 7340032, loss: 10.565\n"
    for i in range(8)
)  # fmt: skip


@pytest.mark.parametrize("before", ["", "I0317 09:59:16.241541 125344476638336 pyconfig.py:413] "])
def test_maxtext_prints_its_whole_job(tmp_path, before):
    config = "".join(f"{before}Config param {name}: {value}\n" for name, value in MAXTEXT.items())
    mesh = f"{before}Num_devices: 128, shape (2, 1, 64, 1, 1, 1, 1, 1, 1)\n"
    log = log_of(tmp_path, config + mesh + COMPLETED)
    assert (log.framework, log.stated.framework) == ("maxtext", "maxtext")
    assert log.stated.settings == {"gpus": 128, "global_batch": 896, "seq": 8192, "dtype": "bf16", "optimizer": "adamw"}
    assert log.stated.plan == {
        "tp": 1, "pp": 1, "cp": 1, "dp": 128, "zero": 3, "shard": 64, "micro_batch": 7, "recompute": "full",
    }  # fmt: skip
    assert catalogue_model(log.stated.model, log.stated.model_name) == "llama2-70b"
    assert series_of(log, {}).median_s == pytest.approx(18.5)
    assert log.tflops_per_gpu == 305.127


@pytest.mark.parametrize(
    ("policy", "recompute"),
    [
        ("minimal", "attention+norm+activation"),
        ("minimal_flash", "norm+activation"),
        ("save_qkv_proj", "norm+attention+attention_out+mlp"),
        ("save_out_proj", None),
    ],
)
def test_policies_of_maxtext(tmp_path, policy, recompute):
    log = log_of(
        tmp_path,
        f"Config param remat_policy: {policy}\nConfig param quantization: fp8\nConfig param dtype: bfloat16\n"
        + COMPLETED,
    )
    assert log.stated.plan.get("recompute") == recompute
    assert log.stated.settings["dtype"] == "fp8-te"


def test_maxtext_without_its_configuration_still_has_its_devices(tmp_path):
    log = log_of(tmp_path, COMPLETED)
    assert log.stated.settings == {"gpus": 128}
    assert log.stated.plan == {}
    assert log.stated.tokens_per_gpu == pytest.approx(18.5 * 3099.7)
    older = COMPLETED.replace(" Tokens/s/device: 3099.7, total_weights: 7340032,", "")
    assert log_of(tmp_path, older).stated.settings == {}


# Trainers


def test_the_bar_and_the_summary_of_the_transformers_trainer(tmp_path):
    bars = "\r".join(f" {i * 2:2}%|{'█' * i}         | {i}/50 [00:{i * 3:02}<02:21,  3.91s/it]" for i in range(1, 12))
    text = (
        "  Instantaneous batch size per device = 2\n"
        "  Total train batch size (w. parallel, distributed & accumulation) = 1,024\n"
        "Map: 100%|██████████| 1000/1000 [00:03<00:00, 312.5 examples/s]\n"
        "Loading checkpoint shards: 100%|██████████| 4/4 [00:08<00:00,  2.12s/it]\n"
        f"{bars}\n{{'loss': 1.9, 'grad_norm': 0.7, 'learning_rate': 2e-05, 'epoch': 0.01}}\n"
        "{'train_runtime': 195.5, 'train_samples_per_second': 261.9, 'train_steps_per_second': 0.256, 'train_loss': 1.7, 'epoch': 1.0}\n"
    )
    log = log_of(tmp_path, text)
    assert (log.framework, log.stated.framework) == ("transformers", "transformers")
    assert len(log.steps) == 11
    assert series_of(log, {}).median_s == pytest.approx(3.91)
    assert log.stated.settings == {"global_batch": 1024}
    assert log.stated.plan == {"micro_batch": 2}


@pytest.mark.parametrize("quote", ["'", '"'])
def test_a_log_of_the_trainer_may_begin_with_a_loss(tmp_path, quote):
    lines = [
        f"{{'loss': {2 - i / 9:.3f}, 'epoch': {i}}}\n {i}%|1  | {i}/50 [00:{4 * i:02}<02:21,  3.9s/it]\n"
        for i in range(1, 9)
    ]
    path = tmp_path / "train.log"
    path.write_text("".join(lines).replace("'", quote))
    assert kind_of(str(path)) == "log"
    log = read_log(str(path))
    assert (log.framework, series_of(log, {}).median_s) == ("transformers", pytest.approx(3.9))


def test_lightning_counts_iterations_per_second(tmp_path):
    bar = "".join(
        f"Epoch 3:  {i}%|█▏        | {i}/100 [01:{i:02}<12:01,  2.50it/s, v_num=4, train_loss=1.200]\r"
        for i in range(1, 9)
    )
    assert series_of(log_of(tmp_path, bar), {}).median_s == pytest.approx(0.4)


def test_a_summary_alone_is_one_mean_and_says_so(tmp_path):
    summary = (
        "{'train_runtime': 195.5, 'train_samples_per_second': 16.384, 'train_steps_per_second': 0.256, 'epoch': 1.0}\n"
    )
    log = log_of(tmp_path, summary)
    assert series_of(log, {}).median_s == pytest.approx(1 / 0.256)
    assert (log.steps[0].number, log.stated.settings) == (50, {"global_batch": 64})
    assert "mean over the whole run" in log.warnings[0]


def test_a_bar_never_stands_before_the_lines_of_an_engine(tmp_path):
    engine = "[Rank 0] epoch=0/micro_step={i}/global_step={i}, RunningAvgSamplesPerSec=8.0, CurrSamplesPerSec=8.0, MaxMemAllocated=60.1GB\n"
    bar = " 10%|█         | {i}/50 [00:12<02:21,  3.91s/it]\n"
    text = "".join(bar.format(i=i) + (engine.format(i=i) if i % 3 == 0 else "") for i in range(1, 20))
    saved = "Saving model checkpoint to out/checkpoint-5\nSaving model weights\n"
    log = log_of(tmp_path, "  Instantaneous batch size per device = 2\n" + text + saved)
    assert [(event.kind, event.after_step) for event in log.events] == [("checkpoint", 18)]
    assert (log.framework, log.stated.framework) == ("deepspeed", "deepspeed")
    assert log.stated.plan == {"micro_batch": 2}
