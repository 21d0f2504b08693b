"""``steptime calibrate``: the group of commands that turn measurements into profiles."""

from __future__ import annotations

from typing import Final

from steptime.cli.parser import Entry, Group

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

GROUP: Final = Group(
    "steptime calibrate",
    "Turn measurements into profiles: of this machine, of its network, of tables measured elsewhere.",
    {name: Entry(*row) for name, row in CALIBRATIONS.items()},
)
