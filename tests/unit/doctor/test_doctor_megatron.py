"""Logs of Megatron-LM and of what is built on it, as its releases print them: what is read of the job."""

# ruff: noqa: E501 the lines of logs are long

from __future__ import annotations

from pathlib import Path

import pytest

from doctor_logs import arguments, iteration
from steptime.doctor import read_log, series_of
from steptime.doctor.records import Log


def log_of(tmp_path: Path, text: str) -> Log:
    path = tmp_path / "x.log"
    path.write_text(text)
    return read_log(str(path))


def test_the_batch_is_read_from_the_iterations_of_megatron(tmp_path):
    log = log_of(tmp_path, "".join(iteration(i, 1500.0) for i in range(1, 9)))
    assert log.stated.settings == {"global_batch": 128}
    assert log.stated.framework == "megatron-core"
    assert log.warnings == ()


def test_a_batch_that_grows_is_that_of_most_lines_and_is_said(tmp_path):
    ramp = "".join(iteration(i, 1500.0, 32 if i < 4 else 256 if i < 16 else 512) for i in range(1, 20))
    log = log_of(tmp_path, arguments(global_batch_size=512) + ramp)
    assert log.stated.settings["global_batch"] == 256
    assert log.warnings == ("the global batch goes from 32 to 512 over the log; most lines have 256",)


def test_megatron_bridge_states_samples_and_utilisation(tmp_path):
    text = "".join(
        f"ain_fp8_mx/0 Step Time : 9.09s GPU utilization: 663.5MODEL_TFLOP/s/GPU\n"
        f"ain_fp8_mx/0  [2025-12-22 15:18:33] iteration {i * 10:8d}/      50 | consumed samples: {i * 5120:12d} | elapsed "
        f"time per iteration (ms): 9089.0 | lm loss: 8.1E+00 | grad norm: 0.042 |\n"
        for i in range(1, 6)
    )
    log = log_of(tmp_path, text)
    assert (log.tflops_per_gpu, log.stated.settings) == (663.5, {"global_batch": 512})


@pytest.mark.parametrize("between", ["\n", ""])
def test_timers_of_megatron_of_2021(tmp_path, between):
    timers = " time (ms) | forward-compute: 92.25 | forward-recv: 65.68 | backward-compute: 239.82 | optimizer: 42.31 | batch-generator: 2.70"
    setup = " time (ms) | model-and-optimizer-setup: 111.39 | train/valid/test-data-iterators-setup: 4415.50\n"
    steps = "".join(iteration(i, 661.3).rstrip("\n") + between + timers + "\n" for i in range(1, 6))
    timers_s = log_of(tmp_path, setup + steps).timers
    assert timers_s["forward-compute"] == pytest.approx((0.09225, 0.09225))
    assert set(timers_s) == {"forward-compute", "backward-compute", "optimizer", "batch-generator"}


