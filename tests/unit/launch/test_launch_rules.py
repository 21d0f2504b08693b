"""Plans that a software cannot run are refused, and the message has the rule."""

from __future__ import annotations

from typing import Any

import pytest

from steptime.errors import PlanError, UserError
from steptime.formats.run_spec import RunSpec
from steptime.launch import SOFTWARE, export_run
from steptime.launch.rules import RULES

DENSE, EXPERTS = "llama3-8b", "mixtral-8x7b"
#: Software, model, plan, settings, words of the message; 64 devices, global batch 256.
REFUSED: list[tuple[str, str, dict[str, Any], dict[str, Any], str]] = [
    ("deepspeed", DENSE, {"pp": 2, "zero": 1, "vpp": 2}, {}, "has no virtual stages: vpp 2"),
    ("deepspeed", DENSE, {"tp": 2, "zero": 3}, {}, "automatic tensor ranks are with ZeRO-0, 1 and 2"),
    ("deepspeed", DENSE, {"cp": 2, "context": "ring"}, {}, "context ranks are Ulysses"),
    ("deepspeed", DENSE, {"zero": 0, "offload": "optimizer"}, {}, "from ZeRO-1 on"),
    ("deepspeed", DENSE, {"zero": 3, "shard": 8}, {}, "HSDP"),
    ("deepspeed", DENSE, {}, {"dtype": "mxfp8"}, "cannot run dtype mxfp8"),
    ("accelerate", DENSE, {"pp": 2}, {}, "has no pipeline: pp 2"),
    ("accelerate", DENSE, {"tp": 2, "zero": 1}, {}, "not with DeepSpeed (ZeRO-1)"),
    ("accelerate", DENSE, {"zero": 3, "recompute": "full", "recompute_every": 2}, {}, "whole blocks"),
    ("accelerate", DENSE, {"zero": 3, "recompute": "mlp"}, {}, "cannot run recompute mlp"),
    ("fsdp2", DENSE, {"pp": 2, "zero": 0}, {}, "has no pipeline"),
    ("fsdp2", DENSE, {"zero": 1}, {}, "cannot run zero 1"),
    ("fsdp2", EXPERTS, {"ep": 8, "zero": 3}, {}, "has no expert ranks: ep 8"),
    ("hf-trainer", DENSE, {"tp": 2}, {}, "has no tensor ranks"),
    ("hf-trainer", DENSE, {"zero": 0, "offload": "optimizer"}, {}, "with sharded states"),
    ("lightning", DENSE, {"tp": 2, "zero": 1}, {}, "ModelParallelStrategy"),
    ("lightning", DENSE, {"cp": 2}, {}, "has no context ranks"),
    ("llm-foundry", DENSE, {"tp": 2, "zero": 3}, {}, "cut the MLP alone"),
    ("llm-foundry", EXPERTS, {"zero": 3}, {}, "MegaBlocks"),
    ("llm-foundry", DENSE, {"zero": 1}, {}, "cannot run zero 1"),
    ("maxtext", DENSE, {"pp": 2, "schedule": "1f1b", "micro_batch": 1}, {}, "cannot run schedule 1f1b"),
    ("maxtext", DENSE, {"zero": 2}, {}, "cannot run zero 2"),
    ("maxtext", DENSE, {"zero": 1, "shard": 8}, {}, "ZeRO-1 is over all data ranks"),
    ("maxtext", DENSE, {"pp": 4, "schedule": "gpipe", "micro_batch": 8, "zero": 0}, {}, "pp has to divide the micro-"),
    ("torchtitan", DENSE, {"tp": 2, "sp": "off", "zero": 3}, {}, "tensor ranks have sequence parallelism"),
    ("torchtitan", DENSE, {"zero": 3, "shard": 1}, {}, "ZeRO-0 shards nothing"),
    ("torchtitan", DENSE, {"zero": 1}, {}, "cannot run zero 1"),
    ("torchtitan", DENSE, {"zero": 3}, {"optimizer": "sgd"}, "cannot run optimizer sgd"),
    ("torchtitan", EXPERTS, {"ep": 4, "etp": 2, "tp": 4, "zero": 3}, {}, "etp is 1 or tp"),
    ("torchtitan", DENSE, {"zero": 0, "offload": "optimizer"}, {}, "the optimiser goes to the host with weights"),
    ("megatron-lm", "llama3.1-405b", {"tp": 4, "pp": 16}, {}, "pp x vpp has to divide the layers"),
    ("megatron-lm", DENSE, {"tp": 16}, {}, "tp has to divide the key-value"),
    ("megatron-lm", DENSE, {"recompute": "full", "recompute_every": 3}, {}, "every n-th layer"),
    ("megatron-lm", DENSE, {"tp": 2, "overlap": "tp", "sp": "off"}, {}, "overlap of tp needs sequence parallelism"),
    ("megatron-lm", DENSE, {"pp": 2, "offload": "activations"}, {}, "without pipeline and without recomputation"),
    ("megatron-lm", DENSE, {"tp": 2}, {"dtype": "mxfp8", "seq": 2002}, "in multiples of 32"),
    ("megatron-lm", DENSE, {"recompute": "activation"}, {}, "cannot run recompute activation of a dense model"),
    ("megatron-lm", DENSE, {"pp": 2, "schedule": "gpipe"}, {}, "cannot run schedule gpipe"),
    ("megatron-lm", DENSE, {}, {"lora": {"rank": 16}}, "writes no adapters for Megatron-LM yet: lora.rank 16"),
    ("nemo", DENSE, {"recompute": "outputs"}, {}, "cannot run recompute outputs"),
    ("megatron-bridge", DENSE, {}, {"dtype": "fp8"}, "names no recipe"),
    *((name, DENSE, {"pp": 2, "zero": 3}, {}, "the plan is not legal: ZeRO-2 and ZeRO-3") for name in SOFTWARE),
    *((name, DENSE, {"micro_batch": 3}, {}, "is not divisible by") for name in SOFTWARE),
]  # fmt: skip


@pytest.mark.each(("name", "model", "plan", "settings", "words"), REFUSED)
def test_refused(name: str, model: str, plan: dict[str, Any], settings: dict[str, Any], words: str) -> None:
    run = RunSpec(model=model, cluster="dgx-h100", settings={"gpus": 64, "global_batch": 256, **settings}, plan=plan)
    with pytest.raises(UserError) as error:
        export_run(run, name)
    assert words in str(error.value), str(error.value)


def test_what_no_software_runs() -> None:
    job = {"gpus": 64, "global_batch": 256}
    for plan, settings, words in (
        ({"tp": 2, "tp2": 2}, {}, "two axes"),
        ({}, {"mode": "published"}, "a paper's own model"),
        ({"dp": 3}, {}, "= 3, not 64"),
    ):
        with pytest.raises(UserError, match=words):
            export_run(RunSpec(model=DENSE, cluster="dgx-h100", settings={**job, **settings}, plan=plan), "megatron-lm")
    with pytest.raises(UserError, match="did you mean megatron-lm"):
        export_run(RunSpec(model=DENSE, settings=job), "megatron_lm")


def test_every_rule_names_software_that_exists() -> None:
    assert all(rule.software <= set(SOFTWARE) for rule in RULES)


@pytest.mark.parametrize("software", ["axolotl", "llama-factory"])
def test_what_is_only_read_is_not_written(software: str) -> None:
    run = RunSpec(model="llama3-8b", cluster="dgx-h100", settings={"gpus": 8, "global_batch": 64}, plan={"zero": 3})
    with pytest.raises(PlanError, match="and writes none yet"):
        export_run(run, software)
