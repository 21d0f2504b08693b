"""Spellings of accelerators, dtypes and settings in tables of measured runs."""

from __future__ import annotations

import pytest

from steptime.hardware.library import load_device
from steptime.measure.runs.architecture import known_model, likely_heads, likely_hidden
from steptime.measure.runs.canonical import (
    Recomputation,
    Sharding,
    attention_kernel,
    device_name,
    dtype_name,
    network_Bps,
    offloaded,
    recomputation,
    schedule_name,
    sharding,
)
from steptime.measure.runs.meaning import framework_default, framework_of
from steptime.measure.runs.metrics import peak_flops_per_s, printed_peak_flops_per_s
from steptime.measure.runs.read import TableRow, table
from steptime.measure.runs.reading import runs_of
from steptime.measure.runs.run import legal_micro_batches, possible_degrees
from steptime.plan.framework_file import name_rules as framework_names


@pytest.mark.each(
    ("text", "name", "assumed"),
    [
        ("H100-SXM-80GB", "h100-sxm", False),
        ("H100 SXM5 80 GB", "h100-sxm", False),
        ("NVIDIA H100-SXM-80GB (700W)", "h100-sxm", False),
        ("H100-96GB-HBM2e-500W (Grand Teton)", "h100-sxm-96gb", False),
        ("A100 (variant not stated)", "a100-sxm-80gb", True),
        ('A100 (paper says "Ampere"; variant not stated)', "a100-sxm-80gb", True),
        ("A100-SXM-40GB", "a100-sxm-40gb", False),
        ("B200-SXM-180GB", "b200-sxm", False),
        ("B300-SXM-270GB", "b300-sxm", False),
        ("GB300", "gb300", False),
        ("V100-SXM3-32GB (DGX-2)", "v100-sxm2-32gb", False),
        ("H200-NVL-141GB", "h200-nvl", False),
        ("AMD Instinct MI355X", "mi355x", False),
        ("TPU v6e Trillium", "tpu-v6e", False),
        ("TPU7x Ironwood", "tpu-v7", False),
        ("Gaudi2-96GB", "gaudi2", False),
        ("RTX 4090", "rtx-4090", False),
        ("GeForce RTX 4090 24 GB", "rtx-4090", False),
        ("H800-SXM-80GB", "h800-sxm", False),
        ("H100-SXM-80GB-liquid-cooled", "h100-sxm", True),
    ],
)
def test_accelerators(text: str, name: str, assumed: bool):
    found = device_name(text)
    assert (found.name, found.assumed, found.ambiguous) == (name, assumed, False)


@pytest.mark.parametrize("text", ["Abacus", "", "80GB", "/etc/passwd", "x.toml", "?", "h" * 10_000])
def test_no_accelerator(text: str):
    assert device_name(text).name is None


def test_one_of_several_accelerators():
    assert device_name("A800/H800 80GB (not stated which)").ambiguous
    assert not device_name("H100/H100-SXM").ambiguous


@pytest.mark.each(
    ("text", "names"),
    [
        ("amp_bf16", "bf16"), ("amp_fp8", "fp8"), ("fp8_full", "fp8"), ("TE FP8", "fp8"), ("FP8 (TE hybrid)", "fp8"),
        ("FP8-CS", "fp8-tensorwise"), ("FP8-MX", "mxfp8"), ("MXFP8", "mxfp8"), ("NVFP4", "nvfp4"), ("TF32", "tf32"),
        ("FP8 MX/subchannel (number in parentheses)", "mxfp8"), ("BF16 (fp32 grad accumulation)", "bf16"),
        ("Float8 linears (BF16 base)", "fp8"), ("BF16/FP16", "bf16 fp16"), ("FP32", "fp32"), ("float16", "fp16"),
        ("FP8 or NVFP4 (both config files present; ambiguous)", "nvfp4 fp8"), ("FP8/int8 quantized", "fp8"),
        ("fp8-te", "fp8-te"), ("FP8 delayed scaling", "fp8-te"), ("te_fp8_delayedscaling", "fp8-te"),
        ("fp8_ds", "fp8-te"), ("fp8-tensorwise", "fp8-tensorwise"), ("fp8_cs", "fp8-tensorwise"),
        ("tensorwise FP8", "fp8-tensorwise"), ("per-tensor current scaling FP8", "fp8-tensorwise"),
        ("fp8-blockwise", "fp8-blockwise"), ("FP8-SC", "fp8-blockwise"), ("blockwise FP8", "fp8-blockwise"),
        ("FP8 (128x128 block scaling)", "fp8-blockwise"), ("Float8BlockScaling", "fp8-blockwise"),
        ("MXFP8BlockScaling", "mxfp8"), ("FP8 tensorwise or MXFP8", "mxfp8 fp8-tensorwise"),
        ("FP8-CS or FP8-DS", "fp8-tensorwise fp8-te"), ("", ""), ("posit8", ""),
    ],
)  # fmt: skip
def test_dtypes(text: str, names: str):
    assert dtype_name(text).precisions == tuple(names.split())


