"""Charts as data, against numbers worked out by hand; what is no result, or has no such chart, is named."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from steptime.errors import UserError
from steptime.report.plots.layouts import places_of
from steptime.report.plots.results import read_result, result
from steptime.report.plots.series import KINDS, Options, chart

PLAN = {"dp": 2, "tp": 2, "pp": 2, "strategy": "1d", "placement": {"tp": 2, "dp": 1, "pp": 1}}


def estimate(step_s: float = 4.0, **more: Any) -> dict[str, Any]:
    return {
        "step_time_s": step_s,
        "samples_per_s": 16 / step_s,
        "time": {"compute/a_s": 2.0, "compute/b_s": 1.0, "bubble/c_s": step_s - 3.0},
        "overlapped": {"dp_comm/d_s": 0.5},
        "memory": {"weights/x": 3.0e9, "activations/y": 1.0e9},
        "memory_capacity_bytes": 8.0e9,
        "peak_memory_bytes": 4.0e9,
        "plan": PLAN,
        "provenance": {"model": "m", "cluster": "c", "device": "d", "constants": {}},
        "workload": {"gpus": 8, "global_batch": 16},
    } | more


def search() -> dict[str, Any]:
    front = [{"step_time_s": 4.0, "peak_memory_bytes": 4.0e9, "plan": PLAN},
             {"step_time_s": 6.0, "peak_memory_bytes": 2.0e9, "plan": PLAN | {"tp": 4}}]  # fmt: skip
    return {"candidates": 10, "feasible": 2, "plans": [estimate(4.0), estimate(5.0)], "pareto": front}


def simulated() -> dict[str, Any]:
    passes = {"rank": [0, 1, 1, 0], "kind": ["F", "F", "B", "B"], "stage": [0, 1, 1, 0], "micro_batch": [0, 0, 0, 0],
              "start_s": [0.0, 1.0, 2.0, 4.0], "end_s": [1.0, 2.0, 4.0, 6.0]}  # fmt: skip
    return {"model": "m", "cluster": "c", "schedule": "1f1b", "ranks": 2, "bubble_fraction": 0.5, "pipeline_s": 6.0,
            "spent_by_rank_s": {}, "passes": passes}  # fmt: skip


def profiled() -> dict[str, Any]:
    rows = [{"name": "mm", "flops": 6e12, "vector_flops": 0.0, "moved_bytes": 1e10, "seconds": 0.03},
            {"name": "gelu", "flops": 0.0, "vector_flops": 1e9, "moved_bytes": 1e10, "seconds": 0.01},
            {"name": "view", "flops": 0.0, "vector_flops": 0.0, "moved_bytes": 0.0, "seconds": 0.0}]  # fmt: skip
    roofs = {"memory_Bps": 2e12, "flops_per_s": {"bf16 matrix": 400e12, "vector": 40e12}}
    return {"model": "m", "device": "d", "by_operator": rows, "moved_bytes": 2e10, "roofs": roofs}


def limited() -> dict[str, Any]:
    one = {"overlap": "all", "compute_flops": [1e25, 1e26, 1e27], "utilization": [0.7, 0.5, 0.0], "cliff_flops": 8e25}
    return {"device": {"name": "d"}, "run": {"duration_s": 86400.0}, "latency_wall_flops": 1e27, "curve": [one]}


def tiled() -> dict[str, Any]:
    levels = [{"below": "L2", "below_Bps": None, "traffic_bytes": 5.0},
              {"below": "shared memory", "below_Bps": 40.0, "traffic_bytes": 20.0},
              {"below": "memory", "below_Bps": 4.0, "traffic_bytes": 1.0}]  # fmt: skip
    return {"naive_bytes": 99.0, "levels": levels, "flops": 100.0, "peak_flops_per_s": 250.0, "dtype": "bf16",
            "machine": "a"}  # fmt: skip


ROWS = [{"cluster": c, "gpus": g, "step_time_s": s, "training_days": s * 10, "model": "m"}
        for c, g, s in (("a", 8, 8.0), ("a", 32, 4.0), ("b", 8, 4.0), ("b", 16, 2.0), ("a", 8, 9.0))]  # fmt: skip
FULL: dict[str, Any] = {
    **dict.fromkeys(("breakdown", "memory", "overview", "mesh"), estimate()),
    **dict.fromkeys(("scaling", "heatmap"), ROWS),
    "roofline": profiled(), "scatter": search(), "timeline": simulated(), "limits": limited(),
    "hierarchy": tiled(),
}  # fmt: skip


def drawn(kind: str, *data: Any, **options: str) -> Any:
    return chart(kind, [result(f"r{i}", one) for i, one in enumerate(data)], Options(**options))


def test_every_kind_has_an_example_here():
    assert sorted(FULL) == sorted(KINDS)


def test_efficiency_is_against_the_fewest_devices_of_each_system():
    time, efficiency, days = drawn("scaling", ROWS).panels
    assert [(s.name, s.x, s.y) for s in time.series] == [("a", (8, 32), (8.0, 4.0)), ("b", (8, 16), (4.0, 2.0))]
    assert [s.y for s in efficiency.series] == [(1.0, 0.5), (1.0, 1.0)], (
        "8 s on 8 devices, 4 s on 32; then twice as fast"
    )
    assert (time.x.log, time.y.log, time.y.unit) == (True, True, "s")
    assert days.series[0].y == (80.0, 40.0)


def test_a_sweep_without_the_length_of_a_training_has_no_days():
    assert len(drawn("scaling", [{k: v for k, v in row.items() if k != "training_days"} for row in ROWS]).panels) == 2


def test_rates_are_compared_where_the_batch_differs():
    rows = [{"cluster": "a", "gpus": g, "step_time_s": 1.0, "samples_per_s": g / 8} for g in (8, 16)]
    assert drawn("scaling", rows).panels[1].series[0].y == (1.0, 1.0)


def test_strategies_are_lines_of_their_own_where_one_job_has_several():
    rows = [{"cluster": "a", "gpus": 8, "step_time_s": s, "strategy": n} for s, n in ((1.0, "1d"), (2.0, "2d"))]
    assert [s.name for s in drawn("scaling", rows).panels[0].series] == ["1d", "2d"]
    rows[1]["gpus"] = 16
    assert [s.name for s in drawn("scaling", rows).panels[0].series] == ["a"]


def test_bars_add_up_to_the_step_and_overlapped_time_is_faint():
    series = drawn("breakdown", estimate(), estimate(5.0)).panels[0].series
    assert [(s.name, s.y, s.faint) for s in series] == [
        ("compute", (3.0, 3.0), False), ("bubble", (1.0, 2.0), False), ("dp comm, overlapped", (0.5, 0.5), True)
    ]  # fmt: skip
    assert [sum(s.y[i] for s in series if not s.faint) for i in (0, 1)] == [4.0, 5.0]


def test_more_parts_than_can_be_told_apart_are_one():
    time = {f"part{i}/x_s": 1.0 / 2**i for i in range(12)}
    series = drawn("breakdown", estimate(sum(time.values()), time=time, overlapped={})).panels[0].series
    assert len(series) == 8 and series[-1].name == "other"
    assert sum(s.y[0] for s in series) == pytest.approx(sum(time.values()), rel=1e-15)


def test_memory_has_the_capacity_of_each_device():
    series = drawn("memory", estimate(), estimate(memory_capacity_bytes=16.0e9)).panels[0].series
    assert [(s.name, s.y) for s in series if s.style == "cap"] == [("capacity", (8.0e9, 16.0e9))]
    assert [s.name for s in series if s.style == "bar"] == ["weights", "activations"]


def test_a_point_has_its_intensity_rate_and_share():
    panel = drawn("roofline", profiled()).panels[0]
    points = {s.name: s for s in panel.series if s.style == "points"}
    assert points["matrix units"].x == (600.0,) and points["matrix units"].y == (200e12,)
    assert points["vector units"].size == (0.25,) and points["matrix units"].labels == ("mm 75 %",)
    roof = next(s for s in panel.series if s.name == "bf16 matrix peak")
    assert roof.y[-1] == 400e12 and roof.y[0] == pytest.approx(2e12 * roof.x[0], rel=1e-12)


def test_an_explained_estimate_has_its_operators_on_the_roofs():
    gemm = {"m": 100.0, "n": 200.0, "k": 300.0, "batch": 1.0, "a_bytes": 2.0, "b_bytes": 2.0, "out_bytes": 2.0}
    detail = {"path": "compute/forward/qkv/gemm_s", "function": "gemm.gemm_s", "value": 0.5, "arguments": gemm,
              "factors": {"times_per_step": 10.0}, "further": []}  # fmt: skip
    constants = {"matrix_flops_per_s.bf16": {"value": 1e15}, "memory_Bps": {"value": 1e12}}
    data = estimate(details=[detail, detail | {"path": "compute/backward/qkv/gemm_s"}])
    data["provenance"]["constants"] = constants
    points = next(s for s in drawn("roofline", data).panels[0].series if s.style == "points")
    flops, moved = 2 * 100 * 200 * 300, 2 * (100 * 300 + 300 * 200 + 100 * 200)
    assert points.x == pytest.approx((flops / moved,), rel=1e-12)
    assert points.y == pytest.approx((2 * 10 * flops / 1.0,), rel=1e-12)


def test_the_front_is_a_line_in_order_of_time():
    data = search()
    data["pareto"].reverse()
    panel = drawn("scatter", data).panels[0]
    front = next(s for s in panel.series if s.style == "step")
    assert (front.x, front.y, front.labels) == ((4.0, 6.0), (4.0e9, 2.0e9), ("tp2 pp2 dp2", "tp4 pp2 dp2"))
    assert next(s for s in panel.series if s.style == "points").x == (4.0, 5.0)


def test_cells_are_the_least_of_the_rows_with_the_same_place():
    panel = drawn("heatmap", ROWS, x="gpus", y="cluster").panels[0]
    values = dict(zip(zip(panel.series[0].x, panel.series[0].y, strict=True), panel.series[0].size, strict=True))
    assert (panel.x.ticks, panel.y.ticks) == (("8", "16", "32"), ("a", "b"))
    assert values == {(0, 0): 8.0, (2, 0): 4.0, (0, 1): 4.0, (1, 1): 2.0}
    assert (panel.value.label, panel.value.unit) == ("step time", "s")


def test_the_two_columns_that_vary_are_found():
    rows = [{"cluster": "a", "x": x, "y": y, "step_time_s": x * y} for x in (1, 2) for y in (3, 4)]
    panel = drawn("heatmap", rows).panels[0]
    assert (panel.x.label, panel.y.label) == ("x", "y")
    with pytest.raises(UserError, match="x, y, z vary"):
        drawn("heatmap", [*rows, rows[0] | {"z": 1}, rows[0] | {"z": 2}])


def test_boxes_of_a_timeline_are_passes():
    series = drawn("timeline", simulated()).panels[0].series
    assert [(s.name, s.x, s.y, s.size) for s in series] == [
        ("forward", (0.0, 1.0), (0.0, 1.0), (1.0, 1.0)), ("backward", (2.0, 4.0), (1.0, 0.0), (2.0, 2.0))
    ]  # fmt: skip
    with pytest.raises(UserError, match="the passes are not in it"):
        drawn("timeline", {key: value for key, value in simulated().items() if key != "passes"})


def test_ranks_fill_a_fast_domain_by_placement():
    panel = drawn("mesh", estimate()).panels[0]
    where = {
        text.split("\n")[0]: (x + 0.5, y) for s in panel.series for x, y, text in zip(s.x, s.y, s.labels, strict=True)
    }
    assert [where[f"{rank}"] for rank in range(4)] == [(0, 0), (1, 0), (0, 1), (1, 1)], "tp inside, dp over domains"
    assert [s.name for s in panel.series] == ["stage 0", "stage 1"] and panel.series[1].y == (2, 2, 3, 3)
    spread = drawn("mesh", estimate(plan=PLAN | {"placement": {"tp": 1, "dp": 2, "pp": 2}})).panels[0]
    first = spread.series[0]
    assert [t.split("\n")[1] for t in first.labels] == ["tp0 dp0", "tp1 dp0", "tp0 dp1", "tp1 dp1"]
    assert (first.x, first.y) == ((-0.5, -0.5, 0.5, 0.5), (0, 1, 0, 1)), "dp and pp inside: tp over domains"


@pytest.mark.parametrize(
    "inside", [{"tp": 2, "dp": 2, "pp": 3}, {"tp": 4, "dp": 1, "pp": 1}, {"tp": 1, "dp": 2, "pp": 1}]
)
def test_no_two_ranks_have_the_same_place(inside):
    places = list(places_of({"tp": 4, "dp": 2, "pp": 3}, inside))
    slots = {(place["domain"], place["slot"]) for place in places}
    width = inside["tp"] * inside["dp"] * inside["pp"]
    assert slots == {(domain, slot) for domain in range(24 // width) for slot in range(width)}


def test_runs_that_no_plan_ends_are_not_on_the_curve():
    panel = drawn("limits", limited()).panels[0]
    assert panel.series[0].x == (1e25, 1e26)
    assert [s.name for s in panel.series if s.style == "rule"] == ["80 % of the most", "latency wall: 1.0e+27"]


def test_a_chart_is_plain_data():
    for kind, data in FULL.items():
        options = {"x": "gpus", "y": "cluster"} if kind == "heatmap" else {}
        assert json.loads(json.dumps(drawn(kind, data, **options).to_json()))["kind"] == kind


@pytest.mark.parametrize(
    ("kind", "data", "words"),
    [
        ("nope", (estimate(),), "kind of plot"),
        ("breakdown", (), "no result to draw"),
        ("timeline", (estimate(),), "r0 is a result of estimate"),
        ("breakdown", (estimate(), search()), "different kinds: estimate, plan"),
        ("mesh", (estimate(), estimate()), "shows one result, not 2"),
        ("scatter", (search() | {"plans": [], "pareto": []},), "no plan is feasible"),
        ("heatmap", ([],), "no rows"),
        ("scaling", ([{"gpus": 8}],), "step_time_s: missing"),
        (
            "scaling",
            ([{"cluster": f"c{i}", "gpus": 8, "step_time_s": 1.0} for i in range(31)],),
            "31 lines cannot be told",
        ),
        ("scaling", ([{"gpus": 0, "step_time_s": 1}],), "0 devices"),
        ("scaling", ([{"gpus": 8, "step_time_s": "x"}],), "'x' is not a number"),
        ("breakdown", (estimate(time={"a_s": float("nan")}),), "nan is not a number"),
        ("mesh", (estimate(plan=PLAN | {"tp": 3}),), "tp has 3 ranks, of which 2"),
    ],
)
def test_what_cannot_be_drawn_is_named(kind, data, words):
    with pytest.raises(UserError, match=words):
        drawn(kind, *data)


def test_a_tiled_product_stands_below_the_roof_of_each_boundary() -> None:
    *roofs, points = drawn("hierarchy", tiled()).panels[0].series
    assert [roof.name for roof in roofs] == ["shared memory roof", "memory roof"]
    assert (points.x, points.y) == ((5.0, 100.0), (200.0, 250.0)), "5 FLOP/B at 40 B/s; 100 at 4, held to the peak"
    assert max(roofs[1].y) == 250.0
    with pytest.raises(UserError, match="no rates"):
        drawn("hierarchy", tiled() | {"peak_flops_per_s": None})


def test_no_damage_to_a_result_gives_anything_but_a_message():
    rng = random.Random(0)
    junk = (None, "x", -1, 0, 1e400, [], {}, [[]], True, {"a": {"b": []}})
    refused = 0
    for kind, data in FULL.items():
        options = {"x": "gpus", "y": "cluster"} if kind == "heatmap" else {}
        for _ in range(150):
            damaged = json.loads(json.dumps(data))
            here: Any = damaged
            while isinstance(here, dict | list) and here:
                key = rng.choice(list(here) if isinstance(here, dict) else range(len(here)))
                if rng.random() < 0.4 or not isinstance(here[key], dict | list):
                    here[key] = rng.choice(junk)
                    break
                here = here[key]
            try:
                drawn(kind, damaged, **options)
            except UserError:
                refused += 1
    assert refused > 100


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.json", "{", "not JSON"),
        ("a.json", '{"x": 1}', "not a result of a command"),
        ("a.json", "[1]", "rows must be a list of objects"),
        ("a.json", "[" * 100_000, "not JSON"),
        ("a.json", "", "not JSON"),
    ],
)
def test_a_file_that_is_no_result_is_named(tmp_path, name, text, words):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=words):
        read_result(tmp_path / name)


def test_rows_may_be_a_table(tmp_path):
    (tmp_path / "sweep.csv").write_text("cluster,gpus,step_time_s\na,8,2\na,16,1.5\n")
    found = read_result(tmp_path / "sweep.csv")
    assert found.name == "sweep" and found.items("rows")[1] == {"cluster": "a", "gpus": 16.0, "step_time_s": 1.5}
    with pytest.raises(UserError, match=r"none\.csv"):
        read_result(tmp_path / "none.csv")
