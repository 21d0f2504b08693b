"""Reader of training logs: framework, steps, timers, memory, device and job."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Final

from steptime.doctor import gather
from steptime.doctor.deepspeed import DeepSpeed, Trainer
from steptime.doctor.gather import MAX_STEPS, Gathered, Parser
from steptime.doctor.megatron import Megatron, NeMo
from steptime.doctor.records import Log, Stated, StepLine
from steptime.doctor.source import HINT, Lines
from steptime.doctor.titan import MaxText, Torchtitan
from steptime.errors import InputFileError, UserError, counted
from steptime.hardware.records import Device
from steptime.measure.runs.canonical import catalogue_device, device_name
from steptime.units import format_bytes

#: Framework of a log -> fitted framework, unless arguments show an older release.
_FITTED: Final[Mapping[str, str]] = gather.NAMES["fitted"]
#: Arguments of Megatron-LM of 2020 and 2021, before it recomputed selectively.
_OF_2021: Final = ("checkpoint_activations", "activations_checkpoint_method")
#: Argument that only releases before Megatron Core print, and arguments of later ones that select the old model code.
_BEFORE_CORE: Final = "DDP_impl"
_LEGACY: Final[Mapping[str, str]] = {"use_legacy_models": "True", "use_mcore_models": "False"}


def fitted_framework(framework: str, flags: Mapping[str, str]) -> str:
    """Fitted framework to predict with; empty: there is none for the software.

    Args:
        framework: framework of a :class:`~steptime.doctor.records.Log`.
        flags: printed flags, under the framework's own names; they identify old releases of Megatron-LM.

    >>> fitted_framework("nemo", {}), fitted_framework("megatron", {"use_legacy_models": "True"})
    ('megatron-core', 'megatron')
    """
    name = _FITTED.get(framework, "")
    if framework in ("megatron", "megatron-deepspeed") and any(flag in flags for flag in _OF_2021):
        flash = any(flag.startswith("use_flash_attn") for flag in flags)
        return name if flash else framework + "-2021"
    if framework == "megatron":
        legacy = any(flags.get(flag) == value for flag, value in _LEGACY.items())
        return "megatron" if legacy or _BEFORE_CORE in flags else name
    return name


def written_by(parser: str, flags: Mapping[str, str], *, deepspeed: bool) -> str:
    """The framework of a log; Megatron-LM under DeepSpeed's engine counts as ``megatron-deepspeed``.

    Args:
        parser: name of the parser that found the steps.
        flags: printed arguments.
        deepspeed: DeepSpeed's engine wrote into the log too.
    """
    under = deepspeed or flags.get("deepspeed") == "True"
    return "megatron-deepspeed" if parser == "megatron" and under else parser


#: Patterns of lines that name a device: torchtitan, Lightning, ``nvidia-smi -L``, its table, properties as PyTorch
#: prints them, XLA, TensorFlow, and keys of configurations.
_NAMED: Final = (
    re.compile(r"\b(?:CUDA|HIP|XPU|GPU) capacity: (.{3,80}?) with [\d.]+\s?GiB"),
    re.compile(r"CUDA device \('([^']{3,80})'\)"),
    re.compile(r"\bGPU \d{1,3}: (.{3,80}?) \(UUID"),
    re.compile(r"^\|\s+\d{1,3}\s+((?:NVIDIA|Tesla|GeForce|Quadro|AMD|A100|H100)[^|]{2,60}?)\s+(?:On|Off|\|)"),
    re.compile(r"DeviceProperties\(name='([^']{3,80})'"),
    re.compile(r"StreamExecutor device \(\d{1,3}\): (.{3,80}?)(?:, Compute|$)"),
    re.compile(r"\bname: ([^,]{3,80}), pci bus id"),
    re.compile(r"\b(?:gpu|device|accelerator)[ _](?:name|type|model)[\"']?\s*[:=]\s*[\"']?([^\"',;|]{3,80})", re.I),
)
_WORDS: Final = ("apacity", "CUDA device", "GPU", "gpu", "|", "Properties", "StreamExec", "pci bus", "evice", "celer")
#: Patterns of the memory of the whole device: torchtitan, the table of nvidia-smi, PyTorch.
_MEMORY: Final = (
    (re.compile(r"\w+ capacity: .{0,120}? with " + gather.NUMBER + r"\s?GiB memory"), 2.0**30),
    (re.compile(r"\d{1,7}MiB\s*/\s*(\d{3,7})MiB"), 2.0**20),
    (re.compile(r"DeviceProperties\(.{0,200}?total_memory=(\d{3,7})MB"), 2.0**20),
    (re.compile(r"total capacity of " + gather.NUMBER + r" GiB"), 2.0**30),
)
#: Range of printed over predicted device memory in which the devices may be the same: drivers keep some.
_MEMORY_RATIOS: Final = (0.88, 1.04)
#: Largest relative difference of matrix peaks between devices of one design.
_ALIKE: Final = 0.1
#: Memory in use over the device's memory, beyond which the difference is no rounding.
_BEYOND: Final = 1.02


class Devices:
    """Parser of the device named in a log."""

    def __init__(self) -> None:
        self.name = ""
        """Name as printed; empty: not named, or unknown to the catalogue."""
        self.memory_bytes: float | None = None

    def feed(self, line: str) -> None:
        """Take one line; the first device counts."""
        if (self.name and self.memory_bytes) or not any(word in line for word in _WORDS):
            return
        if not self.name:
            found = (match[1].strip() for pattern in _NAMED if (match := pattern.search(line)))
            self.name = next((name for name in found if device_name(name).name), "")
        if self.memory_bytes is None:
            sizes = ((gather.number(match[1]), unit) for pattern, unit in _MEMORY if (match := pattern.search(line)))
            self.memory_bytes = next((value * unit for value, unit in sizes if value and value * unit < 1e15), None)


def device_contradictions(
    predicted: Device, cluster: str, name: str, capacity_bytes: float | None, peak_bytes: float | None
) -> tuple[str, ...]:
    """Contradictions between the run's device and the device of the prediction.

    Args:
        predicted: the device of the cluster.
        cluster: the user's name of the cluster.
        name: device as the run prints it; empty: not printed.
        capacity_bytes: its memory as the run prints it.
        peak_bytes: memory that the run had in use.
    """
    whole = predicted.memory_bytes
    other = _another(predicted, name)
    if other is not None:
        return (f"{cluster} has {predicted.name}, but the run names {name} ({other})",)
    if capacity_bytes and not _MEMORY_RATIOS[0] <= capacity_bytes / whole <= _MEMORY_RATIOS[1]:
        sizes = f"{format_bytes(whole)} of memory, but the run has {format_bytes(capacity_bytes)}"
        return (f"{predicted.name} of {cluster} has {sizes}",)
    if peak_bytes and peak_bytes > _BEYOND * whole:
        sizes = f"{format_bytes(whole)} of memory, but the run used {format_bytes(peak_bytes)}"
        return (f"{predicted.name} of {cluster} has {sizes}",)
    return ()


def _another(predicted: Device, name: str) -> str | None:
    """Name of the catalogue's device for a printed name; None: unknown, or it may be the device of the prediction."""
    found = device_name(name) if name else None
    if found is None or found.name is None or found.name in (predicted.name, predicted.like):
        return None
    seen = catalogue_device(found.name)
    exact = not found.assumed and _of_catalogue(predicted)
    return None if not exact and _alike(seen, predicted) else found.name


