"""Parsers of Megatron-LM and NeMo: arguments, iterations, timers over the ranks, memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from steptime.doctor import gather
from steptime.doctor.gather import Gathered
from steptime.doctor.records import StepLine
from steptime.errors import first_few
from steptime.measure.runs.meaning import choice_called, graphs_called, recipe_called, recompute_words
from steptime.plan.job import PRECISIONS
from steptime.plan.recompute import MODULES

_ITERATION: Final = re.compile(r"iteration\s*[:=]?\s+(\d{1,12})\s*/\s*(\d{1,12})\s*\|")
_ELAPSED: Final = re.compile(r"elapsed[ _]time[ _]per[ _]iteration[ _]\(?(ms|s)\)?\s*[:=]\s*" + gather.NUMBER, re.I)
_BATCH: Final = re.compile(r"global batch size\s*[:=]\s*(\d{1,9})\b", re.I)
_SAMPLES: Final = re.compile(r"consumed samples:\s*(\d{1,15})\b")
_TOKENS: Final = re.compile(r"consumed tokens:\s*(\d{1,18})\b")
#: FLOP rate of Megatron Bridge, on a line of its own.
_UTILIZATION: Final = re.compile(gather.NUMBER + r"\s*MODEL_TFLOP/s/GPU")
#: ``time (ms) | forward-compute: 92.25 | ...`` of releases before 2023.
_OLD_TIMER: Final = re.compile(r"\|\s*([a-z][a-z-]{1,63}): " + gather.NUMBER)
_TFLOPS: Final = re.compile(r"(?:throughput per GPU \(TFLOP/s/GPU\)|TFLOPs)\s*:\s*" + gather.NUMBER)
_SKIPPED: Final = re.compile(r"number of (?:skipped|nan) iterations:\s*(\d{1,12})")
_MEMORY: Final = re.compile(r"memory \(MB\) \|.*?max allocated:\s*" + gather.NUMBER)
_RESERVED: Final = re.compile(r"max reserved:\s*" + gather.NUMBER)
_ARGUMENT: Final = re.compile(r"^\s*([a-z][a-z0-9_]{1,63}) \.{2,} (.*)$")
_WORLD: Final = re.compile(r"using world size:\s*(\d{1,9}).*?data-parallel size:\s*(\d{1,9})")
_MIN_MAX: Final = re.compile(rf"^\s*([a-z][a-z0-9/ _-]{{1,63}}?) \.*:\s*\({gather.NUMBER},\s*{gather.NUMBER}\)\s*$")
_MAX_ONLY: Final = re.compile(rf"^\s*([a-z][a-z0-9/ _-]{{1,63}}?) \.+:\s*{gather.NUMBER}\s*$")
_RANK_TIME: Final = re.compile(rf"^\s*rank\s+(\d{{1,7}}):\s*{gather.NUMBER}\s*$")
_TIMER_NAME: Final = re.compile(r"^\s*([a-z][a-z0-9/_-]{1,63}):\s*$")
_IN_LINE: Final = re.compile(
    r"time across ranks \(ms\):\s*([a-z-]+) \.*:\s*\(" + gather.NUMBER + r",\s*" + gather.NUMBER
)
_PER_JOB: Final = ("save-checkpoint", "evaluate", "setup", "interval-time", "load-checkpoint")

#: Argument that is a plain whole number -> (table, field).
_WHOLE: Final[Mapping[str, tuple[str, str]]] = gather.NAMES["megatron"]["counts"]
#: Share of the optimiser on the host from which all of it is predicted there.
HALF: Final = 0.5
#: ``--data-parallel-sharding-strategy`` -> ZeRO stage.
_FSDP: Final[Mapping[str, int]] = gather.NAMES["megatron"]["sharding"]
_OLD_NAMES: Final = frozenset(
    {
        "forward-compute",
        "backward-compute",
        "backward-params-all-reduce",
        "optimizer",
        "batch-generator",
        "save-checkpoint",
    }
)


class Megatron:
    """Parser of Megatron-LM, Megatron-DeepSpeed and software built on them."""

    name = "megatron"

    def __init__(self) -> None:
        self.gathered = Gathered()
        self._timers = False
        self._timer = ""
        self._of_ranks: list[float] = []

    def feed(self, rank: int | None, line: str) -> None:
        """Take one line."""
        g = self.gathered
        if "elapsed" in line and (match := _ITERATION.search(line)):
            self._iteration(line, int(match[1]))
        elif "across ranks (ms)" in line:
            self._close_timer()
            self._timers = True
            if match := _IN_LINE.search(line):
                self._timer_line(match[1], match[2], match[3])
        elif self._timers and self._timer_lines(line):
            pass
        elif "time (ms) |" in line:
            self._old_timers(line)
        elif match := _ARGUMENT.match(line):
            g.add_flag(match[1], match[2].strip())
        elif "memory (MB)" in line and (match := _MEMORY.search(line)):
            self._memory(line, match[1])
        elif match := _WORLD.search(line):
            g.settings["gpus"], g.plan["dp"] = int(match[1]), int(match[2])
        elif "saved checkpoint from iteration" in line:
            g.add_event("checkpoint")
        elif "validation loss at iteration" in line:
            g.add_event("evaluation")
        elif match := _UTILIZATION.search(line):
            g.add_tflops(match[1])

    def _iteration(self, line: str, step: int) -> None:
        g = self.gathered
        self._timers = False
        match = _ELAPSED.search(line)
        value = gather.number(match[2]) if match else None
        if match and value is not None and match[1].lower() == "ms":
            value /= 1e3
        g.add_step(None, StepLine(number=step, time_s=gather.step_time_s(value), at_s=gather.clock_s(line)))
        self._batch(line, step)
        skipped = sum(int(n) for n in _SKIPPED.findall(line))
        if skipped:
            g.skips.append((step, skipped))
        if match := _TFLOPS.search(line):
            g.add_tflops(match[1])
        if "time (ms) |" in line:
            self._old_timers(line)

    def _old_timers(self, line: str) -> None:
        """Read the timers of one rank on one line; timers of DeepSpeed's engine have other names."""
        for name, text in _OLD_TIMER.findall(line[line.index("time (ms) |") :]):
            if name in _OLD_NAMES:
                self._timer_line(name, text, text)

    def _batch(self, line: str, step: int) -> None:
        """Read batch and sequence from one iteration line; the batch may still grow."""
        samples, tokens = _SAMPLES.search(line), _TOKENS.search(line)
        if match := _BATCH.search(line):
            self.gathered.add_batch(int(match[1]))
        elif samples:
            self.gathered.add_consumed(step, int(samples[1]))
        if samples and tokens and int(samples[1]):
            each, rest = divmod(int(tokens[1]), int(samples[1]))
            if each and not rest:
                self.gathered.settings["seq"] = each

    def _memory(self, line: str, allocated: str) -> None:
        pairs = [("allocated", allocated)]
        if match := _RESERVED.search(line):
            pairs.append(("reserved", match[1]))
        for kind, text in pairs:
            value = gather.number(text)
            self.gathered.add_memory(kind, None if value is None else value * 2**20)

    def _timer_lines(self, line: str) -> bool:
        """Read a line of the table of timers; False: the line is none, and the table ends."""
        if match := _MIN_MAX.match(line):
            self._timer_line(match[1], match[2], match[3])
        elif match := _RANK_TIME.match(line):
            value = gather.number(match[2])
            if value is not None and len(self._of_ranks) < 100_000:
                self._of_ranks.append(value)
        elif match := _MAX_ONLY.match(line):
            self._timer_line(match[1], match[2], match[2])
        elif match := _TIMER_NAME.match(line):
            self._close_timer()
            self._timer = match[1]
        else:
            self._close_timer()
            self._timers = False
            return False
        return True

    def _close_timer(self) -> None:
        """Keep the timer whose table over all ranks is complete."""
        if self._timer and self._of_ranks:
            self._timer_line(self._timer, str(min(self._of_ranks)), str(max(self._of_ranks)))
        self._timer, self._of_ranks = "", []

    def _timer_line(self, name: str, least: str, most: str) -> None:
        low, high = gather.number(least), gather.number(most)
        if low is None or high is None:
            return
        if name.startswith("save-checkpoint"):
            self.gathered.add_event("checkpoint", high / 1e3)
        elif name == "evaluate":
            self.gathered.add_event("evaluation", high / 1e3)
        elif not any(word in name for word in _PER_JOB):
            self.gathered.add_timer(name.strip(), low / 1e3, high / 1e3)

    def finish(self) -> None:
        """Translate the printed arguments."""
        self._close_timer()
        g = self.gathered
        g.read_counts(_WHOLE)
        if g.flags.get("group_query_attention") == "False":
            g.model.pop("kv_heads", None)
        _experts(g)
        g.settle_batch()
        _choices(g)
        _savings(g)


