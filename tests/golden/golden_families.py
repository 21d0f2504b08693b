"""The golden families: what is replayed besides the estimates, as commands of a user.

A file of JSON has what the command prints with ``--json`` (and the rows of ``--out``), a file of text its report at 80
columns. `frozen` families rest on tests/golden/clusters and tests/golden/frozen, which no calibration changes; all
others show what users see today, and move with every fit. Most kernels and collectives of tests/golden/inputs are one
row of every source and operator of the bulk measurements, each with 100 us in place of what was measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import golden_commands
import golden_estimates
from golden_compare import Cases, as_json, as_text, from_text, packed, rounded, unpacked

HERE = Path(__file__).parent
H100, CURVES = "--cluster clusters/dgx-h100.toml", "--cluster clusters/dgx-h100-curves.toml"
A100, GB200 = "--cluster clusters/dgx-a100.toml", "--cluster clusters/gb200-nvl72.toml"
PUBLISHED = "--cluster clusters/published-b200-nvs8.toml --mode published"
#: Devices of a captured or fitted module: by the roofline, and by the measured kernels of the frozen H100.
ROOFLINE, MEASURED = "--device clusters/dgx-h100.toml", "--device golden-h100-curves"

PLANS = (
    f"plan llama3.1-70b {H100} --framework ideal --gpus 64 --global-batch 256",
    f"plan llama3.1-70b {CURVES} --gpus 64 --global-batch 256 --top 3",
    f"plan mixtral-8x7b {H100} --framework ideal --gpus 64 --global-batch 256",
    f"plan qwen3-30b-a3b {CURVES} --framework megatron-core --gpus 64 --global-batch 512 --top 3",
    f"plan deepseek-v2-lite {H100} --framework ideal --gpus 64 --global-batch 256",
    f"plan deepseek-v3 {GB200} --framework megatron-core --gpus 1024 --global-batch 4096 --dtype mxfp8 --fix ep=64 "
    "--limit 'pp<=16' --top 2",
    f"plan gpt3_1T {PUBLISHED} --gpus 512 --global-batch 512",
    f"plan vit_era5 {PUBLISHED} --gpus 256 --global-batch 512 --strategy 2d --top 3",
    f"plan gpt3_1T {A100} --framework ideal --gpus 8 --global-batch 8",
    f"plan llama3.1-70b {A100} --framework ideal --gpus 64 --global-batch 64 --limit 'oom_probability<=0.1' --top 2",
    f"plan llama2-70b {A100} --framework torchtune --gpus 16 --global-batch 64 --lora-rank 16 --qlora --top 2",
    f"plan llama3.1-70b {H100} --framework ideal --gpus 128 --global-batch 64 --seq 32768 --strategy context "
    "--context ring --fix recompute=full --top 2",
)

EXPLAINED = (
    f"estimate llama3.1-70b {CURVES} --framework megatron-core --gpus 64 --global-batch 256 --tp 4 --pp 4 --vpp 2 "
    "--overlap dp,tp --explain",
    f"estimate deepseek-v2-lite {H100} --framework ideal --gpus 64 --global-batch 256 --ep 8 --zero 2 --explain",
)

PROFILES = (
    f"profile models:mlp {ROOFLINE} --loss mse --batch 16",
    f"profile models:gpt2_small {ROOFLINE} --loss cross-entropy --batch 8",
    f"profile models:gpt_eager {MEASURED} --loss sum --autocast bf16 --no-fold",
    f"profile models:llama {MEASURED} --loss sum --batch 512 --dtype bf16 --optimizer adamw-fused",
    f"profile models:moe {MEASURED} --loss sum --optimizer adafactor",
    f"profile models:resnet_small {MEASURED} --loss mean --batch 256 --optimizer sgd-momentum",
    f"profile models:lstm_language_model {ROOFLINE} --loss sum",
    f"profile models:vit {MEASURED} --inference",
    f"profile captured_modules:checkpointed {MEASURED} --loss sum",
    f"profile captured_modules:encoder {ROOFLINE} --loss sum --dtype fp16 --optimizer adam-loop",
    f"profile line.onnx {ROOFLINE} --dim rows=64",
    f"profile mlp.onnx {MEASURED}",
    f"profile resnet.onnx {MEASURED}",
    f"profile gpt_eager.onnx {ROOFLINE} --inference",
)

FITS = (
    f"fit gpt2 {MEASURED} --batch 256",
    "fit llama3-8b --device clusters/dgx-a100.toml --batch 8 --allow training --host-bandwidth '20 GB/s'",
    f"fit inputs/net.py:net {MEASURED} --batch 4 --loss mse --allow training",
    "fit inputs/net.py:net --device inputs/small.toml --batch 8192 --loss sum --allow none",
)

OUTCOMES = "--set gpu=A100-80GB --set gbs=512 --set dtype=bf16 --set zero=1"
SCORES = (
    "score data/published_runs.csv --out rows.csv",
    "score data/measured_runs.csv --out rows.csv",
    "score data/measured_runs.csv --framework-unknown --out rows.csv",
    "score --kernels inputs/kernels.csv --out rows.csv",
    "score --collectives inputs/collectives.csv --out rows.csv",
    "score --collectives inputs/nccl.txt --out rows.csv",
    "score --stages inputs/stages.csv --out rows.csv",
    f"score --outcomes inputs/outcomes.csv {OUTCOMES} --out rows.csv",
)

TRACE = "doctor data/doctor/trace.json.gz"
DOCTOR = (
    "doctor data/doctor/megatron.log",
    "doctor data/doctor/megatron.log --cluster dgx-h100",
    "doctor data/doctor/megatron.log --cluster dgx-h100 --model llama2_13b --gpus 32 --tp 4 --framework generic",
    "doctor data/doctor/deepspeed.log --global-batch 64",
    "doctor data/doctor/deepspeed.log --global-batch 64 --model llama2_7b --cluster dgx-h100 --gpus 8 --seq 4096",
    "doctor data/doctor/torchtitan.log --cluster dgx-h100",
    "doctor experts.log --cluster dgx-h100",
    "doctor titan.log --cluster dgx-h100 --gpus 8 --global-batch 16",
    TRACE,
    f"{TRACE} --model llama2_7b --cluster dgx-h100 --global-batch 32 --tp 2",
)

ANSWERS = (
    "diff tp8.json fsdp.json",
    "diff examples/llama3_70b_h100.toml examples/gpt3_175b_a100.toml",
    *(f"estimate {model}" for model in ("llama3.1-70b", "mixtral-8x7b", "deepseek-v3", "vit-l16")),
    *(f"estimate examples/{name}.toml" for name in ("llama3_70b_h100", "llama2_70b_lora")),
    "estimate llama3.1-70b --cluster mi300x-8 --gpus 64 --global-batch 256 --tp 8",
    "estimate llama3.1-70b --cluster tpu-v5p-pod --gpus 64 --global-batch 256",
    "estimate llama3-8b --cluster rtx4090-8 --gpus 16 --global-batch 64 --framework deepspeed --zero 3 "
    "--offload optimizer",
    *(f"devices {name}" for name in ("h100-sxm", "rtx-4090", "mi300x")),
    *(f"clusters {name}" for name in ("dgx-h100", "frontier", "tpu-v5p-pod")),
    *(f"models {name}" for name in ("llama3.1-70b", "deepseek-v3", "gpt3_1T")),
    "frameworks megatron-core",
    "frameworks --overlap",
    "limits",
    "limits --device dgx-a100 --tp-in 4 --tp-out 8 --dp 64 --tokens 65536",
)  # fmt: skip

COMMANDS = (
    "plan", "estimate", "fleet", "shadow", "lengths", "rl", "simulate", "profile", "fit", "diff",
    "collective", "consistency", "mixed", "export", "import", "schedules",
    "reproduce", "guide", "shard", "planners", "reshard", "rewrite", "rules", "study", "plot", "serve",
    "report", "cache", "tile", "compress", "iterate", "tune", "doctor", "limits",
    "calibrate", "predict", "score", "devices", "clusters", "models", "frameworks",
)  # fmt: skip
JOB = "--gpus 64 --global-batch 256"
REPORTS = (
    f"simulate gpt3-175b --cluster dgx-h100 {JOB} --tp 8 --pp 4 --schedule zb-v",
    f"simulate llama3-8b --cluster dgx-h100 {JOB} --pp 4 --vpp 2",
    "schedules --ranks 4 --micro-batches 16",
    "schedules dualpipe --ranks 4 --micro-batches 8",
    "collective all_reduce --cluster dgx-h100 --ranks 16",
    "reshard 'R S(0)' 'S(0) S(0)' --shape 8192x8192 --mesh data=2,model=4 --cluster dgx-h100",
    f"guide llama3-8b --cluster dgx-h100 {JOB}",
    f"estimate llama3.1-70b --cluster dgx-h100 {JOB} --tp 4 --pp 4 --vpp 2",
    f"estimate mixtral-8x7b --cluster dgx-h100 {JOB} --ep 8",
    f"estimate gpt3_1T {PUBLISHED} --gpus 512 --global-batch 512 --tp 8 --pp 16",
    f"estimate gpt3_1T --cluster dgx-a100 {JOB}",
    "estimate llama3-8b",
    f"estimate llama3.1-70b --cluster dgx-h100 {JOB} --tp 4 --explain",
    f"estimate deepseek-v2-lite {H100} --framework ideal {JOB} --ep 8 --explain ep_comm --all",
    f"plan llama3.1-70b --cluster dgx-h100 {JOB}",
    f"plan mixtral-8x7b --cluster dgx-h100 {JOB} --framework megatron-core --top 5",
    f"plan gpt3_1T {PUBLISHED} --gpus 512 --global-batch 512",
    f"estimate llama3.1-70b --cluster dgx-h100 {JOB} --tp 4 --tokens 1T --failures default --prices default",
    f"plan llama3-8b --cluster dgx-h100 {JOB} --tokens 100B --objective cost --deadline '30 days' --budget '10 USD'",
    "fleet llama3-8b --cluster dgx-h100,dgx-b200 --gpus 64..256 --global-batch 256 --tokens 1T --deadline '30 days'",
    f"shadow llama3-8b --cluster dgx-h100 {JOB} --tokens 1T",
    "rl grpo llama3-8b --cluster dgx-h100 --gpus 64 --tp 2 --zero 1 --reward rule --micro-batch 1",
    "iterate lanczos --matrix banded:20000",
    "tune matmul --processor zen4 --trials 0",
    f"lengths llama3-8b --cluster dgx-h100 {JOB} --micro-batch 2 --seq 4096 --zero 3 --lengths lognormal:900,1",
    "mixed llama3-8b --cluster inputs/halls.toml --global-batch 512 --top 1",
    f"export llama3-8b --cluster dgx-h100 {JOB} --tp 2 --pp 2 --framework megatron-core --for megatron-lm",
    "import 'pretrain_gpt.py --tensor-model-parallel-size 2 --bf16 --micro-batch-size 2' --model llama3-8b",
    "plan gpt3_1T --cluster dgx-a100 --gpus 8 --global-batch 8",
    "profile models:gpt --device h100-sxm --loss cross-entropy",
    "profile models:gpt --device h100-sxm --loss cross-entropy --predictor learned --depth 1",
    "profile models:moe --device mi300x --loss sum --autocast bf16 --depth 1",
    "profile line.onnx --device l4 --dim rows=2",
    "fit gpt2 --device rtx-4090 --batch 32",
    "fit llama3-70b --device rtx-4090 --batch 1 --all",
    "diff tp8.json fsdp.json",
    "doctor data/doctor/megatron.log --cluster dgx-h100",
    f"{TRACE} --model llama2_7b --cluster dgx-h100 --global-batch 32 --tp 2",
    "score data/measured_runs.csv",
    "score --kernels inputs/kernels.csv",
    "score --stages inputs/stages.csv",
    f"score --outcomes inputs/outcomes.csv {OUTCOMES}",
    "score --columns",
    "limits",
    "frameworks",
    "frameworks --overlap",
    "frameworks megatron-core",
    "devices",
    "devices h100-sxm",
    "clusters",
    "clusters dgx-h100",
    "models",
    "models deepseek-v3",
    "--help",
    *(f"{command} --help" for command in COMMANDS),
    "estimat llama3-8b",
    "estimate llama3-8",
    f"estimate llama3-8b --cluster dgx-h10 {JOB}",
    f"estimate llama3-8b --cluster dgx-h100 {JOB} --tp 7",
    f"plan llama3-8b --cluster dgx-h100 {JOB} --limit 'tp<=0'",
    "profile models:gpt --device h10",
    "profile absent.onnx --device h100-sxm",
    "score data/published_best.csv",
    "doctor inputs/stages.csv",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Cases of one golden file."""

    name: str
    commands: tuple[str, ...] = ()
    frozen: bool = False
    text: bool = False
    width: int = 118
    shorten: Callable[[Any], Any] = lambda answer: answer

    @property
    def file(self) -> Path:
        """The golden file."""
        return HERE / f"{self.name}.{'txt' if self.text else 'json'}"

    def skipped(self) -> dict[str, str]:
        """Command -> why it cannot be replayed here."""
        lacking = {command: golden_commands.lacking(needs(command)) for command in self.commands}
        return {command: f"{' and '.join(names)} not installed" for command, names in lacking.items() if names}

    def now(self) -> dict[str, Any]:
        """The cases as they are now."""
        if not self.commands:
            return golden_estimates.evaluated()
        run = golden_commands.report if self.text else golden_commands.answer
        skipped = self.skipped()
        found: dict[str, Any] = {}
        with golden_commands.workplace():
            if any(".onnx" in command for command in self.commands) and not golden_commands.lacking(("onnx",)):
                golden_commands.export_models()
            for command in self.commands:
                if command not in skipped:
                    found[command] = rounded(self.shorten(run(command, frozen=self.frozen)))
        return found

    def stored(self) -> dict[str, Any]:
        """The cases as they were."""
        if not self.file.is_file():
            return {}
        text = self.file.read_text(encoding="utf-8")
        return from_text(text) if self.text else unpacked(json.loads(text))

    def write(self, cases: Cases) -> None:
        """Write the golden file."""
        self.file.write_text(as_text(cases) if self.text else as_json(packed(cases), self.width), encoding="utf-8")


