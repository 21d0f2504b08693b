"""Statistics over scored runs: errors, groups, order of plans, memory, folds, intervals."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from steptime.measure.runs import aggregate
from steptime.measure.runs.aggregate import (
    GROUPINGS,
    ScoredRun,
    choice_statistics,
    coverage_interval,
    dominant_source,
    grouped,
    macro,
    memory_statistics,
    rank_statistics,
    ranks,
    scale_band,
    spearman,
    statistics,
    summary,
)
from steptime.measure.runs.predict import folds
from steptime.measure.runs.read import Flag, TableRow, read_rows
from steptime.measure.runs.reading import runs_of
from steptime.measure.runs.run import MeasuredRun
from steptime.model.spec import Experts

FILE = Path(__file__).parents[2] / "data" / "measured_runs.csv"
CELLS = {r.text("row_id"): dict(r.cells) for r in read_rows(FILE)}


def runs(*changes: dict[str, str]) -> list[MeasuredRun]:
    plain = {"metric_tokens_per_s_per_gpu": "", "metric_peak_mem_gb": ""}
    rows = [TableRow(i, CELLS["full"] | plain | {"row_id": f"r{i}"} | c) for i, c in enumerate(changes, 1)]
    reading = runs_of(rows)
    assert not reading.skipped
    return list(reading.runs)


def timed(*pairs: tuple[str, float], **changes: str) -> list[ScoredRun]:
    """Runs that took 10 s each, by source key and predicted seconds; bands of 10 %."""
    made = runs(*({"source_key": key} | changes for key, _ in pairs))
    return [
        ScoredRun(run=run, step_time_s=p, low_s=0.9 * p, high_s=1.1 * p)
        for run, (_, p) in zip(made, pairs, strict=True)
    ]


def test_errors_and_bias():
    found = statistics(timed(("a", 11.0), ("a", 8.0), ("a", 10.5)))
    assert found["rows"] == 3
    assert found["mape"] == pytest.approx((0.1 + 0.2 + 0.05) / 3)
    assert found["median_ape"] == pytest.approx(0.1) and found["median_bias"] == pytest.approx(0.05)
    assert found["bias"] == pytest.approx((0.1 - 0.2 + 0.05) / 3)
    assert found["p90_ape"] == pytest.approx(0.18) and found["coverage90"] == pytest.approx(2 / 3)


def test_rows_without_a_prediction_or_a_time_do_not_count():
    rows = timed(("a", 10.0), ("a", math.nan), ("a", 0.0), ("a", math.inf))
    memory = runs_of([TableRow(1, CELLS["memory"])]).runs[0]
    assert statistics([*rows, ScoredRun(run=memory, step_time_s=1.0)])["rows"] == 1
    empty = statistics([])
    assert empty["rows"] == 0 and set(empty.values()) == {0, None}


def test_groups():
    rows = timed(("a", 11.0), ("b", 9.0), ("b", 10.0))
    assert {k: v["rows"] for k, v in grouped(rows, GROUPINGS["by_source"]).items()} == {"a": 1, "b": 2}
    assert set(grouped(rows, GROUPINGS["by_scale"])) == {"8-15"}
    assert set(grouped(rows, GROUPINGS["by_kind"])) == {"dense"}
    assert [scale_band(n) for n in (1, 2, 3, 16, 31, 11616)] == ["1", "2-3", "2-3", "16-31", "16-31", "8192-16383"]


def test_groups_by_architecture_and_experts():
    plain, routed = timed(("a", 11.0))[0], timed(("a", 9.0))[0]
    experts = Experts(experts=8, experts_per_token=2, expert_ffn_hidden=64, moe_layers=1)
    routed = replace(routed, run=replace(routed.run, model=replace(routed.run.model, experts=experts)))
    found = grouped([plain, routed], GROUPINGS["by_architecture_and_experts"])
    biases = {name: round(one["bias"], 3) for name, one in found.items()}
    assert biases == {"hopper, dense": 0.1, "hopper, experts": -0.1}
    assert set(grouped([plain], GROUPINGS["by_architecture"])) == {"hopper"}
    assert set(grouped([routed], GROUPINGS["by_experts"])) == {"experts"}


def test_all_sources_and_computed_rows():
    rows = timed(*[("a", 11.0)] * 10, ("b", 13.0))
    rows[0] = replace(rows[0], run=replace(rows[0].run, flags=frozenset({Flag.COMPUTED})), step_time_s=20.0)
    found = summary(rows)
    assert found["macro"]["sources"] == 1 and found["macro_all_sources"]["sources"] == 2
    assert found["macro_all_sources"]["mape"] == pytest.approx(((0.9 + 1.0) / 10 + 0.3) / 2)
    assert found["time_without_computed"]["rows"] == 10 and found["computed"] == {"a": 1}
    assert found["time_without_computed"]["mape"] == pytest.approx((0.9 + 0.3) / 10)
    assert macro(rows, least=1)["sources"] == 2


def test_means_over_sources_count_a_source_once():
    rows = timed(*[("a", 11.0)] * 30, *[("b", 13.0)] * 10, *[("c", 99.0)] * 9)
    assert macro(rows)["sources"] == 2 and macro(rows)["mape"] == pytest.approx((0.1 + 0.3) / 2)
    assert dominant_source(rows) == "a"
    assert macro(rows, "a")["mape"] == pytest.approx(0.3)
    assert dominant_source(timed(("a", 1.0))) is None
    assert dominant_source(timed(("a", 1.0), ("b", 1.0), ("c", 1.0))) is None


PLANS = [{"tp": tp, "dp": str(8 // int(tp)), "micro_batch": m} for tp in "1248" for m in "12"]


def ranked(times: list[float], first: int = 0, **changes: str) -> list[ScoredRun]:
    made = runs(*(PLANS[first + i] | {"metric_step_time_s": str(10 + i)} | changes for i in range(len(times))))
    return [ScoredRun(run=run, step_time_s=t) for run, t in zip(made, times, strict=True)]


def test_order_of_plans():
    found = rank_statistics(ranked([1, 2, 3, 4, 6, 5]))
    assert found["groups"] == 1 and found["median_spearman"] == pytest.approx(1 - 6 * 2 / (6 * 35))
    assert found["mean_regret"] == 0 and found["best_picked"] == 1
    backwards = rank_statistics(ranked([6, 5, 4, 3, 2, 1]))
    assert backwards["mean_spearman"] == pytest.approx(-1)
    assert backwards["mean_regret"] == pytest.approx(15 / 10 - 1)
    assert backwards["each"][0]["spread"] == pytest.approx(1.5) and backwards["each"][0]["plans"] == 6
    assert rank_statistics(ranked([1, 2, 3, 4]))["groups"] == 0
    assert rank_statistics(ranked([3, 3, 3, 3, 3]))["median_spearman"] is None


def test_regret_of_three_plans_or_more():
    """Measured 10, 11, 12 s; the plan predicted fastest takes 11 s, one drawn blindly 11 s on average."""
    rows = ranked([5, 1, 9])
    found = choice_statistics(rows)
    assert found["groups"] == 1 and found["mean_regret"] == pytest.approx(0.1) == found["chance"]
    assert found["best_picked"] == 0 and rank_statistics(rows)["groups"] == 0
    assert choice_statistics(ranked([5, 1])) == {"groups": 0, **dict.fromkeys(set(found) - {"groups"})}
    two = choice_statistics(rows + ranked([1, 2, 3], model="other"))
    assert two["groups"] == 2 and two["best_picked"] == 0.5 and two["mean_regret"] == pytest.approx(0.05)


def test_only_the_plan_may_differ_inside_a_group():
    mixed = ranked([1, 2, 3]) + ranked([4, 5, 6], first=3, global_batch_sequences="64")
    assert rank_statistics(mixed)["groups"] == 0
    releases = ranked([1, 2, 3], source="x [1.0]") + ranked([4, 5, 6, 7], first=3, source="x [2.0]")
    assert rank_statistics(releases)["groups"] == 0
    assert rank_statistics(ranked([1, 2, 3]) + ranked([4, 5, 6], first=3))["groups"] == 1


def test_runs_of_one_plan_are_averaged():
    rows = ranked([1, 2, 3, 4, 5])
    twice = ranked([9, 2, 3, 4, 5])
    found = rank_statistics([*rows, twice[0]])
    assert found["each"][0]["plans"] == 5
    assert found["mean_spearman"] == pytest.approx(1 - 6 * (3**2 + 3 * 1) / 120, abs=0.3)


def test_rank_correlation_with_ties():
    assert ranks(np.array([5.0, 5.0, 1.0, 9.0])).tolist() == [2.5, 2.5, 1.0, 4.0]
    assert spearman(np.array([1.0, 1.0]), np.array([1.0, 2.0])) is None
    assert spearman(np.array([1.0, 2.0, 3.0]), np.array([3.0, 2.0, 1.0])) == pytest.approx(-1)


def test_memory_by_definition():
    made = runs(
        {"metric_peak_mem_gb": "10", "mem_definition": "allocated peak", "mem_unit": "GiB"},
        {"metric_peak_mem_gb": "10", "mem_definition": "nvidia-smi (device used)", "mem_unit": "GB as printed"},
    )
    found = memory_statistics([ScoredRun(run=run, memory_bytes=10.2e9) for run in made])
    assert set(found) == {"allocated", "device"}
    assert found["allocated"]["bias"] == pytest.approx(10.2e9 / (10 * 2**30) - 1)
    assert (found["allocated"]["within_unit"], found["device"]["within_unit"]) == (0.0, 1.0)
    assert memory_statistics([ScoredRun(run=made[0])]) == {}


def test_coverage_interval_draws_sources():
    good, bad = [("a", 10.0)] * 20, [("b", 20.0)] * 20
    low, high = coverage_interval(timed(*good, *bad)) or (math.nan, math.nan)
    assert (low, high) == (0.0, 1.0), "two sources, one always covered and one never"
    even = timed(*[(key, p) for key in "abcdefgh" for p in (10.0, 20.0)])
    assert coverage_interval(even) == (0.5, 0.5)
    assert coverage_interval(timed(*good)) is None
    assert coverage_interval(timed(*good, *bad), seed=3) == coverage_interval(timed(*good, *bad), seed=3)


@pytest.mark.parametrize("most", [1, 8, 100, 1 << 20])
def test_coverage_interval_of_draws_in_parts(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """However many sources are drawn at a time, the interval is the same; no array holds more, but for one draw."""
    rows = timed(*[(f"s{i}", 10.0 if i % 3 else 20.0) for i in range(40)], *[("s0", 10.0)] * 7)
    whole = coverage_interval(rows, draws=300)
    sizes = []

    class Recorded(np.random.Generator):
        def integers(self, *args, size, **options):
            sizes.append(size[0] * size[1])
            return super().integers(*args, size=size, **options)

    monkeypatch.setattr(np.random, "default_rng", lambda seed: Recorded(np.random.PCG64(seed)))
    monkeypatch.setattr(aggregate, "DRAWN", most)
    assert coverage_interval(rows, draws=300) == whole is not None
    assert sum(sizes) == 300 * 40 and max(sizes) <= max(most, 40)


def test_folds_keep_groups_together():
    made = runs({"source_key": "a"}, {"source_key": "b"}, {"source_key": "a", "model": "llama-2-7b"}, {"gpu": "B200"})
    by_source = {f.name: f for f in folds(made, "source")}
    assert set(by_source) == {"a", "b", "made-up"}
    assert by_source["a"].held_out.tolist() == [0, 2] and by_source["a"].rest.tolist() == [1, 3]
    assert len(folds(made, "source_and_model")) == 4
    assert len(folds(made, "model")) == 1, "one model in two spellings"
    assert {f.name for f in folds(made, "device")} == {"h100-sxm", "b200-sxm"}
    two = folds(made, "source", parts=2)
    assert len(two) == 2 and sorted(i for f in two for i in f.held_out) == [0, 1, 2, 3]
    with pytest.raises(KeyError):
        folds(made, "moon")


def test_summary_is_json():
    rows = timed(*[("a", 11.0)] * 12, *[("b", 9.0)] * 3)
    rows += [ScoredRun(run=r) for r in runs_of([TableRow(99, CELLS["memory"])]).runs]
    found = json.loads(json.dumps(summary(rows), allow_nan=False))
    assert found["time"]["rows"] == 15 and found["dominant_source"] == "a"
    assert found["time_without_dominant"]["rows"] == 3 and found["macro_without_dominant"]["sources"] == 0
    assert found["by_dtype"]["bf16"]["rows"] == 15
    assert json.loads(json.dumps(summary([]), allow_nan=False))["time"]["rows"] == 0


def test_claims_rest_on_undoubted_rows():
    rows = timed(("a", 11.0), ("a", 20.0))
    doubtful = timed(("a", 50.0), notes="low trust")
    assert summary([*rows, *doubtful])["time_supporting_claims"]["rows"] == 2
