"""Lines of DeepSpeed, and progress bars of Lightning and of the Transformers Trainer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from typing import Final

from steptime.doctor import gather
from steptime.doctor.gather import Gathered
from steptime.doctor.records import StepLine

_SPEED: Final = re.compile(r"(?:CurrSamplesPerSec|(?<![A-Za-z])SamplesPerSec)=" + gather.NUMBER)
_GLOBAL_STEP: Final = re.compile(r"global_step=(\d{1,12})|\b\d{1,9}/(\d{1,12}), ")
_PEAK: Final = re.compile(r"MaxMemAllocated=" + gather.NUMBER + r"\s*GB")
_SKIPPED: Final = re.compile(r"step=(\d{1,12}), skipped=(\d{1,12})")
_PIPELINE: Final = re.compile(r"steps: (\d{1,12}) .*?iter time \(s\): " + gather.NUMBER)
_TIMERS: Final = re.compile(r"time \(ms\) \| (.*)$")
_TIMER: Final = re.compile(r"([a-z][a-z_ -]{0,80}?): " + gather.NUMBER)
_PRINTED: Final = re.compile(r"\[config\.py[^\]]*\]\s+([a-z][a-z0-9_]{1,63}) (?:\.{1,60})? (.*)$")
_JSON: Final = re.compile(r'^\s*"([a-z][a-z0-9_]{1,63})": ("?[\w.+-]{1,64}"?),?\s*$')
_OPENED: Final = re.compile(r'^\s*"(offload_[a-z]{1,20})": \{')
_DEVICE: Final = re.compile(
    r"""(offload_(?:optimizer|param))['"]?\s?[=:]\s?[A-Za-z]{0,60}[({][^})]{0,80}?device['"]?\s?[=:]\s?"""
    r"""(?:<[A-Za-z.]{1,40}: )?['"]?(cpu|nvme)"""
)
_HOST: Final = ("cpu", "nvme")
#: Dtype -> its flag, in releases until 2024 and in later ones.
_DTYPES: Final[Mapping[str, tuple[str, ...]]] = {
    "bf16": ("bfloat16_enabled", "bfloat16_config"),
    "fp16": ("fp16_enabled", "float16_config"),
}
_CHECKPOINT: Final = re.compile(r"Saving model checkpoint|is about to be saved", re.I)

#: Timers of the engine that cover a whole step, old name -> current name.
_NAMES: Final[Mapping[str, str]] = gather.NAMES["deepspeed"]["timers"]
_WHOLE: Final[Mapping[str, tuple[str, str]]] = gather.NAMES["deepspeed"]["counts"]
#: Factors of the global batch; DeepSpeed's world size here does not count tensor and pipeline ranks.
_FACTORS: Final = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "world_size")


