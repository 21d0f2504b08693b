"""The scoreboard: one table of measured runs, predicted in every way that says something."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from steptime.lab.measured import Reading
from steptime.lab.measured.aggregate import macro
from steptime.lab.measured.samples import Progress, modelled
from steptime.lab.measured.targets import Reached, reached
from steptime.lab.scoring.runs import RunScore, score_reading, unread
from steptime.plan.framework_file import framework_path


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
        scores=scores, summaries={key: score.to_json() for key, score in scores.items()},
        second={key: score.to_json() for key, score in apart.items()},
        targets=tuple(reached({key: score.scored for key, score in scores.items()})),
        reading=reading.to_json(), digest=frameworks_digest(),
        as_printed=_means_over_sources(printed, begun),
    )  # fmt: skip


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
    """First digits of the SHA-256 of the file of frameworks in use, by which a page tells what it was made with."""
    return hashlib.sha256(framework_path().read_bytes()).hexdigest()[:12]
