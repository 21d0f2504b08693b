"""Terms computed again from the records of how they came about."""

from __future__ import annotations

from importlib import import_module
from math import prod
from typing import Any

from steptime.estimate.evaluate import Evaluation
from steptime.estimate.result import Detail, FormulaCall
from steptime.estimate.step_terms import details_of, lines_of, memory_details

TOLERANCE = 1e-9


def result_of(call: FormulaCall) -> float:
    """The formula on its arguments, times its factors; of a fitted collective the time alone."""
    module, _, name = call.function.rpartition(".")
    found: Any = getattr(import_module(f"steptime.cost.{module}"), name)(**call.arguments)
    return float(found[0] if isinstance(found, tuple) else found) * prod(call.factors.values())


def differing(details: tuple[Detail, ...]) -> list[tuple[str, float, float]]:
    """Terms whose record makes something else."""
    again = [(one.path, one.value, sum(map(result_of, one.calls))) for one in details]
    return [found for found in again if abs(found[1] - found[2]) > TOLERANCE * abs(found[1])]


def explained(e: Evaluation) -> tuple[Detail, ...]:
    """Time, and the memory of every stage."""
    memory = [detail for stage in e.memory for detail in memory_details(e, stage)]
    return (*details_of(lines_of(e)), *memory)
