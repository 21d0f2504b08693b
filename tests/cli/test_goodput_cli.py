"""``--failures``, ``--prices``, ``--objective``, and the commands ``fleet`` and ``shadow``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli_runner import CliRunner
from steptime.cli.main import main

JOB = ["llama3-8b", "--cluster", "dgx-h100", "--gpus", "16", "--global-batch", "64"]
LENGTH = ["--tokens", "10B"]


def run(*args: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, args)
    return done.exit_code, " ".join(done.output.split())


def test_estimate() -> None:
    code, text = run("estimate", *JOB, *LENGTH, "--failures", "default", "--prices", "default")
    assert code == 0
    for word in ("the whole run", "effective", "USD", "assumed", "Llama Team", "kWh", "t of CO2"):
        assert word in text, word
    code, text = run("estimate", *JOB, *LENGTH, "--failures", "bloom", "--json")
    assert code == 0 and json.loads(text)["run"]["goodput"]["source"].startswith("Hugging Face")


def test_plan() -> None:
    code, text = run("plan", *JOB, *LENGTH, "--objective", "cost", "--failures", "default", "--top", "2")
    assert code == 0 and "no other is better than the first" in text and "USD" in text
    code, text = run("plan", *JOB, *LENGTH, "--budget", "1 USD")
    assert code == 3 and "buys nothing: the least that would" in text
    code, text = run("plan", *JOB, *LENGTH, "--objective", "energy", "--json", "--top", "1")
    assert code == 0 and json.loads(text)["energy_front"]


@pytest.mark.slow
def test_fleet_and_shadow() -> None:
    args = ["llama3-8b", "--cluster", "dgx-h100,dgx-b200", "--gpus", "8..16", "--global-batch", "64", *LENGTH]
    code, text = run("fleet", *args, "--deadline", "30 days")
    assert code == 0 and "16 dgx-b200" in text and "assumed price" in text
    code, text = run("fleet", *args, "--json")
    assert code == 0 and len(json.loads(text)["fleets"]) == 4
    code, text = run("shadow", *JOB, *LENGTH)
    assert code == 0 and "TFLOP/s of" in text and "note: device memory" in text
    code, text = run("shadow", *JOB, *LENGTH, "--json")
    assert code == 0 and {"matrix units", "link nvlink"} <= {one["name"] for one in json.loads(text)["prices"]}


@pytest.mark.parametrize(("args", "word"), [
    (["estimate", *JOB, "--failures", "default"], "--tokens"),
    (["estimate", *JOB, *LENGTH, "--failures", "nobody"], "default"),
    (["estimate", "llama3-8b", "--prices", "default"], "--cluster"),
    (["plan", *JOB, "--objective", "fame"], "objective"),
    (["plan", *JOB, *LENGTH, "--budget", "1000"], "currency"),
    (["fleet", "llama3-8b", "--cluster", "dgx-h100", "--gpus", "8..x", "--global-batch", "64", *LENGTH], "--gpus"),
    (["fleet", "llama3-8b", "--gpus", "8", "--global-batch", "64", *LENGTH], "cluster"),
    (["fleet", "llama3-8b", "--cluster", "dgx-h100", "--gpus", "8", *LENGTH], "--global-batch"),
    (["shadow", *JOB], "--tokens"),
])  # fmt: skip
def test_refused(args: list[str], word: str) -> None:
    code, text = run(*args)
    assert code == 2 and word in text and "Traceback" not in text, text


def test_prices_without_a_date_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text('source = "x"\n[device_hour]\nh100-sxm = "2 USD/h"\n')
    code, text = run("estimate", *JOB, *LENGTH, "--prices", str(path))
    assert code == 2 and "date" in text
