"""The command ``steptime fit``: the cheapest way to fit a training step on one device."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from steptime.cli import options as o
from steptime.cli.parser import flag, number, positional
from steptime.options import MAX_FIT_BATCH, MAX_FIT_SEQ


class Allow(StrEnum):
    """Strongest allowed change of the numerics."""

    NONE = "none"
    ROUNDING = "rounding"
    TRAINING = "training"


def command(
    model: Annotated[
        str,
        positional(
            metavar="MODEL",
            help="pkg.module:factory or file.py:factory, whose code is imported and so run; or a catalogue name, "
            "config.json or TOML file.",
        ),
    ],
    device: Annotated[
        str, flag("--device", catalogue="device", help="Catalogue name or TOML file of the device, or of a cluster.")
    ],
    batch: Annotated[
        int | None,
        number("--batch", "SAMPLES", "Samples per step; default: the factory's, else 8.", 1, MAX_FIT_BATCH),
    ] = None,
    seq: Annotated[
        int | None, number("--seq", "TOKENS", "Tokens of a sample; default: the model's.", 1, MAX_FIT_SEQ)
    ] = None,
    optimizer: Annotated[
        str | None,
        flag("--optimizer", help="adamw (default), adam, sgd, sgd-momentum, adagrad, rmsprop or adafactor."),
    ] = None,
    loss: o.Loss = None,
    host_bandwidth: Annotated[
        str | None,
        flag(
            "--host-bandwidth",
            metavar="'N GB/s'",
            help="Sustained bandwidth of the link between device and host, each way; default the device's.",
        ),
    ] = None,
    allow: Annotated[
        Allow | None,
        flag(
            "--allow",
            help="Strongest change of the numerics: none, rounding (default: fewer bits somewhere), training (the "
            "trained model may differ: fp8, bf16 weights, adapters on 4-bit weights).",
        ),
    ] = None,
    framework: o.Framework = None,
    lora_rank: o.LoraRank = None,
    lora_targets: o.LoraTargets = None,
    qlora: o.Qlora = None,
    inputs: Annotated[
        list[str] | None,
        flag("--input", metavar="SHAPE", help="Input of a captured module, as ids=8x1024:int64. Repeatable."),
    ] = None,
    show_all: Annotated[bool, flag("--all", help="Show every point of the front.")] = False,
    json: o.Json = False,
) -> None:
    """The cheapest way to make a training step fit on one device, and what each technique saves and costs.

    A factory (pkg.module:factory, file.py:factory) is imported, which runs its code, and its module is captured without
    weights or data: memory is exact. Other models are estimated by their dimensions. Precision is one of the
    techniques that are tried, so there is no --dtype and no --autocast: the start is the module as it is made.
    """
    from steptime.captured import fitting
    from steptime.cli.job import refuse_run
    from steptime.cli.output import Progress

    refuse_run(model)
    lora = o.given(rank=lora_rank, targets=lora_targets, qlora=qlora)
    options = o.given(
        batch=batch, seq=seq, optimizer=optimizer, loss=loss, allow=allow, framework=framework,
        lora=lora or None,
        host_bandwidth_Bps=None if host_bandwidth is None else _bandwidth(host_bandwidth),
    )  # fmt: skip
    with Progress("captures") as progress:
        result = fitting.fit(model, device, inputs=tuple(inputs or ()), progress=progress, **options)
    if json:
        from steptime.cli.output import print_json

        print_json(result.to_json())
        return
    from steptime.captured.report.fit import print_fit

    print_fit(result, show_all=show_all)


def _bandwidth(text: str) -> float:
    from steptime.errors import FieldError, UserError
    from steptime.units import parse

    try:
        return parse(text, "Bps")
    except UserError as error:
        raise FieldError("", "--host-bandwidth", str(error)) from None
