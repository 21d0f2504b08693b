"""``steptime predict``: the group of commands that measure graphs, fit learned corrections and score predictors."""

from __future__ import annotations

from typing import Final

import typer

from steptime.cli.main import LazyGroup

COMMANDS: Final = {
    "measure": ("steptime.lab.cli.predict_commands", "Make random training graphs and measure them on this machine."),
    "train": ("steptime.lab.cli.predict_commands", "Fit a learned correction to measured graphs."),
    "score": ("steptime.lab.cli.predict_commands", "Errors of all predictors under the same splits."),
}


class PredictGroup(LazyGroup):
    """The commands of ``steptime predict``."""

    table = COMMANDS


GROUP: Final = typer.Typer(
    name="predict",
    cls=PredictGroup,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
)


@GROUP.callback()
def predict() -> None:
    """Learned corrections of predicted times: measure graphs here, fit factors of operators, score predictors."""
