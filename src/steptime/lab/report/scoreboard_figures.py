"""Figures of the scoreboard as SVG files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np

from steptime.errors import UserError
from steptime.lab.measured import ScoredRun
from steptime.lab.measured.aggregate import covered, timed
from steptime.lab.report.scoreboard import FIGURES
from steptime.lab.scoring.scoreboard import UNSEEN, Board

SIZE: Final = (6.4, 4.2)
LEAST_ROWS: Final = 5
COLOUR, EDGE = "#2b6cb0", "#999999"


def write_figures(board: Board, folder: Path) -> list[Path]:
    """Writes every figure of :data:`FIGURES`; points are rasterised so that the files stay small.

    Raises:
        UserError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise UserError("figures need matplotlib", hint="pip install 'steptime[calibrate]'")
    folder.mkdir(parents=True, exist_ok=True)
    scored = timed(board.scores[UNSEEN].scored)
    draw: dict[str, Callable[[Any, Sequence[ScoredRun]], None]] = {
        "predicted-and-measured": _times, "residuals-by-scale": _residuals, "coverage-by-source": _coverage,
    }  # fmt: skip
    settings = {"svg.hashsalt": "steptime", "svg.fonttype": "none", "font.size": 9, "savefig.dpi": 110}
    with import_module("matplotlib").rc_context(settings):
        return [_written(folder / f"{name}.svg", title, draw[name], scored) for name, title in FIGURES.items()]


def _written(
    path: Path, title: str, draw: Callable[[Any, Sequence[ScoredRun]], None], scored: Sequence[ScoredRun]
) -> Path:
    figure = import_module("matplotlib.figure").Figure(figsize=SIZE, layout="constrained")
    axes = figure.add_subplot()
    draw(axes, scored)
    axes.set_title(title, fontsize=9)
    figure.savefig(path, metadata={"Date": None})
    return path


def _ratios(scored: Sequence[ScoredRun]) -> tuple[Any, Any]:
    measured = np.array([s.run.step_time_s for s in scored], np.float64)
    predicted = np.array([s.step_time_s for s in scored], np.float64)
    return measured, predicted


def _times(axes: Any, scored: Sequence[ScoredRun]) -> None:
    measured, predicted = _ratios(scored)
    axes.loglog(measured, predicted, ".", ms=3, alpha=0.4, color=COLOUR, rasterized=True)
    ends = np.array([measured.min(), measured.max()])
    axes.plot(ends, ends, color="black", lw=0.8)
    for factor in (0.8, 1.25):
        axes.plot(ends, factor * ends, color=EDGE, lw=0.8, ls="--")
    axes.set_xlabel("measured step time, s")
    axes.set_ylabel("predicted step time, s (dashed: a quarter off)")


def _residuals(axes: Any, scored: Sequence[ScoredRun]) -> None:
    measured, predicted = _ratios(scored)
    gpus = np.array([s.run.gpus for s in scored], np.float64)
    axes.plot(gpus, predicted / measured, ".", ms=3, alpha=0.4, color=COLOUR, rasterized=True)
    bands = np.floor(np.log2(gpus))
    for band in np.unique(bands):
        ratio = (predicted / measured)[bands == band]
        if len(ratio) >= LEAST_ROWS:
            low, middle, high = np.quantile(ratio, [0.05, 0.5, 0.95])
            axes.plot([2.0 ** (band + 0.5)] * 2, [low, high], color="black", lw=1)
            axes.plot(2.0 ** (band + 0.5), middle, "_", color="black", ms=9)
    axes.axhline(1, color="black", lw=0.8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_yticks([0.5, 0.7, 1, 1.4, 2], ["0.5", "0.7", "1", "1.4", "2"])
    axes.set_xlabel("GPUs")
    axes.set_ylabel("predicted over measured (bars: 5 to 95 %)")


def _coverage(axes: Any, scored: Sequence[ScoredRun]) -> None:
    inside = covered(scored)
    kept = sorted((k for k, v in inside.items() if len(v) >= LEAST_ROWS), key=lambda k: float(np.mean(inside[k])))
    shares = [100 * float(np.mean(inside[k])) for k in kept]
    axes.barh([f"{k} ({len(inside[k])})" for k in kept], shares, color=COLOUR)
    axes.axvline(90, color="black", lw=0.8, ls="--")
    axes.set_xlim(0, 100)
    axes.tick_params(axis="y", labelsize=7)
    axes.set_xlabel("in band, % (dashed: 90 %)")
