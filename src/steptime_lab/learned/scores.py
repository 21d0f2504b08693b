"""All predictors under all splits: the table of `steptime predict score`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from steptime.num import Array
from steptime_lab.learned import additive, attention
from steptime_lab.learned.data import Rows
from steptime_lab.learned.graphs import SINGLE
from steptime_lab.learned.harness import FAMILY, FAMILY_ALONE, RANDOM, SIZE, Trained, score
from steptime_lab.learned.measuring import Graph
from steptime_lab.learned.memory import errors, fitted_workspaces

KINDS: Final = (RANDOM, SIZE, FAMILY, FAMILY_ALONE)
Maker = Callable[[Sequence[Graph], Rows], Trained]


def _analytic(graphs: Sequence[Graph], rows: Rows) -> Trained:
    return lambda train, test: rows.only(test).analytic_s


def _additive(graphs: Sequence[Graph], rows: Rows) -> Trained:
    return lambda train, test: additive.predicted_s(additive.fitted(rows.only(train)), rows.only(test))


def _attention(graphs: Sequence[Graph], rows: Rows) -> Trained:
    def trained(train: Array, test: Array) -> Array:
        found = attention.Network([graphs[n].sketch for n in train], rows.measured_s[train])
        return found.seconds([graphs[n].sketch for n in test])

    return trained


SLOW: Final[Mapping[str, Maker]] = {"attention over edges (DNNPerf)": _attention}
"""Predictors that take minutes to fit."""
PREDICTORS: Final[Mapping[str, Maker]] = {
    "analytic": _analytic,
    "learned correction": _additive,
    **SLOW,
}
"""Name -> predictor: analytic times, the learned correction, and the published encoder of graphs."""


def table(
    graphs: Sequence[Graph],
    rows: Rows,
    names: Sequence[str],
    told: Callable[[str], None] | None = None,
    kinds: Sequence[str] = KINDS,
) -> list[dict[str, Any]]:
    """One row for each predictor and kind of split: mean, median and bias of relative errors, CPU time of a fit."""
    tell = told or (lambda text: None)
    tell(f"{'error':<36} {'mean':>7} {'median':>7} {'fit':>8}")
    out = []
    for name in names:
        tell(name)
        for kind in kinds:
            found, each = score(rows, kind, PREDICTORS[name](graphs, rows), SINGLE)
            out.append(
                {
                    "predictor": name,
                    "split": kind,
                    "graphs": found.graphs,
                    "mean": found.mean,
                    "median": found.median,
                    "bias": found.bias,
                    "fit_cpu_s": found.fit_s,
                    "by_split": {one.split: one.mean for one in each},
                }
            )
            tell(f"  {kind:<34} {100 * found.mean:>5.1f} % {100 * found.median:>5.1f} % {found.fit_s:>6.1f} s")
    return out


def memory_table(graphs: Sequence[Graph]) -> list[dict[str, Any]]:
    """Errors of peaks by family: simulated, and with workspaces learned from all other families."""
    out = []
    for family in sorted({graph.family for graph in graphs} - {SINGLE}):
        mine = [graph for graph in graphs if graph.family == family]
        known = fitted_workspaces([graph for graph in graphs if graph.family != family])
        before, after = abs(errors(mine)), abs(errors(mine, known))
        out.append(
            {
                "family": family,
                "graphs": len(mine),
                "simulated": float(before.mean()),
                "learned": float(after.mean()),
                "median": float(sorted(after)[len(after) // 2]),
                "largest": float(after.max()),
            }
        )
    return out