def _of_catalogue(device: Device) -> bool:
    """True if a device is in the catalogue, and not a user's own."""
    try:
        return catalogue_device(device.name) == device
    except UserError:
        return False


def _alike(one: Device, other: Device) -> bool:
    """True if two devices agree in memory and peak, so that a name without a variant may mean either."""
    pairs = [(one.memory_bytes, other.memory_bytes)]
    pairs += [
        (one.matrix_flops_per_s[dtype], other.matrix_flops_per_s[dtype])
        for dtype in ("bf16", "fp16")
        if dtype in one.matrix_flops_per_s and dtype in other.matrix_flops_per_s
    ][:1]
    return all(abs(a / b - 1.0) <= _ALIKE for a, b in pairs)


#: Overflows before this step belong to the start of dynamic loss scaling.
_SETTLING_STEPS: Final = 100
#: Events that count even if the parser that found them saw no steps.
_ANYWHERE: Final = ("allocator_retry", "out_of_memory", "garbage_collection")
_BROKEN: Final = "\ufffd"


def read_log(path: str) -> Log:
    """Read the log at a path.

    Raises:
        InputFileError: it cannot be read, or has no line with the time of a step.
    """
    parsers: list[Parser] = [Megatron(), NeMo(), Torchtitan(), DeepSpeed(), MaxText(), Trainer()]
    lines, broken = 0, 0
    source, devices = Lines(path), Devices()
    for raw in source:
        lines += 1
        broken += _BROKEN in raw
        rank, line = gather.rank_of(gather.plain(raw))
        devices.feed(line)
        for parser in parsers:
            parser.feed(rank, line)
    for parser in parsers:
        parser.finish()
    best = max(parsers, key=_weight)
    if not best.gathered.steps:
        raise _no_steps(path, lines, broken, parsers)
    others = [parser.gathered for parser in parsers if parser is not best]
    log = _log(path, best.name, best.gathered, others, devices)
    return log if source.cut is None else replace(log, warnings=(*log.warnings, f"the log is cut off: {source.cut}"))


