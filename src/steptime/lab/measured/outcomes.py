"""Layouts that a study tried, with those that ran out of memory: what the chance of running out is worth."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np

from steptime.lab.measured.aggregate import ScoredRun
from steptime.lab.measured.ranking import plan_key, workload_key
from steptime.lab.measured.read import TableRow
from steptime.lab.measured.reasons import Reason, RowProblem
from steptime.num import Array

COLUMN: Final = "outcome"
RAN, RAN_OUT = "ran", "ran out of memory"
_WORDS: Final = (
    (r"\boom\b|out[- _]of[- _]memory|ran out", RAN_OUT),
    (r"^(?:ok|ran|yes|true|success\w*|complete\w*|finished|done|fits?)$", RAN),
)
_NUMBERS: Final = re.compile(r"\d+")
"""What notes on software of one kind may differ in: numbers of trials."""
EDGES: Final = (0.0, 0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98, 1.0)
"""Ends of the bins of a reliability diagram."""
LEAST_CHANCE: Final = 1e-6
"""Chances are kept this far from 0 and 1 in the logarithmic score."""
LEAST_PLANS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A layout with its prediction and what became of it."""

    scored: ScoredRun
    ran: bool
    """False: it ran out of memory."""


def outcome_of(row: TableRow) -> bool:
    """Whether the layout of a row ran; without a word, one with a step time did.

    Raises:
        RowProblem: its outcome says nothing of memory.

    >>> [outcome_of(TableRow(1, {"outcome": text})) for text in ("ok", "OOM Error", "CUDA out of memory")]
    [True, False, False]
    """
    text = row.text(COLUMN)
    found = next((name for pattern, name in _WORDS if re.search(pattern, text.strip().lower())), None)
    if found is None and not text and row.number("metric_step_time_s"):
        return True
    if found is None:
        raise RowProblem(Reason.NO_OUTCOME, repr(text[:60]))
    return found == RAN


def outcome_statistics(tried: Sequence[Tried]) -> dict[str, Any]:
    r"""What the predicted chances of running out are worth.

    ``above_half``: share of the layouts that ran out, and of those that ran, with $P > 1/2$; ``brier`` the mean of
    $(P - o)^2$ and ``log_loss`` of $-\ln P$ of what happened, for $o = 1$ where it ran out; ``reliability``: by bins of
    $P$ the mean and the share that ran out; ``picked``: of groups of three plans or more of one job, the plan that is
    predicted fastest among those with $P \le 1/2$.
    """
    chance = np.array([each.scored.oom_probability for each in tried], np.float64)
    ran = np.array([each.ran for each in tried], bool)
    clipped = np.clip(chance, LEAST_CHANCE, 1 - LEAST_CHANCE)
    return {
        "ran_out": _above_half(chance[~ran]), "ran": _above_half(chance[ran]),
        "brier": _mean((chance - ~ran) ** 2), "log_loss": _mean(-np.log(np.where(ran, 1 - clipped, clipped))),
        "reliability": reliability_bins(chance, ran), "picked": _picked(tried),
    }  # fmt: skip


def _mean(values: Array) -> float | None:
    return float(np.mean(values)) if len(values) else None


def _above_half(chance: Array) -> dict[str, Any]:
    return {"rows": len(chance), "above_half": _mean(chance > 0.5)}


def reliability_bins(chance: Array, ran: Array) -> list[dict[str, Any]]:
    """By bins of the predicted chance of running out: rows, mean chance, and the share that ran out.

    >>> bins = reliability_bins(np.array([0.0, 0.95, 1.0]), np.array([True, False, False]))
    >>> [(b["low"], b["rows"], b["ran_out"]) for b in bins if b["rows"]]
    [(0.0, 1, 0.0), (0.9, 1, 1.0), (0.98, 1, 1.0)]
    """
    place = np.clip(np.digitize(chance, EDGES) - 1, 0, len(EDGES) - 2)
    return [
        {"low": low, "high": high, "rows": int((place == i).sum()), "mean": _mean(chance[place == i]),
         "ran_out": _mean(~ran[place == i])}
        for i, (low, high) in enumerate(pairwise(EDGES))
    ]  # fmt: skip


def _picked(tried: Sequence[Tried]) -> dict[str, Any]:
    """What choosing by the prediction costs: regret over the fastest plan that ran, and how often the choice ran.

    ``regret_of_ran``: of the plan predicted fastest among those that ran.
    """
    groups: dict[Hashable, dict[Hashable, Tried]] = defaultdict(dict)
    for each in tried:
        run = each.scored.run
        kernels = (run.kernel, _NUMBERS.sub("", run.notes))
        groups[workload_key(run), kernels].setdefault(plan_key(run), each)
    regrets, known, chosen = [], [], 0
    for plans in groups.values():
        ran = [each for each in plans.values() if each.ran and each.scored.run.step_time_s]
        fits = [each for each in plans.values() if each.scored.oom_probability <= 0.5]
        if len(plans) < LEAST_PLANS or not ran or not fits:
            continue
        chosen += 1
        first = min(fits, key=_predicted_s)
        best = min(each.scored.run.step_time_s or math.inf for each in ran)
        known.append((min(ran, key=_predicted_s).scored.run.step_time_s or math.nan) / best - 1)
        if first in ran:
            regrets.append((first.scored.run.step_time_s or math.nan) / best - 1)
    return {
        "groups": chosen, "ran": len(regrets) / chosen if chosen else None, "mean_regret": _mean(np.array(regrets)),
        "worst_regret": max(regrets, default=None), "regret_of_ran": _mean(np.array(known)),
    }  # fmt: skip


def _predicted_s(each: Tried) -> float:
    return each.scored.step_time_s
