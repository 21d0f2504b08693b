"""The options that several commands share."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

from steptime.cli.parser import ANSWER, Arg, flag, positional, row
from steptime.options import ADAPTERS, KEYS, LENGTH, SETTINGS

Plot = Annotated[
    Path | None,
    flag("--plot", metavar="FILE", help="Draw it too, as .svg, .png or .pdf (needs matplotlib).", group=ANSWER),
]
Json = Annotated[bool, flag("--json", help="Print one JSON document and nothing else.", group=ANSWER)]
All = Annotated[bool, flag("--all", help="Show small terms and every constant too.", group=ANSWER)]
ModelOrRun = Annotated[
    str, positional("MODEL|RUN.toml", "Model (catalogue name, config.json, TOML) or run.", catalogue="model")
]
Predictor = Annotated[
    str | None, flag("--predictor", metavar="learned|FILE", help="Multiply the times of operators by learned factors.")
]
Loss = Annotated[
    str | None, flag("--loss", metavar="NAME", help="own, cross-entropy, mse, sum, mean; or let the factory give one.")
]
Cluster = Annotated[str | None, row("cluster")]
Gpus = Annotated[int | None, row("gpus")]
GlobalBatch = Annotated[int | None, row("global_batch")]
Seq = Annotated[int | None, row("seq")]
Dtype = Annotated[str | None, row("dtype")]
Optimizer = Annotated[str | None, row("optimizer")]
Framework = Annotated[str | None, row("framework")]
LoraRank = Annotated[int | None, row("lora_rank")]
LoraTargets = Annotated[str | None, row("lora_targets")]
Qlora = Annotated[bool | None, row("qlora")]

JOB: Final[Mapping[str, Arg]] = {
    **{name: row(name) for name in (*SETTINGS, *KEYS, *ADAPTERS)},
    "placement": flag(
        "--placement",
        metavar="AXIS=N,...|ORDER",
        group="Degrees",
        help="Devices of each axis inside the fast domain; or default, search, or an order as tp-cp-pp-dp.",
    ),
    "plan": flag(
        "--plan",
        metavar="FILE.json",
        group="Job",
        help="Start from the plan that estimate or plan wrote with --json (its first).",
    ),
}
"""Options of a job by parameter: its cluster, parallelism and software."""
TRAINING: Final[Mapping[str, Arg]] = {name: row(name) for name in LENGTH}
"""Options for the length of the whole training."""
Failures = Annotated[
    str | None,
    flag(
        "--failures",
        metavar="NAME|FILE",
        help="How often parts fail, how the run saves and restarts: default, or FILE.toml. Shows the goodput.",
    ),
]
Prices = Annotated[
    str | None,
    flag("--prices", metavar="FILE", help="Prices, PUE, carbon: default, or FILE.toml. Shows money and energy."),
]
Deadline = Annotated[
    str | None, flag("--deadline", metavar="TIME", help="Longest time of the whole run, as '30 days'.")
]
Budget = Annotated[str | None, flag("--budget", metavar="MONEY", help="Most that it may cost, as '2M USD'.")]


def settings_given(options: Mapping[str, Any]) -> dict[str, Any]:
    """The user's settings of a job without its plan, for an API call, from the parameters of a command."""
    lora = given(**{name.removeprefix("lora_"): options[name] for name in ADAPTERS})
    return given(**{name: options[name] for name in SETTINGS if name != "cluster"}) | ({"lora": lora} if lora else {})


def training_given(given_options: Mapping[str, Any]) -> dict[str, Any]:
    """The length of the training, if the user gave one: the argument ``training`` of an API call."""
    found = given(**{name: given_options[name] for name in LENGTH})
    return {"training": found} if found else {}


def given(**options: Any) -> dict[str, Any]:
    """The options that the user gave, enumerations as text."""
    return {
        name: value.value if isinstance(value, StrEnum) else value
        for name, value in options.items()
        if value is not None
    }
