"""``steptime calibrate``: the group of commands that turn measurements into profiles."""

from __future__ import annotations

from typing import Final

import typer

from steptime.cli.main import LazyGroup

#: Command -> its module, and what it does.
CALIBRATIONS: Final = {
    "machine": ("steptime.lab.cli.calibrate_machine", "Measure this machine and write a cluster file."),
    "mesh": ("steptime.lab.cli.calibrate_mesh", "Find the levels and axes of a machine's network in measurements."),
    "fit": ("steptime.lab.cli.calibrate_fit", "Fit time models to tables of measured kernels and collectives."),
    "frameworks": (
        "steptime.lab.cli.calibrate_frameworks",
        "Fit what training frameworks add to measured training runs.",
    ),
}


class CalibrateGroup(LazyGroup):
    """The commands of ``steptime calibrate``."""

    table = CALIBRATIONS


GROUP: Final = typer.Typer(
    name="calibrate",
    cls=CalibrateGroup,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
)


@GROUP.callback()
def calibrate() -> None:
    """Turn measurements into profiles: of this machine, of its network, of tables measured elsewhere."""
