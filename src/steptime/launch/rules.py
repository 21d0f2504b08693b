"""Table of rules on plans that training software cannot run; the text of a rule is the error message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from steptime.errors import PlanError
from steptime.launch.table import Software
from steptime.launch.values import Values, matters

#: Concept -> its name in the error for a software without an option for it.
DEGREES: Final = {
    "tp": "tensor ranks",
    "cp": "context ranks",
    "pp": "pipeline",
    "vpp": "virtual stages",
    "ep": "expert ranks",
    "etp": "tensor ranks of an expert",
    "zero": "ZeRO stage",
    "shard": "ZeRO over fewer ranks than dp (HSDP)",
    "schedule": "pipeline schedule",
    "offload.optimizer": "optimiser on the host",
    "offload.activations": "activations on the host",
    "offload.parameters": "weights on the host",
}
_MEGATRON: Final = frozenset({"megatron-lm", "megatron-bridge", "nemo"})
_SHARDED: Final = frozenset({"torchtitan", "accelerate", "fsdp2", "lightning"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule that a plan has to keep in some software."""

    software: frozenset[str]
    """Names of software; empty: all."""
    text: str
    broken: Callable[[Values], bool]


def _uneven(values: Values) -> bool:
    return values["pp"] > 1 and bool(values["model.layers"] % (values["pp"] * values["vpp"]))


