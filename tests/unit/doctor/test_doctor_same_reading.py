"""The same facts in a log and in a row of measured runs are the same job: doctor and score predict alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from doctor_logs import HEAD, MODELS, STEPS, arguments, iteration
from steptime.doctor.cli import diagnose
from steptime.measure.runs.predict import score_packaged
from steptime.measure.runs.read import TableRow
from steptime.measure.runs.reading import runs_of

FLAGS: dict[str, Any] = {
    "world_size": 64, "global_batch_size": 128, "seq_length": 8192, "micro_batch_size": 1, "num_layers": 32,
    "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1, "context_parallel_size": 1,
    "hidden_size": 4096, "num_attention_heads": 32, "ffn_hidden_size": 14336, "num_query_groups": 8, "bf16": True,
    "fp16": False, "fp8": None, "optimizer": "adam", "use_distributed_optimizer": True, "sequence_parallel": True,
    "accumulate_allreduce_grads_in_fp32": True, "overlap_grad_reduce": True, "tp_comm_overlap": True,
    "recompute_granularity": None,
    "transformer_impl": "transformer_engine", "attention_backend": "AttnBackend.auto",
}  # fmt: skip
ROW = {
    "model": "llama3-8b", "gpu": "dgx-h100", "n_gpus": "64", "gpus_per_node": "8", "global_batch_sequences": "128",
    "seq_len": "8192", "micro_batch": "1", "tp": "2", "pp": "1", "vpp": "1", "cp": "1", "dtype": "bf16",
    "framework": "megatron-core", "zero_stage_or_fsdp": "1", "sequence_parallel": "true", "recompute": "none",
    "attention_impl": "flash", "metric_step_time_s": "1.5",
}  # fmt: skip
#: Arguments of Megatron-LM of 2021; what it had not yet, it does not print.
OF_2021 = {name: FLAGS[name] for name in FLAGS if name.endswith(("_size", "_length", "_layers", "_heads"))} | {
    "bf16": False, "fp16": True, "optimizer": "adam", "DDP_impl": "local", "checkpoint_activations": True,
}  # fmt: skip


def agree(path: Path, row: dict[str, str], model: str | None = None) -> None:
    (run,) = runs_of([TableRow(2, row)]).runs
    (scored,) = score_packaged([run]).scored
    predicted = diagnose(str(path), model, "dgx-h100", {}, {}).predicted
    assert predicted is not None
    assert predicted["step_time_s"] == pytest.approx(scored.step_time_s, rel=1e-6)


@pytest.mark.each(
    ("flags", "row"),
    [
        ({}, {}),
        ({"fp8": "hybrid", "fp8_recipe": "delayed"}, {"dtype": "fp8"}),
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, {"dtype": "mxfp8"}),
        ({"fp8": "hybrid", "fp8_recipe": "tensorwise"}, {"dtype": "FP8 current-scaling"}),
        ({"fp8": "hybrid", "fp8_recipe": "blockwise"}, {"dtype": "FP8 subchannel"}),
        ({"recompute_granularity": "selective"}, {"recompute": "selective"}),
        ({"recompute_granularity": "full", "recompute_method": "uniform"}, {"recompute": "full"}),
        ({"attention_backend": "AttnBackend.unfused"}, {"attention_impl": "unfused"}),
        ({"optimizer": "sgd", "sgd_momentum": 0.9}, {"notes": "SGD with momentum"}),
        ({"pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 2}, {"pp": "4", "vpp": "2"}),
    ],
)
def test_arguments_of_megatron_and_a_row(tmp_path, flags, row):
    path = tmp_path / "m.log"
    path.write_text(arguments(**FLAGS | flags) + "".join(iteration(i, 1500.0) for i in range(1, 6)))
    agree(path, ROW | row)


def test_arguments_of_2021_and_a_row(tmp_path):
    path = tmp_path / "m.log"
    path.write_text(arguments(**OF_2021) + "".join(iteration(i, 5000.0) for i in range(1, 6)))
    row = {"framework": "megatron-2021", "zero_stage_or_fsdp": "0", "sequence_parallel": "", "recompute": "full",
           "attention_impl": "", "dtype": "fp16"}  # fmt: skip
    agree(path, ROW | row, "llama3-8b")
    notes = diagnose(str(path), "llama3-8b", "dgx-h100", {}, {}).warnings
    assert "as megatron-2021 does unless told otherwise: zero 0, sp off, attention unfused" in notes
    own = diagnose(str(path), "llama3-8b", "dgx-h100", {}, {"zero": 1, "attention": "fused"})
    assert "as megatron-2021 does unless told otherwise: sp off" in own.warnings


@pytest.mark.quick(every=3)
@pytest.mark.each(
    ("mesh", "lines", "row"),
    [
        ("['dp_shard'], [64]", "Applied FSDP", {}),
        ("['dp_shard'], [64]", "Applied selective activation checkpointing", {"recompute": "selective"}),
        ("['dp_shard'], [64]", "'selective_ac_option': 'op'\nApplied selective activation checkpointing",
         {"recompute": "selective op"}),
        ("['dp_shard'], [64]", "'selective_ac_option': '2'\nApplied selective activation checkpointing",
         {"recompute": "selective 2"}),
        ("['dp_shard'], [64]", "Swapped to Float8Linear layers", {"dtype": "float8"}),
        ("['dp_shard'], [64]", "Swapped to MXLinear layers", {"dtype": "mxfp8"}),
        ("['dp_shard', 'tp'], [8, 8]", "Async TP is enabled", {"tp": "8", "notes": "async TP; torch.compile"}),
        ("['dp_shard', 'tp'], [8, 8]", "Applied Float8 tensorwise Async Tensor Parallelism to the model",
         {"tp": "8", "notes": "async TP"}),
        ("['dp_replicate', 'dp_shard', 'cp'], [2, 16, 2]", "Applied HSDP",
         {"zero_stage_or_fsdp": "HSDP dp_shard 16", "cp": "2", "global_batch_sequences": "32"}),
        ("['pp', 'dp_shard'], [2, 32]", "Applied FSDP", {"pp": "2"}),
    ],
)  # fmt: skip
def test_header_of_torchtitan_and_a_row(tmp_path, mesh, lines, row):
    whole = ROW | {"framework": "torchtitan", "zero_stage_or_fsdp": "FSDP", "tp": "1", "sequence_parallel": ""}
    whole |= {"global_batch_sequences": "64"} | row
    head = [
        f"Building n-D device mesh with {mesh}".replace("n-D", "2-D"), *lines.splitlines(), "Applied FSDP to the model",
        f"Trainer is initialized with local batch size 1, global batch size {whole['global_batch_sequences']}, "
        "gradient accumulation steps 1, sequence length 8192, total steps 1000 (warmup 200)",
    ]  # fmt: skip
    path = tmp_path / "t.log"
    path.write_text("".join(f"{HEAD}{line}\n" for line in head) + MODELS["of 2025"] + STEPS)
    agree(path, whole)
