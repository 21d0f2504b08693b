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
        f"framework {found.framework}",
        f"{counted(found.count, 'stage')}{ranks}, schedule {found.schedule}, micro-batch {found.micro_batch}, "
        f"{found.micro_batches} micro-batch{'' if found.micro_batches == 1 else 'es'}",
        f"bound {t.seconds(found.bound_s)}: all computation at its fastest, divided evenly over all devices",
        found.stop,
        *([f"{counted(found.idle, 'device')} in no stage"] if found.idle else []),
    ]
    for line in lines:
        t.indented(out, line, by=0)
    out.print()
    table = t.grid(("stage", "units", "devices", "mesh", "again", "memory", "micro-batch", "once"), left=(0, 1, 3))
    for stage in found.stages:
        table.add_row(
            stage.name,
            t.printable(_units(stage)),
            (f"{stage.machines.cluster.name} " if len(found.machines) > 1 else "") + _devices(stage),
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
    """Print how activations reach each stage."""
    from steptime.report import text as t

    seams = t.grid(("from", "activation", "most of a device", "time"), left=(0, 1))
    for stage in found.stages:
        for way in stage.entering:
            for n, each in enumerate(way.passing):
                ends = "" if n else f"{way.source} to {way.target}"
                time = "" if n else t.seconds(way.seconds)
                seams.add_row(ends, t.printable(str(each)), t.memory(each.moved_bytes), time)
    if seams.row_count:
        t.console().print()
        t.console().print(seams)


def _print_details(found: JointPlan) -> None:
    """Print the micro-batches and schedules that were tried, and the shardings of parameters."""
    from steptime.report import text as t

    out = t.console()
    out.print()
    others = t.grid(("micro-batch", "schedule", "step"), left=(1,))
    for size, schedule, step_s in found.tried:
        others.add_row(str(size), schedule, "nothing fits" if step_s is None else t.seconds(step_s))
    out.print(others)
    out.print()
    parameters = t.grid(("parameter", "count", "sharding", "stages"), left=(0, 2, 3))
    for (name, sharding), (count, stages) in _parameters(found).items():
        parameters.add_row(t.printable(name), str(count), sharding, ", ".join(stages))
    out.print(parameters)


def _units(stage: PlannedStage) -> str:
    """First and last unit of a stage."""
    first, last = stage.units[0], stage.units[-1]
    return first if first == last else f"{first} to {last}"


def _devices(stage: PlannedStage) -> str:
    """The first and the last device of a stage."""
    last = stage.first_device + stage.devices - 1
    return f"{stage.first_device}-{last}" if stage.devices > 1 else str(last)


def _parameters(found: JointPlan) -> dict[tuple[str, str], tuple[int, list[str]]]:
    """Number and stages of parameters, by name without list indices and by sharding."""
    out: dict[tuple[str, str], tuple[int, list[str]]] = {}
    for stage in found.stages:
        for key, count in by_name(stage.parameters).items():
            known, stages = out.get(key, (0, []))
            out[key] = known + count, [*stages, stage.name]
    return out