RULES: Final = (
    Rule(
        software=frozenset(),
        text="ZeRO-2 and ZeRO-3 have no pipeline: they move gradients or weights for every micro-batch",
        broken=lambda v: v["zero"] > 1 and v["pp"] > 1,
    ),
    Rule(
        software=frozenset(),
        text="dtype fp8 names no recipe: fp8-te, fp8-tensorwise, fp8-blockwise and mxfp8 do",
        broken=lambda v: v["dtype"] == "fp8",
    ),
    Rule(
        software=_MEGATRON,
        text="pp x vpp has to divide the layers",
        broken=_uneven,
    ),
    Rule(
        software=_MEGATRON,
        text="tp has to divide the key-value heads",
        broken=lambda v: bool(v["model.kv_heads"] % v["tp"]),
    ),
    Rule(
        software=_MEGATRON,
        text="every n-th layer is recomputed where n divides the layers of a (virtual) stage",
        broken=lambda v: v["recompute_every"] > 1 and v.get("recompute_layers") is None,
    ),
    Rule(
        software=_MEGATRON,
        text="experts with tp need sequence parallelism",
        broken=lambda v: matters("ep", v) and v["tp"] > 1 and v["sp"] == "off",
    ),
    Rule(
        software=_MEGATRON,
        text="overlap of tp needs sequence parallelism",
        broken=lambda v: v["tp"] > 1 and v["overlap.tp"] and v["sp"] == "off",
    ),
    Rule(
        software=_MEGATRON,
        text="the ranks that share states have to divide dp x cp",
        broken=lambda v: bool(v["shard"]) and v["zero"] > 0 and v.get("instances") is None,
    ),
    Rule(
        software=_MEGATRON,
        text="activations go to the host without pipeline and without recomputation",
        broken=lambda v: v["offload.activations"] and (v["pp"] > 1 or v["recompute"] != "none"),
    ),
    Rule(
        software=_MEGATRON,
        text="fp4 and fp8 in blocks of 32 take tokens of a rank in multiples of 32",
        broken=lambda v: (
            v["dtype"] in ("mxfp8", "nvfp4") and bool((v["seq"] * v["micro_batch"] // (v["cp"] * v["tp"])) % 32)
        ),
    ),
    Rule(
        software=_SHARDED,
        text="the ranks that shard have to be more than one: ZeRO-0 shards nothing",
        broken=lambda v: v["zero"] > 0 and v["shard"] == 1 and v["dp"] > 1,
    ),
    Rule(
        software=frozenset({"torchtitan"}),
        text="ep x etp has to divide shards x cp x tp",
        broken=lambda v: matters("ep", v) and bool((v["shard_ranks"] * v["cp"] * v["tp"]) % (v["ep"] * v["etp"])),
    ),
    Rule(
        software=frozenset({"torchtitan"}),
        text="etp is 1 or tp",
        broken=lambda v: matters("etp", v) and v["etp"] not in (1, v["tp"]),
    ),
    Rule(
        software=frozenset({"torchtitan"}),
        text="tensor ranks have sequence parallelism",
        broken=lambda v: v["tp"] > 1 and v["sp"] == "off",
    ),
    Rule(
        software=frozenset({"torchtitan"}),
        text="the optimiser goes to the host with weights and gradients, without pipeline (CPU offload of FSDP2)",
        broken=lambda v: v["offload.optimizer"] and (v["pp"] > 1 or v["zero"] < 2),
    ),
    Rule(
        software=frozenset({"deepspeed"}),
        text="context ranks are Ulysses, without tensor ranks and pipeline",
        broken=lambda v: v["cp"] > 1 and (v["context"] != "ulysses" or v["tp"] > 1 or v["pp"] > 1),
    ),
    Rule(
        software=frozenset({"deepspeed"}),
        text="the optimiser goes to the host from ZeRO-1 on",
        broken=lambda v: v["offload.optimizer"] and v["zero"] < 1,
    ),
    Rule(
        software=frozenset({"deepspeed"}),
        text="automatic tensor ranks are with ZeRO-0, 1 and 2",
        broken=lambda v: v["tp"] > 1 and v["zero"] > 2,
    ),
    Rule(
        software=frozenset({"accelerate"}),
        text="tensor and context ranks are with FSDP2 (ZeRO-2, ZeRO-3) or plain replicas, not with DeepSpeed (ZeRO-1)",
        broken=lambda v: v["zero"] == 1 and v["tp"] * v["cp"] > 1,
    ),
    Rule(
        software=frozenset({"accelerate", "hf-trainer", "lightning", "fsdp2"}),
        text="recomputation of FSDP is that of whole blocks",
        broken=lambda v: v["recompute_every"] > 1,
    ),
    Rule(
        software=frozenset({"accelerate", "hf-trainer"}),
        text="the optimiser goes to the host with sharded states: ZeRO-1 by DeepSpeed, ZeRO-2 and ZeRO-3 by FSDP",
        broken=lambda v: v["offload.optimizer"] and v["zero"] == 0,
    ),
    Rule(
        software=frozenset({"lightning"}),
        text="tensor ranks are with ZeRO-3 (ModelParallelStrategy)",
        broken=lambda v: v["tp"] > 1 and v["zero"] != 3,
    ),
    Rule(
        software=frozenset({"lightning"}),
        text="the optimiser goes to the host with sharded states, without tensor ranks",
        broken=lambda v: v["offload.optimizer"] and (v["zero"] == 0 or v["tp"] > 1),
    ),
    Rule(
        software=frozenset({"llm-foundry"}),
        text="MPT has neither experts (without MegaBlocks) nor latent attention",
        broken=lambda v: bool(v.get("model.experts.experts") or v.get("model.latent.kv_lora_rank")),
    ),
    Rule(
        software=frozenset({"llm-foundry"}),
        text="its tensor ranks (tp_config) cut the MLP alone, not attention: no plan with tp",
        broken=lambda v: v["tp"] > 1,
    ),
    Rule(
        software=frozenset({"lightning"}),
        text="tensor ranks shard over all data ranks (ModelParallelStrategy has no replicas)",
        broken=lambda v: v["tp"] > 1 and bool(v["shard"]),
    ),
    Rule(
        software=frozenset({"maxtext"}),
        text="pp has to divide the micro-batches",
        broken=lambda v: v["pp"] > 1 and bool(v["micro_batches"] % v["pp"]),
    ),
    Rule(
        software=frozenset({"maxtext"}),
        text="pp x vpp has to divide the layers",
        broken=_uneven,
    ),
    Rule(
        software=frozenset({"maxtext"}),
        text="the axis of experts is one of its own: ep has to divide the shards (without shards: the replicas)",
        broken=lambda v: v["ep"] > 1 and v.get("shard_outside" if v["zero"] else "replicate_outside") is None,
    ),
    Rule(
        software=frozenset({"maxtext"}),
        text="ZeRO-1 is over all data ranks",
        broken=lambda v: v["zero"] == 1 and bool(v["shard"]),
    ),
)


def check_rules(software: Software, values: Values) -> None:
    """Refuse a plan that breaks a rule of the software.

    Raises:
        PlanError: the message has the rule.
    """
    for rule in RULES:
        if (not rule.software or software.name in rule.software) and rule.broken(values):
            raise PlanError(f"{software.title} cannot run this plan: {rule.text}", hint=_plan(values))


def check_degrees(software: Software, lost: list[str], values: Values) -> None:
    """Refuse a degree that the software has no option for.

    Raises:
        PlanError: the software has no option for it.
    """
    for concept in lost:
        if concept == "lora.rank":  # most have adapters, in files that are not written
            raise PlanError(f"steptime writes no adapters for {software.title} yet: {concept} {values[concept]}")
        if concept in DEGREES:
            raise PlanError(
                f"{software.title} has no {DEGREES[concept]}: {concept} {values[concept]}", hint=_plan(values)
            )


def _plan(values: Values) -> str:
    names = ("dp", "tp", "cp", "pp", "vpp", "ep", "etp", "zero", "shard", "micro_batch")
    unsaid = {"zero": None, "dp": None, "shard": 0}
    given = (f"{name} {values[name]}" for name in names if values.get(name) not in (None, unsaid.get(name, 1)))
    return f"the plan has {', '.join(given)}"
