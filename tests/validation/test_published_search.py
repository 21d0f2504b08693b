"""The published search: the best ten of every point, every statistic, every count of candidates, two figures."""

from __future__ import annotations

import ast
import json
from collections import defaultdict
from functools import cache

import published_cases as cases
import pytest

from steptime.estimate.single import estimate_plan
from steptime_lab.data_root import require_data

TOLERANCE = 1e-9
Point = tuple[str, str, int, int]


@cache
def _rows() -> dict[Point, list[dict[str, str]]]:
    """Rows of each point (strategy, gpu, size of a fast domain, devices), best first."""
    out: dict[Point, list[dict[str, str]]] = defaultdict(list)
    for row in cases.table(require_data("published_search_gpt3_1T.csv.gz")):
        out[row["strategy"], row["gpu"].lower(), int(row["nvs"]), int(row["n_gpus"])].append(row)
    for rows in out.values():
        rows.sort(key=lambda row: int(row["rank"]))
    return out


def _inside(row: dict[str, str]) -> tuple[int, int, int, int]:
    tp1, tp2, dp, pp = (int(row[f"nv_{axis}"] or 1) for axis in ("tp1", "tp2", "dp", "pp"))
    return tp1, tp2, dp, pp


def _plans(row: dict[str, str]):
    c = {name: int(float(row[f"cfg_{name}"] or 1)) for name in ("tp1", "tp2", "pp", "dp", "mbs", "nb")}
    return cases.plans_of(row["strategy"], c["tp1"], c["tp2"], c["pp"], c["dp"], c["mbs"], c["nb"], _inside(row))


@pytest.mark.slow
@pytest.mark.shared
def test_every_statistic_of_every_row():
    wrong, compared, rows = [], 0, 0
    for (name, gpu, domain, gpus), ranked in _rows().items():
        setting = cases.setting("gpt3_1T", gpu, domain, gpus)
        for row in ranked:
            rows += 1
            e = estimate_plan(setting, cases.strategy(name), _plans(row), what_ifs=False)
            assert e.published is not None and e.feasible
            ours = {f"stat_{stat}": value for stat, value in e.published["stats"].items()}
            ours |= {"throughput": e.published["throughput"], "mem_gb": e.peak_memory_bytes * 1e-9}
            stats = {column for column in row if column.startswith("stat_")}
            assert stats <= ours.keys()
            for column in (*sorted(stats), "throughput", "mem_gb"):
                compared += 1
                if not cases.relative(ours[column], float(row[column])) <= TOLERANCE:
                    wrong.append((row["system"], gpus, row["rank"], column, ours[column], row[column]))
    assert not wrong, f"{len(wrong)} of {compared}: {wrong[:5]}"
    assert rows == 1949


@pytest.mark.quick("1d")
@pytest.mark.shared
@pytest.mark.parametrize("name", list(cases.STRATEGIES))
def test_the_best_ten_of_every_point(name):
    published, seen = _rows(), 0
    for gpu in cases.GPUS:
        points = [(name, gpu, domain, gpus) for domain in cases.DOMAINS for gpus in cases.COUNTS]
        found = cases.best([cases.setting("gpt3_1T", *point[1:]) for point in points], name)
        for point, f in zip(points, found, strict=True):
            rows = published.get(point, [])
            assert len(f.best_s) == len(rows), point
            ours = {cases.configuration(name, f.best.row(i)) for i in range(len(rows))}
            assert ours == {cases.configuration(name, _plans(row)) for row in rows}, point
            for best_s, row in zip(f.best_s, rows, strict=True):
                assert cases.relative(cases.BATCH / best_s, float(row["throughput"])) <= TOLERANCE, point
            seen += len(rows)
    assert seen == sum(len(rows) for point, rows in published.items() if point[0] == name)


@pytest.mark.shared
def test_counts_of_candidates():
    published = json.loads(require_data("published_candidate_counts.json").read_text(encoding="utf-8"))
    compared = 0
    for key, expected in published.items():
        model, name, domain, gpus = key.split("|")
        job = cases.job(cases.blocks(model, *cases.SHAPES[model]), int(gpus))
        listing = cases.SPACE.list(job, cases.strategy(name), int(domain), ())
        assert listing.candidates == expected, key
        compared += 1
    assert compared == 2 * 3 * 3 * 13


FIGURES = {
    "1d_tp8_sweep_pp": ("1d", "gpt3_1T"), "1d_pp64_sweep_tp": ("1d", "gpt3_1T"), "2d_gpt3": ("2d", "gpt3_1T"),
    "2d-seqp_gpt3": ("2d-seqp", "gpt3_1T"), "2d-seqp_vit": ("2d-seqp", "vit_era5"),
}  # fmt: skip
STATS = ("t", "t_comp", "t_mem", "t_tp_comm", "t_dp_comm", "t_pp_comm", "t_bubble", "flops_per_gpu", "mem",
         "wts_mem", "wts_grad_mem", "wts_optimizer_states_mem", "acts_mem")  # fmt: skip


@pytest.mark.shared
def test_the_figures_that_explain_the_best_plans():
    """16384 B200 in domains of 8; SUMMA with 8 panels."""
    wrong, rows = [], 0
    for row in cases.table(require_data("published_fig_rationale.csv.gz")):
        name, model = FIGURES[row["fig"]]
        rows += 1
        shape = (int(row["tp1"]), int(row["tp2"]), int(row["pp"]), int(row["dp"]), int(row["mbs"]))
        panels = 8 if name == "2d" else 1
        setting = cases.setting(model, "b200", 8, 16384)
        plans = cases.plans_of(name, *shape, panels, ast.literal_eval(row["nv"]))
        e = estimate_plan(setting, cases.strategy(name), plans, what_ifs=False)
        assert e.published is not None
        for stat in STATS:
            if not cases.relative(e.published["stats"][stat], float(row[stat])) <= TOLERANCE:
                wrong.append((row["fig"], row["label"], stat, e.published["stats"][stat], row[stat]))
    assert not wrong, f"{len(wrong)}: {wrong[:5]}"
    assert rows == 40


@pytest.mark.slow
@pytest.mark.shared
def test_the_hardware_sweeps():
    """Days for 10^12 tokens with 1D on 8192 devices in domains of 8; the table has ten digits."""
    base, wrong, rows = cases.setting("gpt3_1T", "b200", 8, 8192), [], 0
    for row in cases.table(require_data("published_fig_hw_sweeps.csv.gz")):
        matrix, vector = float(row["matrix_tflops"]) * 1e12, float(row["vector_tflops"]) * 1e12
        rows += 1
        changed = cases.with_device(
            base, memory_bytes=float(row["hbm_capacity"]) * 1e9, memory_Bps=float(row["hbm_bandwidth"]) * 1e9,
            matrix_flops_per_s={"bf16": matrix}, vector_flops_per_s={"bf16": vector},
        )  # fmt: skip
        (found,) = cases.best([changed], "1d", top=1)
        days = 1e12 / 2048 / cases.BATCH * found.best_s[0] / cases.DAY_S
        if not cases.relative(days, float(row["train_days_n8192"])) <= TOLERANCE:
            wrong.append((row, days))
    assert not wrong, f"{len(wrong)} of {rows}: {wrong[:5]}"
    assert rows == 1116
