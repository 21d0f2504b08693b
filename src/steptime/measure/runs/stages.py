"""Measured times of the passes of a pipeline's stages against predicted ones.

A row has the columns of a training run and, in place of a step time, mean times of one micro-batch on a stage: its
forward pass T_F, its gradient of inputs T_B, its gradients of weights T_W, and a message between stages T_comm.
Schedules that delay gradients of weights (zb-h1, zb-h2, DualPipe) are planned from these times.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from steptime.api.models import load_model
from steptime.errors import InputFileError, UserError, shorten
from steptime.estimate.evaluate import Evaluation
from steptime.estimate.kernels import of_device
from steptime.measure.residuals import errors
from steptime.measure.runs.read import Reason, RowProblem, TableRow, name_key, not_read, read_rows, table
from steptime.measure.runs.reading import with_recipe
from steptime.measure.runs.run import MeasuredRun, run_of
from steptime.measure.runs.samples import Setting, factors_of, settings_of
from steptime.measure.runs.scoring import REFUSED, Missing, doubted, rows_of_parquet, skipped_counts, write_table
from steptime.plan.framework_file import load_framework

TIMES: Final = ("T_F", "T_B", "T_W", "T_comm")
"""Forward, gradient of inputs, gradients of weights, message to the next stage."""
SECONDS: Final = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
"""Suffix of a column of times -> its unit in seconds."""
SPLITS: Final = re.compile("zb|zero[- _]?bubble|dualpipe", re.IGNORECASE)
"""Schedules that compute gradients of weights apart from those of inputs."""
NEEDED: Final = ("model", "seq_len", "gpu", "pp", "micro_batch", "microbatches")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredStages:
    """One row: measured and predicted seconds of those :data:`TIMES` that it states."""

    line: int
    run: MeasuredRun
    measured_s: Mapping[str, float]
    predicted_s: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageScore:
    """A table of stage times and its predictions; every row is in ``scored`` or in ``missing``."""

    scored: tuple[ScoredStages, ...]
    missing: tuple[Missing, ...]
    columns_not_read: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Counts, reasons, and errors of each time; fractions, not percent."""
        return {
            "rows": len(self.scored) + len(self.missing),
            "scored": len(self.scored),
            **skipped_counts(self.missing),
            "columns_not_read": list(self.columns_not_read),
            "doubts": dict(doubted(s.run for s in self.scored).most_common()),
            "stages": {name: self._errors([name]) for name in TIMES},
            "passes": self._errors(TIMES[:3]),
        }

    def _errors(self, names: Sequence[str]) -> dict[str, Any]:
        """Errors of some times over all rows that state them, without coverage: parts of a step have no bands."""
        pairs = [(s.measured_s[n], s.predicted_s[n]) for s in self.scored for n in names if n in s.measured_s]
        table = np.array(pairs, np.float64).reshape(-1, 2)
        found: dict[str, Any] = dict(errors(table[:, 0], table[:, 1], *np.full((2, len(table)), np.nan)))
        found.pop("coverage90")
        return {"rows": len(table), **found}


def score_stages(path: str | Path) -> StageScore:
    """Predicts every row of a table of stage times, each by the framework that it names.

    Args:
        path: CSV, CSV.gz or Parquet with :data:`NEEDED`, one of :data:`TIMES` with its unit (``T_F_ms``), and any other
            column of measured training runs.

    Raises:
        InputFileError: the file is not such a table, or lacks a needed column.
    """
    scored, missing, load = [], [], cache(load_model)
    rows = (rows_of_parquet if str(path).lower().endswith(".parquet") else read_rows)(path, _check)
    for row in rows:
        try:
            measured = _measured(row)
            run = run_of(with_recipe(_as_run(row)), load)
            if run.degrees is not None and run.degrees.pp > run.model.layers:
                raise RowProblem(Reason.MORE_STAGES, f"pp {run.degrees.pp}, {run.model.layers} layers")
            predicted = stage_times(run, settings_of(run))
        except RowProblem as problem:
            missing.append(_missing(row, str(problem.reason), problem.detail))
        except (UserError, ArithmeticError) as error:
            missing.append(_missing(row, REFUSED, str(error)))
        else:
            scored.append(ScoredStages(line=row.line, run=run, measured_s=measured, predicted_s=predicted))
    unread = not_read((row.cells for row in rows), lambda name: name == "microbatches" or _time_of(name) is not None)
    return StageScore(scored=tuple(scored), missing=tuple(missing), columns_not_read=unread)


def stage_times(run: MeasuredRun, settings: Sequence[Setting]) -> dict[str, float]:
    r"""Predicted seconds of :data:`TIMES`: geometric means over the plausible settings of a run.

    $$\bar t = \exp \sum_i w_i \ln t_i$$

    where $w_i$ is the weight of setting $i$ and $t_i$ its time, a mean over the stages (:func:`mean_stage_s`).
    """
    total = dict.fromkeys(TIMES, 0.0)
    for setting in settings:
        device = setting.cluster.device
        framework = load_framework(run.framework, run.device, of_device(device, setting.machine.models))
        factors = {name: getattr(framework, name) * f for name, f in factors_of(run, setting.job.attention).items()}
        for name, seconds in mean_stage_s(setting.evaluate(replace(framework, **factors))).items():
            total[name] += setting.weight * math.log(max(seconds, 1e-12))
    return {name: math.exp(value) for name, value in total.items()}


