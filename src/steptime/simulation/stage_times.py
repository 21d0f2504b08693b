"""Measured times of the stages of a pipeline, read from CSV."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Final, NoReturn

import numpy as np

from steptime.errors import FieldError, InputFileError, UnknownNameError, UserError, shown
from steptime.num import Array

TIMES: Final = ("forward", "backward", "input_gradient", "weight_gradient", "message")
"""Times that a file may give for a stage; each is a column with a unit."""
UNITS: Final = {"_s": 1.0, "_ms": 1e-3, "_us": 1e-6}
EQUAL: Final = {"T_F_ms": "forward", "T_B_ms": "input_gradient", "T_W_ms": "weight_gradient", "T_comm_ms": "message"}
"""Columns of equal stages, in the symbols of the zero-bubble paper (arXiv 2401.10241): B is the input gradient."""
CHOOSING: Final = ("pp", "microbatches", "micro_batch", "layers", "hidden", "heads", "seq_len")
"""Columns of a table of equal stages that identify the job of a row."""
LONGEST: Final = 1e9
"""Largest number in a column of times, whatever its unit."""
WORDS: Final = ("source", "model", "gpu")
"""Columns of a table of equal stages that are ignored: notes for readers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds of passes by stage and micro-batch, with one column if all micro-batches take the same."""

    forward_s: Array
    backward_s: Array
    """Whole backward pass."""
    input_gradient_s: Array | None
    weight_gradient_s: Array | None
    """Input gradient and weight gradient are the two parts of the backward pass; None: not given."""
    message_s: Array | None
    """Seconds of a message that the stage sends, by stage; None: not given."""


def read_stage_times(path: Path, *, stages: int, ranks: int, job: Mapping[str, int]) -> StageTimes:
    """Times from a file: a row for each stage, or each stage and micro-batch; or one row for equal stages.

    Args:
        path: CSV whose columns are `stage`, optionally `micro_batch`, and :data:`TIMES` with a unit, as `forward_ms`.
            Without `stage` the columns are :data:`EQUAL`: times of all stages of one rank, in a row for each job.
        stages: stages of the schedule.
        ranks: ranks of the pipeline; equal stages divide the times of their rank.
        job: value of each of :data:`CHOOSING`, to find the row of equal stages.

    Raises:
        InputFileError: the file cannot be read.
        UserError: a column is unknown, a number invalid or a stage missing; the message has file, line and column.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            rows = [(reader.line_num, row) for row in reader]
            columns = list(reader.fieldnames or ())
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputFileError(str(path), f"cannot be read: {error}") from None
    equal = "stage" not in columns
    known = _columns(path, columns, equal)
    if not rows:
        raise InputFileError(str(path), "has no rows")
    for line, row in rows:
        if None in row:
            _refuse(path, line, columns[-1], "has more cells behind it than the first line has columns")
    if equal:
        rows = [_chosen(path, rows, job)]
    keys = [(0, 0) if equal else _key(path, line, row, stages, job["microbatches"]) for line, row in rows]
    _each_once(path, keys, [line for line, _ in rows], 1 if equal else stages, job["microbatches"])
    share = ranks / stages if equal else 1.0
    count = 1 + max(micro_batch for _, micro_batch in keys)
    found = {}
    for column, (name, unit) in known.items():
        found[name] = values = np.zeros((1 if equal else stages, count))
        for key, (line, row) in zip(keys, rows, strict=True):
            values[key] = unit * _time(path, line, column, row[column]) * (1.0 if name == "message" else share)
        if equal:
            found[name] = np.repeat(values, stages, axis=0)
    message = found.get("message")
    return StageTimes(
        forward_s=found["forward"],
        backward_s=found["backward"] if "backward" in found else found["input_gradient"] + found["weight_gradient"],
        input_gradient_s=found.get("input_gradient"),
        weight_gradient_s=found.get("weight_gradient"),
        message_s=None if message is None else message.mean(axis=1),
    )


