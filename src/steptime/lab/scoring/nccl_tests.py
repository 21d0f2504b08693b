"""What nccl-tests (and rccl-tests) print, as a table of collectives.

Comment lines name the ranks, their hosts and devices; each line of figures has a size, and a time out of place and in
place. The layout follows the head line, which has changed between versions (github.com/NVIDIA/nccl-tests).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from steptime.errors import InputFileError
from steptime.lab.calibrate.collectives import KINDS, kind_of
from steptime.lab.calibrate.table import Table
from steptime.lab.measured.canonical import device_name
from steptime.store.files import is_file, read_text

#: Larger outputs are refused unread.
MAX_BYTES: Final = 16 * 2**20
HEAD: Final = ("size", "count", "type", "redop", "root", *("time", "algbw", "busbw", "#wrong") * 2)
"""Columns of version 2.11 and later."""
PLACES: Final = ("out-of-place", "in-place")
TEXTS: Final = ("gpu", "collective", "dtype", "method", "source")
_TAG: Final = re.compile(r"^\[\d+,\d+\]<\w+>:? ?")
"""What ``mpirun --tag-output`` puts before each line."""
_RANK: Final = re.compile(r"\bRank\s+(\d+)\b.*?\bon\s+(\S+)\s+device\s+\S+\s+\[[^\]]*\]\s*(.*?)\s*$")
_PROGRAM: Final = re.compile(r"\b([a-z][a-z_]*)_perf\b")
_LINE: Final = re.compile(r"^\s*\d+(\s+\S+){6,}\s*$")
_ASKED: Final = {
    "collective": ("the collective", "--collective"), "gpu": ("the device", "--gpu"),
    "n_gpus": ("the number of devices", "--gpus"),
}  # fmt: skip
"""Column -> what is missing without it, and the option that gives it."""


@dataclass(slots=True)
class _Run:
    """What the comments of one run have said so far."""

    collective: str = ""
    head: tuple[str, ...] = HEAD
    hosts: dict[int, str] = field(default_factory=dict)
    gpu: str = ""

    def comment(self, line: str) -> None:
        """Takes in one line that has no figures."""
        words = tuple(line.lstrip("# ").split())
        if words[:1] == ("nThread",):
            self.hosts = {}
        if {"size", "time", "algbw"} <= set(words):
            self.head = words
        rank, program = _RANK.search(line), _PROGRAM.search(line)
        if rank:
            self.hosts[int(rank[1])] = rank[2]
            self.gpu = device_name(rank[3]).name or rank[3]
        if program and kind_of(program[1]):
            self.collective = program[1]

    def facts(self) -> dict[str, str | float]:
        """Columns that hold for all lines of the run; those that nothing says are missing."""
        found: dict[str, str | float] = {"gpu": self.gpu, "collective": self.collective}
        if self.hosts:
            found |= {"n_gpus": len(self.hosts), "gpus_per_node": len(self.hosts) / len(set(self.hosts.values()))}
        return {name: value for name, value in found.items() if value}

    def lines(self, line: str) -> Iterator[dict[str, str | float]]:
        """One row per time of a line of figures."""
        cells = line.split()
        times = [i for i, name in enumerate(self.head) if name == "time" and i < len(cells)]
        for place, at in zip(PLACES, times, strict=False):
            if cells[at] != "N/A":
                yield {"bytes": float(cells[0]), "dtype": cells[self.head.index("type")], "time_us": float(cells[at]),
                       "method": f"nccl-tests {place}", "source": "nccl-tests"}  # fmt: skip


def is_nccl_tests(path: str | Path) -> bool:
    """Whether a file that is no table looks like the output of nccl-tests."""
    file = Path(path)
    if file.name.lower().endswith((".parquet", ".gz")) or not is_file(file):
        return False
    with file.open("rb") as stream:
        start = stream.read(1 << 16).decode("utf-8", "replace")
    lines = [_TAG.sub("", line) for line in start.splitlines()]
    return any(re.match(r"\s*#.*\b(algbw|nThread)\b", line) for line in lines)


def read_nccl_tests(path: str | Path, given: Mapping[str, str | float]) -> Table:
    """The rows of one or more runs of nccl-tests.

    Args:
        path: the file with their output.
        given: columns ``gpu``, ``collective``, ``n_gpus``, ``gpus_per_node`` that win over what the output says.

    Raises:
        InputFileError: it has no figures, or neither it nor ``given`` says what ran where.
    """
    where, run = str(path), _Run(collective=_of_name(Path(path).name))
    rows: list[dict[str, str | float]] = []
    for number, text in enumerate(read_text(path, MAX_BYTES, "an output of nccl-tests").splitlines(), 1):
        line = _TAG.sub("", text)
        if line.lstrip().startswith("#") or not _LINE.match(line):
            run.comment(line)
            continue
        facts = {**run.facts(), **given}
        missing = next((name for name in _ASKED if name not in facts), None)
        if missing is not None:
            what, option = _ASKED[missing]
            kinds = f", one of {', '.join(sorted(set(KINDS.values())))}" if missing == "collective" else ""
            raise InputFileError(where, f"does not say {what} before line {number}", hint=f"give {option}{kinds}")
        try:
            rows += [{**facts, **row} for row in run.lines(line)]
        except (ValueError, IndexError):
            raise InputFileError(where, f"line {number} is no line of nccl-tests: {line.strip()[:80]!r}") from None
    if not rows:
        raise InputFileError(where, "has no rows")
    return _table(rows)


def _of_name(name: str) -> str:
    """The collective in the name of a file, as in ``all_reduce_perf_16.txt``; "" without one."""
    key = re.sub(r"[^a-z0-9]", "", name.lower())
    return next((kind for kind in sorted(KINDS, key=len, reverse=True) if len(kind) > 5 and kind in key), "")


def _table(rows: list[dict[str, str | float]]) -> Table:
    names = sorted({name for row in rows for name in row})
    texts = {name: np.array([str(row.get(name, "")) for row in rows], dtype=object) for name in names if name in TEXTS}
    numbers = {n: np.array([row.get(n, np.nan) for row in rows], np.float64) for n in names if n not in TEXTS}
    return Table(texts | numbers)