def needs(command: str) -> tuple[str, ...]:
    """Packages that a command needs: those that record its module or read its file."""
    words = command.split()
    target = words[1] if len(words) > 1 and words[0] in ("profile", "fit") else ""
    if target.endswith(".onnx"):
        return ("onnx",) if target == "absent.onnx" else ("onnx", "torch")
    return ("torch",) if ":" in target else ()


def of_plans(answer: Any) -> Any:
    """Of all plans but the first without what repeats.

    Terms are added up by their first name, sources are left out, and of the choices those that differ from the first
    plan's are kept.
    """
    found = answer["json"]
    others = [*found["plans"][1:], *([found["likely_to_fit"]] if found.get("likely_to_fit") else [])]
    for plan in others:
        for name in ("provenance", "flops_convention", "workload"):
            plan.pop(name, None)
        for name in ("time", "overlapped", "memory"):
            plan[name] = _added_up(plan[name])
    first = found["plans"][0]["plan"] if found["plans"] else {}
    for plan in (*others, *found["pareto"]):
        plan["plan"] = {name: value for name, value in plan["plan"].items() if first.get(name) != value}
    return answer


def of_details(answer: Any) -> Any:
    """Without the terms, which the details have too, and without the sources."""
    for name in ("time", "overlapped", "memory", "provenance"):
        del answer["json"][name]
    return answer


def of_fits(answer: Any) -> Any:
    """Settings of the cheapest point and the first ones alone: those of all others are the same texts."""
    for point in answer["json"]["front"][1:]:
        del point["settings"]
    return answer


def _added_up(terms: Mapping[str, float]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for path, value in terms.items():
        head = path.partition("/")[0]
        sums[head] = sums.get(head, 0.0) + value
    return sums


FAMILIES = {
    family.name: family
    for family in (
        Family(name="estimates", width=10_000),
        Family(name="plans", commands=PLANS, frozen=True, shorten=of_plans),
        Family(name="explained", commands=EXPLAINED, frozen=True, shorten=of_details),
        Family(name="profiles", commands=PROFILES, frozen=True),
        Family(name="fits", commands=FITS, frozen=True, shorten=of_fits),
        Family(name="scores", commands=SCORES, width=500),
        Family(name="doctor", commands=DOCTOR),
        Family(name="answers", commands=ANSWERS),
        Family(name="reports", commands=REPORTS, text=True),
    )
}
