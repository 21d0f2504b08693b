"""Jobs that every command is asked about: dense models, experts, adapters, on one device to 16,384."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job and the degrees of its plan, in the words of the command line and of a RUN.toml."""

    model: str
    cluster: str
    gpus: int
    global_batch: int
    job: dict[str, Any] = field(default_factory=dict)
    """Keys beside ``model``, ``cluster``, ``gpus`` and ``global_batch``: seq, dtype, framework, optimizer."""
    plan: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What tests and tables call it."""
        parts = [f"{key}{value}" for key, value in self.plan.items() if key not in ("micro_batch", "recompute")]
        words = [str(self.job[key]) for key in ("framework", "dtype") if key in self.job]
        return " ".join([self.model, f"{self.gpus} {self.cluster}", *words, *parts, *(["lora"] if self.lora else [])])

    @property
    def options(self) -> list[str]:
        """The model and the options of the command line."""
        given: dict[str, Any] = {"cluster": self.cluster, "gpus": self.gpus, "global_batch": self.global_batch}
        given |= self.job | self.plan
        given |= {} if not self.lora else {"lora_rank": self.lora["rank"]}
        words = [self.model]
        for key, value in given.items():
            text = ("on" if value else "off") if isinstance(value, bool) else value
            text = ",".join(value) if isinstance(value, list) else text
            words += [f"--{key.replace('_', '-')}", str(text)]
        return words + (["--qlora"] if self.lora.get("qlora") else [])

    @property
    def run(self) -> dict[str, Any]:
        """The tables of a RUN.toml."""
        top = {"model": self.model, "cluster": self.cluster, "gpus": self.gpus, "global_batch": self.global_batch}
        tables = {"lora": self.lora} if self.lora else {}
        return {**top, **self.job, **tables, "plan": self.plan}

    def run_settings(self) -> dict[str, Any]:
        """Keyword arguments of the API, but for model and cluster."""
        return {key: value for key, value in self.run.items() if key not in ("model", "cluster")}


def _job(model: str, cluster: str, gpus: int, batch: int, **plan: Any) -> Job:
    job = {key: plan.pop(key) for key in ("seq", "dtype", "framework", "optimizer") if key in plan}
    lora = {"rank": plan.pop("lora_rank")} if "lora_rank" in plan else {}
    lora |= {"qlora": plan.pop("qlora")} if "qlora" in plan else {}
    return Job(model=model, cluster=cluster, gpus=gpus, global_batch=batch, job=job, plan=plan, lora=lora)


FULL: Final = {"recompute": "full"}
_ONE: Final = (
    _job("gpt2", "h100-sxm", 1, 8, micro_batch=8),
    _job("gpt2", "rtx-4090", 1, 16, micro_batch=4, framework="ideal"),
    _job("llama3.2-1b", "h100-sxm", 1, 8, micro_batch=1, seq=2048, framework="transformers"),
    _job("qwen3-8b", "rtx-4090", 1, 16, micro_batch=1, seq=2048, lora_rank=16, qlora=True, framework="unsloth", **FULL),
    _job("llama3-8b", "rtx-4090", 1, 8, micro_batch=1, seq=2048, lora_rank=8, framework="torchtune", **FULL),
    _job("llama3-8b", "h100-sxm", 1, 8, micro_batch=1, seq=4096, lora_rank=16, **FULL),
)
_NODE: Final = (
    _job("llama3-8b", "dgx-h100", 8, 64, micro_batch=1, zero=3, **FULL),
    _job("llama3-8b", "dgx-h100", 8, 64, tp=4, micro_batch=1, recompute="selective"),
    _job("llama3-8b", "dgx-h100", 8, 64, tp=2, pp=2, micro_batch=1, framework="megatron-core", **FULL),
    _job("llama3-8b", "dgx-h100", 8, 32, zero=3, micro_batch=1, framework="torchtitan", **FULL),
    _job("llama2-7b", "dgx-a100-80gb", 8, 64, zero=2, micro_batch=2, framework="deepspeed", **FULL),
    _job("llama2-7b", "dgx-a100-80gb", 8, 64, zero=3, micro_batch=1, framework="deepspeed", **FULL),
    _job("gpt2", "dgx-h100", 8, 64, micro_batch=8),
    _job("gpt2", "dgx-h100", 8, 64, micro_batch=8, framework="megatron-core"),
    _job("llama3-8b", "aws-g5", 8, 64, zero=3, micro_batch=1, seq=2048, lora_rank=16, framework="transformers", **FULL),
    _job("mixtral-8x7b", "dgx-h100", 8, 64, ep=8, micro_batch=1, zero=1, seq=2048, **FULL),
)
_CLUSTER: Final = (
    _job("llama3-8b", "dgx-h100", 64, 256, tp=4, pp=2, micro_batch=1, zero=1, **FULL),
    _job(
        "llama3-8b", "dgx-h100", 64, 256, tp=2, micro_batch=1, zero=1, dtype="fp8-te", framework="megatron-core", **FULL
    ),
    _job(
        "llama3-8b", "gb200-nvl72", 64, 256, tp=4, pp=2, micro_batch=1, framework="megatron-core", recompute="selective"
    ),
    _job("llama3-8b", "dgx-h100", 32, 64, cp=4, tp=2, micro_batch=1, seq=32768, **FULL),
    _job("llama3-70b", "dgx-h100", 64, 128, tp=8, pp=4, micro_batch=1, **FULL),
    _job("llama3-70b", "dgx-h100", 64, 128, tp=8, pp=4, micro_batch=1, framework="megatron-core", **FULL),
    _job("llama3-70b", "dgx-h100", 128, 256, zero=3, micro_batch=1, framework="torchtitan", **FULL),
    _job("llama3-70b", "dgx-h100", 128, 512, tp=8, pp=4, vpp=5, micro_batch=1, schedule="interleaved", **FULL),
    _job("gpt3-175b", "dgx-h100", 512, 512, tp=8, pp=8, micro_batch=1, **FULL),
    _job("gpt3-175b", "dgx-h100", 512, 512, tp=8, pp=8, micro_batch=1, schedule="gpipe", **FULL),
    _job("gpt3-175b", "dgx-h100", 512, 512, tp=8, pp=8, micro_batch=1, schedule="zb-h1"),
    _job("gpt3-175b", "dgx-h100", 512, 512, tp=8, pp=8, micro_batch=1, schedule="zb-h2"),
    _job("gpt3-175b", "dgx-h100", 512, 512, tp=8, pp=8, micro_batch=1, schedule="chimera"),
    _job("gpt3-175b", "dgx-h100", 512, 512, tp=8, pp=8, micro_batch=1, schedule="terapipe"),
    _job("gpt3-175b", "dgx-h100", 512, 512, tp=8, pp=8, micro_batch=1, schedule="pipedream"),
    _job("gpt3-175b", "dgx-h100", 512, 512, tp=8, pp=8, micro_batch=1, schedule="pipedream-2bw"),
    _job("gpt3-175b", "published-a100-nvs4", 512, 512, tp=8, pp=8, micro_batch=1),
    _job("gpt3-175b", "dgx-a100-80gb", 1024, 1536, tp=8, pp=8, micro_batch=1, framework="megatron-core", **FULL),
    _job("mixtral-8x7b", "dgx-h100", 64, 256, ep=8, pp=2, micro_batch=1, framework="megatron-core", **FULL),
    _job("mixtral-8x7b", "dgx-h100", 64, 256, ep=8, tp=2, micro_batch=1, **FULL),
    _job("qwen3-30b-a3b", "dgx-h100", 64, 256, ep=8, micro_batch=1, seq=4096, **FULL),
    _job("deepseek-v3", "dgx-h100", 256, 1024, ep=8, pp=16, micro_batch=1, **FULL),
    _job(
        "qwen3-235b-a22b",
        "gb200-nvl72",
        256,
        2048,
        ep=32,
        pp=4,
        micro_batch=1,
        seq=4096,
        framework="megatron-core",
        **FULL,
    ),
    _job("llama3.1-405b", "dgx-h100", 1008, 1008, tp=8, pp=9, micro_batch=1, **FULL),
    _job("llama3.1-405b", "dgx-h100", 16384, 2048, tp=8, pp=16, micro_batch=1, **FULL),
    _job("llama3-8b", "published-b200-nvs8", 16384, 16384, tp=8, micro_batch=1, **FULL),
)
JOBS: Final = (*_ONE, *_NODE, *_CLUSTER)
