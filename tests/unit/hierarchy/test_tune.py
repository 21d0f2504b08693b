"""Tuned products: the space and its prices by hand, compiled kernels against NumPy, searches, the command."""

from __future__ import annotations

import json
import math
import shutil

import numpy as np
import pytest

from cli_runner import CliRunner
from steptime.cli.main import main
from steptime.errors import UserError
from steptime_lab.hierarchy.caches import machine_caches, processor
from steptime_lab.hierarchy.tune import kernel as kernel_module
from steptime_lab.hierarchy.tune import model as model_room
from steptime_lab.hierarchy.tune import search as search_room
from steptime_lab.hierarchy.tune.history import Past, Request
from steptime_lab.hierarchy.tune.kernel import Product, product_of, timed
from steptime_lab.hierarchy.tune.model import Seen, learned
from steptime_lab.hierarchy.tune.prior import PARTS, predicted
from steptime_lab.hierarchy.tune.search import candidates, searched, tune
from steptime_lab.hierarchy.tune.space import Schedule, core_of, space, static_reasons

ZEN4 = core_of(processor("zen4"))
SHAPE = (96, 80, 64)
gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")


KERNELS = ((4, 1, "both"), (6, 2, "none"), (6, 2, "b"), (6, 2, "both"))
"""Register tiles and packings that are compiled here."""
COMPILED = [one for one in space() if (one.rows, one.vectors, one.packing) in KERNELS]


def here():
    return core_of(machine_caches())


@pytest.fixture(autouse=True)
def few_trees(monkeypatch, kernels):
    monkeypatch.setattr(model_room, "TREES", 40)
    monkeypatch.setenv("XDG_CACHE_HOME", str(kernels / "cache"))


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """A folder of compiled kernels."""
    return tmp_path_factory.mktemp("kernels")


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


@pytest.mark.quick(without=["shape0"])
@gcc
@pytest.mark.parametrize("shape", [(96, 80, 64), (7, 5, 3), (50, 130, 600)])
def test_every_kernel_computes_the_product(kernels, shape):
    product = product_of(shape, here(), kernels)
    for one in (each for each in COMPILED if each.block_depth != 256):
        product.runner(one)()
        np.testing.assert_allclose(product.result, product.expected, rtol=1e-4, atol=1e-3)


@gcc
def test_a_wrong_result_is_no_candidate(kernels):
    good = product_of(SHAPE, here(), kernels)
    wrong = Product(shape=SHAPE, core=good.core, folder=good.folder, a=good.a, b=good.b,
                    expected=good.expected + 1, result=good.result)  # fmt: skip
    with pytest.raises(Exception, match="is wrong"):
        wrong.runner(COMPILED[0])


def test_slow_functions_are_not_timed_again():
    calls = {"fast": 0, "slow": 0}

    def fast():
        calls["fast"] += 1

    def slow():
        calls["slow"] += 1
        sum(range(300_000))

    times = timed([fast, slow], best_s=math.inf, rounds=3, cut=1.25)
    assert times[0] < times[1] and calls["fast"] == 6 and calls["slow"] < 6


def asked(trials, strategy="model"):
    return Request(shape=(512, 512, 512), trials=trials, strategy=strategy, seed=3)


def truth(found):
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
    found = predicted((512, 512, 512), ZEN4, candidates((512, 512, 512), ZEN4).found.schedules[::5])
    times, measured = truth(found), []

    def measure(batch, best_s):
        assert best_s == min((times[one] for one in measured), default=math.inf)
        measured.extend(batch)
        return [times[one] for one in batch]

    done, _ = searched(found, asked(16, strategy), measure)
    assert len(measured) == len(set(measured)) == len(done) == 16
    again, _ = searched(found, asked(10**6, strategy), measure, past=Past(known=done))
    assert len(measured) == len(again) == len(found.schedules) and min(again.values()) == min(times.values())


def test_feedback_finds_what_the_closed_form_misses():
    pytest.importorskip("sklearn")
    found = candidates((512, 512, 512), ZEN4, prune=False).found
    times, past = truth(found), Past(seen=[seen_of((384, 384, 384))])
    done, _ = searched(found, asked(16), lambda batch, _: [times[one] for one in batch], past=past)
    assert min(done.values()) <= 1.01 * min(times.values())


@gcc
def test_the_command_compiles_and_measures(kernels, monkeypatch):
    monkeypatch.setattr(search_room, "space", lambda: COMPILED)
    shape = [text for name, size in zip("mnk", SHAPE, strict=True) for text in (f"--{name}", str(size))]
    command = ["tune", "matmul", *shape, "--strategy", "random", "--folder", str(kernels), "--json"]
    first, second = (json.loads(CliRunner().invoke(main, [*command, "--trials", "2"]).stdout) for _ in range(2))
    assert [each["known"] for each in first["ranked"]] == [False] * 2
    assert sorted(each["known"] for each in second["ranked"]) == [False] * 2 + [True] * 2
    assert 0 < second["ranked"][0]["measured_s"] <= first["ranked"][0]["measured_s"]
    assert any(path.suffix == ".jsonl" for path in kernels.iterdir())
    assert {path.suffix for path in (kernels / "cache/steptime/kernels").iterdir()} == {".so"}


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
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    with pytest.raises(UserError, match="no gcc"):
        tune(SHAPE, trials=1, folder=tmp_path)
    assert tune(SHAPE, trials=0, folder=tmp_path).best.measured_s == math.inf


def test_the_command():
    options = ["tune", "matmul", "--m", "512", "--trials", "0", "--processor", "zen4"]
    done = CliRunner().invoke(main, [*options, "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout)["ranked"][0]["measured_s"] is None


@gcc
def test_a_library_that_others_could_have_written_is_not_loaded(tmp_path):
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "open").chmod(0o777)
    file, _ = kernel_module.library_of(COMPILED[0], here())
    planted = tmp_path / "open" / file
    planted.write_bytes(b"not a library")
    made = kernel_module.compiled(COMPILED[0], here(), tmp_path / "open")
    assert made.read_bytes()[:4] == b"\x7fELF"


def test_kernels_are_kept_where_this_user_alone_writes(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert kernel_module.private_folder() == tmp_path / "cache/steptime/kernels"
    assert kernel_module.private_folder().stat().st_mode & 0o077 == 0
    kernel_module.private_folder().chmod(0o777)
    assert tmp_path not in kernel_module.private_folder().parents
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert kernel_module.private_folder() == tmp_path / "home/.cache/steptime/kernels"
