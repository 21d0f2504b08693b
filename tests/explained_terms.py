"""Terms computed again from the records of how they came about."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from math import prod
from typing import Any

from steptime.estimate import ledger
from steptime.estimate.evaluate import Evaluation, evaluate
from steptime.estimate.ledger import details_of, memory_details
from steptime.estimate.result import Detail, FormulaCall
from steptime.terms import Called, Tape, Term, at, taped

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


def lines_of(e: Evaluation) -> list[Term]:
    """Terms of the step of a plan, which is evaluated once more."""
    return ledger.explained(e.method, e.strategy, e.job, e.machine, e.plans)[1]


def tape_of(e: Evaluation) -> Tape:
    """What the evaluation of a plan calls."""
    with taped() as tape:
        evaluate(e.method, e.strategy, e.job, e.machine, e.plans)
    return tape


def noted(compute: Callable[[], object]) -> tuple[Called, str]:
    """The one formula that something calls, and what it rests on."""
    with taped() as tape, at("here"):
        compute()
    (found,) = tape.calls["here"]
    return found, found.basis if isinstance(found.basis, str) else found.basis()


def explained(e: Evaluation) -> tuple[Detail, ...]:
    """Time, and the memory of every stage."""
    memory = [detail for stage in e.memory for detail in memory_details(e, stage)]
    return (*details_of(lines_of(e)), *memory)
