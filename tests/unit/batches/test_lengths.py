"""Unequal lengths: distributions as they are written, closed forms against draws, what a job makes of them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from cli_runner import CliRunner
from steptime import api
from steptime.cli.main import main
from steptime.cost.lengths import attended_length, longest_of, mean_of, slowest_over_mean
from steptime.errors import UserError
from steptime.jobs.batches.run import batches
from steptime.jobs.batches.spread import context_load, lengths_of, packed

SPREAD = "lognormal:900,1"
JOB = {"gpus": 64, "global_batch": 256, "framework": "ideal"}
PLAN = {"micro_batch": 2, "zero": 3}


def test_a_log_normal_spread_has_its_moments():
    found = lengths_of("lognormal:900,0.5", 100_000)
    assert mean_of(found.shares) == pytest.approx(900, rel=5e-3) and found.cut_share == 0
    assert attended_length(found.shares) == pytest.approx(900 * np.exp(0.25), rel=2e-2)


def test_what_is_cut_is_told():
    found = lengths_of("100=1,300=1", 200)
    assert found.shares == ((100.0, 0.5), (200.0, 0.5)) and found.cut_share == pytest.approx(100 / 400)


def test_files_are_histograms(tmp_path):
    rows, table, plain = (tmp_path / name for name in ("a.csv", "a.json", "b.json"))
    rows.write_text("length,count\n100,3\n300,1\n")
    table.write_text('{"100": 3, "300": 1}')
    plain.write_text("[100, 100, 300, 100]")
    found = [lengths_of(str(path), 1000).shares for path in (rows, table, plain)]
    assert found[0] == found[1] == found[2] == ((100.0, 0.75), (300.0, 0.25))


@pytest.mark.parametrize(
    "text", ["", "lognormal:0,1", "lognormal:900", "abc", "0=1", "10=-1", "10.5=1", "5=nan", "absent.csv", "3=0"]
)
def test_what_is_no_spread_is_refused(text):
    with pytest.raises(UserError):
        lengths_of(text, 4096)


def drawn(count):
    return lengths_of(SPREAD, 4096).drawn(count)


@pytest.mark.parametrize(("draws", "replicas"), [(1, 8), (2, 64), (8, 16), (32, 128)])
def test_the_slowest_replica_is_that_of_draws(draws, replicas):
    shares = lengths_of(SPREAD, 4096).shares
    sums = drawn(400 * draws * replicas).reshape(400, replicas, draws).sum(axis=2)
    assert slowest_over_mean(shares, draws, replicas) == pytest.approx(
        sums.max(axis=1).mean() / (draws * mean_of(shares)), rel=2e-2
    )


def test_many_draws_are_normal():
    shares = lengths_of(SPREAD, 4096).shares
    assert slowest_over_mean(shares, 256, 64) == pytest.approx(slowest_over_mean(shares, 257, 64), rel=1e-2)


def test_the_longest_of_several_is_that_of_draws():
    longest = longest_of(lengths_of(SPREAD, 4096).shares, 4)
    assert mean_of(longest) == pytest.approx(drawn(80_000).reshape(-1, 4).max(axis=1).mean(), rel=1e-2)


def test_packing_loses_nothing_and_keeps_to_the_capacity():
    lengths = drawn(2000)
    found = packed(lengths, 4096)
    assert sorted(each for one in found for each in one) == sorted(lengths)
    assert max(map(sum, found)) <= 4096 and len(found) <= 1.02 * np.ceil(lengths.sum() / 4096)


def test_context_ranks_by_hand():
    # Two documents of four: ranks of zigzag pieces have 1+2 and 3+4 of the second as the first's; contiguous are alike.
    assert context_load([4.0, 4.0], 2, zigzag=False) == 1.0
    assert context_load([4.0, 4.0], 2) == 1.0
    assert context_load([6.0, 2.0], 2, zigzag=False) == pytest.approx(2 * 14 / 24)


def test_equal_lengths_are_the_estimate():
    found = {
        way.name: way for way in batches("llama3-8b", "dgx-h100", lengths="4096=1", seq=4096, plan=PLAN, **JOB).ways
    }
    whole = api.estimate("llama3-8b", "dgx-h100", seq=4096, plan=PLAN, **JOB).step_time_s
    for way in found.values():
        assert (way.useful_share, way.slowest) == (1.0, 1.0) and way.step_time_s == pytest.approx(whole)


@pytest.mark.slow
def test_packing_beats_buckets_which_beat_padding():
    found = batches("llama3-8b", "dgx-h100", lengths=SPREAD, seq=4096, plan=PLAN, **JOB)
    rate = {way.name: way.useful_tokens_per_s for way in found.ways}
    assert rate["pack"] >= rate["pack mixed"] > rate["bucket"] > rate["pad"]
    more = batches("llama3-8b", "dgx-h100", lengths=SPREAD, seq=4096, plan=PLAN, buckets=8, **JOB)
    assert next(way for way in more.ways if way.name == "bucket").useful_share > 0.65
    json.dumps(found.to_json())


@pytest.mark.parametrize(
    ("spread", "seq", "buckets"),
    [(SPREAD, 8192, 4), ("lognormal:300,0.3", 4096, 1), ("lognormal:300,0.3", 4096, 8)],
)
def test_the_last_bucket_holds_the_longest_document(spread, seq, buckets):
    found = batches("llama3-8b", "dgx-h100", lengths=spread, seq=seq, plan=PLAN, buckets=buckets, **JOB)
    bucket = next(way for way in found.ways if way.name == "bucket")
    longest = found.lengths.shares[-1][0]
    assert longest <= bucket.tops[-1] < longest + 128 and len(bucket.tops) <= buckets
    assert bucket.what.endswith("of one length" if buckets == 1 else f"of one of {len(bucket.tops)} lengths")


def test_ways_that_do_not_fit_come_last_and_say_so():
    found = batches("llama3-8b", "dgx-h100", lengths="lognormal:300,0.3", seq=8192, plan=PLAN, **JOB)
    assert {way.name: way.reasons for way in found.ways} == {
        "bucket": (),
        "pad micro-batch": (),
        "pack": ("memory",),
        "pack mixed": ("memory",),
        "pad": ("memory",),
    }
    assert [way.feasible for way in found.ways] == [True, True, False, False, False]
    whole = api.estimate("llama3-8b", "dgx-h100", seq=8192, plan=PLAN, **JOB)
    assert found.ways[-1].peak_memory_bytes == whole.peak_memory_bytes > found.memory_capacity_bytes


def test_every_rule_that_is_broken_is_told():
    options = "--cluster dgx-h100 --gpus 64 --global-batch 256 --tp 8 --seq 1024 --lengths 512=0.7,1024=0.2"
    done = CliRunner().invoke(main, ["lengths", "gpt2-xl", *options.split(" ")])
    text = " ".join(done.stdout.split())
    assert done.exit_code == 0 and "no way is feasible" in text and "breaks heads" in text and "kv_heads" in text
    assert "note: the shares add up to 0.9" in text


@pytest.mark.parametrize(("text", "total"), [("512=0.7,1024=0.2", 0.9), ("512=0.75,1024=0.25", 1), ("512=3,1024=1", 1)])
def test_shares_that_do_not_add_up_are_told_and_counts_are_not(text, total):
    assert lengths_of(text, 4096).written == pytest.approx(total)


def test_the_command():
    options = "--cluster dgx-h100 --gpus 64 --global-batch 256 --micro-batch 2 --zero 3 --seq 4096"
    job = ["llama3-8b", *options.split(" ")]
    done = CliRunner().invoke(main, ["lengths", *job, "--lengths", SPREAD, "--json"])
    assert done.exit_code == 0 and len(json.loads(done.stdout)["ways"]) == 5
    refused = CliRunner().invoke(main, ["lengths", *job])
    assert refused.exit_code and "missing" in refused.output + refused.stderr