class DeepSpeed:
    """Parser of DeepSpeed's engine, under any trainer."""

    name = "deepspeed"

    def __init__(self) -> None:
        self.gathered = Gathered()
        self._skipped = 0
        self._opened = ""

    def feed(self, rank: int | None, line: str) -> None:
        """Take one line."""
        g = self.gathered
        if "SamplesPerSec=" in line:
            self._speed(rank, line)
        elif "time (ms) |" in line:
            self._timer_line(line)
        elif "skipped=" in line and (match := _SKIPPED.search(line)):
            step, total = int(match[1]), int(match[2])
            if total > self._skipped:
                g.skips.append((step, total - self._skipped))
            self._skipped = total
        elif "iter time (s):" in line and (match := _PIPELINE.search(line)):
            time_s = gather.step_time_s(gather.number(match[2]))
            g.add_step(rank, StepLine(number=int(match[1]), time_s=time_s, at_s=gather.clock_s(line)))
        elif "cache flushes since last step" in line:
            g.add_event("allocator_retry")
        elif match := _PRINTED.search(line) or _JSON.match(line):
            g.add_flag(match[1], match[2].strip().strip('"'))
            self._part_of_zero(match[1], match[2], line)
        elif match := _OPENED.match(line):
            self._opened = match[1]
        elif "CPU Offload: True" in line:
            g.add_flag("offload_optimizer", "cpu")
        elif _CHECKPOINT.search(line):
            g.add_event("checkpoint")

    def _part_of_zero(self, name: str, value: str, line: str) -> None:
        """Read ZeRO's configuration from one line, or from a line of an object opened on an earlier line."""
        g = self.gathered
        if name.startswith("zero_") and "overlap_comm" in line:
            g.add_flag("overlap_comm", str("overlap_comm=True" in line or "'overlap_comm': True" in line))
        for part, device in _DEVICE.findall(line) if name.startswith("zero_") else ():
            g.add_flag(part, device)
        if name == "device" and self._opened:
            g.add_flag(self._opened, value.strip().strip('"'))
        self._opened = self._opened if name in ("device", "nvme_path", "buffer_count", "pin_memory") else ""

    def _speed(self, rank: int | None, line: str) -> None:
        step, speed = _GLOBAL_STEP.search(line), _SPEED.search(line)
        if step is None or speed is None:
            return
        g = self.gathered
        number = int(step[1] or step[2])
        g.add_step(
            rank, StepLine(number=number, samples_per_s=gather.rate(gather.number(speed[1])), at_s=gather.clock_s(line))
        )
        if match := _PEAK.search(line):
            value = gather.number(match[1])
            g.add_memory("allocated", None if value is None else value * 2**30)

    def _timer_line(self, line: str) -> None:
        found = _TIMERS.search(line)
        for name, text in _TIMER.findall(found[1]) if found else ():
            value = gather.number(text)
            if name in _NAMES and value is not None:
                self.gathered.add_timer(_NAMES[name], value / 1e3, value / 1e3)

    def finish(self) -> None:
        """Translate the printed configuration; ``auto`` and the like are unknown."""
        g = self.gathered
        g.read_counts(_WHOLE)
        g.notes += wrong_batch(g.flags)
        stage = gather.count(g.flags.get("zero_optimization_stage", g.flags.get("stage", "")))
        if stage is not None and stage <= 3:
            g.plan["zero"] = stage
        if g.flags.get("offload_optimizer") in _HOST:
            g.plan["offload"] = "optimizer"
        if g.flags.get("offload_param") in _HOST:
            g.notes.append("offload_param: weights in the memory of the host are not modelled; predicted on the device")
        for dtype, names in _DTYPES.items():
            if any(g.flags.get(name, "").lower().startswith(("true", "enabled=true")) for name in names):
                g.settings["dtype"] = dtype
        g.set_optimizer(g.flags.get("optimizer_name", ""))
        if (overlap := g.flags.get("overlap_comm", "").lower()) in ("true", "false"):
            g.plan["overlap"] = "dp" if overlap == "true" else "none"


def wrong_batch(flags: Mapping[str, str]) -> list[str]:
    """A note if the printed batch is not the product of its printed factors.

    >>> flags = dict(zip(_FACTORS, ("2", "4", "8"))) | {"train_batch_size": "64"}
    >>> wrong_batch(flags), wrong_batch(flags | {"train_batch_size": "96"})[0].partition(":")[0]
    ([], 'the log contradicts itself')
    """
    batch, *parts = (gather.count(flags.get(name, "")) for name in ("train_batch_size", *_FACTORS))
    factors = [part for part in parts if part]
    if not batch or len(factors) < len(_FACTORS) or batch == prod(factors):
        return []
    product = " x ".join(f"{name} {value}" for name, value in zip(_FACTORS, factors, strict=True))
    return [
        f"the log contradicts itself: train_batch_size {batch} is not {product} = {prod(factors)}; without "
        f"--global-batch N {batch} is taken, also for the time of a step where the log has samples/s only"
    ]