def _experts(g: Gathered) -> None:
    """Set the dimensions of the experts; no experts: 0. Megatron-DeepSpeed prints the number as a list."""
    if "num_experts" not in g.flags:
        return
    experts = gather.count(g.flags["num_experts"].strip("[]")) or 0
    g.model["experts"] = experts = experts if experts > 1 else 0
    if experts:
        width = gather.count(g.flags.get("moe_ffn_hidden_size", "")) or g.model.get("ffn_hidden")
        chosen = {"experts_per_token": gather.count(g.flags.get("moe_router_topk", "")), "expert_ffn_hidden": width}
        g.model.update({name: value for name, value in chosen.items() if value})


def _choices(g: Gathered) -> None:
    flags = g.flags
    if (dtype := _dtype(flags)) is not None:
        g.settings["dtype"] = dtype
    g.set_optimizer(_optimizer(flags))
    _sharding(g)
    _offload(g)
    fp32 = flags.get("accumulate_allreduce_grads_in_fp32")
    if fp32 in gather.SAID and "dtype" in g.settings and PRECISIONS[g.settings["dtype"]].element_bytes < 4:
        narrow = "fp16" if flags.get("fp16") == "True" else "bf16"
        g.plan["gradient_dtype"] = "fp32" if fp32 == "True" else narrow
    if (graphs := _graphs(flags)) != "none":
        g.plan["graphs"] = graphs
    if g.model.get("experts") and (dispatcher := _dispatcher(flags)) is not None:
        g.plan["dispatcher"] = dispatcher
    if flags.get("fp8_dot_product_attention") == "True":
        g.plan["attention_dtype"] = "fp8"
    if g.plan.get("tp", 1) > 1 and flags.get("sequence_parallel") in gather.SAID:
        g.plan["sp"] = "on" if flags["sequence_parallel"] == "True" else "off"
    if "overlap_grad_reduce" in flags:
        g.plan["overlap"] = "dp" if flags["overlap_grad_reduce"] == "True" else "none"
    if (kernel := _attention(flags)) is not None:
        g.plan["attention"] = kernel
    if "virtual_pipeline_model_parallel_size" in flags and g.plan.get("vpp") == 1:
        del g.plan["vpp"]


