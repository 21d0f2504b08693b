"""Training and scoring of predictors under the same splits: at random, by size, by family, by device.

A split says which graphs a predictor may see. Errors are relative to the measured time. An interval comes from the
errors on graphs that were held out of training (split conformal prediction).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from steptime.errors import UserError
from steptime.num import Array
from steptime_lab.learned.data import Rows

RANDOM, SIZE, FAMILY, FAMILY_ALONE = "random", "size", "family", "family, without single operators"
KEPT: Final = 0.2
"""Share of graphs that a random split holds out for the test."""
SMALL: Final = 0.7
LARGE: Final = 0.85
"""A split by size trains on graphs below the quantile `SMALL` of times and tests on those above `LARGE`."""
COVERED: Final = 0.9
"""Share of unseen graphs that an interval should hold."""
LEAST: Final = 20
"""Fewest graphs on either side of a split."""


class Split(NamedTuple):
    """Numbers of graphs to train on and to test."""

    name: str
    train: Array
    test: Array


def splits(rows: Rows, kind: str, single: str, seed: int = 0) -> Iterator[Split]:
    """The splits of a kind. Graphs of the family ``single`` are always in training, except with `FAMILY_ALONE`.

    Raises:
        UserError: there are too few graphs.
    """
    families = np.array(rows.families, object)
    networks, alone = np.nonzero(families != single)[0], np.nonzero(families == single)[0]
    if len(networks) < 2 * LEAST:
        raise UserError(
            f"{len(networks)} graphs are too few for a split",
            hint=f"measure {2 * LEAST} or more: steptime predict measure --graphs N",
        )
    if kind == RANDOM:
        shuffled = np.random.default_rng(seed).permutation(networks)
        kept = int(KEPT * len(shuffled))
        yield Split(kind, np.concatenate([shuffled[kept:], alone]), shuffled[:kept])
    elif kind == SIZE:
        order = networks[np.argsort(rows.measured_s[networks], kind="stable")]
        small, large = int(SMALL * len(order)), int(LARGE * len(order))
        yield Split(kind, np.concatenate([order[:small], alone]), order[large:])
    else:
        names = sorted(set(families[networks]))
        if len(names) < 2:
            raise UserError("all graphs are of one family", hint="measure more families to leave one out")
        for name in names:
            rest = networks[families[networks] != name]
            rest = rest if kind == FAMILY_ALONE else np.concatenate([rest, alone])
            yield Split(str(name), rest, networks[families[networks] == name])


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Errors of one predictor on one split."""

    split: str
    graphs: int
    mean: float
    """Mean of the absolute relative errors."""
    median: float
    """Median of the absolute relative errors."""
    bias: float
    """Median of the relative errors."""
    fit_s: float
    """CPU time of training."""


def scored(split: str, predicted_s: Array, measured_s: Array, fit_s: float) -> Scored:
    """Errors of predicted against measured times."""
    errors = predicted_s / measured_s - 1
    return Scored(
        split=split,
        graphs=len(errors),
        mean=float(abs(errors).mean()),
        median=float(np.median(abs(errors))),
        bias=float(np.median(errors)),
        fit_s=fit_s,
    )


def together(found: Sequence[Scored], name: str) -> Scored:
    """Mean of the scores of splits, each counted once."""
    mean = {key: float(np.mean([getattr(one, key) for one in found])) for key in ("mean", "median", "bias", "fit_s")}
    return Scored(split=name, graphs=sum(one.graphs for one in found), **mean)


Trained = Callable[[Array, Array], Array]
"""Numbers of graphs to train on and to test on -> predicted times (s) of the test graphs."""


def score(rows: Rows, kind: str, trained: Trained, single: str, seed: int = 0) -> tuple[Scored, list[Scored]]:
    """Errors of a predictor over the splits of a kind: their mean, and one by one."""
    found = []
    for split in splits(rows, kind, single, seed):
        begin = time.process_time()
        predicted_s = trained(split.train, split.test)
        found.append(scored(split.name, predicted_s, rows.measured_s[split.test], time.process_time() - begin))
    return together(found, kind), found


def conformal(predicted_s: Array, measured_s: Array, covered: float = COVERED) -> tuple[float, float]:
    r"""Interval of factors on a predicted time that covers a share of new graphs.

    Half of the rest lies on either side: the ends are the $\lfloor (n + 1)(1 - c) / 2 \rfloor$-th and
    the $\lceil (n + 1)(1 + c) / 2 \rceil$-th smallest of the $n$ ratios of measured to predicted time, with
    $c$ = `covered`. Errors within a family are correlated, so that coverage of a new family may be lower
    (:func:`left_out`).

    Source: split conformal prediction (Vovk and others, "Algorithmic Learning in a Random World", 2005).

    >>> [round(end, 2) for end in conformal(np.ones(99), np.arange(1, 100) / 50.0)]
    [0.1, 1.9]
    """
    ratios = np.sort(measured_s / predicted_s)
    count = len(ratios)
    low = max(math.floor(round((count + 1) * (1 - covered) / 2, 6)), 1)
    high = min(math.ceil(round((count + 1) * (1 + covered) / 2, 6)), count)
    return float(ratios[low - 1]), float(ratios[high - 1])


def coverage(predicted_s: Array, measured_s: Array, band: tuple[float, float]) -> float:
    """Share of graphs whose ratio of measured to predicted time lies in a band."""
    ratios = measured_s / predicted_s
    return float(((ratios >= band[0]) & (ratios <= band[1])).mean())


def left_out(predicted_s: Array, measured_s: Array, group: Sequence[str]) -> float:
    """Mean over groups of the share of a group's graphs that lies in the interval of all other groups."""
    names = np.array(group, object)
    shares = [
        coverage(
            predicted_s[names == one],
            measured_s[names == one],
            conformal(predicted_s[names != one], measured_s[names != one]),
        )
        for one in sorted(set(group))
    ]
    return float(np.mean(shares))


def noise(first_s: Sequence[float], again_s: Sequence[float]) -> Mapping[str, float]:
    """Mean and median relative difference of two measurements of the same graphs: a lower bound of prediction errors.

    The difference has the noise of both measurements. The error of a correct prediction has the noise of one, which is
    smaller by the square root of two.
    """
    distance = abs(np.array(first_s) / np.array(again_s) - 1)
    return {"mean": float(distance.mean()), "median": float(np.median(distance)), "graphs": float(len(distance))}
