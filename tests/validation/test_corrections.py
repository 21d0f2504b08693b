"""The published mode is the published code, and each corrected defect changes what it should."""

from __future__ import annotations

import csv
import gzip
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from steptime.errors import UserError
from steptime.estimate.evaluate import Evaluation, evaluate
from steptime.estimate.single import Setting
from steptime.hardware import load_cluster
from steptime.model.known import load_catalogue_model
from steptime.plan.job import OPTIMIZERS, PRECISIONS, Job
from steptime.plan.plans import Plans
from steptime.search.exhaustive import Task, search
from steptime_lab.cli.reproduce import (
    Study,
    command,
    differs,
    markdown_lines,
    percent,
    point_lines,
    table_rows,
)
from steptime_lab.data_root import require_data
from steptime_lab.published import check
from steptime_lab.published.check import Check, check_all, check_search
from steptime_lab.published.mode import PublishedSpace
from steptime_lab.published.rows import FIXES, NONE, PUBLISHED, Defects, PublishedMethod

ROOT = Path(__file__).resolve().parents[2]
E, L, F, H, Q = 25600, 2048, 102400, 160, 160
"""gpt3_1T: hidden, sequence, MLP width, heads, head dim."""


def case(
    *off: str, strategy: str = "1d", gpus: int = 8, cluster: str = "published-b200-nvs4", model: str = "gpt3_1T",
    **degrees: int,
) -> Evaluation:  # fmt: skip
    method = PublishedMethod(Defects().without(*off))
    spec = load_catalogue_model(model)
    job = Job(
        model=spec, gpus=gpus, global_batch=16, seq_len=spec.seq_len, precision=PRECISIONS["bf16"],
        optimizer=OPTIMIZERS["adam"],
    )  # fmt: skip
    machine = Setting(method=method, job=job, cluster=load_cluster(cluster)).machine
    return evaluate(method, method.strategies[strategy], job, machine, Plans(**degrees))


def row(e: Evaluation, name: str):
    return next(r for r in e.block.layer if r.name == name)


def times(e: Evaluation, name: str):
    return {t.phase: t for t in e.times["layer"] if t.row.name == name}


ONE_D = {"tp": 4, "pp": 2, "in_tp": 4}
TWO_D = {"strategy": "2d", "tp": 2, "tp2": 4, "in_tp": 2, "in_tp2": 2, "panels": 4}
CONTEXT = {"strategy": "context", "tp": 2, "cp": 4, "in_tp": 2, "in_cp": 2}


def test_the_default_keeps_every_defect():
    assert all(getattr(Defects(), f.name) is True for f in fields(Defects))
    assert not any(getattr(NONE, f.name) for f in fields(Defects))
    assert PUBLISHED.defects == Defects() == PublishedSpace().defects
    assert list(FIXES) == [f.name for f in fields(Defects)]
    assert (PUBLISHED.optimizer_step, PUBLISHED.lone_rank_has_all_links) == (False, False)
    assert not PUBLISHED.share_replicated_gradients


@pytest.mark.parametrize(
    ("strategy", "gpus", "step_time_s"),
    # bits of the model before its defects had switches
    [
        ("1d", 512, "0x1.c64d151e66ddbp+5"),
        ("context", 2048, "0x1.f5e8b7b2dc57bp+3"),
        ("2d", 512, "0x1.bb2659c32cb08p+5"),
    ],
)
def test_the_default_is_the_published_code_to_rounding(strategy, gpus, step_time_s):
    point = check.Point(model="gpt3_1T", strategy=strategy, device="b200", fast_domain=8, gpus=gpus)
    setting = Setting(method=PUBLISHED, job=check.job_of(point), cluster=load_cluster("published-b200-nvs8"))
    task = Task(setting=setting, strategy=PUBLISHED.strategies[strategy], space=PublishedSpace())
    assert float(search([task], 1)[0].best_s[0]) == pytest.approx(float.fromhex(step_time_s), rel=1e-14)


