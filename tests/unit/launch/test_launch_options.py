"""Options of one plan for every software, written by hand from its documentation."""

from __future__ import annotations

from typing import Any

import pytest

from steptime.formats.run_spec import RunSpec
from steptime.launch import SOFTWARE, export_run, software_called
from steptime.launch.table import real_options

SETTINGS: dict[str, Any] = {"gpus": 64, "global_batch": 256, "seq": 4096}
MEGATRON = {"tp": 4, "pp": 2, "vpp": 2, "micro_batch": 2, "recompute": "mlp+norm", "overlap": "dp,tp", "zero": 1}
SHARDED = {"dp": 64, "zero": 3, "shard": 8, "micro_batch": 1, "recompute": "full"}

#: Software -> plan, settings, options of it, launcher.
BY_HAND: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    "megatron-lm": (
        MEGATRON,
        {"dtype": "fp8-te", "framework": "megatron-core"},
        {
            "--tensor-model-parallel-size": 4, "--pipeline-model-parallel-size": 2,
            "--num-virtual-stages-per-pipeline-rank": 2, "--micro-batch-size": 2, "--global-batch-size": 256,
            "--seq-length": 4096, "--max-position-embeddings": 4096, "--sequence-parallel": True, "--bf16": True,
            "--fp8-format": "hybrid", "--fp8-recipe": "delayed", "--optimizer": "adam",
            "--use-distributed-optimizer": True, "--overlap-grad-reduce": True, "--tp-comm-overlap": True,
            "--no-overlap-p2p-communication": True, "--recompute-granularity": "selective",
            "--recompute-modules": ["mlp", "layernorm"], "--accumulate-allreduce-grads-in-fp32": True,
            "--attention-backend": "auto",
            "--num-layers": 32, "--hidden-size": 4096, "--ffn-hidden-size": 14336, "--num-attention-heads": 32,
            "--group-query-attention": True, "--num-query-groups": 8, "--kv-channels": 128, "--vocab-size": 128256,
            "--swiglu": True, "--normalization": "RMSNorm", "--position-embedding-type": "rope",
            "--untie-embeddings-and-output-weights": True, "--disable-bias-linear": True,
            "--hidden-dropout": 0, "--attention-dropout": 0,
        },
        "torchrun --nproc_per_node 8 --nnodes 8 pretrain_gpt.py",
    ),
    "megatron-bridge": (
        {**MEGATRON, "overlap": "dp,pp", "recompute": "full"},
        {"dtype": "mxfp8", "framework": "megatron-core"},
        {
            "model.tensor_model_parallel_size": 4, "model.pipeline_model_parallel_size": 2,
            "model.virtual_pipeline_model_parallel_size": 2, "model.context_parallel_size": 1,
            "model.sequence_parallel": True, "train.micro_batch_size": 2, "train.global_batch_size": 256,
            "model.seq_length": 4096, "mixed_precision": "bf16_with_mxfp8_mixed", "optimizer.optimizer": "adam",
            "ddp.use_distributed_optimizer": True, "ddp.overlap_grad_reduce": True, "ddp.grad_reduce_in_fp32": True,
            "comm_overlap.tp_comm_overlap": False, "comm_overlap.overlap_p2p_comm": True,
            "model.recompute_granularity": "full", "model.recompute_method": "uniform",
            "model.recompute_num_layers": 1,
        },
        "torchrun --nproc_per_node 8 --nnodes 8 recipe.py",
    ),
    "nemo": (
        {**MEGATRON, "vpp": 1, "recompute": "full", "recompute_every": 4},
        {"dtype": "bf16", "framework": "megatron-core"},
        {
            "trainer.num_nodes": 8, "trainer.devices": 8, "trainer.strategy.tensor_model_parallel_size": 4,
            "trainer.strategy.pipeline_model_parallel_size": 2, "trainer.strategy.context_parallel_size": 1,
            "trainer.strategy.sequence_parallel": True, "data.micro_batch_size": 2, "data.global_batch_size": 256,
            "data.seq_length": 4096, "trainer.plugins.precision": "bf16-mixed",
            "optim.config.use_distributed_optimizer": True, "trainer.strategy.ddp.overlap_grad_reduce": True,
            "MegatronCommOverlapCallback.tp_comm_overlap": True, "model.config.recompute_granularity": "full",
            "model.config.recompute_method": "block", "model.config.recompute_num_layers": 4,
        },
        "nemo_run --nnodes 8 --nproc_per_node 8 recipe.py",
    ),
    "torchtitan": (
        {"tp": 2, "pp": 4, "vpp": 2, "schedule": "interleaved", "zero": 1, "micro_batch": 2, "recompute": "selective"},
        {"framework": "torchtitan"},
        {
            "parallelism.tensor_parallel_degree": 2, "parallelism.pipeline_parallel_degree": 4,
            "parallelism.context_parallel_degree": 1, "parallelism.data_parallel_replicate_degree": 1,
            "parallelism.data_parallel_shard_degree": 8, "parallelism.fsdp_reshard_after_forward": "never",
            "parallelism.pipeline_parallel_schedule": "Interleaved1F1B",
            "parallelism.pipeline_parallel_layers_per_stage": 4, "parallelism.pipeline_parallel_microbatch_size": 2,
            "training.local_batch_size": 32, "training.global_batch_size": 256, "training.seq_len": 4096,
            "training.mixed_precision_param": "bfloat16", "training.mixed_precision_reduce": "float32",
            "activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op",
            "optimizer.name": "AdamW", "model.name": "llama3", "model.flavor": "8B",
        },
        "torchrun --nproc_per_node 8 --nnodes 8 -m torchtitan.train --job.config_file train.toml",
    ),
    "torchtitan-python": (
        {"tp": 2, "dp": 32, "zero": 3, "shard": 8, "micro_batch": 2, "recompute": "full"},
        {"framework": "torchtitan"},
        {
            "parallelism.tensor_parallel_degree": 2, "parallelism.pipeline_parallel_degree": 1,
            "parallelism.context_parallel_degree": 1, "parallelism.data_parallel_replicate_degree": 4,
            "parallelism.data_parallel_shard_degree": 8, "parallelism.fsdp_reshard_after_forward": "always",
            "parallelism.enable_sequence_parallel": True, "training.local_batch_size": 2,
            "training.global_batch_size": 256, "training.seq_len": 4096, "training.mixed_precision_param": "bfloat16",
            "training.mixed_precision_reduce": "float32", "activation_checkpoint": "FullAC.Config",
        },
        "torchrun --nproc_per_node 8 --nnodes 8 -m torchtitan.train",
    ),
    "deepspeed": (
        {"dp": 64, "zero": 3, "micro_batch": 2, "offload": "optimizer"},
        {"framework": "deepspeed"},
        {
            "train_batch_size": 256, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2,
            "bf16.enabled": True, "optimizer.type": "AdamW", "zero_optimization.stage": 3,
            "zero_optimization.overlap_comm": True, "zero_optimization.offload_optimizer.device": "cpu",
            "zero_optimization.offload_optimizer.pin_memory": True, "data_types.grad_accum_dtype": "bf16",
        },
        "deepspeed --num_nodes 8 --num_gpus 8 train.py --deepspeed --deepspeed_config ds_config.json",
    ),
    "accelerate": (
        SHARDED,
        {"framework": "torchtitan"},
        {
            "compute_environment": "LOCAL_MACHINE", "main_training_function": "main", "use_cpu": False,
            "num_machines": 8, "num_processes": 64, "mixed_precision": "bf16", "distributed_type": "FSDP",
            "fsdp_config.fsdp_version": 2, "fsdp_config.fsdp_reshard_after_forward": True,
            "fsdp_config.fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_config.fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_config.fsdp_activation_checkpointing": True,
            "parallelism_config.parallelism_config_dp_replicate_size": 8,
            "parallelism_config.parallelism_config_dp_shard_size": 8,
            "parallelism_config.parallelism_config_tp_size": 1, "parallelism_config.parallelism_config_cp_size": 1,
        },
        "accelerate launch --config_file accelerate.yaml train.py",
    ),
    "fsdp2": (
        {**SHARDED, "gradient_dtype": "fp32"},
        {},
        {
            "init_device_mesh.mesh_shape": (8, 8), "init_device_mesh.mesh_dim_names": ("replicate", "shard"),
            "fully_shard.reshard_after_forward": True, "MixedPrecisionPolicy.param_dtype": "torch.bfloat16",
            "MixedPrecisionPolicy.reduce_dtype": "torch.float32", "MICRO_BATCH": 1, "MICRO_BATCHES": 4,
            "SEQUENCE": 4096, "OPTIMIZER": "AdamW", "RECOMPUTE": "full",
        },
        "torchrun --nproc_per_node 8 --nnodes 8 train.py",
    ),
    "hf-trainer": (
        {"dp": 64, "zero": 2, "micro_batch": 1, "recompute": "full"},
        {"optimizer": "adam8bit"},
        {
            "output_dir": "out", "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "bf16": True,
            "optim": "adamw_bnb_8bit", "fsdp": True, "fsdp_config.version": 2,
            "fsdp_config.reshard_after_forward": False, "fsdp_config.activation_checkpointing": True,
        },
        "torchrun --nproc_per_node 8 --nnodes 8 train.py training_args.yaml",
    ),
    "lightning": (
        {"dp": 64, "zero": 1, "micro_batch": 1, "offload": "optimizer"},
        {},
        {
            "trainer.accelerator": "gpu", "trainer.num_nodes": 8, "trainer.devices": 8,
            "trainer.accumulate_grad_batches": 4, "trainer.precision": "bf16-mixed",
            "trainer.strategy.class_path": "lightning.pytorch.strategies.DeepSpeedStrategy",
            "trainer.strategy.init_args.stage": 1, "trainer.strategy.init_args.offload_optimizer": True,
            "data.init_args.batch_size": 1, "data.init_args.sequence_length": 4096,
        },
        "torchrun --nproc_per_node 8 --nnodes 8 train.py fit --config lightning.yaml",
    ),
    "maxtext": (
        {"tp": 2, "dp": 32, "zero": 3, "micro_batch": 2, "recompute": "full"},
        {"framework": "maxtext"},
        {
            "ici_tensor_parallelism": 2, "ici_fsdp_parallelism": 32, "ici_data_parallelism": 1,
            "ici_expert_parallelism": 1, "ici_context_parallelism": 1, "ici_pipeline_parallelism": 1,
            "per_device_batch_size": 1.0, "gradient_accumulation_steps": 4, "max_target_length": 4096,
            "dtype": "bfloat16", "weight_dtype": "float32", "opt_type": "adamw", "remat_policy": "full",
            "base_num_decoder_layers": 32, "base_emb_dim": 4096, "base_mlp_dim": 14336, "base_num_query_heads": 32,
            "base_num_kv_heads": 8, "head_dim": 128, "vocab_size": 128256, "decoder_block": "llama2",
        },
        "python3 -m MaxText.train maxtext.yml",
    ),
    "llm-foundry": (
        SHARDED,
        {"framework": "composer-fsdp"},
        {
            "max_seq_len": 4096, "global_train_batch_size": 256, "device_train_microbatch_size": 1,
            "precision": "amp_bf16", "optimizer.name": "decoupled_adamw",
            "fsdp_config.sharding_strategy": "HYBRID_SHARD",
            "fsdp_config.data_parallel_replicate_degree": 8, "fsdp_config.data_parallel_shard_degree": 8,
            "fsdp_config.activation_checkpointing": True, "fsdp_config.mixed_precision": "PURE",
            "model.name": "mpt_causal_lm", "model.d_model": 4096, "model.n_layers": 32, "model.n_heads": 32,
            "model.attn_config.kv_n_heads": 8, "model.attn_config.attn_type": "grouped_query_attention",
            "model.expansion_ratio": 3.5, "model.vocab_size": 128256, "model.attn_config.attn_impl": "flash",
        },
        "composer -n 8 --world_size 64 train.py train.yaml",
    ),
}  # fmt: skip
#: Groups of options that are compared whole, so that one too many shows.
WHOLE = {"accelerate", "fsdp2", "hf-trainer", "lightning", "deepspeed", "megatron-lm"}


