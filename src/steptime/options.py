"""Every option of a training job and of its plan, once.

The command line and its help, the keyword arguments of :mod:`steptime.api` and their checks, RUN.toml, the record of a
plan, its short form in reports, the columns of studies and the form of the page follow from :data:`OPTIONS`. Imports
nothing of steptime but its errors, so that the command line reads it before it knows what it will do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from numbers import Real
from typing import Any, Final, NamedTuple, TypeAlias

from steptime.errors import FieldError, shown

MAX_DEVICES: Final = 10**7
MAX_GLOBAL_BATCH: Final = 10**9
MAX_SEQ: Final = 10**8
MAX_FIT_BATCH: Final = 10**6
"""Samples of a step on one device, for ``fit``."""
MAX_FIT_SEQ: Final = 10**7
MAX_RANK: Final = 10**5
"""Largest rank of an adapter."""


class Count(NamedTuple):
    """A whole number, and its range."""

    low: int = 1
    high: int = MAX_DEVICES


def digits(text: str) -> int:
    """The whole number that up to 12 digits say; -1 for any other text.

    >>> digits("8"), digits("+8"), digits("1" * 13)
    (8, -1, -1)
    """
    return int(text) if re.fullmatch(r"[0-9]{1,12}", text) else -1


class Ratio(NamedTuple):
    """A number, its range, and its meaning."""

    low: float
    high: float
    meaning: str


class OneOf(NamedTuple):
    """One of some names."""

    names: tuple[str, ...]


class SomeOf(NamedTuple):
    """Any number of some names: joined by commas, ``none``, or a list."""

    names: tuple[str, ...]


class Named(NamedTuple):
    """A name of a catalogue, or a file of its kind."""

    kind: str


class Text(NamedTuple):
    """Words with a grammar of their own."""


class Switch(NamedTuple):
    """``on`` or ``off``."""


class Flag(NamedTuple):
    """A flag, which is set if it is given."""


Takes: TypeAlias = Count | Ratio | OneOf | SomeOf | Named | Text | Switch | Flag


class Place(Enum):
    """Subject that an option describes."""

    JOB = "the job: what is trained, where, with which software"
    ADAPTER = "the adapters of the job: a key of the table lora"
    COLUMN = "the plan: each candidate of a search has its own value"
    CHOICE = "the plan: one value for all candidates of a search"
    LENGTH = "the length of the whole training"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option: ``--name-with-dashes`` on the command line, a key of RUN.toml and JSON; in Python a keyword of
    the job, or a key of ``plan=`` of an estimate and ``fix=`` of a search."""

    name: str
    takes: Takes
    help: str
    place: Place
    group: str
    """Heading in ``--help``."""
    metavar: str = ""
    usual: Any = None
    """Default value, without a framework."""
    label: str | None = None
    """Name in the short form of a plan, shown if the value is not the default; None: not shown."""
    recorded: bool = False
    """True if the record of a plan has it even at the default value."""
    published: bool = True
    """True if the published models support it; else they take the default value only."""
    of_experts: bool = False
    """True if it applies only to models with experts."""
    first: bool = False
    """True for the ten options that come first in ``--help``."""

    @property
    def flag(self) -> str:
        """Spelling on the command line.

        >>> OPTIONS["micro_batch"].flag
        '--micro-batch'
        """
        return f"--{self.name.replace('_', '-')}"


_JOB, _MESH, _MEMORY = "Job", "Degrees", "Memory"
_HOW, _EXPERTS, _ADAPTERS, _LENGTH = "Schedule, kernels and overlap", "Experts", "Adapters", "Length of the training"


def _option(name: str, takes: Takes, place: Place, group: str, help: str, metavar: str = "", **more: Any) -> Option:
    return Option(name=name, takes=takes, place=place, group=group, help=help, metavar=metavar, **more)


def _column(name: str, takes: Takes, help: str, metavar: str = "N", group: str = _MESH, **more: Any) -> Option:
    return _option(name, takes, Place.COLUMN, group, help, metavar, **more)


