"""The report of stages, sub-meshes, shardings, schedule, micro-batch and recomputation of a module."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from steptime.errors import counted
from steptime.sharding.cli.shard import by_name

if TYPE_CHECKING:
    from steptime.sharding.joint import JointPlan, PlannedStage


def print_joint(found: JointPlan) -> None:
    """Write the report to standard output."""
    from steptime.report import text as t

    out = t.console()
    where = " and ".join(f"{counted(each.devices, 'device')} of {each.cluster.name}" for each in found.machines)
    out.print(t.printable(f"{found.model} on {where}"), style="bold")
    low, high = found.bracket_s
    lines = [
        f"step {t.seconds(found.step_s)} (bracket {t.seconds(low)} to {t.seconds(high)}; schedule in closed form "
        f"{t.seconds(found.closed_form_s)})",
        f"{counted(len(found.stages), 'stage')}, schedule {found.schedule}, micro-batch {found.micro_batch}, "
        f"{found.micro_batches} micro-batches",
        f"bound {t.seconds(found.bound_s)}: all computation at its fastest, divided evenly over all devices",
        found.stop,
        *([f"{counted(found.idle, 'device')} in no stage"] if found.idle else []),
    ]
    for line in lines:
        t.indented(out, line, by=0)
    out.print()
    table = t.grid(("stage", "units", "devices", "mesh", "again", "memory", "micro-batch", "once"), left=(0, 1, 3))
    for number, stage in enumerate(found.stages, start=1):
        table.add_row(
            str(number), t.printable(_units(stage)), str(stage.devices), str(stage.plan.built.mesh),
            f"{stage.recomputed} of {stage.blocks}", t.memory(stage.memory_bytes), t.seconds(sum(stage.passes_s)),
            t.seconds(stage.once_s),
        )  # fmt: skip
    out.print(table)
    out.print()
    others = t.grid(("micro-batch", "schedule", "step"), left=(1,))
    for size, schedule, step_s in found.tried:
        others.add_row(str(size), schedule, "nothing fits" if step_s is None else t.seconds(step_s))
    out.print(others)
    out.print()
    parameters = t.grid(("stage", "parameter", "count", "sharding"), left=(0, 1, 3))
    for numbers, rows in _parameters(found):
        for (name, sharding), count in rows:
            parameters.add_row(numbers, t.printable(name), str(count), sharding)
    out.print(parameters)


def _units(stage: PlannedStage) -> str:
    """First and last unit of a stage, and where they run."""
    first, last = stage.units[0], stage.units[-1]
    return f"{first if first == last else f'{first} to {last}'} ({stage.machines.cluster.name})"


def _parameters(found: JointPlan) -> list[tuple[str, list[tuple[tuple[str, str], int]]]]:
    """Shardings of parameters, stages that follow each other with the same ones as one."""
    each = [(str(n), list(by_name(stage.parameters).items())) for n, stage in enumerate(found.stages, start=1)]
    out = []
    for rows, members in groupby(each, key=lambda one: one[1]):
        numbers = [number for number, _ in members]
        out.append((numbers[0] if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}", rows))
    return out
