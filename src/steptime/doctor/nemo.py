"""Lines of NeMo: one per step, or the progress bar of Lightning with the time of the step in it."""

from __future__ import annotations

import re
from typing import Final

from steptime.doctor import words as w
from steptime.doctor.gather import Gathered
from steptime.doctor.records import StepLine

_TIME: Final = re.compile(r"train_step_timing in s\"?\s*[:=]\s*" + w.NUMBER)
_STEP: Final = re.compile(
    r"\bglobal_step\"?\s*[:=]\s*(\d{1,12})\b|\biteration (\d{1,12})/\d{1,12}|\| (\d{1,12})/\d{1,12} \["
)
_BATCH: Final = re.compile(r"\bglobal_batch_size\s*[:=]\s*(\d{1,9})\b")
_CONSUMED: Final = re.compile(r"\bconsumed_samples\"?\s*[:=]\s*(\d{1,15})\b")
_TFLOPS: Final = re.compile(r"\bTFLOPS_per_GPU\s*[:=]\s*" + w.NUMBER, re.I)
_CHECKPOINT: Final = re.compile(r"Async checkpoint save for step|Scheduled async checkpoint save|Saving checkpoint|"
                                r"Successfully saved checkpoint")  # fmt: skip


class NeMo:
    """NeMo 1 and 2 on Megatron Core."""

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
        elif _CHECKPOINT.search(line):
            g.add_event("checkpoint")

    def _step(self, rank: int | None, line: str) -> None:
        found, step = _TIME.search(line), _STEP.search(line)
        if found is None or step is None:
            return
        g = self.gathered
        number = int(step[1] or step[2] or step[3])
        time_s = w.step_time_s(w.number(found[1]))
        g.add_step(rank, StepLine(number=number, time_s=time_s, at_s=w.clock_s(line)))
        if match := _BATCH.search(line):
            g.add_batch(int(match[1]))
        elif match := _CONSUMED.search(line):
            g.add_consumed(number, int(match[1]))
        if match := _TFLOPS.search(line):
            g.add_tflops(match[1])

    def finish(self) -> None:
        """The batch of most lines is that of the job."""
        self.gathered.settle_batch()
