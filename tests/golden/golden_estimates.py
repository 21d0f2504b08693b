"""The golden estimates: every model, cluster and run of the tables below, through the Python interface."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import golden_commands
from golden_compare import rounded

HERE = Path(__file__).parent

MODELS = (
    "gpt2-xl", "gpt3-175b", "gpt3_1T", "llama2-7b", "llama3.1-70b", "gemma2-9b", "qwen3-8b", "falcon-7b", "vit-l16",
)  # fmt: skip
CLUSTERS = ("dgx-a100", "dgx-h100", "gb200-nvl72")

#: Devices, and arguments of an estimate; every model runs each of them on every cluster.
RUNS: tuple[tuple[int, dict[str, Any]], ...] = (
    (64, {}),
    (64, {"plan": {"zero": 0, "micro_batch": 2}}),
    (64, {"plan": {"zero": 3, "recompute": "full"}}),
    (64, {"plan": {"tp": 2, "zero": 2}}),
    (64, {"plan": {"tp": 4, "pp": 2, "micro_batch": 2}}),
    (64, {"plan": {"tp": 8, "pp": 8, "recompute": "full"}, "seq": 1024}),
    (64, {"plan": {"tp": 4, "pp": 4, "vpp": 2}}),
    (64, {"plan": {"tp": 4, "pp": 5, "dp": 3}, "gpus": 60}),
    (64, {"plan": {"tp": 8, "pp": 4, "overlap": "dp,pp"}}),
    (64, {"plan": {"tp": 8, "pp": 2, "overlap": "none"}}),
    (64, {"plan": {"tp": 8, "pp": 4, "placement": {"tp": 2, "pp": 2, "dp": 2}}}),
    (64, {"plan": {"tp": 4, "attention": "unfused", "recompute": "attention"}}),
    (64, {"plan": {"tp": 8, "attention": "unfused", "pp": 4}, "seq": 512}),
    (64, {"plan": {"tp": 4, "cp": 4, "pp": 2}}),
    (1024, {"plan": {"tp": 8, "cp": 8, "pp": 2}, "seq": 32768}),
    (1024, {"plan": {"tp": 4, "tp2": 4, "panels": 8, "pp": 2}}),
    (1024, {"plan": {"tp": 8, "tp2": 2, "panels": 16, "pp": 8, "micro_batch": 2}}),
    (1024, {"plan": {"tp": 8, "pp": 8}, "optimizer": "adam8bit"}),
    (1024, {"plan": {"tp": 2, "pp": 4}, "dtype": "fp32", "optimizer": "sgd"}),
)  # fmt: skip
#: Models with experts, latent attention or a window; adapters, narrow formats and recomputed parts.
WHOLE_STEP_RUNS: tuple[tuple[str, str, int, dict[str, Any]], ...] = (
    ("mixtral-8x7b", "dgx-h100", 64, {}),
    ("mixtral-8x7b", "dgx-h100", 64, {"plan": {"ep": 8}}),
    ("mixtral-8x7b", "dgx-h100", 64, {"plan": {"tp": 2, "ep": 4, "etp": 2, "pp": 2}}),
    ("mixtral-8x7b", "dgx-h100", 64, {"plan": {"ep": 8, "expert_imbalance": 1.3, "recompute": "experts"}}),
    ("mixtral-8x7b", "dgx-h100", 64, {"plan": {"ep": 8, "expert_capacity": 1.25, "zero": 3}}),
    (
        "mixtral-8x22b",
        "dgx-h100",
        1024,
        {"plan": {"tp": 4, "ep": 8, "cp": 2, "pp": 4, "context": "ring"}, "seq": 16384},
    ),
    ("qwen3-30b-a3b", "dgx-a100", 64, {"plan": {"ep": 8, "recompute": "norm+activation"}}),
    ("qwen3-235b-a22b", "dgx-h100", 1024, {"plan": {"tp": 4, "ep": 32, "pp": 8, "vpp": 2}}),
    ("gpt-oss-20b", "dgx-h100", 64, {"plan": {"ep": 8}}),
    ("deepseek-v2-lite", "dgx-h100", 64, {"plan": {"ep": 8}}),
    ("deepseek-v2-lite", "dgx-a100", 64, {"plan": {"tp": 2, "cp": 2, "ep": 16, "context": "ulysses"}}),
    ("deepseek-v3", "dgx-h100", 1024, {"plan": {"pp": 16, "ep": 64, "recompute": "norm+up_projection"}, "seq": 4096}),
    ("deepseek-v3", "gb200-nvl72", 1024, {"plan": {"pp": 8, "ep": 64}, "seq": 4096, "dtype": "mxfp8"}),
    ("llama2-7b", "dgx-h100", 64, {"lora": {"rank": 16}}),
    ("llama2-70b", "dgx-h100", 64, {"lora": {"rank": 16, "targets": "attention"}, "plan": {"zero": 3}}),
    ("llama2-70b", "dgx-a100", 64, {"lora": {"rank": 64, "qlora": True}, "plan": {"recompute": "full"}}),
    ("llama3.1-70b", "dgx-h100", 64, {"dtype": "fp8", "plan": {"tp": 4, "pp": 2}}),
    ("llama3.1-70b", "dgx-h100", 64, {"dtype": "fp8-te", "plan": {"tp": 4, "pp": 2}}),
    ("llama3.1-70b", "gb200-nvl72", 64, {"dtype": "mxfp8", "plan": {"tp": 4, "pp": 2}}),
    ("llama3.1-70b", "gb200-nvl72", 64, {"dtype": "nvfp4", "plan": {"tp": 4, "pp": 2}}),
    ("llama3.1-70b", "dgx-h100", 64, {"plan": {"tp": 8, "sp": "off", "gradient_dtype": "fp32"}}),
    ("llama3.1-70b", "dgx-h100", 64, {"plan": {"zero": 3, "shard": 8, "recompute": "full", "recompute_every": 2}}),
    ("llama3.1-70b", "dgx-h100", 64, {"plan": {"tp": 8, "recompute": "attention"}}),
)
#: Fitted frameworks: these move with every fit of them, all others are under the ideal one.
FRAMEWORK_RUNS: tuple[tuple[str, str, int, dict[str, Any]], ...] = (
    *((model, cluster, 64, {"framework": "generic", "plan": {"tp": 4, "pp": 2}})
      for model in ("llama3.1-70b", "gpt3-175b") for cluster in CLUSTERS),
    *(("llama3.1-70b", "dgx-h100", 64, {"framework": name, "plan": {"tp": 4, "pp": 2, "cp": 2}})
      for name in ("megatron-core", "megatron-2021", "torchtitan", "deepspeed")),
    ("deepseek-v3", "dgx-h100", 1024, {"framework": "megatron-core", "plan": {"pp": 16, "ep": 64}, "seq": 4096}),
    ("deepseek-v3", "dgx-h100", 1024,
     {"framework": "megatron-core", "plan": {"pp": 16, "vpp": 2, "ep": 64}, "seq": 4096, "dtype": "fp8-te"}),
    ("llama3.1-70b", "gb200-nvl72", 64, {"framework": "megatron-core", "plan": {"tp": 4, "pp": 2}, "dtype": "mxfp8"}),
    ("llama2-70b", "dgx-a100", 64, {"framework": "torchtune", "lora": {"rank": 16}, "plan": {"zero": 3}}),
)  # fmt: skip
PUBLISHED_RUNS: tuple[tuple[int, dict[str, Any]], ...] = (
    (512, {"plan": {"tp": 8, "pp": 8}}),
    (512, {"plan": {"tp": 8, "pp": 16, "micro_batch": 2, "placement": {"tp": 4, "pp": 2}}}),
    (512, {"plan": {"tp": 4, "pp": 4, "attention": "unfused", "recompute": "attention"}}),
    (512, {"plan": {"tp": 4, "cp": 4, "pp": 8, "placement": {"tp": 4, "cp": 2}}}),
    (512, {"plan": {"tp": 4, "tp2": 4, "panels": 8, "pp": 8, "placement": {"tp": 2, "tp2": 4}}}),
    (512, {"plan": {"tp": 4, "tp2": 4, "panels": 16, "pp": 4, "attention": "summa"}}),
)


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """Key of each estimate, and the arguments of ``steptime.api.estimate``."""
    for cluster in CLUSTERS:
        for model in MODELS:
            for gpus, run in RUNS:
                yield _case(model, cluster, gpus, run)
    for model, cluster, gpus, run in (*WHOLE_STEP_RUNS, *FRAMEWORK_RUNS):
        yield _case(model, cluster, gpus, run)
    for model in ("gpt3", "gpt3_1T", "vit_era5"):
        for gpus, run in PUBLISHED_RUNS:
            yield _case(model, "published-b200-nvs8", gpus, run | {"mode": "published"})


def _case(model: str, cluster: str, gpus: int, run: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    arguments = {"gpus": gpus, "global_batch": 1024, **run}
    choices = {**arguments, **arguments.get("plan", {})}
    choices.pop("plan", None)
    key = " ".join([model, cluster, *(f"{name}={_text(value)}" for name, value in choices.items())])
    path = str(HERE / "clusters" / f"{cluster}.toml")
    return key, {"model": model, "cluster": path, "framework": "ideal", **arguments}


def _text(value: Any) -> str:
    return ",".join(f"{k}:{v}" for k, v in value.items()) if isinstance(value, Mapping) else str(value)


def record(e: Any) -> dict[str, Any]:
    """What is kept of an estimate, flat."""
    low, high = e.step_time_bracket_s
    band = dict(zip(("band_low_s", "band_high_s"), e.step_time_band_s or (), strict=False))
    numbers = {
        "step_time_s": e.step_time_s, "bracket_low_s": low, "bracket_high_s": high, **band, "mfu": e.mfu, "hfu": e.hfu,
        "peak_memory_bytes": e.peak_memory_bytes,
        **{f"time/{name}": value for name, value in e.time.rollup(1).items()},
    }  # fmt: skip
    return rounded(numbers) | {"reasons": ",".join(e.reasons)}


def evaluated() -> dict[str, dict[str, Any]]:
    """All estimates as they are now."""
    return {key: record(golden_commands.estimate(**arguments)) for key, arguments in cases()}