@pytest.mark.parametrize("name", SOFTWARE)
def test_options_by_hand(name: str) -> None:
    plan, settings, options, launcher = BY_HAND[name]
    run = RunSpec(model="llama3-8b", cluster="dgx-h100", settings={**SETTINGS, **settings}, plan=plan)
    exported = export_run(run, name)
    told = {option: exported.options.get(option) for option in options}
    assert told == options
    assert name not in WHOLE or set(exported.options) == set(options)
    assert exported.launcher == launcher


@pytest.mark.parametrize("name", SOFTWARE)
def test_every_option_of_the_tables_is_real(name: str) -> None:
    """Also those that random plans never need, and those that are only read, but for names of older versions."""
    software, real = software_called(name), real_options(name)
    rows = [*software.numbers.values(), *software.constant, *(row.option for row in software.words)]
    rows += [option for row in software.choices for case in row.cases if case.written for option in case.options]
    assert {row for row in rows if row not in real and not row.startswith(software.whole or "\0")} == set()
    assert software.read.keys() - real <= {each for each in software.read if each.startswith(software.whole or "\0")}


@pytest.mark.parametrize("name", SOFTWARE)
def test_lists_name_version_and_source(name: str) -> None:
    from importlib.resources import files

    head = files("steptime.launch").joinpath(f"options/{name}.txt").read_text().splitlines()[:6]
    comments = " ".join(line for line in head if line.startswith("#"))
    assert "https://" in comments and any(char.isdigit() for char in comments)
