"""Tuned products: the space and its prices by hand, compiled kernels against NumPy, searches, history."""

from __future__ import annotations

import json
import math
import shutil

import numpy as np
import pytest
from typer.testing import CliRunner

from steptime.cli.main import app
from steptime.errors import UserError
from steptime.hardware.caches import machine_caches, processor
from steptime.hierarchy.tune.kernel import Product, product_of, timed
from steptime.hierarchy.tune.model import Seen, learned
from steptime.hierarchy.tune.prior import PARTS, predicted
from steptime.hierarchy.tune.search import candidates, searched, tune
from steptime.hierarchy.tune.space import Schedule, core_of, space, static_reasons

ZEN4 = core_of(processor("zen4"))
SHAPE = (96, 80, 64)
gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")


def here():
    return core_of(machine_caches())


def test_sums_that_do_not_fit_the_registers_are_left_out():
    reasons = dict(zip(space(), static_reasons((4096, 4096, 4096), ZEN4, space()), strict=True))
    assert all((reason == "registers") == (one.rows * one.vectors + one.vectors + 1 > 32)
               for one, reason in reasons.items())  # fmt: skip
    small = dict(zip(space(), static_reasons((48, 100, 128), ZEN4, space()), strict=True))
    assert small[Schedule(rows=4, vectors=1, block_rows=192, block_depth=512, packing="b")] == "same"


def test_cycles_by_hand():
    one = Schedule(rows=6, vectors=2, block_rows=48, block_depth=512, packing="none")
    found = predicted((600, 320, 512), ZEN4, [one])
    steps = 100 * 10 * 512 * 12  # tiles, depth, multiply-adds of a step
    assert found.parts[0, PARTS.index("steps")] == steps
    assert found.parts[0, PARTS.index("tiles")] == 1000
    assert found.parts[0, PARTS.index("copies of b")] == 0
    assert found.traffic_bytes[0, 0] == 4 * (600 * 320 * 512 / 32 + 600 * 320 * 512 / 6)


@gcc
@pytest.mark.parametrize("shape", [(96, 80, 64), (7, 5, 3), (50, 130, 600)])
def test_every_kernel_computes_the_product(tmp_path_factory, shape):
    product = product_of(shape, here(), tmp_path_factory.getbasetemp() / "kernels")
    some = [one for one in space() if (one.rows, one.vectors) in ((4, 1), (6, 2)) and one.block_depth != 256]
    for one in some:
        product.runner(one)()
        np.testing.assert_allclose(product.result, product.expected, rtol=1e-4, atol=1e-3)


@gcc
def test_a_wrong_result_is_no_candidate(tmp_path_factory):
    good = product_of(SHAPE, here(), tmp_path_factory.getbasetemp() / "kernels")
    wrong = Product(shape=SHAPE, core=good.core, folder=good.folder, a=good.a, b=good.b,
                    expected=good.expected + 1, result=good.result)  # fmt: skip
    with pytest.raises(Exception, match="is wrong"):
        wrong.runner(space()[0])


def test_slow_functions_are_not_timed_again():
    calls = {"fast": 0, "slow": 0}

    def fast():
        calls["fast"] += 1

    def slow():
        calls["slow"] += 1
        sum(range(300_000))

    times = timed([fast, slow], best_s=math.inf, rounds=3, cut=1.25)
    assert times[0] < times[1] and calls["fast"] == 6 and calls["slow"] < 6


def truth(found, seed=0):
    """Times that differ from the closed form by a factor of the packing."""
    factor = {"none": 1.4, "b": 1.0, "both": 1.2}
    return {one: cycles * factor[one.packing] * 1e-9 for one, cycles in zip(found.schedules, found.cycles, strict=True)}


def seen_of(shape):
    found = candidates(shape, ZEN4, prune=False).found
    times = truth(found)
    seconds = np.array([times[one] for one in found.schedules])
    return Seen(features=found.features, cycles=found.cycles, seconds=seconds)


def test_trees_learn_what_the_closed_form_misses():
    pytest.importorskip("sklearn")
    found = candidates((512, 512, 512), ZEN4, prune=False).found
    times = truth(found)
    actual = np.array([times[one] for one in found.schedules])
    model = learned([seen_of((384, 384, 384)), seen_of((300, 600, 450))])
    picked = found.schedules[int(np.argmin(model.scores(found)))]
    assert model.rows > 100 and times[picked] <= 1.02 * actual.min()
    assert (
        np.corrcoef(model.scores(found), np.log(actual))[0, 1] > np.corrcoef(np.log(found.cycles), np.log(actual))[0, 1]
    )
    assert learned([]).trees is None


@pytest.mark.parametrize("strategy", ["model", "random", "grid"])
def test_searches_measure_as_many_as_asked_and_none_twice(strategy):
    found = candidates((512, 512, 512), ZEN4).found
    times, measured = truth(found), []

    def measure(batch, best_s):
        measured.extend(batch)
        return [times[one] for one in batch]

    done, _ = searched(found, 16, measure, strategy=strategy, seed=3)
    assert len(measured) == len(set(measured)) == len(done) == 16
    again, _ = searched(found, 10**6, measure, strategy=strategy, known=done)
    assert len(again) == len(found.schedules) and min(again.values()) == min(times.values())


def test_feedback_finds_what_the_closed_form_misses():
    pytest.importorskip("sklearn")
    found = candidates((512, 512, 512), ZEN4, prune=False).found
    times = truth(found)
    done, _ = searched(found, 16, lambda batch, _: [times[one] for one in batch], seen=[seen_of((384, 384, 384))])
    assert min(done.values()) <= 1.01 * min(times.values())


@gcc
def test_history_is_kept_and_used(tmp_path):
    first = tune(SHAPE, trials=3, folder=tmp_path)
    assert len(first.ranked) == 3 and not any(each.known for each in first.ranked)
    more = tune(SHAPE, trials=2, folder=tmp_path)
    assert len(more.ranked) == 5 and sum(each.known for each in more.ranked) == 3
    fresh = tune(SHAPE, trials=1, folder=tmp_path, reuse=False)
    assert len(fresh.ranked) == 1
    lines = (tmp_path / "history-machine.jsonl").read_text().splitlines()
    assert len(lines) == 1 + 6
    json.dumps(more.to_json())


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"shape": (0, 1, 1)}, "m: 0 is not a size"), ({"shape": (1, 1 << 20, 1)}, "n: 1048576 is not a size"),
        ({"strategy": "best"}, "no strategy 'best'"), ({"name": "zen9"}, "zen9"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(tmp_path, given, told):
    with pytest.raises(UserError, match=told):
        tune(**{"shape": SHAPE, "trials": 1, "folder": tmp_path} | given)


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError):
        tune(SHAPE, trials=1, folder=tmp_path / "file" / "x")


def test_without_gcc_predictions_are_left(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UserError, match="no gcc"):
        tune(SHAPE, trials=1, folder=tmp_path)
    assert tune(SHAPE, trials=0, folder=tmp_path).best.measured_s == math.inf


def test_the_command():
    options = ["tune", "matmul", "--m", "512", "--trials", "0", "--processor", "zen4"]
    done = CliRunner().invoke(app, [*options, "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout)["ranked"][0]["measured_s"] is None
