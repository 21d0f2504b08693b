"""The search for a schedule from the command line and Python: what is compared, written, and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import steptime.simulation.search as api
from cli_runner import CliRunner
from steptime.cli.main import main
from steptime.errors import UserError
from steptime.simulation.pytorch_csv import read_csv
from steptime.simulation.search import FoundSchedule, search_schedule
from steptime.simulation.simulate import Durations, simulate
from steptime.simulation.synthesis import synthesised

OPTIONS = ["schedules", "--search", "--ranks", "3", "--micro-batches", "6"]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands search a little."""
    monkeypatch.setitem(synthesised.__kwdefaults__, "effort", 30_000)


def of(name: str, found: FoundSchedule, chunks: int) -> api.NamedSpan:
    return next(each for each in found.named if (each.name, each.chunks) == (name, chunks))


def test_the_named_ones_under_the_same_times() -> None:
    """1F1B by hand: 3 ranks, 6 micro-batches of 3 seconds, and two more of them for filling and draining."""
    found = search_schedule(3, 6, memory=3)
    one = of("1f1b", found, 1)
    assert (one.span_s, one.held, one.fits) == (24.0, 3.0, True)
    assert not of("gpipe", found, 1).fits and of("gpipe", found, 1).held == 6
    assert [each.fits for each in found.named] == sorted((each.fits for each in found.named), reverse=True)
    best = found.best_named
    assert best is not None and best.copies == 1
    assert found.bound_s <= found.found.span_s <= best.span_s
    assert max(found.found.held) <= 3


def test_schedules_of_two_copies_are_shown_and_not_compared() -> None:
    found = search_schedule(2, 4, memory=9, chunks=1)
    pair = of("chimera", found, 1)
    assert pair.copies == 2 and found.best_named is not None and found.best_named.copies == 1


def test_times_of_stages_say_how_many_chunks() -> None:
    for stages, chunks in ((3, 1), (6, 2)):
        found = search_schedule(3, 6, times=([1.0] * (stages - 1) + [2.0], 1.0, 0.8), memory=[4, 3, 2])
        assert found.chunks == chunks and {each.chunks for each in found.named} == {chunks}
        assert all(held <= most for held, most in zip(found.found.held, (4, 3, 2), strict=True))
    with pytest.raises(UserError, match="4 times of forward passes for 3 ranks"):
        search_schedule(3, 6, times=([1.0] * 4, 1.0, 1.0))
    with pytest.raises(UserError, match="3 times of weight-gradient passes for 3 ranks"):
        search_schedule(3, 6, times=([1.0] * 6, 1.0, [1.0] * 3))


def test_the_command_prints_and_writes(tmp_path: Path) -> None:
    csv, runner = tmp_path / "found.csv", CliRunner()
    given = [*OPTIONS, "--times", "1,1.2,0.8", "--message", "0.1", "--memory", "3", "--chunks", "1", "--csv", str(csv)]
    shown = runner.invoke(main, given)
    assert shown.exit_code == 0
    assert {"zb-1p", "found", "bound", "gap"} <= {line.split(" ")[0] for line in shown.output.splitlines()}
    document = json.loads(runner.invoke(main, [*given, "--json"]).stdout)
    played = simulate(
        read_csv(csv), Durations(forward_s=1.0, input_gradient_s=1.2, weight_gradient_s=0.8, message_s=0.1)
    )
    assert document["span_s"] == pytest.approx(played.rank_span_s.max())
    assert document["order"][0][0] == "0F0" and document["chunks"] == 1 and max(document["held"]) <= 3
    assert (
        document["bound_s"]
        <= document["span_s"]
        <= min(each["span_s"] for each in document["named"] if each["fits"] and each["copies"] == 1)
    )


def test_ctrl_c_gives_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    one_search = api.synthesised

    def pressed(*arguments: Any, **options: Any) -> Any:
        def progress(passes: int, span_s: float, bound_s: float) -> None:
            raise KeyboardInterrupt

        return one_search(*arguments, **{**options, "progress": progress})

    monkeypatch.setattr(api, "synthesised", pressed)
    shown = CliRunner().invoke(main, [*OPTIONS, "--memory", "2", "--json"])
    assert shown.exit_code == 0 and json.loads(shown.stdout)["stop"]["reason"] == "Interrupted"
    assert {each["chunks"] for each in json.loads(shown.stdout)["named"]} == {1}


@pytest.mark.parametrize(("options", "message"), [
    (["--memory", "0.5"], "a memory limit of 0.5 micro-batches on rank 0"),
    (["--memory", "3:3"], "memory limits of 2 ranks"),
    (["--memory", "much"], "--memory much: 'much' is no number"),
    (["--times", "1,1"], "--times 1,1: 2 times"),
    (["--times", "1,-1,1"], "input_gradient_s is not a time: -1.0"),
    (["--times", "nan,1,1"], "forward_s is not a time: nan"),
    (["--message", "-1"], "message_s is not a time: -1.0"),
    (["--seconds", "0"], "a search of 0 seconds"),
    (["--chunks", "3"], "'3' is not a whole number from 1 to 2"),
    (["zb-v"], "--search finds a schedule of its own; got the name zb-v"),
])  # fmt: skip
def test_what_is_refused(options: list[str], message: str) -> None:
    result = CliRunner().invoke(main, [*OPTIONS, *options])
    assert result.exit_code == 2 and message in result.stderr


def test_options_of_the_search_need_it() -> None:
    result = CliRunner().invoke(main, ["schedules", "--memory", "4"])
    assert result.exit_code == 2 and "--memory is of a search" in result.stderr


@pytest.mark.parametrize("seconds", [0.0, -5.0, float("nan"), float("inf")])
def test_seconds_are_refused_as_they_were_given(seconds: float) -> None:
    with pytest.raises(UserError, match=f"a search of {seconds:g} seconds"):
        search_schedule(2, 4, seconds=seconds)


def test_more_passes_than_named_schedules_are_made_of_in_minutes_are_refused() -> None:
    with pytest.raises(UserError, match="1,000 ranks x 1,000 micro-batches"):
        search_schedule(1000, 1000, seconds=1.0)


def test_out_of_time_not_every_rule_of_thumb_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    import steptime.simulation.synthesis as synthesis

    made, real = list[int](), synthesis.listed
    monkeypatch.setattr(synthesis, "listed", lambda *given: made.append(1) or real(*given))
    found = search_schedule(4, 12, times=(1.0, 1.2, 0.8), message_s=0.1, memory=3, chunks=1, seconds=1e-6)
    assert len(made) == 1, "one, although there are dozens"
    assert found.best_named is not None and found.found.span_s <= found.best_named.span_s
