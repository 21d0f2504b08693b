"""The history of tuning: files by processor and kernel, interrupted runs, what the command says; times are given."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from cli_runner import CliRunner
from steptime.cli.main import main
from steptime.measure import host as host_room
from steptime.measure.host import this_host
from steptime_lab.hierarchy.caches import processor
from steptime_lab.hierarchy.tune import kernel as kernel_room
from steptime_lab.hierarchy.tune import model as model_room
from steptime_lab.hierarchy.tune import search as search_room
from steptime_lab.hierarchy.tune.history import Past, Request
from steptime_lab.hierarchy.tune.kernel import library_of
from steptime_lab.hierarchy.tune.prior import predicted
from steptime_lab.hierarchy.tune.search import candidates, searched, tune
from steptime_lab.hierarchy.tune.space import core_of, space

ZEN4 = core_of(processor("zen4"))
SHAPE = (512, 512, 512)
OTHER = (384, 384, 384)
COMMAND = ["tune", "matmul", "--processor", "zen4", "--folder"]
CPUINFO = """processor	: 0
model name	: {model}
stepping	: 1
cpu MHz		: {clock}
flags		: {flags}

processor	: 1
model name	: further processors are not read
"""


class Bench:
    """Stands for kernels and clock: times are known, and a search is interrupted when some were measured."""

    def __init__(self) -> None:
        factor = {"none": 1.4, "b": 1.0, "both": 1.2}
        priced = predicted(SHAPE, ZEN4, space())
        self.seconds = {one: cycles * factor[one.packing] * 1e-9 for one, cycles in zip(space(), priced.cycles)}  # noqa: B905
        self.measured, self.last = [], 10**6

    def runner(self, schedule):
        return schedule

    def timed(self, batch, best_s):
        if len(self.measured) + len(batch) > self.last:
            raise KeyboardInterrupt
        self.measured += batch
        return [self.seconds[one] for one in batch]

    def interrupted(self, last, shape=SHAPE, **options):
        """A search that is interrupted before it measures more than the ``last`` one."""
        self.last = len(self.measured) + last
        with pytest.raises(KeyboardInterrupt):
            tune(shape, name="zen4", **options)
        self.last = 10**6


@pytest.fixture
def bench(monkeypatch):
    made = Bench()
    monkeypatch.setattr(search_room, "product_of", lambda *_: made)
    monkeypatch.setattr(search_room, "timed", made.timed)
    monkeypatch.setattr(model_room, "TREES", 5)
    return made


def run(folder, shape=SHAPE, **options):
    return tune(shape, name="zen4", folder=folder, **options)


@pytest.mark.parametrize("strategy", ["model", "random", "grid"])
def test_an_interrupted_run_measures_in_all_what_one_run_does(tmp_path, bench, strategy):
    options = {"trials": 14, "strategy": strategy, "seed": 5}
    run(tmp_path / "whole", **options)
    whole, bench.measured = bench.measured, []
    bench.interrupted(5, folder=tmp_path / "parts", **options)
    bench.interrupted(4, folder=tmp_path / "parts", **options)
    rest = run(tmp_path / "parts", **options)
    assert bench.measured == whole and len(set(whole)) == 14
    assert rest.resumed == 8 and len(rest.ranked) == 14
    assert sum(each.known for each in rest.ranked) == 8
    assert "goes on with an interrupted run: 8 of 14 trials were measured before" in rest.notes
    more = run(tmp_path / "parts", **options)
    assert more.resumed == 0 and len(more.ranked) == 28 and len(set(bench.measured)) == 28


def test_an_interrupted_run_goes_on_after_other_products_and_budgets(tmp_path, bench):
    bench.interrupted(4, folder=tmp_path, trials=8)
    run(tmp_path, shape=OTHER, trials=4)
    other = run(tmp_path, trials=12, seed=2)
    assert other.resumed == 0 and len(other.ranked) == 16
    said = "another run of this product was interrupted after 4 of 8 measurements; "
    assert other.notes == (said + "--trials 8 --strategy model --seed 0 goes on with it",)
    assert not run(tmp_path, shape=OTHER, trials=4).notes
    rest = run(tmp_path, trials=8)
    assert rest.resumed == 4 and len(rest.ranked) == 20
    assert run(tmp_path, trials=8).resumed == 0


def test_ended_runs_add_up(tmp_path, bench):
    first = run(tmp_path, trials=3)
    assert len(first.ranked) == 3 and not any(each.known for each in first.ranked) and not first.notes
    more = run(tmp_path, trials=2)
    assert len(more.ranked) == 5 and sum(each.known for each in more.ranked) == 3
    assert more.history == first.history and more.earlier_history == ""
    json.dumps(more.to_json())


def test_a_fresh_history_leaves_the_earlier_one(tmp_path, bench):
    assert run(tmp_path, trials=1, fresh=True).earlier_history == ""
    first = run(tmp_path, trials=3)
    kept = Path(first.history).read_bytes()
    fresh = run(tmp_path, trials=2, fresh=True)
    assert len(fresh.ranked) == 2 and not any(each.known for each in fresh.ranked)
    assert fresh.earlier_history == first.history != fresh.history and Path(first.history).read_bytes() == kept
    assert fresh.notes == (f"a new history; the earlier one stays in {first.history}",)
    assert len(run(tmp_path, trials=1).ranked) == 3
    third = run(tmp_path, trials=1, fresh=True)
    assert third.earlier_history == fresh.history and len({first.history, fresh.history, third.history}) == 3


def test_fresh_goes_past_a_damaged_history(tmp_path, bench):
    path = Path(run(tmp_path, trials=1).history)
    path.write_text("not a journal\n" + path.read_text())
    done = CliRunner().invoke(main, [*COMMAND, str(tmp_path), "--trials", "1"])
    assert done.exit_code == 2 and "is not a journal" in done.stderr
    assert len(run(tmp_path, trials=1, fresh=True).ranked) == 1


def test_another_kernel_has_another_history(tmp_path, bench, monkeypatch):
    first = run(tmp_path, trials=3)
    source = tmp_path / "product.c"
    source.write_text(kernel_room.SOURCE.read_text() + "\n")
    monkeypatch.setattr(kernel_room, "SOURCE", source)
    second = run(tmp_path, trials=3)
    monkeypatch.setattr(kernel_room, "FLAGS", (*kernel_room.FLAGS, "-g"))
    third = run(tmp_path, trials=3)
    assert len({first.history, second.history, third.history}) == 3
    assert not any(each.known for tuned in (second, third) for each in tuned.ranked)


def test_another_processor_has_other_kernels_and_another_history(tmp_path, bench, monkeypatch):
    def names(**given):
        information = tmp_path / "cpuinfo"
        information.write_text(CPUINFO.format(**{"model": "Some CPU @ 2.20GHz", "clock": 1, "flags": "a b"} | given))
        monkeypatch.setattr(host_room, "CPUINFO", information)
        return library_of(space()[0], ZEN4)[0], Path(run(tmp_path / "tune", trials=1).history).name

    library, history = names()
    assert "-Some-CPU-2-20GHz-" in library and "-Some-CPU-2-20GHz-" in history
    assert names(clock=2, flags="b a") == (library, history)
    for other in (names(model="Other CPU"), names(flags="a b c")):
        assert other[0] != library and other[1] != history
    monkeypatch.setattr(host_room, "CPUINFO", tmp_path / "missing")
    here = this_host()
    monkeypatch.setattr(host_room.platform, "node", lambda: "another")
    assert here.label and here.cpu == this_host().cpu and here.key != this_host().key


def test_records_that_are_no_measurements_are_passed_over(tmp_path, bench):
    first = run(tmp_path, trials=1)
    good = json.loads(Path(first.history).read_text().splitlines()[2])
    strange = [{"key": "x"}, good | {"shape": [0, 1, 1]}, good | {"shape": 3}, good | {"seconds": -1.0},
               good | {"schedule": {"tiles": 3}}, good | {"schedule": good["schedule"] | {"rows": 5}},
               {"key": "y", "run": 7}]  # fmt: skip
    with Path(first.history).open("a") as file:
        file.writelines(json.dumps(each) + "\n" for each in strange)
    more = run(tmp_path, trials=1)
    assert len(more.ranked) == 2 and more.notes == ("6 records of the history are no measurements of this space: "
                                                    "passed over",)  # fmt: skip


def test_without_scikit_learn_the_command_says_so(tmp_path, bench, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.ensemble", None)
    few = run(tmp_path, trials=8)
    assert few.ranking == "closed form" and not few.notes  # as with it: there was nothing to learn from
    said = "no scikit-learn: ranked by the closed form, half of each batch at random"
    done = CliRunner(env={"COLUMNS": "80"}).invoke(main, [*COMMAND, str(tmp_path), "--trials", "4"])
    assert done.exit_code == 0 and said in done.stdout.splitlines()
    printed = json.loads(CliRunner().invoke(main, [*COMMAND, str(tmp_path), "--trials", "1", "--json"]).stdout)
    assert printed["ranking"] == "closed form" and printed["model_rows"] == 0 and printed["notes"] == [said]
    every = run(tmp_path, trials=1000)
    assert len(every.ranked) == len(bench.measured) == len(set(bench.measured))
    assert run(tmp_path, trials=4, strategy="grid").notes == ()


def test_half_of_each_batch_is_drawn_before_eight_measurements(bench):
    pytest.importorskip("sklearn")
    found = candidates(SHAPE, ZEN4).found

    def batches(seed, **past):
        start = len(bench.measured)
        request = Request(shape=SHAPE, trials=12, seed=seed)
        searched(found, request, lambda batch, _: bench.timed(batch, 0), past=Past(**past))
        return [bench.measured[at : at + 4] for at in range(start, start + 12, 4)]

    best = [found.schedules[place] for place in found.order()]
    one, two = batches(1), batches(2)
    assert one[0][:2] == two[0][:2] == best[:2] and one[1][:2] == [each for each in best if each not in one[0]][:2]
    assert not set(one[0][2:]) & set(two[0][2:]) and one[1][2:] != two[1][2:]
    known = {each: bench.seconds[each] for each in best[:8]}
    assert batches(1, known=known) == batches(2, known=known)


def test_ctrl_c_says_what_is_kept_and_the_same_command_goes_on(tmp_path, bench):
    command = [*COMMAND, str(tmp_path), "--trials", "10"]
    bench.last = 5
    done = CliRunner().invoke(main, command)
    path = next(tmp_path.glob("history-zen4-*.jsonl"))
    assert done.exit_code == 130 and f"4 of 10 trials are in {path}; run again, without --fresh" in done.stderr
    bench.last = 10**6
    printed = json.loads(CliRunner().invoke(main, [*command, "--json"]).stdout)
    assert printed["resumed"] == 4 and len(printed["ranked"]) == len(bench.measured) == 10
    assert printed["history"] == str(path) and printed["earlier_history"] is None
    fresh = CliRunner(env={"COLUMNS": "400"}).invoke(main, [*command, "--fresh"])
    assert f"a new history; the earlier one stays in {path}" in fresh.stdout and len(bench.measured) == 20
