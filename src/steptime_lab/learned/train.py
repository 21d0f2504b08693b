"""Training of a correction for `profile` and `estimate` from measured graphs, with its errors and provenance."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from steptime.estimate.learned import Correction, correction_from
from steptime.num import Array
from steptime.store.files import write_whole
from steptime_lab.learned.additive import Options, fitted, predicted_s
from steptime_lab.learned.data import Rows
from steptime_lab.learned.graphs import SINGLE
from steptime_lab.learned.harness import FAMILY, conformal, left_out, noise, splits
from steptime_lab.learned.measuring import Graph


def trained(
    rows: Rows,
    name: str,
    provenance: dict[str, Any],
    *,
    unseen: str,
    options: Options | None = None,
    told: Callable[[str], None] | None = None,
) -> Correction:
    """The correction fitted to all rows, with the error and band of predictions for groups of graphs held out in turn.

    Args:
        rows: measured graphs; :attr:`Rows.families` are the groups.
        name: name in reports.
        provenance: description of the measurements.
        unseen: description of the groups in words.
        options: options of the fit.
        told: called with a line for each group.
    """
    measured, predicted, groups, errors = list[Array](), list[Array](), list[str](), dict[str, float]()
    for split in splits(rows, FAMILY, SINGLE):
        one = fitted(rows.only(split.train), options)
        found_s = predicted_s(one, rows.only(split.test))
        measured.append(rows.measured_s[split.test])
        predicted.append(found_s)
        groups += [split.name] * len(found_s)
        errors[split.name] = float(abs(found_s / measured[-1] - 1).mean())
        if told is not None:
            told(f"{split.name} left out: error {100 * errors[split.name]:.1f} %")
    every_s, all_s = np.concatenate(predicted), np.concatenate(measured)
    band = conformal(every_s, all_s)
    found = fitted(rows, options)
    known = {
        **provenance,
        "graphs": len(rows.measured_s),
        "unseen": unseen,
        "seed": (options or Options()).seed,
        "errors_left_out": {group: round(error, 4) for group, error in errors.items()},
        "covered": round(left_out(every_s, all_s, groups), 4),
    }
    return replace(found, name=name, band=band, error=float(np.mean(list(errors.values()))), provenance=known)


def written(correction: Correction, path: Path) -> None:
    """Write a correction as JSON.

    Raises:
        InputFileError: the file cannot be written.
    """
    plain = correction.to_json()
    correction_from(plain, str(path))
    write_whole(path, json.dumps(plain, separators=(",", ":"), allow_nan=False) + "\n")


def noise_of(graphs: Sequence[Graph]) -> dict[str, float]:
    """Noise of the graphs that were measured twice; empty where there are none."""
    twice = [(graph.seconds, graph.again_s) for graph in graphs if graph.again_s is not None and graph.family != SINGLE]
    return dict(noise([first for first, _ in twice], [again for _, again in twice])) if twice else {}