def test_quantised_base():
    assert dtype_name("NF4 base + BF16").quantised_base
    assert dtype_name("NF4 base + BF16").precisions == ("bf16",)
    assert not dtype_name("NVFP4").quantised_base


@pytest.mark.each(
    ("text", "kind", "share"),
    [
        ("none", "none", 1), ("full", "full", 1), ("full (remat)", "full", 1), ("selective", "attention", 1),
        ("selective (op-level SAC)", "ops", 1), ("selective (every-other-layer)", "full", 0.5),
        ("every 4 layers", "full", 0.25), ("selective (RMSNorm, MLA up-proj)", "norms", 1),
        ("fused SDPA recompute; activation checkpointing off by command line", "none", 1), ("False", "none", 1),
        ("every 0 layers", "full", 1),
    ],
)  # fmt: skip
def test_recomputation(text: str, kind: str, share: float):
    assert recomputation(text) == Recomputation(kind=kind, share=share)


@pytest.mark.each(
    ("text", "framework", "kind", "share"),
    [
        ("selective", "megatron-core", "attention", 1), ("selective", "torchtitan", "ops", 1),
        ("selective activation checkpointing", "torchtitan", "ops", 1), ("Selective AC", "automodel", "ops", 1),
        ("selective op", "torchtitan", "ops", 1), ("selective op", "generic", "ops", 1),
        ("selective_ac_option=op", "torchtitan", "ops", 1), ("selective 2", "torchtitan", "full", 0.5),
        ("selective (1/3)", "fms-fsdp", "full", 1 / 3), ("selective", "fms-fsdp", "full", 1),
        ("selective_ac_option: '4'", "torchtitan", "full", 0.25),
        ("selective (attention)", "torchtitan", "attention", 1), ("full", "torchtitan", "full", 1),
    ],
)  # fmt: skip
def test_selective_is_what_the_framework_calls_so(text: str, framework: str, kind: str, share: float):
    row = {
        "model": "llama3-8b", "gpu": "h100", "n_gpus": "8", "seq_len": "8192", "global_batch_sequences": "8",
        "framework": framework, "recompute": text, "metric_step_time_s": "1",
    }  # fmt: skip
    (run,) = runs_of([TableRow(2, row)]).runs
    assert run.recompute == Recomputation(kind=kind, share=share)


def test_recomputation_that_is_unknown():
    assert recomputation("") is None and recomputation("sometimes") is None


