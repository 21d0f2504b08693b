"""``steptime plot`` and the options ``--plot``: from commands' own JSON to pictures."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from cli_runner import CliRunner
from steptime.cli.main import main

pytest.importorskip("matplotlib")
JOB = ("llama3-8b", "--cluster", "dgx-h100", "--gpus", "16", "--global-batch", "64")
SPLIT = ("--tp", "2", "--pp", "4")


def run(*arguments: object) -> Any:
    return CliRunner().invoke(main, [str(one) for one in arguments])


def saved(path: Path, *arguments: object) -> Path:
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.stderr
    path.write_text(done.stdout)
    return path


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("results")
    return {
        "estimate": saved(folder / "estimate.json", "estimate", *JOB, *SPLIT, "--explain"),
        "plan": saved(folder / "plan.json", "plan", *JOB, "--strategy", "1d", "--top", "20"),
        "simulate": saved(folder / "simulate.json", "simulate", *JOB, *SPLIT, "--timeline"),
        "limits": saved(folder / "limits.json", "limits", "--curve", "--overlap", "none"),
    }


@pytest.mark.quick(every=7)
@pytest.mark.parametrize(
    ("kind", "names", "words"),
    [
        ("overview", ("estimate", "estimate"), ("compute", "capacity")),
        ("scaling", ("estimate", "plan"), ("efficiency", "dgx-h100")),
        ("roofline", ("estimate",), ("matrix units", "bf16 matrix peak")),
        ("scatter", ("plan",), ("Pareto front", "ranked plans")),
        ("timeline", ("simulate",), ("forward", "rank 3")),
        ("mesh", ("estimate",), ("domain 1", "stage 3")),
        ("limits", ("limits",), ("latency wall", "training compute (FLOP)")),
    ],
)
def test_a_saved_result_becomes_a_picture(results, kind, names, words, tmp_path):
    path = tmp_path / "a.svg"
    done = run("plot", kind, *(results[name] for name in names), "-o", path)
    assert (done.exit_code, done.stdout) == (0, f"Drawn in {path}\n"), done.stderr
    text = path.read_text()
    for word in words:
        assert word in text


def test_rows_of_a_sweep_become_a_heat_map(tmp_path):
    rows = tmp_path / "rows.csv"
    rows.write_text("tp,pp,step_time_s\n1,1,4\n2,1,3\n1,2,2.5\n2,2,2.25\n")
    done = run("plot", "heatmap", rows, "-o", tmp_path / "a.png", "--json", "--title", "A sweep")
    found = json.loads(done.stdout)
    assert found["title"] == "A sweep" and found["panels"][0]["series"][0]["size"] == [4.0, 3.0, 2.5, 2.25]
    assert (tmp_path / "a.png").stat().st_size > 1000


@pytest.mark.quick("estimate-more0-weights")
@pytest.mark.parametrize(
    ("command", "more", "word"),
    [("estimate", SPLIT, "weights"), ("plan", (), "Pareto front"), ("simulate", SPLIT, "backward")],
)
def test_plot_draws_what_the_command_found(command, more, word, tmp_path):
    path = tmp_path / "a.svg"
    plain = run(command, *JOB, *more, "--json")
    done = run(command, *JOB, *more, "--json", "--plot", path)
    assert done.exit_code == 0, done.stderr
    known, found = (json.loads(one.stdout) for one in (plain, done))
    for each in (known, found):
        each.pop("stop", None)
    assert known == found, "the document does not change"
    assert word in path.read_text()


def test_the_passes_of_a_timeline_are_those_of_the_schedule(results):
    found = json.loads(results["simulate"].read_text())
    passes, micro = found["passes"], found["micro_batches"]
    assert passes["kind"].count("F") == passes["kind"].count("B") == 4 * micro
    for rank in range(4):
        mine = sorted(
            (start, end)
            for start, end, at in zip(passes["start_s"], passes["end_s"], passes["rank"], strict=True)
            if at == rank
        )
        assert all(end <= start * (1 + 1e-12) for (_, end), (start, _) in itertools.pairwise(mine))
    assert max(passes["end_s"]) == pytest.approx(found["pipeline_s"], rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plot", "overview", "none.json", "-o", "a.svg"), "none.json"),
        (("plot", "overview", "-o", "a.svg"), "there is no result to draw"),
        (("plot", "overview", "none.json"), "no picture to write"),
        (("plot", "overview", "none.json", "-o", "a.doc"), "a.doc: matplotlib cannot write"),
        (("estimate", *JOB, "--plot", "a.doc"), "a.doc: matplotlib cannot write"),
        (("estimate", "llama3-8b", "--plot", "a.svg"), "--plot: a ledger has no step to draw"),
        (("limits", "--overlap", "all"), "--overlap is of the curve"),
        (("limits", "--curve", "--overlap", "some"), "there is no rule of overlap 'some'"),
        (("limits", "--curve", "--batch-growth", "-1"), "--batch-growth"),
        (("limits", "--curve", "--latency-factor", "nan"), "--latency-factor"),
    ],
)
def test_bad_input_is_named(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run(*arguments)
    assert done.exit_code == 2, done.stdout
    assert words in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())