def _columns(path: Path, columns: Iterable[str], equal: bool) -> dict[str, tuple[str, float]]:
    """Time and unit (s) of each column with times."""
    times = {name + unit: (name, factor) for name in TIMES for unit, factor in UNITS.items()}
    others: tuple[str, ...] = ("stage", "micro_batch")
    if equal:
        times, others = {column: (name, 1e-3) for column, name in EQUAL.items()}, (*CHOOSING, *WORDS)
    found: dict[str, tuple[str, float]] = {}
    for column in columns:
        if column in others:
            continue
        if column not in times:
            missing = "" if not equal or "T_F_ms" in columns else "a file of several stages has a column stage"
            raise UnknownNameError("column", column, [*times, *others], where=f"{path}, line 1", otherwise=missing)
        name = times[column][0]
        if name in [other for other, _ in found.values()]:
            raise FieldError(f"{path}, line 1", column, "is there twice, in two units or in one")
        found[column] = times[column]
    there = {name for name, _ in found.values()}
    parts = {"input_gradient", "weight_gradient"}
    if "forward" not in there or not ("backward" in there or parts <= there):
        raise FieldError(
            f"{path}, line 1",
            "forward" if "forward" not in there else "backward",
            "is missing",
            hint=f"give {', '.join(EQUAL)}"
            if equal
            else "give stage, forward_s, and backward_s or both input_gradient_s and weight_gradient_s",
        )
    if "backward" in there and there & parts:
        raise FieldError(f"{path}, line 1", "backward", "is given whole and in parts", hint="give one of both")
    return found


def _chosen(path: Path, rows: list[tuple[int, dict[str, str]]], job: Mapping[str, int]) -> tuple[int, dict[str, str]]:
    """The row of equal stages for the job."""
    fits = [
        (line, row)
        for line, row in rows
        if all(_count(path, line, name, row[name]) == job[name] for name in CHOOSING if name in row)
    ]
    if len(fits) != 1:
        given = [name for name in CHOOSING if name in rows[0][1]]
        raise UserError(
            f"{path}: {len(fits) or 'no'} rows are of this job ({', '.join(f'{name} {job[name]}' for name in given)})",
            hint="leave one row of it, or change the job",
        )
    return fits[0]


def _key(path: Path, line: int, row: Mapping[str, str], stages: int, micro_batches: int) -> tuple[int, int]:
    """Stage and micro-batch of a row."""
    stage, micro_batch = _count(path, line, "stage", row["stage"]), 0
    if stage >= stages:
        _refuse(path, line, "stage", f"{stage}: the schedule has stages 0 to {stages - 1}")
    if "micro_batch" in row:
        micro_batch = _count(path, line, "micro_batch", row["micro_batch"])
        if micro_batch >= micro_batches:
            _refuse(path, line, "micro_batch", f"{micro_batch}: a step has micro-batches 0 to {micro_batches - 1}")
    return stage, micro_batch


def _each_once(path: Path, keys: list[tuple[int, int]], lines: list[int], stages: int, micro_batches: int) -> None:
    """Refuse stages, or pairs of stage and micro-batch, that are missing or given twice."""
    seen = set[tuple[int, int]]()
    for key, line in zip(keys, lines, strict=True):
        if key in seen:
            _refuse(path, line, "stage", f"{key[0]} is there twice")
        seen.add(key)
    count = 1 if all(micro_batch == 0 for _, micro_batch in keys) else micro_batches
    for stage in range(stages):
        for micro_batch in range(count):
            if (stage, micro_batch) not in seen:
                where = f" for micro-batch {micro_batch}" * (count > 1)
                raise UserError(
                    f"{path}: stage {stage} is missing{where}: the schedule has stages 0 to {stages - 1}"
                    + f", a step micro-batches 0 to {count - 1}" * (count > 1)
                )


def _count(path: Path, line: int, column: str, text: str | None) -> int:
    if text is None or not (text.isascii() and text.strip().isdigit() and len(text) < 10):
        _refuse(path, line, column, f"{shown(text)} is not a whole number, 0 or more")
    return int(text)


def _time(path: Path, line: int, column: str, text: str | None) -> float:
    try:
        value = float(text or "")
    except ValueError:
        value = -1.0
    if not (isfinite(value) and value >= 0):
        _refuse(path, line, column, f"{shown(text)} is not a time, 0 or more")
    if value > LONGEST:
        _refuse(path, line, column, f"{shown(text)} is no time of a pass: at most {LONGEST:.0e}")
    return value


def _refuse(path: Path, line: int, column: str, problem: str) -> NoReturn:
    raise FieldError(f"{path}, line {line}", column, problem)