@pytest.mark.each(
    ("text", "expected"),
    [
        ("0 (DP=1)", Sharding(stages=(0,))),
        ("none", Sharding(stages=(0,))),
        ("DP replicated", Sharding(stages=(0,))),
        ("1 (distributed optimizer)", Sharding(stages=(1,))),
        ("DDP (not FSDP; Megatron distributed optimizer is recipe default - not in table)", Sharding(stages=(1,))),
        ("see DeepSpeed config (ZeRO-1 + BF16 optimizer)", Sharding(stages=(1,))),
        ("zero2", Sharding(stages=(2,))),
        ("FSDP SHARD_GRAD_OP", Sharding(stages=(2,))),
        ("FSDP (optimizer+grad sharded, no reshard)", Sharding(stages=(2,))),
        ("3 (DeepSpeed)", Sharding(stages=(3,))),
        ("ZeRO-3", Sharding(stages=(3,))),
        ("FSDP FULL_SHARD", Sharding(stages=(3,))),
        ("FSDP 64", Sharding(stages=(3,), ranks=64)),
        ("FSDP2 8", Sharding(stages=(3,), ranks=8)),
        ("FSDP2 (8)", Sharding(stages=(3,), ranks=8)),
        ("FSDP=256 (GSPMD)", Sharding(stages=(3,), ranks=256)),
        ("FSDP=128, DP=4", Sharding(stages=(3,), ranks=128, replicas=4)),
        ("FSDP2 (dp_shard 4, params sharded over dp*cp)", Sharding(stages=(3,), ranks=4)),
        ("256-way fully sharded DP within pod + 2-way pod DP", Sharding(stages=(3,), ranks=256, replicas=2)),
        ("0/1 (DeepSpeed)", Sharding(stages=(0, 1))),
        ("FSDP+DP (split not in table)", Sharding(stages=(3,))),
        ("HSDP", Sharding(stages=(3,), within_node=True)),
        ("", None),
        ("sideways", None),
    ],
)
def test_sharding(text: str, expected: Sharding | None):
    assert sharding(text) == expected


@pytest.mark.parametrize(
    ("text", "kernel"),
    [
        ("flash (TE/cuDNN)", "fused"), ("TE/SDPA/Flex (fused)", "fused"), ("xformers memory-efficient", "fused"),
        ("Megatron fused softmax (no flash)", "unfused"), ("no flash (21.11)", "unfused"), ("", None), ("linear", None),
    ],
)  # fmt: skip
def test_attention_kernels(text: str, kernel: str | None):
    assert attention_kernel(text) == kernel


@pytest.mark.each(
    ("text", "name", "accumulation"),
    [
        ("1F1B (DeepSpeed pipe)", "1f1b", None), ("interleaved-1F1B (for pp>1)", "interleaved", None),
        ("interleaved1f1b", "interleaved", None), ("ZB-V", "zb-v", None), ("zero-bubble PP", "zb-1p", None),
        ("DualPipe", "dualpipe", None), ("FSDP grad-accum 16", None, 16), ("grad-accum", None, None), ("", None, None),
    ],
)  # fmt: skip
def test_schedules(text: str, name: str | None, accumulation: int | None):
    found = schedule_name(text)
    assert (found.name, found.accumulation) == (name, accumulation)


def test_offload():
    assert offloaded("optimizer (CPU AdamW)") == {"optimizer"}
    assert offloaded("optimizer+param") == {"optimizer", "weights"}
    assert offloaded("activations") == {"activations"}
    assert offloaded("see section") == frozenset()


@pytest.mark.each(
    ("text", "per_node", "gbit"),
    [
        ("4x Omni-Path 100 Gb/s per node", 4, 100), ("800 Gb/s per node", 8, 100), ("400 Gb/s RDMA per GPU", 8, 400),
        ("8x200 Gb/s HDR IB per node", 8, 200), ("1600 Gbps node-node RoCE", 8, 200),
        ("Storage: 2x ConnectX-7 IB NDR 400Gb/s, Compute: 8x ConnectX-7 IB NDR 400Gb/s", 8, 400),
        ("InfiniBand; Data bandwidth for GPU-PCIe: 504 GB/s; PCIe-NIC: 500 GB/s", 8, None), ("single node", 8, None),
        ("8x400 Gb/s IB (H800 NVLink 400 GB/s)", 8, 400),
    ],
)  # fmt: skip
def test_network(text: str, per_node: int, gbit: float | None):
    found = network_Bps(text, per_node)
    assert found == (None if gbit is None else pytest.approx(gbit * 1e9 / 8))