def test_summa_norm_width():
    kept, fixed = case(**TWO_D), case("summa_norm_width", **TWO_D)
    tokens = L // 4
    assert row(kept, "ln1").weights == 2 * (L // 2)
    assert row(fixed, "ln1").weights == 2 * (E // 2)
    assert kept.block.boundary_bytes == tokens * (L // 2) * 2
    assert fixed.block.boundary_bytes == tokens * (E // 2) * 2
    assert fixed.peak_bytes > kept.peak_bytes  # e > l: more, not less
    vit = [case(*off, model="vit_era5", **TWO_D).peak_bytes for off in ((), ("summa_norm_width",))]
    assert vit[1] < vit[0]  # l > e


def test_free_slow_stage_links():
    deep = {"pp": 8, "in_pp": 4}
    kept, fixed = case(**deep), case("free_slow_stage_links", **deep)
    size = L * E * 2
    fast, slow = 2.5e-6 + size / (900e9 * 0.7), 5e-6 + size / (100e9 * 0.7)
    assert kept.step.stage_link_s == pytest.approx(6 * fast / 7, rel=1e-12)
    assert fixed.step.stage_link_s == pytest.approx((6 * fast + slow) / 7, rel=1e-12)
    alone = [case(*off, pp=8).step_time_s for off in ((), ("free_slow_stage_links",))]
    assert alone[0] == alone[1]


@pytest.mark.parametrize(
    ("inside", "ratio"),
    [(1, 2.0), (4, 2.0), (2, None)],
)
def test_all_reduce_charged_once(inside, ratio):
    plan = {"strategy": "2d", "tp": 4, "tp2": 2, "in_tp": inside, "panels": 4}
    kept, fixed = (
        times(case(*off, **plan), "ln1")["forward"].transfers[0] for off in ((), ("all_reduce_charged_once",))
    )
    if ratio:
        assert fixed.busy_s == pytest.approx(ratio * kept.busy_s, rel=1e-12)
    else:  # the volume was doubled already; the fix doubles the latency of one slow hop and two fast ones
        assert fixed.busy_s - kept.busy_s == pytest.approx(5e-6 * 1 + 2.5e-6 * 2, rel=1e-9)


def test_unsharded_row_biases():
    kept, fixed = case(**ONE_D), case("unsharded_row_biases", **ONE_D)
    for name in ("fc2-bias", "vproj-bias"):
        assert (row(kept, name).shape["elements"], row(fixed, name).shape["elements"]) == (L * E, L * E // 4)
        assert row(kept, name).weights == row(fixed, name).weights == E
    assert fixed.step_time_s < kept.step_time_s
    context, fixed = case(**CONTEXT), case("unsharded_row_biases", **CONTEXT)
    assert row(context, "fc2-bias").weights == 2 * row(context, "vproj-bias").weights == E
    assert row(fixed, "vproj-bias").shape == row(fixed, "fc2-bias").shape


def test_context_parallelism_of_one_is_1d_once_the_biases_are_alike():
    off = ("unsharded_row_biases",)
    one, context = case(*off, **ONE_D), case(*off, strategy="context", **ONE_D)
    for here, there in zip(one.block.layer, context.block.layer, strict=True):
        over_tp = {name: tuple(t for t in getattr(there, name) if t.axis == "tp") for name in ("forward", "backward")}
        assert here == replace(there, **over_tp)
    assert one.step_time_s == context.step_time_s
    assert case(**ONE_D).step_time_s > case(strategy="context", **ONE_D).step_time_s


@pytest.mark.parametrize(
    ("off", "plan", "replicated"),
    [
        ((), ONE_D, 4 * E),  # two norms; each rank adds the whole biases
        (("unsharded_row_biases",), ONE_D, 6 * E),
        ((), CONTEXT, 5 * E),
        (("summa_norm_width",), TWO_D, 4 * (E // 2) + F // 2 + 2 * (E // 2)),
    ],
)
def test_free_replicated_gradients(off, plan, replicated):
    kept, fixed = case(*off, **plan), case(*off, "free_replicated_gradients", **plan)
    layers = 128 // plan.get("pp", 1)
    ranks, inside = (4, 2) if plan is TWO_D else (plan["tp"], plan["in_tp"])
    sent = replicated * layers * 2 * (ranks - 1) / ranks
    slow = sent / (inside * 100e9 * 0.7) if ranks > inside else 0.0
    latency = 5e-6 * (ranks // inside - 1) + 2.5e-6 * (ranks - ranks // inside)
    assert kept.step.replicated_s == 0
    assert fixed.step.replicated_s == pytest.approx(2 * (max(slow, sent / (900e9 * 0.7)) + latency), rel=1e-12)
    assert fixed.step_time_s == pytest.approx(kept.step_time_s + fixed.step.replicated_s, rel=1e-12)


def test_local_key_reads():
    kept, fixed = case(**CONTEXT), case("local_key_reads", **CONTEXT)
    more = times(fixed, "fusedla")["backward"].moved_bytes - times(kept, "fusedla")["backward"].moved_bytes
    assert more == 2 * (H // 2) * (L - L // 4) * Q * 2
    assert case(**ONE_D).step_time_s == case("local_key_reads", **ONE_D).step_time_s


def test_no_causal_mask():
    kept, fixed = case(**ONE_D), case("no_causal_mask", **ONE_D)
    assert row(fixed, "fusedla").shape["pairs"] / row(kept, "fusedla").shape["pairs"] == (L + 1) / (2 * L)
    assert fixed.step_time_s < kept.step_time_s
    vit = [case(*off, model="vit_era5", **TWO_D).step_time_s for off in ((), ("no_causal_mask",))]
    assert vit[0] == vit[1]


def test_lone_rank_one_link():
    two = PublishedMethod(Defects().without("lone_rank_one_link"))
    assert (two.lone_rank_has_all_links, PUBLISHED.lone_rank_has_all_links) == (True, False)
    machines = [
        Setting(method=m, job=check.job_of(POINT), cluster=load_cluster("published-b200-nvs8")).machine
        for m in (PUBLISHED, two)
    ]
    assert machines[0] == machines[1]  # the systems of the paper have one link per device


POINT = check.Point(model="gpt3_1T", strategy="1d", device="b200", fast_domain=8, gpus=512)


def test_whole_inputs_kept():
    kept, fixed = case(**ONE_D), case("whole_inputs_kept", **ONE_D)
    for name in ("fc1", "qkv"):
        assert (row(kept, name).kept_bytes, row(fixed, name).kept_bytes) == (L * E * 2, L * E * 2 // 4)
        assert [t.collective for t in row(fixed, name).backward] == ["all_gather", "reduce_scatter"]
    assert fixed.step_time_s > kept.step_time_s
    assert fixed.peak_bytes < kept.peak_bytes
    summa = [case(*off, **TWO_D) for off in ((), ("whole_inputs_kept",))]
    assert (summa[0].step_time_s, summa[0].peak_bytes) == (summa[1].step_time_s, summa[1].peak_bytes)


@pytest.mark.parametrize("plan", [ONE_D, CONTEXT, TWO_D])
def test_attention_output_kept_twice(plan):
    kept, fixed = case(**plan), case("attention_output_kept_twice", **plan)
    less = row(kept, "fusedla").kept_bytes - row(fixed, "fusedla").kept_bytes
    assert less == L // (1 if plan is ONE_D else 4) * (E // plan["tp"]) * 2
    assert fixed.step_time_s == kept.step_time_s


def test_no_optimizer_time():
    kept, fixed = case(**ONE_D, dp=1), case("no_optimizer_time", **ONE_D, dp=1)
    weights = sum(r.weights for r in kept.block.layer) * 64
    assert kept.step.optimizer_s == 0
    assert fixed.step.optimizer_s == pytest.approx(weights * (2 * 12 + 4 * 2 + 2) / 8e12, rel=1e-12)
    assert fixed.step_time_s == pytest.approx(kept.step_time_s + fixed.step.optimizer_s, rel=1e-12)


def test_exact_filling():
    meshes = PublishedSpace().meshes(check.job_of(POINT), PUBLISHED.strategies["1d"])
    counts = []
    for space in (PublishedSpace(), PublishedSpace(defects=Defects().without("exact_filling"))):
        placed, placements = space.placements(PUBLISHED.strategies["1d"], meshes, 512, 72, nearer_is_faster=True)
        counts.append(len(placed))
        if len(placed):
            assert max(placements.domain_ranks) == 64
    assert counts[0] == 0 < counts[1]


def test_equal_stages():
    job = check.job_of(check.Point(model="vit_era5", strategy="1d", device="b200", fast_domain=8, gpus=512))
    meshes = [
        PublishedSpace(defects=d).meshes(job, PUBLISHED.strategies["1d"])
        for d in (Defects(), Defects().without("equal_stages"))
    ]
    stages = [set(m.pp.tolist()) for m in meshes]
    assert stages[1] - stages[0] == {32}  # 48 layers: 16 stages divide them, 32 do not
    split = PublishedMethod(Defects().without("equal_stages")).stage_split(job, Plans(pp=32))
    assert (split.first, split.middle, split.last) == (1, 2, 1)


def test_equal_shares():
    odd = Job(
        model=load_catalogue_model("gpt3_1T"), gpus=64, global_batch=100, seq_len=L, precision=PRECISIONS["bf16"],
        optimizer=OPTIMIZERS["adam"],
    )  # fmt: skip
    strategy, uneven = PUBLISHED.strategies["1d"], Defects().without("equal_shares")
    exact, rounded = (PublishedSpace(defects=d).meshes(odd, strategy) for d in (Defects(), uneven))
    assert (max(exact.dp), max(rounded.dp)) == (4, 64)
    _, listed = PublishedSpace(defects=uneven).configurations(odd, strategy, rounded)
    assert sorted(set(listed.micro_batch[listed.dp == 4].tolist())) == [1, 2, 4, 5, 8, 16, 25]
    plan = Plans(dp=64, micro_batch=2)
    assert (PUBLISHED.micro_batches(odd, plan), PublishedMethod(uneven).micro_batches(odd, plan)) == (0, 1)


def documented() -> dict[str, list[str]]:
    text = (ROOT / "benchmarks/corrections.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip(" `") for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:3] == "| `"
    ]
    return {cells[0]: cells for cells in rows}


@pytest.fixture(scope="module")
def published_winners() -> check.Winners:
    return check.winners(PUBLISHED, PublishedSpace())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["summa_norm_width", "free_slow_stage_links"])
def test_the_documented_table_is_what_is_computed(name, published_winners):
    fix, method, space = check.variants()[name]
    change = check.compare(name, fix, published_winners, check.winners(method, space))
    assert table_rows([change])[1] == documented()[name]
    page = (ROOT / "benchmarks/corrections.md").read_text(encoding="utf-8")
    assert markdown_lines(360, [change])[4] in page
    assert all(line in page for line in point_lines(change.gained))


def test_the_table_is_whole_and_the_guide_has_it():
    assert list(documented()) == list(check.variants())
    guide = (ROOT / "docs/corrections.md").read_text(encoding="utf-8")
    page = (ROOT / "benchmarks/corrections.md").read_text(encoding="utf-8")
    assert [line for line in page.splitlines() if line.startswith("|") and line not in guide] == []
    assert [name for name in FIXES if f"`{name}`" not in re.sub(r"(?m)^\|.*$", "", guide)] == []


def test_no_fix_makes_a_point_infeasible_and_the_corrected_mode_is_near_all_switches_off():
    table = documented()
    assert {cells[3] for cells in table.values()} == {"0"}
    assert table["all_switches"][2] == table["corrected_mode"][2] == "117"


@pytest.mark.slow
@pytest.mark.shared
def test_the_published_mode_computes_the_published_figures():
    checks = check_all()
    assert [(c.name, c.worst, c.mismatches[:3]) for c in checks if differs(c)] == []
    assert all(c.figures > 500 for c in checks)
    assert max(c.worst for c in checks) < 1e-12


@pytest.mark.slow
@pytest.mark.shared
def test_a_wrong_figure_is_found(tmp_path, monkeypatch):
    source = require_data("published_search_gpt3_1T.csv.gz").parent
    for path in source.glob("published_*"):
        (tmp_path / path.name).symlink_to(path)
    target = tmp_path / "published_search_gpt3_1T.csv.gz"
    with gzip.open(target, "rt", newline="") as file:
        rows = list(csv.DictReader(file))
    rows[7]["stat_t_bubble"] = str(float(rows[7]["stat_t_bubble"]) * (1 + 1e-6))
    rows[9]["cfg_dp"] = "3"
    target.unlink()
    with gzip.open(target, "wt", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    monkeypatch.setenv("STEPTIME_DATA", str(tmp_path))
    search_check = check_search()[0]
    assert differs(search_check)
    assert search_check.worst == pytest.approx(1e-6, rel=1e-3)
    assert "bubble" in search_check.where
    assert len(search_check.mismatches) == 1


def test_a_check_without_figures_or_with_nan_differs():
    check = Check(name="x")
    assert differs(check)
    check.number(1.0, 1.0, "a")
    assert not differs(check)
    check.number(float("nan"), 1.0, "b")
    assert differs(check)


def test_percent():
    assert (percent(3.3337), percent(0.9717), percent(1.0)) == ("+233 %", "-2.8 %", "0 %")


def test_every_group_of_searches_is_counted(monkeypatch):
    monkeypatch.setattr(check, "variants", dict)
    monkeypatch.setattr(check, "winners", lambda method, space, step: [step() for _ in range(18)] and {POINT: None})
    seen: list[tuple[int, int]] = []
    assert check.corrections(lambda done, total: seen.append((done, total))) == (0, [])
    assert seen == [(done, 18) for done in range(1, 19)]


def test_without_the_figures_the_error_names_the_variable(monkeypatch):
    monkeypatch.setattr("steptime_lab.published.check.data_root", lambda: None)
    with pytest.raises(UserError, match="STEPTIME_DATA"):
        check_all()


@pytest.mark.parametrize("json", [False, True])
@pytest.mark.parametrize(("error", "code"), [(1e-12, None), (1e-6, 1)])
def test_the_command_fails_where_a_figure_differs(monkeypatch, capsys, error, code, json):
    check = Check(name="searches", cases=1, figures=1, worst=error)
    monkeypatch.setattr("steptime_lab.published.check.check_all", lambda progress: [check])
    assert command(Study.PUBLISHED, json=json) == (code or 0)
    out = capsys.readouterr().out
    assert (
        ('"agrees": false' if json else "differs") in out if code else ('"agrees": true' if json else "agrees") in out
    )
