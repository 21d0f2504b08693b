"""Networks, placements and mixed jobs from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli_runner import CliRunner
from steptime.cli.main import main

GROUPS = (
    '[groups.a]\ncluster = "dgx-h100"\ngpus = 8\n[groups.b]\ncluster = "dgx-a100"\ngpus = 8\n'
    '[link]\nbandwidth = "25 GB/s"\n'
)
JOB = ["llama3.2-1b", "--cluster", "meta-roce-24k", "--gpus", "64", "--global-batch", "64"]


def ran(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, [*arguments])
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.each(
    ("placement", "order"), [("tp-pp-dp", "tp-pp-dp"), ("default", "tp-dp-pp"), ("tp=8,dp=1", "tp-dp-pp")]
)
def test_estimate_takes_an_order(placement: str, order: str) -> None:
    code, out, _ = ran("estimate", *JOB, "--tp", "8", "--pp", "2", "--placement", placement, "--json")
    assert code == 0
    assert json.loads(out)["plan"]["order"] == order


def test_plan_takes_an_order() -> None:
    found = {}
    for how in ("default", "search", "tp-pp-dp"):
        code, out, _ = ran("plan", *JOB, "--fix", "tp=8", "--placement", how, "--top", "1", "--json")
        assert code == 0
        found[how] = json.loads(out)["plans"][0]
    assert found["search"]["step_time_s"] <= min(found["default"]["step_time_s"], found["tp-pp-dp"]["step_time_s"])


@pytest.mark.slow
def test_mixed_prints_both_ways(tmp_path: Path) -> None:
    (tmp_path / "g.toml").write_text(GROUPS, encoding="utf-8")
    job = ["mixed", "llama3.2-1b", "--cluster", str(tmp_path / "g.toml"), "--global-batch", "16", "--seq", "1024"]
    code, out, _ = ran(*job, "--top", "1", "--fix", "micro_batch=1", "--fix", "recompute=none")
    assert code == 0
    assert "slower:" in out and "data (" in out and "stages (" in out
    code, out, _ = ran(*job, "--way", "stages", "--fix", "tp=8", "--json")
    assert code == 0
    assert {plan["way"] for plan in json.loads(out)["plans"]} == {"stages"}


@pytest.mark.each(
    ("arguments", "words"),
    [
        (("mixed", "llama3.2-1b", "--global-batch", "8"), "--cluster"),
        (("mixed", "llama3.2-1b", "--cluster", "none.toml", "--global-batch", "8"), "none.toml"),
        (("estimate", *JOB, "--placement", "tp-zz"), "axis of an order"),
        (("plan", *JOB, "--placement", "zz"), "axis of an order"),
        (("estimate", *JOB[:4], "32768", "--gpus", "32768", "--global-batch", "32768"), "24576"),
    ],
)
def test_bad_input_is_told(arguments: tuple[str, ...], words: str) -> None:
    code, _, err = ran(*arguments)
    assert code == 2
    assert words in err
