"""The studies of ``studies/`` give the numbers that arXiv 2410.00273 shows."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import published_cases as cases
import pytest

from steptime import study
from steptime_lab.data_root import require_data

STUDIES = Path(__file__).parents[2] / "studies"
SWEEPS = Path(__file__).parents[1] / "data" / "published_sweeps.csv"
TOLERANCE = 1e-9
DIGITS = 1e-8
"""Relative error of figures that are printed with ten digits."""


def rows_of(name: str, store: Path, table: str = "plans") -> list[dict[str, Any]]:
    found = study.read_study(STUDIES / f"{name}.toml")
    outcome = study.run(found, store, workers=1)
    assert not outcome.refused
    return study.results(found, store).rows(table)


def test_every_study_is_read_and_cites_its_source() -> None:
    import tomllib

    files = sorted(STUDIES.glob("*.toml"))
    assert len(files) >= 4
    for path in files:
        assert study.read_study(path).cases
        assert "arXiv" in tomllib.loads(path.read_text(encoding="utf-8"))["source"]


def test_strong_scaling_has_every_point_of_the_paper() -> None:
    found = study.read_study(STUDIES / "strong-scaling.toml")
    assert len({point.key for point in found.points}) == 9 * 2 * 3 * 13


def _sweep(figure: str, rows: Iterable[Mapping[str, Any]]) -> dict[tuple[int, int, int], Mapping[str, Any]]:
    of_figure = [row for row in rows if row["grid"].split()[0] == figure]
    return {(row["tp"], row["tp2"] * row["cp"], row["pp"]): row for row in of_figure}


def test_rationale_sweeps(tmp_path: Path) -> None:
    lines = [line for line in SWEEPS.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    rows = rows_of("rationale", tmp_path)
    for line in csv.DictReader(lines):
        row = _sweep(line["figure"], rows)[int(line["tp"]), int(line["tp2"]), int(line["pp"])]
        assert cases.relative(row["step_time_s"], float(line["step_time_s"])) <= TOLERANCE, line
        if line["memory_gb"]:
            assert cases.relative(row["peak_memory_bytes"], float(line["memory_gb"]) * 1e9) <= TOLERANCE, line


@pytest.mark.shared
def test_all_rationale_sweeps_and_their_terms(tmp_path: Path) -> None:
    rows = rows_of("rationale", tmp_path)
    with gzip.open(require_data("published_fig_rationale.csv.gz"), "rt", encoding="utf-8") as file:
        published = list(csv.DictReader(file))
    assert len(published) == len(rows)
    sql = (
        "select grid, point, sum(value) as s from terms where quantity = 'time_s' and path like 'bubble%' group by all"
    )
    found = study.results(study.read_study(STUDIES / "rationale.toml"), tmp_path)
    bubbles = {(row["grid"], row["point"]): row["s"] for row in found.query(sql)}
    for line in published:
        row = _sweep(line["fig"], rows)[int(line["tp1"]), int(line["tp2"]), int(line["pp"])]
        assert cases.relative(row["step_time_s"], float(line["t"])) <= TOLERANCE, line
        bubble = bubbles.get((row["grid"], row["point"]), 0.0)
        assert abs(bubble - float(line["t_bubble"])) <= TOLERANCE * row["step_time_s"], line


@pytest.mark.slow
@pytest.mark.shared
def test_hardware_sweeps(tmp_path: Path) -> None:
    """Every eleventh of the 1,116 points; ``steptime study run studies/hardware-sweeps.toml`` computes them all."""
    from dataclasses import replace

    found = study.read_study(STUDIES / "hardware-sweeps.toml")
    with gzip.open(require_data("published_fig_hw_sweeps.csv.gz"), "rt", encoding="utf-8") as file:
        published = list(csv.DictReader(file))
    assert len(found.cases) == len(published) == 1116
    some = replace(found, cases=found.cases[::11])
    study.run(some, tmp_path, workers=1)
    rows = study.results(some, tmp_path).rows()
    assert len(rows) == len(some.cases)
    columns = ("memory_bytes", "memory_Bps", "matrix_flops_per_s")
    days = {(line["sweep"], *_key(line)): float(line["train_days_n8192"]) for line in published}
    for row in rows:
        key = (row["grid"], *(_digits(row[name]) for name in columns))
        assert cases.relative(row["training_days"], days[key]) <= DIGITS, key


def _key(line: Mapping[str, str]) -> tuple[str, str, str]:
    scales = (("hbm_capacity", 1e9), ("hbm_bandwidth", 1e9), ("matrix_tflops", 1e12))
    memory, bandwidth, rate = (_digits(float(line[name]) * scale) for name, scale in scales)
    return memory, bandwidth, rate


def _digits(value: float) -> str:
    return f"{value:.7g}"