def _choice(name: str, takes: Takes, help: str, metavar: str = "", group: str = _HOW, **more: Any) -> Option:
    return _option(name, takes, Place.CHOICE, group, help, metavar, **more)


def _of_job(name: str, takes: Takes, help: str, metavar: str = "", **more: Any) -> Option:
    return _option(name, takes, Place.JOB, _JOB, help, metavar, **more)


def _adapter(name: str, takes: Takes, help: str, metavar: str = "") -> Option:
    return _option(name, takes, Place.ADAPTER, _ADAPTERS, help, metavar)


def _length(name: str, help: str) -> Option:
    return _option(name, Text(), Place.LENGTH, _LENGTH, help, "N")


_ROWS: Final = (
    _of_job("cluster", Named("cluster"), "Catalogue name or TOML file of the machines.", "NAME|FILE", first=True),
    _of_job("gpus", Count(), "Devices of the job.", "N", first=True),
    _of_job("global_batch", Count(high=MAX_GLOBAL_BATCH), "Sequences per step.", "SEQUENCES", first=True),
    _of_job("seq", Count(high=MAX_SEQ), "Sequence length; default: the model's.", "TOKENS", first=True),
    _of_job(
        "dtype", Text(),
        "bf16 (default), fp16, tf32, fp32; fp8: only the rate of products; with passes that quantise and narrow "
        "inputs kept: fp8-te (a scale per tensor, of former steps), fp8-tensorwise (of the tensor itself), "
        "fp8-blockwise (per block of 128), mxfp8 (of 32), nvfp4 (4 bits, of 16).", "DTYPE", first=True,
    ),
    _of_job("optimizer", Text(), "adam (default), adamw, adam8bit, sgd, momentum, muon, ...", "NAME"),
    _of_job(
        "strategy", OneOf(("1d", "2d", "context", "auto")), "How tensors are split; 2d is SUMMA; default auto.",
    ),
    _of_job(
        "mode", OneOf(("corrected", "published")), "Keep the defects of a reproduced paper, or not (default).",
    ),
    _of_job(
        "framework", Named("framework"), "Training software, see steptime frameworks; default generic; ideal: none.",
        "NAME", first=True,
    ),
    _column("dp", Count(), "Data ranks; default: what the other degrees leave."),
    _column("tp", Count(), "Tensor ranks.", first=True, usual=1),
    _column("tp2", Count(), "Tensor ranks of the second axis (2d).", usual=1),
    _column("cp", Count(), "Context ranks (the sequence is split).", usual=1),
    _column("pp", Count(), "Pipeline stages.", first=True, usual=1),
    _column("vpp", Count(high=10**5), "Virtual stages per stage (interleaving).", usual=1, published=False),
    _column(
        "ep", Count(), "Expert ranks: each has some of the experts.", usual=1, published=False, of_experts=True,
    ),
    _column("etp", Count(), "Tensor ranks of one expert.", usual=1, published=False, of_experts=True),
    _column("sp", Switch(), "Sequence parallelism between products; default on.", "on|off", usual=1, published=False),
    _column("micro_batch", Count(high=MAX_GLOBAL_BATCH), "Sequences per micro-batch.", first=True, usual=1),
    _column("panels", Count(high=10**6), "Panels of a SUMMA product.", usual=1, label="panels"),
    _column(
        "zero", Count(0, 3), "ZeRO stage, 0 to 3; default the framework's, of generic 1.", "N", _MEMORY, first=True,
        usual=1, label="zero", published=False,
    ),
    _column(
        "shard", Count(0), "Ranks over which ZeRO shards (HSDP); 0, the default: all dp.", "RANKS", _MEMORY, usual=0,
        label="shard", published=False,
    ),
    _column(
        "recompute", Text(),
        "What backward recomputes: none (default), full, selective (as --framework means it; attention where none "
        "is named), or parts joined by +: attention, norm, activation, attention_out, up_projection (of latent "
        "attention), mlp, experts, outputs (all but attention and every second product: torchtitan's op).",
        "PARTS", _MEMORY, first=True, usual="none", label="recompute",
    ),
    _column(
        "recompute_every", Count(), "Recompute every N-th layer in full; default 1: all.", "N", _MEMORY, usual=1,
        label="every", published=False,
    ),
    _choice(
        "schedule", Named("schedule"),
        "A name of the command schedules, as gpipe, 1f1b, zb-h1, zb-v, dualpipe; interleaved follows from vpp.",
        "NAME", usual="1f1b", published=False, recorded=True,
    ),
    _choice(
        "attention", OneOf(("fused", "unfused", "summa")),
        "fused (default) or unfused; published mode has summa too.", "KERNEL", usual="fused", label="attention",
        recorded=True,
    ),
    _choice(
        "attention_dtype", OneOf(("fp8",)), "fp8: fused attention computes in it; default 16 bits.", "DTYPE",
        label="attention in", published=False,
    ),
    _choice(
        "document_length", Ratio(1.0, float(MAX_SEQ), "tokens of a document of a packed sequence"),
        "Sequences are packed documents of this many tokens; default one document.", "TOKENS", label="documents of",
        published=False,
    ),
    _choice(
        "overlap", SomeOf(("dp", "tp", "pp", "ep", "offload")),
        "Hidden behind compute: of dp, tp, pp, ep, offload, joined by commas, or none; default the framework's, "
        "with dualpipe and dualpipev pp and ep too.", "AXES", usual=("dp",), label="overlap", recorded=True,
    ),
    _choice(
        "offload", SomeOf(("optimizer", "activations", "parameters")),
        "Kept on the host: of optimizer, activations, parameters, joined by commas.", "PARTS", _MEMORY, usual=(),
        label="offload", published=False,
    ),
    _choice(
        "graphs", Text(),
        "What is one CUDA graph: step, or of each layer attention, router, preprocess, joined by +; default none.",
        "PARTS", usual="none", label="graphs", published=False,
    ),
    _choice(
        "compile", Flag(),
        "torch.compile of model and loss: norms, dropouts, masks and loss that the framework runs by several kernels "
        "are fused, and keep no copies.",
        usual=False, label="compile", published=False,
    ),
    _choice(
        "dispatcher", OneOf(("all_to_all", "deepep", "hybridep")),
        "all_to_all, deepep or hybridep sends tokens to experts; default the framework's.", "NAME", _EXPERTS,
        usual="all_to_all", label="dispatcher", published=False, of_experts=True, recorded=True,
    ),
    _choice(
        "context", OneOf(("all_gather", "ring", "ulysses")),
        "What cp ranks exchange: all_gather, ring or ulysses; default the framework's.", "WAY", usual="all_gather",
        published=False, recorded=True,
    ),
    _choice(
        "gradient_dtype", OneOf(("fp32", "bf16", "fp16")),
        "Gradients are reduced in fp32, bf16 or fp16; default the framework's.", "DTYPE", published=False,
    ),
    _choice(
        "expert_imbalance", Ratio(1.0, 1e4, "tokens of the fullest expert rank over the mean"),
        "Tokens of the fullest expert rank over the mean, 1 or more; default 1.", "RATIO", _EXPERTS, usual=1.0,
        published=False, of_experts=True, recorded=True,
    ),
    _choice(
        "expert_load", Text(), "Tokens by expert: zipf:1.1, lognormal:0.5, uniform, or a file.", "SPREAD", _EXPERTS,
        published=False, of_experts=True,
    ),
    _choice(
        "expert_capacity", Ratio(0.01, 1e4, "slots of an expert over its mean tokens"),
        "Slots of an expert over its mean tokens; tokens beyond are dropped.", "RATIO", _EXPERTS, published=False,
        of_experts=True,
    ),
    _adapter("lora_rank", Count(high=MAX_RANK), "Train adapters of this rank on frozen weights.", "R"),
    _adapter(
        "lora_targets", Text(), "Adapters: linear (default: all products), attention, or q,k,v,o,gate,up,down.", "PARTS"
    ),
    _adapter("qlora", Flag(), "Frozen weights are stored in 4 bits."),
    _adapter("dora", Flag(), "Adapters have lengths of columns of their own (DoRA)."),
    _length("tokens", "Tokens of the whole training, as 1T or 300B: shows days and GPU-hours."),
    _length("samples", "The length of the training in sequences or images instead."),
    _length("epochs", "The length in passes over the data set instead."),
    _length("dataset_tokens", "Tokens of the data set, for --epochs."),
    _length("dataset_samples", "Sequences or images of it, for --epochs."),
)  # fmt: skip

