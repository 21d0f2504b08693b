"""Shared parts of the log parsers: numbers, times of day, ranks, common lines, and the record that they fill."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from importlib import resources
from typing import Any, Final, Protocol

from steptime.doctor.records import LogEvent, StepLine
from steptime.measure.runs.meaning import modelled_optimizer, optimizer_called

NAMES: Final[Mapping[str, Any]] = tomllib.loads(
    resources.files("steptime.doctor").joinpath("names.toml").read_text(encoding="utf-8")
)
"""Names used by training software, by software or subject: the tables of ``names.toml``."""
_ANSI: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
#: torchrun's ``[rank0]:`` and ``[default0]:``, srun's ``0: ``.
_RANK: Final = re.compile(r"^\s*(?:\[(?:default|rank)(\d{1,7})\]:\s?|(\d{1,7}):\s)")
_CLOCK: Final = re.compile(r"(\d{4}-\d{2}-\d{2})[ T](\d{2}:\d{2}:\d{2})(?:[.,](\d{1,6}))?")
NUMBER: Final = r"([-+]?(?:\d[\d,]{0,40}(?:\.\d{0,40})?|\.\d{1,40})(?:[eE][-+]?\d{1,9})?|nan|inf|-inf)"

#: Values of a switch; any other value is unknown.
SAID: Final = ("True", "False")
#: Limits of a step time; figures beyond them are no step times.
LONGEST_STEP_S: Final = 1e6
SHORTEST_STEP_S: Final = 1e-7


def plain(line: str) -> str:
    """The line without ANSI escape codes."""
    return _ANSI.sub("", line) if "\x1b" in line else line


def rank_of(line: str) -> tuple[int | None, str]:
    """The rank that a launcher put in front of a line, and the rest of the line.

    >>> rank_of("[rank3]:step: 1"), rank_of("0: step: 1"), rank_of("12:00 step: 1")
    ((3, 'step: 1'), (0, 'step: 1'), (None, '12:00 step: 1'))
    """
    match = _RANK.match(line)
    return (int(match[1] or match[2]), line[match.end() :]) if match else (None, line)


def number(text: str) -> float | None:
    """A number as logs write it; None: no number, or not finite.

    >>> number("12,345.6"), number("nan"), number("1e999")
    (12345.6, None, None)
    """
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def count(text: str) -> int | None:
    """A whole number of reasonable size, or None."""
    value = number(text)
    return int(value) if value is not None and 0 <= value <= 1e12 and value == int(value) else None


def clock_s(line: str) -> float | None:
    """Seconds since 1970 of the date and time in a line, in the zone of the log; None: there is none."""
    match = _CLOCK.search(line, 0, 200)
    if match is None:
        return None
    try:
        day = datetime.fromisoformat(f"{match[1]}T{match[2]}")
    except ValueError:
        return None
    seconds = (day - datetime(1970, 1, 1)).total_seconds()
    return seconds + (float(f"0.{match[3]}") if match[3] else 0.0)


def step_time_s(value: float | None) -> float | None:
    """A step time, or None if it is out of range."""
    return value if value is not None and SHORTEST_STEP_S <= value <= LONGEST_STEP_S else None


def rate(value: float | None) -> float | None:
    """A throughput, or None if it is out of range."""
    return value if value is not None and 1e-6 <= value <= 1e12 else None


#: Most lines kept of one rank: the first ones of a longer log.
MAX_STEPS: Final = 2_000_000
_MAX_EVENTS: Final = 100_000
_MAX_TIMERS: Final = 200
_MAX_SAMPLES: Final = 20_000
_MAX_FLAGS: Final = 5_000
_MAX_RANKS: Final = 100_000


@dataclass(slots=True)
class Gathered:
    """Facts that one framework's parser found, in the order of the log."""

    steps: dict[int, list[StepLine]] = field(default_factory=dict)
    """Step lines by rank; -1: the line names no rank."""
    timers: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    events: list[LogEvent] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    model: dict[str, int] = field(default_factory=dict)
    model_name: str = ""
    batches: dict[int, int] = field(default_factory=dict)
    """Global batch -> number of step lines that have it."""
    consumed: tuple[int, int] | None = None
    """Step and consumed samples of the last line that has them."""
    flags: dict[str, str] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)
    """``allocated`` and ``reserved`` peaks, bytes."""
    capacity_bytes: float | None = None
    skips: list[tuple[int, int]] = field(default_factory=list)
    """Last step before the line, and optimiser steps skipped since the previous entry."""
    tflops: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Notes on these facts for the report."""
    unusable: int = 0
    """Number of step lines whose figures are not numbers, zero, or out of range."""
    full: bool = False

    @property
    def last_step(self) -> int:
        """Number of the last logged step; 0 before the first."""
        return max((series[-1].number for series in self.steps.values() if series), default=0)

    def add_step(self, rank: int | None, line: StepLine) -> None:
        """Keep a step; a repeated line for the same step, from another rank without a prefix, is dropped."""
        if line.time_s is None and line.samples_per_s is None and line.tokens_per_s_per_gpu is None:
            self.unusable += 1
            return
        if rank is not None and rank not in self.steps and len(self.steps) >= _MAX_RANKS:
            return
        series = self.steps.setdefault(-1 if rank is None else rank, [])
        if rank is None and series and series[-1].number == line.number:
            return
        if len(series) >= MAX_STEPS:
            self.full = True
        else:
            series.append(line)

    def add_timer(self, name: str, least_s: float, most_s: float) -> None:
        """Keep one reading of a timer."""
        if not (0.0 <= least_s <= 1e6 and 0.0 <= most_s <= 1e6):
            return
        if name in self.timers or len(self.timers) < _MAX_TIMERS:
            samples = self.timers.setdefault(name, [])
            if len(samples) < _MAX_SAMPLES:
                samples.append((min(least_s, most_s), max(least_s, most_s)))

    def add_tflops(self, text: str) -> None:
        """Keep a printed FLOP rate of one device (TFLOP/s), if it is valid."""
        if value := rate(number(text)):
            self.tflops.append(value)

    def add_event(self, kind: str, time_s: float | None = None) -> None:
        """Keep an event; the same one printed by several ranks counts once."""
        event = LogEvent(kind=kind, after_step=self.last_step, time_s=time_s)
        same = next((e for e in reversed(self.events[-4:]) if (e.kind, e.after_step) == (kind, event.after_step)), None)
        if same is None and len(self.events) < _MAX_EVENTS:
            self.events.append(event)
        elif same is not None and time_s is not None and (same.time_s is None or time_s > same.time_s):
            self.events[self.events.index(same, max(len(self.events) - 4, 0))] = event

    def add_flag(self, name: str, value: str) -> None:
        """Keep the printed value of a setting."""
        if len(self.flags) < _MAX_FLAGS:
            self.flags[name] = value[:300]

    def read_counts(self, names: Mapping[str, tuple[str, str]]) -> None:
        """Keep the whole numbers among the flags, without zeros.

        Args:
            names: flag -> ``settings``, ``plan`` or ``model``, and the field there.
        """
        tables: dict[str, dict[str, Any]] = {"settings": self.settings, "plan": self.plan, "model": self.model}
        for flag, (table, name) in names.items():
            if value := count(self.flags.get(flag, "")):
                tables[table][name] = value

    def set_optimizer(self, text: str) -> None:
        """Keep the optimiser, with a note if another one is predicted in its place."""
        if not text or text == "None":
            return
        name = text.lower()
        called = name if modelled_optimizer(name) == name else optimizer_called(name)
        self.settings["optimizer"] = modelled_optimizer(called)
        if self.settings["optimizer"] == "adam" and "adam" not in name:
            self.notes.append(f"optimizer {name[:40]}: predicted as adam")

    def add_batch(self, size: int) -> None:
        """Keep the global batch of a step line."""
        if size > 0 and (size in self.batches or len(self.batches) < _MAX_FLAGS):
            self.batches[size] = self.batches.get(size, 0) + 1

    def add_consumed(self, step: int, samples: int) -> None:
        """Keep the batch that follows from the samples between two lines."""
        if self.consumed is not None and step > self.consumed[0]:
            each, rest = divmod(samples - self.consumed[1], step - self.consumed[0])
            if rest == 0:
                self.add_batch(each)
        self.consumed = step, samples

    def settle_batch(self) -> None:
        """Take the batch of most step lines as the job's."""
        if not self.batches:
            return
        usual = max(self.batches, key=lambda size: (self.batches[size], size))
        self.settings["global_batch"] = usual
        if len(self.batches) > 1:
            span = f"{min(self.batches)} to {max(self.batches)}"
            self.notes.append(f"the global batch goes from {span} over the log; most lines have {usual}")

    def add_memory(self, kind: str, value_bytes: float | None) -> None:
        """Keep the largest reading."""
        if value_bytes is not None and 0 < value_bytes < 1e15:
            self.memory[kind] = max(self.memory.get(kind, 0.0), value_bytes)


class Parser(Protocol):
    """Parser of the lines of one framework."""

    name: str
    gathered: Gathered

    def feed(self, rank: int | None, line: str) -> None:
        """Take one line; lines of other programs are ignored."""

    def finish(self) -> None:
        """Derive the declared job once all lines are read."""