def _graphs(flags: Mapping[str, str]) -> str:
    """Scope of CUDA graphs: the step, or parts of a layer (``cuda_graph_modules``, formerly ``cuda_graph_scope``)."""
    how = flags.get("cuda_graph_impl", "none")
    scope = f"{flags.get('cuda_graph_modules', '')} {flags.get('cuda_graph_scope', '')}"
    if how == "full_iteration" or (how == "local" and "full_iteration" in scope):
        return "step"
    return graphs_called(scope) if how in ("transformer_engine", "local") else "none"


def _dispatcher(flags: Mapping[str, str]) -> str | None:
    """Dispatcher of tokens to experts: the back end of the flexible dispatcher (default DeepEP), or its type."""
    kind = flags.get("moe_token_dispatcher_type", "")
    if kind == "flex":
        return choice_called("dispatcher", flags.get("moe_flex_dispatcher_backend", "")) or "deepep"
    return choice_called("dispatcher", kind)


def _sharding(g: Gathered) -> None:
    """Set the ZeRO stage from DeepSpeed's stage, the strategy of FSDP, or the distributed optimiser."""
    flags = g.flags
    if flags.get("use_distributed_optimizer") in gather.SAID:
        g.plan["zero"] = int(flags["use_distributed_optimizer"] == "True")
    instances = gather.count(flags.get("num_distributed_optimizer_instances", "")) or 1
    ranks = g.plan.get("dp", 1) * g.plan.get("cp", 1)
    if g.plan.get("zero") and 1 < instances < ranks and ranks % instances == 0:
        g.plan["shard"] = ranks // instances
    if flags.get("use_torch_fsdp2") == "True":
        g.plan["zero"] = 3
    elif "True" in (flags.get("use_megatron_fsdp"), flags.get("use_custom_fsdp")):
        g.plan["zero"] = _FSDP.get(flags.get("data_parallel_sharding_strategy", ""), 3)
    if (
        flags.get("deepspeed") == "True"
        and (stage := gather.count(flags.get("zero_stage", ""))) is not None
        and stage <= 3
    ):
        g.plan["zero"] = stage


