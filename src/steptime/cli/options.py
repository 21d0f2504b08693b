"""The options that several commands share, each with its type, range and help."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from steptime.api.request import digits
from steptime.errors import shorten
from steptime.plan.keys import COUNTS, MAX_DEVICES, MAX_GLOBAL_BATCH, MAX_SEQ


def whole(low: int, high: int) -> Callable[[str | int], int]:
    """Parser of a whole number from ``low`` to ``high``; a default comes as a number already."""

    def parse(given: str | int) -> int:
        text = str(given)
        value = digits(text)
        if not low <= value <= high:
            raise typer.BadParameter(f"{shorten(text, 40)!r} is not a whole number from {low} to {high}")
        return value

    return parse


def number(option: str, metavar: str, text: str, low: int = 1, high: int = MAX_DEVICES) -> Any:
    """An option whose value is a whole number."""
    return typer.Option(option, parser=whole(low, high), metavar=metavar, help=text)


def degree(name: str, metavar: str, text: str) -> Any:
    """The option of a key of a plan that is a whole number."""
    return number(f"--{name.replace('_', '-')}", metavar, text, *COUNTS[name])


def real(option: str, metavar: str, text: str) -> Any:
    """An option whose value is a number; its range is checked with the plan."""

    def parse(given: str | float) -> float:
        try:
            return float(given)
        except ValueError:
            raise typer.BadParameter(f"{shorten(str(given), 40)!r} is not a number") from None

    return typer.Option(option, parser=parse, metavar=metavar, help=text)


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


Plot = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Draw it too, as .svg, .png or .pdf (needs matplotlib).")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
All = Annotated[bool, typer.Option("--all", help="Show small terms and every constant too.")]
ModelOrRun = Annotated[
    str, typer.Argument(metavar="MODEL|RUN.toml", help="Model (catalogue name, config.json, TOML) or run.")
]
Predictor = Annotated[
    str | None,
    typer.Option("--predictor", metavar="learned|FILE", help="Multiply the times of operators by learned factors."),
]
Loss = Annotated[
    str | None,
    typer.Option("--loss", metavar="NAME", help="own, cross-entropy, mse, sum, mean; or let the factory give one."),
]
Cluster = Annotated[str | None, typer.Option("--cluster", help="Catalogue name or TOML file of the machines.")]
GPUS = number("--gpus", "N", "Devices of the job.")
GLOBAL_BATCH = number("--global-batch", "SEQUENCES", "Sequences per step.", 1, MAX_GLOBAL_BATCH)
Gpus = Annotated[int | None, GPUS]
GlobalBatch = Annotated[int | None, GLOBAL_BATCH]
Seq = Annotated[int | None, number("--seq", "TOKENS", "Sequence length; default: the model's.", 1, MAX_SEQ)]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help="bf16 (default), fp16, tf32, fp32; fp8: only the rate of products; with passes that quantise and narrow "
        "inputs kept: fp8-te (a scale per tensor, of former steps), fp8-tensorwise (of the tensor itself), "
        "fp8-blockwise (per block of 128), mxfp8 (of 32), nvfp4 (4 bits, of 16).",
    ),
]
Optimizer = Annotated[
    str | None, typer.Option("--optimizer", help="adam (default), adamw, adam8bit, sgd, momentum, muon, ...")
]
StrategyOption = Annotated[
    Strategy | None, typer.Option("--strategy", help="How tensors are split; 2d is SUMMA; default auto.")
]
ModeOption = Annotated[
    Mode | None, typer.Option("--mode", help="Keep the defects of a reproduced paper, or not (default).")
]


Dp = Annotated[int | None, degree("dp", "N", "Data ranks; default: what the other degrees leave.")]
Tp = Annotated[int | None, degree("tp", "N", "Tensor ranks.")]
Tp2 = Annotated[int | None, degree("tp2", "N", "Tensor ranks of the second axis (2d).")]
Cp = Annotated[int | None, degree("cp", "N", "Context ranks (the sequence is split).")]
Pp = Annotated[int | None, degree("pp", "N", "Pipeline stages.")]
Vpp = Annotated[int | None, degree("vpp", "N", "Virtual stages per stage (interleaving).")]
Ep = Annotated[int | None, degree("ep", "N", "Expert ranks: each has some of the experts.")]
Etp = Annotated[int | None, degree("etp", "N", "Tensor ranks of one expert.")]
Sp = Annotated[
    str | None, typer.Option("--sp", metavar="on|off", help="Sequence parallelism between products; default on.")
]
Shard = Annotated[int | None, degree("shard", "RANKS", "Ranks over which ZeRO shards (HSDP); 0, the default: all dp.")]
MicroBatch = Annotated[int | None, degree("micro_batch", "N", "Sequences per micro-batch.")]
Zero = Annotated[int | None, degree("zero", "N", "ZeRO stage, 0 to 3; default the framework's, of generic 1.")]
Panels = Annotated[int | None, degree("panels", "N", "Panels of a SUMMA product.")]
Recompute = Annotated[
    str | None,
    typer.Option(
        "--recompute",
        metavar="PARTS",
        help="What backward recomputes: none (default), full, selective (as --framework means it; attention where none "
        "is named), or parts joined by +: attention, norm, activation, attention_out, up_projection (of latent "
        "attention), mlp, experts, outputs (all but attention and every second product: torchtitan's op).",
    ),
]
RecomputeEvery = Annotated[
    int | None, degree("recompute_every", "N", "Recompute every N-th layer in full; default 1: all.")
]
Schedule = Annotated[
    str | None,
    typer.Option(
        "--schedule",
        help="A name of the command schedules, as gpipe, 1f1b, zb-h1, zb-v, dualpipe; interleaved follows from vpp.",
    ),
]
Overlap = Annotated[
    str | None,
    typer.Option(
        "--overlap",
        help="Hidden behind compute: of dp, tp, pp, ep, offload, joined by commas, or none; default the framework's, "
        "with dualpipe and dualpipev pp and ep too.",
    ),
]
Offload = Annotated[
    str | None,
    typer.Option("--offload", help="Kept on the host: of optimizer, activations, parameters, joined by commas."),
]
Context = Annotated[
    str | None,
    typer.Option("--context", help="What cp ranks exchange: all_gather, ring or ulysses; default the framework's."),
]
GradientDtype = Annotated[
    str | None,
    typer.Option("--gradient-dtype", help="Gradients are reduced in fp32, bf16 or fp16; default the framework's."),
]
Graphs = Annotated[
    str | None,
    typer.Option(
        "--graphs",
        help="What is one CUDA graph: step, or of each layer attention, router, preprocess, joined by +; default none.",
    ),
]
Dispatcher = Annotated[
    str | None,
    typer.Option(
        "--dispatcher", help="all_to_all, deepep or hybridep sends tokens to experts; default the framework's."
    ),
]
AttentionDtype = Annotated[
    str | None,
    typer.Option("--attention-dtype", help="fp8: fused attention computes in it; default 16 bits."),
]
DocumentLength = Annotated[
    float | None,
    real("--document-length", "TOKENS", "Sequences are packed documents of this many tokens; default one document."),
]
ExpertImbalance = Annotated[
    float | None,
    real("--expert-imbalance", "RATIO", "Tokens of the fullest expert rank over the mean, 1 or more; default 1."),
]
ExpertLoad = Annotated[
    str | None,
    typer.Option(
        "--expert-load",
        metavar="SPREAD",
        help="Tokens by expert: zipf:1.1, lognormal:0.5, uniform, or a file.",
    ),
]
ExpertCapacity = Annotated[
    float | None,
    real("--expert-capacity", "RATIO", "Slots of an expert over its mean tokens; tokens beyond are dropped."),
]
Framework = Annotated[
    str | None,
    typer.Option(
        "--framework", metavar="NAME", help="Training software, see steptime frameworks; default generic; ideal: none."
    ),
]
LoraRank = Annotated[int | None, number("--lora-rank", "R", "Train adapters of this rank on frozen weights.", 1, 10**5)]
LoraTargets = Annotated[
    str | None,
    typer.Option(
        "--lora-targets", help="Adapters: linear (default: all products), attention, or q,k,v,o,gate,up,down."
    ),
]
Dora = Annotated[bool | None, typer.Option("--dora", help="Adapters have lengths of columns of their own (DoRA).")]
Qlora = Annotated[bool | None, typer.Option("--qlora", help="Frozen weights are stored in 4 bits.")]
Attention = Annotated[
    str | None, typer.Option("--attention", help="fused (default) or unfused; published mode has summa too.")
]
Placement = Annotated[
    str | None,
    typer.Option(
        "--placement",
        metavar="AXIS=N,...|ORDER",
        help="Devices of each axis inside the fast domain; or default, search, or an order as tp-cp-pp-dp.",
    ),
]

PlanFile = Annotated[
    str | None,
    typer.Option(
        "--plan", metavar="FILE.json", help="Start from the plan that estimate or plan wrote with --json (its first)."
    ),
]


def _length(option: str, text: str) -> Any:
    return typer.Option(option, metavar="N", help=text)


Tokens = Annotated[
    str | None, _length("--tokens", "Tokens of the whole training, as 1T or 300B: shows days and GPU-hours.")
]
Samples = Annotated[str | None, _length("--samples", "The length of the training in sequences or images instead.")]
Epochs = Annotated[str | None, _length("--epochs", "The length in passes over the data set instead.")]
DatasetTokens = Annotated[str | None, _length("--dataset-tokens", "Tokens of the data set, for --epochs.")]
DatasetSamples = Annotated[str | None, _length("--dataset-samples", "Sequences or images of it, for --epochs.")]
Failures = Annotated[
    str | None,
    typer.Option(
        "--failures",
        metavar="NAME|FILE",
        help="How often parts fail, how the run saves and restarts: default, or FILE.toml. Shows the goodput.",
    ),
]
Prices = Annotated[
    str | None,
    typer.Option(
        "--prices", metavar="FILE", help="Prices, PUE, carbon: default, or FILE.toml. Shows money and energy."
    ),
]
Deadline = Annotated[
    str | None, typer.Option("--deadline", metavar="TIME", help="Longest time of the whole run, as '30 days'.")
]
Budget = Annotated[str | None, typer.Option("--budget", metavar="MONEY", help="Most that it may cost, as '2M USD'.")]

#: What describes a job, by parameter: where it runs, how it is parallelised, with which software.
JOB: dict[str, Any] = {
    "cluster": Cluster,
    "gpus": Gpus,
    "global_batch": GlobalBatch,
    "seq": Seq,
    "dtype": Dtype,
    "optimizer": Optimizer,
    "strategy": StrategyOption,
    "mode": ModeOption,
    "dp": Dp,
    "tp": Tp,
    "tp2": Tp2,
    "cp": Cp,
    "pp": Pp,
    "vpp": Vpp,
    "ep": Ep,
    "etp": Etp,
    "sp": Sp,
    "micro_batch": MicroBatch,
    "recompute": Recompute,
    "recompute_every": RecomputeEvery,
    "zero": Zero,
    "shard": Shard,
    "schedule": Schedule,
    "overlap": Overlap,
    "offload": Offload,
    "attention": Attention,
    "context": Context,
    "gradient_dtype": GradientDtype,
    "graphs": Graphs,
    "dispatcher": Dispatcher,
    "attention_dtype": AttentionDtype,
    "document_length": DocumentLength,
    "expert_imbalance": ExpertImbalance,
    "expert_load": ExpertLoad,
    "expert_capacity": ExpertCapacity,
    "panels": Panels,
    "placement": Placement,
    "framework": Framework,
    "lora_rank": LoraRank,
    "lora_targets": LoraTargets,
    "qlora": Qlora,
    "dora": Dora,
    "plan": PlanFile,
}


def describes_job(after: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command the options of :data:`JOB`, in place of its keyword arguments and after one of its own."""

    def extended(function: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in signature(function, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
        at = 1 + [p.name for p in own].index(after)
        shared = [
            Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=kind)
            for name, kind in JOB.items()
        ]
        every = [*own[:at], *shared, *own[at:]]

        function.__annotations__ = {p.name: p.annotation for p in every}
        function.__signature__ = Signature(every)  # type: ignore[attr-defined]
        return function

    return extended


def drawing(kind: str, path: Path | None) -> Callable[[Mapping[str, Any]], None] | None:
    """What draws the result of a command, given as JSON; None where no picture is asked for.

    Raises:
        UserError: a picture cannot be written to the file.
    """
    if path is None:
        return None
    from steptime.registry import loaded
    from steptime.report.figure import refuse_plot

    refuse_plot(path)
    write: Callable[[str, Mapping[str, Any], Path], None] = loaded("steptime.plots.cli:write_plot")
    return lambda found: write(kind, found, path)


#: Parameters of a command that say what the job is; the parallel plan has :data:`~steptime.plan.keys.KEYS`.
SETTINGS: Final = ("gpus", "global_batch", "seq", "dtype", "optimizer", "strategy", "mode", "framework")

#: Parameters of a command that say how long the whole training is.
TRAINING: Final = ("tokens", "samples", "epochs", "dataset_tokens", "dataset_samples")


def settings_given(given_options: Mapping[str, Any]) -> dict[str, Any]:
    """What the user gave of the job except its plan: the settings of an API call, from the parameters of a command."""
    lora = lora_of(
        given_options["lora_rank"], given_options["lora_targets"], given_options["qlora"], given_options["dora"]
    )
    return given(**{name: given_options[name] for name in SETTINGS}) | lora


def training_given(given_options: Mapping[str, Any]) -> dict[str, Any]:
    """The length of the training, if the user gave one: the argument ``training`` of an API call."""
    found = given(**{name: given_options[name] for name in TRAINING})
    return {"training": found} if found else {}


def lora_of(rank: int | None, targets: str | None, qlora: bool | None, dora: bool | None) -> dict[str, Any]:
    """The table ``lora`` of the four options, as far as they are given."""
    found = given(rank=rank, targets=targets, qlora=qlora, dora=dora)
    return {"lora": found} if found else {}


def given(**options: Any) -> dict[str, Any]:
    """The options that the user gave, enumerations as text."""
    return {
        name: value.value if isinstance(value, StrEnum) else value
        for name, value in options.items()
        if value is not None
    }
