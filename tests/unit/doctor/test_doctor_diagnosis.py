"""Findings, their order, and the verdict."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from steptime import api
from steptime.doctor import Diagnosis, diagnose_log, diagnose_trace, read_log, read_trace, trace_times
from steptime.doctor.advice import ADVICE, NAMES, advice_for
from steptime.doctor.diagnose import verdict_of
from steptime.doctor.records import Variant
from steptime.estimate.result import Estimate
from steptime.terms import Terms

DATA = Path(__file__).resolve().parents[2] / "data/doctor"
OVERLAP = ADVICE["dp_comm"]["megatron"][0]
PLAN = {"tp": 2, "micro_batch": 1, "overlap": "none"}


@pytest.fixture(scope="module")
def base() -> Estimate:
    return api.estimate("llama2_7b", "dgx-h100", gpus=64, global_batch=256, plan=PLAN)


def changed(base: Estimate, **values: Any) -> Estimate:
    """An estimate whose terms are these groups."""
    time = Terms({"compute/forward/x/gemm_s": 0.4, "compute/backward/x/gemm_s": 0.8,
                  "dp_comm/gradients/exposed_buckets_s": 0.02, "optimizer/memory_bound_s": 0.01})  # fmt: skip
    defaults = {"step_time_s": 1.4, "step_time_bracket_s": (0.8, 1.45), "step_time_band_s": None, "time": time,
                "overlapped": Terms({"dp_comm/gradients/exposed_buckets_s": 0.1})}  # fmt: skip
    return dataclasses.replace(base, **(defaults | values))


def megatron(estimate: Estimate | None, **more: Any) -> Diagnosis:
    return diagnose_log(read_log(str(DATA / "megatron.log")), {}, estimate, **more)


def codes(d: Diagnosis) -> list[str]:
    return [finding.code for finding in d.findings]


def test_the_verdict_says_where_the_step_lies(base):
    e = changed(base)
    assert verdict_of(e, 1.44).where == "inside_bracket"
    assert verdict_of(e, 1.46).where == "slower"
    assert verdict_of(e, 0.79).where == "faster"
    assert verdict_of(None, 1.0).where == "no_prediction"
    banded = changed(base, step_time_band_s=(1.3, 1.5))
    assert verdict_of(banded, 1.49).where == "inside_band"
    outside = verdict_of(banded, 1.0)
    assert outside.where == "inside_bracket"
    assert "outside the error band" in outside.text


def test_a_step_inside_the_band_leaves_nothing_unexplained(base):
    log = read_log(str(DATA / "torchtitan.log"))
    settings = {"gpus": 8, "global_batch": 8, "seq": 8192}
    fast = changed(base, step_time_s=1.2, step_time_bracket_s=(0.8, 1.25))
    found = diagnose_log(log, settings, fast)
    assert found.findings[0].code == "unexplained"
    assert found.findings[0].lost_s == pytest.approx(0.25, abs=0.01)
    inside = diagnose_log(log, settings, dataclasses.replace(fast, step_time_band_s=(1.0, 1.5)))
    assert "unexplained" not in codes(inside)


@pytest.mark.parametrize(
    ("overlaps", "tried"), [({"overlap_grad_reduce"}, False), ({"overlap_grad_reduce", "overlap_param_gather"}, True)]
)
def test_what_the_run_does_already_is_not_what_to_try(base, tmp_path, overlaps, tried):
    """Half of it is not all of it; the rest of the advice stays."""
    text = (DATA / "megatron.log").read_text()
    said = "".join(f"  {name} {'.' * 30} True\n" for name in overlaps)
    path = tmp_path / "x.log"
    path.write_text(re.sub(r"^  overlap_grad_reduce .*\n", lambda _: said, text, flags=re.MULTILINE))
    (found,) = (
        each for each in diagnose_log(read_log(str(path)), {}, changed(base)).findings if each.code == "dp_comm"
    )
    assert (OVERLAP in found.advice) != tried
    assert any("--ddp-bucket-size" in line for line in found.advice)


def test_findings_of_the_megatron_sample_are_ranked_by_seconds(base):
    d = megatron(changed(base))
    lost = [finding.lost_s for finding in d.findings if finding.lost_s is not None]
    assert lost == sorted(lost, reverse=True)
    assert codes(d)[:2] == ["outside", "dp_comm"]
    by_code = {finding.code: finding for finding in d.findings}
    assert by_code["dp_comm"].lost_s == pytest.approx(0.17 - 0.02)
    assert any("--overlap-grad-reduce" in line for line in by_code["dp_comm"].advice)
    assert any("--async-save" in line for line in by_code["outside"].advice)
    assert by_code["data"].lost_s == pytest.approx(0.03)
    rows = {row.name: row for row in d.rows}
    assert rows["all-grads-sync"].ratio == pytest.approx(8.5)
    assert rows["all-grads-sync"].bracket == pytest.approx((0.0, 0.12))
    assert rows["forward-backward"].predicted == pytest.approx(1.2)
    assert rows["MFU"].measured == pytest.approx(base.mfu * 1.4 / d.measured["step_time_s"])


def test_without_a_prediction_only_what_is_measured_is_said():
    d = megatron(None)
    assert d.predicted is None
    assert d.verdict.where == "no_prediction"
    assert codes(d) == ["outside", "data", "spikes"]
    assert all(row.predicted is None for row in d.rows)


def test_contradictions_and_impossible_speed_come_first(base):
    d = megatron(changed(base), contradictions=("gpus is given as 8, but the run says 64",))
    assert codes(d)[0] == "inputs"
    assert d.findings[0].evidence == ("gpus is given as 8, but the run says 64",)
    fast = megatron(changed(base, step_time_s=3.0, step_time_bracket_s=(2.0, 4.0)))
    assert fast.verdict.where == "faster"
    assert codes(fast)[0] == "inputs"
    assert "unexplained" not in codes(fast)


def test_a_changed_plan_that_fits_is_named_as_a_guess(base):
    e = changed(base, step_time_s=1.2, step_time_bracket_s=(0.8, 1.25))
    fits, not_so = Variant(change="full recomputation", step_time_s=1.49), Variant(change="x", step_time_s=1.4)
    d = megatron(e, variants=(not_so, fits))
    (found,) = [finding for finding in d.findings if finding.code == "variant"]
    assert "full recomputation" in found.title
    assert "not a proof" in found.evidence[1]
    assert "variant" not in codes(megatron(e, variants=(not_so,)))


def test_inside_the_band_what_rests_on_the_prediction_is_only_possible(base):
    """A step of 1.5 s, predicted 1.4 s: what is measured stays a loss, what is predicted becomes a possibility."""
    fits = Variant(change="full recomputation", step_time_s=1.49)
    outside = megatron(changed(base), variants=(fits,))
    inside = megatron(changed(base, step_time_band_s=(1.2, 1.7)), variants=(fits,))
    assert inside.verdict.where == "inside_band" and not any(f.possible for f in outside.findings)
    by_code = {f.code: f for f in inside.findings}
    assert (by_code["variant"].title, by_code["variant"].lost_s) == (
        "possibly: the run costs what full recomputation would", None,
    )  # fmt: skip
    assert by_code["dp_comm"].title == "possibly: all-grads-sync takes longer than predicted"
    assert by_code["variant"].to_json()["possible"] and not by_code["data"].possible
    assert by_code["data"].title == "the step waits for data"


def test_a_prediction_of_another_job_explains_nothing(base):
    e = changed(base, step_time_s=1.2, step_time_bracket_s=(0.8, 1.25))
    fits = Variant(change="full recomputation", step_time_s=1.49)
    assert "unexplained" in codes(megatron(e))
    d = megatron(e, variants=(fits,), contradictions=("dgx-h100 has h100-sxm, but the run names NVIDIA B200",))
    assert codes(d)[0] == "inputs"
    assert {f.code: f.possible for f in d.findings}["variant"]
    bare = megatron(e, contradictions=d.findings[0].evidence)
    assert "unexplained" not in codes(bare)
    fast = megatron(changed(base, step_time_bracket_s=(2.0, 4.0)), contradictions=d.findings[0].evidence)
    assert codes(fast).count("inputs") == 1


def test_full_memory_and_allocator_retries(base):
    log = read_log(str(DATA / "deepspeed.log"))
    d = diagnose_log(log, {"global_batch": 64}, base)
    (memory,) = [finding for finding in d.findings if finding.code == "memory"]
    assert "reported 6 times" in memory.evidence[1]
    assert memory.lost_s is None
    assert "memory" not in codes(megatron(base))


def test_memory_far_from_the_prediction_is_a_finding(base):
    log = read_log(str(DATA / "megatron.log"))
    measured = log.peak_memory_bytes
    assert measured is not None

    def memory(ratio: float, kind: str = "allocated", **more: Any) -> Any:
        e = changed(
            base, memory_by_definition={kind: measured / ratio}, memory=Terms({"weights/x": 6e9, "loss/x": 1e9})
        )
        d = diagnose_log(log, {}, e, **more)
        return next((finding for finding in d.findings if finding.code == "memory_off"), None)

    more = memory(1.4)
    assert more.title == "the run takes 40 % more memory than predicted"
    assert more.evidence[0] == "measured 23.5 GiB, predicted 16.8 GiB, both allocated: 6.72 GiB more"
    assert more.evidence[1] == "predicted: weights 5.59 GiB, loss 954 MiB"
    assert "sequence_parallel" in more.advice[0] and "_record_memory_history" in more.advice[1]
    assert "30 % less memory" in memory(0.7).title
    assert memory(1.14) is None and memory(0.76) is None
    guesses = (Variant(change="full recomputation", step_time_s=1.0, memory={"allocated": measured * 0.99}),
               Variant(change="other", step_time_s=1.0, memory={"allocated": measured * 2}))  # fmt: skip
    (line,) = memory(1.4, memory_variants=guesses).evidence[2:]
    assert line == "with full recomputation it would be 23.3 GiB: a fit, not a proof"


def test_reserved_memory_is_held_against_reserved_memory(base):
    log = dataclasses.replace(read_log(str(DATA / "megatron.log")), memory_kind="reserved")
    e = changed(base, memory_by_definition={"allocated": 1e9, "reserved": 24100.25 * 2**20})
    (row,) = [row for row in diagnose_log(log, {}, e).rows if row.name == "peak memory"]
    assert row.ratio == pytest.approx(1.0)


def test_garbage_collection_behind_the_spikes_of_the_torchtitan_sample():
    log = read_log(str(DATA / "torchtitan.log"))
    d = diagnose_log(log, {"gpus": 8, "global_batch": 8, "seq": 8192})
    (spikes,) = [finding for finding in d.findings if finding.code == "spikes"]
    assert spikes.title == "slow steps every 10 steps, at garbage collection"
    assert "gc_freq" in spikes.advice[0]


def test_a_slow_rank_is_named(tmp_path):
    path = tmp_path / "t.log"
    lines = [f"[rank{r}]:step: {i}  loss: 2.0  tps: {800 if r == 3 else 1000}" for i in range(1, 20) for r in range(4)]
    path.write_text("\n".join(lines))
    d = diagnose_log(read_log(str(path)), {"gpus": 4, "global_batch": 4, "seq": 1000})
    (found,) = d.findings
    assert found.code == "stragglers"
    assert found.lost_s == pytest.approx(0.25)
    assert "rank 3 1.25 s" in found.evidence[0]


def test_trace_findings_against_the_prediction(base):
    path = str(DATA / "trace.json.gz")
    times = trace_times(read_trace(path), path, {})
    e = changed(
        base, step_time_s=0.17, step_time_bracket_s=(0.1, 0.2),
        time=Terms({"compute/x": 0.13, "tp_comm/x": 0.01, "optimizer/x": 0.003, "memory_bound/x": 0.009,
                    "host/x": 0.018}),
    )  # fmt: skip
    d = diagnose_trace(times, e)
    assert codes(d)[:2] == ["tp_comm", "stall"]
    assert d.findings[0].lost_s == pytest.approx(0.0188)
    assert any(line.startswith("Megatron-LM: --sequence-parallel") for line in d.findings[0].advice)
    rows = {row.name: row for row in d.rows}
    assert rows["other"].predicted == pytest.approx(0.018)
    assert rows["dp_comm"].bracket == pytest.approx((0.0, 0.1))
    measured = [row.measured for row in d.rows if row.unit == "s" and row.name != "step time"]
    assert sum(value for value in measured if value) == pytest.approx(times.step_s)


def test_exposed_traffic_without_a_prediction_is_found():
    path = str(DATA / "trace.json.gz")
    d = diagnose_trace(trace_times(read_trace(path), path, {}))
    assert codes(d)[0] == "tp_comm"
    assert d.findings[0].lost_s == pytest.approx(0.0288)


def test_advice_is_never_said_twice():
    for code in ADVICE:
        for framework in ("", *NAMES):
            words = advice_for(code, framework)
            assert words, (code, framework)
            assert len(set(words)) == len(words)