def _offload(g: Gathered) -> None:
    """Set the offload of the optimiser; a part of it on the host counts as none or all, whichever is nearer."""
    share = (
        gather.number(g.flags.get("optimizer_offload_fraction", "")) if "optimizer_offload_fraction" in g.flags else 1.0
    )
    if g.flags.get("optimizer_cpu_offload") == "True" and share is not None and share > 0:
        if share >= HALF:
            g.plan["offload"] = "optimizer"
        if share < 1:
            kept = "all" if share >= HALF else "nothing"
            g.notes.append(f"optimizer_offload_fraction {share:g}: predicted with {kept} of the optimiser on the host")
    if g.flags.get("cpu_offloading") == "True":
        g.notes.append(
            "cpu_offloading: activations of some layers on the host are not modelled; predicted on the device"
        )


def _dtype(flags: Mapping[str, str]) -> str | None:
    """Recipe of the printed formats; None: none is printed."""
    for narrow in ("fp4", "fp8"):
        formats = [
            flags.get(name, "None") for name in (narrow, f"{narrow}_format", f"{narrow}_e4m3", f"{narrow}_hybrid")
        ]
        if any(value not in ("None", "False") for value in formats):
            return recipe_called(f"{narrow} {flags.get(f'{narrow}_recipe', '')}") or recipe_called(narrow)
    said = [name for name in ("bf16", "fp16") if flags.get(name) == "True"]
    return said[0] if said else "fp32" if flags.get("bf16") == flags.get("fp16") == "False" else None


def _optimizer(flags: Mapping[str, str]) -> str:
    """The optimiser; ``sgd`` has momentum unless the printed momentum is 0."""
    momentum = gather.number(flags.get("sgd_momentum", "0.9"))
    return "momentum" if flags.get("optimizer") == "sgd" and momentum else flags.get("optimizer", "")


def _attention(flags: Mapping[str, str]) -> str | None:
    """Fused or unfused attention, from its backend, the flash-attention flag, or Transformer Engine's layers."""
    backend = flags.get("attention_backend", "").lower().rpartition(".")[2]
    if backend in ("flash", "fused"):
        return "fused"
    if backend in ("unfused", "local"):
        return "unfused"
    flash = {value for name, value in flags.items() if name.startswith("use_flash_attn") and value in gather.SAID}
    if "True" in flash or flags.get("transformer_impl") == "transformer_engine":
        return "fused"
    return "unfused" if flash else None


