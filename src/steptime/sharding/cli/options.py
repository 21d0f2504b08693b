"""Options that several sharding commands share, with their parsers."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Annotated

from steptime.cli.parser import flag, number, positional, row
from steptime.errors import UserError
from steptime.options import MAX_DEVICES
from steptime.report import text as t

if TYPE_CHECKING:
    from steptime.estimate.result import Estimate

Model = Annotated[str, positional(metavar="pkg.module:factory|FILE.py:factory|FILE.onnx", help="What makes the model.")]
Cluster = Annotated[str, row("cluster")]
Gpus = Annotated[int, number("--gpus", "N", "Devices of the mesh.", 2, MAX_DEVICES)]
Mesh = Annotated[
    str | None,
    flag(
        "--mesh",
        metavar="data=2,model=4",
        help="Axes, the innermost last; default: all of 1 and 2 axes, of planners 2 near equal.",
    ),
]
Batch = Annotated[int | None, number("--batch", "N", "Samples of the whole step.")]
Memory = Annotated[
    str | None,
    flag("--memory", metavar="'N GiB'", help="Memory of a device for tensors; default: what it has."),
]


def software_line(estimate: Estimate) -> str:
    """Framework, element type and band in one line."""
    said, band = f"framework {estimate.provenance.framework}, {estimate.workload['dtype']}", estimate.step_time_band_s
    return said if band is None else f"{said}; band 90 %: {t.seconds(band[0])} .. {t.seconds(band[1])}"


def room_of(memory: str | None) -> float | None:
    """Bytes of ``--memory``; None: not given.

    Raises:
        UserError: it has no unit, or is not above 0.

    >>> room_of("1 GiB")
    1073741824.0
    """
    from steptime.units import parse

    if memory is None:
        return None
    room = parse(memory, "bytes")
    if not 0 < room < inf:
        raise UserError(f"--memory {memory!r}: a device has more than 0", hint="write for example '80 GB'")
    return room


def seconds_of(option: str, seconds: float) -> float:
    """Seconds of an option that limits a search.

    Raises:
        UserError: they are not above 0, or no number.

    >>> seconds_of("--seconds", 0.5)
    0.5
    """
    if not 0 < seconds < inf:
        raise UserError(f"{option} {seconds:g}: a search takes time", hint="give seconds above 0")
    return seconds
