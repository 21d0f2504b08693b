"""``steptime predict``: the group of commands that measure graphs, fit learned corrections and score predictors."""

from __future__ import annotations

from typing import Final

from steptime.cli.parser import Entry, Group

COMMANDS: Final = {
    "measure": ("steptime.lab.cli.predict_commands", "Make random training graphs and measure them on this machine."),
    "train": ("steptime.lab.cli.predict_commands", "Fit a learned correction to measured graphs."),
    "score": ("steptime.lab.cli.predict_commands", "Errors of all predictors under the same splits."),
}

GROUP: Final = Group(
    "steptime predict",
    "Learned corrections of predicted times: measure graphs here, fit factors of operators, score predictors.",
    {name: Entry(*row) for name, row in COMMANDS.items()},
)
