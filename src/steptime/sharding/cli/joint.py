"""The report of stages, sub-meshes, shardings, schedule, micro-batch and recomputation of a module."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steptime.errors import counted
from steptime.sharding.cli.lists import by_name

if TYPE_CHECKING:
    from steptime.sharding.joint_plan import JointPlan, PlannedStage


def print_joint(found: JointPlan) -> None:
    """Write the report to standard output."""
    from steptime.report import text as t

    out = t.console()
    where = " and ".join(f"{counted(each.devices, 'device')} of {each.cluster.name}" for each in found.machines)
    out.print(t.printable(f"{found.model} on {where}"), style="bold")
    low, high = found.bracket_s
    ranks = "" if found.stages_per_rank == 1 else f" ({found.stages_per_rank} for each rank)"
    lines = [
        f"step {t.seconds(found.step_s)} (bracket {t.seconds(low)} to {t.seconds(high)}; schedule in closed form "
        f"{t.seconds(found.closed_form_s)})",
        f"{counted(len(found.stages), 'stage')}{ranks}, schedule {found.schedule}, micro-batch {found.micro_batch}, "
        f"{found.micro_batches} micro-batch{'' if found.micro_batches == 1 else 'es'}",
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
            str(number),
            t.printable(_units(stage)),
            f"{stage.devices} {stage.machines.cluster.name}" if len(found.machines) > 1 else str(stage.devices),
            str(stage.plan.built.mesh),
            f"{stage.recomputed} of {stage.blocks}",
            t.memory(stage.memory_bytes),
            t.seconds(sum(stage.passes_s)),
            t.seconds(stage.once_s),
        )
    out.print(table)
    _print_seams(found)
    _print_details(found)


def _print_seams(found: JointPlan) -> None:
    """How each activation comes into each stage."""
    from steptime.report import text as t

    seams = t.grid(("into", "activation", "most of a device", "time"), left=(0, 1))
    for number, stage in enumerate(found.stages, start=1):
        for n, each in enumerate(stage.entering.passing):
            time = "" if n else t.seconds(stage.entering.seconds)
            seams.add_row(str(number), t.printable(str(each)), t.memory(each.moved_bytes), time)
    if seams.row_count:
        t.console().print()
        t.console().print(seams)


def _print_details(found: JointPlan) -> None:
    """Micro-batches and schedules that were tried, and how parameters lie."""
    from steptime.report import text as t

    out = t.console()
    out.print()
    others = t.grid(("micro-batch", "schedule", "step"), left=(1,))
    for size, schedule, step_s in found.tried:
        others.add_row(str(size), schedule, "nothing fits" if step_s is None else t.seconds(step_s))
    out.print(others)
    out.print()
    parameters = t.grid(("parameter", "count", "sharding", "stages"), left=(0, 2, 3))
    for (name, sharding), (count, numbers) in _parameters(found).items():
        parameters.add_row(t.printable(name), str(count), sharding, ", ".join(map(str, numbers)))
    out.print(parameters)


def _units(stage: PlannedStage) -> str:
    """First and last unit of a stage."""
    first, last = stage.units[0], stage.units[-1]
    return first if first == last else f"{first} to {last}"


def _parameters(found: JointPlan) -> dict[tuple[str, str], tuple[int, list[int]]]:
    """Parameters of lists under one name, by sharding: how many, and in which stages."""
    out: dict[tuple[str, str], tuple[int, list[int]]] = {}
    for number, stage in enumerate(found.stages, start=1):
        for key, count in by_name(stage.parameters).items():
            known, numbers = out.get(key, (0, []))
            out[key] = known + count, [*numbers, number]
    return out