def _weight(parser: Parser) -> tuple[bool, int]:
    """Sort key of parsers: most step lines win; a progress bar counts only if no other parser has any."""
    lines = max(map(len, parser.gathered.steps.values()), default=0)
    return lines > 0 and not isinstance(parser, Trainer), lines


def _no_steps(path: str, lines: int, broken: int, parsers: Sequence[Parser]) -> InputFileError:
    if broken > lines / 2:
        return InputFileError(path, "is no UTF-8 text, so no training log", hint=HINT)
    unusable = sum(parser.gathered.unusable for parser in parsers)
    if unusable:
        problem = f"has {counted(unusable, 'step line')}, but no usable time in any (zero, NaN, or beyond all measure)"
        return InputFileError(path, problem)
    wanted = (
        "'elapsed time per iteration', 'SamplesPerSec=', 'step: N loss: ... tps:', 'train_step_timing in s', "
        "'completed step: N, seconds:' or a progress bar"
    )
    return InputFileError(path, f"has {counted(lines, 'line')}, but none with the time of a step ({wanted})", hint=HINT)


def _log(path: str, parser: str, g: Gathered, others: Sequence[Gathered], devices: Devices) -> Log:
    main = min(g.steps)
    kind = "reserved" if parser == "torchtitan" else "allocated"
    timers = {name: samples for other in (*others, g) for name, samples in other.timers.items()}
    memory = {kind: value for other in (*others, g) for kind, value in other.memory.items()}
    settings = {key: value for other in (*others, g) for key, value in other.settings.items()}
    plan = {key: value for other in (*others, g) for key, value in other.plan.items()}
    flags = {key: value for other in (*others, g) for key, value in other.flags.items()}
    engine = parser != "deepspeed" and "zero_optimization_stage" in flags
    framework = written_by(parser, flags, deepspeed=engine)
    return Log(
        path=path,
        framework=framework,
        steps=tuple(g.steps[main]),
        stated=Stated(
            settings=settings,
            plan=plan,
            model=g.model,
            flags=flags,
            model_name=g.model_name,
            framework=fitted_framework(framework, flags),
            tokens_per_gpu=_tokens_per_gpu(g.steps[main]),
        ),
        timers={name: _middle(samples) for name, samples in timers.items()},
        rank_steps={rank: tuple(s) for rank, s in g.steps.items() if rank >= 0} if len(g.steps) > 1 else {},
        events=(*(event for other in others for event in other.events if event.kind in _ANYWHERE), *g.events),
        peak_memory_bytes=memory.get(kind),
        memory_kind=kind,
        device=devices.name,
        capacity_bytes=devices.memory_bytes or g.capacity_bytes,
        skipped_steps=sum(n for step, n in g.skips if step > _SETTLING_STEPS),
        restarts=sum(b.number <= a.number for a, b in pairwise(g.steps[main])),
        tflops_per_gpu=median(g.tflops) if g.tflops else None,
        warnings=_warnings(g),
    )


def _tokens_per_gpu(steps: Sequence[StepLine]) -> float | None:
    """Tokens per device and step: time x rate, if the lines have both."""
    both = [step.time_s * step.tokens_per_s_per_gpu for step in steps if step.time_s and step.tokens_per_s_per_gpu]
    return median(both) if both else None


def _middle(samples: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Medians of the smallest and of the largest times, without the first reading."""
    used = samples[1:] or samples
    return median(low for low, _ in used), median(high for _, high in used)


def _warnings(g: Gathered) -> tuple[str, ...]:
    out = list(g.notes)
    if g.unusable:
        out.append(f"{counted(g.unusable, 'step line')} without a usable figure (zero, NaN, or beyond all measure)")
    if g.full:
        out.append(f"only the first {MAX_STEPS} steps were read")
    return tuple(out)
