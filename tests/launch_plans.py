"""Random plans that a training software can run, for tests of launch files and for the benchmark of all of them."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from steptime.errors import UserError
from steptime.formats.run_spec import RunSpec
from steptime.launch import Launch, launch_of, software_called
from steptime.launch.write import Exported, export_launch

MODELS = ("llama3-8b", "gpt3-175b", "mixtral-8x7b", "qwen2.5-7b", "deepseek-v2", "llama2-13b")
CLUSTERS = (("dgx-h100", 8), ("gb200-nvl72", 72), ("dgx-a100-80gb", 8), (None, 8))
OPS = "norm+activation+outputs"
RECOMPUTE = ("none", "none", "full", "full", "attention", "norm+mlp", "mlp", OPS, "activation", "up_projection")
#: Choices that a run makes now and then.
OPTIONAL: dict[str, tuple[Any, ...]] = {
    "sp": ("on", "off"),
    "context": ("ring", "all_gather", "ulysses"),
    "gradient_dtype": ("fp32", "bf16"),
    "overlap": ("dp", "none", "dp,tp", "dp,pp"),
    "offload": ("optimizer", "activations"),
    "attention": ("unfused",),
    "graphs": ("step",),
    "expert_imbalance": (1.5,),
    "document_length": (512.0,),
}
DTYPES = ("bf16", "bf16", "bf16", "fp16", "fp32", "fp8-te", "fp8-tensorwise", "fp8-blockwise", "mxfp8", "nvfp4")
SCHEDULES = (None, None, None, "gpipe", "zb-v", "dualpipev", "looped-bfs")
FRAMEWORKS = (None, "megatron-core", "torchtitan", "deepspeed", "maxtext", "generic")


def random_run(random: Random) -> RunSpec:
    """A run with random degrees and choices; it need not be legal."""
    pick = random.choice
    degrees = {name: 2 ** random.choice((0, 0, 0, 1, 2, 3)) for name in ("tp", "cp", "pp")}
    degrees["dp"] = 2 ** random.randint(0, 6)
    plan: dict[str, Any] = {**degrees, "micro_batch": pick((1, 1, 2, 4)), "zero": random.randint(0, 3)}
    plan["recompute"] = pick(RECOMPUTE)
    if plan["recompute"] == "full" and random.random() < 0.3:
        plan["recompute_every"] = pick((2, 4))
    if degrees["pp"] > 1:
        plan["vpp"] = pick((1, 1, 2))
        schedule = pick(SCHEDULES)
        plan |= {} if schedule is None else {"schedule": schedule}
    if random.random() < 0.4:
        plan["ep"] = pick((2, 4, 8))
        plan["etp"] = pick((1, 1, degrees["tp"]))
        plan["dispatcher"] = pick(("all_to_all", "deepep", "hybridep"))
    if random.random() < 0.2 and degrees["dp"] >= 4:
        plan["shard"] = degrees["dp"] // 2
    plan |= {name: pick(values) for name, values in OPTIONAL.items() if random.random() < 0.15}
    if random.random() < 0.15:
        plan["placement"] = {"tp": degrees["tp"]}
    devices = degrees["tp"] * degrees["cp"] * degrees["pp"] * degrees["dp"]
    cluster, _ = pick(CLUSTERS)
    settings: dict[str, Any] = {
        "gpus": devices,
        "global_batch": degrees["dp"] * plan["micro_batch"] * pick((1, 2, 4, 8, 16)),
        "seq": pick((2048, 4096, 8192)),
        "dtype": pick(DTYPES),
        "optimizer": pick(("adam", "adam", "adam", "sgd", "momentum", "adam8bit")),
    }
    framework = pick(FRAMEWORKS)
    settings |= {} if framework is None else {"framework": framework}
    return RunSpec(model=pick(MODELS), cluster=cluster, settings=settings, plan=plan)


def legal_launches(name: str, seed: int = 0) -> Iterator[tuple[RunSpec, Launch, Exported]]:
    """Random runs that a software can run, without end; most of the random ones it cannot."""
    random, software = Random(f"{name} {seed}"), software_called(name)
    while True:
        run = _nearer(random_run(random), name, random)
        try:
            launch = launch_of(run)
            yield run, launch, export_launch(launch, software)
        except UserError:
            continue


#: Software -> what it never has: the random run is taken without it nine times out of ten.
_WITHOUT = {
    "deepspeed": ("cp", "vpp", "shard", "etp"),
    "accelerate": ("pp", "vpp", "ep", "etp"),
    "fsdp2": ("pp", "vpp", "ep", "etp", "cp"),
    "hf-trainer": ("tp", "cp", "pp", "vpp", "ep", "etp", "shard"),
    "lightning": ("cp", "pp", "vpp", "ep", "etp"),
    "llm-foundry": ("tp", "cp", "pp", "vpp", "ep", "etp"),
}


def _nearer(run: RunSpec, name: str, random: Random) -> RunSpec:
    """The run with what the software has in place of what it has not; now and then as it is."""
    if random.random() < 0.1:
        return run
    left_out = {*_WITHOUT.get(name, ()), *({"schedule"} if "pp" in _WITHOUT.get(name, ()) else ())}
    left_out |= {"dispatcher"} if "ep" in left_out else set()
    plan, settings = {key: value for key, value in run.plan.items() if key not in left_out}, dict(run.settings)
    has = {row.concept: [c.value for c in row.cases if c.written] for row in software_called(name).choices}
    for table in (plan, settings):
        for key in set(table) & has.keys():
            if table[key] not in has[key]:
                table[key] = random.choice(has[key])
    if plan.get("pp", 1) > 1 and plan["zero"] > 1:
        plan["zero"] = random.randint(0, 1)
    if plan["recompute"] != "full":
        plan.pop("recompute_every", None)
    settings["gpus"] = plan.get("tp", 1) * plan.get("cp", 1) * plan.get("pp", 1) * plan["dp"]
    return RunSpec(model=run.model, cluster=run.cluster, settings=settings, plan=plan)
