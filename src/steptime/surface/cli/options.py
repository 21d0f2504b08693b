"""The options that several commands share, each with its type, range and help."""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any

import typer

from steptime.errors import shorten

#: Same bounds as in RUN.toml (which is not imported here because it imports pydantic).
MAX_DEVICES = 10**7
MAX_GLOBAL_BATCH = 10**9
MAX_SEQ = 10**8


def whole(low: int, high: int) -> Callable[[str | int], int]:
    """Parser of a whole number from ``low`` to ``high``; a default comes as a number already."""

    def parse(given: str | int) -> int:
        text = str(given)
        value = int(text) if re.fullmatch(r"[0-9]{1,12}", text) else -1
        if not low <= value <= high:
            raise typer.BadParameter(f"{shorten(text, 40)!r} is not a whole number from {low} to {high}")
        return value

    return parse


def number(option: str, metavar: str, text: str, low: int = 1, high: int = MAX_DEVICES) -> Any:
    """An option whose value is a whole number."""
    return typer.Option(option, parser=whole(low, high), metavar=metavar, help=text)


class Strategy(StrEnum):
    """Families of parallel plans."""

    ONE_D = "1d"
    TWO_D = "2d"
    CONTEXT = "context"
    AUTO = "auto"


class Mode(StrEnum):
    """Whether defects of a reproduced paper are kept."""

    CORRECTED = "corrected"
    PUBLISHED = "published"


Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
All = Annotated[bool, typer.Option("--all", help="Show small terms and every constant too.")]
Cluster = Annotated[str | None, typer.Option("--cluster", help="Catalogue name or TOML file of the machines.")]
GPUS = number("--gpus", "N", "Devices of the job.")
GLOBAL_BATCH = number("--global-batch", "SEQUENCES", "Sequences per step.", 1, MAX_GLOBAL_BATCH)
Gpus = Annotated[int | None, GPUS]
GlobalBatch = Annotated[int | None, GLOBAL_BATCH]
Seq = Annotated[int | None, number("--seq", "TOKENS", "Sequence length; default: the model's.", 1, MAX_SEQ)]
Dtype = Annotated[str | None, typer.Option("--dtype", help="bf16 (default), fp16, fp8, tf32 or fp32.")]
Optimizer = Annotated[str | None, typer.Option("--optimizer", help="adam (default), adamw, adam8bit, momentum or sgd.")]
StrategyOption = Annotated[
    Strategy | None, typer.Option("--strategy", help="How tensors are split; 2d is SUMMA; default auto.")
]
ModeOption = Annotated[
    Mode | None, typer.Option("--mode", help="Keep the defects of a reproduced paper, or not (default).")
]


Dp = Annotated[int | None, number("--dp", "N", "Data ranks; default: what the other degrees leave.")]
Tp = Annotated[int | None, number("--tp", "N", "Tensor ranks.")]
Tp2 = Annotated[int | None, number("--tp2", "N", "Tensor ranks of the second axis (2d).")]
Cp = Annotated[int | None, number("--cp", "N", "Context ranks (the sequence is split).")]
Pp = Annotated[int | None, number("--pp", "N", "Pipeline stages.")]
Vpp = Annotated[int | None, number("--vpp", "N", "Virtual stages per stage (interleaving).", 1, 10**5)]
Ep = Annotated[int | None, number("--ep", "N", "Expert ranks; only 1 in this version.")]
MicroBatch = Annotated[int | None, number("--micro-batch", "N", "Sequences per micro-batch.", 1, MAX_GLOBAL_BATCH)]
Zero = Annotated[int | None, number("--zero", "N", "ZeRO stage, 0 to 3; default 1.", 0, 3)]
Panels = Annotated[int | None, number("--panels", "N", "Panels of a SUMMA product.", 1, 10**6)]
Recompute = Annotated[
    str | None, typer.Option("--recompute", help="What backward recomputes: none (default), attention or full.")
]
Schedule = Annotated[str | None, typer.Option("--schedule", help="1f1b, or interleaved where vpp is more than 1.")]
Overlap = Annotated[
    str | None, typer.Option("--overlap", help="Traffic that hides behind compute: dp (default), pp, 'dp,pp' or none.")
]
Attention = Annotated[
    str | None, typer.Option("--attention", help="fused (default) or unfused; published mode has summa too.")
]
Placement = Annotated[
    str | None,
    typer.Option(
        "--placement", metavar="AXIS=N,...", help="Devices of each axis inside the fast domain; default best."
    ),
]


def given(**options: Any) -> dict[str, Any]:
    """The options that the user gave, enumerations as text."""
    return {
        name: value.value if isinstance(value, StrEnum) else value
        for name, value in options.items()
        if value is not None
    }