def mean_stage_s(e: Evaluation) -> dict[str, float]:
    """Seconds of :data:`TIMES` for one micro-batch, the mean over the stages of a pipeline.

    The gradient of inputs is the backward pass with its recomputation, without the products of gradients of weights.
    """
    layers, stages, passes = float(e.inputs.layers), float(e.inputs.stages), e.passes
    parts = ((layers, passes["layer"]), (1.0, passes["first"]), (1.0, passes["last"]))
    again = e.inputs.recomputed
    forward = sum(n * float(part.forward_s) for n, part in parts) / stages
    weights = sum(n * float(part.weights_s) for n, part in parts) / stages
    backward = layers * float(passes["layer"].backward_with_s(again))
    backward = (backward + float(passes["first"].backward_s) + float(passes["last"].backward_s)) / stages
    return {"T_F": forward, "T_B": backward - weights, "T_W": weights, "T_comm": float(e.step.stage_link_s)}


def _measured(row: TableRow) -> dict[str, float]:
    """Seconds of the times that a row states.

    Raises:
        RowProblem: it states none that is a positive number.
    """
    found = {}
    for column in row.cells:
        if (known := _time_of(column)) is not None and (value := row.number(column)) is not None:
            found[known[0]] = value * SECONDS[known[1]]
    if row.unread:
        raise RowProblem(Reason.BAD_MEASUREMENT, f"{row.unread[0]}: {shorten(row.text(row.unread[0]))!r}")
    if not found:
        raise RowProblem(Reason.NO_MEASUREMENT)
    return found


def _as_run(row: TableRow) -> TableRow:
    """The row as a training run: devices and batch follow from degrees and micro-batches; its step time is a dummy.

    Raises:
        RowProblem: it states no stages or micro-batches.
    """
    degree = {name: row.whole(name, at_most=10**5) or 1 for name in ("tp", "pp", "cp", "dp")}
    count, size = row.whole("microbatches", at_most=10**6), row.whole("micro_batch", at_most=10**6)
    if row.unread:
        raise RowProblem(Reason.BAD_NUMBER, f"{row.unread[0]}: {shorten(row.text(row.unread[0]))!r}")
    if count is None or size is None or degree["pp"] < 2:
        stated = ", ".join(f"{name} {shorten(row.text(name))!r}" for name in ("pp", "micro_batch", "microbatches"))
        raise RowProblem(Reason.NO_STAGES, stated)
    given = {
        "n_gpus": str(math.prod(degree.values())),
        "global_batch_sequences": str(count * size * degree["dp"]),
        "tp": "1",
    }
    cells = {**given, **{name: text for name, text in row.cells.items() if text.strip()}}
    # Times of passes do not depend on the schedule; one that splits the backward pass gives gradients of weights apart.
    splits = SPLITS.search(cells.get("schedule", ""))
    return TableRow(row.line, {**cells, **({} if splits else {"schedule": "ZB-1p"}), "metric_step_time_s": "1"})


def _time_of(column: str) -> tuple[str, str] | None:
    """Time and unit of a column; None for any other column.

    >>> _time_of("T_F_ms"), _time_of("t comm (us)"), _time_of("T_F"), _time_of("layers")
    (('T_F', 'ms'), ('T_comm', 'us'), None, None)
    """
    called, _, unit = name_key(column).rpartition("_")
    time = next((name for name in TIMES if name.lower() == called), None)
    return (time, unit) if time is not None and unit in SECONDS else None


def stage_columns() -> list[str]:
    """The columns of times, each with its unit.

    >>> stage_columns()[:3]
    ['T_F_s', 'T_F_ms', 'T_F_us']
    """
    return [f"{name}_{unit}" for name in TIMES for unit in SECONDS]


def _check(where: str, names: list[str]) -> None:
    """Refuses a table without a needed column, or without a time of a stage."""
    missing = [name for name in NEEDED if name not in names]
    hint = f"needed: {', '.join(NEEDED)}, and one of T_F_ms, T_B_ms, T_W_ms, T_comm_ms (or _us, _s)"
    if missing:
        raise InputFileError(where, f"lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}", hint=hint)
    if not any(_time_of(name) for name in names):
        raise InputFileError(where, "has no time of a stage", hint=hint)


def _missing(row: TableRow, reason: str, detail: str) -> Missing:
    return Missing(line=row.line, reason=reason, detail=shorten(detail, 200))


COLUMNS: Final[Sequence[str]] = table("columns")["columns"]["stages"]


def write_stages(score: StageScore, path: Path) -> None:
    """Writes one line per time of each row: measured, predicted, error; or why the row was skipped.

    Raises:
        InputFileError: it cannot be written.
    """
    lines: list[tuple[int, dict[str, object]]] = []
    for s in score.scored:
        run, names = s.run, [name for name in TIMES if name in s.measured_s]
        for name in names:
            measured, predicted = s.measured_s[name], s.predicted_s[name]
            lines.append(
                (
                    s.line,
                    {
                        "line": s.line,
                        "model": run.model_name,
                        "gpu": run.device,
                        "framework": run.framework,
                        "time": name,
                        "measured_s": f"{measured:.6g}",
                        "predicted_s": f"{predicted:.6g}",
                        "error": f"{predicted / measured - 1:.4f}",
                    },
                )
            )
    write_table(path, COLUMNS, lines, score.missing)
