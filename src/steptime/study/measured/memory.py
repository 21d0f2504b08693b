"""Predicted memory of a measured run in the terms of what the run's own tool prints."""

from __future__ import annotations

from typing import Final

from steptime.estimate.evaluate import Evaluation
from steptime.estimate.memory_definitions import memory_by_definition
from steptime.study.measured.metrics import MemoryDefinition
from steptime.study.measured.run import MeasuredRun

_NAMES: Final = {
    MemoryDefinition.ALLOCATED: "allocated", MemoryDefinition.RESERVED: "reserved", MemoryDefinition.DEVICE: "device",
}  # fmt: skip
#: What a framework's own log calls memory where a row does not say it: torchtitan prints `max_reserved`.
PRINTED: Final = {"torchtitan": "reserved", "megatron": "reserved"}


def definition_of(run: MeasuredRun) -> str:
    """``allocated``, ``reserved`` or ``device``: what the measured memory of a run is, as far as it is known."""
    stated = MemoryDefinition.NOT_STATED if run.memory is None else run.memory.definition
    return _NAMES.get(stated) or PRINTED.get(run.framework, "allocated")


def predicted_bytes(run: MeasuredRun, evaluation: Evaluation) -> float:
    """Predicted peak memory of one setting of a run, by the definition of its measurement.

    A run that was measured has run, so that its memory is at most that of the device.
    """
    needed = float(memory_by_definition(evaluation)[definition_of(run)])
    return min(needed, evaluation.machine.memory_bytes)
