"""``steptime calibrate``: the group of commands that turn measurements into profiles."""

from __future__ import annotations

from typing import Final

from steptime.cli.parser import Entry, Group

#: Command -> its module, and what it does.
CALIBRATIONS: Final = {
    "machine": ("steptime.measure.cli.machine", "Measure this machine and write a cluster file."),
    "mesh": ("steptime.measure.cli.mesh", "Find the levels and axes of a machine's network in measurements."),
}

GROUP: Final = Group(
    "steptime calibrate",
    "Turn measurements into profiles: of this machine, of its network, of tables measured elsewhere.",
    {name: Entry(*row) for name, row in CALIBRATIONS.items()},
)
