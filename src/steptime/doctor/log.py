"""Reads a training log: which framework wrote it, its steps, timers, memory and stated job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Final

from steptime.doctor import words as w
from steptime.doctor.behaviour import fitted_framework, written_by
from steptime.doctor.deepspeed import DeepSpeed
from steptime.doctor.devices import Devices
from steptime.doctor.gather import MAX_STEPS, Gathered, Parser
from steptime.doctor.maxtext import MaxText
from steptime.doctor.megatron import Megatron
from steptime.doctor.nemo import NeMo
from steptime.doctor.records import Log, Stated, StepLine
from steptime.doctor.source import HINT, Lines
from steptime.doctor.titan import Torchtitan
from steptime.doctor.trainer import Trainer
from steptime.errors import InputFileError, counted

#: Overflows below this step are a dynamic loss scale that looks for its level.
_SETTLING_STEPS: Final = 100
#: Events that count even where the parser that knows them saw no steps to put them between.
_ANYWHERE: Final = ("allocator_retry", "out_of_memory", "garbage_collection")
_BROKEN: Final = "\ufffd"


def read_log(path: str) -> Log:
    """The log of that path.

    Raises:
        InputFileError: it cannot be read, or has no line with the time of a step.
    """
    parsers: list[Parser] = [Megatron(), NeMo(), Torchtitan(), DeepSpeed(), MaxText(), Trainer()]
    lines, broken = 0, 0
    source, devices = Lines(path), Devices()
    for raw in source:
        lines += 1
        broken += _BROKEN in raw
        rank, line = w.rank_of(w.plain(raw))
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
    """Most step lines win; a progress bar counts only where nothing else does."""
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
        path=path, framework=framework, steps=tuple(g.steps[main]),
        stated=Stated(settings=settings, plan=plan, model=g.model, flags=flags, model_name=g.model_name,
                      framework=fitted_framework(framework, flags)),
        timers={name: _middle(samples) for name, samples in timers.items()},
        rank_steps={rank: tuple(s) for rank, s in g.steps.items() if rank >= 0} if len(g.steps) > 1 else {},
        events=(*(event for other in others for event in other.events if event.kind in _ANYWHERE), *g.events),
        peak_memory_bytes=memory.get(kind), memory_kind=kind, device=devices.name,
        capacity_bytes=devices.memory_bytes or g.capacity_bytes,
        skipped_steps=sum(n for step, n in g.skips if step > _SETTLING_STEPS), restarts=_restarts(g.steps[main]),
        tflops_per_gpu=median(g.tflops) if g.tflops else None, warnings=_warnings(g),
    )  # fmt: skip


def _middle(samples: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Medians of the smallest and the largest, the first reading left out."""
    used = samples[1:] or samples
    return median(low for low, _ in used), median(high for _, high in used)


def _restarts(steps: Sequence[StepLine]) -> int:
    return sum(b.number <= a.number for a, b in pairwise(steps))


def _warnings(g: Gathered) -> tuple[str, ...]:
    out = list(g.notes)
    if g.unusable:
        out.append(f"{counted(g.unusable, 'step line')} without a usable figure (zero, NaN, or beyond all measure)")
    if g.full:
        out.append(f"only the first {MAX_STEPS} steps were read")
    return tuple(out)
