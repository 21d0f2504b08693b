"""Inputs on which users met a wrong answer: the command, the right value, and what is said now.

``scripts/cases`` prints the table. A row is *met* where its interval, the 90 % band of a time or the number itself,
meets the interval of the right value. A row that is not met says by how much and why.
"""

# ruff: noqa: E501 commands as a user types them

from __future__ import annotations

import math
import sys
import tempfile
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cli_runner import CliRunner
from consistency.answers import asked
from steptime.cli.main import main as steptime

DATA: Final = Path(__file__).resolve().parents[1] / "data"
GIB: Final = 2.0**30
INF: Final = math.inf

Interval = tuple[float, float]
Reader = Callable[[Sequence[Any]], Interval | object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One question with its right answer."""

    name: str
    commands: tuple[str, ...]
    """Commands as a user types them; ``{cases}`` and ``{launch}`` are folders of inputs, ``{out}`` is scratch."""
    reader: Reader
    """Their JSON -> what is said: an interval, or anything that is compared as it is."""
    right: Interval | object
    unit: str = ""
    source: str
    missed: str = ""
    """Why the right value is not met, and by how much; empty: it is met."""

    @property
    def said(self) -> Interval | object:
        """What the commands say now."""
        with tempfile.TemporaryDirectory() as out:
            folders = {"cases": DATA / "cases", "launch": DATA / "launch", "models": DATA / "huggingface", "out": out}
            return self.reader([answer(command.format(**folders).split()) for command in self.commands])

    def meets(self, said: Interval | object) -> bool:
        """Whether that is the right value."""
        if not isinstance(self.right, tuple) or not isinstance(said, tuple):
            return said == self.right
        return bool(said[0] <= self.right[1] and self.right[0] <= said[1])


def within(value: float, share: float) -> Interval:
    """A right value with its tolerance."""
    return value * (1 - share), value * (1 + share)


def answer(words: Sequence[str]) -> Any:
    """The JSON of a command; of an import the tables that it wrote; an error message as text."""
    if words[0] != "import":
        return asked(*words)
    done = CliRunner().invoke(steptime, [*words])
    if done.exit_code:
        return " ".join(done.output.split())
    run = Path(words[words.index("-o") + 1])
    model = run.with_suffix(".model.toml")
    tables = {"model": tomllib.loads(model.read_text())} if model.exists() else {}
    return {**tables, "run": tomllib.loads(run.read_text()), "said": " ".join((done.output + run.read_text()).split())}


def time(found: Sequence[Any]) -> Interval:
    """The 90 % band of the step time (s)."""
    low, high = found[-1]["step_time_band_s"]
    return low, high


def memory(found: Sequence[Any]) -> Interval:
    """The peak memory (GiB)."""
    return (found[-1]["peak_memory_bytes"] / GIB,) * 2


def read(*names: str) -> Reader:
    """Entries of the run that an import wrote; ``plan.tp`` is one of its plan."""

    def of(found: Sequence[Any]) -> object:
        out = []
        for name in names:
            table: Any = found[0]["run"]
            for part in name.split("."):
                table = table.get(part) if isinstance(table, dict) else None
            out.append(table)
        return out

    return of


def number(path: str) -> Reader:
    """One number of the last answer; the answer itself where it is an error."""

    def of(found: Sequence[Any]) -> Interval | object:
        value: Any = found[-1]
        for part in path.split("."):
            if isinstance(value, str):
                return value
            value = value[int(part)] if part.isdigit() else value[part]
        return (float(value),) * 2

    return of


def parameters(found: Sequence[Any]) -> Interval | object:
    """All parameters of a model; the message where it is refused."""
    return found[-1] if isinstance(found[-1], str) else (float(sum(found[-1]["model"]["parameters"].values())),) * 2


def phase(name: str) -> Reader:
    """Time of a phase of one step of reinforcement learning (s)."""
    return lambda found: (next(p["time_s"] for p in found[0]["phases"] if p["name"] == name),) * 2


def added(found: Sequence[Any]) -> Interval:
    """How much longer the last takes than the first, as a share."""
    return (found[-1]["step_time_s"] / found[0]["step_time_s"] - 1.0,) * 2


def more_memory(found: Sequence[Any]) -> Interval:
    """How much more memory the last needs than the first (GiB)."""
    return ((found[-1]["peak_memory_bytes"] - found[0]["peak_memory_bytes"]) / GIB,) * 2


def simulated(found: Sequence[Any]) -> Interval:
    """Peak of the fullest simulated rank over that of the estimate."""
    return (max(found[2]["peak_memory_bytes"]) / found[1]["peak_memory_bytes"],) * 2


def exposed(found: Sequence[Any]) -> object:
    """Rows of traffic of a trace (s)."""
    rows = found[0]["comparison"]
    return {row["name"]: round(row["measured"], 6) for row in rows if row["name"].endswith("_comm")}


MEGATRON: Final = "--cluster dgx-h100 --seq 2048 --framework megatron-core --micro-batch 1"
MXFP8: Final = "--seq 4096 --dtype mxfp8 --framework megatron-core --etp 1 --graphs step --dispatcher hybridep"
GPT6B: Final = (
    "estimate {cases}/gpt6b.toml --cluster dgx-a100-80gb --gpus 8 --global-batch 16 --micro-batch 1 --seq 16384"
    " --framework megatron-deepspeed --cp 4 --context ulysses --zero"
)
MOONLIGHT: Final = (
    "estimate {cases}/moonlight.json --cluster dgx-h100 --gpus 8 --seq 4096 --framework megatron-core --global-batch 4"
    " --micro-batch 1 --tp 2 --ep 8 --etp 1 --zero 1 --gradient-dtype bf16"
)
GRPO: Final = (
    "rl grpo llama3.1-8b --cluster dgx-h100 --gpus 8 --prompts 64 --samples 32 --prompt-len 200 --response-len 795"
    " --micro-batch 4 --tp 2 --framework megatron-core --reference same --reward rule"
)
HOST: Final = "host time of small steps is not modelled: "
BRIDGE: Final = "NVIDIA-NeMo/Megatron-Bridge examples/model_verification_cards"
CASES: Final = (
    Case(
        name="active-parameters-mtp", commands=("models {models}/deepseek-v3.json",),
        reader=number("model.active_parameters"), right=within(38.2e9, 0.005), unit="parameters",
        source="deepseek-ai/DeepSeek-V3 config.json: 8 + 1 of 257 experts of the MTP layer",
    ),
    Case(
        name="compile-not-modelled",
        commands=(
            "estimate {cases}/nanochat.toml --cluster dgx-a100-80gb --gpus 8 --global-batch 256 --micro-batch 32"
            " --seq 2048 --framework ddp --compile",
        ),
        reader=time, right=(0.989, 0.997), unit="s", source="karpathy/nanochat PR 147",
    ),
    Case(
        name="deepspeed-zero3-more-memory, no recomputation", commands=(GPT6B + " 2", GPT6B + " 3"),
        reader=more_memory, right=(0.0, INF), unit="GiB", source="deepspeedai/DeepSpeed 5305",
        missed="buffers that DeepSpeed gathers into are not modelled: ZeRO-3 7.8 GiB below ZeRO-2, measured 13 GB above",
    ),
    Case(
        name="deepspeed-zero3-more-memory, recomputation",
        commands=(GPT6B + " 2 --recompute full", GPT6B + " 3 --recompute full"),
        reader=more_memory, right=(0.0, INF), unit="GiB", source="deepspeedai/DeepSpeed 5305",
        missed="buffers that DeepSpeed gathers into are not modelled: ZeRO-3 7.8 GiB below ZeRO-2, measured 9 GB above",
    ),
    Case(
        name="doctor-all-to-all-as-pipeline", commands=("doctor {cases}/all_to_all.json",), reader=exposed,
        right={"unassigned_comm": 0.004}, unit="s", source="facebookresearch/HolisticTraceAnalysis tests/data",
    ),
    Case(
        name="doctor-maxtext-batch",
        commands=("doctor {cases}/maxtext.log --model gpt3-175b --cluster dgx-h100 --gpus 128",),
        reader=lambda found: "from the run itself: global_batch 1024" in found[0]["warnings"], right=True,
        source="MaxText log of gpt3-175b: tokens/s/device times seconds",
    ),
    Case(
        name="estimate-simulate-memory-differ, one number",
        commands=(
            "import {cases}/gpt7b.sh --cluster dgx-h100 -o {out}/run.toml", "estimate {out}/run.toml",
            "simulate {out}/run.toml",
        ),
        reader=simulated, right=within(1.0, 0.005), source="simulate against estimate",
    ),
    Case(
        name="estimate-simulate-memory-differ, measured",
        commands=("import {cases}/gpt7b.sh --cluster dgx-h100 -o {out}/run.toml", "estimate {out}/run.toml"),
        reader=memory, right=within(56.55, 0.06), unit="GiB",
        source="NVIDIA/Megatron-LM gpt3_7b_tp1_pp4_memory_speed, allocator peak of the last rank",
    ),
    Case(
        name="finetune-host-time, 8B LoRA",
        commands=(f"estimate qwen3-8b {MEGATRON} --gpus 1 --global-batch 32 --lora-rank 8 --lora-targets attention",),
        reader=time, right=(7.775, 7.775), unit="s", source=f"{BRIDGE}/qwen3-8b",
        missed=HOST + "4.46 s, 43 % too fast",
    ),
    Case(
        name="finetune-host-time, 8B tp 4",
        commands=(f"estimate qwen3-8b {MEGATRON} --gpus 4 --global-batch 32 --tp 4 --sp off --overlap none",),
        reader=time, right=(7.424, 7.424), unit="s", source=f"{BRIDGE}/qwen3-8b",
        missed=HOST + "2.46 s, 67 % too fast",
    ),
    Case(
        name="finetune-host-time, 4B LoRA",
        commands=(
            f"estimate {{cases}}/nemotron-4b.json {MEGATRON} --gpus 8 --global-batch 32 --lora-rank 8"
            " --lora-targets attention --overlap none",
        ),
        reader=time, right=(0.382, 0.382), unit="s", source=f"{BRIDGE}/nemotron-3-nano-4b",
        missed=HOST + "0.272 s, 29 % too fast",
    ),
    Case(
        name="finetune-host-time, 4B full",
        commands=(
            f"estimate {{cases}}/nemotron-4b.json {MEGATRON} --gpus 8 --global-batch 32 --zero 1 --overlap none",
        ),
        reader=time, right=(0.627, 0.627), unit="s", source=f"{BRIDGE}/nemotron-3-nano-4b",
        missed=HOST + "0.455 s, 27 % too fast",
    ),
    Case(
        name="finetune-host-time, 20B LoRA",
        commands=(f"estimate gpt-oss-20b {MEGATRON} --gpus 1 --global-batch 128 --lora-rank 32",),
        reader=time, right=(50.69, 50.69), unit="s", source=f"{BRIDGE}/gpt-oss-20b",
        missed=HOST + "27 s, 47 % too fast",
    ),
    Case(
        name="fp8-b200-exact, 235B on gb200",
        commands=(
            f"estimate qwen3-235b-a22b --cluster gb200-nvl72 --gpus 256 --global-batch 8192 {MXFP8} --pp 8 --vpp 3"
            " --ep 32 --overlap dp,pp,ep --micro-batch 1",
        ),
        reader=time, right=(17.905, 17.905), unit="s", source=f"{BRIDGE}/qwen3-235b-a22b",
    ),
    Case(
        name="fp8-b200-exact, 235B on gb300",
        commands=(
            f"estimate qwen3-235b-a22b --cluster gb300-nvl72 --gpus 256 --global-batch 8192 {MXFP8} --pp 4 --vpp 12"
            " --ep 32 --overlap dp,pp,ep --micro-batch 2",
        ),
        reader=time, right=(14.921, 14.921), unit="s", source=f"{BRIDGE}/qwen3-235b-a22b",
    ),
    Case(
        name="fp8-b200-exact, 120B",
        commands=(
            f"estimate gpt-oss-120b --cluster gb300-nvl72 --gpus 64 --global-batch 1280 {MXFP8} --ep 16 --micro-batch 4",
        ),
        reader=time, right=(2.481, 2.481), unit="s", source=f"{BRIDGE}/gpt-oss-120b",
    ),
    Case(
        name="gb200-dense-too-fast",
        commands=("import {cases}/gpt7b.sh --cluster gb200-nvl72 -o {out}/run.toml", "estimate {out}/run.toml"),
        reader=time, right=(0.786, 0.786), unit="s", source="NVIDIA/Megatron-LM golden_values_dev_dgx_gb200.json",
        missed=HOST + "0.457 s, 42 % too fast (A100 and H100 are inside the band)",
    ),
    Case(
        name="grpo-generation, generation", commands=(GRPO,), reader=phase("generation"), right=(50.0, 64.0), unit="s",
        source="NVIDIA-NeMo/RL 959: 56 to 58 s",
        missed="responses are equally long and the engine has no host time: 13.3 s, 4.3 times too fast; a note says so",
    ),
    Case(
        name="grpo-generation, update", commands=(GRPO,), reader=phase("update"), right=within(27.5, 0.2), unit="s",
        source="NVIDIA-NeMo/RL 959: 27 to 28 s",
    ),
    Case(
        name="import-axolotl", commands=("import {launch}/axolotl.yaml --cluster dgx-h100 -o {out}/run.toml",),
        reader=read("model", "dtype", "lora.rank", "lora.qlora", "plan.micro_batch", "plan.tp", "plan.shard"),
        right=["llama3-8b", "bf16", 16, True, 2, 2, 4], source="axolotl-ai-cloud/axolotl examples",
    ),
    Case(
        name="import-bridge-precision",
        commands=(
            "import {launch}/precision.py --from megatron-bridge --model deepseek-v3 --cluster dgx-h100"
            " -o {out}/run.toml",
        ),
        reader=lambda found: [*read("dtype", "plan.recompute")(found), "dtype is left open" in found[0]["said"]],  # type: ignore[misc]
        right=[None, "up_projection+mlp", True], source="NVIDIA-NeMo/Megatron-Bridge perf_recipes/deepseek",
    ),
    Case(
        name="import-maxtext-fsdp-default",
        commands=("import {launch}/maxtext.yml --model llama3-70b --cluster dgx-h100 -o {out}/run.toml",),
        reader=read("plan.zero"), right=[3], source="AI-Hypercomputer/maxtext base.yml: ici_fsdp_parallelism -1",
    ),
    Case(
        name="import-no-vocab", commands=("import {launch}/tokenizer.sh --cluster dgx-h100 -o {out}/run.toml",),
        reader=lambda found: "vocabulary" in found[0]["said"], right=True,
        source="NVIDIA/Megatron-LM examples/gpt3: the vocabulary is that of a tokenizer",
    ),
    Case(
        name="import-own-moe-layer-freq",
        commands=("import {launch}/experts.sh --cluster dgx-h100 -o {out}/run.toml", "models {out}/run.model.toml"),
        reader=parameters, right=within(16.38e9, 0.003), unit="parameters",
        source="DeepSeekMoE-16B: one dense layer of 28",
    ),
    Case(
        name="import-shell-arithmetic",
        commands=("import {launch}/arithmetic.sh --cluster dgx-h100 -o {out}/run.toml",),
        reader=lambda found: found[0]["model"]["layers"], right=92, source="THUDM/slime scripts/models",
    ),
    Case(
        name="llava-oom-missed",
        commands=(
            "estimate llama2-7b --cluster dgx-a100 --gpus 8 --global-batch 128 --micro-batch 1 --seq 2048 --zero 2"
            " --framework deepspeed --recompute full",
        ),
        reader=number("oom_probability"), right=(0.5, 1.0), source="haotian-liu/LLaVA 655: out of memory",
        missed="30.1 GiB of 40, P(oom) 0.3 %: buckets and fragments of ZeRO-2 under accumulation are not modelled",
    ),
    Case(
        name="lora-trainable-count",
        commands=(
            "estimate llama3.1-70b --cluster dgx-h100 --gpus 8 --global-batch 8 --lora-rank 4 --lora-targets q,v"
            " --zero 3 --recompute full",
        ),
        reader=number("workload.trained_parameters"), right=(8_192_000, 8_192_000), unit="parameters",
        source="tenstorrent/tt-blacksmith 686, print_trainable_parameters of PEFT",
    ),
    Case(
        name="notes-not-counted",
        commands=("plan {cases}/qwen3.5.json --cluster dgx-h100 --gpus 512 --global-batch 512 --seq 4096 --top 1",),
        reader=lambda found: "attn_output_gate" in str(found[0]), right=False, source="Qwen/Qwen3.5-27B",
    ),
    Case(
        name="oom-at-initialisation",
        commands=(
            "estimate llama3-8b --cluster dgx-a100 --gpus 2 --global-batch 16 --micro-batch 2 --zero 2"
            " --offload optimizer --seq 1024 --framework deepspeed --recompute full",
        ),
        reader=lambda found: "before the first step" in str(found[0]), right=True,
        source="ZHZisZZ/dllm 9: a flat copy of the weights, 14.9 GiB more",
    ),
    Case(
        name="param-offload",
        commands=(
            "estimate llama2-70b --cluster rtx3090-8 --gpus 2 --global-batch 8 --micro-batch 1 --seq 512 --zero 3"
            " --qlora --lora-rank 8 --framework axolotl --recompute full --offload parameters",
        ),
        reader=number("oom_probability"), right=(0.0, 0.05), source="axolotl-ai-cloud/axolotl 1428: fits two of 24 GB",
    ),
    Case(
        name="plan-graphs-not-searched",
        commands=(
            "plan qwen3-235b-a22b --cluster gb200-nvl72 --gpus 256 --global-batch 8192 --seq 4096 --dtype mxfp8"
            " --framework megatron-core --top 1",
        ),
        reader=number("plans.0.step_time_s"), right=(0.0, 17.3), unit="s",
        source=f"{BRIDGE}/qwen3-235b-a22b: the published recipe, with graphs, is estimated at 17.30 s",
    ),
    Case(
        name="refused-deepseek-v4", commands=("models {cases}/deepseek-v4.json",), reader=parameters,
        right=within(284.33e9, 0.005), unit="parameters", source="deepseek-ai/DeepSeek-V4-Flash, transformers on meta",
        missed="four residual streams, compressed keys and hashed experts have no operators; the refusal names them",
    ),
    Case(
        name="rl-trl-fused-loss",
        commands=(
            "rl grpo qwen3-0.6b --cluster aws-g5 --gpus 8 --prompts 2 --samples 4 --prompt-len 480"
            " --response-len 20000 --micro-batch 1 --zero 3 --framework trl --reference none --reward rule",
        ),
        reader=lambda found: (found[0]["peak_bytes"] / GIB,) * 2, right=(22.5, INF), unit="GiB",
        source="huggingface/trl 4585: does not fit 24 GB",
    ),
    Case(
        name="small-step-host-time, step", commands=(MOONLIGHT,), reader=time, right=(0.4572, 0.4572), unit="s",
        source="NVIDIA-NeMo/Megatron-Bridge 5570", missed=HOST + "0.300 s, 34 % too fast",
    ),
    Case(
        name="small-step-host-time, norm and activation again",
        commands=(MOONLIGHT, MOONLIGHT + " --recompute norm+activation"), reader=added, right=within(0.1079, 0.3),
        source="NVIDIA-NeMo/Megatron-Bridge 5570", missed=HOST + "recomputation adds 1.0 %, measured 10.8 %",
    ),
    Case(
        name="small-step-host-time, memory", commands=(MOONLIGHT,), reader=memory, right=within(36.6e9 / GIB, 0.2),
        unit="GiB", source="NVIDIA-NeMo/Megatron-Bridge 5570",
    ),
    Case(
        name="vision-tower-qwen3vl", commands=("models {cases}/qwen3-vl.json",), reader=parameters,
        right=within(2.1275e9, 0.001), unit="parameters", source="verl-project/verl 4748; Qwen/Qwen3-VL-2B-Instruct",
    ),
)  # fmt: skip
NOT_HERE: Final = {
    "captured-no-ep": "the module is 744 B of transformers; smaller ones are asked in tests/unit/captured",
}
"""Case -> where its test is, or why there is none."""


def shown(value: Interval | object) -> str:
    """An interval or a value for people."""
    if not isinstance(value, tuple):
        return str(value)
    low, high = (f"{bound:.4g}" for bound in value)
    return low if low == high else f"{low}..{high}"


def main() -> int:
    """Print the table; 1: a row says something else than its answer."""
    wrong = 0
    for case in CASES:
        said = case.said
        met = case.meets(said)
        wrong += met == bool(case.missed)
        print(f"{case.name}: right {shown(case.right)} {case.unit}, said {shown(said)[:100]}: ", end="")
        print("met" if met else f"MISSED: {case.missed or 'it was met before'}", f"[{case.source}]")
        if "-v" in sys.argv:
            print("   ", *(f"steptime {command}\n   " for command in case.commands))
    for name, reason in NOT_HERE.items():
        print(f"{name}: {reason}")
    print(f"{len(CASES)} rows, {sum(not case.missed for case in CASES)} of them met")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