#: ``12%|#2  | 60/500 [04:00<28:40, 3.91s/it]``; only Lightning's ``Epoch 0:`` may come before it.
_BAR: Final = re.compile(
    r"^\s*(?:(?:Training|Epoch \d{1,9})\s*:+\s*)*\d{1,3}%\|.{0,300}?\|\s*(\d{1,12})/(\d{1,12}) "
    r"\[([\d:]{4,12})<[^,\]]{1,20},\s*" + gather.NUMBER + r"(s/it|it/s)"
)
_RUNTIME: Final = re.compile(r"['\"]train_runtime['\"]: ['\"]?" + gather.NUMBER)
_STEPS_PER_S: Final = re.compile(r"['\"]train_steps_per_second['\"]: ['\"]?" + gather.NUMBER)
_SAMPLES_PER_S: Final = re.compile(r"['\"]train_samples_per_second['\"]: ['\"]?" + gather.NUMBER)
#: Lines that the Trainer of transformers prints and Lightning does not.
_OF_TRANSFORMERS: Final = re.compile(r"\{['\"](?:loss|train_runtime)['\"]: |Instantaneous batch size per device = ")
_TRAINER_BATCH: Final = re.compile(
    r"Total train batch size \(w\. parallel, distributed & accumulation\) = ([\d,]{1,12})"
)
_EACH: Final = re.compile(r"Instantaneous batch size per device = (\d{1,9})")
_DTYPE: Final = re.compile(r"^\s*(bf16|fp16)=(True|False),?\s*$")
_OPTIMIZER: Final = re.compile(r"^\s*optim=(?:OptimizerNames\.)?(\w{1,40}),?\s*$")
_TRAINER_CHECKPOINT: Final = re.compile(r"Saving model checkpoint to|Saving (?:current )?model")


class Trainer:
    """Parser of trainers that show their steps in a progress bar."""

    def __init__(self) -> None:
        self.name = "trainer"
        self.gathered = Gathered()
        self._summary: tuple[int, float] | None = None

    def feed(self, rank: int | None, line: str) -> None:
        """Take one line."""
        g = self.gathered
        if _OF_TRANSFORMERS.search(line):
            self.name = "transformers"
        if match := _BAR.match(line):
            self._bar(rank, match)
        elif match := _RUNTIME.search(line):
            self._end(line)
        elif (match := _TRAINER_BATCH.search(line)) and (batch := gather.count(match[1])):
            g.settings["global_batch"] = batch
        elif match := _EACH.search(line):
            g.plan["micro_batch"] = int(match[1])
        elif match := _DTYPE.match(line):
            if match[2] == "True":
                g.settings["dtype"] = match[1]
        elif match := _OPTIMIZER.match(line):
            g.set_optimizer(match[1].lower().removesuffix("_torch").removesuffix("_torch_fused").removesuffix("_hf"))
        elif _TRAINER_CHECKPOINT.search(line):
            g.add_event("checkpoint")

    def _bar(self, rank: int | None, match: re.Match[str]) -> None:
        value, step = gather.number(match[4]), int(match[1])
        if step == 0 or value is None or value <= 0:
            return
        time_s = value if match[5] == "s/it" else 1.0 / value
        self.gathered.add_step(rank, StepLine(number=step, time_s=gather.step_time_s(time_s), at_s=_seconds(match[3])))

    def _end(self, line: str) -> None:
        speed, samples = _STEPS_PER_S.search(line), _SAMPLES_PER_S.search(line)
        per_s = gather.rate(gather.number(speed[1])) if speed else None
        if per_s is None:
            return
        whole = gather.number(match[1]) if (match := _RUNTIME.search(line)) else None
        self._summary = max(1, round(per_s * (whole or 0.0))), 1.0 / per_s
        each = gather.rate(gather.number(samples[1])) if samples else None
        if each:
            self.gathered.settings.setdefault("global_batch", max(1, round(each / per_s)))

    def finish(self) -> None:
        """Take the summary, the mean over the whole run, as the only step line if there is no progress bar."""
        g = self.gathered
        if not g.steps and self._summary is not None:
            g.add_step(None, StepLine(number=self._summary[0], time_s=gather.step_time_s(self._summary[1])))
            g.notes.append("the log has no step times, only the mean over the whole run, start-up and pauses included")


def _seconds(clock: str) -> float | None:
    """Seconds of ``mm:ss`` or ``h:mm:ss``."""
    try:
        parts = [int(part) for part in clock.split(":")]
    except ValueError:
        return None
    return float(sum(part * 60**i for i, part in enumerate(reversed(parts))))