def test_frameworks():
    found = {
        "megatron": TableRow(
            1, {"source_key": "libai", "source": "Oneflow-Inc/libai Benchmark.md [Megatron-LM e156d2f]"}
        ),
        "libai": TableRow(1, {"source_key": "libai", "source": "Oneflow-Inc/libai Benchmark.md [LiBai]"}),
        "maxtext": TableRow(1, {"source_key": "dgxc", "model": "MaxText Llama2-70B"}),
        "megatron-core": TableRow(1, {"source_key": "dgxc", "model": "Llama3.1-8B"}),
        "megatron-deepspeed": TableRow(1, {"source_key": "mlperf", "source": "Intel-HabanaLabs/results/HLS-Gaudi2"}),
        "megatron-deepspeed-2021": TableRow(1, {"source_key": "bigscience", "notes": "ZeRO-3; stage"}),
        "deepspeed-2021": TableRow(1, {"source_key": "sc21", "notes": "ZeRO-3; 384 GPUs"}),
        "megatron-2021": TableRow(1, {"source_key": "sc21", "notes": "PTD; not ZeRO-3; "}),
        "torchtitan": TableRow(1, {"framework": "TorchTitan", "source_key": "mlperf"}),
        "generic": TableRow(1, {"source_key": "never heard of"}),
    }
    assert {name: framework_of(row) for name, row in found.items()} == {name: name for name in found}


def test_defaults_are_weights_of_every_framework():
    rules = framework_names()
    known = {*rules["source_key"].values(), *(r["framework"] for r in rules["pattern"])}
    settings = {"recompute", "zero", "sp", "attention", "dtype"}
    for framework in (*known, "generic"):
        for setting in settings:
            assert sum(framework_default(framework, setting).values()) == pytest.approx(1), (framework, setting)
    assert known <= set(table("defaults"))


def test_known_models_are_in_the_catalogue():
    from steptime.model.known import in_catalogue

    assert all(in_catalogue(entry["catalogue"]) for entry in table("models")["model"])
    names = {
        "MaxText Llama3-70B": "llama3.1-70b", "Llama2-70B LoRA (MLPerf)": "llama2-70b", "LLAMA3_8B": "llama3.1-8b",
        "DeepSeek3-671B": "deepseek-v3", "Kimi_K2": "kimi-k2", "GPT OSS 120B": "gpt-oss-120b",
        "Nemotron-340B": "nemotron4-340b", "PaXML GPT3-175B": "gpt3-175b", "Qwen2.5-7B": "qwen2.5-7b",
    }  # fmt: skip
    for name, expected in names.items():
        found = known_model(name)
        assert found is not None and found["catalogue"] == expected
    assert known_model("DeepSeekV4 Flash") is None and known_model("GPT 52B") is None


def test_shapes_from_a_size():
    for parameters, hidden in ((175e9, 12288), (39.1e9, 8192 - 1024), (1.3e9, 2432)):
        assert abs(likely_hidden(parameters) / hidden - 1) < 0.15
    assert likely_hidden(52e9, layers=64) == 8192
    assert likely_heads(12288) == 96 and likely_heads(13) == 1


def test_micro_batches_and_degrees_are_legal():
    assert legal_micro_batches(24) == [1, 2, 4, 8] and legal_micro_batches(3) == [1]
    found = list(possible_degrees(64, 32, heads=64, layers=80, per_node=8))
    assert found
    for d in found:
        assert d.tp * d.pp * d.cp * d.dp == 64 and 32 % d.dp == 0 and d.tp <= 8 and 80 % d.pp == 0


def test_peaks():
    assert peak_flops_per_s("a100-sxm-80gb", "fp8") == peak_flops_per_s("a100-sxm-80gb", "bf16") == 312e12
    assert peak_flops_per_s("v100-sxm2-32gb", "bf16") == 125e12
    text = "MFU uses peak 989/1979 (H100 BF16/FP8), 2450/4900 (GB200)"
    assert printed_peak_flops_per_s(text, "h100-sxm", "bf16") == 989e12
    assert printed_peak_flops_per_s("model; 989", "h100-sxm", "bf16") == 989e12
    assert printed_peak_flops_per_s("model", "h100-sxm", "bf16") is None


def test_the_96_gb_variant_is_slower_in_memory_and_by_its_limit_of_power():
    wide, usual = load_device("h100-96gb-hbm2e-500w"), load_device("h100-sxm")
    assert (wide.memory_bytes, wide.memory_Bps, wide.power_W) == (97871 * 2**20, 2.4e12, 500)
    assert wide.matrix_flops_per_s["bf16"] == pytest.approx(
        usual.matrix_flops_per_s["bf16"] * (500 / 700) ** (2 / 3), rel=2e-3
    )