OPTIONS: Final[Mapping[str, Option]] = {row.name: row for row in _ROWS}
"""Name -> option, in the order of records and messages."""


def of_place(*places: Place) -> tuple[str, ...]:
    """Names of the options that describe something, in order."""
    return tuple(row.name for row in _ROWS if row.place in places)


SETTINGS: Final = of_place(Place.JOB)
"""Arguments of an API call that describe the job, with ``cluster``."""
COLUMNS: Final = of_place(Place.COLUMN)
"""Keys of a plan that a search can keep at a value or, where they are counts, bound."""
CHOICES: Final = of_place(Place.CHOICE)
"""Keys of a plan whose value is the same for all candidates of a search."""
KEYS: Final = of_place(Place.COLUMN, Place.CHOICE)
"""Keys of a plan but ``placement`` and ``order``: the same as options, in RUN.toml, in Python and in JSON."""
ADAPTERS: Final = of_place(Place.ADAPTER)
LENGTH: Final = of_place(Place.LENGTH)
COUNTS: Final = {name: takes for name in KEYS if isinstance(takes := OPTIONS[name].takes, Count)}
RATIOS: Final = {name: takes for name in KEYS if isinstance(takes := OPTIONS[name].takes, Ratio)}

SHOWN: Final[Mapping[str, str]] = {"mbs": "micro_batch", "p(oom)": "oom_probability"}
"""Name of a key in reports -> the key."""
CHANCE: Final = "oom_probability"
"""Quantity that a search can bound in addition to degrees: the chance of running out of memory."""
AXES: Final = ("dp", "tp", "tp2", "cp", "pp")
"""Axes of the mesh, which a placement lays into fast domains."""
LAUNCHED: Final = "default"
"""Word for the order in which launchers place ranks on devices."""
SEARCHED: Final = "search"


def usual_of(name: str) -> Any:
    """The default value of an option in the types of the engine.

    >>> usual_of("schedule"), usual_of("offload")
    ('1f1b', frozenset())
    """
    usual = OPTIONS[name].usual
    return frozenset(usual) if isinstance(OPTIONS[name].takes, SomeOf) else usual


def choices_of(name: str) -> tuple[str, ...]:
    """The names that an option takes.

    >>> choices_of("context")
    ('all_gather', 'ring', 'ulysses')
    """
    takes = OPTIONS[name].takes
    return takes.names if isinstance(takes, OneOf | SomeOf) else ()


def number(field: str, value: Any, low: float, high: float, meaning: str) -> float:
    """A number within bounds; ``meaning`` says what it is in the error.

    Raises:
        FieldError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not _fits(value):
        raise FieldError("", field, f"{shown(value)} is not a number", hint=meaning)
    if not low <= float(value) <= high:
        near = low if float(value) < low else high
        problem = f"{float(value):g} must lie from {low:g} to {high:g} ({meaning}); the nearest is {near:g}"
        raise FieldError("", field, problem)
    return float(value)


def _fits(value: Any) -> bool:
    """True if a number is finite as a float; a whole number may be too large for one."""
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False