def test_what_megatron_prints_of_gradients_sequence_parallelism_and_recomputation(tmp_path):
    flags = {"bf16": True, "tensor_model_parallel_size": 2, "num_layers": 32, "pipeline_model_parallel_size": 2}
    steps = "".join(iteration(i, 1500.0) for i in range(1, 6))

    def plan(**more: object) -> dict[str, object]:
        return dict(log_of(tmp_path, arguments(**flags, **more) + steps).stated.plan)

    assert "gradient_dtype" not in plan() and "sp" not in plan() and "recompute" not in plan()
    assert plan(accumulate_allreduce_grads_in_fp32=True)["gradient_dtype"] == "fp32"
    assert plan(accumulate_allreduce_grads_in_fp32=False)["gradient_dtype"] == "bf16"
    assert plan(sequence_parallel=True)["sp"] == "on"
    assert plan(sequence_parallel=False)["sp"] == "off"
    assert plan(recompute_granularity="selective", recompute_modules="['core_attn']")["recompute"] == "attention"
    assert plan(recompute_granularity="selective", recompute_modules="None")["recompute"] == "attention"
    assert plan(recompute_granularity="selective", recompute_modules="['moe_act']")["recompute"] == "activation"
    several = plan(recompute_granularity="selective", recompute_modules="['layernorm', 'mla_up_proj', 'core_attn']")
    assert several["recompute"] == "norm+up_projection+attention"
    assert "recompute" not in plan(recompute_granularity="selective", recompute_modules="['shared_experts']")
    assert plan(recompute_granularity="selective", recompute_modules="['mlp', 'off']")["recompute"] == "mlp"
    assert plan(recompute_granularity=None)["recompute"] == "none"
    assert plan(checkpoint_activations=True)["recompute"] == "full"
    block = plan(recompute_granularity="full", recompute_method="block", recompute_num_layers=4)
    assert (block["recompute"], block["recompute_every"]) == ("full", 4)
    whole = plan(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    assert whole["recompute"] == "full" and "recompute_every" not in whole


def test_what_megatron_prints_of_graphs_and_of_attention_in_fp8(tmp_path):
    def plan(**flags: object) -> dict[str, object]:
        text = arguments(bf16=True, **flags) + "".join(iteration(i, 1500.0) for i in range(1, 6))
        return dict(log_of(tmp_path, text).stated.plan)

    assert "graphs" not in plan() and "attention_dtype" not in plan()
    assert plan(cuda_graph_impl="full_iteration")["graphs"] == "step"
    assert "graphs" not in plan(cuda_graph_impl="transformer_engine")
    modules = {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": "['moe_router', 'moe_preprocess']"}
    assert plan(**modules)["graphs"] == "router+preprocess"
    assert plan(cuda_graph_impl="local", cuda_graph_scope="full_iteration")["graphs"] == "step"
    assert "graphs" not in plan(cuda_graph_impl="none", cuda_graph_modules="['attn']")
    experts = {"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 512}
    flex = {**experts, "moe_token_dispatcher_type": "flex"}
    assert plan(**experts, moe_token_dispatcher_type="alltoall")["dispatcher"] == "all_to_all"
    assert [plan(**flex, **more)["dispatcher"] for more in ({}, {"moe_flex_dispatcher_backend": "hybridep"})] == [
        "deepep", "hybridep",
    ]  # fmt: skip
    assert "dispatcher" not in plan(moe_token_dispatcher_type="alltoall"), "no experts"
    assert plan(fp8_dot_product_attention=True)["attention_dtype"] == "fp8"
    assert "attention_dtype" not in plan(fp8_dot_product_attention=False)


@pytest.mark.parametrize(
    ("flags", "plan"),
    [
        ({"use_distributed_optimizer": True}, {"zero": 1}),
        ({"use_distributed_optimizer": True, "num_distributed_optimizer_instances": 4}, {"zero": 1, "shard": 4}),
        ({"use_distributed_optimizer": False, "num_distributed_optimizer_instances": 4}, {"zero": 0}),
        ({"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads"}, {"zero": 2}),
        ({"use_custom_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}, {"zero": 3}),
        ({"use_torch_fsdp2": True}, {"zero": 3}),
    ],
)  # fmt: skip
def test_what_ranks_of_megatron_share_out(tmp_path, flags, plan):
    text = arguments(data_parallel_size=8, context_parallel_size=2, **flags)
    log = log_of(tmp_path, text + "".join(iteration(i, 1500.0) for i in range(1, 6)))
    assert {name: log.stated.plan.get(name) for name in plan} == plan and ("shard" in log.stated.plan) == (
        "shard" in plan
    )


def test_formats_and_optimisers_of_megatron(tmp_path):
    steps = "".join(iteration(i, 1500.0) for i in range(1, 6))

    def stated(**flags: object) -> tuple[object, object, int]:
        log = log_of(tmp_path, arguments(**flags) + steps)
        return log.stated.settings.get("dtype"), log.stated.settings.get("optimizer"), len(log.warnings)

    assert stated(bf16=True, fp16=False, fp8=None, optimizer="adam") == ("bf16", "adam", 0)
    assert stated(bf16=False, fp16=False) == ("fp32", None, 0)
    assert stated(bf16=True, fp8="hybrid", fp8_recipe="some new one, or another") == ("fp8-te", None, 0)
    assert stated(bf16=True, fp8_e4m3=False, fp8_hybrid=True)[0] == "fp8-te"
    assert stated(bf16=True, fp4="e2m1", fp4_recipe="nvfp4")[0] == "nvfp4"
    assert stated(optimizer="sgd", sgd_momentum=0.9)[1] == "momentum"
    assert stated(optimizer="sgd", sgd_momentum=0.0)[1] == "sgd"
    assert stated(optimizer="dist_muon")[1:] == ("adam", 1)
    assert stated(recompute_granularity="selective", recompute_modules="['moe_act', 'shared_experts']")[2] == 1


@pytest.mark.parametrize(
    ("flags", "attention"),
    [
        ({}, None), ({"attention_backend": "AttnBackend.flash"}, "fused"), ({"attention_backend": "local"}, "unfused"),
        ({"attention_backend": "AttnBackend.auto", "transformer_impl": "transformer_engine"}, "fused"),
        ({"use_flash_attn": False, "transformer_impl": "transformer_engine"}, "fused"),
        ({"use_flash_attn": False, "transformer_impl": "local"}, "unfused"),
        ({"use_flash_attn_v1": False, "use_flash_attn_v2": True}, "fused"),
    ],
)  # fmt: skip
def test_attention_of_megatron(tmp_path, flags, attention):
    log = log_of(tmp_path, arguments(**flags) + "".join(iteration(i, 1500.0) for i in range(1, 6)))
    assert log.stated.plan.get("attention") == attention


ODD = (
    "  Total train batch size (w. parallel, distributed & accumulation) = ,,,",
    f"{'9' * 30}/{'9' * 30} completed step: 1, seconds: 1e300, TFLOP/s/device: nan, Tokens/s/device: 0, total_weights: 0,",
    "Building a b with X(dim=4096, multiple_of=1e3, ffn_dim_multiplier=1e308, n_layers=nan, n_heads=-1)",
    "Building a b with {", '"dim": 99999999999999999999', "}", "Num_devices: 0, shape (0, 0)",
    " iteration 1/ 9 | consumed samples: 1 | consumed tokens: 0 | elapsed time per iteration (s): 1 | global batch size: 0 |",
    " 10%|# | 1/50 [::::<02:21,  3.91s/it]", " 10%|# | 2/50 [00:01<02:21,  0.00it/s]", "{'train_runtime': 0, 'train_steps_per_second': 1e9}",
    "| global_step: 5 | train_step_timing in s: inf | consumed_samples: 0", "'selective_ac_option': '0'",
    "| global_step: 4 | train_step_timing in s: 1.0 | consumed_samples: 7",
)  # fmt: skip


def test_odd_lines_of_every_framework_do_no_harm(tmp_path):
    log = log_of(tmp_path, "\n".join(ODD) + "\n" + "".join(iteration(i, 900.0) for i in range(2, 9)))
    assert series_of(log, {}).median_s == pytest.approx(0.9)
    assert log.stated.settings == {"global_batch": 128}


# Megatron-DeepSpeed


BIGSCIENCE = (
    "[default7]: iteration    {step}/  115311 | consumed samples:      {samples} | consumed tokens:  {tokens} | elapsed "
    "time per iteration (s): {s:.2f} | learning rate: 5.969E-05 | global batch size:  2048 | lm loss: 2.463556E+00 | "
    "grad norm: 0.174 | num zeros: 0.0 | number of skipped iterations:   0 | number of nan iterations:   0 | samples "
    "per second: 19.463 | TFLOPs: 149.02 |\n"
)


def test_megatron_deepspeed_in_seconds(tmp_path):
    steps = "".join(
        BIGSCIENCE.format(step=i, samples=2048 * i, tokens=2048 * 2048 * i, s=105.22 + 0.01 * i) for i in range(1, 9)
    )
    flags = arguments(deepspeed=True, zero_stage=1, deepspeed_config="ds.json", use_flash_attn_v2=False)
    log = log_of(tmp_path, flags + steps)
    assert (log.framework, log.stated.framework) == ("megatron-deepspeed", "megatron-deepspeed")
    assert series_of(log, {}).median_s == pytest.approx(105.26, abs=0.02)
    assert log.stated.settings == {"global_batch": 2048, "seq": 2048}
    assert log.stated.plan["zero"] == 1
    assert log.tflops_per_gpu == 149.02


def test_deepspeed_engine_lines_in_a_megatron_log(tmp_path):
    dump = "[2026-03-01 12:00:00,001] [INFO] [config.py:1003:print]   zero_optimization_stage ...... 2\n"
    log = log_of(tmp_path, dump + "".join(iteration(i, 900.0) for i in range(1, 6)))
    assert log.framework == "megatron-deepspeed"
    assert log.stated.plan["zero"] == 2


@pytest.mark.parametrize(("name", "dtype"), [("float16_config", "fp16"), ("bfloat16_config", "bf16")])
def test_deepspeed_of_2025_states_its_dtype(tmp_path, name, dtype):
    head = "[2026-03-01 12:00:00,001] [INFO] [config.py:1003:print]   "
    dump = f"{head}{name} ............... enabled=True auto_cast=False\n{head}zero_optimization_stage ...... 2\n"
    speed = "[2026-03-01 12:00:01,001] epoch=0/micro_step=1/global_step={}, RunningAvgSamplesPerSec=3.1, CurrSamplesPerSec=3.1\n"
    log = log_of(tmp_path, dump + "".join(map(speed.format, range(1, 5))))
    assert log.stated.settings["dtype"] == dtype
