"""The scoreboard: one table of measured runs, predicted in every way that says something."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from steptime.measure.runs.aggregate import ScoredRun, macro
from steptime.measure.runs.reading import Reading
from steptime.measure.runs.run import MeasuredRun
from steptime.measure.runs.samples import Progress, modelled
from steptime.measure.runs.scoring import RunScore, score_reading, unread
from steptime.plan.framework_file import framework_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Which runs; None: any."""

    source: str
    one_node: bool | None = None
    schedules: frozenset[str] | None = None

    def holds(self, run: MeasuredRun) -> bool:
        """Whether a run is meant."""
        return (
            run.source_key == self.source
            and self.one_node in (None, run.gpus <= run.gpus_per_node)
            and (self.schedules is None or run.schedule in self.schedules)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An error that is published, or wished for, on some runs."""

    name: str
    where: Where
    measure: str = "time"
    """``time`` or ``memory``."""
    statistic: str = "mape"
    """``mape`` or ``max_ape``."""
    wanted: float | None = None
    """Published by others; None: nobody has published one."""
    by: str = ""
    split: str = "source_and_model"
    """Which predictions are compared with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """A target and our error on its runs, by the way of predicting."""

    target: Target
    rows: int
    errors: Mapping[str, float | None]

    @property
    def missed_by(self) -> float | None:
        """Error above the target, negative if it is met; None without a target or runs."""
        found = self.errors.get(self.target.split)
        return None if found is None or self.target.wanted is None else found - self.target.wanted


_FLUSH: Final = frozenset({"1f1b", "interleaved"})
_VTRAIN: Final = "vTrain, KAIST news page and arXiv 2312.12391"
TARGETS: Final = (
    Target(
        name="SimuMax's B200 runs (22 of 43), time",
        where=Where(source="simumax", one_node=True),
        wanted=0.0562,
        by="SimuMax v1.2, docs/b200/b200_release_v1.2_summary.md",
    ),
    Target(
        name="SimuMax's B200 runs (22 of 43), memory",
        where=Where(source="simumax", one_node=True),
        measure="memory",
        wanted=0.0046,
        by="SimuMax v1.2, docs/b200/b200_release_v1.2_summary.md",
    ),
    Target(
        name="Korthikanti et al., table 5 (4 of 8)",
        where=Where(source="korthikanti"),
        wanted=0.0365,
        by="Calculon, `calculon llm-validation`, 8 points",
    ),
    Target(
        name="Korthikanti et al., table 5 (4 of 8), largest",
        where=Where(source="korthikanti"),
        statistic="max_ape",
        wanted=0.0887,
        by="Calculon, `calculon llm-validation`, 8 points",
    ),
    Target(
        name="vTrain, one node", where=Where(source="vtrain", one_node=True), wanted=0.0837, by=_VTRAIN, split="model"
    ),
    Target(
        name="vTrain, several nodes",
        where=Where(source="vtrain", one_node=False),
        wanted=0.1473,
        by=_VTRAIN,
        split="model",
    ),
    Target(name="Zero Bubble, 1F1B and interleaved, time", where=Where(source="zero-bubble", schedules=_FLUSH)),
    Target(
        name="Zero Bubble, 1F1B and interleaved, memory",
        where=Where(source="zero-bubble", schedules=_FLUSH),
        measure="memory",
    ),
)


def reached(scored: Mapping[str, Sequence[ScoredRun]], targets: Sequence[Target] = TARGETS) -> list[Reached]:
    """Our errors on the runs of each target.

    Args:
        scored: way of predicting -> predictions of all runs.
        targets: what to look at.
    """
    out = []
    for target in targets:
        found = {how: _errors(target, runs) for how, runs in scored.items()}
        rows = max((len(errors) for errors in found.values()), default=0)
        out.append(Reached(target=target, rows=rows, errors={h: _statistic(target, e) for h, e in found.items()}))
    return out


def _errors(target: Target, scored: Sequence[ScoredRun]) -> list[float]:
    pairs = [
        (s.run.step_time_s, s.step_time_s) if target.measure == "time" else (s.run.memory_bytes, s.memory_bytes)
        for s in scored
        if target.where.holds(s.run)
    ]
    return [abs(p / m - 1) for m, p in pairs if m and math.isfinite(p)]


def _statistic(target: Target, errors: list[float]) -> float | None:
    if not errors:
        return None
    return float(max(errors) if target.statistic == "max_ape" else np.mean(errors))


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """An accuracy that a tool claims, in its own words and on its own runs."""

    tool: str
    claim: str
    scope: str
    source: str


CLAIMS: Final = (
    Claim(
        tool="Calculon",
        claim="time: mean 3.65 %, largest 8.87 %",
        scope="8 points, A100, one paper's table",
        source="`calculon llm-validation`",
    ),
    Claim(
        tool="SimuMax",
        claim="time: mean 1.48 %, largest 3.76 %; memory: mean 1.43 %",
        scope="30 rows, A100-PCIe, at most 8 GPUs",
        source="SimuMax docs/FULL_RESULTS.md",
    ),
    Claim(
        tool="SimuMax",
        claim="time: mean 5.62 %, largest 13.54 %; memory: mean 0.46 %",
        scope="43 rows, one node of 8 B200",
        source="SimuMax docs/b200/b200_release_v1.2_summary.md",
    ),
    Claim(
        tool="vTrain",
        claim="time: mean 8.37 % on one node, 14.73 % on up to 512 GPUs",
        scope="A100",
        source="KAIST EE news page; arXiv 2312.12391",
    ),
    Claim(
        tool="Primus Projection",
        claim="+7.2, +5.3, -9.2, -7.8 %",
        scope="4 points, MI325X and MI355X, 8 nodes",
        source="Primus docs, tech blog",
    ),
    Claim(
        tool="NeuSight",
        claim="GPT-3 on an H100 it has not seen: 2.3 %",
        scope="kernels and single GPUs",
        source="ASPLOS 2025; arXiv 2407.13853",
    ),
    Claim(tool="Echo", claim="mean 8 %", scope="GPT-175B, 96 H800", source="arXiv 2412.12487"),
    Claim(
        tool="Maya", claim="below 5 %", scope="training code emulated at the CUDA interface", source="arXiv 2503.20191"
    ),
    Claim(tool="TrioSim", claim="typically below 10 %", scope="one GPU's trace to several GPUs", source="ISCA 2025"),
    Claim(tool="Mist", claim="time -5.9 %, memory +1.2 %", scope="1 point, 2 L4", source="README of the repository"),
)
"""What peers publish; none publishes a bias, the coverage of an interval, or errors on sources left out of a fit."""


def to_json(found: Sequence[Reached]) -> list[dict[str, Any]]:
    """The table of targets as plain data."""
    return [
        {
            "name": r.target.name,
            "measure": r.target.measure,
            "statistic": r.target.statistic,
            "rows": r.rows,
            "wanted": r.target.wanted,
            "by": r.target.by,
            "split": r.target.split,
            "errors": dict(r.errors),
            "missed_by": r.missed_by,
        }
        for r in found
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way of predicting the runs."""

    title: str
    leave_out: str | None = None
    named: bool = True


SEEN: Final = "packaged"
KNOWN: Final = "source_and_model"
UNSEEN: Final = "each"
UNNAMED: Final = "unnamed"
#: Key -> way, the easiest question first.
WAYS: Final = {
    SEEN: Way(title="frameworks of the package (most sources were in the fit)"),
    KNOWN: Way(title="source known, model not", leave_out=KNOWN),
    "model": Way(title="model not known, in ten parts", leave_out="model"),
    UNSEEN: Way(title="source not known", leave_out=UNSEEN),
    UNNAMED: Way(title="source not known, framework not told", leave_out=UNSEEN, named=False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """All predictions and their statistics."""

    scores: Mapping[str, RunScore]
    """Of the runs of the first table, by way."""
    summaries: Mapping[str, Mapping[str, Any]]
    second: Mapping[str, Mapping[str, Any]]
    """Of the runs of the second table, by way; empty without one."""
    targets: tuple[Reached, ...]
    reading: Mapping[str, Any]
    digest: str
    as_printed: Mapping[str, float]
    """Mean over sources of the errors, by way, of the same tables without what scripts say."""


def board_of(
    reading: Reading,
    printed: Reading,
    begun: Callable[[str], Progress | None] = lambda _: None,
    second: Reading | None = None,
) -> Board:
    """Predicts the runs in every way.

    Args:
        reading: the runs.
        printed: the same without what the scripts behind them say.
        begun: called with the title of each way when it begins; gives the callback for its progress.
        second: runs of a second table, which are fitted together with the first and have statistics of their own.
    """
    both = replace(reading, runs=(*reading.runs, *(() if second is None else second.runs)), skipped=())
    found = modelled(both.runs)
    every = {
        key: score_reading(both, leave_out=way.leave_out, named=way.named, progress=begun(way.title), found=found)
        for key, way in WAYS.items()
    }
    scores = {key: _of(score, reading) for key, score in every.items()}
    apart = {} if second is None else {key: _of(score, second) for key, score in every.items()}
    return Board(
        scores=scores,
        summaries={key: score.to_json() for key, score in scores.items()},
        second={key: score.to_json() for key, score in apart.items()},
        targets=tuple(reached({key: score.scored for key, score in scores.items()})),
        reading=reading.to_json(),
        digest=frameworks_digest(),
        as_printed=_means_over_sources(printed, begun),
    )


def _of(score: RunScore, own: Reading) -> RunScore:
    """The part of a score of both tables that is of one of them."""
    known = {id(run) for run in own.runs}
    scored = tuple(s for s in score.scored if id(s.run) in known)
    names = {(run.source_key, run.row_id) for run in own.runs} - {(s.run.source_key, s.run.row_id) for s in scored}
    refused = [row for row in score.missing if (row.source_key, row.row_id) in names]
    return replace(score, rows=own.rows, scored=scored, missing=(*refused, *unread(own)))


def _means_over_sources(reading: Reading, begun: Callable[[str], Progress | None]) -> dict[str, float]:
    found, out = modelled(reading.runs), {}
    for key in (KNOWN, UNSEEN):
        progress = begun(f"{WAYS[key].title}, tables as printed")
        score = score_reading(reading, leave_out=WAYS[key].leave_out, progress=progress, found=found)
        out[key] = float(macro(score.scored)["mape"])
    return out


def frameworks_digest() -> str:
    """First digits of the SHA-256 of the fit of frameworks in use, by which a page tells what it was made with."""
    return hashlib.sha256(json.dumps(framework_table(), sort_keys=True).encode()).hexdigest()[:12]
