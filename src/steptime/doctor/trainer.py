"""Progress bars of Lightning and of the Transformers Trainer, and the summary that the latter prints at its end."""

from __future__ import annotations

import re
from typing import Final

from steptime.doctor import words as w
from steptime.doctor.gather import Gathered
from steptime.doctor.records import StepLine

#: ``12%|#2  | 60/500 [04:00<28:40, 3.91s/it]``; what stands before it must be nothing, or Lightning's ``Epoch 0:``.
_BAR: Final = re.compile(
    r"^\s*(?:(?:Training|Epoch \d{1,9})\s*:+\s*)*\d{1,3}%\|.{0,300}?\|\s*(\d{1,12})/(\d{1,12}) "
    r"\[([\d:]{4,12})<[^,\]]{1,20},\s*" + w.NUMBER + r"(s/it|it/s)"
)
_RUNTIME: Final = re.compile(r"['\"]train_runtime['\"]: ['\"]?" + w.NUMBER)
_STEPS_PER_S: Final = re.compile(r"['\"]train_steps_per_second['\"]: ['\"]?" + w.NUMBER)
_SAMPLES_PER_S: Final = re.compile(r"['\"]train_samples_per_second['\"]: ['\"]?" + w.NUMBER)
_BATCH: Final = re.compile(r"Total train batch size \(w\. parallel, distributed & accumulation\) = ([\d,]{1,12})")
_EACH: Final = re.compile(r"Instantaneous batch size per device = (\d{1,9})")
_DTYPE: Final = re.compile(r"^\s*(bf16|fp16)=(True|False),?\s*$")
_OPTIMIZER: Final = re.compile(r"^\s*optim=(?:OptimizerNames\.)?(\w{1,40}),?\s*$")
_CHECKPOINT: Final = re.compile(r"Saving model checkpoint to|Saving (?:current )?model")


class Trainer:
    """Whatever shows its steps by a progress bar."""

    name = "trainer"

    def __init__(self) -> None:
        self.gathered = Gathered()
        self._summary: tuple[int, float] | None = None

    def feed(self, rank: int | None, line: str) -> None:
        """Take one line."""
        g = self.gathered
        if match := _BAR.match(line):
            self._bar(rank, match)
        elif match := _RUNTIME.search(line):
            self._end(line)
        elif (match := _BATCH.search(line)) and (batch := w.count(match[1])):
            g.settings["global_batch"] = batch
        elif match := _EACH.search(line):
            g.plan["micro_batch"] = int(match[1])
        elif match := _DTYPE.match(line):
            if match[2] == "True":
                g.settings["dtype"] = match[1]
        elif match := _OPTIMIZER.match(line):
            g.set_optimizer(match[1].lower().removesuffix("_torch").removesuffix("_torch_fused").removesuffix("_hf"))
        elif _CHECKPOINT.search(line):
            g.add_event("checkpoint")

    def _bar(self, rank: int | None, match: re.Match[str]) -> None:
        value, step = w.number(match[4]), int(match[1])
        if step == 0 or value is None or value <= 0:
            return
        time_s = value if match[5] == "s/it" else 1.0 / value
        self.gathered.add_step(rank, StepLine(number=step, time_s=w.step_time_s(time_s), at_s=_seconds(match[3])))

    def _end(self, line: str) -> None:
        speed, samples = _STEPS_PER_S.search(line), _SAMPLES_PER_S.search(line)
        per_s = w.rate(w.number(speed[1])) if speed else None
        if per_s is None:
            return
        whole = w.number(match[1]) if (match := _RUNTIME.search(line)) else None
        self._summary = max(1, round(per_s * (whole or 0.0))), 1.0 / per_s
        each = w.rate(w.number(samples[1])) if samples else None
        if each:
            self.gathered.settings.setdefault("global_batch", max(1, round(each / per_s)))

    def finish(self) -> None:
        """Without a progress bar the summary is the only step line: the mean over the whole run."""
        g = self.gathered
        if not g.steps and self._summary is not None:
            g.add_step(None, StepLine(number=self._summary[0], time_s=w.step_time_s(self._summary[1])))
            g.notes.append("the log has no step times, only the mean over the whole run, start-up and pauses included")


def _seconds(clock: str) -> float | None:
    """Seconds of ``mm:ss`` or ``h:mm:ss``."""
    try:
        parts = [int(part) for part in clock.split(":")]
    except ValueError:
        return None
    return float(sum(part * 60**i for i, part in enumerate(reversed(parts))))