def _savings(g: Gathered) -> None:
    """Set the recomputation; older names of the flags are from 2021 and 2022."""
    flags = g.flags
    granularity, method = flags.get("recompute_granularity"), flags.get("activations_checkpoint_method", "None")
    if granularity == "full" or flags.get("checkpoint_activations") == "True" or method in ("uniform", "block"):
        g.plan["recompute"] = "full"
        each, layers = gather.count(flags.get("recompute_num_layers", "")), g.model.get("layers")
        if flags.get("recompute_method") == "block" and each and layers:
            done = each * g.plan.get("pp", 1) * g.plan.get("vpp", 1)
            g.plan["recompute_every"] = max(1, round(layers / done))
    elif granularity == "selective":
        _selective(g)
    elif granularity == "None" or flags.get("checkpoint_activations") == "False":
        g.plan["recompute"] = recompute_words("none")


def _selective(g: Gathered) -> None:
    """Set the recomputed modules: the core of attention if none are printed."""
    modules = re.findall(r"\w+", g.flags.get("recompute_modules", ""))
    modules = ["core_attn"] if modules in ([], ["None"]) else modules
    known = {name: MODULES[name] for name in modules if name in MODULES}
    if known:
        g.plan["recompute"] = "+".join(dict.fromkeys(known.values()))
    if unknown := [name for name in modules if name not in known]:
        g.notes.append(f"recompute_modules {first_few(unknown, 5)}: not modelled, left out")


_NEMO_TIME: Final = re.compile(r"train_step_timing in s\"?\s*[:=]\s*" + gather.NUMBER)
_NEMO_STEP: Final = re.compile(
    r"\bglobal_step\"?\s*[:=]\s*(\d{1,12})\b|\biteration (\d{1,12})/\d{1,12}|\| (\d{1,12})/\d{1,12} \["
)
_NEMO_BATCH: Final = re.compile(r"\bglobal_batch_size\s*[:=]\s*(\d{1,9})\b")
_CONSUMED: Final = re.compile(r"\bconsumed_samples\"?\s*[:=]\s*(\d{1,15})\b")
_NEMO_TFLOPS: Final = re.compile(r"\bTFLOPS_per_GPU\s*[:=]\s*" + gather.NUMBER, re.I)
_NEMO_CHECKPOINT: Final = re.compile(
    r"Async checkpoint save for step|Scheduled async checkpoint save|Saving checkpoint|Successfully saved checkpoint"
)


class NeMo:
    """Parser of NeMo 1 and 2 on Megatron Core."""

    name = "nemo"

    def __init__(self) -> None:
        self.gathered = Gathered()

    def feed(self, rank: int | None, line: str) -> None:
        """Take one line."""
        g = self.gathered
        if "train_step_timing in s" in line:
            self._step(rank, line)
        elif "Validation" in line and "iteration" in line:
            g.add_event("evaluation")
        elif _NEMO_CHECKPOINT.search(line):
            g.add_event("checkpoint")

    def _step(self, rank: int | None, line: str) -> None:
        found, step = _NEMO_TIME.search(line), _NEMO_STEP.search(line)
        if found is None or step is None:
            return
        g = self.gathered
        number = int(step[1] or step[2] or step[3])
        time_s = gather.step_time_s(gather.number(found[1]))
        g.add_step(rank, StepLine(number=number, time_s=time_s, at_s=gather.clock_s(line)))
        if match := _NEMO_BATCH.search(line):
            g.add_batch(int(match[1]))
        elif match := _CONSUMED.search(line):
            g.add_consumed(number, int(match[1]))
        if match := _NEMO_TFLOPS.search(line):
            g.add_tflops(match[1])

    def finish(self) -> None:
        """Take the batch of most lines as the job's."""
        self.gathered.settle_batch()
