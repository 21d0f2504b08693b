"""Commands of the laboratory, which the command line finds by an entry point of this package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from steptime.cli.parser import Entry

#: Command -> its module, imported when the command runs, and a summary.
_LAB: Final = {
    "rules": ("steptime_lab.rules.cli", "Substitutions of tensor terms with their proofs."),
    "planners": ("steptime_lab.cli.planners", "Other searches and recipes next to the planner."),
    "reshard": ("steptime_lab.cli.reshard", "The cheapest collectives from one sharding to another."),
    "cache": ("steptime_lab.hierarchy.cli.cache", "Simulate caches on access patterns: hits, misses, reuse."),
    "tile": ("steptime_lab.hierarchy.cli.tile", "The best tiles of a product at every level of a machine; warps."),
    "compress": ("steptime_lab.cli.compress", "Quantised, sparse, low-rank weights: bytes, time, what pays."),
    "tune": ("steptime_lab.hierarchy.cli.tune", "The fastest tiles of a product here, measured."),
    "iterate": ("steptime_lab.iterate.cli", "An iteration of Lanczos, CG or a loop of yours, on a matrix."),
    "limits": ("steptime_lab.cli.limits", "How far a run can scale before data movement stops it."),
    "reproduce": ("steptime_lab.cli.reproduce", "Check the published mode; what each corrected defect changes."),
    "predict": ("steptime_lab.cli.predict", "Learned corrections of times: measure, fit, score."),
    "consistency": ("steptime_lab.cli.consistency", "All-reduce and parameter servers: throughput, staleness."),
}
_CALIBRATE: Final = {
    "fit": ("steptime_lab.cli.calibrate_fit", "Fit time models to tables of measured kernels and collectives."),
    "frameworks": (
        "steptime_lab.cli.calibrate_frameworks",
        "Fit what training frameworks add to measured training runs.",
    ),
}
COMMANDS: Final[Mapping[str, Mapping[str, Entry]]] = {
    "steptime lab": {name: Entry(*row, "Laboratory") for name, row in _LAB.items()},
    "steptime": {name: Entry(*row, "") for name, row in _LAB.items()},
    "steptime calibrate": {name: Entry(*row) for name, row in _CALIBRATE.items()},
}
"""Name of a group -> its commands. Commands of the lab also work without ``lab``; help does not list that spelling."""
