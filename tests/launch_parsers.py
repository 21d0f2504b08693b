"""The software's own parsers, where they are installed, on launch files that steptime wrote."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def accelerate(path: Path) -> dict[str, Any]:
    """What ``accelerate launch`` would run: its configuration, checked against its own arguments."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    given = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    given, _, _ = _validate_launch_command(given)
    environment = prepare_multi_gpu_env(given)
    mesh = ("DP_REPLICATE_SIZE", "DP_SHARD_SIZE", "TP_SIZE", "CP_SIZE")
    return {
        "gpus": given.num_processes,
        "nodes": given.num_machines,
        "dtype": given.mixed_precision,
        "mesh": [int(environment.get(f"PARALLELISM_CONFIG_{name}", 1)) for name in mesh],
        "fsdp": environment.get("ACCELERATE_USE_FSDP") == "true",
    }


def hf_trainer(path: Path) -> dict[str, Any]:
    """``TrainingArguments`` from the YAML, on the CPU."""
    import yaml
    from transformers import HfArgumentParser, TrainingArguments

    table = yaml.safe_load(path.read_text())
    narrow = {name: table.pop(name) for name in ("bf16", "fp16", "tf32") if name in table}
    (found,) = HfArgumentParser(TrainingArguments).parse_dict({**table, "use_cpu": True})
    return {
        "micro_batch": found.per_device_train_batch_size,
        "micro_batches": found.gradient_accumulation_steps,
        "fsdp": bool(found.fsdp),
        "optim": str(found.optim.value),
        "dtype": next(iter(narrow), "fp32"),
    }


def deepspeed(path: Path, world: int) -> dict[str, Any]:
    """``DeepSpeedConfig`` for a number of data ranks."""
    import deepspeed.runtime.config as config

    class Ranks:
        def get_data_parallel_world_size(self) -> int:
            return world

    table = json.loads(path.read_text())
    held = config.dist.get_world_size, config.dist.get_rank
    config.dist.get_world_size = lambda *_, **__: world * table.get("sequence_parallel_size", 1)
    config.dist.get_rank = lambda *_, **__: 0
    try:
        found = config.DeepSpeedConfig(table, mpu=Ranks() if "sequence_parallel_size" not in table else None)
    finally:
        config.dist.get_world_size, config.dist.get_rank = held
    return {
        "global_batch": found.train_batch_size,
        "micro_batch": found.train_micro_batch_size_per_gpu,
        "micro_batches": found.gradient_accumulation_steps,
        "zero": int(found.zero_optimization_stage),
    }


def torchtitan(path: Path) -> dict[str, Any]:
    """``JobConfig`` from the TOML."""
    from torchtitan.config.manager import ConfigManager

    found = ConfigManager().parse_args(["--job.config_file", str(path)])
    parallel = found.parallelism
    return {
        "tp": parallel.tensor_parallel_degree,
        "cp": parallel.context_parallel_degree,
        "pp": parallel.pipeline_parallel_degree,
        "dp": parallel.data_parallel_replicate_degree * parallel.data_parallel_shard_degree,
        "global_batch": found.training.global_batch_size,
        "seq": found.training.seq_len,
    }


def lightning(path: Path) -> dict[str, Any]:
    """The trainer's arguments as LightningCLI reads them: its parser, by the signatures of the classes."""
    import yaml
    from jsonargparse import ArgumentParser
    from lightning.pytorch import Trainer

    table = yaml.safe_load(path.read_text())
    table.pop("data", None)
    parser = ArgumentParser()
    parser.add_class_arguments(Trainer, "trainer")
    found = parser.parse_object(table).trainer
    return {"devices": found.devices, "nodes": found.num_nodes, "micro_batches": found.accumulate_grad_batches}


#: Software -> packages without which its parser cannot be asked.
NEEDS: Mapping[str, tuple[str, ...]] = {
    "accelerate": ("accelerate",),
    "hf-trainer": ("transformers", "accelerate", "yaml"),
    "deepspeed": ("deepspeed",),
    "torchtitan": ("torchtitan", "tyro"),
    "lightning": ("lightning", "jsonargparse", "yaml"),
}
PARSERS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "accelerate": accelerate,
    "hf-trainer": hf_trainer,
    "deepspeed": deepspeed,
    "torchtitan": torchtitan,
    "lightning": lightning,
}


def missing(name: str) -> str:
    """The package without which the parser of a software cannot be asked; empty: all are there."""
    return next((package for package in NEEDS[name] if find_spec(package) is None), "")


def parsed(name: str, path: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """What the software's own parser makes of a file."""
    more = (values["dp"],) if name == "deepspeed" else ()
    return PARSERS[name](path, *more)


def wanted(name: str, values: Mapping[str, Any], node_devices: int) -> dict[str, Any]:
    """What it should make of it, by the plan."""
    dp, shared = values["dp"], values.get("shard") or values["dp"]
    steps = values["global_batch"] // (values["micro_batch"] * dp)
    zero, degrees = values.get("zero", 0), [values["tp"], values["cp"]]
    meshed = zero > 1 or degrees != [1, 1]
    mesh = [dp // shared, shared] if zero else [dp, 1]
    tables: dict[str, dict[str, Any]] = {
        "accelerate": {
            "gpus": values["gpus"],
            "nodes": values["gpus"] // node_devices,
            "dtype": {"fp32": "no"}.get(values["dtype"], values["dtype"]),
            "mesh": [*mesh, *degrees] if meshed else [1, 1, 1, 1],
            "fsdp": zero > 1,
        },
        "hf-trainer": {
            "micro_batch": values["micro_batch"],
            "micro_batches": steps,
            "fsdp": zero > 1,
            "optim": {"adam": "adamw_torch_fused", "adam8bit": "adamw_bnb_8bit", "sgd": "sgd"}.get(values["optimizer"]),
            "dtype": values["dtype"],
        },
        "deepspeed": {
            "global_batch": values["global_batch"],
            "micro_batch": values["micro_batch"],
            "micro_batches": steps,
            "zero": zero,
        },
        "torchtitan": {name: values[name] for name in ("tp", "cp", "pp", "dp", "global_batch", "seq")},
        "lightning": {"devices": node_devices, "nodes": values["gpus"] // node_devices, "micro_batches": steps},
    }
    return tables[name]
